"""How many batches compute side by side on one device, and in which lane each one computes.

Batches in one *lane* compute one after the other, each while the next one is copied in. More lanes pay off
if a batch leaves much of the device idle, and cost latency if it does not: four batches that each fill a GPU
take four times as long side by side. How many lanes pay off is measured once, when the engine opens, and
separately for full batches and for batches that may still grow, since only the latter gain by waiting.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.key import BatchKey

GROWING_GAIN: Final = 1.5
FULL_GAIN: Final = 1.15
"""The factor by which twice the lanes must increase the work done in the same time, because each batch takes
longer in exchange. A batch that may still grow could use the wait to take more rows, so it must gain much
more. A full batch gains nothing by waiting, so any gain clearly above the noise of the measurement is
enough."""

STUCK_NS_MIN: Final = 50_000_000
STUCK_TIMES: Final = 4
"""A batch that has been under way for this many times its expected time, and for at least this long, may
hang. New batches then use another lane instead of waiting for it. Both are far beyond usual variation, and a
false alarm costs little: for one batch, more lanes are used than pay off."""

ENQUEUE_SHARE: Final = 0.5
"""Enqueueing counts as slow if it takes at least this share of the compute time: a batch would then have to
be launched ahead so early that it could hardly grow. The exact share was not tuned."""

LEAD_MARGIN_NS: Final = 50_000
"""How long before its turn a batch should be in place. A late batch leaves the device idle, and an early one
misses requests. In simulated worlds whose timers and ends are seen up to 200 µs late, nothing between 0 and
100 µs, nor a margin learned from late batches, had a better p99."""


class Lanes(NamedTuple):
    """How many batches compute side by side."""

    growing: tuple[tuple[int, int], ...] = ()
    """For batches that may still grow: pairs of a number of rows, rising, and the lanes for batches of up to
    that many rows. Batches with even more rows, of smaller shapes, have the lanes of the last pair."""
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
        return self.growing[-1][1] if self.growing else 1

    @property
    def are_one(self) -> bool:
        """Return whether no batches compute side by side."""
        return self.full == 1 and all(count == 1 for _, count in self.growing)

    def by_rows(self, rows_max: int) -> dict[int, int]:
        """Return the number of lanes, by the largest number of rows for which it holds."""
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
    """How fast a device was with a number of lanes, as measured when the engine opened."""

    rows: int
    """The rows of each batch."""
    lanes: int
    rows_per_s: float


def lanes_that_pay(
    rate_of: Callable[[int], float], lanes_max: int, gain_min: float, *, lanes: int = 1
) -> int:
    """Return how many lanes pay off: double them while that gives ``gain_min`` times the work.

    :param rate_of: returns the work done in the same time with a number of lanes.
    :param lanes: the number that pays off in any case.
    """
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
        least = lanes_that_pay(rate, lanes_max, GROWING_GAIN, lanes=least)
        growing.append((min(rows, rows_max), least))
    return Lanes(tuple(reversed(growing)), full)


class Line:
    """A queue of batches that compute one after the other: a lane, or an arena.

    When a batch ends, the expected ends of all batches behind it are corrected, so errors do not accumulate.
    """

    __slots__ = ("batches", "computed_ns", "is_stuck")

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        """The batches that compute here, or wait to, in the order of their launch."""
        self.computed_ns = 0
        """The latest time at which a batch here is known to have computed."""
        self.is_stuck = False
        """Whether one of them seems to hang."""

    def free_ns(self) -> int:
        """Return when all batches in it should have computed; this errs on the early side."""
        free_ns = self.computed_ns
        for batch in self.batches:
            if batch.takes_ns is not None:
                free_ns = max(free_ns, batch.ready_ns) + batch.takes_ns
        return free_ns

    def free_late_ns(self, late_ns: Callable[[Batch], int]) -> int:
        """Return the same as :meth:`free_ns`, but erring on the late side.

        :param late_ns: returns the time within which most batches like this one compute.
        """
        free_ns = self.computed_ns
        for batch in self.batches:
            if batch.takes_ns:
                free_ns = max(free_ns, batch.ready_ns) + max(batch.takes_ns, late_ns(batch))
        return free_ns

    def landed(self, number: int, computed_ns: int) -> None:
        """Note that a batch has computed, and so have all before it, whose outputs may still be copied."""
        for batch in self.batches:
            if batch.number <= number:
                batch.takes_ns = batch.ready_ns = 0
        self.computed_ns = max(self.computed_ns, computed_ns)


class Concurrency:
    """The lines of one engine: where each batch computes, when it will end, and when to launch the next one.

    :param times: how long batches take.
    :param lanes: how many batches compute side by side.
    :param lanes_max: how many lanes exist; while one hangs, another takes its place. 0 on a device that
        orders batches itself: one after the other in an arena, and otherwise at once.
    :param arenas: how many arenas there are.
    :param may_put_slowly: whether it may take as long to put batches on the device as to compute them.
    """

    def __init__(
        self,
        times: BatchTimes,
        *,
        lanes: Lanes = ONE_LANE,
        lanes_max: int = 0,
        arenas: int = 0,
        may_put_slowly: bool = False,
    ) -> None:
        self._times = times
        self._lanes = lanes
        self.has_lanes = lanes_max > 0
        """Whether the engine decides which batches compute side by side."""
        self.lines = [Line() for _ in range(lanes_max or arenas)]
        self._may_put_slowly = may_put_slowly

    def __repr__(self) -> str:
        return f"<Concurrency {[len(line.batches) for line in self.lines]}>"

    def allowed(self, rows: int, rows_max: int) -> int:
        """Return the lanes for a batch of ``rows`` where ``rows_max`` make it full."""
        return min(self._lanes.allowed(rows, rows_max), len(self.lines))

    @property
    def occupied(self) -> int:
        """Return how many batches compute, or wait to, in lanes that are not stuck."""
        return sum([len(line.batches) for line in self.lines if not line.is_stuck])

    def usable(self, count: int) -> list[Line]:
        """Return up to ``count`` lanes that are not stuck."""
        return [line for line in self.lines if not line.is_stuck][:count]

    def acquire(self, count: int) -> int:
        """Return the lane for a batch that is launched now: of ``count``, the one with the fewest batches,
        and of several that are equally full, the one that is free first."""
        usable = self.usable(count) or self.lines
        fewest = min([len(line.batches) for line in usable])
        equals = [line for line in usable if len(line.batches) == fewest]
        return self.lines.index(min(equals, key=Line.free_ns) if fewest else equals[0])

    def line_of(self, batch: Batch) -> Line | None:
        """Return the line of a batch; ``None`` if it waits for no other batch."""
        number = batch.lane if self.has_lanes else batch.arena
        return None if number is None else self.lines[number]

    def launched(self, batch: Batch) -> None:
        """Note that a batch is on its way to its line."""
        line = self.line_of(batch)
        if line is not None:
            batch.stuck_ns = batch.launched_ns + STUCK_NS_MIN
            batch.is_in_line = True
            line.batches.append(batch)

    def started(self, batch: Batch, now_ns: int, put_ns: int | None = None) -> int | None:
        """Note that a batch is on its stream.

        :param put_ns: when its first part was put there, if that took a while. It can compute from then on.
        :returns: in how many ns it is expected to end; ``None`` if no such batch was seen yet.
        """
        times, rows, copies = self._times, batch.rows_run, batch.key.copy_key
        put_ns = now_ns if put_ns is None else put_ns
        batch.is_staged = True
        if self.has_lanes:
            times.observe_start(batch, put_ns, now_ns)
        compute_ns = times.compute.typical(batch.key.shape, rows)
        if compute_ns is None:
            return None
        batch.ready_ns, batch.takes_ns = put_ns + (times.copy_in.typical(copies, rows) or 0), compute_ns
        line = self.line_of(batch) if self.lines else None
        ends_ns = batch.ready_ns + compute_ns if line is None else line.free_ns()
        batch.ends_ns = ends_ns = max(ends_ns + (times.copy_out.typical(copies, rows) or 0), now_ns)
        expected_ns = ends_ns - now_ns
        if line is not None:
            batch.stuck_ns = max(batch.stuck_ns, now_ns + STUCK_TIMES * expected_ns)
        return expected_ns

    def landed(self, batch: Batch, now_ns: int) -> None:
        """Note that the device has finished a batch, and correct the expected ends of the batches behind
        it."""
        line = self.line_of(batch)
        if line is not None:
            line.landed(batch.number, now_ns - self._times.copy_out_ns(batch.key, batch.rows_run))
            if self.has_lanes:
                self.left(batch)

    def left(self, batch: Batch) -> None:
        """Note that a batch has left its line, because it ended or failed. Idempotent."""
        line = self.line_of(batch)
        if line is not None and batch.is_in_line:
            line.batches.remove(batch)
            batch.is_in_line = False
            line.is_stuck = False

    def lead_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long before its turn a batch must be launched."""
        return self._times.lead_ns(key, rows) + LEAD_MARGIN_NS

    def due_ns(self, key: BatchKey, rows: int, rows_max: int, now_ns: int) -> int | None:
        """Return the latest time to launch a batch that may still grow; ``None`` to launch it now.

        It is then in place just as the first lane becomes free, unless another batch waits for that lane.
        """
        count = self.allowed(rows, rows_max)
        if self.occupied < count:
            return None
        stuck_ns = self._find_stuck(now_ns)
        over = self.occupied - count
        if over < 0 or stuck_ns is None:
            return None
        usable = self.usable(count)
        batches = [batch for line in self.lines if not line.is_stuck for batch in line.batches]
        # One that waits keeps the lanes busy; a second one would only miss requests that arrive meanwhile.
        is_next = not over and all(batch.is_staged for batch in batches)
        if not is_next or self._is_put_slowly(key, rows):
            return stuck_ns
        if any(batch.takes_ns is None for batch in batches):
            return None
        return min(stuck_ns, min([line.free_ns() for line in usable]) - self.lead_ns(key, rows))

    def _find_stuck(self, now_ns: int) -> int | None:
        """Mark lanes with a batch that seems to hang; return when the next one may be found."""
        next_ns: int | None = None
        for line in self.lines:
            if line.is_stuck or not line.batches:
                continue
            stuck_ns = min([batch.stuck_ns for batch in line.batches])
            if stuck_ns <= now_ns:
                line.is_stuck = True
            elif next_ns is None or stuck_ns < next_ns:
                next_ns = stuck_ns
        return next_ns

    def _is_put_slowly(self, key: BatchKey, rows: int) -> bool:
        """Return whether putting such a batch on the device takes about as long as computing it. Such batches
        are not launched ahead of time, as they could not grow any more."""
        if not self._may_put_slowly:
            return False
        compute_ns = self._times.compute.typical(key.shape, rows)
        put_ns = self._times.enqueue_ns(key, rows)
        return compute_ns is not None and 0 < ENQUEUE_SHARE * compute_ns <= put_ns
