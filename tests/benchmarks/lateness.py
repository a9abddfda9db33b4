"""How late does the load generator come to a request, and what does it cost? The target answers at once.

One process sends an open loop of Poisson arrivals, with each way of waiting in turn.
"""

from functools import partial

import numpy as np
import uvloop

from asynctrt import loadtest
from asynctrt._util import clock
from asynctrt._util.process import calm_gc
from asynctrt.loadtest.arrivals import LoadProfile, Schedule
from tests.benchmarks.common import arguments, in_turn, median, save, show, spread
from tests.loadtest.support import Target

RATES = (1_000, 5_000, 20_000, 50_000)


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
    found = np.percentile(late, (50, 99), method="inverted_cdf") / 1e3
    return {
        "late_p50_us": float(found[0]),
        "late_p99_us": float(found[1]),
        "cores": 1.0,
        "rate": len(due) / seconds,
    }


async def measure(pacing, rate, seconds):
    target = IdleTarget()
    target.kind = {"adaptive": "http", "timer": "function"}[pacing]
    report = await loadtest.run(target, rate=rate, seconds=seconds, warmup=0.2, samples=1, seed=1)
    (run,) = report.runs
    assert not run.void, run.void
    late = {f"late_{name}_us": value * 1e3 for name, value in run.lateness.items()}
    return {**late, "cores": run.generator_cores, "rate": run.throughput}


def main():
    options = arguments(__doc__, seconds=3.0, repeats=5)
    cases = [(pacing, rate) for rate in RATES for pacing in ("adaptive", "timer")]
    runs = {case: partial(lambda case: uvloop.run(measure(*case, options.seconds)), case) for case in cases}
    for rate in RATES:
        runs["a bare loop", rate] = partial(bare, rate, options.seconds)
    # As the child processes of the command do.
    calm_gc()
    results = in_turn(runs, options.repeats, "lateness")
    lines, figures = [], {}
    for (pacing, rate), done in results.items():
        names = [name for name in done[0] if all(name in one for one in done)]
        figures[f"{pacing}, {rate}/s"] = {
            "median": {name: median(done, name) for name in names},
            "runs": done,
        }
        lines.append(
            (
                f"{pacing}, {rate:,}/s",
                f"{median(done, 'late_p50_us'):.2f}",
                f"{median(done, 'late_p99_us'):.1f}",
                spread(done, "late_p99_us"),
                f"{median(done, 'cores'):.2f}",
            )
        )
    show("Lateness in µs, an idle target", ("", "p50", "p99", "p99 least to most", "cores"), lines)
    save(options.json, "lateness of the load generator", figures)


if __name__ == "__main__":
    main()
