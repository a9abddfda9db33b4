"""The protocols that a device fulfils: :class:`Device`, :class:`Stream`, :class:`Event`, :class:`Buffer`.

They are CUDA's terms with CUDA's meaning: work on one stream runs in order, work on two streams runs in
any order, an event is done when its stream has reached it, and nothing here waits on the CPU but
:meth:`Event.synchronize`. Device objects are made by the device alone, and a stream is always named.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

ALIGNMENT = 256
"""Alignment in bytes of every buffer and of every tensor within one, as ``set_device_memory`` demands."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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


class Stream(Protocol):
    """A queue of work that the device does in order."""

    def record(self, event: Event) -> None:
        """Let ``event`` be done when everything before it on this stream is."""

    def wait(self, event: Event) -> None:
        """Let what follows on this stream start only when ``event`` is done."""

    def copy(self, target: Buffer, source: Buffer, *, offset: int, nbytes: int) -> None:
        """Copy ``nbytes`` at the same ``offset`` of both buffers, in either direction."""

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
    def contexts_default(self) -> int:
        """How many contexts an engine on this device has when its options do not say."""

    def create_stream(self) -> Stream:
        """A new stream."""

    def create_event(self) -> Event:
        """A new event, done from the start."""

    def allocate_staging(self, nbytes: int) -> Buffer:
        """Memory that the CPU writes and the device copies from: pinned, where there is a difference.

        :raises DeviceMemoryError: when there is no room.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the device.

        :raises DeviceMemoryError: when there is no room.
        """

    def close(self) -> None:
        """Give back what the device holds. Idempotent."""
