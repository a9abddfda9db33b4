"""Batches that were captured and are launched again, on the host device."""

import gc

import numpy as np
import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError
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


@pytest.mark.parametrize("aux_streams", [0, 2])
def test_a_graph_computes_with_what_is_there_when_it_is_launched(aux_streams):
    bench = Bench(EngineSpec(aux_streams=aux_streams))
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    user.context.set_aux_streams([bench.stream().handle for _ in range(aux_streams)])
    graph = captured(bench, user, stream)
    for seed in range(5):
        put(user, rows(8, 16, seed=seed))
        graph.launch(stream=stream)
        assert wait(bench.device, stream) is None
        user.check()
    assert bench.trt.violations() == ()
    bench.close()


def test_a_graph_has_nothing_to_do_with_other_contexts_and_their_graphs():
    bench = Bench()
    stream = bench.stream()
    users = [bench.user().give(rows(count, 16, seed=count)) for count in (8, 3, 64)]
    graphs = [captured(bench, user, stream) for user in users[:2]]
    for turn in range(3):
        for user, graph in zip(users, graphs, strict=False):
            put(user, rows(len(user.arrays["input"]), 16, seed=turn))
            graph.launch(stream=stream)
        users[2].give(rows(5 + turn, 16)).run(stream)
        for user in users:
            user.check()
    assert bench.trt.violations() == ()
    bench.close()


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


def test_a_graph_is_captured_anew_after_a_modification():
    bench = Bench()
    user, stream = bench.user().give(rows(8, 16, seed=1)), bench.stream()
    before = captured(bench, user, stream)
    user.give(rows(3, 16, seed=2))
    after = captured(bench, user, stream)
    for seed in range(3):
        put(user, rows(3, 16, seed=seed))
        after.launch(stream=stream)
        assert wait(bench.device, stream) is None
        user.check()
    assert bench.trt.violations() == ()
    before.launch(stream=stream)
    assert isinstance(wait(bench.device, stream), ViolationError)
    bench.close()


@pytest.mark.parametrize("has_allocator", [False, True])
def test_what_is_no_modification_of_a_context(has_allocator):
    bench = Bench(two_profiles())
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    if has_allocator:
        MODIFICATIONS["an output allocator"](user, stream)
    user.context.update_device_memory_size_for_shapes()
    graph = captured(bench, user, stream)
    if has_allocator:
        user.outputs["output"] = user.allocators["output"].buffer
    for seed in range(3):
        set_the_same(user, stream)
        assert user.context.update_device_memory_size_for_shapes() > 0
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


@pytest.mark.parametrize("is_another", [True, False])
def test_another_output_allocator_or_none_is_a_modification(is_another):
    bench = Bench(two_profiles())
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    MODIFICATIONS["an output allocator"](user, stream)
    graph = captured(bench, user, stream)
    if is_another:
        MODIFICATIONS["an output allocator"](user, stream)
    else:
        assert user.context.set_output_allocator("output", None)
    graph.launch(stream=stream)
    assert isinstance(wait(bench.device, stream), ViolationError)
    bench.close()


def test_a_context_that_is_modified_between_the_launch_of_a_graph_and_its_turn():
    """TensorRT leaves the execution of the graph undefined, which comes after its launch."""
    device = LatchDevice()
    bench = Bench(device=device)
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    graph = captured(bench, user, stream)
    graph.launch(stream=stream)
    MODIFICATIONS["another shape"](user, stream)
    device.open()
    assert isinstance(wait(device, stream), ViolationError)
    bench.close()


def test_an_eager_batch_does_not_mind_what_its_context_is_told_after_it():
    device = LatchDevice()
    bench = Bench(two_profiles(), device=device)
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    assert user.context.execute_async_v3(stream.handle)
    for what, modify in MODIFICATIONS.items():
        if what != "another profile":  # That has to wait for the batch.
            modify(user, stream)
    device.open()
    assert wait(device, stream) is None
    user.check()
    assert bench.trt.violations() == ()
    bench.close()


