"""Buffers, events, streams and graphs of a CUDA device. ``cuda`` makes them; nobody else does."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

import numpy as np
from cuda.bindings import driver

from asynctrt import clock
from asynctrt.devices.base import ALIGNMENT, Buffer, Event, Stream
from asynctrt.errors import DeviceError

if TYPE_CHECKING:
    from asynctrt.devices.cuda import CudaDevice

POLL_S: Final = 200e-6
"""The pause between two looks of a thread that waits for an event with a timeout."""

_OK: Final = driver.CUresult.CUDA_SUCCESS
_PENDING: Final = driver.CUresult.CUDA_ERROR_NOT_READY
_BLOCKING: Final = int(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
_NO_TIMES: Final = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)


class CudaBuffer:
    """Device memory, zeroed, which the CPU cannot see."""

    def __init__(self, device: "CudaDevice", nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes
        self.address = device.take(nbytes)

    def __repr__(self) -> str:
        return f"<CudaBuffer {self._device.name} nbytes={self.nbytes}>"

    @property
    def is_host_visible(self) -> bool:
        return False

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        raise DeviceError(f"{self!r} is memory of the GPU: copy it to staging memory to look at it")

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            self._device.give_back(address, self.nbytes)


class PinnedBuffer:
    """Page-locked memory of the host, zeroed, which the GPU copies from and to without the CPU.

    Views keep it alive after :meth:`close`.
    """

    def __init__(self, device: "CudaDevice", nbytes: int) -> None:
        self.nbytes = nbytes
        self._bytes = np.asarray(_PinnedBlock(device, nbytes))[:nbytes]
        self._bytes[...] = 0
        self.address: int = self._bytes.ctypes.data

    def __repr__(self) -> str:
        return f"<PinnedBuffer nbytes={self.nbytes}>"

    @property
    def is_host_visible(self) -> bool:
        return True

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._bytes[offset : offset + nbytes].view(dtype).reshape(shape)

    def close(self) -> None:
        self._bytes = self._bytes[:0].copy()


class _PinnedBlock:
    """What NumPy's views hold on to; the memory goes with the last of them."""

    def __init__(self, device: "CudaDevice", nbytes: int) -> None:
        device.activate()
        code, address = driver.cuMemHostAlloc(max(nbytes, ALIGNMENT), driver.CU_MEMHOSTALLOC_PORTABLE)
        device.check(code, f"{nbytes} bytes of pinned memory")
        self.__array_interface__ = {
            "version": 3,
            "shape": (max(nbytes, ALIGNMENT),),
            "typestr": "|u1",
            "data": (int(address), False),
        }
        # At exit the driver takes everything back itself, and may be gone before this could run.
        finalize(self, device.free_pinned, int(address)).atexit = False


class OutputBuffer:
    """Device memory in the order of streams: allocated on a batch's, freed on the default stream."""

    def __init__(self, device: "CudaDevice", nbytes: int, stream: Stream) -> None:
        self.nbytes = nbytes
        code, address = driver.cuMemAllocAsync(max(nbytes, ALIGNMENT), stream.handle)
        device.check(code, f"{nbytes} bytes for outputs")
        self.address = int(address)
        self._free = finalize(self, device.free_output, self.address)
        self._free.atexit = False

    @property
    def is_host_visible(self) -> bool:
        return False

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        raise DeviceError("outputs that stay on the GPU cannot be seen by the CPU: DeviceArray.numpy()")

    def close(self) -> None:
        self._free()


