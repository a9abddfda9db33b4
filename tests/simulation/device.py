"""A device that only takes time: copies in and out in turn, computing in lanes that may hinder each other."""

import math
import random
from collections import deque
from collections.abc import Callable

from asynctrt.scheduling.batch import Batch
from tests.simulation.latency import LatencyModel
from tests.simulation.timeline import Timeline


class Flight:
    """One batch on the device."""

    __slots__ = (
        "batch",
        "behind",
        "compute_ns",
        "copied_in_ns",
        "copy_in_ns",
        "copy_out_ns",
        "decided",
        "error",
        "group",
        "hangs",
        "is_copied_in",
        "landed",
        "left_ns",
        "started_ns",
        "waits",
    )

    arena_wait_ns = 0

    def __init__(
        self,
        batch: Batch,
        landed: Callable[["Flight"], None],
        group: int = 0,
        decided: Batch | None = None,
    ) -> None:
        self.batch = batch
        self.decided = batch if decided is None else decided
        """The same batch as the scheduler knows it."""
        self.group = group
        """Whose it is, of several engines on the device."""
        self.landed = landed
        """Called when the device is done with it."""
        self.copy_in_ns = self.compute_ns = self.copy_out_ns = 0
        self.copied_in_ns = self.started_ns = 0
        """When it was in place, and when it began to compute."""
        self.left_ns = 0.0
        """How long it would still compute alone."""
        self.hangs = False
        """Whether it never ends computing."""
        self.error: Exception | None = None
        """How it ends, if not well."""
        self.waits = False
        """Whether the batch before it in its lane has still to compute."""
        self.behind: Flight | None = None
        """The batch behind it in its lane."""
        self.is_copied_in = False


class _Lane:
    """Where one batch computes after the other: an arena, or a number of threads."""

    __slots__ = ("free", "waiting")

    def __init__(self, width: int) -> None:
        self.free = width
        self.waiting: deque[Flight] = deque()


