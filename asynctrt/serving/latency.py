"""Count latencies in buckets, as Prometheus histograms need them, at little cost per request."""

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the buckets in seconds; one more bucket has none."""

BOUNDS_NS: Final = tuple(round(bound * 1e9) for bound in BOUNDS_S)


class Latencies:
    """The latencies of one model's answered requests: in the queue, computing, and from arrival to answer.

    ``queue``, ``compute`` and ``total`` hold the number of requests in each bucket, and then the sum of their
    times in ns.
    """

    __slots__ = ("compute", "queue", "total")

    def __init__(self) -> None:
        self.queue = [0] * (len(BOUNDS_NS) + 2)
        self.compute = [0] * (len(BOUNDS_NS) + 2)
        self.total = [0] * (len(BOUNDS_NS) + 2)

    def add(self, total_ns: int, queue_ns: int, compute_ns: int) -> None:
        """Count one answered request."""
        queue, compute, total = self.queue, self.compute, self.total
        queue[bisect_left(BOUNDS_NS, queue_ns)] += 1
        queue[-1] += queue_ns
        compute[bisect_left(BOUNDS_NS, compute_ns)] += 1
        compute[-1] += compute_ns
        total[bisect_left(BOUNDS_NS, total_ns)] += 1
        total[-1] += total_ns
