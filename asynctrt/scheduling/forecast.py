"""Predicts, from the times of earlier batches, whether requests can meet their deadlines.

**When a request comes**, predictions are optimistic: batches ahead count as full, other buckets as empty, and
batches without known times as if they took none. So a request that is refused would hardly have been in time,
and one that is accepted may still expire. A wrong prediction must not refuse requests forever: whatever is
predicted, one request in every ``PROBE_NS_MIN``, or in every ``PROBE_TIMES`` times the predicted time of its
batch, is accepted anyway, and its batch is measured.

**When a batch is formed**, for ``timeout_until="answer"``, more is known: the batch begins when the device is
free, not when it is launched, and takes longer the more rows it has. Here predictions are pessimistic, except
for whether a request would be late even alone.

- A request that would be late even as the only one in its batch has expired.
- If a batch of all waiting requests would end too late for some of them, a smaller batch goes first, provided
  that the others are in time behind it, or that more requests would be lost otherwise.
- If not, the requests that cannot wait for the larger batch have expired. With that much queued, a small
  batch for them would make others late, which would then need small batches themselves, and so on.

Nothing is predicted for sizes whose times are not known well enough. A request that was accepted to test a
prediction is launched in any case.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from asynctrt.errors import DeadlineUnreachableError
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS, Policy
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request

PROBE_NS_MIN: Final = 20_000_000
PROBE_TIMES: Final = 8
PROBE_NS_MAX: Final = 10_000_000_000
"""After accepting a request in spite of its prediction, wait for ``PROBE_TIMES`` times the predicted time of
its batch, but at least ``PROBE_NS_MIN`` and at most ``PROBE_NS_MAX``, before accepting another. So a correct
prediction costs about an eighth of the device's time and 50 batches a second at most, and even the worst one
is tested every 10 s."""

MARGIN_NS_MIN: Final = 100_000
MARGIN_SHARE: Final = 16
"""The compute time divided by ``MARGIN_SHARE``, but at least ``MARGIN_NS_MIN`` and at most
``DEADLINE_MARGIN_NS``, is reserved for what is not measured, such as other callbacks on the event loop.
``MARGIN_NS_MIN`` alone was used first, but the times of longer batches vary by more."""

Choose = Callable[[int], tuple[Sequence[Request], int]]
"""Given the most rows of a batch, returns its requests and their rows."""


class Punctual(NamedTuple):
    """A batch that is expected to end in time, and the requests that are too late for it."""

    requests: Sequence[Request]
    rows: int
    late: tuple[Request, ...] = ()


class Forecast:
    """Predicts when requests would be launched and answered.

    :param in_flight: the batches in flight, in the order of their launch.
    :param in_flight_max: how many batches may be in flight.
    :param rows_to_run: returns the rows that the device executes for a number of rows of a key.
    """

    def __init__(
        self,
        policy: Policy,
        times: BatchTimes,
        concurrency: Concurrency,
        in_flight: Collection[Batch],
        in_flight_max: int,
        rows_to_run: Callable[[BatchKey, int], int],
    ) -> None:
        self._policy = policy
        self._times = times
        self._concurrency = concurrency
        self._in_flight = in_flight
        self._in_flight_max = in_flight_max
        self._rows_to_run = rows_to_run
        self._probe_ns = 0
        self.trial: tuple[Request, ...] = ()
        """The requests of the latest call that was accepted although it was predicted to be late. It is
        launched in any case."""

    def check(self, request: Request, bucket: BucketQueue, rows_before: int = 0) -> None:
        """Check a request's deadline. If it applies to the answer, reserve the time to compute the request.

        :param rows_before: rows of the same call that are queued before it.
        :raises DeadlineUnreachableError: if its deadline would pass before its turn; nothing has changed.
        """
        policy, now_ns = self._policy, request.arrival_ns
        in_flight = len(self._in_flight)
        most = (bucket.rows + rows_before) // bucket.rows_max
        is_at_once = in_flight + most < self._in_flight_max and request.deadline_ns >= now_ns
        if is_at_once and not policy.answers_in_time:
            return
        rows_ahead = bucket.rows_ahead(request) + rows_before
        batches = rows_ahead // bucket.rows_max
        takes_ns: int | None = 0
        at_once = self._in_flight_max
        if policy.answers_in_time:
            rows = min(rows_ahead % bucket.rows_max + request.rows, bucket.rows_max)
            takes_ns = self._times.service_ns(bucket.key, rows)
            at_once = self._side_by_side(bucket)
        wait_ns = 0
        if in_flight + batches >= at_once:
            wait_ns = self._wait_ns(bucket, now_ns, batches, in_flight - at_once)
        if takes_ns is None:
            return  # The times of such batches are not known.
        left_ns = request.deadline_ns - now_ns
        if wait_ns + takes_ns > left_ns:
            self._refuse(request, bucket, rows_ahead, wait_ns, takes_ns)
        elif policy.answers_in_time:
            # Its batch is not known yet: reserve the time of one with only this request.
            alone_ns = self._times.service_ns(bucket.key, request.rows) or 0
            request.reserve_ns = min(alone_ns, takes_ns)
            request.deadline_ns -= request.reserve_ns

    def _side_by_side(self, bucket: BucketQueue) -> int:
        """Return how many batches compute at once."""
        if self._concurrency.has_lanes:
            return self._concurrency.allowed(bucket.rows_max, bucket.rows_max)
        return self._policy.concurrency

    def _wait_ns(self, bucket: BucketQueue, now_ns: int, batches: int, over: int) -> int:
        """Return how long a request waits at least, until a number of batches ahead of it have been launched.

        :param over: in-flight batches minus batches that compute at once.
        """
        first = next(iter(self._in_flight), None)
        wait_ns = 0
        if first is not None and self._times.sure_ns(first.key, first.rows_run):
            # The first batch to end lets another one start, and from then on batches end in turn.
            wait_ns = max((first.ends_ns or now_ns) - now_ns, 0)
        each_ns = self._times.sure_ns(bucket.key, bucket.rows_max)
        return wait_ns + (batches + over) * each_ns // self._side_by_side(bucket)

    def _refuse(
        self, request: Request, bucket: BucketQueue, rows_ahead: int, wait_ns: int, takes_ns: int
    ) -> None:
        now_ns = request.arrival_ns
        if now_ns >= self._probe_ns:
            pause_ns = max(PROBE_NS_MIN, PROBE_TIMES * takes_ns)
            self._probe_ns = now_ns + min(pause_ns, PROBE_NS_MAX)
            if self._policy.answers_in_time:
                self.trial = (request,)
            return
        raise self._unreachable(request, bucket, rows_ahead, wait_ns + takes_ns)

    def _unreachable(
        self, request: Request, bucket: BucketQueue, rows_ahead: int, predicted_ns: int
    ) -> DeadlineUnreachableError:
        """Return the error for a request that would be too late."""
        what = "answered" if self._policy.answers_in_time else "launched"
        error = DeadlineUnreachableError(
            f"going by earlier batches, the request would be {what} in {predicted_ns / 1e6:.3f} ms at the "
            f"earliest, but its timeout is {(request.deadline_ns - request.arrival_ns) / 1e6:.3f} ms: "
            f"{rows_ahead} rows go first, {bucket.rows_max} in a batch, and {len(self._in_flight)} batches "
            "are in flight. Retry later, allow more time, or send less"
        )
        error.predicted_s = predicted_ns / 1e9
        return error

    def begins_ns(self, bucket: BucketQueue, rows: int, now_ns: int) -> int:
        """Return the time by which a batch that is launched now usually begins to compute."""
        key = bucket.key
        concurrency, lines = self._concurrency, self._concurrency.lines
        if concurrency.has_lanes:
            lines = concurrency.usable(concurrency.allowed(rows, bucket.rows_max)) or lines
        free_ns = min([line.free_late_ns(self._late_ns) for line in lines], default=now_ns)
        if free_ns <= now_ns:
            return now_ns + self._times.copy_in_ns(key, rows)
        return max(free_ns, now_ns + concurrency.lead_ns(key, rows))

    def takes_ns(self, key: BatchKey, rows: int) -> int | None:
        """Return the time within which a batch is usually answered, from when it begins to compute."""
        compute_ns = self._times.occupied.late(key.shape, self._rows_to_run(key, rows))
        if compute_ns is None:
            return None
        margin_ns = min(max(compute_ns // MARGIN_SHARE, MARGIN_NS_MIN), DEADLINE_MARGIN_NS)
        return compute_ns + self._times.copy_out_ns(key, rows) + margin_ns

    def fit(
        self, bucket: BucketQueue, rows_max: int, choose: Choose, now_ns: int, *, may_split: bool
    ) -> Punctual:
        """Return the batch to launch from a bucket now, and the requests it is too late for; change nothing.

        :param rows_max: the most rows of the batch; ``choose`` returns its requests.
        :param may_split: whether the first of these may go without the others.
        """
        key = bucket.key
        chosen, rows = choose(rows_max)
        due_ns = min(map(self._due_ns, chosen))
        if due_ns == NO_DEADLINE_NS or (takes_ns := self.takes_ns(key, rows)) is None:
            return Punctual(chosen, rows)
        begins_ns = self.begins_ns(bucket, rows, now_ns)
        if begins_ns + takes_ns <= due_ns:
            return Punctual(chosen, rows)
        hopeless = tuple(request for request in chosen if self._is_hopeless(request, begins_ns))
        if hopeless:
            return Punctual((), 0, hopeless)
        smaller = self._largest_in_time(key, chosen, begins_ns) if may_split else 0
        late = self._late_together(bucket, chosen, rows_max, begins_ns)
        left = bucket.rows - sum(request.rows for request in late)
        if not left and may_split:
            # The first request may still be in time, and no other waits for the device.
            smaller = smaller or 1
        first = chosen[:smaller]
        first_rows = sum(request.rows for request in first)
        lost = 0
        if smaller and left:
            lost = self._lost_behind(bucket, chosen[smaller:], first_rows, rows_max, begins_ns)
        if smaller and not (lost and (left >= rows_max or lost > len(late))):
            return Punctual(first, first_rows)
        if not late or not left:
            return Punctual(chosen, rows)
        return Punctual((), 0, late)

    def _late_ns(self, batch: Batch) -> int:
        return self._times.occupied.late(batch.key.shape, batch.rows_run) or 0

    def _is_hopeless(self, request: Request, begins_ns: int) -> bool:
        """Return whether a request would certainly be late, even as the only one in its batch."""
        least_ns = self._times.sure_ns(request.key, request.rows)
        least_ns += self._times.copy_out_ns(request.key, request.rows)
        return begins_ns + least_ns > self._due_ns(request)

    def _largest_in_time(self, key: BatchKey, chosen: Sequence[Request], begins_ns: int) -> int:
        """Return how many of these requests, from the first on, form the largest batch in time for all of
        them."""
        rows, due_ns, found = 0, NO_DEADLINE_NS, 0
        for count, request in enumerate(chosen, start=1):
            rows += request.rows
            due_ns = min(due_ns, self._due_ns(request))
            if begins_ns + (self.takes_ns(key, rows) or 0) <= due_ns:
                found = count
        return found

    def _late_together(
        self, bucket: BucketQueue, chosen: Sequence[Request], rows_max: int, begins_ns: int
    ) -> tuple[Request, ...]:
        """Return the requests for which a batch of everything else would be too late; queued requests take
        their places in it."""
        late = []
        rows = bucket.rows
        for request in sorted(chosen, key=self._due_ns):
            takes_ns = self.takes_ns(bucket.key, max(1, min(rows, rows_max))) or 0
            if begins_ns + takes_ns <= self._due_ns(request):
                break
            late.append(request)
            rows -= request.rows
        return tuple(late)

    def _lost_behind(
        self, bucket: BucketQueue, others: Sequence[Request], rows: int, rows_max: int, begins_ns: int
    ) -> int:
        """Return how many of these requests would be late in the batch behind one of ``rows`` rows."""
        takes_ns = self.takes_ns(bucket.key, rows) or 0
        takes_ns += self.takes_ns(bucket.key, max(1, min(bucket.rows - rows, rows_max))) or 0
        return sum(begins_ns + takes_ns > self._due_ns(request) for request in others)

    def _due_ns(self, request: Request) -> int:
        """Return the time by which to answer a request."""
        if request in self.trial:
            return NO_DEADLINE_NS
        return min(request.deadline_ns + request.reserve_ns, NO_DEADLINE_NS)
