"""Predictions, held to what queueing theory and arithmetic say."""

import random

import numpy as np
import pytest

from asynctrt.errors import OptionsError
from asynctrt.options import Options
from tests.simulation.latency import parse_latency
from tests.simulation.plan import make_plan, percentiles, simulate_plan
from tests.simulation.settings import SimulationSettings


def table(*batches, **more):
    names = ("rows", "compute_ms", "copy_in_ms", "copy_out_ms")
    return parse_latency(
        {"batches": [dict(zip(names, batch, strict=False)) for batch in batches], **more}, "x"
    )


def plan(arrivals, latency, options=None, **settings):
    return make_plan(arrivals, latency, SimulationSettings(**settings), Options(**options or {}), 1)


def predict(arrivals, latency, options=None, **settings):
    return simulate_plan(plan(arrivals, latency, options, **settings))[0]


ONE = {"max_rows": 1, "contexts": 64}


@pytest.mark.tier2
def test_a_queue_of_exponential_arrivals_waits_as_theory_says():
    """M/D/1: a mean wait of rho / (2 (1 - rho)) services before each."""
    for load in (0.5, 0.8):
        made = predict(f"poisson:{1000 * load:f}", table((1, 1.0)), ONE, seconds=40.0)
        assert made.latency["mean"] == pytest.approx(1 + load / (2 * (1 - load)), rel=0.1)
        assert made.busy_share == pytest.approx(load, rel=0.03)
        assert made.throughput == pytest.approx(1000 * load, rel=0.02)


def test_requests_beyond_the_capacity_fill_batches_and_then_are_shed():
    latency = table((1, 1.0), (8, 4.5))
    most = 8 / 4.5e-3
    made = predict("poisson:4000", latency, {"max_rows": 8, "max_queue_rows": 64}, seconds=5.0)
    assert made.throughput == pytest.approx(most, rel=0.01)
    assert made.shed_share == pytest.approx(1 - most / 4000, rel=0.03)
    assert set(made.shed) == {"queue full"}
    assert made.mean_rows == pytest.approx(8, rel=0.01)
    assert made.busy_share > 0.99
    late = predict("poisson:4000", latency, {"max_rows": 8, "timeout": 0.02}, seconds=5.0)
    assert set(late.shed) == {"deadline"}
    assert late.goodput < late.throughput < 4000
    assert late.latency["max"] < 20 + 2 * 4.5 * 2 + 0.1


@pytest.mark.parametrize("load", [1.0, 1.5])
@pytest.mark.parametrize("device", [{}, {"arenas": 1, "contexts": 4}])
def test_what_is_computed_is_answered_in_time_beyond_the_capacity_too(load, device):
    """A batch that is launched ahead waits for the one before it: that is counted."""
    latency = table((1, 4.0, 0.03), (64, 10.0, 2.0))
    made = predict(
        f"poisson:{load * 6400}",
        latency,
        {"timeout": 0.03, "timeout_until": "answer", **device},
        seconds=1.5,
        warmup=0.5,
    )
    most = 6400 if device else 64 / 12e-3  # A thread of the host device copies before it computes.
    assert made.latency["p99"] < 30
    assert made.goodput > 0.95 * most
    assert made.goodput > 0.995 * made.throughput


@pytest.mark.tier2
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("shapes", ["a,b", ",".join(f"s{number}" for number in range(16))])
def test_shapes_that_are_equally_common_keep_the_mean_batch(gpu, shapes):
    latency = table((1, 1.5, 0.05, 0.02), (64, 4.4, 1.0, 0.2), jitter=0.05)
    options = {"max_rows": 64, "arenas": 1, "contexts": 4} if gpu else {"max_rows": 64}
    for rate in (3000, 7000, 11000):
        alone = predict(f"poisson:{rate}", latency, options, seconds=2.0)
        mixed = predict(f"poisson:{rate}", latency, options, seconds=2.0, shapes=shapes)
        assert mixed.mean_rows > 0.9 * alone.mean_rows
        assert mixed.shed_share == 0


@pytest.mark.tier2
def test_rare_shapes_do_not_take_the_time_that_a_common_one_needs():
    """In strict turns a third was shed here: 15 batches of few rows for each full one."""
    latency = table((1, 1.5, 0.05, 0.02), (64, 4.4, 1.0, 0.2), jitter=0.05)
    shapes = ",".join(f"s{number}@{100 / (number + 1):.1f}" for number in range(16))
    options = {"max_rows": 64, "max_queue_rows": 3000, "contexts": 4, "arenas": 2}
    made = predict("poisson:12500", latency, options, seconds=3.0, shapes=shapes)
    assert made.shed_share == 0
    assert made.latency["p99"] < 250


def test_every_request_is_accounted_for():
    made = predict(
        "bursts:3000",
        table((1, 1.0), (8, 4.5)),
        {"max_rows": 8, "timeout": 0.05, "max_queue_rows": 100},
        seconds=2.0,
        cancel=0.2,
        patience=0.01,
    )
    shed = sum(made.shed.values())
    assert made.cancelled > 0 < shed
    # Whoever went away after the answer, or after it was shed, is counted among the cancelled as well.
    assert made.answered + shed <= made.requests <= made.answered + shed + made.cancelled


