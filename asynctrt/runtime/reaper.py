"""Finds out that batches are done, promptly and without burning the CPU.

The loop finds completions itself. A thread or a descriptor that is to tell a loop which is never idle
comes tens of milliseconds late (the thread cannot get the GIL), so it may only wake a loop that sleeps.

``adaptive``, the default, looks when a batch may be done:

- On a device that can call (the host), the call wakes the loop. On a loop that is mostly busy a guard looks
  now and then whether the thread that would call needs help; while it does, the guard looks soon after launch
  and around the expected end.
- On a device that cannot, an alarm ends the sleep a margin before the expected end, and from there on
  there is a look every tick.

``spin`` looks every tick from launch to end: the promptest, at the price of a whole core.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from asynctrt import clock
from asynctrt.alarm import create_alarm
from asynctrt.devices.base import Event

GUARD_NS: Final = 3_000_000
"""The pause between two looks of the guard while nobody needs help."""

HELP_NS: Final = 100_000
"""The shortest such pause after it had to help, and for as many events as HELP_EVENTS."""

HELP_EVENTS: Final = 32

BUSY: Final = 0.5
BUSY_WINDOW_NS: Final = 2_000_000
"""A loop whose thread used more than this share of at least so much time may keep the GIL from others."""

LATE_NS: Final = 5_000_000
LATE_PAUSE_NS: Final = 1_000_000
"""A batch that is later than this is looked at with pauses, not every tick."""

MARGIN_NS_MIN: Final = 50_000
MARGIN_NS_MAX: Final = 400_000
"""How long before the expected end the looks begin: a tenth of the expectation, within these bounds."""


class _Watch:
    """One event that somebody waits for.

    ``look_ns``: from when on it is queried or, if its device calls, when it is guarded next. ``late_ns``:
    from when on it is queried with pauses.
    """

    __slots__ = ("calls", "event", "expected_ns", "late_ns", "look_ns", "on_done", "start_ns")

    def __init__(
        self,
        event: Event,
        on_done: Callable[[], None],
        start_ns: int,
        expected_ns: int,
        look_ns: int,
        *,
        calls: bool,
    ) -> None:
        self.event = event
        self.on_done = on_done
        self.start_ns = start_ns
        self.expected_ns = expected_ns
        self.look_ns = look_ns
        self.late_ns = look_ns + LATE_NS
        self.calls = calls


class Reaper:
    """Watches events for one loop and calls back, on the loop, when they are done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int], *, spin: bool) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._spin = spin
        self._watches: list[_Watch] = []
        self._tick_is_scheduled = False
        self._woken = False
        self._help_events = 0
        self._is_busy = False
        self._judged = (now_ns(), clock.own_cpu_ns())
        self._alarm = create_alarm(loop, self._ring, now_ns)

    def __repr__(self) -> str:
        mode = "spin" if self._spin else "adaptive"
        return f"<Reaper {mode} watching={len(self._watches)}>"

    def watch(self, event: Event, on_done: Callable[[], None], *, expected_ns: int | None) -> None:
        """Call ``on_done`` when ``event`` is done. ``expected_ns``: how long that takes, if known."""
        now_ns = self._now_ns()
        expected = expected_ns or 0
        self._judge(now_ns)
        calls = event.on_done(self._wake)
        if calls:
            look_ns = now_ns + (HELP_NS if self._help_events else GUARD_NS)
        elif event.query():  # Done already: the next tick tells.
            look_ns = now_ns
        else:
            margin_ns = min(max(MARGIN_NS_MIN, expected // 10), MARGIN_NS_MAX)
            look_ns = now_ns + max(expected - margin_ns, 0)
        self._watches.append(_Watch(event, on_done, now_ns, expected, look_ns, calls=calls))
        self._plan(now_ns)

    def close(self) -> None:
        """Forget every event and never call back again. Idempotent."""
        self._watches.clear()
        self._alarm.close()

    def _wake(self) -> None:
        """From any thread: something is done."""
        if not self._woken:
            self._woken = True
            try:  # noqa: SIM105  (a context manager costs as much as the call)
                self._loop.call_soon_threadsafe(self._look)
            except RuntimeError:
                pass  # The loop was closed with work in flight; nobody is left to be told.

    def _tick(self) -> None:
        self._tick_is_scheduled = False
        self._look()

    def _ring(self) -> None:
        """The alarm: the guard's time, or a batch may be done soon."""
        now_ns = self._now_ns()
        self._judge(now_ns)
        for watch in self._watches:
            if watch.calls and watch.look_ns <= now_ns:
                if self._is_busy and watch.event.nudge():
                    self._help_events = HELP_EVENTS
                watch.look_ns = now_ns + self._guard_pause_ns(watch, now_ns)
        self._look()

    def _judge(self, now_ns: int) -> None:
        """Whether the loop was mostly busy of late, so that other threads may have missed the GIL."""
        since_ns, since_cpu_ns = self._judged
        if now_ns - since_ns >= BUSY_WINDOW_NS:
            cpu_ns = clock.own_cpu_ns()
            self._is_busy = cpu_ns - since_cpu_ns > BUSY * (now_ns - since_ns)
            self._judged = (now_ns, cpu_ns)

    def _guard_pause_ns(self, watch: _Watch, now_ns: int) -> int:
        """How long the guard may leave a pending event alone."""
        if not self._help_events:
            return GUARD_NS
        # Looks begin well before the expected end: the expectation was learned from ends that were found,
        # and if it were itself the time of the first look, each end would be found a little later still.
        begin_ns = watch.start_ns + watch.expected_ns * 3 // 4
        return max(begin_ns - now_ns, watch.expected_ns // 16, HELP_NS)

    def _look(self) -> None:
        self._woken = False
        now_ns = self._now_ns()
        done = []
        pending = []
        for watch in self._watches:
            if watch.event.query():
                done.append(watch)
            else:
                pending.append(watch)
                if not watch.calls and watch.late_ns < now_ns >= watch.look_ns:
                    watch.look_ns = now_ns + LATE_PAUSE_NS
        self._watches = pending
        if done and self._help_events:
            self._help_events -= 1
        for watch in done:
            watch.on_done()
        self._plan(now_ns)

    def _plan(self, now_ns: int) -> None:
        """Be back at the next look, or at the next tick if one is due. The guard can wait for the alarm."""
        if not self._watches:
            return
        look_ns = min(watch.look_ns for watch in self._watches)
        due = self._spin or any(watch.look_ns <= now_ns and not watch.calls for watch in self._watches)
        if due and not self._tick_is_scheduled:
            self._tick_is_scheduled = True
            self._loop.call_soon(self._tick)
        elif not due:
            self._alarm.set(look_ns)
