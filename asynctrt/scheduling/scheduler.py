"""The scheduler: one synchronous object that decides. The driver does what it says.

Nothing here waits, reads a clock or touches memory, so a decision can neither be torn by a cancellation
nor differ between two runs with the same inputs.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from asynctrt.errors import AsynctrtError, QueueFullError
from asynctrt.scheduling.latency import LatencyModel
from asynctrt.scheduling.ledger import BatchTotals, Launch, Ledger
from asynctrt.scheduling.policy import NEVER_NS, Policy
from asynctrt.scheduling.queues import BucketQueue, DeadlineHeap
from asynctrt.scheduling.request import (
    IN_FLIGHT,
    MASKED,
    NO_DEADLINE_NS,
    QUEUED,
    Change,
    Request,
    change,
    change_all,
)
from asynctrt.scheduling.timeline import Timeline

ARENA_WAIT_NS_MIN: Final = 10_000
"""A shorter time between the end of the copy in and the beginning of the computing is no wait for an arena:
one event after the other takes some microseconds by itself."""


class Scheduler:
    """Requests in, launches out.

    :param policy: when to launch what.
    :param queue_rows_max: rows that may be queued over all buckets.
    :param priorities: number of priority levels; a larger priority is more urgent.
    :param contexts: execution contexts to launch on; ``arenas``: enqueue-memory arenas they share.
    :param in_flight_max: batches that may be in flight at once.
    :param arena_users: the count of batches in each arena, if engines share arenas.
    :param kind_of: from a bucket and rows to the kind of batch that contexts are kept on: the profile.
    :param limit_of: from a bucket to the rows that one of its batches holds at the most.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        queue_rows_max: int,
        priorities: int,
        contexts: int,
        arenas: int,
        in_flight_max: int,
        arena_users: list[int] | None = None,
        kind_of: Callable[[Hashable, int], Hashable] | None = None,
        limit_of: Callable[[Hashable], int] | None = None,
    ) -> None:
        self._policy = policy
        self._kind_of = kind_of
        self._limit_of = limit_of
        self._queue_rows_max = queue_rows_max
        self._priorities = priorities
        # Buckets that have work, in the order of their turns.
        self._buckets: OrderedDict[Hashable, BucketQueue] = OrderedDict()
        # An emptied queue is kept for the next bucket: a lone caller would make a new one each time.
        self._spare: BucketQueue | None = None
        self._deadlines = DeadlineHeap()
        self._closed: AsynctrtError | None = None
        self._masked = 0
        self.queued_rows = 0
        self.ledger = Ledger(
            contexts=contexts, arenas=arenas, in_flight_max=in_flight_max, arena_users=arena_users
        )
        self.latency = LatencyModel()
        self.timeline = Timeline(arenas=arenas, compute=self.latency)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<Scheduler {state} queued={self.queued_requests} rows={self.queued_rows} "
            f"buckets={len(self._buckets)} {self.ledger!r}>"
        )

    @property
    def is_idle(self) -> bool:
        """Nothing is queued and nothing is in flight."""
        return not self._buckets and not self.ledger.in_flight

    @property
    def queued_requests(self) -> int:
        """Requests that wait, over all buckets."""
        return sum(bucket.requests for bucket in self._buckets.values())

    @property
    def submitted(self) -> int:
        """Requests taken so far: those that have ended, and those that are on their way."""
        totals = self.ledger.totals
        ended = totals.succeeded + totals.failed + totals.cancelled + totals.expired
        in_flight = sum(len(launch.requests) for launch in self.ledger.in_flight.values())
        return ended + self.queued_requests + in_flight - self._masked

    def buckets(self) -> dict[Hashable, int]:
        """The rows that are queued in each bucket."""
        return {key: bucket.rows for key, bucket in self._buckets.items()}

    def submit(self, request: Request) -> None:
        """Queue one request, or raise and change nothing.

        :raises EngineClosedError: (or what else was given) after :meth:`refuse` or :meth:`close`.
        :raises QueueFullError: when the queue has no room for its rows.
        """
        rows = request.rows
        if self._closed or self.queued_rows + rows > self._queue_rows_max:
            self._refuse(rows, 1)
        bucket = self._buckets.get(request.bucket)
        if bucket is None:
            bucket = self._add_bucket(request.bucket)
        bucket.push(request)
        self.queued_rows += rows
        if request.deadline_ns != NO_DEADLINE_NS:
            # Each request has a row at least.
            self._deadlines.push(request, queued_max=self.queued_rows)

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Queue all of ``requests``, or raise and queue none. Raises as :meth:`submit` does."""
        rows = sum(request.rows for request in requests)
        if self._closed or self.queued_rows + rows > self._queue_rows_max:
            self._refuse(rows, len(requests))
        for request in requests:
            self.submit(request)

    def cancel(self, request: Request) -> bool:
        """The caller has gone away. True: the request was queued and has left the queue.

        In flight, its rows are masked and its batch-mates are untouched. Once answered, nothing is done.
        """
        if request.state is QUEUED:
            self._leave(request, Change.CANCEL)
            self.ledger.totals.cancelled += 1
            return True
        if request.state is IN_FLIGHT:
            change(request, Change.CANCEL)
            self.ledger.totals.cancelled += 1
            self._masked += 1
        return False

    def expire(self, now_ns: int) -> list[Request]:
        """Take the queued requests whose deadline has come out of the queue and return them."""
        if not self._deadlines:
            return []
        due = self._deadlines.pop_due(now_ns)
        for request in due:
            self._leave(request, Change.EXPIRE)
        self.ledger.totals.expired += len(due)
        return due

    def next_launch(self, now_ns: int) -> Launch | None:
        """The batch to launch now, its context and arena taken; ``None`` when none can be."""
        if not self._buckets or not self.ledger.can_launch:
            return None
        in_flight = len(self.ledger.in_flight)
        bucket = self._policy.choose(self._buckets.values(), in_flight, now_ns)
        if bucket is None:
            return None
        rows = bucket.rows
        requests = bucket.take(self._policy.rows_to_take(bucket, len(self._buckets), in_flight, self.latency))
        rows -= bucket.rows
        self.queued_rows -= rows
        if bucket.requests:
            self._buckets.move_to_end(bucket.key)
        else:
            self._drop_bucket(bucket)
        kind = None if self._kind_of is None else self._kind_of(bucket.key, rows)
        return self.ledger.launch(bucket.key, requests, rows, now_ns, kind)

    def rows_to_run(self, launch: Launch, rows: int, sizes: Sequence[int]) -> int:
        """How many rows the device shall compute for the ``rows`` of a batch: see :class:`Policy`."""
        return self._policy.rows_to_run(launch.bucket, rows, sizes, self.latency)

    def next_wakeup(self) -> int | None:
        """When to look again though nothing happens, in ns: a deadline, or the end of a delay."""
        wakeup_ns = self._deadlines.earliest_ns()
        if self._policy.delay_ns_max and self._buckets and self.ledger.can_launch:
            for bucket in self._buckets.values():
                ready_ns = self._policy.ready_ns(bucket, len(self.ledger.in_flight))
                if ready_ns != NEVER_NS and (wakeup_ns is None or ready_ns < wakeup_ns):
                    wakeup_ns = ready_ns
        return wakeup_ns

    def complete(
        self,
        launch: Launch,
        now_ns: int,
        *,
        copy_in_ns: int,
        compute_ns: int,
        copy_out_ns: int,
        arena_wait_ns: int = 0,
        is_timed: bool = True,
    ) -> None:
        """The batch has been answered; its context is free again."""
        requests = launch.requests
        totals = self.ledger.totals
        arrivals_ns = [request.arrival_ns for request in requests]
        if self._masked:
            arrivals_ns = [request.arrival_ns for request in requests if request.state is not MASKED]
            self._masked -= len(requests) - len(arrivals_ns)
        answered = len(arrivals_ns)
        totals.succeeded += answered
        change_all(requests, Change.COMPLETE)
        self.ledger.release(launch)
        if is_timed:
            totals.batches_timed += 1
            self.latency.observe(launch.bucket, launch.rows_run, compute_ns)
        totals.rows += launch.rows
        totals.batches += 1
        if launch.rows_run != launch.rows:
            totals.rows_padded += launch.rows_run - launch.rows
        if launch.arena is not None:
            totals.busy_ns += compute_ns
            totals.arena_wait_ns += arena_wait_ns
            totals.arena_waits += arena_wait_ns > ARENA_WAIT_NS_MIN
        queue_ns = launch.launched_ns * answered - sum(arrivals_ns)
        totals.queue_ns += queue_ns
        totals.copy_in_ns += copy_in_ns * answered
        totals.compute_ns += compute_ns * answered
        totals.copy_out_ns += copy_out_ns * answered
        totals.total_ns += queue_ns + (now_ns - launch.launched_ns) * answered
        size = totals.by_size.get(launch.rows)
        if size is None:
            size = totals.by_size[launch.rows] = BatchTotals()
        size.count += 1
        size.copy_in_ns += copy_in_ns
        size.compute_ns += compute_ns
        size.copy_out_ns += copy_out_ns

    def fail(self, launch: Launch, *, quarantine: bool = False) -> None:
        """The batch failed. With ``quarantine``, its context is never used again."""
        requests = launch.requests
        masked = sum(request.state is MASKED for request in requests) if self._masked else 0
        self._masked -= masked
        self.ledger.totals.failed += len(requests) - masked
        change_all(requests, Change.FAIL)
        self.timeline.forget(launch)
        if quarantine:
            self.ledger.quarantine(launch)
        else:
            self.ledger.release(launch)

    def refuse(self, why: AsynctrtError) -> None:
        """From now on every submission is refused with an error like ``why``; the queue goes on."""
        self._closed = why

    @property
    def is_stuck(self) -> bool:
        """Whether no context is left that a batch could ever run on again."""
        return not self.ledger.usable_contexts

    def close(self, why: AsynctrtError) -> list[Request]:
        """Refuse every submission from now on, and take everything that is queued."""
        self.refuse(why)
        queued = [request for bucket in self._buckets.values() for request in bucket.waiting()]
        change_all(queued, Change.FAIL)
        self._buckets.clear()
        self.queued_rows = 0
        self.ledger.totals.failed += len(queued)
        return queued

    def _leave(self, request: Request, what: Change) -> None:
        """Take a queued request out of its bucket from wherever it stands."""
        change(request, what)
        bucket = self._buckets[request.bucket]
        bucket.discard(request)
        self.queued_rows -= request.rows
        if not bucket.requests:
            self._drop_bucket(bucket)

    def _add_bucket(self, key: Hashable) -> BucketQueue:
        bucket, self._spare = self._spare, None
        rows_max = self._policy.rows_max
        if self._limit_of is not None:
            rows_max = min(rows_max, self._limit_of(key))
        if bucket is None:
            bucket = BucketQueue(key, self._priorities, rows_max)
        else:
            bucket.reuse(key, rows_max)
        self._buckets[key] = bucket
        return bucket

    def _drop_bucket(self, bucket: BucketQueue) -> None:
        del self._buckets[bucket.key]
        self._spare = bucket

    def _refuse(self, rows: int, requests: int) -> None:
        self.ledger.totals.refused += requests
        if self._closed:
            # A fresh instance: one that many callers raise would collect all their tracebacks.
            raise type(self._closed)(*self._closed.args)
        raise QueueFullError(
            f"the queue holds {self.queued_rows} of at most {self._queue_rows_max} rows and has no "
            f"room for {rows} more. Retry later, send less, or open the engine with a larger "
            "max_queue_rows"
        )
