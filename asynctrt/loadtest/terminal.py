"""Shows the progress and the results of a load test in a terminal. Imports ``rich``, as ``cli`` does."""

from collections.abc import Iterable, Sequence
from typing import Final, Self

from asynctrt._util import clock
from asynctrt._util.validation import printable
from asynctrt.errors import MissingExtraError
from asynctrt.loadtest.comparing import Line
from asynctrt.loadtest.criteria import PERCENTILES
from asynctrt.loadtest.figures import latencies
from asynctrt.loadtest.recorder import Window, total
from asynctrt.loadtest.report import Interval, Report, Run
from asynctrt.loadtest.session import Progress
from asynctrt.loadtest.views import all_errors, kept_text

try:
    from rich import box
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.markup import escape
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise MissingExtraError("the command line needs rich: pip install 'asynctrt[load]'") from error

REFRESH_S: Final = 0.25
NOW_WINDOWS: Final = 4
"""Number of windows in the last second."""
SPARKS: Final = "▁▂▃▄▅▆▇█"
SPARKS_MAX: Final = 60
RUNS_MAX: Final = 40
WIDE: Final = PERCENTILES
NARROW: Final = ("p50", "p99", "p99.9")
STREAM: Final = ("p50", "p99")
WIDE_COLUMNS: Final = 110
"""Smallest width of a terminal for showing all percentiles."""
LABEL_COLUMNS: Final = 8
MISSING: Final = "-"


class LiveView:
    """Show a load test while it runs: ``with LiveView(console, title) as view``."""

    def __init__(self, console: Console, title: str) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._title = title
        self._shown_ns = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def watch(self, progress: Progress) -> None:
        """Show the progress, unless it was shown within ``REFRESH_S``."""
        now_ns = clock.now_ns()
        if now_ns - self._shown_ns >= REFRESH_S * 1e9:
            # Start only now, because opening the model may use the terminal.
            self._live.start()
            self._shown_ns = now_ns
            self._live.update(progress_view(self._title, progress, now_ns), refresh=True)


def progress_view(title: str, progress: Progress, now_ns: int) -> RenderableType:
    """Return the display of a load test's progress."""
    elapsed_s = (now_ns - progress.started_ns) / 1e9
    of = f" of {progress.count}" if progress.count is not None else ""
    head = Text.assemble((title, "bold"), f"  run {progress.number}{of}  {progress.label}")
    parts: list[RenderableType] = [head]
    if progress.seconds is not None:
        left_s = max(0.0, progress.seconds - elapsed_s)
        parts.append(
            ProgressBar(total=progress.seconds, completed=min(elapsed_s, progress.seconds), width=60)
        )
        parts.append(
            Text(f"{elapsed_s:.0f} s, {left_s:.0f} s to go" if left_s else "waiting for the last answers")
        )
    else:
        parts.append(Text(f"{elapsed_s:.0f} s, runs until the last answer"))
    numbers = sorted(number for number in progress.windows if number >= 0)
    if not numbers:
        return Group(*parts, Text("warming up"))
    # Leave out the last window, which is still filling.
    recent = [progress.windows[number] for number in numbers[-NOW_WINDOWS - 1 : -1]]
    table = Table("", "requests/s", "p50 ms", "p99 ms", "errors", "late p99 ms", box=None)
    for name, windows in (("now", recent), ("so far", [progress.windows[number] for number in numbers[:-1]])):
        if windows:
            table.add_row(name, *_live_row(total(windows), len(windows) * progress.window_s))
    tails = [latencies(progress.windows[number].latency).get("p99", 0.0) for number in numbers[-SPARKS_MAX:]]
    return Group(*parts, table, Text(f"p99 {sparks(tails)}"))


def _live_row(whole: Window, seconds: float) -> list[str]:
    latency, late = latencies(whole.latency), latencies(whole.lateness)
    return [
        f"{whole.completed / seconds:,.0f}",
        _ms(latency.get("p50")),
        _ms(latency.get("p99")),
        f"{whole.failed:,}",
        _ms(late.get("p99")),
    ]


def sparks(values: Sequence[float]) -> str:
    """Draw values as a row of small bars, from 0 to the largest."""
    most = max(values, default=0.0)
    if not most:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(len(SPARKS) - 1, int(value / most * len(SPARKS)))] for value in values)


