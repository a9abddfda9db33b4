"""Assemble a large message as it arrives, in memory whose release does not block the event loop."""

import asyncio
import mmap
import weakref
from contextlib import suppress
from typing import Final

import numpy as np

ASSEMBLED_NBYTES_MIN: Final = 1 << 20
"""Smaller messages are not worth it."""


class Assembly:
    """The bytes of a message whose size is known.

    A ``bytearray`` is moved as it grows, and freeing 60 MiB of it, page by page, takes 4 ms. This memory is
    mapped once, so pages that are never written take only address space. When nothing refers to it any more,
    including tensors of the message, a thread releases it.

    :param nbytes: the announced size; no more is accepted.
    :param loop: the event loop whose thread releases the memory. Default: the running one; without one, it
        is released at once.
    """

    def __init__(self, nbytes: int, loop: asyncio.AbstractEventLoop | None = None) -> None:
        # No huge pages: the system may take long to find one. And not MAP_SHARED, mmap's default: that is a
        # file in memory.
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
        """Copy the next bytes to the end; the caller has checked that there is room."""
        end = self._nbytes + len(piece)
        self._memory[self._nbytes : end] = piece
        self._nbytes = end

    def whole(self) -> memoryview:
        """Return all bytes added."""
        return self._memory[: self._nbytes]


def _give_back(mapped: mmap.mmap, loop: asyncio.AbstractEventLoop) -> None:
    """Release the memory in a thread of the loop. Called in any thread, once nothing else refers to it."""
    with suppress(RuntimeError):  # The loop is closed: the memory goes with this last reference.
        loop.call_soon_threadsafe(loop.run_in_executor, None, _forget, mapped)


def _forget(mapped: mmap.mmap) -> None:
    """Drop the last reference, which returns the memory to the system without holding the GIL."""
