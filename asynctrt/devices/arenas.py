"""Arenas: blocks of enqueue memory that execution contexts share, of one engine or of several.

A context uses an arena while its batch computes. Batches in one arena run one after the other, and the device
sees to that: each stream waits for the event of the arena's last use, so the CPU does not stand between two
batches. K arenas for N contexts take the memory of K, where N private workspaces would take that of N
(``IExecutionContext::setDeviceMemoryV2``; "How TensorRT works", The Runtime Phase).
"""

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np

from asynctrt.devices.base import Buffer, Device, Event, Stream, aligned, check_room
from asynctrt.errors import InternalError, OptionsError, UsageError
from asynctrt.forks import Origin


class GrowingBuffer:
    """Enqueue memory that is as large as the batches in it needed so far. Its address changes as it grows.

    It grows in the order of the stream of the batch that needs more, which has waited for the batch before:
    neither does the CPU wait, nor does memory go that is in use.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer: Buffer | None = None
        self._is_kept = False
        self._outgrown: list[Buffer] = []

    def __repr__(self) -> str:
        return f"<GrowingBuffer {self._device.name} nbytes={self.nbytes}>"

    @property
    def address(self) -> int:
        return 0 if self._buffer is None else self._buffer.address

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def held_nbytes(self) -> int:
        """Return the bytes that it holds, with those that it outgrew and keeps."""
        return self.nbytes + sum(buffer.nbytes for buffer in self._outgrown)

    @property
    def is_host_visible(self) -> bool:
        return self._buffer is not None and self._buffer.is_host_visible

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        assert self._buffer is not None, "there is nothing in it yet"
        return self._buffer.array(dtype, shape, offset)

    def reserve(self, nbytes: int, *, stream: Stream) -> None:
        """Make it at least ``nbytes`` large for work on ``stream``, which is in order with all work before.

        :raises DeviceMemoryError: if that does not fit; it stays as it is.
        """
        if nbytes <= self.nbytes:
            return
        if stream.is_capturing:
            raise InternalError(f"{self!r} cannot grow to {nbytes} bytes while {stream!r} captures")
        grown = self._device.allocate_ordered(aligned(nbytes), stream=stream.handle)
        outgrown, self._buffer = self._buffer, grown
        if outgrown is not None and self._is_kept:
            self._outgrown.append(outgrown)
        elif outgrown is not None:
            self._device.free_ordered(outgrown, stream=stream.handle)

    def keep(self) -> None:
        """Keep what it outgrows from now on, because captured graphs work in it."""
        self._is_kept = True

    def close(self) -> None:
        """Free it, and all that it kept. Idempotent."""
        for buffer in (*self._outgrown, *([] if self._buffer is None else [self._buffer])):
            buffer.close()
        self._outgrown.clear()
        self._buffer = None


class Arena:
    """One block of enqueue memory, used in the order of its events."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None
        self.last_use: Event | None = None
        """Done when the latest batch in it has computed. The stream of the next batch waits for it."""
        self.is_enqueueing = False
        """Whether a thread is putting a batch in it on its stream. Those behind it wait in :attr:`waiting`,
        since the order of batches in an arena is that in which they are enqueued."""
        self.waiting: deque[Callable[[], object]] = deque()
        self.is_given_up = False
        """Whether a batch in it did not end, so that none behind it would ever begin."""
        self.on_given_up: list[Callable[[], object]] = []
        """What each engine that uses it does when it is given up."""

    @property
    def memory(self) -> Buffer:
        """Return the block, which has been reserved."""
        assert self.buffer is not None, "an arena is reserved before it is used"
        return self.buffer

    def give_up(self) -> None:
        """Let no batch into it any more, of whichever engine. Idempotent."""
        if not self.is_given_up:
            self.is_given_up = True
            for tell in tuple(self.on_given_up):
                tell()
            self.go_on()

    def go_on(self) -> None:
        """After a batch was enqueued by a thread: let those behind it go, up to the next one of that kind."""
        self.is_enqueueing = False
        while self.waiting and not self.is_enqueueing:
            self.waiting.popleft()()


