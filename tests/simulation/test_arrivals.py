"""Simulated arrivals: their rates, bursts and shapes."""

from collections import Counter

import numpy as np
import pytest

from tests.simulation.arrivals import at_random, evenly, in_bursts, requests


@pytest.mark.parametrize("times", [at_random, in_bursts, lambda *how: evenly(*how[:2])])
def test_a_rate_is_kept_and_a_seed_repeats_itself(times):
    found = times(500, 10.0, 1)
    assert found == times(500, 10.0, 1)
    assert len(found) == pytest.approx(5000, rel=0.3 if times is in_bursts else 0.1)
    assert found == sorted(found)
    assert 0 <= found[0] <= found[-1] <= 10 * 10**9


def test_another_seed_gives_other_times_and_bursts_are_burstier():
    def spread(times_ns):
        counts = np.histogram(times_ns, 1000, (0, 100e9))[0]
        return counts.var() / counts.mean()

    plain = at_random(200, 100.0, 1)
    assert plain != at_random(200, 100.0, 2)
    assert spread(in_bursts(200, 100.0, 1, factor=8, period_s=1)) > 5 * spread(plain)


def test_requests_are_mixed_by_weight():
    shapes = [("short", 3.0), ("long", 1.0)]
    found = list(requests(range(10_000), shapes=shapes, timeout_s=0.5, cancel_share=0.5, patience_s=1e-6))
    assert [arrival.due_ns for arrival in found] == list(range(10_000))
    counts = Counter(arrival.key.shape for arrival in found)
    assert counts["short"] == pytest.approx(3 * counts["long"], rel=0.1)
    assert {arrival.timeout_ns for arrival in found} == {500_000_000}
    leaving = [arrival.patience_ns for arrival in found if arrival.patience_ns is not None]
    assert len(leaving) == pytest.approx(len(found) / 2, rel=0.1)
    assert np.mean(leaving) == pytest.approx(1000, rel=0.1)
