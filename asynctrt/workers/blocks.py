"""The blocks of large rows that a worker knows. Its engine runs batches from them without gathering.

A device with its own memory can copy from a block directly once the block is pinned. Pinning takes
milliseconds, so a thread does it, and batches are gathered until then.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from asynctrt.core.intake import Intake
from asynctrt.runtime.shared import SharedBlock, SharedBuffer, SharedRows
from asynctrt.tensors import Array
from asynctrt.workers.layout import GroupLayout
from asynctrt.workers.memory import SharedMemory, rounded

BLOCKS_MAX: Final = 256
"""The maximum number of known blocks: more than a front alternates between."""

PINNED_NBYTES_MAX: Final = 1 << 30
"""The maximum pinned memory of one front. Pinned memory can be neither swapped out nor returned."""

logger = logging.getLogger("asynctrt")


class Where(NamedTuple):
    """The position of a group's rows in its front's memory."""

    block: int
    rows: int
    generation: int
    """The generation of the block's pages, which changes when other pages replace them."""


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
        self._known: OrderedDict[int, SharedBlock] = OrderedDict()
        self._pins: ThreadPoolExecutor | None = None
        # The blocks that are pinned or to be pinned. The functions that unpin them are the thread's alone: it
        # unpins a block before it pins another one in its place, even if that was decided meanwhile.
        self._to_unpin: set[SharedBlock] = set()
        self._unpin: dict[SharedBlock, Callable[[], None]] = {}
        self._pinned_nbytes = 0
        self._pinning = 0
        self._may_pin = True
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Blocks known={len(self._known)} pinned={self._pinned_nbytes} bytes>"

    def rows(self, arrays: tuple[Array, ...], layout: GroupLayout, where: Where) -> SharedRows:
        """Return the payload for rows in a block."""
        nbytes = rounded(layout.nbytes(where.rows))
        content = nbytes, layout.symbols, where.generation
        block = self._known.get(where.block)
        if block is None or block.content != content:
            block = self._meet(where.block, nbytes, content)
        self._known.move_to_end(where.block)
        offsets = tuple([where.block + offset for offset in layout.input_offsets(where.rows)])
        return SharedRows.at(block, offsets, arrays, self._ended)

    def close(self) -> None:
        """Forget each block as soon as no batch uses its rows, so that the memory can be freed."""
        self._is_closed = True
        for block in self._known.values():
            self._forget(block)
        self._known.clear()
        self._end_thread()
        # Otherwise the memory would stay mapped until the next garbage collection.
        self._buffer = None
        del self._memory, self._on_ended

    def _meet(self, start: int, nbytes: int, content: Hashable) -> SharedBlock:
        """Record a block that is new, or whose rows or pages have changed."""
        for other in list(self._known.values()):
            # An overlapping block is no longer in use: otherwise the front would not have reused its memory.
            if other.start < start + nbytes and other.start + other.nbytes > start:
                self._forget(self._known.pop(other.start))
        if len(self._known) >= BLOCKS_MAX:
            self._forget(self._known.popitem(last=False)[1])
        if self._buffer is None:
            self._buffer = SharedBuffer(self._memory.buffer)
        block = self._known[start] = SharedBlock(self._buffer, start, nbytes, content)
        self._pin(block)
        return block

    def _ended(self, block: SharedBlock) -> None:
        if block.is_forgotten:
            self._forget(block)
        if not self._is_closed:
            self._on_ended()

    def _forget(self, block: SharedBlock) -> None:
        """Release a block's resources: now, or once no batch uses its rows."""
        block.is_forgotten = True
        if block.batches:
            return
        for slab in block.slabs.values():
            self._intake.forget_inputs(slab)
        block.slabs.clear()
        block.address = None
        if block in self._to_unpin:
            assert self._pins is not None
            self._count_out(block)
            # Until then the memory must stay mapped: new memory at its addresses would count as pinned.
            self._pins.submit(self._unpin_now, block)
        self._end_thread()

    def _end_thread(self) -> None:
        """End the pinning thread after closing, once it has nothing left to do."""
        if self._is_closed and self._pins is not None and not self._to_unpin:
            self._pins.shutdown(wait=False)

    def _pin(self, block: SharedBlock) -> None:
        """Pin a block in a thread, if the device needs that."""
        device = self._intake.device
        if device.unified or not self._may_pin or self._pinned_nbytes + block.nbytes > PINNED_NBYTES_MAX:
            return
        pins = self._thread()
        if pins is None:
            return
        self._to_unpin.add(block)
        self._pinned_nbytes += block.nbytes
        self._pinning += 1
        pinning = self._loop.run_in_executor(pins, self._pin_now, block)
        pinning.add_done_callback(partial(self._pinned, block))

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

    def _count_out(self, block: SharedBlock) -> None:
        self._to_unpin.discard(block)
        self._pinned_nbytes -= block.nbytes

    def _pin_now(self, block: SharedBlock) -> None:
        self._unpin[block] = self._intake.device.pin(block.buffer.address + block.start, block.nbytes)

    def _unpin_now(self, block: SharedBlock) -> None:
        unpin = self._unpin.pop(block, None)
        if unpin is not None:
            unpin()

    def _pinned(self, block: SharedBlock, pinning: "asyncio.Future[None]") -> None:
        """Allow the device to copy directly from a block, unless pinning failed."""
        self._pinning -= 1
        if pinning.cancelled():
            return
        error = pinning.exception()
        if error is None:
            if not block.is_forgotten:
                block.address = block.buffer.address
            return
        if block in self._to_unpin:
            self._count_out(block)
        if self._may_pin:
            logger.warning("memory with large rows cannot be pinned, so they are copied once more: %s", error)
        self._may_pin = False
        self._end_thread()
