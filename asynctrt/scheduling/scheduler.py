"""The scheduler: one synchronous object that decides. The driver does what it decided.

Nothing here waits, reads a clock or touches memory, so a decision can neither be torn by a cancellation
nor differ between two runs with the same inputs.
"""

from bisect import insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asynctrt.errors import (
    AsynctrtError,
    DeadlineUnreachableError,
    InternalError,
    QueueFullError,
    copy_for,
)
from asynctrt.scheduling.batch import Batch, Flight, Reason, RejectedBatch
from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.company import NoCompany
from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.contexts import ContextAllocator
from asynctrt.scheduling.counters import Counters, SizeCounters
from asynctrt.scheduling.forecast import Forecast
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import AGED_EVERY, DEADLINE_MARGIN_NS, Policy
from asynctrt.scheduling.queues import BucketQueue, Buckets, DeadlineHeap, OpenBatch
from asynctrt.scheduling.request import (
    IN_FLIGHT,
    NO_DEADLINE_NS,
    QUEUED,
    Change,
    Request,
    State,
    awaited,
    change,
    change_all,
    complete,
)
from asynctrt.scheduling.shapes import Shapes
from asynctrt.scheduling.shares import Share

PARTS_MAX: Final = 4
"""How many parts of batches that failed may wait while new batches take turns with them, times the rows of a
batch. They are enough for those who always send what fails to be among them, so that new batches end well."""

NO_COMPANY: Final = NoCompany()

Part = tuple[BucketQueue, tuple[Request, ...], int]
"""Requests of one bucket for a batch, and their rows."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the scheduler has done and is doing: numbers only, which nothing changes afterwards."""

    counters: Counters
    submitted: int
    queued_requests: int
    queued_rows: int
    in_flight_batches: int
    contexts_quarantined: int


