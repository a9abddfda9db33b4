"""Held against scipy's, over everything that a load test asks for."""

import pytest
from scipy.special import betainc, stdtrit

from asynctrt.loadtest.distributions import binomial_cdf, incomplete_beta, student_t_quantile

COUNTS = [1, 2, 10, 300, 3001, 100_000, 24_000_000]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001])
def test_the_binomial(count, share):
    middle = int(count * share)
    spread = int((count * share * (1 - share)) ** 0.5) + 1
    for most in {
        0,
        1,
        middle - 4 * spread,
        middle - spread,
        middle,
        middle + spread,
        middle + 4 * spread,
        count,
    }:
        if 0 <= most <= count:
            # scipy's bdtr is off by 3% in the middle of 24 million.
            wanted = float(betainc(count - most, most + 1, 1 - share)) if most < count else 1.0
            assert binomial_cdf(most, count, share) == pytest.approx(wanted, rel=1e-6, abs=1e-300)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 1000])
@pytest.mark.parametrize("probability", [0.5, 0.75, 0.975, 0.9995])
def test_students_t(freedom, probability):
    wanted = float(stdtrit(freedom, probability))
    assert student_t_quantile(freedom, probability) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_the_ends_of_the_incomplete_beta():
    assert (incomplete_beta(2, 3, 0), incomplete_beta(2, 3, 1)) == (0, 1)
    assert incomplete_beta(0.5, 7.5, 0.03) == pytest.approx(float(betainc(0.5, 7.5, 0.03)), rel=1e-12)
