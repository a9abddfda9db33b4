"""Batches on contexts: what is told to TensorRT, what comes out, and what goes wrong."""

import threading

import numpy as np
import pytest

from asynctrt.backends.tensorrt import context as context_module
from asynctrt.backends.tensorrt.outputs import UnboundOutput
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeviceLostError,
    DeviceMemoryError,
    ExecutionError,
    InputError,
    InternalError,
    OptionsError,
)
from asynctrt.testing.tensorrt import EngineSpec, TensorIO, ViolationError
from tests.backends.tensorrt.helpers import Bench

WAIT_S = 20
SMALL = {"input": ((1, 1), (4, 4), (8, 8))}
LARGE = {"input": ((1, 1), (16, 16), (64, 32))}
SEQUENCE = EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),), profiles=(LARGE, SMALL))


class Spy:
    """Stands before an ``IExecutionContext`` and notes the calls that change it."""

    def __init__(self, trt):
        object.__setattr__(self, "_trt", trt)
        object.__setattr__(self, "calls", [])

    def __setattr__(self, name, value):
        setattr(self._trt, name, value)

    def __getattr__(self, name):
        found = getattr(self._trt, name)
        if not callable(found):
            return found

        def call(*args):
            self.calls.append(name)
            return found(*args)

        return call

    def take(self):
        taken = list(self.calls)
        self.calls.clear()
        return taken


@pytest.fixture
def spied(monkeypatch):
    """Lets every context be made with a spy; the latest one is the last of the list."""
    spies = []
    make = context_module.create_trt_context

    def create(loaded):
        spies.append(Spy(make(loaded)))
        return spies[-1]

    monkeypatch.setattr(context_module, "create_trt_context", create)
    return spies


def test_batches_of_many_sizes(bench):
    made = bench()
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    for seed, rows in enumerate((1, 64, 3, 3, 17)):
        made.run(binding, rows, arena, seed)
    context.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"])
def test_every_type_goes_through(bench, dtype):
    made = bench(EngineSpec(inputs=(TensorIO("x", dtype, (-1, 3, 5)),)))
    context = made.model.create_context(made.device)
    made.run(made.bind(context), 5, made.arena())
    context.close()


def test_only_what_changes_is_said(bench, spied):
    made = bench(SEQUENCE)
    context = made.model.create_context(made.device)
    spy = spied[-1]
    small, large = made.bind(context, input_1=8), made.bind(context, input_1=20)
    arena, other = made.arena(), made.arena()
    spy.take()
    made.run(small, 4, arena)
    assert spy.take() == [
        "set_optimization_profile_async",
        "set_tensor_address",
        "set_tensor_address",
        "set_input_shape",
        "infer_shapes",
        "get_tensor_shape",
        "set_device_memory",
        "execute_async_v3",
    ]
    made.run(small, 4, arena)
    assert spy.take() == ["execute_async_v3"]
    made.run(small, 5, arena)
    assert spy.take() == ["set_input_shape", "infer_shapes", "get_tensor_shape", "execute_async_v3"]
    made.run(small, 5, other)
    assert spy.take() == ["set_device_memory", "execute_async_v3"]
    twin = made.bind(context, input_1=8)
    made.run(twin, 5, other)
    assert spy.take() == ["set_tensor_address", "set_tensor_address", "execute_async_v3"]
    made.run(large, 5, other)
    assert spy.take()[0] == "set_optimization_profile_async"
    context.close()


def test_profiles_follow_the_shapes(bench):
    made = bench(SEQUENCE)
    context = made.model.create_context(made.device)
    arena = made.arena()
    bindings = {length: made.bind(context, rows=64, input_1=length) for length in (2, 8, 9, 32)}
    for seed, (length, rows) in enumerate([(2, 1), (8, 8), (9, 1), (8, 9), (2, 8), (32, 64), (2, 3)]):
        made.run(bindings[length], rows, arena, seed)
        assert f"profile={0 if length > 8 or rows > 8 else 1} " in repr(context)
    context.close()