def test_copies_overlap_with_computing_in_arenas():
    serial = table((1, 1.0, 1.0, 1.0))
    alone = predict("constant:100", serial, ONE, seconds=2.0)
    assert alone.latency["p50"] == alone.latency["max"] == pytest.approx(3.0)
    for arenas, most in ((1, 1000), (4, 1000)):
        made = predict(
            "constant:2000",
            serial,
            {**ONE, "contexts": 8, "arenas": arenas, "max_queue_rows": 8},
            seconds=2.0,
            concurrency=8,
        )
        assert made.throughput == pytest.approx(most, rel=0.02), "copies take turns, beside the computing"


def test_batches_side_by_side_hinder_each_other():
    latency = table((1, 1.0))
    options = {**ONE, "contexts": 4, "arenas": 4, "max_queue_rows": 4}
    found = [
        predict("constant:8000", latency, options, seconds=2.0, warmup=1.0, interference=share).throughput
        for share in (0.0, 0.5, 1.0)
    ]
    # It takes a while to find out that more lanes pay.
    assert found == pytest.approx([4000, 4000 / 2.5, 1000], rel=0.03)


def test_jitter_keeps_the_mean():
    made = predict("constant:10", table((1, 1.0), jitter=0.5), ONE, seconds=500.0)
    assert made.latency["mean"] == pytest.approx(1.0, rel=0.05)
    assert made.latency["p99"] > 1.5


def test_lanes_interference_and_jitter_of_the_settings_win():
    made = plan("constant:10", table((1, 1.0), lanes=2, jitter=0.5), lanes=3, jitter=0.0).latency
    assert (made.lanes, made.jitter, made.interference) == (3, 0.0, 0.0)


def test_a_delay_makes_larger_batches_and_split_smaller_ones(tmp_path):
    latency = table((1, 2.0), (32, 4.0), lanes=2)
    plain = predict("poisson:800", latency, seconds=5.0)
    delayed = predict("poisson:800", latency, {"max_delay": 0.02}, seconds=5.0)
    assert delayed.mean_rows > 1.5 * plain.mean_rows
    trace = tmp_path / "t.csv"
    trace.write_text("time\n" + "".join(f"{group / 10}\n" * 8 for group in range(20)))
    split, whole = (predict(str(trace), latency, split=does).mean_rows for does in (True, False))
    # What a batch takes is known from the second group on.
    assert (split, whole) == (pytest.approx(8 * 20 / 39), 8)


def test_urgent_requests_and_shapes():
    latency = table((1, 1.0), shapes={"long": [{"rows": 1, "compute_ms": 3.0}]})
    made = predict("constant:10", latency, ONE, seconds=10.0, shapes="short,long", urgency="0@3,2")
    assert made.latency["max"] == pytest.approx(3.0)
    assert made.latency["mean"] == pytest.approx(2.0, rel=0.2)
    with pytest.raises(OptionsError, match="set priorities to 6 or more"):
        plan("constant:10", latency, urgency="5")


def test_a_fleet_is_balanced_by_what_its_devices_have_to_do():
    def both(latency, **settings):
        return [
            predict("poisson:1600", latency, ONE, seconds=5.0, devices=20, balance=balance, **settings)
            for balance in ("least", "round-robin")
        ]

    # Where all take equally long, taking turns is giving each to the first that is done, as one queue would.
    least, in_turn = both(table((1, 10.0)))
    assert least.latency == in_turn.latency
    shapes = {"long": [{"rows": 1, "compute_ms": 40.0}]}
    least, in_turn = both(table((1, 5.0), shapes=shapes), shapes="short@6,long")
    assert least.throughput == pytest.approx(in_turn.throughput, rel=0.02)
    assert least.latency["p99"] < 0.7 * in_turn.latency["p99"]
    assert least.busy_share == pytest.approx(0.8, rel=0.05)


def test_a_fleet_knows_what_was_shed_and_cancelled():
    """Otherwise a device whose requests leave would count as busy for ever."""
    made = predict(
        "poisson:400",
        table((1, 10.0)),
        {**ONE, "timeout": 0.03, "max_queue_rows": 3},
        seconds=10.0,
        devices=2,
        cancel=0.3,
    )
    assert made.shed
    assert made.busy_share > 0.97


def test_the_warm_up_is_left_out():
    whole = predict("constant:100", table((1, 1.0)), seconds=10.0)
    made = predict("constant:100", table((1, 1.0)), seconds=10.0, warmup=5.0)
    assert (whole.seconds, made.seconds) == (10.0, 5.0)
    assert made.throughput == pytest.approx(whole.throughput, rel=0.01)


