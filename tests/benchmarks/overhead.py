"""The overhead of the engine: throughput and CPU time of requests to a no-op model.

The model runs on the event loop, on a host device that computes in place and on the default one, and in a
thread, as functions do by default; each under 1, 32 and 256 callers, and under a lone caller with a
configured delay of 2 ms. The cases run in turn, and all are repeated (A B A B ...), so that a machine whose
speed drifts favours none of them.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import numpy as np

import asynctrt
from asynctrt._util import clock
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.options import Options
from asynctrt.tensors import TensorSpec
from tests.benchmarks.common import arguments, console, save, show

WARM_UP_S = 0.15

OVERHEAD_DIM = 16
CALLERS = (1, 32, 256)


@dataclass(slots=True)
class BenchCase:
    """Measure one thing: ``run(seconds)`` returns its figures."""

    name: str
    labels: dict[str, Any]
    run: Callable[[float], Awaitable[dict[str, float]]]
    runs: list[dict[str, float]] = field(default_factory=list)

    def median(self, figure: str) -> float | None:
        """Return the median over the runs so far; ``None`` before the first, or if they lack the figure."""
        values = [run[figure] for run in self.runs if figure in run]
        return statistics.median(values) if values else None

    def spread(self, figure: str) -> tuple[float, float] | None:
        """Return the smallest and the largest value so far."""
        values = [run[figure] for run in self.runs if figure in run]
        return (min(values), max(values)) if values else None


@dataclass(slots=True)
class BenchReport:
    """Hold all cases of one benchmark. It fills while they run."""

    settings: dict[str, Any]
    cases: list[BenchCase]
    repeats: int

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "settings": self.settings,
            "cases": [
                {
                    "name": case.name,
                    **case.labels,
                    "median": {figure: case.median(figure) for figure in case.runs[0]} if case.runs else {},
                    "runs": case.runs,
                }
                for case in self.cases
            ],
        }


def run_cases(report, seconds):
    """Run every case once, then all again, ``report.repeats`` times."""

    async def run():
        for _ in range(report.repeats):
            for case in report.cases:
                case.runs.append(await case.run(seconds))

    with console.status("measuring"):
        anyio.run(run, backend_options={"use_uvloop": True})


def echo_model(run_on="thread"):
    """Return a model that only copies its float32[16] rows."""

    def echo(inputs, outputs):
        outputs["output"][...] = inputs["input"]

    return FunctionModel(
        echo,
        inputs=TensorSpec("input", np.dtype("float32"), (OVERHEAD_DIM,)),
        outputs=TensorSpec("output", np.dtype("float32"), (OVERHEAD_DIM,)),
        run_on=run_on,
    )


def overhead_report(repeats):
    """Return a report, still empty, on the throughput and the CPU time of requests to a no-op model."""
    devices = {
        "immediate": ("always", "loop"),
        "host": ("auto", "loop"),
        "thread": ("auto", "thread"),
    }
    cases = [
        BenchCase(
            f"{device}, {callers} callers" if callers > 1 else f"{device}, a lone caller",
            {"device": device, "callers": callers, "max_delay": 0.0},
            partial(_run_overhead, in_place, run_on, callers, Options()),
        )
        for callers in CALLERS
        for device, (in_place, run_on) in devices.items()
    ]
    cases.append(
        BenchCase(
            "host, a lone caller, max_delay=2 ms",
            {"device": "host", "callers": 1, "max_delay": 0.002},
            partial(_run_overhead, "auto", "loop", 1, Options(max_delay=0.002)),
        )
    )
    return BenchReport({"row": f"float32[{OVERHEAD_DIM}]", "max_rows": 64, "loop": "uvloop"}, cases, repeats)


async def _run_overhead(in_place, run_on, callers, options, seconds):
    device = HostDevice(in_place=in_place)
    async with asynctrt.open(echo_model(run_on), device=device, options=options) as engine:
        rows = {"input": np.random.default_rng(0).random((1, OVERHEAD_DIM), np.float32)}
        measures, _ = await closed_loop(engine, [rows] * callers, seconds, timed=False)
    return measures


async def closed_loop(engine, inputs, seconds, *, timed):
    """Run one caller for each of ``inputs`` in a closed loop, for ``seconds`` after a warm-up.

    :param timed: also take the latency of each request, which reads the clock twice.
    :returns: the figures, and the latencies in ns.
    """
    is_over = False
    is_measured = False
    latencies_ns = []

    async def caller(rows):
        while not is_over:
            await engine.infer(rows)

    async def timed_caller(rows):
        while not is_over:
            sent_ns = clock.now_ns()
            await engine.infer(rows)
            if is_measured:
                latencies_ns.append(clock.now_ns() - sent_ns)

    async with asyncio.TaskGroup() as group:
        for rows in inputs:
            group.create_task(timed_caller(rows) if timed else caller(rows))
        await asyncio.sleep(WARM_UP_S)
        is_measured = True
        before, start_ns, start_cpu_ns = engine.statistics(), clock.now_ns(), clock.cpu_ns()
        await asyncio.sleep(seconds)
        after, end_ns, end_cpu_ns = engine.statistics(), clock.now_ns(), clock.cpu_ns()
        is_measured = False
        is_over = True
    requests = after.succeeded - before.succeeded
    batches = after.batches - before.batches
    measures = {
        "requests_per_s": requests / (end_ns - start_ns) * 1e9,
        "cpu_us_per_request": (end_cpu_ns - start_cpu_ns) / max(requests, 1) / 1e3,
        "round_trip_us": (end_ns - start_ns) / max(requests, 1) / 1e3 * len(inputs),
        "mean_batch_rows": (after.rows - before.rows) / max(batches, 1),
    }
    return measures, latencies_ns


def main():
    options = arguments(__doc__, repeats=5, seconds=0.5)
    report = overhead_report(options.repeats)
    run_cases(report, options.seconds)
    show(
        "Overhead of the engine, no-op model",
        ("", "requests/s", "least to most", "CPU µs a request", "round trip µs", "mean batch"),
        [
            (
                case.name,
                f"{case.median('requests_per_s'):,.0f}",
                "{:,.0f} to {:,.0f}".format(*case.spread("requests_per_s")),
                *(
                    f"{case.median(figure):,.2f}"
                    for figure in ("cpu_us_per_request", "round_trip_us", "mean_batch_rows")
                ),
            )
            for case in report.cases
        ],
        f"medians of {options.repeats} runs in turn;",
    )
    save(options.json, __doc__, report.as_json())


if __name__ == "__main__":
    main()
