"""Threads that copy the rows of large batches, so that the loop does not stand still meanwhile.

::

    copiers = Copiers(reaper, now_ns)
    copiers.submit(copy, nbytes, then)  # copy() in a thread, then(error) on the loop: None, or what it raised
    copiers.close(timeout_s)  # after the reaper; blocks until the threads have ended, False if one has not

A thread starts when a copy finds the others busy. The reaper finds the end of a copy as it finds the end of a
batch, so ``then`` is prompt on a loop that is never idle as well.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from asynctrt.devices.host import cores
from asynctrt.devices.host.threads import StreamThreads
from asynctrt.runtime.completion import Reaper

COPIERS_MAX: Final = 4
"""Threads for copying; more do not copy faster (tests/benchmarks/copies.py)."""

NBYTES_PER_NS: Final = 6
"""About what one thread copies (tests/benchmarks/copies.py); it tells when the end of a copy may be near."""


class Copiers:
    """A few threads for one event loop.

    :param reaper: finds the ends of copies.
    :param threads_max: default: the cores that the process may use, up to :data:`COPIERS_MAX`.
    """

    def __init__(self, reaper: Reaper, now_ns: Callable[[], int], *, threads_max: int | None = None) -> None:
        self._reaper = reaper
        self._threads = StreamThreads(threads_max or min(cores(), COPIERS_MAX), "asynctrt-copy", now_ns)
        self._threads.join()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Copiers {'closed' if self._closed else 'open'}>"

    def submit(
        self, copy: Callable[[], object], nbytes: int, then: Callable[[BaseException | None], object]
    ) -> None:
        """Run ``copy`` in a thread, and ``then`` on the loop with what it raised, or with ``None``."""
        assert not self._closed, "nothing is copied after the end"
        job = _Copy(copy, self._threads)
        self._threads.schedule(job)
        self._reaper.watch(job, partial(job.tell, then), expected_ns=nbytes // NBYTES_PER_NS)

    def close(self, timeout_s: float) -> bool:
        """End the threads, each after its copy; return False if one does not end in time. Idempotent."""
        if self._closed:
            return True
        self._closed = True
        return self._threads.leave(timeout_s)


class _Copy:
    """One copy: what a thread serves, and what the reaper watches."""

    __slots__ = ("_callback", "_copy", "_done", "_threads", "error")

    def __init__(self, copy: Callable[[], object], threads: StreamThreads) -> None:
        self._copy: Callable[[], object] | None = copy
        self._threads = threads
        self._done = threading.Event()
        self._callback: Callable[[], None] | None = None
        self.error: BaseException | None = None

    def serve(self) -> None:
        """From a thread: copy, and call back."""
        self._threads.hand_back()
        copy, self._copy = self._copy, None
        assert copy is not None
        try:
            copy()
        except BaseException as error:
            self.error = error
        self._done.set()
        callback = self._callback
        if callback is not None:
            callback()
        self._threads.hand_back()

    def tell(self, then: Callable[[BaseException | None], object]) -> None:
        """On the loop: report the end."""
        then(self.error)

    def is_running(self) -> bool:
        return not self._done.is_set()

    def query(self) -> bool:
        return self._done.is_set()

    def nudge(self) -> bool:
        return not self._done.is_set() and self._threads.lend_gil()

    def on_done(self, callback: Callable[[], None]) -> bool:
        # Ask first, look second, and the thread the other way round: one of the two sees the other.
        self._callback = callback
        return not self._done.is_set()

    def synchronize(self, timeout_s: float | None = None) -> bool:
        return self._done.wait(timeout_s)