class Arenas:
    """A number of arenas on one device. They grow to what the most demanding engine in them needs.

    An engine makes its own. To share arenas, make them yourself, and open each engine on the same device
    object with ``shared_arenas=``; such engines belong to one event loop. Open the engine that needs most
    first: the memory that a growing arena replaces stays allocated until :meth:`close`, as captured graphs
    may still use it.

    :param device: the device object that the engines are opened on.
    :param count: how many batches may compute side by side.
    :param nbytes: the initial size of each.
    :param by_shapes: let each be as large as the batches in it needed so far, and grow with them, rather than
        as large as the largest batch of any profile. Engines in such arenas capture no graphs.
    :raises OptionsError: if ``count`` is less than 1, or ``nbytes`` negative.
    :raises DeviceMemoryError: if they do not fit.
    """

    def __init__(self, device: Device, count: int, *, nbytes: int = 0, by_shapes: bool = False) -> None:
        if count < 1 or nbytes < 0:
            raise OptionsError(f"count must be at least 1 and nbytes at least 0, not {count} and {nbytes}")
        if by_shapes and nbytes:
            raise OptionsError(f"arenas that are sized by shapes begin empty, so leave out nbytes={nbytes}")
        self.device = device
        self.by_shapes = by_shapes
        """Whether each is as large as the batches in it needed."""
        self.arenas = [Arena() for _ in range(count)]
        if by_shapes:
            for arena in self.arenas:
                arena.buffer = GrowingBuffer(device)
        self.users = [0] * count
        """Batches in flight in each, of all engines."""
        self.engines = 0
        """How many engines use them."""
        self.is_shared = False
        """Whether other engines may use them at any time."""
        self._thread = 0
        # Guards what engines that are opened at once, each in a thread, may change.
        self._lock = threading.RLock()
        self._retired: list[Buffer] = []
        self._origin = Origin()
        self._nbytes = 0
        if nbytes:
            self.reserve(nbytes)

    def __repr__(self) -> str:
        size = "by shapes" if self.by_shapes else f"nbytes={self._nbytes} of each"
        return f"<Arenas {self.device.name} count={len(self.arenas)} {size}>"

    def __len__(self) -> int:
        return len(self.arenas)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self._origin.is_here:  # What ends a child goes on.
            self.close()

    @property
    def nbytes(self) -> int:
        """Return how many bytes they hold together."""
        grown = sum(
            arena.buffer.held_nbytes for arena in self.arenas if isinstance(arena.buffer, GrowingBuffer)
        )
        return len(self.arenas) * self._nbytes + sum(buffer.nbytes for buffer in self._retired) + grown

    def claim(self, thread: int) -> None:
        """Let engines use them whose loop runs in the thread with this number.

        :raises UsageError: if engines of another thread use them, as nothing would keep their batches apart.
        """
        self._origin.check(self)
        if self.engines and thread != self._thread:
            raise UsageError(
                f"{self!r} are used by engines on another event loop, and nothing would keep the batches of "
                "two loops apart. Make separate arenas for each loop"
            )
        self._thread = thread
        self.is_shared = True

    def join(self, nbytes: int) -> None:
        """Note that one more engine uses them, with ``nbytes`` in each. As :meth:`reserve`."""
        self._origin.check(self)
        with self._lock:
            self.reserve(nbytes)
            self.engines += 1

    def leave(self) -> None:
        """Note that an engine uses them no longer."""
        with self._lock:
            self.engines -= 1

    def reserve(self, nbytes: int) -> None:
        """Make each at least ``nbytes`` large.

        :raises DeviceMemoryError: if they do not fit, with the arithmetic; then nothing is changed.
        """
        self._origin.check(self)
        with self._lock:
            self._grow(aligned(nbytes))

    def _grow(self, nbytes: int) -> None:
        if nbytes <= self._nbytes or self.by_shapes:
            return
        check_room(
            self.device,
            nbytes * len(self.arenas),
            f"{len(self.arenas)} arenas of {nbytes} bytes",
            "Open the engine with fewer arenas (batches then take turns), or build the plan for fewer rows",
        )
        grown: list[Buffer] = []
        try:
            for _ in self.arenas:
                grown.append(self.device.allocate(nbytes))  # noqa: PERF401  (each may fail)
        except BaseException:
            for buffer in grown:
                buffer.close()
            raise
        for arena, buffer in zip(self.arenas, grown, strict=True):
            if arena.buffer is not None:
                self._retired.append(arena.buffer)
            arena.buffer = buffer
        self._nbytes = nbytes

    def close(self) -> None:
        """Free the memory. Idempotent.

        :raises UsageError: if an engine still uses them.
        """
        self._origin.check(self)
        if self.engines:
            raise UsageError(f"{self!r} are still used by {self.engines} engines. Close those first")
        for arena in self.arenas:
            if arena.buffer is not None:
                arena.buffer.close()
                # One that grows may be used again, from nothing.
                arena.buffer = arena.buffer if self.by_shapes else None
            arena.last_use = None
        for buffer in self._retired:
            buffer.close()
        self._retired.clear()
        self._nbytes = 0
