"""The charts of the report page, as data for the script that draws them. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.report import Moment, Report, Run
from asynctrt.loadtest.views import MARKS, groups, main_groups, marks_for, odds, sizes, words

LOG_FROM: Final = 30.0
"""An axis is logarithmic if the largest value is more than this many times the smallest."""

FIGURES: Final = (("p50", ""), ("p99", ""), ("max", "dotted"), ("late_p99", "thin"))
"""Figures drawn over time if there is only one group, each with its line style."""
LABELS: Final = {"late_p99": "generator's lateness, p99"}

Points = Mapping[float, float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """Hold one chart: its title and caption, and the data that the script draws."""

    name: str
    title: str
    caption: str
    data: Mapping[str, Any]


def charts(report: Report) -> list[Chart]:
    """Return every chart for which the report has figures."""
    made = {
        "throughput-latency": _throughput_latency(report),
        "latency": _latency(report),
        "throughput": _throughput(report),
        "percentiles": _percentiles(report),
        "batches": _batches(report),
    }
    return [Chart(name, *words(report, name), data) for name, data in made.items() if data is not None]


def _chart(
    series: Sequence[tuple[str, str, Points]], x: str, y: str, *, is_log: bool = False, **more: Any
) -> dict[str, Any] | None:
    """Return a chart of named series over the union of their x values; ``None`` if all are empty."""
    known = [(label, look, points) for label, look, points in series if any(_known(points.values()))]
    if not known:
        return None
    xs = sorted({place for _, _, points in known for place in points})
    return {
        "x": x,
        "y": y,
        "log": is_log,
        "xs": xs,
        # Draw a line across x values at which only other series have points.
        "spans": any(len(points) < len(xs) for _, _, points in known),
        "series": [
            {"label": label, "look": look, "values": [_finite(points.get(place)) for place in xs]}
            for label, look, points in known
        ],
        **more,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _is_wide(values: Iterable[float | None]) -> bool:
    known = [value for value in _known(values) if value > 0]
    return bool(known) and max(known) / min(known) > LOG_FROM


def _throughput_latency(report: Report) -> dict[str, Any] | None:
    runs = [run for run in report.runs if "p50" in run.latency and not run.void]
    rates = [run.throughput for run in runs]
    if len(runs) < 2 or report.kind == "compare" or max(rates) < 1.05 * min(rates):
        return None
    found = {name: {run.throughput: run.latency.get(name) for run in runs} for name in ("p50", "p99")}
    series = [(name, "points", points) for name, points in found.items()]
    is_log = _is_wide(value for points in found.values() for value in points.values())
    return _chart(series, "throughput (requests/s)", "latency (ms)", is_log=is_log)


def _latency(report: Report) -> dict[str, Any] | None:
    shown = main_groups(report, "search")
    series: list[tuple[str, str, Points]] = []
    if len(shown) == 1:
        for run in shown[0].runs:
            several = f" of {run.label}" if len({one.label for one in shown[0].runs}) > 1 else ""
            series += [
                (LABELS.get(name, name) + several, look, _over_time(run, name)) for name, look in FIGURES
            ]
    else:
        has_p99 = any(
            moment.p99 is not None for group in shown for run in group.runs for moment in run.moments
        )
        name = "p99" if has_p99 else "p50"
        series = [
            (f"{group.key}, {name}", "", _over_time(run, name)) for group in shown for run in group.runs
        ]
    is_log = _is_wide(
        value for label, _, points in series if "late" not in label for value in points.values()
    )
    errors = sorted(
        {_middle(moment) for group in shown for run in group.runs for moment in run.moments if moment.errors}
    )
    return _chart(series, "time after the warm-up (s)", "latency (ms)", is_log=is_log, errors=errors)


def _throughput(report: Report) -> dict[str, Any] | None:
    shown = main_groups(report, "search")
    series: list[tuple[str, str, Points]] = []
    for group in shown:
        for run in group.runs:
            name = group.key if len(shown) > 1 else ""
            series.append((f"{name} due".strip(), "thin", _over_time(run, "sent")))
            series.append((f"{name} answered".strip(), "", _over_time(run, "throughput")))
    return _chart(series, "time after the warm-up (s)", "requests/s")


def _over_time(run: Run, name: str) -> Points:
    return {_middle(moment): getattr(moment, name) for moment in run.moments}


def _middle(moment: Moment) -> float:
    return moment.at_s + moment.seconds / 2


def _percentiles(report: Report) -> dict[str, Any] | None:
    series: list[tuple[str, str, Points]] = []
    most = 2.0
    for group in groups(report):
        for run in group.runs:
            if not run.answered:
                continue
            counts = Counts.decode(run.histogram)
            most = max(most, 2.0 * len(counts))
            points = {odds(mark): (counts.percentile(mark) or 0) / 1e6 for mark in marks_for(len(counts))}
            series.append((group.key or "latency", "", points))
            if len(report.runs) == 1:
                sent = {
                    odds(float(name[1:])): value for name, value in run.uncorrected.items() if name[0] == "p"
                }
                series.append(("from when it was sent", "points", sent))
    marks = [[odds(mark), f"{mark:.10g}%"] for mark in MARKS if odds(mark) <= most]
    is_log = _is_wide(value for _, _, points in series for value in points.values())
    return _chart(series, "percentile of the requests", "latency (ms)", is_log=is_log, marks=marks)


def _batches(report: Report) -> dict[str, Any] | None:
    shown = main_groups(report, "sweep", "search")
    series = [
        (
            group.key or "batches",
            "bars",
            {float(rows): float(count) for rows, count in sizes(group.runs).items()},
        )
        for group in shown
    ]
    return _chart(series, "rows in a batch", "batches")
