"""Batches on contexts: the calls to TensorRT, the answers, and the failures."""

import dataclasses
import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from asynctrt.backends.tensorrt import context as context_module
from asynctrt.backends.tensorrt.outputs import UnboundOutput
from asynctrt.devices.base import MemoryFigures
from asynctrt.devices.host import HostDevice, HostStream
from asynctrt.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    ExecutionError,
    InternalError,
)
from tests.backends.tensorrt.helpers import Bench
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, ViolationError
from tests.doubles.tensorrt.context import IExecutionContext

WAIT_S = 20
SMALL = {"input": ((1, 1), (4, 4), (8, 8))}
LARGE = {"input": ((1, 1), (16, 16), (64, 32))}
SEQUENCE = EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),), profiles=(LARGE, SMALL))


class Spy:
    """A wrapper of an ``IExecutionContext`` that records the calls of its methods."""

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


def of_two_profiles(bench, spec=SEQUENCE, **options):
    """Return a bench, a context, bindings of it for which the profiles differ, and an arena."""
    made = bench(spec, **options)
    context = made.create_context()
    return made, context, [made.bind(context, input_1=length) for length in (8, 20)], made.arena()


@pytest.fixture
def spied(monkeypatch):
    """Wrap every new context in a spy; the latest spy is the last of the list."""
    spies = []
    make = context_module.create_trt_context

    def create(loaded):
        spies.append(Spy(make(loaded)))
        return spies[-1]

    monkeypatch.setattr(context_module, "create_trt_context", create)
    return spies


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"])
def test_every_type_goes_through(bench, dtype):
    made = bench(EngineSpec(inputs=(TensorIO("x", dtype, (-1, 3, 5)),)))
    binding, arena = made.ready()
    made.run(binding, 5, arena)


def test_only_what_changes_is_said(bench, spied):
    made = bench(SEQUENCE)
    context = made.create_context()
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
    made.run(small, 4, arena)
    assert spy.take() == ["set_input_shape", "execute_async_v3"], "the outputs of 4 rows were checked before"
    made.run(small, 5, arena)
    assert spy.take() == ["set_input_shape", "execute_async_v3"]
    made.run(small, 5, other)
    assert spy.take() == ["set_device_memory", "execute_async_v3"]
    twin = made.bind(context, input_1=8)
    made.run(twin, 5, other)
    assert spy.take() == ["set_tensor_address", "set_tensor_address", "execute_async_v3"]
    made.run(large, 5, other)
    assert spy.take() == [], "another profile has another of TensorRT's contexts"
    again = spied[-1]
    assert "set_optimization_profile_async" in again.take()
    made.run(large, 5, other)
    assert again.take() == ["execute_async_v3"]
    made.run(twin, 5, other)
    assert spy.take() == ["execute_async_v3"], "which remembers all that it was given"


@pytest.mark.parametrize(
    ("room", "contexts"), [({}, 2), ({"memory_budget": 4096 + 1024}, 1), ({"memory_budget": 4096 + 2048}, 2)]
)
def test_each_profile_has_a_context_if_there_is_room(bench, spied, room, contexts):
    made, context, bindings, arena = of_two_profiles(
        bench, dataclasses.replace(SEQUENCE, persistent_nbytes=1024), **room
    )
    del spied[:]
    for seed in range(6):
        made.run(bindings[seed % 2], 4, arena, seed)
    assert len(spied) == contexts - 1
    assert made.model.memory_statistics().held_nbytes == 4096 + contexts * 1024
    assert not made.model._loaded.memory.take_refusals()
    context.close()
    gc.collect()
    spied.clear()
    assert made.model.memory_statistics().held_nbytes == 4096


def test_a_context_that_cannot_be_created_after_all_leaves_one_that_switches(bench):
    made, _, bindings, arena = of_two_profiles(bench)
    made.run(bindings[0], 4, arena)
    made.trt.fail_next("context-memory")
    for seed in range(4):
        made.run(bindings[1 - seed % 2], 4, arena, seed)