def test_a_criterion_counts_what_was_shed():
    latency = table((1, 1.0))
    good = predict("constant:100", latency, seconds=10.0, slo=("p99<2ms", "throughput>90"))
    assert good.slo == {"p99<2ms": True, "throughput>90": True}
    assert good.goodput == good.throughput
    options = {"max_rows": 1, "contexts": 2, "max_queue_rows": 1}
    shed = predict("constant:1100", latency, options, seconds=5.0, slo=("p50<9ms,p95<9ms",))
    assert shed.slo == {"p50<9ms": True, "p95<9ms": False}
    errors = predict("constant:1100", latency, options, seconds=5.0, slo=("errors<1%",))
    assert errors.slo == {"errors<1%": False}


def test_percentiles_need_enough_requests():
    assert percentiles(np.zeros(0, np.int64)) == {}
    assert set(percentiles(np.arange(4))) == {"mean", "max"}
    assert "p50" in percentiles(np.arange(5))
    assert "p99" not in percentiles(np.arange(298))
    found = percentiles(np.arange(1, 1001) * 10**6)
    assert (found["p50"], found["p99"], found["max"], found["mean"]) == (500, 990, 1000, 500.5)


def test_it_stops_when_told_with_the_figures_of_what_there_is():
    made, _ = simulate_plan(plan("poisson:10000", table((1, 0.1)), seconds=20.0), lambda share: share < 0.1)
    assert not made.complete
    assert 1 < made.seconds < 4
    assert made.throughput == pytest.approx(10000, rel=0.1)


def test_requests_that_an_engine_would_split_are_refused():
    with pytest.raises(OptionsError, match="a request has 100 rows and a batch holds 64"):
        plan("poisson:10", table((1, 1.0)), rows="100")


@pytest.mark.tier2
@pytest.mark.parametrize("device", [{}, {"arenas": 1, "contexts": 4}])
def test_a_latency_target_holds_batches_back_where_that_raises_what_is_in_time(tmp_path, device):
    """Eight requests within a ms, every 11 ms, and batches of 7 ms whatever their rows: alone, the first of
    them makes all others too late."""
    rng, times = random.Random(1), []
    for clump in range(1500):
        times += [clump * 0.011 + rng.random() * 0.001 for _ in range(8)]
    trace = tmp_path / "clumps.csv"
    trace.write_text("time\n" + "".join(f"{time}\n" for time in sorted(times)))
    latency = table((1, 7.0), (16, 7.5))
    good = [
        predict(str(trace), latency, {"max_rows": 16, **device, **more}, slo=("p99<9ms",)).goodput
        for more in ({}, {"latency_target": "p99<9ms"})
    ]
    assert good[1] > 4 * good[0]
    assert good[1] > 0.85 * 8 / 0.011


def _any_case(seed):
    """Return a random device with a load and a target: a curve that rises in steps, threads that hinder one
    another, loads up to more than it can do."""
    rng = random.Random(seed)
    rows_max, rows, took_ms, batches = rng.choice([4, 8, 16, 32]), 1, rng.uniform(1, 5), []
    while rows <= rows_max:
        batches.append((rows, took_ms))
        rows, took_ms = 2 * rows, took_ms * rng.choice([1.0, 1.1, 1.3, 1.6, 2.0, 2.6])
    lanes, interference = rng.choice([1, 1, 2, 4]), rng.choice([0, 0.5, 1.0])
    latency = table(*batches, lanes=lanes, interference=interference, jitter=rng.choice([0, 0.1, 0.3]))
    rate = max(size / took for size, took in batches) * 1e3 * (1 if interference else lanes)
    rate *= rng.choice([0.3, 0.6, 0.8, 0.9, 1.0, 1.1])
    load = rng.choice(["poisson:{:f}", "bursts:{:f},factor=3,share=0.2,period=0.3"]).format(rate)
    target_ms = round(batches[-1][1] * rng.choice([1.2, 1.6, 2, 3]), 3)
    device, split = ({"arenas": 1, "contexts": 4}, False) if rng.random() < 0.3 else ({}, rng.random() < 0.5)
    seconds = max(6000 / rate, 2.0)
    return load, latency, target_ms, {"max_rows": rows_max, **device}, {"split": split, "seconds": seconds}


@pytest.mark.tier2
@pytest.mark.parametrize("block", range(4))
def test_with_a_latency_target_no_less_is_in_time_than_without(block):
    """But for what is lost while something is tried that does not help."""
    shares = []
    for seed in range(12 * block, 12 * block + 12):
        load, latency, target_ms, options, settings = _any_case(seed)
        slo = f"p99<{target_ms}ms"
        plain, aimed = (
            predict(load, latency, {**options, **more}, slo=(slo,), **settings)
            for more in ({}, {"latency_target": slo})
        )
        shares.append((aimed.goodput - plain.goodput) / plain.throughput)
        assert shares[-1] > -0.07, seed
        assert aimed.latency["p99"] < 1.15 * plain.latency["p99"], seed
        assert aimed.throughput > 0.98 * plain.throughput, seed
    assert sum(shares) > -0.01 * len(shares)
