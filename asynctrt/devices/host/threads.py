"""The threads of the host device, and how a loop that is never idle lets them have the GIL."""

import atexit
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from asynctrt import clock
from asynctrt.forks import Origin
from asynctrt.pace import Paces

HAND_OVER_NS: Final = 50_000
"""About what giving work to a thread and hearing back from it costs; shorter work runs in place."""

LABELS_MAX: Final = 1024
"""Of how many kinds of work a device remembers the pace."""

LEND_S: Final = 200e-6
"""How long a loop may stand still to hand the GIL over."""

LEND_PAUSE_NS_MIN: Final = 100_000
LEND_PAUSE_NS_MAX: Final = 10_000_000
"""The pause after a hand-over that turned out to be in vain; it doubles each time."""

EXIT_NS: Final = 500_000_000
EXIT_LOOK_S: Final = 0.001
"""How long an interpreter that exits waits for threads that are in the middle of something, and how often it
looks. One that comes back into an interpreter which has gone is ended by the system from within the library
that it ran, which C++ takes for an error that ends the process (``std::terminate``)."""

GIL: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()


class Served(Protocol):
    """Something that a thread serves: a stream with work, or a copy."""

    def serve(self) -> None:
        """Do the work. Never raises."""


class ReadyQueue:
    """What is ready to be served by several threads, by any or by a certain one, which is known by the lock
    that it sleeps on. Of those that are idle, the last to become so is woken.

    Its core is warm, and so is what libraries keep for each thread. ``queue.SimpleQueue`` wakes the first:
    with four threads, each call of a lone caller was served by another one, and took 1.15 times as long if
    the model itself takes no time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: deque[tuple[Served, threading.Lock | None]] = deque()
        self._is_over = False
        # Of each thread that sleeps, what wakes it when it is released.
        self._asleep: list[threading.Lock] = []

    def put(self, served: Served, home: "threading.Lock | None" = None) -> None:
        """Add something, and wake a thread for it.

        :param home: the only thread that may take it.
        """
        with self._lock:
            while self._asleep if home is None else home in self._asleep:
                sleep = home or self._asleep[-1]
                is_woken = sleep.locked()
                if is_woken:
                    sleep.release()
                # Not before: one that Ctrl-C came in between would sleep for good.
                if home is None:
                    self._asleep.pop()
                else:
                    self._asleep.remove(home)
                if is_woken:
                    break
            self._ready.append((served, home))

    def free(self, home: "threading.Lock") -> None:
        """Let any thread take what was for this one, which takes nothing any more."""
        with self._lock:
            left = [served for served, its_home in self._ready if its_home is home]
            self._ready = deque(entry for entry in self._ready if entry[1] is not home)
        for served in left:
            self.put(served)

    def end(self) -> None:
        """Let the threads end when nothing is ready any more.

        It takes no lock: the garbage collector may call it wherever another call is.
        """
        self._is_over = True
        for sleep in self._asleep.copy():
            with suppress(RuntimeError):  # It is awake already.
                sleep.release()

    def get(self, sleep: threading.Lock) -> Served | None:
        """Wait for something, in a thread; ``None`` if it is to end.

        :param sleep: a lock of the thread's own, which it holds.
        """
        while True:
            with self._lock:
                for index, (served, home) in enumerate(self._ready):
                    if home is None or home is sleep:
                        del self._ready[index]
                        return served
                self._asleep.append(sleep)
            # This side goes to sleep and then looks, and `end` the other way round, so one sees the other.
            if self._is_over:
                return None
            sleep.acquire()


class _Worker:
    """One of the threads. It does not keep the device and its streams alive, and ends when they are gone."""

    def __init__(self, threads: "StreamThreads", name: str) -> None:
        ready = self._ready = threads.ready
        self._threads = weakref.ref(threads, lambda _: ready.end())
        self.serves: Served | None = None
        self.is_replaced = False
        self.sleep = threading.Lock()
        """What it sleeps on, which it holds."""
        self.sleep.acquire()
        self._cpu_ns: Callable[[], int] | None = None
        self._seen: tuple[int, int] | None = None
        # A daemon: a model that hangs must not keep the interpreter from exiting.
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def is_stalled(self, now_ns: int) -> bool:
        """Return whether it has work and has not computed since the last look, so that it wants the GIL."""
        if self.serves is None or self._cpu_ns is None:
            return False
        cpu_ns = self._cpu_ns()
        seen, self._seen = self._seen, (now_ns, cpu_ns)
        return seen is not None and 2 * (cpu_ns - seen[1]) < now_ns - seen[0]

    def has_computed(self, lent_ns: int, now_ns: int) -> bool:
        """Return whether it has computed for half of the time since a look at ``lent_ns``."""
        if self.serves is None or self._cpu_ns is None or self._seen is None:
            return False
        seen_ns, seen_cpu_ns = self._seen
        return seen_ns == lent_ns and 2 * (self._cpu_ns() - seen_cpu_ns) >= now_ns - lent_ns

    def _serve(self) -> None:
        self._cpu_ns = clock.cpu_clock_of_this_thread()
        atexit.register(self._let_end)
        try:
            while (served := self._ready.get(self.sleep)) is not None:
                self._seen = None
                self.serves = served
                served.serve()
                del served
                threads = self._threads()
                if threads is None or not threads.has_served(self):
                    return
                del threads
        finally:
            self.serves = None
            atexit.unregister(self._let_end)

    def _let_end(self) -> None:
        """Let it come back, if it is in the middle of something, before the interpreter goes."""
        threads = self._threads()
        end_ns = 0 if threads is None else threads.exit_end_ns()
        while self.serves is not None and clock.now_ns() < end_ns:
            threading.Event().wait(EXIT_LOOK_S)


class StreamThreads:
    """Threads that the streams of a device share. They start when needed and end with the last stream."""

    def __init__(self, threads_max: int, name: str, now_ns: Callable[[], int]) -> None:
        self._threads_max = threads_max
        self._name = name
        self._now_ns = now_ns
        self._origin = Origin()
        self._what = f"the device of the threads {name!r}"
        self._exit_end_ns = 0
        # Guards what engines on several threads may change at once: streams, workers, tickets.
        self._lock = threading.Lock()
        self._streams = 0
        self._workers: list[_Worker] = []
        # Streams that were scheduled and not served yet: each could keep a thread busy.
        self._tickets = 0
        # The streams that one thread serves, and which, once that is chosen.
        self._homes: dict[Served, _Worker | None] = {}
        self.ready = ReadyQueue()
        self.paces = Paces(HAND_OVER_NS, LABELS_MAX)
        """What work took, on any of the streams: a model has one for each context, and many sizes of batches,
        so that each stream would learn for a long time."""
        # The hand-over of the GIL: a thread frees the baton whenever it gets anywhere.
        self._baton = threading.Lock()
        self._baton.acquire()
        self._lend_pause_ns = LEND_PAUSE_NS_MIN
        self._lend_next_ns = 0

    def exit_end_ns(self) -> int:
        """Return until when an interpreter that exits waits for threads in the middle of something."""
        if not self._origin.is_here:
            return 0  # Threads are not forked.
        self._exit_end_ns = self._exit_end_ns or clock.now_ns() + EXIT_NS
        return self._exit_end_ns

    def check(self) -> None:
        """Check that the threads are this process's.

        :raises UsageError: in a process that was forked from the one that made this object.
        """
        self._origin.check(self._what)

    def join(self) -> None:
        """Count one more stream.

        :raises UsageError: as :meth:`check`.
        """
        self.check()
        with self._lock:
            self._streams += 1

    def leave(self, timeout_s: float) -> bool:
        """Count one stream less, and end the threads with the last.

        Return False if one of them does not end within ``timeout_s``, which is for all together.
        """
        if not self._origin.is_here:
            return True  # Its threads are the parent's, and so may be the lock.
        with self._lock:
            self._streams -= 1
            if self._streams:
                return True
            # Streams that are made from now on have threads and a queue of their own.
            workers, self._workers = self._workers, []
            ready, self.ready = self.ready, ReadyQueue()
        ready.end()
        until_ns = clock.now_ns() + int(timeout_s * 1e9)
        for worker in workers:
            worker.thread.join(max(until_ns - clock.now_ns(), 0) / 1e9)
        return not any(worker.thread.is_alive() for worker in workers)

    def settle(self, stream: Served) -> None:
        """Let one thread serve this stream from now on, until it hangs there."""
        with self._lock:
            self._homes[stream] = None

    def unsettle(self, stream: Served) -> None:
        """Forget that it keeps to one."""
        if self._origin.is_here:  # The lock may be the parent's.
            with self._lock:
                self._homes.pop(stream, None)

    def schedule(self, stream: Served) -> None:
        """Let a thread serve this stream, which has work."""
        with self._lock:
            self._tickets += 1
            is_settled = stream in self._homes
            try:
                if not is_settled:
                    self._start_worker(self._tickets)
                elif self._homes[stream] is None:
                    self._start_worker(len(self._taken()) + 1)
            except RuntimeError:
                # The system refuses another thread (ulimit -u). Those that there are will do.
                if not self._workers:
                    self._tickets -= 1
                    raise
            except BaseException:
                self._tickets -= 1
                raise
            self.ready.put(stream, self._home_of(stream) if is_settled else None)

    def replace(self, stream: Served) -> None:
        """Let another thread stand in for the one that serves this stream, which hangs, if one does."""
        with self._lock:
            for worker in self._workers:
                if worker.serves is stream:
                    worker.is_replaced = True
                    self._workers.remove(worker)
                    self._tickets -= 1
                    with suppress(RuntimeError):  # It is tried again with the next one that is scheduled.
                        self._start_worker(self._tickets)
                    for settled, home in self._homes.items():
                        if home is worker:
                            self._homes[settled] = None
                    self.ready.free(worker.sleep)
                    return

    def has_served(self, worker: _Worker) -> bool:
        """From a worker: it has served its stream. Return whether it goes on, or has been replaced."""
        with self._lock:
            worker.serves = None
            if not worker.is_replaced:
                self._tickets -= 1
        return not worker.is_replaced

    def hand_back(self) -> None:
        """From a worker, whenever it gets anywhere: give the GIL back to the loop that lent it."""
        if self._baton.locked():
            try:  # noqa: SIM105  (a context manager costs more than the rest)
                self._baton.release()
            except RuntimeError:
                pass  # Another worker was quicker.

    def lend_gil(self) -> bool:
        """Let a thread that waits for the GIL have it. Return False, at once, if none seems to."""
        now_ns = self._now_ns()
        if now_ns < self._lend_next_ns or not GIL:
            return False
        stalled = [worker.is_stalled(now_ns) for worker in self._workers]
        # A thread that has been given work and has not taken it up.
        idle = sum(worker.serves is None for worker in self._workers)
        is_wanted = idle > 0 and self._tickets > len(self._workers) - idle
        if not is_wanted and not any(stalled):
            return False
        # An old sign of life must not end the hand-over before it has begun.
        self._baton.acquire(blocking=False)
        if self._baton.acquire(timeout=LEND_S) or self._have_computed(now_ns):
            self._lend_pause_ns = LEND_PAUSE_NS_MIN
            return True
        self._lend_next_ns = self._now_ns() + self._lend_pause_ns
        self._lend_pause_ns = min(2 * self._lend_pause_ns, LEND_PAUSE_NS_MAX)
        return False

    def _have_computed(self, lent_ns: int) -> bool:
        """Return whether a thread used most of what it was lent, and is not through: it wants more soon.

        Work that takes the GIL again and again, as a copy of many arrays does for each, starves otherwise.
        """
        now_ns = self._now_ns()
        return any(worker.has_computed(lent_ns, now_ns) for worker in self._workers)

    def _start_worker(self, wanted: int) -> None:
        """Start a thread if there are fewer than wanted, and room."""
        if len(self._workers) < min(wanted, self._threads_max):
            self._workers.append(_Worker(self, f"{self._name}-{len(self._workers)}"))

    def _taken(self) -> set[_Worker]:
        """Return the threads that some streams keep to."""
        return {home for home in self._homes.values() if home is not None}

    def _home_of(self, stream: Served) -> "threading.Lock":
        """Return what the thread that this stream keeps to sleeps on; choose the one that fewest keep to."""
        home = self._homes[stream]
        if home is None:
            kept = list(self._homes.values())
            home = self._homes[stream] = min(self._workers, key=kept.count)
        return home.sleep
