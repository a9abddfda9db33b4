"""What the benchmarks share: a table, a JSON file with the machine, and runs in turn."""

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asynctrt.bench import describe_machine

console = Console()


def arguments(doc, **defaults):
    """The options that every benchmark has, and those of one with their defaults."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def in_turn(runs, repeats, description):
    """Call every run once, then all again: A B C A B C. Returns the list of results for each name."""
    results = {name: [] for name in runs}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=repeats * len(runs))
        for _ in range(repeats):
            for name, run in runs.items():
                results[name].append(run())
                progress.advance(task)
    return results


def median(results, figure):
    return statistics.median(result[figure] for result in results)


def spread(results, figure):
    values = [result[figure] for result in results]
    return f"{min(values):,.0f} to {max(values):,.0f}"


def show(title, columns, lines, caption=""):
    machine = describe_machine()
    table = Table(title=title, caption=f"{caption} {machine['cpu']}, {machine['cores']} cores".strip())
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def save(path, title, figures):
    if path is not None:
        content = {"title": title, "machine": describe_machine(), "figures": figures}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
