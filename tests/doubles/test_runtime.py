"""Plans, runtimes and engines of the double: refusals, their wording, and where they are reported."""

import dataclasses
import gc
import struct
import threading

import pytest

from tests.doubles.support import (
    Bench,
    make_allocator,
    make_logger,
    make_output_allocator,
    make_recorder,
    rows,
)
from tests.doubles.tensorrt import (
    EngineSpec,
    TensorIO,
    ViolationError,
    double_lean_runtime,
    double_plan,
)

pytestmark = pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT:DeprecationWarning")

TWO_PROFILES = (
    {"input": ((1, 16), (2, 16), (4, 16))},
    {"input": ((1, 16), (16, 16), (64, 16))},
)


def test_a_plan_begins_as_real_ones_do():
    plan = double_plan(EngineSpec(), version="11.4.0.106")
    tag, zero, two, size, *version = struct.unpack_from("<4sIQQ4B", plan)
    assert (tag, zero, two, size, version) == (b"ftrt", 0, 2, len(plan), [11, 4, 0, 106])


def test_an_engine_says_what_its_plan_says():
    profiles = ({"input": ((1, 16), (2, 16), (4, 16))}, {"input": ((1, 16), (16, 16), (32, 16))})
    spec = EngineSpec(
        "seven", profiles=profiles, steps=7, aux_streams=2, hardware_compatibility="AMPERE_PLUS"
    )
    engine = Bench(spec).engine
    trt = Bench().trt
    assert (engine.name, engine.num_layers, engine.num_io_tensors, engine.num_aux_streams) == (
        "seven",
        7,
        2,
        2,
    )
    assert [engine[index] for index in range(len(engine))] == ["input", "output"]
    assert engine.get_tensor_mode("input") == trt.TensorIOMode.INPUT
    assert engine.get_tensor_mode("output") == trt.TensorIOMode.OUTPUT
    assert engine.get_tensor_dtype("output") == trt.float32
    assert tuple(engine.get_tensor_shape("output")) == (-1, 16)
    assert engine.get_tensor_location("input") == trt.TensorLocation.DEVICE
    assert engine.get_tensor_bytes_per_component("input") == -1
    assert engine.get_tensor_components_per_element("input") == -1
    assert engine.get_tensor_vectorized_dim("input") == -1
    assert engine.get_aliased_input_tensor("output") is None
    assert engine.num_optimization_profiles == 2
    assert [tuple(shape) for shape in engine.get_tensor_profile_shape("input", 1)] == [
        (1, 16),
        (16, 16),
        (32, 16),
    ]
    sizes = [engine.get_device_memory_size_for_profile_v2(index) for index in (0, 1)]
    assert sizes[0] < sizes[1] == engine.device_memory_size_v2
    assert all(size % 256 == 0 for size in sizes)
    assert engine.hardware_compatibility_level == trt.HardwareCompatibilityLevel.AMPERE_PLUS
    assert engine.get_engine_stat() == 4096
    assert engine.get_engine_stat(trt.EngineStat.STRIPPED_WEIGHTS_SIZE) == -1
    assert not engine.refittable
    assert not engine.is_shape_inference_io("input")


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


def just_a_header(more=0):
    """Return a plan whose header says that it ends there, or after some zeros."""
    plan = bytearray(double_plan(EngineSpec())[:64] + bytes(more))
    struct.pack_into("<Q", plan, 16, len(plan))
    return bytes(plan)


REFUSED = [
    (b"", "Magic tag does not match"),
    (b"\x08\x07onnx" * 100, "Magic tag does not match"),
    (double_plan(EngineSpec())[:40], "Magic tag does not match"),
    (just_a_header(), "Plan is corrupt"),
    (just_a_header() + bytes(3), "Plan size does not match. Note: Size in header: 64, Size of buffer: 67"),
    (just_a_header(3), "Plan is corrupt"),
    (just_a_header(4), "Plan is corrupt"),
    (double_plan(EngineSpec())[:-9], "Plan size does not match. Note: Size in header: "),
    (double_plan(EngineSpec())[:-9] + b"123456789", "Plan is corrupt"),
    (
        double_plan(EngineSpec(), version="11.3.0.1"),
        (
            "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not "
            "match. Note: Current Version: 236, Serialized Engine Version: 232"
        ),
    ),
    (
        double_plan(EngineSpec(), compute_capability=(8, 6)),
        "incompatible device, expecting compute 9.0 got compute 8.6, please rebuild.",
    ),
    (
        double_plan(EngineSpec(version_compatible=True), version="10.9.0.34"),
        "host executable code, and engineHostCodeAllowed is false",
    ),
    (
        double_plan(EngineSpec(version_compatible=True), version="12.0.0.1"),
        "Version tag does not match",
    ),
    (
        double_plan(EngineSpec(version_compatible=True, excludes_lean_runtime=True), version="10.9.0.34"),
        "old deserialization call on a newer plan file",
    ),
]