def test_nothing_runs_while_it_is_captured():
    bench = Bench()
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    graph = captured(bench, user, stream)
    put(user, rows(8, 16, seed=7))
    assert wait(bench.device, stream) is None
    with pytest.raises(AssertionError):
        user.check()
    # It is not pending either: another stream may be used.
    user.run(bench.stream())
    user.check()
    graph.close()
    bench.close()


@pytest.mark.parametrize("change", [None, "a shape", "enqueue memory"])
def test_the_first_batch_after_a_change_cannot_be_captured(change):
    bench = Bench()
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    if change is not None:
        user.run(stream)
    if change == "a shape":
        assert user.context.set_input_shape("input", (3, 16))
        assert user.context.set_input_shape("input", (8, 16))
    elif change == "enqueue memory":
        other = bench.device.allocate(bench.engine.device_memory_size_v2)
        user.context.set_device_memory(other.address, other.nbytes)
    stream.begin_capture()
    assert not user.context.execute_async_v3(stream.handle)
    assert "operation not permitted when stream is capturing" in bench.recorder.last()[1]
    stream.end_capture()
    captured(bench, user, stream).close()
    assert bench.trt.violations() == ()
    bench.close()


@pytest.mark.parametrize(
    "spec", [EngineSpec(data_dependent=True), EngineSpec(capturable=False), EngineSpec(waits=True)]
)
def test_what_cannot_be_captured_is_refused(spec):
    bench = Bench(spec)
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    user.run(stream)
    stream.begin_capture()
    assert not user.context.execute_async_v3(stream.handle)
    assert "operation not permitted when stream is capturing" in bench.recorder.last()[1]
    stream.end_capture()
    user.run(stream)
    user.check()
    bench.close()


def test_a_graph_in_an_arena_that_is_in_use():
    device = LatchDevice()
    bench = Bench(device=device)
    one = bench.user().give(rows(8, 16, seed=1))
    two = bench.user(arena=one.arena).give(rows(8, 16, seed=2))
    first, second = bench.stream(), bench.stream()
    graph = captured(bench, one, first)
    assert two.context.execute_async_v3(second.handle)
    graph.launch(stream=first)
    done = device.create_event()
    first.record(done)
    # The graph's turn comes first, though the other was enqueued before: who captured cannot know.
    device.release(last=True)
    assert done.query()
    device.open()
    assert wait(device, second) is None
    two.check()
    one.check()
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


def test_a_graph_whose_context_is_gone():
    bench = Bench()
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    graph = captured(bench, user, stream)
    user.context = None
    gc.collect()
    assert bench.trt.violations() == ()
    graph.launch(stream=stream)
    assert isinstance(wait(bench.device, stream), ViolationError)
    assert "whose execution context is gone" in bench.trt.violations()[0]
    with pytest.raises(ViolationError, match="whose execution context is gone"):
        bench.user()
    bench.close()


def test_a_graph_does_not_write_to_the_memory_of_a_context_that_is_gone():
    bench = Bench()
    user, stream = bench.user(strategy="STATIC").give(rows(8, 16)), bench.stream()
    held = set(bench.allocator.held)
    graph = captured(bench, user, stream)
    own = next(
        bench.allocator.held[address]
        for address in held
        if bench.allocator.held[address].nbytes == bench.engine.device_memory_size_v2
    )
    memory = own.array(np.dtype("u1"), (own.nbytes,), 0)
    user.context = None
    gc.collect()
    assert held - set(bench.allocator.held)
    memory[:] = 7
    graph.launch(stream=stream)
    assert isinstance(wait(bench.device, stream), ViolationError)
    assert (memory == 7).all()
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


def test_failures_hit_the_launches_of_graphs_too():
    bench = Bench(device=HostDevice(threads=2, in_place="never"))
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    graph = captured(bench, user, stream)
    bench.trt.fail_next("illegal-address")
    graph.launch(stream=stream)
    assert isinstance(wait(bench.device, stream), DeviceLostError)
    bench.close()
