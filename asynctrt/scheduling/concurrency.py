"""How many batches compute side by side on a device that they share, and in which lane each one computes.

Batches in one *lane* compute one after the other, each while the next one is copied in. More lanes pay off
where a batch leaves much of the device idle, and cost latency where it does not: four batches that fill a GPU
take four times as long side by side. How many lanes pay off is measured once, when the engine opens, for
batches that may still grow and for full ones: a full batch cannot gain by waiting, the others can.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from asynctrt.scheduling.batch import Batch, Flight
from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.key import BatchKey

GROWING_GAIN: Final = 1.5
FULL_GAIN: Final = 1.15
"""How much more work twice the lanes must do in the same time: each batch takes longer in exchange."""

STUCK_NS_MIN: Final = 50_000_000
STUCK_TIMES: Final = 4
"""A batch that has been under way for this many times its expected time, and for this long, may hang. New
batches then use another lane instead of waiting for it."""

AHEAD_MAX: Final = 1
"""Batches that are not full and are launched ahead of time, while others compute."""

ENQUEUE_SHARE: Final = 0.5
"""Putting a batch on the device takes long from this share of the time for which it computes."""

LEAD_MARGIN_NS: Final = 100_000
LEAD_MARGIN_NS_MAX: Final = 250_000
"""How long before it is needed a batch is in place, as far as can be told, at first and at most: what is late
leaves a device idle, and what is early has missed some requests."""

IN_TIME_NS: Final = 10_000
"""A batch that was in place for less than this before its turn was late."""

LATE_STEP_NS: Final = 6_000
EARLY_STEP_NS: Final = 2_000
"""By how much the margin grows with a batch that was late, and shrinks with one that was not, so that about
one in four is late. A late batch leaves the device idle, which delays every request that waits; an early one
only misses requests that arrive a little later."""


class Lanes(NamedTuple):
    """How many batches compute side by side."""

    growing: tuple[tuple[int, int], ...] = ()
    """For batches that may still grow: pairs of rows, rising, and the lanes for batches of up to that many.
    Batches with more rows, of smaller shapes, have the lanes of the last pair."""
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

    def by_rows(self, rows_max: int) -> dict[int, int]:
        """Return the lanes of batches, by the largest number of rows for which they hold."""
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


def lanes_that_pay(
    rate_of: Callable[[int], float], lanes_max: int, gain_min: float, *, lanes: int = 1
) -> int:
    """Return how many lanes pay off: doubled while twice as many do ``gain_min`` times the work.

    :param rate_of: returns the work done in the same time with a number of lanes.
    :param lanes: as many pay off in any case.
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
    """Where batches compute one after the other: a lane, or an arena.

    When a batch is seen to end, the expected ends of all batches behind it move with it, so errors do not
    accumulate.
    """

    __slots__ = ("computed_ns", "flights", "is_stuck")

    def __init__(self) -> None:
        self.flights: list[Flight] = []
        """The batches that compute here, or wait to, in the order of their launch."""
        self.computed_ns = 0
        """Until when it is known to have computed."""
        self.is_stuck = False
        """Whether one of them seems to hang."""

    def free_ns(self) -> int:
        """Return when all batches in it should have computed; this errs on the early side."""
        free_ns = self.computed_ns
        for flight in self.flights:
            if flight.takes_ns is not None:
                free_ns = max(free_ns, flight.ready_ns) + flight.takes_ns
        return free_ns

    def free_late_ns(self, late_ns: Callable[[Flight], int]) -> int:
        """Return what :meth:`free_ns` does, on the late side.

        :param late_ns: returns the time within which most batches like this one compute.
        """
        free_ns = self.computed_ns
        for flight in self.flights:
            if flight.takes_ns:
                free_ns = max(free_ns, flight.ready_ns) + max(flight.takes_ns, late_ns(flight))
        return free_ns

    def landed(self, number: int, computed_ns: int) -> None:
        """Note that a batch has computed. So have those before it, whose outputs may still be copied."""
        for flight in self.flights:
            if flight.number <= number:
                flight.takes_ns = flight.ready_ns = 0
        self.computed_ns = max(self.computed_ns, computed_ns)


