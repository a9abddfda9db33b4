"""Put a large message together while it arrives, in memory that costs the event loop little."""

from typing import Final

import numpy as np

ASSEMBLED_NBYTES_MIN: Final = 1 << 20
"""A smaller message is not worth it."""


class Assembly:
    """The bytes of a message whose size is known.

    NumPy asks the system for huge pages. A ``bytearray`` of 60 MiB is moved as it grows, and takes 4 ms to be
    freed, page by page; this takes 0.2. Of memory that nothing was written to there is only the address.

    :param nbytes: the size that was announced. No more is accepted.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = memoryview(np.empty(nbytes, np.uint8).data)
        self._nbytes = 0

    def __repr__(self) -> str:
        return f"<Assembly {self._nbytes} of {len(self._memory)}>"

    def has_room(self, nbytes: int) -> bool:
        """Return whether there is room for more bytes."""
        return self._nbytes + nbytes <= len(self._memory)

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        """Copy the next bytes to the end, for which there is room."""
        end = self._nbytes + len(piece)
        self._memory[self._nbytes : end] = piece
        self._nbytes = end

    def whole(self) -> memoryview:
        """Return all that was added."""
        return self._memory[: self._nbytes]
