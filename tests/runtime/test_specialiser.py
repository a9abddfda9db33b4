"""Shapes that recur get separate contexts while an engine serves, and no request waits for it."""

import asyncio
import logging
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

import asynctrt
from asynctrt.core import local
from asynctrt.devices.host import HostDevice
from asynctrt.engine import STREAM_END_S
from asynctrt.errors import OptionsError
from asynctrt.runtime import calibration, specialised, specialiser
from asynctrt.runtime.specialiser import OFTEN, SHAPES_MAX, WINDOW, RecurringShapes
from tests.backends.onnx_sessions import CapturableSessions, HostSessions, SpecialisedSessions, in_place
from tests.benchmarks.lengths import encoder_onnx
from tests.helpers import WAIT_S
from tests.models import detector_onnx, double_onnx, unnamed_output_onnx

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path):
    return unnamed_output_onnx(tmp_path / "joined.onnx")


@asynccontextmanager
async def opened(model, *, left=0, **settings):
    """An engine. When it is closed, ``left`` sessions of its model are left."""
    settings = {"contexts": 2, "max_rows": 4, "graphs": (1, 2, 4), "lanes": 2, **settings}
    try:
        async with asynctrt.open(model, device=in_place(), **settings) as engine:
            yield engine
    finally:
        assert model.alive == left


async def check(engine, length, rows=1, value=1.0):
    """Send rows of a length, and check the answer."""
    sent = np.full((rows, length), value, np.float32)
    answer = await engine.infer(sent)
    np.testing.assert_array_equal(answer["joined"], np.concatenate([sent, sent], axis=1))


