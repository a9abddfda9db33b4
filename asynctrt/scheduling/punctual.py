"""Which requests a batch takes so that it ends in time, and which are too late for any.

For ``timeout_until="answer"``. A batch begins when the device is free, not when it is launched, and takes
longer the more rows it has. So whether a request can be answered in time is known when its batch is formed:

- What would be late even in a batch of its own has expired, whatever it would still be launched by.
- Where all that may go would end too late for some of it, a smaller batch goes first, if the others are in
  time behind it, or more would be lost otherwise.
- Else those that cannot wait for the larger batch have expired: with as much queued, a small batch for them
  would make others late, which would need small batches then, and so on.

What is told errs on the late side, but for what is said to be too late in a batch of its own. Nothing is told
of sizes of which too little is known, and a request that tries out a prediction goes in any case.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.curve import ServiceCurve
from asynctrt.scheduling.estimates import LEAD_MARGIN_NS, CompletionEstimator
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request

MARGIN_SHARE: Final = 16
"""This part of the time to compute is left for what is not measured, such as the callers' turns on the loop;
but at least ``LEAD_MARGIN_NS``, and at most ``DEADLINE_MARGIN_NS``."""

Choose = Callable[[int], tuple[tuple[Request, ...], int]]
"""Returns the requests of a batch of so many rows at most, and their rows."""


class Punctual(NamedTuple):
    """A batch that ends in time, as far as can be told, and who is too late for it."""

    requests: tuple[Request, ...]
    rows: int
    late: tuple[Request, ...] = ()


class Punctuality:
    """Foretells when batches would end.

    :param in_flight: the batches in flight by their numbers.
    :param lines: how many lanes there are, or arenas where there are no lanes; 0 where a batch that is
        launched computes at once.
    :param rows_to_run: returns the rows that the device executes for a number of rows of a key.
    """

    def __init__(
        self,
        estimator: CompletionEstimator,
        curve: ServiceCurve,
        in_flight: dict[int, Batch],
        lines: int,
        lanes: Concurrency | None,
        rows_to_run: Callable[[BatchKey, int], int],
    ) -> None:
        self._estimator = estimator
        self._curve = curve
        self._in_flight = in_flight
        self._lines = lines
        self._lanes = lanes
        self._rows_to_run = rows_to_run
        self.trial: tuple[Request, ...] = ()
        """The requests of the call that was taken last although it was said to be late: it goes in any
        case."""

    def begins_ns(self, bucket: BucketQueue, rows: int, now_ns: int) -> int:
        """Return when a batch that is launched now begins to compute at the latest, as a rule."""
        key = bucket.key
        if not self._lines:
            return now_ns + self._estimator.copy_in_ns(key, rows)
        lines: Sequence[int] = range(self._lines)
        if self._lanes is not None:
            lines = self._lanes.usable(self._lanes.allowed(rows, bucket.rows_max)) or lines
        free_ns = self._estimator.free_late_ns(lines, now_ns, self._takes_ns)
        if free_ns <= now_ns:
            return now_ns + self._estimator.copy_in_ns(key, rows)
        return max(free_ns, now_ns + self._estimator.lead_ns(key.copy_key, rows))

    def takes_ns(self, key: BatchKey, rows: int) -> int | None:
        """Return how long a batch takes from when it begins to compute to its answers, at most as a rule."""
        compute_ns = self._curve.late_ns(key.cost_key, self._rows_to_run(key, rows))
        if compute_ns is None:
            return None
        margin_ns = min(max(compute_ns // MARGIN_SHARE, LEAD_MARGIN_NS), DEADLINE_MARGIN_NS)
        return compute_ns + self._estimator.copy_out_ns(key, rows) + margin_ns

    def least_ns(self, key: BatchKey, rows: int) -> int:
        """Return how long a batch computes at least; 0 until enough like it were seen.

        What was measured while others computed beside it is the longer of the two that are known.
        """
        least_ns = self._estimator.compute_ns(key, rows)
        late_ns = self._curve.late_ns(key.cost_key, self._rows_to_run(key, rows))
        return least_ns if late_ns is None else min(least_ns, late_ns)

    def fit(
        self, bucket: BucketQueue, rows_max: int, choose: Choose, now_ns: int, *, may_split: bool
    ) -> Punctual:
        """Return the batch to launch from a bucket now, and whom it comes too late for; change nothing.

        :param rows_max: the rows that it may have; ``choose`` returns its requests if it has that many.
        :param may_split: whether the first of these may go without the others.
        """
        key = bucket.key
        chosen, rows = choose(rows_max)
        due_ns = min(map(self._due_ns, chosen))
        if due_ns == NO_DEADLINE_NS or (most_ns := self._curve.most_ns(key.cost_key)) is None:
            return Punctual(chosen, rows)
        begins_ns = self.begins_ns(bucket, rows, now_ns)
        copied_ns = begins_ns + self._estimator.copy_out_ns(key, rows) + DEADLINE_MARGIN_NS
        if copied_ns + most_ns <= due_ns or (takes_ns := self.takes_ns(key, rows)) is None:
            return Punctual(chosen, rows)  # Most are far from late, and need no closer look.
        if begins_ns + takes_ns <= due_ns:
            return Punctual(chosen, rows)
        hopeless = tuple(request for request in chosen if self._is_hopeless(request, begins_ns))
        if hopeless:
            return Punctual((), 0, hopeless)
        smaller = self._largest_in_time(key, chosen, begins_ns) if may_split else 0
        late = self._late_together(bucket, chosen, rows_max, begins_ns)
        left = bucket.rows - sum(request.rows for request in late)
        if not left and may_split:
            # It is not sure that the first of them is late, and nobody else wants the device.
            smaller = smaller or 1
        first = chosen[:smaller]
        first_rows = sum(request.rows for request in first)
        if smaller and left:
            lost = self._lost_behind(bucket, chosen[smaller:], first_rows, rows_max, begins_ns)
            if lost and (left >= rows_max or lost > len(late)):
                smaller = 0
        if smaller:
            return Punctual(first, first_rows)
        if not late or not left:
            return Punctual(chosen, rows)
        return Punctual((), 0, late)

    def _takes_ns(self, number: int) -> int:
        batch = self._in_flight.get(number)
        if batch is None:
            return 0
        return self._curve.late_ns(batch.key.cost_key, batch.rows_run) or 0

    def _is_hopeless(self, request: Request, begins_ns: int) -> bool:
        """Return whether a request would be late in a batch of its own, as far as that is sure."""
        least_ns = self.least_ns(request.key, request.rows)
        least_ns += self._estimator.copy_out_ns(request.key, request.rows)
        return begins_ns + least_ns > self._due_ns(request)

    def _largest_in_time(self, key: BatchKey, chosen: Sequence[Request], begins_ns: int) -> int:
        """Return how many of these, from the first on, make up the largest batch that is in time for all."""
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
        """Return those who cannot wait for one batch of all others, of whom the rest of the queue takes the
        places."""
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
        """Return how many of these would be late in a batch behind one of so many rows."""
        takes_ns = self.takes_ns(bucket.key, rows) or 0
        takes_ns += self.takes_ns(bucket.key, max(1, min(bucket.rows - rows, rows_max))) or 0
        return sum(begins_ns + takes_ns > self._due_ns(request) for request in others)

    def _due_ns(self, request: Request) -> int:
        """Return when a request has to be answered."""
        if request in self.trial:
            return NO_DEADLINE_NS
        return min(request.deadline_ns + request.reserve_ns, NO_DEADLINE_NS)
