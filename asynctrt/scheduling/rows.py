"""Which rows does the next batch take? Each policy answers by one method, :meth:`TakeRows.rows_max`.

A policy that is not here, such as one that bounds the tokens of a batch, is another subclass, and is given to
the scheduler of an engine where that is made (``core/assembly.py``).
"""

from collections.abc import Callable

from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.forecast import Forecast
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queues import BucketQueue, Buckets, DeadlineHeap
from asynctrt.scheduling.request import Request
from asynctrt.scheduling.room import Room

Chosen = tuple[tuple[Request, ...], int, tuple[Request, ...]]
"""The requests of a batch, their rows, and those that would be too late for it. If any have to leave the
queue first, no others are chosen."""


class TakeRows:
    """Takes all rows that fit into a batch."""

    def rows_max(self, bucket: BucketQueue, in_flight: int, *, by_age: bool) -> int:
        """Return how many rows the next batch of a bucket may have: at least those of its first request.

        :param by_age: whether it starts with what is most overdue.
        """
        return bucket.rows_max

    def choose(self, bucket: BucketQueue, in_flight: int, now_ns: int, *, by_age: bool) -> Chosen:
        """Return the requests of the next batch of a bucket; change nothing."""
        return *bucket.choose(self.rows_max(bucket, in_flight, by_age=by_age), by_age), ()

    def preview(self, bucket: BucketQueue, in_flight: int) -> tuple[Request, ...]:
        """Return the requests that the batch would have if it were launched now, as far as can be told."""
        return bucket.choose(self.rows_max(bucket, in_flight, by_age=False))[0]


class TakeOneRequest(TakeRows):
    """Takes one request, whatever else is queued."""

    def rows_max(self, bucket: BucketQueue, in_flight: int, *, by_age: bool) -> int:
        head = bucket.head(by_age=by_age)
        return bucket.rows_max if head is None else head.rows


class SpreadOverCores(TakeRows):
    """Takes an even share of the rows for each idle core, where batches compute in parallel."""

    def __init__(self, policy: Policy, buckets: Buckets, times: BatchTimes) -> None:
        self._policy = policy
        self._buckets = buckets
        self._times = times

    def rows_max(self, bucket: BucketQueue, in_flight: int, *, by_age: bool) -> int:
        if bucket.rows < 2 or by_age or bucket.key.slab is not None:
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


class HalvesFirst(TakeRows):
    """Takes half of the rows for an idle device, if it is faster to copy the others in while these compute
    than to copy all of them in first.

    :param expected_rows: returns the rows that the device would execute for a number of rows of a key.
    """

    def __init__(
        self,
        concurrency: Concurrency,
        times: BatchTimes,
        room: Room,
        expected_rows: Callable[[BatchKey, int], int],
    ) -> None:
        self._concurrency = concurrency
        self._times = times
        self._room = room
        self._expected_rows = expected_rows

    def rows_max(self, bucket: BucketQueue, in_flight: int, *, by_age: bool) -> int:
        if bucket.key.slab is not None or by_age or self._concurrency.occupied:
            return bucket.rows_max
        rows = min(bucket.rows, bucket.rows_max)
        head = bucket.head()
        half = max((rows + 1) // 2, 0 if head is None else head.rows)
        if half >= rows or not self._room.is_for_two:
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


class InTime(TakeRows):
    """Takes the rows that are answered in time, of those that another policy takes."""

    def __init__(self, policy: TakeRows, forecast: Forecast, deadlines: DeadlineHeap) -> None:
        self._policy = policy
        self._forecast = forecast
        self._deadlines = deadlines

    def rows_max(self, bucket: BucketQueue, in_flight: int, *, by_age: bool) -> int:
        return self._policy.rows_max(bucket, in_flight, by_age=by_age)

    def choose(self, bucket: BucketQueue, in_flight: int, now_ns: int, *, by_age: bool) -> Chosen:
        if not self._deadlines.line:
            return self._policy.choose(bucket, in_flight, now_ns, by_age=by_age)

        def choose(rows_max: int) -> tuple[tuple[Request, ...], int]:
            return bucket.choose(rows_max, by_age)

        rows_max = self.rows_max(bucket, in_flight, by_age=by_age)
        may_split = bucket.key.slab is None and not by_age
        return self._forecast.fit(bucket, rows_max, choose, now_ns, may_split=may_split)
