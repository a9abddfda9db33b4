"""What batches took so far, and when one that is launched now is expected to be done.

Expectations are a low quantile of a short window, not a mean: one slow batch must not move them, because
waiting too long costs more than looking too early.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Final

from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.key import BatchKey

WINDOW: Final = 16
SHAPES_MAX: Final = 256
QUANTILE: Final = 4  # The expectation is the value a quarter of the way up the sorted window.
STAGING_QUANTILE: Final = 0.75

LEAD_MARGIN_NS: Final = 100_000
LEAD_MARGIN_NS_MAX: Final = 250_000
"""How long before it is needed a batch is in place, as far as can be told, at first and at most: what is late
leaves a device idle, and what is early has missed some requests."""

IN_TIME_NS: Final = 10_000
"""A batch that was in place for less than this before its turn was late."""

LATE_STEP_NS: Final = 6_000
EARLY_STEP_NS: Final = 2_000
"""By how much the margin grows with a batch that was late, and shrinks with one that was not, so that about
one in four is late. A late batch costs everybody who waits the time in which the device is idle; an early one
costs those who came a little later."""

NEVER_NS: Final = 2**63 - 1

TIMED_EVERY: Final = 8
"""One batch in this many is timed by the device, since timing costs the CPU and the GPU a few µs each."""

TIMED_ALWAYS_NS: Final = 5_000_000
"""Batches that compute for at least this long are all timed."""


class _Window:
    """The last few durations of one size, and the expectation that follows from them."""

    __slots__ = ("known_ns", "quantile", "recent")

    def __init__(self, quantile: float) -> None:
        self.recent: deque[int] = deque(maxlen=WINDOW)
        self.known_ns: int | None = None
        self.quantile = quantile

    @property
    def expected_ns(self) -> int:
        if self.known_ns is None:
            self.known_ns = sorted(self.recent)[int(len(self.recent) * self.quantile)]
        return self.known_ns


class LatencyHistory:
    """Durations in ns of the last few batches, by what they cost the same by and by their rows.

    :param quantile: which of the durations of one size is expected: by default the one that a quarter of them
        are shorter than.
    """

    __slots__ = ("_quantile", "_shapes", "seen")

    def __init__(self, *, quantile: float = 1 / QUANTILE) -> None:
        self.seen = 0
        """How many batches were observed."""
        self._quantile = quantile
        self._shapes: OrderedDict[Hashable, dict[int, _Window]] = OrderedDict()

    def observe(self, shape: Hashable, rows: int, duration_ns: int) -> None:
        """Remember how long a batch took. The least recently seen shape makes room for a new one."""
        sizes = self._shapes.get(shape)
        if sizes is None:
            sizes = self._shapes[shape] = {}
            if len(self._shapes) > SHAPES_MAX:
                self._shapes.popitem(last=False)
        if len(self._shapes) > 1:
            self._shapes.move_to_end(shape)
        window = sizes.get(rows)
        if window is None:
            window = sizes[rows] = _Window(self._quantile)
        window.recent.append(duration_ns)
        window.known_ns = None
        self.seen += 1

    def forget(self, shape: Hashable) -> None:
        """Forget all batches of a shape."""
        self._shapes.pop(shape, None)

    def expected_ns(self, shape: Hashable, rows: int) -> int | None:
        """Return a lower bound of how long such a batch will take; ``None`` before any was seen.

        A size that was never seen takes the expectation of the nearest smaller one: a lower bound is
        the safe side, since being early costs one more look and being late costs latency.
        """
        sizes = self._shapes.get(shape)
        if not sizes:
            return None
        window = sizes.get(rows)
        if window is None:
            seen = max((size for size in sizes if size < rows), default=None)
            if seen is None:
                return None
            window = sizes[seen]
        return window.expected_ns

    def sure_ns(self, shape: Hashable, rows: int) -> int | None:
        """Return what :meth:`expected_ns` does, from sizes alone of which enough samples exist."""
        sizes = self._shapes.get(shape)
        if not sizes:
            return None
        window = sizes.get(rows)
        if window is None or len(window.recent) < QUANTILE:
            seen = [size for size in sizes if size < rows and len(sizes[size].recent) >= QUANTILE]
            if not seen:
                return None
            window = sizes[max(seen)]
        return window.expected_ns

    def has_seen(self, shape: Hashable, rows: int) -> bool:
        """Return whether a batch of exactly this size was seen."""
        return rows in self._shapes.get(shape, ())

    def measured(self, most: int) -> Iterator[tuple[Hashable, int, int, int]]:
        """Yield the shape, the rows, the expectation in ns and the number of samples of each size, or of so
        many at most that are spread over all."""
        # An odd step, as sizes are mostly powers of two: else it might be the same size of each shape.
        every = -(-sum(map(len, self._shapes.values())) // most) | 1
        skipped = 0
        for shape, sizes in self._shapes.items():
            for rows in islice(sizes, skipped, None, every):
                window = sizes[rows]
                yield shape, rows, window.expected_ns, len(window.recent)
            skipped = (skipped - len(sizes)) % every

    def is_sure(self, shape: Hashable, rows: int) -> bool:
        """Return whether enough samples of this size exist that one outlier cannot skew the estimate."""
        window = self._shapes.get(shape, {}).get(rows)
        return window is not None and len(window.recent) >= QUANTILE


class CompletionEstimator:
    """Expected ends of batches, and which batches the device is to time.

    Batches in one lane, or else in one arena, compute one after the other, while their copies overlap with
    the computing of others; so the expected end of one depends on those ahead of it. Estimates err on the
    early side.

    :param lines: how many lanes there are, or arenas where there are no lanes.
    :param compute: the measured compute times, which the policy decides by too.
    """

    def __init__(self, *, lines: int, compute: LatencyHistory) -> None:
        self._compute = compute
        self._service_ns: dict[int, int] = {}
        self._service_key: BatchKey | None = None
        self._service_seen = 0
        self._staging = LatencyHistory(quantile=STAGING_QUANTILE)
        # Of it, until the first was put on the stream: while the rest is, the device computes.
        self._gathering = LatencyHistory(quantile=STAGING_QUANTILE)
        self._copy_in = LatencyHistory()
        self._copy_out = LatencyHistory()
        self._margin_ns = LEAD_MARGIN_NS
        # Timed batches in flight that were launched when they were due.
        self._just_in_time: set[int] = set()
        # Until when each line is known to have computed, and what is in flight there, in order: from when
        # on a batch can compute, and for how long. An end that was seen moves all those behind it, so each
        # expectation is told from the last truth and no error is carried along.
        self._computed_ns = [0] * lines
        self._ahead: list[dict[int, tuple[int, int]]] = [{} for _ in range(lines)]

    def launched_just_in_time(self, batch: Batch) -> None:
        """Note that a timed batch was launched when it was due: its wait says how well that was foretold."""
        self._just_in_time.add(batch.number)

    def observe_wait(self, batch: Batch, wait_ns: int) -> None:
        """Learn how long before its turn a batch is to be in place.

        :param wait_ns: how long the device waited for the batches before it, once it had been copied in.
        """
        if batch.number in self._just_in_time:
            self._just_in_time.remove(batch.number)
            step_ns = LATE_STEP_NS if wait_ns < IN_TIME_NS else -EARLY_STEP_NS
            self._margin_ns = min(max(self._margin_ns + step_ns, 0), LEAD_MARGIN_NS_MAX)

    def wants_times(self, number: int, shape: Hashable, rows: int) -> bool:
        """Return whether the device is to time this batch: a new size, a long one, or a sample."""
        if number % TIMED_EVERY == 0 or not self._compute.is_sure(shape, rows):
            return True
        return (self._compute.expected_ns(shape, rows) or 0) >= TIMED_ALWAYS_NS

    def usual_ns(self, batch: Batch) -> tuple[int, int, int]:
        """Return how long such a batch usually takes to be copied in, to compute and to be copied out."""
        rows, copies = batch.rows_run, batch.key.copy_key
        return (
            self._copy_in.expected_ns(copies, rows) or 0,
            self._compute.expected_ns(batch.key.cost_key, rows) or 0,
            self._copy_out.expected_ns(copies, rows) or 0,
        )

    def copies_ns(self, batch: Batch) -> tuple[int, int] | None:
        """Return how long such a batch is copied in and out, if batches with such rows were measured."""
        rows, copies = batch.rows_run, batch.key.copy_key
        copy_in_ns = self._copy_in.expected_ns(copies, rows)
        copy_out_ns = self._copy_out.expected_ns(copies, rows)
        return None if copy_in_ns is None or copy_out_ns is None else (copy_in_ns, copy_out_ns)

    def started(self, batch: Batch, now_ns: int, put_ns: int | None = None) -> int | None:
        """Return in how many ns the batch is expected to be done; ``None`` if none like it was seen yet.

        :param put_ns: when the first of it was put on its stream, if that took a while. From then on it
            computes, if it can.
        """
        rows, copies = batch.rows_run, batch.key.copy_key
        if batch.lane is not None:
            self._staging.observe(copies, rows, now_ns - batch.launched_ns)
            self._gathering.observe(copies, rows, (now_ns if put_ns is None else put_ns) - batch.launched_ns)
        compute_ns = self._compute.expected_ns(batch.key.cost_key, rows)
        if compute_ns is None:
            return None
        copied_in_ns = (now_ns if put_ns is None else put_ns) + (self._copy_in.expected_ns(copies, rows) or 0)
        computed_ns = copied_in_ns + compute_ns
        line = _line(batch)
        if line is not None:
            self._ahead[line][batch.number] = copied_in_ns, compute_ns
            computed_ns = self.computed_by_ns(line)
        return max(computed_ns + (self._copy_out.expected_ns(copies, rows) or 0) - now_ns, 0)

    def free_ns(self, lines: Sequence[int]) -> int:
        """Return when the first of these lanes is expected to have computed all that is in it."""
        return min(map(self.computed_by_ns, lines))

    def free_late_ns(self, lines: Sequence[int], now_ns: int, late_ns: Callable[[int], int]) -> int:
        """Return what :meth:`free_ns` does, on the late side.

        :param late_ns: returns how long a batch in flight computes at most, as a rule, by its number.
        """
        found = NEVER_NS
        for line in lines:
            computed_ns = self._computed_ns[line]
            for number, (ready_ns, takes_ns) in self._ahead[line].items():
                computed_ns = max(computed_ns, ready_ns) + max(takes_ns, late_ns(number))
            found = min(found, computed_ns)
        return max(found, now_ns)

    def lead_ns(self, copies: Hashable, rows: int) -> int:
        """Return how long before a batch can compute it is to be launched: to be staged and copied in."""
        staged_ns = self._staging.expected_ns(copies, rows) or 0
        return staged_ns + (self._copy_in.expected_ns(copies, rows) or 0) + self._margin_ns

    def enqueue_ns(self, copies: Hashable, rows: int) -> int:
        """Return how long it takes to put a gathered batch on the device; 0 before any was."""
        staged_ns = self._staging.expected_ns(copies, rows) or 0
        return max(staged_ns - (self._gathering.expected_ns(copies, rows) or 0), 0)

    def delay_ns(self, copies: Hashable, rows: int) -> int:
        """Return how long after its launch a batch can compute: when it is gathered and copied in."""
        gathered_ns = self._gathering.expected_ns(copies, rows) or 0
        return gathered_ns + (self._copy_in.expected_ns(copies, rows) or 0)

    def copy_in_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long the rows of a batch take to be copied in at least; 0 before any were."""
        return self._copy_in.expected_ns(key.copy_key, rows) or 0

    def copy_out_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long the rows of a batch take to be copied out at least; 0 before any were."""
        return self._copy_out.expected_ns(key.copy_key, rows) or 0

    def service_ns(self, key: BatchKey, rows: int) -> int | None:
        """Return how long a batch takes at least from its launch to its end, if it does not wait for another;
        ``None`` until enough like it were seen."""
        # It is asked for each request with a deadline, and changes with each batch.
        known = self._service_ns
        seen = self._compute.seen + self._copy_in.seen + self._copy_out.seen
        if key is not self._service_key or seen != self._service_seen:
            known.clear()
            self._service_key, self._service_seen = key, seen
        if rows in known:
            return known[rows]
        compute_ns = self._compute.sure_ns(key.cost_key, rows)
        if compute_ns is None:
            return None
        known[rows] = compute_ns + self.copy_in_ns(key, rows) + self.copy_out_ns(key, rows)
        return known[rows]

    def compute_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long a batch computes at least; 0 until enough like it were seen."""
        return self._compute.sure_ns(key.cost_key, rows) or 0

    def is_known(self, number: int, line: int) -> bool:
        """Return whether the end of a batch on the device can be told."""
        return number in self._ahead[line]

    def observe_copies(self, batch: Batch, *, copy_in_ns: int, copy_out_ns: int) -> None:
        """Remember the copy times that the device measured."""
        self._copy_in.observe(batch.key.copy_key, batch.rows_run, copy_in_ns)
        self._copy_out.observe(batch.key.copy_key, batch.rows_run, copy_out_ns)

    def landed(self, batch: Batch, now_ns: int) -> None:
        """Note that the batch is done. Those behind it move with it."""
        line = _line(batch)
        if line is not None:
            ahead = self._ahead[line]
            # Copies out may end in another order; what was launched before this one has computed, too.
            for number in [number for number in ahead if number <= batch.number]:
                del ahead[number]
            copy_out_ns = self._copy_out.expected_ns(batch.key.copy_key, batch.rows_run) or 0
            self._computed_ns[line] = max(self._computed_ns[line], now_ns - copy_out_ns)

    def forget_times(self, copies: Hashable) -> None:
        """Forget how long it takes to put such batches on the device."""
        self._staging.forget(copies)
        self._gathering.forget(copies)
        self._service_key = None

    def forget(self, batch: Batch) -> None:
        """Drop a batch that failed: none waits for it any more, and it says nothing about others."""
        self._just_in_time.discard(batch.number)
        line = _line(batch)
        if line is not None:
            self._ahead[line].pop(batch.number, None)

    def computed_by_ns(self, line: int) -> int:
        """Return when a lane, or an arena, is expected to have computed all that is in it."""
        computed_ns = self._computed_ns[line]
        for ready_ns, takes_ns in self._ahead[line].values():
            computed_ns = max(computed_ns, ready_ns) + takes_ns
        return computed_ns


def _line(batch: Batch) -> int | None:
    """Return what a batch computes in, one after the other."""
    return batch.arena if batch.lane is None else batch.lane
