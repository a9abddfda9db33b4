"""Shows the progress and the results of a load test in a terminal. Imports ``rich``, as ``cli`` does."""

from collections.abc import Sequence
from typing import Final, Self

from asynctrt._util import clock
from asynctrt._util.validation import printable
from asynctrt.errors import MissingExtraError
from asynctrt.loadtest import summary
from asynctrt.loadtest.comparing import Line
from asynctrt.loadtest.figures import latencies
from asynctrt.loadtest.plans import WINDOW_S
from asynctrt.loadtest.recorder import Window, total
from asynctrt.loadtest.report import Report
from asynctrt.loadtest.session import Progress
from asynctrt.loadtest.summary import DASH, Cell, number

try:
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.markup import escape
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise MissingExtraError("the command line needs rich: pip install 'asynctrt[load]'") from error

STYLES: Final = {"bad": "bold red", "warn": "bold yellow", "good": "green", "note": "dim"}
LEFT_OUT_FIRST: Final = (
    "p99.99", "p95", "p90", "Seconds", "mean", "Due", "Requests", "p99.9", "Copy in", "Copy out",
    "Share of requests", "Batches", "Rows each", "Cores", "Goodput", "A", "B", "max",
)  # fmt: skip
"""Columns that a narrow terminal does not show, the least important first."""
WORDS_COLUMNS: Final = 8
"""Words and the labels of runs get at least this width, and more lines if they need them."""


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
        """Show the progress, unless it was shown within the time of one window."""
        now_ns = clock.now_ns()
        if now_ns - self._shown_ns >= WINDOW_S * 1e9:
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
    left_s = max(0.0, progress.seconds - elapsed_s)
    parts += [
        ProgressBar(total=progress.seconds, completed=min(elapsed_s, progress.seconds), width=60),
        Text(f"{elapsed_s:.0f} s, {left_s:.0f} s to go" if left_s else "waiting for the last answers"),
    ]
    numbers = sorted(number for number in progress.windows if number >= 0)
    if not numbers:
        return Group(*parts, Text("warming up"))
    # Leave out the last window, which is still filling.
    window_s = progress.window_ns * progress.pairs / 1e9
    whole = [progress.windows[number] for number in numbers[:-1]]
    table = Table("", "requests/s", "p50 ms", "p99 ms", "errors", "late p99 ms", box=None)
    for name, windows in (("now", whole[-max(1, round(1 / window_s)) :]), ("so far", whole)):
        if windows:
            table.add_row(name, *_live_row(total(windows), len(windows) * window_s))
    return Group(*parts, table)


def _live_row(whole: Window, seconds: float) -> list[str]:
    latency, late = latencies(whole.latency), latencies(whole.lateness)
    times = [
        _number(figures.get(name)) for figures, name in ((latency, "p50"), (latency, "p99"), (late, "p99"))
    ]
    return [f"{whole.completed / seconds:,.0f}", *times[:2], f"{whole.failed:,}", times[2]]


def show(console: Console, report: Report) -> None:
    """Show the important messages, the tables, the confidence intervals, and the result in one line."""
    for banner in summary.banners(report):
        reasons = "".join(f"\n  {_clean(reason)}" for reason in banner.reasons)
        console.print(f"[{STYLES[banner.level]}]{_clean(banner.title)}[/]{reasons}", highlight=False)
    for table in (*summary.tables(report), *summary.results(report)):
        console.print(_drawn(console, table))
    for tile in summary.tiles(report):
        if "95%" in tile.more:
            figure = f"{tile.name}: {tile.value.text} {tile.unit} ({tile.more})"
            console.print(_clean(figure), highlight=False)
    console.print(f"[bold]{_clean(summary.headline(report))}[/]", highlight=False)


def _drawn(console: Console, table: summary.Table) -> Table:
    """Return a table for a terminal, without the columns that do not fit."""
    unbounded = console.options.update(width=1 << 20)
    for count in range(len(LEFT_OUT_FIRST) + 1):
        drawn = _with_columns(table, LEFT_OUT_FIRST[:count])
        if console.measure(drawn, options=unbounded).minimum <= console.width:
            break
    return drawn


def _with_columns(table: summary.Table, left_out: Sequence[str]) -> Table:
    head = table.head or ("",) * len(table.rows[0])
    kept = [at for at, name in enumerate(head) if name not in left_out]
    words = {0} | {at for row in table.rows for at, cell in enumerate(row) if cell.level == "words"}
    if not table.head:
        words.add(len(head) - 1)
    drawn = Table(title=_clean(table.title), caption=_clean(table.note), box=box.SIMPLE_HEAD)
    drawn.title_justify = drawn.caption_justify = "left"
    drawn.show_header = bool(table.head)
    for at in kept:
        if at in words:  # It may take several lines.
            drawn.add_column(_clean(head[at]), overflow="fold", min_width=WORDS_COLUMNS)
        else:
            least = max(cell_len(text) for text in (head[at], *(row[at].text for row in table.rows)))
            drawn.add_column(_clean(head[at]), justify="right", no_wrap=True, min_width=least)
    for row in table.rows:
        drawn.add_row(*(Text(printable(row[at].text), STYLES.get(row[at].level, "")) for at in kept))
    return drawn


def show_lines(console: Console, found: tuple[list[Line], list[str]], a: str, b: str) -> None:
    """Show the figures of two reports beside each other, and notes about what else differs."""
    lines, notes = found
    rows = []
    for name, before, after in lines:
        shown = summary.share if name.endswith("errors") else number
        ratio = f"{after / before:.3f}" if before and after is not None else DASH
        cells = [DASH if value is None else shown(value) for value in (before, after)]
        rows.append(tuple(Cell(text) for text in (name, *cells, ratio)))
    console.print(f"A: {_clean(a)}\nB: {_clean(b)}", soft_wrap=True, highlight=False)
    table = summary.Table(
        "Two reports", ("Figure", "A", "B", "B over A"), tuple(rows), "Latencies are in ms."
    )
    console.print(_drawn(console, table))
    for note in notes:
        console.print(f"[dim]Differs: {_clean(note)}.[/]", soft_wrap=True)


def _clean(text: str) -> str:
    """Escape markup in foreign text, and replace control characters."""
    return escape(printable(text))


def _number(value: float | None) -> str:
    return DASH if value is None else number(value)
