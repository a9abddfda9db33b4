"""Assemble a large message as it arrives."""

import mmap
from typing import Final

ASSEMBLED_NBYTES_MIN: Final = 1 << 20
"""Smaller messages are not worth it."""


class Assembly:
    """The bytes of a message whose size is known.

    A ``bytearray`` is moved as it grows. This memory is mapped once, so pages that are never written take
    only address space, and it returns to the system when nothing refers to it any more, including tensors of
    the message.
    """

    def __init__(self, nbytes: int) -> None:
        # No huge pages: the system may take long to find one. And not MAP_SHARED, mmap's default: that is a
        # file in memory.
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(mapped)
        self._nbytes = 0

    def __repr__(self) -> str:
        return f"<Assembly {self._nbytes} of {len(self._memory)}>"

    def has_room(self, nbytes: int) -> bool:
        """Return whether there is room for more bytes."""
        return self._nbytes + nbytes <= len(self._memory)

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        """Copy the next bytes to the end; the caller has checked that there is room."""
        end = self._nbytes + len(piece)
        self._memory[self._nbytes : end] = piece
        self._nbytes = end

    def whole(self) -> memoryview:
        """Return all bytes added."""
        return self._memory[: self._nbytes]
