"""Two models on one device, both flooded: what share of it does each get, without weights and with them?

The share of a model is what it answers beside the other, over what it answers alone. The last column is how
long one request at a time takes of a model that is asked now and then, beside a flooded one.
"""

import asyncio
import random
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
import numpy as np
from onnx import TensorProto

import asynctrt
from asynctrt._util import clock
from tests.benchmarks.common import arguments, console, in_turn, median, save, show
from tests.models import node
from tests.models import save as save_model

CALLERS = 64
ROWS = 8
WIDTHS = {"large": (512, 2048, 4), "small": (512, 1024, 3)}
"""The width of a model's input and of its layers, and how many of these there are."""

CASES = {
    "no weights": (None, None),
    "1 : 1": (1.0, 1.0),
    "3 : 1": (3.0, 1.0),
    "1 : 3": (1.0, 3.0),
}


def perceptron(path, wide, hidden, layers):
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "input"
    for layer in range(layers):
        shape = wide if not layer else hidden, hidden if layer < layers - 1 else wide
        weights.append((f"w{layer}", (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)))
        nodes.append(node("MatMul", f"{last} w{layer}", f"y{layer}"))
        last = f"y{layer}"
    nodes.append(node("Relu", last, "output"))
    row = TensorProto.FLOAT, ["rows", wide]
    return save_model(path, nodes, [("input", *row)], [("output", *row)], weights)


async def flood(engine, until_ns, seconds):
    """Return the rows/s that callers get who ask again at once, in the second half of the time."""
    rows = np.zeros((ROWS, 512), np.float32)
    half_ns = until_ns - int(seconds * 5e8)
    answered = 0

    async def ask():
        nonlocal answered
        while clock.now_ns() < until_ns:
            await engine.infer(rows)
            answered += ROWS * (clock.now_ns() > half_ns)

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(ask())
    return answered / (seconds / 2)


async def seldom(engine, until_ns, seconds):
    """Return the median ms of requests that come one by one."""
    rng, took_ms = random.Random(1), []
    while clock.now_ns() < until_ns:
        started_ns = clock.now_ns()
        await engine.infer(np.zeros((ROWS, 512), np.float32))
        took_ms.append((clock.now_ns() - started_ns) / 1e6)
        await asyncio.sleep(rng.expovariate(1 / 0.02))
    return float(np.median(took_ms))


async def run(paths, device, seconds, loads):
    """Return what each of the models gets, by its name; a load is a weight and what to do."""
    async with AsyncExitStack() as stack:
        opened = [
            (name, what, await stack.enter_async_context(_open(paths[name], device, weight)))
            for name, weight, what in loads
        ]
        until_ns = clock.now_ns() + int(seconds * 1e9)
        found = await asyncio.gather(*(what(engine, until_ns, seconds) for _, what, engine in opened))
    return {name: value for (name, _, _), value in zip(opened, found, strict=True)}


def _open(path, device, weight):
    return asynctrt.open(path, device=device, max_rows=32, contexts=4, weight=weight)


def main():
    options = arguments(__doc__, repeats=5, seconds=2.0, device="host")
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: perceptron(Path(folder) / f"{name}.onnx", *size) for name, size in WIDTHS.items()}
        measure = partial(run, paths, options.device, options.seconds)
        loads = {f"{name} alone": [(name, None, flood)] for name in WIDTHS}
        loads |= {
            case: [("large", weights[0], flood), ("small", weights[1], flood)]
            for case, weights in CASES.items()
        }
        seldom_in = {"alone": None, "no weights": (None, None), "1 : 1": (1.0, 1.0)}
        for case, weights in seldom_in.items():
            beside = [] if weights is None else [("large", weights[0], flood)]
            loads[f"seldom, {case}"] = [*beside, ("small", weights and weights[1], seldom)]
        runs = {case: partial(anyio.run, measure, load) for case, load in loads.items()}
        results = in_turn(runs, options.repeats, "measuring")
    alone = {name: median(results[f"{name} alone"], name) for name in WIDTHS}
    lines = []
    for case in CASES:
        shares = [median(results[case], name) / alone[name] for name in WIDTHS]
        rows = [f"{median(results[case], name):,.0f}" for name in WIDTHS]
        ms = ""
        if f"seldom, {case}" in results:
            ms = f"{median(results[f'seldom, {case}'], 'small'):.2f}"
        lines.append(
            (case, *rows, *(f"{share:.2f}" for share in (*shares, sum(shares), shares[0] / shares[1])), ms)
        )
    ms = f"{median(results['seldom, alone'], 'small'):.2f}"
    lines.append(("alone", *(f"{alone[name]:,.0f}" for name in WIDTHS), "1", "1", "", "", ms))
    show(
        "Two models on one device",
        ("weights", "large/s", "small/s", "large", "small", "sum", "ratio", "seldom, ms"),
        lines,
        f"{CALLERS} callers each, medians of {options.repeats} runs of {options.seconds:g} s in turn;",
    )
    save(options.json, __doc__, results)
    console.print("ratio: of the two shares, which the weights say")


if __name__ == "__main__":
    main()
