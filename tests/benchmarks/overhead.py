"""What the engine itself costs a request: a no-op model, beside a peer and a bare loop, in turn.

The model runs on the event loop, on a host device that computes in place and on the default one, and in a
thread, as functions do by default; each under 1, 32 and 256 callers, and under a lone caller with a
configured delay of 2 ms. Beside it async-batcher, the best published in-process batcher, if it is installed
(``pip install async-batcher``), and a loop that batches and can do nothing else.
"""

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec

import numpy as np

import asynctrt
from asynctrt.devices.host import HostDevice
from tests.benchmarks.common import arguments, copying_model, in_turn, report, requests_of, save

DIM = 16
CALLERS = (1, 32, 256)
ROWS_MAX = 64


@asynccontextmanager
async def engine(in_place, run_on, **settings):
    device = HostDevice(in_place=in_place)
    async with asynctrt.open(
        copying_model(run_on=run_on), device=device, max_rows=ROWS_MAX, **settings
    ) as opened:
        yield opened.infer


@asynccontextmanager
async def peer():
    from async_batcher.batcher import AsyncBatcher

    class Peer(AsyncBatcher):
        async def process_batch(self, batch):
            block = np.concatenate(batch)
            return [block[number : number + 1] for number in range(len(batch))]

    batcher = Peer(max_batch_size=ROWS_MAX, max_queue_time=0.002, concurrency=4)
    yield batcher.process
    await batcher.stop()


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


@asynccontextmanager
async def bare():
    yield Bare().infer


SUBJECTS = {
    "immediate": partial(engine, "always", "loop"),
    "host": partial(engine, "auto", "loop"),
    "thread": partial(engine, "auto", "thread"),
    "bare loop": bare,
}
if find_spec("async_batcher") is not None:
    SUBJECTS["async-batcher"] = peer


async def measure(subject, callers, seconds):
    row = np.random.default_rng(0).random((1, DIM), np.float32)
    async with subject() as infer:
        return await requests_of(infer, [row] * callers, seconds)


def main():
    options = arguments(__doc__, repeats=5, seconds=0.5)
    subjects = {
        f"{name}, {callers}": (made, callers) for callers in CALLERS for name, made in SUBJECTS.items()
    }
    subjects["host, 1, max_delay=2 ms"] = partial(engine, "auto", "loop", max_delay=0.002), 1
    runs = {name: partial(measure, *subject, options.seconds) for name, subject in subjects.items()}
    results = in_turn(runs, options.repeats)
    figures = {"requests_per_s": ",.0f", "cpu_us_per_request": ".2f", "mean_us": ",.1f"}
    report("A no-op model and callers", results, "medians of runs in turn;", **figures)
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
