"""The blocks of large rows that a worker knows. Its engine runs batches from them without gathering.

A device with its own memory can copy from a block directly once the block is pinned. Pinning takes
milliseconds, so a thread does it, and batches are gathered until then.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from asynctrt.core.intake import Intake
from asynctrt.runtime.shared import SharedBlock, SharedBuffer, SharedRows
from asynctrt.tensors import Array
from asynctrt.workers.layout import GroupLayout
from asynctrt.workers.memory import SharedMemory

BLOCKS_MAX: Final = 64
"""The maximum number of known blocks: more than a front alternates between."""

PINNED_NBYTES_MAX: Final = 1 << 30
"""The maximum pinned memory of one front. Pinned memory can be neither swapped out nor returned."""

PINS_IN_VAIN_MAX: Final = 3
"""After this many failures in a row, no further block is pinned."""

logger = logging.getLogger("asynctrt")


class Where(NamedTuple):
    """The position of a group's rows in its front's memory."""

    block: int
    rows: int
    start: int
    """The first row within the block."""
    capacity: int | None
    """The rows of the block, if the group shares it."""
    generation: int
    """The generation of the block's pages, which changes when other pages replace them."""


class _Known(NamedTuple):
    """A known block, with the fields that must not change for it to be the same block."""

    shared: SharedBlock
    start: int
    end: int
    sizes: tuple[int, ...]
    """The sizes of the dimensions that vary."""
    generation: int

    @property
    def nbytes(self) -> int:
        """The block's size."""
        return self.end - self.start


class Blocks:
    """The blocks of one front.

    :param memory: the front's memory.
    :param intake: takes the rows of the blocks.
    :param on_ended: called when a batch that used rows of a block has ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        memory: SharedMemory,
        intake: Intake,
        on_ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._memory = memory
        self._buffer: SharedBuffer | None = None
        self._intake = intake
        self._on_ended = on_ended
        # Keyed by offset, least recently used first.
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._pins: ThreadPoolExecutor | None = None
        self._unpin: dict[SharedBlock, tuple[int, Callable[[], None]]] = {}
        self._pinned_nbytes = 0
        self._pinning = 0
        self._pins_in_vain = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Blocks known={len(self._known)} pinned={self._pinned_nbytes} bytes>"

    def rows(self, arrays: tuple[Array, ...], layout: GroupLayout, where: Where) -> SharedRows:
        """Return the payload for rows in a block."""
        known = self._known.get(where.block)
        end = where.block + layout.nbytes(where.capacity or where.rows)
        if known is None or known[2:] != (end, layout.symbols, where.generation):
            known = self._meet(len(arrays), layout, where, end)
        self._known.move_to_end(where.block)
        return SharedRows.at(known.shared, where.start, arrays, self._ended)

    def close(self) -> None:
        """Forget each block as soon as no batch uses its rows, so that the memory can be freed."""
        self._is_closed = True
        for known in self._known.values():
            self._forget(known.shared)
        self._known.clear()
        self._end_thread()
        # Otherwise the memory would stay mapped until the next garbage collection.
        self._buffer = None
        del self._memory, self._on_ended

    def _meet(self, inputs: int, layout: GroupLayout, where: Where, end: int) -> _Known:
        """Record a block that is new, or whose rows or pages have changed."""
        for block, known in list(self._known.items()):
            # An overlapping block is no longer in use: otherwise the front would not have reused its memory.
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
        """Release a block's resources: now, or once no batch uses its rows."""
        shared.is_forgotten = True
        if shared.batches:
            return
        for slab in shared.slabs.values():
            self._intake.forget_inputs(slab)
        shared.slabs.clear()
        shared.address = None
        nbytes, unpin = self._unpin.pop(shared, (0, None))
        self._pinned_nbytes -= nbytes
        if unpin is not None and self._pins is not None:
            # Until then the memory must stay mapped: new memory at its addresses would count as pinned.
            self._pins.submit(_unpin, unpin, shared)
        self._end_thread()

    def _end_thread(self) -> None:
        """End the pinning thread after closing, once it has nothing left to do."""
        if self._is_closed and self._pins is not None and not self._unpin and not self._pinning:
            self._pins.shutdown(wait=False)

    def _pin(self, known: _Known) -> None:
        """Pin a block in a thread, if the device needs that."""
        device = self._intake.device
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
        """Return the pinning thread's executor; ``None`` if the system refuses a thread (ulimit -u)."""
        if self._pins is None:
            pins = ThreadPoolExecutor(1, "asynctrt-pin")
            try:
                # The first submission starts the thread. If that is refused, the job stays in the queue.
                pins.submit(int)
            except RuntimeError:
                return None
            self._pins = pins
        return self._pins

    def _pinned(self, known: _Known, pinning: "asyncio.Future[Callable[[], None]]") -> None:
        """Allow the device to copy directly from a block, unless pinning failed."""
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
    """Unpin a block, keeping its memory alive until that is done."""
    unpin()
