"""Student's t distribution for load tests, to avoid the 143 MB of scipy.

It is computed from the regularised incomplete beta function. That function's continued fraction (NIST Digital
Library of Mathematical Functions, 8.17.22) is evaluated by Lentz's method. The tests compare the results with
scipy's.
"""

import math
from typing import Final

TINY: Final = 1e-300
"""Replaces a zero in Lentz's method."""
STEPS_MAX: Final = 100_000
"""The fraction needs about as many steps as the square root of its larger parameter."""


def student_t_quantile(freedom: float, probability: float) -> float:
    """Return the value that Student's t does not exceed with ``probability``, which is at least one half."""
    tail = 2 * (1 - probability)
    low, high = 0.0, 1.0
    while _two_tails(freedom, high) > tail:
        high *= 2
    for _ in range(100):  # Each step halves the interval, down to neighbouring floats.
        middle = (low + high) / 2
        if _two_tails(freedom, middle) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _two_tails(freedom: float, value: float) -> float:
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value * value))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function, for positive ``a`` and ``b`` and ``x`` from 0 to 1."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # Here the fraction of the complement converges faster.
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Return the fraction 1 + d1 / (1 + d2 / (1 + …)) of the incomplete beta function."""
    value = ratio = 1.0
    inverse = 0.0
    for step in range(1, STEPS_MAX):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        inverse = 1 / (1 + term * inverse or TINY)
        ratio = 1 + term / ratio or TINY
        change = ratio * inverse
        value *= change
        if abs(change - 1) < 1e-15:
            break
    return value
