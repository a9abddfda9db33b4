"""What must hold of a scheduler at every step, whatever happens in its world.

The bounds are the checker's own, and wider than what the scheduler does: they say what callers may rely on.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from asynctrt.errors import AsynctrtError, DeadlineUnreachableError, InternalError, QueueFullError
from asynctrt.scheduling.batch import Batch, Reason, RejectedBatch
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request, State
from asynctrt.scheduling.scheduler import Scheduler
from tests.scheduling.support import queued_by_key
from tests.simulation.device import Flight

ENDS: Final = (State.DONE, State.FAILED, State.CANCELLED, State.EXPIRED)
STARVED_BATCHES: Final = 200
"""Batches of other buckets that may go first where they wait for a delay, too."""
PASSED_OVER_MAX: Final = 6
"""Batches, for each bucket there has been, that may go before one that is as urgent as they are."""
OVERDUE_PAUSE_MIN: Final = 4
"""Batches from one that starts with what is overdue to the next: the urgent have most turns."""
OVERDUE_PAUSE_MAX: Final = 16
"""Batches after which one has to start with what is overdue."""
ORDER_CHECKED_MAX: Final = 8
"""Requests of a bucket whose order is held; a scheduler need not look for gaps behind more of them."""
DISPLACING_BUCKETS: Final = 8
"""Buckets up to which a less urgent request has to make room, whichever it is in."""
TIMED_AT_FIRST: Final = 20
"""Batches of a size that may be timed for what that tells; later no more than every second one."""
SHORT_NS: Final = 2_000_000
"""What takes less is short: to time it costs too much for every batch to be timed."""
KNOWN_AFTER: Final = 8
"""Batches of a size after which a scheduler has to know what they take."""
TRIED_AFTER_NS: Final = 50_000_000
TRIED_AFTER_BATCHES: Final = 16
"""How long a scheduler may refuse all that is late before it tries whether that is still so, in ns and in
times of the longest batch, whichever is longer."""
LAUNCHED_BEFORE_NS: Final = 1_000_000
"""How long before its deadline a request may be launched that otherwise waits for company, at most."""
WATCHED_BEFORE_NS: Final = 100_000
"""And how long before it it has to be launched, at least."""
THOROUGH_EVERY: Final = 16
"""One step in this many has its statistics checked as well, which takes longer than all else."""
LOG_MAX: Final = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler was made with."""

    policy: Policy
    queue_rows_max: int
    contexts: int
    arenas: int
    in_flight_max: int
    rows_fixed: int | None = None
    limit_of: Callable[[Hashable], int] | None = None
    """The rows that a batch of a shape holds, where that is not the same for all."""
    profile_of: Callable[[int], int] | None = None
    """The profile for a number of rows, of a model that has profiles."""
    is_calm: bool = False
    """Whether every batch takes exactly what others like it took, so that expectations can be held to it."""
    batch_ns: int = 0
    """What the largest batch takes, if all is calm."""
    times_all: bool = False
    """Whether the device times every batch."""
    keeps_promises: bool = False
    """Whether the scheduler can know whatever a batch takes and waits for on the device."""
    users: Sequence[int] = ()
    """The batches in each arena, over all engines that share them."""
    others_have_work: Callable[[], bool] = bool
    """Whether others on the device have something queued or in flight."""

    def rows_max(self, key: BatchKey) -> int:
        """Return the rows that a batch of a key holds."""
        return self.policy.rows_max if self.limit_of is None else self.limit_of(key.shape)


