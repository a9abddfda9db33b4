"""The CPU as a device: streams are queues that share a thread a core, events are flags.

Staging memory is the device's memory. Three things make it fit for a busy event loop, and all are about
Python's global lock (the GIL):

- Work that is shorter than a hand-over to a thread runs in place, in the thread that launches it. What is
  short is measured, per label, and forgotten at once when a run turns out long.
- Streams share their threads, so a thread goes on with the next batch without waiting for the loop.
- A loop that is never idle gives the GIL up for too short a time for another thread to get hold of it:
  a batch that was done was seen to be noticed tens of milliseconds late, whatever the switch interval.
  So :meth:`HostEvent.nudge` looks whether a thread is neither computing nor idle, which means that it wants
  the GIL, and then hands the GIL over until that thread has moved on.
"""

import ctypes
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Final, Literal
from weakref import WeakValueDictionary, finalize

import numpy as np

from asynctrt import clock
from asynctrt.devices.arrays import DeviceArray
from asynctrt.devices.base import ALIGNMENT, Buffer, Event, MemoryFigures, Stream
from asynctrt.devices.crew import Crew
from asynctrt.errors import DeviceError, DeviceLostError, DeviceMemoryError, OptionsError

HAND_OVER_NS: Final = 50_000
"""What giving work to a thread and hearing back from it costs (measured: 44 µs p50 on an idle loop)."""

CONTEXTS_MAX: Final = 32
"""Contexts of an engine whose options do not say, at the most."""

LABELS_MAX: Final = 1024
"""How many labels a stream remembers the pace of."""

InPlace = Literal["auto", "always", "never"]


class HostBuffer:
    """Zeroed memory of the process, aligned to 256 bytes. Views keep it alive after :meth:`close`."""

    def __init__(self, nbytes: int, on_close: Callable[[int], None] | None = None) -> None:
        try:
            block = np.zeros(nbytes + ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise DeviceMemoryError(
                f"the host has no {nbytes} bytes for a buffer. Lower max_rows or contexts"
            ) from error
        start = -block.ctypes.data % ALIGNMENT
        self._bytes = block[start : start + nbytes]
        # It gives its bytes back once: when it is closed, or when nobody has it any more.
        self._give_back = None if on_close is None else finalize(self, on_close, nbytes)

    @property
    def address(self) -> int:
        return self._bytes.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def is_host_visible(self) -> bool:
        return True

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._bytes[offset : offset + nbytes].view(dtype).reshape(shape)

    def close(self) -> None:
        if self._give_back is not None:
            self._give_back()
        self._bytes = self._bytes[:0].copy()


class HostEvent:
    """A flag that a stream sets when it gets there."""

    __slots__ = (
        "_callback",
        "_lock",
        "_reached",
        "_recorded",
        "_stream",
        "_time_ns",
        "_waiters",
        "error",
    )

    def __init__(self) -> None:
        self.error: BaseException | None = None
        # Recordings are counted, so that a stream can wait for the one that it was told to wait for,
        # however often the event has been recorded again by the time it gets there.
        self._recorded = 0
        self._reached = 0
        self._time_ns = 0
        self._callback: Callable[[], None] | None = None
        self._stream: HostStream | None = None
        self._lock = threading.Lock()
        self._waiters: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<HostEvent {'done' if self._reached == self._recorded else 'pending'}>"

    @property
    def recording(self) -> int:
        """The number of the latest recording."""
        return self._recorded

    def query(self) -> bool:
        return self._reached == self._recorded

    def has_reached(self, recording: int) -> bool:
        """Whether that recording is done."""
        return self._reached >= recording

    def nudge(self) -> bool:
        if self._reached == self._recorded or self._stream is None:
            return False
        return self._stream.crew.lend_gil()

    def on_done(self, callback: Callable[[], None]) -> bool:
        # Ask first, look second: the stream's thread sets the flag first and looks who asked second, so one
        # of the two sees the other without a lock. Both may, which is one call too many and does no harm.
        self._callback = callback
        return self._reached != self._recorded

    def synchronize(self, timeout_s: float | None = None) -> bool:
        reached = threading.Event()
        self.call_when_reached(self._recorded, reached.set)
        return reached.wait(timeout_s)

    def call_when_reached(self, recording: int, callback: Callable[[], None]) -> None:
        """Call back once, now or from a thread of the stream, when that recording is done."""
        with self._lock:
            # Ask first, look second, as in on_done; the lock is for taking it back.
            self._waiters.append(callback)
            if self._reached < recording:
                return
            self._waiters.remove(callback)
        callback()

    def elapsed_ns(self, since: Event) -> int:
        if not isinstance(since, HostEvent):
            raise DeviceError(f"{since!r} is not an event of the host device")
        return self._time_ns - since._time_ns

    def begin(self, stream: "HostStream") -> None:
        """For the stream: the event is pending."""
        if self._reached != self._recorded:
            raise DeviceError(f"{self!r} is recorded again before it was done")
        self.error = None
        self._callback = None
        self._stream = stream
        self._recorded += 1

    def reach(self, time_ns: int, error: BaseException | None) -> None:
        """For the stream: the event is done."""
        self.error = error
        self._time_ns = time_ns
        self._reached = self._recorded
        if self._waiters:
            with self._lock:
                waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter()
        callback = self._callback
        if callback is not None:
            callback()


class _Pace:
    """How long the runs of one label took lately, and whether to run it in place."""

    __slots__ = ("_hold", "_holding", "_recent")

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=8)
        self._hold = 4
        self._holding = 4

    @property
    def is_short(self) -> bool:
        # The shortest of several runs, because a run in a thread also counts its wait for the GIL.
        return not self._holding and min(self._recent) < HAND_OVER_NS

    def observe(self, duration_ns: int, *, in_place: bool) -> None:
        self._recent.append(duration_ns)
        if self._holding:
            self._holding -= 1
        if in_place and duration_ns > 4 * HAND_OVER_NS:
            # It held the loop. Each time it does, it stays in the thread for twice as many runs.
            self._recent.clear()
            self._hold = self._holding = min(2 * self._hold, 1024)


