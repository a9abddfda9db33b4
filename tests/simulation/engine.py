"""What drives a scheduler in a simulated world: the driver's part, without rows, memory or an event loop."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Final, NamedTuple, Protocol

from asynctrt.errors import (
    AsynctrtError,
    DeviceLostError,
    DeviceMemoryError,
    ExecutionError,
)
from asynctrt.scheduling.batch import Batch, RejectedBatch
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import (
    NO_DEADLINE_NS,
    PlainRequest,
    PlainRequests,
    Request,
    State,
)
from asynctrt.scheduling.scheduler import Scheduler
from tests.simulation.arrivals import Arrival
from tests.simulation.device import Flight, VirtualDevice
from tests.simulation.timeline import Timeline

FAULTS: Final = ("refused", "memory", "row", "slow", "hang", "lost")
"""What can happen to a batch: the device refuses it, has no memory for it, one of its rows is bad, it takes
far longer than usual, never ends, or the device is lost with it."""


class Took(NamedTuple):
    """How long a batch usually takes, which is told of one that was not timed."""

    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int
    arena_wait_ns: int = 0


class Observer(Protocol):
    """Sees everything that happens to one engine, when it has happened."""

    def submitted(self, request: Request) -> None:
        """See a request that is queued."""

    def displaced(self, requests: list[Request], by: Request) -> None:
        """See requests that left a full queue for a more urgent one, which is told next."""

    def refused(self, request: Request, error: Exception) -> None:
        """See a request that was not taken."""

    def cancelled(self, request: Request, *, was_queued: bool) -> None:
        """See a request whose caller has gone away."""

    def expired(self, requests: list[Request], now_ns: int, arrived_by_ns: int) -> None:
        """See requests whose deadline came while they were queued."""

    def launched(self, batch: Batch, now_ns: int) -> None:
        """See a batch that is about to be put on the device."""

    def expected(self, batch: Batch, expected_ns: int | None) -> None:
        """See in how many ns a batch that is on the device is expected to be done."""

    def rejected(self, batch: RejectedBatch) -> None:
        """See requests that left the queue because the model raised."""

    def row_refused(self, request: Request) -> None:
        """See a request of a batch in flight that fails alone."""

    def answered(self, flight: Flight, now_ns: int) -> None:
        """See a batch that has ended well."""

    def failed(self, batch: Batch, *, quarantine: bool) -> None:
        """See a batch that has failed."""

    def bisected(self, batch: Batch) -> None:
        """See a batch that has failed and whose halves are tried again."""

    def arena_lost(self, arena: int) -> None:
        """See an arena that is not used any more."""

    def closed(self, requests: list[Request], error: AsynctrtError) -> None:
        """See what was queued when the engine was closed."""

    def pumped(self, now_ns: int) -> None:
        """See that everything was launched that is to be launched now."""


class PlainCaller(Request):
    """A plain request as observers see it. It is also its own future, as no object is made of most."""

    def __init__(self, key: BatchKey, now_ns: int) -> None:
        self.made: PlainRequest | None = None
        """The object that the scheduler made of it."""
        self.is_done = False
        super().__init__(1, key, 0, now_ns)

    def done(self) -> bool:
        """Return whether it was answered or cancelled."""
        return self.is_done

    @property
    def state(self) -> State:
        """Its state, as the scheduler has it."""
        return self._state if self.made is None else self.made.state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state


def callers_of(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return what observers know of requests that the scheduler returned."""
    if type(requests) is PlainRequests and requests.entries:
        callers = tuple([caller for caller, _, _ in requests.entries])
        for caller in callers:
            if not caller.is_done:
                caller.state = requests.state
        return callers
    found = []
    for request in requests:
        if isinstance(request, PlainRequest):
            request.future.made = request
        found.append(request.future if isinstance(request, PlainRequest) else request)
    return tuple(found)


