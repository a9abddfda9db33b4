"""Whole load tests: repetitions, sweeps, searches, against targets of known behaviour."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from asynctrt import loadtest
from asynctrt._util import clock
from asynctrt.errors import OptionsError, UsageError
from asynctrt.loadtest.command import exit_status
from asynctrt.loadtest.job import LoadJob, carry_out, make_report
from asynctrt.loadtest.session import LoadSession
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import TargetSpec
from tests.helpers import WAIT_S, until
from tests.loadtest.support import Target, at_once
from tests.models import double_onnx

pytestmark = pytest.mark.anyio

QUICK = {"seconds": 0.25, "warmup": 0.0}


class Busy(Target):
    """Refuses what comes faster than ``capacity`` a second, on the whole since its run began.

    On a busy machine requests come late, and then many at once: that is not the rate which they are sent at.
    """

    def __init__(self, capacity):
        super().__init__()
        self.gap_ns = 1e9 / capacity
        self.began_ns = None
        self.taken = 0

    def start(self, prepared):
        now_ns = clock.now_ns()
        self.began_ns = self.began_ns or now_ns
        future = self.loop.create_future()
        if self.taken > 20 + (now_ns - self.began_ns) / self.gap_ns:
            future.set_exception(OSError("too busy"))
        else:
            self.taken += 1
            future.set_result({})
        return future

    async def batches(self):
        self.began_ns, self.taken = None, 0  # It is asked before each run, and after.
        return await super().batches()


async def test_repetitions_give_intervals():
    report = await loadtest.run(Target(at_once), rate=400, repeats=3, **QUICK)
    assert report.kind == "repeats"
    assert len(report.runs) == 3
    made = report.intervals["throughput"]
    values = [run.throughput for run in report.runs]
    assert made.count == 3
    assert made.mean == pytest.approx(np.mean(values))
    assert made.low <= min(values)
    assert report.figure("throughput") == pytest.approx(np.mean(values))


async def test_a_sweep_is_every_combination(tmp_path):
    path = double_onnx(tmp_path / "double.onnx")
    report = await loadtest.run(path, sweep={"callers": [1, 2], "max_rows": [1, 4]}, **QUICK)
    assert report.kind == "sweep"
    assert [dict(run.parameters) for run in report.runs] == [
        {"callers": 1, "max_rows": 1},
        {"callers": 1, "max_rows": 4},
        {"callers": 2, "max_rows": 1},
        {"callers": 2, "max_rows": 4},
    ]
    assert max(report.runs[2].batches.by_rows) == 1
    assert report.intervals == {}


def test_a_sweep_repeats_in_turns():
    job = LoadJob(TargetSpec("model.onnx"), LoadSettings(repeats=2), {"max_rows": [1, 4]})
    assert [case.parameters["max_rows"] for case in job.cases()] == [1, 4, 1, 4]


@pytest.mark.tier2
async def test_a_search_finds_what_a_target_bears():
    """It refuses beyond 800 a second; a constant rate is refused above that, and not below."""
    capacity = 800
    report = await loadtest.run(
        Busy(capacity),
        search=True,
        slo="errors<1%",
        rate=100,
        arrivals="constant",
        repeats=1,
        **QUICK | {"seconds": 0.5},
    )
    assert report.kind == "search"
    found = report.search
    assert 0.85 * capacity < found.holds <= 1.05 * capacity
    assert found.holds < found.fails < 1.25 * capacity
    rates = [run.parameters["rate"] for run in report.runs]
    assert rates[:4] == [100, 200, 400, 800]


async def test_a_search_that_cannot_judge_its_slo_ends_with_the_reason():
    report = await loadtest.run(Target(at_once), search=True, slo="login:p99<1s", rate=1000, **QUICK)
    *_, run = report.runs
    assert (run.slo, report.search.holds, report.search.fails) == ({}, None, None)
    assert "login" in report.search.why
    assert exit_status(report) == 5


class Behind(LoadSession):
    """A session whose target does not keep up with more than 300/s."""

    async def run(self, case):
        run = await super().run(case)
        run = self.runs[-1] = replace(run, kept=300.0 if run.parameters["rate"] > 300 else None)
        return run


async def test_a_search_asks_that_the_target_keeps_up():
    """A short run ends before its latency has grown beyond a lenient slo."""
    settings = LoadSettings(rate=200, slo="p50<9s", repeats=1, **QUICK)
    async with Behind(apart=False, watch=None) as session:
        report = await carry_out(LoadJob(Target(at_once), settings, search=True), session)
    assert 285 < report.search.holds <= 300 < report.search.fails


class Stopping(LoadSession):
    """A session that ends after its second run; the first is void if ``is_disturbed``."""

    is_disturbed = False

    async def run(self, case):
        run = await super().run(case)
        if len(self.runs) > 1:
            self.stop()
        elif self.is_disturbed:
            self.runs[0] = run = replace(run, void=("disturbed",))
        return run


async def test_a_search_measures_for_as_long_as_its_slo_needs():
    """299 requests are needed for p99, which at 200/s takes longer than what was asked."""
    job = LoadJob(Target(at_once), LoadSettings(rate=200, slo="p99<9s", **QUICK), search=True)
    async with Stopping(apart=False, watch=None) as session:
        report = await carry_out(job, session)
    first, second = report.runs
    assert first.unjudged
    assert second.slo == {"p99<9s": True}
    assert first.parameters == second.parameters == {"rate": 200}


@pytest.mark.parametrize(("repeats", "runs"), [(3, 2), (1, 1)])
async def test_a_search_tries_a_rate_again_if_a_run_is_void(repeats, runs):
    job = LoadJob(
        Target(at_once), LoadSettings(rate=200, slo="errors<1%", repeats=repeats, **QUICK), search=True
    )
    async with Stopping(apart=False, watch=None) as session:
        session.is_disturbed = True
        report = await carry_out(job, session)
    assert [run.parameters["rate"] for run in report.runs] == [200] * runs
    assert exit_status(report) == 4  # Neither has found a rate.


@pytest.mark.tier2
async def test_a_search_without_a_rate_begins_near_what_callers_get():
    report = await loadtest.run(
        Busy(400), search=True, slo="errors<1%", repeats=1, arrivals="constant", **QUICK
    )
    # The 20 requests that it takes beyond its capacity are 80 a second in a quarter of one.
    assert 200 < report.search.holds <= 490
    assert all("rate" in run.parameters for run in report.runs)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"search": True}, "a search needs an slo"),
        ({"search": True, "slo": "p99<1ms", "requests": 50}, "299 requests"),
        ({"search": True, "slo": "p99<1ms", "callers": 2}, "a search varies the rate"),
        ({"search": True, "slo": "p99<1ms", "rate": "1..5"}, "begins at one constant rate"),
        ({"search": True, "slo": "p99<1ms", "sweep": {"rate": [1]}}, "exclude each other"),
        ({"arrivals": "constant"}, "set rate"),
        ({"arrivals": "constant", "callers": 2}, "set rate"),
        ({"dims": "n=3", "inputs": {"x": np.zeros((1, 2))}}, "dims"),
        ({"processes": 2}, "several processes can only send to a server"),
        ({"sweep": {"rate": [100, -1]}}, "not a rate"),
        ({"sweep": {"rat": [100]}}, "did you mean 'rate'"),
        ({"sweep": {"max_rows": [2]}}, "cannot set"),
    ],
)
async def test_what_cannot_be_done_is_said_before_the_first_run(arguments, says):
    target = Target(at_once)
    with pytest.raises(OptionsError, match=says):
        await loadtest.run(target, **arguments)
    assert not target.requests


@pytest.mark.tier2
async def test_what_was_cut_short_is_reported():
    target = Target(at_once)
    job = LoadJob(target, LoadSettings(rate=500, seconds=1.0, warmup=0.0, repeats=50))
    async with LoadSession(apart=False, watch=None) as session, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(carry_out(job, session))
        await until(lambda: len(session.runs) == 1 and target.requests > 800)
        session.stop()
        report = await running
    assert len(report.runs) == 2
    assert [run.complete for run in report.runs] == [True, False]
    assert not report.complete
    assert report.intervals == {}  # Of one whole run there is none.


def test_nothing_at_all_is_no_report():
    with pytest.raises(UsageError, match="before anything was measured"):
        make_report(LoadJob("target", LoadSettings()), [], None)


async def test_the_report_is_json_and_says_what_was_asked(tmp_path):
    path = double_onnx(tmp_path / "double.onnx")
    target = TargetSpec(str(path))
    report = await loadtest.run(target, rate=300, slo="p50<1s", **QUICK)
    report.save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["settings"]["rate"] == 300
    assert content["target"]["where"] == str(path)
    assert content["machine"]["cores"] >= 1
    assert content["runs"][0]["slo"] == {"p50<1s": True}
    job = LoadJob(TargetSpec("http://127.0.0.1/x", token="s3cret", headers=("X: s3cret",)), LoadSettings())
    assert "s3cret" not in make_report(job, report.runs, None).as_text()
