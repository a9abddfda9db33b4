"""Devices without callbacks: when to query an event, and how long the loop may sleep until then."""

from collections.abc import Sequence
from typing import Final

from asynctrt.runtime.completion.watcher import Watch

LATE_NS: Final = 5_000_000
LATE_PAUSE_NS_MIN: Final = 60_000
LATE_PAUSE_NS_MAX: Final = 1_000_000
"""A batch later than LATE_NS is looked at with pauses, not every tick; they grow with its lateness."""

MARGIN_NS_MIN: Final = 30_000
MARGIN_NS_MAX: Final = 150_000
"""How long before the expected end looks begin: a 20th of the expected time, within these bounds."""

DOZE_NS_MIN: Final = 150_000
"""A longer sleep is split into seven eighths and a separate sleep for the rest: a short sleep ends more
punctually than a long one (tests/benchmarks/lateness.py)."""

LOOKS: Final = 4
"""The number of looks in one tick of a loop without other work: a tick takes as long as two looks."""

BUSY_TICK_NS: Final = 20_000
"""A tick longer than this did other work as well, so the loop would not have slept anyway."""

QUIET_TICKS: Final = 2
"""After this many ticks in a row without other work, the loop may sleep until the next look is due."""


class Poller:
    """Decides when to look at events of a device without callbacks."""

    def __init__(self) -> None:
        self._tick_ns = 0
        self._quiet_ticks = 0

    def begin(self, watch: Watch) -> None:
        """Plan the first look at a new event."""
        margin_ns = min(max(MARGIN_NS_MIN, watch.expected_ns // 20), MARGIN_NS_MAX)
        watch.look_ns = watch.start_ns + max(watch.expected_ns - margin_ns, 0)
        watch.late_ns = watch.look_ns + LATE_NS
        self._tick_ns, self._quiet_ticks = watch.start_ns, 0

    def tick(self, now_ns: int) -> int:
        """Record the start of a tick, and return how often to query in it."""
        if now_ns - self._tick_ns > BUSY_TICK_NS:
            self._quiet_ticks = 0
        else:
            self._quiet_ticks += 1
        self._tick_ns = now_ns
        return LOOKS if self._quiet_ticks > QUIET_TICKS else 1

    def postpone(self, watches: Sequence[Watch], now_ns: int) -> None:
        """Plan the next look at late events."""
        for watch in watches:
            if not watch.calls and watch.late_ns < now_ns >= watch.look_ns:
                pause_ns = (now_ns - watch.start_ns) >> 8
                watch.look_ns = now_ns + min(max(pause_ns, LATE_PAUSE_NS_MIN), LATE_PAUSE_NS_MAX)

    def is_due(self, watches: Sequence[Watch], now_ns: int) -> bool:
        """Return whether to look at the next tick: an event may be done, or other work occupies the loop."""
        for watch in watches:
            if not watch.calls and (
                watch.look_ns <= now_ns or (self._quiet_ticks < QUIET_TICKS and now_ns < watch.late_ns)
            ):
                return True
        return False

    def sleep_until_ns(self, watch: Watch, now_ns: int) -> int:
        """Return when to end the sleep before the next look."""
        left_ns = watch.look_ns - now_ns
        # Looks of the guard and looks at late events need not be punctual.
        if left_ns <= DOZE_NS_MIN or watch.calls or now_ns >= watch.late_ns:
            return watch.look_ns
        return now_ns + left_ns * 7 // 8