class HostStream:
    """Work in order: on a thread of the device or, if it is short enough, in place."""

    def __init__(self, *, crew: Crew, in_place: InPlace, now_ns: Callable[[], int], handle: int) -> None:
        self.crew = crew
        self.handle = handle
        self._in_place = in_place
        self._now_ns = now_ns
        self._operations: deque[Callable[[], bool]] = deque()
        # Guards the step from served to idle against an operation that arrives meanwhile.
        self._lock = threading.Lock()
        self._is_served = False
        self._error: BaseException | None = None
        self._paces: dict[Hashable, _Pace] = {}
        self._captured: HostGraph | None = None
        self._closed = False
        crew.join()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "busy" if self._is_served else "idle"
        return f"<HostStream {state} pending={len(self._operations)}>"

    def launch(self, work: Callable[[], None], *, label: Hashable) -> None:
        """Run ``work`` after everything launched before. Runs with one ``label`` take about as long.

        What it raises becomes the error of the next event that is recorded here.
        """
        if self._captured is not None:
            self._captured.add(partial(HostStream.launch, work=work, label=label))
            return
        in_place = False
        if not self._is_served:
            if self._in_place == "auto":
                pace = self._paces.get(label)
                in_place = pace is not None and pace.is_short
            else:
                in_place = self._in_place == "always"
        if in_place:
            self._run(work, label, in_place=True)
        else:
            self._put(partial(self._run, work, label, in_place=False))

    def record(self, event: Event) -> None:
        event = _own(event)
        if self._captured is not None:
            self._captured.add(partial(HostStream.record, event=event))
            return
        event.begin(self)
        if self._is_served:
            self._put(partial(self._reach, event))
        else:
            self._reach(event)

    def wait(self, event: Event) -> None:
        event = _own(event)
        if self._captured is not None:
            self._captured.add(partial(HostStream.wait, event=event))
            return
        if self._is_served or not event.query():
            self._put(partial(self._await, event, event.recording))

    def copy(self, target: Buffer, source: Buffer, *, offset: int, nbytes: int) -> None:
        into = target.array(np.dtype(np.uint8), (nbytes,), offset)
        out_of = source.array(np.dtype(np.uint8), (nbytes,), offset)
        self.launch(partial(np.copyto, into, out_of), label=("copy", nbytes))

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        def copy() -> None:
            ctypes.memmove(target, source, nbytes)

        self.launch(copy, label=("copy", nbytes))

    @property
    def is_capturing(self) -> bool:
        """Whether what is put on it is collected instead of done."""
        return self._captured is not None

    def begin_capture(self) -> None:
        if self._captured is not None:
            raise DeviceError(f"{self!r} is capturing already")
        self._captured = HostGraph()

    def end_capture(self) -> "HostGraph":
        graph, self._captured = self._captured, None
        if graph is None:
            raise DeviceError(f"{self!r} is not capturing")
        return graph

    def close(self, timeout_s: float) -> bool:
        if self._closed:
            return True
        self._captured = None
        if self._is_served:
            last = HostEvent()
            self.record(last)
            if not last.synchronize(timeout_s):
                return False
        self._closed = True
        return self.crew.leave(timeout_s)

    def serve(self) -> None:
        """For a worker: do what there is to do, until nothing is left or an event has to be waited for."""
        while True:
            while self._operations:
                if not self._operations[0]():
                    return
                self._operations.popleft()
                self.crew.hand_back()
            with self._lock:
                if not self._operations:
                    self._is_served = False
                    return

    def _put(self, operation: Callable[[], bool]) -> None:
        if self._closed:
            raise DeviceError(f"{self!r} is closed")
        with self._lock:
            self._operations.append(operation)
            if self._is_served:
                return
            self._is_served = True
        self.crew.schedule(self)

    def _run(self, work: Callable[[], None], label: Hashable, *, in_place: bool) -> bool:
        start_ns = self._now_ns()
        if not in_place:
            self.crew.hand_back()
        try:
            work()
        except BaseException as error:
            if in_place and not isinstance(error, Exception):
                raise  # Ctrl-C in the loop's own thread is the application's.
            self._error = self._error or error
        pace = self._paces.get(label)
        if pace is None:
            if len(self._paces) >= LABELS_MAX:
                self._paces.clear()
            pace = self._paces[label] = _Pace()
        pace.observe(self._now_ns() - start_ns, in_place=in_place)
        return True

    def _reach(self, event: HostEvent) -> bool:
        error, self._error = self._error, None
        event.reach(self._now_ns(), error)
        return True

    def _await(self, event: HostEvent, recording: int) -> bool:
        """True when the event is there; otherwise some worker goes on here when it is."""
        if event.has_reached(recording):
            return True
        event.call_when_reached(recording, partial(self.crew.schedule, self))
        return False


