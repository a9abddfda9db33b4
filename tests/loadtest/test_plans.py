"""From settings to what one process does: times, windows, arrivals, and how much may be on the way."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt.errors import OptionsError
from asynctrt.loadtest.arrivals import Schedule
from asynctrt.loadtest.plans import WINDOWS_MAX, Limit, make_plan
from asynctrt.loadtest.recorder import RunRecorder
from asynctrt.loadtest.samples import Sample
from asynctrt.loadtest.settings import LoadSettings


def sample(rows=1):
    return Sample({}, rows)


def plan(samples=None, rows_max=256, share=0, shares=1, **told):
    return make_plan(LoadSettings(**told), samples or [sample()], rows_max, share, shares)


def due_and_what(schedule):
    blocks = list(schedule.blocks())
    return (
        np.concatenate([block.due_ns for block in blocks]).tolist() if blocks else [],
        np.concatenate([block.samples for block in blocks]).tolist() if blocks else [],
    )


# ---- times


@pytest.mark.parametrize(
    ("told", "warmup", "seconds"),
    [
        ({}, 1.0, 10),
        ({"rate": 5, "seconds": 3, "warmup": 0.5}, 0.5, 3),
        ({"callers": 5, "warmup": 0}, 0, 10),
    ],
)
def test_how_long_to_warm_up_and_to_measure(told, warmup, seconds):
    made = plan(**told)
    assert (made.warmup_ns, made.measured_ns) == (warmup * 1e9, seconds * 1e9)


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(0, 1e5))
def test_windows_cover_exactly_what_is_measured(seconds, warmup):
    """From its first moment to its last, and none of them is empty; also when they are merged in pairs."""
    made = plan(rate=1, seconds=seconds, warmup=warmup)
    count = -(-made.measured_ns // made.window_ns)
    assert (count - 1) * made.window_ns < made.measured_ns <= count * made.window_ns
    # As the recorder has it, which does the counting.
    pairs = 2 ** max(0, math.ceil(math.log2(count / WINDOWS_MAX)))
    assert seconds < 1 or made.measured_ns / made.window_ns / pairs == pytest.approx(-(-count // pairs))
    recorder = RunRecorder(made.warmup_ns, made.window_ns)
    for at_ns in (-1, 0, made.measured_ns - 1):
        recorder.failed(made.warmup_ns + at_ns, "Error", "")
    assert set(recorder.take()) == {-1, 0, count - 1}


@pytest.mark.parametrize(
    ("seconds", "window_s"),
    [(10, 0.25), (0.25, 0.25), (0.1, 0.1), (1.1, 0.22), (600, 0.25), (600.1, 600.1 / 2432)],
)
def test_windows(seconds, window_s):
    assert plan(seconds=seconds).window_ns == pytest.approx(window_s * 1e9)


# ---- closed loops


def test_callers_over_the_whole_time():
    made = plan(callers="1..9", seconds=3, warmup=1)
    assert made.schedule is None
    assert (made.callers.ends_s[-1], made.callers.at(0), made.callers.at(4)) == pytest.approx(
        (4, 1, 9), abs=0.01
    )


# ---- open loops


def test_arrivals_over_the_whole_time():
    samples = [sample(), sample()]
    made = plan(samples, rate="100,300", seconds=3, warmup=1, seed=5, arrivals="constant")
    assert isinstance(made.schedule, Schedule)
    assert made.schedule.process == "constant"
    assert made.schedule.samples == 2
    assert made.schedule.seed == made.seed == 5
    assert made.callers is None
    due_ns, what = due_and_what(made.schedule)
    assert len(due_ns) == 2 * 100 + 2 * 300
    assert set(what) == {0, 1}
    assert due_ns[-1] < made.warmup_ns + made.measured_ns


@pytest.mark.parametrize(
    ("told", "is_level"),
    [
        ({}, True),
        ({"callers": "1,2"}, False),
        ({"callers": "1..2"}, False),
        ({"rate": 100}, True),
        ({"rate": "1..2"}, False),
    ],
)
def test_whether_it_is_meant_to_be_level(told, is_level):
    assert plan(**told).is_level is is_level


# ---- limits


@pytest.mark.parametrize(
    ("told", "rows", "rows_max", "expected"),
    [
        ({"rate": 100}, [1], 256, 256),
        ({"rate": 100}, [4], 256, 64),
        ({"rate": 100}, [1, 100], 256, 2),  # Any of them may be the largest.
        ({"rate": 100}, [300], 256, 1),
        # A caller waits for an answer, and not for room.
        ({"callers": 64}, [1], 256, 256),
        ({"callers": 1000}, [1], 256, 1000),
        ({"callers": "1,500,20"}, [8], 256, 500),
    ],
)
def test_how_much_may_be_on_the_way(told, rows, rows_max, expected):
    assert plan([sample(item) for item in rows], rows_max, **told).limit.requests == expected


@pytest.mark.parametrize("rate", [1, 100, 5000, "10..300"])
def test_to_a_server_as_many_as_can_be_due_before_the_first_is_given_up(rate):
    """So that a slow server never keeps the generator from sending."""
    made = plan(rows_max=None, rate=rate, answer_timeout=2.0, seconds=20.0)
    due_ns, _ = due_and_what(made.schedule)
    within = np.searchsorted(due_ns, np.array(due_ns) + 2_000_000_000) - np.arange(len(due_ns))
    assert within.max() <= made.limit.requests <= within.max() + 12 * within.max() ** 0.5 + 20
    assert not made.limit.is_void


def test_a_limit_of_this_machine_is_kept_and_said():
    room = Limit(50, "a process may have 114 open files")
    told = LoadSettings(rate=1000)
    made = make_plan(told, [sample()], None, 0, 2, room=room)
    assert made.limit.requests == 100
    assert made.limit.is_void
    assert "114 open files" in made.limit.why
    with pytest.raises(OptionsError, match="101 callers are too many for 2 .*114 open files"):
        make_plan(LoadSettings(callers=101), [sample()], None, 0, 2, room=room)


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 5000))
def test_something_may_always_be_on_the_way(rows_max, rows, callers):
    """And no more rows than the target bears, unless callers ask for it, or one request has more."""
    samples = [sample(rows)]
    in_open = plan(samples, rows_max, rate=1).limit.requests
    assert in_open == max(1, rows_max // rows)
    assert plan(samples, rows_max, callers=callers).limit.requests == max(in_open, callers)


@pytest.mark.parametrize("is_server", [False, True])
def test_how_it_waits(is_server):
    """So that an engine in this process has the interpreter to itself."""
    room = Limit(10**6) if is_server else None
    made = make_plan(LoadSettings(rate=1), [sample()], 256, room=room)
    assert (made.near_ns > 0) is is_server


def test_what_the_settings_say_is_in_the_plan():
    told = {"think": 0.5, "answer_timeout": 2.5, "requests": 100, "seed": 9, "rtol": 0.1, "atol": 0.2}
    made = plan(callers=3, share=1, shares=3, **told)
    assert (made.think, made.timeout_ns, made.requests_max) == (0.5, 2_500_000_000, 100)
    assert (made.seed, made.rtol, made.atol) == (9, 0.1, 0.2)
    assert (made.share, made.shares) == (1, 3)


def test_rows_are_those_that_are_sent():
    """On average, and not those that the settings have for requests that are made up."""
    mixed = [sample(1), sample(1), sample(1), sample(5)]
    assert plan(mixed, rate=10, rows=7).rows == 2.0
    assert plan(mixed, callers=2).rows == 2.0