def test_a_context_for_another_profile_is_created_in_a_thread(bench):
    made, context, (small, large), arena = of_two_profiles(bench)
    made.model._loaded.paces = SimpleNamespace(is_short=lambda _: True, observe=lambda *args, **kw: None)
    assert not context.may_block(small, 3, None), "the first profile has the first context"
    made.run(small, 3, arena)
    assert not context.may_block(small, 4, None)
    assert context.may_block(large, 3, None)
    made.run(large, 3, arena)
    assert not context.may_block(large, 4, None)


def test_after_an_error_each_profile_goes_on_in_its_context(bench):
    spec = dataclasses.replace(SEQUENCE, shares_profiles=False)
    made, _, bindings, arena = of_two_profiles(bench, spec, version="8.6.1.6")
    for binding in bindings:
        made.run(binding, 4, arena)
    for failing in bindings:
        made.trt.fail_next("enqueue")
        with pytest.raises(ExecutionError, match="failed on demand"):
            failing.enqueue(4, profile=None, stream=made.stream, arena=arena)
    for binding in reversed(bindings):
        made.run(binding, 4, arena)


def test_profiles_follow_the_shapes(bench):
    made = bench(SEQUENCE)
    context = made.create_context()
    arena = made.arena()
    bindings = {length: made.bind(context, rows=64, input_1=length) for length in (2, 8, 9, 32)}
    for seed, (length, rows) in enumerate([(2, 1), (8, 8), (9, 1), (8, 9), (2, 8), (32, 64), (2, 3)]):
        made.run(bindings[length], rows, arena, seed)
        assert f"profile={0 if length > 8 or rows > 8 else 1} " in repr(context)


def test_a_given_profile_is_used(bench):
    """Both profiles take these batches; left alone, the model would choose the one with less memory."""
    made = bench(SEQUENCE)
    context = made.create_context()
    binding, arena = made.bind(context, input_1=8), made.arena()
    for seed, (rows, profile) in enumerate([(3, 0), (3, 1), (8, 0), (3, None), (8, 1)]):
        made.run(binding, rows, arena, seed, profile)
        assert f"profile={1 if profile is None else profile} " in repr(context)


def test_a_given_profile_that_does_not_take_the_batch_is_refused(bench, spied):
    made = bench(SEQUENCE)
    context = made.create_context()
    spy = spied[-1]
    binding, arena = made.bind(context, input_1=8), made.arena()
    made.run(binding, 3, arena, profile=1)
    spy.take()
    with pytest.raises(InternalError, match=r"profile 1 of 'plan' .* input \(9, 8\), .*profile 1 takes"):
        binding.enqueue(9, profile=1, stream=made.stream, arena=arena)
    for profile in (2, -1):
        with pytest.raises(InternalError, match=f"profile {profile} .*which has 2"):
            binding.enqueue(3, profile=profile, stream=made.stream, arena=arena)
    assert spy.take() == [], "TensorRT was told nothing"
    made.run(binding, 9, arena, profile=0)


def test_a_lost_device(bench):
    made = bench()
    binding, arena = made.ready()
    made.trt.fail_next("illegal-address")
    binding.enqueue(4, profile=None, stream=made.stream, arena=arena)
    assert made.finish() is not None
    with pytest.raises(DeviceLostError) as caught:
        binding.enqueue(4, profile=None, stream=made.stream, arena=arena)
    assert "illegal memory access" in str(caught.value)


def test_memory_that_is_refused_while_a_context_is_created(bench):
    """The real library crashes then, and so does the double."""
    device = HostDevice(in_place="never")
    double = StrictTensorRT(device)
    with pytest.raises(DeviceMemoryError, match="memory_budget"):
        bench(EngineSpec(persistent_nbytes=10_000), device=device, trt=double, memory_budget=14_000)
    assert device.memory().held_nbytes == 0
    assert double.violations() == ()


