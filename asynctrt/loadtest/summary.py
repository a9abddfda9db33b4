"""The result of a load test in words, key figures and tables, for the page and the terminal. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asynctrt.loadtest.criteria import LATENCIES, parse_slo
from asynctrt.loadtest.report import ErrorCount, Report, Run
from asynctrt.loadtest.settings import CALLERS_DEFAULT

DASH: Final = "\N{EM DASH}"
TOO_FEW: Final = "too few requests for this percentile"
UNJUDGED: Final = "Too few requests to judge: measure for longer"
NO_ANSWER: Final = "nothing was answered"
HEADLINES: Final = ("p99", "p95", "p90", "p50", "mean")
"""Latency figures for the headline, in order of preference: it shows the first known one."""
FAILED_SHARE: Final = 0.5
"""If more than this share of a run's requests fail, the run is not good, whatever its slo says."""
UNITS: Final = {"throughput": "requests/s", "goodput": "requests/s", "errors": "of the requests"}
"""Units of figures other than latencies."""


@dataclass(frozen=True, slots=True)
class Banner:
    """Show an important message."""

    level: str
    """``bad``, ``warn``, ``good`` or ``note``."""
    title: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """Show a figure, or why it is missing."""

    text: str
    title: str = ""
    level: str = ""
    """``good``, ``bad``, or ``words`` for text that may be long."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Show one of the key figures."""

    name: str
    value: Cell
    unit: str
    more: str