def show(console: Console, report: Report, *, uncorrected: bool) -> None:
    """Show the results."""
    runs = report.runs
    if not runs:
        console.print("Nothing was measured.")
        return
    _show_behind(console, report)
    console.print(_runs_table(runs[-RUNS_MAX:], uncorrected=uncorrected, width=console.width))
    if len(runs) > RUNS_MAX:
        console.print(f"These are the last {RUNS_MAX} of {len(runs)} runs; the report has all.")
    for name, made in report.intervals.items():
        if name in ("throughput", "p50", "p99"):
            console.print(
                f"{name}: {_interval(made, name)} over {made.count} repetitions, with 95% confidence"
            )
    _show_streams(console, runs[-RUNS_MAX:])
    _show_steps(console, runs[-RUNS_MAX:])
    _show_inside(console, runs[-1])
    _show_errors(console, runs)
    if report.search is not None:
        _show_search(console, report)
    if report.comparison is not None:
        table = Table("", "B over A", "95% interval", title=_clean(f"{report.comparison.b}, compared with A"))
        for name, ratio in report.comparison.ratios.items():
            table.add_row(name, f"{ratio.mean:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}")
        console.print(table)
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        console.print(f"[dim]Note: {_clean(note)}.[/]")
    _show_verdict(console, report)


