"""Tell work in another thread that nobody waits for it any more."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Cancellation:
    """What the thread that works asks, and the one that waits for it tells. Any thread may do either."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<Cancellation {'cancelled' if self.is_cancelled else 'open'}>"

    @property
    def is_cancelled(self) -> bool:
        """Return whether the work is to end."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the work to end. Idempotent."""
        with self._lock:
            self._cancelled.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the work is to end; return whether it is."""
        return self._cancelled.wait(timeout_s)

    @contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """Have something called, once, when the work is to end while inside; at once if it is already."""
        with self._lock:
            is_late = self._cancelled.is_set()
            if not is_late:
                self._calls.append(call)
        if is_late:
            call()
        try:
            yield
        finally:
            with self._lock:
                if call in self._calls:
                    self._calls.remove(call)


_CURRENT: ContextVar[Cancellation | None] = ContextVar("asynctrt-cancellation", default=None)


def current() -> Cancellation:
    """Return the cancellation of the work that this thread does: one that never comes, if none was given."""
    return _CURRENT.get() or Cancellation()


@contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """Let what this thread does inside be ended by a cancellation."""
    token = _CURRENT.set(cancellation)
    try:
        yield
    finally:
        _CURRENT.reset(token)
