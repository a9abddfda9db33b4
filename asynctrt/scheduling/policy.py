"""Which bucket may launch now, how many rows, and when to look again.

Decisions only: nothing here changes anything. The rules, for a bucket with work and a lease that is free:

- A full batch launches at once, even if it then waits its turn on the device: it cannot get any better.
- With nothing in flight, whatever there is launches at once: a delay must never tax an idle engine.
- With every slot of the device taken, a batch that is not full waits: it would only wait there instead, and
  could not grow any more.
- Otherwise it launches when its oldest request has waited ``delay_ns_max``, by default at once. The wait
  counts from that arrival and never restarts.

Among buckets that may launch, the most urgent head wins; equals take turns, so that a flood of one shape
cannot keep another waiting.
"""

from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from asynctrt.scheduling.latency import LatencyModel
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import WholeBucket

NEVER_NS: Final = 2**63 - 1

PART_NS_MIN: Final = 200_000
"""Rows are spread over idle slots only while each part computes for longer than a few hand-overs."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What does not change while an engine lives.

    :param rows_max: rows that one batch holds at the most.
    :param delay_ns_max: how long a batch may wait for company while another is in flight.
    :param slots: how many batches keep the device busy.
    :param is_parallel: whether batches side by side take no longer than one alone.
    """

    rows_max: int
    delay_ns_max: int
    slots: int
    is_parallel: bool

    def ready_ns(self, bucket: BucketQueue, in_flight: int) -> int:
        """From when on ``bucket`` may launch, in ns, if nothing else happens; 0 means at once."""
        if bucket.rows >= bucket.rows_max or not in_flight:
            return 0
        if in_flight >= self.slots:
            return NEVER_NS
        if not self.delay_ns_max:
            return 0
        return bucket.oldest_arrival_ns() + self.delay_ns_max

    def choose(self, buckets: Collection[BucketQueue], in_flight: int, now_ns: int) -> BucketQueue | None:
        """The bucket to launch from now, out of those with work in the order of their turns."""
        chosen = None
        urgency = -1
        for bucket in buckets:
            head = bucket.head()
            if head is None or head.priority <= urgency:
                continue
            if self.ready_ns(bucket, in_flight) <= now_ns:
                chosen, urgency = bucket, head.priority
        return chosen

    def rows_to_take(self, bucket: BucketQueue, buckets: int, in_flight: int, latency: LatencyModel) -> int:
        """Rows for the batch: all that fit or, on a device with cores of their own, an even share.

        A whole bucket is never shared out: its rows lie in one slab, which one batch runs from.
        Two cores compute 16 rows each in about half the time in which one computes 32. Who configured a
        delay asked for large batches, and gets them.
        """
        rows_max = bucket.rows_max
        if isinstance(bucket.key, WholeBucket):
            return rows_max
        idle_slots = self.slots - in_flight - (buckets - 1)
        rows = min(bucket.rows, rows_max)
        if not self.is_parallel or self.delay_ns_max or idle_slots < 2 or rows < 2:
            return rows_max
        expected_ns = latency.expected_ns(bucket.key, rows)
        if expected_ns is None or expected_ns < 2 * PART_NS_MIN:
            return rows_max
        parts = min(idle_slots, expected_ns // PART_NS_MIN)
        share = min(-(-bucket.rows // parts), rows_max)
        head = bucket.head()
        return max(share, head.rows if head is not None else 0)

    def rows_to_run(self, bucket: Hashable, rows: int, sizes: Sequence[int], latency: LatencyModel) -> int:
        """Rows that the device shall compute for a batch of ``rows``: so many, or the next captured size.

        To pad costs the computing of more rows; to launch what was captured saves the CPU the calls, and the
        device the gaps between them. Sizes that were never run are estimated between those that were.

        :param sizes: the captured sizes, rising.
        """
        at = bisect_left(sizes, rows)
        if at == len(sizes) or sizes[at] == rows:
            return rows
        padded = sizes[at]
        more_ns = latency.expected_ns(bucket, padded)
        if more_ns is None or not latency.has_seen(bucket, padded):
            return padded
        if latency.has_seen(bucket, rows):
            fewer_ns = latency.expected_ns(bucket, rows) or 0
        else:
            below = sizes[at - 1] if at else 0
            below_ns = latency.expected_ns(bucket, below) if latency.has_seen(bucket, below) else None
            if below_ns is None:
                return padded
            fewer_ns = below_ns + (more_ns - below_ns) * (rows - below) // (padded - below)
        return padded if more_ns + latency.graph_ns <= fewer_ns + latency.direct_ns else rows
