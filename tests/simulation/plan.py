"""Predicts what a load does to one device or a fleet of them: throughput, latency, goodput, what is shed."""

import gc
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
import numpy.typing as npt

from asynctrt import clock
from asynctrt.errors import AsynctrtError, DeadlineError, OptionsError
from asynctrt.loadtest.criteria import LATENCIES, PERCENTILES, latency_target_ms
from asynctrt.options import MAX_ROWS_DEFAULT, Options
from asynctrt.scheduling.batch import Batch, RejectedBatch
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.simulation.arrivals import Arrival, Load
from tests.simulation.device import Flight, VirtualDevice
from tests.simulation.engine import VirtualEngine
from tests.simulation.latency import LatencyModel
from tests.simulation.settings import SimulationSettings
from tests.simulation.timeline import Timeline

GPU_CONCURRENCY: Final = 2
"""Batches that keep a GPU busy, as ``CudaDevice`` has it."""
CONTEXTS_ON_GPU: Final = 4
LOOK_EVERY: Final = 4096
"""Arrivals after which it is told how far it is, and may be stopped."""
BATCHES_KEPT: Final = 200

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Collected:
    """What was counted. Times are in ns, of the answered requests in the order of their answers."""

    arrived_ns: list[int] = field(default_factory=list)
    answered_ns: list[int] = field(default_factory=list)
    deadlines_ns: list[int] = field(default_factory=list)
    shed_ns: list[int] = field(default_factory=list)
    """When requests arrived that were refused, or whose deadline passed in the queue."""
    shed: Counter[str] = field(default_factory=Counter)
    """These by why."""
    cancelled: int = 0
    requests: int = 0
    rows: int = 0
    by_rows: Counter[int] = field(default_factory=Counter)
    queue_ns: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0
    last: deque[tuple[Flight, int]] = field(default_factory=lambda: deque(maxlen=BATCHES_KEPT))
    """The last batches, and when they were answered."""


class _Watcher:
    """Counts what happens to one engine, in as few steps as possible."""

    def __init__(self, into: Collected) -> None:
        self._into = into
        self._in_flight = 0
        self.drain: _Drain | None = None
        """Told of everything, where requests are given to the device that is done first."""

    def submitted(self, request: Request) -> None:
        if self.drain is not None:
            self.drain.taken(request.rows)

    def displaced(self, requests: list[Request], by: Request) -> None:
        for request in requests:
            self._shed(request, "displaced")
            if self.drain is not None:
                self.drain.taken(-request.rows)

    def refused(self, request: Request, error: Exception) -> None:
        self._shed(request, "deadline" if isinstance(error, DeadlineError) else "queue full")

    def cancelled(self, request: Request, *, was_queued: bool) -> None:
        self._into.cancelled += 1
        if was_queued and self.drain is not None:
            self.drain.taken(-request.rows)

    def expired(self, requests: list[Request], now_ns: int, arrived_by_ns: int) -> None:
        for request in requests:
            self._shed(request, "deadline")
            if self.drain is not None:
                self.drain.taken(-request.rows)

    def launched(self, batch: Batch, now_ns: int) -> None:
        self._in_flight += 1
        if self.drain is not None:
            self.drain.launched(batch)

    def expected(self, batch: Batch, expected_ns: int | None) -> None:
        pass

    def rejected(self, batch: RejectedBatch) -> None:
        pass

    def row_refused(self, request: Request) -> None:
        pass

    def answered(self, flight: Flight, now_ns: int) -> None:
        into, batch = self._into, flight.batch
        requests: Sequence[Request] = batch.requests
        done = State.DONE
        arrived = [request.arrival_ns for request in requests if request.state is done]
        count = len(arrived)
        into.arrived_ns += arrived
        into.answered_ns += [now_ns] * count
        into.deadlines_ns += [
            min(request.deadline_ns + request.reserve_ns, NO_DEADLINE_NS)
            for request in requests
            if request.state is done
        ]
        into.by_rows[batch.rows] += 1
        into.rows += batch.rows
        into.queue_ns += batch.launched_ns * count - sum(arrived)
        into.copy_in_ns += flight.copy_in_ns * count
        into.compute_ns += flight.compute_ns * count
        into.copy_out_ns += flight.copy_out_ns * count
        into.last.append((flight, now_ns))
        self._in_flight -= 1
        if self.drain is not None and not self._in_flight:
            self.drain.idle()

    def failed(self, batch: Batch, *, quarantine: bool) -> None:
        pass

    def bisected(self, batch: Batch) -> None:
        pass

    def arena_lost(self, arena: int) -> None:
        pass

    def closed(self, requests: list[Request], error: AsynctrtError) -> None:
        pass

    def pumped(self, now_ns: int) -> None:
        pass

    def _shed(self, request: Request, why: str) -> None:
        self._into.shed[why] += 1
        self._into.shed_ns.append(request.arrival_ns)


