"""Two models on one device, both flooded: what share of it does each get, without weights and with them?

Batches hold 16 rows. Those of "slow" and "quick" take all multiprocessors for 8 and for 1 ms, "small" an
eighth of them for 2 ms. The share of a model is what it answers beside the other, over what it answers
alone. Answers are checked. On the host device the kernels sleep.
"""

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import numpy as np

import asynctrt
from tests.benchmarks.common import arguments, in_turn, median, save, show
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.support import check, closed_loop, open_device

ROWS = 16
CALLERS = 64
MODELS = {"slow": (8_000_000, 1.0), "quick": (1_000_000, 1.0), "small": (2_000_000, 0.125)}
"""How long a batch takes, in ns, and which share of the multiprocessors."""

CASES = {
    "no weights": (None, None),
    "1 : 1": (1.0, 1.0),
    "3 : 1": (3.0, 1.0),
    "1 : 3": (1.0, 3.0),
}
PAIRS = [("slow", "quick"), ("quick", "small")]


async def flood(device, kernels, loads, seconds):
    """Return the rows/s of each model; a load is its name and its weight."""
    rows = [np.full((1, 512), number, np.float32) for number in range(CALLERS)]
    async with AsyncExitStack() as stack:
        engines = {}
        for name, weight in loads:
            work_ns, share = MODELS[name]
            engines[name] = await stack.enter_async_context(
                asynctrt.open(
                    SpinModel(kernels, work_ns, share=share),
                    device=device,
                    contexts=4,
                    max_rows=ROWS,
                    weight=weight,
                )
            )
        found = await asyncio.gather(
            *(
                closed_loop(engine, lambda row, answer: check(answer, {"output": 2 * row}), rows, seconds)
                for engine in engines.values()
            )
        )
    return {name: run["rows_per_s"] for name, run in zip(engines, found, strict=True)}


def quotient(one, other):
    """Divide; NaN if nothing was answered in a short time on a busy machine."""
    return one / other if other else float("nan")


def main():
    options = arguments(__doc__, device="cuda:0", seconds=1.0, repeats=3)
    device = open_device(options.device)
    kernels = kernels_on(device)
    loads = {f"{name} alone": [(name, None)] for name in MODELS}
    loads |= {
        f"{first}, {second}, {case}": [(first, weights[0]), (second, weights[1])]
        for first, second in PAIRS
        for case, weights in CASES.items()
    }

    runs = in_turn(
        {case: partial(flood, device, kernels, load, options.seconds) for case, load in loads.items()},
        options.repeats,
        "measuring",
    )
    alone = {name: median(runs[f"{name} alone"], name) for name in MODELS}
    lines, found = [], {}
    for pair in PAIRS:
        for case in CASES:
            of_pair = runs[f"{pair[0]}, {pair[1]}, {case}"]
            shares = [quotient(median(of_pair, name), alone[name]) for name in pair]
            found[", ".join((*pair, case))] = dict(zip(pair, shares, strict=True))
            texts = [f"{share:.2f}" for share in (*shares, sum(shares), quotient(*shares))]
            lines.append((" and ".join(pair), case, *texts))
    show(
        f"two flooded models on one device, {CALLERS} callers each",
        ("models", "weights", "first", "second", "sum", "ratio"),
        lines,
        "shares of what each answers alone, and the ratio that the weights say.",
        device=device,
    )
    save(options.json, __doc__, {"alone": alone, "shares": found}, device)


if __name__ == "__main__":
    main()
