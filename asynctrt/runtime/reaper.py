"""Finds out that batches are done, promptly and without burning the CPU.

The loop finds completions itself. A thread or a descriptor that is to tell a loop which is never idle
comes tens of milliseconds late (the thread cannot get the GIL), so it may only wake a loop that sleeps.

``adaptive``, the default, looks when a batch may be done:

- On a device that can call (the host), the call wakes the loop. On a loop that is mostly busy a guard looks
  now and then whether the thread that would call needs help; while it does, the guard looks soon after launch
  and around the expected end.
- On a device that cannot (CUDA: a host function holds up its stream), an alarm ends the sleep a margin before
  the expected end, and from there on there is a look every tick. A loop that others keep busy has ticks
  anyway, so there is a look in each of them, whatever is expected.

``spin`` looks every tick from launch to end: the promptest, at the price of a whole core.

``thread`` has a thread that blocks on the event and wakes the loop: the least CPU on a loop that is mostly
idle, and tens of milliseconds late on one that never is.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Literal

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
LATE_PAUSE_NS_MIN: Final = 60_000
LATE_PAUSE_NS_MAX: Final = 1_000_000
"""A batch that is later than this is looked at with pauses, not every tick: the longer the later it is."""

MARGIN_NS_MIN: Final = 30_000
MARGIN_NS_MAX: Final = 150_000
"""How long before the expected end the looks begin: a 20th of the expectation, within these bounds."""

DOZE_NS_MIN: Final = 150_000
"""Of a longer sleep seven eighths are slept at once, and the rest anew: a short sleep ends more punctually
than a long one (a timer of 0.9 ms was 21 µs late at p50 and 85 at p99, and by dozing 8 and 21)."""

LOOKS: Final = 4
"""Looks in one tick of a loop that nobody else wants: a tick takes as long as two of them."""

BUSY_TICK_NS: Final = 20_000
"""A tick that took longer than this had something else to do: the next look costs nobody any sleep."""

QUIET_TICKS: Final = 2
"""After so many ticks in a row with nothing else to do, the loop may sleep until the next look is due."""

NEVER_NS: Final = 2**63 - 1

Waiting = Literal["adaptive", "spin", "thread"]


class _Watch:
    """One event that somebody waits for.

    ``look_ns``: from when on it is queried or, if somebody calls, when it is guarded next. ``late_ns``:
    from when on it is queried with pauses. ``hung_ns``: when it is given up.
    """

    __slots__ = (
        "calls",
        "event",
        "expected_ns",
        "hung_ns",
        "lane",
        "late_ns",
        "look_ns",
        "on_done",
        "on_hung",
        "start_ns",
    )

    def __init__(
        self,
        event: Event,
        on_done: Callable[[], None],
        on_hung: Callable[[], None] | None,
        start_ns: int,
        expected_ns: int,
        look_ns: int,
        hung_ns: int,
        lane: int | None,
        *,
        calls: bool,
    ) -> None:
        self.event = event
        self.on_done = on_done
        self.on_hung = on_hung
        self.hung_ns = hung_ns
        self.lane = lane
        self.start_ns = start_ns
        self.expected_ns = expected_ns
        self.look_ns = look_ns
        self.late_ns = look_ns + LATE_NS
        self.calls = calls


class _Waiter:
    """The thread of ``thread``: it blocks on one event after the other."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._wake = wake
        # A daemon, which is not joined either: an event that never fires must not keep anything from ending.
        threading.Thread(target=self._serve, name="asynctrt-reaper", daemon=True).start()

    def wait_for(self, event: Event) -> None:
        """One more; they end in about the order in which they were launched."""
        self._events.put(event)

    def close(self) -> None:
        """End after the event that it waits for."""
        self._events.put(None)

    def _serve(self) -> None:
        while (event := self._events.get()) is not None:
            event.synchronize()
            self._wake()


