"""When a batch is launched, how many rows it takes, and how many the device executes.

Decisions only: nothing here changes anything. For a free context:

- A full batch launches at once, even if it then waits its turn on the device: it cannot get any better.
- With nothing in flight, whatever is queued launches at once: a delay must never tax an idle engine.
- With enough batches in flight to keep the device busy, nothing launches unless some bucket is full. Then the
  turn decides among all buckets that are ready, so that full ones cannot keep the others waiting.
- On a device that copies while it computes (``is_pipelined``), a batch that is not full is put there just in
  time: when the one before it is about to have computed, less the time for gathering and copying its rows.
- Otherwise a batch launches when its oldest request has waited ``delay_ns_max``, by default at once, or
  shortly before a deadline in it passes. The wait counts from that arrival and never restarts.

Among buckets that may launch, the one with the most urgent request wins; equals take turns, so that a flood
of one shape cannot keep another waiting, but every second turn may be that of the earliest deadline, and a
bucket that fills batches keeps its turn for some while others that had theirs lately fill none. Within a
bucket and a priority the earliest deadline goes first. One batch in ``AGED_EVERY`` starts with what is most
overdue, whatever its priority, so that nothing starves.
"""

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

from asynctrt.scheduling.batch_times import Times
from asynctrt.scheduling.concurrency import ONE_LANE, Lanes
from asynctrt.scheduling.request import NO_DEADLINE_NS

PART_NS_MIN: Final = 200_000
"""Rows are spread over idle cores only while each part computes for longer than a few hand-overs."""

DEADLINE_MARGIN_NS: Final = 500_000
"""A batch that waits for company is launched this long before the first deadline in it."""

PATIENCE_NS: Final = 1_000_000_000
"""After so long a wait a request is overdue: of its priority it goes before every deadline that is later, and
one batch in ``AGED_EVERY`` starts with whatever is most overdue."""

AGED_EVERY: Final = 8


class Captured(NamedTuple):
    """The batch sizes that were captured as CUDA graphs, and what launching one costs the CPU."""

    sizes: tuple[int, ...] = ()
    """Rising."""
    direct_ns: int = 0
    """To put a batch on a stream call by call; 0 if it was not measured."""
    graph_ns: int = 0
    """To launch a captured one; 0 if it was not measured."""


NOT_CAPTURED: Final = Captured()


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of one engine; they do not change while it lives.

    :param rows_max: rows that one batch holds.
    :param delay_ns_max: how long a batch may wait for company while another is in flight.
    :param concurrency: how many batches keep the device busy.
    :param is_parallel: whether batches side by side take no longer than one alone.
    :param captured: the batch sizes that were captured.
    :param is_pipelined: whether batches wait for one another on the device, each copied in while the one
        before it computes, so that they are to be launched just in time.
    :param lanes: how many batches compute side by side there; ``lanes_max``: the lanes that exist.
    :param may_enqueue_slowly: whether it may take as long to put batches there as to compute them.
    :param answers_in_time: whether deadlines are those of answers, so that batches are also formed as late as
        possible when they are full.
    :param patience_ns: after how long a request is overdue.
    :param is_alone: whether each request is a batch of its own, whatever else is queued.
    """

    rows_max: int
    delay_ns_max: int = 0
    concurrency: int = 1
    is_parallel: bool = False
    captured: Captured = NOT_CAPTURED
    is_alone: bool = False
    is_pipelined: bool = False
    lanes: Lanes = ONE_LANE
    lanes_max: int = 1
    may_enqueue_slowly: bool = False
    answers_in_time: bool = False
    patience_ns: int = PATIENCE_NS

    def ready_ns(self, oldest_arrival_ns: int, deadline_ns: int) -> int:
        """Return when a bucket that is not full has waited long enough, in ns."""
        ready_ns = oldest_arrival_ns + self.delay_ns_max
        if deadline_ns != NO_DEADLINE_NS:
            ready_ns = min(ready_ns, deadline_ns - DEADLINE_MARGIN_NS)
        return ready_ns

    def rows_to_take(
        self,
        shape: Hashable,
        rows: int,
        head_rows: int,
        *,
        rows_max: int,
        buckets: int,
        in_flight: int,
        compute: Times,
    ) -> int:
        """Return the rows of the next batch: all that fit or, on several idle cores, an even share.

        Two cores compute 16 rows each in about half the time in which one computes 32. A configured delay
        asks for large batches, and gets them.

        :param rows: rows queued in the bucket; ``head_rows`` of them belong to its first request.
        :param rows_max: rows that one batch of the bucket holds.
        :param buckets: how many buckets have work.
        """
        idle = self.concurrency - in_flight - (buckets - 1)
        if not self.is_parallel or self.delay_ns_max or idle < 2 or rows < 2:
            return rows_max
        expected_ns = compute.typical(shape, min(rows, rows_max))
        if expected_ns is None or expected_ns < 2 * PART_NS_MIN:
            return rows_max
        parts = min(idle, expected_ns // PART_NS_MIN)
        part = max(min(-(-rows // parts), rows_max), head_rows)
        # What is always divided is never measured anew as a whole, but at most as long as its parts together:
        # its first run, of a model that was cold, would count for ever.
        if compute.has_seen(shape, part):
            part_ns = compute.typical(shape, part) or 0
            if -(-min(rows, rows_max) // part) * part_ns < 2 * PART_NS_MIN:
                return rows_max
        return part

    def rows_to_run(self, shape: Hashable, rows: int, compute: Times) -> int:
        """Return the rows to execute for a batch of ``rows``: those, or padded to the next captured size.

        Padding costs the computing of more rows; launching what was captured saves the CPU the calls, and the
        device the gaps between them. Sizes that were never run are estimated between those that were.
        """
        sizes, direct_ns, graph_ns = self.captured
        at = bisect_left(sizes, rows)
        if at == len(sizes) or sizes[at] == rows:
            return rows
        padded = sizes[at]
        more_ns = compute.typical(shape, padded)
        if more_ns is None or not compute.has_seen(shape, padded):
            return padded
        if compute.has_seen(shape, rows):
            fewer_ns = compute.typical(shape, rows) or 0
        else:
            below = sizes[at - 1] if at else 0
            below_ns = compute.typical(shape, below) if compute.has_seen(shape, below) else None
            if below_ns is None:
                return padded
            fewer_ns = below_ns + (more_ns - below_ns) * (rows - below) // (padded - below)
        return padded if more_ns + graph_ns <= fewer_ns + direct_ns else rows