class Rules:
    """Keeps an account of its own of one engine, and raises as soon as the scheduler's differs."""

    def __init__(self, scheduler: Scheduler, limits: Limits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._number: dict[Request, int] = {}
        self._queued: dict[Request, None] = {}
        self._rows: Counter[BatchKey] = Counter()
        self.in_flight: dict[int, Batch] = {}
        # Parts of batches that failed, which are to be launched again.
        self._again: list[tuple[Request, ...]] = []
        self._slabs: dict[int, list[tuple[int, int]]] = {}
        self._ends_ns: dict[int, int] = {}
        # Batches of which the scheduler could tell when they would end, at the latest.
        self._told: set[int] = set()
        # How many batches of a shape and a size were timed, and the profile that each context had last.
        self._timed: Counter[tuple[Hashable, int]] = Counter()
        self._launched: Counter[tuple[Hashable, int]] = Counter()
        # The shape and the size that each context keeps, where a change takes long.
        self._kept: dict[int, tuple[Hashable, int]] = {}
        # The batches that change it, and the longest that such a batch took: the scheduler learns from them.
        self._changing: set[int] = set()
        self._change_ns = limits.policy.change_ns
        self._asked_times: Counter[tuple[Hashable, int]] = Counter()
        # By what it takes to copy them, and their size, the batches of which that was measured.
        self._copied: set[tuple[Hashable, int]] = set()
        self._ran: dict[int, tuple[int | None, object]] = {}
        # The longest that batches took to be copied in, to compute and to be copied out: each is expected by
        # itself, and there may be no batch that had all of them.
        self._longest_parts_ns = (0, 0, 0)
        self._longest_seen_ns = 0
        # When a request with a deadline was taken last, and the last batch that was aged.
        self._taken_ns = 0
        self._aged_number = 0
        self.quarantined: set[int] = set()
        self._passed_over: Counter[BatchKey] = Counter()
        self._keys: set[BatchKey] = set()
        self.ends: Counter[State] = Counter()
        self.reasons: Counter[Reason] = Counter()
        self.refusals = self.rejections = self.bisections = self.displacements = self.steps = 0
        self.foreseen = 0
        self._rows_run = self._rows_padded = 0
        self._pumped_ns = 0
        self._is_closed = False
        self.log: deque[str] = deque(maxlen=LOG_MAX)
        """The last things that happened, in words."""

    # ---- what it sees: the protocol of an observer

    def submitted(self, request: Request) -> None:
        number = self._number[request] = len(self._number) + 1
        self._queued[request] = None
        self._rows[request.key] += request.rows
        self._keys.add(request.key)
        self._say(request.arrival_ns, f"request {number} of {request.rows} rows is queued")
        _hold(request.state is State.QUEUED, "a request that was taken is not queued")
        if request.deadline_ns != NO_DEADLINE_NS:
            self._taken_ns = request.arrival_ns
        limits = self._limits
        _hold(
            limits.policy.answers_in_time or not request.reserve_ns, "time is set aside that nobody asked for"
        )
        _hold(0 <= request.reserve_ns <= self._longest_ns, "more time is set aside than any batch took")
        _hold(self._scheduler.queued_rows <= self._limits.queue_rows_max, "the queue is over its bound")
        self._check_counts()

    def displaced(self, requests: list[Request], by: Request) -> None:
        self.displacements += len(requests)
        queued = sum(self._rows.values())
        for request in requests:
            self._say(by.arrival_ns, f"request {self._number[request]} makes room")
            is_full = queued + by.rows > self._limits.queue_rows_max
            _hold(is_full, "more requests were displaced than had to be")
            _hold(request.priority < by.priority, "a request was displaced by one that is not more urgent")
            _hold(request.state is State.FAILED, "a displaced request goes on")
            queued -= request.rows
            self._leave(request)

    def refused(self, request: Request, error: Exception) -> None:
        self.refusals += 1
        if isinstance(error, QueueFullError):
            queued = sum(self._rows.values())
            if len(self._rows) <= DISPLACING_BUCKETS:
                queued = sum(other.rows for other in self._queued if other.priority >= request.priority)
            _hold(queued + request.rows > self._limits.queue_rows_max, "a request was refused with room left")
            self._taken_ns = request.arrival_ns  # It would not have been refused for being late.
        elif isinstance(error, DeadlineUnreachableError):
            self.foreseen += 1
            self._check_foreseen(request, error)
        elif not self._is_closed:
            known = isinstance(error.__cause__, ModelDefectError)
            _hold(known, f"a request was refused: {type(error).__name__}: {error}")
        self._check_counts()

    def cancelled(self, request: Request, *, was_queued: bool) -> None:
        is_queued = request in self._queued
        _hold(was_queued is is_queued, "cancelling misjudged where a request was")
        number = self._number[request]
        if is_queued:
            self._say(0, f"request {number} is cancelled in the queue")
            _hold(request.state is State.CANCELLED, "a cancelled request goes on")
            self._leave(request)
        elif any(request in requests for requests in self._under_way()):
            self._say(0, f"request {number} is cancelled in flight")
            _hold(request.state is State.MASKED, "a request that was cancelled in flight is not masked")
        self._check_counts()

    def expired(self, requests: list[Request], now_ns: int, arrived_by_ns: int) -> None:
        for request in requests:
            self._say(now_ns, f"request {self._number[request]} expires")
            if request.deadline_ns > now_ns:
                self._check_given_up(request, now_ns)
            else:
                _hold(request.arrival_ns <= arrived_by_ns, "a request expired before it could be launched")
            _hold(request.state is State.EXPIRED, "an expired request goes on")
            self._leave(request)

    def launched(self, batch: Batch, now_ns: int) -> None:
        numbers = [self._number.get(request, 0) for request in batch.requests]
        self._say(now_ns, f"{batch!r} with requests {numbers} is launched")
        self._check_rows(batch)
        self._check_times(batch)
        if batch.reason is Reason.AGAIN:
            self._check_context(batch)
            self._take_again(batch.requests)
            self._note_launch(batch)
            return
        self._check_queued(batch)
        self._check_deadlines(batch, now_ns)
        self._check_order(batch)
        self._check_turn(batch)
        self._check_age(batch, now_ns)
        self._check_context(batch)
        self._check_reason(batch, now_ns)
        for request in batch.requests:
            self._leave(request, is_final=False)
        self._note_launch(batch)

    def _note_launch(self, batch: Batch) -> None:
        self.in_flight[batch.number] = batch
        self.reasons[batch.reason] += 1
        limits = self._limits
        if limits.keeps_promises and limits.policy.answers_in_time:
            is_known = self._timed[batch.key.shape, batch.rows_run] >= KNOWN_AFTER
            is_known &= (batch.key.copy_key, batch.rows_run) in self._copied
            if is_known and self._told.issuperset(set(self.in_flight) - {batch.number}):
                self._told.add(batch.number)
        rows = [(self._number[request], row) for request in batch.requests for row in range(request.rows)]
        self._slabs[batch.number] = rows[: batch.rows_run]
        _hold(len(self.in_flight) <= self._limits.in_flight_max, "too many batches are in flight")

    def expected(self, batch: Batch, expected_ns: int | None) -> None:
        seen = any(self._timed[batch.key.shape, rows] for rows in range(1, batch.rows_run + 1))
        _hold((expected_ns is not None) is seen, "an expectation out of nothing, or none out of something")
        if expected_ns is not None:
            _hold(expected_ns >= 0, "a batch is expected in the past")
            self._ends_ns[batch.number] = batch.launched_ns + expected_ns

    def rejected(self, batch: RejectedBatch) -> None:
        self.rejections += 1
        known = isinstance(batch.error.__cause__, ModelDefectError)
        _hold(known, f"a batch was rejected: {type(batch.error).__name__}: {batch.error}")
        if batch.requests[0] not in self._queued:
            self._take_again(batch.requests)
        for request in batch.requests:
            _hold(request.state is State.FAILED, "a rejected request goes on")
            if request in self._queued:
                self._leave(request)
            else:
                self._end(request, State.FAILED)
        self._check_counts()

    def row_refused(self, request: Request) -> None:
        _hold(request.state is State.MASKED, "a request that failed alone goes on")
        # Its caller has the error by now.
        self.ends[State.FAILED] += 1
        self._number[request] = -self._number[request]

    def answered(self, flight: Flight, now_ns: int) -> None:
        batch = flight.batch
        self._say(now_ns, f"batch {batch.number} is answered")
        del self.in_flight[batch.number]
        slab, offset = self._slabs.pop(batch.number), 0
        for request in batch.requests:
            number = self._number[request]
            if request.state is State.DONE:
                # What the driver cuts out of the slab for this caller.
                rows = slab[offset : offset + request.rows]
                own = [(number, row) for row in range(request.rows)]
                _hold(rows == own, f"request {number} got the rows {rows}")
                until_ns = request.deadline_ns + request.reserve_ns
                # Of the others, it is tried out how long they take.
                if request.reserve_ns and batch.number in self._told:
                    _hold(now_ns <= until_ns, f"request {number} was computed to be answered too late")
            offset += request.rows
            self._end(request, State.DONE)
        self._rows_run += batch.rows
        self._rows_padded += batch.rows_run - batch.rows
        self._timed[batch.key.shape, batch.rows_run] += batch.is_timed
        if batch.is_timed:
            self._copied.add((batch.key.copy_key, batch.rows_run))
        took_ns = flight.copy_in_ns, flight.compute_ns, flight.copy_out_ns
        copy_in_ns, compute_ns, copy_out_ns = map(max, self._longest_parts_ns, took_ns)
        self._longest_parts_ns = copy_in_ns, compute_ns, copy_out_ns
        if batch.number in self._changing:
            self._change_ns = max(self._change_ns, now_ns - batch.launched_ns)
        # A clock that leaps is taken for a batch that took as long.
        self._longest_seen_ns = max(self._longest_seen_ns, sum(took_ns), now_ns - batch.launched_ns)
        if self._limits.is_calm and batch.number in self._ends_ns:
            _hold(
                self._ends_ns.pop(batch.number) <= now_ns, f"batch {batch.number} was expected after its end"
            )
        self._check_counts()

    def failed(self, batch: Batch, *, quarantine: bool) -> None:
        self._say(0, f"batch {batch.number} fails{', and hangs' * quarantine}")
        del self.in_flight[batch.number]
        del self._slabs[batch.number]
        for request in batch.requests:
            self._end(request, State.FAILED)
        if quarantine:
            self.quarantined |= {batch.context} if batch.arena is None else self._neighbours(batch.arena)
        self._check_counts()

    def bisected(self, batch: Batch) -> None:
        self.bisections += 1
        self._say(0, f"batch {batch.number} fails, and its halves are tried again")
        _hold(len(batch.requests) > 1, "a batch of one request was bisected")
        del self.in_flight[batch.number]
        del self._slabs[batch.number]
        left = [request for request in batch.requests if request.state is State.IN_FLIGHT]
        half = (len(left) + 1) // 2
        self._again += [tuple(part) for part in (left[:half], left[half:]) if part]
        for request in batch.requests:
            if request.state is not State.IN_FLIGHT:
                self._end(request, State.FAILED)
        self._check_counts()

    def arena_lost(self, arena: int) -> None:
        self.quarantined |= self._neighbours(arena)

    def closed(self, requests: list[Request], error: AsynctrtError) -> None:
        self._say(0, f"the engine is closed: {error}")
        self._is_closed = True
        for part in self._again:
            for request in part:
                self._end(request, State.FAILED)
        again = {request for part in self._again for request in part}
        self._again.clear()
        for request in requests:
            # Who was found to be too late a moment ago is told now.
            is_over = request.state in (State.FAILED, State.EXPIRED)
            _hold(is_over, "a request that was queued at the end goes on")
            if request not in again:
                self._leave(request)
        _hold(not self._queued, "closing left requests in the queue")

    def pumped(self, now_ns: int) -> None:
        self.steps += 1
        self._pumped_ns = now_ns
        self._forget_again()
        self._check_waiting(now_ns)
        self._check_counts()
        if self.steps % THOROUGH_EVERY == 0:
            self._check_statistics()

    # ---- what it checks

    def end(self, submitted: int) -> None:
        """Check, after everything has drained, that all were answered and nothing is left.

        :param submitted: the requests that were submitted, refused ones included.
        """
        scheduler = self._scheduler
        _hold(not self._queued, f"{len(self._queued)} requests wait for ever")
        _hold(not self._again, "a part of a batch that failed is never tried again")
        _hold(not self.in_flight, "a batch never ended")
        _hold(scheduler.is_idle, "the scheduler is not idle although everything has ended")
        _hold(self.ends.total() + self.refusals == submitted, "requests have vanished")
        self._check_counts()
        self._check_statistics()

    def _under_way(self) -> list[tuple[Request, ...]]:
        return [*(batch.requests for batch in self.in_flight.values()), *self._again]

    def _waiting(self) -> list[Request]:
        """Return what was queued when a batch was decided, without those who have had to leave since."""
        return [request for request in self._queued if request.state is not State.EXPIRED]

    def _take_again(self, requests: tuple[Request, ...]) -> None:
        """Expect the largest part of a failed batch, or the oldest of these, without those who left since."""
        self._forget_again()
        _hold(bool(self._again), "a batch again of which no part failed")
        part = self._next_part()
        left = tuple(request for request in part if request.state is not State.CANCELLED)
        for request in part:
            if request.state is State.CANCELLED:
                self._end(request, State.FAILED)
        _hold(requests == left, "a part of a failed batch came back as something else")

    def _forget_again(self) -> None:
        """Let go of the parts whose callers have all left."""
        while self._again and all(request.state is State.CANCELLED for request in max(self._again, key=len)):
            for request in self._next_part():
                self._end(request, State.FAILED)

    def _next_part(self) -> tuple[Request, ...]:
        return self._again.pop(self._again.index(max(self._again, key=len)))

    def _leave(self, request: Request, *, is_final: bool = True) -> None:
        _hold(request in self._queued, f"request {self._number.get(request)} left the queue twice")
        del self._queued[request]
        self._rows[request.key] -= request.rows
        if not self._rows[request.key]:
            del self._rows[request.key]
            self._passed_over.pop(request.key, None)
        if is_final:
            self.ends[request.state] += 1

    def _end(self, request: Request, otherwise: State) -> None:
        """Count a request of a batch that has ended."""
        if self._number[request] < 0:
            _hold(request.state is State.CANCELLED, "a request that failed alone was answered again")
            return  # It was counted when it failed.
        is_masked = request.state is State.CANCELLED
        _hold(request.state in (otherwise, State.CANCELLED), f"{request!r} ended otherwise than its batch")
        self.ends[State.CANCELLED if is_masked else otherwise] += 1

    def _check_rows(self, batch: Batch) -> None:
        limits = self._limits
        policy = limits.policy
        _hold(len(set(batch.requests)) == len(batch.requests) > 0, "a request is in a batch twice")
        rows = sum(request.rows for request in batch.requests)
        _hold(batch.rows == rows, f"a batch of {rows} rows counts {batch.rows}")
        rows_max = limits.rows_max(batch.key)
        _hold(rows <= batch.rows_run <= rows_max, f"a batch runs {batch.rows_run} of {rows} rows")
        for request in batch.requests:
            _hold(request.key == batch.key, "requests of different keys share a batch")
            _hold(request.state is State.IN_FLIGHT, "a launched request is not in flight")
        sizes = policy.captured.sizes
        padded = sizes[bisect_left(sizes, rows) :][:1]
        allowed: tuple[int, ...] = (rows, *padded) if limits.rows_fixed is None else (limits.rows_fixed,)
        if policy.change_ns:
            kept = [size for shape, size in self._kept.values() if shape == batch.key.shape]
            allowed = (rows, *[size for size in kept if size >= rows])
        if policy.is_alone:
            allowed = (rows_max,)
            _hold(len(batch.requests) == 1, "a request that is to be alone has company")
        _hold(batch.rows_run in allowed, f"{rows} rows were padded to {batch.rows_run}")
        profile = None if limits.profile_of is None else limits.profile_of(batch.rows_run)
        _hold(batch.profile == profile, f"{batch.rows_run} rows run with profile {batch.profile}")

    def _check_queued(self, batch: Batch) -> None:
        for request in batch.requests:
            _hold(request in self._queued, "a request was launched that was not queued")

    def _check_deadlines(self, batch: Batch, now_ns: int) -> None:
        for request in batch.requests:
            had_chance = request.arrival_ns <= self._pumped_ns
            _hold(request.deadline_ns > now_ns or not had_chance, "a request was launched after its deadline")

    def _check_given_up(self, request: Request, now_ns: int) -> None:
        """What expires before the time to launch it is over would have been answered too late."""
        _hold(self._limits.policy.answers_in_time, "a request expired before its deadline")
        # Whatever is on the device goes first, and none of it takes longer than the longest so far.
        batches = 1 + len(self.in_flight)
        least_ns = batches * (self._longest_seen_ns + LAUNCHED_BEFORE_NS)
        until_ns = request.deadline_ns + request.reserve_ns
        _hold(now_ns + least_ns >= until_ns, "a request was given up that could have been in time")

    def _check_foreseen(self, request: Request, error: DeadlineUnreachableError) -> None:
        """A request is refused for being late only if that is known, and one now and then is taken."""
        limits, now_ns = self._limits, request.arrival_ns
        timeout_ns = request.deadline_ns - now_ns
        _hold(not self._is_closed, "a closed engine tells how late a request would be")
        _hold(error.predicted_s * 1e9 > timeout_ns - 1, "a request was refused that would be in time")
        known: Counter[Hashable] = Counter()
        for (shape, _), count in self._timed.items():
            known[shape] += count
        _hold(
            max(known.values(), default=0) > 1,
            "a prediction was made before there was enough to make it from",
        )
        is_idle = not self._queued and not self.in_flight
        _hold(limits.policy.answers_in_time or not is_idle, "an idle engine refused what it could launch")
        pause_ns = max(TRIED_AFTER_NS, TRIED_AFTER_BATCHES * self._longest_ns)
        _hold(now_ns - self._taken_ns < pause_ns, "everything is refused for being late, again and again")
        # All that is ahead one after the other, each as long as the longest so far.
        batches = 1 + len(self.in_flight) + self._rows[request.key] // limits.rows_max(request.key)
        is_possible = error.predicted_s * 1e9 <= batches * self._longest_ns + 1
        _hold(is_possible, "a request is said to be later than it could be")

    @property
    def _longest_ns(self) -> int:
        """How long a batch may be expected to take at most."""
        return sum(self._longest_parts_ns)

    def _due_ns(self, request: Request) -> int:
        return min(request.deadline_ns, request.arrival_ns + self._limits.policy.patience_ns)

    def _check_order(self, batch: Batch) -> None:
        """Among requests that may share a batch: the urgent first, and then what is due first. In a batch for
        what is most overdue, the priority comes first whose first request is due first."""
        inside = set(batch.requests)
        mates = [request for request in self._waiting() if request.key == batch.key]
        rank = {request.priority: -request.priority for request in mates}
        if batch.reason is Reason.AGED:
            for request in sorted(mates, key=self._due_ns, reverse=True):
                rank[request.priority] = self._due_ns(request)
        mates.sort(key=lambda request: (rank[request.priority], -request.priority, self._due_ns(request)))
        place = {request: number for number, request in enumerate(mates)}
        _hold(mates[0] in inside, "a batch leaves the head of its queue behind")
        passed: Counter[int] = Counter()
        for request in mates:
            if request in inside:
                continue
            passed[request.priority] += 1
            if passed[request.priority] > ORDER_CHECKED_MAX:
                continue
            for other in inside:
                _hold(
                    place[other] < place[request] or other.rows < request.rows,
                    f"request {self._number[other]} went before request {self._number[request]}",
                )

    def _check_turn(self, batch: Batch) -> None:
        """Among those that may not share one: no bucket is passed over again and again."""
        if batch.reason is Reason.AGED:
            return
        urgency = max(request.priority for request in batch.requests)
        waiting: dict[BatchKey, int] = {}
        for request in self._waiting():
            waiting[request.key] = max(waiting.get(request.key, 0), request.priority)
        self._passed_over.pop(batch.key, None)
        delay_ns = self._limits.policy.delay_ns_max
        most = PASSED_OVER_MAX * len(self._keys) + (STARVED_BATCHES if delay_ns else 0)
        for key, priority in waiting.items():
            if key != batch.key and priority >= urgency:
                _hold(priority == urgency or bool(delay_ns), "a less urgent bucket went first")
                self._passed_over[key] += 1
                _hold(self._passed_over[key] <= most, "a bucket is passed over again and again")

    def _check_age(self, batch: Batch, now_ns: int) -> None:
        """Nothing waits for ever for what is more urgent: one batch in some starts with the most overdue."""
        policy = self._limits.policy
        due_ns = {request: self._due_ns(request) for request in self._waiting()}
        if batch.reason is Reason.AGED:
            _hold(batch.number - self._aged_number >= OVERDUE_PAUSE_MIN, "the overdue go first too often")
            self._aged_number = batch.number
            its_ns = min(due_ns[request] for request in batch.requests)
            _hold(its_ns <= now_ns, "a batch is called aged in which nothing is")
            # What waits for company is not ready.
            _hold(its_ns == min(due_ns.values()) or bool(policy.delay_ns_max), "another is more overdue")
        elif not policy.delay_ns_max:
            urgent = max(request.priority for request in self._waiting())
            starves = any(its <= now_ns and request.priority < urgent for request, its in due_ns.items())
            is_long = batch.number - self._aged_number >= OVERDUE_PAUSE_MAX
            _hold(not (starves and is_long), "a request starves behind more urgent ones")

    def _check_context(self, batch: Batch) -> None:
        limits = self._limits
        _hold(0 <= batch.context < limits.contexts, f"there is no context {batch.context}")
        busy = {other.context for other in self.in_flight.values()}
        _hold(batch.context not in busy, "a context was given out twice: two batches in one arena, unordered")
        _hold(batch.context not in self.quarantined, "a context was given out that is out of use")
        arena = batch.context % limits.arenas if limits.arenas else None
        _hold(batch.arena == arena, "a context was given another arena than its own")
        free = set(range(limits.contexts)) - busy - self.quarantined
        if batch.arena is not None and limits.users:
            # This batch is counted there by now.
            least = min(limits.users[one % limits.arenas] - (one % limits.arenas == arena) for one in free)
            _hold(limits.users[batch.arena] - 1 == least, "a fuller arena was taken")
        if limits.policy.change_ns:
            kept = batch.key.shape, batch.rows_run
            mates = [one for one in free if batch.arena is None or one % limits.arenas == arena]
            same = [one for one in mates if self._kept.get(one) == kept]
            _hold(batch.context in (same or mates), "a context changed its size for a batch without need")
            if not same:
                self._changing.add(batch.number)
            self._kept[batch.context] = kept
        if limits.profile_of is not None:
            mates = [one for one in free if batch.arena is None or one % limits.arenas == arena]
            is_captured = batch.rows_run in limits.policy.captured.sizes
            ran = batch.profile, None if is_captured else (batch.key.shape, batch.rows_run)
            same = [one for one in mates if self._ran.get(one) == ran]
            new = [one for one in mates if one not in self._ran]
            known = [one for one in mates if self._ran.get(one, (None,))[0] == batch.profile]
            wanted = same or new or known or mates
            _hold(batch.context in wanted, "a context that had another profile was taken")
            self._ran[batch.context] = ran

    def _check_times(self, batch: Batch) -> None:
        """Every batch is timed where that costs nothing; else few of those that are short and well known."""
        limits, size = self._limits, (batch.key.shape, batch.rows_run)
        if limits.policy.change_ns and not batch.is_timed:
            return  # The time of a change is not that of a batch.
        self._launched[size] += 1
        self._asked_times[size] += batch.is_timed
        if limits.times_all:
            _hold(batch.is_timed, "a batch is not timed although all are")
        elif limits.batch_ns < SHORT_NS:
            most = TIMED_AT_FIRST + self._launched[size] // 2
            _hold(self._asked_times[size] <= most, "every batch is timed although most need not be")

    def _check_reason(self, batch: Batch, now_ns: int) -> None:
        policy, in_flight = self._limits.policy, len(self.in_flight)
        is_saturated = in_flight >= policy.concurrency
        # What leaves the queue makes a bucket smaller that was full or ready before.
        if batch.reason is Reason.FULL:
            _hold(
                self._rows[batch.key] >= self._limits.rows_max(batch.key),
                "a batch is called full that is not",
            )
        if batch.reason is Reason.TURN:
            _hold(is_saturated, "a turn on a device that has room")
        if is_saturated:
            has_reason = self._some_full() and not policy.answers_in_time
            _hold(has_reason, "a batch was launched although the device has enough to do")
        elif batch.reason is Reason.AHEAD:
            _hold(policy.is_pipelined and bool(in_flight), "a batch is called ahead of none")
        elif batch.reason in (Reason.DELAY, Reason.DEADLINE):
            has_left = self.ends[State.CANCELLED] or self.ends[State.EXPIRED] or self.displacements
            has_left |= any(request.state is State.EXPIRED for request in self._queued)  # Not told yet.
            mates = [request for request in self._queued if request.key == batch.key]
            oldest_ns = min(request.arrival_ns for request in mates)
            due_ns = min(request.deadline_ns for request in mates) - LAUNCHED_BEFORE_NS
            is_over = oldest_ns + policy.delay_ns_max <= now_ns or due_ns <= now_ns
            _hold(is_over or bool(has_left), "a batch was launched before its delay was over")

    def _check_waiting(self, now_ns: int) -> None:
        """Nothing waits that could run, and what waits for a time is told it."""
        limits, scheduler = self._limits, self._scheduler
        policy, in_flight = limits.policy, len(self.in_flight)
        busy = {batch.context for batch in self.in_flight.values()}
        free = limits.contexts - len(busy | self.quarantined)
        has_room = free > 0 and in_flight < limits.in_flight_max
        if has_room and self._is_left_to_others(now_ns):
            return
        _hold(not (self._again and has_room), "a part of a failed batch waits although a context is free")
        if not self._queued:
            return
        oldest = next(iter(self._queued))
        deadline_ns = min(request.deadline_ns for request in self._queued)
        _hold(deadline_ns > now_ns, "a request waits although its deadline has come")
        wakeup_ns = scheduler.next_wakeup()
        if deadline_ns != NO_DEADLINE_NS:
            _hold(wakeup_ns is not None and wakeup_ns <= deadline_ns, "nobody watches a deadline")
        if not has_room:
            return
        _hold(bool(in_flight), "work waits while nothing is in flight")
        if policy.change_ns and scheduler.room.until_ns is not None:
            until_ns = scheduler.room.until_ns
            _hold(now_ns < until_ns <= now_ns + self._change_ns, "a batch waits longer than a change takes")
            _hold(wakeup_ns is not None and wakeup_ns <= until_ns, "nobody watches the wait for a context")
            return
        # What has its turn may be a batch that still grows, until the device wants it.
        is_behind = policy.is_pipelined and any(
            rows < limits.rows_max(key) for key, rows in self._rows.items()
        )
        is_free = not self._some_full() or policy.answers_in_time or is_behind
        _hold(is_free, "a full batch waits although a context is free")
        if in_flight >= policy.concurrency:
            return
        if policy.is_pipelined:
            self._check_just_in_time(now_ns, wakeup_ns)
            return
        end_ns = oldest.arrival_ns + policy.delay_ns_max
        _hold(now_ns < end_ns, "work waits although the device has room and its delay is over")
        if deadline_ns != NO_DEADLINE_NS:
            end_ns = min(end_ns, deadline_ns - WATCHED_BEFORE_NS)
        _hold(wakeup_ns is not None and wakeup_ns <= max(end_ns, now_ns), "nobody watches the end of a delay")

    def _is_left_to_others(self, now_ns: int) -> bool:
        """Return whether others on the device go first, by weight, for a time that somebody watches."""
        scheduler = self._scheduler
        if (
            scheduler.room.share is None
            or not scheduler.room.share.is_held
            or not (self._queued or self._again)
        ):
            return False
        wakeup_ns = scheduler.next_wakeup()
        _hold(wakeup_ns is not None and now_ns < wakeup_ns, "nobody watches what is left to others")
        _hold(self._limits.others_have_work(), "the device is left to others that have no work for it")
        return True

    def _some_full(self) -> bool:
        return any(rows >= self._limits.rows_max(key) for key, rows in self._rows.items())

    def _check_just_in_time(self, now_ns: int, wakeup_ns: int | None) -> None:
        """What waits until the device wants it is launched by then: when the one batch there is has ended.

        The scheduler has learned since what the batches before that one took, so it may be off by as much.
        """
        if len(self.in_flight) != 1 or self._limits.policy.delay_ns_max:
            return
        (number,) = self.in_flight
        if number in self._ends_ns:
            _hold(wakeup_ns is not None, "nobody watches when the device wants the next batch")
            if self._limits.is_calm and wakeup_ns is not None:
                late_ns = wakeup_ns - max(self._ends_ns[number], now_ns)
                _hold(late_ns <= 2 * self._limits.batch_ns, "the next batch would be late")

    def _check_counts(self) -> None:
        scheduler = self._scheduler
        waiting = self._waiting()
        _hold(scheduler.queue.requests == len(waiting), "queued requests are miscounted")
        rows = sum(request.rows for request in waiting)
        _hold(scheduler.queued_rows == rows, "queued rows are miscounted")
        _hold(scheduler.in_flight == len(self.in_flight), "batches in flight are miscounted")
        is_stuck = len(self.quarantined) == self._limits.contexts
        _hold(scheduler.is_stuck == is_stuck, "contexts that are out of use are miscounted")

    def _check_statistics(self) -> None:
        snapshot = self._scheduler.snapshot()
        counters, ends = snapshot.counters, self.ends
        # Those that are masked are counted when that is done.
        masked = sum(
            request.state is State.MASKED and self._number[request] > 0
            for requests in self._under_way()
            for request in requests
        )
        found = counters.succeeded, counters.failed, counters.cancelled, counters.expired
        right = ends[State.DONE], ends[State.FAILED], ends[State.CANCELLED] + masked, ends[State.EXPIRED]
        _hold(found == right, f"{found} requests are counted by their ends, instead of {right}")
        rows = counters.rows, counters.rows_padded
        _hold(rows == (self._rows_run, self._rows_padded), "rows that were run are miscounted")
        known = {reason: count for reason, count in counters.launched.items() if count}
        _hold(known == self.reasons, "the reasons of batches are miscounted")
        _hold(queued_by_key(self._scheduler) == self._rows, "the rows of a bucket are miscounted")
        quarantined = snapshot.contexts_quarantined
        _hold(quarantined == len(self.quarantined), f"{quarantined} contexts are counted out of use")

    def _neighbours(self, arena: int) -> set[int]:
        return set(range(arena, self._limits.contexts, self._limits.arenas))

    def _say(self, now_ns: int, what: str) -> None:
        self.log.append(f"{now_ns / 1e6:12.3f} ms  {what}" if now_ns else f"{'':16}{what}")


class ModelDefectError(Exception):
    """What the simulated model raises when it is asked about its profiles."""


def _hold(condition: bool, broken: str) -> None:
    if not condition:
        raise InternalError(broken)