@dataclass(frozen=True, slots=True)
class Table:
    """Show a table; the first cell of each row is its heading."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


Column = Callable[[Run], "Cell | float | None"]


# ---- what stands for a report


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


def rate_of(run: Run) -> float:
    """Return the rate of a run, for sorting."""
    try:
        return float(run.parameters["rate"])
    except (KeyError, TypeError, ValueError):  # The run has no rate as a parameter, or a ramp.
        return run.throughput if run.offered is None else run.offered


def all_errors(runs: Iterable[Run]) -> dict[str, ErrorCount]:
    """Return the errors of all runs by kind, with the first message of each kind."""
    found: dict[str, ErrorCount] = {}
    for run in runs:
        for kind, what in run.errors.items():
            before = found.get(kind)
            found[kind] = ErrorCount(before.count + what.count, before.example) if before else what
    return found


# ---- the verdict


def headline(report: Report) -> str:
    """Return the result in one line."""
    main = main_run(report)
    if main is None:
        return "Nothing was measured"
    if report.search is not None:
        slo = ", ".join(report.search.slo)
        if report.search.holds is None:
            return f"No rate was found that holds {slo}"
        return f"{number(report.search.holds)} requests/s hold {slo}"
    if not any(run.answered for run in report.runs):
        return "Nothing was answered"
    # A stopped search has runs but no result.
    is_sweep = report.kind in ("sweep", "search")
    figure = main.figure if is_sweep else report.figure
    rate = f"{number(figure('throughput') or 0.0)} requests/s"
    known = ((name, figure(name)) for name in HEADLINES)
    shown = next((f"{name} {number(value)} ms" for name, value in known if value is not None), None)
    if is_sweep:
        return f"At best {rate}" + (f", with {shown}" if shown else "")
    return f"{shown} at {rate}" if shown else rate


def name_of(report: Report) -> str:
    """Return the name of the target."""
    target = report.target
    return str(target.get("name") or target.get("where") or "")


def about(report: Report) -> str:
    """Describe the target and its load in one line."""
    settings = report.settings
    target = [str(report.target.get(name) or "") for name in ("where", "device")]
    parts = [part for part in target if part and part != name_of(report)]
    if settings.get("rate") is not None:
        rate = settings["rate"]
        shown = number(float(rate)) if str(rate).replace(".", "", 1).isdecimal() else rate
        parts.append(f"open loop, {shown} requests/s, {settings.get('arrivals', 'poisson')}")
    elif report.kind not in ("sweep", "search"):
        parts.append(f"closed loop, {settings.get('callers') or CALLERS_DEFAULT} callers")
    counts = {"repeats": "repetitions", "sweep": "runs in a sweep", "search": "runs in a search"}
    if report.kind in counts:
        parts.append(f"{len(report.runs)} {counts[report.kind]}")
    seconds = sorted({round(run.seconds, 1) for run in report.runs})
    if seconds:
        each = " each" if len(report.runs) > 1 else ""
        span = f"{seconds[0]:g}" if len(seconds) == 1 else f"{seconds[0]:g} to {seconds[-1]:g}"
        parts.append(f"{span} s{each}")
    return " · ".join(parts)


def banners(report: Report) -> list[Banner]:
    """Return the important messages: that the target did not keep up, then the others, the worst first."""
    runs = report.runs
    found = []
    if not any(run.answered for run in runs):
        kinds = [f"{kind}: {what.example}" for kind, what in all_errors(runs).items()]
        found.append(Banner("bad", "Nothing was answered", tuple(kinds[:3])))
    elif any(run.error_share > FAILED_SHARE for run in runs) and report.search is None:
        found.append(Banner("bad", "Most requests failed"))
    void = [run for run in runs if run.void]
    if void:
        # In a search or a sweep the last runs may be void; results at lower rates remain valid.
        is_part = report.kind in ("sweep", "search") and len(void) < len(runs)
        count = "This run is" if len(runs) == 1 else f"{len(void)} of {len(runs)} runs are"
        text = f"{count} VOID: the generator was measured, not the target"
        found.append(Banner("warn" if is_part else "bad", text, report.void))
    cut = [run for run in runs if not run.complete]
    if cut:
        what = "Stopped early" if len(runs) == 1 else f"Stopped early: {len(cut)} of {len(runs)} runs"
        left = sum(run.unanswered for run in cut)
        reasons = ["The figures cover only what was measured before."]
        reasons += [f"{left:,} requests had neither been answered nor failed."] * (left > 0)
        found.append(Banner("bad", what, tuple(reasons)))
    found += _slo(report)
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    if notes:
        found.append(Banner("note", "Notes", tuple(notes)))
    found.sort(key=lambda banner: ("bad", "warn", "good", "note").index(banner.level))
    behind = [
        f"of {run.offered or 0:,.0f} requests/s that were due in {run.label} it answered {run.kept:,.0f}"
        for run in runs
        if run.kept is not None
    ]
    if behind and report.search is None:
        found.insert(0, Banner("warn", "The target did not keep up", tuple(behind)))
    return found


def _slo(report: Report) -> Iterator[Banner]:
    """Yield banners that say whether the slo was held. In a search or a sweep, one such run is enough."""
    asked = list(dict.fromkeys(text for run in report.runs for text in run.slo))
    left = {text: f"{text}: {why}" for run in report.runs for text, why in run.unjudged.items()}
    is_one_enough = report.kind in ("sweep", "search")
    if is_one_enough and any(run.holds for run in report.runs):
        return
    if is_one_enough and asked and all(run.misses or run.void for run in report.runs):
        yield Banner("bad", f"{', '.join(asked)} is not held by any run")
        return
    if left:
        yield Banner("warn", UNJUDGED, tuple(left.values()))
    if is_one_enough:
        return
    failed = _missed(report, asked)
    if failed:
        yield Banner("bad", "The slo is not held", failed)
    elif asked and report.holds:
        yield Banner("good", f"{', '.join(asked)} is held")


def _missed(report: Report, asked: Sequence[str]) -> tuple[str, ...]:
    """Return the criteria that were missed, each with the worst value."""
    failed = []
    for criterion in parse_slo(asked):
        runs = [run for run in report.runs if not run.slo.get(criterion.text, True)]
        known = [value for run in runs if (value := run.figure(criterion.key)) is not None]
        if runs:
            what = f"too many requests took longer, though they are too few to give {criterion.key}"
            if not any(run.answered for run in runs):
                what = NO_ANSWER
            if known:
                worst = max(known) if criterion.sign == "<" else min(known)
                what = f"{criterion.key} is {_figure(criterion.figure, worst)}"
                if criterion.compare(worst):  # A failed request counts as infinite latency.
                    what += " among answered requests, but too many requests failed"
            many = f" at worst, in {len(runs)} of {len(report.runs)} runs" if len(report.runs) > 1 else ""
            failed.append(f"{criterion.text}: {what}{many}")
    return tuple(failed)


# ---- figures


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


def _figure(name: str, value: float | None) -> str:
    """Format a figure with its unit."""
    if value is None:
        return DASH
    return share(value) if name == "errors" else f"{number(value)} {UNITS.get(name, 'ms')}"


def share(value: float) -> str:
    """Format a share in percent; 0% means exactly none and 100% exactly all."""
    percent = 100 * value
    if percent in (0.0, 100.0):
        return f"{percent:.0f}%"
    # Do not round a share just below 1 to 100%.
    return f"{number(percent) if percent < 99.9 else f'{min(percent, 99.9999):.6g}'}%"


def tiles(report: Report) -> list[Tile]:
    """Return the key figures, of all repetitions with their intervals or of the representative run."""
    main = main_run(report)
    if main is None:
        return []
    is_mean = report.kind == "repeats"
    runs, figure = (report.runs, report.figure) if is_mean else ((main,), main.figure)
    found = []
    for name, title in (
        ("throughput", "Throughput"),
        ("goodput", "Goodput"),
        ("p50", "Latency p50"),
        ("p99", "Latency p99"),
        ("mean", "Mean latency"),
        ("errors", "Errors"),
    ):
        value, shown = figure(name), share if name == "errors" else number
        if value is None and name == "goodput":
            continue
        cell = Cell(DASH, TOO_FEW if main.answered else NO_ANSWER)
        if value is not None:
            cell = Cell(shown(value), level="bad" if name == "errors" and value else "")
        within = report.intervals.get(name)
        more = cell.title if within is None else f"95%: {shown(within.low)} to {shown(within.high)}"
        if name == "throughput" and main.rows != 1 and value is not None:
            more = f"{number(value * main.rows)} rows/s" + (f" · {more}" if more else "")
        if name == "errors":
            failed = sum(error.count for error in all_errors(runs).values())
            more = f"{failed:,} of {sum(run.requests for run in runs):,}"
        found.append(Tile(title, cell, UNITS.get(name, "ms"), more))
    return found


# ---- tables


def results(report: Report) -> list[Table]:
    """Return the table of a search's result; none for another kind of load test."""
    if report.search is None:
        return []
    holds, fails = report.search.holds, report.search.fails
    rows = (
        ("Highest rate that holds", Cell(_figure("throughput", holds), "" if holds else "no rate held")),
        ("Lowest rate that does not", Cell(_figure("throughput", fails), "" if fails else "no rate failed")),
        ("Slo", Cell(", ".join(report.search.slo))),
        ("Why it ended", Cell(report.search.why)),
    )
    return [Table("Search", (), tuple((Cell(name), cell) for name, cell in rows))]


