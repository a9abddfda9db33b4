"""Confidence intervals by Student's t, and the requests that a percentile needs. Pure."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from asynctrt.loadtest.report import Interval

CONFIDENCE: Final = 0.95


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of independent values with its confidence interval; ``None`` for fewer than two."""
    if len(values) < 2:
        return None
    given = np.asarray(values, np.float64)
    mean = float(given.mean())
    error = float(given.std(ddof=1)) / len(values) ** 0.5
    reach = student_t(len(values) - 1) * error
    return Interval(mean, mean - reach, mean + reach, len(values))


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """Return the geometric mean of ratios, in which 2 and 0.5 cancel out, with its confidence interval."""
    if any(ratio <= 0 for ratio in ratios):
        return None
    logs = interval([float(np.log(ratio)) for ratio in ratios])
    if logs is None:
        return None
    mean, low, high = (float(np.exp(value)) for value in (logs.mean, logs.low, logs.high))
    return Interval(mean, low, high, logs.count)


def student_t(freedom: int) -> float:
    """Return the value that the size of Student's t exceeds in 5% of cases, to within 0.2%.

    For one and two degrees of freedom the formula is exact. Beyond, it is the expansion by powers of
    1 / ``freedom`` around the normal distribution (Abramowitz and Stegun 26.7.5).
    """
    probability = (1 + CONFIDENCE) / 2
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom**power) for power, term in enumerate(terms, start=1))


def exceeds(count: int, requests: int, percent: float) -> bool:
    """Return whether a percentile exceeds a limit with 95% confidence, if ``count`` requests do.

    Sum the binomial distribution. ``requests`` must be at most :func:`requests_least`.
    """
    share = 1 - percent / 100
    chance, fewer = (1 - share) ** requests, 0.0
    for number in range(count):
        fewer += chance
        if fewer > CONFIDENCE:
            return True
        chance *= (requests - number) / (number + 1) * share / (1 - share)
    return False


def requests_least(percent: float) -> int:
    """Return the smallest number of requests whose maximum bounds a percentile with 95% confidence."""
    return int(np.ceil(np.log(1 - CONFIDENCE) / np.log(percent / 100)))