def show_lines(console: Console, found: tuple[list[Line], list[str]], a: str, b: str) -> None:
    """Show the figures of two reports beside each other, and notes about what else differs."""
    lines, notes = found
    table = Table("", title="Two reports; latencies in ms", box=box.SIMPLE_HEAD)
    for column in ("A", "B", "B over A"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, before, after in lines:
        form = "{:.2%}".format if name == "errors" else _ms
        ratio = f"{after / before:.3f}" if before and after is not None else MISSING
        cells = [MISSING if value is None else form(value) for value in (before, after)]
        table.add_row(_clean(name), *cells, ratio)
    console.print(f"A: {_clean(a)}\nB: {_clean(b)}", soft_wrap=True, highlight=False)
    console.print(table)
    for note in notes:
        console.print(f"[dim]Differs: {_clean(note)}.[/]", soft_wrap=True)


def _show_behind(console: Console, report: Report) -> None:
    if report.search is None:
        for run in report.runs[-RUNS_MAX:]:
            if run.kept is not None:
                console.print(f"[bold yellow]The target did not keep up[/]: {_clean(kept_text(run))}.")


def _show_errors(console: Console, runs: Sequence[Run]) -> None:
    errors = all_errors(runs)
    if not errors:
        return
    table = Table("error", "count", "first message", title="Requests that failed or had wrong answers")
    for kind, what in sorted(errors.items()):
        table.add_row(_clean(kind), f"{what.count:,}", _clean(what.example))
    console.print(table)


def _runs_table(runs: Sequence[Run], *, uncorrected: bool, width: int) -> Table:
    rates = ["requests/s", *["good/s"] * any(run.goodput is not None for run in runs)]
    shown = WIDE if width >= WIDE_COLUMNS else NARROW[: 4 - len(rates)]
    names = [name for name in shown if any(name in run.latency for run in runs)] + ["max"]
    lines: list[tuple[str, list[str], bool]] = []
    for run in runs:
        values = (run.throughput, run.goodput)[: len(rates)]
        cells = [MISSING if value is None else f"{value:,.0f}" for value in values]
        cells += [_ms(run.latency.get(name)) for name in names]
        cells += [f"{run.error_share:.2%}" if run.error_share else "0", _verdict(run)]
        lines.append((run.label, cells, False))
        if uncorrected:
            cells = [_ms(run.uncorrected.get(name)) for name in names]
            lines.append(("  from when sent", [*[""] * len(rates), *cells, "", ""], True))
    table = Table(title="Latency in ms, from when a request was due", box=box.SIMPLE_HEAD)
    columns = [*rates, *names, "errors", "verdict"]
    widths = [
        max(len(column), *(Text.from_markup(cells[number]).cell_len for _, cells, _ in lines))
        for number, column in enumerate(columns)
    ]
    # Never cut off figures, only labels.
    table.add_column(
        "", no_wrap=True, max_width=max(LABEL_COLUMNS, width - sum(widths) - 3 * len(widths) - 4)
    )
    for column, least in zip(columns, widths, strict=True):
        table.add_column(column, justify="right", no_wrap=True, min_width=least)
    for label, cells, is_dim in lines:
        table.add_row(_clean(label), *cells, style="dim" if is_dim else None)
    return table


def _verdict(run: Run) -> str:
    if run.void:
        return "[bold red]VOID[/]" if run.complete else "[bold red]VOID[/], [yellow]cut short[/]"
    if not run.complete:
        return "[yellow]cut short[/]"
    if run.misses:
        return "[yellow]missed[/]"
    if run.unjudged:
        return "[yellow]too few[/]"
    return "[green]held[/]" if run.slo else ""


def _show_streams(console: Console, runs: Sequence[Run]) -> None:
    """Show the figures of answers in pieces, if there are any."""
    if not any(run.stream is not None for run in runs):
        return
    table = Table("", title="Answers in pieces, in ms", box=box.SIMPLE_HEAD)
    for column in ("pieces/s", "first p50", "first p99", "between p50", "between p99"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        if run.stream is not None:
            times = (
                _ms(part.get(name)) for part in (run.stream.first, run.stream.between) for name in STREAM
            )
            table.add_row(_clean(run.label), f"{run.stream.pieces:,.0f}", *times)
    console.print(table)


def _show_steps(console: Console, runs: Sequence[Run]) -> None:
    """Show the figures of the steps, if there are any."""
    if not any(run.steps for run in runs):
        return
    labels = [""] if len(runs) > 1 else []
    table = Table(*labels, "step", title="Steps, in ms from beginning to end", box=box.SIMPLE_HEAD)
    names = ("mean", "p50", "p99", "max")
    for column in ("count", "failed", *names):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        for name, found in run.steps.items():
            times = (_ms(found.latency.get(figure)) for figure in names)
            cells = [_clean(run.label)] * len(labels) + [_clean(name)]
            table.add_row(*cells, f"{found.count:,}", f"{found.failed:,}", *times)
    console.print(table)


def _show_inside(console: Console, run: Run) -> None:
    """Show where the time went in the last run, and what the generator used."""
    batches = run.batches
    if batches is not None:
        console.print(
            f"Batches: {batches.mean_rows:.1f} rows on average. A request: queue {_ms(batches.queue)} ms, "
            f"copy in {_ms(batches.copy_in)}, compute "
            f"{_ms(batches.compute)}, copy out {_ms(batches.copy_out)}."
        )
    used = run.resources
    parts = []
    if run.lateness:
        parts.append(f"late by {_us(run.lateness.get('p50'))} at p50, {_us(run.lateness.get('p99'))} at p99")
    if used.generator_cores is not None:
        parts.append(f"{used.generator_cores:.2f} cores")
    if used.memory_mb is not None:
        parts.append(f"{used.memory_mb:,.0f} MB")
    console.print(f"Generator: {', '.join(parts)}.")
    if used.gpu_name is not None:
        figures = (
            ("busy", used.gpu_share, ".0%"),
            ("MB", used.gpu_memory_mb, ",.0f"),
            ("W", used.gpu_watts, ",.0f"),
        )
        known = [f"{format(value, form)} {name}" for name, value, form in figures if value is not None]
        console.print(f"{_clean(used.gpu_name)}: {', '.join(known)}.")


def _show_search(console: Console, report: Report) -> None:
    found = report.search
    assert found is not None
    target = _clean(", ".join(found.slo))
    if found.holds is None:
        console.print(f"[yellow]No rate was found that holds {target}[/]: {_clean(found.why)}.")
    else:
        beyond = f"; {found.fails:,.4g} did not hold" if found.fails is not None else ""
        console.print(f"[bold]{found.holds:,.4g} requests/s[/] hold {target}{beyond}: {_clean(found.why)}.")


def _show_verdict(console: Console, report: Report) -> None:
    for why in report.void:
        console.print(f"[bold red]VOID[/]: {_clean(why)}.")
    if report.search is not None or report.kind == "sweep":
        return
    missed: Iterable[str] = dict.fromkeys(
        text for run in report.runs for text, is_held in run.slo.items() if not is_held
    )
    for text in missed:
        console.print(f"[bold yellow]Not held[/]: {_clean(text)}.")
    for text, why in {text: why for run in report.runs for text, why in run.unjudged.items()}.items():
        console.print(f"[bold yellow]Not judged[/]: {_clean(text)}: {_clean(why)}. Measure for longer.")


def _clean(text: str) -> str:
    """Escape markup in foreign text, and replace control characters."""
    return escape(printable(text))


def _interval(made: Interval, name: str) -> str:
    form = _ms if name.startswith("p") else "{:,.0f}".format
    unit = " ms" if name.startswith("p") else "/s"
    return f"{form(made.mean)}{unit} ({form(made.low)} to {form(made.high)})"


def _ms(value: float | None) -> str:
    """Format milliseconds with three significant digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _us(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value * 1e3:.3g} us" if value < 1 else f"{_ms(value)} ms"
