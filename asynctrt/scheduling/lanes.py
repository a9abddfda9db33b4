"""How many batches compute side by side on a device that they share, learned from what that does to them.

Batches in one *lane* compute one after the other, each while the next one is copied in. More lanes pay where
a batch leaves much of the device idle, and cost latency where it does not: four batches that fill a GPU take
four times as long side by side. So there is one lane, once some batches have shown how long they take. Now
and then, while batches wait for their turn anyway, twice as many are tried for a few batches. They are kept
if the device then does more work in the same time, in terms of what each batch computes for alone, and more
than batches of twice the size would. Small batches leave more of a device idle than large ones, so what a
trial shows for one size holds for all smaller ones, or for all larger ones.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import Final

from asynctrt.scheduling.batch import Batch

WARM_UP: Final = 16
"""Batches after which those that come are put in lanes. What hangs, hangs those behind it in its lane."""

GAIN_MIN: Final = 1.15
"""How much more work must be done with twice the lanes, which cost latency: each batch takes longer."""

PROBE_BATCHES: Final = 8
HOPE_MIN: Final = 1.05
"""A trial that shows no such gain after so many batches is ended: more would cost latency for nothing."""

TRIAL_BATCHES: Final = 24
"""Batches that decide a trial."""

BASE_BATCHES: Final = 24
"""Batches just before a trial that it is compared with, each of which waited for its turn."""

FIRST_TRIAL: Final = 32
NEXT_TRIAL_MAX: Final = 1 << 15
"""Batches that wait for their turn before the first trial, and at most between two. Each one in vain is
followed by four times as long a pause."""

STUCK_NS_MIN: Final = 50_000_000
STUCK_TIMES: Final = 4
"""A batch that has been under way for so many times as long as was expected, and for that long, may hang:
batches that come do not wait for it, but use another lane."""

SHAPES_MAX: Final = 64
WINDOW: Final = 16


class _Times:
    """How long batches of one shape compute alone, by their rows."""

    __slots__ = ("_by_rows", "_known")

    def __init__(self) -> None:
        self._by_rows: dict[int, deque[int]] = {}
        self._known: dict[int, float] = {}

    def observe(self, rows: int, compute_ns: int) -> None:
        window = self._by_rows.get(rows)
        if window is None:
            window = self._by_rows[rows] = deque(maxlen=WINDOW)
        window.append(compute_ns)
        self._known.clear()

    def expected_ns(self, rows: int) -> float:
        """Return the time of a size: what was seen, or a line between its neighbours; 0 if none was seen."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._estimate(rows)
        return known

    def _estimate(self, rows: int) -> float:
        if window := self._by_rows.get(rows):
            return median(window)
        below = max((size for size in self._by_rows if size < rows), default=None)
        above = min((size for size in self._by_rows if size > rows), default=None)
        if below is None and above is None:
            return 0.0
        if below is None or above is None:
            return median(self._by_rows[below or above or 0])
        below_ns, above_ns = median(self._by_rows[below]), median(self._by_rows[above])
        return below_ns + (above_ns - below_ns) * (rows - below) / (above - below)


class _Shape:
    """What is known of the batches of one shape."""

    __slots__ = ("contended", "lanes", "times", "wait")

    def __init__(self, sizes: int) -> None:
        self.times = _Times()
        self.lanes = [1] * sizes
        """By the bits of the number of rows; never more for larger batches than for smaller ones."""
        self.contended = [0] * sizes
        self.wait = [FIRST_TRIAL] * sizes


class _Span:
    """The work that was done while the device was busy."""

    __slots__ = ("batches", "busy_ns", "work_ns")

    def __init__(self) -> None:
        self.batches = 0
        self.work_ns = 0.0
        """What the batches would have computed for, each alone."""
        self.busy_ns = 0

    @property
    def rate(self) -> float:
        """Return the batches' worth of work done at a time."""
        return self.work_ns / self.busy_ns if self.busy_ns else 0.0


