"""Helpers that the benchmarks share: a table, a JSON file with the machine, and runs in turn."""

import argparse
import json
import statistics
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asynctrt.loadtest.making import describe_machine

try:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
except (
    ImportError
):  # The benchmarks for a GPU do without it: their machine may have only what the engine needs.
    console = None
else:
    console = Console()


def arguments(doc, **defaults):
    """Parse the options of every benchmark, and those of one with their defaults."""
    return parser_of(doc, **defaults).parse_args()


def parser_of(doc, **defaults):
    """Return a parser of the options of every benchmark, and of those of one with their defaults."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", "--results", type=Path, metavar="FILE", help="write the figures here")
    for name, value in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=value)
    return parser


def in_turn(runs, repeats, description):
    """Call every run once, then all again (A B C A B C), and return the list of results for each name."""
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


def describe_gpu(device):
    """Describe the GPU, its driver and its libraries; ``None`` for the host device."""
    if device.name == "host":
        return None
    from cuda.bindings import driver

    cuda_version = int(driver.cuDriverGetVersion()[1])
    described = {
        "name": device.gpu,
        "compute_capability": ".".join(map(str, device.compute_capability)),
        "driver": driver_version(),
        "cuda": f"{cuda_version // 1000}.{cuda_version % 1000 // 10}",
    }
    for package in ("cuda-bindings", "torch"):
        with suppress(PackageNotFoundError):
            described[package] = version(package)
    return described


def driver_version():
    """Return the driver's version from ``nvidia-smi``, if that is installed."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return said.split()[0] if said.split() else "unknown"
    return "unknown"


def show(title, columns, lines, caption=""):
    machine = describe_machine()
    table = Table(title=title, caption=f"{caption} {machine['cpu']}, {machine['cores']} cores".strip())
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def save(path, title, figures, device=None):
    if path is not None:
        machine = describe_machine()
        if device is not None:
            machine["gpu"] = describe_gpu(device)
        content = {"title": title, "machine": machine, "figures": figures}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
