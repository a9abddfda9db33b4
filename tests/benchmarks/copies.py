"""Copying rows: gathered late or on arrival, as one block or one by one, on the loop or off it.

``COPY_ON_LOOP_NBYTES_MAX`` was chosen from the last table: how long a batch of a given size blocks the loop,
against what handing the copy to a thread costs the batch.
"""

import asyncio
import timeit

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt.backends.function import FunctionModel
from asynctrt.runtime import driver
from asynctrt.tensors import TensorSpec
from tests.benchmarks.common import arguments, save, show

BATCH = 64


def us(function):
    function()
    number = max(1, int(0.02 / max(timeit.timeit(function, number=1), 1e-7)))
    return min(timeit.repeat(function, number=number, repeat=5)) / number * 1e6


def gathering():
    figures = {}
    for floats in (16, 512, 4096, 37_500):
        slab = np.zeros((BATCH, floats), np.float32)
        rows = [np.ones((1, floats), np.float32) for _ in range(BATCH)]

        def late(slab=slab, rows=rows):
            np.concatenate(rows, out=slab)  # As a batch's rows are staged.

        def on_arrival(slab=slab, rows=rows):
            for number, row in enumerate(rows):
                slab[number : number + 1] = row

        def as_a_block(slab=slab):
            return [{"output": row} for row in slab[:, None].copy()]

        def one_by_one(slab=slab):
            return [{"output": row.copy()} for row in slab[:, None]]

        figures[floats * 4] = {
            "gathered late": us(late),
            "on arrival": us(on_arrival),
            "out as a block": us(as_a_block),
            "out one by one": us(one_by_one),
        }
    return figures


def copying_model(floats):
    def copy(inputs, outputs):
        outputs["output"][...] = inputs["input"][:, :1]

    return FunctionModel(
        copy,
        inputs=TensorSpec("input", "float32", (floats,)),
        outputs=TensorSpec("output", "float32", (1,)),
    )


async def longest_stop(nbytes, *, off_loop, batches):
    """Return the loop's longest stop and the batch's latency in µs, as medians over batches of this size."""
    before, driver.GATHER_ON_LOOP_NBYTES_MAX = driver.GATHER_ON_LOOP_NBYTES_MAX, 0 if off_loop else 1 << 60
    floats = nbytes // 4 // 8
    stops, latencies = [], []
    try:
        async with asynctrt.open(copying_model(floats), max_rows=8) as engine:
            rows = [np.ones((1, floats), np.float32) for _ in range(8)]
            for _ in range(batches):
                stop_ns = 0
                task = asyncio.gather(*[engine.infer(row) for row in rows])
                start_ns = last_ns = clock.now_ns()
                while not task.done():
                    await asyncio.sleep(0)
                    now_ns = clock.now_ns()
                    stop_ns, last_ns = max(stop_ns, now_ns - last_ns), now_ns
                await task
                stops.append(stop_ns / 1000)
                latencies.append((clock.now_ns() - start_ns) / 1000)
    finally:
        driver.GATHER_ON_LOOP_NBYTES_MAX = before
    return float(np.median(stops)), float(np.median(latencies))


def main():
    options = arguments(__doc__, batches=50)
    copies = gathering()
    names = list(next(iter(copies.values())))
    show(
        "a batch of 64 rows, µs",
        ("bytes a row", *names),
        [(f"{size:,}", *(f"{figures[name]:,.1f}" for name in names)) for size, figures in copies.items()],
    )
    stops = {}
    for kib in (64, 256, 512, 1024, 2048, 4096, 16384, 65536):
        on_loop = uvloop.run(longest_stop(kib * 1024, off_loop=False, batches=options.batches))
        off_loop = uvloop.run(longest_stop(kib * 1024, off_loop=True, batches=options.batches))
        stops[kib] = {"on the loop": on_loop, "off the loop": off_loop}
    show(
        "a batch of 8 rows, µs",
        ("KiB a batch", "loop stops, on", "loop stops, off", "latency, on", "latency, off"),
        [
            (f"{kib:,}", *(f"{way[figure]:,.0f}" for figure in (0, 1) for way in ways.values()))
            for kib, ways in stops.items()
        ],
        f"medians of {options.batches} batches;",
    )
    save(options.json, __doc__, {"copies": copies, "stops": stops})


if __name__ == "__main__":
    main()
