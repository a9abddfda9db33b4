"""Held against scipy's, over everything that a load test asks for."""

import pytest
from scipy.special import betainc, stdtrit

from asynctrt.loadtest.distributions import incomplete_beta, student_t_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 1000])
@pytest.mark.parametrize("probability", [0.5, 0.75, 0.975, 0.9995])
def test_students_t(freedom, probability):
    wanted = float(stdtrit(freedom, probability))
    assert student_t_quantile(freedom, probability) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_the_ends_of_the_incomplete_beta():
    assert (incomplete_beta(2, 3, 0), incomplete_beta(2, 3, 1)) == (0, 1)
    assert incomplete_beta(0.5, 7.5, 0.03) == pytest.approx(float(betainc(0.5, 7.5, 0.03)), rel=1e-12)