class _Drain:
    """When one device is expected to be done with all that it was given."""

    __slots__ = ("_at_once", "_change", "_latency", "_number", "_queued", "_row_ns", "_timeline", "_until_ns")

    def __init__(
        self,
        number: int,
        timeline: Timeline,
        latency: LatencyModel,
        rows_max: int,
        at_once: int,
        change: Callable[[int, int], None],
    ) -> None:
        self._number = number
        self._timeline = timeline
        self._latency = latency
        self._at_once = at_once
        self._change = change
        # What waits is expected to run in full batches.
        self._row_ns = latency.table.cost(rows_max).total_ns // rows_max // at_once
        self._queued = 0
        self._until_ns = 0

    def taken(self, rows: int) -> None:
        """Note rows that were queued; fewer than 0: that left the queue."""
        self._queued += rows
        self._tell()

    def launched(self, batch: Batch) -> None:
        """Note a batch."""
        self._queued -= batch.rows
        takes_ns = self._latency.cost(batch.key.shape, batch.rows_run).total_ns // self._at_once
        self._until_ns = max(self._until_ns, self._timeline.now_ns) + takes_ns
        self._tell()

    def idle(self) -> None:
        """Note that nothing is in flight."""
        self._until_ns = self._timeline.now_ns
        self._tell()

    def _tell(self) -> None:
        self._change(self._number, self._until_ns + self._queued * self._row_ns)


class _Fleet:
    """Devices, and which of them takes a request."""

    def __init__(
        self, settings: SimulationSettings, make: Callable[[], VirtualEngine], watch: Callable[..., _Drain]
    ) -> None:
        self.engines = [make() for _ in range(settings.devices)]
        self._in_turn = settings.balance == "round-robin"
        self._next = 0
        # When each is expected to be done, the earliest on top. An entry that is no longer true is skipped.
        self._ends_ns = [0] * settings.devices
        self._heap = [(0, number) for number in range(settings.devices)]
        if settings.devices > 1 and not self._in_turn:
            for number, engine in enumerate(self.engines):
                watcher = engine.observer
                assert isinstance(watcher, _Watcher)
                watcher.drain = watch(number, self._change)

    def submit(self, arrival: Arrival) -> None:
        """Give a request to a device."""
        if len(self.engines) == 1:
            self.engines[0].submit(arrival)
        elif self._in_turn:
            self.engines[self._next].submit(arrival)
            self._next = (self._next + 1) % len(self.engines)
        else:
            heap, ends_ns = self._heap, self._ends_ns
            while heap[0][0] != ends_ns[heap[0][1]]:
                heappop(heap)
            self.engines[heap[0][1]].submit(arrival)

    def _change(self, number: int, end_ns: int) -> None:
        self._ends_ns[number] = end_ns
        if len(self._heap) > 8 * len(self._ends_ns) + 64:
            self._heap = [(its_ns, place) for place, its_ns in enumerate(self._ends_ns)]
            heapify(self._heap)
        else:
            heappush(self._heap, (end_ns, number))


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a prediction follows from."""

    load: Load
    latency: LatencyModel
    settings: SimulationSettings
    options: Options
    seed: int = 0

    @property
    def rows_max(self) -> int:
        """Rows that one batch holds."""
        return self.options.max_rows or MAX_ROWS_DEFAULT

    @property
    def arenas(self) -> int:
        """Arenas; 0 for a device whose threads compute."""
        return self.options.arenas or 0

    @property
    def contexts(self) -> int:
        """Contexts: as many as an engine has by default, if the options do not say."""
        usual = CONTEXTS_ON_GPU if self.arenas else 2 * self.latency.lanes
        return self.options.contexts or max(usual, self.arenas)


def make_plan(
    arrivals: str, latency: LatencyModel, settings: SimulationSettings, options: Options, seed: int
) -> Plan:
    """Put a plan together.

    :raises OptionsError: for parts that contradict each other.
    :raises UsageError: for a trace that cannot be read.
    """
    changed = {
        name: value
        for name in ("lanes", "interference", "jitter")
        if (value := getattr(settings, name)) is not None
    }
    load = settings.load(arrivals, options.timeout, seed)
    plan = Plan(load, replace(latency, **changed), settings, options, seed)
    if load.priority_max >= options.priorities:
        raise OptionsError(
            f"a request has priority {load.priority_max}, and there are {options.priorities}, from 0 on: set "
            f"priorities to {load.priority_max + 1} or more"
        )
    if load.rows_max > plan.rows_max:
        raise OptionsError(
            f"a request has {load.rows_max} rows and a batch holds {plan.rows_max}; an engine would split "
            "it. Give max_rows as large as that, or smaller requests"
        )
    if settings.warmup >= load.seconds > 0:
        raise OptionsError(f"the trace is {load.seconds:g} s long, and warmup is {settings.warmup:g}")
    return plan


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted. Latencies are in ms by name, rates in requests/s."""

    complete: bool
    """False if it was stopped: the figures are of what was simulated until then."""
    seconds: float
    requests: int
    answered: int
    throughput: float
    goodput: float | None
    """Answers/s within their deadline and the latency of the slo; ``None`` without either."""
    shed_share: float
    shed: Mapping[str, int]
    """Requests that were refused or expired, by why."""
    cancelled: int
    latency: Mapping[str, float]
    batches: int
    mean_rows: float
    busy_share: float
    """The share of the time in which the devices' lanes computed."""
    slo: Mapping[str, bool]
    """Whether each criterion was met."""
    events: int
    took_s: float
    """Real seconds that simulating it took."""

    def figure(self, name: str) -> float | None:
        """Return a figure by its name in criteria; ``None`` if it is not known."""
        if name in ("throughput", "goodput"):
            return self.throughput if name == "throughput" else self.goodput
        return self.shed_share if name == "errors" else self.latency.get(name)


