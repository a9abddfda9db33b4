"""Measure whether work is too short to be worth running in a thread."""

import sys
import threading
from collections import deque
from collections.abc import Hashable
from typing import Final

GIL: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether this Python runs one thread at a time."""

HOLD_MIN: Final = 4
HOLD_MAX: Final = 1024
"""The number of runs for which work stays in the thread: at first, and after many runs that held up the loop.
"""

FORGIVEN_AFTER: Final = 32
"""The number of short runs in place after which earlier long runs are forgotten. On a machine that others use
too, the system delays up to one run in a hundred, whatever it runs; work that is itself long in one run of
twenty still stays in the thread."""


class InlinePolicy:
    """The durations of the latest runs of some work, which decide whether to run it in place.

    :param short_ns: the approximate cost of handing work to a thread and getting its result.
    """

    __slots__ = ("_hold", "_holding", "_in_place", "_recent", "_short_ns", "is_settled", "is_short")

    def __init__(self, short_ns: int) -> None:
        self._short_ns = short_ns
        self._recent: deque[int] = deque(maxlen=8)
        self._hold = HOLD_MIN
        self._holding = HOLD_MIN
        self._in_place = 0
        self.is_short = False
        """Whether to run it in place."""
        self.is_settled = False
        """Whether it is run in place, and one more short run there says nothing new."""

    def observe(self, duration_ns: int, *, in_place: bool) -> None:
        """Record the duration of a run."""
        self._recent.append(duration_ns)
        if self._holding:
            self._holding -= 1
        if in_place:
            if duration_ns > 4 * self._short_ns:
                # It held up the loop. Each time, it stays in the thread for twice the number of runs.
                self._recent.clear()
                self._hold = self._holding = min(2 * self._hold, HOLD_MAX)
                self._in_place = 0
                self.is_short = self.is_settled = False
                return
            if self._hold > HOLD_MIN:
                self._in_place += 1
                if self._in_place == FORGIVEN_AFTER:
                    self._hold = HOLD_MIN
        # Use the shortest of several runs, because a run in a thread includes its wait for the GIL.
        self.is_short = not self._holding and (
            duration_ns < self._short_ns or min(self._recent) < self._short_ns
        )
        self.is_settled = self.is_short and self._hold == HOLD_MIN


class Paces:
    """The paces of several kinds of work, which any thread may run.

    :param short_ns: as for :class:`InlinePolicy`.
    :param labels_max: the number of kinds to remember.
    """

    def __init__(self, short_ns: int, labels_max: int) -> None:
        self._short_ns = short_ns
        self._labels_max = labels_max
        self._paces: dict[Hashable, InlinePolicy] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._paces)

    def is_short(self, label: Hashable) -> bool:
        """Return whether to run work with this label in place."""
        pace = self._paces.get(label)
        return pace is not None and pace.is_short

    def observe(self, label: Hashable, duration_ns: int, *, in_place: bool) -> None:
        """Record the duration of a run of work with this label."""
        pace = self._paces.get(label)
        if in_place and pace is not None and pace.is_settled and duration_ns < self._short_ns:
            return  # Usual, so neither the lock nor the run is worth its time.
        with self._lock:
            pace = self._paces.get(label)
            if pace is None:
                if len(self._paces) >= self._labels_max:
                    self._paces.clear()
                pace = self._paces[label] = InlinePolicy(self._short_ns)
            pace.observe(duration_ns, in_place=in_place)
