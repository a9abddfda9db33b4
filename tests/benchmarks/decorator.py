"""``@asynctrt.batch`` beside ``engine.infer`` and an asyncio batcher of 30 lines, as one would write it."""

import asyncio
import contextlib
from functools import partial

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt.tensors import TensorSpec
from tests.benchmarks.common import arguments, in_turn, median, save, show, spread
from tests.benchmarks.overhead import OVERHEAD_DIM, WARM_UP_S

ROWS_MAX = 64


def function(x):
    return x + 1


def items_function(items):
    return items


class ByHand:
    """A queue, a task that takes what is there, and a future for each item."""

    def __init__(self, function, rows_max):
        self.function = function
        self.rows_max = rows_max
        self.queue = asyncio.Queue()
        self.task = asyncio.create_task(self.serve())

    async def __call__(self, item):
        future = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((item, future))
        return await future

    async def serve(self):
        while True:
            batch = [await self.queue.get()]
            while len(batch) < self.rows_max and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            try:
                results = self.function(np.stack([item for item, _ in batch]))
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():
                        future.set_result(result)


@contextlib.asynccontextmanager
async def by_hand():
    batched = ByHand(function, ROWS_MAX)
    yield batched
    batched.task.cancel()


@contextlib.asynccontextmanager
async def decorated(function, **settings):
    async with asynctrt.batch(max_rows=ROWS_MAX, **settings)(function) as batched:
        yield batched


@contextlib.asynccontextmanager
async def engine():
    specs = [TensorSpec(name, np.dtype(np.float32), (OVERHEAD_DIM,)) for name in ("input", "output")]
    model = asynctrt.FunctionModel(
        lambda inputs: function(inputs["input"]), inputs=specs[0], outputs=specs[1]
    )
    async with asynctrt.open(model, max_rows=ROWS_MAX, contexts=1) as opened:

        async def call(item):
            return (await opened.infer(item[None]))["output"][0]

        yield call


SUBJECTS = {
    "@asynctrt.batch": partial(decorated, function),
    '@asynctrt.batch, run_on="loop"': partial(decorated, function, run_on="loop"),
    "@asynctrt.batch, items=True": partial(decorated, items_function, items=True),
    "engine.infer": engine,
    "30 lines of asyncio": by_hand,
}


async def measure(subject, callers, seconds):
    item = np.random.default_rng(0).random(OVERHEAD_DIM, np.float32)
    count, is_over = 0, False

    async def caller(call):
        nonlocal count
        while not is_over:
            await call(item)
            count += 1

    async with subject() as call:
        tasks = [asyncio.create_task(caller(call)) for _ in range(callers)]
        await asyncio.sleep(WARM_UP_S)
        before, start_ns, start_cpu_ns = count, clock.now_ns(), clock.cpu_ns()
        await asyncio.sleep(seconds)
        requests, elapsed_ns = count - before, clock.now_ns() - start_ns
        cpu_ns = clock.cpu_ns() - start_cpu_ns
        is_over = True
        await asyncio.gather(*tasks)
    return {"requests_per_s": requests / elapsed_ns * 1e9, "cpu_us_per_item": cpu_ns / requests / 1e3}


def run(subject, callers, seconds):
    return uvloop.run(measure(subject, callers, seconds))


def main():
    options = arguments(__doc__, repeats=5, seconds=0.5)
    figures = {}
    for callers in (1, 256):
        results = in_turn(
            {name: partial(run, subject, callers, options.seconds) for name, subject in SUBJECTS.items()},
            options.repeats,
            f"{callers} callers",
        )
        figures[callers] = results
        show(
            f"{callers} callers, float32[{OVERHEAD_DIM}] items, at most {ROWS_MAX} a batch, uvloop",
            ("", "items/s", "least to most", "CPU µs an item"),
            [
                (
                    name,
                    f"{median(runs, 'requests_per_s'):,.0f}",
                    spread(runs, "requests_per_s"),
                    f"{median(runs, 'cpu_us_per_item'):.2f}",
                )
                for name, runs in results.items()
            ],
            f"medians of {options.repeats} runs in turn;",
        )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