class VirtualEngine:
    """Asks the scheduler what the driver asks, in the same order, and does what it says on a virtual device.

    :param observer: sees everything that happens.
    :param batch_timeout_ns: after how long a batch counts as hung; ``None``: never.
    :param faults: what happens to batches, by their numbers, each with how much.
    :param group: which of several engines on the device it is.
    """

    def __init__(
        self,
        timeline: Timeline,
        scheduler: Scheduler,
        device: VirtualDevice,
        observer: Observer,
        *,
        has_arenas: bool,
        batch_timeout_ns: int | None = None,
        faults: dict[int, tuple[str, float]] | None = None,
        group: int = 0,
    ) -> None:
        self._timeline = timeline
        self.scheduler = scheduler
        self.device = device
        """Where its batches run."""
        self.observer = observer
        """Sees everything that happens."""
        self._has_arenas = has_arenas
        self._batch_timeout_ns = batch_timeout_ns
        self._faults = faults or {}
        self._group = group
        self.offset_ns = 0
        """How far its clock is ahead of the device's."""
        self.lost: DeviceLostError | None = None
        # A world in which several engines share a device has them told at once.
        self.on_lost: Callable[[DeviceLostError], None] = self.lose
        self.on_arena_lost: Callable[[int], None] = self.avoid
        self.flights: dict[int, Flight] = {}
        self.events = 0
        """Requests that came, left or were answered, and batches that were launched or ended."""
        self._pumped_ns = 0
        self._alarm_ns = NO_DEADLINE_NS
        self._pump_is_due = False
        # As the check of inputs: requests of one shape have the same key, not only an equal one.
        self._keys: dict[BatchKey, BatchKey] = {}

    def submit(self, arrival: Arrival) -> Request | None:
        """Queue a request, and pump at the end of the instant. ``None``: it was not taken."""
        timeline = self._timeline
        now_ns = timeline.now_ns + self.offset_ns
        timeout_ns = arrival.timeout_ns
        key = self._keys.setdefault(arrival.key, arrival.key)
        queue = self.scheduler.queue
        self.events += 1
        try:
            if arrival.rows == 1 and not arrival.priority and timeout_ns is None:
                request: Request = PlainCaller(key, now_ns)
                if not queue.open.join(key, request, None):
                    queue.submit_plain(key, request, None, now_ns)
            else:
                deadline_ns = NO_DEADLINE_NS if timeout_ns is None else now_ns + timeout_ns
                request = Request(arrival.rows, key, arrival.priority, now_ns, deadline_ns)
                queue.submit(request)
        except AsynctrtError as error:
            self.observer.refused(request, error)
            return None
        if displaced := list(callers_of(queue.take_displaced())):
            self.events += len(displaced)
            self.observer.displaced(displaced, request)
        self.observer.submitted(request)
        if arrival.patience_ns is not None:
            timeline.at(timeline.now_ns + arrival.patience_ns, self.cancel, request)
        if not self._pump_is_due:
            self._pump_is_due = True
            timeline.at(timeline.now_ns, self._pump, None)
        return request

    def cancel(self, request: Request) -> None:
        """Let the caller of a request go away."""
        if self._timeline.is_late(self.cancel, request):
            return
        if not isinstance(request, PlainCaller):
            was_queued = self.scheduler.cancel(request)
        elif request.state in (State.QUEUED, State.IN_FLIGHT):
            is_queued = request.state is State.QUEUED
            request.is_done = True
            was_queued = self.scheduler.cancel_plain(request) is not None
            if request.made is None:
                request.state = State.CANCELLED if is_queued else State.MASKED
        else:
            was_queued = False
        self.events += 1
        self.observer.cancelled(request, was_queued=was_queued)

    def pump_soon(self) -> None:
        """Pump at the end of the instant, whatever has happened."""
        if not self._pump_is_due:
            self._pump_is_due = True
            self._timeline.at(self._timeline.now_ns, self._pump, None)

    def lose(self, why: DeviceLostError) -> None:
        """Fail everything, and take nothing any more."""
        if self.lost is not None:
            return
        self.lost = why
        self.observer.closed(list(callers_of(self.scheduler.close(why))), why)
        for flight in tuple(self.flights.values()):
            self._fail(flight, quarantine=True)

    def avoid(self, arena: int) -> None:
        """Use an arena no more."""
        self.scheduler.room.contexts.quarantine_arena(arena)
        self.observer.arena_lost(arena)
        self._lose_if_stuck()

    def _pump(self, _: object) -> None:
        timeline = self._timeline
        if timeline.is_late(self._pump, None):
            return
        self._pump_is_due = False
        scheduler = self.scheduler
        now_ns = timeline.now_ns + self.offset_ns
        if due := scheduler.queue.expire(now_ns, self._pumped_ns):
            self._expire(list(callers_of(due)), now_ns, self._pumped_ns)
        self._pumped_ns = now_ns
        while (decided := scheduler.next_batch(now_ns)) is not None:
            if isinstance(decided, Batch):
                self._start(decided, now_ns)
            else:
                self.observer.rejected(decided._replace(requests=callers_of(decided.requests)))
        if scheduler.queue.has_to_expire and (due := scheduler.queue.expire(now_ns)):
            self._expire(list(callers_of(due)), now_ns, NO_DEADLINE_NS)
        self.observer.pumped(now_ns)
        wakeup_ns = scheduler.next_wakeup()
        if wakeup_ns is not None and wakeup_ns < self._alarm_ns:
            self._alarm_ns = wakeup_ns
            timeline.at(wakeup_ns - self.offset_ns, self._wake, wakeup_ns)

    def _wake(self, alarm_ns: int) -> None:
        if self._timeline.is_late(self._wake, alarm_ns):
            return
        if alarm_ns == self._alarm_ns:
            self._alarm_ns = NO_DEADLINE_NS
        self.pump_soon()

    def _expire(self, due: list[Request], now_ns: int, arrived_by_ns: int) -> None:
        self.events += len(due)
        self.observer.expired(due, now_ns, arrived_by_ns)

    def _start(self, decided: Batch, now_ns: int) -> None:
        self.events += 1
        batch = copy(decided)
        batch.requests = callers_of(decided.requests)
        self.observer.launched(batch, now_ns)
        flight = Flight(batch, self._landed, self._group, decided)
        self.flights[batch.number] = flight
        kind, much = self._faults.get(batch.number, ("", 1.0)) if self._faults else ("", 1.0)
        if kind == "memory":
            flight.error = DeviceMemoryError("there is no memory for this batch")
            self._fail(flight)
            return
        if kind == "lost":
            self.on_lost(DeviceLostError("the device was lost"))
            return
        if kind == "row":
            number = int(much) % len(batch.requests)
            self.scheduler.fail_one(decided.requests[number])
            callers_of(decided.requests)
            self.observer.row_refused(batch.requests[number])
        elif kind == "refused":
            flight.error = ExecutionError("the model raised")
        flight.hangs = kind == "hang"
        self.device.start(flight, much if kind == "slow" else 1.0)
        self.observer.expected(batch, self.scheduler.started(decided, now_ns))
        if self._batch_timeout_ns is not None:
            self._timeline.at(self._timeline.now_ns + self._batch_timeout_ns, self._hung, flight)

    def _landed(self, flight: Flight) -> None:
        batch, scheduler = flight.batch, self.scheduler
        if batch.number not in self.flights:
            return  # It was given up before, and has ended after all.
        if self._timeline.is_late(self._landed, flight):
            return
        now_ns = self._timeline.now_ns + self.offset_ns
        decided = flight.decided
        scheduler.ran(decided, now_ns, flight.compute_ns)
        if flight.error is not None:
            if scheduler.bisect(decided):
                callers_of(decided.requests)
                del self.flights[batch.number]
                self.events += 1
                self.observer.bisected(batch)
                self.pump_soon()
            else:
                self._fail(flight)
            return
        copies_ns = flight.copy_in_ns, flight.copy_out_ns
        scheduler.landed(decided, now_ns, copies_ns if batch.is_timed and any(copies_ns) else None)
        del self.flights[batch.number]
        took = flight if batch.is_timed else Took(*scheduler.times.usual_ns(decided.key, decided.rows_run))
        scheduler.finished(decided, now_ns, took)
        self._deliver(decided)
        self.events += 1 + len(batch.requests)
        self.observer.answered(flight, now_ns)
        if not self._pump_is_due:
            self._pump(None)

    @staticmethod
    def _deliver(decided: Batch) -> None:
        """Answer the plain requests of a batch."""
        for caller in callers_of(decided.requests):
            if isinstance(caller, PlainCaller):
                if caller.made is None:
                    caller.state = State.CANCELLED if caller.is_done else State.DONE
                caller.is_done = True

    def _fail(self, flight: Flight, *, quarantine: bool = False) -> None:
        batch = flight.batch
        del self.flights[batch.number]
        self.scheduler.failed(flight.decided, quarantine=quarantine)
        callers_of(flight.decided.requests)
        self.events += 1 + len(batch.requests)
        self.observer.failed(batch, quarantine=quarantine)
        if not quarantine:
            self.pump_soon()

    def _hung(self, flight: Flight) -> None:
        batch = flight.batch
        if batch.number not in self.flights or self._timeline.is_late(self._hung, flight):
            return
        self.device.abandon(flight)
        self._fail(flight, quarantine=True)
        if batch.arena is not None:
            self.on_arena_lost(batch.arena)
        self._lose_if_stuck()

    def _lose_if_stuck(self) -> None:
        if self.scheduler.is_stuck:
            self.lose(DeviceLostError("no context is left"))
        else:
            self.pump_soon()
