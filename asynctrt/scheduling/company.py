"""Decides whether rows of different sizes share a batch: they do if padding costs less than another batch.

A batch is padded to the size of its longest row, and maybe to a few more rows. Waiting rows of another size
join it instead of running as a separate batch, if the larger batch takes less time than the two would:
padding must take less than the fixed part of a batch's time. If only some rows of the other size fit, a batch
for the rest is still needed, so they join only where they replace rows that pad the batch.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache

from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.batch_times import SURE_SAMPLES, Costs
from asynctrt.scheduling.key import SHAPES_MAX, BatchKey
from asynctrt.scheduling.queues import BucketQueue, JoinedRows


class OneSize:
    """Lets only rows of one size share a batch: for engines that pad no rows."""

    is_measured = True
    """Whether the times of batches that are launched now teach nothing new."""

    def observe(self, batch: Batch, took_ns: int) -> None:
        """Ignore the time of a batch."""

    def tell(self, shape: Hashable, times: Mapping[int, int]) -> None:
        """Ignore the times of batches of a shape."""

    def join(
        self, bucket: BucketQueue, others: Iterable[BucketQueue], side_by_side: int = 1
    ) -> tuple[BatchKey, tuple[JoinedRows, ...]]:
        """Return the key of a batch of all rows of a bucket, and the rows of others that join it.

        :param side_by_side: how many batches compute side by side.
        """
        return bucket.key, ()


class MixedSizes(OneSize):
    """Finds rows of other sizes to share a batch with.

    :param units_of: returns the cost of a row of a shape in units.
    :param holds: returns whether rows of the second shape can be padded to the first.
    :param times: the units and the time in ns of batches that ran before the first request.
    :param padded_rows: returns the number of rows that a batch of a shape is run with. Default: no padding.
    """

    def __init__(
        self,
        units_of: Callable[[Hashable], int],
        holds: Callable[[Hashable, Hashable], bool],
        times: Iterable[tuple[int, int]] = (),
        padded_rows: Callable[[Hashable, int], int] = lambda _, rows: rows,
    ) -> None:
        # Both are called with the same few shapes for each batch.
        self._units_of = lru_cache(SHAPES_MAX)(units_of)
        self._holds = lru_cache(SHAPES_MAX)(holds)
        self._padded_rows = padded_rows
        self._are_told = False
        self.costs = Costs()
        for units, took_ns in times:
            self.costs.observe(units, took_ns)
        # Keep what was measured before: batches that share the device with others take longer.
        self.is_measured = self.costs.batch_ns > 0

    def observe(self, batch: Batch, took_ns: int) -> None:
        """Note the time of a batch."""
        self.costs.observe(self._units_of(batch.key.shape) * batch.rows_run, took_ns)

    def tell(self, shape: Hashable, times: Mapping[int, int]) -> None:
        """Note the times in ns, by their rows, of batches of a shape that runs in another way from now on.

        The first such times replace all earlier ones.
        """
        if times and not self._are_told:
            self._are_told = self.is_measured = True
            self.costs = Costs()
        for rows, took_ns in times.items():
            for _ in range(SURE_SAMPLES):
                self.costs.observe(self._units_of(shape) * rows, took_ns)

    def join(
        self, bucket: BucketQueue, others: Iterable[BucketQueue], side_by_side: int = 1
    ) -> tuple[BatchKey, tuple[JoinedRows, ...]]:
        key, rows, rows_max = bucket.key, bucket.rows, bucket.rows_max
        # Batches side by side overlap in the fixed parts of their times, in which most of the device is idle.
        batch_ns = self.costs.batch_ns / side_by_side
        if not batch_ns or key.on_device or key.outputs_on_device:
            return key, ()
        joined: list[JoinedRows] = []
        for other in self._in_order(bucket, others):
            is_longer = self._holds(other.key.shape, key.shape)
            if not is_longer and not self._holds(key.shape, other.key.shape):
                continue
            longer, limit = (other.key, min(rows_max, other.rows_max)) if is_longer else (key, rows_max)
            more = min(other.rows, limit - rows)
            saved_ns = batch_ns if more == other.rows else 0
            if more > 0 and self._ns_more(key.shape, rows, longer.shape, other, more) < saved_ns:
                chosen, more = other.choose(more)
                if chosen:
                    joined.append((other, chosen, more))
                    key, rows, rows_max = longer, rows + more, limit
        return key, tuple(joined)

    def _in_order(self, bucket: BucketQueue, others: Iterable[BucketQueue]) -> list[BucketQueue]:
        """Return the buckets whose rows may join: larger ones rising, then smaller ones falling."""
        larger: list[tuple[int, BucketQueue]] = []
        smaller: list[tuple[int, BucketQueue]] = []
        for other in others:
            if other is bucket or other.is_full or other.key[1:] != bucket.key[1:]:
                continue
            is_larger = self._holds(other.key.shape, bucket.key.shape)
            (larger if is_larger else smaller).append((self._units_of(other.key.shape), other))
        ordered = [*sorted(larger, key=_units), *sorted(smaller, key=_units, reverse=True)]
        return [other for _, other in ordered]

    def _ns_more(self, shape: Hashable, rows: int, joined: Hashable, other: BucketQueue, more: int) -> float:
        """Return how much longer batches compute if ``more`` rows of a bucket join a batch of ``rows``, whose
        shape may change; the fixed parts of their times are left out."""
        left = other.rows - more
        units = self._units_run(joined, rows + more) + self._units_run(other.key.shape, left)
        units -= self._units_run(shape, rows) + self._units_run(other.key.shape, other.rows)
        return units * self.costs.unit_ns

    def _units_run(self, shape: Hashable, rows: int) -> int:
        """Return the cost of a batch in units, padding rows included."""
        return self._units_of(shape) * self._padded_rows(shape, rows) if rows else 0


def _units(found: tuple[int, BucketQueue]) -> int:
    return found[0]
