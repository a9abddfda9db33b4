"""What ONNX Runtime's texts on a GPU mean."""

import pytest

from asynctrt.backends.onnxruntime_errors import meaning_of

ILLEGAL = (
    "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; "
    "hostname=here ; file=/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_stream_handle.cc ; line=76 ; "
    "expr=cudaStreamSynchronize(stream);"
)
ARENA = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running MatMul node. "
    "Name:'MatMul_3' Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:391 void* "
    "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, Stream*) Available memory of 1024 is smaller "
    "than requested bytes of 4194304"
)
EXTEND = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. "
    "Status Message: /src/bfc_arena.cc:350 AllocateRawInternal Failed to allocate memory for requested "
    "buffer of size 805306368"
)
OUT = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : CUDA failure 2: out of memory ; GPU=0 ; hostname=here"
SHAPES = (
    "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running Gather node. "
    "Status Message: indices element out of data bounds, idx=9 must be within the inclusive range [-4,3]"
)


@pytest.mark.parametrize(
    ("text", "is_memory", "nbytes"),
    [
        (ILLEGAL, False, None),
        (ARENA, True, 4_194_304),
        (EXTEND, True, 805_306_368),
        (OUT, True, None),
        ("CUDNN failure 4000: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", False, None),
        ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0", True, None),
        (SHAPES, False, None),
        ("", False, None),
    ],
)
def test_what_is_understood(text, is_memory, nbytes):
    meaning = meaning_of(text)
    assert (meaning.is_memory, meaning.nbytes) == (is_memory, nbytes)


def test_an_illegal_address_is_not_a_want_of_memory_though_both_are_named():
    assert not meaning_of(ILLEGAL + " out of memory").is_memory


def test_what_is_said_leaves_the_type_out():
    assert meaning_of(SHAPES).said.startswith("Non-zero status code returned while running Gather node.")
    assert "idx=9" in meaning_of(SHAPES + "\nsecond line").said
    assert "second line" not in meaning_of(SHAPES + "\nsecond line").said
