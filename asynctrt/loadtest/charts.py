"""The charts of the report page, as data for the script that draws them. Pure."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple

from asynctrt.loadtest.report import Report, Run
from asynctrt.loadtest.summary import main_run

LOG_FROM: Final = 30.0
"""An axis is logarithmic if the largest value is more than this many times the smallest."""
ALIKE: Final = 1.05
"""Rates that differ by less than this factor are one rate: latency against them shows nothing."""
RUNS_MAX: Final = 10
"""More lines than the script has colours for would be indistinguishable."""
TIME: Final = "time after the warm-up (s)"


class Series(NamedTuple):
    """A line, bars or points of a chart. What has the same label has one colour in all charts."""

    label: str
    look: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """Hold one chart: its title and caption, and the data that the script draws."""

    name: str
    title: str
    caption: str
    data: Mapping[str, Any]


def charts(report: Report) -> list[Chart]:
    """Return every chart for which the report has figures."""
    main = main_run(report)
    if main is None:
        return []
    labels = {run.label for run in report.runs}
    which = f" This is the run {main.label}." if len(labels) > 1 else " This is the first run."
    which = which if len(report.runs) > 1 else ""
    made = (
        Chart(
            "rate-latency",
            "Latency against rate",
            "Each point is a run that is not void, or a moment of a run whose load changes: the requests/s "
            "that were due (with callers: that were answered), and the latency.",
            _rate_latency(report),
        ),
        Chart(
            "latency",
            "Latency over time",
            "Latency of the requests that were due at each moment. A gap is a moment with too few requests "
            "for the figure, and a red mark one with errors." + which,
            _latency(main),
        ),
        Chart(
            "runs",
            "Latency of each run over time",
            "The p99, or if there are too few requests for it the p50, of the requests that were due at each "
            "moment.",
            _runs(report),
        ),
        Chart(
            "throughput",
            "Throughput over time",
            "Answers per second, beside the requests that were due. If the answers stay below for long, the "
            "target does not keep up." + which,
            _throughput(main),
        ),
        Chart("batches", "Batches by size", "Number of batches by their rows." + which, _batches(main)),
    )
    drawn = [chart for chart in made if chart.data]
    colours: dict[str, int] = {}
    for chart in drawn:
        for series in chart.data["series"]:
            if series["look"] != "thin":
                series["colour"] = colours.setdefault(series["label"], len(colours))
    return drawn


def _chart(
    x: str, xs: Sequence[float], y: str, series: Sequence[Series], *, is_log: bool = False
) -> dict[str, Any]:
    """Return a chart of several series over the same x values, without empty ones; empty if all are."""
    known = [(one, [_finite(value) for value in one.values]) for one in series]
    lines = [
        {"label": one.label, "look": one.look, "values": values}
        for one, values in known
        if any(value is not None for value in values)
    ]
    return {"x": x, "y": y, "log": is_log, "xs": list(xs), "series": lines} if lines else {}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _is_wide(series: Sequence[Series]) -> bool:
    values = [value for one in series for value in one.values if value is not None and 0 < value < math.inf]
    return bool(values) and max(values) / min(values) > LOG_FROM


def _rate_latency(report: Report) -> dict[str, Any]:
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
    found.sort(key=lambda item: item[0])
    if len(found) < 2 or found[-1][0] < ALIKE * found[0][0]:
        return {}
    rates, p50, p99 = zip(*found, strict=True)
    series = [Series("p50", "points", p50), Series("p99", "points", p99)]
    return _chart("rate (requests/s)", rates, "latency (ms)", series, is_log=_is_wide(series))


def _latency(run: Run) -> dict[str, Any]:
    looks = (("p50", ""), ("p99", ""), ("max", "dotted"))
    series = [Series(name, look, _over_time(run, name)) for name, look in looks]
    late = Series("generator's lateness, p99", "thin", _over_time(run, "late_p99"))
    data = _chart(TIME, _times(run), "latency (ms)", [*series, late], is_log=_is_wide(series))
    errors = [at_s for at_s, moment in zip(_times(run), run.moments, strict=True) if moment.errors]
    return {**data, "errors": errors} if data else data


def _runs(report: Report) -> dict[str, Any]:
    """Return a line for each run of a sweep or of repetitions; of several with one label, the first."""
    runs = {run.label: run for run in reversed(report.runs)}
    if report.kind not in ("sweep", "repeats") or not 2 <= len(runs) <= RUNS_MAX:
        return {}
    has_p99 = any(moment.p99 is not None for run in runs.values() for moment in run.moments)
    name = "p99" if has_p99 else "p50"
    lines = {
        f"{label}, {name}": dict(zip(_times(run), _over_time(run, name), strict=True))
        for label, run in reversed(runs.items())
    }
    xs = sorted({at_s for line in lines.values() for at_s in line})
    series = [Series(label, "", [line.get(at_s) for at_s in xs]) for label, line in lines.items()]
    return _chart(TIME, xs, "latency (ms)", series, is_log=_is_wide(series))


def _throughput(run: Run) -> dict[str, Any]:
    series = [
        Series("due", "thin", _over_time(run, "sent")),
        Series("answered", "", _over_time(run, "throughput")),
    ]
    return _chart(TIME, _times(run), "requests/s", series)


def _batches(run: Run) -> dict[str, Any]:
    by_rows = {} if run.batches is None else run.batches.by_rows
    rows = sorted(by_rows)
    series = [Series("batches", "bars", [by_rows[size] for size in rows])]
    return _chart("rows in a batch", rows, "batches", series)


def _times(run: Run) -> list[float]:
    return [moment.at_s + moment.seconds / 2 for moment in run.moments]


def _over_time(run: Run, name: str) -> list[float | None]:
    return list(map(attrgetter(name), run.moments))
