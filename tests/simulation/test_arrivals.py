"""Simulated arrivals: rates, mixes, traces, and what is wrong with them."""

from collections import Counter

import numpy as np
import pytest

from asynctrt.errors import OptionsError, UsageError
from asynctrt.scheduling.key import FIXED_SHAPE, BatchKey
from tests.simulation.arrivals import Arrival, Mix, parse_load, parse_mix

MIX = Mix()


def load(text, seconds=10.0, mix=MIX, seed=1, speed=1.0):
    return list(parse_load(text, seconds, mix, seed, speed).arrivals())


@pytest.mark.parametrize(
    "text", ["poisson:500", "constant:500", "bursts:500,period=0.5", "day:500,swing=0.9"]
)
def test_a_rate_is_kept_and_a_seed_repeats_itself(text):
    found = load(text)
    assert found == load(text)
    assert len(found) == pytest.approx(5000, rel=0.3 if text.startswith("bursts") else 0.1)
    times = [arrival.due_ns for arrival in found]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 10 * 10**9
    assert text.startswith("constant") or found != load(text, seed=2)


def test_bursts_are_burstier_and_a_day_rises_and_falls():
    def spread(text, pieces):
        times = np.array([arrival.due_ns for arrival in load(text, 100.0)])
        counts = np.histogram(times, pieces, (0, 100e9))[0]
        return counts.var() / counts.mean()

    assert spread("bursts:200,factor=8,period=1", 1000) > 5 * spread("poisson:200", 1000)
    assert spread("day:200,swing=0.9", 10) > 5 * spread("poisson:200", 10)


def test_requests_are_mixed_by_weight():
    mix = Mix(
        parse_mix("1@3,8", "rows", is_whole=True),
        [(BatchKey("short"), 1.0), (BatchKey("long"), 1.0)],
        [(0, 9.0), (2, 1.0)],
        timeout_ns=5,
        cancel_share=0.5,
        patience_ns=1000,
    )
    found = load("poisson:1000", mix=mix)
    rows = Counter(arrival.rows for arrival in found)
    assert rows[1] == pytest.approx(3 * rows[8], rel=0.1)
    assert {arrival.key.shape for arrival in found} == {"short", "long"}
    assert {arrival.priority for arrival in found} == {0, 2}
    assert {arrival.timeout_ns for arrival in found} == {5}
    leaving = [arrival.patience_ns for arrival in found if arrival.patience_ns is not None]
    assert len(leaving) == pytest.approx(len(found) / 2, rel=0.1)
    assert np.mean(leaving) == pytest.approx(1000, rel=0.1)


def test_a_trace_says_what_comes_when(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("time,rows,shape,priority,deadline,length\n5.5,2,a,1,0.25,128\n5,,,,,\n7,3,,0,,64\n")
    found = load(str(path), speed=2.0)
    assert found == [
        Arrival(0, 1, FIXED_SHAPE, 0, None),
        Arrival(250_000_000, 2, BatchKey("a,length=128"), 1, 250_000_000),
        Arrival(1_000_000_000, 3, BatchKey("length=64"), 0, None),
    ]
    made = parse_load(str(path), 10.0, MIX, 0)
    assert (made.seconds, made.expected, made.rows_max, made.priority_max) == (2.0, 3, 3, 1)
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"time": 1, "rows": 4}\n\n{"time": 2.5, "deadline": 1}\n')
    assert [arrival[:2] for arrival in load(str(lines))] == [(0, 4), (1_500_000_000, 1)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no entries: it needs a header with time"),
        ("time\n", "has no entries"),
        ("when\n1\n", "line 2: there is no time, in seconds; the columns are time, rows"),
        ("time\n1\nx\n", "line 3: time must be a number from 0"),
        ("time\n-1\n", "line 2: time must be a number from 0"),
        ("time\nnan\n", "line 2: time must be a number"),
        ("time,rows\n1,0\n", "line 2: rows must be a whole number"),
        ("time,rows\n1,1.5\n", "line 2: rows must be a whole number"),
        ("time,priority\n1,0.5\n", "line 2: priority must be a whole number"),
        ("time,deadline\n1,soon\n", "line 2: deadline must be a number"),
        ("time,length\n1,long\n", "line 2: length must be a number"),
        ("time\n1,2\n", "line 2: there are more values than names"),
        ('{"time": 1}\n{"time": }\n', "line 2 is not JSON"),
        ('{"time": 1}\n[]\n', "line 2: [] is not an object"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path, content, says):
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(OptionsError) as caught:
        load(str(path))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("poisson:", "is not a rate"),
        ("poisson:-1", "is not a rate"),
        ("poisson:1e12", "at most 100,000,000"),
        ("poisson:10,share=1", "unknown value 'share'; valid values for poisson: none"),
        ("bursts:10,size=1", "valid values for bursts: factor, share, period"),
        ("bursts:10,factor=x", "factor must be a number above 1"),
        ("bursts:10,factor=20,share=0.1", "factor * share must be below 1"),
        ("day:10,swing=2", "swing must be a number above 0 and below 1"),
    ],
)
def test_a_bad_rate_is_refused(text, says):
    with pytest.raises(OptionsError) as caught:
        load(text)
    assert says in str(caught.value)


def test_what_is_neither_a_rate_nor_a_file_is_told_both():
    with pytest.raises(UsageError, match=r"'poison:100' cannot be read.*poisson:RATE"):
        load("poison:100")


@pytest.mark.parametrize("text", ["", "a", "1@0", "1@x", "1,,2", "1@-1"])
def test_a_bad_mix_is_refused(text):
    with pytest.raises(OptionsError, match="write 1, or 1@3,8"):
        parse_mix(text, "rows", is_whole=True)
