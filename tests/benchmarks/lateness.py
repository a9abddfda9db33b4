"""How late does the load generator come to a request, and what does it cost? The target answers at once.

One process sends an open loop of Poisson arrivals: to an idle target with each way of waiting in turn, and to
a bare HTTP server. ``rate`` is what it reached; a run that reached less than was asked is void.
"""

import subprocess
import sys
import time
from functools import partial

import numpy as np

from asynctrt import loadtest
from asynctrt._util import clock
from asynctrt._util.process import calm_gc
from asynctrt.loadtest.arrivals import LoadProfile, Schedule
from tests.benchmarks.common import arguments, in_turn, medians, report, save
from tests.loadtest.support import Target

RATES = (5_000, 20_000, 50_000)
PORT = 8391


class IdleTarget(Target):
    """Answer everything at once, and record nothing."""

    in_flight_max = 1 << 20

    def start(self, prepared):
        future = self.loop.create_future()
        future.set_result(None)
        return future


def bare(rate, seconds):
    """Measure the lower bound: a loop that only looks at the clock."""
    profile = LoadProfile.parse(f"{rate:f}", seconds)
    schedule = Schedule("poisson", profile, 1, 1)
    due = np.concatenate([block.due_ns for block in schedule.blocks()]) + clock.now_ns()
    late = []
    for one in due.tolist():
        while (now_ns := clock.now_ns()) < one:
            pass
        late.append(now_ns - one)
    found = np.percentile(late, (50, 99, 100), method="inverted_cdf") / 1e3
    return {
        **dict(zip(("late_p50_us", "late_p99_us", "late_max_us"), found.tolist(), strict=True)),
        "cores": 1.0,
        "rate": len(due) / seconds,
    }


async def measure(pacing, rate, seconds):
    if pacing == "HTTP":
        target = f"http://127.0.0.1:{PORT}/v2/models/noop/infer"
        report = await loadtest.run(target, rate=rate, seconds=seconds, warmup=0.2, seed=1, method="GET")
    else:
        target = IdleTarget()
        target.kind = {"adaptive": "http", "timer": "function"}[pacing]
        report = await loadtest.run(target, rate=rate, seconds=seconds, warmup=0.2, samples=1, seed=1)
        assert not report.void, report.void
    (run,) = report.runs
    late = {f"late_{name}_us": value * 1e3 for name, value in run.lateness.items()}
    return {**late, "cores": run.generator_cores, "rate": run.throughput}


def main():
    options = arguments(__doc__, seconds=3.0, repeats=5)
    cases = [(pacing, rate) for rate in RATES for pacing in ("adaptive", "timer", "HTTP")]
    runs = {case: partial(measure, *case, options.seconds) for case in cases}
    for rate in RATES:
        runs["a bare loop", rate] = partial(bare, rate, options.seconds)
    # As the child processes of the command do.
    calm_gc()
    server = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.bare_http", str(PORT)])
    try:
        time.sleep(1.0)
        results = in_turn(runs, options.repeats, "lateness")
    finally:
        server.kill()
        server.wait()
    results = {f"{pacing}, {rate}/s": done for (pacing, rate), done in results.items()}
    formats = {
        "late_p50_us": ".2f",
        "late_p99_us": ".1f",
        "late_max_us": ",.0f",
        "cores": ".2f",
        "rate": ",.0f",
    }
    report("Lateness in µs, an idle target", results, **formats)
    figures = {name: {"median": medians(done), "runs": done} for name, done in results.items()}
    save(options.json, "lateness of the load generator", figures)


if __name__ == "__main__":
    main()