class HostGraph:
    """What was put on a stream while it captured, to be put on a stream again."""

    def __init__(self) -> None:
        self._operations: list[Callable[[HostStream], None]] = []

    def __repr__(self) -> str:
        return f"<HostGraph operations={len(self._operations)}>"

    def add(self, operation: Callable[[HostStream], None]) -> None:
        """For the stream: one more."""
        self._operations.append(operation)

    def launch(self, *, stream: Stream) -> None:
        assert isinstance(stream, HostStream)
        for operation in self._operations:
            operation(stream)

    def close(self) -> None:
        self._operations.clear()


def _own(event: Event) -> HostEvent:
    if not isinstance(event, HostEvent):
        raise DeviceError(f"{event!r} is not an event of the host device")
    return event


class HostDevice:
    """The CPU as a device.

    Engines that shall share its threads are opened with the same object; ``device="host"`` makes a new one.

    :param threads: how many batches compute at once. Default: the cores that the process may use.
    :param in_place: ``auto`` runs short work in the launching thread; ``always`` and ``never`` force it.
    :param unified: ``False`` gives the device memory of its own, so that every batch is copied in and out
        as on a GPU. For tests of what runs on one.
    :param memory_nbytes: what its buffers may come to at the most. Default: what the machine has.
    :raises OptionsError: for an impossible number of threads.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        in_place: InPlace = "auto",
        unified: bool = True,
        memory_nbytes: int | None = None,
        name: str = "asynctrt-host",
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        if threads is not None and threads < 1:
            raise OptionsError(f"a host device has at least one thread, not {threads}")
        self._threads = threads or cores()
        self._in_place: InPlace = in_place
        self._unified = unified
        self._now_ns = now_ns
        self._crew = Crew(self._threads, name, now_ns)
        self._memory_nbytes = memory_nbytes
        # Guards what engines on several threads may change at once.
        self._lock = threading.Lock()
        self._held_nbytes = 0
        self._streams: WeakValueDictionary[int, HostStream] = WeakValueDictionary()
        self._handles = itertools.count(1)

    def __repr__(self) -> str:
        return f"<HostDevice threads={self._threads} in_place={self._in_place} unified={self._unified}>"

    @property
    def name(self) -> str:
        return "host"

    @property
    def unified(self) -> bool:
        return self._unified

    @property
    def slots(self) -> int:
        return self._threads

    @property
    def is_parallel(self) -> bool:
        return True

    @property
    def prefers_graphs(self) -> bool:
        return False

    @property
    def timing_is_free(self) -> bool:
        return True

    @property
    def contexts_default(self) -> int:
        # Twice as many as can compute, so that a thread which is done finds the next batch waiting; but each
        # has a slab, and on a machine with many cores those would come to a lot of memory.
        return min(2 * self._threads, CONTEXTS_MAX)

    @property
    def lost(self) -> DeviceLostError | None:
        return None

    def activate(self) -> None:
        """There is no other."""

    def memory(self) -> MemoryFigures:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryFigures(_available_nbytes() or total, total, self._held_nbytes, self._memory_nbytes)

    def create_stream(self, *, priority: int = 0) -> HostStream:
        with self._lock:
            handle = next(self._handles)
            stream = HostStream(crew=self._crew, in_place=self._in_place, now_ns=self._now_ns, handle=handle)
            self._streams[handle] = stream
        return stream

    def stream_of(self, handle: int) -> HostStream:
        """The stream with that handle, for libraries that are given handles as CUDA's are.

        :raises DeviceError: if there is none.
        """
        stream = self._streams.get(handle)
        if stream is None:
            raise DeviceError(f"{handle} is the handle of no stream of {self!r}")
        return stream

    def create_event(self, *, is_timed: bool = True) -> HostEvent:
        return HostEvent()

    def allocate_staging(self, nbytes: int) -> HostBuffer:
        return self.allocate(nbytes)

    def allocate(self, nbytes: int) -> HostBuffer:
        with self._lock:
            if self._memory_nbytes is not None and self._held_nbytes + nbytes > self._memory_nbytes:
                raise DeviceMemoryError(
                    f"the host device holds {self._held_nbytes} bytes of the {self._memory_nbytes} that it "
                    f"may, and has no room for {nbytes} more. Lower max_rows, contexts or arenas"
                )
            self._held_nbytes += nbytes
        try:
            return HostBuffer(nbytes, self._gave_back)
        except BaseException:
            self._gave_back(nbytes)
            raise

    def import_array(self, value: object) -> DeviceArray | None:
        return value if isinstance(value, DeviceArray) and value.device is self else None

    def allocate_output(self, nbytes: int, *, stream: Stream) -> HostBuffer:
        return self.allocate(nbytes)

    def abandon(self) -> None:
        """Nothing to do: to free memory of the process waits for nothing."""

    def _gave_back(self, nbytes: int) -> None:
        with self._lock:
            self._held_nbytes -= nbytes

    def close(self) -> None:
        """Its threads end with its last stream, and its buffers are the process's."""


def cores() -> int:
    """The CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _available_nbytes() -> int | None:
    """What the machine can give without swapping, caches that it would drop included; Linux says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * kib[0] if kib else None
