"""The scheduler: one synchronous object that makes all decisions. The driver carries them out.

Nothing here waits, reads a clock or touches tensors, so a decision cannot be interrupted halfway by a
cancellation, and two runs with the same inputs make the same decisions.

:meth:`Scheduler.next_batch` asks small policies one question each (``policies``): is there room? Whose turn
is it? May that batch still grow? Which rows does it take, and with how many is it run?
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asynctrt.errors import AsynctrtError, InternalError
from asynctrt.scheduling.batch import Batch, Measured, Reason, RejectedBatch
from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.company import OneSize
from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.contexts import ContextAllocator
from asynctrt.scheduling.counters import Counters
from asynctrt.scheduling.forecast import Forecast
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policies import (
    Again,
    AtOnce,
    HalvesFirst,
    InTime,
    JustInTime,
    KeptSizes,
    Room,
    RunAs,
    SpreadOverCores,
    TakeOneRequest,
    TakeRows,
    Turns,
)
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queue import Queue
from asynctrt.scheduling.queues import BucketQueue, JoinedRows
from asynctrt.scheduling.request import (
    IN_FLIGHT,
    QUEUED,
    Change,
    Request,
    change,
    complete,
    waiting_in,
)
from asynctrt.scheduling.shapes import Shapes
from asynctrt.scheduling.shares import Share

PARTS_MAX: Final = 4
"""New batches take turns with parts of failed batches, as long as no more parts wait than this many times the
rows of a batch. That is enough to isolate all requests of callers whose requests always fail, so that new
batches succeed."""


# As constants: looking a member up on its class takes longer.
IDLE: Final = Reason.IDLE
FULL: Final = Reason.FULL

NONE_JOINED: Final[tuple[JoinedRows, ...]] = ()


class Snapshot(NamedTuple):
    """What the scheduler has done and is doing, as numbers that do not change afterwards."""

    counters: Counters
    submitted: int
    queued_requests: int
    queued_rows: int
    in_flight_batches: int
    contexts_quarantined: int


class Scheduler:
    """Takes requests and returns batches.

    :param policy: the rules by which batches are launched.
    :param shapes: which rows of each shape the model takes.
    :param queue_rows_max: the most rows that may be queued, over all buckets.
    :param priorities: the number of priority levels; a larger priority is more urgent.
    :param contexts: the number of execution contexts; ``arenas``: of enqueue-memory arenas that they share.
    :param in_flight_max: the most batches that may be in flight at once.
    :param arena_users: the number of batches in each arena, if engines share arenas.
    :param times_all: whether the device times every batch, because timing costs it nothing.
    :param company: decides which rows of other sizes share a batch.
    :param rows: decides which rows a batch takes. Default: as many as fit, divided where that is faster.
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
        company: OneSize | None = None,
        rows: TakeRows | None = None,
    ) -> None:
        self._policy = policy
        self._counters = Counters()
        self.times = BatchTimes(times_all=times_all, keeps_promises=policy.answers_in_time)
        """How long batches take."""
        self._concurrency = Concurrency(
            self.times,
            lanes=policy.lanes,
            lanes_max=policy.lanes_max if policy.is_pipelined else 0,
            arenas=arenas,
            may_put_slowly=policy.may_enqueue_slowly,
        )
        self._in_flight: dict[Batch, None] = {}
        self.room = Room(
            ContextAllocator(contexts=contexts, arenas=arenas, arena_users=arena_users),
            self._in_flight,
            in_flight_max,
        )
        """Decides whether there is room for a batch; holds the contexts."""
        self.room.contexts_differ = shapes.has_profiles or policy.change_ns > 0
        if policy.change_ns:
            self.room.sizes = KeptSizes(self.room.contexts, shapes, self.times, policy.change_ns)
        self._run_as = RunAs(policy, shapes, self.times)
        forecast = Forecast(
            policy, self.times, self._concurrency, self._in_flight, in_flight_max, self._run_as.expected_rows
        )
        self.queue = Queue(
            policy,
            priorities=priorities,
            rows_max=queue_rows_max,
            limit=self._run_as.limit,
            forecast=forecast,
            counters=self._counters,
        )
        """The requests that wait to be launched."""
        self.again = Again(PARTS_MAX * policy.rows_max)
        """Parts of batches that failed, to be tried again."""
        self._turns = Turns(self.queue.buckets, self.queue.deadlines)
        self._growth = self._growth_of(policy)
        self._rows = self._rows_of(policy, forecast) if rows is None else rows
        self._company = OneSize() if company is None or policy.is_alone else company
        self._number = 0
        self.taken: Sequence[Request] = ()
        """The requests that left the queue last, to be launched."""

    def _growth_of(self, policy: Policy) -> AtOnce:
        if not policy.is_pipelined:
            return AtOnce()
        # Launching sooner does not answer sooner.
        deadlines = None if policy.answers_in_time else self.queue.deadlines
        return JustInTime(self._concurrency, deadlines, holds_full_ones=policy.answers_in_time)

    def _rows_of(self, policy: Policy, forecast: Forecast) -> TakeRows:
        rows = TakeRows()
        if policy.is_alone:
            rows = TakeOneRequest()
        elif policy.is_pipelined:
            rows = HalvesFirst(self._concurrency, self.times, self.room, self._run_as.expected_rows)
        elif policy.is_parallel and not policy.delay_ns_max:  # A delay asks for large batches.
            rows = SpreadOverCores(policy, self.queue.buckets, self.times)
        return InTime(rows, forecast, self.queue.deadlines) if policy.answers_in_time else rows

    def __repr__(self) -> str:
        state = "closed" if self.queue.closed else "open"
        return (
            f"<Scheduler {state} queued={self.queue.requests} rows={self.queued_rows} "
            f"in_flight={len(self._in_flight)} {self.room.contexts!r}>"
        )

    def divide(self, share: Share) -> None:
        """Use no more than a share of the device from now on."""
        self.room.share = share
        share.wants = lambda: self.has_to_launch and self.room.is_wanted
        share.is_full = self.room.is_full

    @property
    def lanes_max(self) -> int:
        """Return how many lanes there may be; 0 if the device orders batches itself."""
        return self._policy.lanes_max if self._policy.is_pipelined else 0

    @property
    def queued_rows(self) -> int:
        """Return the rows that wait, over all buckets."""
        return self.queue.rows + self.queue.open.rows

    @property
    def has_to_launch(self) -> bool:
        """Return whether any request waits to be launched, for the first time or again."""
        return self.queue.rows > 0 or bool(self.queue.open.entries) or bool(self.again.parts)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is queued and nothing is in flight."""
        return not self.has_to_launch and not self._in_flight

    @property
    def is_stuck(self) -> bool:
        """Return whether no context is left on which a batch could ever run again."""
        return not self.room.contexts.usable

    @property
    def in_flight(self) -> int:
        """Return how many batches are in flight."""
        return len(self._in_flight)

    def snapshot(self) -> Snapshot:
        """Return what has been done and is being done, as numbers that do not change afterwards.

        Any thread may call this while the loop's thread makes changes, so it iterates over copies.
        """
        counters = self._counters.copy()
        queued = self.queue.requests
        # Masked requests have been counted as cancelled or failed.
        again = [requests for _, requests in tuple(self.again.parts)]
        under_way = [*again, *(batch.requests for batch in tuple(self._in_flight))]
        waiting = sum(map(waiting_in, under_way))
        return Snapshot(
            counters,
            submitted=counters.ended + queued + waiting,
            queued_requests=queued,
            queued_rows=self.queued_rows,
            in_flight_batches=len(self._in_flight),
            contexts_quarantined=len(self.room.contexts.quarantined),
        )

    def limit(self, key: BatchKey) -> int:
        """Return the rows that one batch of this key holds.

        :raises InputError: for a shape that no profile of the model takes.
        :raises ExecutionError: if the model fails to say which shapes it takes.
        """
        return self._run_as.limit(key.shape)

    def cancel(self, request: Request) -> bool:
        """Cancel a request whose caller has gone away. Return whether it was queued, and so has left the
        queue.

        A request in flight is masked, and the others in its batch are not affected. An answered one is
        ignored.
        """
        if request.state is QUEUED:
            self.queue.leave(request, Change.CANCEL)
            self._counters.cancelled += 1
            return True
        if request.state is IN_FLIGHT:
            change(request, Change.CANCEL)
            self._counters.cancelled += 1
        return False

    def cancel_plain(self, future: Any) -> Request | None:
        """Cancel a plain request, whose future has been cancelled. Return it if it was queued."""
        request = self.queue.object_of(future)
        if request is not None:
            self.queue.leave(request, Change.CANCEL)
        self._counters.cancelled += 1
        return request

    def fail_one(self, request: Request) -> None:
        """Fail one request of a batch in flight; the others go on."""
        if request.state is IN_FLIGHT:
            change(request, Change.CANCEL)
            self._counters.failed += 1

    def next_batch(self, now_ns: int) -> Batch | RejectedBatch | None:
        """Return the batch to launch now, with everything decided; ``None`` if there is none.

        The model is asked about the batch before any request leaves its queue. If that fails, the requests
        leave it as a :class:`RejectedBatch`, and the next call goes on with others.
        """
        queue, again, room, opened = self.queue, self.again, self.room, self.queue.open
        opened.joins = None
        if self._growth.due_ns is not None:
            self._growth.begin()
        room.until_ns = None
        if not (opened.entries or queue.rows or again.parts) or not room.has_room(now_ns):
            return None
        if opened.entries:
            if opened.may_launch and not (queue.rows or again.parts or queue.deadlines.line):
                return self._next_open(now_ns)
            queue.close_open()
        decided = self._next_again(now_ns) if again.parts and again.goes_first else None
        if decided is None and queue.rows:
            decided = self._next_queued(now_ns)
        if decided is None and again.parts:
            decided = self._next_again(now_ns)
        return decided

    def _next_queued(self, now_ns: int) -> Batch | RejectedBatch | None:
        """Return the next batch of queued requests; ``None`` if none should be launched now."""
        queue, buckets, room, in_flight = self.queue, self.queue.buckets, self.room, len(self._in_flight)
        while queue.rows:
            turn = buckets.pick(now_ns, in_flight)
            room.bides = turn is None
            if turn is None:
                break
            if buckets.priority_max or (buckets.waiting > 1 and queue.deadlines.line):
                turn = self._turns.reconsider(turn, self._number + 1, now_ns, in_flight)
            bucket, reason = turn
            if in_flight and self._growth.may_grow(bucket, now_ns):
                break
            chosen, rows, late = self._rows.choose(bucket, in_flight, now_ns, reason)
            if late:
                queue.give_up(late)
                continue
            return self._fit(bucket, chosen, rows, reason, now_ns)
        return None

    def _next_open(self, now_ns: int) -> Batch | RejectedBatch | None:
        """Return the next batch of the open batch, which alone waits; ``None`` if it should wait."""
        opened, in_flight = self.queue.open, len(self._in_flight)
        reason = IDLE if len(opened.entries) < opened.rows_max else FULL
        self.room.bides = False
        if in_flight:
            if in_flight >= self._policy.concurrency and (reason is IDLE or self._policy.answers_in_time):
                self.room.bides = True
                return None
            if self._growth.may_grow(opened, now_ns):
                return None
        key, rows = opened.key, len(opened.entries)
        if rows > 1:
            rows = min(rows, self._rows.rows_max(opened, in_flight, reason))
        found = self._run_as.find(key, rows)
        self.taken = chosen = opened.first(rows)
        opened.leave(rows)
        if isinstance(found, Exception):
            self.queue.fail(chosen)
            return RejectedBatch(chosen, found)
        self.again.was_part = False
        return self._launch(key, chosen, rows, *found, reason, now_ns)

    def _fit(
        self, bucket: BucketQueue, chosen: Sequence[Request], rows: int, reason: Reason, now_ns: int
    ) -> Batch | RejectedBatch | None:
        """Return the next batch of a bucket, with the rows that the free contexts take; ``None`` if it has to
        wait for a context."""
        if not self._policy.change_ns:
            return self._form(bucket, chosen, rows, 0, reason, now_ns)
        fitted = self.room.sizes.fit(bucket, chosen, rows, reason, now_ns)
        if fitted is not None:
            return self._form(bucket, *fitted, reason, now_ns)
        self.room.bides, self.room.until_ns = True, self.room.sizes.until_ns
        return None

    def _form(
        self,
        bucket: BucketQueue,
        chosen: Sequence[Request],
        rows: int,
        rows_min: int,
        reason: Reason,
        now_ns: int,
    ) -> Batch | RejectedBatch:
        """Remove the requests of a batch from their queues, and launch it.

        :param rows_min: how many rows to run it with at least, if no others join it.
        """
        queue, own, own_rows = self.queue, chosen, rows
        key, joined = bucket.key, NONE_JOINED
        if queue.buckets.waiting > 1 and rows < bucket.rows_max and rows == bucket.rows:
            key, joined = self._join(bucket)
            for _, others, more in joined:
                chosen, rows = (*chosen, *others), rows + more
        found = self._run_as.find(key, rows)
        self.taken = chosen
        queue.launch(bucket, own, own_rows, joined)
        if isinstance(found, Exception):
            queue.fail(chosen)
            return RejectedBatch(chosen, found)
        rows_run, profile = found
        if joined:
            rows_min = self.room.sizes.usual(key.shape, rows_run)
            self.room.sizes.note(key.shape, rows, rows_min)
        if rows_min > rows_run:
            rows_run = rows_min
        self.again.was_part = False
        if reason is Reason.AGED:
            self._turns.aged_number = self._number + 1
        return self._launch(key, chosen, rows, rows_run, profile, reason, now_ns)

    def _join(self, bucket: BucketQueue) -> tuple[BatchKey, tuple[JoinedRows, ...]]:
        """Return the key of a batch of all rows of a bucket, and the rows of other buckets that join it."""
        policy, buckets = self._policy, self.queue.buckets
        if policy.is_parallel and buckets.waiting <= policy.concurrency - len(self._in_flight):
            return bucket.key, ()  # There are idle cores for all buckets to compute at the same time.
        side_by_side = max(self._concurrency.allowed(bucket.rows, bucket.rows_max), 1)
        return self._company.join(bucket, buckets.next_ones(), side_by_side)

    def _next_again(self, now_ns: int) -> Batch | RejectedBatch | None:
        """Return the next part of a batch that failed; ``None`` if there is none."""
        part = self.again.pop()
        if part is None:
            return None
        key, chosen = part
        self.taken = chosen
        rows = sum(request.rows for request in chosen)
        found = self._run_as.find(key, rows)
        if isinstance(found, Exception):
            self.queue.fail(chosen)
            return RejectedBatch(chosen, found)
        rows_run, profile = found
        rows_run = max(rows_run, self.room.sizes.usual(key.shape, rows_run))
        self.again.was_part = True
        return self._launch(key, chosen, rows, rows_run, profile, Reason.AGAIN, now_ns)

    def _launch(
        self,
        key: BatchKey,
        chosen: Sequence[Request],
        rows: int,
        rows_run: int,
        profile: int | None,
        reason: Reason,
        now_ns: int,
    ) -> Batch:
        self._number = number = self._number + 1
        is_timed = self.times.times_all or self.times.wants_times(number, key.shape, rows_run)
        changes = False
        if self.room.contexts_differ:
            context, arena, changes = self._acquire(key, rows_run, profile)
            is_timed = is_timed and not changes  # The time of a change is not that of a batch.
        else:
            context, arena = self.room.contexts.acquire()
        lane, count = None, 1
        if self._concurrency.has_lanes:
            count = self._concurrency.allowed(rows, self._run_as.limit(key.shape))
            lane = self._concurrency.acquire(count)
            if reason is Reason.IDLE and self._concurrency.occupied:
                reason = Reason.AHEAD
        batch = Batch(
            key, chosen, rows, rows_run, profile, context, arena, lane, number, reason, now_ns, is_timed
        )
        self._in_flight[batch] = None
        if changes:
            batch.changes_size = True
        if self._concurrency.lines:
            self._concurrency.launched(batch)
        self._counters.launched[reason] += 1
        if self.room.share is not None:
            usual_ns = self.times.alone_ns(key, rows_run)
            self.room.share.launched(batch, now_ns, usual_ns, lanes=count)
        return batch

    def _acquire(self, key: BatchKey, rows_run: int, profile: int | None) -> tuple[int, int | None, bool]:
        """Return the context of a batch, its arena, and whether the context has to change for it."""
        contexts, kept = self.room.contexts, self.room.sizes.profile(key, rows_run, profile)
        if kept is None:
            return *contexts.acquire(), False
        changes = kept is not profile and not contexts.has_free(kept)
        return *contexts.acquire(kept, self._run_of(key, rows_run)), changes

    def _run_of(self, key: BatchKey, rows_run: int) -> Hashable:
        """Return what a context is set to for a batch; ``None`` for a graph, whose context is another one."""
        return None if rows_run in self._policy.captured.sizes else (key.shape, rows_run)

    def next_wakeup(self) -> int | None:
        """Return the time in ns at which to call :meth:`next_batch` again even if nothing happens: a
        deadline, the end of a delay, or the latest time to launch a batch so that it is in place for its
        turn."""
        room, queue = self.room, self.queue
        times = [queue.deadlines.earliest_ns(), self._growth.due_ns, room.until_ns]
        # While the device is left to others, the end of a delay changes nothing.
        if self._policy.delay_ns_max and room.is_free and not room.is_held:
            times.append(queue.buckets.wakeup_ns(len(self._in_flight)))
        return min([time_ns for time_ns in times if time_ns is not None], default=None)

    def started(self, batch: Batch, now_ns: int, put_ns: int | None = None) -> int | None:
        """Note that a batch is on its stream.

        :param put_ns: when its first part was put there, if that took a while.
        :returns: in how many ns it is expected to end; ``None`` if no such batch was seen yet.
        """
        return self._concurrency.started(batch, now_ns, put_ns)

    def landed(self, batch: Batch, now_ns: int, copies_ns: tuple[int, int] | None = None) -> None:
        """Note that the device has finished a batch, whose outputs must still be copied for the callers.

        :param copies_ns: how long it was copied in and out, if the device measured that.
        """
        if copies_ns is not None:
            self.times.observe_copies(batch, *copies_ns)
        if self._concurrency.lines:
            self._concurrency.landed(batch, now_ns)

    def run_anew(self, shape: Hashable, times: Mapping[int, int]) -> None:
        """Replace the times of a shape whose batches run in another way from now on.

        :param times: how long they take now, in ns, by their rows; empty if that is not known.
        """
        self.times.forget(shape)
        self.times.seed(BatchKey(shape), times)
        self._company.tell(shape, times)

    def ran(self, batch: Batch, now_ns: int, took_ns: int) -> None:
        """Note how long a batch ran, if schedulers divide the device."""
        if self.room.share is not None:
            self.room.share.ran(batch, now_ns, took_ns)

    def finished(self, batch: Batch, now_ns: int, took: Measured) -> None:
        """Note that a batch has been computed and is being answered; its context is free again."""
        self._end(batch)
        answered, arrived_ns = complete(batch.requests)
        if batch.changes_size:
            usual_ns = took.copy_in_ns + took.compute_ns + took.copy_out_ns  # It was not timed.
            self.room.sizes.changed(max(now_ns - batch.launched_ns - usual_ns, 0))
        if batch.is_timed:
            self.times.observe(batch, now_ns, took)
            if not self._company.is_measured:
                self._company.observe(batch, took.copy_in_ns + took.compute_ns + took.copy_out_ns)
        self._counters.add_batch(batch, now_ns, answered, arrived_ns, took)

    def failed(self, batch: Batch, *, quarantine: bool = False) -> None:
        """Note that a batch failed. With ``quarantine``, its context is never used again."""
        self._end(batch, quarantine=quarantine)
        for request in batch.requests:
            # Masked requests were counted when they were masked.
            self._counters.failed += request.state is IN_FLIGHT
            change(request, Change.FAIL)

    def bisect(self, batch: Batch) -> bool:
        """Note that a batch failed, and try its halves again to isolate the requests that fail it; all stay
        in flight.

        :returns: False, with nothing changed, for a batch of one request, for one without a waiting caller,
            and after :meth:`close`.
        """
        if len(batch.requests) < 2 or self.again.is_over:
            return False
        if batch not in self._in_flight:
            raise _not_in_flight(batch)
        if not any(request.state is IN_FLIGHT for request in batch.requests):
            return False  # No caller waits for any of it.
        self._end(batch)
        self._counters.bisected += 1
        self.again.divide(batch.key, batch.requests)
        return True

    def _end(self, batch: Batch, *, quarantine: bool = False) -> None:
        """Take back the context, lane and share of a batch that is no longer in flight."""
        room = self.room
        if batch not in self._in_flight:
            raise _not_in_flight(batch)
        del self._in_flight[batch]
        if quarantine:
            room.contexts.quarantine(batch.context, batch.arena)
        else:
            room.contexts.release(batch.context, batch.arena)
        if self._concurrency.lines:
            self._concurrency.left(batch)
        if room.share is not None:
            room.share.left(batch)

    def close(self, why: AsynctrtError) -> list[Request]:
        """Refuse every submission from now on, and return all unanswered requests that are not in flight:
        queued, waiting to be tried again, or taken out of the queue as too late."""
        self.queue.refuse(why)
        queued, late = self.queue.clear()
        queued = [*self.again.close(), *queued]
        self.queue.fail(queued)
        return [*queued, *late]


def _not_in_flight(batch: Batch) -> InternalError:
    return InternalError(f"{batch!r} is not in flight")
