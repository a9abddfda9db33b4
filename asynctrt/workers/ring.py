"""Messages of 64 bytes from one process to another, through shared memory.

A ring has one producer and one consumer, and only one of them writes each word, so there is no lock that a
dying process could leave locked. A consumer with nothing to do marks itself as asleep, and only then does the
producer wake it through its eventfd: while both are busy, there are no system calls.
"""

import os
import struct
import threading
from collections.abc import Iterator
from mmap import mmap
from typing import Any, Final

from asynctrt._util.forks import in_child, seal
from asynctrt.workers.memory import SharedMemory, align

ENTRY: Final = struct.Struct("<HHIQqQQQQQ")
"""Kind, count, number, id, time, and five words whose meaning depends on the kind."""
TAIL: Final = 0
"""Word of the producer: the number of entries published. Each side's words have their own cache lines."""
HEAD: Final = 8
"""Word of the consumer: the number of entries taken."""
SLEEPS: Final = 16
"""Word of the consumer: odd while it sleeps, a different odd number each time."""
BEAT: Final = 24
"""Word of the consumer: when its event loop last ran, in ns of ``time.monotonic_ns``."""
HEADER_NBYTES: Final = 256


class Fence:
    """A memory fence: each call orders earlier reads and writes before later ones.

    It releases and acquires a lock that no other thread uses. The processor must keep these in order: on x86
    they take a locked instruction, on ARM a store-release and a load-acquire, which may not pass the store.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def ring_nbytes(capacity: int) -> int:
    """Return the bytes of a ring with ``capacity`` entries."""
    return align(HEADER_NBYTES + capacity * ENTRY.size)


class End:
    """One end of a ring.

    :param start: the offset of the ring in the memory, in bytes.
    :param capacity: the number of its entries, a power of two.
    :param eventfd: the eventfd that wakes the consumer.
    """

    def __init__(self, memory: SharedMemory, start: int, capacity: int, eventfd: int) -> None:
        self._buffer: mmap | bytearray = memory.buffer
        self._words = memory.words[start // 8 : start // 8 + HEADER_NBYTES // 8]
        self._first = start + HEADER_NBYTES
        self._capacity = capacity
        self.eventfd = eventfd
        self._fence = Fence()
        in_child(self, End._let_go)

    def _let_go(self) -> None:
        """Detach a forked child from the parent's ring: it must neither use it nor wake the consumer."""
        # Whatever it does from now on, it does to an empty ring in private memory.
        self._buffer = bytearray(self._first + self._capacity * ENTRY.size)
        self._words = memoryview(bytearray(HEADER_NBYTES)).cast("Q")
        seal(self.eventfd)


class Sender(End):
    """The producer's end."""

    def __init__(self, memory: SharedMemory, start: int, capacity: int, eventfd: int) -> None:
        super().__init__(memory, start, capacity, eventfd)
        self._tail = 0
        self._woken = 0

    @property
    def room(self) -> int:
        """The number of entries that fit now."""
        return self._capacity - (self._tail - self._words[HEAD])

    @property
    def beat_ns(self) -> int:
        """When the consumer's event loop last ran; 0 if it has not run yet."""
        return self._words[BEAT]

    def put(self, *fields: Any) -> None:
        """Write an entry, which the consumer sees after :meth:`publish`. The caller ensures that it fits."""
        at = self._first + self._tail % self._capacity * ENTRY.size
        ENTRY.pack_into(self._buffer, at, *fields)
        self._tail += 1

    def publish(self) -> None:
        """Publish the entries put so far, and wake the consumer if it sleeps."""
        self._fence()
        self._words[TAIL] = self._tail
        self._fence()
        turn = self._words[SLEEPS]
        if turn % 2 and turn != self._woken:
            self._woken = turn
            os.eventfd_write(self.eventfd, 1)


class Receiver(End):
    """The consumer's end."""

    def __init__(self, memory: SharedMemory, start: int, capacity: int, eventfd: int) -> None:
        super().__init__(memory, start, capacity, eventfd)
        self._head = 0

    def take(self) -> Iterator[tuple[int, ...]]:
        """Iterate over the published entries. Each is taken before it is yielded."""
        tail = self._words[TAIL]
        self._fence()
        while self._head < tail:
            at = self._first + self._head % self._capacity * ENTRY.size
            fields = ENTRY.unpack_from(self._buffer, at)
            self._head += 1
            self._words[HEAD] = self._head
            yield fields

    def sleep(self) -> bool:
        """Mark the consumer as asleep, so that the next entry wakes it.

        :returns: false if there is an entry already: then it stays awake.
        """
        # It may be asleep already: when it is woken while already scheduled to look, it looks twice.
        if not self._words[SLEEPS] % 2:
            self._words[SLEEPS] += 1
        self._fence()
        if self._words[TAIL] == self._head:
            return True
        self._words[SLEEPS] += 1
        return False

    def wake(self) -> None:
        """Mark the consumer as awake, after it was woken."""
        try:
            os.eventfd_read(self.eventfd)
        except BlockingIOError:
            return
        if self._words[SLEEPS] % 2:
            self._words[SLEEPS] += 1

    def beat(self, now_ns: int) -> None:
        """Show the producer that the event loop runs."""
        self._words[BEAT] = now_ns
