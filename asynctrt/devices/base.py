"""The protocols that a device fulfils: :class:`Device`, :class:`Stream`, :class:`Event`, :class:`Buffer`.

They are CUDA's terms with CUDA's meaning: work on one stream runs in order, work on two streams runs in
any order, an event is done when its stream has reached it, and nothing here waits on the CPU but
:meth:`Event.synchronize`. Device objects are made by the device alone, and a stream is always named.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from asynctrt.errors import DeviceLostError, DeviceMemoryError

if TYPE_CHECKING:
    from asynctrt.devices.arrays import DeviceArray

ALIGNMENT = 256
"""Alignment in bytes of every buffer and of every tensor within one, as ``set_device_memory`` demands."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of a device, in bytes. Other processes use it too, so what is free may be gone at once."""

    free_nbytes: int
    total_nbytes: int
    held_nbytes: int
    """Held by buffers of this device object."""
    budget_nbytes: int | None = None
    """What this device object may hold at the most."""

    @property
    def room_nbytes(self) -> int:
        """What can still be allocated through this device object."""
        if self.budget_nbytes is None:
            return self.free_nbytes
        return min(self.free_nbytes, self.budget_nbytes - self.held_nbytes)

    def __str__(self) -> str:
        said = (
            f"{mib(self.free_nbytes)} of {mib(self.total_nbytes)} are free, {mib(self.held_nbytes)} held here"
        )
        return said if self.budget_nbytes is None else f"{said} out of a budget of {mib(self.budget_nbytes)}"


def mib(nbytes: int) -> str:
    """A size for messages."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 // 10 else f"{nbytes:,} bytes"


class Buffer(Protocol):
    """A block of memory, aligned to 256 bytes, that lives until :meth:`close`."""

    @property
    def address(self) -> int:
        """The first byte, as the device sees it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def is_host_visible(self) -> bool:
        """Whether the CPU can read and write it, so that :meth:`array` may be called."""

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        """A writable view of a part. ``offset`` in bytes."""

    def close(self) -> None:
        """Give the memory back. Idempotent."""


class Event(Protocol):
    """A mark on a stream. It can be recorded again once it is done."""

    @property
    def error(self) -> BaseException | None:
        """What went wrong in the work before the event, once it is done."""

    def query(self) -> bool:
        """Whether the stream has reached the event. Never blocks."""

    def nudge(self) -> bool:
        """Help a pending event along where it needs the CPU's help; True if that is what it needed.

        A stream that is a Python thread may be done and unable to say so, because a loop that is never idle
        keeps the GIL from it. May hold the calling thread for as long as a hand-over takes.
        """

    def on_done(self, callback: Callable[[], None]) -> bool:
        """Ask for ``callback``, from any thread, when the event is done.

        False: this device cannot call, or the event is done already; the caller has to query.
        """

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Block this thread until the event is done; False after ``timeout_s``."""

    def elapsed_ns(self, since: "Event") -> int:
        """Device time between two events that are done."""


class Graph(Protocol):
    """Work that was captured once and is launched as a whole, as often as needed."""

    def launch(self, *, stream: "Stream") -> None:
        """Put all of it on ``stream``, in its order. At most one launch may be under way."""

    def close(self) -> None:
        """Give it back, once no launch of it is under way. Idempotent."""


class Stream(Protocol):
    """A queue of work that the device does in order."""

    @property
    def handle(self) -> int:
        """What libraries of the device know it by: for CUDA the ``cudaStream_t`` as a number. Never 0."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is put on it is collected, not done."""

    def record(self, event: Event) -> None:
        """Let ``event`` be done when everything before it on this stream is."""

    def wait(self, event: Event) -> None:
        """Let what follows on this stream start only when ``event`` is done."""

    def copy(self, target: Buffer, source: Buffer, *, offset: int, nbytes: int) -> None:
        """Copy ``nbytes`` at the same ``offset`` of both buffers, in either direction."""

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses that the device sees. Who calls it keeps the memory until it is done."""

    def begin_capture(self) -> None:
        """From now on collect what is put on this stream instead of doing it."""

    def end_capture(self) -> Graph:
        """What was collected; the stream works again.

        :raises DeviceError: when some of it cannot be part of a graph.
        """

    def close(self, timeout_s: float) -> bool:
        """End the stream; False when its work did not end within ``timeout_s``. Idempotent."""


@runtime_checkable
class Device(Protocol):
    """Where models run."""

    @property
    def name(self) -> str:
        """As given to ``asynctrt.open``: ``host``, ``cuda:0``."""

    @property
    def unified(self) -> bool:
        """Whether the device reads and writes staging memory itself, so that no copies are needed."""

    @property
    def slots(self) -> int:
        """How many batches keep the device busy. More may be put on it, and wait for their turn there."""

    @property
    def is_parallel(self) -> bool:
        """Whether batches side by side take no longer than one alone, as on cores of their own."""

    @property
    def prefers_graphs(self) -> bool:
        """Whether to launch what was captured is cheaper than to put the work on a stream again."""

    @property
    def timing_is_free(self) -> bool:
        """Whether events with times cost no more than others, so that every batch has its times."""

    @property
    def contexts_default(self) -> int:
        """How many contexts an engine on this device has when its options do not say."""

    @property
    def lost(self) -> DeviceLostError | None:
        """Why nothing on this device can be trusted any more in this process, once that is so."""

    def activate(self) -> None:
        """Make it the calling thread's current device, as libraries that are called next expect."""

    def memory(self) -> MemoryFigures:
        """What is free and what is held."""

    def create_stream(self, *, priority: int = 0) -> Stream:
        """A new stream. A higher priority is served first, where the device knows priorities."""

    def create_event(self, *, is_timed: bool = True) -> Event:
        """A new event, done from the start. Without times it may cost less, and ``elapsed_ns`` is refused."""

    def allocate_staging(self, nbytes: int) -> Buffer:
        """Memory that the CPU writes and the device copies from: pinned, where there is a difference.

        :raises DeviceMemoryError: when there is no room.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the device.

        :raises DeviceMemoryError: when there is no room.
        """

    def import_array(self, value: object) -> "DeviceArray | None":
        """An array of any library that lies on this device, where it lies; ``None`` if it is none.

        :raises InputError: for one that lies there but cannot be taken: on another GPU, or not in C order.
        """

    def allocate_output(self, nbytes: int, *, stream: Stream) -> Buffer:
        """Memory for what is to stay on the device, in the order of ``stream``; not zeroed. Never blocks.

        :raises DeviceMemoryError: when there is no room.
        """

    def abandon(self) -> None:
        """Be told that something on it may run for ever: nothing is done from now on that waits for it."""

    def close(self) -> None:
        """Give back what the device holds. Idempotent."""


def check_room(device: Device, nbytes: int, what: str, fix: str) -> None:
    """Refuse what would not fit before any of it is made.

    :raises DeviceMemoryError: with the arithmetic.
    """
    memory = device.memory()
    if nbytes > memory.room_nbytes:
        raise DeviceMemoryError(
            f"{what} need {mib(nbytes)} on {device.name}, and there is room for {mib(memory.room_nbytes)} "
            f"({memory}). {fix}"
        )