def tables(report: Report) -> list[Table]:
    """Return the tables of all runs: figures, answers in pieces, steps, what was inside, and errors."""
    made = (_runs(report), _streams(report), _steps(report), _inside(report), _errors(report))
    return [table for table in made if table is not None]


def _table(title: str, columns: Mapping[str, Column], report: Report, note: str = "") -> Table | None:
    """Return a table with a row for each run, leaving out empty columns."""
    cells = {head: [_cell(column(run)) for run in report.runs] for head, column in columns.items()}
    known = {head: column for head, column in cells.items() if any(cell is not None for cell in column)}
    if not known:
        return None
    firsts = [Cell(run.label) for run in report.runs]
    filled = [[cell or Cell(DASH, "not known") for cell in column] for column in known.values()]
    return Table(title, ("Run", *known), tuple(zip(firsts, *filled, strict=True)), note)


def _cell(value: Cell | float | None) -> Cell | None:
    return value if value is None or isinstance(value, Cell) else Cell(number(value))


def _latencies() -> dict[str, Column]:
    """Return a column for each latency, which says why one is missing."""

    def column(name: str) -> Column:
        return lambda run: run.latency.get(name, Cell(DASH, TOO_FEW if run.answered else NO_ANSWER))

    return {name: column(name) for name in LATENCIES}


