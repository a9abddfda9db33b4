"""MLPerf's rules: a verdict for each that is broken, and early stopping as LoadGen's source says it."""

from functools import cache
from math import exp, lgamma, log, log1p

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt.loadtest.criteria import parse_slo
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.scenarios import RULES, Measured, early_stopping_ns, offline_requests, verdict
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.statistics import surely_below

CONFIDENCE = 0.99


def counted(values):
    counts = Counts()
    counts.add(np.asarray(values, np.int64))
    return counts


# ---- early stopping, as early_stopping.cc and results.cc have it


@cache
def odds(h, t, p):
    """The odds of t or fewer overlatency queries in h + t, if each is within with probability p."""
    n = h + t
    return sum(
        exp(lgamma(n + 1) - lgamma(x + 1) - lgamma(n - x + 1) + (n - x) * log(p) + x * log1p(-p))
        for x in range(t + 1)
    )


@cache
def find_min_passing(t, p):
    """The least h with odds(h, t) within the confidence. It grows with t."""
    h = find_min_passing(t - 1, p) if t else 1
    while not odds(h, t, p) < 1 - CONFIDENCE:
        h += 1
    return h


def loadgen_estimate(latencies, p):
    """EarlyStopping() for single-stream: of the sorted latencies, the one after t were left out."""
    queries_issued = len(latencies)
    t, h_min = 1, find_min_passing(1, p)
    if queries_issued < h_min + 1:
        return None
    for i in range(2, queries_issued + 1):
        if queries_issued < find_min_passing(i, p) + i:
            t = i - 1
            break
    return sorted(latencies)[queries_issued - t]


@pytest.mark.parametrize("percent", [90, 99])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 78, 80, 81, 82, 100, 200, 661, 662, 663, 838, 839, 1500])
def test_the_estimate_is_loadgens(percent, count):
    """Of distinct latencies that the histogram keeps as they are, so that not one rank may be off."""
    latencies = np.random.default_rng(count).permutation(2000)[:count].tolist()
    assert early_stopping_ns(counted(latencies), percent) == loadgen_estimate(latencies, percent / 100)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2000), max_size=300), st.sampled_from([50, 80, 90]))
def test_the_estimate_of_any_latencies_is_loadgens(latencies, percent):
    assert early_stopping_ns(counted(latencies), percent) == loadgen_estimate(latencies, percent / 100)


@pytest.mark.parametrize(
    ("queries", "percent", "discarded"),
    [(7469, 90, 685), (2048, 90, 172), (1_179_125, 99, 11_539), (2_091_550, 99, 20_579)],
)
def test_as_many_are_left_out_as_in_published_results(queries, percent, discarded):
    """Logs of submissions say so: "Would discard 685 highest latency queries", one less than may be over."""
    assert surely_below(queries, discarded + 1, percent, CONFIDENCE)
    assert not surely_below(queries, discarded + 2, percent, CONFIDENCE)
    for slow, estimate in ((discarded + 1, 2000), (discarded, 1)):
        assert early_stopping_ns(counted([1] * (queries - slow) + [2000] * slow), percent) == estimate


@pytest.mark.parametrize(
    ("p", "over", "within"),
    [
        # What LoadGen's early_stopping.cc computes, compiled and run.
        (0.9, 0, 44),
        (0.9, 1, 63),
        (0.9, 10, 187),
        (0.9, 400, 4066),
        (0.99, 0, 459),
        (0.99, 1, 661),
        (0.99, 60, 7993),
        (0.99, 400, 44_481),
        (0.999, 60, 80_555),
    ],
)
def test_the_least_that_pass_are_loadgens(p, over, within):
    assert surely_below(within + over, over, p * 100, CONFIDENCE)
    assert not surely_below(within + over - 1, over, p * 100, CONFIDENCE)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=64, max_size=300))
def test_the_estimate_is_an_upper_bound(latencies):
    counts = counted(latencies)
    assert counts.percentile(90) <= early_stopping_ns(counts, 90) <= counts.nth(len(counts))


def test_the_estimate_is_right_as_often_as_it_says():
    """Of exponential latencies, whose 90th percentile is ln 10: below it in 1% of the runs at the most."""
    rng = np.random.default_rng(1)
    truth = log(10)
    runs = (rng.exponential(1.0, 200) * 1e6 for _ in range(1000))
    wrong = np.mean([early_stopping_ns(counted(run), 90) / 1e6 < truth * 0.999 for run in runs])
    assert wrong <= 0.01 + 5 * (0.01 * 0.99 / 1000) ** 0.5


# ---- rules


def test_the_rules_are_those_of_mlperf_conf():
    assert {name: (rule.percent, rule.seconds_min, rule.rows) for name, rule in RULES.items()} == {
        "single-stream": (90, 600, 1),
        "multi-stream": (99, 600, 8),
        "server": (99, 600, 1),
        "offline": (90, 600, 1),
    }
    assert RULES["multi-stream"].requests_min == 662
    assert RULES["offline"].requests_min == 24_576


