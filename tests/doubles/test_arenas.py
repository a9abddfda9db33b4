"""Two batches in one arena: with an order they give right numbers, without one wrong ones and a violation."""

import threading

import numpy as np
import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.testing import LatchDevice
from tests.doubles.support import WAIT_S, Bench, rows, wait
from tests.doubles.tensorrt import EngineSpec, ViolationError


class Gate:
    """Holds a stream at a certain place until the test opens it."""

    def __init__(self):
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.open.wait(WAIT_S)


def two_users(device, **kwargs):
    bench = Bench(EngineSpec(steps=6, **kwargs), device=device)
    arena = device.allocate(bench.engine.device_memory_size_v2)
    users = [bench.user(arena=arena).give(rows(8, 16, seed=seed)) for seed in (1, 2)]
    return bench, users, [bench.stream(), bench.stream()]


def test_two_batches_that_execute_in_one_arena_at_once():
    """The first is held in the middle, the second runs through: both fail, and the first is wrong too."""
    device = HostDevice(threads=2, in_place="never")
    bench, (one, two), (first, second) = two_users(device)
    gate = Gate()
    # The third launch of the first batch waits: it has entered the arena, and has its first state there.
    launch, launched = first.launch, []

    def launch_slowly(work, *, label, **kw):
        launched.append(label)
        if len(launched) == 3:
            launch(gate, label="gate")
        launch(work, label=label, **kw)

    first.launch = launch_slowly
    assert one.context.execute_async_v3(first.handle)
    assert gate.reached.wait(WAIT_S)
    assert two.context.execute_async_v3(second.handle)
    error = wait(device, second)
    gate.open.set()
    late = wait(device, first)
    assert isinstance(error, ViolationError)
    assert isinstance(late, ViolationError)
    assert "was written to while it executed" in str(late)
    found = bench.trt.violations()
    assert any("two enqueues in one arena" in one and "is executing in it" in one for one in found)
    assert not np.array_equal(one.answers()["output"], bench.spec.expected(one.arrays)["output"])
    with pytest.raises(ViolationError, match="two enqueues in one arena"):
        one.context.infer_shapes()
    bench.close()


def test_two_batches_that_execute_in_the_wrong_order():
    """Both run, one after the other, but nothing says so: it is found because the later one came first."""
    device = LatchDevice()
    bench, (one, two), (first, second) = two_users(device)
    assert one.context.execute_async_v3(first.handle)
    assert two.context.execute_async_v3(second.handle)
    done = device.create_event()
    second.record(done)
    device.release(last=True)
    assert done.query()
    assert isinstance(done.error, ViolationError)
    assert "was enqueued before and did not execute" in bench.trt.violations()[0]
    device.open()
    bench.close()


def test_arenas_that_only_overlap_are_one():
    device = LatchDevice()
    bench = Bench(device=device)
    needed = bench.engine.device_memory_size_v2
    arena = device.allocate(2 * needed)
    users = [bench.user(arena=arena).give(rows(64, 16, seed=seed)) for seed in (1, 2, 3)]
    for user, offset in zip(users, (0, needed - 256, needed), strict=True):
        user.context.set_device_memory(arena.address + offset, needed)
    streams = [bench.stream() for _ in users]
    for user, stream in zip(users, streams, strict=True):
        assert user.context.execute_async_v3(stream.handle)
    # The first and the last have nothing in common; the one between overlaps both.
    device.release()
    device.release(last=True)
    found = bench.trt.violations()
    assert len(found) == 1
    assert "batch 6 " in found[0]
    assert "batch 5 " in found[0]
    device.open()
    bench.close()


def test_arenas_overlap_by_what_was_given_not_by_what_a_batch_needs():
    device = LatchDevice()
    bench = Bench(device=device)
    needed = bench.engine.device_memory_size_v2
    arena = device.allocate(3 * needed)
    users = [bench.user(arena=arena).give(rows(1, 16, seed=seed)) for seed in (1, 2)]
    for user, offset in zip(users, (0, needed), strict=True):
        user.context.set_device_memory(arena.address + offset, 2 * needed)
    streams = [bench.stream() for _ in users]
    for user, stream in zip(users, streams, strict=True):
        assert user.context.execute_async_v3(stream.handle)
    device.release(last=True)
    assert f"+{2 * needed})" in bench.trt.violations()[0]
    device.open()
    bench.close()


@pytest.mark.parametrize("at", [0, -256])
def test_a_write_into_enqueue_memory_that_is_in_use(at):
    device = LatchDevice()
    bench, (user, _), (stream, _) = two_users(device)
    launch, launched = stream.launch, []

    def launch_and_scribble(work, *, label, **kw):
        launched.append(label)
        if len(launched) == 4:
            offset = at % user.arena.nbytes
            launch(lambda: user.arena.array(np.dtype("u1"), (256,), offset).fill(7), label="scribble")
        launch(work, label=label, **kw)

    stream.launch = launch_and_scribble
    assert user.context.execute_async_v3(stream.handle)
    device.open()
    assert isinstance(wait(device, stream), ViolationError)
    assert "was written to while it executed" in bench.trt.violations()[0]
    bench.close()


def test_nothing_usable_stays_behind():
    device = HostDevice()
    bench, (user, _), (stream, _) = two_users(device)
    user.run(stream)
    user.check()
    state = user.arena.array(np.dtype("float32"), (8 * 16,), 256)
    assert np.isnan(state).all()
    user.arena.array(np.dtype("u1"), (user.arena.nbytes,), 0)[:] = 0x5A
    user.run(stream)
    user.check()
    bench.close()