def _runs(report: Report) -> Table | None:
    columns: dict[str, Column] = {
        "Verdict": _verdict,
        "Seconds": lambda run: Cell(f"{run.seconds:.1f}"),
        "Due": lambda run: run.offered,
        "Requests": lambda run: Cell(f"{run.requests:,}"),
        "Throughput": lambda run: run.throughput,
        "Goodput": lambda run: run.goodput,
        "Errors": lambda run: Cell(share(run.error_share), level="bad" if run.error_share else ""),
        **_latencies(),
    }
    note = "Latencies, p50 to max, are in ms; due, throughput and goodput are in requests/s."
    return _table("Runs", columns, report, note)


def _verdict(run: Run) -> Cell:
    if run.void:
        return Cell("void", "; ".join(run.void), "bad")
    if not run.complete:
        return Cell("stopped", "the figures cover only what was measured before", "bad")
    failed = [name for name, is_held in run.slo.items() if not is_held]
    if failed:
        return Cell("fails", f"not held: {', '.join(failed)}", "bad")
    if run.kept is not None:
        return Cell("behind", "the target did not keep up", "bad")
    if run.unjudged:
        return Cell("too few", "; ".join(run.unjudged.values()))
    return Cell("holds", level="good") if run.slo else Cell("complete")


def _streams(report: Report) -> Table | None:
    def column(part: str, name: str) -> Column:
        def cell(run: Run) -> Cell | float | None:
            return None if run.stream is None else getattr(run.stream, part).get(name, Cell(DASH, TOO_FEW))

        return cell

    columns: dict[str, Column] = {"Pieces/s": lambda run: None if run.stream is None else run.stream.pieces}
    for part in ("first", "between"):
        columns |= {f"{part.capitalize()} {name}": column(part, name) for name in ("p50", "p99")}
    note = "Times are in ms: from when a request was due to its answer's first piece, and between its pieces."
    return _table("Answers in pieces", columns, report, note)


def _steps(report: Report) -> Table | None:
    """Return a table with a row for each step of each run."""
    rows = []
    for run in report.runs:
        for name, found in run.steps.items():
            known = [found.latency.get(figure) for figure in LATENCIES]
            times = [Cell(DASH, TOO_FEW) if value is None else Cell(number(value)) for value in known]
            failed = Cell(f"{found.failed:,}", level="bad" if found.failed else "")
            labels = [Cell(run.label)] if len(report.runs) > 1 else []
            rows.append((*labels, Cell(name), Cell(f"{found.count:,}"), failed, *times))
    note = "Times are in ms, from the beginning to the end of a step; failed steps do not count."
    head = (*["Run"] * (len(report.runs) > 1), "Step", "Count", "Failed", *LATENCIES)
    return Table("Steps", head, tuple(rows), note) if rows else None


def _inside(report: Report) -> Table | None:
    def column(name: str) -> Column:
        return lambda run: getattr(run.batches, name, None)

    columns: dict[str, Column] = {
        "Late p99": lambda run: run.lateness.get("p99"),
        "Cores": lambda run: run.generator_cores,
        "Batches": column("batches"),
        "Rows each": column("mean_rows"),
        "Queue": column("queue"),
        "Copy in": column("copy_in"),
        "Compute": column("compute"),
        "Copy out": column("copy_out"),
    }
    note = "Times are in ms. Late p99 and cores are of the generator."
    return _table("Generator and batches", columns, report, note)


def _errors(report: Report) -> Table | None:
    found = sorted(all_errors(report.runs).items(), key=lambda item: -item[1].count)
    requests = max(sum(run.requests for run in report.runs), 1)
    rows = [
        (
            Cell(kind),
            Cell(f"{what.count:,}"),
            Cell(share(what.count / requests)),
            Cell(what.example, level="words"),
        )
        for kind, what in found
    ]
    head = ("Kind", "Count", "Share of requests", "First message")
    return Table("Errors", head, tuple(rows)) if rows else None


def flat(mapping: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and values as text, leaving out unset values; nested names are joined by dots."""
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        elif isinstance(value, bool):
            yield f"{above}{name}", "yes" if value else "no"
        elif isinstance(value, list | tuple):
            if value:
                yield f"{above}{name}", ", ".join(str(item) for item in value)
        elif value is not None and value != "":
            yield f"{above}{name}", f"{value:.6g}" if isinstance(value, float) else str(value)
