"""MLPerf's four scenarios and their rules, as in its LoadGen (mlperf.conf, results.cc).

A query of multi-stream is one request of 8 rows. The single query of offline becomes one request for each of
its samples: all are due at once, and as many are in flight as the target allows.
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
"""Confidence of early stopping."""
OFFLINE_MAX: Final = 20_000_000
"""Limit on samples that are due at once, as all are held in memory."""
OFFLINE_SLACK: Final = 1.1
"""Factor on the number of samples that the expected rate answers in the shortest duration."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Hold the rules of one scenario.

    :param percent: the percentile that is its result, or for which its target is set.
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
    """Return the number of samples in the offline query, from the expected rate."""
    assert settings.rate is not None
    if float(settings.rate) * seconds > OFFLINE_MAX:
        raise OptionsError(
            f"the offline query would have more than {OFFLINE_MAX:,} samples: set fewer requests"
        )
    return max(RULES["offline"].requests_min, int(OFFLINE_SLACK * seconds * float(settings.rate)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Hold the figures from which a verdict is made.

    :param seconds: until the last query was issued; for offline, until the last answer.
    :param errors: queries without a right answer.
    """

    latency: Counts
    seconds: float
    requests: int
    errors: int
    throughput: float


def verdict(scenario: Scenario, measured: Measured, criteria: tuple[Criterion, ...]) -> dict[str, Any]:
    """Return whether a run is valid, the rules that it breaks, and the scenario's result."""
    rules = RULES[scenario]
    why = []
    if measured.seconds < rules.seconds_min:
        why.append(f"it took {measured.seconds:.1f} s; the rules demand at least {rules.seconds_min:.0f} s")
    if measured.requests < rules.requests_min:
        why.append(f"it had {measured.requests:,} queries; the rules demand at least {rules.requests_min:,}")
    if measured.errors:
        why.append(f"{measured.errors:,} queries failed or had wrong answers")
    found: dict[str, Any] = {"name": scenario}
    if scenario in ("single-stream", "multi-stream"):
        estimate_ns = early_stopping_ns(measured.latency, rules.percent)
        if estimate_ns is None:
            why.append(f"too few queries to estimate p{rules.percent:g} with 99% confidence")
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
    """Return an upper bound of a percentile with 99% confidence; ``None`` if there are too few queries.

    It is the largest latency that is left when as many of the largest are discarded as the rules allow.
    """
    count = len(latency)
    # Search for the largest number that may be over it: the condition holds up to that number.
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