def test_an_arena_that_is_too_small(bench):
    made = bench()
    binding, arena = made.ready()
    with pytest.raises(InternalError, match="no arena"):
        binding.enqueue(4, profile=None, stream=made.stream, arena=None)
    with pytest.raises(InternalError, match="needs"):
        binding.enqueue(64, profile=None, stream=made.stream, arena=made.arena(1024))
    made.run(binding, 64, arena)


def test_an_arena_that_tensorrt_refuses_is_never_taken_for_set(bench):
    """TensorRT returns nothing then, and would go on in the arena of before, beside what runs there."""
    made = bench()
    (binding, arena), other = made.ready(), made.arena()
    made.run(binding, 4, arena)
    shifted = SimpleNamespace(address=other.address + 64, nbytes=other.nbytes)
    said = r"set_device_memory\(0x.* failed.*must be aligned to 256 bytes"
    for _ in range(2):
        with pytest.raises(ExecutionError, match=said):
            binding.enqueue(4, profile=None, stream=made.stream, arena=shifted)
    made.run(binding, 4, other)


def test_two_threads_in_one_context(bench):
    made = bench()
    binding, arena = made.ready()
    inside, go = threading.Event(), threading.Event()
    made.run(binding, 4, arena)
    handle = made.stream.handle

    class Held:
        """A stream that blocks when its handle is read."""

        is_capturing = False

        @property
        def handle(self):
            inside.set()
            assert go.wait(WAIT_S)
            return handle

    thread = threading.Thread(
        target=binding.enqueue, args=(4,), kwargs={"profile": None, "stream": Held(), "arena": arena}
    )
    thread.start()
    assert inside.wait(WAIT_S)
    with pytest.raises(InternalError, match="two threads"):
        binding.enqueue(4, profile=None, stream=made.stream, arena=arena)
    go.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert made.finish() is None


def test_a_violation_comes_through_as_it_is():
    """A violation is our own bug, and must not look like a failure of the model."""
    made = Bench()
    context = made.create_context()
    binding, arena = made.bind(context), made.arena()
    foreign = HostDevice(in_place="never", threads=1)
    stream = foreign.create_stream()
    stream.handle = 999_999
    with pytest.raises(ViolationError):
        binding.enqueue(4, profile=None, stream=stream, arena=arena)
    made.run(binding, 4, arena)
    context.close()
    assert stream.close(WAIT_S)
    made.close()


def test_capturing_and_replaying(bench):
    made = bench()
    binding, arena = made.ready()
    made.stream.begin_capture()
    with pytest.raises(InternalError, match="not run with them before"):
        binding.enqueue(8, profile=None, stream=made.stream, arena=arena)
    made.stream.end_capture()
    made.run(binding, 8, arena)
    made.stream.begin_capture()
    binding.enqueue(8, profile=None, stream=made.stream, arena=arena)
    graph = made.stream.end_capture()
    for seed in range(5):
        made.fill(binding, seed)
        graph.launch(stream=made.stream)
        assert made.finish() is None
        made.check(binding, 8)
    made.run(binding, 9, arena)
    graph.close()


def test_an_engine_that_cannot_be_captured(bench):
    made = bench(EngineSpec(capturable=False))
    binding, arena = made.ready()
    made.run(binding, 8, arena)
    made.stream.begin_capture()
    with pytest.raises(ExecutionError, match="capturing"):
        binding.enqueue(8, profile=None, stream=made.stream, arena=arena)
    made.stream.end_capture()
    made.run(binding, 8, arena)


def test_whatever_raises_when_it_is_closed_the_rest_is_closed_too(bench, monkeypatch):
    made = bench(EngineSpec(aux_streams=2))
    context = made.create_context()
    closed = []

    def close(self, timeout_s):
        closed.append(self)
        raise DeviceError("no")

    with monkeypatch.context() as patched:
        patched.setattr(HostStream, "close", close)
        with pytest.raises(DeviceError, match="no"):
            context.close()
    assert len(closed) == 2
    assert "contexts=0" in repr(made.model)


