"""What a front learns from answers: how many groups to form."""

import pytest

from asynctrt.workers.pace import PART_NS_MIN, Pace


def test_rows_are_divided_as_far_as_that_pays():
    pace = Pace(parallel=4)
    assert pace.parts(1000) == 1  # Nothing is known yet.
    for _ in range(200):
        pace.measured(8, 8 * PART_NS_MIN // 16)
    assert pace.parts(31) == 1
    assert pace.parts(33) == 2
    assert pace.parts(50) == 3
    assert pace.parts(1000) == 4


def test_one_more_row_is_a_part_of_the_largest_batch():
    pace = Pace(parallel=2)
    assert pace.added_row_ns == 0
    pace.measured(1, 50_000)
    pace.measured(10, 100_000)
    pace.measured(1, 90_000)
    assert pace.added_row_ns == 5_000
    for _ in range(300):
        pace.measured(10, 200_000)
    assert pace.added_row_ns == pytest.approx(10_000)


def test_batches_without_any_time_or_rows():
    pace = Pace(parallel=2)
    pace.measured(0, 0)
    pace.measured(4, 0)
    assert pace.parts(64) == 1
