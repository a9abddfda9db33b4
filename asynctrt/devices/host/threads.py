"""The threads of the host device, and the hand-over of the GIL from a busy event loop to them."""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from asynctrt._util import clock
from asynctrt._util.forks import Origin
from asynctrt._util.pace import GIL, Paces

HAND_OVER_NS: Final = 50_000
"""The approximate cost of handing work to a thread and getting the result; shorter work runs in place."""

LABELS_MAX: Final = 1024
"""The maximum number of labels whose durations a device remembers."""

LEND_S: Final = 200e-6
"""How long an event loop may pause to hand the GIL over."""

LEND_PAUSE_NS_MIN: Final = 100_000
LEND_PAUSE_NS_MAX: Final = 10_000_000
"""The pause after a hand-over that gained nothing; it doubles each time."""

EXIT_NS: Final = 500_000_000
EXIT_LOOK_S: Final = 0.001
"""How long interpreter exit waits for threads that are running work, and how often it checks. If a thread
returned to an interpreter that is gone, the system would end the thread inside the library that it ran, and
C++ treats that as a fatal error (``std::terminate``)."""


class Served(Protocol):
    """An item that a thread serves: a stream with work, or a copy."""

    def serve(self) -> None:
        """Run the work. Never raises."""


class ReadyQueue:
    """A queue of items for several threads. An item is for any thread or for one thread, identified by its
    lock. Of the idle threads, it wakes the one that became idle last.

    That thread's core and the per-thread caches of libraries are warm. ``queue.SimpleQueue`` wakes the thread
    that has been idle longest: with four threads, each call of a lone caller was served by a different
    thread, and took 1.15 times as long with a model that takes no time itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: deque[tuple[Served, threading.Lock | None]] = deque()
        self._is_over = False
        # The locks of sleeping threads; releasing a lock wakes its thread.
        self._asleep: list[threading.Lock] = []

    def put(self, served: Served, home: "threading.Lock | None" = None) -> None:
        """Add an item, which only the thread ``home`` may serve if given, and wake a thread for it."""
        with self._lock:
            while self._asleep if home is None else home in self._asleep:
                sleep = home or self._asleep[-1]
                is_woken = sleep.locked()
                if is_woken:
                    sleep.release()
                # Not earlier: if Ctrl-C came in between, the thread would sleep forever.
                if home is None:
                    self._asleep.pop()
                else:
                    self._asleep.remove(home)
                if is_woken:
                    break
            self._ready.append((served, home))

    def free(self, home: "threading.Lock") -> None:
        """Make the items of this thread, which no longer serves, available to any thread."""
        with self._lock:
            left = [served for served, its_home in self._ready if its_home is home]
            self._ready = deque(entry for entry in self._ready if entry[1] is not home)
        for served in left:
            self.put(served)

    def end(self) -> None:
        """End the threads once the queue is empty. Takes no lock: the garbage collector may call it."""
        self._is_over = True
        for sleep in self._asleep.copy():
            with suppress(RuntimeError):  # The thread is already awake.
                sleep.release()

    def get(self, sleep: threading.Lock) -> Served | None:
        """Wait for an item in the thread that holds the lock ``sleep``; return ``None`` if the thread should
        end."""
        while True:
            with self._lock:
                for index, (served, home) in enumerate(self._ready):
                    if home is None or home is sleep:
                        del self._ready[index]
                        return served
                self._asleep.append(sleep)
            # This method registers as asleep and then checks the flag; `end` does the reverse, so one sees
            # the other.
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
        """The lock that it sleeps on, which it holds."""
        self.sleep.acquire()
        self._cpu_ns: Callable[[], int] | None = None
        self._seen: tuple[int, int] | None = None
        # A daemon thread, so that a hung model does not keep the interpreter from exiting.
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def is_stalled(self, now_ns: int) -> bool:
        """Return whether it has work but has not computed since the last check, so that it wants the GIL."""
        if self.serves is None or self._cpu_ns is None:
            return False
        cpu_ns = self._cpu_ns()
        seen, self._seen = self._seen, (now_ns, cpu_ns)
        return seen is not None and 2 * (cpu_ns - seen[1]) < now_ns - seen[0]

    def has_computed(self, lent_ns: int, now_ns: int) -> bool:
        """Return whether it has computed for half of the time since the check at ``lent_ns``."""
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
        """Let running work return to its thread before the interpreter exits."""
        threads = self._threads()
        end_ns = 0 if threads is None else threads.exit_end_ns()
        while self.serves is not None and clock.now_ns() < end_ns:
            threading.Event().wait(EXIT_LOOK_S)


class StreamThreads:
    """Threads that the streams of a device share. They start on demand and end with the last stream."""

    def __init__(self, threads_max: int, name: str, now_ns: Callable[[], int]) -> None:
        self._threads_max = threads_max
        self._name = name
        self._now_ns = now_ns
        self._origin = Origin()
        self._what = f"the device of the threads {name!r}"
        self._exit_end_ns = 0
        # Guards state that engines in several threads may change at once: streams, workers, tickets.
        self._lock = threading.Lock()
        self._streams = 0
        self._workers: list[_Worker] = []
        # Streams that were scheduled and not yet served: each could keep a thread busy.
        self._tickets = 0
        # Streams that must be served by one thread, and that thread once it is chosen.
        self._homes: dict[Served, _Worker | None] = {}
        self.ready = ReadyQueue()
        self.paces = Paces(HAND_OVER_NS, LABELS_MAX)
        """The durations of work on any of the streams. They are shared because a model has a stream per
        context and many batch sizes, so each stream alone would learn slowly."""
        # The hand-over of the GIL: a thread releases the baton whenever it makes progress.
        self._baton = threading.Lock()
        self._baton.acquire()
        self._lend_pause_ns = LEND_PAUSE_NS_MIN
        self._lend_next_ns = 0

    def exit_end_ns(self) -> int:
        """Return the time until which interpreter exit waits for threads that are running work."""
        if not self._origin.is_here:
            return 0  # A fork does not copy threads.
        self._exit_end_ns = self._exit_end_ns or clock.now_ns() + EXIT_NS
        return self._exit_end_ns

    def check(self) -> None:
        """Check that the threads belong to this process."""
        self._origin.check(self._what)

    def join(self) -> None:
        """Register a stream."""
        self.check()
        with self._lock:
            self._streams += 1

    def leave(self, timeout_s: float) -> bool:
        """Unregister a stream. After the last one, end the threads, and return whether they ended in time."""
        if not self._origin.is_here:
            return True  # The threads, and perhaps the lock, are the parent's.
        with self._lock:
            self._streams -= 1
            if self._streams:
                return True
            # Streams created from now on get new threads and a new queue.
            workers, self._workers = self._workers, []
            ready, self.ready = self.ready, ReadyQueue()
        ready.end()
        until_ns = clock.now_ns() + int(timeout_s * 1e9)
        for worker in workers:
            worker.thread.join(max(until_ns - clock.now_ns(), 0) / 1e9)
        return not any(worker.thread.is_alive() for worker in workers)

    def settle(self, stream: Served) -> None:
        """Serve this stream from one thread from now on, until work hangs there."""
        with self._lock:
            self._homes[stream] = None

    def unsettle(self, stream: Served) -> None:
        """Allow any thread to serve this stream again."""
        if self._origin.is_here:  # After a fork the parent may hold the lock.
            with self._lock:
                self._homes.pop(stream, None)

    def schedule(self, stream: Served) -> None:
        """Schedule this stream, which has work, on a thread."""
        with self._lock:
            self._tickets += 1
            is_settled = stream in self._homes
            try:
                if not is_settled:
                    self._start_worker(self._tickets)
                elif self._homes[stream] is None:
                    self._start_worker(len(self._taken()) + 1)
            except RuntimeError:
                # The system refuses another thread (ulimit -u). The existing threads suffice.
                if not self._workers:
                    self._tickets -= 1
                    raise
            except BaseException:
                self._tickets -= 1
                raise
            self.ready.put(stream, self._home_of(stream) if is_settled else None)

    def replace(self, stream: Served) -> None:
        """Replace the thread that serves this stream, which hangs, if there is one."""
        with self._lock:
            for worker in self._workers:
                if worker.serves is stream:
                    worker.is_replaced = True
                    self._workers.remove(worker)
                    self._tickets -= 1
                    with suppress(RuntimeError):  # The next `schedule` tries again.
                        self._start_worker(self._tickets)
                    for settled, home in self._homes.items():
                        if home is worker:
                            self._homes[settled] = None
                    self.ready.free(worker.sleep)
                    return

    def has_served(self, worker: _Worker) -> bool:
        """Record, from a worker, that it has served its stream. Return False if it has been replaced."""
        with self._lock:
            worker.serves = None
            if not worker.is_replaced:
                self._tickets -= 1
        return not worker.is_replaced

    def hand_back(self) -> None:
        """Return the GIL to the loop that lent it. Workers call this whenever they make progress."""
        if self._baton.locked():
            try:  # noqa: SIM105  (a context manager costs more than the rest)
                self._baton.release()
            except RuntimeError:
                pass  # Another worker was quicker.

    def lend_gil(self) -> bool:
        """Yield the GIL to a thread that waits for it. Return False, at once, if none seems to."""
        if not self.may_lend():
            return False
        now_ns = self._now_ns()
        stalled = [worker.is_stalled(now_ns) for worker in self._workers]
        # A thread that was given work and has not started it.
        idle = sum(worker.serves is None for worker in self._workers)
        is_wanted = idle > 0 and self._tickets > len(self._workers) - idle
        if not is_wanted and not any(stalled):
            return False
        # An earlier release of the baton must not end the hand-over before it starts.
        self._baton.acquire(blocking=False)
        return self._lent(self._baton.acquire(timeout=LEND_S) or self._have_computed(now_ns))

    def may_lend(self) -> bool:
        """Return whether to yield the GIL to a thread that needs it: not just after this gained nothing."""
        return GIL and self._now_ns() >= self._lend_next_ns

    def lend_gil_until(self, served: threading.Lock) -> None:
        """Yield the GIL until a thread releases a lock, for a short time."""
        self._lent(served.acquire(timeout=LEND_S))

    def _lent(self, has_gained: bool) -> bool:  # noqa: FBT001  (the only argument)
        """Record whether a hand-over gained anything, and return it."""
        if has_gained:
            self._lend_pause_ns = LEND_PAUSE_NS_MIN
        else:
            self._lend_next_ns = self._now_ns() + self._lend_pause_ns
            self._lend_pause_ns = min(2 * self._lend_pause_ns, LEND_PAUSE_NS_MAX)
        return has_gained

    def _have_computed(self, lent_ns: int) -> bool:
        """Return whether a thread computed for most of the lent time, and needs the GIL again to be done."""
        now_ns = self._now_ns()
        return any(worker.has_computed(lent_ns, now_ns) for worker in self._workers)

    def _start_worker(self, wanted: int) -> None:
        """Start a thread if fewer are running than wanted and the maximum allows it."""
        if len(self._workers) < min(wanted, self._threads_max):
            self._workers.append(_Worker(self, f"{self._name}-{len(self._workers)}"))

    def _taken(self) -> set[_Worker]:
        """Return the threads that serve certain streams exclusively."""
        return {home for home in self._homes.values() if home is not None}

    def _home_of(self, stream: Served) -> "threading.Lock":
        """Return the lock of the thread for this stream; choose the thread with the fewest such streams."""
        home = self._homes[stream]
        if home is None:
            kept = list(self._homes.values())
            home = self._homes[stream] = min(self._workers, key=kept.count)
        return home.sleep
