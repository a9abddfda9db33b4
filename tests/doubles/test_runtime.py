"""Plans, runtimes and engines of the double: refusals, their wording, and where they are reported."""

import gc

import pytest

from tests.doubles.support import (
    Bench,
    make_logger,
)
from tests.doubles.tensorrt import (
    EngineSpec,
    TensorIO,
    ViolationError,
    double_lean_runtime,
    double_plan,
)

pytestmark = pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT:DeprecationWarning")


def test_a_shape_tensor_and_an_odd_type_can_be_looked_at_and_do_not_run():
    for io in (TensorIO("input", on_host=True), TensorIO("input", "fp8"), TensorIO("input", "bool")):
        bench = Bench(EngineSpec(inputs=(io,)))
        user = bench.user()
        assert bench.engine.is_shape_inference_io("input") == io.on_host
        assert not user.context.execute_async_v3(bench.stream().handle)
        code, said = bench.recorder.last()
        assert code == bench.trt.ErrorCodeTRT.UNSUPPORTED_STATE
        assert "cannot compute" in said
        assert bench.trt.violations() == ()


def test_what_fits_is_taken():
    bench = Bench(start=False)
    assert bench.load(EngineSpec(hardware_compatibility="AMPERE_PLUS"), compute_capability=(8, 0))
    same_kind = EngineSpec(hardware_compatibility="SAME_COMPUTE_CAPABILITY")
    assert bench.load(same_kind, compute_capability=(9, 0))
    assert bench.load(same_kind, compute_capability=(8, 0)) is None
    bench.runtime.engine_host_code_allowed = True
    assert bench.runtime.engine_host_code_allowed
    assert bench.load(EngineSpec(version_compatible=True), version="10.0.1.6")
    assert bench.load(EngineSpec(version_compatible=True), version="8.6.1.6") is None
    assert "TensorRT plan major version does not match runtime major version" in bench.recorder.last()[1]
    before = Bench(start=False, version="10.16.1.11")
    before.runtime.engine_host_code_allowed = True
    assert before.load(EngineSpec(version_compatible=True), version="8.6.1.6")
    assert before.load(EngineSpec(version_compatible=True), version="8.5.1.6") is None


def test_an_allocator_without_its_methods_makes_it_fail():
    bench = Bench(start=False)
    bench.allocator = bench.trt.IGpuAllocator()
    bench.runtime.gpu_allocator = bench.allocator
    assert bench.load(EngineSpec()) is None
    assert bench.logger.errors() == [
        "Method: allocate was not overriden. Please provide an implementation for this method."
    ]


def test_an_allocation_that_is_not_aligned_is_a_violation():
    bench = Bench(start=False)
    type(bench.allocator).allocate = lambda self, size, alignment, flags: 1 << 20 | alignment // 2
    with pytest.raises(ViolationError, match="not aligned to 256"):
        bench.load(EngineSpec())


@pytest.mark.parametrize("what", ["logger", "allocator", "recorder"])
def test_what_was_called_back_has_to_live_as_long_as_what_calls(what):
    bench = Bench()
    context = bench.engine.create_execution_context()
    setattr(bench, what, None)
    gc.collect()
    with pytest.raises(ViolationError, match="was destroyed before the object"):
        if what == "recorder":
            context.set_input_shape("input", (999, 16))
        else:
            context.infer_shapes()
    if what == "allocator":
        with pytest.raises(ViolationError):
            bench.engine.create_execution_context()
    assert len(bench.trt.violations()) >= 1


def test_the_first_logger_is_that_of_the_library():
    """It is used for what belongs to no runtime, though its own runtime is gone."""
    bench = Bench()
    second = make_logger(bench.trt)
    runtime = bench.trt.Runtime(second)
    assert any("differs from one already registered" in message for _, message in second.said)
    bench.engine = bench.runtime = None
    gc.collect()
    assert runtime.deserialize_cuda_engine(double_plan(EngineSpec())) is not None
    bench.logger = None
    gc.collect()
    with pytest.raises(ViolationError, match="passed first was destroyed"):
        runtime.deserialize_cuda_engine(double_plan(EngineSpec()))


def test_the_newest_library_has_the_older_calls_no_more_and_crashes_on_a_lean_runtime_of_8(tmp_path):
    bench = Bench()
    for name in ("device_memory_size", "create_execution_context_without_device_memory"):
        assert not hasattr(bench.engine, name)
    library = tmp_path / "libnvinfer_lean.so.8"
    library.write_bytes(double_lean_runtime("8.6.1.6"))
    with pytest.raises(ViolationError, match=r"load_runtime of TensorRT 11\.4\.0\.106 crashes"):
        bench.runtime.load_runtime(str(library))
    before = Bench(start=False, version="10.16.1.11")
    assert before.runtime.load_runtime(str(library)) is not None
