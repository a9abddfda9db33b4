"""Arenas: blocks of enqueue memory that execution contexts share, of one engine or of several.

A context works in an arena for as long as its batch computes. Batches in one arena run one after the other,
and the device sees to that: each stream waits for the event of the arena's last use, so no CPU stands between
two batches. K arenas for N contexts cost the memory of K, where N private workspaces would cost that of N
(``IExecutionContext::setDeviceMemoryV2``; "How TensorRT works", The Runtime Phase).
"""

from types import TracebackType
from typing import Self

from asynctrt.devices.base import Buffer, Device, Event, aligned, check_room
from asynctrt.errors import OptionsError, UsageError


class Arena:
    """One block of enqueue memory, used in the order of its events."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None
        self.last_use: Event | None = None
        """Done when the latest batch in it has computed; the stream of the next one waits for it."""

    @property
    def memory(self) -> Buffer:
        """The block."""
        assert self.buffer is not None, "an arena is reserved before it is used"
        return self.buffer


class Arenas:
    """``count`` arenas on one device. They grow to what the most demanding engine in them needs.

    An engine makes its own. To share them, make them yourself and open each engine on the same device object
    and with ``shared_arenas=`` this; such engines belong to one event loop. Open the one that needs most
    first: what a growing arena leaves behind stays allocated until :meth:`close`, as captured graphs may
    still use it.

    :param device: the device object that the engines are opened on.
    :param count: how many batches may compute side by side.
    :param nbytes: how large each is from the start.
    :raises OptionsError: for an impossible number.
    :raises DeviceMemoryError: when they do not fit.
    """

    def __init__(self, device: Device, count: int, *, nbytes: int = 0) -> None:
        if count < 1 or nbytes < 0:
            raise OptionsError(f"there are at least 1 arena and 0 bytes in each, not {count} and {nbytes}")
        self.device = device
        self.arenas = [Arena() for _ in range(count)]
        self.users = [0] * count
        """Batches in flight in each, counted by the ledgers of all engines."""
        self.engines = 0
        """Engines that use them."""
        self._thread = 0
        self._retired: list[Buffer] = []
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
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes held by all together."""
        return len(self.arenas) * self._nbytes + sum(buffer.nbytes for buffer in self._retired)

    def claim(self, thread: int) -> None:
        """Let engines whose loop runs in this thread use them.

        :raises UsageError: while engines of another thread do: nothing keeps their batches apart.
        """
        if self.engines and thread != self._thread:
            raise UsageError(
                f"{self!r} are used by engines on another event loop, and nothing would keep the batches of "
                "two loops apart. Make arenas for each loop"
            )
        self._thread = thread

    def reserve(self, nbytes: int) -> None:
        """Let each have at least ``nbytes``.

        :raises DeviceMemoryError: when they do not fit, with the arithmetic; nothing is changed then.
        """
        nbytes = aligned(nbytes)
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
        """Give the memory back. Idempotent.

        :raises UsageError: while an engine uses them.
        """
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
