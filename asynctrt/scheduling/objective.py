"""How batches are formed so that a share of the requests is answered within a time: ``p99<20ms``.

Work-conserving batches are hard to beat, and are never left for a prediction alone:

- As long as the objective is met, nothing else is tried.
- If it is missed, other choices are played through with the latest arrivals and the measured times: smaller
  batches, fewer at once, batches that are held back although the device is idle. First the batches as they
  are: if what is foretold of these is not what was measured, nothing follows from the rest.
- The best of them is tried if it is said to be better. It is left at once when it turns out worse than it
  was before, and when more waits than it can do; and it has to turn out better twice, with work-conserving
  batches measured in between, which have to be worse. Each attempt in vain is followed by a longer pause.
- What is kept is compared with work-conserving batches again now and then, and left when it is worse than
  those were.

No request is refused: the objective is of all of them and the deadline of none. See ``timeout`` for that.
"""

import math
from collections import deque
from collections.abc import Hashable
from enum import Enum, auto
from typing import Final, NamedTuple

from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.curve import ServiceCurve
from asynctrt.scheduling.replay import WORK_CONSERVING, Choice, Replayed, replay
from asynctrt.scheduling.request import DONE
from asynctrt.scheduling.target import Target

EPOCH: Final = 256
"""Answers by which a choice is judged."""
BATCHES_MIN: Final = 12
"""Batches that these are from at least: those of one batch are late together."""
TRIAL_MIN: Final = 48
"""Answers after which a trial may be given up."""
ARRIVALS: Final = 768
"""Requests that are played through."""
TRUST: Final = 0.15
"""How far off the share may be that is foretold of the batches as they are."""
GAIN_MIN: Final = 0.25
"""The part of the misses that a choice has to be said to avoid."""
REMEMBERED: Final = 1 << 20
"""Batches for which it is remembered what those of other sizes took."""
PAUSE_MAX: Final = 256
"""Epochs between two attempts at most."""
RECHECK_MAX: Final = 64
"""Epochs at most after which what is kept is compared again."""
RATE_GAIN_MIN: Final = 1.1
"""How many times as many rows have to be done where more than a batch waits all the time."""
RATE_GAIN_SAID: Final = 1.25
"""How many times as many that has to be said to be, for a trial."""
RATE_LOSS_MAX: Final = 0.97
"""A trial that does fewer than this part of the rows is left after ``BATCHES_MIN`` batches."""


class Situation(NamedTuple):
    """An objective, and what is done for it. It does not change."""

    target: str
    share: float | None
    """Of the last answers, those within the time; ``None`` before there were enough."""
    choice: Choice
    reason: str
    """Why that was chosen."""
    changes: int
    """How often the choice has changed."""


class _Measured(NamedTuple):
    """How an epoch turned out."""

    share: float
    """Of the requests that arrived in it, those that were answered in time."""
    latency_ns: int
    """Theirs, at the percentile of the target."""
    rows_per_ns: float
    queued_most: int
    """The most rows that were queued when a batch ended."""
    is_saturated: bool
    """Whether there was a batch's worth in the queue all the time: then what is done in a time counts, since
    everybody is late, and those most who come last."""

    def beats(self, other: "_Measured", noise: float) -> bool:
        """Return whether it is better than another, by more than noise in the share."""
        if self.is_saturated and other.is_saturated:
            return self.rows_per_ns >= RATE_GAIN_MIN * other.rows_per_ns
        return self.share >= other.share + noise and (
            other.is_saturated or self.latency_ns <= 1.05 * other.latency_ns
        )


NOTHING: Final = _Measured(0.0, 0, 0.0, 0, is_saturated=False)


class _Phase(Enum):
    WATCH = auto()
    """Work-conserving, as from the start."""
    TRIAL = auto()
    """A choice is tried, for the first or the second time."""
    BETWEEN = auto()
    """Work-conserving between two trials of a choice."""
    KEPT = auto()
    """A choice has proved itself."""
    RECHECK = auto()
    """Work-conserving, to see whether that is as good by now."""


