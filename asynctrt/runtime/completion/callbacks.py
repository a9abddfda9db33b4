"""Devices with callbacks: make sure that the calling thread can get the GIL."""

from collections.abc import Callable, Sequence
from typing import Final

from asynctrt._util import clock
from asynctrt.runtime.completion.watcher import Watch

GUARD_NS: Final = 3_000_000
"""The pause between two looks of the guard at a new batch that needs no help."""

GUARD_NS_MAX: Final = 50_000_000
GUARD_SHIFT: Final = 4
"""The pauses grow to a 16th of the time that the batch has taken so far, up to this bound."""

HELP_NS: Final = 100_000
"""The shortest pause after the guard had to help, for the next HELP_EVENTS events."""

HELP_EVENTS: Final = 32

BUSY: Final = 0.5
BUSY_WINDOW_NS: Final = 2_000_000
"""A loop is mostly busy if its thread used more than this share of the CPU in at least this time. It may then
keep the GIL from others."""


class Guard:
    """Checks now and then, on a mostly busy loop, whether a calling thread needs help with the GIL."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._help_events = 0
        self._is_busy = False
        self._judged = (now_ns(), clock.own_cpu_ns())

    def begin(self, watch: Watch) -> None:
        """Plan the first look at a new event."""
        now_ns = watch.start_ns
        self._judge(now_ns)
        watch.look_ns = now_ns + (HELP_NS if self._help_events else GUARD_NS)

    def end(self) -> None:
        """Record that an event is done."""
        if self._help_events:
            self._help_events -= 1

    def look(self, watches: Sequence[Watch], now_ns: int) -> None:
        """Check whether the calling threads need help, if a look at one of them is due.

        If no thread has needed help lately, each look covers all events, so several batches in flight cause
        no more looks than one.
        """
        if not any(watch.calls and watch.look_ns <= now_ns for watch in watches):
            return
        self._judge(now_ns)
        for watch in watches:
            if watch.calls and (watch.look_ns <= now_ns or not self._help_events):
                if self._is_busy and watch.event.nudge():
                    self._help_events = HELP_EVENTS
                watch.look_ns = now_ns + self._pause_ns(watch, now_ns)

    def _judge(self, now_ns: int) -> None:
        """Decide whether the loop was mostly busy lately, so that other threads may not have got the GIL."""
        since_ns, since_cpu_ns = self._judged
        if now_ns - since_ns >= BUSY_WINDOW_NS:
            cpu_ns = clock.own_cpu_ns()
            self._is_busy = cpu_ns - since_cpu_ns > BUSY * (now_ns - since_ns)
            self._judged = (now_ns, cpu_ns)

    def _pause_ns(self, watch: Watch, now_ns: int) -> int:
        """Return the time until the next look at a pending event."""
        # A 16th of the time so far, so that an event is found late only by a small part of its time.
        part_ns = min(now_ns - watch.start_ns >> GUARD_SHIFT, GUARD_NS_MAX)
        if not self._help_events:
            return max(part_ns, GUARD_NS)
        # Looks begin well before the expected end: the estimate was learned from the times of looks that
        # found the end. If the first look were at the estimate, each end would be found a little later.
        begin_ns = watch.start_ns + watch.expected_ns * 3 // 4
        return max(begin_ns - now_ns, part_ns, HELP_NS)
