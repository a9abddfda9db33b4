"""Turns a prediction into the report of a load test, so that it is drawn as one. Needs the extra ``load``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asynctrt.bench import describe_machine
from asynctrt.errors import OptionsError
from asynctrt.files import write_whole
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.page import render
from asynctrt.loadtest.plots import as_png, figures
from asynctrt.loadtest.report import Bar, BatchFigures, ErrorKind, Moment, Report, Resources, Run
from asynctrt.simulation.plan import Collected, Plan, Prediction, described, percentiles

MOMENTS: Final = 120
FIRST: Final = "percentiles"
"""The plot that a single picture shows."""

Ints = npt.NDArray[np.int64]


def draw(path: Path, plan: Plan, made: Prediction, collected: Collected, arrivals: str) -> list[Path]:
    """Write the plots: a page for ``.html``, the percentiles for ``.png``, all as PNG into any other folder.

    :returns: what was written.
    :raises OptionsError: if there is nothing to draw.
    :raises UsageError: if it cannot be written.
    """
    report = report_of(plan, made, collected, arrivals)
    plots = figures(report)
    if path.suffix == ".html":
        write_whole(path, render(report, plots))
        return [path]
    if path.suffix == ".png":
        found = [plot for plot in plots if plot.name == FIRST]
        if not found:
            raise OptionsError("nothing was answered, so there is nothing to draw")
        write_whole(path, as_png(found[0].figure))
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in plots:
        write_whole(path / f"{plot.name}.png", as_png(plot.figure))
        written.append(path / f"{plot.name}.png")
    return written


def report_of(plan: Plan, made: Prediction, collected: Collected, arrivals: str) -> Report:
    """Return a prediction as the report of a load test."""
    counts = Counts()
    arrived = np.array(collected.arrived_ns, np.int64)
    took = np.array(collected.answered_ns, np.int64) - arrived
    counts.add(took[arrived >= int(plan.settings.warmup * 1e9)])
    per_request = max(made.answered, 1) * 1e6
    batches = BatchFigures(
        requests=made.answered,
        batches=made.batches,
        mean_rows=made.mean_rows,
        queue=collected.queue_ns / per_request,
        copy_in=collected.copy_in_ns / per_request,
        compute=collected.compute_ns / per_request,
        copy_out=collected.copy_out_ns / per_request,
        by_rows=dict(sorted(collected.by_rows.items())),
    )
    run = Run(
        label=arrivals,
        seconds=made.seconds,
        complete=made.complete,
        void=(),
        notes=("simulated: no device ran anything",),
        offered=made.requests / max(plan.load.seconds, 1e-9),
        requests=made.requests,
        answered=made.answered,
        unanswered=0,
        rows=collected.rows / max(made.answered, 1),
        throughput=made.throughput,
        goodput=made.goodput,
        error_share=made.shed_share,
        errors={why: ErrorKind(count, why) for why, count in sorted(made.shed.items())},
        latency=made.latency,
        uncorrected={},
        lateness={},
        slo=made.slo,
        steady_from_s=None,
        throughput_interval=None,
        latency_interval=None,
        batches=batches if made.batches else None,
        resources=Resources(),
        moments=tuple(_moments(plan, made, collected)),
        timeline=_timeline(collected) if plan.settings.devices == 1 else (),
        histogram=counts.encoded(),
    )
    target = {"where": "a simulated device", "device": "none", "options": described(plan)}
    return Report("run", target, {"slo": list(plan.settings.slo)}, describe_machine(), (run,), {})


def _moments(plan: Plan, made: Prediction, collected: Collected) -> Iterator[Moment]:
    warmup_s = plan.settings.warmup
    for at_s, seconds, took, answers, sheds in pieces(collected, warmup_s, made.seconds, MOMENTS):
        found = percentiles(took)
        yield Moment(
            at_s=at_s,
            seconds=seconds,
            sent=(len(took) + sheds) / seconds,
            throughput=answers / seconds,
            p50=found.get("p50"),
            p99=found.get("p99"),
            max=found.get("max"),
            errors=sheds,
            late_p99=None,
        )


def pieces(
    collected: Collected, warmup_s: float, seconds: float, count: int
) -> Iterator[tuple[float, float, Ints, int, int]]:
    """Yield pieces of a run: beginning and length in s, latencies in ns of what arrived, answers, sheds."""
    edges = np.linspace(warmup_s * 1e9, (warmup_s + seconds) * 1e9, count + 1).astype(np.int64)
    arrived = np.array(collected.arrived_ns, np.int64)
    answered = np.array(collected.answered_ns, np.int64)
    order = np.argsort(arrived, kind="stable")
    took = (answered - arrived)[order]
    places = np.searchsorted(arrived[order], edges)
    ends = np.searchsorted(np.sort(answered), edges)
    sheds = np.searchsorted(np.sort(np.array(collected.shed_ns, np.int64)), edges)
    for at in range(count):
        length_s = float(edges[at + 1] - edges[at]) / 1e9
        if length_s > 0:
            start_s = float(edges[at]) / 1e9 - warmup_s
            values = took[places[at] : places[at + 1]]
            yield start_s, length_s, values, int(ends[at + 1] - ends[at]), int(sheds[at + 1] - sheds[at])


def _timeline(collected: Collected) -> tuple[Bar, ...]:
    """Return the last batches as bars."""
    last = sorted(collected.last, key=lambda entry: entry[0].batch.launched_ns)
    bars = []
    for flight, answered_ns in last:
        batch = flight.batch
        first_ns = last[0][0].batch.launched_ns
        times: list[Any] = [
            batch.launched_ns,
            min(batch.launched_ns + flight.copy_in_ns, flight.started_ns),
            flight.started_ns,
            flight.started_ns + flight.compute_ns,
            answered_ns,
        ]
        bars.append(Bar(batch.context, batch.arena, batch.rows, *((time - first_ns) / 1e6 for time in times)))
    return tuple(bars)
