"""How sure a figure is: intervals by Student's t, steady state by MSER. The only importer of ``scipy``."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from asynctrt.errors import MissingExtraError
from asynctrt.loadtest.report import Interval

try:
    # Not scipy.stats, which is these two with half a second of loading around them.
    from scipy.special import bdtr, stdtrit
except ImportError as error:
    raise MissingExtraError("load tests need scipy: pip install 'asynctrt[load]'") from error

CONFIDENCE: Final = 0.95
PIECES: Final = 10
"""A run's windows are put together to so many pieces for an interval: neighbours resemble each other, and the
mean of windows that do would seem to be surer than it is."""
STEADY_LEAST: Final = 20
"""Windows below which nothing can be said about a steady state."""


def interval(values: Sequence[float]) -> Interval | None:
    """The mean of independent values and its interval; ``None`` of fewer than two."""
    if len(values) < 2:
        return None
    given = np.asarray(values, np.float64)
    mean = float(given.mean())
    error = float(given.std(ddof=1)) / len(values) ** 0.5
    reach = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
    return Interval(mean, mean - reach, mean + reach, len(values))


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """The geometric mean of ratios and its interval: 2 and 0.5 are as far from 1, and cancel out."""
    if any(ratio <= 0 for ratio in ratios):
        return None
    logs = interval([float(np.log(ratio)) for ratio in ratios])
    if logs is None:
        return None
    mean, low, high = (float(np.exp(value)) for value in (logs.mean, logs.low, logs.high))
    return Interval(mean, low, high, logs.count)


def interval_within(values: Sequence[float], weights: Sequence[float]) -> Interval | None:
    """The mean over a run's windows, by the method of batch means; ``None`` of fewer than two pieces each.

    :param weights: how much each window counts: its requests, or its seconds.
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
    """The first of the values that belongs to the steady state; ``None`` if there is none, or too few.

    The marginal standard error rule (MSER; White 1997): of all ways to leave the beginning out, take the one
    after which the mean's standard error is the smallest. If that is more than half, it was never steady.
    """
    if len(values) < STEADY_LEAST:
        return None
    given = np.asarray(values, np.float64)
    # About their median: squares of large numbers would leave nothing of how they differ.
    given = given - np.median(given)
    # Means and squares of each tail, from the end on.
    counts = np.arange(len(given), 0, -1)
    sums = np.cumsum(given[::-1])[::-1]
    squares = np.cumsum((given**2)[::-1])[::-1]
    spread = np.maximum(squares - sums**2 / counts, 0.0) / counts.astype(np.float64) ** 2
    half = len(given) // 2
    best = int(np.argmin(spread[: half + 1]))
    return best if best < half else None


def surely_below(count: int, over: int, percent: float, confidence: float) -> bool:
    """Whether ``percent`` of all requests are surely within a limit, if ``over`` of ``count`` were not.

    It is what MLPerf's early stopping asks: with fewer requests within it, so few over it would have been
    less likely than ``1 - confidence``.
    """
    return bool(bdtr(over, count, 1 - percent / 100) <= 1 - confidence)


def requests_least(percent: float) -> int:
    """The number of requests from which on the largest one bounds a percentile with 95% confidence."""
    return int(np.ceil(np.log(1 - CONFIDENCE) / np.log(percent / 100)))
