"""The strict double on a GPU: kernels that are compiled at run time, and checks that they make themselves."""

import numpy as np
import pytest

from tests.doubles.support import (
    Bench,
    rows,
    same,
    until,
    wait,
)
from tests.doubles.tensorrt import EngineSpec, TensorIO, ViolationError

MS = 1_000_000


@pytest.fixture
def bench(device):
    made = []

    def make(spec=None, **kwargs):
        made.append(Bench(spec, device=device, compute_capability=device.compute_capability, start=False))
        one = made[-1]
        one.engine = one.load(one.spec, compute_capability=device.compute_capability)
        return one

    yield make
    for one in made:
        one.trt.release_hangs()
        one.close()


def test_answers_are_computed_bit_by_bit_as_by_numpy(bench):
    made = bench(EngineSpec(inputs=(TensorIO("input", dims=(-1, 37)),), steps=11))
    user = made.user().give(np.random.default_rng(0).standard_normal((64, 37), np.float32))
    user.run()
    user.check()
    assert made.trt.violations() == ()


def test_two_batches_in_one_arena_at_once(bench, device):
    made = bench(EngineSpec(work_ns=50 * MS, fills_gpu=False))
    arena = device.allocate(made.engine.device_memory_size_v2)
    users = [made.user(arena=arena).give(rows(8, 16, seed=seed)) for seed in (1, 2)]
    streams = [made.stream(), made.stream()]
    for user, stream in zip(users, streams, strict=True):
        assert user.context.execute_async_v3(stream.handle)
    for stream in streams:
        assert wait(device, stream) is None
    found = made.trt.violations()
    assert any("while another batch executes in it" in one for one in found), found
    assert any("was written to while it executed" in one for one in found), found
    with pytest.raises(ViolationError, match="two enqueues in one arena"):
        users[0].context.infer_shapes()


def test_two_batches_in_the_wrong_order(bench, device):
    made = bench()
    arena = device.allocate(made.engine.device_memory_size_v2)
    holder = made.user().give(rows(8, 16))
    users = [made.user(arena=arena).give(rows(8, 16, seed=seed)) for seed in (1, 2)]
    streams = [made.stream() for _ in range(3)]
    made.trt.fail_next("hang")
    assert holder.context.execute_async_v3(streams[2].handle)
    held = device.create_event()
    streams[2].record(held)
    until(lambda: made.trt.executor.pinned.hangs_begun == 1)
    streams[0].wait(held)
    for user, stream in zip(users, streams, strict=False):
        assert user.context.execute_async_v3(stream.handle)
    assert wait(device, streams[1]) is None
    made.trt.release_hangs()
    assert wait(device, streams[0]) is None
    assert "before a batch that was enqueued earlier" in made.trt.violations()[0]


def test_a_write_into_enqueue_memory_that_is_in_use(bench, device):
    made = bench(EngineSpec(work_ns=200 * MS))
    user, stream, other = made.user().give(rows(8, 16)), made.stream(), made.stream()
    scribble = device.allocate_staging(256)
    scribble.array(np.dtype("u1"), (256,), 0)[:] = 7
    assert user.context.execute_async_v3(stream.handle)
    ended = device.create_event()
    stream.record(ended)
    while not ended.query():
        other.copy(user.arena, scribble, offset=0, nbytes=256)
        assert wait(device, other) is None
    assert "was written to while it executed" in made.trt.violations()[0]


def captured(user, stream):
    user.run(stream)  # What the first batch after a change does cannot be captured.
    stream.begin_capture()
    assert user.context.execute_async_v3(stream.handle)
    return stream.end_capture()


def test_two_graphs_in_one_arena_at_once(bench, device):
    made = bench(EngineSpec(work_ns=50 * MS, fills_gpu=False))
    arena = device.allocate(made.engine.device_memory_size_v2)
    graphs, streams = [], []
    users = [made.user(arena=arena).give(rows(8, 16, seed=seed)) for seed in (1, 2)]
    for user in users:
        streams.append(made.stream())
        graphs.append(captured(user, streams[-1]))
    assert made.trt.violations() == ()
    for graph, stream in zip(graphs, streams, strict=True):
        graph.launch(stream=stream)
    for stream in streams:
        assert wait(device, stream) is None
    assert any("two enqueues in one arena" in one for one in made.trt.violations())
    for graph in graphs:
        graph.close()


def test_a_data_dependent_output(bench):
    made = bench(EngineSpec(inputs=(TensorIO("input", dims=(-1, 29)),), data_dependent=True))
    user, stream = made.user(), made.stream()
    for count in (2, 64, 5):
        user.give(rows(count, 29, seed=count))
        same(user.run(stream), made.spec.expected(user.arrays))
    stream.begin_capture()
    assert not user.context.execute_async_v3(stream.handle)
    assert "not permitted when stream is capturing" in made.recorder.last()[1]
    stream.end_capture().close()
    assert made.trt.violations() == ()


def test_profiles_are_switched(bench):
    profiles = ({"input": ((1, 16), (2, 16), (4, 16))}, {"input": ((1, 16), (16, 16), (64, 16))})
    made = bench(EngineSpec(profiles=profiles))
    user, stream, other = made.user(), made.stream(), made.stream()
    made.trt.fail_next("hang")
    user.give(rows(4, 16))
    assert user.context.execute_async_v3(stream.handle)
    with pytest.raises(ViolationError, match="its profile is switched on stream"):
        user.context.set_optimization_profile_async(1, other.handle)
    with pytest.raises(ViolationError, match="executes on stream"):
        user.context.execute_async_v3(other.handle)
    until(lambda: made.trt.executor.pinned.hangs_begun == 1)
    made.trt.release_hangs()
    assert wait(made.device, stream) is None
    assert user.context.set_optimization_profile_async(1, stream.handle)
    user.give(rows(64, 16)).run(stream)
    user.check()


def test_memory_that_the_gpu_cannot_reach(bench):
    made = bench()
    user, stream = made.user().give(rows(8, 16)), made.stream()
    good = user.context.get_tensor_address("input")
    process = np.zeros(1 << 16, np.uint8)
    user.context.set_tensor_address("input", (process.ctypes.data + 255) // 256 * 256)
    with pytest.raises(ViolationError, match="the GPU cannot reach the memory"):
        user.context.execute_async_v3(stream.handle)
    small = made.device.allocate(256)
    user.context.set_tensor_address("input", small.address)
    with pytest.raises(ViolationError, match="its allocation ends after"):
        user.context.execute_async_v3(stream.handle)
    user.context.set_tensor_address("input", good)
    with pytest.raises(ViolationError, match="or that of a default stream"):
        user.context.execute_async_v3(0)
    user.run(stream)
    user.check()
