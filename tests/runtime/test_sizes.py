"""Sizes to pad to: powers of two, within what the model supports and what is known to run."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from asynctrt.runtime.pad_sizes import Sizes, merged

RANGES = some.lists(some.tuples(some.integers(1, 300), some.integers(0, 200)), max_size=3).map(
    lambda found: [(least, least + more) for least, more in found]
)


def test_powers_of_two():
    found = Sizes()
    assert [found.rounded(size) for size in (0, 1, 2, 3, 8, 9, 1000)] == [1, 1, 2, 4, 8, 16, 1024]
    assert found.largest is None


@given(RANGES)
def test_ranges_are_joined(ranges):
    found = merged(ranges)
    assert {n for least, most in found for n in range(least, most + 1)} == {
        n for least, most in ranges for n in range(least, most + 1)
    }
    assert all(one[1] + 1 < other[0] for one, other in pairwise(found))


@given(RANGES, some.integers(1, 700))
def test_a_size_that_the_model_supports_is_found_if_there_is_one(ranges, size):
    found = Sizes(ranges)
    padded = found.rounded(size)
    if not ranges or size <= max(most for _, most in ranges):
        assert padded >= size
        assert not ranges or any(least <= padded <= most for least, most in ranges)
    else:
        assert padded is None


@pytest.mark.parametrize(("size", "padded"), [(5, 8), (40, 64), (65, 77), (77, 77), (78, 78), (300, 300)])
def test_no_row_is_padded_beyond_what_is_known_to_run(size, padded):
    found = Sizes()
    found.proven = 64
    assert found.rounded(70) == 70
    assert found.ran(77)
    assert not found.ran(70)
    assert found.rounded(size) == padded


def test_sizes_are_within_the_profiles():
    ranges = {"n": [(8, 20), (40, 100)], "m": [(1, 30), (40, 80)]}
    sizes = Sizes.within(["n", "m"], ranges.get)
    assert [sizes.rounded(size) for size in (1, 17, 21, 64, 70, 81)] == [8, 20, 40, 64, 80, None]


def test_there_may_be_sizes_between_powers_of_two():
    found = Sizes()
    found.steps = 8
    assert [found.rounded(size) for size in (0, 1, 5, 16, 17, 33, 100, 127)] == [
        1,
        1,
        5,
        16,
        18,
        36,
        104,
        128,
    ]
    assert all(size <= found.rounded(size) <= size * 9 / 8 for size in range(1, 2000))
