"""Simulated loads, held to what queueing theory and arithmetic say."""

from dataclasses import replace

import pytest

from tests.simulation.arrivals import at_random, evenly, in_bursts, requests
from tests.simulation.latency import CostTable, Entry, linear
from tests.simulation.load import simulate

ONE = {"max_rows": 1, "contexts": 64}


def run(times_ns, latency, options=None, *, seconds=None, seed=1, shapes=(), leaves=0.0, patience=0.1, **how):
    sent = requests(
        times_ns,
        shapes=shapes,
        timeout_s=(options or {}).get("timeout"),
        cancel_share=leaves,
        patience_s=patience,
        seed=seed,
    )
    seconds = times_ns[-1] / 1e9 if seconds is None else seconds
    return simulate(sent, latency, options, seconds=seconds, seed=seed, **how)


def at_rate(rate, latency, options=None, *, seconds, **how):
    """Return what requests do that arrive at random."""
    return run(at_random(rate, seconds, 1), latency, options, seconds=seconds, **how)


def at_intervals(rate, latency, options=None, *, seconds=2.0, **how):
    """Return what requests do that arrive evenly."""
    return run(evenly(rate, seconds), latency, options, seconds=seconds, **how)


@pytest.mark.tier2
def test_a_queue_of_exponential_arrivals_waits_as_theory_says():
    """M/D/1: a mean wait of rho / (2 (1 - rho)) services before each."""
    for load in (0.5, 0.8):
        made = at_rate(1000 * load, linear((1, 1.0)), ONE, seconds=40.0)
        assert made.mean_ms == pytest.approx(1 + load / (2 * (1 - load)), rel=0.1)
        assert made.busy_share == pytest.approx(load, rel=0.03)
        assert made.throughput == pytest.approx(1000 * load, rel=0.02)


def test_requests_beyond_the_capacity_fill_batches_and_then_are_shed():
    latency = linear((1, 1.0), (8, 4.5))
    most = 8 / 4.5e-3
    made = at_rate(4000, latency, {"max_rows": 8, "max_queue_rows": 64}, seconds=5.0)
    assert made.throughput == pytest.approx(most, rel=0.01)
    assert made.shed_share == pytest.approx(1 - most / 4000, rel=0.03)
    assert set(made.shed) == {"queue full"}
    assert made.mean_rows == pytest.approx(8, rel=0.01)
    assert made.busy_share > 0.99
    late = at_rate(4000, latency, {"max_rows": 8, "timeout": 0.02}, seconds=5.0)
    assert set(late.shed) == {"deadline"}
    assert late.goodput < late.throughput < 4000
    assert late.ms(100) < 20 + 2 * 4.5 * 2 + 0.1


@pytest.mark.parametrize("load", [1.0, 1.5])
@pytest.mark.parametrize("device", [{}, {"arenas": 1, "contexts": 4}])
def test_what_is_computed_is_answered_in_time_beyond_the_capacity_too(load, device):
    """A batch that is launched ahead waits for the one before it: that is counted."""
    latency = linear((1, 4.0, 0.03), (64, 10.0, 2.0))
    made = at_rate(
        load * 6400,
        latency,
        {"timeout": 0.03, "timeout_until": "answer", **device},
        seconds=1.5,
        warmup=0.5,
    )
    most = 6400 if device else 64 / 12e-3  # A thread of the host device copies before it computes.
    assert made.ms(99) < 30
    assert made.goodput > 0.95 * most
    assert made.goodput > 0.995 * made.throughput


@pytest.mark.tier2
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("shapes", [2, 16])
def test_shapes_that_are_equally_common_keep_the_mean_batch(gpu, shapes):
    latency = linear((1, 1.5, 0.05, 0.02), (64, 4.4, 1.0, 0.2), jitter=0.05)
    options = {"max_rows": 64, "arenas": 1, "contexts": 4} if gpu else {"max_rows": 64}
    kinds = [(f"s{number}", 1.0) for number in range(shapes)]
    for rate in (3000, 7000, 11000):
        alone = at_rate(rate, latency, options, seconds=2.0)
        mixed = at_rate(rate, latency, options, seconds=2.0, shapes=kinds)
        assert mixed.mean_rows > 0.9 * alone.mean_rows
        assert mixed.shed_share == 0


