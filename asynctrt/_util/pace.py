"""Whether work is so short that a thread for it is not worth it, as measured."""

import threading
from collections import deque
from collections.abc import Hashable
from typing import Final

HOLD_MIN: Final = 4
HOLD_MAX: Final = 1024
"""Runs that work stays in the thread for, after the first and after many that held up the loop."""

FORGIVEN_AFTER: Final = 1024
"""Short runs in place after which work that had held up the loop counts as short again: the system holds up
any process now and then, whatever it runs."""


class Pace:
    """How long the latest runs of some work took, and so whether to run it in place.

    :param short_ns: about what giving the work to a thread and hearing back from it costs.
    """

    __slots__ = ("_hold", "_holding", "_in_place", "_recent", "_short_ns", "is_short")

    def __init__(self, short_ns: int) -> None:
        self._short_ns = short_ns
        self._recent: deque[int] = deque(maxlen=8)
        self._hold = HOLD_MIN
        self._holding = HOLD_MIN
        self._in_place = 0
        self.is_short = False
        """Whether to run it in place."""

    def observe(self, duration_ns: int, *, in_place: bool) -> None:
        """Note how long a run took."""
        self._recent.append(duration_ns)
        if self._holding:
            self._holding -= 1
        if in_place:
            if duration_ns > 4 * self._short_ns:
                # It held the loop. Each time it does, it stays in the thread for twice as many runs.
                self._recent.clear()
                self._hold = self._holding = min(2 * self._hold, HOLD_MAX)
                self._in_place = 0
                self.is_short = False
                return
            if self._hold > HOLD_MIN:
                self._in_place += 1
                if self._in_place == FORGIVEN_AFTER:
                    self._hold = HOLD_MIN
        # The shortest of several runs, because a run in a thread also counts its wait for the GIL.
        self.is_short = not self._holding and (
            duration_ns < self._short_ns or min(self._recent) < self._short_ns
        )


class Paces:
    """The paces of several kinds of work, which any thread may run.

    :param short_ns: as of :class:`Pace`.
    :param labels_max: how many kinds are remembered.
    """

    def __init__(self, short_ns: int, labels_max: int) -> None:
        self._short_ns = short_ns
        self._labels_max = labels_max
        self._paces: dict[Hashable, Pace] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._paces)

    def is_short(self, label: Hashable) -> bool:
        """Return whether to run work with this label in place."""
        pace = self._paces.get(label)
        return pace is not None and pace.is_short

    def observe(self, label: Hashable, duration_ns: int, *, in_place: bool) -> None:
        """Note how long a run of it took."""
        with self._lock:
            pace = self._paces.get(label)
            if pace is None:
                if len(self._paces) >= self._labels_max:
                    self._paces.clear()
                pace = self._paces[label] = Pace(self._short_ns)
            pace.observe(duration_ns, in_place=in_place)
