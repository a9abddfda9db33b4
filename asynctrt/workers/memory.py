"""The memory that a front shares with its workers, and the front's allocator.

It is an anonymous file (``memfd_create``), passed by descriptor: it disappears with the last process that has
it, however that process ends.
"""

import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from typing import Final

from asynctrt._util.forks import Origin
from asynctrt.errors import DeviceUnavailableError

ALIGNMENT: Final = 64
"""The alignment of blocks and of the arrays in them: a cache line."""
PAGE: Final = mmap.PAGESIZE
BLOCK_NBYTES_MIN: Final = 256
KEPT_NBYTES: Final = 256 << 20
"""Large free blocks keep up to this many bytes of pages in all. Beyond that, the blocks that have been free
longest return theirs to the system."""
RETURNED_NBYTES_MIN: Final = 1 << 20
"""Smaller blocks always keep their pages."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """Round up to a multiple of ``to``."""
    return -(-nbytes // to) * to


class SharedMemory:
    """A mapping of memory that several processes share.

    Arrays made over :attr:`buffer` keep it mapped; it is unmapped when the last of them is gone.

    :param fd: the file descriptor, which this object takes over.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._origin = Origin()
        self.buffer = mmap.mmap(fd, nbytes)
        # Closes the descriptor with the last reference, unless `close` is called before.
        self._close = weakref.finalize(self, os.close, fd)
        self.words: memoryview[int] = memoryview(self.buffer).cast("Q")
        """The same memory as words of 8 bytes. Only one process writes a word that two processes use."""

    def __repr__(self) -> str:
        return f"<SharedMemory {self.nbytes} bytes>"

    @classmethod
    def create(cls, nbytes: int) -> "SharedMemory":
        """Return new, zeroed memory. Only pages that are written to use memory.

        :raises DeviceUnavailableError: if the system refuses it.
        """
        nbytes = align(nbytes, PAGE)
        fd = -1
        try:
            fd = os.memfd_create("asynctrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            # If a process shrank it, the others would die by SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, nbytes)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if not isinstance(error, OSError):
                raise
            raise DeviceUnavailableError(
                f"worker processes need shared memory, and {nbytes} bytes are refused: {error.strerror}. A "
                "sandbox may forbid memfd_create (seccomp); or raise the limit of open files (ulimit -n), or "
                "of memory (ulimit -v)"
            ) from error

    def discard(self, nbytes: int) -> None:
        """Return the first ``nbytes`` to the system, even if they are still mapped, and close. Idempotent.

        From then on they read as zeros.
        """
        if self.fd >= 0 and nbytes and self._origin.is_here:
            self.buffer.madvise(mmap.MADV_REMOVE, 0, min(align(nbytes, PAGE), self.nbytes))
        self.close()
        self.words.release()
        # While arrays exist over it, the address space cannot be released.
        with suppress(BufferError):
            self.buffer.close()

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped while arrays exist over it. Idempotent."""
        self._close()
        self.fd = -1


class Heap:
    """An allocator of blocks in shared memory, used by one process.

    Sizes are rounded up to powers of two, and a freed block is reused for its size. So both calls take
    constant time, however many blocks there are. The rest of a block has no pages unless rows reach there.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._free: dict[int, list[int]] = {}
        # The sizes of large free blocks that have pages, by offset, longest free first.
        self._kept: dict[int, int] = {}
        self._kept_nbytes = 0
        # By offset: the value of `_returns` when that block last returned its pages. `_returns_before` holds
        # for all other blocks.
        self._returned: dict[int, int] = {}
        self._returns = self._returns_before = 0
        self._end = 0
        self.blocks = 0
        """The number of allocated blocks."""
        self._origin = Origin()

    def __repr__(self) -> str:
        return f"<Heap blocks={self.blocks} reached={self._end} of {self.memory.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """The end of the used range, including pages that large free blocks returned to the system."""
        return self._end

    def allocate(self, nbytes: int) -> int:
        """Allocate a block and return its offset.

        :raises MemoryError: if there is no room.
        """
        size = rounded(nbytes)
        free = self._free.get(size)
        if free:
            self.blocks += 1
            offset = free.pop()
            self._kept_nbytes -= self._kept.pop(offset, 0)
            return offset
        if not self.blocks and self._end + size > self.memory.nbytes:
            self._free.clear()
            while self._kept:
                self._return_oldest()
            # The next blocks may use these pages at other offsets.
            self._returned.clear()
            self._returns_before = self._returns
            self._end = 0
        start = align(self._end, PAGE) if size >= PAGE else self._end
        if start + size > self.memory.nbytes:
            raise MemoryError(f"{size} more bytes than the {self.memory.nbytes} of shared memory")
        self._end = start + size
        self.blocks += 1
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Free a block; ``nbytes`` is the number passed to :meth:`allocate`."""
        if not self._origin.is_here:
            return  # This is a forked child, whose blocks are in memory that the parent still uses.
        size = rounded(nbytes)
        self._free.setdefault(size, []).append(offset)
        self.blocks -= 1
        if size >= RETURNED_NBYTES_MIN:
            self._kept[offset] = size
            self._kept_nbytes += size
            while self._kept_nbytes > KEPT_NBYTES:
                self._return_oldest()

    def generation(self, offset: int) -> int:
        """Return a number that changes when a block gets new pages because it returned the old ones.

        A process that pinned the old pages must then pin the new ones.
        """
        return self._returned.get(offset, self._returns_before)

    def _return_oldest(self) -> None:
        offset = next(iter(self._kept))
        size = self._kept.pop(offset)
        self._kept_nbytes -= size
        self._returns += 1
        self._returned[offset] = self._returns
        if self.memory.fd >= 0:  # Otherwise all of it has been returned.
            self.memory.buffer.madvise(mmap.MADV_REMOVE, offset, size // PAGE * PAGE)


def rounded(nbytes: int) -> int:
    """Round a size up to a power of two."""
    return 1 << (max(nbytes, BLOCK_NBYTES_MIN) - 1).bit_length()