def test_contexts_in_one_arena_take_turns(bench):
    """The stream order of two streams is made by an event, as the pool does it."""
    made = bench(EngineSpec(steps=6))
    first, second = (made.model.create_context(made.device) for _ in range(2))
    stream, arena = made.device.create_stream(), made.arena()
    one, two = made.bind(first), made.bind(second)
    made.fill(one, 1)
    made.fill(two, 2)
    for _ in range(20):
        between = made.device.create_event()
        one.enqueue(50, stream=made.stream, arena=arena)
        made.stream.record(between)
        stream.wait(between)
        two.enqueue(60, stream=stream, arena=arena)
        after = made.device.create_event()
        stream.record(after)
        assert after.synchronize(WAIT_S)
        assert after.error is None
        made.check(one, 50)
        made.check(two, 60)
    assert stream.close(WAIT_S)
    first.close()
    second.close()


def test_shapes_outside_every_profile_are_the_callers(bench):
    made = bench(SEQUENCE)
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context, input_1=32), made.arena()
    with pytest.raises(InputError, match=r"profile 0 takes input \(1..64, 1..32\)"):
        binding.enqueue(65, stream=made.stream, arena=arena)
    made.run(binding, 64, arena)
    context.close()


def test_an_enqueue_that_fails_is_this_batchs_alone(bench, spied):
    made = bench()
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    made.run(binding, 4, arena)
    made.trt.fail_next("enqueue")
    with pytest.raises(ExecutionError) as caught:
        binding.enqueue(4, stream=made.stream, arena=arena)
    assert "the enqueue failed on demand) [FAILED_EXECUTION]" in str(caught.value)
    assert "'plan'" in str(caught.value)
    spied[-1].take()
    made.run(binding, 4, arena)
    assert "set_input_shape" in spied[-1].take(), "after an error everything is said anew"
    context.close()


def test_a_lost_device(bench):
    made = bench()
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    made.trt.fail_next("illegal-address")
    binding.enqueue(4, stream=made.stream, arena=arena)
    assert made.finish() is not None
    with pytest.raises(DeviceLostError) as caught:
        binding.enqueue(4, stream=made.stream, arena=arena)
    assert "illegal memory access" in str(caught.value)
    context.close()


def test_a_context_that_there_is_no_memory_for(bench):
    made = bench(EngineSpec(persistent_nbytes=10_000), memory_budget=30_000)
    kept = [made.model.create_context(made.device) for _ in range(2)]
    with pytest.raises(DeviceMemoryError) as caught:
        made.model.create_context(made.device)
    assert "memory_budget" in str(caught.value)
    assert "OutOfMemory" in str(caught.value)
    kept.pop().close()
    kept.append(made.model.create_context(made.device))
    made.trt.fail_next("context-memory")
    with pytest.raises(DeviceMemoryError, match="are free"):
        made.model.create_context(made.device)
    for context in kept:
        context.close()
    assert made.model.memory_statistics().blocks == 1


def test_an_arena_that_is_too_small(bench):
    made = bench()
    context = made.model.create_context(made.device)
    binding = made.bind(context)
    with pytest.raises(InternalError, match="no arena"):
        binding.enqueue(4, stream=made.stream, arena=None)
    with pytest.raises(InternalError, match="needs"):
        binding.enqueue(64, stream=made.stream, arena=made.arena(1024))
    made.run(binding, 64, made.arena())
    context.close()


def test_a_small_arena_is_enough_for_small_batches(bench):
    made = bench()
    context = made.model.create_context(made.device)
    binding = made.bind(context)
    arena = made.arena(made.spec.enqueue_nbytes({"input": (4, 16)}))
    for rows in (4, 2, 4):
        made.run(binding, rows, arena)
    with pytest.raises(InternalError, match="needs"):
        binding.enqueue(64, stream=made.stream, arena=arena)
    made.run(binding, 3, arena)
    made.run(binding, 64, made.arena())
    made.run(binding, 4, arena)
    context.close()


