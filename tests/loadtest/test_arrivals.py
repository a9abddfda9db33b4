"""Arrivals against the theory of their process, with a fixed seed, and against exact arithmetic.

Counts of a Poisson process are within 5 of its standard deviations: one in two million would be outside by
chance, and with a fixed seed none is.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt.errors import OptionsError
from asynctrt.loadtest.arrivals import (
    BLOCK,
    KNOTS,
    RATE_MAX,
    Arrivals,
    LoadProfile,
    Schedule,
    parse_stages,
)

SIGMAS = 5


def schedule(rate, seconds, process="poisson", seed=1, samples=1):
    profile = rate if isinstance(rate, LoadProfile) else LoadProfile.parse(str(rate), seconds)
    return Schedule(process, profile, samples, seed)


def gathered(blocks):
    """All blocks as one."""
    found = list(blocks)
    empty = np.zeros(0, np.int64)
    return Arrivals(
        np.concatenate([empty, *(block.due_ns for block in found)]),
        np.concatenate([empty, *(block.samples for block in found)]),
    )


def integral(profile, start_s, end_s):
    """Of the level, piece by piece."""
    total, begin = 0.0, 0.0
    for end, level in zip(profile.ends_s.tolist(), profile.levels.tolist(), strict=True):
        total += level * max(0.0, min(end, end_s) - max(begin, start_s))
        begin = end
    return total


def counts_in(due_ns, edges_s):
    return np.histogram(due_ns / 1e9, edges_s)[0]


def assert_poisson(found, expected):
    """Counts of pieces that are independent of each other."""
    for count, mean in zip(found, expected, strict=True):
        assert abs(count - mean) <= SIGMAS * max(mean, 1.0) ** 0.5, (found, expected)


def assert_exponential(found, mean):
    """Gaps have an exponential distribution."""
    from scipy.stats import kstest  # It takes half a second, which each process of the tests would spend.

    assert kstest(found, "expon", args=(0, mean)).pvalue > 0.01


# ---- processes


def test_gaps_of_a_poisson_process_are_exponential():
    due_ns = gathered(schedule(1000, 100).blocks()).due_ns
    gaps_s = np.diff(due_ns) / 1e9
    assert len(gaps_s) > 10 * BLOCK
    assert_exponential(gaps_s, 1 / 1000)
    # One gap says nothing about the next.
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < SIGMAS / len(gaps_s) ** 0.5


def test_the_gap_between_two_blocks_is_like_any_other():
    gaps_s = []
    for seed in range(400):
        blocks = schedule(1000, 10, seed=seed).blocks()
        first, second = next(blocks), next(blocks)
        gaps_s.append((second.due_ns[0] - first.due_ns[-1]) / 1e9)
    assert_exponential(gaps_s, 1 / 1000)


@pytest.mark.parametrize("rate", [0.5, 20, 3000])
def test_counts_of_a_poisson_process_have_its_mean_and_variance(rate):
    counts = [len(gathered(schedule(rate, 10, seed=seed).blocks()).due_ns) for seed in range(200)]
    mean = rate * 10
    assert np.mean(counts) == pytest.approx(mean, abs=SIGMAS * (mean / 200) ** 0.5)
    # The variance of a variance: 2 / (n - 1) of its square, and a little more for few arrivals.
    assert np.var(counts, ddof=1) == pytest.approx(mean, rel=SIGMAS * (2 / 199 + 1 / mean / 200) ** 0.5)


@pytest.mark.parametrize("rate", [1, 7, 1000])
def test_constant_arrivals_are_even(rate):
    due_ns = gathered(schedule(rate, 5, "constant").blocks()).due_ns
    exact = [int((number + 0.5) / rate * 1e9) for number in range(5 * rate)]
    assert due_ns.tolist() == pytest.approx(exact, abs=1)


@settings(deadline=None)
@given(st.integers(1, 5000), st.sampled_from([0.001, 0.25, 1.0, 3.7]))
def test_constant_arrivals_are_as_many_as_there_is_time_for(rate, seconds):
    """The first comes half a gap after the start, and the last half a gap before the end."""
    due_ns = gathered(schedule(rate, seconds, "constant").blocks()).due_ns
    assert abs(len(due_ns) - rate * seconds) <= 0.5 + 1e-9
    assert not len(due_ns) or 0 <= due_ns[0] <= due_ns[-1] < seconds * 1e9


@pytest.mark.parametrize("process", ["poisson", "constant"])
@pytest.mark.parametrize("text", ["20000", "100..30000", "0,60000,10"])
@pytest.mark.parametrize("shares", [2, 3, 7])
def test_the_shares_of_processes_are_one_schedule(process, text, shares):
    """Every request is sent by exactly one of them, at the same time and with the same sample."""
    one = schedule(text, 2, process, samples=3)
    whole = gathered(one.blocks())
    assert len(whole.due_ns) > 3 * BLOCK  # Whose turn it is goes on from block to block.
    parts = [gathered(one.blocks(share, shares)) for share in range(shares)]
    for share, part in enumerate(parts):
        assert part.due_ns.tolist() == whole.due_ns[share::shares].tolist()
        assert part.samples.tolist() == whole.samples[share::shares].tolist()


@pytest.mark.parametrize("text", ["2500", "100..2000", "10,0,500"])
def test_the_same_seed_is_the_same_schedule(text):
    def made(seed, samples=2):
        return gathered(schedule(text, 3, seed=seed, samples=samples).blocks())

    first, again, other = made(7), made(7), made(8)
    assert first.due_ns.tolist() == again.due_ns.tolist()
    assert first.samples.tolist() == again.samples.tolist()
    assert first.due_ns.tolist() != other.due_ns.tolist()
    # When a request comes does not depend on what there is to send.
    assert made(7, samples=1).due_ns.tolist() == first.due_ns.tolist()


def test_blocks_are_short_and_in_order():
    blocks = list(schedule(5000, 2, samples=2).blocks())
    assert all(0 < len(block.due_ns) == len(block.samples) <= BLOCK for block in blocks)
    assert all(block.due_ns.dtype == block.samples.dtype == np.int64 for block in blocks)
    due_ns = gathered(blocks).due_ns
    assert (np.diff(due_ns) >= 0).all()
    assert 0 <= due_ns[0] < due_ns[-1] < 2e9


def test_each_sample_is_sent_as_often_as_another():
    samples = gathered(schedule(5000, 10, samples=4).blocks()).samples
    for count in np.bincount(samples, minlength=4):
        assert abs(count - len(samples) / 4) <= SIGMAS * (len(samples) * 3 / 16) ** 0.5
    assert not gathered(schedule(100, 1).blocks()).samples.any()


# ---- profiles


@pytest.mark.parametrize(
    ("text", "times", "levels", "total"),
    [
        ("1000", (0, 5, 10, 20), (1000, 1000, 1000, 1000), 10_000),
        ("0.5", (0, 10), (0.5, 0.5), 5),
        ("1e3", (0,), (1000,), 10_000),
        (" 100 , 200 ", (1, 6), (100, 200), 1500),
        ("100,500,0,1000", (0, 2.4, 2.6, 6, 9, 10, 11), (100, 100, 500, 0, 1000, 1000, 1000), 4000),
        ("100..2000", (0, 5, 10), (100, 1050, 2000), 10_500),
        ("2000..0", (0, 5, 10), (2000, 1000, 0), 10_000),
    ],
)
def test_levels_over_the_time(text, times, levels, total):
    profile = LoadProfile.parse(text, 10)
    # A ramp is of pieces: at a knot it is half of one off.
    reach = 2000 / KNOTS if ".." in text else 0
    assert [profile.at(time) for time in times] == pytest.approx(list(levels), abs=reach)
    assert (profile.ends_s[-1], profile.total) == pytest.approx((10, total), rel=1e-12)
    assert profile.largest == pytest.approx(max(levels), abs=reach)


@pytest.mark.parametrize("text", ["0", "0,0", "0..0", "1e9", "1,1e9", "1..1e9", "1e400", "0.0"])
def test_a_rate_that_is_none_or_too_high(text):
    with pytest.raises(OptionsError, match="must be above 0 and at most 100,000,000") as caught:
        LoadProfile.parse(text, 10)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1",
        "+1",
        "nan",
        "inf",
        "1,",
        ",1",
        "1,,2",
        "1..",
        "..1",
        "1..2..3",
        "1..2..3,4",
        "True",
        "1@",
        "1@5",
        "1@0s",
        "1@x",
        "@5s",
        "1@5s@5s",
    ],
)
def test_what_is_no_rate(text):
    with pytest.raises(
        OptionsError, match="is not a rate or a number of callers: write 1000, a ramp"
    ) as caught:
        LoadProfile.parse(text, 10)
    assert repr(text) in str(caught.value)


def test_stages_may_have_lengths_of_their_own():
    profile = LoadProfile.parse("100@30s, 100..500@1m,500@500ms", 90.5)
    assert parse_stages("100@30s,100..500@1m,500@500ms")[1] == 90.5
    assert profile.ends_s[-1] == pytest.approx(90.5)
    assert [profile.at(time) for time in (0, 29.9, 90.2)] == [100, 100, 500]
    assert profile.at(60) == pytest.approx(300, rel=0.01)
    assert profile.total == pytest.approx(30 * 100 + 60 * 300 + 0.5 * 500)


def test_the_warm_up_before_stages_is_at_their_first_level():
    profile = LoadProfile.parse("100..200@10s,50@10s", 21)
    assert [profile.at(time) for time in (0.0, 0.9, 20.9)] == [100, 100, 50]
    assert profile.at(6) == pytest.approx(150, rel=0.01)
    assert profile.ends_s[-1] == pytest.approx(21)
    assert LoadProfile.parse("100@10s", 11).levels.tolist() == [100.0]  # One level, which may become steady.


def test_stages_of_equal_length_may_be_ramps():
    profile = LoadProfile.parse("1..2,3", 10)
    assert (profile.at(2.5), profile.at(7)) == (pytest.approx(1.5, rel=0.01), 3)
    assert parse_stages("1..2,3")[1] is None


def test_every_stage_has_a_length_or_none():
    with pytest.raises(OptionsError, match="give every stage a length, as in 100@30s,500@1m, or none"):
        LoadProfile.parse("1@5s,2", 10)


@settings(deadline=None)
@given(st.text(st.sampled_from("0123456789.,e-+ nax"), max_size=12))
def test_any_text_is_a_rate_or_refused(text):
    try:
        profile = LoadProfile.parse(text, 10)
    except OptionsError:
        return
    assert 0 < profile.largest <= RATE_MAX
    assert 0 < profile.total < math.inf
    assert profile.ends_s[-1] == pytest.approx(10)


levels = st.lists(st.floats(0, 1e5), min_size=1, max_size=8).filter(lambda given: max(given) > 1e-3)


@settings(deadline=None)
@given(levels, st.floats(0.01, 1e4), st.data())
def test_times_are_the_inverse_of_sums(given_levels, seconds, data):
    profile = LoadProfile.parse(",".join(f"{level:f}" for level in given_levels), seconds)
    sums = np.array(sorted(data.draw(st.lists(st.floats(0, 1), max_size=20)))) * profile.total
    times = profile.times_s(sums)
    assert (np.diff(times) >= 0).all()
    assert ((times >= 0) & (times <= profile.ends_s[-1])).all()
    again = [integral(profile, 0, time) for time in times]
    assert again == pytest.approx(sums.tolist(), rel=1e-9, abs=1e-9 * profile.total)


@pytest.mark.parametrize("process", ["poisson", "constant"])
@pytest.mark.parametrize("text", ["2000", "100..4000", "4000..0", "500,3000,0,1500", "0..100"])
def test_as_many_as_the_integral_in_every_piece(process, text):
    profile = LoadProfile.parse(text, 8)
    due_ns = gathered(schedule(profile, 8, process).blocks()).due_ns
    edges = np.linspace(0, 8, 17)
    expected = [integral(profile, start, end) for start, end in pairwise(edges)]
    found = counts_in(due_ns, edges)
    if process == "constant":
        assert found.tolist() == pytest.approx(expected, abs=1 + 1e-6)
    else:
        assert_poisson(found, expected)
