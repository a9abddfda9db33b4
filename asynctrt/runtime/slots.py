"""Slots: rows of a slab that a caller fills itself, so that they are never copied on the CPU.

Slots of one bucket share the open slab, one after the other. The slots of a slab that were submitted are one
batch of their own: they launch from where they lie. A slot that is still being written when its slab launches
is left behind; its rows are then gathered into another batch like those of any request.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from types import TracebackType
from typing import Any, Self

from asynctrt.errors import EngineClosedError, InputError, QueueFullError, UsageError
from asynctrt.runtime.bay import Slab
from asynctrt.runtime.pool import Pool
from asynctrt.scheduling.request import WholeBucket
from asynctrt.tensors import Array, InferResult


class SlotSlab:
    """A slab that callers fill, and who is still using it."""

    def __init__(self, number: int, bucket: Hashable, slab: Slab) -> None:
        self.number = number
        self.bucket = bucket
        self.slab = slab
        self.rows_given = 0
        self.slots = 0
        self.is_sealed = False
        self.is_in_flight = False
        self.on_unused: Callable[[SlotSlab], None] | None = None

    def __repr__(self) -> str:
        state = "in flight" if self.is_in_flight else "sealed" if self.is_sealed else "open"
        return f"<SlotSlab {self.number} {state} rows={self.rows_given} slots={self.slots}>"

    @property
    def batch_bucket(self) -> WholeBucket:
        """The bucket of the batch that is launched from here."""
        return WholeBucket(self.bucket, self.number)

    def launched(self) -> None:
        """Its batch is under way: no further slot may join, and nobody may write over it."""
        self.is_sealed = self.is_in_flight = True

    def ended(self) -> None:
        """Its batch is over."""
        self.is_in_flight = False
        self.tell_if_unused()

    def tell_if_unused(self) -> None:
        """Tell the board when the last user has gone."""
        if not self.slots and not self.is_in_flight and self.on_unused is not None:
            self.on_unused(self)


class SlabRows:
    """The payload of a request whose rows lie in a slab already."""

    __slots__ = ("owner", "span")

    def __init__(self, owner: SlotSlab, span: slice) -> None:
        self.owner = owner
        self.span = span


class SlotBoard:
    """Gives out the rows of a bounded number of slabs, in order of asking."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
        slabs_max: int,
        limit_of: Callable[[Hashable], int],
        waiting_rows_max: int,
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._slabs_max = slabs_max
        self._limit_of = limit_of
        self._waiting_rows_max = waiting_rows_max
        self._waiting_rows = 0
        self._slabs: dict[int, SlotSlab] = {}
        self._open: dict[Hashable, SlotSlab] = {}
        self._waiters: deque[tuple[asyncio.Future[tuple[SlotSlab, slice]], Hashable, int]] = deque()
        self._closed: str | None = None

    def __repr__(self) -> str:
        return f"<SlotBoard slabs={len(self._slabs)} waiting={len(self._waiters)}>"

    @property
    def nbytes(self) -> int:
        """Bytes held by its slabs."""
        return sum(owner.slab.memory.nbytes for owner in self._slabs.values())

    async def take(self, bucket: Hashable, rows: int) -> tuple[SlotSlab, slice]:
        """Rows for one slot. Waits for its turn while every slab is in use.

        :raises QueueFullError: when too many rows are waited for already.
        :raises EngineClosedError: when the engine is closed before the turn comes.
        """
        if self._closed is not None:
            raise EngineClosedError(self._closed)
        taken = None if self._waiters else self._try(bucket, rows)
        if taken is not None:
            return taken
        if self._waiting_rows + rows > self._waiting_rows_max:
            raise QueueFullError(
                f"slots for {self._waiting_rows} rows are waited for already, and no more than "
                f"{self._waiting_rows_max} may be. Leave slots sooner, or retry later"
            )
        turn: asyncio.Future[tuple[SlotSlab, slice]] = self._loop.create_future()
        self._waiters.append((turn, bucket, rows))
        self._waiting_rows += rows
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # The turn had come already: pass it on.
                self.give_back(turn.result()[0])
            raise
        finally:
            self._waiting_rows -= rows

    def give_back(self, owner: SlotSlab) -> None:
        """One slot of this slab is over."""
        owner.slots -= 1
        owner.tell_if_unused()

    def refuse(self, why: str) -> None:
        """Fail those who wait, and give out no more. What was given out goes on."""
        self._closed = why
        for turn, _, _ in self._waiters:
            if not turn.done():
                turn.set_exception(EngineClosedError(why))
        self._waiters.clear()

    def close(self) -> None:
        """Let go of every slab, once nothing is in flight. Arrays that callers still hold stay valid."""
        self._open.clear()
        for owner in self._slabs.values():
            owner.on_unused = None
            self._pool.close_slab(owner.slab)
        self._slabs.clear()

    def _try(self, bucket: Hashable, rows: int) -> tuple[SlotSlab, slice] | None:
        owner = self._open.get(bucket)
        if owner is None or owner.is_sealed or owner.rows_given + rows > self._limit_of(bucket):
            owner = self._next_slab(bucket)
            if owner is None:
                return None
            self._open[bucket] = owner
        span = slice(owner.rows_given, owner.rows_given + rows)
        owner.rows_given += rows
        owner.slots += 1
        return owner, span

    def _next_slab(self, bucket: Hashable) -> SlotSlab | None:
        unused = [owner for owner in self._slabs.values() if not owner.slots and not owner.is_in_flight]
        for owner in unused:
            if owner.bucket == bucket:
                return self._reopen(owner)
        if len(self._slabs) >= self._slabs_max:
            if not unused:
                return None
            self._drop(unused[0])
        number = min(set(range(self._slabs_max)) - set(self._slabs))
        owner = SlotSlab(number, bucket, self._pool.create_slab(bucket))
        owner.on_unused = self._became_unused
        self._slabs[number] = owner
        return owner

    def _reopen(self, owner: SlotSlab) -> SlotSlab:
        owner.rows_given = 0
        owner.is_sealed = False
        return owner

    def _drop(self, owner: SlotSlab) -> None:
        del self._slabs[owner.number]
        if self._open.get(owner.bucket) is owner:
            del self._open[owner.bucket]
        self._pool.close_slab(owner.slab)

    def _became_unused(self, owner: SlotSlab) -> None:
        if not self._waiters and self._open.get(owner.bucket) is owner:
            self._reopen(owner)
        while self._waiters:
            turn, bucket, rows = self._waiters[0]
            if not turn.done():
                try:
                    taken = self._try(bucket, rows)
                except Exception as error:  # No memory for another slab: this caller's error.
                    turn.set_exception(error)
                else:
                    if taken is None:
                        return
                    turn.set_result(taken)
            self._waiters.popleft()


