"""The charts of the report page, as data for the script that draws them. Pure."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.report import Moment, Report, Run
from asynctrt.loadtest.views import MARKS, by_label, groups, main_groups, main_run, marks_for, odds, sizes

LOG_FROM: Final = 30.0
"""An axis is logarithmic if the largest value is more than this many times the smallest."""

FIGURES: Final = (("p50", ""), ("p99", ""), ("max", "dotted"), ("late_p99", "thin"))
"""Figures drawn over time if there is only one group, each with its line style."""
LABELS: Final = {"late_p99": "generator's lateness, p99"}

Points = Mapping[float, float | None]


class Series(NamedTuple):
    """A line, bars or points of a chart. What has the same ``group`` has one colour in all charts."""

    label: str
    look: str
    points: Points
    group: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Hold one chart: its title and caption, and the data that the script draws."""

    name: str
    title: str
    caption: str
    data: Mapping[str, Any]


WORDS: Final = {
    "rate-latency": (
        "Latency against rate",
        """Each point is a run that is not void, or a moment of a run whose load changes: the requests/s that
        were due (with callers: that were answered), and the latency.""",
    ),
    "latency": (
        "Latency over time",
        """Latency of the requests that were due at each moment. A gap is a moment with too few requests for
        the figure, and a red mark one with errors.""",
    ),
    "throughput": (
        "Throughput over time",
        """Answers per second, beside the requests that were due. If the answers stay below for long, the
        target does not keep up.""",
    ),
    "percentiles": (
        "Latency by percentile",
        "The latency that this share of the requests did not exceed.",
    ),
    "batches": ("Batches by size", "Number of batches by their rows."),
}
"""The title and the caption of each chart, in their order."""


def charts(report: Report) -> list[Chart]:
    """Return every chart for which the report has figures."""
    makers = (_rate_latency, _latency, _throughput, _percentiles, _batches)
    made = list(zip(WORDS.items(), [maker(report) for maker in makers], strict=True))
    colours = {group.name: number for number, group in enumerate(groups(report))}
    for _, data in made:
        for series in data["series"] if data is not None else ():
            series["colour"] = colours.setdefault(series.pop("group") or series["label"], len(colours))
    return [
        Chart(name, title, " ".join(caption.split()) + _which(report, name), data)
        for (name, (title, caption)), data in made
        if data is not None
    ]


def _which(report: Report, chart: str) -> str:
    """Return which runs a chart shows, if it does not show all of them."""
    main = main_run(report)
    of_one = {"latency": ("search",), "throughput": ("search",), "batches": ("sweep", "search")}
    if main is not None and report.kind in of_one.get(chart, ()) and len(report.runs) > 1:
        return f" This is the run {main.label}." if len(by_label(report)) > 1 else " This is the first run."
    drawn = sum(len(group.runs) for group in groups(report))
    if chart != "rate-latency" and drawn < len(report.runs):
        return f" {drawn} of the {len(report.runs)} runs are drawn."
    return ""


