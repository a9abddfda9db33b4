"""How many batches compute side by side on a device that they share, learned from what that does to them.

Batches in one *lane* compute one after the other, each while the next one is copied in. More lanes pay where
a batch leaves much of the device idle, and cost latency where it does not: four batches that fill a GPU take
four times as long side by side. So there is one lane after the first few batches, of which some compute alone
to show how long that takes. Now and then, when batches had to wait for their turn, twice as many are tried
for a few batches, or all of them where full batches wait before anything is known: each batch says how much
longer it took than alone, and beside how many others. The lanes that were tried are kept if the device then
does more work in the same time, in terms of what each batch takes alone, and more than batches of twice the
size would; or if batches side by side hardly notice one another. Later fewer are tried, as many as what the
device does is worth: batches that only wait for room there might as well have grown.

What a batch takes alone is known from others of its size, or from a line through two sizes that are not far
away. The first of a size in a context may take far longer than those after it. So where it matters, and
nothing is known of a size or only how long its first batch took, the next few batches of it compute alone.

What is learned holds for batches by how much is in them, be it many small rows or few large ones: of one
model, batches with less leave more of the device idle. So what a trial shows for some holds for all that are
smaller, or for all that are larger, and sixteen shapes learn as fast as one.

Where it takes about as long to put a batch on the device as to compute it, there are two lanes in any case:
two threads put batches there at the same time, and the device waits for them all the same.
"""

from bisect import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from math import ceil, sqrt
from statistics import fmean, median, median_low, stdev
from typing import Final, NamedTuple

from asynctrt.scheduling.batch import Batch

WARM_UP: Final = 16
"""Batches after which those that come are put in lanes. What hangs, hangs those behind it in its lane."""

GAIN_MIN: Final = 1.15
"""How much more work must be done with twice the lanes, which cost latency: each batch takes longer."""

FREE_MIN: Final = 0.8
FULL_MAX: Final = 0.15
"""What each further lane adds to the work done, as a share of what one lane does alone. From the
first share on, batches hardly notice one another; up to the second, the device was full before."""

PROBE_BATCHES: Final = 8
"""Batches after which a trial is ended that leaves no doubt: more would cost latency for nothing."""

DOUBT: Final = 3
"""By how many standard errors what was measured may be off, while there are few batches."""

TRIAL_BATCHES: Final = 24
ERROR_MAX: Final = 0.15
"""Batches that decide a trial in doubt, unless they differ too much."""

GIVE_UP_BATCHES: Final = 96
"""Batches after which a trial is ended that has not had enough of them side by side."""

SIDE_BY_SIDE: Final = 0.3
"""A batch counts for a trial if it had at least so much of the lanes that are tried beside it."""

ALL_BUT: Final = 0.5
"""And for what is known of the lanes that there are, if it had all of them beside it but so much of one."""

BASE_ERROR_MAX: Final = 0.05
BASE_BATCHES: Final = 48
"""How exactly it is to be known what the lanes do that there are before fewer are tried, and after how many
batches it is as it is."""

ROUNDED: Final = 0.25
"""By how much the work of some lanes may exceed that of a whole number of them, to pass for it."""

FIRST_TRIAL: Final = 16
NEXT_TRIAL_MAX: Final = 1 << 15
"""Batches that wait for their turn before the first trial, and at most between two. Each one in vain is
followed by a pause four times as long, or sixteen times where the device was full before."""

FULL_COUNTS: Final = 4
FULL_GROWTH_MAX: Final = 1.05
"""Until the first trial, a full batch that had to wait counts as this many, since others wait behind it. If
larger batches would gain no more than this factor, that trial is of all lanes at once: for as long as it is
not known whether they pay, requests queue up."""

FULL_BATCHES: Final = 32
"""After this many full batches in a row that had to wait, other lanes are tried, however long the pause was
to be, and again after twice as many: requests may be queueing up."""

CLASSES: Final = 64
"""Classes of batches, by how much is in them: one for each power of two."""

LOG_MAX: Final = 256
"""How many changes of the number of lanes that compute are remembered."""

ALONE_FIRST: Final = 4
"""Batches that come first and have the device for themselves, to show what they take alone."""

STUCK_NS_MIN: Final = 50_000_000
STUCK_TIMES: Final = 4
"""A batch that has been under way for so many times as long as was expected, and for that long, may hang:
batches that come do not wait for it, but use another lane."""

SLOW_MIN: Final = 0.5
SLOW_LANES: Final = 2
"""If putting a batch on the device takes at least this share of the time for which it computes alone, it has
at least this many lanes."""

SURE_SAMPLES: Final = 4
"""From this many times of one size on, they are believed even if larger batches took less."""

PAIRS: Final = 2
SLOW_FIRST_MIN: Final = 1.1
"""The first batch of a size in a context may take far longer than those after it, because what it computes
with is put on the device then. Once this many later batches have been compared with first ones, first ones
count as slow if most took longer by more than this factor."""

FIRST_RATIO_MAX: Final = 2
"""Where lanes would pay even if first batches took this many times as long as later ones, it does not matter
whether they do."""

ALONE_TO_LEARN: Final = 3
"""How many batches of a size compute alone when more has to be known of it."""

