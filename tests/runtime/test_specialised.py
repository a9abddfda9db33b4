"""Contexts that are told the sizes of a shape: what they compute, what they hold, and when there are none."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from asynctrt._util.cancellation import Cancellation
from asynctrt.devices.host import HostDevice, HostGraph
from asynctrt.errors import DeviceError, DeviceMemoryError, ExecutionError, ModelError, UsageError
from asynctrt.runtime.specialised import Builder, Deadline, NoGainError, named
from asynctrt.scheduling.key import BatchKey
from tests.backends.onnx_sessions import SpecialisedSessions, in_place
from tests.models import detector_onnx, node, save, sequence_onnx, unnamed_output_onnx
from tests.runtime.support import WAIT_S, make_batch, make_pool, make_request

SHAPE = (("height", 32), ("width", 64))
SIZES = (1, 2, 4)


@pytest.fixture
def device():
    with_memory = in_place()
    yield with_memory
    assert with_memory.memory().held_nbytes == 0
    with_memory.close()


def model_of(tmp_path, **settings):
    return SpecialisedSessions(detector_onnx(tmp_path / "detector.onnx"), **settings)


def build(device, model, *, captures=True, sizes=SIZES, cancellation=None, one_by_one=True, in_turn=False):
    builder = Builder(device, model, 2, captures=captures)
    builder.in_turn = in_turn
    given = {"one_by_one": one_by_one, "cancellation": cancellation or Cancellation()}
    try:
        return builder.build(SHAPE, sizes, **given)
    finally:
        builder.close()


LENGTH = BatchKey((("length", 3),))


def adopting(model, device, contexts):
    """Return a pool whose contexts share what was built for rows of a length."""
    pool = make_pool(model, device, contexts=contexts)
    builder = Builder(device, model, contexts, captures=True)
    builder.in_turn = True
    pool.adopt(builder.build(LENGTH.shape, SIZES, one_by_one=True, cancellation=Cancellation()))
    builder.close()
    return pool


@pytest.mark.parametrize(("one_by_one", "in_turn"), [(True, False), (False, False), (False, True)])
def test_each_size_is_captured_beside_each_context(tmp_path, device, one_by_one, in_turn):
    model = model_of(tmp_path)
    made = build(device, model, one_by_one=one_by_one, in_turn=in_turn)
    told = made.statistics
    assert (told.shape, told.batch_sizes, told.is_captured) == ("height=32 width=64", SIZES, True)
    assert (set(told.before_ns), set(told.after_ns)) == ({1, 4}, set(SIZES))
    assert min(*told.before_ns.values(), *told.after_ns.values(), told.built_ns) > 0
    assert [sorted(site.captured) for site in made.sites] == [[1, 2, 4]] * 2
    assert model.alive == (3 if in_turn else 2 * 3), "what was told nothing is closed"
    assert model.changes == 2, "the largest size shows the answers, and the smallest how long it took"
    for site in made.sites:
        staging = site.slab.inputs[0]
        assert np.ptp(staging, axis=(1, 2, 3)).min() > 0, "valid rows are everywhere"
        rows = np.random.default_rng(1).random((2, 3, 32, 64), np.float32)
        site.slab.inputs[0][:2] = rows
        site.slab.put_in(site.stream, 2)
        site.captured[2].graph.launch(stream=site.stream)
        site.slab.put_out(site.stream, 2)
        alone = ort.InferenceSession(str(model.path), providers=["CPUExecutionProvider"])
        expected = alone.run(None, {"images": rows})[0]
        np.testing.assert_allclose(site.slab.outputs["output0"][:2], expected, rtol=1e-4, atol=1e-5)
    made.close()
    assert model.alive == 0


def test_without_graphs_batches_are_put_on_the_device_call_by_call_if_changes_take_long(tmp_path, device):
    model = model_of(tmp_path, ways=("waits",), change_s=0.01)
    made = build(device, model)
    assert (made.statistics.batch_sizes, made.statistics.is_captured) == (SIZES, False)
    site = made.sites[1]
    site.slab.inputs[0][...] = 0.5
    site.slab.put_in(site.stream, 4)
    stream = device.create_stream()
    site.captured[4].graph.launch(stream=stream)
    site.slab.put_out(stream, 4)
    assert np.ptp(site.slab.outputs["output0"][:4], axis=0).max() < 1e-5
    stream.close(1)
    made.close()
    assert model.alive == 0


@pytest.mark.parametrize("settings", [{"captures": False}, {"captures": True}])
def test_nothing_is_kept_if_it_would_not_be_faster(tmp_path, device, settings):
    model = model_of(tmp_path, ways=("waits",), batch_s=0.03)  # Far longer than anything holds one up.
    with pytest.raises(NoGainError, match="cannot be captured"):
        build(device, model, **settings)
    assert model.alive == 0


def test_an_output_whose_shape_depends_on_the_data(tmp_path, device):
    path = save(
        tmp_path / "found.onnx",
        [
            node("ReduceMax", "input", "most", axes=[0], keepdims=0),
            node("NonZero", "most", "where"),
            node("Squeeze", "where first", "which"),
            node("Gather", "input which", "output", axis=1),
        ],
        [("input", TensorProto.FLOAT, ["batch", "length"])],
        [("output", TensorProto.FLOAT, ["batch", "found"])],
        [("first", np.array([0]))],
    )
    model = SpecialisedSessions(path)
    builder = Builder(device, model, 2, captures=True)
    with pytest.raises(NoGainError, match="depends on the data"):
        builder.build((("length", 3),), SIZES, one_by_one=True, cancellation=Cancellation())
    assert model.alive == 0


@pytest.mark.parametrize(
    ("ways", "error", "said"),
    [
        (("refused",), ModelError, "not loaded"),
        (("good", "good", "refused"), ModelError, "not loaded"),
        (("good", "good", "full"), DeviceMemoryError, "no room"),
        (("good", "wrong"), ExecutionError, "does not compute what the model does"),
        (("good",) * 5 + ("wrong",), ExecutionError, "does not compute what the model does"),
    ],
)
def test_a_build_that_fails_leaves_nothing(tmp_path, device, ways, error, said):
    """Whatever the number of contexts that there were by then."""
    model = model_of(tmp_path, ways=ways, change_s=0.01)
    with pytest.raises((error, NoGainError), match=said):
        build(device, model)
    assert model.alive == 0


def test_a_stream_that_cannot_be_created_leaves_no_other(tmp_path, device, monkeypatch):
    create, made = device.create_stream, []

    def create_stream():
        if len(made) == 2:  # One for the reference, and one for the first context.
            raise DeviceError("no more streams")
        made.append(create())
        return made[-1]

    monkeypatch.setattr(device, "create_stream", create_stream)
    with pytest.raises(DeviceError, match="no more streams"):
        build(device, model_of(tmp_path))
    assert all(stream._closed for stream in made)


def test_as_many_sizes_as_fit(tmp_path, device):
    model = model_of(tmp_path, ways=("good",) * 4 + ("full",) + ("good",) * 100)
    made = build(device, model, sizes=(1, 2, 3, 4))
    assert made.statistics.batch_sizes == (2, 4)
    made.close()


@pytest.mark.parametrize("make", [Cancellation, lambda: Deadline(60)])
def test_a_build_that_is_cancelled_leaves_nothing(tmp_path, device, make):
    cancellation = make()
    model = model_of(tmp_path, held=lambda: model.told == 3 and cancellation.cancel())
    with pytest.raises(UsageError):
        build(device, model, cancellation=cancellation)
    assert model.alive == 0
    assert model.told == 3


def test_a_deadline_cancels_itself():
    assert Deadline(0).is_cancelled
    assert Deadline(0).is_over
    later = Deadline(60)
    assert not later.is_cancelled
    later.cancel()
    assert (later.is_cancelled, later.is_over) == (True, False)


def test_the_sizes_of_outputs_follow_from_those_of_inputs(tmp_path, device):
    model = SpecialisedSessions(unnamed_output_onnx(tmp_path / "joined.onnx"))
    stream = device.create_stream()
    context = model.create_context_for(device, stream, {"length": 5}, 2)
    assert context.told_sizes() == {"joined_length": 10}
    context.close()
    stream.close(1)


def test_the_name_of_a_shape():
    assert named(SHAPE) == "height=32 width=64"


def test_batches_that_were_staged_before_or_after_a_change_are_right(tmp_path, device):
    """Their rows stay where they were put, which is where they have to be computed."""
    model = SpecialisedSessions(sequence_onnx(tmp_path / "sequence.onnx"))
    key = BatchKey((("length", 3),))
    pool = make_pool(model, device, contexts=2)
    pooled = pool.contexts[1]

    def staged(value):
        request = make_request(np.full((2, 3), value, np.float32), key=key)
        source = pool.source(make_batch(request, key=key, context=1))
        source.stage()
        return source

    def run(source, value):
        pooled.enqueue(source, pooled.untimed)
        assert pooled.untimed.copied_out.synchronize(WAIT_S)
        np.testing.assert_array_equal(source.slab.outputs["doubled"][:2], np.full((2, 3), 2 * value))
        return sum(len(session.runs) for session in model.sessions)

    before = staged(1)
    builder = Builder(device, model, 2, captures=True)
    made = builder.build(key.shape, SIZES, one_by_one=True, cancellation=Cancellation())
    ran = sum(len(session.runs) for session in model.sessions)
    pool.adopt(made)
    assert pool.missing_nbytes(before.batch) == 0
    assert run(before, 1) == ran + 1
    assert run(staged(2), 2) == ran + 1, "it was replayed"
    after = staged(3)
    assert pool.release(key.shape) is made
    assert run(after, 3) == ran + 2
    assert run(staged(4), 4) == ran + 3
    made.close()
    pool.adopt(builder.build(key.shape, SIZES, one_by_one=True, cancellation=Cancellation()))
    assert pool.close(WAIT_S) == 0
    assert model.alive == 1, "what was told nothing serves all shapes"
    builder.close()
    assert model.alive == 0


@pytest.mark.parametrize("hangs", [False, True])
def test_what_contexts_share_ends_after_every_graph(tmp_path, device, monkeypatch, hangs):
    """Ending a session frees what its graphs read and write, and needs the stream that it works on."""
    ended, close = [], HostGraph.close
    monkeypatch.setattr(HostGraph, "close", lambda graph: (ended.append("graph"), close(graph)))

    class Noting(SpecialisedSessions):
        def load_session(self, device, stream, sizes):
            session = super().load_session(device, stream, sizes)
            end = session.close
            session.close = lambda: (ended.append("session" if not stream._closed else "late"), end())
            return session

    pool = adopting(Noting(sequence_onnx(tmp_path / "sequence.onnx")), device, 3)
    ended.clear()
    if hangs:
        pool.contexts[1].comes_to_rest = lambda timeout_s: False
        assert pool.close(0.01) == 1
        assert ended == [], "a GPU keeps what is closed while work hangs"
        del pool.contexts[1].comes_to_rest
    assert pool.close(WAIT_S) == 0
    assert ended == ["graph"] * 9 + ["session"] * 6


class Guarding(HostDevice):
    """A device that frees nothing while work on it may run forever, like a GPU."""

    def __init__(self):
        super().__init__(in_place="always", unified=False)
        self.hanging = set()

    def abandon(self, stream):
        self.hanging.add(stream)

    def ended(self, stream):
        self.hanging.discard(stream)


@pytest.mark.parametrize("hanging", [1, 2])
def test_what_was_kept_for_batches_that_hung_is_released_once_they_have_ended(tmp_path, hanging):
    """What is closed while other work hangs is never released on a GPU: that would wait for the work."""
    device = Guarding()

    class Kept(SpecialisedSessions):
        def load_session(self, device, stream, sizes):
            session = super().load_session(device, stream, sizes)
            end = session.close
            session.close = lambda: None if device.hanging else end()
            return session

    model = Kept(sequence_onnx(tmp_path / "sequence.onnx"))
    pool = adopting(model, device, 2)
    hung = pool.contexts[:hanging]
    for context in hung:
        context.comes_to_rest = lambda timeout_s: False
    assert pool.close(0.01) == hanging
    assert len(device.hanging) == hanging
    for context in hung:
        del context.comes_to_rest
    assert pool.close(WAIT_S) == 0
    assert model.alive == 0
    assert device.memory().held_nbytes == 0


def test_what_contexts_share_is_not_used_behind_a_batch_that_hangs(tmp_path, device):
    model = SpecialisedSessions(sequence_onnx(tmp_path / "sequence.onnx"))
    pool = adopting(model, device, 2)

    def run(context):
        """Run a batch, and return how many batches ran call by call so far."""
        request = make_request(np.full((2, 3), context, np.float32), key=LENGTH)
        source = pool.source(make_batch(request, key=LENGTH, context=context))
        source.stage()
        pooled = pool.contexts[context]
        pooled.enqueue(source, pooled.untimed)
        assert pooled.untimed.copied_out.synchronize(WAIT_S)
        np.testing.assert_array_equal(source.slab.outputs["doubled"][:2], np.full((2, 3), 2 * context))
        return sum(len(session.runs) for session in model.sessions)

    ran = run(0)
    assert run(1) == run(0) == ran, "they were replayed"
    pool.contexts[0].stream.is_abandoned = True
    assert run(1) == ran + 1
    pool.contexts[0].stream.is_abandoned = False
    assert run(1) == ran + 1
    assert pool.close(WAIT_S) == 0
    assert model.alive == 0


def test_what_other_shapes_hold_counts(tmp_path, device):
    """All of them together may hold half of what was free at first."""
    model = model_of(tmp_path)
    builder = Builder(device, model, 2, captures=True)
    share_nbytes = device.memory().room_nbytes // 2
    given = {"one_by_one": True, "cancellation": Cancellation()}
    with pytest.raises(DeviceMemoryError, match="left to shapes with separate contexts"):
        builder.build(SHAPE, SIZES, held_nbytes=share_nbytes - 1000, **given)
    assert model.alive == 0
    builder.build(SHAPE, SIZES, held_nbytes=share_nbytes - (1 << 30), **given).close()
    builder.close()
