"""The protocols of a device: :class:`Device`, :class:`Stream`, :class:`Event`, :class:`Buffer`.

The terms are CUDA's, with CUDA's meaning: work on one stream runs in order, there is no order between two
streams, an event is done when its stream has reached it, and only :meth:`Completion.synchronize` blocks. Only
the device creates its objects, and a stream is always passed as a keyword.
:class:`DeviceArray` is here too, because a device imports arrays and an array knows its device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from asynctrt.errors import DeviceLostError, DeviceMemoryError, OptionsError, UsageError, show

ALIGNMENT: Final = 256
"""Alignment in bytes of every buffer and of every tensor within one, as ``set_device_memory`` demands."""

MIB: Final = 1 << 20

COPY_S: Final = 60.0
"""How long a copy between the host and the device may take before the device counts as hung."""


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Account:
    """The memory that a device object and its parts hold, and the maximum, in bytes."""

    def __init__(self, budget_nbytes: int | None) -> None:
        self.budget_nbytes = budget_nbytes
        self.held_nbytes = 0


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of a device, in bytes. Other processes use the device too, so free memory may soon be gone."""

    free_nbytes: int
    total_nbytes: int
    held_nbytes: int
    """Bytes held by buffers of this device object."""
    budget_nbytes: int | None = None
    """The most that buffers of this device object may hold."""

    @property
    def room_nbytes(self) -> int:
        """Return how much can still be allocated through this device object."""
        if self.budget_nbytes is None:
            return self.free_nbytes
        return min(self.free_nbytes, self.budget_nbytes - self.held_nbytes)

    def __str__(self) -> str:
        said = (
            f"{mib(self.free_nbytes)} of {mib(self.total_nbytes)} are free, {mib(self.held_nbytes)} held here"
        )
        return said if self.budget_nbytes is None else f"{said} out of a budget of {mib(self.budget_nbytes)}"


def mib(nbytes: int) -> str:
    """Format a size for messages."""
    return f"{nbytes / MIB:,.1f} MiB" if nbytes >= MIB // 10 else f"{nbytes:,} bytes"


class Buffer(Protocol):
    """A block of memory, aligned to 256 bytes, that lives until :meth:`close`."""

    @property
    def address(self) -> int:
        """Return the address of the first byte in the device's address space."""

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""

    @property
    def is_host_visible(self) -> bool:
        """Return whether the CPU can read and write it, so that :meth:`array` may be called."""

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        """Return a writable view of part of the buffer, from byte ``offset`` on."""

    def close(self) -> None:
        """Free the memory. Idempotent."""