class Slot:
    """``async with engine.slot(rows=4) as slot``: write ``slot["input"][...]``, then ``await slot.infer()``.

    The arrays are views of the slab, of shape ``(rows, *dims)``, and hold whatever the last user left there:
    write every row. They must not be written to after :meth:`infer` was called. A slot is for one inference.
    """

    def __init__(
        self,
        board: SlotBoard,
        bucket: Hashable,
        rows: int,
        submit: Callable[[Any, int, Hashable, float | None, int], Awaitable[InferResult]],
    ) -> None:
        self._board = board
        self._bucket = bucket
        self._rows = rows
        self._submit = submit
        self._owner: SlotSlab | None = None
        self._span = slice(0)
        self._was_submitted = False

    def __repr__(self) -> str:
        state = "released" if self._owner is None else "sent" if self._was_submitted else "open"
        return f"<Slot rows={self._rows} {state}>"

    async def __aenter__(self) -> Self:
        if self._owner is not None or self._was_submitted:
            raise UsageError("this slot was entered before. Ask for a new one: engine.slot(rows=...)")
        self._owner, self._span = await self._board.take(self._bucket, self._rows)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._owner is not None:
            owner, self._owner = self._owner, None
            self._was_submitted = True
            self._board.give_back(owner)

    def __getitem__(self, name: str) -> Array:
        """The rows of one input, to be written.

        :raises InputError: when the model has no such input.
        :raises UsageError: outside ``async with``, or after :meth:`infer`.
        """
        owner = self._entered()
        names = [place.name for place in owner.slab.layout.inputs]
        if name not in names:
            raise InputError(f"{name!r} is not an input of this model; there are {names}")
        return owner.slab.inputs[names.index(name)][self._span]

    async def infer(self, *, timeout: float | None = None, priority: int = 0) -> InferResult:
        """Run the rows that were written. As :meth:`Engine.infer`, without checks of dtype and shape.

        :raises UsageError: when called twice, or outside ``async with``.
        """
        owner = self._entered()
        payload: Any = SlabRows(owner, self._span)
        bucket: Hashable = owner.batch_bucket
        if owner.is_sealed:
            # Left behind: the slab was launched while this slot was being written.
            payload = tuple(array[self._span] for array in owner.slab.inputs)
            bucket = self._bucket
        self._was_submitted = True
        # The slab is in use until the answer is there, though the slot may be left before.
        owner.slots += 1
        try:
            return await self._submit(payload, self._rows, bucket, timeout, priority)
        except QueueFullError:
            self._was_submitted = False  # Nothing was queued, so the same rows may be tried again.
            raise
        finally:
            self._board.give_back(owner)

    def _entered(self) -> SlotSlab:
        if self._was_submitted:
            raise UsageError("this slot was used already. Ask for a new one: engine.slot(rows=...)")
        if self._owner is None:
            raise UsageError("enter the slot first: async with engine.slot(rows=...) as slot")
        return self._owner
