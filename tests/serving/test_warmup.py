"""Requests that an engine answers before clients may ask it."""

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.errors import ModelError
from asynctrt.kserve.datatypes import datatype_of, write_tensor
from asynctrt.serving.warmup import WarmUp, WarmUpTensor, filled
from asynctrt.tensors import TensorSpec
from tests.models import double_model

pytestmark = pytest.mark.anyio


def watched(seen, dims=(4,), dtype="float32"):
    """A model that remembers what it was given."""

    def function(inputs, outputs):
        seen.append(inputs["input"].copy())
        outputs["output"][:] = 0

    return FunctionModel(
        function,
        inputs=TensorSpec("input", dtype, dims),
        outputs=TensorSpec("output", "float32", (1,)),
    )


async def test_requests_of_a_configuration(tmp_path):
    seen = []
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    (tmp_path / "x.raw").write_bytes(values.tobytes())
    async with asynctrt.open(watched(seen)) as engine:
        for tensor in (
            WarmUpTensor("FP32", (4,)),
            WarmUpTensor("FP32", (4,), is_random=True),
            WarmUpTensor("FP32", (4,), path=tmp_path / "x.raw"),
        ):
            await WarmUp("w", 2, 2, {"input": tensor}).run(engine)
    zeros, random, read = (np.concatenate(seen[start : start + 2]) for start in (0, 2, 4))
    assert not zeros.any()
    assert random.any()
    assert np.array_equal(read, np.concatenate([values, values]))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "has the inputs none, and the model input"),
        ({"other": WarmUpTensor("FP32", (4,))}, "has the inputs other"),
        ({"input": WarmUpTensor("FP16", (4,))}, "is FP32, not FP16"),
        ({"input": WarmUpTensor("FP32", (5,))}, r"is \[4\], not \[5\]"),
        ({"input": WarmUpTensor("FP32", ())}, r"is \[4\], not \[\]"),
        ({"input": WarmUpTensor("FP32", (4,), path="missing")}, "cannot be read"),
        ({"input": WarmUpTensor("FP32", (4,), path="short")}, "16 bytes, but 3 are given"),
    ],
)
async def test_requests_that_the_model_does_not_take(tmp_path, tensors, says):
    (tmp_path / "short").write_bytes(b"abc")
    placed = {
        name: WarmUpTensor(item.datatype, item.dims, path=item.path and tmp_path / item.path)
        for name, item in tensors.items()
    }
    async with asynctrt.open(double_model()) as engine:
        with pytest.raises(ModelError, match=f"(?s)warm-up 'w'.*{says}"):
            await WarmUp("w", 1, 1, placed).run(engine)


@pytest.mark.parametrize("is_random", [False, True])
async def test_a_request_for_more_memory_than_there_may_be_is_refused(is_random):
    async with asynctrt.open(double_model()) as engine:
        tensor = WarmUpTensor("FP32", (4,), is_random=is_random)
        with pytest.raises(ModelError, match="input 'input' has 68719476720 bytes; at most 1073741824 are"):
            await WarmUp("w", 2**32 - 1, 1, {"input": tensor}).run(engine)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint64", "bool", "S4", "object"])
def test_random_values_are_of_every_dtype(dtype):
    values = filled(TensorSpec("x", dtype, (50,)), (2, 50), is_random=True)
    assert values.dtype == np.dtype(dtype)
    assert values.any() or (dtype in ("S4", "object") and set(values.flat) <= {b"", ""})


@pytest.mark.parametrize(
    ("spec", "dims", "shape"),
    [
        (TensorSpec("h", "float32", (2, "n"), axis=1), (2, 7), (2, 3, 7)),
        (TensorSpec("h", "float32", (2, "n"), axis=1), (2, 5, 7), (2, 5, 7)),
        (TensorSpec("x", "float32", (2,)), (4, 2), (4, 2)),
        (TensorSpec("w", "float32", (2, "n"), axis=None), (2, 7), (2, 7)),
        (TensorSpec("w", object, (), axis=None), (), ()),
    ],
)
def test_dims_are_of_a_row_or_of_the_whole_tensor(tmp_path, spec, dims, shape):
    datatype = datatype_of(spec)
    assert WarmUpTensor(datatype, dims).read(spec, 3).shape == shape
    path = tmp_path / "values"
    written = np.full(shape, "a", object) if datatype == "BYTES" else np.ones(shape, np.float32)
    path.write_bytes(write_tensor(written))
    assert np.array_equal(WarmUpTensor(datatype, dims, path=path).read(spec, 3), written)
