"""Sessions: what is opened for a run and kept for the next, stopping, intervals that are narrow enough."""

import asyncio

import pytest

import asynctrt
from asynctrt.errors import OptionsError
from asynctrt.loadtest.session import RUN_ONLY, SETTING_NAMES, LoadCase, LoadSession
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import TargetSpec
from asynctrt.options import Options
from tests.helpers import WAIT_S, until
from tests.loadtest.support import Target, at_once
from tests.models import double_model, double_onnx

pytestmark = pytest.mark.anyio

QUICK = LoadSettings(callers=2, seconds=0.25, warmup=0.0)


def case(target, settings=QUICK):
    return LoadCase(target, settings, "a case", {})


def test_values_go_to_settings_or_options():
    base = case(TargetSpec("model.onnx", options=Options(contexts=2)))
    changed = base.with_values({"rate": 50, "max_rows": 8})
    assert (changed.settings.rate, changed.settings.callers) == (50, None)
    assert changed.target.options == Options(contexts=2, max_rows=8)
    assert changed.parameters == {"rate": 50, "max_rows": 8}
    assert changed.with_values({"callers": 3}).settings.rate is None
    assert base.target.options == Options(contexts=2)


@pytest.mark.parametrize(
    ("target", "values", "says"),
    [
        (TargetSpec("model.onnx"), {"max_row": 8}, "did you mean 'max_rows'"),
        (TargetSpec("model.onnx"), {"max_rows": 0}, "max_rows must be a whole number"),
        (TargetSpec("model.onnx"), {"rate": 0}, "must be above 0"),
        (TargetSpec("http://here"), {"max_rows": 8}, "cannot set"),
        ("an engine", {"max_rows": 8}, "cannot set"),
    ],
)
def test_values_that_are_impossible(target, values, says):
    with pytest.raises(OptionsError, match=says):
        case(target).with_values(values)


def test_settings_that_need_nothing_new_are_settings():
    # What is sent, and by whom, needs new samples or processes.
    others = {"rows", "dims", "inputs", "samples", "expect", "processes", "seed"}
    assert set(SETTING_NAMES) == RUN_ONLY | others
    assert not RUN_ONLY & others


async def test_what_was_opened_stays_for_runs_that_only_send_differently(tmp_path):
    spec = TargetSpec(str(double_onnx(tmp_path / "double.onnx")))
    async with LoadSession(apart=False, watch=None) as session:
        base = case(spec)
        await session.run(base)
        (first,) = session._opened.values()
        await session.run(base.with_values({"rate": 100}))
        assert list(session._opened.values()) == [first]
        await session.run(base.with_values({"max_rows": 2}))
        await session.run(base)
        assert len(session._opened) == 2  # Two configurations in turn: neither is opened again.
        assert first in session._opened.values()
        await session.run(base.with_values({"max_rows": 3}))
        assert len(session._opened) == 2
        engines = [sender.target._engine for sender, _ in session._opened.values()]
    assert [run.label for run in session.runs] == ["a case", "rate=100", "max_rows=2", "a case", "max_rows=3"]
    assert all(engine.statistics().state == "closed" for engine in engines)


async def test_it_is_stopped_while_it_runs_and_does_nothing_more():
    target = Target(at_once)
    async with LoadSession(apart=False, watch=None) as session, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(
            session.run(case(target, LoadSettings(rate=500, seconds=600, warmup=0.0)))
        )
        await until(lambda: target.requests > 200)
        assert session.is_running
        session.stop()
        run = await running
        assert not run.complete
        assert run.answered > 100
        assert await session.run(case(target)) is None
    assert session.runs == [run]


async def test_a_long_run_keeps_a_bounded_number_of_windows(monkeypatch):
    """They are merged in pairs, and nothing is lost or counted twice."""
    monkeypatch.setattr("asynctrt.loadtest.session.WINDOWS_HELD_MAX", 4)
    monkeypatch.setattr("asynctrt.loadtest.plans.WINDOW_S", 0.01)
    monkeypatch.setattr("asynctrt.loadtest.runner.EMIT_NS", 50_000_000)
    async with LoadSession(apart=False, watch=None) as session:
        run = await session.run(case(Target(at_once), LoadSettings(rate=1000, seconds=0.5, warmup=0.0)))
    assert len(session.progress.windows) <= 4
    assert run.requests == run.answered == sum(moment.answered for moment in run.moments) > 300
    assert sum(moment.seconds for moment in run.moments) == pytest.approx(0.5)
    assert run.throughput == pytest.approx(run.answered / 0.5, rel=0.02)


@pytest.mark.tier2
async def test_what_goes_on_is_told():
    seen = []

    def watch(progress):
        numbers = [number for number in progress.windows if number >= 0]
        seen.append((progress.number, progress.label, progress.seconds, len(numbers)))

    async with asynctrt.open(double_model()) as engine, LoadSession(apart=False, watch=watch) as session:
        await session.run(case(engine, LoadSettings(rate=300, seconds=0.5, warmup=0.25)))
        await session.run(case(engine, LoadSettings(rate=300, seconds=0.5, warmup=0.25)))
    assert {number for number, *_ in seen} == {1, 2}
    assert seen[0][1:3] == ("a case", 0.75)
    assert max(count for *_, count in seen) >= 2
