"""Show in a terminal what `asynctrt bench` found."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asynctrt import bench as benchmarks


def show_overhead(out: Console, report: benchmarks.BenchReport) -> None:
    """Print the cost of the engine itself as a table; nothing, if nothing was measured."""
    if not _was_measured(report):
        return
    table = _table(report, ("requests/s", "spread", "CPU µs a\nrequest", "round trip\nµs", "mean\nbatch"))
    for case in report.cases:
        rate, spread = case.median("requests_per_s"), case.spread("requests_per_s")
        if rate is None or spread is None:
            continue
        lone = case.labels["callers"] == 1
        table.add_row(
            case.name,
            f"{rate:,.0f}",
            _width(rate, spread),
            _figure(case, "cpu_us_per_request"),
            _figure(case, "round_trip_us") if lone else "",
            _figure(case, "mean_batch_rows", 1),
        )
    out.print(table)


def show_model(out: Console, report: benchmarks.BenchReport) -> None:
    """Print an engine beside plain ONNX Runtime as a table; nothing, if nothing was measured."""
    if not _was_measured(report):
        return
    raw = {
        (case.labels["threads"], case.labels["rows"]): rate
        for case in report.cases
        if case.labels["kind"] == "raw" and (rate := case.median("rows_per_s"))
    }
    threads = sorted({threads for threads, _ in raw})
    over = tuple(f"over raw,\n{count} thread{'s' * (count > 1)}" for count in threads)
    table = _table(
        report,
        ("rows/s", "spread", *over, "CPU µs\na row", "mean\nbatch", "p50\nms", "p99\nms"),
        "over raw: over ONNX Runtime alone, with the largest batch that the callers could fill; ",
    )
    for case in report.cases:
        rate, spread = case.median("rows_per_s"), case.spread("rows_per_s")
        if rate is None or spread is None:
            continue
        table.add_row(
            case.name,
            f"{rate:,.0f}",
            _width(rate, spread),
            *(_over_raw(case, rate, raw, count) for count in threads),
            _figure(case, "cpu_us_per_row"),
            _figure(case, "mean_batch_rows", 1),
            _figure(case, "p50_ms", 1),
            _figure(case, "p99_ms", 1),
        )
    out.print(table)


def _was_measured(report: benchmarks.BenchReport) -> bool:
    return any(case.runs for case in report.cases)


def _over_raw(
    case: benchmarks.BenchCase, rate: float, raw: dict[tuple[int, int], float], threads: int
) -> str:
    """Return the engine's rate over that of the largest raw batch that its callers could fill."""
    if case.labels["kind"] != "engine":
        return ""
    sizes = [rows for count, rows in raw if count == threads]
    rows = max((size for size in sizes if size <= case.labels["callers"]), default=min(sizes))
    return f"{rate / raw[threads, rows]:.2f}"


def _width(rate: float, spread: tuple[float, float]) -> str:
    """Return how far the repetitions lie apart, as a share of their median."""
    return f"{(spread[1] - spread[0]) / rate:.0%}" if rate else ""


def _table(report: benchmarks.BenchReport, columns: tuple[str, ...], legend: str = "") -> Table:
    machine = benchmarks.describe_machine()
    settings = ", ".join(f"{key} {value}" for key, value in report.settings.items())
    # Interrupted, some cases have run once more than others, and some perhaps not at all.
    runs = " or ".join(str(count) for count in sorted({len(case.runs) for case in report.cases} - {0}))
    table = Table(
        title=report.title,
        title_justify="left",
        caption=escape(
            f"median of {runs}; spread: largest minus least; {legend}{settings}; {machine['cpu']}, "
            f"{machine['cores']} cores, Python {machine['versions']['python']}"
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _figure(case: benchmarks.BenchCase, name: str, digits: int = 2) -> str:
    value = case.median(name)
    if value is None:
        return ""
    return f"{value:,.{digits if value < 1000 else 0}f}"
