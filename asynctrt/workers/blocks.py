"""The blocks of large rows that a worker knows, from which its engine runs batches without gathering them.

A device with memory of its own can copy from them directly once they are pinned. Pinning takes milliseconds,
so a thread does it, and batches are gathered until then.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from asynctrt.engine import Engine
from asynctrt.runtime.shared import SharedBlock, SharedBuffer, SharedRows
from asynctrt.tensors import Array
from asynctrt.workers.layout import Layout
from asynctrt.workers.memory import SharedMemory

BLOCKS_MAX: Final = 64
"""Blocks that are remembered: more than a front alternates between."""

PINNED_NBYTES_MAX: Final = 1 << 30
"""The most that is pinned of one front's memory. What is pinned can be neither swapped out nor given back."""

PINS_IN_VAIN_MAX: Final = 3
"""After so many failures in a row, no further block is pinned."""

logger = logging.getLogger("asynctrt")


class Where(NamedTuple):
    """Where the rows of a group lie in the memory of its front."""

    block: int
    rows: int
    start: int
    """The first of them in the block."""
    capacity: int | None
    """The rows of the block, if the group shares it."""
    generation: int
    """Of the block's pages: it changes when they are replaced by others."""


class _Known(NamedTuple):
    """A block that was seen, and what must be unchanged for it to be the same one."""

    shared: SharedBlock
    start: int
    end: int
    sizes: tuple[int, ...]
    """Of the dimensions that vary."""
    generation: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.start


class Blocks:
    """The blocks of one front.

    :param memory: that of the front.
    :param on_ended: called when a batch that had rows of one of them is over.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        memory: SharedMemory,
        engine: Engine,
        on_ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._memory = memory
        self._buffer: SharedBuffer | None = None
        self._engine = engine
        self._on_ended = on_ended
        # By where they begin; those that were used last come last.
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._pins: ThreadPoolExecutor | None = None
        self._unpin: dict[SharedBlock, tuple[int, Callable[[], None]]] = {}
        self._pinned_nbytes = 0
        self._pinning = 0
        self._pins_in_vain = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Blocks known={len(self._known)} pinned={self._pinned_nbytes} bytes>"

    def rows(self, arrays: tuple[Array, ...], layout: Layout, where: Where) -> SharedRows:
        """Return the payload for rows that lie in a block."""
        known = self._known.get(where.block)
        end = where.block + layout.nbytes(where.capacity or where.rows)
        if known is None or known[2:] != (end, layout.symbols, where.generation):
            known = self._meet(len(arrays), layout, where, end)
        self._known.move_to_end(where.block)
        return SharedRows.at(known.shared, where.start, arrays, self._ended)

    def close(self) -> None:
        """Forget all, as soon as no batch has rows of them, so that the memory is free."""
        self._is_closed = True
        for known in self._known.values():
            self._forget(known.shared)
        self._known.clear()
        self._end_thread()
        # Else the memory would stay mapped until garbage is collected.
        self._buffer = None
        del self._memory, self._on_ended

    def _meet(self, inputs: int, layout: Layout, where: Where, end: int) -> _Known:
        """Note a block that is new, or has other rows or other pages than before."""
        for block, known in list(self._known.items()):
            # What lay there is no longer used, or the front would not have given the memory out again.
            if known.start < end and known.end > where.block:
                del self._known[block]
                self._forget(known.shared)
        if len(self._known) >= BLOCKS_MAX:
            self._forget(self._known.popitem(last=False)[1].shared)
        if self._buffer is None:
            self._buffer = SharedBuffer(self._memory.buffer)
        offsets = layout.offsets(where.rows, 0, where.capacity)[:inputs]
        shared = SharedBlock(
            self._buffer, tuple([where.block + offset for offset in offsets]), where.capacity or where.rows
        )
        known = self._known[where.block] = _Known(shared, where.block, end, layout.symbols, where.generation)
        if where.capacity is not None:
            self._pin(known)
        return known

    def _ended(self, shared: SharedBlock) -> None:
        if shared.is_forgotten:
            self._forget(shared)
        if not self._is_closed:
            self._on_ended()

    def _forget(self, shared: SharedBlock) -> None:
        """Let go of what is kept for a block: now, or when no batch has rows of it any more."""
        shared.is_forgotten = True
        if shared.batches:
            return
        for slab in shared.slabs.values():
            self._engine._pool.forget_inputs(slab)
        shared.slabs.clear()
        shared.address = None
        nbytes, unpin = self._unpin.pop(shared, (0, None))
        self._pinned_nbytes -= nbytes
        if unpin is not None and self._pins is not None:
            # Until then the memory stays mapped: other memory at its addresses would count as pinned.
            self._pins.submit(_unpin, unpin, shared)
        self._end_thread()

    def _end_thread(self) -> None:
        """Let the thread that pins end, once there is nothing left for it to do."""
        if self._is_closed and self._pins is not None and not self._unpin and not self._pinning:
            self._pins.shutdown(wait=False)

    def _pin(self, known: _Known) -> None:
        """Have a block pinned in a thread, if the device needs that."""
        device = self._engine._device
        if device.unified or self._pins_in_vain >= PINS_IN_VAIN_MAX:
            return
        if self._pinned_nbytes + known.nbytes > PINNED_NBYTES_MAX:
            return
        pins = self._thread()
        if pins is None:
            return
        self._pinned_nbytes += known.nbytes
        self._pinning += 1
        address = known.shared.buffer.address + known.start
        pinning = self._loop.run_in_executor(pins, device.pin, address, known.nbytes)
        pinning.add_done_callback(partial(self._pinned, known))

    def _thread(self) -> ThreadPoolExecutor | None:
        """Return what pins in a thread; ``None`` if the system refuses one (ulimit -u)."""
        if self._pins is None:
            pins = ThreadPoolExecutor(1, "asynctrt-pin")
            try:
                # Its thread starts with what it is given first, which stays in its queue if that is refused.
                pins.submit(int)
            except RuntimeError:
                return None
            self._pins = pins
        return self._pins

    def _pinned(self, known: _Known, pinning: "asyncio.Future[Callable[[], None]]") -> None:
        """Let the device copy from a block from now on."""
        self._pinning -= 1
        shared = known.shared
        error = None if pinning.cancelled() else pinning.exception()
        if pinning.cancelled() or error is not None:
            self._pinned_nbytes -= known.nbytes
            self._pins_in_vain += 1
            if self._pins_in_vain == PINS_IN_VAIN_MAX:
                logger.warning(
                    "memory with large rows cannot be pinned, so they are copied once more: %s", error
                )
            self._end_thread()
            return
        self._pins_in_vain = 0
        self._unpin[shared] = known.nbytes, pinning.result()
        if shared.is_forgotten:
            self._forget(shared)
        else:
            shared.address = shared.buffer.address


def _unpin(unpin: Callable[[], None], _shared: SharedBlock) -> None:
    """Unpin a block, and only then let go of its memory."""
    unpin()
