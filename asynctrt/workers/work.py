"""A worker's state of one group's rows, from when they are accepted to when they are answered."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asynctrt.core.intake import Intake
from asynctrt.runtime.shared import SharedRows
from asynctrt.scheduling.request import Request, State
from asynctrt.tensors import InferResult
from asynctrt.workers.blocks import Where
from asynctrt.workers.layout import BlockArrays, GroupLayout


class Desk(Protocol):
    """The part of the worker's side of a front that a :class:`Work` uses."""

    words: "memoryview[int]"
    """The front's memory."""

    def answer(self, work: "Work", result: InferResult) -> None:
        """Answer computed rows. Never raises."""

    def fail_soon(self, work: "Work", error: BaseException) -> None:
        """Answer rows with an error, after the code that is ending their batch. Never raises."""


class Work:
    """A front's rows that are being computed, from one block.

    It takes the place of the future of the engine's request, so that the answer is written to the block while
    the batch is answered, without a separate callback.

    :param desk: the worker's side of the front.
    :param where: the position of the rows.
    """

    __slots__ = (
        "_desk",
        "_intake",
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
    """The rows, and the arrays for their outputs."""

    def __init__(self, desk: Desk, id_: int, where: Where, layout: GroupLayout) -> None:
        self._desk = desk
        self._intake: Intake | None = None
        self.id = id_
        self.where = where
        self.layout = layout
        self.word = where.block // 8 + layout.launched(where.start)
        """The index of the word in the front's memory that shows its progress."""
        self.is_over = False
        """Whether it was computed, has failed or was cancelled. Its answer may not have been sent yet."""
        self.task: asyncio.Task[InferResult] | None = None
        """The task that joins the parts, if there are more rows than a batch holds. Its result is theirs."""
        self.requests: Sequence[Request] = ()
        """The engine's requests: one, or one for each part."""
        self.shared: SharedRows | None = None
        """The payload of large rows, which batches may use in place."""

    def queued(self, intake: Intake, request: Request) -> None:
        """Record its request and the intake that took it."""
        self._intake = intake
        self.requests = (request,)

    def on_launch(self) -> None:
        """Mark the block as launched."""
        self._desk.words[self.word] = 1

    def on_answer(self) -> None:
        """Mark the block as answered: the answer is in it, or in the front's larger block for it."""
        self._desk.words[self.word] = self.layout.stamp(self.id)

    def cancel(self) -> None:
        """End it without an answer; rows in flight are still computed."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()
        elif self._intake is not None:
            self._intake.cancel(self.requests[0])

    # The methods of a request's future that a driver calls.

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
        """Whether a batch may still read the block, although no caller waits for its answer.

        A thread may be gathering even small rows. If the block were freed, other rows could be written there,
        and the batch could fail on them or end the process.
        """
        if self.shared is not None and self.shared.batches:
            return True
        return any(request.state is State.MASKED for request in self.requests)
