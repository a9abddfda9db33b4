"""How many requests a second can the load generator send to a no-op engine in its own process, on one core?

Beside it runs the bare closed loop of ``tests.benchmarks.overhead``, which does not take latencies.
"""

import numpy as np
import uvloop

import asynctrt
from asynctrt import loadtest
from asynctrt.devices.host import HostDevice
from tests.benchmarks.common import arguments, in_turn, median, save, show, spread
from tests.benchmarks.overhead import OVERHEAD_DIM, closed_loop, echo_model

CALLERS = (64, 256)
RATE = 200_000


async def bare(callers, seconds):
    async with asynctrt.open(echo_model(), device=HostDevice(in_place="always")) as engine:
        rows = {"input": np.random.default_rng(0).random((1, OVERHEAD_DIM), np.float32)}
        measures, _ = await closed_loop(engine, [rows] * callers, seconds, timed=False)
    return {
        "throughput": measures["requests_per_s"],
        "cores": measures["cpu_us_per_request"] / 1e6 * measures["requests_per_s"],
    }


async def ours(seconds, **settings):
    async with asynctrt.open(echo_model(), device=HostDevice(in_place="always")) as engine:
        report = await loadtest.run(engine, seconds=seconds, warmup=0.3, **settings)
    (run,) = report.runs
    assert not run.errors, run.errors
    # A rate that this machine cannot send ends the run early, and leaves too few requests for p99.
    tails = {"p99_ms": run.latency["p99"]} if "p99" in run.latency else {}
    if "p99" in run.lateness:
        tails["late_p99_us"] = run.lateness["p99"] * 1e3
    return {
        "throughput": run.throughput,
        "cores": run.resources.generator_cores,
        **tails,
    }


def main():
    options = arguments(__doc__, seconds=2.0, repeats=5)
    runs = {}
    for callers in CALLERS:
        runs[f"{callers} callers, a bare loop"] = lambda callers=callers: uvloop.run(
            bare(callers, options.seconds)
        )
        runs[f"{callers} callers, load test"] = lambda callers=callers: uvloop.run(
            ours(options.seconds, callers=callers)
        )
    runs[f"{RATE:,}/s, Poisson"] = lambda: uvloop.run(ours(options.seconds, rate=RATE))
    results = in_turn(runs, options.repeats, "generation")
    lines, figures = [], {}
    for name, done in results.items():
        names = [figure for figure in done[0] if all(figure in one for one in done)]
        figures[name] = {"median": {figure: median(done, figure) for figure in names}, "runs": done}
        lines.append(
            (
                name,
                f"{median(done, 'throughput'):,.0f}",
                spread(done, "throughput"),
                f"{median(done, 'cores'):.2f}",
                f"{median(done, 'p99_ms'):.3f}" if "p99_ms" in names else "",
            )
        )
    show("A no-op engine, float32[16]", ("", "requests/s", "least to most", "cores", "p99 ms"), lines)
    save(options.json, "requests/s that the load generator sends", figures)


if __name__ == "__main__":
    main()
