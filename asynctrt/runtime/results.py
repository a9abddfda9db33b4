"""Memory for large results, used again once callers have dropped what they got."""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from asynctrt._util.pace import GIL
from asynctrt.tensors import Array

RECYCLED_NBYTES_MIN: Final = 64 << 10
"""Smaller results are cheap to allocate. When the callers of a batch drop larger ones, the C library returns
their memory to the system, and the page faults of new memory take several times as long as copying a result:
64 callers at once, with results of 64 KB, took 57 µs of the CPU a request instead of 19."""

KEPT_NBYTES_MAX: Final = 64 << 20
"""The most bytes to keep, in use or not. Beyond it, results get new memory that is not kept."""

LOOKS: Final = 4
"""The blocks to look at, the oldest first: callers drop results about in the order in which they got them."""

_LIST: Final = [np.empty(0, np.uint8)]
UNUSED: Final = sys.getrefcount(_LIST[0])
"""The references to a block that one list holds and nothing else. A variable would not do: a debugger may
hold what it names as well, and whether the call counts it depends on the version of Python."""


class ResultMemory:
    """Blocks of memory for the results of one engine. A block is in use while any array refers to it."""

    def __init__(self) -> None:
        self._blocks: dict[int, deque[Array]] = {}
        self.nbytes = 0
        """The bytes of all blocks."""

    def __repr__(self) -> str:
        return f"<ResultMemory nbytes={self.nbytes}>"

    def empty_like(self, array: Array) -> Array:
        """Return an array of the same shape and dtype, in C order, with arbitrary content."""
        nbytes = array.nbytes
        # Without a GIL, the references of other threads cannot be counted.
        if not RECYCLED_NBYTES_MIN <= nbytes <= KEPT_NBYTES_MAX or array.dtype.hasobject or not GIL:
            return np.empty(array.shape, array.dtype)
        return np.ndarray(array.shape, array.dtype, self._block(nbytes))

    def copy(self, array: Array) -> Array:
        """Return a copy of an array, in C order."""
        if array.nbytes < RECYCLED_NBYTES_MIN:
            return array.copy()
        copied = self.empty_like(array)
        copied[...] = array
        return copied

    def copied(self, views: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """Return copies of the outputs of each request."""
        return [{name: self.copy(view) for name, view in own.items()} for own in views]

    def reserved(self, views: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """Return arrays for the outputs of each request, for another thread to fill (:func:`fills`)."""
        return [{name: self.empty_like(view) for name, view in own.items()} for own in views]

    def _block(self, nbytes: int) -> Array:
        blocks = self._blocks.setdefault(nbytes, deque())
        for _ in range(LOOKS):
            try:
                looked_at = [blocks.popleft()]  # So that no other thread looks at it now.
            except IndexError:
                break
            is_unused = sys.getrefcount(looked_at[0]) == UNUSED
            blocks.append(looked_at[0])
            if is_unused:
                return looked_at[0]
        if self.nbytes + nbytes > KEPT_NBYTES_MAX:
            # Results may have had other sizes before. Memory in use stays with their callers.
            self._blocks = {nbytes: blocks}
            self.nbytes = nbytes * len(blocks)
        block = np.empty(nbytes, np.uint8)
        if self.nbytes + nbytes <= KEPT_NBYTES_MAX:
            blocks.append(block)
            self.nbytes += nbytes
        return block
