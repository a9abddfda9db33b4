"""What a run is held to: what each text says, which texts say nothing, and what is compared with what."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt.errors import OptionsError
from asynctrt.loadtest.criteria import (
    FIGURES,
    Criterion,
    latency_target_ms,
    parse_slo,
)


@pytest.mark.parametrize(
    ("text", "figure", "sign", "limit", "is_relative"),
    [
        ("p99<20ms", "p99", "<", 20, False),
        ("p99.9<2s", "p99.9", "<", 2000, False),
        ("p99.99<1.5ms", "p99.99", "<", 1.5, False),
        ("p50<250us", "p50", "<", 0.25, False),
        ("p50<250µs", "p50", "<", 0.25, False),
        ("mean>7ms", "mean", ">", 7, False),
        ("max<1s", "max", "<", 1000, False),
        (" p99 < 20 ms ", "p99", "<", 20, False),
        ("errors<0.1%", "errors", "<", 0.001, False),
        ("errors<0.1", "errors", "<", 0.1, False),
        ("throughput>1000", "throughput", ">", 1000, False),
        ("goodput<12.5", "goodput", "<", 12.5, False),
        ("p99>+10%", "p99", ">", 0.1, True),
        ("throughput<-5%", "throughput", "<", -0.05, True),
        ("errors>+0%", "errors", ">", 0, True),
    ],
)
def test_what_a_text_says(text, figure, sign, limit, is_relative):
    made = Criterion.parse(text)
    assert (made.figure, made.sign, made.is_relative) == (figure, sign, is_relative)
    assert made.limit == pytest.approx(limit, rel=1e-12)
    assert str(made) == text.strip()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a criterion"),
        ("p99", "is not a criterion"),
        ("p99=20ms", "is not a criterion"),
        ("p99<=20ms", "is not a criterion"),
        ("p99<ms", "is not a criterion"),
        ("p99<nan", "is not a criterion"),
        ("p99<-", "is not a criterion"),
        ("p99<1e3ms", "is not a criterion"),
        ("p99<20ms errors<1%", "is not a criterion"),
        ("P99<20ms", "is not a criterion"),
        ("p98<20ms", "unknown figure 'p98'; valid figures: p50, p90"),
        ("latency<20ms", "unknown figure 'latency'"),
        ("p99<20", "a latency needs a unit: us, µs, ms, s"),
        ("p99<20m", "a latency needs a unit"),
        ("p99<20%", "a latency needs a unit"),
        ("throughput>1000ms", "throughput does not take the unit 'ms'"),
        ("throughput>10%", "throughput does not take the unit '%'"),
        ("errors<5ms", "errors does not take the unit 'ms'"),
        ("p99>+10", "must be in percent, as in p99>+10%"),
        ("p99>-10ms", "must be in percent"),
    ],
)
def test_what_is_no_criterion(text, says):
    with pytest.raises(OptionsError) as caught:
        Criterion.parse(text)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.tier2
@settings(deadline=None)
@given(st.text(max_size=20))
def test_any_text_is_a_criterion_or_refused(text):
    try:
        made = Criterion.parse(text)
    except OptionsError:
        return
    assert made.figure in FIGURES
    assert not math.isnan(made.limit)


@pytest.mark.parametrize(
    ("text", "value", "baseline", "is_true"),
    [
        ("p99<20ms", 19.999, None, True),
        ("p99<20ms", 20.0, None, False),
        ("p99>20ms", 20.0, None, False),
        ("p99>20ms", 20.001, None, True),
        ("errors<1%", 0.0, None, True),
        ("errors<0%", 0.0, None, False),
        ("p99>+10%", 11.1, 10.0, True),
        ("p99>+10%", 10.9, 10.0, False),
        ("p99>+10%", 9.0, 10.0, False),
        ("throughput<-5%", 94.0, 100.0, True),
        ("throughput<-5%", 96.0, 100.0, False),
        ("throughput<-5%", 120.0, 100.0, False),
        ("errors>+10%", 0.0, 0.0, False),  # Nothing has changed, though there is no share of nothing.
        ("errors>+10%", 0.001, 0.0, True),
        ("errors>+0%", 0.0, 0.0, False),
    ],
)
def test_what_is_compared_with_what(text, value, baseline, is_true):
    assert Criterion.parse(text).compare(value, baseline) is is_true


def test_several_targets_in_one_text_or_in_many():
    together = parse_slo(["p99<20ms, errors<1%", "throughput>100"])
    assert together == parse_slo(["p99<20ms", "errors<1%", "throughput>100"])
    assert [str(item) for item in together] == ["p99<20ms", "errors<1%", "throughput>100"]
    assert parse_slo([]) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("p99<+10%", "an slo needs an absolute limit"),
        ("throughput>-10%", "an slo needs an absolute limit"),
        ("p99>20ms", "states what is good"),
        ("errors>1%", "states what is good"),
        ("throughput<100", "states what is good"),
        ("goodput<100", "states what is good"),
        ("p99<20ms,", "is not a criterion"),
    ],
)
def test_what_is_no_target(text, says):
    with pytest.raises(OptionsError, match=says):
        parse_slo([text])


@pytest.mark.parametrize(
    ("slo", "limit_ms"),
    [
        ((), None),
        (("errors<1%", "throughput>5"), None),
        (("mean<5ms",), None),  # A mean bounds no single answer.
        (("p99<20ms",), 20),
        (("p50<5ms,p99<20ms",), 20),
        (("p99<20ms", "max<1s"), 1000),
    ],
)
def test_the_time_within_which_an_answer_is_good(slo, limit_ms):
    assert latency_target_ms(parse_slo(slo)) == limit_ms
