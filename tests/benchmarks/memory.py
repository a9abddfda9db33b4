"""A million requests through one engine, and 200 engines opened and closed: what is left behind?

It runs with one heap for all threads (``MALLOC_ARENA_MAX=1``). With several heaps, how much the C library
keeps of a closed engine depends on which of them its threads were given.
"""

import asyncio
import ctypes
import gc
import os
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import psutil
import uvloop

import asynctrt
from asynctrt.devices.host import HostDevice
from tests.benchmarks.common import arguments, copying_model, save, show
from tests.benchmarks.mlp import mlp_onnx
from tests.benchmarks.overhead import DIM

CALLERS = 256


def now():
    gc.collect()
    # Memory that was freed and kept by the C library is not a leak: it is used again.
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "resident_kib": psutil.Process().memory_info().rss // 1024,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


async def through_one_engine(requests, in_place):
    async with asynctrt.open(copying_model(), device=HostDevice(in_place=in_place)) as engine:
        row = np.ones((1, DIM), np.float32)

        async def caller(count):
            for number in range(count):
                # Every way to end: answered, with a deadline, cancelled, refused.
                if number % 16 == 3:
                    await engine.infer(row, timeout=10)
                elif number % 64 == 5:
                    task = asyncio.create_task(engine.infer(row))
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                else:
                    await engine.infer(row)

        async def many(total):
            await asyncio.gather(*[caller(total // CALLERS) for _ in range(CALLERS)])

        await many(50_000)
        before = now()
        for part in range(4):
            await many(requests // 4)
            print(f"{in_place}: {(part + 1) * requests // 4:,} requests, {now()}", flush=True)
        return before, now()


async def engines(path, count):
    async def cycle():
        device = HostDevice(in_place="never")
        async with asynctrt.open(path, device=device) as engine:
            await asyncio.gather(*[engine.infer(np.ones((1, 512), np.float32)) for _ in range(20)])

    for _ in range(20):
        await cycle()
    before = now()
    for number in range(count):
        await cycle()
        if number % 50 == 49:
            print(f"{number + 1} engines, {now()}", flush=True)
    return before, now()


def main():
    if os.environ.get("MALLOC_ARENA_MAX") != "1":
        command = [sys.executable, "-m", "tests.benchmarks.memory", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "MALLOC_ARENA_MAX": "1"})
    options = arguments(__doc__, requests=1_000_000, engines=200)
    figures = {}
    for in_place in ("auto", "never"):
        figures[f"{options.requests:,} requests, in place: {in_place}"] = uvloop.run(
            through_one_engine(options.requests, in_place)
        )
    with tempfile.TemporaryDirectory() as folder:
        path = mlp_onnx(Path(folder) / "mlp.onnx")
        figures[f"{options.engines} engines opened and closed"] = uvloop.run(engines(path, options.engines))
    show(
        "before and after",
        ("", "resident KiB", "threads", "descriptors"),
        [
            (name, *(f"{before[figure]:,} to {after[figure]:,}" for figure in before))
            for name, (before, after) in figures.items()
        ],
    )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
