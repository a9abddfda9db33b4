"""The queue of an engine: it accepts or refuses requests, and holds them until they are launched or leave."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from asynctrt.errors import AsynctrtError, DeadlineUnreachableError, QueueFullError, copy_for
from asynctrt.scheduling.counters import Counters
from asynctrt.scheduling.forecast import Forecast
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queues import BucketQueue, Buckets, Deadlines, JoinedRows, OpenBatch
from asynctrt.scheduling.request import (
    NO_DEADLINE_NS,
    Change,
    PlainRequest,
    Request,
    change,
)


class Queue:
    """The queue of one engine, bounded in rows.

    :param rows_max: the most rows that may wait, over all buckets.
    :param limit: returns the most rows of a batch of a shape.
    :param forecast: refuses requests that would be too late.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        priorities: int,
        rows_max: int,
        limit: Callable[[Hashable], int],
        forecast: Forecast,
        counters: Counters,
    ) -> None:
        self._priorities = priorities
        self._patience_ns = policy.patience_ns
        self._limit = limit
        self._forecast = forecast
        self._counters = counters
        self.rows_max = rows_max
        self.rows = 0
        """Rows that wait in buckets, not counting the open batch."""
        self.buckets = Buckets(policy, priorities)
        # The bucket of the latest request, and usually of the next one too. It stays in `buckets`,
        # which drop empty ones only to add another.
        self._bucket: BucketQueue | None = None
        self.open = OpenBatch(policy)
        """Plain requests that may be launched as they are."""
        # The queued requests that were plain and now have objects, by their futures.
        self._made: dict[Any, PlainRequest] = {}
        self.deadlines = Deadlines()
        self.has_to_expire = False
        """Whether a deadline must be watched, or callers must be notified that their requests left the
        queue."""
        # Requests that are too late for any batch; the next `expire` returns them.
        self._late: list[Request] = []
        self.displaced: list[Request] = []
        """Requests that made room for more urgent ones, for the driver to take and answer."""
        self.closed: AsynctrtError | None = None
        """Why new requests are refused; ``None`` if they are accepted."""

    def __repr__(self) -> str:
        return f"<Queue requests={self.requests} rows={self.rows + self.open.rows}>"

    @property
    def requests(self) -> int:
        """Return how many requests wait. Any thread may ask."""
        return sum(bucket.requests for bucket in self.buckets) + self.open.rows

    def submit_plain(self, key: BatchKey, future: Any, payload: Any, now_ns: int) -> None:
        """Queue a plain request that cannot join the open batch, or raise as :meth:`submit`.

        :param future: has a future's ``done()``, which is how the scheduler sees that its caller has left.
        """
        opened = self.open
        if opened.entries and opened.key != key:
            self.close_open()
        if len(opened.entries) >= self.rows_max - self.rows:
            self._refuse(1, 1)
        bucket = self._bucket
        if bucket is None or bucket.key is not key:
            bucket = self._bucket_of(key)
        if bucket is not opened.bucket:
            opened.bucket, opened.key, opened.rows_max = bucket, bucket.key, bucket.rows_max
        opened.joins = key
        opened.length_max = self.rows_max - self.rows
        opened.arrival_ns = now_ns
        opened.entries.append((future, payload, now_ns))

    def submit(self, *requests: Request) -> None:
        """Queue a request, or all parts of a call, or raise and change nothing.

        If the queue is full, less urgent requests make room and are moved to :attr:`displaced`.

        :raises EngineClosedError: after :meth:`refuse`, or another error given there.
        :raises DeadlineUnreachableError: if it would probably be too late.
        :raises QueueFullError: if the queue has no room for its rows.
        :raises InputError: if no profile of the model takes its shape.
        :raises ExecutionError: if the model fails to say which profile does.
        """
        self.close_open()
        first, last = requests[0], requests[-1]
        rows = sum([request.rows for request in requests])
        has_deadline = last.deadline_ns != NO_DEADLINE_NS
        if has_deadline:
            self._foresee(requests, rows)
        if self.rows + rows > self.rows_max:
            self._make_room(requests, rows)
        bucket = self._bucket_of(last.key)
        self.rows += rows
        if bucket.push(*requests):
            self.buckets.pushed(bucket, first.priority, first.deadline_ns)
        if has_deadline:
            self.has_to_expire = True
            for request in requests:
                # Each request has at least one row.
                self.deadlines.push(request, queued_max=self.rows)

    def close_open(self) -> None:
        """Move the requests of the open batch into their bucket, where they have turns among others."""
        opened = self.open
        bucket, entries = opened.bucket, opened.entries
        opened.joins = None
        if bucket is None or not entries:
            return
        # In this order, Ctrl-C may leave requests in both places, but loses none.
        bucket.extend(entries)
        opened.entries = []
        self.rows += len(entries)
        if bucket.priority < 0 or (bucket.rows >= bucket.rows_max and not bucket.is_full):
            self.buckets.pushed(bucket, 0, NO_DEADLINE_NS)

    def launch(
        self, bucket: BucketQueue, chosen: Sequence[Request], rows: int, joined: Iterable[JoinedRows]
    ) -> None:
        """Take the requests of a batch out of their buckets.

        :param joined: the rows of other buckets that join ``chosen``.
        """
        for other, others, more in joined:
            other.take(others, more)
            self.buckets.left(other)
            self.rows -= more
        bucket.take(chosen, rows)
        self.buckets.launched(bucket)
        self.rows -= rows

    def object_of(self, future: Any) -> PlainRequest | None:
        """Return the object of a plain request by its future; ``None`` if it is not queued any more."""
        if future not in self._made:
            self.close_open()
            for bucket in self.buckets:
                bucket.make_objects()
                if future in self._made:
                    break
        return self._made.get(future)

    def leave(self, request: Request, what: Change) -> None:
        """Take a queued request out of its bucket from wherever it stands."""
        self.close_open()
        change(request, what)
        bucket = self.buckets.by_key[request.key]
        bucket.discard(request)
        self.rows -= request.rows
        self.buckets.left(bucket)

    def expire(self, now_ns: int, arrived_by_ns: int = NO_DEADLINE_NS) -> list[Request]:
        """Take queued requests whose deadline has passed out of the queue, and return them.

        :param arrived_by_ns: skip requests that arrived later: they had no chance to be launched yet.
        """
        due = self.deadlines.pop_due(now_ns, arrived_by_ns)
        self._late += due  # First: after Ctrl-C, requests that have left are found nowhere else.
        for request in due:
            self.leave(request, Change.EXPIRE)
        self._counters.expired += len(due)
        self.has_to_expire = bool(self.deadlines.line)
        late, self._late = self._late, []
        return late

    def give_up(self, late: Iterable[Request]) -> None:
        """Take requests out of the queue that cannot be answered in time; :meth:`expire` returns them."""
        for request in late:
            self._late.append(request)
            self.leave(request, Change.EXPIRE)
            self._counters.expired += 1
        self.has_to_expire = True

    def refuse(self, why: AsynctrtError) -> None:
        """Refuse every new request from now on with a copy of ``why``; queued ones go on."""
        self.close_open()
        self.closed = why
        self.rows_max = -1

    def take_displaced(self) -> Sequence[Request]:
        """Return the requests that made room for more urgent ones, each only once, for the caller to
        answer."""
        displaced, self.displaced = self.displaced, []
        return displaced

    def clear(self) -> tuple[list[Request], list[Request]]:
        """Empty the queue.

        :returns: the queued requests, and the requests that had left the queue as too late but were not
            answered.
        """
        # After Ctrl-C, a plain request may be there twice, with two objects.
        queued = {request.future or request: request for request in self.buckets.clear()}
        self._made.clear()
        self.rows = 0
        late, self._late = self._late, []
        return list(queued.values()), late

    def fail(self, requests: Iterable[Request]) -> None:
        """Note that requests failed before they were launched."""
        for request in requests:
            self._counters.failed += not request.has_left
            change(request, Change.FAIL)

    def _foresee(self, requests: Sequence[Request], rows: int) -> None:
        """Refuse the parts of a call if it would be too late."""
        if self.closed:
            return  # They will be refused because of that.
        last = requests[-1]
        try:
            # The call is answered only when its last part is.
            self._forecast.check(last, self._bucket_of(last.key), rows - last.rows)
        except DeadlineUnreachableError:
            self._counters.refused += len(requests)
            self._counters.refused_late += len(requests)
            raise
        if last in self._forecast.trial:
            self._forecast.trial = tuple(requests)  # One late part would fail the whole call.
        for request in requests:
            request.deadline_ns = last.deadline_ns
            request.reserve_ns = last.reserve_ns

    def _make_room(self, requests: Sequence[Request], rows: int) -> None:
        """Take less urgent requests out of a full queue, or raise and change nothing."""
        displaced = []
        if not self.closed and rows <= self.rows_max:
            over = self.rows + rows - self.rows_max
            displaced = self.buckets.least_urgent(requests[0].priority, over)
        if not displaced:
            if requests[-1] in self._forecast.trial:
                self._forecast.trial = ()
            self._refuse(rows, len(requests))
        self._bucket_of(requests[0].key)  # If it raises, it does so before anything has changed.
        self.displaced += displaced  # First, as in `expire`.
        self.has_to_expire = True
        for request in displaced:
            self.leave(request, Change.FAIL)
        self._counters.failed += sum([not request.has_left for request in displaced])

    def _bucket_of(self, key: BatchKey) -> BucketQueue:
        bucket = self._bucket
        if bucket is not None and bucket.key is key:
            return bucket
        bucket = self.buckets.by_key.get(key)
        if bucket is None:
            bucket = BucketQueue(key, self._priorities, self._limit(key.shape), self._patience_ns, self._made)
            self.buckets.add(bucket)
        self._bucket = bucket
        return bucket

    def _refuse(self, rows: int, requests: int) -> None:
        self._counters.refused += requests
        if self.closed:
            # A new instance, because one raised for many callers would collect all their tracebacks.
            raise copy_for(self.closed)
        raise QueueFullError(
            f"the queue holds {self.rows + self.open.rows} of at most {self.rows_max} rows and has no "
            f"room for {rows} more. Retry later, send less, or open the engine with a larger "
            "max_queue_rows"
        )