class Objective:
    """What is done for the target of one engine, and how it turns out.

    :param rows_max: rows that a batch holds; ``width``: batches that keep the device busy.
    :param is_split: whether rows are spread over idle threads.
    :param may_limit: whether fewer batches at once may be tried: not where they queue up on the device.
    """

    def __init__(self, target: Target, *, rows_max: int, width: int, is_split: bool, may_limit: bool) -> None:
        self._target = target
        self._rows_max = rows_max
        self._width = width
        self._is_split = is_split
        self._may_limit = may_limit
        self.choice = WORK_CONSERVING
        """How batches are to be formed now."""
        self._reason = "too little is known yet"
        self.changes = 0
        """How often the choice has changed."""
        self._share: float | None = None
        # What batches take, alone and beside others.
        # In a queue that grows all batches are full, and smaller ones are what matters then.
        self._alone = ServiceCurve(quantile=0.5, forgotten_after=REMEMBERED)
        self._beside = ServiceCurve(quantile=0.5, forgotten_after=REMEMBERED)
        self._with_others: set[int] = set()
        self._cost_key: Hashable = None
        # When requests came, their rows, and when they were launched.
        self._arrivals: deque[tuple[int, int, int]] = deque(maxlen=ARRIVALS)
        # The epoch: since when, and what has become of those who arrived in it.
        self._since_ns = 0
        self._latencies: list[int] = []
        self._in_time = self._batches = self._rows = 0
        self._queued_least, self._queued_most = 1 << 62, 0
        self._phase = _Phase.WATCH
        self._pause = self._next_pause = 0
        self._recheck = self._next_recheck = 4
        # How work-conserving batches turned out last, and the epoch before this one.
        self._base = self._last = NOTHING
        self._tried = WORK_CONSERVING
        self._successes = 0
        # What is still to be played through, with which arrivals, and the best so far.
        self._candidates: list[Choice] = []
        self._played: list[tuple[int, int]] = []
        self._played_from_ns = 0
        self._usual: Replayed | None = None
        self._best: tuple[Replayed, Choice] | None = None

    def situation(self) -> Situation:
        """Return what is done, and why."""
        return Situation(str(self._target), self._share, self.choice, self._reason, self.changes)

    def impose(self, choice: Choice) -> None:
        """Form batches in this way, however that turns out: for simulations."""
        self._choose(choice, "it was imposed")

    def held_until_ns(self, rows: int, arrival_ns: int) -> int:
        """Return until when a batch of so many rows that could be launched is held back, in ns.

        :param arrival_ns: since when it waits.
        """
        if not self.choice.delay_ns or rows >= (self.choice.rows_max or self._rows_max):
            return 0
        return arrival_ns + self.choice.delay_ns

    def rows_to_take(self, rows: int) -> int:
        """Return the rows of a batch that would have so many."""
        most = self.choice.rows_max
        return min(rows, most) if most else rows

    def launched(self, batch: Batch, others: list[int]) -> None:
        """Note a batch, and which others are in flight."""
        if others:
            self._with_others.update(others)
            self._with_others.add(batch.number)

    def forget(self, batch: Batch) -> None:
        """Drop a batch that failed."""
        self._with_others.discard(batch.number)

    def finished(self, batch: Batch, now_ns: int, took_ns: int, queued_rows: int) -> None:
        """Note the answers of a batch, and decide.

        :param took_ns: for how long it kept others from being computed.
        """
        is_beside = batch.number in self._with_others
        self._with_others.discard(batch.number)
        if batch.key.cost_key != self._cost_key:
            self._cost_key = batch.key.cost_key
            self._arrivals.clear()
            self._drop_candidates()
        # What takes less than the clock can tell takes some time all the same: it is divided by.
        curve = self._beside if is_beside else self._alone
        curve.observe(self._cost_key, batch.rows_run, max(took_ns, 1))
        within_ns, since_ns = self._target.within_ns, self._since_ns
        for request in batch.requests:
            if request.state is DONE:
                arrived_ns = request.arrival_ns
                self._arrivals.append((arrived_ns, request.rows, batch.launched_ns))
                if arrived_ns >= since_ns:
                    self._latencies.append(now_ns - arrived_ns)
                    self._in_time += now_ns - arrived_ns <= within_ns
        self._batches += 1
        self._rows += batch.rows
        self._queued_least = min(self._queued_least, queued_rows)
        self._queued_most = max(self._queued_most, queued_rows)
        if self._phase is not _Phase.WATCH and self._has_to_stop(now_ns, queued_rows):
            self._give_up(now_ns, f"{self._tried} turned out worse")
        elif self._batches >= BATCHES_MIN and (
            len(self._latencies) >= EPOCH or (self._is_saturated and self._rows >= 2 * EPOCH)
        ):
            self._end_epoch(now_ns)
        elif self._candidates:
            self._play_next(now_ns)

    # ---- how it is decided

    def _has_to_stop(self, now_ns: int, queued_rows: int) -> bool:
        """Return whether what is tried, or kept, is worse than work-conserving batches were."""
        if self.choice == WORK_CONSERVING:
            return False
        if not self._base.is_saturated:
            if queued_rows > max(self._base.queued_most, self._rows_max):
                return True
        elif self._batches >= BATCHES_MIN and self._is_saturated:
            rate = self._rows / max(now_ns - self._since_ns, 1)
            if rate < RATE_LOSS_MAX * self._base.rows_per_ns:
                return True
        count = len(self._latencies)
        if count < TRIAL_MIN:
            return False
        misses = count - self._in_time
        usual = count * (1 - self._base.share)
        return misses > usual + 2 * math.sqrt(max(usual, 1.0)) + 1

    @property
    def _is_saturated(self) -> bool:
        return self._queued_least >= self._rows_max

    def _measured(self, now_ns: int) -> _Measured:
        latencies = sorted(self._latencies)
        count = len(latencies)
        latency_ns = latencies[min(int(self._target.percentile * count), count - 1)] if count else 0
        rate = self._rows / max(now_ns - self._since_ns, 1)
        share = self._in_time / count if count else 0.0
        return _Measured(share, latency_ns, rate, self._queued_most, self._is_saturated)

    def _end_epoch(self, now_ns: int) -> None:
        found, last, phase = self._measured(now_ns), self._last, self._phase
        count = max(len(self._latencies), 1)
        share = self._share = found.share
        self._last = found
        if phase is _Phase.WATCH:
            self._base = found
            self._watch(share)
        elif phase is _Phase.TRIAL:
            base = self._base.share
            if not found.beats(self._base, 2 * math.sqrt(max(base * (1 - base), 1 / count) / count)):
                self._give_up(now_ns, f"{self._tried} did not turn out better")
                return
            self._successes += 1
            if self._successes == 1:
                self._phase = _Phase.BETWEEN
                self._choose(WORK_CONSERVING, f"to compare {self._tried} with, which met {share:.1%}")
            else:
                self._phase, self._recheck = _Phase.KEPT, self._next_recheck
                self._next_pause = 0
                self._reason = f"{share:.1%} in time, {base:.1%} with work-conserving batches"
        elif phase is _Phase.KEPT:
            self._recheck -= 1
            if not self._recheck:
                self._phase = _Phase.RECHECK
                self._choose(WORK_CONSERVING, f"to compare {self._tried} with, which met {share:.1%}")
        elif share >= self._target.percentile or not last.beats(found, 0.0):
            self._give_up(now_ns, "work-conserving batches are as good", pauses=False)
            return
        else:
            self._base = found
            self._phase = _Phase.KEPT if phase is _Phase.RECHECK else _Phase.TRIAL
            if phase is _Phase.RECHECK:
                self._recheck = self._next_recheck = min(2 * self._next_recheck, RECHECK_MAX)
            self._choose(self._tried, f"work-conserving batches met {share:.1%}, and this {last.share:.1%}")
        self._begin_epoch(now_ns)

    def _watch(self, share: float) -> None:
        if share >= self._target.percentile:
            self._reason = f"it is met: {share:.1%} in time"
            self._next_pause = 0
            self._drop_candidates()
        elif self._pause:
            self._pause -= 1
        elif not self._candidates:
            self._candidates = self._possible()
            played = sorted(self._arrivals)
            self._played = [(came_ns, rows) for came_ns, rows, _ in played]
            self._played_from_ns = played[0][2] if played else 0
            if not self._candidates:
                self._reason = "too little is known of what batches take"

    def _possible(self) -> list[Choice]:
        """Return what may be tried, work-conserving batches last: those are played through first."""
        points = self._alone.points(self._cost_key) or self._beside.points(self._cost_key)
        if not points or len(self._arrivals) < EPOCH:
            return []
        most, most_ns = points[-1]
        sizes = {0}
        best = max(points, key=lambda point: point[0] / point[1])[0]
        for rows in (best, most // 2, most // 4):
            if 0 < rows < self._rows_max:
                sizes.add(rows)
        delays = [0]
        spare_ns = self._target.within_ns - most_ns
        if spare_ns > 0:
            delays += [spare_ns // 8, spare_ns // 3, 2 * spare_ns // 3]
        counts = {0, 1, self._width // 2} if self._may_limit and self._width > 1 else {0}
        choices = [
            Choice(rows, count, delay)
            for rows in sorted(sizes)
            for count in sorted(counts)
            for delay in delays
        ]
        choices.remove(WORK_CONSERVING)
        return [*choices, WORK_CONSERVING]

    def _play_next(self, now_ns: int) -> None:
        """Play one choice through, and begin to try the best when all have been."""
        choice = self._candidates.pop()
        found = replay(
            self._played,
            choice,
            self._takes_ns,
            begin_ns=self._played_from_ns,
            rows_max=self._rows_max,
            width=self._width,
            is_split=self._is_split,
            within_ns=self._target.within_ns,
            percentile=self._target.percentile,
        )
        if self._usual is None:
            self._usual = found
            if not self._is_trusted(found.share):
                self._drop_candidates()
                self._rest()
            return
        if self._best is None or (found.share, -found.latency_ns) > (
            self._best[0].share,
            -self._best[0].latency_ns,
        ):
            self._best = found, choice
        if self._candidates:
            return
        usual, (best, choice) = self._usual, self._best
        self._drop_candidates()
        if not self._is_trusted(usual.share):  # Another epoch has ended meanwhile.
            self._rest()
            return
        gain = best.share - usual.share
        is_more = gain >= max(GAIN_MIN * (1 - usual.share), 0.02) and best.latency_ns <= usual.latency_ns
        # Where everybody is late, those who are sooner done with all of it have more in time in the end.
        is_faster = self._base.is_saturated and RATE_GAIN_SAID * best.latency_ns <= usual.latency_ns
        if not is_more and not is_faster:
            self._reason = "nothing else is said to be better"
            self._rest()
            return
        self._tried, self._successes, self._phase = choice, 0, _Phase.TRIAL
        self._choose(
            choice, f"said to have {best.share:.0%} in time instead of {usual.share:.0%}; being tried"
        )
        self._begin_epoch(now_ns)

    def _is_trusted(self, share: float) -> bool:
        """Return whether the share that is foretold of the batches as they are is what was measured."""
        if abs(share - self._base.share) <= TRUST:
            return True
        self._reason = (
            f"what is foretold is not to be trusted: {share:.0%} in time, where it was {self._base.share:.0%}"
        )
        return False

    def _takes_ns(self, rows: int, is_beside: bool) -> int:  # noqa: FBT001  (replay calls it for each batch)
        first, other = (self._beside, self._alone) if is_beside else (self._alone, self._beside)
        found = first.late_ns(self._cost_key, rows)
        return (found if found is not None else other.late_ns(self._cost_key, rows)) or 1

    def _give_up(self, now_ns: int, why: str, *, pauses: bool = True) -> None:
        self._phase = _Phase.WATCH
        self._choose(WORK_CONSERVING, why)
        if pauses:
            self._rest()
        self._begin_epoch(now_ns)

    def _rest(self) -> None:
        self._next_pause = min(max(4, 4 * self._next_pause), PAUSE_MAX)
        self._pause = self._next_pause

    def _drop_candidates(self) -> None:
        self._candidates, self._played = [], []
        self._usual = self._best = None

    def _choose(self, choice: Choice, why: str) -> None:
        self._reason = why
        if choice != self.choice:
            self.choice = choice
            self.changes += 1

    def _begin_epoch(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._latencies = []
        self._in_time = self._batches = self._rows = 0
        self._queued_least, self._queued_most = 1 << 62, 0