class VirtualDevice:
    """Takes the time that a model of the latency says.

    :param arenas: batches in one arena compute one after the other; 0: ``latency.lanes`` threads compute.
    :param groups: engines that have as many arenas each; 1: all share the same.
    """

    def __init__(
        self,
        timeline: Timeline,
        latency: LatencyModel,
        arenas: int,
        rng: random.Random,
        *,
        groups: int = 1,
        change_ns: int = 0,
    ) -> None:
        self._change_ns = change_ns
        self._ran: dict[tuple[int, int], tuple[object, int]] = {}
        self._timeline = timeline
        self.latency = latency
        """What batches cost."""
        self._random = rng
        self._groups, self._arenas = groups, arenas
        self._lanes = [_Lane(1) for _ in range(arenas * groups)] or [_Lane(latency.lanes)]
        self._last_in_lane: dict[tuple[int, int], Flight] = {}
        self._copied_in_ns = self._copied_out_ns = 0
        self.width = arenas or latency.lanes
        """Batches that can compute at once."""
        self.busy_ns = 0
        """The time that batches have computed, summed over lanes."""
        sigma = math.sqrt(math.log1p(latency.jitter**2))
        self._sigma = sigma
        self._mu = -sigma * sigma / 2  # So that the mean stays what it is.
        self._active: dict[Flight, None] = {}
        self._advanced_ns = 0
        self._version = 0

    def start(self, flight: Flight, slow: float = 1.0) -> None:
        """Run a batch from now on.

        :param slow: how many times longer it computes than usual.
        """
        batch = flight.batch
        flight.copy_in_ns, compute_ns, flight.copy_out_ns = self.latency.cost(batch.key.shape, batch.rows_run)
        if self._sigma:
            slow *= self._random.lognormvariate(self._mu, self._sigma)
        flight.compute_ns = compute_ns if slow == 1.0 else max(1, round(compute_ns * slow))
        if self._change_ns:
            where, ran = (flight.group, batch.context), (batch.key.shape, batch.rows_run)
            flight.compute_ns += self._change_ns * (self._ran.get(where) != ran)
            self._ran[where] = ran
        now_ns = self._timeline.now_ns
        if batch.lane is not None:
            where = flight.group, batch.lane
            if (before := self._last_in_lane.get(where)) is not None:
                flight.waits, before.behind = True, flight
            self._last_in_lane[where] = flight
        if flight.copy_in_ns:
            # One engine copies in, one batch after the other.
            self._copied_in_ns = max(self._copied_in_ns, now_ns) + flight.copy_in_ns
            self._timeline.at(self._copied_in_ns, self._copied_in, flight)
        elif self._copied_in_ns > now_ns:
            self._timeline.at(self._copied_in_ns, self._copied_in, flight)
        else:
            self._copied_in(flight)

    def abandon(self, flight: Flight) -> None:
        """Let no batch that comes wait for one that hangs. Those that wait for it already do so for ever."""
        if flight.batch.lane is None:
            return
        where = flight.group, flight.batch.lane
        if self._last_in_lane.get(where) is flight:
            del self._last_in_lane[where]

    def _copied_in(self, flight: Flight) -> None:
        if not flight.is_copied_in:
            flight.is_copied_in, flight.copied_in_ns = True, self._timeline.now_ns
        if flight.waits:
            return
        lane = self._lane(flight)
        if lane.free:
            lane.free -= 1
            self._compute(flight)
        else:
            lane.waiting.append(flight)

    def _lane(self, flight: Flight) -> _Lane:
        return self._lanes[flight.group % self._groups * self._arenas + (flight.batch.arena or 0)]

    def _compute(self, flight: Flight) -> None:
        now_ns = flight.started_ns = self._timeline.now_ns
        if flight.hangs:
            return  # And nothing else computes in its lane ever again.
        if not self.latency.interference:
            self._timeline.at(now_ns + flight.compute_ns, self._computed, flight)
            return
        self._advance()
        flight.left_ns = float(flight.compute_ns)
        self._active[flight] = None
        self._await_next()

    def _advance(self) -> None:
        """Note how far the batches have come that compute side by side."""
        now_ns = self._timeline.now_ns
        if self._active:
            done_ns = (now_ns - self._advanced_ns) / self._slowdown
            for flight in self._active:
                flight.left_ns -= done_ns
        self._advanced_ns = now_ns

    @property
    def _slowdown(self) -> float:
        return 1 + self.latency.interference * (len(self._active) - 1)

    def _await_next(self) -> None:
        self._version += 1
        if self._active:
            left_ns = min(flight.left_ns for flight in self._active) * self._slowdown
            self._timeline.at(
                self._timeline.now_ns + max(0, math.ceil(left_ns)), self._ended_beside, self._version
            )

    def _ended_beside(self, version: int) -> None:
        if version != self._version:
            return  # Others have come or gone since.
        self._advance()
        ended = [flight for flight in self._active if flight.left_ns <= 0.5]
        for flight in ended:
            del self._active[flight]
        for flight in ended:
            # Its device takes its time with others beside it, as a real one would.
            flight.compute_ns = self._timeline.now_ns - flight.started_ns
            self._computed(flight)
        self._await_next()

    def _computed(self, flight: Flight) -> None:
        timeline = self._timeline
        now_ns = timeline.now_ns
        self.busy_ns += flight.compute_ns
        lane = self._lane(flight)
        if lane.waiting:
            self._compute(lane.waiting.popleft())
        else:
            lane.free += 1
        if (behind := flight.behind) is not None:
            behind.waits, flight.behind = False, None
            if behind.is_copied_in:
                self._copied_in(behind)
        self.abandon(flight)
        copied_ns = now_ns
        if flight.copy_out_ns:
            self._copied_out_ns = copied_ns = max(self._copied_out_ns, now_ns) + flight.copy_out_ns
        # The loop notices it as one more event, also where that takes no time.
        timeline.at(copied_ns, flight.landed, flight)