@pytest.mark.parametrize(("plan", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_plan_that_does_not_fit_is_refused_and_the_recorder_is_told(plan, said):
    bench = Bench(start=False)
    assert bench.runtime.deserialize_cuda_engine(plan) is None
    code, message = bench.recorder.last()
    assert message.startswith(f"IRuntime::deserializeCudaEngine: Error Code {code.value}: ")
    assert said in message
    assert bench.logger.errors() == []
    assert bench.allocator.held == {}


def test_without_a_recorder_the_logger_is_told():
    bench = Bench(start=False)
    bench.runtime.error_recorder = None
    assert bench.runtime.error_recorder is None
    assert bench.runtime.deserialize_cuda_engine(b"nothing") is None
    assert "Magic tag" in bench.logger.errors()[0]


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


def test_another_version_can_be_loaded_from_a_file(tmp_path):
    bench = Bench(start=False)
    library = tmp_path / "libnvinfer_lean.so.10"
    library.write_bytes(double_lean_runtime("10.9.0.34"))
    spec = EngineSpec(version_compatible=True, excludes_lean_runtime=True)
    shim = bench.runtime.load_runtime(str(library))
    assert shim.deserialize_cuda_engine(double_plan(spec, version="10.9.0.34")).name == spec.name
    assert bench.runtime.load_runtime(str(tmp_path / "missing.so")) is None
    assert "Unable to load" in bench.recorder.last()[1]


def test_loggers_are_called_from_other_threads_too():
    bench = Bench(start=False)
    threads = set()
    log = type(bench.logger).log
    type(bench.logger).log = lambda self, severity, msg: (
        threads.add(threading.get_ident()),
        log(self, severity, msg),
    )
    assert bench.load(EngineSpec())
    assert threads - {threading.get_ident()}


def test_weights_come_from_the_allocator_and_go_back():
    bench = Bench(EngineSpec(weights_nbytes=10_000))
    assert [buffer.nbytes for buffer in bench.allocator.held.values()] == [10_240]
    bench.engine = None
    gc.collect()
    assert bench.allocator.held == {}
    assert bench.trt.violations() == ()


def test_memory_of_contexts_comes_from_the_allocator_and_goes_back():
    bench = Bench(EngineSpec(persistent_nbytes=1000))
    weights = len(bench.allocator.held)
    managed = bench.engine.create_execution_context(bench.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    assert sorted(buffer.nbytes for buffer in bench.allocator.held.values()) == [1024, 4096]
    own = bench.engine.create_execution_context()
    assert sum(buffer.nbytes for buffer in bench.allocator.held.values()) == (
        4096 + 2 * 1024 + bench.engine.device_memory_size_v2
    )
    del managed, own
    gc.collect()
    assert len(bench.allocator.held) == weights


def test_without_an_allocator_the_device_gives_memory():
    bench = Bench(start=False)
    bench.runtime.gpu_allocator = None
    held = bench.device.memory().held_nbytes
    engine = bench.load(EngineSpec())
    assert bench.device.memory().held_nbytes == held + 4096
    del engine
    gc.collect()
    assert bench.device.memory().held_nbytes == held


def test_an_allocator_that_refuses_makes_it_fail():
    bench = Bench(EngineSpec(persistent_nbytes=1000))
    bench.allocator.refuse = True
    assert bench.load(EngineSpec()) is None
    assert bench.recorder.last() == (
        bench.trt.ErrorCodeTRT.INTERNAL_ERROR,
        "IRuntime::deserializeCudaEngine: Error Code 2: OutOfMemory (Requested size was 4096 bytes.)",
    )
    with pytest.raises(ViolationError, match="segmentation fault"):
        bench.engine.create_execution_context()
    assert len(bench.allocator.held) == 1


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


def test_an_allocator_that_raises_refuses():
    bench = Bench(start=False)

    def fail(self, size, alignment, flags):
        raise MemoryError("no memory today")

    type(bench.allocator).allocate = fail
    assert bench.load(EngineSpec()) is None
    assert "Error Code 2: OutOfMemory" in bench.recorder.last()[1]


def test_memory_is_refused_with_0_and_not_with_none():
    bench = Bench(start=False)
    type(bench.allocator).allocate = lambda self, size, alignment, flags: None
    with pytest.raises(ViolationError, match="refuse memory with 0"):
        bench.load(EngineSpec())


def test_weights_can_be_streamed():
    spec = EngineSpec(weights_nbytes=64 << 10, streamable_weights_nbytes=32 << 10)
    bench = Bench(spec)
    engine = bench.engine
    assert engine.streamable_weights_size == engine.weight_streaming_budget_v2 == 32 << 10
    assert engine.get_weight_streaming_automatic_budget() == 32 << 10
    whole = engine.device_memory_size_v2
    engine.weight_streaming_budget_v2 = 0
    assert [buffer.nbytes for buffer in bench.allocator.held.values()] == [32 << 10]
    assert engine.weight_streaming_scratch_memory_size == 8 << 10
    assert engine.device_memory_size_v2 == whole + (8 << 10)
    user = bench.user().give(rows(4, 16))
    user.run()
    user.check()
    engine.weight_streaming_budget_v2 = 32 << 10
    assert engine.weight_streaming_budget_v2 == 0
    assert "no active IExecutionContext" in bench.recorder.last()[1]
    bench.close()


def test_engines_outlive_their_runtime():
    bench = Bench()
    bench.runtime = None
    gc.collect()
    user = bench.user().give(rows(4, 16))
    user.run()
    user.check()
    assert bench.trt.violations() == ()
    bench.close()


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


def test_once_there_is_no_runtime_another_logger_is_the_first():
    bench = Bench()
    bench.engine = bench.runtime = bench.logger = None
    gc.collect()
    logger = make_logger(bench.trt)
    runtime = bench.trt.Runtime(logger)
    assert logger.errors() == []
    assert runtime.deserialize_cuda_engine(double_plan(EngineSpec())) is not None
    assert bench.trt.violations() == ()


def test_memory_of_an_allocator_that_is_gone_is_noted():
    bench = Bench(EngineSpec())
    bench.allocator.held.clear()
    bench.allocator = None
    bench.engine = None
    gc.collect()
    assert "was destroyed before" in bench.trt.violations()[0]


def test_who_creates_hands_the_recorder_on():
    bench = Bench()
    own = make_recorder(bench.trt)
    bench.engine.error_recorder = own
    assert bench.engine.error_recorder is own
    context = bench.engine.create_execution_context()
    assert context.error_recorder is own
    assert not context.set_input_shape("nothing", (1, 16))
    assert len(own.errors) == 1
    assert bench.recorder.errors == []


def test_names_and_profiles_that_are_not_there_are_reported():
    bench = Bench()
    engine = bench.engine
    assert tuple(engine.get_tensor_shape("nothing")) == ()
    assert engine.get_tensor_mode("nothing") == bench.trt.TensorIOMode.NONE
    for name, profile in (("input", 1), ("output", 0), ("nothing", 0)):
        assert list(map(tuple, engine.get_tensor_profile_shape(name, profile))) == [(), (), ()]
    assert engine.get_tensor_name(2) is None
    assert engine.get_device_memory_size_for_profile_v2(3) == 0
    codes = {code for code, _ in bench.recorder.errors}
    assert codes == {bench.trt.ErrorCodeTRT.INVALID_ARGUMENT}
    assert "invalid tensor name: nothing" in bench.recorder.errors[0][1]


def test_a_runtime_takes_interfaces_and_bytes_only():
    bench = Bench()
    with pytest.raises(TypeError, match="ILogger is expected"):
        bench.trt.Runtime(print)
    with pytest.raises(TypeError, match="IGpuAllocator is expected"):
        bench.runtime.gpu_allocator = bench.logger
    with pytest.raises(TypeError, match="IErrorRecorder is expected"):
        bench.runtime.error_recorder = bench.logger
    with pytest.raises(TypeError, match="accepts a plan as bytes"):
        bench.runtime.deserialize_cuda_engine("model.plan")
    bench.runtime.max_threads = 0
    assert "maxThreads > 0" in bench.recorder.last()[1]
    assert bench.runtime.max_threads == 1
    bench.runtime.max_threads = 4
    assert bench.runtime.max_threads == 4
    assert bench.runtime.logger is bench.logger
    assert bench.runtime.num_DLA_cores == 0


def test_a_runtime_config_says_the_strategy():
    bench = Bench()
    config = bench.engine.create_runtime_config()
    assert config.get_execution_context_allocation_strategy().name == "STATIC"
    config.set_execution_context_allocation_strategy(
        bench.trt.ExecutionContextAllocationStrategy.USER_MANAGED
    )
    context = bench.engine.create_execution_context(runtime_config=config)
    context.set_device_memory(256 * 1000, 1 << 20)


@pytest.mark.parametrize(
    ("what", "where"), [("deserialize-memory", "deserialize"), ("context-memory", "create")]
)
def test_memory_can_be_refused_on_demand(what, where):
    bench = Bench()
    bench.trt.fail_next(what, 2)
    for _ in range(2):
        made = bench.load(EngineSpec()) if where == "deserialize" else bench.engine.create_execution_context()
        assert made is None
        assert "Error Code 2: OutOfMemory" in bench.recorder.last()[1]
    assert bench.load(EngineSpec())
    assert bench.engine.create_execution_context()


def test_two_doubles_have_nothing_in_common():
    one, other = Bench(), Bench(version="10.9.0.34")
    assert one.trt.Runtime is not other.trt.Runtime
    assert other.trt.__version__ == "10.9.0.34"
    one.trt.fail_next("context-memory")
    assert other.engine is None
    logger, allocator = make_logger(other.trt), make_allocator(other.trt, other.device)
    runtime = other.trt.Runtime(logger)
    runtime.gpu_allocator = allocator
    engine = runtime.deserialize_cuda_engine(double_plan(EngineSpec(), version="10.9.0.34"))
    assert engine.create_execution_context()


def old_engine(spec=None, **kw):
    """An engine of 8.6 under 10.16, with its own lean runtime."""
    bench = Bench(start=False, version="10.16.1.11", **kw)
    bench.runtime.engine_host_code_allowed = True
    spec = dataclasses.replace(spec or EngineSpec(), version_compatible=True)
    bench.engine, bench.spec = bench.load(spec, version="8.6.1.6"), spec
    return bench


def test_an_older_engine_answers_0_to_later_calls_and_reports_it():
    bench = old_engine()
    engine, strategy = bench.engine, bench.trt.ExecutionContextAllocationStrategy
    assert engine.device_memory_size_v2 == 0
    assert "getDeviceMemorySizeV2 is only supported from TensorRT 10.1 onwards" in bench.recorder.last()[1]
    assert engine.get_device_memory_size_for_profile_v2(0) == 0
    assert "getDeviceMemorySizeForProfileV2 is only supported" in bench.recorder.last()[1]
    held = bench.device.memory().held_nbytes
    context = engine.create_execution_context(strategy.USER_MANAGED)
    needed = bench.device.memory().held_nbytes - held
    assert needed == engine.device_memory_size > 0, "which it allocates without a word"
    arena = bench.device.allocate(needed)
    context.set_device_memory(arena.address, needed)
    assert "setDeviceMemoryV2 is only supported" in bench.recorder.last()[1]
    assert context.update_device_memory_size_for_shapes() == 0
    context.device_memory = arena.address
    assert "not created with createExecutionContextWithoutDeviceMemory" in bench.recorder.last()[1]
    assert bench.trt.violations() == ()


def test_an_older_engine_crashes_in_the_call_that_the_later_one_replaced():
    bench = old_engine()
    with pytest.raises(
        ViolationError, match=r"for_profile of 'double', which TensorRT 8\.6\.1\.6 built, crashes"
    ):
        bench.engine.get_device_memory_size_for_profile(0)
    later = Bench(version="10.16.1.11", start=False)
    engine = later.load(EngineSpec(), version="10.16.1.11")
    assert engine.get_device_memory_size_for_profile(0) == engine.device_memory_size > 0


def test_older_engines_share_memory_that_has_no_size():
    bench = old_engine(EngineSpec(profiles=TWO_PROFILES))
    held = bench.device.memory().held_nbytes
    contexts = [bench.engine.create_execution_context_without_device_memory() for _ in range(2)]
    assert bench.device.memory().held_nbytes == held
    arena = bench.device.allocate(bench.engine.device_memory_size)
    stream = bench.stream()
    for context in contexts:
        user = bench.user(context=context, arena=arena)
        context.device_memory = arena.address
        for address in (0, arena.address + 256):
            context.device_memory = address
        assert "must be aligned on 512 byte boundary" in bench.recorder.last()[1]
        user.give(rows(4, 16)).run(stream)
        user.check()
    assert len(bench.recorder.errors) == 4
    assert bench.trt.violations() == ()


def test_older_engines_need_memory_too():
    bench = old_engine()
    user = bench.user(context=bench.engine.create_execution_context_without_device_memory(), arena=None)
    user.give(rows(4, 16))
    assert not user.context.execute_async_v3(bench.stream().handle)
    assert "getDeviceMemory() != nullptr" in bench.recorder.last()[1]


def test_an_older_engine_with_a_callback_that_a_later_library_passes_on_wrongly():
    bench = old_engine()
    user = bench.user(context=bench.engine.create_execution_context(), arena=None).give(rows(4, 16))
    with pytest.raises(ViolationError, match="error_recorder is set to None"):
        user.context.error_recorder = None
    allocator = make_output_allocator(bench)
    assert user.context.set_output_allocator("output", allocator)
    with pytest.raises(ViolationError, match="executes with an output allocator for 'output'"):
        user.context.execute_async_v3(bench.stream().handle)


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
