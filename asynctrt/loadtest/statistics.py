"""Confidence intervals by Student's t, and the requests that a percentile needs. Pure."""

from collections.abc import Sequence
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


def student_t(freedom: int) -> float:
    """Return the value that the size of Student's t exceeds in 5% of cases, to within 0.2%."""
    if freedom <= 2:
        return (12.7062, 4.30265)[freedom - 1]
    # Abramowitz and Stegun 26.7.5, around the normal distribution.
    terms = (1.95996, 2.37227, 2.82250, 2.55585, 1.58953)
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))


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
