"""Batches that were captured and are launched again, on the host device."""

import gc

import pytest

from asynctrt.testing import LatchDevice
from tests.doubles.support import MODIFICATIONS, Bench, rows, set_the_same, two_profiles, wait
from tests.doubles.tensorrt import EngineSpec, ViolationError


def captured(bench, user, stream):
    if isinstance(bench.device, LatchDevice):
        bench.device.open()
    user.run(stream)  # What the first batch after a change does cannot be captured.
    if isinstance(bench.device, LatchDevice):
        bench.device.shut()
    stream.begin_capture()
    assert user.context.execute_async_v3(stream.handle)
    return stream.end_capture()


def put(user, array):
    """New values at the addresses that were captured."""
    user.arrays = {"input": array}
    user.kept[0].array(array.dtype, array.shape, 0)[:] = array


@pytest.mark.parametrize("modify", MODIFICATIONS.values(), ids=MODIFICATIONS)
def test_a_graph_whose_context_was_modified(modify):
    bench = Bench(two_profiles())
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    before = captured(bench, user, stream)
    before.launch(stream=stream)
    assert wait(bench.device, stream) is None
    user.check()
    written = user.outputs["output"].array(user.arrays["input"].dtype, (8, 16), 0)
    written[:] = 7
    modify(user, stream)
    assert wait(bench.device, stream) is None
    assert bench.trt.violations() == ()
    before.launch(stream=stream)
    error = wait(bench.device, stream)
    assert isinstance(error, ViolationError)
    said = f"of {user.context.name}, whose execution context was modified after the capture"
    assert said in str(error)
    assert bench.trt.violations() == (str(error),)
    # It did not touch memory that may be somebody else's by now.
    assert (written == 7).all()
    with pytest.raises(ViolationError, match="modified after the capture"):
        user.context.infer_shapes()
    user.context.infer_shapes()
    bench.close()


@pytest.mark.parametrize("has_allocator", [False, True])
def test_what_is_no_modification_of_a_context(has_allocator):
    bench = Bench(two_profiles())
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    if has_allocator:
        MODIFICATIONS["an output allocator"](user, stream)
    graph = captured(bench, user, stream)
    if has_allocator:
        user.outputs["output"] = user.allocators["output"].buffer
    for seed in range(3):
        set_the_same(user, stream)
        # A shape that is refused is not set.
        assert not user.context.set_input_shape("input", (65, 16))
        with pytest.raises(RuntimeError):
            user.context.set_optimization_profile_async(2, stream.handle)
        assert user.context.set_input_shape("input", (8, 16))
        put(user, rows(8, 16, seed=seed))
        user.run(stream)
        user.check()
        put(user, rows(8, 16, seed=seed + 10))
        graph.launch(stream=stream)
        assert wait(bench.device, stream) is None
        user.check()
    assert bench.trt.violations() == ()
    bench.close()


def test_two_launches_of_graphs_in_one_arena_at_once():
    device = LatchDevice()
    bench = Bench(EngineSpec(steps=2), device=device)
    one = bench.user().give(rows(8, 16, seed=1))
    two = bench.user(arena=one.arena).give(rows(8, 16, seed=2))
    first, second = bench.stream(), bench.stream()
    graphs = captured(bench, one, first), captured(bench, two, second)
    graphs[0].launch(stream=first)
    # In the middle of the first graph the second one runs.
    operations = list(first._operations)
    first._operations.clear()
    first._operations.extend(operations[:2])
    device.release()
    graphs[1].launch(stream=second)
    done = device.create_event()
    second.record(done)
    device.release()
    assert isinstance(done.error, ViolationError)
    assert "is executing in it" in bench.trt.violations()[0]
    for operation in operations[2:]:
        operation()
    device.open()
    bench.close()


def test_a_context_that_is_destroyed_while_its_graph_is_in_flight():
    device = LatchDevice()
    bench = Bench(device=device)
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    graph = captured(bench, user, stream)
    graph.launch(stream=stream)
    operations = list(stream._operations)
    stream._operations.clear()
    stream._operations.extend(operations[:2])
    device.release()
    user.context = None
    gc.collect()
    assert "was destroyed while batch" in bench.trt.violations()[0]
    for operation in operations[2:]:
        operation()
    device.open()
    bench.close()
