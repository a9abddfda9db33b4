"""Sending from processes of their own: orders and windows, Ctrl-C, a process that dies."""

import asyncio
import multiprocessing
import os
import signal
from contextlib import asynccontextmanager

import pytest

from asynctrt import loadtest
from asynctrt.errors import ModelNotFoundError, TargetError
from asynctrt.loadtest.plans import make_plan
from asynctrt.loadtest.processes import Fleet
from asynctrt.loadtest.recorder import merge, total
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import TargetSpec
from tests.helpers import WAIT_S, until
from tests.loadtest.support import sample
from tests.models import double_onnx
from tests.serving.support import serving

pytestmark = pytest.mark.anyio

QUICK = LoadSettings(rate=300, seconds=0.5, warmup=0.0)


@pytest.fixture
def spec(tmp_path):
    return TargetSpec(str(double_onnx(tmp_path / "double.onnx")))


async def run(fleet, settings):
    windows, plans = {}, []
    async with asyncio.timeout(WAIT_S):
        plan, outcomes = await fleet.perform(settings, lambda more: merge(windows, more), plans.append)
    assert plans == [plan]
    return plan, outcomes, total(windows.values())


@asynccontextmanager
async def under_way(spec, **settings):
    """A process, and a run of it that has begun and is long."""
    settings = LoadSettings(seconds=600, **settings)
    async with asyncio.timeout(WAIT_S), Fleet.open(spec, settings) as fleet:
        seen = []
        running = asyncio.create_task(fleet.perform(settings, seen.append, lambda _: None))
        await until(lambda: seen)
        yield fleet, running


@pytest.mark.tier2
async def test_two_runs_of_one_process(spec):
    async with asyncio.timeout(WAIT_S):
        async with Fleet.open(spec, QUICK) as fleet:
            pids = _pids()
            for rate in (200, 400):
                settings = LoadSettings(rate=rate, seconds=0.5, warmup=0.0)
                plan, outcomes, whole = await run(fleet, settings)
                due = sum(
                    len(block.due_ns) for block in make_plan(settings, [sample()], 10).schedule.blocks()
                )
                assert whole.sent == whole.answered == due
                assert outcomes[0].batches.requests == due
                assert plan.measured_ns == 5 * 10**8
            assert _pids() == pids
    assert not any(_is_alive(pid) for pid in pids)


async def test_the_counts_of_a_server_are_those_of_the_report():
    async with serving() as server, asyncio.timeout(WAIT_S):
        for settings in ({"callers": 16}, {"rate": 2000}):
            report = await loadtest.run(
                f"{server.http_url}/v2/models/double", seconds=0.4, warmup=0.0, **settings
            )
            (run,) = report.runs
            assert run.batches.requests == run.answered == sum(moment.answered for moment in run.moments)


async def test_processes_share_the_load_of_a_server():
    async with serving() as server, asyncio.timeout(WAIT_S):
        settings = LoadSettings(rate=300, seconds=0.5, warmup=0.0, processes=2)
        spec = TargetSpec(f"{server.http_url}/v2/models/double")
        async with Fleet.open(spec, settings) as fleet:
            assert len(set(_pids())) == 2
            _, outcomes, whole = await run(fleet, settings)
    due = sum(len(block.due_ns) for block in make_plan(settings, [sample()], 10).schedule.blocks())
    assert whole.sent == whole.answered == due
    assert [outcome.exhausted for outcome in outcomes] == [True, True]
    assert abs(outcomes[0].answered - outcomes[1].answered) <= 1


async def test_what_a_process_says_is_wrong_is_raised_here():
    with pytest.raises(ModelNotFoundError, match=r"nothing\.onnx"):
        async with Fleet.open(TargetSpec("nothing.onnx"), QUICK):
            pass


@pytest.mark.tier2
async def test_a_process_that_dies_is_said(spec):
    async with under_way(spec, rate=100) as (_, running):
        os.kill(_pids()[0], signal.SIGKILL)
        with pytest.raises(TargetError, match="ended unexpectedly, with exit status -9"):
            await running


@pytest.mark.tier2
async def test_a_run_is_stopped(spec):
    async with under_way(spec, rate=100, warmup=0.0) as (fleet, running):
        fleet.stop()
        _, (outcome,) = await running
        assert not outcome.exhausted
        # It takes the next order.
        _, (outcome,), _ = await run(fleet, QUICK)
        assert outcome.exhausted


@pytest.mark.tier2
async def test_a_run_that_is_stopped_before_it_has_begun_ends_all_the_same(spec):
    async with asyncio.timeout(WAIT_S), Fleet.open(spec, QUICK) as fleet:
        running = asyncio.create_task(
            fleet.perform(LoadSettings(rate=100, seconds=600), lambda _: None, lambda _: None)
        )
        await asyncio.sleep(0)  # The order is given.
        fleet.stop()
        _, (outcome,) = await running
        assert not outcome.exhausted
        _, (outcome,), _ = await run(fleet, QUICK)
        assert outcome.exhausted


@pytest.mark.tier2
async def test_closing_in_the_middle_of_a_run_ends_the_process(spec):
    async with under_way(spec, callers=2, warmup=0.0) as (_, running):
        (pid,) = _pids()
        running.cancel()
    assert not _is_alive(pid)


@pytest.mark.tier2
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_what_ends_the_group_is_not_for_the_processes_that_send(spec, number):
    """A terminal, ``timeout`` and a CI runner send their signals to every process of the group."""
    async with asyncio.timeout(WAIT_S):
        async with Fleet.open(spec, QUICK) as fleet:
            os.kill(_pids()[0], number)
            _, (outcome,), whole = await run(fleet, QUICK)
    assert outcome.exhausted
    assert whole.answered


def _pids():
    return [process.pid for process in multiprocessing.active_children()]


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
