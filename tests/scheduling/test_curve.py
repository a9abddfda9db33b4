"""What batches are said to take at most, by what they took."""

import pytest

from asynctrt.scheduling.curve import (
    FORGOTTEN_AFTER,
    MOST_EVERY,
    SAMPLES_MIN,
    SHAPES_MAX,
    WINDOW,
    ServiceCurve,
)


def seen(*sizes, times=SAMPLES_MIN):
    """A curve that has seen batches: rows and how long they took."""
    curve = ServiceCurve()
    for rows, took_ns in sizes:
        for _ in range(times):
            curve.observe("s", rows, took_ns)
    return curve


def told(curve, *sizes):
    return [curve.late_ns("s", rows) for rows in sizes]


def test_nothing_is_said_of_too_few():
    curve = seen((4, 100), times=SAMPLES_MIN - 1)
    assert told(curve, 4) == [None]
    curve.observe("s", 4, 100)
    assert told(curve, 4) == [100]


@pytest.mark.parametrize(
    ("sizes", "rows", "expected"),
    [
        ([(4, 100)], (1, 4, 9), [100, 100, 100]),
        ([(4, 100), (8, 200)], (1, 4, 5, 6, 8, 64), [100, 100, 125, 150, 200, 200]),
        ([(1, 50), (4, 110), (64, 700)], (1, 2, 3, 34), [50, 70, 90, 405]),
        # More rows never take less.
        ([(4, 300), (8, 200)], (4, 6, 8), [300, 300, 300]),
    ],
)
def test_between_known_sizes_it_is_a_line_and_beyond_them_the_nearest(sizes, rows, expected):
    assert told(seen(*sizes), *rows) == expected


def test_it_is_on_the_late_side():
    curve = seen(*[(4, 100)] * 14, (4, 170), (4, 900), times=1)
    assert told(curve, 4) == [170]
    for _ in range(WINDOW):
        curve.observe("s", 4, 80)
    assert told(curve, 4) == [80]


def test_sizes_that_are_alike_say_something_together():
    curve = seen((33, 100), (40, 110), (50, 130), (60, 140), times=1)
    assert told(curve, 40, 60) == [140, 140]


def test_those_that_are_known_by_themselves_need_no_others():
    curve = seen((33, 100), times=SAMPLES_MIN)
    curve.observe("s", 60, 900)
    assert told(curve, 33, 60) == [100, 100]


def test_what_is_not_seen_again_is_forgotten():
    """What is said to take too long is not tried any more."""
    curve = seen((64, 10_000), (1, 50))
    for _ in range(FORGOTTEN_AFTER - SAMPLES_MIN):
        curve.observe("s", 1, 50)
    assert told(curve, 64) == [10_000]
    curve.observe("s", 1, 50)
    assert told(curve, 64) == [50]
    curve.observe("s", 64, 200)
    assert told(curve, 64) == [50], "those that were forgotten do not count"


def test_shapes_are_apart_and_bounded():
    curve = seen((4, 100))
    for number in range(SHAPES_MAX - 1):
        curve.observe(number, 4, 900)
    assert told(curve, 4) == [100]
    curve.observe("one more", 4, 900)
    assert told(curve, 4) == [None]


def test_nothing_that_is_remembered_took_longer():
    curve = seen((4, 100))
    assert curve.most_ns("s") == 100
    assert curve.most_ns("other") is None
    curve.observe("s", 8, 900)
    assert curve.most_ns("s") == 900
    for _ in range(MOST_EVERY + FORGOTTEN_AFTER):
        curve.observe("s", 4, 90)
    assert curve.most_ns("s") == 90, "what was forgotten does not count"