class Reaper:
    """Watches events for one loop and calls back, on the loop, when they are done."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int], *, waiting: Waiting
    ) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._waiting = waiting
        self._watches: list[_Watch] = []
        self._tick_is_scheduled = False
        self._tick_ns = 0
        self._quiet_ticks = 0
        self._woken = False
        self._help_events = 0
        self._is_busy = False
        self._judged = (now_ns(), clock.own_cpu_ns())
        self._waiter = _Waiter(self._wake) if waiting == "thread" else None
        self._alarm = create_alarm(loop, self._ring, now_ns)

    def __repr__(self) -> str:
        return f"<Reaper {self._waiting} watching={len(self._watches)}>"

    def watch(
        self,
        event: Event,
        on_done: Callable[[], None],
        *,
        expected_ns: int | None,
        hung_after_ns: int | None = None,
        on_hung: Callable[[], None] | None = None,
        lane: int | None = None,
    ) -> None:
        """Call ``on_done`` when ``event`` is done, or ``on_hung`` if it is not after ``hung_after_ns``.

        ``expected_ns``: how long it takes, if known. ``lane``: events of one lane end in the order in which
        they are watched, so only the first is looked at.
        """
        now_ns = self._now_ns()
        expected = expected_ns or 0
        calls = event.on_done(self._wake)
        if calls:
            self._judge(now_ns)
            look_ns = now_ns + (HELP_NS if self._help_events else GUARD_NS)
        elif event.query():  # Done already: the next tick tells.
            look_ns = now_ns
        elif self._waiter is not None:
            self._waiter.wait_for(event)
            calls = True
            look_ns = now_ns + GUARD_NS
        else:
            margin_ns = min(max(MARGIN_NS_MIN, expected // 20), MARGIN_NS_MAX)
            look_ns = now_ns + max(expected - margin_ns, 0)
            self._tick_ns, self._quiet_ticks = now_ns, 0
        hung_ns = NEVER_NS if hung_after_ns is None else now_ns + hung_after_ns
        self._watches.append(
            _Watch(event, on_done, on_hung, now_ns, expected, look_ns, hung_ns, lane, calls=calls)
        )
        self._plan(now_ns)

    def close(self) -> None:
        """Forget every event and never call back again. Idempotent."""
        self._watches.clear()
        self._alarm.close()
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None

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
        now_ns = self._now_ns()
        if now_ns - self._tick_ns > BUSY_TICK_NS:
            self._quiet_ticks = 0
        else:
            self._quiet_ticks += 1
        self._tick_ns = now_ns
        if self._quiet_ticks > QUIET_TICKS and self._watches:
            query = self._watches[0].event.query
            for _ in range(LOOKS):
                if query():
                    break
        self._look()

    def _ring(self) -> None:
        """The alarm: the guard's time, or a batch may be done soon, or the rest of a sleep is left."""
        now_ns = self._now_ns()
        due = False
        for watch in self._watches:
            if watch.look_ns <= now_ns:
                due = True
                if watch.calls:
                    self._guard(watch, now_ns)
        if due:
            self._look()
        else:
            self._plan(now_ns)

    def _guard(self, watch: _Watch, now_ns: int) -> None:
        """See whether the thread that would call needs help."""
        self._judge(now_ns)
        if self._is_busy and watch.event.nudge():
            self._help_events = HELP_EVENTS
        watch.look_ns = now_ns + self._guard_pause_ns(watch, now_ns)

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
        hung = []
        pending = []
        lanes = set()
        for watch in self._watches:
            if watch.lane not in lanes and watch.event.query():
                done.append(watch)
            elif now_ns >= watch.hung_ns:
                hung.append(watch)
            else:
                pending.append(watch)
                if watch.lane is not None:
                    lanes.add(watch.lane)
                if not watch.calls and watch.late_ns < now_ns >= watch.look_ns:
                    pause_ns = (now_ns - watch.start_ns) >> 8
                    watch.look_ns = now_ns + min(max(pause_ns, LATE_PAUSE_NS_MIN), LATE_PAUSE_NS_MAX)
        self._watches = pending
        if done and self._help_events:
            self._help_events -= 1
        for watch in done:
            watch.on_done()
        for watch in hung:
            if watch.on_hung is not None:
                watch.on_hung()
        self._plan(now_ns)

    def _plan(self, now_ns: int) -> None:
        """Be back at the next look, or at the next tick if one is due. The guard can wait for the alarm."""
        if not self._watches:
            return
        first = min(self._watches, key=_look_ns)
        due = self._waiting == "spin" or self._is_due(now_ns)
        if due and not self._tick_is_scheduled:
            self._tick_is_scheduled = True
            self._loop.call_soon(self._tick)
        elif not due:
            left_ns = first.look_ns - now_ns
            # Neither the guard nor looks at what is late have to be punctual.
            dozes = left_ns > DOZE_NS_MIN and not first.calls and now_ns < first.late_ns
            self._alarm.set(now_ns + left_ns * 7 // 8 if dozes else first.look_ns)

    def _is_due(self, now_ns: int) -> bool:
        """Whether to look at the next tick: for what may be done, or because others keep the loop awake."""
        for watch in self._watches:
            if not watch.calls and (
                watch.look_ns <= now_ns or (self._quiet_ticks < QUIET_TICKS and now_ns < watch.late_ns)
            ):
                return True
        return False


def _look_ns(watch: _Watch) -> int:
    return watch.look_ns