DATA = EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),), data_dependent=True)


def test_outputs_whose_shape_depends_on_the_data(bench):
    made = bench(DATA)
    assert [str(spec) for spec in made.model.outputs] == [
        "output: float32[rows, input.1]",
        "positives: float32[rows, positives.1]",
    ]
    assert not made.model.capabilities.is_capturable
    context = made.create_context()
    arena = made.arena()
    bindings = {length: made.bind(context, input_1=length) for length in (1, 5, 32)}
    for seed, (length, rows) in enumerate([(5, 3), (32, 64)]):
        made.run(bindings[length], rows, arena, seed)
    blocks = list(made.model._loaded.memory._blocks)
    for seed, (length, rows) in enumerate([(1, 1), (5, 3), (32, 2)]):
        made.run(bindings[length], rows, arena, seed)
    assert list(made.model._loaded.memory._blocks) == blocks, "memory is kept from batch to batch"
    context.close()
    assert made.model.memory_statistics().blocks == 1


def test_an_output_that_is_empty(bench):
    made = bench(DATA)
    context = made.create_context()
    binding = made.bind(context, input_1=5)
    for memory in binding.inputs:
        memory.array[...] = 100  # The sign changes an odd number of times on the way, so none is positive.
    binding.enqueue(4, profile=None, stream=made.stream, arena=made.arena())
    assert made.finish() is None
    assert made.check(binding, 4)["positives"].size in (0, 20)


def test_unbound_outputs_belong_to_the_caller(bench):
    made = bench(DATA)
    binding, arena = made.ready(input_1=5)
    kept = made.run(binding, 4, arena, 1)["positives"]
    copy = kept.copy()
    made.run(binding, 4, arena, 2)
    np.testing.assert_array_equal(kept, copy)


def test_each_batchs_output_is_taken_once(bench):
    """Otherwise a batch without an output would be answered with the rows of the batch before."""
    made = bench(DATA)
    binding, arena = made.ready(input_1=5)
    for _ in range(2):
        made.run(binding, 4, arena)
        with pytest.raises(ExecutionError, match="no batch was enqueued for it"):
            binding.unbound_outputs(4)


WRONG_SHAPES = {
    "fewer rows": lambda rows, longest: (rows - 1, longest),
    "more rows": lambda rows, longest: (rows + 1, longest),
    "another rank": lambda rows, longest: (rows, longest, 1),
    "more than was reserved": lambda rows, longest: (rows, 1000),
    "not known": lambda rows, longest: (rows, -1),
}


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
def test_a_reported_shape_that_cannot_be_the_batchs(bench, monkeypatch, wrong):
    """Its rows would go to the wrong requests, or come from an earlier batch."""
    made = bench(DATA)
    binding, arena = made.ready(input_1=5)
    made.run(binding, 8, arena)
    tell = IExecutionContext._tell

    def tell_wrong(self, name, shape):
        tell(self, name, WRONG_SHAPES[wrong](*shape) if name == "positives" else shape)

    with monkeypatch.context() as patch:
        patch.setattr(IExecutionContext, "_tell", tell_wrong)
        with pytest.raises(ExecutionError, match="positives"):
            binding.enqueue(4, profile=None, stream=made.stream, arena=arena)
    assert made.finish() is None
    with pytest.raises(ExecutionError, match="no batch was enqueued for it"):
        binding.unbound_outputs(4)
    made.run(binding, 4, arena)


def test_memory_for_an_output_that_is_refused_in_the_middle_of_an_enqueue(bench):
    """The batch is on its stream all the same, and the next one on the context is right."""
    made = bench(DATA)
    binding, arena = made.ready(input_1=32)
    made.run(binding, 1, arena)
    held = made.model.memory_statistics().held_nbytes
    made.model._loaded.memory._budget = held + 1024
    made.fill(binding, seed=3)
    with pytest.raises(DeviceMemoryError, match=r"execute_async_v3.*exceed the budget"):
        binding.enqueue(64, profile=None, stream=made.stream, arena=arena)
    with pytest.raises(ExecutionError, match="no batch was enqueued for it"):
        binding.unbound_outputs(64)
    assert made.finish() is None
    made.run(binding, 2, arena)


