"""The model of how long batches take, by their key and their rows. All predictions of time come from here.

The last few times of each size are kept, and give two values: ``typical``, a low quantile, for checking early
whether something has ended; and ``late``, a high quantile, for promises. One slow batch changes neither.
Sizes that were never seen are interpolated between sizes that were.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from typing import Final

from asynctrt.scheduling.batch import Batch, Measured
from asynctrt.scheduling.key import KEYS_KEPT_MAX, BatchKey

WINDOW: Final = 16
"""How many of the latest times of a size are kept: enough for a quantile of 0.9, yet few enough that they are
soon replaced when times change."""

TYPICAL: Final = 0.25
LATE: Final = 0.9
LATE_STAGING: Final = 0.75
"""The shares of the times that are shorter than ``typical`` and ``late``. ``TYPICAL`` is low because looking
too early whether a batch has ended costs little. ``LATE`` leaves out only the slowest time of a full
window. Staging uses a lower share: the CPU delays some batches far more than others, and if all were launched
early enough for the slowest ones, each would miss requests that could still have joined it."""

SURE_SAMPLES: Final = 4
"""How many batches of a size make its times reliable: ``typical`` is then the second shortest time, so
neither a slow batch nor a single fast one decides it; and the shortest is most likely without one-time
work."""

FORGOTTEN_AFTER: Final = 128
"""A size is forgotten if it does not occur in this many batches of its key. Otherwise a time that has become
wrong would last: requests that it makes late are refused, so no batch of the size would ever correct it. It
is eight full windows, so that a size that is merely rare is kept."""

TIMED_EVERY: Final = 8
"""The device times one batch in this many. Timing costs the CPU and the GPU a few µs each, so the cost per
batch is below one µs, and a full window still takes only ``WINDOW`` times this many batches."""

TIMED_ALWAYS_NS: Final = 5_000_000
"""All batches that compute for at least this long are timed: the few µs are then about a thousandth of the
time, and samples would come too rarely otherwise."""

SPREAD_MIN: Final = 2
"""How many factors of two must lie between the smallest and the largest batches. If they were closer, noise
in their times would decide what a row costs."""


class _Window:
    """The latest times of one size."""

    __slots__ = ("recent", "rising", "seen_at")

    def __init__(self) -> None:
        self.recent: deque[int] = deque(maxlen=WINDOW)
        self.seen_at = 0
        """The number of batches of its key up to its latest one."""
        self.rising: list[int] | None = None
        """The same in rising order; ``None`` until that is asked for."""

    def at(self, share: float) -> int:
        """Return the time that a share of the times are shorter than."""
        rising = self.rising
        if rising is None:
            rising = self.rising = sorted(self.recent)
        return rising[int(len(rising) * share)]


class _Sizes:
    """The times of all sizes of one key."""

    __slots__ = ("by_rows", "late_known", "seen")

    def __init__(self) -> None:
        self.by_rows: dict[int, _Window] = {}
        self.seen = 0
        """The number of batches seen."""
        self.late_known: dict[int, int | None] = {}
        """The late times that were asked for since the last batch."""

    def typical_between(self, rows: int, least: int) -> int | None:
        """Estimate the typical time of a size from its neighbours with at least ``least`` batches."""
        known = [size for size, window in self.by_rows.items() if len(window.recent) >= least]
        if not known or rows < min(known):
            return None
        return _between([(size, self.by_rows[size].at(TYPICAL)) for size in sorted(known)], rows)

    def late(self, rows: int, share: float, least: int) -> int | None:
        if rows not in self.late_known:
            self.late_known[rows] = _between(self._late_points(share, least), rows)
        return self.late_known[rows]

    def _late_points(self, share: float, least: int) -> list[tuple[int, int]]:
        """Return the sizes with at least ``least`` batches and their late times, both rising.

        If none of the sizes between two powers of two has enough batches, all of them together give one
        point, which must hold for the largest.
        """
        groups: dict[int, list[tuple[int, _Window]]] = {}
        for rows, window in sorted(self.by_rows.items()):
            if self.seen - window.seen_at <= FORGOTTEN_AFTER:
                groups.setdefault(rows.bit_length(), []).append((rows, window))
        points: list[tuple[int, int]] = []
        most_ns = 0
        for group in groups.values():
            found = [(rows, window.at(share)) for rows, window in group if len(window.recent) >= least]
            if not found:
                rising = sorted(took_ns for _, window in group for took_ns in window.recent)
                found = [(group[-1][0], rising[int(len(rising) * share)])] if len(rising) >= least else []
            for rows, late_ns in found:
                most_ns = max(most_ns, late_ns)
                points.append((rows, most_ns))
        return points


class Times:
    """The times of one stage of batches, such as computing, in ns.

    :param late_share: the share of times that are shorter than ``late``.
    :param least: the number of batches of a size that ``late`` needs.
    """

    __slots__ = ("_keys", "_late_share", "_least")

    def __init__(self, *, late_share: float = LATE, least: int = SURE_SAMPLES) -> None:
        self._late_share, self._least = late_share, least
        self._keys: OrderedDict[Hashable, _Sizes] = OrderedDict()

    def observe(self, key: Hashable, rows: int, took_ns: int) -> None:
        """Remember how long a batch took. The least recently seen key makes room for a new one."""
        sizes = self._keys.get(key)
        if sizes is None:
            sizes = self._keys[key] = _Sizes()
            if len(self._keys) > KEYS_KEPT_MAX:
                self._keys.popitem(last=False)
        if len(self._keys) > 1:
            self._keys.move_to_end(key)
        window = sizes.by_rows.get(rows)
        if window is None:
            window = sizes.by_rows[rows] = _Window()
        elif sizes.seen - window.seen_at > FORGOTTEN_AFTER:
            window.recent.clear()
        window.recent.append(took_ns)
        window.rising = None
        sizes.seen = window.seen_at = sizes.seen + 1
        if sizes.late_known:
            sizes.late_known.clear()

    def forget(self, key: Hashable) -> None:
        """Forget all batches of a key."""
        self._keys.pop(key, None)

    def typical(self, key: Hashable, rows: int, least: int = 1) -> int | None:
        """Return how long such a batch typically takes, erring on the short side; ``None`` before a batch of
        no more rows was seen.

        :param least: ignore sizes with fewer batches.
        """
        sizes = self._keys.get(key)
        if sizes is None:
            return None
        window = sizes.by_rows.get(rows)
        if window is not None and len(window.recent) >= least:
            return window.at(TYPICAL)
        return sizes.typical_between(rows, least)

    def late(self, key: Hashable, rows: int) -> int | None:
        """Return the time within which most such batches finish; ``None`` until enough were seen.

        More rows never take less time. A size below the smallest known size gets the time of the smallest,
        and a size above the largest known size gets the time of the largest.
        """
        sizes = self._keys.get(key)
        return None if sizes is None else sizes.late(rows, self._late_share, self._least)

    def has_seen(self, key: Hashable, rows: int) -> bool:
        """Return whether a batch of exactly this size was seen."""
        sizes = self._keys.get(key)
        return sizes is not None and rows in sizes.by_rows

    def is_sure(self, key: Hashable, rows: int) -> bool:
        """Return whether enough batches of exactly this size were seen that one outlier does no harm."""
        sizes = self._keys.get(key)
        window = None if sizes is None else sizes.by_rows.get(rows)
        return window is not None and len(window.recent) >= SURE_SAMPLES


class BatchTimes:
    """How long batches take to be staged, copied in, computed and copied out.

    :param times_all: whether the device times every batch, because timing costs it nothing.
    :param keeps_promises: whether to remember how long batches occupy the device.
    """

    def __init__(self, *, times_all: bool = False, keeps_promises: bool = True) -> None:
        self.times_all = times_all
        """Whether the device times every batch from now on."""
        self._keeps_promises = keeps_promises
        self.compute = Times()
        self.alone = Times()
        """How long batches took to compute before the first request came, with nothing beside them."""
        self.copy_in = Times()
        self.copy_out = Times()
        self.staging = Times(late_share=LATE_STAGING, least=1)
        """From the launch until a batch is on its stream."""
        self.gathering = Times(late_share=LATE_STAGING, least=1)
        """From the launch until the first part of a batch is on its stream. The device computes while the
        rest is enqueued."""
        self.occupied = Times()
        """How long batches occupy the device. If they begin at once, this includes handing them over and
        noticing their end. Measured only if promises depend on it."""

    def wants_times(self, number: int, key: Hashable, rows: int) -> bool:
        """Return whether the device should time this batch: its size is new, it is long, or it is a
        sample."""
        if self.times_all or number % TIMED_EVERY == 0 or not self.compute.is_sure(key, rows):
            return True
        return (self.compute.typical(key, rows) or 0) >= TIMED_ALWAYS_NS

    def seed(self, key: BatchKey, compute_ns: Mapping[int, int]) -> None:
        """Note the compute times of batches before the first request, by their rows, as reliable."""
        for rows, took_ns in compute_ns.items():
            self.alone.observe(key.shape, rows, took_ns)
            for _ in range(SURE_SAMPLES):
                self.compute.observe(key.shape, rows, took_ns)

    def forget(self, key: Hashable) -> None:
        """Forget all times of a key but its copies, because its batches run in another way from now on."""
        for times in (self.compute, self.alone, self.occupied, self.staging, self.gathering):
            times.forget(key)

    def observe(self, batch: Batch, now_ns: int, took: Measured) -> None:
        """Remember how long a timed batch took, when it ends."""
        key, rows, compute_ns = batch.key, batch.rows_run, took.compute_ns
        if self._keeps_promises:
            occupied_ns = compute_ns
            if batch.lane is None and batch.arena is None:
                # It began at once, so the time to hand it over and to notice its end is part of it.
                occupied_ns = max(compute_ns, now_ns - batch.launched_ns - took.copy_in_ns - took.copy_out_ns)
            self.occupied.observe(key.shape, rows, occupied_ns)
        self.compute.observe(key.shape, rows, compute_ns)
        if batch.lane is not None and self.copy_in.typical(key.copy_key, rows) is None:
            # None were measured, perhaps because its rows and outputs are on the device.
            self.observe_copies(batch, 0, 0)

    def observe_copies(self, batch: Batch, copy_in_ns: int, copy_out_ns: int) -> None:
        """Remember the copy times that the device measured."""
        self.copy_in.observe(batch.key.copy_key, batch.rows_run, copy_in_ns)
        self.copy_out.observe(batch.key.copy_key, batch.rows_run, copy_out_ns)

    def observe_start(self, batch: Batch, put_ns: int, now_ns: int) -> None:
        """Remember when the first part of a batch was put on its stream, and when all of it was there."""
        copies, rows = batch.key.copy_key, batch.rows_run
        self.staging.observe(copies, rows, now_ns - batch.launched_ns)
        self.gathering.observe(copies, rows, put_ns - batch.launched_ns)

    def usual_ns(self, key: BatchKey, rows: int) -> tuple[int, int, int]:
        """Return how long such a batch typically takes to be copied in, computed and copied out."""
        compute_ns = self.compute.typical(key.shape, rows) or 0
        return self.copy_in_ns(key, rows), compute_ns, self.copy_out_ns(key, rows)

    def alone_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long such a batch typically computes with nothing beside it; 0 if no such batch ran."""
        shape = key.shape
        return self.alone.typical(shape, rows) or self.compute.typical(shape, rows) or 0

    def copy_in_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long the rows of a batch typically take to be copied in; 0 before any were."""
        return self.copy_in.typical(key.copy_key, rows) or 0

    def copy_out_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long the rows of a batch typically take to be copied out; 0 before any were."""
        return self.copy_out.typical(key.copy_key, rows) or 0

    def lead_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long it takes from the launch until a batch can compute: to be staged and copied in."""
        return (self.staging.late(key.copy_key, rows) or 0) + self.copy_in_ns(key, rows)

    def delay_ns(self, key: BatchKey, rows: int) -> int:
        """Return the same as :meth:`lead_ns`, but for a device that computes while the rest is still
        enqueued."""
        return (self.gathering.late(key.copy_key, rows) or 0) + self.copy_in_ns(key, rows)

    def enqueue_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long it takes to put a gathered batch on the device; 0 before any was."""
        staged_ns, gathered_ns = (
            times.late(key.copy_key, rows) or 0 for times in (self.staging, self.gathering)
        )
        return max(staged_ns - gathered_ns, 0)

    def sure_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long a batch computes at least; 0 until enough such batches were seen."""
        return self.compute.typical(key.shape, rows, SURE_SAMPLES) or 0

    def service_ns(self, key: BatchKey, rows: int) -> int | None:
        """Return how long a batch takes at least, with its copies; ``None`` until enough were seen."""
        compute_ns = self.compute.typical(key.shape, rows, SURE_SAMPLES)
        if compute_ns is None:
            return None
        return compute_ns + self.copy_in_ns(key, rows) + self.copy_out_ns(key, rows)


class Costs:
    """What a batch costs: a fixed time, and a time for each unit of its rows.

    Both follow from the shortest times of the smallest and the largest batches. If a larger batch took less
    time than the smallest, its time counts for the smallest, which something must have held up.
    """

    __slots__ = ("_least", "batch_ns", "unit_ns")

    def __init__(self) -> None:
        # By the bit length of a batch's units: the shortest time, that batch's units, the number of batches.
        self._least: dict[int, tuple[int, int, int]] = {}
        self.batch_ns = self.unit_ns = 0.0
        """Both 0 until they are known."""

    def observe(self, units: int, took_ns: int) -> None:
        """Note the time of a batch."""
        bits = units.bit_length()
        least_ns, least_units, count = self._least.get(bits, (took_ns, units, 0))
        if took_ns < least_ns:
            least_ns, least_units = took_ns, units
        elif count > SURE_SAMPLES:
            return
        self._least[bits] = least_ns, least_units, count + 1
        known = [bits for bits, (_, _, count) in self._least.items() if count >= SURE_SAMPLES]
        if len(known) < 2 or max(known) - min(known) < SPREAD_MIN:
            return
        small = self._least[min(known)][1]
        small_ns = min(self._least[bits][0] for bits in known)
        large_ns, large, _ = self._least[max(known)]
        self.unit_ns = max(large_ns - small_ns, 0) / (large - small)
        self.batch_ns = max(small_ns - self.unit_ns * small, 0.0)


def _between(points: list[tuple[int, int]], rows: int) -> int | None:
    """Interpolate the value for ``rows`` between points with rising rows; constant beyond them."""
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
