"""The threads of the host device, and how a loop that is never idle lets them have the GIL."""

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Protocol

from asynctrt import clock

LEND_S: Final = 200e-6
"""How long a loop may stand still to hand the GIL over."""

LEND_PAUSE_NS_MIN: Final = 100_000
LEND_PAUSE_NS_MAX: Final = 10_000_000
"""The pause after a hand-over that turned out to be in vain; it doubles each time."""

GIL: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()


class Served(Protocol):
    """What a worker serves: a stream."""

    def serve(self) -> None:
        """Do what there is to do."""


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
        self.ready: SimpleQueue[Served | None] = SimpleQueue()
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

    def schedule(self, stream: Served) -> None:
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
