"""What a load test can be told, and what it cannot: every setting has a value that is refused by its name."""

import contextlib
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt._util.validation import docs_of
from asynctrt.errors import OptionsError
from asynctrt.loadtest.settings import (
    CALLERS_DEFAULT,
    CALLERS_MAX,
    PROCESSES_MAX,
    LoadSettings,
)

NAN, INF = float("nan"), float("inf")

IMPOSSIBLE = {
    "rate": ["0", 0, 0.0, -1, "-1", "1e9", 1e9, NAN, INF, "fast", "", "1..", True, [100], (1, 2), 1j],
    "callers": [
        "0",
        0,
        -1,
        0.5,
        "0.5",
        1.5,
        "2.5",
        "1.5..4",
        CALLERS_MAX + 1,
        f"1..{2 * CALLERS_MAX}",
        "many",
        "",
        True,
        [3],
    ],
    "think": [-0.1, 3601, NAN, "1", None, True],
    "arrivals": ["even", None, "Poisson", ["poisson"]],
    "seconds": [0, -1, 1e6 + 1, NAN, INF, "10", True],
    "warmup": [-0.1, 1e5 + 1, NAN, INF, None, "1"],
    "requests": [0, -1, 1.5, "10", True],
    "repeats": [0, -1, 2.5, "3", True],
    "answer_timeout": [0, -1, 3601, NAN, INF, None, "10"],
    "slo": ["p99", "p98<1ms", "p99<1", "p99<+1%", ("p99<1ms", ""), 5, [5], None],
    "rows": [0, -1, 1.5, "8", None, True],
    "dims": [5, [5], None, b"length=3"],
    "inputs": [5, b"rows.npz", ["rows.npz"]],
    "samples": [0, -1, 1.5, "8", None, True],
    "expect": [5, b"answers.npz"],
    "rtol": [-0.1, NAN, None, "0.1"],
    "atol": [-0.1, NAN, None, "0.1"],
    "processes": [0, -1, 1.5, "2", None, True, PROCESSES_MAX + 1],
    "seed": [-1, 1.5, "0", None, True],
}
"""By the name of the setting."""

SAID_SO = {
    "rate": r"rate",
    "callers": r"callers",
    "slo": r"criterion|figure|unit|target|slo",
    "arrivals": r"arrivals",
}
"""Where the message names it in its own words."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}={value!r}")
        for name, values in IMPOSSIBLE.items()
        for value in values
    ],
)
def test_an_impossible_value_is_refused_by_the_settings_name(name, value):
    with pytest.raises(OptionsError, match=SAID_SO.get(name, name)):
        LoadSettings(**{name: value})


def test_every_setting_has_an_impossible_value():
    assert set(IMPOSSIBLE) == {item.name for item in dataclasses.fields(LoadSettings)}


def test_every_setting_is_explained():
    texts = docs_of(LoadSettings)
    assert set(texts) == {item.name for item in dataclasses.fields(LoadSettings)}
    assert all(text.endswith(".") for text in texts.values())


def test_the_usual_settings():
    usual = LoadSettings()
    assert not usual.is_open
    assert LoadSettings(rate=3).is_open
    assert usual.profile(10).levels.tolist() == [CALLERS_DEFAULT] == [64]
    assert (usual.rows, usual.samples, usual.processes, usual.seed) == (1, 64, 1, 0)
    assert (usual.warmup, usual.answer_timeout) == (1, 10)
    assert usual.criteria == ()
    assert (
        LoadSettings(**{item.name: getattr(usual, item.name) for item in dataclasses.fields(usual)}) == usual
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        usual.rate = 3


@pytest.mark.parametrize(
    "settings",
    [
        {"rate": 1},
        {"rate": 0.5},
        {"rate": "100..2000"},
        {"rate": "100,500,1000", "arrivals": "constant"},
        {"rate": np.float64(12.5)},
        {"rate": np.int64(12), "rows": np.int64(8), "seed": np.int64(3)},
        {"rate": 1e8},
        {"callers": 1},
        {"callers": CALLERS_MAX},
        {"callers": "1..500", "think": 0.5},
        {"callers": "10,100"},
        {"seconds": 0.1, "warmup": 0},
        {"seconds": 1e6, "warmup": 1e5, "answer_timeout": 3600, "think": 3600},
        {"seconds": np.int64(5), "think": np.float32(0.5)},
        {"requests": 1, "repeats": 7},
        {"repeats": 2, "slo": ["p99<20ms,errors<1%", "throughput>5"]},
        {"inputs": "rows.npz", "expect": "answers.npz", "rtol": 0, "atol": 0},
        {"processes": PROCESSES_MAX},
    ],
)
def test_what_is_possible(settings):
    made = LoadSettings(**settings)
    assert dataclasses.replace(made) == made


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rate": 1, "callers": 1}, "rate is for an open loop and callers for a closed loop"),
        ({"rate": 1, "think": 0.1}, "think is the pause of a caller"),
        ({"expect": "e"}, "expect has the answers to the rows of inputs"),
    ],
)
def test_settings_that_are_at_odds(settings, says):
    with pytest.raises(OptionsError) as caught:
        LoadSettings(**settings)
    assert says in str(caught.value)


def test_texts_and_lists_become_tuples_and_paths():
    made = LoadSettings(slo="p99<20ms", inputs="rows.npz", expect="e.npz")
    assert made.slo == ("p99<20ms",)
    assert (made.inputs, made.expect) == (Path("rows.npz"), Path("e.npz"))
    assert LoadSettings(dims="length=3").dims == ("length=3",)
    assert LoadSettings(dims=(f"length={size}" for size in (3, 4))).dims == ("length=3", "length=4")
    assert [str(item) for item in made.criteria] == ["p99<20ms"]
    assert hash(made) == hash(dataclasses.replace(made))


@settings(deadline=None)
@given(st.floats(1e-3, 1e8), st.floats(0.01, 1e4))
def test_a_rate_as_a_number_is_that_rate(rate, seconds):
    """To the millionth of a request a second."""
    for given_rate in (rate, np.float64(rate)):
        made = LoadSettings(rate=given_rate).profile(seconds)
        assert made.largest == pytest.approx(rate, abs=1e-6)
        assert made.total == pytest.approx(rate * seconds, rel=1e-3)


@settings(deadline=None)
@given(st.integers(1, CALLERS_MAX))
def test_callers_as_a_number_and_as_a_text(callers):
    for given_callers in (callers, str(callers), np.int64(callers)):
        assert LoadSettings(callers=given_callers).profile(1).largest == callers


@settings(deadline=None)
@given(
    st.sampled_from([item.name for item in dataclasses.fields(LoadSettings)]),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=3),
        st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=3),
        st.just(object()),
        st.just(math),
    ),
)
def test_any_value_is_taken_or_refused(name, value):
    """And with nothing but an OptionsError."""
    with contextlib.suppress(OptionsError):
        LoadSettings(**{name: value})