class CudaEvent:
    """A CUDA event. Who synchronizes on it sleeps. To record one with times takes 1.2 µs, without 0.5."""

    __slots__ = ("_cuda", "_device", "error")

    def __init__(self, device: "CudaDevice", *, is_timed: bool = True) -> None:
        self._device = device
        self.error: BaseException | None = None
        device.activate()
        code, self._cuda = driver.cuEventCreate(_BLOCKING if is_timed else _BLOCKING | _NO_TIMES)
        device.check(code, "an event")

    def __repr__(self) -> str:
        return f"<CudaEvent {self._device.name}>"

    def __del__(self) -> None:
        # Handles, not memory: CUDA keeps what is still pending alive by itself.
        if getattr(self, "_cuda", None) is not None and driver is not None:
            driver.cuEventDestroy(self._cuda)

    @property
    def cuda(self) -> Any:
        """The driver's own object."""
        return self._cuda

    def query(self) -> bool:
        code = driver.cuEventQuery(self._cuda)[0]
        if code == _OK:
            return True
        if code == _PENDING:
            return False
        self.error = self._device.failed(code, "work on a stream")
        return True

    def nudge(self) -> bool:
        return False

    def on_done(self, callback: Callable[[], None]) -> bool:
        # A host function could call, but it holds its stream until it has run, costs 80 µs to enqueue, and
        # comes tens of milliseconds late to a loop that is never idle.
        return False

    def synchronize(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            code = driver.cuEventSynchronize(self._cuda)[0]
            if code != _OK:
                self.error = self._device.failed(code, "work on a stream")
            return True
        until_ns = clock.now_ns() + int(timeout_s * 1e9)
        pause = threading.Event()
        while not self.query():
            if clock.now_ns() >= until_ns:
                return False
            pause.wait(POLL_S)
        return True

    def elapsed_ns(self, since: Event) -> int:
        code, elapsed_ms = driver.cuEventElapsedTime(_own(since)._cuda, self._cuda)
        self._device.check(code, "the time between two events")
        return int(elapsed_ms * 1e6)


class CudaStream:
    """A CUDA stream of its own, which does not wait for the default stream."""

    def __init__(self, device: "CudaDevice", priority: int) -> None:
        self._device = device
        device.activate()
        code, self._cuda = driver.cuStreamCreateWithPriority(
            int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), priority
        )
        device.check(code, "a stream")
        self.handle = int(self._cuda)
        self.is_capturing = False
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "capturing" if self.is_capturing else "open"
        return f"<CudaStream {self._device.name} {state}>"

    def record(self, event: Event) -> None:
        event = _own(event)
        event.error = None
        code = driver.cuEventRecord(event.cuda, self._cuda)[0]
        if code != _OK:
            raise self._device.failed(code, "recording an event")

    def wait(self, event: Event) -> None:
        code = driver.cuStreamWaitEvent(self._cuda, _own(event).cuda, 0)[0]
        if code != _OK:
            raise self._device.failed(code, "a wait for an event")

    def copy(self, target: Buffer, source: Buffer, *, offset: int, nbytes: int) -> None:
        self.copy_bytes(target.address + offset, source.address + offset, nbytes)

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        code = driver.cuMemcpyAsync(target, source, nbytes, self._cuda)[0]
        if code != _OK:
            raise self._device.failed(code, f"a copy of {nbytes} bytes")

    def begin_capture(self) -> None:
        # What this thread must not do meanwhile (to allocate, say) ends the capture; other threads may.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._device.check(driver.cuStreamBeginCapture(self._cuda, mode)[0], "the beginning of a capture")
        self.is_capturing = True

    def end_capture(self) -> "CudaGraph":
        self.is_capturing = False
        code, graph = driver.cuStreamEndCapture(self._cuda)
        self._device.check(code, "a capture")
        return CudaGraph(self._device, graph, self._cuda)

    def close(self, timeout_s: float) -> bool:
        if self._closed:
            return True
        if self._device.lost is None:
            try:
                last = CudaEvent(self._device)
                self.record(last)
            except DeviceError:
                if self._device.lost is None:
                    raise
            else:
                if not last.synchronize(timeout_s):
                    return False
        self._closed = True
        driver.cuStreamDestroy(self._cuda)
        return True


class CudaGraph:
    """A captured stream, instantiated."""

    def __init__(self, device: "CudaDevice", graph: Any, stream: Any) -> None:
        self._device = device
        self._graph = graph
        code, self._exec = driver.cuGraphInstantiate(graph, 0)
        device.check(code, "making a graph of what was captured")
        # So that the first launch costs no more than the others.
        device.check(driver.cuGraphUpload(self._exec, stream)[0], "uploading a graph")

    def __repr__(self) -> str:
        return f"<CudaGraph {self._device.name}>"

    def launch(self, *, stream: Stream) -> None:
        code = driver.cuGraphLaunch(self._exec, stream.handle)[0]
        if code != _OK:
            raise self._device.failed(code, "launching a graph")

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            driver.cuGraphExecDestroy(self._exec)
            driver.cuGraphDestroy(graph)


def _own(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise DeviceError(f"{event!r} is not an event of a CUDA device")
    return event
