"""Selects and groups a report's runs for the page and its charts, and formats numbers. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from asynctrt.loadtest.report import ErrorCount, Report, Run

GROUPS_MAX: Final = 10
"""Limit on the groups in one chart; more would be indistinguishable."""
CURVE_POINTS: Final = 400
MARKS: Final = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999, 99.9999)
"""Percentiles labelled on the axis of the percentile curve."""


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Group runs that are shown together: repetitions of the same case, or a single run."""

    name: str
    runs: tuple[Run, ...]


def number(value: float) -> str:
    """Format a number with three significant digits, but with all digits of its integer part."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "?"
    if value == int(value):
        return f"{value:,.0f}"
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{value:,.0f}"
    return f"{rounded:,.{2 - math.floor(math.log10(abs(rounded)))}f}"


def rate_of(run: Run) -> float:
    """Return the rate of a run, for sorting."""
    try:
        return float(run.parameters["rate"])
    except (KeyError, TypeError, ValueError):  # The run has no rate as a parameter, or a ramp.
        return run.throughput if run.offered is None else run.offered


def by_label(report: Report) -> dict[str, tuple[Run, ...]]:
    """Return the runs by label; for a search, ordered by rate."""
    runs = sorted(report.runs, key=rate_of) if report.kind == "search" else report.runs
    found: dict[str, tuple[Run, ...]] = {}
    for run in runs:
        found[run.label] = (*found.get(run.label, ()), run)
    return found


def main_run(report: Report) -> Run | None:
    """Return the representative run: for a search, at the rate found; for a sweep, the best run."""
    if not report.runs:
        return None
    if report.kind not in ("sweep", "search"):
        return report.runs[0]
    good = [run for run in report.runs if run.holds]
    if report.search is not None:
        good = [run for run in good if rate_of(run) <= (report.search.holds or 0.0)]
        # A confirmed rate was run more than once; the last run counts.
        return max(reversed(good), key=rate_of, default=report.runs[-1])
    best = good or [run for run in report.runs if not run.void] or report.runs
    if len({run.offered for run in best}) == 1 and best[0].offered is not None:
        # At the same rate, throughputs differ only by chance, so choose the run with the lowest latency.
        return min(best, key=lambda run: run.latency.get("p99", math.inf))
    return max(best, key=lambda run: run.throughput)


def groups(report: Report) -> list[RunGroup]:
    """Group runs of the same case. If there are too many groups, choose evenly from the first to the last."""
    if report.kind in ("run", "repeats"):
        count = len(report.runs)
        name = f"{count} repetitions" if count > 1 else ""
        return [RunGroup(name, report.runs)] if count else []
    found = list(by_label(report).items())
    if len(found) > GROUPS_MAX:
        step = (len(found) - 1) / (GROUPS_MAX - 1)
        found = [found[round(place * step)] for place in range(GROUPS_MAX)]
    names = [f"{label} (void)" if any(run.void for run in runs) else label for label, runs in found]
    return [RunGroup(name, runs) for name, (_, runs) in zip(names, found, strict=True)]


def main_groups(report: Report, *kinds: str) -> list[RunGroup]:
    """Return only the representative run for these kinds of reports, and all groups for other kinds."""
    main = main_run(report)
    return [RunGroup("", (main,))] if report.kind in kinds and main is not None else groups(report)


def sizes(runs: Iterable[Run]) -> dict[int, int]:
    """Return the number of batches by their rows, over all runs."""
    found: dict[int, int] = {}
    for run in runs:
        for rows, count in run.batches.by_rows.items() if run.batches is not None else ():
            found[int(rows)] = found.get(int(rows), 0) + count
    return dict(sorted(found.items()))


def all_errors(runs: Iterable[Run]) -> dict[str, ErrorCount]:
    """Return the errors of all runs by kind, with the first message of each kind."""
    found: dict[str, ErrorCount] = {}
    for run in runs:
        for kind, what in run.errors.items():
            before = found.get(kind)
            found[kind] = ErrorCount(before.count + what.count, before.example) if before else what
    return found


def odds(percent: float) -> float:
    """Return n for the percentile that one in n values exceeds."""
    return 100 / (100 - percent)


def marks_for(count: int) -> list[float]:
    """Return percentiles for ``count`` values, evenly spaced by the logarithm of the odds, and ``MARKS``."""
    largest = 2 * count
    steps = [largest ** (step / CURVE_POINTS) for step in range(CURVE_POINTS + 1)]
    exact = [mark for mark in MARKS if odds(mark) <= largest]
    return sorted({*exact, *(100 - 100 / one_in for one_in in steps)})
