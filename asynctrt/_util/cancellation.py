"""Cancel work in another thread that is no longer needed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Cancellation:
    """A cancellation flag: a waiting thread sets it, and a working thread checks it. Thread-safe."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<Cancellation {'cancelled' if self.is_cancelled else 'open'}>"

    @property
    def is_cancelled(self) -> bool:
        """Return whether the work should end."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the work to end. Idempotent."""
        with self._lock:
            self._cancelled.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for a cancellation; return whether the work should end."""
        return self._cancelled.wait(timeout_s)

    @contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """Call a function once if the work is cancelled inside the block; at once if it already was."""
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
    """Return the cancellation of this thread's work; if none was set, one that is never cancelled."""
    return _CURRENT.get() or Cancellation()


@contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """Let a cancellation end the work that this thread does inside the block."""
    token = _CURRENT.set(cancellation)
    try:
        yield
    finally:
        _CURRENT.reset(token)
