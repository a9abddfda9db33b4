"""Put a large message together while it arrives, in memory that never holds the event loop."""

import asyncio
import mmap
import weakref
from contextlib import suppress
from typing import Final

import numpy as np

ASSEMBLED_NBYTES_MIN: Final = 1 << 20
"""A smaller message is not worth it."""

FREED_NBYTES: Final = 2 << 20
"""Bytes that are given back before it is the turn of others: 0.1 ms."""

LET_GO_S: Final = 0.001
"""When to look again for memory that a thread is about to let go of."""


class Assembly:
    """The bytes of a message whose size is known.

    A ``bytearray`` is moved as it grows, and 60 MiB of it take 4 ms to be freed, page by page. This is mapped
    once, so that of what nothing was written to there is only the address; and when nothing refers to it any
    more, be it a tensor of the message, it is given back in pieces.

    :param nbytes: the size that was announced. No more is accepted.
    :param loop: the event loop that gives it back. Default: the running one; without any, all goes at once.
    """

    def __init__(self, nbytes: int, loop: asyncio.AbstractEventLoop | None = None) -> None:
        # Not in huge pages: to find one may take the system long. And not shared, which is the default: that
        # is a file in memory, which goes as a whole when it is closed.
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if loop is None:
            with suppress(RuntimeError):
                loop = asyncio.get_running_loop()
        array = np.frombuffer(mapped, np.uint8)
        if loop is not None:
            weakref.finalize(array, _give_back, mapped, loop).atexit = False
        self._memory = memoryview(array.data)
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


def _give_back(mapped: mmap.mmap, loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop give memory back. Called in any thread, when nothing refers to it any more."""
    with suppress(RuntimeError):  # The loop is closed: it goes with the last reference, which is this one.
        loop.call_soon_threadsafe(_give_back_some, mapped, loop)


def _give_back_some(mapped: mmap.mmap, loop: asyncio.AbstractEventLoop) -> None:
    try:
        if len(mapped) <= FREED_NBYTES:
            mapped.close()
            return
        mapped.resize(len(mapped) - FREED_NBYTES)
    except BufferError:
        # Another thread dropped the last reference and told so, and has not let go of the memory yet.
        loop.call_later(LET_GO_S, _give_back_some, mapped, loop)
    except OSError:
        pass  # It goes as a whole then, with this reference.
    else:
        loop.call_soon(_give_back_some, mapped, loop)
