"""The measured latency of a batch, by bucket and batch size: when is this one expected to be done?

A low quantile of a short window, not a mean: one slow batch must not move the expectation, because
waiting too long costs more than looking too early (measured: a mean that one outlier had spoilt made a
5 ms batch be noticed 2.5 ms late).
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final

WINDOW: Final = 16
BUCKETS_MAX: Final = 256
QUANTILE: Final = 4  # The expectation is the value a quarter of the way up the sorted window.


class LatencyModel:
    """Observed durations in ns of the last few batches of each (bucket, rows)."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: OrderedDict[Hashable, dict[int, deque[int]]] = OrderedDict()

    def observe(self, bucket: Hashable, rows: int, duration_ns: int) -> None:
        """Remember how long a batch took. The least recently seen bucket makes room for a new one."""
        sizes = self._buckets.get(bucket)
        if sizes is None:
            sizes = self._buckets[bucket] = {}
            if len(self._buckets) > BUCKETS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(bucket)
        window = sizes.get(rows)
        if window is None:
            window = sizes[rows] = deque(maxlen=WINDOW)
        window.append(duration_ns)

    def expected_ns(self, bucket: Hashable, rows: int) -> int | None:
        """How long such a batch will take, at the least; ``None`` before anything was seen.

        A size that was never seen takes the expectation of the nearest smaller one: a lower bound is
        the safe side, since being early costs one more look and being late costs latency.
        """
        sizes = self._buckets.get(bucket)
        if not sizes:
            return None
        window = sizes.get(rows)
        if window is None:
            seen = max((size for size in sizes if size < rows), default=None)
            if seen is None:
                return None
            window = sizes[seen]
        return sorted(window)[len(window) // QUANTILE]
