"""Histograms of latencies, in buckets whose width grows with the value (as HDR histograms have them).

Values are counted in blocks with NumPy, rounded down to 3 significant digits. So the counts of several
windows and processes add up exactly.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.int32]

LARGEST_NS: Final = 24 * 3600 * 10**9
KEPT_BITS: Final = 10
"""Bits kept below a value's leading bit, which give 3 significant digits: the error is at most 0.05%."""
DROPPED_BITS: Final = 52 - KEPT_BITS
"""Bits dropped of a float's mantissa."""
ONE_KEY: Final = 1023 << KEPT_BITS
"""The kept bits of the float 1.0, that is, the exponent's bias."""
LARGEST_KEY: Final = (int(np.float64(LARGEST_NS).view(np.int64)) >> DROPPED_BITS) - ONE_KEY
ZERO: Final = -1
"""The key of 0, which has no leading bit."""
LOOSE_MAX: Final = 1 << 16
"""Limit on the uncounted keys; beyond it they are counted."""


class Counts:
    """Count how often each value in ns occurs. Counts can be merged and pickled."""

    __slots__ = ("_counts", "_keys", "_loose", "_loose_count", "total_ns")

    def __init__(self) -> None:
        self._keys: Keys = np.zeros(0, np.int32)
        self._counts: Ints = np.zeros(0, np.int64)
        self._loose: list[Keys] = []
        self._loose_count = 0
        self.total_ns = 0

    def __repr__(self) -> str:
        return f"<Counts {len(self)} values>"

    def __len__(self) -> int:
        return int(self._counts.sum()) + self._loose_count

    def __getstate__(self) -> tuple[Keys, Ints, int]:
        """Return the compacted state for another process."""
        self.compact()
        return self._keys, self._counts, self.total_ns

    def __setstate__(self, state: tuple[Keys, Ints, int]) -> None:
        self._keys, self._counts, self.total_ns = state
        self._loose, self._loose_count = [], 0

    def add(self, values: Ints) -> None:
        """Count values, clipped to between 0 and a day; ``total_ns`` adds up the unclipped values."""
        if not len(values):
            return
        # Do as little as possible here, because nothing is sent meanwhile. compact() does the rest.
        self.total_ns += int(values.sum())
        self._loose.append(_bits(values))
        self._loose_count += len(values)
        if self._loose_count > LOOSE_MAX:
            self.compact()

    def merge(self, other: "Counts") -> None:
        """Add the counts of ``other``, without loss of precision."""
        self.total_ns += other.total_ns
        self._keys, self._counts = _added(self._keys, self._counts, other._keys, other._counts)
        self._loose += other._loose
        self._loose_count += other._loose_count
        if self._loose_count > LOOSE_MAX:
            self.compact()

    def items(self) -> tuple[Ints, Ints]:
        """Return the values in ascending order, and how often each occurs."""
        self.compact()
        return _values(self._keys), self._counts

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

    @classmethod
    def of(cls, mapping: Mapping[int, int]) -> Self:
        """Return the counts of :meth:`as_mapping`."""
        counts = cls()
        values = np.array(list(mapping), np.int64)
        counts._keys, counts._counts = _keys(_bits(values)), np.array(list(mapping.values()), np.int64)
        counts.total_ns = int((_middle(values) * counts._counts).sum())
        return counts

    def compact(self) -> None:
        """Count the keys that are not counted yet."""
        if self._loose:
            keys = _keys(np.concatenate(self._loose))
            self._loose, self._loose_count = [], 0
            first = int(keys.min())
            counts = np.bincount(keys - first)
            places = np.flatnonzero(counts)
            found: Keys = (places + first).astype(np.int32)
            self._keys, self._counts = _added(self._keys, self._counts, found, counts[places])


def merged(parts: Iterable[Counts]) -> Counts:
    """Merge all counts at once, which for thousands is far faster than one by one."""
    whole = Counts()
    keys, counts = [], []
    for part in parts:
        whole.total_ns += part.total_ns
        whole._loose += part._loose
        whole._loose_count += part._loose_count
        if len(part._keys):
            keys.append(part._keys)
            counts.append(part._counts)
    if keys:
        every = np.concatenate(keys)
        first = int(every.min())
        summed = np.bincount(every - first, np.concatenate(counts))
        places = np.flatnonzero(summed)
        whole._keys = (places + first).astype(np.int32)
        whole._counts = summed[places].astype(np.int64)
    if whole._loose_count > LOOSE_MAX:
        whole.compact()
    return whole


def _bits(values: Ints) -> Keys:
    """Return the upper bits of values as floats: their exponents and first digits."""
    bits = values.astype(np.float64).view(np.int64)
    # Shift in place, because allocating memory would cost more than the shift.
    np.right_shift(bits, DROPPED_BITS, out=bits)
    return bits.astype(np.int32)


def _keys(bits: Keys) -> Keys:
    """Return the keys of rounded values: integers in the same order as the values."""
    keys: Keys = np.clip(bits - np.int32(ONE_KEY), ZERO, LARGEST_KEY)
    return keys


def _values(keys: Keys) -> Ints:
    """Return the smallest value that has each key."""
    exponents = keys >> KEPT_BITS
    mantissas = (keys & ((1 << KEPT_BITS) - 1)) + (1 << KEPT_BITS)
    values: Ints = np.ldexp(mantissas.astype(np.float64), exponents - KEPT_BITS).astype(np.int64)
    values[keys == ZERO] = 0
    return values


def _added(keys: Keys, counts: Ints, more_keys: Keys, more_counts: Ints) -> tuple[Keys, Ints]:
    if not len(more_keys):
        return keys, counts
    if not len(keys):
        return more_keys, more_counts.astype(np.int64)
    both, places = np.unique(np.concatenate((keys, more_keys)), return_inverse=True)
    return both, np.bincount(places, np.concatenate((counts, more_counts))).astype(np.int64)


def _middle(values: Any) -> Any:
    """Return the middle of the range that rounds down to each value."""
    # Below 2**53, the exponent of the float is the number of bits of the integer.
    bits = np.frexp(np.asarray(values, np.float64))[1].astype(np.int64)
    return values + ((np.int64(1) << np.maximum(bits - KEPT_BITS - 1, 0)) >> 1)