class Completion(Protocol):
    """Something that the reaper watches until it is done."""

    def query(self) -> bool:
        """Return whether it is done. Never blocks."""

    def is_running(self) -> bool:
        """Return whether the work before it is running now, rather than waiting for its turn.

        Call this only while it is pending. Work waits for its turn while no thread is free, or while it is
        ordered after other work that has not ended. Work behind abandoned work (:meth:`Stream.abandon`)
        counts as running.
        """

    def nudge(self) -> bool:
        """Let it make progress if it needs the CPU for that, and return whether it did.

        A Python thread may have finished and be unable to report it, because a busy event loop holds the GIL.
        This call may block for as long as a hand-over of the GIL takes.
        """

    def on_done(self, callback: Callable[[], None]) -> bool:
        """Request a call of ``callback``, from any thread, once it is done.

        Return False if callbacks are not supported or it is already done. The caller must then call
        :meth:`query`.
        """

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Block this thread until it is done. Return False if that takes longer than ``timeout_s``."""


class Event(Completion, Protocol):
    """A mark on a stream, done when the stream has reached it. It can be recorded again once it is done."""

    error: BaseException | None
    """The error of the work before the event, once it is done. The reader may reset it to None."""

    def elapsed_ns(self, since: "Event") -> int:
        """Return the device time in ns between two events that are done."""


class Graph(Protocol):
    """Captured work that is launched as a whole, any number of times."""

    def launch(self, *, stream: "Stream") -> None:
        """Enqueue all of it on ``stream``, in order. Only one launch may be in flight at a time."""

    def close(self) -> None:
        """Free it. No launch may be in flight. Idempotent."""


class Stream(Protocol):
    """A queue of work that the device runs in order."""

    is_abandoned: bool
    """Whether its work was abandoned as hung."""

    @property
    def handle(self) -> int:
        """Return the handle to pass to libraries: for CUDA, the ``cudaStream_t`` as an integer. Never 0."""

    @property
    def is_capturing(self) -> bool:
        """Return whether work put on it is captured instead of run."""

    @property
    def ran_ns(self) -> int | None:
        """Return how long its work has run so far, in ns, excluding waits; ``None`` if unknown."""

    def record(self, event: Event) -> None:
        """Mark ``event`` as done once everything before it on this stream is done."""

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait until ``event`` is done."""

    def copy(self, target: Buffer, source: Buffer, *, offset: int, nbytes: int) -> None:
        """Copy ``nbytes`` at the same ``offset`` of both buffers, in either direction."""

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses in the device's address space. The caller must keep the memory alive
        until the copy has run."""

    def begin_capture(self) -> None:
        """Start to capture work put on this stream, instead of running it."""

    def end_capture(self) -> Graph:
        """Stop capturing, and return the captured work as a graph.

        :raises DeviceError: if some of it cannot be part of a graph.
        """

    def abandon(self) -> None:
        """Give up its work, which seems to hang. The host device replaces the thread that runs it.

        After this the stream may only be closed. If its work ends after all, its events are done as usual.
        """

    def drain(self, timeout_s: float) -> bool:
        """Wait for its work to end and accept no more. Return False if it takes longer than ``timeout_s``."""

    def close(self, timeout_s: float) -> bool:
        """Destroy the stream. Return False if its work does not end within ``timeout_s``. Idempotent."""


@runtime_checkable
class Device(Protocol):
    """A device that models run on."""

    @property
    def name(self) -> str:
        """Return its name as ``asynctrt.open`` takes it: ``host``, ``cuda:0``."""

    @property
    def gpu(self) -> str | None:
        """Return the GPU's product name (``NVIDIA H200``), or ``None`` on a device that is not a GPU."""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Return the GPU's compute capability, ``(9, 0)``, or ``None`` on a device that is not a GPU."""

    @property
    def is_integrated(self) -> bool:
        """Return whether it is a GPU that shares the host's memory instead of having separate memory."""

    @property
    def unified(self) -> bool:
        """Return whether the device computes in staging memory directly, so that no copies are needed."""

    @property
    def concurrency(self) -> int:
        """Return how many batches keep the device busy. Further batches wait for their turn."""

    @property
    def is_parallel(self) -> bool:
        """Return whether concurrent batches take no longer than one alone, as on separate cores."""

    @property
    def is_pipelined(self) -> bool:
        """Return whether one batch is copied in while another computes, so that a batch is best enqueued just
        before the previous one ends."""

    @property
    def prefers_graphs(self) -> bool:
        """Return whether launching a graph is cheaper than enqueueing its work again."""

    @property
    def timing_is_free(self) -> bool:
        """Return whether timed events cost no more than untimed ones, so that every batch is timed."""

    @property
    def contexts_default(self) -> int:
        """Return the default number of contexts for an engine on this device."""

    @property
    def lost(self) -> DeviceLostError | None:
        """Return why this process can no longer use the device, or ``None`` while it can."""

    @property
    def whole(self) -> "Device":
        """Return the device that this one is a part of, or the device itself."""

    def partition(self, share: float) -> "tuple[Device, Device]":
        """Divide the device into two parts with separate compute resources: ``share`` of it, and the rest.

        The parts share its memory. Close both after the engines on them, and before the whole device.

        :param share: above 0 and below 1. The device rounds it to the nearest possible.
        :raises OptionsError: for any other share, or if this is already a part of a device.
        :raises DeviceUnavailableError: if the device cannot be divided.
        """

    def activate(self) -> None:
        """Make it the calling thread's current device, which libraries require."""

    def memory(self) -> MemoryFigures:
        """Return how much memory is free and how much is held."""

    def create_stream(self) -> Stream:
        """Create a stream."""

    def create_event(self, *, is_timed: bool = True) -> Event:
        """Create an event, which counts as done until it is recorded.

        :param is_timed: whether ``elapsed_ns`` may be called. An untimed event may cost less.
        """

    def allocate_staging(self, nbytes: int) -> Buffer:
        """Allocate memory for copies by both the CPU and the device: pinned, for a GPU.

        :raises DeviceMemoryError: if it does not fit.
        """

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Let the device copy directly from memory mapped by this process: for a GPU, page-lock it.

        Return a function that undoes this. Both calls may be slow, so make them in a thread without an event
        loop. The memory must stay mapped until the pin is undone.

        :raises DeviceError: if the system or the device refuses it.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate zeroed device memory.

        :raises DeviceMemoryError: if it does not fit.
        """

    def import_array(self, value: object) -> "DeviceArray | None":
        """Return an array of any library on this device without copying it, or ``None`` for any other value.

        :raises InputError: if the array is on another GPU or not in C order.
        """

    def allocate_ordered(self, nbytes: int, *, stream: int) -> Buffer:
        """Allocate memory in the order of the stream with this handle. It is not zeroed. Never blocks.

        ``close`` frees it in the order of CUDA's default stream.

        :raises DeviceMemoryError: if it does not fit.
        """

    def free_ordered(self, buffer: Buffer, *, stream: int) -> None:
        """Free memory from :meth:`allocate_ordered` once this stream has done its work so far."""

    def abandon(self, stream: Stream) -> None:
        """Record that the work of a stream may run forever: nothing waits for it until :meth:`ended`."""

    def ended(self, stream: Stream) -> None:
        """Record that the work of a stream has ended. If it had been abandoned, run what was postponed."""

    def close(self) -> None:
        """Free what the device holds. Idempotent."""


class DeviceArray:
    """An array on a device, with rows as its first axis, in C order. It keeps its memory alive.

    GPU libraries read it in place, through ``__cuda_array_interface__``: ``torch.as_tensor(array,
    device="cuda")``, ``cupy.asarray(array)``. The rows are complete when the engine returns it. Its memory is
    freed in the order of CUDA's default stream; if you read it on another stream, keep the array until that
    is done.
    """

    __slots__ = ("_owner", "address", "device", "dtype", "ready", "shape")

    def __init__(
        self,
        device: Device,
        address: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        owner: object,
        ready: Event | None = None,
    ) -> None:
        self.device = device
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.ready = ready
        """Done once the contents are complete; ``None`` if they already are."""
        # Only keeps the memory alive.
        self._owner = owner

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)} on {self.device.name}>"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "DeviceArray":
        """Return consecutive rows without copying them.

        :raises UsageError: for any index other than ``array[start:stop]``.
        """
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise UsageError(
                f"a DeviceArray is sliced by consecutive rows, array[start:stop], not by {show(rows)}. To "
                "read single values copy it to the host, array.numpy(), or give it to a library of the GPU: "
                "torch.as_tensor(array)"
            )
        start, stop, _ = rows.indices(len(self))
        shape = (max(stop - start, 0), *self.shape[1:])
        return self._view(self.address + start * self.row_nbytes, shape)

    def as_row(self) -> "DeviceArray":
        """Return the whole array as one row, without copying it."""
        return self._view(self.address, (1, *self.shape))

    def as_given(self) -> "DeviceArray":
        """Return the first row as an array, without copying it: the inverse of :meth:`as_row`."""
        return self._view(self.address, self.shape[1:])

    def _view(self, address: int, shape: tuple[int, ...]) -> "DeviceArray":
        return DeviceArray(self.device, address, self.dtype, shape, owner=self._owner, ready=self.ready)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def row_nbytes(self) -> int:
        """Return the size of one row in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the size of all rows in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe it to CUDA's libraries, by version 3 of their interface."""
        if not self.device.name.startswith("cuda"):
            raise AttributeError(f"{self!r} is not on a CUDA device")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }

    def numpy(self) -> np.ndarray:
        """Return a copy in the host's memory. Blocks: for a large array, call it in another thread.

        :raises DeviceError: if the device cannot copy it.
        """
        stream = self.device.create_stream()
        staging = self.device.allocate_staging(self.nbytes)
        if self.ready is not None:
            stream.wait(self.ready)
        stream.copy_bytes(staging.address, self.address, self.nbytes)
        copied = self.device.create_event()
        stream.record(copied)
        if not copied.synchronize(COPY_S):
            raise DeviceLostError(f"copying {self!r} to the host did not end within {COPY_S} s")
        stream.close(COPY_S)
        if copied.error is not None:
            raise copied.error
        array = staging.array(self.dtype, self.shape, 0)
        staging.close()
        return array


def check_share(device: Device, share: float) -> None:
    """Check that a device can be divided."""
    if device.whole is not device:
        raise OptionsError(f"{device!r} is a part of a device, which is not divided again")
    if not 0 < share < 1:
        raise OptionsError(f"a share of {device.name} must be above 0 and below 1, not {share}")


def check_room(device: Device, nbytes: int, what: str, fix: str) -> None:
    """Check that ``nbytes`` fit before allocating any of them."""
    memory = device.memory()
    if nbytes > memory.room_nbytes:
        raise DeviceMemoryError(
            f"{what} need {mib(nbytes)} on {device.name}, and there is room for {mib(memory.room_nbytes)} "
            f"({memory}). {fix}"
        )


def view_of(
    block: np.ndarray, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int
) -> np.ndarray:
    """Return part of a block of bytes, starting at byte ``offset``, as an array that shares its memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    return block[offset : offset + nbytes].view(dtype).reshape(shape)