async def until(engine, condition, length=3):
    """Send rows until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.gather(*(check(engine, length, 1 + n % 3, n) for n in range(4)))
            await asyncio.sleep(0)


def shapes_of(engine):
    return {one.shape for one in engine.statistics().specialised}


async def test_a_shape_that_recurs_runs_in_contexts_of_its_own(path, caplog):
    caplog.set_level(logging.INFO)
    model = SpecialisedSessions(path)
    async with opened(model) as engine:
        general = tuple(model.sessions)
        assert engine.statistics().specialised == ()
        await until(engine, lambda: shapes_of(engine))
        (found,) = engine.statistics().specialised
        assert (found.shape, found.batch_sizes, found.is_captured) == ("length=3", (1, 2, 4), True)
        assert model.alive == 2 + 1 + 2 * 3
        runs = [len(session.runs) for session in general]
        for number in range(40):
            await asyncio.gather(*(check(engine, 3, 1 + n % 4, number + n) for n in range(5)))
        assert [len(session.runs) for session in general] == runs, "all were replayed"
        padded = engine.statistics().rows_padded
        await check(engine, 3, rows=3)
        assert engine.statistics().rows_padded == padded + 1
        await check(engine, 7, rows=3)
        assert sum(len(session.runs) for session in general) == sum(runs) + 1, "another shape is not"
        assert sum("a shape that recurs" in record.getMessage() for record in caplog.records) == 1


async def test_where_batches_compute_in_turn_contexts_share_what_was_built(path):
    model = SpecialisedSessions(path)
    async with opened(model, contexts=4, lanes=1) as engine:
        await until(engine, lambda: shapes_of(engine))
        assert model.alive == 4 + 1 + 3
        for number in range(40):
            await asyncio.gather(*(check(engine, 3, 1 + n % 4, number + n) for n in range(9)))


async def test_until_then_batches_have_few_sizes(path):
    """So that no more of them are planned anew than need be."""
    async with opened(SpecialisedSessions(path), max_rows=6, graphs="auto") as engine:
        assert engine.statistics().batch_sizes == (1, 2, 4, 6)
        await check(engine, 3, rows=3)
        assert engine.statistics().rows_padded == 1
    model = SpecialisedSessions(path)
    model.capabilities = replace(model.capabilities, changes_slowly=False)
    async with opened(model) as engine:
        assert engine.statistics().batch_sizes == ()


@pytest.mark.parametrize("fixed", [{}, {"free_dimension_overrides": {"length": 3}}], ids=["varying", "fixed"])
async def test_without_graphs_contexts_keep_their_sizes_if_changes_take_long(path, fixed):
    """Arrivals at random would have a batch of another size planned each time."""
    model = SpecialisedSessions(path, change_s=0.05, **fixed)
    model.capabilities = replace(model.capabilities, is_specialisable=False)
    async with opened(model, max_rows=16, graphs="auto") as engine:
        assert engine.statistics().batch_sizes == (1, 2, 4, 8, 16)
        changes, batches = model.changes, engine.statistics().batches
        for number in range(60):
            await asyncio.gather(*(check(engine, 3, 1, n) for n in range(1 + 7 * number % 16)))
        assert engine.statistics().batches - batches >= 60
        assert model.changes - changes <= 8


async def test_what_only_the_first_batch_of_a_size_takes_is_no_change(path, monkeypatch):
    monkeypatch.setattr(calibration, "BUDGET_NS", 0)  # So that large batches were never run before.
    seen = set()

    class Slow(SpecialisedSessions):
        def load_session(self, device, stream, sizes):
            session = super().load_session(device, stream, sizes)
            put = session.put

            def slow(binding, stream, batch):
                if batch not in seen:
                    seen.add(batch)
                    time.sleep(0.3)
                put(binding, stream, batch)

            session.put = slow
            return session

    async with opened(Slow(path, change_s=0.05), max_rows=16, graphs="auto") as engine:
        assert 0.045 < engine._parts.calibration.change_ns / 1e9 < 0.3


def held(path):
    """Return a model whose contexts are held while they are built, and two events: that, and its end."""
    begun, go = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert go.wait(WAIT_S)

    return SpecialisedSessions(path, held=hold), begun, go


async def test_requests_are_answered_while_contexts_are_built(path):
    model, begun, go = held(path)
    async with opened(model) as engine:
        await until(engine, begun.is_set)
        for number in range(50):
            await check(engine, 3, 1 + number % 4, number)
        assert not shapes_of(engine)
        assert model.told == 1, "one shape is built for at a time"
        go.set()
        await until(engine, lambda: shapes_of(engine))


async def test_an_engine_that_is_closed_while_it_builds_leaves_nothing(path):
    model, begun, go = held(path)
    async with opened(model) as engine:
        await until(engine, begun.is_set)
        asyncio.get_running_loop().call_later(0.05, go.set)
    assert not [thread for thread in threading.enumerate() if "specialise" in thread.name]


async def test_an_engine_that_is_closed_waits_for_what_is_being_built(path, monkeypatch):
    """Its model may be closed then, and the memory that batches of zeros read would be freed."""
    begun, go, least_ns = threading.Event(), threading.Event(), specialised.least_ns

    def held_ns(*args):
        begun.set()
        assert go.wait(WAIT_S)
        return least_ns(*args)

    monkeypatch.setattr(specialised, "least_ns", held_ns)
    model = SpecialisedSessions(path)
    async with opened(model) as engine:
        await until(engine, begun.is_set)
        asyncio.get_running_loop().call_later(4 * STREAM_END_S, go.set)


async def test_a_model_is_not_closed_while_anything_is_built_of_it(path, monkeypatch, caplog):
    monkeypatch.setattr(local, "BUILD_END_S", 0.01)
    model, begun, go = held(path)
    async with opened(model, left=1) as engine:  # The reference.
        closed = threading.Event()
        engine._parts = replace(engine._parts, owned=(SimpleNamespace(close=closed.set),))
        await until(engine, begun.is_set)
    assert not closed.is_set()
    assert "1 contexts were abandoned" in caplog.text
    go.set()
    assert await asyncio.to_thread(closed.wait, WAIT_S)
    assert model.alive == 0


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("refused", "it is not loaded"),
        ("full", "there is no room"),
        ("wrong", "does not compute what the model does"),
        ("waits", "cannot be captured as a CUDA graph"),
    ],
)
async def test_what_cannot_be_built_is_not_tried_for_ever(path, way, said, caplog):
    caplog.set_level(logging.INFO)
    # Enough good ones for the shapes of outputs to be known.
    ways = ("good", way, *[way] * 3) if way == "wrong" else (way,)
    times = {"wrong": {"change_s": 0.003}, "waits": {"batch_s": 0.01}}.get(way, {})
    model = SpecialisedSessions(path, ways=ways, **times)
    async with opened(model) as engine:
        length = 2
        async with asyncio.timeout(WAIT_S):
            while "nor will other shapes" not in caplog.text:
                length += 1
                for _ in range(2 * OFTEN):
                    await check(engine, length)
        told = model.told
        for _ in range(3 * OFTEN):
            await check(engine, length + 1)
        assert model.told == told
        assert engine.statistics().specialised == ()
        assert engine.statistics().failed == 0
        found = [text for text in caplog.messages if "have no separate contexts" in text]
        assert 1 <= len(found) <= 3
        assert said in found[0]
        assert "nor will other shapes" in found[-1]
        assert model.alive == 2


async def test_shapes_are_bounded_and_what_is_rare_gives_way(path):
    model = SpecialisedSessions(path)
    async with opened(model) as engine:
        for length in range(1, SHAPES_MAX + 1):
            await until(engine, lambda length=length: f"length={length}" in shapes_of(engine), length)
        held = engine._device.memory().held_nbytes
        await until(engine, lambda: "length=9" in shapes_of(engine), length=9)
        assert len(shapes_of(engine)) == SHAPES_MAX
        await until(engine, lambda: model.alive == 2 + 1 + SHAPES_MAX * 2 * 3, length=9)
        assert engine._device.memory().held_nbytes < 2 * held, "what gave way was freed"
        for length in range(1, 12):
            await asyncio.gather(*(check(engine, length, 1 + n % 4, n) for n in range(6)))


async def test_shapes_are_built_one_after_the_other_but_take_another_s_place_only_after_a_rest(
    path, monkeypatch
):
    monkeypatch.setattr(specialiser, "REST", 10_000)
    model = SpecialisedSessions(path)
    async with opened(model) as engine:
        for length in range(1, SHAPES_MAX + 1):
            await until(engine, lambda length=length: f"length={length}" in shapes_of(engine), length)
        told = model.told
        for _ in range(20 * OFTEN):
            await check(engine, 9)
        assert model.told == told


async def test_a_rare_shape_gives_way_if_there_is_no_room_for_a_frequent_one(path):
    model = SpecialisedSessions(path, ways=(*["good"] * 6, "full", *["good"] * 6))
    async with opened(model) as engine:
        await until(engine, lambda: shapes_of(engine) == {"length=3"}, length=3)
        await until(engine, lambda: shapes_of(engine) == {"length=4"}, length=4)
        assert model.told == 6 + 1 + 6
        await check(engine, 3)


async def test_a_shape_that_was_refused_is_not_tried_again(path, caplog):
    caplog.set_level(logging.INFO)
    model = SpecialisedSessions(path, ways=("refused", *["good"] * 6))
    async with opened(model) as engine:
        await until(engine, lambda: "have no separate contexts" in caplog.text)
        told = model.told
        for _ in range(2 * OFTEN):
            await check(engine, 3)
        assert model.told == told
        await until(engine, lambda: shapes_of(engine) == {"length=4"}, length=4)


async def test_nothing_is_built_for_shapes_that_are_ever_new(path):
    model = SpecialisedSessions(path)
    async with opened(model) as engine:
        for length in range(1, 300):
            await check(engine, length)
        assert model.told == 0


async def test_shapes_that_are_named_are_ready_when_the_engine_opens(tmp_path):
    model = SpecialisedSessions(detector_onnx(tmp_path / "detector.onnx"))
    shapes = [{"images": (3, 32, 32)}, {"images": (3, 64, 32)}]
    async with opened(model, onnx={"shapes": shapes}) as engine:
        found = engine.statistics().specialised
        assert [one.shape for one in found] == ["height=32 width=32", "height=64 width=32"]
        ran = len(model.sessions[0].runs) + len(model.sessions[1].runs)
        answer = await engine.infer(np.ones((3, 3, 64, 32), np.float32))
        assert answer["output0"].shape == (3, 6, 8)
        assert len(model.sessions[0].runs) + len(model.sessions[1].runs) == ran


async def test_a_shape_that_is_named_and_cannot_be_built_for_runs_like_any_other(path, caplog):
    model = SpecialisedSessions(path, ways=("refused",))
    async with opened(model, onnx={"shapes": {"tokens": (3,)}}) as engine:
        assert engine.statistics().specialised == ()
        await check(engine, 3)
    assert "it is not loaded" in caplog.text


@pytest.mark.parametrize("shape", [{"tokens": (3, 4)}, {"images": (3,)}])
async def test_a_shape_that_the_model_does_not_take(path, shape):
    model = SpecialisedSessions(path)
    with pytest.raises(OptionsError, match="shapes names"):
        await opened(model, onnx={"shapes": shape}).__aenter__()


async def test_a_model_that_gains_nothing_is_warned_of(tmp_path, caplog):
    model = HostSessions(double_onnx(tmp_path / "double.onnx"))
    async with asynctrt.open(
        model, device=HostDevice(unified=False), onnx={"shapes": {"input": (4,)}}
    ) as engine:
        assert engine.statistics().specialised == ()
    assert caplog.text.count("shapes names shapes") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"batching": "deterministic", "graphs": "auto", "contexts": 1, "lanes": 1},
        {"batching": "off", "graphs": "auto"},
    ],
)
async def test_engines_that_gain_nothing_build_nothing(path, settings):
    model = SpecialisedSessions(path)
    async with opened(model, **settings) as engine:
        for _ in range(3 * OFTEN):
            await check(engine, 3)
        assert model.told == 0


async def test_an_engine_that_knows_its_shapes_builds_nothing_more(tmp_path):
    model = CapturableSessions(double_onnx(tmp_path / "double.onnx"))
    model.capabilities = replace(model.capabilities, is_specialisable=True)
    async with opened(model) as engine:
        assert engine.statistics().graphs == (1, 2, 4)
        before = len(model.sessions)
        for _ in range(3 * OFTEN):
            await engine.infer(np.ones((1, 4), np.float32))
        assert len(model.sessions) == before


async def test_lengths_that_are_padded_get_contexts_of_their_own(tmp_path):
    """And batches of several lengths run there, which tell what they take."""
    path = encoder_onnx(tmp_path / "encoder.onnx", 8)
    alone, rng = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]), np.random.default_rng(0)
    sent = [
        {"input_ids": rng.integers(1, 1000, (1, size)), "attention_mask": np.ones((1, size), np.int64)}
        for size in (9, 12, 16, 17, 20, 32)
    ]
    model = SpecialisedSessions(path)
    async with opened(model) as engine:
        assert "padding sequence changed no answer" in engine.batching.lengths
        async with asyncio.timeout(WAIT_S):
            while shapes_of(engine) != {"sequence=16", "sequence=32"}:
                await asyncio.gather(*map(engine.infer, sent))
        general = [len(session.runs) for session in model.sessions[:2]]
        answers = await asyncio.gather(*map(engine.infer, sent * 3))
        assert [len(session.runs) for session in model.sessions[:2]] == general
        for one, answer in zip(sent * 3, answers, strict=True):
            np.testing.assert_allclose(answer["output"], alone.run(None, one)[0], atol=1e-5)


def noted(recurring, *shapes):
    """Note batches of these shapes, and return which were reported as recurring."""
    return {shape for shape in shapes if recurring.note(shape)}


def test_a_shape_recurs_once_it_has_come_often():
    recurring = RecurringShapes()
    assert not noted(recurring, *["a"] * (OFTEN - 1))
    assert noted(recurring, "a") == {"a"}


def test_shapes_that_are_ever_new_do_not_recur():
    recurring = RecurringShapes()
    assert not noted(recurring, *range(10_000))
    assert len(recurring._counts) <= 2 * WINDOW


def test_a_shape_that_comes_rarely_among_others_does_not_recur():
    """It would not pay off, however often it has come over the years."""
    recurring = RecurringShapes()
    assert not noted(recurring, *[shape for _ in range(1000) for shape in range(40)])


def test_a_shape_that_comes_often_recurs_whatever_comes_beside_it():
    recurring = RecurringShapes()
    sent = [shape for number in range(OFTEN + 4) for shape in ("often", *range(10 * number, 10 * number + 9))]
    assert noted(recurring, *sent) == {"often"}


def test_what_came_long_ago_is_forgotten():
    recurring = RecurringShapes()
    noted(recurring, *["old"] * WINDOW, *["new"] * (12 * WINDOW))
    assert not noted(recurring, "old")
    assert noted(recurring, "new") == {"new"}


def test_the_shape_that_came_last_the_longest_time_ago_gives_way():
    recurring = RecurringShapes()
    noted(recurring, *["a"] * 20, *["b"] * 20, "a", *["new"] * 60)
    assert recurring.victim("new", {"a", "b"}) == "b"
    assert recurring.victim("new", {"a", "b", "never seen"}) == "never seen"


def test_no_shape_gives_way_to_one_that_comes_as_often():
    """Or shapes that take turns would be built for all day."""
    recurring = RecurringShapes()
    noted(recurring, *[shape for _ in range(30) for shape in range(9)])
    assert recurring.victim(8, set(range(8))) is None
