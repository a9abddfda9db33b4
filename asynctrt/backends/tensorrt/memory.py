"""The device memory that TensorRT requests: counted, bounded, and refused with the numbers.

The ``IGpuAllocator`` given to TensorRT uses ``Device.allocate``, so weights and persistent context memory
count towards the same budget as slabs and arenas. Refusals are recorded, because TensorRT itself only reports
that an allocation failed ("How TensorRT works", Bounding TensorRT Memory in Production).

Refusing an allocation while a context is created ends the process with a segmentation fault (seen with
engines of TensorRT 8.6, under 8.6 and 10.16). So a context is only created if there is room for it.
Allocations that should be refused during that time are granted, if necessary from a reserve, and the context
is dropped afterwards.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asynctrt.backends.tensorrt.messages import ERRORS_MAX, callback
from asynctrt.devices.base import ALIGNMENT, Buffer, Device, aligned, mib
from asynctrt.errors import DeviceError, DeviceLostError, DeviceMemoryError

RESERVE_NBYTES: Final = 8 << 20
"""The size of the reserve for a context's creation, in case others allocate device memory at that time."""

CODE_NBYTES: Final = 32 << 20
"""Room for memory that CUDA allocates itself while a context is created, bypassing the allocator. Engines of
8.6 under 10.16 took 2 to 6 MiB when opened, and 0.5 to 1.3 MiB for each further context, in steps of 2 MiB;
without that room the process ended (H100, a perceptron and a small encoder)."""

STEP_NBYTES: Final = 2 << 20
"""CUDA allocates GPU memory in steps of this size. With less free, any failure may be due to lack of
memory."""

logger = logging.getLogger("asynctrt.tensorrt")


