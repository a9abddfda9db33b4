"""How sure a figure is: against textbook values, exact sums, and how often an interval has the truth in it.

Shares of a simulation are within 5 standard deviations of a binomial of theirs; the seeds are fixed.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit

from asynctrt.loadtest.statistics import (
    CONFIDENCE,
    interval,
    requests_least,
    student_t,
)

SIGMAS = 5


# ---- intervals


@pytest.mark.parametrize(
    ("values", "mean", "half_width"),
    [
        # Student's t at 97.5%: 12.70620 for one degree of freedom, 4.302653 for 2, 2.776445 for 4.
        ([1, 3], 2, 12.70620),
        ([1, 2, 3], 2, 4.302653 / 3**0.5),
        ([2, 4, 4, 4, 6], 4, 2.776445 * 2**0.5 / 5**0.5),
        ([5, 5, 5], 5, 0),
        ([-1, 1], 0, 12.70620),
    ],
)
def test_an_interval_is_students(values, mean, half_width):
    made = interval(values)
    assert (made.mean, made.count) == (mean, len(values))
    assert made.high - made.mean == pytest.approx(half_width, rel=2e-3)
    assert made.mean - made.low == pytest.approx(half_width, rel=2e-3)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 1000])
def test_students_t(freedom):
    assert student_t(freedom) == pytest.approx(float(stdtrit(freedom, 0.975)), rel=2e-3)


@pytest.mark.parametrize("values", [[], [3.0]])
def test_one_value_has_no_interval(values):
    assert interval(values) is None


# ---- how many may be over


@pytest.mark.parametrize(
    ("percent", "least"), [(50, 5), (90, 29), (95, 59), (99, 299), (99.9, 2995), (99.99, 29_956)]
)
def test_the_requests_that_a_percentile_needs(percent, least):
    assert requests_least(percent) == least


@settings(deadline=None)
@given(st.floats(1, 99.99))
def test_the_largest_of_so_many_bounds_the_percentile(percent):
    """With 95%: one of them is beyond it, unless all are within. With one less, not so."""
    least = requests_least(percent)
    assert (percent / 100) ** least <= (1 - CONFIDENCE) * (1 + 1e-9)
    assert (percent / 100) ** (least - 1) >= (1 - CONFIDENCE) * (1 - 1e-9)
