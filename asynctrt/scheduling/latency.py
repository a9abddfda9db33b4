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


class _Window:
    """The last few durations of one size, and what they let expect."""

    __slots__ = ("_expected_ns", "_recent")

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._expected_ns: int | None = None

    def observe(self, duration_ns: int) -> None:
        self._recent.append(duration_ns)
        self._expected_ns = None

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def expected_ns(self) -> int:
        if self._expected_ns is None:
            self._expected_ns = sorted(self._recent)[len(self._recent) // QUANTILE]
        return self._expected_ns


class LatencyModel:
    """Observed durations in ns of the last few batches of each (bucket, rows)."""

    __slots__ = ("_buckets", "direct_ns", "graph_ns")

    def __init__(self) -> None:
        self._buckets: OrderedDict[Hashable, dict[int, _Window]] = OrderedDict()
        self.direct_ns = 0
        """What the CPU needs to put a batch on a stream call by call; 0 if it was not measured."""
        self.graph_ns = 0
        """What it needs for a captured one."""

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
            window = sizes[rows] = _Window()
        window.observe(duration_ns)

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
        return window.expected_ns

    def has_seen(self, bucket: Hashable, rows: int) -> bool:
        """Whether a batch of just this size was seen."""
        return rows in self._buckets.get(bucket, ())

    def is_sure(self, bucket: Hashable, rows: int) -> bool:
        """Whether so many batches of just this size were seen that one slow one among them does no harm."""
        window = self._buckets.get(bucket, {}).get(rows)
        return window is not None and len(window) >= QUANTILE
