"""Confidence intervals by Student's t; detection of the steady state by MSER."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from asynctrt.loadtest.distributions import student_t_quantile
from asynctrt.loadtest.report import Interval

CONFIDENCE: Final = 0.95
PIECES: Final = 10
"""A run's windows are combined into this many pieces for an interval. Neighbouring windows are correlated, so
an interval over single windows would be too narrow."""
STEADY_LEAST: Final = 20
"""Smallest number of windows in which a steady state can be detected."""


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of independent values with its confidence interval; ``None`` for fewer than two."""
    if len(values) < 2:
        return None
    given = np.asarray(values, np.float64)
    mean = float(given.mean())
    error = float(given.std(ddof=1)) / len(values) ** 0.5
    reach = student_t_quantile(len(values) - 1, (1 + CONFIDENCE) / 2) * error
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


def interval_within(values: Sequence[float], weights: Sequence[float]) -> Interval | None:
    """Return a run's mean and its confidence interval by batch means; ``None`` for too few windows.

    :param weights: the weight of each window: its requests, or its seconds.
    """
    if len(values) < 2 * PIECES:
        return None
    given, counts = np.asarray(values, np.float64), np.asarray(weights, np.float64)
    pieces = np.array_split(np.arange(len(given)), PIECES)
    means = [
        float(np.average(given[piece], weights=counts[piece])) for piece in pieces if counts[piece].sum()
    ]
    return interval(means)


def steady_from(values: Sequence[float]) -> int | None:
    """Return the index of the first steady value; ``None`` if there is none, or there are too few values.

    Apply the marginal standard error rule (MSER; White 1997): leave out the beginning for which the mean of
    the rest has the smallest standard error. If that is half of the values, they were never steady.
    """
    if len(values) < STEADY_LEAST:
        return None
    given = np.asarray(values, np.float64)
    # Subtract the median, because rounding the squares of large numbers would lose the differences.
    given = given - np.median(given)
    # The length, sum and sum of squares of each tail.
    counts = np.arange(len(given), 0, -1)
    sums = np.cumsum(given[::-1])[::-1]
    squares = np.cumsum((given**2)[::-1])[::-1]
    spread = np.maximum(squares - sums**2 / counts, 0.0) / counts.astype(np.float64) ** 2
    half = len(given) // 2
    best = int(np.argmin(spread[: half + 1]))
    return best if best < half else None


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
