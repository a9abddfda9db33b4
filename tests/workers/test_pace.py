"""What a front learns from answers: how many groups to form, and which worker is fast."""

import pytest

from asynctrt.workers.pace import FACTOR_MAX, PART_NS_MIN, Pace


def test_rows_are_divided_as_far_as_that_pays():
    pace = Pace(parallel=4)
    assert pace.parts(1000) == 1  # Nothing is known yet.
    for _ in range(200):
        pace.measured(1.0, 8, 8 * PART_NS_MIN // 16)
    assert pace.parts(31) == 1
    assert pace.parts(33) == 2
    assert pace.parts(50) == 3
    assert pace.parts(1000) == 4


@pytest.mark.parametrize("slow", [1.5, 3])
def test_the_slower_of_two_workers(slow):
    pace = Pace(parallel=2)
    factors = [1.0, 1.0]
    for round_ in range(400):
        for worker, times in enumerate((1, slow)):
            for rows in (1, 16 + round_ % 8, 60):  # Sizes alike for both.
                factors[worker] = pace.measured(factors[worker], rows, int(times * (10_000 + 1000 * rows)))
    fast, late = factors
    assert fast < 1 < late
    assert late / fast == pytest.approx(slow, rel=0.1)


def test_workers_with_batches_of_different_sizes_are_alike():
    """One has lone requests, the other whole batches: a row costs thirty times as much in the one."""
    pace = Pace(parallel=2)
    factors = [1.0, 1.0]
    for _ in range(200):
        for worker, rows in enumerate((1, 64)):
            factors[worker] = pace.measured(factors[worker], rows, 50_000_000)
    assert factors == [1.0, 1.0]


def test_a_batch_that_was_held_up_does_not_shut_its_worker_out():
    pace = Pace(parallel=2)
    factor = pace.measured(1.0, 4, 2_000)
    factor = pace.measured(factor, 4, 50_000_000)
    assert factor < 1 + FACTOR_MAX / 10


def test_one_more_row_is_a_part_of_the_largest_batch():
    pace = Pace(parallel=2)
    assert pace.added_row_ns == 0
    pace.measured(1.0, 1, 50_000)
    pace.measured(1.0, 10, 100_000)
    pace.measured(1.0, 1, 90_000)
    assert pace.added_row_ns == 5_000
    for _ in range(300):
        pace.measured(1.0, 10, 200_000)
    assert pace.added_row_ns == pytest.approx(10_000)


def test_batches_without_any_time_or_rows():
    pace = Pace(parallel=2)
    assert pace.measured(1.0, 0, 0) == pace.measured(1.0, 4, 0) == 1.0
    assert pace.parts(64) == 1
