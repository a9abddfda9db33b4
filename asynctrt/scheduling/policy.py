"""When a batch is launched, how many rows it takes, and how many the device executes.

This module only decides; it changes nothing. The rules for a free context are:

- A full batch launches at once, even if it then waits for its turn on the device: it cannot get any better.
- With nothing in flight, whatever is queued launches at once: an idle engine must never wait for a delay.
- With enough batches in flight to keep the device busy, nothing launches unless some bucket is full. Then all
  ready buckets take turns, so that full ones cannot keep the others waiting.
- On a device that copies while it computes (``is_pipelined``), a batch that is not full is launched just in
  time: so that its rows have been gathered and copied in when the batch before it has computed.
- Otherwise a batch launches when its oldest request has waited ``delay_ns_max``, by default at once, or
  shortly before one of its deadlines. The wait counts from that request's arrival and never restarts.

Among buckets that may launch, the one with the most urgent request goes first. Buckets of equal urgency take
turns, so that a flood of one shape cannot keep another waiting, with two exceptions: every second turn may go
to the earliest deadline, and a bucket that fills batches keeps its turn for a few batches while others that
recently had a turn fill none. Within a bucket and a priority, the earliest deadline goes first. One batch in
``AGED_EVERY`` starts with the most overdue request, whatever its priority, so that no request starves.
"""

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

from asynctrt.scheduling.batch_times import Times
from asynctrt.scheduling.concurrency import ONE_LANE, Lanes
from asynctrt.scheduling.request import NO_DEADLINE_NS

DEADLINE_MARGIN_NS: Final = 500_000
"""A batch that waits for more rows is launched this long before its first deadline, because the event loop
may wake up late for it. The exact time was not tuned."""

PATIENCE_NS: Final = 1_000_000_000
"""After waiting this long, a request is overdue: it goes before all later deadlines of its priority, and one
batch in ``AGED_EVERY`` starts with the most overdue request. It is meant to be longer than requests usually
wait, so that normally only priorities and deadlines decide."""

AGED_EVERY: Final = 8
"""One batch in this many starts with the most overdue request of any priority. So overdue requests get an
eighth of the batches at most, and a flood of urgent requests still gets nearly all of the device."""


class Captured(NamedTuple):
    """The batch sizes that were captured as CUDA graphs, and what launching one costs the CPU."""

    sizes: tuple[int, ...] = ()
    """Rising."""
    direct_ns: int = 0
    """The time to put a batch on a stream call by call; 0 if it was not measured."""
    graph_ns: int = 0
    """The time to launch a captured batch; 0 if it was not measured."""


NOT_CAPTURED: Final = Captured()


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of one engine, which never change.

    :param rows_max: the most rows of a batch.
    :param delay_ns_max: how long a batch may wait for more rows while another is in flight.
    :param concurrency: how many batches keep the device busy.
    :param is_parallel: whether batches side by side take no longer than one alone.
    :param captured: the batch sizes that were captured.
    :param is_pipelined: whether batches wait for one another on the device, each copied in while the one
        before it computes, so that launching them just in time is best.
    :param lanes: how many batches compute side by side there; ``lanes_max``: how many lanes exist.
    :param may_enqueue_slowly: whether enqueueing a batch may take as long as computing it.
    :param answers_in_time: whether deadlines apply to answers, so that even full batches are formed as late
        as possible.
    :param patience_ns: the wait after which a request is overdue.
    :param change_ns: how much longer a batch takes on a context that ran another size before; 0 if contexts
        may change their size at any time.
    :param is_alone: whether each request runs as a separate batch, whatever else is queued.
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
    change_ns: int = 0

    def ready_ns(self, oldest_arrival_ns: int, deadline_ns: int) -> int:
        """Return when a bucket that is not full has waited long enough, in ns."""
        ready_ns = oldest_arrival_ns + self.delay_ns_max
        if deadline_ns != NO_DEADLINE_NS:
            ready_ns = min(ready_ns, deadline_ns - DEADLINE_MARGIN_NS)
        return ready_ns

    def rows_to_run(self, shape: Hashable, rows: int, compute: Times) -> int:
        """Return how many rows to execute for a batch of ``rows``: no more, or the next captured size.

        Padding costs the time to compute more rows; a graph saves the CPU many calls, and the device the gaps
        between them. The times of sizes that were never run are interpolated.
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
