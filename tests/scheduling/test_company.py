"""Rows of other sizes join a batch if padding them costs less than a batch of their own."""

import pytest

from asynctrt.errors import ExecutionError
from asynctrt.scheduling.batch_times import SPREAD_MIN, SURE_SAMPLES, Costs
from asynctrt.scheduling.company import MixedSizes
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import Request
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.scheduling.support import took


def units_of(shape):
    return shape[0][1]


def holds(shape, other):
    return units_of(shape) >= units_of(other)


def company(batch_ns, unit_ns=1, **more):
    times = [(units, batch_ns + unit_ns * units) for units in (1, 1000)] * SURE_SAMPLES
    return MixedSizes(units_of, holds, times, **more)


def scheduler(found, **more):
    settings = {"contexts": 2, "arenas": 0, "in_flight_max": 2, "queue_rows_max": 99, "priorities": 1}
    return Scheduler(
        policy=Policy(rows_max=8, concurrency=2),
        shapes=Shapes(rows_max=8, profiles=None),
        company=found,
        **settings | more,
    )


def come(owner, *sizes):
    for size in sizes:
        owner.queue.submit(Request(1, BatchKey((("n", size),)), 0, 0))


def sizes(batch):
    return units_of(batch.key.shape), sorted(units_of(request.key.shape) for request in batch.requests)


def test_costs_follow_from_the_shortest_times():
    costs = Costs()
    small, large = [(10, 900), (10, 110), (10, 500), (10, 110)], [(1000, 9000), *[(1000, 1100)] * 3]
    for units, took_ns in small + large:
        assert costs.batch_ns == 0
        costs.observe(units, took_ns)
    assert (costs.batch_ns, costs.unit_ns) == (100, 1)


def test_costs_of_about_one_size_are_not_told_apart():
    costs = Costs()
    for units in (8, 8 << (SPREAD_MIN - 1)):
        for _ in range(SURE_SAMPLES):
            costs.observe(units, units)
    assert costs.batch_ns == costs.unit_ns == 0


def test_smaller_and_larger_rows_join_where_a_batch_costs_more_than_padding():
    owner = scheduler(company(1000))
    come(owner, 16, 8, 32, 64)
    assert sizes(owner.next_batch(0)) == (64, [8, 16, 32, 64])
    assert owner.queued_rows == 0


def test_they_run_apart_where_padding_costs_more():
    owner = scheduler(company(20))
    come(owner, 8, 16, 64)
    assert sizes(owner.next_batch(0)) == (16, [8, 16])
    assert sizes(owner.next_batch(0)) == (64, [64])


def test_a_size_that_fills_a_batch_does_not_join():
    owner = scheduler(company(1_000_000))
    come(owner, 8, 8, *[16] * 9)
    assert sizes(owner.next_batch(0)) == (8, [8, 8])
    assert sizes(owner.next_batch(0)) == (16, [16] * 8)


def test_a_batch_takes_no_more_rows_than_it_holds():
    owner = scheduler(company(1_000_000))
    come(owner, *[8] * 5, *[16] * 3, 32)
    assert sizes(owner.next_batch(0)) == (16, [8] * 5 + [16] * 3)
    assert sizes(owner.next_batch(0)) == (32, [32])


def test_rows_that_would_leave_some_behind_do_not_join():
    """They would be padded, or pad others, and there would be as many batches."""
    owner = scheduler(company(1_000_000))
    come(owner, *[8] * 5, *[16] * 6)
    assert sizes(owner.next_batch(0)) == (8, [8] * 5)
    assert sizes(owner.next_batch(0)) == (16, [16] * 6)


def test_rows_take_the_place_of_others_that_pad_a_batch():
    owner = scheduler(company(1, padded_rows=lambda _, rows: 8 if rows > 1 else 1))
    come(owner, *[32] * 5, *[8] * 4)
    assert sizes(owner.next_batch(0)) == (32, [8] * 3 + [32] * 5)
    assert sizes(owner.next_batch(0)) == (8, [8])


