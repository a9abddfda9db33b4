"""The strict double on a GPU: kernels that are compiled at run time, and checks that they make themselves."""

import gc

import ml_dtypes
import numpy as np
import pytest

from tests.doubles.support import (
    MODIFICATIONS,
    Bench,
    rows,
    same,
    set_the_same,
    two_profiles,
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"])
def test_every_type_is_computed_bit_by_bit_as_by_numpy(bench, dtype):
    made = bench(EngineSpec(inputs=(TensorIO("input", dtype, (-1, 37)),), steps=11))
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if np.dtype(numpy_dtype).kind in "iu":
        x = np.random.default_rng(0).integers(0, 127, (64, 37)).astype(numpy_dtype)
    else:
        x = np.random.default_rng(0).standard_normal((64, 37), np.float32).astype(numpy_dtype)
    user = made.user().give(x)
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


@pytest.mark.parametrize("modify", MODIFICATIONS.values(), ids=MODIFICATIONS)
def test_a_graph_whose_context_was_modified(bench, device, modify):
    made = bench(two_profiles())
    user, stream = made.user().give(rows(8, 16)), made.stream()
    graph = captured(user, stream)
    graph.launch(stream=stream)
    assert wait(device, stream) is None
    user.check()
    modify(user, stream)
    assert wait(device, stream) is None
    assert made.trt.violations() == ()
    graph.launch(stream=stream)
    assert wait(device, stream) is None
    (said,) = made.trt.violations()
    assert f"of {user.context.name}, whose execution context was modified after the capture" in said
    with pytest.raises(ViolationError, match="modified after the capture"):
        user.context.infer_shapes()
    graph.close()


def test_what_is_no_modification_of_a_context(bench, device):
    made = bench(two_profiles())
    user, stream = made.user().give(rows(8, 16)), made.stream()
    graph = captured(user, stream)
    for _ in range(3):
        set_the_same(user, stream)
        user.run(stream)
        user.check()
        graph.launch(stream=stream)
        assert wait(device, stream) is None
        user.check()
    assert made.trt.violations() == ()
    user.give(rows(3, 16)).run(stream)
    user.check()
    # Captured anew, it is right again; the first one stays wrong.
    other = captured(user, stream)
    other.launch(stream=stream)
    assert wait(device, stream) is None
    assert made.trt.violations() == ()
    graph.launch(stream=stream)
    assert wait(device, stream) is None
    assert "modified after the capture" in made.trt.violations()[0]
    graph.close()
    other.close()


def test_a_context_that_is_gone_is_told_from_the_one_that_has_its_place_now(bench, device, monkeypatch):
    from tests.doubles.tensorrt import cuda

    monkeypatch.setattr(cuda, "SLOTS", 1)
    made = bench()
    stream = made.stream()
    users = [made.user().give(rows(8, 16, seed=1))]
    graphs = [captured(users[0], stream)]
    users[0].context = None
    gc.collect()
    users.append(made.user().give(rows(8, 16, seed=2)))
    graphs.append(captured(users[1], stream))
    graphs[1].launch(stream=stream)
    assert wait(device, stream) is None
    users[1].check()
    assert made.trt.violations() == ()
    graphs[0].launch(stream=stream)
    assert wait(device, stream) is None
    assert "whose execution context is gone" in made.trt.violations()[0]
    for graph in graphs:
        graph.close()


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


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_a_data_dependent_output(bench, dtype):
    made = bench(EngineSpec(inputs=(TensorIO("input", dtype, (-1, 29)),), data_dependent=True))
    user, stream = made.user(), made.stream()
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    for count in (2, 64, 5):
        user.give(rows(count, 29, seed=count).astype(numpy_dtype))
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
