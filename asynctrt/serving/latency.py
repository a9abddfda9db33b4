"""Count latencies, and delays of the event loop, in buckets, as Prometheus histograms need them."""

import asyncio
from bisect import bisect_left
from typing import Final

from asynctrt._util import clock

BOUNDS_NS: Final = (*(step * 10**decade for decade in range(4, 9) for step in (10, 25, 50)), 10**10)
"""Upper bounds of the buckets, three a decade from 0.1 ms to 10 s; one more bucket has none."""

BOUNDS_S: Final = tuple(bound / 1e9 for bound in BOUNDS_NS)

BEAT_S: Final = 0.05
"""Time between two measurements of the loop's delay, which take 0.1% of a slow core."""


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


class LoopDelays:
    """Measures how late the running event loop's timers are, until :meth:`close`.

    That is how long a request that arrives at that moment waits before any work is done for it.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_NS) + 2)
        """The number of delays in each bucket, and then their sum in ns."""
        self._longest_ns = 0
        self._loop = asyncio.get_running_loop()
        self._schedule()

    def __repr__(self) -> str:
        return f"<LoopDelays {sum(self.counts[:-1])} measured>"

    def close(self) -> None:
        """Stop measuring. Idempotent."""
        self._timer.cancel()

    def take_longest_ns(self) -> int:
        """Return the longest delay since the last call."""
        longest_ns, self._longest_ns = self._longest_ns, 0
        return longest_ns

    def _schedule(self) -> None:
        self._due_ns = clock.now_ns() + int(BEAT_S * 1e9)
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        late_ns = max(0, clock.now_ns() - self._due_ns)
        self.counts[bisect_left(BOUNDS_NS, late_ns)] += 1
        self.counts[-1] += late_ns
        self._longest_ns = max(self._longest_ns, late_ns)
        self._schedule()