class Lanes:
    """The lanes of one engine: which one a batch goes to, and how many there are for its size.

    :param lanes_max: batches that can compute side by side at most.
    :param rows_max: rows of the largest batch.
    """

    def __init__(self, lanes_max: int, rows_max: int) -> None:
        self._lanes_max = lanes_max
        self._rows_max = rows_max
        self._sizes = rows_max.bit_length() + 1
        self._users = [0] * lanes_max
        # The lane of each batch that is to compute, or does, and from when on it counts as stuck.
        self._inside: dict[int, tuple[int, int]] = {}
        self._stuck: set[int] = set()
        self._landed = 0
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        # The timed batches that have had the device for themselves so far.
        self._alone: set[int] = set()
        self._changed_ns = 0
        self._span = _Span()
        self._base = 0.0
        # The shape and the size that are on trial, and with how many lanes.
        self._trial: tuple[_Shape, int, int] | None = None
        # The first batch of the trial. Those before it wait in fewer lanes.
        self._trial_begins = 0

    def __repr__(self) -> str:
        return f"<Lanes {self._users}>"

    def allowed(self, shape: Hashable, rows: int) -> int:
        """Return the lanes for batches of this size."""
        if self._landed < WARM_UP:
            return self._lanes_max
        if self._lanes_max == 1 or (known := self._shapes.get(shape)) is None:
            return 1
        size = rows.bit_length()
        if self._trial is not None and self._trial[0] is known and self._trial[1] == size:
            return self._trial[2]
        return known.lanes[size]

    def chosen(self) -> dict[int, int]:
        """Return the lanes by the most rows of the batches that have them; of several shapes, the most."""
        most = [max(lanes) for lanes in zip(*(known.lanes for known in self._shapes.values()), strict=True)]
        return {(1 << size) - 1: lanes for size, lanes in enumerate(most) if lanes > 1}

    @property
    def occupied(self) -> int:
        """Return how many batches are to compute, or do, without those that are stuck."""
        if not self._stuck:
            return len(self._inside)
        return sum(lane not in self._stuck for lane, _ in self._inside.values())

    def usable(self, count: int) -> Sequence[int]:
        """Return so many lanes at most that are not stuck."""
        if not self._stuck:
            return range(count)
        return [lane for lane in range(self._lanes_max) if lane not in self._stuck][:count]

    def acquire(self, shape: Hashable, rows: int) -> int:
        """Return the lane for a batch that is launched now: the one with the fewest, the first of equals."""
        lanes = self.usable(self.allowed(shape, rows)) or range(self._lanes_max)
        return lanes[0] if len(lanes) == 1 else min(lanes, key=self._users.__getitem__)

    def expect(self, number: int, now_ns: int, expected_ns: int) -> None:
        """Note in how many ns a batch is expected to be done."""
        lane, stuck_ns = self._inside[number]
        self._inside[number] = lane, max(stuck_ns, now_ns + STUCK_TIMES * expected_ns)

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

    def launched(self, batch: Batch) -> None:
        """Note that a batch is on its way into the lane that :meth:`acquire` gave."""
        lane, now_ns = batch.lane, batch.launched_ns
        assert lane is not None
        if self._lanes_max > 1:
            if self._inside:
                self._span.busy_ns += now_ns - self._changed_ns
            self._changed_ns = now_ns
            if len(self._inside) > self._users[lane]:
                self._alone.clear()
            elif batch.is_timed:
                self._alone.add(batch.number)
            if self._users[lane]:
                self._known(batch.key.cost_key).contended[batch.rows.bit_length()] += 1
            elif self._trial is None:
                self._span = _Span()
        self._users[lane] += 1
        self._inside[batch.number] = lane, now_ns + STUCK_NS_MIN

    def landed(self, batch: Batch, now_ns: int) -> None:
        """Note that a batch has computed. Idempotent."""
        if not self._leave(batch, now_ns):
            return
        self._landed += 1
        if self._lanes_max > 1:
            if self._trial is not None and batch.number <= self._trial_begins:
                self._span = _Span()
                return
            known = self._known(batch.key.cost_key)
            alone_ns = known.times.expected_ns(batch.rows_run)
            span = self._span
            span.batches += 1
            span.work_ns += alone_ns
            if self._trial is not None:
                self._judge(*self._trial)
            elif not alone_ns or self._landed <= WARM_UP:
                self._span = _Span()
            elif span.batches >= BASE_BATCHES:
                self._base, self._span = span.rate, _Span()
                self._begin_trial(known, batch)

    def is_usual(self, batch: Batch) -> bool:
        """Return whether a timed batch had no more batches beside it than those of its size usually have."""
        if self._lanes_max == 1 or batch.number in self._alone:
            return True
        return self._known(batch.key.cost_key).lanes[batch.rows.bit_length()] > 1

    def observe(self, batch: Batch, compute_ns: int) -> None:
        """Remember the time of a batch that has :meth:`landed`, if it had the device for itself."""
        if batch.number in self._alone:
            self._alone.discard(batch.number)
            self._known(batch.key.cost_key).times.observe(batch.rows_run, compute_ns)

    def forget(self, batch: Batch) -> None:
        """Drop a batch that failed: it says nothing about others."""
        self._leave(batch, self._changed_ns)
        self._alone.discard(batch.number)

    def _leave(self, batch: Batch, now_ns: int) -> bool:
        inside = self._inside.pop(batch.number, None)
        if inside is None:
            return False
        lane = inside[0]
        self._stuck.discard(lane)
        self._span.busy_ns += max(now_ns - self._changed_ns, 0)
        self._changed_ns = max(now_ns, self._changed_ns)
        self._users[lane] -= 1
        return True

    def _known(self, shape: Hashable) -> _Shape:
        known = self._shapes.get(shape)
        if known is None:
            known = self._shapes[shape] = _Shape(self._sizes)
            if len(self._shapes) > SHAPES_MAX:
                self._shapes.popitem(last=False)
        return known

    def _begin_trial(self, known: _Shape, batch: Batch) -> None:
        """Try other lanes for batches of this size, if enough of them have waited for their turn."""
        size = batch.rows.bit_length()
        if known.contended[size] < known.wait[size]:
            return
        lanes = known.lanes[size]
        # What proved itself once may not any more, as others use the device too.
        tried = min(2 * lanes, self._lanes_max) if lanes < self._lanes_max else max(lanes // 2, 1)
        self._trial = known, size, tried
        self._trial_begins = max(self._inside, default=batch.number)

    def _gain_of_growth(self, known: _Shape, size: int) -> float:
        """Return how much more work batches of twice this size do in the same time, one after the other."""
        rows = min((1 << size) - 1, self._rows_max)
        larger = min(2 * rows, self._rows_max)
        alone_ns, larger_ns = known.times.expected_ns(rows), known.times.expected_ns(larger)
        return max(1.0, larger / rows * alone_ns / larger_ns) if rows and larger_ns else 1.0

    def _judge(self, known: _Shape, size: int, tried: int) -> None:
        """End the trial when it has shown enough."""
        span, lanes = self._span, known.lanes[size]
        gain = span.rate / self._base / self._gain_of_growth(known, size)
        if tried > lanes:
            if span.batches < (TRIAL_BATCHES if gain >= HOPE_MIN else PROBE_BATCHES):
                return
            is_better = gain >= GAIN_MIN
        else:
            if span.batches < PROBE_BATCHES:
                return
            is_better = span.rate * GAIN_MIN * self._gain_of_growth(known, size) >= self._base
        self._trial, self._span = None, _Span()
        if is_better and tried > lanes:
            self._base = span.rate
            known.lanes[: size + 1] = [max(tried, other) for other in known.lanes[: size + 1]]
            known.wait[: size + 1] = [FIRST_TRIAL] * (size + 1)
        elif is_better:
            self._base = span.rate
            known.lanes[size:] = [min(tried, other) for other in known.lanes[size:]]
        if not is_better or tried < lanes:
            # Neither will larger batches gain.
            pause = min(4 * known.wait[size], NEXT_TRIAL_MAX)
            known.wait[size:] = [max(pause, other) for other in known.wait[size:]]
        known.contended = [0] * self._sizes
