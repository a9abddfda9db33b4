"""Put the same load on a model in four ways: three that are written by hand, and an engine.

The load is a number of callers, each of which sends a row, waits for the answer and sends the next. Beside
them something else runs on the event loop and notes how late it is woken, as any other part of an application
would be: a health check, a websocket.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from asynctrt import clock
from asynctrt.engine import Engine
from asynctrt.tensors import Array

WARM_UP_S: Final = 0.3
TICK_S: Final = 0.005
"""How often what notes the lateness of the loop wants to be woken."""

HAND_DELAY_S: Final = 0.002
"""How long the batcher by hand waits for one more row."""

Predict = Callable[[Array], Array]
"""Compute ``(rows, ...)`` and return ``(rows, ...)``. It blocks."""

Infer = Callable[[Array], Awaitable[object]]
Way = Callable[[], AbstractAsyncContextManager[Infer]]


@dataclass(slots=True)
class Measured:
    """What one way made of the load."""

    answers: int = 0
    elapsed_ns: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    late_ns: list[int] = field(default_factory=list)
    own_work_ns: int = 0

    @property
    def answers_per_s(self) -> float:
        """Answers a second; 0 before the first."""
        return self.answers / self.elapsed_ns * 1e9 if self.elapsed_ns else 0.0

    @property
    def own_share(self) -> float:
        """The share of the time in which the loop did the application's own work."""
        return self.own_work_ns / self.elapsed_ns if self.elapsed_ns else 0.0

    def latency_ms(self, percent: float) -> float:
        """Return a percentile of the latencies in ms; 0 without an answer."""
        return _percentile_ms(self.latencies_ns, percent)

    def late_ms(self, percent: float) -> float:
        """Return in ms how late something else on the loop was woken, as a percentile."""
        return _percentile_ms(self.late_ns, percent)


@asynccontextmanager
async def in_the_coroutine(predict: Predict) -> AsyncIterator[Infer]:
    """Call the model where the request is handled. Nothing else runs meanwhile."""

    async def infer(row: Array) -> Array:
        await asyncio.sleep(0)  # As a request does that comes over the network.
        return predict(row)

    yield infer


@asynccontextmanager
async def in_a_thread_each(predict: Predict) -> AsyncIterator[Infer]:
    """Call the model in a thread for each request, one row at a time."""

    async def infer(row: Array) -> Array:
        return await asyncio.to_thread(predict, row)

    yield infer


class HandBatcher:
    """Batches with a queue and a task, as an application does that writes it for itself.

    It lacks a bounded queue, deadlines, priorities, more than one batch at a time and requests of several
    rows; rows of callers that were cancelled are computed all the same.
    """

    def __init__(self, predict: Predict, max_rows: int) -> None:
        self._predict = predict
        self._max_rows = max_rows
        self._waiting: asyncio.Queue[tuple[Array, asyncio.Future[Array]]] = asyncio.Queue()

    async def infer(self, row: Array) -> Array:
        """Return the model's answer to one row."""
        answer: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((row, answer))
        return await answer

    async def run(self) -> None:
        """Compute one batch after another."""
        while True:
            rows, answers = zip(*await self._gather(), strict=True)
            try:
                computed = await asyncio.to_thread(self._predict, np.concatenate(rows))
            except Exception as error:
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for number, answer in enumerate(answers):
                if not answer.done():
                    answer.set_result(computed[number : number + 1])

    async def _gather(self) -> list[tuple[Array, asyncio.Future[Array]]]:
        batch = [await self._waiting.get()]
        with suppress(TimeoutError):
            while len(batch) < self._max_rows:
                batch.append(await asyncio.wait_for(self._waiting.get(), HAND_DELAY_S))
        return batch


@asynccontextmanager
async def by_hand(predict: Predict, max_rows: int) -> AsyncIterator[Infer]:
    """Batch by hand."""
    batcher = HandBatcher(predict, max_rows)
    task = asyncio.create_task(batcher.run())
    try:
        yield batcher.infer
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def through(engine: Engine) -> AsyncIterator[Infer]:
    """Await the engine."""
    yield engine.infer


def ways_to(predict: Predict, engine: Engine, max_rows: int) -> dict[str, Way]:
    """Return the four ways to a model by their names: a function, and an engine that computes the same."""
    return {
        "in the coroutine": partial(in_the_coroutine, predict),
        "asyncio.to_thread": partial(in_a_thread_each, predict),
        "a batcher by hand": partial(by_hand, predict, max_rows),
        "asynctrt": partial(through, engine),
    }


async def measure(
    way: Way, rows: Sequence[Array], *, callers: int, seconds: float, own_work_s: float = 0.0
) -> Measured:
    """Put a load on one way for ``seconds``, after a warm-up.

    :param rows: the callers take turns at them.
    :param own_work_s: keep the loop busy: with a task that computes for this long, lets others have a turn,
        and computes again.
    """
    load = _Load(rows, callers)
    async with way() as infer, asyncio.TaskGroup() as tasks:
        for number in range(callers):
            tasks.create_task(load.call(number, infer))
        tasks.create_task(load.notice())
        if own_work_s:
            tasks.create_task(load.work(int(own_work_s * 1e9)))
        await asyncio.sleep(WARM_UP_S)
        load.is_measured, begun_ns = True, clock.now_ns()
        await asyncio.sleep(seconds)
        load.done.elapsed_ns = clock.now_ns() - begun_ns
        load.is_measured, load.is_over = False, True
    return load.done


class _Load:
    """What runs while one way is measured, and what it finds."""

    def __init__(self, rows: Sequence[Array], callers: int) -> None:
        self._rows = rows
        self._callers = callers
        self.done = Measured()
        self.is_measured = False
        self.is_over = False

    async def call(self, number: int, infer: Infer) -> None:
        while not self.is_over:
            sent_ns = clock.now_ns()
            await infer(self._rows[number % len(self._rows)])
            number += self._callers
            if self.is_measured:
                self.done.answers += 1
                self.done.latencies_ns.append(clock.now_ns() - sent_ns)

    async def notice(self) -> None:
        while not self.is_over:
            due_ns = clock.now_ns() + int(TICK_S * 1e9)
            await asyncio.sleep(TICK_S)
            if self.is_measured:
                self.done.late_ns.append(max(0, clock.now_ns() - due_ns))

    async def work(self, work_ns: int) -> None:
        while not self.is_over:
            begun_ns = clock.now_ns()
            while clock.now_ns() - begun_ns < work_ns:
                pass
            if self.is_measured:
                self.done.own_work_ns += clock.now_ns() - begun_ns
            await asyncio.sleep(0)


def _percentile_ms(found_ns: Sequence[int], percent: float) -> float:
    return float(np.percentile(found_ns, percent)) / 1e6 if found_ns else 0.0
