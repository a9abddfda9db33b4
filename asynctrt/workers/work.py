"""What a worker is asked for: rows of one group, from when they are taken to when they are answered."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asynctrt.runtime.shared import SharedRows
from asynctrt.scheduling.request import Request, State
from asynctrt.tensors import InferResult
from asynctrt.workers.blocks import Where
from asynctrt.workers.layout import Layout


class Desk(Protocol):
    """What the rows need of the worker's side of their front."""

    words: "memoryview[int]"
    """The front's memory."""

    def answer(self, work: "Work", result: InferResult) -> None:
        """Answer rows that were computed. It raises nothing."""


class Work:
    """Rows of a front that are being computed, from one block.

    It stands for the future of its request of the engine, so that an answer is written to the block while its
    batch is answered, and not in a callback of its own.

    :param desk: of the front.
    :param where: where they lie.
    """

    __slots__ = ("_desk", "future", "id", "layout", "requests", "shared", "where")

    def __init__(self, desk: Desk, id_: int, where: Where, layout: Layout) -> None:
        self._desk = desk
        self.id = id_
        self.where = where
        self.layout = layout
        self.future: asyncio.Future[InferResult] | None = None
        self.requests: Sequence[Request] = ()
        """Those of the engine: one, or the parts of more rows than a batch holds."""
        self.shared: SharedRows | None = None
        """Large rows, which batches may use as they lie in the block."""

    def on_launch(self) -> None:
        """Note in the block that a batch with it is launched."""
        block, _, start, _, _ = self.where
        self._desk.words[block // 8 + self.layout.launched(start)] = 1

    def done(self) -> bool:
        """Return whether it is over."""
        return self.future is None or self.future.done()

    def set_result(self, result: InferResult) -> None:
        """Answer with the result."""
        self.future = None
        self._desk.answer(self, result)

    def set_exception(self, error: BaseException) -> None:
        """End with an error, which is answered when what ended the batch is through."""
        if self.future is not None:
            self.future.set_exception(error)

    @property
    def is_read(self) -> bool:
        """Whether a batch may still read the block, although no caller waits for its answer any more.

        A thread may be gathering even small rows. Were the block free, rows of others would come there, on
        which this batch could fail, or end the process.
        """
        if self.shared is not None and self.shared.batches:
            return True
        return any(request.state is State.MASKED for request in self.requests)
