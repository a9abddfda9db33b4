"""May the next batch still grow? Where batches wait for one another on the device, until just in time."""

from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS
from asynctrt.scheduling.queues import BucketQueue, DeadlineHeap


class AtOnce:
    """Lets no batch grow that could be launched: for devices that start each batch at once."""

    due_ns: int | None = None
    """When the batch that may grow is to be launched; ``None`` if there is none."""
    bucket: BucketQueue | None = None
    """Of which bucket it is."""

    def may_grow(self, bucket: BucketQueue, now_ns: int) -> bool:
        """Return whether the next batch, while others are in flight, can still grow before the device would
        want it."""
        return False

    def begin(self) -> None:
        """Forget what was found before."""

    def launched(self, bucket: BucketQueue) -> bool:
        """Note that a batch of a bucket was launched; return whether one of it was held back before."""
        return False


class JustInTime(AtOnce):
    """Lets batches grow until the device is about to be free for them.

    :param deadlines: those that no batch may grow beyond; ``None`` if launching sooner helps no one.
    """

    def __init__(
        self, concurrency: Concurrency, deadlines: DeadlineHeap | None, *, holds_full_ones: bool
    ) -> None:
        self._concurrency = concurrency
        self._deadlines = deadlines
        self._holds_full_ones = holds_full_ones
        # Of which bucket a batch was held back since the last launch.
        self._was: BucketQueue | None = None

    def begin(self) -> None:
        self.due_ns = self.bucket = None

    def may_grow(self, bucket: BucketQueue, now_ns: int) -> bool:
        if bucket.is_full and not self._holds_full_ones:
            return False
        rows_max = bucket.rows_max
        due_ns = self._concurrency.due_ns(bucket.key, min(bucket.rows, rows_max), rows_max, now_ns)
        if due_ns is None:
            return False
        if self._deadlines is not None and (deadline_ns := self._deadlines.earliest_ns()) is not None:
            due_ns = min(due_ns, deadline_ns - DEADLINE_MARGIN_NS)
        if due_ns <= now_ns:
            return False
        self.due_ns = due_ns
        self.bucket = self._was = bucket
        return True

    def launched(self, bucket: BucketQueue) -> bool:
        was, self._was = self._was, None
        return was is bucket