def simulate_plan(
    plan: Plan, advance: Callable[[float], bool] = lambda _: True
) -> tuple[Prediction, Collected]:
    """Simulate a load.

    :param advance: called now and then with the share that is done; it returns False to stop.
    """
    # A world makes no cycles, and looking for them among the objects of a fleet takes longer than all else.
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _simulate(plan, advance)
    finally:
        if was_on:
            gc.enable()


def _simulate(plan: Plan, advance: Callable[[float], bool]) -> tuple[Prediction, Collected]:
    started_ns = clock.now_ns()
    timeline, collected = Timeline(), Collected()
    fleet = _fleet(plan, timeline, collected)
    is_over, events = True, 0
    expected = max(plan.load.expected, 1.0)
    for events, arrival in enumerate(plan.load.arrivals(), start=1):
        if arrival.due_ns > timeline.now_ns:
            timeline.run_until(arrival.due_ns)
        fleet.submit(arrival)
        if not events % LOOK_EVERY and not advance(min(events / expected, 1.0)):
            is_over = False
            break
    collected.requests = events
    end_ns = timeline.now_ns
    if is_over:
        end_ns = max(end_ns, int(plan.load.seconds * 1e9))
        while timeline.entries:
            timeline.run_until(timeline.entries[0][0] + 1_000_000)
            if not advance(1.0):
                is_over = False
                break
    took_s = (clock.now_ns() - started_ns) / 1e9
    return _predicted(plan, fleet, collected, end_ns, took_s, complete=is_over), collected


def _fleet(plan: Plan, timeline: Timeline, collected: Collected) -> _Fleet:
    latency, settings, options, arenas = plan.latency, plan.settings, plan.options, plan.arenas
    contexts = plan.contexts
    in_flight_max = min(options.max_in_flight or contexts, contexts)
    concurrency = settings.concurrency or (GPU_CONCURRENCY if arenas else latency.lanes)
    lanes_max = min(arenas or 1, in_flight_max)
    policy = Policy(
        rows_max=plan.rows_max,
        delay_ns_max=int(options.max_delay * 1e9),
        concurrency=min(concurrency + (lanes_max - 1 if arenas else 0), in_flight_max),
        is_parallel=settings.split or latency.splits,
        is_pipelined=arenas > 0,
        lanes_max=lanes_max,
        answers_in_time=options.timeout_until == "answer",
        target=options.target,
    )
    rng = random.Random(plan.seed)

    def make() -> VirtualEngine:
        scheduler = Scheduler(
            policy=policy,
            shapes=Shapes(rows_max=plan.rows_max, profiles=None),
            queue_rows_max=options.max_queue_rows,
            priorities=options.priorities,
            contexts=contexts,
            arenas=arenas,
            in_flight_max=in_flight_max,
            times_all=not arenas,
        )
        device = VirtualDevice(timeline, latency, arenas, rng)
        return VirtualEngine(timeline, scheduler, device, _Watcher(collected), has_arenas=arenas > 0)

    def watch(number: int, change: Callable[[int, int], None]) -> _Drain:
        # Lanes that hinder one another fully are as one.
        width = arenas or latency.lanes
        at_once = max(1, round(width / (1 + latency.interference * (width - 1))))
        return _Drain(number, timeline, latency, plan.rows_max, at_once, change)

    return _Fleet(settings, make, watch)


