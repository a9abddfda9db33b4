"""Whether a request would be too late, told when it comes, by what batches took so far.

What is told errs on the early side, as the estimates do that it follows from: batches ahead are counted as
full, other buckets as empty, and batches that nothing is known of as if they took no time. So a request that
is refused would hardly have been in time; one that is taken may still expire.

An estimate that is wrong must not refuse everything for ever. Whatever is said to be too late, one request in
``PROBE_NS_MIN``, or in ``PROBE_TIMES`` times as long as its batch is said to take, is taken all the same, and
its batch is measured.
"""

from typing import Final

from asynctrt.errors import DeadlineUnreachableError
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.estimates import CompletionEstimator
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.punctual import Punctuality
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import Request

PROBE_NS_MIN: Final = 20_000_000
PROBE_TIMES: Final = 8
PROBE_NS_MAX: Final = 10_000_000_000


class Forecast:
    """Foretells when a request would be launched and answered.

    :param in_flight: the batches in flight by their numbers, in the order of their launch.
    :param in_flight_max: how many there may be.
    :param lanes: where batches are launched just in time.
    """

    def __init__(
        self,
        policy: Policy,
        estimator: CompletionEstimator,
        in_flight: dict[int, Batch],
        in_flight_max: int,
        lanes: Concurrency | None,
    ) -> None:
        self._policy = policy
        self._estimator = estimator
        self._in_flight = in_flight
        self._in_flight_max = in_flight_max
        self._lanes = lanes
        # When each batch in flight is expected to be done, as far as that was told when it began.
        self._ends_ns: dict[int, int] = {}
        self._probe_ns = 0
        self.punctuality: Punctuality | None = None
        """What decides who is too late for a batch, told of requests that try out a prediction."""

    def started(self, batch: Batch, end_ns: int) -> None:
        """Note when a batch is expected to be done."""
        self._ends_ns[batch.number] = end_ns

    def ended(self, batch: Batch) -> None:
        """Note that a batch is done, or given up."""
        self._ends_ns.pop(batch.number, None)

    def check(self, request: Request, bucket: BucketQueue, rows_before: int = 0) -> None:
        """Set aside the time that it takes to compute a request, if it is to be answered by its deadline.

        :param rows_before: rows of the same call that are queued before it.
        :raises DeadlineUnreachableError: if its deadline would pass before its turn; nothing has changed.
        """
        policy, now_ns = self._policy, request.arrival_ns
        in_flight = len(self._in_flight)
        if not policy.answers_in_time:
            most = (bucket.rows + rows_before) // bucket.rows_max
            if in_flight + most < self._in_flight_max and request.deadline_ns >= now_ns:
                return  # It would be launched at once.
        rows_ahead = bucket.rows_ahead(request) + rows_before
        batches = rows_ahead // bucket.rows_max
        takes_ns: int | None = 0
        at_once = self._in_flight_max
        if policy.answers_in_time:
            rows = min(rows_ahead % bucket.rows_max + request.rows, bucket.rows_max)
            takes_ns = self._estimator.service_ns(bucket.key, rows)
            at_once = self._side_by_side(bucket)
        wait_ns = 0
        if in_flight + batches >= at_once:
            wait_ns = self._wait_ns(bucket, now_ns, batches, in_flight - at_once)
        if takes_ns is None:
            return  # Nothing is known of such batches.
        left_ns = request.deadline_ns - now_ns
        if wait_ns + takes_ns > left_ns and policy.answers_in_time:
            # A closer look, which costs more, says less or the same.
            takes_ns = self._service_ns(bucket.key, rows) or 0
            if wait_ns:
                wait_ns = self._wait_ns(bucket, now_ns, batches, in_flight - at_once, is_close=True)
        if wait_ns + takes_ns > left_ns:
            self._refuse(request, bucket, rows_ahead, wait_ns, takes_ns)
        elif policy.answers_in_time:
            self._reserve(request, bucket.key, takes_ns)

    def _reserve(self, request: Request, key: BatchKey, most_ns: int) -> None:
        """Set aside the time of a batch of its own: in which one it goes is not known yet."""
        service_ns = self._estimator.service_ns if self._lanes is None else self._service_ns
        reserve_ns = min(service_ns(key, request.rows) or 0, most_ns)
        request.reserve_ns = reserve_ns
        request.deadline_ns -= reserve_ns

    def _service_ns(self, key: BatchKey, rows: int) -> int | None:
        """Return how long a batch takes at least, with its copies; ``None`` until enough were seen."""
        takes_ns = self._estimator.service_ns(key, rows)
        if takes_ns is None or self.punctuality is None:
            return takes_ns
        return takes_ns - self._estimator.compute_ns(key, rows) + self.punctuality.least_ns(key, rows)

    def _side_by_side(self, bucket: BucketQueue) -> int:
        """Return how many batches compute at once."""
        if self._lanes is not None:
            return self._lanes.allowed(bucket.rows_max, bucket.rows_max)
        return self._policy.concurrency

    def _wait_ns(
        self, bucket: BucketQueue, now_ns: int, batches: int, over: int, *, is_close: bool = False
    ) -> int:
        """Return how long a request waits at least until so many batches that are ahead of it are launched.

        :param over: by how many batches the device has more than it does at once; below 0: fewer.
        :param is_close: whether to look at all that is known of what batches take.
        """
        first = next(iter(self._in_flight.values()), None)
        wait_ns = 0
        if first is not None and self._estimator.compute_ns(first.key, first.rows_run):
            # The first batch that ends lets one go, and from then on they end in turn.
            wait_ns = max(self._ends_ns.get(first.number, now_ns) - now_ns, 0)
        compute_ns = self._compute_ns if is_close else self._estimator.compute_ns
        each_ns = compute_ns(bucket.key, bucket.rows_max)
        return wait_ns + (batches + over) * each_ns // self._side_by_side(bucket)

    def _compute_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long a batch computes at least; 0 until enough like it were seen."""
        if self.punctuality is not None:
            return self.punctuality.least_ns(key, rows)
        return self._estimator.compute_ns(key, rows)

    def _refuse(
        self, request: Request, bucket: BucketQueue, rows_ahead: int, wait_ns: int, takes_ns: int
    ) -> None:
        now_ns = request.arrival_ns
        if now_ns >= self._probe_ns:
            pause_ns = max(PROBE_NS_MIN, PROBE_TIMES * takes_ns)
            self._probe_ns = now_ns + min(pause_ns, PROBE_NS_MAX)
            if self.punctuality is not None:
                self.punctuality.trial = (request,)
            return
        predicted_ns = wait_ns + takes_ns
        what = "answered" if self._policy.answers_in_time else "launched"
        error = DeadlineUnreachableError(
            f"the request would be {what} in {predicted_ns / 1e6:.3f} ms at the earliest, by what batches "
            f"took so far, and its timeout is {(request.deadline_ns - now_ns) / 1e6:.3f} ms: {rows_ahead} "
            f"rows go first, {bucket.rows_max} in a batch, and {len(self._in_flight)} batches are in flight. "
            "Retry later, allow more time, or send less"
        )
        error.predicted_s = predicted_ns / 1e9
        raise error
