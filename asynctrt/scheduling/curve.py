"""How long batches take by their rows, on the late side: what most batches of a size were done within.

:class:`~asynctrt.scheduling.estimates.LatencyHistory` errs on the early side, which is right for looking
whether something has ended. What is promised for a time has to err on the other.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final

WINDOW: Final = 16
SAMPLES_MIN: Final = 4
"""Batches that say something of a size; fewer of several sizes say something together."""
LATE_QUANTILE: Final = 0.9
FORGOTTEN_AFTER: Final = 128
"""Batches of a shape after which a size is forgotten that has not been seen again. What is said to take too
long is not tried any more, so a time that is not true any more would never be seen to be wrong."""
MOST_EVERY: Final = 256
"""Batches after which it is looked for the longest anew."""
SHAPES_MAX: Final = 256


class _Times:
    """The last durations of batches of one shape, by their rows and by the bits of these."""

    __slots__ = (
        "_by_bits",
        "_by_rows",
        "_known",
        "_points",
        "_seen",
        "_seen_at",
        "most_ns",
    )

    def __init__(self) -> None:
        self._by_rows: dict[int, deque[int]] = {}
        self._by_bits: dict[int, deque[tuple[int, int]]] = {}
        # How many batches were seen, and how many when each size was, the one seen longest ago first.
        self._seen = 0
        self._seen_at: OrderedDict[int, int] = OrderedDict()
        self.most_ns = 0
        """Nothing that is remembered took longer."""
        self._known: dict[int, int | None] = {}
        self._points: list[tuple[int, int]] | None = None

    def observe(self, rows: int, took_ns: int) -> None:
        window = self._by_rows.get(rows)
        if window is None:
            window = self._by_rows[rows] = deque(maxlen=WINDOW)
        window.append(took_ns)
        together = self._by_bits.get(rows.bit_length())
        if together is None:
            together = self._by_bits[rows.bit_length()] = deque(maxlen=WINDOW)
        together.append((rows, took_ns))
        self._seen += 1
        self._seen_at[rows] = self._seen
        self._seen_at.move_to_end(rows)
        while self._seen - next(iter(self._seen_at.values())) > FORGOTTEN_AFTER:
            self._forget(self._seen_at.popitem(last=False)[0])
        if took_ns > self.most_ns:
            self.most_ns = took_ns
        elif not self._seen % MOST_EVERY:
            self.most_ns = max(max(window) for window in self._by_rows.values())
        if self._points is not None or self._known:
            self._known.clear()
            self._points = None

    def _forget(self, rows: int) -> None:
        del self._by_rows[rows]
        together = self._by_bits[rows.bit_length()]
        left = [entry for entry in together if entry[0] != rows]
        together.clear()
        together.extend(left)

    def late_ns(self, rows: int) -> int | None:
        if rows not in self._known:
            self._known[rows] = self._between(rows)
        return self._known[rows]

    def _between(self, rows: int) -> int | None:
        points = self.points()
        if not points:
            return None
        at = bisect_left(points, (rows, 0))
        if at == len(points):
            return points[-1][1]
        above, above_ns = points[at]
        if at == 0 or above == rows:
            return above_ns
        below, below_ns = points[at - 1]
        return below_ns + (above_ns - below_ns) * (rows - below) // (above - below)

    def _value(self, window: "deque[int] | list[int]") -> int:
        return sorted(window)[int(len(window) * LATE_QUANTILE)]

    def points(self) -> list[tuple[int, int]]:
        """Return the sizes of which enough is known, with their times, both rising.

        Where no size of a power of two up to the next is known by itself, all of those together are a point.
        """
        if self._points is not None:
            return self._points
        found: dict[int, int] = {}
        bits = set()
        for rows, window in self._by_rows.items():
            if len(window) >= SAMPLES_MIN:
                found[rows] = self._value(window)
                bits.add(rows.bit_length())
        for size, together in self._by_bits.items():
            if size not in bits and len(together) >= SAMPLES_MIN:
                # The largest of them, as this is to be no shorter than what any of them takes.
                found[max(rows for rows, _ in together)] = self._value([took_ns for _, took_ns in together])
        points = self._points = []
        most_ns = 0
        for rows, took_ns in sorted(found.items()):
            most_ns = max(most_ns, took_ns)
            points.append((rows, most_ns))
        return points


class ServiceCurve:
    """What batches of each shape take at most, as a rule, by their rows.

    More rows never take less. Between the sizes of which enough is known it is a straight line; below the
    smallest it is the time of that one, and so above the largest, of which nothing longer was ever seen.
    """

    __slots__ = ("_shapes",)

    def __init__(self) -> None:
        self._shapes: OrderedDict[Hashable, _Times] = OrderedDict()

    def observe(self, shape: Hashable, rows: int, took_ns: int) -> None:
        """Remember how long a batch took. The least recently seen shape makes room for a new one."""
        times = self._shapes.get(shape)
        if times is None:
            times = self._shapes[shape] = _Times()
            if len(self._shapes) > SHAPES_MAX:
                self._shapes.popitem(last=False)
        if len(self._shapes) > 1:
            self._shapes.move_to_end(shape)
        times.observe(rows, took_ns)

    def forget(self, shape: Hashable) -> None:
        """Forget all batches of a shape."""
        self._shapes.pop(shape, None)

    def late_ns(self, shape: Hashable, rows: int) -> int | None:
        """Return what a batch takes at most, as a rule; ``None`` until enough were seen."""
        times = self._shapes.get(shape)
        return None if times is None else times.late_ns(rows)

    def most_ns(self, shape: Hashable) -> int | None:
        """Return what no batch of any size takes longer than, as a rule; ``None`` before any was seen."""
        times = self._shapes.get(shape)
        return None if times is None else times.most_ns
