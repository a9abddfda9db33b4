"""Virtual time: what happens when, in order. Nothing waits."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Timeline:
    """Events in order of time, and of when they were set among those of one instant."""

    __slots__ = ("_order", "entries", "now_ns", "stalled_until_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self.stalled_until_ns = 0
        """Until when the event loop stands still. The device goes on, and the loop is late for that."""
        self.entries: list[tuple[int, int, Callable[[Any], None], Any]] = []
        """The events to come, as a heap."""
        self._order = count()

    def at(self, time_ns: int, call: Callable[[Any], None], argument: Any) -> None:
        """Let something happen at a time, or now if that is past."""
        heappush(self.entries, (time_ns, next(self._order), call, argument))

    def is_late(self, call: Callable[[Any], None], argument: Any) -> bool:
        """Return whether the loop stands still, so that this has been put off until it goes on."""
        if self.now_ns >= self.stalled_until_ns:
            return False
        self.at(self.stalled_until_ns, call, argument)
        return True

    def run_next(self) -> None:
        """Let the next event happen, which is there."""
        time_ns, _, call, argument = heappop(self.entries)
        if time_ns > self.now_ns:
            self.now_ns = time_ns
        call(argument)

    def run_until(self, end_ns: int) -> None:
        """Let everything happen that is due by a time, which is then the time."""
        entries = self.entries
        while entries and entries[0][0] <= end_ns:
            time_ns, _, call, argument = heappop(entries)
            if time_ns > self.now_ns:
                self.now_ns = time_ns
            call(argument)
        if end_ns > self.now_ns:
            self.now_ns = end_ns
