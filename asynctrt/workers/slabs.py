"""Blocks that groups of large rows share, one after the other."""

from typing import Final

from asynctrt.workers.layout import SYMBOLS, GroupLayout
from asynctrt.workers.memory import Heap, SharedMemory

SLAB_NBYTES_MAX: Final = 64 << 20
"""The maximum size of a slab. A few slabs are free at any time, and the heap keeps the pages of that many."""


OPEN_SHARE: Final = 4
"""Open slabs take up to 1 / ``OPEN_SHARE`` of the memory. Otherwise rows of many shapes at once would occupy
all of it, mostly empty. Beyond the limit, a slab is only as large as its group."""


class SharedSlab:
    """A block with room for the rows of one batch, in order of arrival of their groups."""

    __slots__ = ("_slabs", "block", "capacity", "generation", "groups", "layout", "rows_given")

    def __init__(
        self, slabs: "Slabs", layout: GroupLayout, block: int, capacity: int, generation: int
    ) -> None:
        self._slabs = slabs
        self.layout = layout
        self.block = block
        self.capacity = capacity
        self.generation = generation
        """The generation of its pages, from :meth:`Heap.generation`."""
        self.rows_given = 0
        self.groups = 0
        """Groups that use its rows."""

    def __repr__(self) -> str:
        return f"<Slab {self.block} groups={self.groups} rows={self.rows_given} of {self.capacity}>"

    @property
    def nbytes(self) -> int:
        """The slab's size."""
        return self.layout.nbytes(self.capacity)

    def give_back(self) -> None:
        """Release the rows of a group; after the last group, free the slab."""
        self.groups -= 1
        if not self.groups:
            self._slabs.free(self)


class Slabs:
    """An allocator of rows in slabs. Slabs for rows of one shape have one size, whatever the sizes of groups.

    So a few blocks are reused again and again: they seldom need new pages from the system, and leave no
    holes. A slab returns to the heap with its last group.

    :param rows_max: the maximum rows of a batch.
    :param nbytes_max: the maximum bytes of a batch.
    """

    def __init__(self, heap: Heap, memory: SharedMemory, *, rows_max: int, nbytes_max: int) -> None:
        self._heap = heap
        self._memory = memory
        self._rows_max = rows_max
        self._nbytes_max = min(nbytes_max, SLAB_NBYTES_MAX)
        # By layout: the slab that may have rows left.
        self._open: dict[GroupLayout, SharedSlab] = {}
        self._open_nbytes = 0

    def __repr__(self) -> str:
        return f"<Slabs open={len(self._open)}>"

    def capacity(self, layout: GroupLayout) -> int:
        """Return the rows of a slab."""
        return max(min(self._rows_max, self._nbytes_max // layout.row_nbytes), 1)

    def take(self, layout: GroupLayout, rows: int) -> tuple[SharedSlab, int]:
        """Allocate rows for a group; return the slab and the first row.

        :raises MemoryError: if there is no room.
        """
        slab = self._open.get(layout)
        if slab is None or slab.rows_given + rows > slab.capacity:
            slab = self._make(layout, rows)
            self._shut(layout)
            self._open[layout] = slab
            self._open_nbytes += slab.nbytes
        start = slab.rows_given
        slab.rows_given += rows
        slab.groups += 1
        self._memory.words[slab.block // 8 + layout.launched(start)] = 0
        return slab, start

    def free(self, slab: SharedSlab) -> None:
        """Give a slab without groups back to the heap."""
        self._heap.free(slab.block, slab.nbytes)
        if self._open.get(slab.layout) is slab:
            self._shut(slab.layout)

    def _shut(self, layout: GroupLayout) -> None:
        """Stop allocating from the open slab of a layout, if there is one."""
        slab = self._open.pop(layout, None)
        if slab is not None:
            self._open_nbytes -= slab.nbytes

    def _make(self, layout: GroupLayout, rows: int) -> SharedSlab:
        capacity = max(self.capacity(layout), rows)
        before = self._open.get(layout)
        others_nbytes = self._open_nbytes - (0 if before is None else before.nbytes)
        if others_nbytes and others_nbytes + layout.nbytes(capacity) > self._memory.nbytes // OPEN_SHARE:
            capacity = rows
        try:
            block = self._heap.allocate(layout.nbytes(capacity))
        except MemoryError:
            if capacity == rows:
                raise
            capacity = rows
            block = self._heap.allocate(layout.nbytes(capacity))
        for at, size in enumerate(layout.symbols, start=block // 8 + SYMBOLS):
            self._memory.words[at] = size
        return SharedSlab(self, layout, block, capacity, self._heap.generation(block))
