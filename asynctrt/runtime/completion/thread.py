"""The thread of ``waiting="thread"``, which blocks on one event after the other."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from asynctrt.devices.base import Completion


class WaiterThread:
    """Blocks on events and calls ``wake`` after each event. Its thread ends when it is garbage-collected."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: SimpleQueue[Completion | None] = SimpleQueue()
        self.wake = wake
        # The thread has only a weak reference to this object, so that it does not keep it alive.
        thread = threading.Thread(
            target=_serve,
            args=(self._events, weakref.ref(self)),
            name="asynctrt-reaper",
            # Never joined: an event that never fires must not block the exit.
            daemon=True,
        )
        thread.start()
        self.close = weakref.finalize(self, self._events.put, None)
        """End the thread after the events already queued. Idempotent."""

    def wait_for(self, event: Completion) -> None:
        """Wait for another event. Events end in about the order in which they were launched."""
        self._events.put(event)


def _serve(events: "SimpleQueue[Completion | None]", waiter: "weakref.ref[WaiterThread]") -> None:
    while (event := events.get()) is not None:
        event.synchronize()
        del event
        waiting = waiter()
        if waiting is not None:
            waiting.wake()
        del waiting