def test_two_threads_in_one_context(bench):
    made = bench()
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    inside, go = threading.Event(), threading.Event()
    made.run(binding, 4, arena)
    handle = made.stream.handle

    class Held:
        """A stream that holds whoever asks for its handle."""

        is_capturing = False

        @property
        def handle(self):
            inside.set()
            assert go.wait(WAIT_S)
            return handle

    thread = threading.Thread(target=binding.enqueue, args=(4,), kwargs={"stream": Held(), "arena": arena})
    thread.start()
    assert inside.wait(WAIT_S)
    with pytest.raises(InternalError, match="two threads"):
        binding.enqueue(4, stream=made.stream, arena=arena)
    go.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert made.finish() is None
    context.close()


def test_a_violation_comes_through_as_it_is():
    """It is a bug of ours and must not look like a failure of the model."""
    made = Bench()
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    foreign = HostDevice(in_place="never", threads=1)
    stream = foreign.create_stream()
    stream.handle = 999_999
    with pytest.raises(ViolationError):
        binding.enqueue(4, stream=stream, arena=arena)
    made.run(binding, 4, arena)
    context.close()
    assert stream.close(WAIT_S)
    made.close()


def test_capturing_and_replaying(bench):
    made = bench()
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    made.stream.begin_capture()
    with pytest.raises(InternalError, match="not run with them before"):
        binding.enqueue(8, stream=made.stream, arena=arena)
    made.stream.end_capture()
    made.run(binding, 8, arena)
    made.stream.begin_capture()
    binding.enqueue(8, stream=made.stream, arena=arena)
    graph = made.stream.end_capture()
    for seed in range(5):
        made.fill(binding, seed)
        graph.launch(stream=made.stream)
        assert made.finish() is None
        made.check(binding, 8)
    made.run(binding, 9, arena)
    graph.close()
    context.close()


def test_an_engine_that_cannot_be_captured(bench):
    made = bench(EngineSpec(capturable=False))
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    made.run(binding, 8, arena)
    made.stream.begin_capture()
    with pytest.raises(ExecutionError, match="capturing"):
        binding.enqueue(8, stream=made.stream, arena=arena)
    made.stream.end_capture()
    made.run(binding, 8, arena)
    context.close()


DATA = EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),), data_dependent=True)


def test_outputs_whose_shape_depends_on_the_data(bench):
    made = bench(DATA)
    assert [str(spec) for spec in made.model.outputs] == [
        "output: float32[rows, input.1]",
        "positives: float32[rows, positives.1]",
    ]
    assert not made.model.is_capturable
    context = made.model.create_context(made.device)
    arena = made.arena()
    bindings = {length: made.bind(context, input_1=length) for length in (1, 5, 32)}
    for seed, (length, rows) in enumerate([(5, 3), (32, 64), (1, 1), (5, 3), (32, 2)]):
        made.run(bindings[length], rows, arena, seed)
    held = made.model.memory_statistics()
    assert held.allocations < 8, "memory is kept from batch to batch"
    context.close()
    assert made.model.memory_statistics().blocks == 1


def test_an_output_that_is_empty(bench):
    made = bench(DATA)
    context = made.model.create_context(made.device)
    binding = made.bind(context, input_1=5)
    for memory in binding.inputs:
        memory.array[...] = 100  # The sign changes an odd number of times on the way, so none is positive.
    binding.enqueue(4, stream=made.stream, arena=made.arena())
    assert made.finish() is None
    made.check(binding, 4)
    assert binding.unbound_outputs(4)["positives"].size in (0, 20)
    context.close()


def test_unbound_outputs_belong_to_the_caller(bench):
    made = bench(DATA)
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context, input_1=5), made.arena()
    made.run(binding, 4, arena, 1)
    kept = binding.unbound_outputs(4)["positives"]
    copy = kept.copy()
    made.run(binding, 4, arena, 2)
    np.testing.assert_array_equal(kept, copy)
    context.close()


def test_an_output_that_there_is_no_memory_for(bench):
    made = bench(DATA, memory_budget=4096 + 64 * 4 * 4)
    context = made.model.create_context(made.device)
    arena = made.arena()
    small, large = made.bind(context, input_1=4), made.bind(context, input_1=32)
    made.run(small, 64, arena)
    with pytest.raises(DeviceMemoryError, match="memory_budget"):
        large.enqueue(64, stream=made.stream, arena=arena)
    made.run(small, 64, arena)
    context.close()


