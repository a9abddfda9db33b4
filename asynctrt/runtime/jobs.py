"""Threads for work that would block the loop: copies of large batches, and enqueues that wait for the device.

::

    jobs = Jobs("asynctrt-copy", 4, reaper, now_ns)
    jobs.submit(work, then)  # work() in a thread, then(error) on the loop: its exception or None
    jobs.close(timeout_s)  # after the reaper; blocks until the threads have ended, False on a timeout

A thread starts when all others are busy with jobs. The reaper detects the end of a job like the end of a
batch, so ``then`` is prompt even on a loop that is never idle, and a hung job is abandoned.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from asynctrt.devices.host import cores, raise_on_loop
from asynctrt.devices.host.threads import StreamThreads
from asynctrt.runtime.completion import Reaper

COPIERS_MAX: Final = 4
"""The most threads for one copy; more do not copy faster (tests/benchmarks/copies.py)."""

COPIES: Final = 2
"""How many copies run at the same time, if there are cores for their threads: one batch is copied out while
another one is copied in."""

COPIED_NBYTES_PER_NS: Final = 6
"""The rough speed of one copying thread (tests/benchmarks/copies.py); used to estimate the end of a copy."""


class Jobs:
    """A few threads for one event loop.

    :param name: the name of the threads.
    :param threads_max: the most threads to run.
    :param reaper: detects the ends of jobs.
    """

    def __init__(self, name: str, threads_max: int, reaper: Reaper, now_ns: Callable[[], int]) -> None:
        self._reaper = reaper
        self._threads = StreamThreads(threads_max, name, now_ns)
        self._threads.join()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Jobs {'closed' if self._closed else 'open'}>"

    def submit(
        self,
        work: Callable[[], object],
        then: Callable[[BaseException | None], object],
        *,
        expected_ns: int | None = None,
        hung_after_ns: int | None = None,
        on_hung: Callable[[], object] | None = None,
        hold: Callable[["Job"], object] | None = None,
    ) -> None:
        """Run ``work`` in a thread, then call ``then`` on the loop with its exception or ``None``.

        If this method raises, Ctrl-C included, no thread runs ``work``, now or later, so its data may be used
        elsewhere. If an interrupt arrives after a thread has begun, the loop raises it later.

        :param expected_ns: the expected duration, if known.
        :param hung_after_ns: call ``on_hung`` on the loop when the job has run for this long. Another thread
            then replaces the job's. If the job ends later, ``then`` is still called.
        :param hold: called with the job before a thread may begin.
        """
        assert not self._closed, "nothing is done after the end"
        job = Job(work, self._threads)
        try:
            # Watched before it can begin, so that it cannot run unnoticed if an error occurs in between.
            self._reaper.watch(
                job,
                partial(job.tell, then),
                expected_ns=expected_ns,
                hung_after_ns=hung_after_ns,
                on_hung=None if on_hung is None else partial(self._give_up, job, on_hung),
            )
            if hold is not None:
                hold(job)
            self._threads.schedule(job)
        except BaseException as error:
            if job.revoke():
                raise
            raise_on_loop(error)

    def assist(self, work: Callable[[], object]) -> None:
        """Run ``work`` in a thread, without reporting its end. A no-op if the system refuses a thread."""
        with suppress(RuntimeError):  # Help is optional: the caller's own work in progress must not fail.
            self._threads.schedule(Job(work, self._threads))

    def close(self, timeout_s: float) -> bool:
        """End each thread after its job; return False if a thread does not end in time. Idempotent."""
        if self._closed:
            return True
        self._closed = True
        return self._threads.leave(timeout_s)

    def _give_up(self, job: "Job", on_hung: Callable[[], object]) -> None:
        self._threads.replace(job)
        on_hung()


class Copiers(Jobs):
    """The threads that copy.

    :param threads_max: the most threads. Default: the process's cores, up to :data:`COPIES` times
        :data:`COPIERS_MAX`.
    """

    def __init__(self, reaper: Reaper, now_ns: Callable[[], int], *, threads_max: int | None = None) -> None:
        self.threads_max = threads_max or min(cores(), COPIES * COPIERS_MAX)
        """The most threads."""
        self.parts_max = min(self.threads_max, COPIERS_MAX)
        """The most parts to divide a copy into."""
        super().__init__("asynctrt-copy", self.threads_max, reaper, now_ns)

    def copy(
        self,
        copy: Callable[[], object],
        nbytes: int,
        then: Callable[[BaseException | None], object],
        hold: Callable[["Job"], object] | None = None,
    ) -> None:
        """Run ``copy``, which copies ``nbytes`` bytes, in a thread, as :meth:`submit` does."""
        self.submit(copy, then, expected_ns=nbytes // COPIED_NBYTES_PER_NS, hold=hold)

    def copy_in_parts(
        self,
        parts: Sequence[Callable[[], object]],
        nbytes: int,
        then: Callable[[BaseException | None], object],
        hold: Callable[["Job"], object] | None = None,
    ) -> None:
        """Run all ``parts``, which copy ``nbytes`` bytes together, in up to one thread each.

        When the last part has ended, ``then`` is called once, with the first error or ``None``. One job
        stands for all parts.
        """
        work = SharedWork(parts)
        self.copy(work.do, nbytes // len(parts), then, hold)
        for _ in range(len(parts) - 1):
            self.assist(work.help)


class SharedWork:
    """Work in parts that one thread must complete, and others may help with."""

    def __init__(self, parts: Sequence[Callable[[], object]]) -> None:
        self._left = deque(parts)
        self._count = len(parts)
        self._lock = threading.Lock()
        self._unfinished = len(parts)
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def __len__(self) -> int:
        return self._count

    def help(self) -> None:
        """Run parts until none is left. :meth:`do` raises their first error."""
        while True:
            try:
                part = self._left.popleft()
            except IndexError:
                return
            error = None
            try:
                part()
            except BaseException as raised:
                error = raised
            with self._lock:
                self._error = self._error or error
                self._unfinished -= 1
                if not self._unfinished:
                    self._is_done.set()

    def do(self) -> None:
        """Run parts until none is left, wait for the parts of helpers, and raise the first error of all.

        Helpers affect only how long it takes.
        """
        self.help()
        self._is_done.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # Breaks a cycle: its traceback holds this frame.


class Job:
    """One job, served by a thread and watched by the reaper."""

    __slots__ = ("_begun", "_callback", "_is_done", "_is_revoked", "_running", "_threads", "_work", "error")

    def __init__(self, work: Callable[[], object], threads: StreamThreads) -> None:
        # Popped once, either by a thread or by `revoke`.
        self._work = [work]
        self._is_revoked = False
        self._threads = threads
        self._begun = False
        self._is_done = False
        # Held until the job is done, for `synchronize`. An event would do the same in ten times as long.
        self._running = threading.Lock()
        self._running.acquire()
        self._callback: Callable[[], None] | None = None
        self.error: BaseException | None = None

    def serve(self) -> None:
        """Run the job and call back. Called by a thread."""
        self._begun = True
        self._threads.hand_back()
        try:
            work = self._work.pop()
        except IndexError:
            return  # It was revoked.
        try:
            work()
        except BaseException as error:
            self.error = error
        del work
        self._is_done = True
        self._running.release()
        callback = self._callback
        if callback is not None:
            callback()
        self._threads.hand_back()

    def revoke(self) -> bool:
        """Withdraw the job without running or reporting it; a no-op that returns False if it has begun."""
        try:
            self._work.pop()
        except IndexError:
            return self._is_revoked
        self._is_revoked = self._is_done = True
        self._running.release()
        return True

    def tell(self, then: Callable[[BaseException | None], object]) -> None:
        """Report the end. Called on the loop."""
        if not self._is_revoked:
            error, self.error = self.error, None
            then(error)

    def is_running(self) -> bool:
        return self._begun and not self._is_done

    def query(self) -> bool:
        return self._is_done

    def nudge(self) -> bool:
        return not self._is_done and self._threads.lend_gil()

    def on_done(self, callback: Callable[[], None]) -> bool:
        # Store the callback, then read the flag; the thread does the reverse. So at least one sees the other.
        self._callback = callback
        return not self._is_done

    def synchronize(self, timeout_s: float | None = None) -> bool:
        if not self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._running.release()
        return True
