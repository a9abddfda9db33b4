"""MLPerf's four scenarios and their rules, as its LoadGen has them (mlperf.conf, results.cc).

A query of multi-stream is one request of 8 rows. Offline's one query is as many requests as it has samples,
all due at once, of which as many are on the way as the target bears.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from asynctrt.errors import OptionsError
from asynctrt.loadtest.criteria import Criterion
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.settings import LoadSettings, Scenario
from asynctrt.loadtest.statistics import surely_below

CONFIDENCE: Final = 0.99
"""Of early stopping."""
OFFLINE_MAX: Final = 20_000_000
"""Samples that are due at once, and so are all in memory."""
OFFLINE_SLACK: Final = 1.1
"""Samples beyond those that the expected rate needs for the shortest duration."""


@dataclass(frozen=True, slots=True)
class Rules:
    """One scenario's rules.

    :param percent: the percentile that is its result, or that its target is for.
    :param requests_min: queries; for offline, samples.
    """

    percent: float
    seconds_min: float
    requests_min: int
    rows: int


RULES: Final[Mapping[Scenario, Rules]] = MappingProxyType(
    {
        "single-stream": Rules(90, 600, 100, 1),
        "multi-stream": Rules(99, 600, 662, 8),
        "server": Rules(99, 600, 100, 1),
        "offline": Rules(90, 600, 24_576, 1),
    }
)


def offline_requests(settings: LoadSettings, seconds: float) -> int:
    """How many samples offline's query has, for the rate that is expected."""
    assert settings.rate is not None
    if float(settings.rate) * seconds > OFFLINE_MAX:
        raise OptionsError(
            f"offline's query would have more than {OFFLINE_MAX:,} samples: say fewer requests"
        )
    return max(RULES["offline"].requests_min, int(OFFLINE_SLACK * seconds * float(settings.rate)))


@dataclass(frozen=True, slots=True)
class Measured:
    """What a verdict is made of.

    :param seconds: until the last query was issued; for offline, until the last answer.
    :param errors: queries that were not answered rightly.
    """

    latency: Counts
    seconds: float
    requests: int
    errors: int
    throughput: float


def verdict(scenario: Scenario, measured: Measured, criteria: tuple[Criterion, ...]) -> dict[str, Any]:
    """Valid or not and why, and the scenario's result."""
    rules = RULES[scenario]
    why = []
    if measured.seconds < rules.seconds_min:
        why.append(f"it took {measured.seconds:.1f} s; the rules demand {rules.seconds_min:.0f}")
    if measured.requests < rules.requests_min:
        why.append(f"it had {measured.requests:,} queries; the rules demand {rules.requests_min:,}")
    if measured.errors:
        why.append(f"{measured.errors:,} queries were not answered rightly")
    found: dict[str, Any] = {"name": scenario}
    if scenario in ("single-stream", "multi-stream"):
        estimate_ns = early_stopping_ns(measured.latency, rules.percent)
        if estimate_ns is None:
            why.append(f"too few queries for an estimate of p{rules.percent:g} with 99% confidence")
        else:
            found[f"p{rules.percent:g}_ms"] = estimate_ns / 1e6
    elif scenario == "server":
        (criterion,) = [item for item in criteria if item.figure.startswith("p")]
        count = len(measured.latency)
        over = count - measured.latency.within(criterion.limit * 1e6)
        if not surely_below(count, over, float(criterion.figure[1:]), CONFIDENCE):
            why.append(f"{criterion}: {over:,} of {count:,} took longer, too many for 99% confidence")
        found["requests_per_s"] = measured.throughput
    else:
        found["samples_per_s"] = measured.throughput
    return {**found, "valid": not why, "why": why}


def early_stopping_ns(latency: Counts, percent: float) -> int | None:
    """A percentile's upper bound with 99% confidence, ``None`` of too few queries.

    It is the largest latency after as many were left out as may be.
    """
    count = len(latency)
    # The most that may be over it: a search, since the condition holds up to some number and not beyond.
    if not surely_below(count, 1, percent, CONFIDENCE):
        return None
    low, high = 1, count
    while high - low > 1:
        middle = (low + high) // 2
        if surely_below(count, middle, percent, CONFIDENCE):
            low = middle
        else:
            high = middle
    return latency.nth(count - low + 1)
