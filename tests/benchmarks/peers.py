"""The engine beside async-batcher, the best published in-process batcher, and a bare loop."""

import asyncio
import contextlib
import sys
from collections import deque
from functools import partial

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt.devices.host import HostDevice
from tests.benchmarks.common import arguments, in_turn, median, save, show, spread
from tests.benchmarks.overhead import OVERHEAD_DIM, WARM_UP_S, echo_model

try:
    from async_batcher.batcher import AsyncBatcher
except ImportError:
    sys.exit("this benchmark needs its peer: pip install async-batcher")

ROWS_MAX = 64


class Peer(AsyncBatcher):
    async def process_batch(self, batch):
        block = np.concatenate(batch)
        return [block[number : number + 1] for number in range(len(batch))]


class Bare:
    """Batch with a deque, one flush per tick, one concatenate, and futures set in a loop: the lower bound."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.queue = deque()

    async def infer(self, row):
        future = self.loop.create_future()
        self.queue.append((row, future))
        if len(self.queue) == 1:
            self.loop.call_soon(self.flush)
        return await future

    def flush(self):
        while self.queue:
            batch = [self.queue.popleft() for _ in range(min(ROWS_MAX, len(self.queue)))]
            block = np.concatenate([row for row, _ in batch])
            for number, (_, future) in enumerate(batch):
                future.set_result(block[number : number + 1])


@contextlib.asynccontextmanager
async def engine(in_place, **settings):
    device = HostDevice(in_place=in_place)
    async with asynctrt.open(echo_model(), device=device, max_rows=ROWS_MAX, **settings) as opened:
        yield opened.infer


@contextlib.asynccontextmanager
async def peer():
    batcher = Peer(max_batch_size=ROWS_MAX, max_queue_time=0.002, concurrency=4)
    yield batcher.process
    await batcher.stop()


@contextlib.asynccontextmanager
async def bare():
    yield Bare().infer


SUBJECTS = {
    "engine, events done at once": lambda: engine("always"),
    "engine, host device": lambda: engine("auto"),
    "async-batcher": peer,
    "bare loop": bare,
}


async def measure(subject, callers, seconds):
    row = np.random.default_rng(0).random((1, OVERHEAD_DIM), np.float32)
    count, is_over = 0, False

    async def caller(infer):
        nonlocal count
        while not is_over:
            await infer(row)
            count += 1

    async with subject() as infer:
        tasks = [asyncio.create_task(caller(infer)) for _ in range(callers)]
        await asyncio.sleep(WARM_UP_S)
        before, start_ns, start_cpu_ns = count, clock.now_ns(), clock.cpu_ns()
        await asyncio.sleep(seconds)
        requests, elapsed_ns = count - before, clock.now_ns() - start_ns
        cpu_ns = clock.cpu_ns() - start_cpu_ns
        is_over = True
        await asyncio.gather(*tasks)
    return {
        "requests_per_s": requests / elapsed_ns * 1e9,
        "cpu_us_per_request": cpu_ns / requests / 1e3,
        "round_trip_us": elapsed_ns / requests / 1e3 * callers,
    }


def run(subject, callers, seconds):
    return uvloop.run(measure(subject, callers, seconds))


def main():
    options = arguments(__doc__, repeats=5, seconds=0.5)
    figures = {}
    for callers in (1, 32, 256):
        results = in_turn(
            {name: partial(run, subject, callers, options.seconds) for name, subject in SUBJECTS.items()},
            options.repeats,
            f"{callers} callers",
        )
        figures[callers] = results
        base = median(results["async-batcher"], "requests_per_s")
        show(
            f"{callers} callers, float32[16] rows, at most {ROWS_MAX} a batch, uvloop",
            ("", "requests/s", "least to most", "CPU µs a request", "round trip µs", "over async-batcher"),
            [
                (
                    name,
                    f"{median(runs, 'requests_per_s'):,.0f}",
                    spread(runs, "requests_per_s"),
                    f"{median(runs, 'cpu_us_per_request'):.2f}",
                    f"{median(runs, 'round_trip_us'):,.1f}" if callers == 1 else "",
                    f"{median(runs, 'requests_per_s') / base:.2f}",
                )
                for name, runs in results.items()
            ],
            f"medians of {options.repeats} runs in turn;",
        )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
