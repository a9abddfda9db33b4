"""Latency under Poisson arrivals of 1, 2 and 16 shapes, beside the best possible and a batcher by hand.

Batches hold up to 16 rows of one shape. "fills" takes all multiprocessors for 0.5 ms and 31 µs a row; "small"
takes an eighth of them for eight times as long, so that both can compute the same number of rows a second.
The rates are shares of that number. Shapes are equally frequent, and drawn at random. The engine has 12
contexts for "small", of which eight fit, and 4 for "fills". Beside it, in the same process and in turn:

- "by hand": one thread for each batch that can compute at once, which gathers, copies and waits; when one is
  free, its batch is what waits of the shape of the oldest request.
- "ideal": the same, for as long as the kernels are told to take, with everything else for nothing.

Answers are checked. On the host device the kernels sleep.
"""

import asyncio
import heapq
from collections import deque

import numpy as np
import uvloop

import asynctrt
from tests.benchmarks.common import arguments, medians, save, show
from tests.benchmarks.gpu.batchers import ByHand
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.raw import Batch
from tests.benchmarks.gpu.resnet import Poisson, at_rate
from tests.benchmarks.gpu.support import check, open_device, said

ROWS = 16
SIZES = (1, 2, 4, 8, 16)
DIM = 64
SMALL = 8
"""How many batches of the small model fit beside each other."""


def work_of(width):
    """Return the time of a batch by its rows, for a model of which ``width`` batches compute at once."""
    return lambda rows: width * (500_000 + 31_250 * rows)


def inputs(shapes, count=64):
    """Return a row of each of some shapes again and again, in random order."""
    rng = np.random.default_rng(3)
    dims = [DIM * int(number) for number in rng.integers(1, shapes + 1, count)]
    return [np.full((1, dim), number, np.float32) for number, dim in enumerate(dims)]


class Lane:
    """What a good engineer writes for each batch that computes at once: memory for each shape and size."""

    def __init__(self, device, kernels, width, rows):
        stream = device.create_stream()
        self._batches = {}
        for dim in {row.shape[1] for row in rows}:
            model = SpinModel(kernels, work_of(width), row=(dim,), share=1 / width)
            for size in SIZES:
                self._batches[dim, size] = Batch(device, model, size, None, stream, is_captured=False)

    def __call__(self, rows):
        batch = self._batches[rows[0].shape[1], next(size for size in SIZES if size >= len(rows))]
        np.concatenate(rows, out=batch.slab.inputs[0][: len(rows)])
        batch.launch()
        batch.end.synchronize()
        return [{"output": row[np.newaxis].copy()} for row in batch.answer()["output"][: len(rows)]]

    def close(self):
        for batch in self._batches.values():
            batch.close()


def ideal(width, rows, rate, seconds, seed):
    """Return the latency of so many lanes that are never late, as :class:`Poisson` counts it."""
    count = max(int(rate * seconds), 1)
    due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    work_ns = work_of(width)
    free = [0.0] * width
    waiting = {}
    latencies = np.empty(count)
    arrived = answered = 0
    while answered < count:
        time_s = heapq.heappop(free)
        if not any(waiting.values()):
            time_s = max(time_s, due[arrived])
        while arrived < count and due[arrived] <= time_s:
            waiting.setdefault(rows[arrived % len(rows)].shape[1], deque()).append(arrived)
            arrived += 1
        _, dim = min((queue[0], dim) for dim, queue in waiting.items() if queue)
        taken = [waiting[dim].popleft() for _ in range(min(ROWS, len(waiting[dim])))]
        end_s = time_s + work_ns(next(size for size in SIZES if size >= len(taken))) / 1e9
        heapq.heappush(free, end_s)
        for number in taken:
            latencies[number] = end_s - due[number]
        answered += len(taken)
    p50, p99 = np.percentile(latencies[count // 5 :], [50, 99]) * 1e6
    return {"p50_us": float(p50), "p99_us": float(p99)}


async def check_all(batcher, rows):
    answers = await asyncio.gather(*[batcher.submit(row) for row in rows])
    for row, answer in zip(rows, answers, strict=True):
        check(answer, {"output": 2 * row})


async def by_hand_under_load(device, kernels, width, rows, rate, options):
    lanes = [Lane(device, kernels, width, rows) for _ in range(width)]
    batcher = ByHand(lanes, ROWS)
    try:
        await check_all(batcher, rows)
        return [
            await Poisson(batcher, rows, rate, options.seconds, seed).run()
            for seed in range(1, options.repeats + 1)
        ]
    finally:
        await batcher.aclose()
        for lane in lanes:
            lane.close()


async def engine_under_load(device, kernels, width, rows, rates, options):
    """Return by share what it does at each rate."""
    model = SpinModel(kernels, work_of(width), row=("length",), share=1 / width)
    found = {}
    contexts = max(width + width // 2, 4)
    async with asynctrt.open(model, device=device, contexts=contexts, max_rows=ROWS) as engine:
        await check_all(engine, rows)
        asynctrt.tune_process()
        for share, rate in rates.items():
            found[share] = await at_rate(engine, rows, rate, options)
        await check_all(engine, rows)
    return found


def measure(device, kernels, width, shapes, options):
    """Return by share of the capacity, and by batcher, what was measured."""
    capacity = width * ROWS / work_of(width)(ROWS) * 1e9
    rates = {f"{share:.0%}": share * capacity for share in map(float, options.shares.split(","))}
    rows = inputs(shapes)
    found = {}
    for share, rate in rates.items():
        seeds = range(1, options.repeats + 1)
        by_hand = uvloop.run(by_hand_under_load(device, kernels, width, rows, rate, options))
        found[share] = {
            "ideal": medians([ideal(width, rows, rate, options.seconds, seed) for seed in seeds]),
            "by hand": medians(by_hand),
        }
    engine = uvloop.run(engine_under_load(device, kernels, width, rows, rates, options))
    for share, case in engine.items():
        found[share]["engine"] = case
    return found


def main():
    options = arguments(
        __doc__, device="cuda:0", seconds=2.0, repeats=3, shares="0.2,0.5,0.8", shapes="1,2,16"
    )
    device = open_device(options.device)
    kernels = kernels_on(device)
    asynctrt.tune_process()
    figures = {}
    try:
        for name, width in (("small", SMALL), ("fills", 1)):
            for shapes in map(int, options.shapes.split(",")):
                case = f"{name}, {shapes} shape{'s' if shapes > 1 else ''}"
                with said(case):
                    figures[case] = measure(device, kernels, width, shapes, options)
    finally:  # What was measured before something failed is worth having.
        show(
            "latency under Poisson arrivals, from when a request was due",
            ("model", "load", "batcher", "p50 ms", "p99 ms", "p99 / ideal", "rows a batch", "errors"),
            [
                (
                    *(case, share, name, f"{run['p50_us'] / 1e3:.2f}", f"{run['p99_us'] / 1e3:.2f}"),
                    f"{run['p99_us'] / loads['ideal']['p99_us']:.2f}",
                    f"{run['rows_a_batch']:.1f}" if "rows_a_batch" in run else "",
                    str(int(run["errors"])) if run.get("errors") else "",
                )
                for case, by_share in figures.items()
                for share, loads in by_share.items()
                for name, run in loads.items()
            ],
            f"load: of {ROWS / work_of(1)(ROWS) * 1e9:,.0f} rows/s.",
            device=device,
        )
        save(options.json, __doc__, figures, device=device)


if __name__ == "__main__":
    main()
