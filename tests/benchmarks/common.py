"""Helpers that the benchmarks share: callers, a table, a JSON file with the machine, and runs in turn."""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import uvloop

from asynctrt._util import clock
from asynctrt.backends.function import FunctionModel
from asynctrt.loadtest.making import describe_machine
from asynctrt.tensors import TensorSpec

WARM_UP_S = 0.15


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


def in_turn(runs, repeats, description=""):
    """Call every run once, then all again (A B C A B C), and return the list of results for each name.

    A run that returns a coroutine has an event loop of its own.
    """
    results = {name: [] for name in runs}
    for turn in range(repeats):
        for name, run in runs.items():
            print(f"{description}: {name}, {turn + 1} of {repeats}", file=sys.stderr, flush=True)
            found = run()
            results[name].append(uvloop.run(found) if asyncio.iscoroutine(found) else found)
    return results


def copying_model(service_s=None, *, run_on="thread", name=None):
    """Return a model that copies its float32[16] rows.

    :param service_s: a function that returns for how long a batch of some rows takes, which is slept.
    """

    def copy(inputs, outputs):
        if service_s is not None:
            time.sleep(service_s(len(inputs["input"])))
        outputs["output"][...] = inputs["input"]

    input_, output = (TensorSpec(name, "float32", (16,)) for name in ("input", "output"))
    return FunctionModel(copy, inputs=input_, outputs=output, run_on=run_on, name=name)


async def asked_again(infer, inputs, seconds, check_answer=None, look=lambda: None, warm_up_s=WARM_UP_S):
    """Have one caller for each of ``inputs`` send it again and again, for ``seconds`` after a warm-up.

    Each caller's last answer is checked: ``check_answer(rows, answer)``.

    :param look: called when the measurement begins and when it ends.
    :returns: the latencies and the elapsed and the CPU time in ns, and what ``look`` returned.
    """
    is_over = is_measured = False
    latencies_ns = []

    async def caller(rows):
        answer = None
        while not is_over:
            sent_ns = clock.now_ns()
            answer = await infer(rows)
            if is_measured:
                latencies_ns.append(clock.now_ns() - sent_ns)
        if check_answer is not None:
            check_answer(rows, answer)

    async with asyncio.TaskGroup() as group:
        for rows in inputs:
            group.create_task(caller(rows))
        await asyncio.sleep(warm_up_s)
        is_measured = True
        before, start_ns, start_cpu_ns = look(), clock.now_ns(), clock.cpu_ns()
        await asyncio.sleep(seconds)
        after, elapsed_ns, cpu_ns = look(), clock.now_ns() - start_ns, clock.cpu_ns() - start_cpu_ns
        is_measured, is_over = False, True
    return latencies_ns, elapsed_ns, cpu_ns, before, after


async def requests_of(infer, inputs, seconds, check_answer=None, **given):
    """Return the figures of callers by request: see :func:`asked_again`."""
    latencies_ns, elapsed_ns, cpu_ns, *looks = await asked_again(
        infer, inputs, seconds, check_answer, **given
    )
    count = max(len(latencies_ns), 1)
    figures = {
        "requests_per_s": len(latencies_ns) / elapsed_ns * 1e9,
        "cpu_us_per_request": cpu_ns / count / 1e3,
        "cores": cpu_ns / elapsed_ns,
        # Where no request ended meanwhile, each took as long at the least.
        **quantiles_us(latencies_ns or [elapsed_ns]),
    }
    if looks[0] is not None:
        before, after = looks
        figures["mean_batch_rows"] = (after.rows - before.rows) / max(after.batches - before.batches, 1)
    return figures


def quantiles_us(times_ns):
    """Return the median, the 99th percentile and the maximum, in µs."""
    p50, p99 = np.percentile(times_ns, [50, 99])
    return {
        "p50_us": float(p50) / 1e3,
        "p99_us": float(p99) / 1e3,
        "mean_us": float(np.mean(times_ns)) / 1e3,
        "max_us": max(times_ns) / 1e3,
        "count": len(times_ns),
    }


AGAIN = 256
"""Answers after a kill that were not on their way before."""


async def answered_again_s(callers):
    """Return how long it takes until ``AGAIN`` more requests have been answered."""
    began_s, before = time.perf_counter(), callers.answered
    while callers.answered < before + AGAIN:
        await asyncio.sleep(0.001)
    return time.perf_counter() - began_s


def outcome_of(callers, requests, pauses_s, seconds):
    """Return what became of requests under kills."""
    counts = {name: getattr(callers, name) for name in ("answered", "lost", "wrong", "twice")}
    return {
        "requests": requests,
        **counts,
        "pauses_ms": [pause_s * 1e3 for pause_s in pauses_s],
        "requests_per_s": callers.answered / seconds,
    }


def median(results, figure):
    return statistics.median(result[figure] for result in results)


def medians(runs):
    """Return the median of each figure over repeated runs."""
    return {name: median(runs, name) for name in runs[0]}


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


def show(title, columns, lines, caption="", *, device=None):
    """Print a plain table, for log files and for machines that have only what the engine needs."""
    lines = [tuple(columns), *(tuple(line) for line in lines)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        first, *others = zip(line, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]).rstrip())
        if line is lines[0]:
            print("  ".join("-" * width for width in widths))
    machine, gpu = describe_machine(), device and describe_gpu(device)
    on = f"{machine['cpu']}, {machine['cores']} cores"
    if gpu:
        on = f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; {on}"
    print(f"{caption} On: {on}".strip(), flush=True)


def report(title, results, caption="", *, device=None, **formats):
    """Show for each case the medians of its runs: ``p99_us=",.0f"`` says how a figure is written."""
    lines = []
    for name, runs in results.items():
        cells = [
            f"{median(runs, figure):{form}}" if figure in runs[0] else "" for figure, form in formats.items()
        ]
        first = next(iter(formats))
        lines.append((str(name), *cells, spread(runs, first) if first in runs[0] else ""))
    columns = [figure.replace("_", " ") for figure in formats]
    show(title, ("", *columns, f"{columns[0]}, least to most"), lines, caption, device=device)


def save(path, title, figures, device=None):
    if path is not None:
        machine = describe_machine()
        if device is not None:
            machine["gpu"] = describe_gpu(device)
        content = {"title": title, "machine": machine, "figures": figures}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