class Concurrency:
    """The lines of one engine: where each batch computes, when they are done, and when the next is launched.

    :param times: how long batches take.
    :param lanes: how many batches compute side by side, on a device that shares itself among them.
    :param lanes_max: the lanes that exist there: while one hangs, another takes its place. 0: on this device
        batches in one arena compute one after the other, and others at once.
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
        self._margin_ns = LEAD_MARGIN_NS

    def __repr__(self) -> str:
        return f"<Concurrency {[len(line.flights) for line in self.lines]}>"

    def allowed(self, rows: int, rows_max: int) -> int:
        """Return the lanes for a batch of ``rows`` where ``rows_max`` make it full."""
        return min(self._lanes.allowed(rows, rows_max), len(self.lines))

    @property
    def occupied(self) -> int:
        """Return how many batches compute, or wait to, in lanes that are not stuck."""
        return sum([len(line.flights) for line in self.lines if not line.is_stuck])

    @property
    def in_use(self) -> int:
        """Return how many lanes have batches."""
        return sum([bool(line.flights) for line in self.lines])

    def usable(self, count: int) -> list[Line]:
        """Return up to ``count`` lanes that are not stuck."""
        return [line for line in self.lines if not line.is_stuck][:count]

    def acquire(self, count: int) -> int:
        """Return the lane for a batch that is launched now: of ``count``, the one with the fewest batches;
        among those, if each has some, the one that is done first."""
        usable = self.usable(count) or self.lines
        fewest = min([len(line.flights) for line in usable])
        equals = [line for line in usable if len(line.flights) == fewest]
        return self.lines.index(min(equals, key=Line.free_ns) if fewest else equals[0])

    def line_of(self, batch: Batch) -> Line | None:
        """Return the line of a batch; ``None`` if it waits for no other."""
        number = batch.lane if self.has_lanes else batch.arena
        return None if number is None else self.lines[number]

    def launched(self, batch: Batch) -> None:
        """Note that a batch is on its way to its line."""
        line = self.line_of(batch)
        if line is not None:
            batch.flight.stuck_ns = batch.launched_ns + STUCK_NS_MIN
            batch.flight.is_in_line = True
            line.flights.append(batch.flight)

    def started(self, batch: Batch, now_ns: int, put_ns: int | None = None) -> int | None:
        """Note that a batch is on its stream.

        :param put_ns: when the first of it was put there, if that took a while. From then on it computes, if
            it can.
        :returns: in how many ns it is expected to be done; ``None`` if none like it was seen yet.
        """
        times, rows, copies, flight = self._times, batch.rows_run, batch.key.copy_key, batch.flight
        put_ns = now_ns if put_ns is None else put_ns
        flight.is_staged = True
        if self.has_lanes:
            times.observe_start(batch, put_ns, now_ns)
        compute_ns = times.compute.typical(batch.key.shape, rows)
        if compute_ns is None:
            return None
        flight.ready_ns, flight.takes_ns = put_ns + (times.copy_in.typical(copies, rows) or 0), compute_ns
        line = self.line_of(batch) if self.lines else None
        ends_ns = flight.ready_ns + compute_ns if line is None else line.free_ns()
        flight.ends_ns = ends_ns = max(ends_ns + (times.copy_out.typical(copies, rows) or 0), now_ns)
        expected_ns = ends_ns - now_ns
        if line is not None:
            flight.stuck_ns = max(flight.stuck_ns, now_ns + STUCK_TIMES * expected_ns)
        return expected_ns

    def landed(self, batch: Batch, now_ns: int) -> None:
        """Note that the device is done with a batch. Those behind it move with it."""
        line = self.line_of(batch)
        if line is not None:
            line.landed(batch.number, now_ns - self._times.copy_out_ns(batch.key, batch.rows_run))
            if self.has_lanes:
                self.left(batch)

    def left(self, batch: Batch) -> None:
        """Note that a batch is in its line no more: it has ended, or failed. Idempotent."""
        line, flight = self.line_of(batch), batch.flight
        if line is not None and flight.is_in_line:
            line.flights.remove(flight)
            flight.is_in_line = False
            line.is_stuck = False

    def observe_wait(self, batch: Batch, wait_ns: int) -> None:
        """Adjust the margin with which batches are launched just in time.

        :param wait_ns: how long the device waited for the batches before it, once it had been copied in.
        """
        if batch.flight.was_due:
            step_ns = LATE_STEP_NS if wait_ns < IN_TIME_NS else -EARLY_STEP_NS
            self._margin_ns = min(max(self._margin_ns + step_ns, 0), LEAD_MARGIN_NS_MAX)

    def lead_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long before the device can compute a batch it must be launched."""
        return self._times.lead_ns(key, rows) + self._margin_ns

    def due_ns(self, key: BatchKey, rows: int, rows_max: int, now_ns: int) -> int | None:
        """Return the latest time to launch a batch that may still grow; ``None``: now.

        That is just in time for the first lane to become free, as long as no other batch waits for it.
        """
        count = self.allowed(rows, rows_max)
        if self.occupied < count:
            return None
        stuck_ns = self._find_stuck(now_ns)
        over = self.occupied - count
        if over < 0 or stuck_ns is None:
            return None
        usable = self.usable(count)
        flights = [flight for line in self.lines if not line.is_stuck for flight in line.flights]
        is_next = over < AHEAD_MAX and all(flight.is_staged for flight in flights)
        if not is_next or self._is_put_slowly(key, rows):
            return stuck_ns
        if any(flight.takes_ns is None for flight in flights):
            return None
        return min(stuck_ns, min([line.free_ns() for line in usable]) - self.lead_ns(key, rows))

    def _find_stuck(self, now_ns: int) -> int | None:
        """Find lanes with a batch that seems to hang; return when the next one may be found."""
        next_ns: int | None = None
        for line in self.lines:
            if line.is_stuck or not line.flights:
                continue
            stuck_ns = min([flight.stuck_ns for flight in line.flights])
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
