"""Events, streams and graphs of a CUDA device."""

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from weakref import ref

from asynctrt._util import clock
from asynctrt.devices.base import Buffer, Event, Stream
from asynctrt.devices.cuda.bindings import driver
from asynctrt.devices.cuda.captures import CAPTURING, own_sources
from asynctrt.devices.cuda.context import CudaContext
from asynctrt.errors import DeviceError

POLL_S: Final = 200e-6
"""The pause between two queries by a thread that waits for an event with a timeout."""

_OK: Final = driver.CUresult.CUDA_SUCCESS
_PENDING: Final = driver.CUresult.CUDA_ERROR_NOT_READY
_CAPTURING: Final = frozenset(
    {
        driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        driver.CUresult.CUDA_ERROR_CAPTURED_EVENT,
    }
)
_BLOCKING: Final = int(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
_NO_TIMES: Final = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)


class CudaEvent:
    """A CUDA event. A thread that synchronizes on it sleeps. Recording an untimed event costs less."""

    __slots__ = ("__weakref__", "_after", "_context", "_stream", "cuda", "error", "recording")

    def __init__(self, context: CudaContext, *, is_timed: bool = True) -> None:
        self._context = context
        self.error: BaseException | None = None
        self.recording = 0
        """How many times it was recorded."""
        self._stream: CudaStream | None = None
        self._after: _Recording | None = None
        context.activate()
        code, self.cuda = driver.cuEventCreate(_BLOCKING if is_timed else _BLOCKING | _NO_TIMES)
        """The driver's own object."""
        context.check(code, "an event")

    def __repr__(self) -> str:
        return f"<CudaEvent {self._context.name}>"

    def __del__(self) -> None:
        # CUDA itself keeps a pending event alive.
        if getattr(self, "cuda", None) is not None and driver is not None:
            driver.cuEventDestroy(self.cuda)

    @property
    def is_abandoned(self) -> bool:
        """Whether it was recorded on a stream that was abandoned."""
        return self._stream is not None and self._stream.is_abandoned

    def begin(self, stream: "CudaStream", after: "_Recording | None") -> None:
        """Store the stream that it is recorded on, and the recording that the work before it waits for."""
        self.error = None
        self.recording += 1
        self._stream = stream
        self._after = after

    def query(self) -> bool:
        code = driver.cuEventQuery(self.cuda)[0]
        if code == _PENDING:
            return False
        if code != _OK:
            # After any such error it is unknown whether the work still reads and writes. The exception is a
            # thread that captures, which must not query.
            ends_unknown = code not in _CAPTURING
            self.error = self._context.failed(code, "work on a stream", ends_unknown=ends_unknown)
        return True

    def is_running(self) -> bool:
        if self._after is None:
            return True
        known, recording = self._after
        event = known()
        # An event is only recorded again once it was done.
        if event is None or event.recording != recording or event.is_abandoned or event.query():
            self._after = None
            return True
        return False

    def nudge(self) -> bool:
        return False

    def on_done(self, callback: Callable[[], None]) -> bool:
        # A host function could call it, but that blocks its stream until it has run, is slow to enqueue, and
        # runs late beside a busy event loop.
        return False

    def synchronize(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            code = driver.cuEventSynchronize(self.cuda)[0]
            if code != _OK:
                self.error = self._context.failed(code, "work on a stream")
            return True
        until_ns = clock.now_ns() + int(timeout_s * 1e9)
        pause = threading.Event()
        while not self.query():
            if clock.now_ns() >= until_ns:
                return False
            pause.wait(POLL_S)
        return True

    def elapsed_ns(self, since: Event) -> int:
        code, elapsed_ms = driver.cuEventElapsedTime(_own(since).cuda, self.cuda)
        self._context.check(code, "the time between two events")
        return int(elapsed_ms * 1e6)


class CudaStream:
    """A CUDA stream that does not wait for the default stream, on the whole GPU or in a green context."""

    def __init__(self, context: CudaContext, green: Any = None) -> None:
        self._context = context
        context.activate()
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if green is None:
            code, self._cuda = driver.cuStreamCreate(flags)
        else:
            code, self._cuda = driver.cuGreenCtxStreamCreate(green, flags, 0)
        context.check(code, "a stream")
        self.handle = int(self._cuda)
        self.is_capturing = False
        self._owns_sources = False
        self.is_abandoned = False
        """Whether its work was abandoned as hung."""
        self.ran_ns: int | None = None
        """Unknown on a GPU."""
        self._after: _Recording | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "capturing" if self.is_capturing else "open"
        return f"<CudaStream {self._context.name} {state}>"

    def record(self, event: Event) -> None:
        event = _own(event)
        event.begin(self, self._after)
        code = driver.cuEventRecord(event.cuda, self._cuda)[0]
        if code != _OK:  # Without a call, as several for each batch.
            raise self._context.failed(code, "recording an event")

    def wait(self, event: Event) -> None:
        event = _own(event)
        code = driver.cuStreamWaitEvent(self._cuda, event.cuda, 0)[0]
        if code != _OK:
            raise self._context.failed(code, "a wait for an event")
        self._after = ref(event), event.recording

    def copy(self, target: Buffer, source: Buffer, *, offset: int, nbytes: int) -> None:
        self.copy_bytes(target.address + offset, source.address + offset, nbytes)

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        code = driver.cuMemcpyAsync(target, source, nbytes, self._cuda)[0]
        if code != _OK:
            raise self._context.failed(code, f"a copy of {nbytes} bytes")

    def check(self, what: str) -> None:
        """Detect a sticky error in work on this stream, and set ``lost`` in that case."""
        code = driver.cuStreamQuery(self._cuda)[0]
        if code not in (_OK, _PENDING) and code not in _CAPTURING:
            self._context.failed(code, what)

    def begin_capture(self) -> None:
        # Calls that are forbidden during a capture (allocation, for example) end it only if this thread makes
        # them.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        CAPTURING.acquire()
        code = driver.cuStreamBeginCapture(self._cuda, mode)[0]
        if code != _OK:
            CAPTURING.release()
            raise self._context.failed(code, "the beginning of a capture")
        self.is_capturing, self._owns_sources = True, False
        _collector.pause()

    def own_sources(self) -> None:
        """Make the graph being captured copy host data from memory that the graph owns."""
        self._owns_sources = True

    def end_capture(self) -> "CudaGraph":
        was_capturing, self.is_capturing = self.is_capturing, False
        code, graph = driver.cuStreamEndCapture(self._cuda)
        if was_capturing:
            CAPTURING.release()
            _collector.resume()
        self._context.check(code, "a capture")
        return CudaGraph(self._context, graph, self._cuda, owns_sources=self._owns_sources)

    def abandon(self) -> None:
        self.is_abandoned = True

    def drain(self, timeout_s: float) -> bool:
        if self.is_capturing:
            with suppress(DeviceError):
                self.end_capture().close()
        lost = self._context.lost
        if self._closed or lost is not None:
            return True
        try:
            last = CudaEvent(self._context)
            self.record(last)
        except DeviceError:
            if self._context.lost is None:
                raise
            return True
        return last.synchronize(timeout_s)

    def close(self, timeout_s: float) -> bool:
        if self._closed:
            return True
        if not self.drain(timeout_s):
            return False
        self._closed = True
        driver.cuStreamDestroy(self._cuda)
        return True


class _Collector:
    """Disables Python's garbage collector while a stream captures.

    The collector runs in whichever thread allocates. During a capture it could free memory left by an earlier
    engine, which would end the capture.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._was_on = False

    def pause(self) -> None:
        with self._lock:
            if not self._captures:
                self._was_on = gc.isenabled()
                gc.disable()
            self._captures += 1

    def resume(self) -> None:
        with self._lock:
            self._captures -= 1
            if not self._captures and self._was_on:
                gc.enable()


_collector = _Collector()


class CudaGraph:
    """An instantiated capture of a stream, which may own a copy of the host data that it reads."""

    def __init__(self, context: CudaContext, graph: Any, stream: Any, *, owns_sources: bool) -> None:
        self._context = context
        self._graph = graph
        try:
            self._sources = own_sources(context, graph) if owns_sources else None
            code, self._exec = driver.cuGraphInstantiate(graph, 0)
            context.check(code, "making a graph of what was captured")
        except BaseException:
            driver.cuGraphDestroy(graph)
            raise
        # Makes the first launch as cheap as later ones.
        context.check(driver.cuGraphUpload(self._exec, stream)[0], "uploading a graph")

    def __repr__(self) -> str:
        return f"<CudaGraph {self._context.name}>"

    def launch(self, *, stream: Stream) -> None:
        code = driver.cuGraphLaunch(self._exec, stream.handle)[0]
        if code != _OK:
            raise self._context.failed(code, "launching a graph")

    def close(self) -> None:
        graph, self._graph = self._graph, None
        # Freeing the graph's allocations would wait for hung work, so leave them in that case.
        if graph is not None and self._context.state == "ready":
            driver.cuGraphExecDestroy(self._exec)
            driver.cuGraphDestroy(graph)
            self._sources = None


_Recording = tuple[ref[CudaEvent], int]
"""A recording of another stream's event that work waits for."""


def _own(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise DeviceError(f"{event!r} is not an event of a CUDA device")
    return event