def _predicted(
    plan: Plan, fleet: _Fleet, collected: Collected, end_ns: int, took_s: float, *, complete: bool
) -> Prediction:
    settings = plan.settings
    warmup_ns = int(settings.warmup * 1e9)
    seconds = max(end_ns - warmup_ns, 1) / 1e9
    arrived, answered, deadlines = (
        np.array(values, np.int64)
        for values in (collected.arrived_ns, collected.answered_ns, collected.deadlines_ns)
    )
    is_due = arrived >= warmup_ns
    took = answered - arrived
    latency = percentiles(took[is_due])
    ends_in_time = (answered >= warmup_ns) & (answered <= end_ns)
    limit_ms = latency_target_ms(settings.criteria)
    goodput = None
    if limit_ms is not None or (len(deadlines) and bool((deadlines != NO_DEADLINE_NS).any())):
        is_good = ends_in_time & (answered <= deadlines)
        if limit_ms is not None:
            is_good &= took <= limit_ms * 1e6
        goodput = float(is_good.sum()) / seconds
    shed = sum(time_ns >= warmup_ns for time_ns in collected.shed_ns)
    counted = int(is_due.sum()) + shed
    busy_ns = sum(engine.device.busy_ns for engine in fleet.engines)
    lanes_ns = sum(engine.device.width for engine in fleet.engines) * max(end_ns, 1)
    batches = collected.by_rows.total()
    made = Prediction(
        complete=complete,
        seconds=seconds,
        requests=collected.requests,
        answered=len(arrived),
        throughput=float(ends_in_time.sum()) / seconds,
        goodput=goodput,
        shed_share=shed / counted if counted else 0.0,
        shed=dict(collected.shed),
        cancelled=collected.cancelled,
        latency=latency,
        batches=batches,
        mean_rows=collected.rows / batches if batches else 0.0,
        busy_share=min(busy_ns / lanes_ns, 1.0),
        slo={},
        events=sum(engine.events for engine in fleet.engines),
        took_s=took_s,
    )
    return replace(made, slo=_held(plan, made, took[is_due], shed))


def _held(plan: Plan, made: Prediction, took: Ints, shed: int) -> dict[str, bool]:
    """Return whether each criterion was met. What was shed counts as one that took for ever."""
    found = {}
    for item in plan.settings.criteria:
        value = made.figure(item.figure)
        if item.figure in PERCENTILES:
            within = int((took <= item.limit * 1e6).sum())
            ended = len(took) + shed
            found[str(item)] = ended > 0 and within >= float(item.figure[1:]) / 100 * ended
        elif item.figure in LATENCIES:
            found[str(item)] = value is not None and not shed and item.compare(value)
        else:
            found[str(item)] = value is not None and item.compare(value)
    return found


def percentiles(took_ns: Ints) -> dict[str, float]:
    """Return percentiles, mean and maximum in ms, without those for which there are too few values.

    As for load tests: the largest of them has to bound the percentile with 95% confidence.
    """
    found: dict[str, float] = {}
    if not len(took_ns):
        return found
    took_ns = np.sort(took_ns)
    for name in PERCENTILES:
        share = float(name[1:]) / 100
        if len(took_ns) >= math.ceil(math.log(0.05) / math.log(share)):
            found[name] = float(took_ns[math.ceil(round(share * len(took_ns), 6)) - 1]) / 1e6
    found["mean"] = float(took_ns.mean()) / 1e6
    found["max"] = float(took_ns[-1]) / 1e6
    return found