@pytest.mark.parametrize(
    ("rate", "seconds", "count"),
    [
        (1000, 600, 660_000),
        (0.5, 600, 24_576),
        (37.2, 600, 24_576),
        (37.5, 600, 24_750),
        ("1000", 600.0, 660_000),
        (1000, 60, 66_000),
        (100, 1, 24_576),
    ],
)
def test_offlines_samples(rate, seconds, count):
    """A tenth more than the expected rate needs for the time, and never fewer than the rules have."""
    assert offline_requests(LoadSettings(scenario="offline", rate=rate), seconds) == count


SERVER = ("p99<15ms",)
SETTLED = {"single-stream": 1000, "multi-stream": 1000, "server": 1000, "offline": 24_576}


def measured(scenario, *, latency_ms=None, seconds=600.0, requests=None, errors=0, throughput=123.4):
    count = SETTLED[scenario] if requests is None else requests
    taken_ms = np.full(count - errors, 2.0) if latency_ms is None else np.asarray(latency_ms, float)
    return Measured(counted(taken_ms * 1e6), seconds, count, errors, throughput)


def judged(scenario, slo=SERVER, **changed):
    return verdict(scenario, measured(scenario, **changed), parse_slo(slo if scenario == "server" else ()))


@pytest.mark.parametrize(
    ("scenario", "result"),
    [
        ("single-stream", {"p90_ms": pytest.approx(2.0, rel=5e-4)}),
        ("multi-stream", {"p99_ms": pytest.approx(2.0, rel=5e-4)}),
        ("server", {"requests_per_s": 123.4}),
        ("offline", {"samples_per_s": 123.4}),
    ],
)
def test_a_valid_run_and_its_result(scenario, result):
    assert judged(scenario) == {"name": scenario, **result, "valid": True, "why": []}


@pytest.mark.parametrize("scenario", sorted(RULES))
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seconds": 599.9}, "it took 599.9 s; the rules demand at least 600"),
        ({"errors": 1}, "1 queries failed or had wrong answers"),
        ({"requests": 63}, "it had 63 queries; the rules demand"),
    ],
)
def test_a_rule_that_is_broken(scenario, changed, says):
    found = judged(scenario, **changed)
    assert not found["valid"]
    assert any(says in why for why in found["why"])


@pytest.mark.parametrize("scenario", sorted(RULES))
def test_just_enough_queries(scenario):
    least = RULES[scenario].requests_min
    said = [why for why in judged(scenario, requests=least)["why"] if "the rules demand" in why]
    assert not said
    said = [why for why in judged(scenario, requests=least - 1)["why"] if "the rules demand" in why]
    assert said == [f"it had {least - 1:,} queries; the rules demand at least {least:,}"]


def test_all_that_is_broken_is_said():
    found = judged("single-stream", seconds=1.0, requests=10, errors=10)
    assert len(found["why"]) == 4
    assert "p90_ms" not in found


@pytest.mark.parametrize(
    ("scenario", "count", "has_estimate"),
    [
        ("single-stream", 63, False),
        ("single-stream", 64, True),
        ("multi-stream", 661, False),
        ("multi-stream", 662, True),
    ],
)
def test_too_few_for_an_estimate(scenario, count, has_estimate):
    found = judged(scenario, requests=count)
    assert any("too few queries to estimate" in why for why in found["why"]) is not has_estimate
    assert (len(found) == 4) is has_estimate


@pytest.mark.parametrize(
    ("slo", "count", "over", "is_valid"),
    [
        (("p99<15ms",), 458, 0, False),  # Too few to be sure, though all of them are within.
        (("p99<15ms",), 459, 0, True),
        (("p99<15ms",), 459, 1, False),
        (("p99<15ms",), 661, 1, False),
        (("p99<15ms",), 662, 1, True),
        (("p99<15ms",), 2010, 10, True),
        (("p99<15ms",), 2010, 11, False),
        (("p99<15ms",), 2010, 20, False),  # p99 itself would hold.
        (("p90<15ms", "throughput>1"), 64, 1, False),  # Enough for p90, but not for the rules:
        (("p90<15ms", "throughput>1"), 100, 1, True),
        (("p99.9<15ms",), 4602, 0, False),
        (("p99.9<15ms,errors<1%",), 4603, 0, True),
    ],
)
def test_servers_target(slo, count, over, is_valid):
    """As many as may be over with 99% confidence, and not one more. An answer in just the time is in time."""
    latency_ms = [15.0] * (count - over) + [15.1] * over
    found = judged("server", slo, latency_ms=latency_ms, requests=count)
    assert found["valid"] is is_valid, found
    assert found["requests_per_s"] == 123.4


def test_server_says_which_target_was_missed():
    found = judged("server", latency_ms=[20.0] * 600, requests=600)
    assert found["why"] == ["p99<15ms: 600 of 600 took longer, too many for 99% confidence"]
