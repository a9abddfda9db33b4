"""How exactly are delays and timeouts below a millisecond kept? On uvloop and on asyncio.

For a timeout it measures how long after its deadline a queued request is answered; for a delay, how long
after its end a batch that is not full is launched. Another batch is in flight meanwhile, or neither would
wait at all.
"""

import asyncio
import contextlib

import anyio
import numpy as np

import asynctrt
from asynctrt._util import clock
from asynctrt.testing import LatchDevice
from tests.benchmarks.common import arguments, save, show
from tests.models import double_model, rows


async def late_timeouts(seconds, count):
    device, late = LatchDevice(concurrency=1), []
    async with asynctrt.open(double_model(), device=device, contexts=1) as engine:
        blocker = asyncio.create_task(engine.infer(rows(1)))
        while not device.held:
            await asyncio.sleep(0)
        for _ in range(count):
            sent_ns = clock.now_ns()
            with contextlib.suppress(asynctrt.DeadlineError):
                await engine.infer(rows(1), timeout=seconds)
            late.append((clock.now_ns() - sent_ns) / 1000 - seconds * 1e6)
        device.open()
        await blocker
    return late


async def late_launches(seconds, count):
    device, late = LatchDevice(concurrency=2), []
    async with asynctrt.open(double_model(), device=device, contexts=2, max_delay=seconds) as engine:
        for _ in range(count):
            blocker = asyncio.create_task(engine.infer(rows(1)))
            while not device.held:
                await asyncio.sleep(0)
            follower = asyncio.create_task(engine.infer(rows(2)))
            # A timer of its own would disturb the measurement: sleep until the engine acts.
            while device.held < 2:
                await asyncio.sleep(0.002)
            device.release(2)
            await blocker
            late.append((await follower).timing.queue_ns / 1000 - seconds * 1e6)
    return late


def main():
    options = arguments(__doc__, count=200)
    figures, lines = {}, []
    for loop in ("uvloop", "asyncio"):
        for what, measure in (("timeout", late_timeouts), ("delay", late_launches)):
            for microseconds in (100, 300, 700, 1400, 5000):
                late = anyio.run(
                    measure,
                    microseconds / 1e6,
                    options.count,
                    backend_options={"use_uvloop": loop == "uvloop"},
                )
                least, p50, p99 = min(late), *np.percentile(late, [50, 99])
                figures[f"{loop} {what} {microseconds}"] = {"least": least, "p50": p50, "p99": p99}
                lines.append(
                    (f"{loop}, {what} of {microseconds} µs", *(f"{v:,.0f}" for v in (least, p50, p99)))
                )
    show("late by, µs", ("", "least", "p50", "p99"), lines, f"{options.count} each;")
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
