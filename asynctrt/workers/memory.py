"""Memory that a front shares with its workers, and the allocator of the front.

It is a file without a name (``memfd_create``), passed on by descriptor: it is gone with the last process that
has it, however that ends.
"""

import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from typing import Final

from asynctrt.errors import DeviceUnavailableError
from asynctrt.forks import Origin

ALIGNMENT: Final = 64
"""Of blocks and of arrays in them: a cache line."""
PAGE: Final = mmap.PAGESIZE
BLOCK_NBYTES_MIN: Final = 256
KEPT_NBYTES: Final = 256 << 20
"""Large free blocks keep their pages up to this many bytes in all. Beyond that, those of the blocks that have
been free for longest go back to the system."""
RETURNED_NBYTES_MIN: Final = 1 << 20
"""Smaller blocks keep their pages always."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """Round up to a multiple of ``to``."""
    return -(-nbytes // to) * to


class SharedMemory:
    """A mapping of memory that several processes have.

    Arrays made over :attr:`buffer` keep it mapped; it is unmapped when the last of them is gone.

    :param fd: the descriptor, which becomes its own.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._origin = Origin()
        self.buffer = mmap.mmap(fd, nbytes)
        # With the last reference, if nobody closes it.
        self._close = weakref.finalize(self, os.close, fd)
        self.words: memoryview[int] = memoryview(self.buffer).cast("Q")
        """The same as words of 8 bytes. A word that two processes use is written by one of them alone."""

    def __repr__(self) -> str:
        return f"<SharedMemory {self.nbytes} bytes>"

    @classmethod
    def create(cls, nbytes: int) -> "SharedMemory":
        """Return new memory of zeros. Only pages that are written to take any.

        :raises DeviceUnavailableError: if the system refuses it.
        """
        nbytes = align(nbytes, PAGE)
        fd = -1
        try:
            fd = os.memfd_create("asynctrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            # A process that made it smaller would end all others by SIGBUS.
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
        """Give the first ``nbytes`` back to the system, whoever still maps them, and close it. Idempotent.

        What is read there from now on is zeros.
        """
        if self.fd >= 0 and nbytes and self._origin.is_here:
            self.buffer.madvise(mmap.MADV_REMOVE, 0, min(align(nbytes, PAGE), self.nbytes))
        self.close()
        self.words.release()
        # While there are arrays over it, the address space is not given back.
        with suppress(BufferError):
            self.buffer.close()

    def close(self) -> None:
        """Close the descriptor; what is mapped stays so while arrays are over it. Idempotent."""
        self._close()
        self.fd = -1


class Heap:
    """Blocks of a shared memory, given out by one process.

    Sizes are rounded up to four steps a power of two, and a freed block serves the next one of its size. So
    both calls take the same short time however many blocks there are, and at most a quarter is wasted.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._free: dict[int, list[int]] = {}
        # Large free blocks that have pages, with their sizes, those that have been free for longest first.
        self._kept: dict[int, int] = {}
        self._kept_nbytes = 0
        # By offset: how many blocks had given pages back when that one last did; and when any last could.
        self._returned: dict[int, int] = {}
        self._returns = self._returns_before = 0
        self._end = 0
        self.blocks = 0
        """Blocks that are given out."""
        self._origin = Origin()

    def __repr__(self) -> str:
        return f"<Heap blocks={self.blocks} reached={self._end} of {self._memory.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """How far it has reached. What large free blocks gave back to the system is counted."""
        return self._end

    def allocate(self, nbytes: int) -> int:
        """Return the offset of a block.

        :raises MemoryError: if there is no room.
        """
        size = rounded(nbytes)
        free = self._free.get(size)
        if free:
            self.blocks += 1
            offset = free.pop()
            self._kept_nbytes -= self._kept.pop(offset, 0)
            return offset
        if not self.blocks and self._end + size > self._memory.nbytes:
            self._free.clear()
            while self._kept:
                self._return_oldest()
            # Blocks that begin elsewhere have these pages next.
            self._returned.clear()
            self._returns_before = self._returns
            self._end = 0
        start = align(self._end, PAGE) if size >= PAGE else self._end
        if start + size > self._memory.nbytes:
            raise MemoryError(f"{size} more bytes than the {self._memory.nbytes} of shared memory")
        self._end = start + size
        self.blocks += 1
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Take back a block of ``nbytes``, the number that :meth:`allocate` was given."""
        if not self._origin.is_here:
            return  # Arrays that a forked child lets go of lie in memory that its parent uses.
        size = rounded(nbytes)
        self._free.setdefault(size, []).append(offset)
        self.blocks -= 1
        if size >= RETURNED_NBYTES_MIN:
            self._kept[offset] = size
            self._kept_nbytes += size
            while self._kept_nbytes > KEPT_NBYTES:
                self._return_oldest()

    def generation(self, offset: int) -> int:
        """Return a number that changes when a block gets other pages, because its own were given back.

        Whoever had the old pages pinned must have the new ones pinned.
        """
        return self._returned.get(offset, self._returns_before)

    def _return_oldest(self) -> None:
        offset = next(iter(self._kept))
        size = self._kept.pop(offset)
        self._kept_nbytes -= size
        self._returns += 1
        self._returned[offset] = self._returns
        if self._memory.fd >= 0:  # Else all of it has been given back.
            self._memory.buffer.madvise(mmap.MADV_REMOVE, offset, size // PAGE * PAGE)


def rounded(nbytes: int) -> int:
    """Round a size up to one of four steps a power of two."""
    nbytes = max(nbytes, BLOCK_NBYTES_MIN)
    return align(nbytes, max(1 << (nbytes - 1).bit_length() - 3, BLOCK_NBYTES_MIN))
