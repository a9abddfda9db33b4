"""The counts against a sorted list of the same values."""

import bisect
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt.loadtest.histogram import LARGEST_NS, Counts

PRECISION = 1e-3
PERCENTS = (50, 90, 95, 99, 99.9, 99.99, 100)

edges = st.integers(0, 46).flatmap(lambda bits: st.integers(-2, 2).map(lambda off: max(0, 2**bits + off)))
values_ns = st.one_of(
    st.integers(0, 5000), edges, st.integers(0, 10**9), st.integers(0, LARGEST_NS), st.just(LARGEST_NS)
)
lists_ns = st.lists(values_ns, max_size=200)


def counted(*values):
    counts = Counts()
    counts.add(np.array(values, np.int64))
    return counts


def merged(parts):
    whole = Counts()
    for part in parts:
        whole.merge(part)
    return whole


def as_dict(counts):
    values, numbers = counts.items()
    found = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    assert counts.as_mapping() == found
    return found


@settings(deadline=None)
@given(st.lists(values_ns, min_size=1, max_size=300))
def test_percentiles_are_those_of_a_sorted_list(values):
    counts, in_order = counted(*values), sorted(values)
    for percent in PERCENTS:
        rank = math.ceil(round(len(values) * percent * 100) / 10_000)
        assert counts.percentile(percent) == counts.nth(rank)
        assert counts.nth(rank) == pytest.approx(in_order[rank - 1], rel=PRECISION / 2)


@settings(deadline=None)
@given(lists_ns, values_ns)
def test_how_many_are_within_a_limit(values, limit):
    """Exact for what is further away from the limit than the precision."""
    found, in_order = counted(*values).within(limit), sorted(values)
    assert bisect.bisect_right(in_order, limit) <= found
    assert found <= bisect.bisect_right(in_order, limit * (1 + PRECISION) + 1e-9)


@pytest.mark.parametrize(
    ("value", "kept", "shown"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (2047, 2047, 2047),  # Up to here every value has a bucket of its own.
        (2048, 2048, 2049),
        (2049, 2048, 2049),
        (4095, 4094, 4095),
        (4096, 4096, 4098),
        (4099, 4096, 4098),
        (1_000_000, 999_936, 1_000_192),
        (-1, 0, 0),
        (-(2**62), 0, 0),
        (LARGEST_NS + 1, 86_380_382_257_152, 86_414_741_995_520),
        (2**62, 86_380_382_257_152, 86_414_741_995_520),
    ],
)
def test_what_is_kept_of_a_value(value, kept, shown):
    counts = counted(value)
    assert as_dict(counts) == {kept: 1}
    assert counts.nth(1) == counts.percentile(100) == shown
    assert counts.total_ns == value


def test_nothing():
    counts = Counts()
    counts.add(np.zeros(0, np.int64))
    for empty in (Counts(), counts):
        assert len(empty) == 0
        assert as_dict(empty) == {}
        assert empty.percentile(50) is None
        assert empty.within(1e9) == 0
        assert empty.total_ns == 0


@settings(deadline=None)
@given(st.lists(lists_ns.map(lambda values: values[:30]), max_size=8), st.randoms())
def test_adding_up_is_exact_in_any_order(parts, random):
    """However the values are spread over counts, and in whatever order these are merged."""
    all_at_once = counted(*[value for part in parts for value in part])
    shuffled = [counted(*part) for part in parts]
    random.shuffle(shuffled)
    pairs = [merged(shuffled[start : start + 2]) for start in range(0, len(shuffled), 2)]
    one_by_one = Counts()
    for part in parts:
        for value in part:
            one_by_one.add(np.array([value], np.int64))
    for made in (merged(shuffled), merged(pairs), one_by_one):
        assert as_dict(made) == as_dict(all_at_once)
        assert made.total_ns == all_at_once.total_ns
        assert len(made) == len(all_at_once)


def test_many_values_take_little_room():
    """A place for each value that is different, to the precision, between the smallest and the largest."""
    counts, block = Counts(), np.arange(10**6, 2 * 10**6, dtype=np.int64)
    for _ in range(3):
        counts.add(block)
    assert len(counts) == 3 * len(block)
    assert len(pickle.dumps(counts)) < 8 * 1100


def test_merging_leaves_the_other_as_it_was():
    one, other = counted(1, 2), counted(2, 3)
    one.merge(other)
    one.add(np.array([9], np.int64))
    assert as_dict(other) == {2: 1, 3: 1}
    assert as_dict(one) == {1: 1, 2: 2, 3: 1, 9: 1}
