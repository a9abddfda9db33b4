"""Arenas: blocks of enqueue memory that execution contexts share, within one engine or across several.

A context uses an arena while its batch computes. Batches in one arena run one after the other. The device
enforces this order: each stream waits for the event of the arena's last use, so no CPU work happens between
two batches. N contexts with K arenas need the memory of K arenas; private workspaces would need that of N
(``IExecutionContext::setDeviceMemoryV2``; "How TensorRT works", The Runtime Phase).
"""

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from asynctrt._util.forks import Origin
from asynctrt.devices.base import Buffer, Device, Event, aligned, check_room
from asynctrt.errors import OptionsError, UsageError


class Arena:
    """One block of enqueue memory, used in the order of its events."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None
        self.last_use: Event | None = None
        """Done when the latest batch in it has computed. The stream of the next batch waits for it."""
        self.is_enqueueing = False
        """Whether a thread is enqueueing a batch in it. Later batches then queue in :attr:`waiting`, because
        batches use an arena in the order in which they are enqueued."""
        self.waiting: deque[Callable[[], object]] = deque()
        self.is_given_up = False
        """Whether a batch in it never ended, so that no later batch could start."""
        self.on_given_up: list[Callable[[], object]] = []
        """Callbacks, one per engine that uses the arena, called when it is given up."""

    @property
    def memory(self) -> Buffer:
        """Return the block, which must have been reserved."""
        assert self.buffer is not None, "an arena is reserved before it is used"
        return self.buffer

    def give_up(self) -> None:
        """Stop using the arena, in every engine that shares it. Idempotent."""
        if not self.is_given_up:
            self.is_given_up = True
            for tell in tuple(self.on_given_up):
                tell()
            self.go_on()

    def go_on(self) -> None:
        """Release the batches that waited for a thread to enqueue its batch, up to the next such batch."""
        self.is_enqueueing = False
        while self.waiting and not self.is_enqueueing:
            self.waiting.popleft()()


class Arenas:
    """A fixed number of arenas on one device. They grow to the size that the most demanding engine needs.

    By default an engine makes its own. To share arenas, create an ``Arenas`` object and open each engine on
    the same device object with ``shared_arenas=``. Engines that share arenas must run on one event loop. Open
    the engine that needs most first: the memory that a growing arena replaces stays allocated until
    :meth:`close`, because captured graphs may still use it.

    :param device: the device object that the engines are opened on.
    :param count: how many batches may compute side by side.
    :param nbytes: the initial size of each arena.
    :raises OptionsError: if ``count`` is less than 1, or ``nbytes`` negative.
    :raises DeviceMemoryError: if they do not fit.
    """

    def __init__(self, device: Device, count: int, *, nbytes: int = 0) -> None:
        if count < 1 or nbytes < 0:
            raise OptionsError(f"count must be at least 1 and nbytes at least 0, not {count} and {nbytes}")
        self.device = device
        self.arenas = [Arena() for _ in range(count)]
        self.users = [0] * count
        """The number of batches in flight in each arena, across all engines."""
        self.engines = 0
        """How many engines use them."""
        self.is_shared = False
        """Whether another engine may start using them at any time."""
        self._thread = 0
        # Guards state that several engines, opened at once in different threads, may change.
        self._lock = threading.RLock()
        self._retired: list[Buffer] = []
        self._origin = Origin()
        self._nbytes = 0
        if nbytes:
            self.reserve(nbytes)

    def __repr__(self) -> str:
        return f"<Arenas {self.device.name} count={len(self.arenas)} nbytes={self._nbytes} of each>"

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
        if error is None or self._origin.is_here:  # In a child, keep the error.
            self.close()

    @property
    def nbytes(self) -> int:
        """Return the total number of bytes held."""
        return len(self.arenas) * self._nbytes + sum(buffer.nbytes for buffer in self._retired)

    def claim(self, thread: int) -> None:
        """Allow use by engines whose event loop runs in the thread with this id.

        :raises UsageError: if engines on another thread use them, because batches of two loops could overlap.
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
        """Register one more engine, which needs ``nbytes`` in each arena. Raises as :meth:`reserve` does."""
        self._origin.check(self)
        with self._lock:
            self.reserve(nbytes)
            self.engines += 1

    def leave(self) -> None:
        """Unregister an engine."""
        with self._lock:
            self.engines -= 1

    def reserve(self, nbytes: int) -> None:
        """Grow each arena to at least ``nbytes``.

        :raises DeviceMemoryError: if they do not fit, with the arithmetic; nothing has changed then.
        """
        self._origin.check(self)
        with self._lock:
            self._grow(aligned(nbytes))

    def _grow(self, nbytes: int) -> None:
        if nbytes <= self._nbytes:
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

        :raises UsageError: if an engine still uses the arenas.
        """
        self._origin.check(self)
        if self.engines:
            raise UsageError(f"{self!r} are still used by {self.engines} engines. Close those first")
        for arena in self.arenas:
            if arena.buffer is not None:
                arena.buffer.close()
                arena.buffer = None
            arena.last_use = None
        for buffer in self._retired:
            buffer.close()
        self._retired.clear()
        self._nbytes = 0