class FarBuffer:
    """Memory that the host cannot see, on a host."""

    is_host_visible = False

    def __init__(self, buffer):
        self._buffer = buffer
        self.address, self.nbytes, self.array = buffer.address, buffer.nbytes, self.refuse

    def refuse(self, *args):
        raise AssertionError("the host does not see this memory")

    def close(self):
        self._buffer.close()


class FarStream:
    """Notes the copies and does them between the buffers behind."""

    def __init__(self, stream):
        self._stream = stream
        self.copied = []

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def copy(self, target, source, *, offset, nbytes):
        self.copied.append(nbytes)
        self._stream.copy(target, source._buffer, offset=offset, nbytes=nbytes)


def test_where_the_host_cannot_see_it_the_output_is_copied_behind_the_batch(bench, monkeypatch):
    made = bench(DATA)
    reserve = UnboundOutput.reserve

    def far(self, nbytes):
        address = reserve(self, nbytes)
        if isinstance(self._buffer, FarBuffer) or address is None:
            return address
        self._buffer = FarBuffer(self._buffer)
        return address

    monkeypatch.setattr(UnboundOutput, "reserve", far)
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context, input_1=7), made.arena()
    stream = FarStream(made.stream)
    for seed, rows in enumerate((3, 64, 5)):
        made.fill(binding, seed)
        binding.enqueue(rows, stream=stream, arena=arena)
        assert made.finish() is None
        made.check(binding, rows)
        positives = binding.unbound_outputs(rows)["positives"]
        assert stream.copied[-1] == positives.nbytes, "the bytes that there are, not the most there could be"
    context.close()


@pytest.mark.parametrize("whose", ["ours", "library"])
def test_auxiliary_streams(bench, spied, whose):
    made = bench(EngineSpec(aux_streams=2), aux_streams=whose)
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    for seed in range(3):
        made.run(binding, 40, arena, seed)
    assert spied[-1].take().count("set_aux_streams") == (3 if whose == "ours" else 0)
    context.close()


def test_a_limit_for_the_l2_cache(bench):
    made = bench(persistent_cache_limit=1000)
    made.device.l2_persisting_nbytes = 2500
    contexts = [made.model.create_context(made.device) for _ in range(2)]
    assert contexts[0]._trt.persistent_cache_limit == 1000
    with pytest.raises(OptionsError, match="2500"):
        made.model.create_context(made.device)
    contexts.pop().close()
    contexts.append(made.model.create_context(made.device))
    for context in contexts:
        context.close()


def test_what_profilers_are_told(bench):
    made = bench(nvtx="none")
    context = made.model.create_context(made.device)
    assert context._trt.nvtx_verbosity.name == "NONE"
    context.close()


def test_a_context_that_cannot_be_configured_is_given_back(bench):
    made = bench(EngineSpec(persistent_nbytes=1000), nvtx="detailed")
    with pytest.raises(ExecutionError, match="setNvtxVerbosity"):
        made.model.create_context(made.device)
    assert "contexts=0" in repr(made.model)


def test_closing_twice(bench):
    made = bench()
    context = made.model.create_context(made.device)
    context.close()
    context.close()
    assert repr(context) == "<TensorRTContext plan closed>"
    assert "contexts=0" in repr(made.model)


def test_outputs_that_are_not_what_was_found_at_opening(bench, monkeypatch):
    """Nothing is enqueued that would write beyond the memory bound for it."""
    made = bench(EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),)))
    context = made.model.create_context(made.device)
    binding = made.bind(context, input_1=5)
    trt = context._trt
    shape_of_output = trt.get_tensor_shape

    def longer(name):
        rows, length = tuple(shape_of_output(name))
        return made.trt.Dims((rows, length + 1))

    monkeypatch.setattr(trt, "get_tensor_shape", longer)
    with pytest.raises(ExecutionError, match=r"has shape \(4, 6\)"):
        binding.enqueue(4, stream=made.stream, arena=made.arena())
    monkeypatch.undo()
    made.run(binding, 4, made.arena())
    context.close()