class Scheduler:
    """Take requests, give batches.

    :param policy: when to launch what.
    :param shapes: what the model takes of each shape.
    :param queue_rows_max: rows that may be queued over all buckets.
    :param priorities: number of priority levels; a larger priority is more urgent.
    :param contexts: execution contexts to launch on; ``arenas``: enqueue-memory arenas they share.
    :param in_flight_max: batches that may be in flight at once.
    :param arena_users: the count of batches in each arena, if engines share arenas.
    :param times_all: whether the device times every batch, because that costs it nothing.
    :param company: decides which rows of other sizes share a batch.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        shapes: Shapes,
        queue_rows_max: int,
        priorities: int,
        contexts: int,
        arenas: int,
        in_flight_max: int,
        arena_users: list[int] | None = None,
        times_all: bool = False,
        company: NoCompany = NO_COMPANY,
    ) -> None:
        self._policy = policy
        self._company = company
        self._shapes = shapes
        self._runs_as_it_is = shapes.runs_as_many_as_it_takes and not policy.captured.sizes
        self._queue_rows_max = queue_rows_max
        self._priorities = priorities
        self._in_flight_max = in_flight_max
        self._buckets = Buckets(policy, priorities)
        # The one of the latest request, as the next one is mostly of the same. It is in `_buckets`, which
        # drop some only to add another.
        self._bucket: BucketQueue | None = None
        self._deadlines = DeadlineHeap()
        self._contexts = ContextAllocator(contexts=contexts, arenas=arenas, arena_users=arena_users)
        self._counters = Counters()
        self._times = BatchTimes()
        self._concurrency = Concurrency(
            self._times,
            lanes=policy.lanes,
            lanes_max=self.lanes_max,
            arenas=arenas,
            may_put_slowly=policy.may_enqueue_slowly,
        )
        # When the next batch is to be launched.
        self._due_ns: int | None = None
        # Of which bucket that batch is, and of which it has been since the last launch.
        self._early: BucketQueue | None = None
        self._was_early: BucketQueue | None = None
        self._closed: AsynctrtError | None = None
        self._is_over = False
        self._number = 0
        self._queued_rows = 0
        self.open = OpenBatch()
        """Requests that came since the last decision, and need nothing decided about them."""
        self.has_to_expire = False
        """Whether a deadline has to be watched, or callers have to be notified that they left the queue."""
        self._in_flight: dict[Flight, Batch] = {}
        self._forecast = Forecast(
            policy, self._times, self._concurrency, self._in_flight, in_flight_max, self._expected_rows
        )
        # Requests that are too late for any batch, to be told at the next `expire`.
        self._late: list[Request] = []
        self.share: Share | None = None
        """Its part of a device that it divides with others; ``None`` if it takes what it can get."""
        # Whether what is queued waits for company, not for the device.
        self._bides = False
        # The last batch that started with what was most overdue, and whether the last one went out of turn.
        self._aged_number = 0
        self._is_out_of_turn = False
        self.again: list[tuple[BatchKey, tuple[Request, ...]]] = []
        """Parts of batches that failed, each to be launched as a batch of its own, the largest first."""
        self.taken: Sequence[Request] = ()
        """Those that were taken out of the queue last, to be launched."""
        self.displaced: list[Request] = []
        """Requests that made room for more urgent ones; for the driver to take away and to answer."""
        # Whether the latest batch was such a part, so that it is the queue's turn.
        self._was_part = False
        self._parts_max = PARTS_MAX * policy.rows_max
        self.times_all = times_all
        """Whether the device times every batch from now on."""

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<Scheduler {state} queued={self.queued_requests} rows={self.queued_rows} "
            f"in_flight={len(self._in_flight)} {self._contexts!r}>"
        )

    def divide(self, share: Share) -> None:
        """Launch no more from now on than is left to it of the device that it shares."""
        self.share = share
        share.wants = self._wants_device
        share.is_full = self._is_full

    @property
    def lanes_max(self) -> int:
        """Return how many lanes there may be; 0 where the device sees to the order of batches."""
        return self._policy.lanes_max if self._policy.is_pipelined else 0

    @property
    def queued_rows(self) -> int:
        """Return the rows that wait, over all buckets."""
        return self._queued_rows + len(self.open.requests)

    @property
    def has_to_launch(self) -> bool:
        """Return whether anything waits to be launched, for the first time or again."""
        # No batch is open unless something is queued.
        return self._queued_rows > 0 or bool(self.again)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is queued and nothing is in flight."""
        return not self.has_to_launch and not self._in_flight

    @property
    def is_stuck(self) -> bool:
        """Return whether no context is left that a batch could ever run on again."""
        return not self._contexts.usable

    @property
    def in_flight(self) -> int:
        """Return how many batches are in flight."""
        return len(self._in_flight)

    @property
    def queued_requests(self) -> int:
        """Return how many requests wait, over all buckets."""
        return sum(bucket.requests for bucket in self._buckets) + len(self.open.requests)

    def snapshot(self) -> Snapshot:
        """Return what has been done and is being done, as numbers that are the caller's own.

        Any thread may ask, in the middle of whatever the loop's thread does: what is gone through is a copy.
        """
        counters = self._counters
        values = {name: getattr(counters, name) for name in Counters.__slots__}
        sizes = dict(counters.by_rows)
        values["by_rows"] = {
            rows: SizeCounters(size.count, size.copy_in_ns, size.compute_ns, size.copy_out_ns)
            for rows, size in sorted(sizes.items())
        }
        values["launched"] = dict(counters.launched)
        queued = self.queued_requests
        # Whoever is masked has been counted.
        again = [requests for _, requests in self.again]
        under_way = [*again, *(batch.requests for batch in tuple(self._in_flight.values()))]
        waiting = sum(request.state is IN_FLIGHT for requests in under_way for request in requests)
        return Snapshot(
            Counters(**values),
            submitted=counters.ended + queued + waiting,
            queued_requests=queued,
            queued_rows=self.queued_rows,
            in_flight_batches=len(self._in_flight),
            contexts_quarantined=len(self._contexts.quarantined),
        )

    def queued_by_key(self) -> dict[BatchKey, int]:
        """Return the rows that are queued in each bucket with work."""
        self._close_open()
        return {bucket.key: bucket.rows for bucket in self._buckets}

    def limit(self, key: BatchKey) -> int:
        """Return the rows that one batch of this key holds.

        :raises InputError: for a shape that no profile of the model takes.
        :raises ExecutionError: when the model fails to say.
        """
        return self._shapes.limit(key.shape)

    def submit(self, request: Request) -> None:
        """Queue one request, or raise and change nothing.

        A queue without room for it gives up less urgent requests, which then are in :attr:`displaced`.

        :raises EngineClosedError: (or what else was given) after :meth:`refuse` or :meth:`close`.
        :raises DeadlineUnreachableError: when it would be too late, as far as can be told.
        :raises QueueFullError: when the queue has no room for its rows.
        :raises InputError, ExecutionError: as :meth:`limit`.
        """
        if self.open.bucket is not None:
            self._close_open()
        rows, has_deadline = request.rows, request.deadline_ns != NO_DEADLINE_NS
        bucket = self._bucket
        # Most are launched at once, which the forecast would say after two calls.
        if (
            has_deadline
            and not self._closed
            and (
                self._policy.answers_in_time
                or bucket is None
                or bucket.key is not request.key
                or len(self._in_flight) + bucket.rows // bucket.rows_max >= self._in_flight_max
                or request.deadline_ns < request.arrival_ns
            )
        ):
            self._foresee(request, 1)
        if self._queued_rows + rows > self._queue_rows_max:
            self._make_room((request,), rows)
        if bucket is None or bucket.key is not request.key:
            bucket = self._bucket = self._bucket_of(request.key)
        self._queued_rows += rows
        if has_deadline or request.priority:
            needs_place = bucket.push(request)
        else:  # What `push` does, without the call.
            bucket.plain.append(request)
            bucket.rows = rows = bucket.rows + rows
            needs_place = bucket.priority < 0 or (rows >= bucket.rows_max and not bucket.is_full)
            self.open.begin(bucket, self._queue_rows_max - self._queued_rows)
        if needs_place:
            self._buckets.pushed(bucket, request)
        if has_deadline:
            # Each request has a row at least.
            self._deadlines.push(request, queued_max=self._queued_rows)
            self.has_to_expire = True

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Queue all of ``requests``, which share a key, or raise and queue none. As :meth:`submit`."""
        self._close_open()
        rows = sum(request.rows for request in requests)
        if requests[-1].deadline_ns != NO_DEADLINE_NS and not self._closed:
            # All of it is there when its last part is.
            self._foresee(requests[-1], len(requests), rows - requests[-1].rows)
            if requests[-1] in self._forecast.trial:
                self._forecast.trial = tuple(requests)  # If one part is late, all of them are given up.
        if self._queued_rows + rows > self._queue_rows_max:
            self._make_room(requests, rows)
        for request in requests:
            request.deadline_ns = min(request.deadline_ns, requests[-1].deadline_ns)
            request.reserve_ns = requests[-1].reserve_ns
        bucket = self._bucket = self._bucket_of(requests[0].key)
        if bucket.push_parts(requests):
            self._buckets.pushed(bucket, requests[0])
        self._queued_rows += rows
        if requests[0].deadline_ns != NO_DEADLINE_NS:
            self.has_to_expire = True
            for request in requests:
                self._deadlines.push(request, queued_max=self._queued_rows)

    def cancel(self, request: Request) -> bool:
        """Note that the caller has gone away. True: the request was queued and has left the queue.

        In flight, its rows are masked and its batch-mates are untouched. Once answered, nothing is done.
        """
        if request.state is QUEUED:
            self._close_open()
            self._leave(request, Change.CANCEL)
            self._counters.cancelled += 1
            return True
        if self._mask(request):
            self._counters.cancelled += 1
        return False

    def fail_one(self, request: Request) -> None:
        """Fail one request of a batch in flight, whose caller is told at once; its batch-mates go on."""
        if self._mask(request):
            self._counters.failed += 1

    def expire(self, now_ns: int, arrived_by_ns: int = NO_DEADLINE_NS) -> list[Request]:
        """Take the queued requests whose deadline has come out of the queue and return them.

        :param arrived_by_ns: spare those that arrived later: they had no chance to be launched yet.
        """
        due = self._deadlines.pop_due(now_ns, arrived_by_ns)
        for request in due:
            self._leave(request, Change.EXPIRE)
        self._counters.expired += len(due)
        if self._late:
            due += self._late
            self._late = []
        self.has_to_expire = bool(self._deadlines.line)
        return due

    def next_batch(self, now_ns: int) -> Batch | RejectedBatch | None:  # noqa: C901  (a call a batch less)
        """Return the batch to launch now, with everything decided; ``None`` when there is none.

        The model is asked about the batch before any request leaves its queue. When that fails, the requests
        leave it as a :class:`RejectedBatch`, and the next call goes on with others.
        """
        if self.open.bucket is not None:
            self._close_open()
        in_flight = len(self._in_flight)
        self._due_ns = self._early = None
        if not self._contexts.free or in_flight >= self._in_flight_max:
            return None
        if self.share is not None and self._is_left_to_others(self.share, now_ns):
            return None
        if self.again and not (self._was_part and len(self.again) <= self._parts_max):
            decided = self._next_again(now_ns)
            if decided is not None:
                return decided
        while True:
            if not self._queued_rows:
                return self._next_again(now_ns)
            picked = self._buckets.pick(now_ns, in_flight)
            if picked is None:
                self._bides = True
                return self._next_again(now_ns)
            bucket, reason = picked
            by_age = False
            if self._buckets.priority_max or (self._deadlines.line and self._buckets.waiting > 1):
                bucket, reason = self._reconsider(bucket, reason, now_ns)
                by_age = reason is Reason.AGED
            key = bucket.key
            joined: tuple[Part, ...] = ()
            if in_flight and self._policy.is_pipelined and self._is_early(bucket, now_ns):
                self._early = self._was_early = bucket
                return self._next_again(now_ns)
            if self._policy.answers_in_time and self._deadlines.line:
                chosen, rows = self._choose_in_time(bucket, in_flight, now_ns, by_age=by_age)
                if not chosen:
                    continue  # With fewer in the queue.
                break
            if bucket.rows == 1:
                chosen, rows = bucket.choose(1)
            else:
                chosen, rows = self._choose(bucket, in_flight, by_age=by_age)
            if self._buckets.waiting > 1 and rows < bucket.rows_max and rows == bucket.rows:
                key, joined = self._join(bucket, rows, in_flight)
                for _, others, more in joined:
                    chosen, rows = chosen + others, rows + more
            break
        rows_run, profile = rows, None
        if not self._runs_as_it_is:
            try:
                rows_run, profile = self._rows_to_run(key, rows)
            except Exception as error:
                return self._reject(bucket, chosen, rows, joined, error)
        self._was_part = False
        self.taken = chosen
        if joined:
            self._take_all(bucket, chosen, rows, joined)
        else:
            bucket.take(chosen, rows)
            self._buckets.launched(bucket)
        self._queued_rows -= rows
        if by_age:
            self._aged_number = self._number + 1
        batch = self._launch(key, chosen, rows, rows_run, profile, reason, now_ns)
        was_early, self._was_early = self._was_early, None
        batch.flight.was_due = was_early is bucket and reason is not Reason.FULL and batch.is_timed
        return batch

    @property
    def early_key(self) -> BatchKey | None:
        """Return the key of the batch that :meth:`next_batch` holds back while others compute, so that it may
        grow; ``None`` if there is none."""
        return None if self._early is None else self._early.key

    def early(self) -> tuple[tuple[Request, ...], int] | None:
        """Return the requests that this batch would have now, and the context that it would be launched on;
        ``None`` if there is no telling."""
        bucket = self._early
        if bucket is None or not bucket.rows:
            return None
        chosen, rows = self._choose(bucket, len(self._in_flight), by_age=False)
        profile = None
        if self._shapes.has_profiles:
            try:
                profile = self._rows_to_run(bucket.key, rows)[1]
            except Exception:
                return None  # The model raises again when the batch is formed, and is answered for then.
        context = self._contexts.keep(profile)
        return None if context is None else (chosen, context)

    def _choose(
        self, bucket: BucketQueue, in_flight: int, *, by_age: bool
    ) -> tuple[tuple[Request, ...], int]:
        """Return the requests of the next batch and their rows."""
        if self._policy.is_alone and (head := bucket.head(by_age=by_age)) is not None:
            return (head,), head.rows
        return bucket.choose(bucket.rows_max if by_age else self._rows_to_take(bucket, in_flight), by_age)

    def _choose_in_time(
        self, bucket: BucketQueue, in_flight: int, now_ns: int, *, by_age: bool
    ) -> tuple[tuple[Request, ...], int]:
        """Return the requests of the next batch and their rows; none if some had to leave the queue, as it
        would come too late for them."""

        def choose(rows_max: int) -> tuple[tuple[Request, ...], int]:
            if self._policy.is_alone and (head := bucket.head(by_age=by_age)) is not None:
                return (head,), head.rows
            return bucket.choose(rows_max, by_age)

        rows_max = bucket.rows_max if by_age else self._rows_to_take(bucket, in_flight)
        may_split = bucket.key.slab is None and not by_age
        found = self._forecast.fit(bucket, rows_max, choose, now_ns, may_split=may_split)
        for request in found.late:
            self._leave(request, Change.EXPIRE)
        self._counters.expired += len(found.late)
        self._late += found.late
        self.has_to_expire = True
        return found.requests, found.rows

    def _join(self, bucket: BucketQueue, rows: int, in_flight: int) -> tuple[BatchKey, tuple[Part, ...]]:
        """Return the requests of other buckets that share the batch of ``bucket``, and the batch's key."""
        policy, buckets = self._policy, self._buckets
        key = bucket.key
        joined: list[Part] = []
        # On idle cores, the others compute at the same time.
        is_parallel = policy.is_parallel and buckets.waiting <= policy.concurrency - in_flight
        is_placed = key.slab is not None or key.on_device or key.outputs_on_device
        if policy.is_alone or is_placed or is_parallel:
            return key, ()
        rows_max = bucket.rows_max
        side_by_side = self._concurrency.allowed(rows, rows_max) if self._policy.is_pipelined else 1
        for other in self._company.beside(bucket, buckets.next_ones(), side_by_side):
            is_longer = other.key.shape != key.shape and self._company.holds(other.key.shape, key.shape)
            room = (min(rows_max, other.rows_max) if is_longer else rows_max) - rows
            if room < 1 or not (is_longer or self._company.holds(key.shape, other.key.shape)):
                continue
            chosen, more = other.choose(room)
            if not chosen:
                continue
            if is_longer:
                key, rows_max = other.key, min(rows_max, other.rows_max)
            joined.append((other, chosen, more))
            rows += more
        return key, tuple(joined)

    def _take_all(
        self,
        bucket: BucketQueue,
        chosen: tuple[Request, ...],
        rows: int,
        joined: tuple[Part, ...],
        after: State = IN_FLIGHT,
    ) -> None:
        """Let the requests of a batch leave their buckets."""
        own = len(chosen)
        for other, others, more in joined:
            other.take(others, more, after)
            self._buckets.left(other)
            own, rows = own - len(others), rows - more
        bucket.take(chosen[:own], rows, after)
        self._buckets.launched(bucket)

    def _reject(
        self,
        bucket: BucketQueue,
        chosen: tuple[Request, ...],
        rows: int,
        joined: tuple[Part, ...],
        error: Exception,
    ) -> RejectedBatch:
        """Take requests out of their queue that the model cannot be asked about."""
        self._take_all(bucket, chosen, rows, joined, State.FAILED)
        self._queued_rows -= rows
        self._counters.failed += len(chosen)
        return RejectedBatch(chosen, error)

    def _launch(
        self,
        key: BatchKey,
        chosen: tuple[Request, ...],
        rows: int,
        rows_run: int,
        profile: int | None,
        reason: Reason,
        now_ns: int,
    ) -> Batch:
        self._number = number = self._number + 1
        is_timed = self.times_all or self._times.wants_times(number, key.cost_key, rows_run)
        context, arena = self._contexts.acquire(profile)
        lane, count = None, 1
        if self._policy.is_pipelined:
            count = self._concurrency.allowed(rows, self._shapes.limit(key.shape))
            lane = self._concurrency.acquire(count)
            if reason is Reason.IDLE and self._concurrency.occupied:
                reason = Reason.AHEAD
        flight = Flight(number)
        # In 0.6 of the time that the constructor takes.
        batch = tuple.__new__(
            Batch,
            (
                number,
                key,
                chosen,
                rows,
                rows_run,
                profile,
                context,
                arena,
                is_timed,
                reason,
                now_ns,
                lane,
                flight,
            ),
        )
        self._in_flight[flight] = batch
        if self._concurrency.lines:
            self._concurrency.launched(batch)
        self._counters.launched[reason] += 1
        if self.share is not None:
            self.share.launched(
                flight,
                now_ns,
                (key.cost_key, rows_run),
                lanes=count,
                computing=self._computing(),
            )
        return batch

    def _is_left_to_others(self, share: Share, now_ns: int) -> bool:
        """Return whether others on the device go before what is queued here; note until when."""
        if not self.has_to_launch:
            return False
        until_ns = share.hold_until(now_ns)
        self._bides = False
        self._due_ns = until_ns
        return until_ns is not None

    def _wants_device(self) -> bool:
        """Return whether there is something to launch now, or when what is in flight ends."""
        if not self.has_to_launch:
            return False
        return bool(self._in_flight) or (not self._bides and self._contexts.free > 0)

    def _is_full(self) -> bool:
        """Return whether nothing would be launched now, however much room the device has."""
        return self._bides or not self._contexts.free or len(self._in_flight) >= self._in_flight_max

    def _computing(self) -> int:
        """Return how many of its batches compute at once."""
        return self._concurrency.in_use if self._policy.is_pipelined else len(self._in_flight)

    def _reconsider(self, bucket: BucketQueue, reason: Reason, now_ns: int) -> tuple[BucketQueue, Reason]:
        """Return the bucket to launch from instead of the one whose turn it is: now and then that of what is
        most overdue, and every second time that of the earliest deadline."""
        buckets = self._buckets
        is_due = buckets.priority_max and self._number + 1 - self._aged_number >= AGED_EVERY
        if is_due and (aged := buckets.overdue(now_ns)) is not None:
            return aged, Reason.AGED
        out_of_turn, self._is_out_of_turn = self._is_out_of_turn, False
        if not out_of_turn and (first := self._deadlines.earliest()) is not None:
            other = buckets.instead(bucket, first)
            if other is not None:
                self._is_out_of_turn = True
                return other, buckets.reason(other, now_ns, len(self._in_flight))
        return bucket, reason

    def _next_again(self, now_ns: int) -> Batch | RejectedBatch | None:
        """Return the next part of a batch that failed, without those whose callers have gone away since;
        ``None`` if there is none."""
        while self.again:
            key, requests = self.again.pop(0)
            chosen = awaited(requests)
            if not chosen:
                continue
            rows = sum(request.rows for request in chosen)
            try:
                rows_run, profile = self._rows_to_run(key, rows)
            except Exception as error:
                change_all(chosen, Change.FAIL)
                self._counters.failed += len(chosen)
                return RejectedBatch(chosen, error)
            self._was_part = True
            return self._launch(key, chosen, rows, rows_run, profile, Reason.AGAIN, now_ns)
        return None

    def _is_early(self, bucket: BucketQueue, now_ns: int) -> bool:
        """Return whether the next batch can still grow before the device would want it; note when that is."""
        if bucket.is_full and not self._policy.answers_in_time:
            return False
        rows_max = bucket.rows_max
        due_ns = self._concurrency.due_ns(bucket.key, min(bucket.rows, rows_max), rows_max, now_ns)
        if due_ns is None:
            return False
        # To be launched sooner is of no use to those who are to be answered sooner.
        deadlines = None if self._policy.answers_in_time else self._deadlines
        if deadlines is not None and deadlines.line and (deadline_ns := deadlines.earliest_ns()) is not None:
            due_ns = min(due_ns, deadline_ns - DEADLINE_MARGIN_NS)
        if due_ns <= now_ns:
            return False
        self._due_ns = due_ns
        return True

    def next_wakeup(self) -> int | None:
        """Return when to look again though nothing happens, in ns: a deadline, the end of a delay, or when a
        batch is to be launched so that the device has it in time."""
        wakeup_ns = self._deadlines.earliest_ns() if self._deadlines.line else None
        if self._due_ns is not None and (wakeup_ns is None or self._due_ns < wakeup_ns):
            wakeup_ns = self._due_ns
        if self.share is not None and self.share.is_held:
            return wakeup_ns  # The end of a delay changes nothing.
        if self._policy.delay_ns_max and self._contexts.free and len(self._in_flight) < self._in_flight_max:
            delay_ns = self._buckets.wakeup_ns(len(self._in_flight))
            if delay_ns is not None and (wakeup_ns is None or delay_ns < wakeup_ns):
                return delay_ns
        return wakeup_ns

    def started(self, batch: Batch, now_ns: int, put_ns: int | None = None) -> int | None:
        """Note that a batch is on its stream.

        :param put_ns: when the first of it was put there, if that took a while.
        :returns: in how many ns it is expected to be done; ``None`` if none like it was seen yet.
        """
        return self._concurrency.started(batch, now_ns, put_ns)

    def landed(self, batch: Batch, now_ns: int) -> None:
        """Note that the device is done with a batch; its outputs are still to be copied to their callers."""
        self._concurrency.landed(batch, now_ns)

    def seed(self, key: BatchKey, compute_ns: Mapping[int, int]) -> None:
        """Note what batches took before the first request came, in ns, by their rows."""
        self._times.seed(key, compute_ns)

    def run_anew(self, shape: Hashable, times: Mapping[int, int]) -> None:
        """Forget what batches of a shape took: from now on they run in another way.

        :param times: how long they take now, in ns, by their rows; empty if nothing is known.
        """
        self._times.forget(shape)
        self.seed(BatchKey(shape), times)
        self._company.tell(shape, times)

    def usual_ns(self, batch: Batch) -> tuple[int, int, int]:
        """Return how long such a batch usually takes to be copied in, to compute and to be copied out."""
        return self._times.usual_ns(batch.key, batch.rows_run)

    def observe_copies(self, batch: Batch, *, copy_in_ns: int, copy_out_ns: int) -> None:
        """Remember the copy times that the device measured of a timed batch."""
        self._times.observe_copies(batch, copy_in_ns, copy_out_ns)

    def observe_wait(self, batch: Batch, wait_ns: int) -> None:
        """Remember how long before its turn a timed batch was in place, as the device measured."""
        self._concurrency.observe_wait(batch, wait_ns)

    def ran(self, batch: Batch, now_ns: int, took_ns: int) -> None:
        """Note how long a batch ran on the device, which others share, once it is done there."""
        if self.share is not None:
            self.share.ran(batch.flight, now_ns, took_ns)

    def finished(
        self,
        batch: Batch,
        now_ns: int,
        copy_in_ns: int,
        compute_ns: int,
        copy_out_ns: int,
        arena_wait_ns: int = 0,
    ) -> None:
        """Note that a batch has been answered; its context is free again."""
        if self._in_flight.pop(batch.flight, None) is not batch:
            raise _not_in_flight(batch)
        answered, arrived_ns = complete(batch.requests)
        self._contexts.release(batch.context, batch.arena)
        if self._concurrency.lines:
            self._concurrency.left(batch)
        if self.share is not None:
            self.share.left(batch.flight, computing=self._computing())
        if batch.is_timed:
            if self._policy.answers_in_time:
                self._observe_late(batch, now_ns, copy_in_ns, compute_ns, copy_out_ns)
            self._times.compute.observe(batch.key.cost_key, batch.rows_run, compute_ns)
            if batch.lane is not None and not self._times.knows_copies(batch.key, batch.rows_run):
                # Nobody has told of any: its rows and its outputs are on the device, say.
                self._times.observe_copies(batch, 0, 0)
            self._company.observe(batch, copy_in_ns + compute_ns + copy_out_ns)
        self._counters.add_batch(
            batch, now_ns, answered, arrived_ns, copy_in_ns, compute_ns, copy_out_ns, arena_wait_ns
        )

    def _observe_late(
        self, batch: Batch, now_ns: int, copy_in_ns: int, compute_ns: int, copy_out_ns: int
    ) -> None:
        """Remember what a batch took at most, besides its copies, if it is told for what is usual."""
        if batch.lane is None and batch.arena is None:
            # It began at once, so all the time is its own, to be handed over and noticed as well.
            compute_ns = max(compute_ns, now_ns - batch.launched_ns - copy_in_ns - copy_out_ns)
        self._times.occupied.observe(batch.key.cost_key, batch.rows_run, compute_ns)

    def failed(self, batch: Batch, *, quarantine: bool = False) -> None:
        """Note that a batch failed. With ``quarantine``, its context is never used again."""
        if self._in_flight.pop(batch.flight, None) is not batch:
            raise _not_in_flight(batch)
        # Whoever is masked was counted when that was done.
        self._counters.failed += sum(request.state is IN_FLIGHT for request in batch.requests)
        change_all(batch.requests, Change.FAIL)
        self._forget(batch)
        if quarantine:
            self._contexts.quarantine(batch.context, batch.arena)
        else:
            self._contexts.release(batch.context, batch.arena)

    def bisect(self, batch: Batch) -> bool:
        """Note that a batch failed, to find out by halves whose requests it fails with; all stay in flight.

        :returns: False, with nothing noted, for a batch of one request, or of none that is still awaited, and
            after :meth:`close`.
        """
        if len(batch.requests) < 2 or self._is_over:
            return False
        if self._in_flight.get(batch.flight) is not batch:
            raise _not_in_flight(batch)
        if not any(request.state is IN_FLIGHT for request in batch.requests):
            return False  # Nobody waits for any of it.
        del self._in_flight[batch.flight]
        self._counters.bisected += 1
        self._forget(batch)
        self._contexts.release(batch.context, batch.arena)
        left = awaited(batch.requests)
        half = (len(left) + 1) // 2
        for part in (left[:half], left[half:]):
            if part:
                # What fails most likely waits behind what most are waiting for.
                insort(self.again, (batch.key, part), key=_smallness)
        return True

    def quarantine_arena(self, arena: int) -> None:
        """Note that a batch of another engine hangs in an arena: no context there is used from now on."""
        self._contexts.quarantine_arena(arena)

    def refuse(self, why: AsynctrtError) -> None:
        """Refuse every submission from now on with an error like ``why``; the queue goes on."""
        self._close_open()
        self._closed = why
        self._queue_rows_max = -1

    def close(self, why: AsynctrtError) -> list[Request]:
        """Refuse every submission from now on, and take everything that is queued, or to be tried again, and
        those that left the queue as too late and were not told yet."""
        self.refuse(why)
        self._is_over = True
        again = [request for _, part in self.again for request in awaited(part)]
        self.again.clear()
        queued = [*again, *self._buckets.clear()]
        change_all(queued, Change.FAIL)
        self._queued_rows = 0
        self._counters.failed += len(queued)
        late, self._late = self._late, []
        return [*queued, *late]

    def _close_open(self) -> None:
        """Let the requests of the open batch join the queue of their bucket, as decisions need them there."""
        bucket, requests = self.open.bucket, self.open.requests
        self.open.bucket = self.open.key = None
        if bucket is None or not requests:
            return
        self.taken = requests  # They are in no other place for a moment.
        self.open.requests = []
        bucket.plain.extend(requests)
        self._queued_rows += len(requests)
        bucket.rows += len(requests)
        if bucket.rows >= bucket.rows_max and not bucket.is_full:
            self._buckets.pushed(bucket, requests[0])

    def _forget(self, batch: Batch) -> None:
        """Expect nothing any more of a batch that failed."""
        self._concurrency.left(batch)
        if self.share is not None:
            self.share.left(batch.flight, computing=self._computing())

    def _foresee(self, request: Request, requests: int, rows_before: int = 0) -> None:
        """Refuse a request, or all of a call, that would be too late."""
        bucket = self._bucket
        if bucket is None or bucket.key is not request.key:
            bucket = self._bucket = self._bucket_of(request.key)
        try:
            self._forecast.check(request, bucket, rows_before)
        except DeadlineUnreachableError:
            self._counters.refused += requests
            self._counters.refused_late += requests
            raise

    def _make_room(self, requests: Sequence[Request], rows: int) -> None:
        """Take less urgent requests out of a full queue, or raise and change nothing."""
        displaced = []
        if not self._closed and rows <= self._queue_rows_max:
            over = self._queued_rows + rows - self._queue_rows_max
            displaced = self._buckets.least_urgent(requests[0].priority, over)
        if not displaced:
            self._refuse(rows, len(requests))
        self._bucket_of(requests[0].key)  # What it raises is raised before anything has changed.
        for request in displaced:
            self._leave(request, Change.FAIL)
        self._counters.failed += len(displaced)
        self.displaced += displaced
        self.has_to_expire = True

    def _bucket_of(self, key: BatchKey) -> BucketQueue:
        bucket = self._buckets.by_key.get(key)
        if bucket is None:
            bucket = BucketQueue(key, self._priorities, self.limit(key), self._policy.patience_ns)
            self._buckets.add(bucket)
        return bucket

    def _rows_to_take(self, bucket: BucketQueue, in_flight: int) -> int:
        if bucket.key.slab is not None:
            # Its rows lie in one slab, which one batch runs from; there are never more than it holds.
            return bucket.rows_max
        if self._policy.is_pipelined:
            return bucket.rows_max if self._concurrency.occupied else self._rows_of_first_half(bucket)
        if bucket.rows < 2 or not self._policy.is_parallel:
            return bucket.rows_max
        head = bucket.head()
        return self._policy.rows_to_take(
            bucket.key.cost_key,
            bucket.rows,
            0 if head is None else head.rows,
            rows_max=bucket.rows_max,
            buckets=self._buckets.waiting,
            in_flight=in_flight,
            compute=self._times.compute,
        )

    def _rows_of_first_half(self, bucket: BucketQueue) -> int:
        """Return the rows for an idle device: half of them, if it is faster to copy the others in while
        these compute than to copy all of them in first."""
        rows = min(bucket.rows, bucket.rows_max)
        head = bucket.head()
        half = max((rows + 1) // 2, 0 if head is None else head.rows)
        if half >= rows or self._contexts.free < 2 or self._in_flight_max < 2:
            return bucket.rows_max  # The others would have no context to be copied in for.
        key, compute, delay_ns = bucket.key, self._times.compute, self._times.delay_ns
        run, half_run = self._expected_rows(key, rows), self._expected_rows(key, half)
        whole_ns, half_ns = compute.typical(key.cost_key, run), compute.typical(key.cost_key, half_run)
        if whole_ns is None or half_ns is None:
            return bucket.rows_max
        first_ns = delay_ns(key, half_run) + half_ns
        # The second half is there when the first has computed, or as soon as it has been copied in.
        halves_ns = max(first_ns, 2 * delay_ns(key, half_run)) + half_ns
        return half if halves_ns < delay_ns(key, run) + whole_ns else bucket.rows_max

    def _rows_to_run(self, key: BatchKey, rows: int) -> tuple[int, int | None]:
        """Return the rows that the device executes for ``rows``, and the profile to do it with."""
        rows_run = self._shapes.padded_rows(key.shape, rows)
        if self._policy.captured.sizes and key.shape == ():
            rows_run = self._policy.rows_to_run(key.cost_key, rows_run, self._times.compute)
        return rows_run, self._shapes.profile(key.shape, rows_run)

    def _expected_rows(self, key: BatchKey, rows: int) -> int:
        """Return the rows that the device is expected to execute for ``rows``."""
        try:
            return self._rows_to_run(key, rows)[0]
        except Exception:  # The model raises again when the batch is formed, and is answered for then.
            return rows

    def _leave(self, request: Request, what: Change) -> None:
        """Take a queued request out of its bucket from wherever it stands."""
        change(request, what)
        bucket = self._buckets.by_key.get(request.key)
        assert bucket is not None
        bucket.discard(request)
        self._queued_rows -= request.rows
        self._buckets.left(bucket)

    def _mask(self, request: Request) -> bool:
        """Drop the answer of a request in flight; False if it is no longer in flight."""
        if request.state is not IN_FLIGHT:
            return False
        change(request, Change.CANCEL)
        return True

    def _refuse(self, rows: int, requests: int) -> None:
        self._counters.refused += requests
        if self._closed:
            # A fresh instance: one that many callers raise would collect all their tracebacks.
            raise copy_for(self._closed)
        raise QueueFullError(
            f"the queue holds {self.queued_rows} of at most {self._queue_rows_max} rows and has no "
            f"room for {rows} more. Retry later, send less, or open the engine with a larger "
            "max_queue_rows"
        )


def _smallness(part: tuple[BatchKey, tuple[Request, ...]]) -> int:
    return -len(part[1])


def _not_in_flight(batch: Batch) -> InternalError:
    return InternalError(f"{batch!r} is not in flight")
