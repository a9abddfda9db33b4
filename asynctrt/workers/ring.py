"""Messages of 64 bytes from one process to another, through shared memory.

A ring has one producer and one consumer, and each of its words is written by one of the two, so there is no
lock that a process which dies could leave locked. A consumer with nothing to do says that it sleeps, and only
then is it woken by its eventfd: while both are busy no system call is made.
"""

import os
import struct
import threading
from collections.abc import Iterator
from mmap import mmap
from typing import Any, Final

from asynctrt.forks import in_child, seal
from asynctrt.workers.memory import SharedMemory, align

ENTRY: Final = struct.Struct("<HHIQqQQQQQ")
"""Kind, count, number, id, time, and five words whose meaning depends on the kind."""
TAIL: Final = 0
"""Word: entries that the producer has published."""
HEAD: Final = 8
"""Word: entries that the consumer has taken. Each word has a cache line of its own."""
SLEEPS: Final = 16
"""Word of the consumer: odd while it sleeps, and another odd number each time."""
BEAT: Final = 24
"""Word of the consumer: when its event loop last ran, in ns of ``time.monotonic_ns``."""
WORKS: Final = 25
"""Word of the consumer: how much of what it has taken it still worked on then."""
HEADER_NBYTES: Final = 256


class Fence:
    """Orders what was read and written before against what follows, in memory, each time it is called.

    A lock that no other thread uses is released and acquired, which the processor must do in order: on x86 by
    a locked instruction, on ARM by a store with release and a load with acquire, which may not pass it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def ring_nbytes(capacity: int) -> int:
    """Return the bytes that a ring of so many entries takes."""
    return align(HEADER_NBYTES + capacity * ENTRY.size)


class Sender:
    """The producer's end.

    :param start: where the ring begins in the memory, in bytes.
    :param capacity: its entries, a power of two.
    :param eventfd: what wakes the consumer.
    """

    def __init__(self, memory: SharedMemory, start: int, capacity: int, eventfd: int) -> None:
        self._buffer: mmap | bytearray = memory.buffer
        self._words = memory.words[start // 8 : start // 8 + HEADER_NBYTES // 8]
        self._first = start + HEADER_NBYTES
        self._capacity = capacity
        self._eventfd = eventfd
        self._fence = Fence()
        self._tail = 0
        self._woken = 0
        in_child(self, Sender._let_go)

    def _let_go(self) -> None:
        """In a child that was forked: write to no ring of the parent's, and wake nobody."""
        self._buffer, self._words = _private(self._first, self._capacity)
        seal(self._eventfd)

    @property
    def room(self) -> int:
        """How many entries can be put now."""
        return self._capacity - (self._tail - self._words[HEAD])

    def put(self, *fields: Any) -> None:
        """Write an entry, which the consumer sees after :meth:`publish`. There has to be room for it."""
        at = self._first + self._tail % self._capacity * ENTRY.size
        ENTRY.pack_into(self._buffer, at, *fields)
        self._tail += 1

    def publish(self) -> None:
        """Show the consumer what was put, and wake it if it sleeps."""
        self._fence()
        self._words[TAIL] = self._tail
        self._fence()
        turn = self._words[SLEEPS]
        if turn % 2 and turn != self._woken:
            self._woken = turn
            os.eventfd_write(self._eventfd, 1)


class Receiver:
    """The consumer's end; the parameters are those of :class:`Sender`."""

    def __init__(self, memory: SharedMemory, start: int, capacity: int, eventfd: int) -> None:
        self._buffer: mmap | bytearray = memory.buffer
        self._words = memory.words[start // 8 : start // 8 + HEADER_NBYTES // 8]
        self._first = start + HEADER_NBYTES
        self._capacity = capacity
        self.eventfd = eventfd
        self._fence = Fence()
        self._head = 0
        in_child(self, Receiver._let_go)

    def _let_go(self) -> None:
        """In a child that was forked: leave what comes to the parent."""
        self._buffer, self._words = _private(self._first, self._capacity)
        seal(self.eventfd)

    def take(self) -> Iterator[tuple[int, ...]]:
        """Go through the entries that were published. Each is gone when the next one is asked for."""
        tail = self._words[TAIL]
        self._fence()
        while self._head < tail:
            at = self._first + self._head % self._capacity * ENTRY.size
            fields = ENTRY.unpack_from(self._buffer, at)
            self._head += 1
            self._words[HEAD] = self._head
            yield fields

    def sleep(self) -> bool:
        """Say that it sleeps, so that it is woken by the next entry.

        :returns: false if there is one already: then it is awake.
        """
        if not self._words[SLEEPS] % 2:  # Else it sleeps already: who is woken and due at once looks twice.
            self._words[SLEEPS] += 1
        self._fence()
        if self._words[TAIL] == self._head:
            return True
        self._words[SLEEPS] += 1
        return False

    def wake(self) -> None:
        """Say that it is awake, after it was woken."""
        try:
            os.eventfd_read(self.eventfd)
        except BlockingIOError:
            return
        if self._words[SLEEPS] % 2:
            self._words[SLEEPS] += 1

    def beat(self, now_ns: int, works: int = 0) -> None:
        """Show the producer that the event loop runs, and how much it works on."""
        self._words[WORKS] = works
        self._words[BEAT] = now_ns


def _private(first: int, capacity: int) -> "tuple[bytearray, memoryview[int]]":
    """Return an empty ring of nobody else's: its buffer, and its words."""
    return bytearray(first + capacity * ENTRY.size), memoryview(bytearray(HEADER_NBYTES)).cast("Q")


def beat_of(sender: Sender) -> tuple[int, int]:
    """Return when the consumer's event loop last ran, in ns, or 0; and how much it worked on then."""
    return int(sender._words[BEAT]), int(sender._words[WORKS])
