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

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from queue import SimpleQueue
from typing import Final, Literal

import numpy as np

from asynctrt import clock
from asynctrt.devices.base import ALIGNMENT, Buffer, Event
from asynctrt.errors import DeviceError, DeviceMemoryError, OptionsError

HAND_OVER_NS: Final = 50_000
"""What giving work to a thread and hearing back from it costs (measured: 44 µs p50 on an idle loop)."""

LEND_S: Final = 200e-6
"""How long a loop may stand still to hand the GIL over."""

LEND_PAUSE_NS_MIN: Final = 100_000
LEND_PAUSE_NS_MAX: Final = 10_000_000
"""The pause after a hand-over that turned out to be in vain; it doubles each time."""

CONTEXTS_MAX: Final = 32
"""Contexts of an engine whose options do not say, at the most."""

LABELS_MAX: Final = 1024
"""How many labels a stream remembers the pace of."""

GIL: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()

InPlace = Literal["auto", "always", "never"]


class HostBuffer:
    """Zeroed memory of the process, aligned to 256 bytes. Views keep it alive after :meth:`close`."""

    def __init__(self, nbytes: int) -> None:
        try:
            block = np.zeros(nbytes + ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise DeviceMemoryError(
                f"the host has no {nbytes} bytes for a buffer. Lower max_rows or contexts"
            ) from error
        start = -block.ctypes.data % ALIGNMENT
        self._bytes = block[start : start + nbytes]

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


class _Worker:
    """One thread of a crew."""

    def __init__(self, crew: "Crew", name: str) -> None:
        self._crew = crew
        self._ready = crew.ready
        self.is_running = False
        self._cpu_ns: Callable[[], int] | None = None
        self._seen: tuple[int, int] | None = None
        # A daemon: a model that hangs must not keep the interpreter from exiting.
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def is_stalled(self, now_ns: int) -> bool:
        """Whether it has work and did not compute since the last look: then it wants the GIL."""
        if not self.is_running or self._cpu_ns is None:
            return False
        cpu_ns = self._cpu_ns()
        seen, self._seen = self._seen, (now_ns, cpu_ns)
        return seen is not None and 2 * (cpu_ns - seen[1]) < now_ns - seen[0]

    def _serve(self) -> None:
        self._cpu_ns = clock.cpu_clock_of_thread(threading.get_ident())
        while (stream := self._ready.get()) is not None:
            self._seen = None
            self.is_running = True
            stream.serve()
            self.is_running = False
            self._crew.served()
            del stream
        self._ready.put(None)  # The next one ends too.


class Crew:
    """The threads that the streams of a device share. They start when needed and end with the last stream."""

    def __init__(self, threads_max: int, name: str, now_ns: Callable[[], int]) -> None:
        self._threads_max = threads_max
        self._name = name
        self._now_ns = now_ns
        # Guards what engines on several threads may change at once: streams, workers, tickets.
        self._lock = threading.Lock()
        self._streams = 0
        self._workers: list[_Worker] = []
        # Streams that were scheduled and not served yet: each could keep a thread busy.
        self._tickets = 0
        self.ready: SimpleQueue[HostStream | None] = SimpleQueue()
        # The hand-over of the GIL: a thread frees the baton whenever it gets anywhere.
        self._baton = threading.Lock()
        self._baton.acquire()
        self._lend_pause_ns = LEND_PAUSE_NS_MIN
        self._lend_next_ns = 0

    def join(self) -> None:
        """One more stream."""
        with self._lock:
            self._streams += 1

    def leave(self, timeout_s: float) -> bool:
        """One stream less; with the last, the threads end. False if they do not within ``timeout_s``."""
        with self._lock:
            self._streams -= 1
            if self._streams:
                return True
            # Who opens the next stream begins with threads and a queue of its own.
            workers, self._workers = self._workers, []
            ready, self.ready = self.ready, SimpleQueue()
        ready.put(None)
        for worker in workers:
            worker.thread.join(timeout_s)
        return not any(worker.thread.is_alive() for worker in workers)

    def schedule(self, stream: "HostStream") -> None:
        """Let a thread serve this stream, which has work."""
        with self._lock:
            self._tickets += 1
            if len(self._workers) < min(self._tickets, self._threads_max):
                self._workers.append(_Worker(self, f"{self._name}-{len(self._workers)}"))
            self.ready.put(stream)

    def served(self) -> None:
        """From a worker: a stream that was scheduled has been served."""
        with self._lock:
            self._tickets -= 1

    def hand_back(self) -> None:
        """From a worker, whenever it gets anywhere: who lent it the GIL may have it back."""
        if self._baton.locked():
            try:  # noqa: SIM105  (a context manager costs more than the rest)
                self._baton.release()
            except RuntimeError:
                pass  # Another worker was quicker.

    def lend_gil(self) -> bool:
        """Let a thread that waits for the GIL have it; False, at once, if none seems to."""
        now_ns = self._now_ns()
        if now_ns < self._lend_next_ns or not GIL:
            return False
        stalled = [worker.is_stalled(now_ns) for worker in self._workers]
        wanted = self.ready.qsize() and not all(worker.is_running for worker in self._workers)
        if not wanted and not any(stalled):
            return False
        # An old sign of life must not end the hand-over before it has begun.
        self._baton.acquire(blocking=False)
        if self._baton.acquire(timeout=LEND_S):
            self._lend_pause_ns = LEND_PAUSE_NS_MIN
            return True
        self._lend_next_ns = self._now_ns() + self._lend_pause_ns
        self._lend_pause_ns = min(2 * self._lend_pause_ns, LEND_PAUSE_NS_MAX)
        return False


class HostStream:
    """Work in order: on a thread of the device or, if it is short enough, in place."""

    def __init__(self, *, crew: Crew, in_place: InPlace, now_ns: Callable[[], int]) -> None:
        self.crew = crew
        self._in_place = in_place
        self._now_ns = now_ns
        self._operations: deque[Callable[[], bool]] = deque()
        # Guards the step from served to idle against an operation that arrives meanwhile.
        self._lock = threading.Lock()
        self._is_served = False
        self._error: BaseException | None = None
        self._paces: dict[Hashable, _Pace] = {}
        self._closed = False
        crew.join()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "busy" if self._is_served else "idle"
        return f"<HostStream {state} pending={len(self._operations)}>"

    def launch(self, work: Callable[[], None], *, label: Hashable) -> None:
        """Run ``work`` after everything launched before. Runs with one ``label`` take about as long.

        What it raises becomes the error of the next event that is recorded here.
        """
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
        event.begin(self)
        if self._is_served:
            self._put(partial(self._reach, event))
        else:
            self._reach(event)

    def wait(self, event: Event) -> None:
        event = _own(event)
        if self._is_served or not event.query():
            self._put(partial(self._await, event, event.recording))

    def copy(self, target: Buffer, source: Buffer, *, offset: int, nbytes: int) -> None:
        into = target.array(np.dtype(np.uint8), (nbytes,), offset)
        out_of = source.array(np.dtype(np.uint8), (nbytes,), offset)
        self.launch(partial(np.copyto, into, out_of), label=("copy", nbytes))

    def close(self, timeout_s: float) -> bool:
        if self._closed:
            return True
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
    :raises OptionsError: for an impossible number of threads.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        in_place: InPlace = "auto",
        unified: bool = True,
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
    def contexts_default(self) -> int:
        # Twice as many as can compute, so that a thread which is done finds the next batch waiting; but each
        # has a slab, and on a machine with many cores those would come to a lot of memory.
        return min(2 * self._threads, CONTEXTS_MAX)

    def create_stream(self) -> HostStream:
        return HostStream(crew=self._crew, in_place=self._in_place, now_ns=self._now_ns)

    def create_event(self) -> HostEvent:
        return HostEvent()

    def allocate_staging(self, nbytes: int) -> HostBuffer:
        return HostBuffer(nbytes)

    def allocate(self, nbytes: int) -> HostBuffer:
        return HostBuffer(nbytes)

    def close(self) -> None:
        """Its threads end with its last stream, and its buffers are the process's."""


def cores() -> int:
    """The CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
