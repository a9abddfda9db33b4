"""What a worker is asked for: rows of one group, from when they are taken to when they are answered."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asynctrt.runtime.shared import SharedRows
from asynctrt.scheduling.request import Request, State
from asynctrt.tensors import InferResult
from asynctrt.workers.blocks import Where
from asynctrt.workers.layout import BlockArrays, Layout


class Driver(Protocol):
    """What runs the requests of the engine."""

    def cancel(self, request: Request) -> None:
        """Drop a request whose caller has gone."""


class Desk(Protocol):
    """What the rows need of the worker's side of their front."""

    words: "memoryview[int]"
    """The front's memory."""

    def answer(self, work: "Work", result: InferResult) -> None:
        """Answer rows that were computed. It raises nothing."""

    def fail_soon(self, work: "Work", error: BaseException) -> None:
        """Answer rows with an error, when what ended their batch is through. It raises nothing."""


class Work:
    """Rows of a front that are being computed, from one block.

    It stands for the future of its request of the engine, so that an answer is written to the block while its
    batch is answered, and not in a callback of its own.

    :param desk: of the front.
    :param where: where they lie.
    """

    __slots__ = (
        "_desk",
        "_driver",
        "arrays",
        "id",
        "is_over",
        "layout",
        "requests",
        "shared",
        "task",
        "where",
        "word",
    )

    arrays: BlockArrays
    """The rows, and where their outputs go."""

    def __init__(self, desk: Desk, id_: int, where: Where, layout: Layout) -> None:
        self._desk = desk
        self._driver: Driver | None = None
        self.id = id_
        self.where = where
        self.layout = layout
        self.word = where.block // 8 + layout.launched(where.start)
        """The word of the front's memory that says how far it has come."""
        self.is_over = False
        """Whether it was computed, has failed or was cancelled. Its answer may still be on the way."""
        self.task: asyncio.Task[InferResult] | None = None
        """What joins the parts of more rows than a batch holds. It says how they end."""
        self.requests: Sequence[Request] = ()
        """Those of the engine: one, or those of the parts."""
        self.shared: SharedRows | None = None
        """Large rows, which batches may use as they lie in the block."""

    def queued(self, driver: Driver, request: Request) -> None:
        """Note what its request is, and what runs it."""
        self._driver = driver
        self.requests = (request,)

    def on_launch(self) -> None:
        """Note in the block that a batch with it is launched."""
        self._desk.words[self.word] = 1

    def on_answer(self) -> None:
        """Note in the block that the answer is in it, or in a larger one that the front has for it."""
        self._desk.words[self.word] = self.layout.stamp(self.id)

    def cancel(self) -> None:
        """End it without an answer; what is in flight is computed all the same."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()
        elif self._driver is not None:
            self._driver.cancel(self.requests[0])

    # What a driver does with the future of a request.

    def done(self) -> bool:
        """Return whether it is over."""
        return self.is_over

    def set_result(self, result: InferResult) -> None:
        """Answer with the result."""
        self.is_over = True
        self._desk.answer(self, result)

    def set_exception(self, error: BaseException) -> None:
        """Answer with an error."""
        self.is_over = True
        self._desk.fail_soon(self, error)

    @property
    def is_read(self) -> bool:
        """Whether a batch may still read the block, although no caller waits for its answer any more.

        A thread may be gathering even small rows. Were the block free, rows of others would come there, on
        which this batch could fail, or end the process.
        """
        if self.shared is not None and self.shared.batches:
            return True
        return any(request.state is State.MASKED for request in self.requests)
