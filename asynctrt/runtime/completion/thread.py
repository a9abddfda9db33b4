"""The thread of ``waiting="thread"``, which blocks on one event after the other."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from asynctrt.devices.base import Completion


class WaiterThread:
    """Blocks on events and calls ``wake`` after each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: SimpleQueue[Completion | None] = SimpleQueue()
        self._wake = wake
        # A daemon, which is not joined either: an event that never fires must not keep anything from ending.
        threading.Thread(target=self._serve, name="asynctrt-reaper", daemon=True).start()

    def wait_for(self, event: Completion) -> None:
        """Wait for one more event; events end in about the order in which they were launched."""
        self._events.put(event)

    def close(self) -> None:
        """End the thread after the events that it was given."""
        self._events.put(None)

    def _serve(self) -> None:
        while (event := self._events.get()) is not None:
            event.synchronize()
            self._wake()