BEYOND_MAX: Final = 2
"""A straight line tells the time of batches that are larger than all known ones by this factor at most, and
of smaller ones by no more than the factor between the smallest and the largest known one. (The latter bounds
larger ones as well.)"""

LEFT_OUT: Final = 5
"""The slowest one in this many batches is ignored, as anything may hold a batch up. With fewer ignored, a
busy machine would hide that batches fit side by side; with more, nobody would notice that some wait for
room."""

SHAPES_MAX: Final = 64
SEEN_MAX: Final = 1 << 14
VOLUMES_MAX: Final = 1024
WINDOW: Final = 16


class _Firsts:
    """How many times as long the first batch of a size in a context takes as those after it."""

    __slots__ = ("_ratios", "ratio")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self.ratio = 1.0

    @property
    def is_known(self) -> bool:
        return len(self._ratios) >= PAIRS

    def observe(self, first_ns: float, later_ns: float) -> None:
        """Note how long the first batches of a size took, and a later one."""
        self._ratios.append(first_ns / later_ns)
        if self.is_known:
            ratio = median(self._ratios)
            self.ratio = ratio if ratio > SLOW_FIRST_MIN else 1.0


class _Times:
    """How long batches of a shape compute alone, by their rows."""

    __slots__ = ("_first", "_firsts", "_known", "_later", "_ratio", "_sizes")

    def __init__(self, firsts: _Firsts) -> None:
        self._firsts = firsts
        # By rows: of the first in each context, and of all others.
        self._first: dict[int, deque[int]] = {}
        self._later: dict[int, deque[int]] = {}
        self._sizes: list[int] = []
        # What follows from these, and how many times as long first ones took when that was worked out.
        self._known: dict[int, float] = {}
        self._ratio = 1.0

    def observe(self, rows: int, compute_ns: int, *, is_first: bool) -> None:
        """Note how long a batch computed, and whether it was the first of its size in its context."""
        if not is_first and rows in self._first:
            self._firsts.observe(_usual(self._first[rows]), compute_ns)
        windows = self._first if is_first else self._later
        window = windows.get(rows)
        if window is None:
            window = windows[rows] = deque(maxlen=WINDOW)
            self._sizes = sorted({*self._first, *self._later})
        window.append(compute_ns)
        self._known.clear()

    def is_sure(self, rows: int) -> bool:
        """Return whether nothing more has to be known of this very size."""
        return len(self._later.get(rows, ())) >= SURE_SAMPLES

    def has_first(self, rows: int) -> bool:
        """Return whether the first batch of a size was seen, so that later ones can be compared with it."""
        return rows in self._first

    def is_known(self, rows: int) -> bool:
        """Return whether the time of a size is known, or can be told from that of two others."""
        sizes = self._sizes
        if rows in sizes:
            return True
        if len(sizes) < 2:
            return False
        least, most = sizes[0], sizes[-1]
        # Two that are close to one another say little about a third.
        span = most / least
        return least / span <= rows <= most * min(span, BEYOND_MAX)

    def expected_ns(self, rows: int) -> float:
        """Return the time of a size: what was seen, or a line through others; 0 if none is known."""
        if self._ratio != self._firsts.ratio:
            self._ratio = self._firsts.ratio
            self._known.clear()
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._estimate(rows)
        return known

    def _estimate(self, rows: int) -> float:
        sizes = self._sizes
        if not sizes:
            return 0.0
        if rows in sizes or len(sizes) < 2:
            return self._usual_ns(rows if rows in sizes else sizes[0])
        at = bisect(sizes, rows)
        # Beyond what was seen, along all of it: rather too short than too long, as larger batches seldom
        # become cheaper by the row.
        below, above = (sizes[at - 1], sizes[at]) if 0 < at < len(sizes) else (sizes[0], sizes[-1])
        below_ns, above_ns = self._usual_ns(below), self._usual_ns(above)
        expected_ns = below_ns + (above_ns - below_ns) * (rows - below) / (above - below)
        return max(expected_ns, below_ns * min(rows / below, 1))

    def _usual_ns(self, rows: int) -> float:
        """Return the usual time of a size that is known."""
        if self.is_sure(rows):
            return _usual(self._later[rows])
        # None takes longer than larger ones.
        return min(map(self._seen_ns, (size for size in self._sizes if size >= rows)))

    def _seen_ns(self, rows: int) -> float:
        """Return what batches of a size took after the first, as far as it is known."""
        later = self._later.get(rows)
        return _usual(self._first[rows]) / self._ratio if later is None else _usual(later)


