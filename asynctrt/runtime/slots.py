"""Slots: rows of a slab that a caller fills itself, so that the CPU need not copy them.

Slots of one shape share the open slab, one after the other. The submitted slots of a slab form a batch by
themselves. If a slot is still being written when its slab launches, it misses that batch; its rows are then
gathered into another batch like the rows of any other request.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from types import TracebackType
from typing import Any, Self

from asynctrt._util.forks import Origin
from asynctrt.errors import EngineClosedError, InputError, QueueFullError, UsageError, show
from asynctrt.runtime.contexts import ContextPool
from asynctrt.runtime.staging import Slab, SlotRows
from asynctrt.scheduling.key import BatchKey
from asynctrt.tensors import Array, InferResult


class SlotSlab:
    """A slab that callers fill, with a count of its users."""

    def __init__(
        self, number: int, shape: Hashable, slab: Slab, on_unused: "Callable[[SlotSlab], None]"
    ) -> None:
        self.number = number
        self.shape = shape
        self.slab = slab
        self.rows_given = 0
        self.users = 0
        """The number of slots given out, and of requests not yet answered."""
        self.is_sealed = False
        self.batches = 0
        """The number of batches in flight with rows of it."""
        self.key = BatchKey(shape, number)
        """The key of the batch that is launched from this slab."""
        self._on_unused = on_unused

    def __repr__(self) -> str:
        state = "in flight" if self.batches else "sealed" if self.is_sealed else "open"
        return f"<SlotSlab {self.number} {state} rows={self.rows_given} users={self.users}>"

    @property
    def is_unused(self) -> bool:
        """Whether no slot, request or batch uses it."""
        return not self.users and not self.batches

    def launched(self) -> None:
        """Record that a batch from it is in flight: no more slots may join, and its rows must not change."""
        self.is_sealed = True
        self.batches += 1

    def ended(self) -> None:
        """Record that such a batch is over."""
        self.batches -= 1
        self._tell_if_unused()

    def left(self) -> None:
        """Record that one of its users is done with it."""
        self.users -= 1
        self._tell_if_unused()

    def _tell_if_unused(self) -> None:
        if self.is_unused:
            self._on_unused(self)


class _Waiter:
    """A caller that waits for a slot."""

    __slots__ = ("rows", "shape", "turn")

    def __init__(self, turn: asyncio.Future[tuple[SlotSlab, slice]], shape: Hashable, rows: int) -> None:
        self.turn = turn
        self.shape = shape
        self.rows = rows


class SlotBoard:
    """Gives out the rows of a bounded number of slabs, in the order of requests for slots."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        pool: ContextPool,
        slabs_max: int,
        limit: Callable[[BatchKey], int],
        waiting_rows_max: int,
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._slabs_max = slabs_max
        self._limit = limit
        self._waiting_rows_max = waiting_rows_max
        self._waiting_rows = 0
        self._slabs: dict[int, SlotSlab] = {}
        self._open: dict[Hashable, SlotSlab] = {}
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._closed: str | None = None
        self._origin = Origin()

    def __repr__(self) -> str:
        return f"<SlotBoard slabs={len(self._slabs)} waiting={len(self._waiters)}>"

    @property
    def nbytes(self) -> int:
        """The bytes held by its slabs."""
        return sum(owner.slab.buffers.nbytes for owner in tuple(self._slabs.values()))

    async def take(self, shape: Hashable, rows: int) -> tuple[SlotSlab, slice]:
        """Return rows for one slot. Waits for its turn while every slab is in use.

        :raises QueueFullError: if too many rows are waited for already.
        :raises EngineClosedError: if the engine is closed before the turn comes.
        """
        self._origin.check("this slot")
        if self._closed is not None:
            raise EngineClosedError(self._closed)
        taken = None if self._waiters else self._try(shape, rows)
        if taken is not None:
            return taken
        if self._waiting_rows + rows > self._waiting_rows_max:
            raise QueueFullError(
                f"slots for {self._waiting_rows} rows are waited for already, and at most "
                f"{self._waiting_rows_max} may be. Leave slots sooner, or retry later"
            )
        waiter = _Waiter(self._loop.create_future(), shape, rows)
        self._waiters[waiter] = None
        self._waiting_rows += rows
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                # The turn had come already: pass it on.
                waiter.turn.result()[0].left()
            self._waiters.pop(waiter, None)
            # The next waiters may fit where this one did not.
            self._serve()
            raise
        finally:
            self._waiting_rows -= rows

    def refuse(self, why: str) -> None:
        """Fail all waiters, and give out no more slots. Slots already given out stay usable."""
        self._closed = why
        for waiter in self._waiters:
            if not waiter.turn.done():
                waiter.turn.set_exception(EngineClosedError(why))
        self._waiters.clear()

    def close(self) -> None:
        """Release every slab. Nothing may be in flight. Arrays that callers still hold stay valid."""
        self._closed = self._closed or "closed"
        self._open.clear()
        slabs, self._slabs = self._slabs, {}
        for owner in slabs.values():
            self._pool.close_slot_slab(owner.slab)

    def _try(self, shape: Hashable, rows: int) -> tuple[SlotSlab, slice] | None:
        owner = self._open.get(shape)
        if owner is None or owner.is_sealed or owner.rows_given + rows > self._limit(BatchKey(shape)):
            owner = self._next_slab(shape)
            if owner is None:
                return None
            self._open[shape] = owner
        span = slice(owner.rows_given, owner.rows_given + rows)
        owner.rows_given += rows
        owner.users += 1
        return owner, span

    def _next_slab(self, shape: Hashable) -> SlotSlab | None:
        unused = [owner for owner in self._slabs.values() if owner.is_unused]
        for owner in unused:
            if owner.shape == shape:
                return self._reopen(owner)
        if len(self._slabs) >= self._slabs_max:
            if not unused:
                return None
            self._drop(unused[0])
        number = min(set(range(self._slabs_max)) - set(self._slabs))
        owner = SlotSlab(number, shape, self._pool.create_slot_slab(shape), self._became_unused)
        self._slabs[number] = owner
        return owner

    def _reopen(self, owner: SlotSlab) -> SlotSlab:
        owner.rows_given = 0
        owner.is_sealed = False
        return owner

    def _drop(self, owner: SlotSlab) -> None:
        del self._slabs[owner.number]
        if self._open.get(owner.shape) is owner:
            del self._open[owner.shape]
        self._pool.close_slot_slab(owner.slab)

    def _became_unused(self, owner: SlotSlab) -> None:
        if self._slabs.get(owner.number) is not owner:
            return  # The board was closed meanwhile.
        if not self._waiters and self._open.get(owner.shape) is owner:
            self._reopen(owner)
        self._serve()

    def _serve(self) -> None:
        """Give slots to waiters in their order, until one does not fit."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            if not waiter.turn.done():
                try:
                    taken = self._try(waiter.shape, waiter.rows)
                except Exception as error:  # No memory for another slab: this caller's error.
                    waiter.turn.set_exception(error)
                else:
                    if taken is None:
                        return
                    waiter.turn.set_result(taken)
            del self._waiters[waiter]


class Slot:
    """``async with engine.slot(rows=4) as slot``: write ``slot["input"][...]``, then ``await slot.infer()``.

    The arrays are views of the slab, of shape ``(rows, *dims)``, and contain the last user's data: write
    every row. Do not write to them after calling :meth:`infer`. A slot is for one inference.
    """

    def __init__(
        self,
        board: SlotBoard,
        shape: Hashable,
        rows: int,
        submit: Callable[[Any, int, BatchKey, float | None, int], Awaitable[InferResult]],
    ) -> None:
        self._board = board
        self._shape = shape
        self._rows = rows
        self._submit = submit
        self._owner: SlotSlab | None = None
        self._span = slice(0)
        self._was_entered = False
        self._was_submitted = False

    def __repr__(self) -> str:
        state = "released" if self._owner is None else "sent" if self._was_submitted else "open"
        return f"<Slot rows={self._rows} {state}>"

    async def __aenter__(self) -> Self:
        if self._was_entered:
            raise UsageError("this slot was entered before. Ask for a new one: engine.slot(rows=...)")
        self._was_entered = True
        self._owner, self._span = await self._board.take(self._shape, self._rows)
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
            owner.left()

    def __getitem__(self, name: str) -> Array:
        """Return the rows of one input: an array ``(rows, *dims)`` to write.

        :raises InputError: if the model has no such input.
        :raises UsageError: outside ``async with``, or after :meth:`infer`.
        """
        owner = self._entered()
        names = [span.name for span in owner.slab.layout.inputs]
        if not isinstance(name, str) or name not in names:
            raise InputError(f"{show(name)} is not an input of this model; its inputs are {names}")
        return owner.slab.inputs[names.index(name)][self._span]

    async def infer(self, *, timeout: float | None = None, priority: int = 0) -> InferResult:
        """Run the written rows, like :meth:`Engine.infer`, but without checks of values.

        The answer has all outputs of the model.

        If a call is refused at once (``InputError``, ``QueueFullError``), it may be retried.

        :raises UsageError: if called twice, or outside ``async with``.
        """
        owner = self._entered()
        payload: Any = SlotRows(owner, self._span)
        key = owner.key
        if owner.is_sealed:
            # Too late for the slab's batch, which was launched while this slot was being written.
            payload = tuple(array[self._span] for array in owner.slab.inputs)
            key = BatchKey(self._shape)
        # If this raises, nothing was queued, and the same rows may be retried.
        answer = self._submit(payload, self._rows, key, timeout, priority)
        self._was_submitted = True
        # The slab is in use until the answer arrives, even if the caller leaves the slot earlier.
        owner.users += 1
        try:
            return await answer
        finally:
            owner.left()

    def _entered(self) -> SlotSlab:
        if self._was_submitted:
            raise UsageError("this slot was used already. Ask for a new one: engine.slot(rows=...)")
        if self._owner is None:
            raise UsageError("enter the slot first: async with engine.slot(rows=...) as slot")
        return self._owner
