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

What is learned holds for batches by how much is in them, be it many small rows or few large ones: of one
model, batches with less leave more of the device idle. So what a trial shows for some holds for all that are
smaller, or for all that are larger, and sixteen shapes learn as fast as one.

Where it takes about as long to put a batch on the device as to compute it, there are two lanes in any case:
two threads put batches there at the same time, and the device waits for them all the same.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from math import ceil, sqrt
from statistics import fmean
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

SHAPES_MAX: Final = 64
VOLUMES_MAX: Final = 1024
WINDOW: Final = 16


class _Times:
    """How long batches compute alone, by their rows."""

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

    def is_known(self, rows: int) -> bool:
        """Return whether this size was seen, or two others."""
        return rows in self._by_rows or len(self._by_rows) > 1

    def expected_ns(self, rows: int) -> float:
        """Return the time of a size: what was seen, or a line through others; 0 if none was seen."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._estimate(rows)
        return known

    def _estimate(self, rows: int) -> float:
        if rows in self._by_rows:
            return self._usual_ns(rows)
        if len(self._by_rows) < 2:
            return self._usual_ns(next(iter(self._by_rows))) if self._by_rows else 0.0
        least, most = min(self._by_rows), max(self._by_rows)
        below = max((size for size in self._by_rows if size < rows), default=least)
        above = min((size for size in self._by_rows if size > rows), default=most)
        if below == above or not below < rows < above:
            # Beyond what was seen, along all of it: rather too short than too long, as larger batches
            # seldom become cheaper by the row.
            below, above = least, most
        below_ns, above_ns = self._usual_ns(below), self._usual_ns(above)
        expected_ns = below_ns + (above_ns - below_ns) * (rows - below) / (above - below)
        return max(expected_ns, below_ns * min(rows / below, 1))

    def _usual_ns(self, rows: int) -> float:
        """Return the usual time of a size that was seen."""
        window = self._by_rows[rows]
        if len(window) >= SURE_SAMPLES:
            return _usual(window)
        # The first of a size may take far longer, which none does than larger ones.
        return min(_usual(other) for size, other in self._by_rows.items() if size >= rows)


def _usual(times_ns: Collection[int]) -> float:
    """Return the lower quartile of some times: the first of a shape may take far longer than all others."""
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
    """What a batch side by side with others says."""

    beside: float
    """How many lanes computed meanwhile, on average."""
    longer: float
    """How many times longer than alone it computed."""
    growth: float
    """How much more work batches of twice its size would do in the same time."""
    size: int
    """Its class."""
    alone_ns: float
    """How long it computes alone."""


def _work_of(samples: Sequence[_Sample]) -> _Work:
    """Return what some batches side by side say."""
    beside = fmean(sample.beside for sample in samples)
    # Anything may hold a batch up, so a few that took very long say nothing.
    ordered = sorted([(sample.longer, sample.alone_ns) for sample in samples])
    quarter = len(ordered) // 4
    middle, alone = zip(*ordered[quarter : len(ordered) - quarter], strict=True)
    # All of them together: where a batch has to wait for room, short ones wait as long as others.
    longer = fmean(middle, alone)
    error = (middle[-1] - middle[0]) / longer / sqrt(len(ordered))
    growth = fmean(sample.growth for sample in samples)
    return _Work(beside, beside / longer, growth, error)


class _Trial:
    """Other lanes for the batches of a class, and of all smaller ones, or larger ones if they are fewer."""

    __slots__ = ("base", "begins", "cause", "landed", "lanes", "samples", "size", "tried", "unknown")

    def __init__(self, size: int, lanes: int, tried: int, base: _Work | None) -> None:
        self.cause = self.size = size
        """The class of which batches had to wait for their turn."""
        self.lanes, self.tried = lanes, tried
        self.base = base
        """What the device does with the lanes that there are. Until it is known, nothing else is tried."""
        self.begins = 0
        """The last batch that was launched before."""
        self.samples: list[_Sample] = []
        self.landed = self.unknown = 0
        """Batches that have ended in it, and those of which it is not known what they take alone."""

    def takes(self, size: int) -> bool:
        """Return whether it is about batches of a class."""
        return size <= self.size if self.tried > self.lanes else size >= self.size

    def counts(self, beside: float, at_first: int) -> bool:
        """Return whether a batch had enough others beside it, or few enough, to say something.

        Those that began before the lanes were full have not waited for what comes after them.
        """
        if self.base is None:
            return beside >= self.lanes - ALL_BUT
        if self.tried > self.lanes:
            return at_first > self.lanes and beside >= self.lanes + SIDE_BY_SIDE * (self.tried - self.lanes)
        return beside <= self.lanes - SIDE_BY_SIDE * (self.lanes - self.tried)

    def work(self) -> _Work:
        """Return what its samples say."""
        return _work_of(self.samples)

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
        self._shapes: OrderedDict[Hashable, _Times] = OrderedDict()
        self._volumes: dict[Hashable, int] = {}
        # The batches that have had the device for themselves so far.
        self._alone: set[int] = set()
        # By class. Never more lanes for larger batches than for smaller ones.
        self._lanes = [1] * CLASSES
        # Batches that had to wait for their turn since the last trial, and how many more have to before the
        # next one may begin.
        self._contended = [0] * CLASSES
        self._until_trial = 0
        # What larger batches would have gained, summed over those.
        self._growth = [0.0] * CLASSES
        self._wait = [FIRST_TRIAL] * CLASSES
        self._is_down_next = [False] * CLASSES
        self._trial: _Trial | None = None
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
        if trial is None or trial.base is None or not trial.takes(size):
            return lanes
        return max(lanes, trial.tried) if trial.tried > trial.lanes else min(lanes, trial.tried)

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
            if len(self._inside) > self._users[lane]:
                self._alone.clear()
            else:
                self._alone.add(batch.number)
            # With the last lane taken, the next one would have to wait.
            is_last = self._users.count(0) == (not self._users[lane])
            if (self._users[lane] or is_last) and self._is_known(batch):
                size = self._class_of(batch.key.cost_key, batch.rows)
                count = FULL_COUNTS if self._hurries(size) and batch.rows == self._rows_max else 1
                self._until_trial = self._until_trial - count if self._contended[size] else 0
                self._contended[size] += count
                self._growth[size] += count * self._gain_of_growth(batch)
        self._users[lane] += 1
        self._inside[batch.number] = lane, now_ns + STUCK_NS_MIN

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
        if self._trial is not None:
            self._noted[batch.number] = self._trial, end_ns - begin_ns, *self._beside(begin_ns, end_ns)
        elif self._until_trial <= 0:
            self._consider(batch)

    def is_usual(self, batch: Batch) -> bool:
        """Return whether a timed batch had no more batches beside it than those of its size usually have."""
        if self._lanes_max == 1 or batch.number in self._alone:
            return True
        return self._lanes[self._class_of(batch.key.cost_key, batch.rows)] > 1

    def ended(self, batch: Batch, compute_ns: int = 0) -> None:
        """Note that nothing more will be asked about a batch, and how long it computed, if measured."""
        # Only by the device: ends that are seen late, several at once, would make batches look short.
        if compute_ns > 0 and batch.number in self._alone:
            self._times(batch.key.cost_key).observe(batch.rows_run, compute_ns)
        self._alone.discard(batch.number)
        noted = self._noted.pop(batch.number, None)
        if noted is not None and noted[0] is self._trial:
            # And more where the batch was on the device before that could be told, by a launch that took
            # long, as the first of a graph does.
            self._note(noted[0], batch, max(noted[1], compute_ns), noted[2], noted[3])

    def forget(self, batch: Batch) -> None:
        """Drop a batch that failed: it says nothing about others."""
        if self._leave(batch.number, self._log[-1][0] if self._log else 0):
            self._to_learn = max(self._to_learn - 1, 0)
        self.ended(batch)

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
            times = self._shapes[shape] = _Times()
            if len(self._shapes) > SHAPES_MAX:
                self._shapes.popitem(last=False)
        return times

    def _note(self, trial: _Trial, batch: Batch, took_ns: int, beside: float, at_first: int) -> None:
        """Note what a batch says about what is tried."""
        if batch.number <= trial.begins:
            return
        shape, rows = batch.key.cost_key, batch.rows_run
        size = self._class_of(shape, batch.rows)
        trial.landed += 1
        if not self._is_known(batch):
            trial.unknown += 1
        elif trial.takes(size) and trial.counts(beside, at_first):
            alone_ns = self._times(shape).expected_ns(rows)
            longer = max(took_ns / alone_ns, 1.0)
            trial.samples.append(_Sample(beside, longer, self._gain_of_growth(batch), size, alone_ns))
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
        if trial is not self._trial or trial.landed < GIVE_UP_BATCHES:
            return
        if 2 * trial.unknown > trial.landed:
            # Those that are under way count as well: to wait for four after them costs a device with work for
            # many lanes more than it tells.
            self._to_learn = ALONE_FIRST
        self._end_trial(trial, is_better=None)

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

    def _consider(self, batch: Batch) -> None:
        """Try other lanes for the largest batches of which enough have waited for their turn, and for all
        that are smaller."""
        chosen, waited, until = None, 0, NEXT_TRIAL_MAX
        for size, count in enumerate(self._contended):
            if not count:
                continue
            waited += count
            if waited >= self._wait[size]:
                chosen, waited_of_chosen = size, waited
            else:
                until = min(until, self._wait[size] - waited)
        if chosen is None:
            self._until_trial = until
            return
        lanes = self._lanes[chosen]
        # What proved itself once may not any more, as others use the device too.
        is_down = lanes == self._lanes_max or (lanes > 1 and self._is_down_next[chosen])
        # How many fewer is decided when it is known what the device does with these.
        tried = lanes - 1 if is_down else min(2 * lanes, self._lanes_max)
        base = self._proved_for(chosen, is_down=is_down)
        self._proved = None
        if lanes == 1:
            base = _Work(1.0, 1.0, sum(self._growth[: chosen + 1]) / waited_of_chosen)
            if self._hurries(chosen) and base.growth <= FULL_GROWTH_MAX:
                tried = self._lanes_max
        trial = self._trial = _Trial(chosen, lanes, tried, base)
        trial.begins = max(self._inside, default=batch.number)
        if is_down:
            # Also those that are smaller and have as many: beside them, larger ones with fewer show nothing.
            trial.size = self._lanes.index(lanes)
            if base is not None:
                self._go_down(trial, base)

    def _proved_for(self, size: int, *, is_down: bool) -> _Work | None:
        """Return what the device does with the lanes of a class, if the trial before has just shown it."""
        proved, lanes = self._proved, self._lanes[size]
        if proved is None or proved.size < size or proved.tried != lanes:
            return None
        found = proved.work()
        if is_down and (found.beside < lanes - ALL_BUT or found.error > BASE_ERROR_MAX):
            return None
        return found

    def _go_down(self, trial: _Trial, base: _Work) -> None:
        """Try as many lanes as would do the same work if batches in them did not notice one another.

        Not fewer than half as many: if they do notice, requests queue up meanwhile.
        """
        trial.tried = max(min(ceil(base.rate - ROUNDED), trial.lanes - 1), trial.lanes // 2)
        if _is_beyond(base, trial.tried):
            self._end_trial(trial, is_better=False)

    def _gain_of_growth(self, batch: Batch) -> float:
        """Return how much more work batches of twice this size do in the same time, one after the other."""
        times, rows = self._times(batch.key.cost_key), batch.rows
        larger = min(2 * rows, self._rows_max)
        alone_ns, larger_ns = times.expected_ns(rows), times.expected_ns(larger)
        return max(1.0, larger / rows * alone_ns / larger_ns) if larger_ns else 1.0

    def _judge(self, trial: _Trial) -> None:
        """End the trial, or its first part, when it has shown enough."""
        count = len(trial.samples)
        if count < PROBE_BATCHES:
            return
        found = trial.work()
        if trial.base is None:
            self._judge_base(trial, found)
            return
        is_up = trial.tried > trial.lanes
        fewer, more = (trial.base, found) if is_up else (found, trial.base)
        if more.beside - fewer.beside < SIDE_BY_SIDE * abs(trial.tried - trial.lanes):
            # Beside batches of other classes there were as many before.
            fewer = _Work(1.0, 1.0, fewer.growth)
        # What there is stays unless it was shown that it should not.
        doubt = 1 if is_up else -1
        pays, added = _pays(fewer, more, doubt)
        surely, perhaps = (_pays(fewer, more, doubt)[0] for doubt in (DOUBT, -DOUBT))
        if surely is not perhaps and (count < TRIAL_BATCHES or found.error > ERROR_MAX):
            return
        if pays and is_up:
            # Of much larger batches it has shown nothing.
            size = trial.size + 1 if added >= FREE_MIN else trial.size
            trial.size = min(size, trial.seen()[1] + 2, CLASSES - 1)
        if added <= FULL_MAX:
            self._wait[trial.size] = min(4 * self._wait[trial.size], NEXT_TRIAL_MAX)
        self._end_trial(trial, is_better=pays is is_up)

    def _judge_base(self, trial: _Trial, found: _Work) -> None:
        """Begin to try other lanes, once it is known what those do that there are."""
        if trial.tried > trial.lanes:
            if _is_beyond(found, trial.tried):
                self._end_trial(trial, is_better=False)
                return
        elif found.error > BASE_ERROR_MAX and len(trial.samples) < BASE_BATCHES:
            return  # It costs nothing to wait for more, as nothing else is tried yet.
        elif _are_as_good_alone([one for one in trial.samples if one.size >= trial.cause]):
            # There may never be few enough beside these to see that, if smaller batches have more lanes.
            trial.size, trial.tried = trial.cause, 1
            self._end_trial(trial, is_better=True)
            return
        trial.base, trial.samples = found, []
        trial.landed = trial.unknown = 0
        trial.begins = max(self._inside, default=0)
        if trial.tried < trial.lanes:
            self._go_down(trial, found)

    def _end_trial(self, trial: _Trial, *, is_better: bool | None) -> None:
        """End a trial.

        :param is_better: whether what was tried is; ``None`` if there was no telling.
        """
        size, tried = trial.size, trial.tried
        is_up = tried > trial.lanes
        self._trial = None
        self._contended, self._growth = [0] * CLASSES, [0.0] * CLASSES
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
        pause = min((2 if is_better is None else 4) * self._wait[size], NEXT_TRIAL_MAX)
        if is_up:
            # Neither will larger batches gain, and those smaller than all that were seen less likely.
            if len(trial.samples) > 1:
                size = min(size, trial.seen()[0])
            self._wait[size:] = [max(pause, other) for other in self._wait[size:]]
            self._wait[:size] = [max(pause // 4, other) for other in self._wait[:size]]
        else:
            # Nor are there too many for smaller ones.
            self._wait[: size + 1] = [max(pause, other) for other in self._wait[: size + 1]]


def _pays(fewer: _Work, more: _Work, doubt: int) -> tuple[bool, float]:
    """Return whether more lanes pay, and how much of a lane's worth of work each further one adds.

    :param doubt: by how many standard errors what was measured may flatter them.
    """
    most, least = more.rate * (1 - doubt * more.error), fewer.rate * (1 + doubt * fewer.error)
    added = (most - least) / max(more.beside - fewer.beside, 0.1)
    # What twice as many would do, if these are not.
    gain = 1 + added * fewer.beside / max(least, 0.1)
    return added >= FREE_MIN or gain >= GAIN_MIN * fewer.growth, added


def _are_as_good_alone(samples: Sequence[_Sample]) -> bool:
    """Return whether batches are as well computed one after the other, as far as can be told."""
    if len(samples) < PROBE_BATCHES:
        return False
    found = _work_of(samples)
    most = found.rate * (1 + DOUBT * found.error)
    return most < GAIN_MIN * found.growth and not _pays(_Work(1.0, 1.0, found.growth), found, -DOUBT)[0]


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