def _chart(
    series: Sequence[Series], x: str, y: str, *, is_log: bool = False, **more: Any
) -> dict[str, Any] | None:
    """Return a chart of named series over the union of their x values; ``None`` if all are empty."""
    known = [one for one in series if any(_known(one.points.values()))]
    if not known:
        return None
    xs = sorted({place for one in known for place in one.points})
    return {
        "x": x,
        "y": y,
        "log": is_log,
        "xs": xs,
        # Draw a line across x values at which only other series have points.
        "spans": any(len(one.points) < len(xs) for one in known),
        "series": [
            {
                "label": one.label,
                "look": one.look,
                "group": one.group,
                "values": [_finite(one.points.get(place)) for place in xs],
            }
            for one in known
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


def _rate_latency(report: Report) -> dict[str, Any] | None:
    level = report.settings.get("rate") or report.settings.get("callers")
    is_varied = re.search(r"\.\.|,", str(level)) is not None and report.kind in ("run", "repeats")
    found: list[tuple[float, float | None, float | None]] = []
    for run in report.runs:
        is_open = run.offered is not None
        if run.void:
            continue
        if is_varied:
            found += [(one.sent if is_open else one.throughput, one.p50, one.p99) for one in run.moments]
        else:
            rate = run.throughput if run.offered is None else run.offered
            found.append((rate, run.latency.get("p50"), run.latency.get("p99")))
    rates = [rate for rate, *_ in found]
    if len(rates) < 2 or max(rates) < 1.05 * min(rates):
        return None
    points: tuple[dict[float, float | None], ...] = {}, {}
    for rate, *values in found:
        place = rate
        while place in points[0]:  # Two runs at the same rate are two points.
            place = math.nextafter(place, math.inf)
        for by_rate, value in zip(points, values, strict=True):
            by_rate[place] = value
    series = [Series(name, "points", one) for name, one in zip(("p50", "p99"), points, strict=True)]
    is_log = _is_wide(value for one in points for value in one.values())
    return _chart(series, "rate (requests/s)", "latency (ms)", is_log=is_log)


def _latency(report: Report) -> dict[str, Any] | None:
    shown = main_groups(report, "search")
    series: list[Series] = []
    if len(shown) == 1:
        for run in shown[0].runs:
            several = f" of {run.label}" if len({one.label for one in shown[0].runs}) > 1 else ""
            series += [
                Series(LABELS.get(name, name) + several, look, _over_time(run, name))
                for name, look in FIGURES
            ]
    else:
        has_p99 = any(
            moment.p99 is not None for group in shown for run in group.runs for moment in run.moments
        )
        name = "p99" if has_p99 else "p50"
        series = [
            Series(f"{group.name}, {name}", "", _over_time(run, name), group.name)
            for group in shown
            for run in group.runs
        ]
    is_log = _is_wide(value for one in series if "late" not in one.label for value in one.points.values())
    errors = sorted(
        {_middle(moment) for group in shown for run in group.runs for moment in run.moments if moment.errors}
    )
    return _chart(series, "time after the warm-up (s)", "latency (ms)", is_log=is_log, errors=errors)


def _throughput(report: Report) -> dict[str, Any] | None:
    shown = main_groups(report, "search")
    series: list[Series] = []
    for group in shown:
        for run in group.runs:
            name = group.name if len(shown) > 1 else ""
            series.append(Series(f"{name} due".strip(), "thin", _over_time(run, "sent"), name))
            series.append(Series(f"{name} answered".strip(), "", _over_time(run, "throughput"), name))
    return _chart(series, "time after the warm-up (s)", "requests/s")


def _over_time(run: Run, name: str) -> Points:
    return {_middle(moment): getattr(moment, name) for moment in run.moments}


def _middle(moment: Moment) -> float:
    return moment.at_s + moment.seconds / 2


def _percentiles(report: Report) -> dict[str, Any] | None:
    series: list[Series] = []
    most = 2.0
    for group in groups(report):
        for run in group.runs:
            if not run.answered:
                continue
            counts = Counts.of(run.histogram)
            most = max(most, 2.0 * len(counts))
            points = {odds(mark): (counts.percentile(mark) or 0) / 1e6 for mark in marks_for(len(counts))}
            series.append(Series(group.name or "latency", "", points, group.name))
    marks = [[odds(mark), f"{mark:.10g}%"] for mark in MARKS if odds(mark) <= most]
    is_log = _is_wide(value for one in series for value in one.points.values())
    return _chart(series, "percentile of the requests", "latency (ms)", is_log=is_log, marks=marks)


def _batches(report: Report) -> dict[str, Any] | None:
    shown = main_groups(report, "sweep", "search")
    series = [
        Series(
            group.name or "batches",
            "bars",
            {float(rows): float(count) for rows, count in sizes(group.runs).items()},
            group.name,
        )
        for group in shown
    ]
    return _chart(series, "rows in a batch", "batches")
