"""What a load does to one simulated device: throughput, latency, what is shed, how much is in time."""

import gc
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asynctrt._util import clock
from asynctrt.errors import DeadlineError
from asynctrt.options import MAX_ROWS_DEFAULT, Options
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.simulation.arrivals import Arrival
from tests.simulation.device import Flight, VirtualDevice
from tests.simulation.engine import Observer, VirtualEngine
from tests.simulation.latency import LatencyModel
from tests.simulation.timeline import Timeline

GPU_CONCURRENCY: Final = 2
"""Batches that keep a GPU busy, as ``CudaDevice`` has it."""
CONTEXTS_ON_GPU: Final = 4

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Result:
    """What a load did. Rates are per second; what came before the warm-up ended is left out of them."""

    requests: int
    answered: int
    cancelled: int
    """Requests whose callers went away, also after the answer."""
    shed: Counter[str]
    """Requests that were refused or expired, by why."""
    shed_share: float
    throughput: float
    goodput: float
    """Answers per second within their deadline and the limit."""
    took_ns: Ints
    """How long answers took, ascending."""
    mean_rows: float
    busy_share: float
    """The share of the time in which the device's lanes computed."""
    events: int
    real_s: float
    """How long it took to simulate."""

    def ms(self, percent: float) -> float:
        """Return a percentile of the latency in ms; 0 without answers."""
        if not len(self.took_ns):
            return 0.0
        place = math.ceil(round(percent / 100 * len(self.took_ns), 6))
        return float(self.took_ns[max(place, 1) - 1]) / 1e6

    @property
    def mean_ms(self) -> float:
        """The mean latency."""
        return float(self.took_ns.mean()) / 1e6


class _Seen(Observer):
    """Counts what happens to an engine."""

    def __init__(self) -> None:
        self.arrived_ns: list[int] = []
        self.answered_ns: list[int] = []
        self.deadlines_ns: list[int] = []
        self.shed_ns: list[int] = []
        self.shed: Counter[str] = Counter()
        self.gone = self.rows = self.batches = 0

    def displaced(self, requests: list[Request], by: Request) -> None:
        self._shed(requests, "displaced")

    def refused(self, request: Request, error: Exception) -> None:
        self._shed([request], "deadline" if isinstance(error, DeadlineError) else "queue full")

    def cancelled(self, request: Request, *, was_queued: bool) -> None:
        self.gone += 1

    def expired(self, requests: list[Request], now_ns: int, arrived_by_ns: int) -> None:
        self._shed(requests, "deadline")

    def answered(self, flight: Flight, now_ns: int) -> None:
        done = [request for request in flight.batch.requests if request.state is State.DONE]
        self.arrived_ns += [request.arrival_ns for request in done]
        self.answered_ns += [now_ns] * len(done)
        self.deadlines_ns += [min(each.deadline_ns + each.reserve_ns, NO_DEADLINE_NS) for each in done]
        self.rows += flight.batch.rows
        self.batches += 1

    def _shed(self, requests: list[Request], why: str) -> None:
        self.shed[why] += len(requests)
        self.shed_ns += [request.arrival_ns for request in requests]


def simulate(
    arrivals: Iterable[Arrival],
    latency: LatencyModel,
    options: dict[str, Any] | None = None,
    *,
    seconds: float,
    warmup: float = 0.0,
    limit_ms: float = math.inf,
    concurrency: int | None = None,
    splits: bool = False,
    seed: int = 0,
) -> Result:
    """Simulate a load on one device, with arenas as on a GPU if the options have them.

    :param options: those of an engine.
    :param limit_ms: what takes longer is not in time.
    :param concurrency: batches that keep the device busy. Default: 2 with arenas, else its lanes.
    :param splits: whether waiting rows are spread over idle lanes, as on the host device.
    """
    sent = list(arrivals)
    # A world makes no cycles, and looking for them takes longer than all else.
    was_on = gc.isenabled()
    gc.disable()
    try:
        started_ns = clock.now_ns()
        timeline, seen = Timeline(), _Seen()
        engine = _engine(timeline, latency, Options(**options or {}), seen, concurrency, splits, seed)
        for arrival in sent:
            if arrival.due_ns > timeline.now_ns:  # What arrives in one instant is looked at together.
                timeline.run_until(arrival.due_ns)
            engine.submit(arrival)
        end_ns = max(timeline.now_ns, int(seconds * 1e9))
        while timeline.entries:
            timeline.run_next()
    finally:
        if was_on:
            gc.enable()
    real_s = (clock.now_ns() - started_ns) / 1e9
    warmup_ns = int(warmup * 1e9)
    measured_s = (end_ns - warmup_ns) / 1e9
    arrived, answered, deadlines = (
        np.array(values, np.int64) for values in (seen.arrived_ns, seen.answered_ns, seen.deadlines_ns)
    )
    took, is_due = answered - arrived, arrived >= warmup_ns
    has_ended = (answered >= warmup_ns) & (answered <= end_ns)
    is_good = has_ended & (answered <= deadlines) & (took <= limit_ms * 1e6)
    shed = sum(time_ns >= warmup_ns for time_ns in seen.shed_ns)
    return Result(
        requests=len(sent),
        answered=len(arrived),
        cancelled=seen.gone,
        shed=seen.shed,
        shed_share=shed / max(int(is_due.sum()) + shed, 1),
        throughput=float(has_ended.sum()) / measured_s,
        goodput=float(is_good.sum()) / measured_s,
        took_ns=np.sort(took[is_due]),
        mean_rows=seen.rows / max(seen.batches, 1),
        busy_share=min(engine.device.busy_ns / (engine.device.width * end_ns), 1.0),
        events=engine.events,
        real_s=real_s,
    )


def _engine(
    timeline: Timeline,
    latency: LatencyModel,
    options: Options,
    seen: _Seen,
    concurrency: int | None,
    splits: bool,
    seed: int,
) -> VirtualEngine:
    rows_max, arenas = options.max_rows or MAX_ROWS_DEFAULT, options.arenas or 0
    contexts = options.contexts or max(CONTEXTS_ON_GPU if arenas else 2 * latency.lanes, arenas)
    concurrency = concurrency or (GPU_CONCURRENCY if arenas else latency.lanes)
    lanes_max = min(arenas or 1, contexts)
    policy = Policy(
        rows_max=rows_max,
        delay_ns_max=int(options.max_delay * 1e9),
        concurrency=min(concurrency + lanes_max - 1, contexts),
        is_parallel=splits,
        is_pipelined=arenas > 0,
        lanes=latency.lanes_that_pay(rows_max, lanes_max),
        lanes_max=lanes_max,
        answers_in_time=options.timeout_until == "answer",
    )
    scheduler = Scheduler(
        policy=policy,
        shapes=Shapes(rows_max=rows_max, profiles=None),
        queue_rows_max=options.max_queue_rows,
        priorities=options.priorities,
        contexts=contexts,
        arenas=arenas,
        in_flight_max=contexts,
        times_all=not arenas,
    )
    device = VirtualDevice(timeline, latency, arenas, random.Random(seed))
    return VirtualEngine(timeline, scheduler, device, seen, has_arenas=arenas > 0)