def test_times_that_are_told_replace_those_before():
    found = company(1_000_000)
    for shape in ((("n", 8),), (("n", 64),)):
        found.tell(shape, {1: 20 + shape[0][1], 8: 20 + 8 * shape[0][1]})
    assert (found.costs.batch_ns, found.costs.unit_ns) == (20, 1)
    owner = scheduler(found)
    come(owner, 8, 64)
    assert sizes(owner.next_batch(0)) == (8, [8])


def test_nothing_joins_until_costs_are_known():
    owner = scheduler(MixedSizes(units_of, holds))
    come(owner, 8, 16)
    assert sizes(owner.next_batch(0)) == (8, [8])


def test_halves_of_a_batch_that_failed_keep_its_shape():
    owner = scheduler(company(1_000_000))
    come(owner, 8, 16, 32)
    batch = owner.next_batch(0)
    assert owner.bisect(batch)
    halves = [owner.next_batch(0), owner.next_batch(0)]
    assert [half.key for half in halves] == [batch.key] * 2
    assert sum(half.rows for half in halves) == 3


def test_who_leaves_in_flight_and_in_the_queue():
    owner = scheduler(company(1_000_000))
    requests = [Request(1, BatchKey((("n", size),)), 0, 0) for size in (8, 16)]
    for request in requests:
        owner.queue.submit(request)
    batch = owner.next_batch(0)
    assert not owner.cancel(requests[0])
    owner.finished(batch, 1, took(0, 1, 0))
    assert owner.is_idle
    assert owner.snapshot().counters.cancelled == 1


def test_all_are_refused_together_if_the_model_cannot_be_asked():
    class Profiles:
        def row_ranges(self, shape):
            return [(1, 8)]

        def profile_of(self, shape, rows):
            raise KeyError(rows)

    owner = Scheduler(
        policy=Policy(rows_max=8),
        shapes=Shapes(rows_max=8, profiles=Profiles()),
        company=company(1_000_000),
        contexts=1,
        arenas=0,
        in_flight_max=1,
        queue_rows_max=9,
        priorities=1,
    )
    come(owner, 8, 16)
    rejected = owner.next_batch(0)
    assert len(rejected.requests) == 2
    assert isinstance(rejected.error, ExecutionError)
    assert owner.queued_rows == 0


@pytest.mark.parametrize("more", [{"on_device": True}, {"outputs_on_device": True}])
def test_rows_that_cannot_be_padded_run_as_they_are(more):
    owner = scheduler(company(1_000_000))
    for size in (8, 16):
        owner.queue.submit(Request(1, BatchKey((("n", size),), **more), 0, 0))
    assert owner.next_batch(0).rows == 1


def test_a_shape_that_runs_anew_tells_its_times():
    owner = scheduler(company(1_000_000))
    for size in (8, 64):
        owner.run_anew((("n", size),), {1: 20 + size, 8: 20 + 8 * size})
    come(owner, 8, 64)
    assert sizes(owner.next_batch(0)) == (8, [8])
    owner.run_anew((("n", 64),), {})
    assert sizes(owner.next_batch(0)) == (64, [64])


def test_a_small_batch_that_was_held_up_does_not_count():
    costs = Costs()
    for units, took_ns in ((8, 3000), (64, 164), (1024, 1124)):
        for _ in range(SURE_SAMPLES):
            costs.observe(units, took_ns)
    assert costs.batch_ns == pytest.approx(156, abs=2)
    assert costs.unit_ns == pytest.approx(0.945, abs=0.01)


@pytest.mark.parametrize(("side_by_side", "joins"), [(1, True), (2, False)])
def test_batches_side_by_side_spend_their_fixed_parts_together(side_by_side, joins):
    buckets = [BucketQueue(BatchKey((("n", size),)), 1, 8) for size in (32, 64)]
    for bucket in buckets:
        bucket.push(Request(1, bucket.key, 0, 0))
    assert bool(company(50).join(buckets[0], buckets, side_by_side)[1]) is joins