@pytest.mark.tier2
def test_rare_shapes_do_not_take_the_time_that_a_common_one_needs():
    """In strict turns a third was shed here: 15 batches of few rows for each full one."""
    latency = linear((1, 1.5, 0.05, 0.02), (64, 4.4, 1.0, 0.2), jitter=0.05)
    shapes = [(f"s{number}", 1 / (number + 1)) for number in range(16)]
    options = {"max_rows": 64, "max_queue_rows": 3000, "contexts": 4, "arenas": 2}
    made = at_rate(12500, latency, options, seconds=3.0, shapes=shapes)
    assert made.shed_share == 0
    assert made.ms(99) < 250


def test_every_request_is_accounted_for():
    made = run(
        in_bursts(3000, 2.0, 1, period_s=0.2),
        linear((1, 1.0), (8, 4.5)),
        {"max_rows": 8, "timeout": 0.05, "max_queue_rows": 100},
        seconds=2.0,
        leaves=0.2,
        patience=0.01,
    )
    shed = sum(made.shed.values())
    assert made.cancelled > 0 < shed
    # Whoever went away after the answer, or after it was shed, is counted among the cancelled as well.
    assert made.answered + shed <= made.requests <= made.answered + shed + made.cancelled


def test_copies_overlap_with_computing_in_arenas():
    serial = linear((1, 1.0, 1.0, 1.0))
    alone = at_intervals(100, serial, ONE)
    assert alone.ms(50) == alone.ms(100) == pytest.approx(3.0)
    for arenas, most in ((1, 1000), (4, 1000)):
        made = at_intervals(
            2000,
            serial,
            {**ONE, "contexts": 8, "arenas": arenas, "max_queue_rows": 8},
            concurrency=8,
        )
        assert made.throughput == pytest.approx(most, rel=0.02), "copies take turns, beside the computing"


def test_batches_side_by_side_hinder_each_other():
    options, found = {**ONE, "contexts": 4, "arenas": 4, "max_queue_rows": 4}, []
    for share in (0.0, 0.5, 1.0):
        latency = linear((1, 1.0), interference=share)
        found.append(at_intervals(8000, latency, options).throughput)
    assert found == pytest.approx([4000, 4000 / 2.5, 1000], rel=0.03)


def test_jitter_keeps_the_mean():
    made = at_intervals(10, linear((1, 1.0), jitter=0.5), ONE, seconds=500.0)
    assert made.mean_ms == pytest.approx(1.0, rel=0.05)
    assert made.ms(99) > 1.5


def test_a_delay_makes_larger_batches_and_split_smaller_ones():
    latency = linear((1, 2.0), (32, 4.0), lanes=2)
    plain = at_rate(800, latency, seconds=5.0)
    delayed = at_rate(800, latency, {"max_delay": 0.02}, seconds=5.0)
    assert delayed.mean_rows > 1.5 * plain.mean_rows
    groups = [group * 100_000_000 for group in range(20) for _ in range(8)]
    split, whole = (run(groups, latency, splits=does).mean_rows for does in (True, False))
    # What a batch takes is known from the second group on.
    assert (split, whole) == (pytest.approx(8 * 20 / 39), 8)


def test_shapes_have_costs_of_their_own():
    latency = replace(linear((1, 1.0)), shapes={"long": CostTable([Entry(1, 0.0, 3.0, 0.0)])})
    made = at_intervals(10, latency, ONE, seconds=10.0, shapes=[("short", 1.0), ("long", 1.0)])
    assert made.ms(100) == pytest.approx(3.0)
    assert made.mean_ms == pytest.approx(2.0, rel=0.2)


def test_the_warm_up_is_left_out():
    latency = linear((1, 1.0), (64, 64.0))
    whole = at_intervals(100, latency, seconds=10.0)
    made = at_intervals(100, latency, seconds=10.0, warmup=5.0)
    assert made.throughput == pytest.approx(whole.throughput, rel=0.01)
    assert len(made.took_ns) == len(whole.took_ns) / 2 == 500
    assert made.goodput == made.throughput
    assert at_intervals(100, latency, seconds=10.0, limit_ms=0.9).goodput == 0
