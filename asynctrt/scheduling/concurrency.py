"""How many batches compute side by side on a device that they share, and in which lane each one computes.

Batches in one *lane* compute one after the other, each while the next one is copied in. More lanes pay off
where a batch leaves much of the device idle, and cost latency where it does not: four batches that fill a GPU
take four times as long side by side. How many lanes pay off is measured once, when the engine opens, for
batches that may still grow and for full ones: a full batch cannot gain by waiting, the others can.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from asynctrt.scheduling.batch import Batch

GROWING_GAIN: Final = 1.5
FULL_GAIN: Final = 1.15
"""How much more work twice the lanes must do in the same time: each batch takes longer in exchange."""

STUCK_NS_MIN: Final = 50_000_000
STUCK_TIMES: Final = 4
"""A batch that has been under way for this many times its expected time, and for this long, may hang. New
batches then use another lane instead of waiting for it."""


class Lanes(NamedTuple):
    """How many batches compute side by side."""

    growing: tuple[tuple[int, int], ...] = ()
    """For batches that may still grow: rows, rising, and the lanes for batches of up to so many rows. Larger
    ones have one lane."""
    full: int = 1
    """For full batches."""

    @classmethod
    def fixed(cls, count: int, rows_max: int) -> "Lanes":
        """Return the same number for all batches of up to ``rows_max`` rows."""
        return cls(((rows_max, count),), count)

    def allowed(self, rows: int, rows_max: int) -> int:
        """Return the lanes for a batch of ``rows`` where ``rows_max`` make it full."""
        if rows >= rows_max:
            return self.full
        for most, count in self.growing:
            if rows <= most:
                return count
        return 1

    def by_rows(self, rows_max: int) -> dict[int, int]:
        """Return the lanes by the largest batches that have so many."""
        found: dict[int, int] = {}
        for rows in (*[most for most, _ in self.growing if most < rows_max], rows_max - 1, rows_max):
            if rows < 1:
                continue
            lanes = self.allowed(rows, rows_max)
            if found and next(reversed(found.values())) == lanes:
                found.popitem()
            found[rows] = lanes
        return found


ONE_LANE: Final = Lanes()


class Rate(NamedTuple):
    """What a device did in the same time with some lanes, as measured when the engine opened."""

    rows: int
    """The rows of each batch."""
    lanes: int
    rows_per_s: float


def lanes_that_pay(rate_of: Callable[[int], float], lanes_max: int, gain_min: float) -> int:
    """Return how many lanes pay off: doubled while twice as many do ``gain_min`` times the work.

    :param rate_of: returns the work done in the same time with a number of lanes.
    """
    lanes = 1
    while lanes < lanes_max:
        more = min(2 * lanes, lanes_max)
        # The last step may be less than a doubling, and must gain accordingly less.
        if rate_of(more) < (1 + (gain_min - 1) * (more / lanes - 1)) * rate_of(lanes):
            break
        lanes = more
    return lanes


def choose_lanes(
    sizes: Sequence[int], rate_of: Callable[[int, int], float | None], rows_max: int, lanes_max: int
) -> Lanes:
    """Return the lanes that pay off.

    :param sizes: the batch sizes that can be measured, rising, the largest being a full batch.
    :param rate_of: returns the work done in the same time with batches of some rows in a number of lanes;
        ``None`` if that could not be measured.
    """
    growing: list[tuple[int, int]] = []
    full = least = 1
    for rows in reversed(sizes):

        def rate(lanes: int, rows: int = rows) -> float:
            return rate_of(rows, lanes) or 0.0

        if not rate(1):
            break
        if rows == sizes[-1]:
            full = lanes_that_pay(rate, lanes_max, FULL_GAIN)
        # Smaller batches leave more of the device idle, so they never have fewer lanes.
        least = max(least, lanes_that_pay(rate, lanes_max, GROWING_GAIN))
        growing.append((min(rows, rows_max), least))
    return Lanes(tuple(reversed(growing)), full)


class Concurrency:
    """The lanes of one engine: which one a batch goes to, and which ones seem to hang.

    :param lanes: how many batches compute side by side.
    :param lanes_max: the lanes that exist: while one hangs, another takes its place.
    """

    def __init__(self, lanes: Lanes, lanes_max: int) -> None:
        self._lanes = lanes
        self._users = [0] * lanes_max
        # The lane of each batch that is to compute or does, and when the batch counts as stuck.
        self._inside: dict[int, tuple[int, int]] = {}
        self._stuck: set[int] = set()

    def __repr__(self) -> str:
        return f"<Concurrency {self._users}>"

    def allowed(self, rows: int, rows_max: int) -> int:
        """Return the lanes for a batch of ``rows`` where ``rows_max`` make it full."""
        return min(self._lanes.allowed(rows, rows_max), len(self._users))

    @property
    def occupied(self) -> int:
        """Return how many batches are to compute, or do, in lanes that are not stuck."""
        if not self._stuck:
            return len(self._inside)
        return sum(lane not in self._stuck for lane, _ in self._inside.values())

    @property
    def in_use(self) -> int:
        """Return how many lanes have batches."""
        return len(self._users) - self._users.count(0)

    def usable(self, count: int) -> Sequence[int]:
        """Return up to ``count`` lanes that are not stuck."""
        if not self._stuck:
            return range(count)
        return [lane for lane in range(len(self._users)) if lane not in self._stuck][:count]

    def acquire(self, count: int, free_ns: Callable[[int], int]) -> int:
        """Return the lane for a batch that is launched now: of ``count``, the one with the fewest batches.

        :param free_ns: returns when a lane is expected to have computed all that is in it, which decides
            between lanes with as many batches.
        """
        lanes = self.usable(count) or range(len(self._users))
        if len(lanes) == 1:
            return lanes[0]
        users = self._users
        fewest = min([users[lane] for lane in lanes])
        equals = [lane for lane in lanes if users[lane] == fewest]
        return min(equals, key=free_ns) if fewest else equals[0]

    def launched(self, batch: Batch) -> None:
        """Note that a batch is on its way into the lane that :meth:`acquire` returned."""
        assert batch.lane is not None
        self._users[batch.lane] += 1
        self._inside[batch.number] = batch.lane, batch.launched_ns + STUCK_NS_MIN

    def expect(self, batch: Batch, now_ns: int, expected_ns: int) -> None:
        """Note in how many ns a batch is expected to be done."""
        lane, stuck_ns = self._inside[batch.number]
        self._inside[batch.number] = lane, max(stuck_ns, now_ns + STUCK_TIMES * expected_ns)

    def find_stuck(self, now_ns: int) -> int | None:
        """Find lanes with a batch that seems to hang; return when the next one may be found."""
        next_ns = None
        for lane, stuck_ns in self._inside.values():
            if lane in self._stuck:
                continue
            if stuck_ns <= now_ns:
                self._stuck.add(lane)
            elif next_ns is None or stuck_ns < next_ns:
                next_ns = stuck_ns
        return next_ns

    def left(self, batch: Batch) -> None:
        """Note that a batch has computed, or failed. Idempotent."""
        inside = self._inside.pop(batch.number, None)
        if inside is not None:
            self._stuck.discard(inside[0])
            self._users[inside[0]] -= 1