@dataclass(frozen=True, slots=True)
class MemoryRefusal:
    """A refused allocation. Sizes are in bytes."""

    asked_nbytes: int
    held_nbytes: int
    """Memory that TensorRT held for the model at the time."""
    budget_nbytes: int | None
    reason: str

    def __str__(self) -> str:
        bounds = "" if self.budget_nbytes is None else f" (budget {mib(self.budget_nbytes)})"
        return (
            f"TensorRT asked for {mib(self.asked_nbytes)} while it held {mib(self.held_nbytes)} for this "
            f"model{bounds}: {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """The device memory that TensorRT holds for one model."""

    held_nbytes: int
    blocks: int
    """The number of allocations that it consists of."""


class DeviceMemory:
    """All memory that TensorRT holds for one model. Thread-safe."""

    def __init__(self, device: Device, *, budget: int | None) -> None:
        self._device = device
        self._budget = budget
        # Reentrant, because any allocation may start the garbage collector, which may free a TensorRT object.
        self._lock = threading.RLock()
        self._blocks: dict[int, Buffer] = {}
        self._held = 0
        self._refusals: deque[MemoryRefusal] = deque(maxlen=ERRORS_MAX)
        # Serialises the creation of contexts, because room is only reserved for one.
        self._creating = threading.Lock()
        self._reserve: Reserve | None = None
        self._context_nbytes = 0

    def __repr__(self) -> str:
        return f"<DeviceMemory blocks={len(self._blocks)} held={self._held}>"

    def statistics(self) -> MemoryStatistics:
        """Return a snapshot."""
        with self._lock:
            return MemoryStatistics(self._held, len(self._blocks))

    @contextmanager
    def room_for_context(self) -> "Iterator[Reserve]":
        """During TensorRT's creation of a context, grant allocations that should be refused, and record that.

        If the reserve :attr:`~Reserve.is_overdrawn` afterwards, the context must be dropped.
        """
        with self._creating:
            wanted = self._context_nbytes
            self._check_room(wanted)
            reserve = Reserve(self._device.allocate(RESERVE_NBYTES))
            with self._lock:
                before, self._reserve = self._held, reserve
            try:
                yield reserve
            finally:
                with self._lock:
                    self._reserve = None
                    self._context_nbytes = max(wanted, self._held - before)
                reserve.end()

    def _check_room(self, wanted: int) -> None:
        """Check that there is room for a context, with a margin."""
        memory, why = self._device.memory(), self._why_not(wanted)
        beside = RESERVE_NBYTES + CODE_NBYTES
        if why is None and (
            wanted + beside > memory.free_nbytes or wanted + RESERVE_NBYTES > memory.room_nbytes
        ):
            why = f"there is not so much room on {self._device.name} ({memory})"
        if why is not None:
            raise DeviceMemoryError(
                f"another execution context may take {mib(wanted)}, with {mib(beside)} to be left beside it: "
                f"{why}. Open the model with fewer contexts"
            )

    def take_refusals(self) -> tuple[MemoryRefusal, ...]:
        """Return the refusals since the last call."""
        with self._lock:
            taken = tuple(self._refusals)
            self._refusals.clear()
        return taken

    def take(self, nbytes: int, alignment: int = ALIGNMENT, *, stream: int | None = None) -> int | None:
        """Return the address of new memory, or ``None`` to refuse, as the allocator's callbacks require."""
        # Buffers have the alignment of CUDA allocations, and TensorRT requests no more than that.
        spare = alignment if alignment > ALIGNMENT else 0
        try:
            with self._lock:
                buffer, refusal = self._granted(nbytes + spare, stream)
                if buffer is not None:
                    address = -(-buffer.address // alignment) * alignment if spare else buffer.address
                    self._blocks[address] = buffer
                    self._held += buffer.nbytes
        except Exception as error:  # TensorRT calls this, and its code cannot handle exceptions.
            buffer, refusal = None, self._record(nbytes, f"the device refused it: {error}")
        if refusal is not None:
            logger.warning("%s", refusal)
        if buffer is None:
            return None
        logger.debug("TensorRT was given %s at %#x and now holds %s", mib(nbytes), address, mib(self._held))
        return address

    def give_back(self, address: int, *, stream: int | None = None) -> bool:
        """Free the block at an address; return ``False`` if there is no block or it cannot be freed."""
        with self._lock:
            buffer = self._blocks.pop(address, None)
            if buffer is None:
                return False
            nbytes = buffer.nbytes
            self._held -= nbytes
        try:
            if stream is None:
                buffer.close()
            else:
                self._device.free_ordered(buffer, stream=stream)
        except Exception as error:
            logger.warning("%s of TensorRT's memory could not be freed: %s", mib(nbytes), error)
            return False
        return True

    def buffer_at(self, address: int) -> Buffer:
        """Return the buffer behind an address that :meth:`take` returned."""
        return self._blocks[address]

    def _granted(self, nbytes: int, stream: int | None) -> tuple[Buffer | None, MemoryRefusal | None]:
        """Return new memory or its refusal, or both while there is a reserve."""
        reserve, why = self._reserve if stream is None else None, self._why_not(nbytes)
        buffer = None
        if why is None or reserve is not None:
            try:
                buffer = self._allocate(nbytes, stream)
            except DeviceError as error:
                why = str(error) if isinstance(error, DeviceLostError) else f"the device refused it: {error}"
        if why is None:
            return buffer, None
        if reserve is not None:
            reserve.is_overdrawn = True
            buffer = buffer or reserve.take(nbytes)
        return buffer, self._record(nbytes, why)

    def _allocate(self, nbytes: int, stream: int | None) -> Buffer:
        if stream is None:
            return self._device.allocate(nbytes)
        return self._device.allocate_ordered(nbytes, stream=stream)

    def _why_not(self, nbytes: int) -> str | None:
        """Return why the budget refuses ``nbytes`` more; ``None`` if it does not."""
        if self._budget is None or self._held + nbytes <= self._budget:
            return None
        return "that would exceed the budget. Raise memory_budget or lower contexts"

    def _record(self, nbytes: int, reason: str) -> MemoryRefusal:
        with self._lock:
            refusal = MemoryRefusal(nbytes, self._held, self._budget, reason)
            self._refusals.append(refusal)
        return refusal


class Reserve:
    """Memory set aside while a context is created. Pieces in use outlive that."""

    def __init__(self, buffer: Buffer) -> None:
        self.is_overdrawn = False
        """Whether an allocation was granted that should have been refused."""
        self._buffer = buffer
        self._taken = 0
        # The number of uses: the pieces, and the reserve itself until it ends.
        self._uses = 1

    def take(self, nbytes: int) -> Buffer | None:
        """Return a piece, or ``None`` if too little is left."""
        if self._taken + nbytes > self._buffer.nbytes:
            return None
        piece = _Piece(self._buffer, self._taken, nbytes, self.end)
        self._taken += aligned(nbytes)
        self._uses += 1
        return piece

    def end(self) -> None:
        """End one use, and free the memory after the last."""
        self._uses -= 1
        if not self._uses:
            self._buffer.close()


class _Piece:
    """A part of a buffer."""

    def __init__(self, whole: Buffer, offset: int, nbytes: int, on_close: Callable[[], None]) -> None:
        self.address = whole.address + offset
        self.nbytes = nbytes
        self.is_host_visible = whole.is_host_visible
        self._whole = whole
        self._offset = offset
        self._on_close: Callable[[], None] | None = on_close

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        return self._whole.array(dtype, shape, self._offset + offset)

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


def lacks_memory(device: Device, nbytes: int) -> bool:
    """Return whether a device has less than ``nbytes`` free; return False if it cannot tell."""
    try:
        return device.memory().free_nbytes < nbytes
    except DeviceError:
        return False


def describe_refusals(refusals: tuple[MemoryRefusal, ...]) -> str:
    """Return the last refusal, which made the call fail, and the number of refusals."""
    if not refusals:
        return ""
    more = f" ({len(refusals)} refusals)" if len(refusals) > 1 else ""
    return f"{refusals[-1]}{more}"


def make_allocator(module: Any, source: DeviceMemory) -> Any:
    """Create an ``IGpuAllocator`` for the flavour ``module`` that allocates from ``source``.

    Freeing a buffer waits for the device if the device requires it, so ``deallocate_async`` needs no ordering
    on its stream.
    """
    return _create_allocator(module.IGpuAllocator, source, in_order=False)


def make_temporary_allocator(module: Any, source: DeviceMemory) -> Any:
    """Create an ``IGpuAsyncAllocator`` for memory that an enqueue needs only while its batch runs.

    Without one TensorRT uses the engine's allocator, where freeing such memory waits for all work on the GPU
    (``IExecutionContext::setTemporaryStorageAllocator``). Return ``None`` for a library without it.
    """
    base = getattr(module, "IGpuAsyncAllocator", None)
    return None if base is None else _create_allocator(base, source, in_order=True)


def _create_allocator(base: Any, source: DeviceMemory, *, in_order: bool) -> Any:
    """Create an allocator that overrides every method: the bindings call only overridden ones."""

    class Allocator(base):  # type: ignore[misc]  # The module is known only at run time.
        def __init__(self) -> None:
            super().__init__()

        @callback
        def allocate(self, size: int, alignment: int, flags: int) -> int:
            """Return the address of memory for immediate use, or 0: the bindings do not accept ``None``."""
            return (source.take(size, alignment) or 0) if size else 0

        @callback
        def reallocate(self, address: int, alignment: int, new_size: int) -> int:
            """Return 0: resizing is not implemented, and the block stays as it is."""
            return 0

        @callback
        def deallocate(self, memory: int) -> bool:
            """Free a block; the address 0 stands for no block."""
            return not memory or source.give_back(memory)

        @callback
        def allocate_async(self, size: int, alignment: int, flags: int, stream: int) -> int:
            """Return the address of memory for use in the order of a stream, or 0 to refuse."""
            return (source.take(size, alignment, stream=stream if in_order else None) or 0) if size else 0

        @callback
        def deallocate_async(self, memory: int, stream: int) -> bool:
            """Free a block once its stream, or the whole device, no longer uses it."""
            return not memory or source.give_back(memory, stream=stream if in_order else None)

    return Allocator()