def _usual(times_ns: Collection[int]) -> float:
    """Return the lower quartile of some times: anything may have made a batch take longer."""
    return float(sorted(times_ns)[(len(times_ns) - 1) // 4])


class _Work(NamedTuple):
    """What a device does at a time."""

    beside: float
    """The lanes that computed at once, on average."""
    rate: float
    """The batches' worth of work that they did, in terms of what each computes for alone."""
    growth: float
    """How much more work batches of twice the size would do in the same time, one after the other."""
    error: float = 0.0
    """By what part of it the rate may be off, as the batches differ: the standard error."""


class _Sample(NamedTuple):
    """How long a batch computed beside others. It is compared with what is known when it is asked."""

    beside: float
    """How many lanes computed meanwhile, on average."""
    took_ns: int
    """How long it computed."""
    shape: Hashable
    times: _Times
    """What is known of its shape."""
    rows: int
    """Its rows."""
    rows_run: int
    """The rows that the device executed for them."""
    size: int
    """Its class."""


class _Trial:
    """Other lanes for the batches of a class, and of all smaller ones, or larger ones if they are fewer."""

    __slots__ = (
        "base",
        "base_samples",
        "begins",
        "cause",
        "is_held",
        "landed",
        "lanes",
        "least",
        "met",
        "samples",
        "size",
        "tried",
        "unknown",
    )

    def __init__(self, size: int, lanes: int, tried: int, base: _Work | None, least: int) -> None:
        self.cause = self.size = size
        """The class of which batches had to wait for their turn."""
        self.least = least
        """The first class that would have more lanes, or has as many if they are fewer."""
        self.lanes, self.tried = lanes, tried
        self.base = base
        """What the device does with the lanes that there are. Until it is known, nothing else is tried."""
        self.base_samples: list[_Sample] = []
        """The batches that showed it, if it had to be shown."""
        self.begins = 0
        """The last batch that was launched before."""
        self.samples: list[_Sample] = []
        self.landed = self.met = 0
        """Batches that have ended in it, and how many of those it is about."""
        self.is_held = False
        """Whether it is over, but for what the next batches alone will say."""
        self.unknown: list[tuple[Hashable, int]] = []
        """Shapes and rows of the batches in it of which it is not known what they take alone."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self.cause, self.lanes, self.tried

    @property
    def is_up(self) -> bool:
        return self.tried > self.lanes

    @property
    def beside_min(self) -> float:
        """How many lanes have to compute on average beside a batch that is to say what more of them do."""
        return self.lanes + SIDE_BY_SIDE * (self.tried - self.lanes)

    def begin(self, last: int) -> None:
        """Begin, or begin its second part, with the batches that are launched after one."""
        self.begins = last
        self.landed = self.met = 0
        self.unknown = []

    def takes(self, size: int) -> bool:
        """Return whether it is about batches of a class."""
        return self.least <= size <= self.size if self.is_up else size >= self.size

    def counts(self, beside: float, at_first: int) -> bool:
        """Return whether a batch had enough others beside it, or few enough, to say something."""
        if self.base is None:
            return beside >= self.lanes - ALL_BUT
        if self.is_up:
            return self.has_more(beside, at_first)
        return beside <= self.lanes - SIDE_BY_SIDE * (self.lanes - self.tried)

    def has_more(self, beside: float, at_first: int) -> bool:
        """Return whether enough others computed beside a batch for it to say what more lanes do.

        One that began before the lanes were full has not waited for what comes after it.
        """
        return at_first > self.lanes and beside >= self.beside_min

    def seen(self) -> tuple[int, int]:
        """Return the classes of the smallest and of the largest batches that it has seen more than one of."""
        classes = sorted(sample.size for sample in self.samples)
        return classes[1], classes[-2]


class Lanes:
    """The lanes of one engine: which one a batch goes to, and how many there are for its size.

    :param lanes_max: batches that can compute side by side at most.
    :param rows_max: rows of the largest batch.
    """

    def __init__(self, lanes_max: int, rows_max: int) -> None:
        self._lanes_max = lanes_max
        self._rows_max = rows_max
        self.enqueue_ns: Callable[[Hashable, int], int] | None = None
        """Returns how long it takes to put a batch on the device, where that may be long."""
        self.is_in_haste = True
        """Whether the first trial comes early, and is of all lanes, if full batches have to wait. Not where a
        device is divided by weight: others would get less of it meanwhile."""
        self._users = [0] * lanes_max
        # The lane of each batch that is to compute, or does, and from when on it counts as stuck.
        self._inside: dict[int, tuple[int, int]] = {}
        self._stuck: set[int] = set()
        self._landed = 0
        # Batches that are to compute alone before others are to do so side by side.
        self._to_learn = ALONE_FIRST if lanes_max > 1 else 0
        # Batches that had to wait and of which it is not known what they take alone; after how many some are
        # to compute alone.
        self._strange, self._strange_max = 0, FIRST_TRIAL
        # Of which shape those are to be, and how many rows of it there are to be in each, if that matters.
        self._learned: tuple[Hashable, int] | None = None
        self._shapes: OrderedDict[Hashable, _Times] = OrderedDict()
        self._firsts = _Firsts()
        # Which contexts have had batches of which shapes and rows; the batches that are the first such.
        self._seen: set[tuple[int, Hashable, int]] = set()
        self._first: set[int] = set()
        self._volumes: dict[Hashable, int] = {}
        # The batches that have had the device for themselves so far.
        self._alone: set[int] = set()
        # By class. Never more lanes for larger batches than for smaller ones.
        self._lanes = [1] * CLASSES
        # Batches that had to wait for their turn since the last trial, and how many more have to before the
        # next one may begin.
        self._contended = [0] * CLASSES
        self._until_trial = 0
        # What larger batches would have gained, summed over those, and over how many.
        self._growth, self._grown = [0.0] * CLASSES, [0] * CLASSES
        self._wait = [FIRST_TRIAL] * CLASSES
        self._is_down_next = [False] * CLASSES
        # Full batches that had to wait, without any other in between, and after how many others are tried.
        self._full = 0
        self._full_max = FULL_BATCHES
        self._trial: _Trial | None = None
        # Those for more lanes that were given up, as few batches came that they are about.
        self._unfinished: dict[tuple[int, int, int], _Trial] = {}
        # What a trial has just shown that was a success, for the next one.
        self._proved: _Trial | None = None
        # Of the batches on the device, by lane: since when, and how long such are copied, if known.
        self._running: list[dict[int, tuple[int, tuple[int, int] | None]]] = [{} for _ in range(lanes_max)]
        # Of batches that have landed in a trial: which one, how long they computed, and beside how many, on
        # average and when they began.
        self._noted: dict[int, tuple[_Trial, int, float, int]] = {}
        # When each lane computed last; when the number of lanes that compute changed, and to what.
        self._computed_ns = [0] * lanes_max
        self._computing = 0
        self._log: deque[tuple[int, int]] = deque(maxlen=LOG_MAX)

    def __repr__(self) -> str:
        return f"<Lanes {self._users}>"

    def allowed(self, shape: Hashable, rows: int) -> int:
        """Return the lanes for batches of this size."""
        if self._landed < WARM_UP:
            return self._lanes_max
        if self._lanes_max == 1:
            return 1
        size = self._class_of(shape, rows)
        trial, lanes = self._trial, self._lanes[size]
        if self.is_put_slowly(shape, rows):
            return min(max(SLOW_LANES, lanes), self._lanes_max)
        if trial is None or trial.base is None or trial.is_held or not trial.takes(size):
            return lanes
        return max(lanes, trial.tried) if trial.is_up else min(lanes, trial.tried)

    def is_put_slowly(self, shape: Hashable, rows: int) -> bool:
        """Return whether to put such a batch on the device takes about as long as to compute it alone."""
        if self.enqueue_ns is None or (times := self._shapes.get(shape)) is None:
            return False
        return 0 < SLOW_MIN * times.expected_ns(rows) <= self.enqueue_ns(shape, rows)

    def chosen(self) -> dict[int, int]:
        """Return the lanes by the most rows of the batches that have them; of several shapes, the most."""
        found = {}
        for bits in range(1, self._rows_max.bit_length() + 1):
            rows = min((1 << bits) - 1, self._rows_max)
            lanes = max((self._lanes[self._class_of(shape, rows)] for shape in self._shapes), default=1)
            if lanes > 1:
                found[rows] = lanes
        return found

    @property
    def wants_one_alone(self) -> bool:
        """Return whether nothing is to be launched beside what computes, nor behind it, unless it seems to
        hang."""
        return self._to_learn > 0

    def wants_time(self, lane: int, shape: Hashable, rows_run: int) -> bool:
        """Return whether a batch is to be timed because it computes alone, as few of its size have."""
        if self._lanes_max == 1 or len(self._inside) > self._users[lane]:
            return False
        times = self._shapes.get(shape)
        return times is None or not times.is_sure(rows_run)

    @property
    def is_trying(self) -> bool:
        """Return whether the next batches are to be timed, as they decide how many lanes there are."""
        return self._trial is not None

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
        """Return so many lanes at most that are not stuck."""
        if not self._stuck:
            return range(count)
        return [lane for lane in range(self._lanes_max) if lane not in self._stuck][:count]

    def acquire(self, shape: Hashable, rows: int, free_ns: Callable[[int], int]) -> int:
        """Return the lane for a batch that is launched now: the one with the fewest, the first of equals.

        :param free_ns: returns when a lane is expected to have computed all that is in it.
        """
        lanes = self.usable(self.allowed(shape, rows)) or range(self._lanes_max)
        if len(lanes) == 1:
            return lanes[0]
        users = self._users
        fewest = min(users[lane] for lane in lanes)
        equals = [lane for lane in lanes if users[lane] == fewest]
        # Where each has batches, the one that is done first.
        return min(equals, key=free_ns) if fewest else equals[0]

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
            kind = batch.context, batch.key.cost_key, batch.rows_run
            if kind not in self._seen:
                if len(self._seen) == SEEN_MAX:
                    self._seen.clear()
                self._seen.add(kind)
                self._first.add(batch.number)
            if len(self._inside) > self._users[lane]:
                self._alone.clear()
            else:
                self._alone.add(batch.number)
            # With the last lane taken, the next one would have to wait.
            is_last = self._users.count(0) == (not self._users[lane])
            if self._users[lane] or is_last:
                self._contends(batch)
            else:
                self._full, self._full_max = 0, FULL_BATCHES
        self._users[lane] += 1
        self._inside[batch.number] = lane, now_ns + STUCK_NS_MIN

    def _contends(self, batch: Batch) -> None:
        """Note a batch that had to wait for its turn, or after which the next one would have to."""
        shape = batch.key.cost_key
        size = self._class_of(shape, batch.rows)
        if not self._is_known(batch):
            # It would never compute alone beside smaller ones that have more lanes.
            self._strange += self._lanes[size] < self._lanes[0]
            if self._strange >= self._strange_max and not self._to_learn and self._trial is None:
                self._strange, self._strange_max = 0, min(4 * self._strange_max, NEXT_TRIAL_MAX)
                self._learn_from(shape, batch.rows)
            return
        is_full = batch.rows == self._rows_max
        count = FULL_COUNTS if is_full and self._hurries(size) else 1
        if self._has_long_been_full(is_full=is_full):
            count = self._wait[size]
            self._growth, self._grown = [0.0] * CLASSES, [0] * CLASSES
        self._until_trial = self._until_trial - count if self._contended[size] else 0
        self._contended[size] += count
        self._growth[size] += count * self._gain_of_growth(self._times(shape), batch.rows)
        self._grown[size] += count

    def _has_long_been_full(self, *, is_full: bool) -> bool:
        """Count full batches in a row; return whether they are so many that other lanes are to be tried.

        However long the pause was to be: the trial that it follows may have been of other batches.
        """
        if not is_full:
            self._full, self._full_max = 0, FULL_BATCHES
            return False
        self._full += 1
        if self._full < self._full_max or self._trial is not None or not self.is_in_haste:
            return False
        self._full_max *= 2
        return True

    def started(self, batch: Batch, now_ns: int, copies_ns: tuple[int, int] | None) -> None:
        """Note that a batch is on the device, and how long such are copied in and out, if that is known."""
        inside = self._inside.get(batch.number)
        if inside is not None and self._lanes_max > 1:
            running = self._running[inside[0]]
            if not running:
                self._change(1, now_ns)
            running[batch.number] = now_ns, copies_ns

    def landed(self, batch: Batch, now_ns: int) -> None:
        """Note that a batch has computed. Idempotent."""
        inside = self._inside.get(batch.number)
        if inside is None:
            return
        lane = inside[0]
        running = self._running[lane].get(batch.number)
        self._leave(batch.number, now_ns)
        self._landed += 1
        self._to_learn = max(self._to_learn - 1, 0)
        if running is None:
            self._pass_by(batch)
            return
        started_ns, copies_ns = running
        if copies_ns is None:
            self._computed_ns[lane] = now_ns
            self._pass_by(batch)
            return
        # The device measures less where streams share a hardware queue, whose batches keep one another from
        # beginning.
        begin_ns, end_ns = max(started_ns + copies_ns[0], self._computed_ns[lane]), now_ns - copies_ns[1]
        self._computed_ns[lane] = end_ns
        if self._landed <= WARM_UP:
            return
        trial = self._trial
        if trial is None and self._until_trial <= 0:
            self._consider()
        elif trial is None and self._unfinished:
            size = self._class_of(batch.key.cost_key, batch.rows)
            trial = next((trial for trial in self._unfinished.values() if trial.takes(size)), None)
        if trial is not None:
            self._noted[batch.number] = trial, end_ns - begin_ns, *self._beside(begin_ns, end_ns)

    def is_usual(self, batch: Batch) -> bool:
        """Return whether a timed batch had no more batches beside it than those of its size usually have."""
        if self._lanes_max == 1 or batch.number in self._alone:
            return True
        return self._lanes[self._class_of(batch.key.cost_key, batch.rows)] > 1

    def ended(self, batch: Batch, compute_ns: int = 0) -> None:
        """Note that nothing more will be asked about a batch, and how long it computed, if measured."""
        # Only by the device: ends that are seen late, several at once, would make batches look short.
        if compute_ns > 0 and batch.number in self._alone:
            times, is_first = self._times(batch.key.cost_key), batch.number in self._first
            times.observe(batch.rows_run, compute_ns, is_first=is_first)
        self._alone.discard(batch.number)
        self._first.discard(batch.number)
        if (trial := self._trial) is not None and trial.is_held and not self._to_learn:
            self._judge(trial)
        noted = self._noted.pop(batch.number, None)
        if noted is not None:
            # And more where the batch was on the device before that could be told, by a launch that took
            # long, as the first of a graph does.
            self._note(noted[0], batch, max(noted[1], compute_ns), noted[2], noted[3])

    def forget(self, batch: Batch) -> None:
        """Drop a batch that failed: it says nothing about others."""
        if self._leave(batch.number, self._log[-1][0] if self._log else 0):
            self._to_learn = max(self._to_learn - 1, 0)
        self.ended(batch)

    def forget_times(self, shape: Hashable) -> None:
        """Forget what batches of a shape take alone; the next ones show that anew."""
        self._shapes.pop(shape, None)
        self._volumes.pop(shape, None)
        self._seen = {kind for kind in self._seen if kind[1] != shape}

    def _leave(self, number: int, now_ns: int) -> bool:
        inside = self._inside.pop(number, None)
        if inside is None:
            return False
        lane = inside[0]
        self._stuck.discard(lane)
        self._users[lane] -= 1
        running = self._running[lane]
        if number in running:
            del running[number]
            if not running:
                self._change(-1, now_ns)
        return True

    def _change(self, by: int, now_ns: int) -> None:
        self._computing += by
        self._log.append((max(now_ns, self._log[-1][0]) if self._log else now_ns, self._computing))

    def _beside(self, begin_ns: int, end_ns: int) -> tuple[float, int]:
        """Return how many lanes computed in a time that has just ended: on average, and at its beginning."""
        area, upto_ns, computing = 0, end_ns, 1
        for changed_ns, computing in reversed(self._log):
            since_ns = max(changed_ns, begin_ns)
            if since_ns < upto_ns:
                area += computing * (upto_ns - since_ns)
                upto_ns = since_ns
            if changed_ns <= begin_ns:
                break
        return max(area / max(end_ns - begin_ns, 1), 1.0), computing

    def _times(self, shape: Hashable) -> _Times:
        times = self._shapes.get(shape)
        if times is None:
            times = self._shapes[shape] = _Times(self._firsts)
            if len(self._shapes) > SHAPES_MAX:
                self._shapes.popitem(last=False)
        return times

    def _note(self, trial: _Trial, batch: Batch, took_ns: int, beside: float, at_first: int) -> None:
        """Note what a batch says about what is tried, or would be if more such came."""
        if batch.number <= trial.begins or trial.is_held:
            return
        is_tried = trial is self._trial
        if not is_tried and (self._trial is not None or self._unfinished.get(trial.key) is not trial):
            return
        trial.landed += 1
        shape = batch.key.cost_key
        size = self._class_of(shape, batch.rows)
        if not self._is_known(batch):
            if is_tried:
                trial.unknown.append((shape, batch.rows))
        elif trial.takes(size):
            trial.met += 1
            if trial.counts(beside, at_first) if is_tried else trial.has_more(beside, at_first):
                times = self._times(shape)
                trial.samples.append(_Sample(beside, took_ns, shape, times, batch.rows, batch.rows_run, size))
                if is_tried or (len(trial.samples) >= PROBE_BATCHES and self._resume(trial.key)):
                    self._judge(trial)
        self._give_up(trial)

    def _pass_by(self, batch: Batch) -> None:
        """Note a batch that says nothing, as it is not known when it computed: no trial waits for better ones
        for ever."""
        trial = self._trial
        if trial is not None and batch.number > trial.begins:
            trial.landed += 1
            self._give_up(trial)

    def _give_up(self, trial: _Trial) -> None:
        """End a trial that has not had enough batches side by side."""
        if trial is not self._trial or trial.is_held or trial.landed < GIVE_UP_BATCHES:
            return
        wait = list(self._wait)
        self._end_trial(trial, is_better=None)
        if 2 * len(trial.unknown) > trial.landed:
            if self._learned is None:
                self._wait = wait  # The next one will know more.
            shape = Counter(shape for shape, _ in trial.unknown).most_common(1)[0][0]
            self._learn_from(shape, median_low(rows for other, rows in trial.unknown if other == shape))
        elif trial.met < PROBE_BATCHES:
            self._wait = wait  # Hardly any had more lanes, or fewer.
            if trial.is_up:
                self._unfinished[trial.key] = trial

    def _learn_from(self, shape: Hashable, rows: int) -> None:
        """Have the next batches compute alone; one of ``shape`` has at most this many rows."""
        self._learned = shape, rows
        # Once those have ended that are under way.
        self._to_learn = len(self._inside) + ALONE_TO_LEARN

    def _doubts_firsts(self, trial: _Trial, fewer: _Work, more: _Work) -> bool:
        """Return whether more lanes may seem to pay only because first batches are slow; if so, have some
        compute alone to find out."""
        at_worst = more._replace(rate=more.rate / FIRST_RATIO_MAX)
        if self._firsts.is_known or _pays(fewer, at_worst, 1)[0]:
            return False
        one = next((one for one in trial.samples if one.times.has_first(one.rows_run)), None)
        if one is not None:
            self._learn_from(one.shape, one.rows)
        return one is not None

    def rows_to_learn(self, shape: Hashable, rows_max: int) -> int:
        """Return how many rows a batch that is to compute alone has at most."""
        if self._learned is None or shape != self._learned[0]:
            return rows_max
        return min(rows_max, self._learned[1])

    def _is_known(self, batch: Batch) -> bool:
        """Return whether it is known how long a batch computes alone."""
        times = self._shapes.get(batch.key.cost_key)
        return times is not None and times.is_known(batch.rows_run)

    def _class_of(self, shape: Hashable, rows: int) -> int:
        volume = self._volumes.get(shape)
        if volume is None:
            if len(self._volumes) > VOLUMES_MAX:
                self._volumes.clear()
            volume = self._volumes[shape] = _volume(shape)
        return min((rows * volume).bit_length(), CLASSES - 1)

    def _hurries(self, size: int) -> bool:
        """Return whether a class has had no trial yet, and its first one may come early."""
        return self.is_in_haste and self._wait[size] == FIRST_TRIAL

    def _consider(self) -> None:
        """Try other lanes for the largest batches of which enough have waited for their turn, and for all
        that are smaller and have as many."""
        chosen, until = None, NEXT_TRIAL_MAX
        first = waited = 0
        for size, count in enumerate(self._contended):
            if self._lanes[size] != self._lanes[first]:
                first, waited = size, 0
            if not count:
                continue
            waited += count
            if waited >= self._wait[size]:
                chosen = first, size + 1
            else:
                until = min(until, self._wait[size] - waited)
        if chosen is None:
            self._until_trial = until
        else:
            those = slice(*chosen)
            grown = sum(self._grown[those])
            self._begin_trial(chosen[1] - 1, sum(self._growth[those]) / grown if grown else 1.0)

    def _begin_trial(self, chosen: int, growth: float) -> None:
        """Try other lanes for a class.

        :param growth: how much more work larger batches would have done than those that waited.
        """
        lanes = self._lanes[chosen]
        # What proved itself once may not any more, as others use the device too.
        is_down = lanes == self._lanes_max or (lanes > 1 and self._is_down_next[chosen])
        # How many fewer is decided when it is known what the device does with these.
        tried = lanes - 1 if is_down else min(2 * lanes, self._lanes_max)
        base, base_samples = self._proved_for(chosen, is_down=is_down)
        self._proved = None
        if lanes == 1:
            base = _Work(1.0, 1.0, growth)
            if self._hurries(chosen) and growth <= FULL_GROWTH_MAX:
                tried = self._lanes_max
        if lanes < self._lanes[0]:
            tried = min(tried, self._lanes[0])  # The smallest batches, which want most, want no more.
        if self._resume((chosen, lanes, tried)):
            return
        least = next(size for size, its in enumerate(self._lanes) if its < tried or its == lanes)
        trial = self._trial = _Trial(chosen, lanes, tried, base, least)
        trial.base_samples = base_samples
        trial.begin(self._last_launched())
        if is_down:
            # Also those that are smaller and have as many: beside them, larger ones with fewer show nothing.
            trial.size = least
            if base is not None:
                self._go_down(trial, base)

    def _resume(self, key: tuple[int, int, int]) -> bool:
        """Go on with a trial that was given up; return whether there is one."""
        trial = self._unfinished.pop(key, None)
        if trial is None:
            return False
        self._trial = trial
        trial.begin(self._last_launched())
        return True

    def _last_launched(self) -> int:
        return max(self._inside, default=0)

    def _proved_for(self, size: int, *, is_down: bool) -> tuple[_Work | None, list[_Sample]]:
        """Return what the device does with the lanes of a class, and what shows it, if the last trial has."""
        proved, lanes = self._proved, self._lanes[size]
        if proved is None or proved.size < size or proved.tried != lanes or lanes == 1:
            return None, []
        found = self._work(proved.samples)
        if is_down and (found.beside < lanes - ALL_BUT or found.error > BASE_ERROR_MAX):
            return None, []
        return found, proved.samples

    def _go_down(self, trial: _Trial, base: _Work) -> None:
        """Try as many lanes as would do the same work if batches in them did not notice one another.

        Not fewer than half as many: if they do notice, requests queue up meanwhile.
        """
        trial.tried = max(min(ceil(base.rate - ROUNDED), trial.lanes - 1), trial.lanes // 2)
        if _is_beyond(base, trial.tried):
            self._end_trial(trial, is_better=False)

    def _work(self, samples: Sequence[_Sample]) -> _Work:
        """Return what some batches side by side say."""
        alone_ns = [one.times.expected_ns(one.rows_run) for one in samples]
        longer = [max(one.took_ns / its_ns, 1.0) for one, its_ns in zip(samples, alone_ns, strict=True)]
        # Together, as where a batch has to wait for room, short ones wait as long as others.
        mean, error = _mean(longer, alone_ns)
        beside = fmean(one.beside for one in samples)
        growth = fmean(self._gain_of_growth(one.times, one.rows) for one in samples)
        return _Work(beside, beside / mean, growth, error)

    def _are_as_good_alone(self, samples: Sequence[_Sample]) -> bool:
        """Return whether batches are as well computed one after the other, as far as can be told."""
        if len(samples) < PROBE_BATCHES:
            return False
        found = self._work(samples)
        most = found.rate * (1 + DOUBT * found.error)
        return most < GAIN_MIN * found.growth and not _pays(_Work(1.0, 1.0, found.growth), found, -DOUBT)[0]

    def _gain_of_growth(self, times: _Times, rows: int) -> float:
        """Return how much more work batches of twice this size do in the same time, one after the other."""
        larger = min(2 * rows, self._rows_max)
        alone_ns, larger_ns = times.expected_ns(rows), times.expected_ns(larger)
        return max(1.0, larger / rows * alone_ns / larger_ns) if larger_ns else 1.0

    def _judge(self, trial: _Trial) -> None:
        """End the trial, or its first part, when it has shown enough."""
        count = len(trial.samples)
        if count < PROBE_BATCHES:
            return
        found = self._work(trial.samples)
        if trial.base is None:
            self._judge_base(trial, found)
            return
        # With fewer lanes it shows what batches take alone, so what was seen before may say something else.
        base = self._work(trial.base_samples) if trial.base_samples else trial.base
        fewer, more = (base, found) if trial.is_up else (found, base)
        if more.beside - fewer.beside < SIDE_BY_SIDE * abs(trial.tried - trial.lanes):
            # Beside batches of other classes there were as many before.
            fewer = _Work(1.0, 1.0, fewer.growth)
        # What there is stays unless it was shown that it should not.
        doubt = 1 if trial.is_up else -1
        pays, added = _pays(fewer, more, doubt)
        if not trial.is_held:
            surely, perhaps = (_pays(fewer, more, doubt)[0] for doubt in (DOUBT, -DOUBT))
            if surely is not perhaps and (count < TRIAL_BATCHES or found.error > ERROR_MAX):
                return
            trial.is_held = pays and trial.is_up and self._doubts_firsts(trial, fewer, more)
            if trial.is_held:
                return
        if pays and trial.is_up:
            # Of much larger batches it has shown nothing.
            size = trial.size + 1 if added >= FREE_MIN else trial.size
            trial.size = min(size, trial.seen()[1] + 2, CLASSES - 1)
            # Nor, where all lanes were tried at once, of twice as many as computed.
            twice = 2 * trial.lanes
            while twice < more.beside:
                twice *= 2
            trial.tried = min(trial.tried, twice)
        if added <= FULL_MAX:
            self._wait[trial.size] = min(4 * self._wait[trial.size], NEXT_TRIAL_MAX)
        self._end_trial(trial, is_better=pays is trial.is_up)

    def _judge_base(self, trial: _Trial, found: _Work) -> None:
        """Begin to try other lanes, once it is known what those do that there are."""
        if trial.is_up:
            if found.beside >= trial.beside_min:
                # Smaller batches have as many, so it is known already what these do beside them.
                self._end_trial(trial, is_better=_is_beyond(found, trial.lanes))
                return
        elif found.error > BASE_ERROR_MAX and len(trial.samples) < BASE_BATCHES:
            return  # It costs nothing to wait for more, as nothing else is tried yet.
        elif self._are_as_good_alone([one for one in trial.samples if one.size >= trial.cause]):
            # There may never be few enough beside these to see that, if smaller batches have more lanes.
            trial.size, trial.tried = trial.cause, 1
            self._end_trial(trial, is_better=True)
            return
        trial.base, trial.base_samples, trial.samples = found, trial.samples, []
        trial.begin(self._last_launched())
        if not trial.is_up:
            self._go_down(trial, found)

    def _end_trial(self, trial: _Trial, *, is_better: bool | None) -> None:
        """End a trial.

        :param is_better: whether what was tried is; ``None`` if there was no telling.
        """
        size, tried, is_up = trial.size, trial.tried, trial.is_up
        self._trial = None
        if is_better:
            self._unfinished.clear()
        self._contended, self._growth, self._grown = [0] * CLASSES, [0.0] * CLASSES, [0] * CLASSES
        if is_better and is_up:
            self._lanes[: size + 1] = [max(tried, other) for other in self._lanes[: size + 1]]
            # If even that is not enough, the next ones are tried at once.
            wait = PROBE_BATCHES if tried < self._lanes_max else 16 * FIRST_TRIAL
            self._wait[: size + 1] = [wait] * (size + 1)
            self._proved = trial
            return
        if is_better:
            self._lanes[size:] = [min(tried, other) for other in self._lanes[size:]]
            # If those are still too many, fewer are tried at once.
            self._wait[size:] = [FIRST_TRIAL] * (CLASSES - size)
            self._is_down_next[size : trial.cause + 1] = [True] * (trial.cause + 1 - size)
            self._proved = trial
            return
        size = trial.cause
        self._is_down_next[size] = is_up and is_better is not None
        # Where there was no telling, or nothing was tried as it could not be better, there may soon be more.
        pause = min((4 if is_better is False and trial.samples else 2) * self._wait[size], NEXT_TRIAL_MAX)
        if is_up and len(trial.samples) > 1:
            # Neither will larger batches gain, but those may that are smaller than all that were seen.
            size = min(size, trial.seen()[0])
        for other, lanes in enumerate(self._lanes):
            # Of those that have another number of lanes, this has shown nothing.
            if lanes == trial.lanes:
                is_like = other >= size if is_up else other <= size
                self._wait[other] = max(pause if is_like else pause // 4, self._wait[other])


def _mean(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values without the largest ones, and its standard error as a part of it."""
    ordered = sorted(zip(values, weights, strict=True))
    kept, its_weights = zip(*ordered[: len(ordered) - len(ordered) // LEFT_OUT], strict=True)
    mean = fmean(kept, its_weights)
    return mean, stdev(kept) / sqrt(len(kept)) / mean if len(kept) > 1 else 0.0


def _pays(fewer: _Work, more: _Work, doubt: int) -> tuple[bool, float]:
    """Return whether more lanes pay, and how much of a lane's worth of work each further one adds.

    :param doubt: by how many standard errors what was measured may flatter them.
    """
    most, least = more.rate * (1 - doubt * more.error), fewer.rate * (1 + doubt * fewer.error)
    added = (most - least) / max(more.beside - fewer.beside, 0.1)
    # What twice as many would do, if these are not.
    gain = 1 + added * fewer.beside / max(least, 0.1)
    return added >= FREE_MIN or gain >= GAIN_MIN * fewer.growth, added


def _is_beyond(found: _Work, fewer: int) -> bool:
    """Return whether what is done is surely worth more lanes than ``fewer``, even if batches in those did not
    notice one another at all. To try would cost latency, much of it under load."""
    return _pays(_Work(fewer, fewer, found.growth), found, DOUBT)[0]


def _volume(shape: Hashable) -> int:
    """Return how much is in a row of a shape, as its dimensions that may differ tell: their product."""
    volume = 1
    if isinstance(shape, tuple):
        for entry in shape:
            size = entry[-1] if isinstance(entry, tuple) and entry else entry
            if isinstance(size, int):
                volume *= max(size, 1)
    return volume
