"""Histograms of latencies, in buckets whose width grows with the value (as HDR histograms have them).

Values are counted in blocks with NumPy, rounded down to 3 significant digits. So the counts of several
windows and processes add up exactly.
"""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

LARGEST_NS: Final = 24 * 3600 * 10**9
KEPT_BITS: Final = 10
"""Bits kept below a value's leading bit, which give 3 significant digits: the error is at most 0.05%."""
DROPPED_BITS: Final = np.finfo(np.float64).nmant - KEPT_BITS
"""Bits dropped of a float's mantissa."""


def _upper_bits(value: float) -> int:
    return int(np.float64(value).view(np.int64)) >> DROPPED_BITS


ONE_KEY: Final = _upper_bits(1.0)
LARGEST_KEY: Final = _upper_bits(LARGEST_NS) - ONE_KEY
ZERO: Final = -1
"""The key of 0, which has no leading bit."""


class Counts:
    """Count how often each value in ns occurs. Counts can be merged and pickled."""

    __slots__ = ("_counts", "_first", "total_ns")

    def __init__(self) -> None:
        # The counts of all keys from `_first` on.
        self._first = 0
        self._counts: Ints = np.zeros(0, np.int64)
        self.total_ns = 0

    def __repr__(self) -> str:
        return f"<Counts {len(self)} values>"

    def __len__(self) -> int:
        return int(self._counts.sum())

    def add(self, values: Ints) -> None:
        """Count values, clipped to between 0 and a day; ``total_ns`` adds up the unclipped values."""
        if len(values):
            keys = _keys(values)
            first = int(keys.min())
            self._add(first, np.bincount(keys - first))
            self.total_ns += int(values.sum())

    def merge(self, other: "Counts") -> None:
        """Add the counts of ``other``, without loss of precision."""
        if len(other._counts):
            self._add(other._first, other._counts)
            self.total_ns += other.total_ns

    def items(self) -> tuple[Ints, Ints]:
        """Return the values in ascending order, and how often each occurs."""
        places = np.flatnonzero(self._counts)
        return _values(places + self._first), self._counts[places]

    def within(self, limit_ns: float) -> int:
        """Return how many values are at most the limit, to the histogram's precision."""
        values, counts = self.items()
        return int(counts[: np.searchsorted(values, limit_ns, "right")].sum())

    def percentile(self, percent: float) -> int | None:
        """Return the value that ``percent`` of all values do not exceed; ``None`` if there are no values."""
        count = len(self)
        return self.nth(max(1, math.ceil(round(count * percent / 100, 6)))) if count else None

    def nth(self, rank: int) -> int:
        """Return the value with this rank; the smallest value has rank 1."""
        values, counts = self.items()
        place = np.searchsorted(np.cumsum(counts), rank, "left")
        return int(_middle(values[place]))

    def as_mapping(self) -> dict[int, int]:
        """Return how often each rounded value in ns occurs."""
        return dict(zip(*(part.tolist() for part in self.items()), strict=True))

    def _add(self, first: int, counts: Ints) -> None:
        """Add the counts of the keys from ``first`` on."""
        mine, end = self._counts, first + len(counts)
        if not len(mine):
            self._first = first
        start, end = min(first, self._first), max(end, self._first + len(mine))
        if end - start > len(mine):
            self._counts = np.zeros(end - start, np.int64)
            self._counts[self._first - start :][: len(mine)] = mine
            self._first = start
        self._counts[first - start :][: len(counts)] += counts


def _keys(values: Ints) -> Ints:
    """Return the keys of values: their upper bits as floats, that is, exponents and first digits."""
    keys = values.astype(np.float64).view(np.int64)
    # Shift in place, because allocating memory would cost more than the shift.
    np.right_shift(keys, DROPPED_BITS, out=keys)
    keys -= ONE_KEY
    return np.clip(keys, ZERO, LARGEST_KEY, out=keys)


def _values(keys: Ints) -> Ints:
    """Return the smallest value that has each key."""
    exponents = keys >> KEPT_BITS
    mantissas = (keys & ((1 << KEPT_BITS) - 1)) + (1 << KEPT_BITS)
    values: Ints = np.ldexp(mantissas.astype(np.float64), exponents - KEPT_BITS).astype(np.int64)
    values[keys == ZERO] = 0
    return values


def _middle(values: Any) -> Any:
    """Return the middle of the range that rounds down to each value."""
    # Below 2**53, the exponent of the float is the number of bits of the integer.
    bits = np.frexp(np.asarray(values, np.float64))[1].astype(np.int64)
    return values + ((np.int64(1) << np.maximum(bits - KEPT_BITS - 1, 0)) >> 1)
