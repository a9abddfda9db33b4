"""Contexts of the double: settings, refusals and violations."""

import gc
from contextlib import contextmanager

import pytest

from asynctrt.testing import LatchDevice
from tests.doubles.support import rows, two_profiles, wait
from tests.doubles.tensorrt import EngineSpec, ViolationError

TWO_PROFILES = (
    {"input": ((1, 16), (2, 16), (4, 16))},
    {"input": ((1, 16), (16, 16), (64, 16))},
)


@contextmanager
def violated(bench, match):
    """Check that a call raises, and that this is remembered."""
    before = len(bench.trt.violations())
    with pytest.raises(ViolationError, match=match):
        yield
    assert len(bench.trt.violations()) == before + 1


def test_a_profile_is_not_switched_while_a_batch_is_pending(bench):
    """Not on the batch's own stream either: the library asks for it, and looks at nothing."""
    made = bench(two_profiles(), device=LatchDevice())
    user, stream = made.user().give(rows(4, 16)), made.stream()
    assert user.context.execute_async_v3(stream.handle)
    assert user.context.set_optimization_profile_async(0, stream.handle), "which it has already"
    with violated(made, "its profile is switched while batch .* is pending"):
        user.context.set_optimization_profile_async(1, stream.handle)
    made.device.open()
    assert wait(made.device, stream) is None
    assert user.context.set_optimization_profile_async(1, stream.handle)
    # A switch that is pending is in order with the next one on its stream.
    made.device.shut()
    for index in (0, 1):
        assert user.context.set_optimization_profile_async(index, stream.handle)
    made.device.open()


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [
        ("reallocate_output_async", lambda *_: None, "returned None, of which the bindings complain"),
        ("reallocate_output_async", lambda *_: 128, "which is not aligned to 256"),
        ("reallocate_output_async", lambda: 0, "of 'positives' raised TypeError"),
        ("notify_shape", lambda: 0, "notify_shape of 'positives' raised TypeError"),
    ],
)
def test_an_output_allocator_of_which_nobody_hears(bench, method, does, said):
    made = bench(EngineSpec(data_dependent=True))
    user, stream = made.user().give(rows(4, 16)), made.stream()
    setattr(type(user.allocators["positives"]), method, does)
    with violated(made, said):
        user.context.execute_async_v3(stream.handle)
    assert wait(made.device, stream) is None


def test_an_enqueue_without_an_output_allocator(bench):
    made = bench(EngineSpec(data_dependent=True))
    user = made.user().give(rows(4, 16))
    spare = made.device.allocate(1 << 12)
    user.context.set_output_allocator("positives", None)
    user.context.set_tensor_address("positives", spare.address)
    with violated(made, "without an output allocator for 'positives'"):
        user.context.execute_async_v3(made.stream().handle)


def test_an_output_allocator_that_is_gone(bench):
    made = bench(EngineSpec(data_dependent=True))
    user = made.user().give(rows(4, 16))
    user.allocators.clear()
    gc.collect()
    with violated(made, "output allocator of 'positives' was destroyed"):
        user.context.execute_async_v3(made.stream().handle)


def test_enqueue_memory_that_is_too_small(bench):
    made = bench(EngineSpec(profiles=TWO_PROFILES))
    user = made.user()
    small, large = (made.engine.get_device_memory_size_for_profile_v2(index) for index in (0, 1))
    user.context.set_device_memory(user.arena.address, small - 256)
    assert f"too small. Provided {small - 256}, but expected at least {small}" in made.recorder.last()[1]
    user.context.set_device_memory(0, large)
    assert "Cannot set memory to nullptr" in made.recorder.last()[1]
    user.give(rows(4, 16)).run()  # In the memory that it had.
    user.check()
    user.context.set_device_memory(user.arena.address, large - 256)
    stream = made.stream()
    assert user.context.set_optimization_profile_async(1, stream.handle)
    user.give(rows(64, 16))
    with violated(made, f"executes with {large - 256} bytes of enqueue memory, but needs {large}"):
        user.context.execute_async_v3(stream.handle)


def test_enqueue_memory_without_a_size(bench):
    made = bench()
    context = made.user().context
    with violated(made, "use set_device_memory"):
        context.device_memory = 1 << 20


def test_memory_that_overlaps(bench):
    made = bench()
    user = made.user().give(rows(4, 16))
    address = user.context.get_tensor_address("input")
    user.context.set_tensor_address("output", address)
    with violated(made, "overlap in memory"):
        user.context.execute_async_v3(made.stream().handle)
    for offset in (256, user.arena.nbytes - 256):  # All of the memory that was given, however few rows.
        user.context.set_tensor_address("output", user.arena.address + offset)
        with violated(made, "the enqueue memory and 'output' overlap"):
            user.context.execute_async_v3(made.stream().handle)


def test_a_stream_of_nobody(bench):
    made = bench()
    user = made.user().give(rows(4, 16))
    for handle in (0, 987_654):
        with violated(made, f"no stream of .* has the handle {handle}"):
            user.context.execute_async_v3(handle)
        with violated(made, f"no stream of .* has the handle {handle}"):
            user.context.set_optimization_profile_async(0, handle)
        with violated(made, f"no stream of .* has the handle {handle}"):
            user.context.set_aux_streams([handle])


def test_auxiliary_streams_that_are_not_all_different(bench):
    made = bench(EngineSpec(aux_streams=2))
    user, stream = made.user().give(rows(4, 16)), made.stream()
    with violated(made, "not all different"):
        user.context.set_aux_streams([stream.handle, stream.handle])
    user.context.set_aux_streams([stream.handle])
    with violated(made, "both its main stream and an auxiliary one"):
        user.context.execute_async_v3(stream.handle)


def test_an_enqueue_while_another_is_pending_on_another_stream(bench):
    made = bench(device=LatchDevice())
    user = made.user().give(rows(4, 16))
    first, second = made.stream(), made.stream()
    assert user.context.execute_async_v3(first.handle)
    with violated(made, f"executes on stream {second.handle} while batch .* is pending on stream"):
        user.context.execute_async_v3(second.handle)
    with violated(made, "its profile is switched on stream"):
        user.context.set_optimization_profile_async(0, second.handle)
    made.device.open()
    assert wait(made.device, first) is None
    assert user.context.execute_async_v3(second.handle)
    assert wait(made.device, second) is None


def test_a_context_that_is_destroyed_while_its_batch_is_in_flight(bench):
    made = bench(device=LatchDevice())
    user, stream = made.user().give(rows(4, 16)), made.stream()
    assert user.context.execute_async_v3(stream.handle)
    user.context = None
    gc.collect()
    assert "was destroyed while batch" in made.trt.violations()[0]
    with pytest.raises(ViolationError, match="was destroyed while batch"):
        made.engine.create_execution_context()
    # It is raised once.
    assert made.engine.create_execution_context()
    made.device.open()


def test_a_context_that_is_destroyed_when_its_batch_is_through(bench):
    made = bench()
    user = made.user().give(rows(4, 16))
    user.run()
    user.context = user.engine = made.engine = None
    gc.collect()
    assert made.trt.violations() == ()
    assert made.allocator.held == {}


def test_to_ask_for_a_profile_of_another_context_crashes_with_tensorrt_8(bench):
    made = bench(start=False, version="8.6.1.6")
    engine = made.load(EngineSpec(shares_profiles=False), version="8.6.1.6")
    _first, second = (engine.create_execution_context() for _ in range(2))
    with pytest.raises(ViolationError, match="refused a profile"):
        second.set_optimization_profile_async(0, made.stream().handle)