def test_outputs_whose_shape_depends_on_the_data_are_not_captured(bench):
    """A graph runs without reporting a shape, so what was reported for an earlier batch would be read."""
    made = bench(DATA)
    binding, arena = made.ready(input_1=5)
    made.run(binding, 4, arena)
    made.stream.begin_capture()
    with pytest.raises(InternalError, match="does not report the shape of 'positives'"):
        binding.enqueue(4, profile=None, stream=made.stream, arena=arena)
    made.stream.end_capture().close()


class FarBuffer:
    """Host memory that pretends to be out of the host's sight."""

    is_host_visible = False

    def __init__(self, buffer):
        self._buffer = buffer
        self.address, self.nbytes, self.array = buffer.address, buffer.nbytes, self.refuse

    def refuse(self, *args):
        raise AssertionError("the host does not see this memory")

    def close(self):
        self._buffer.close()


class FarStream:
    """A stream that records copies, and makes them between the wrapped buffers."""

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
    binding, arena = made.ready(input_1=7)
    stream = FarStream(made.stream)
    for seed, rows in enumerate((3, 64, 5)):
        made.fill(binding, seed)
        binding.enqueue(rows, profile=None, stream=stream, arena=arena)
        assert made.finish() is None
        positives = made.check(binding, rows)["positives"]
        assert stream.copied[-1] == positives.nbytes, "the bytes that there are, not the most there could be"


def test_auxiliary_streams(bench, spied):
    made = bench(EngineSpec(aux_streams=2))
    binding, arena = made.ready()
    for seed in range(3):
        made.run(binding, 40, arena, seed)
    assert spied[-1].take().count("set_aux_streams") == 3


def test_a_context_that_cannot_be_configured_is_given_back(bench, monkeypatch):
    made = bench(EngineSpec(persistent_nbytes=1000))

    def wrong(self, name):
        self._report_usage("IExecutionContext::setNvtxVerbosity", "condition: verbosity")

    monkeypatch.setattr(made.trt.IExecutionContext, "name", property(lambda self: "", wrong))
    with pytest.raises(ExecutionError, match="setNvtxVerbosity"):
        made.model.create_context(made.device)
    assert "contexts=0" in repr(made.model)


def test_outputs_that_are_not_what_was_found_at_opening(bench, monkeypatch):
    """A batch that would write beyond its bound memory is not enqueued."""
    made = bench(EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),)))
    context = made.create_context()
    binding = made.bind(context, input_1=5)
    trt = context._trt
    shape_of_output = trt.get_tensor_shape

    def longer(name):
        rows, length = tuple(shape_of_output(name))
        return made.trt.Dims((rows, length + 1))

    monkeypatch.setattr(trt, "get_tensor_shape", longer)
    with pytest.raises(ExecutionError, match=r"has shape \(4, 6\)"):
        binding.enqueue(4, profile=None, stream=made.stream, arena=made.arena())
    monkeypatch.undo()
    made.run(binding, 4, made.arena())


def test_what_fails_on_a_device_without_memory_fails_for_that(bench, monkeypatch):
    """TensorRT 8.6 says "Cask" and nothing of memory, when an enqueue finds none."""
    made = bench()
    binding, arena = made.ready()
    made.trt.fail_next("enqueue")
    figures = MemoryFigures(free_nbytes=1 << 20, total_nbytes=80 << 30, held_nbytes=0)
    with monkeypatch.context() as patched:
        patched.setattr(made.device, "memory", lambda: figures)
        with pytest.raises(DeviceMemoryError, match="execute_async_v3"):
            made.run(binding, 4, arena)
    made.run(binding, 4, arena)
    made.trt.fail_next("enqueue")
    with pytest.raises(ExecutionError, match="execute_async_v3"):
        made.run(binding, 4, arena)
