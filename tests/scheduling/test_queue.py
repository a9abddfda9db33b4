"""What waits: plain requests, which have no objects, and the batch that they fill.

The rest is with the scheduler.
"""

import itertools
import random

import pytest

from asynctrt.errors import EngineClosedError, QueueFullError
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.company import OneSize
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import PATIENCE_NS
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import (
    IN_FLIGHT,
    MASKED,
    QUEUED,
    PlainRequests,
    Request,
    State,
    complete,
    holds,
    waiting_in,
)
from tests.scheduling.support import KEY, Caller, Profiles, enter, finish, queued_by_key, scheduler, submit


def leave(plan, future):
    future.is_done = True
    return plan.cancel_plain(future)


def futures_of(batch):
    assert type(batch.requests) is PlainRequests
    return [future for future, _, _ in batch.requests.entries]


def ends_of(plan):
    counters = plan.snapshot().counters
    return counters.succeeded, counters.failed, counters.cancelled, plan.snapshot().submitted


class TestPlain:
    def test_they_are_queued_and_launched_without_objects(self):
        plan = scheduler(queue_rows_max=7)
        futures = enter(plan, 7, now_ns=5)
        assert (plan.queued_rows, plan.queue.requests, plan.has_to_launch) == (7, 7, True)
        assert repr(plan.queue) == "<Queue requests=7 rows=7>"
        first, second = plan.next_batch(6), plan.next_batch(7)
        assert (futures_of(first), first.rows, len(first.requests)) == (futures[:4], 4, 4)
        assert (futures_of(second), [payload for _, payload, _ in second.requests.entries]) == (
            futures[4:],
            [4, 5, 6],
        )
        assert plan.next_batch(8) is None
        assert plan.is_idle is plan.has_to_launch is False
        finish(plan, first, 10)
        finish(plan, second, 20)
        counters = plan.snapshot().counters
        assert (counters.succeeded, counters.queue_ns, counters.total_ns) == (7, 4 + 3 * 2, 4 * 5 + 3 * 15)
        assert ends_of(plan) == (7, 0, 0, 7)
        assert plan.is_idle

    def test_each_key_has_its_own_and_an_equal_key_is_the_same(self):
        plan = scheduler()
        other = BatchKey(("other",))
        for key in (KEY, other, BatchKey(("b",)), KEY, other):
            enter(plan, key=key)
        assert queued_by_key(plan) == {KEY: 3, other: 2}
        assert [plan.next_batch(0).rows for _ in range(2)] == [3, 2]

    def test_the_queue_is_bounded(self):
        plan = scheduler(queue_rows_max=4)
        enter(plan, 4)
        with pytest.raises(QueueFullError, match="holds 4 of at most 4"):
            enter(plan)
        assert plan.snapshot().counters.refused == 1
        plan.next_batch(0)
        enter(plan, 4)

    def test_a_closed_queue_takes_none(self):
        plan = scheduler()
        enter(plan, 2)
        plan.queue.refuse(EngineClosedError("closing"))
        with pytest.raises(EngineClosedError, match="closing"):
            enter(plan)
        assert plan.next_batch(0).rows == 2

    def test_those_of_several_ticks_keep_their_order_and_their_arrivals(self):
        plan = scheduler(rows_max=8, in_flight_max=1)
        enter(plan, now_ns=1)
        plan.next_batch(1)
        futures = enter(plan, 2, now_ns=2)
        assert plan.next_batch(2) is None
        futures += enter(plan, 3, now_ns=3)
        plan.queue.close_open()
        requests, rows = next(iter(plan.queue.buckets)).choose(8)
        found, _, arrived_ns = zip(*requests.entries, strict=True)
        assert (rows, list(found), arrived_ns) == (5, futures, (2, 2, 3, 3, 3))

    def test_objects_come_in_the_same_order(self):
        plan = scheduler(rows_max=8)
        futures = enter(plan, 2)
        several = submit(plan, rows=2, key=KEY)
        futures += enter(plan, 2)
        batch = plan.next_batch(0)
        assert [request.future for request in batch.requests] == [*futures[:2], None, *futures[2:]]
        assert batch.requests[2] is several
        assert {request.state for request in batch.requests} == {IN_FLIGHT}

    def test_an_urgent_request_goes_before_them(self):
        plan = scheduler(contexts=1)
        futures = enter(plan, 3)
        urgent = submit(plan, key=KEY, priority=1)
        urgent_first, *others = plan.next_batch(0).requests
        assert urgent_first is urgent
        assert [request.future for request in others] == futures

    def test_a_full_queue_displaces_the_latest(self):
        plan = scheduler(queue_rows_max=4)
        futures = enter(plan, 4)
        futures[3].is_done = True  # It leaves in this tick, which the scheduler is told afterwards.
        urgent = submit(plan, rows=2, key=KEY, priority=1)
        assert [request.future for request in plan.queue.take_displaced()] == [futures[3], futures[2]]
        assert not plan.cancel_plain(futures[3])
        assert ends_of(plan)[1:3] == (1, 1)
        assert plan.next_batch(0).requests[0] is urgent

    def test_closing_returns_each_once(self):
        plan = scheduler()
        futures = enter(plan, 5)
        assert [request.future for request in plan.close(EngineClosedError("closing"))] == futures
        assert plan.is_idle
        assert ends_of(plan) == (0, 5, 0, 5)

    def test_closing_returns_each_once_even_if_it_was_interrupted_while_it_moved(self):
        plan = scheduler()
        futures = enter(plan, 3)
        plan.queue.open.bucket.extend(list(plan.queue.open.entries))
        assert [request.future for request in plan.close(EngineClosedError("closing"))] == futures

    def test_a_model_that_raises_rejects_them(self):
        plan = scheduler(profiles=Profiles(profile=ZeroDivisionError()))
        futures = enter(plan, 3)
        futures[1].is_done = True
        rejected = plan.next_batch(0)
        assert [(request.future, request.state) for request in rejected.requests] == [
            (futures[0], State.FAILED),
            (futures[1], State.CANCELLED),
            (futures[2], State.FAILED),
        ]
        assert not plan.cancel_plain(futures[1])
        assert ends_of(plan) == (0, 2, 1, 3)


class TestLeaving:
    def test_one_that_is_queued(self):
        plan = scheduler()
        futures = enter(plan, 3)
        assert leave(plan, futures[1])
        assert (plan.queued_rows, ends_of(plan)) == (2, (0, 0, 1, 3))
        batch = plan.next_batch(0)
        assert [request.future for request in batch.requests] == [futures[0], futures[2]]
        assert not leave(plan, futures[0])
        finish(plan, batch)
        assert ends_of(plan) == (1, 0, 2, 3)

    def test_all_that_are_queued(self):
        plan = scheduler()
        for future in enter(plan, 5):
            assert leave(plan, future)
        assert plan.is_idle
        assert plan.next_batch(0) is None

    def test_one_in_flight_is_masked(self):
        plan = scheduler()
        futures = enter(plan, 3, now_ns=7)
        batch = plan.next_batch(7)
        assert not leave(plan, futures[0])
        assert waiting_in(batch.requests) == 2
        assert ends_of(plan) == (0, 0, 1, 3)
        finish(plan, batch, 17)
        assert ends_of(plan) == (2, 0, 1, 3)
        assert plan.snapshot().counters.total_ns == 20

    @pytest.mark.parametrize("are_made", [False, True])
    def test_one_in_flight_of_which_the_scheduler_is_told_after_its_batch(self, are_made):
        plan = scheduler()
        futures = enter(plan, 3)
        batch = plan.next_batch(0)
        if are_made:
            assert {request.state for request in batch.requests} == {IN_FLIGHT}
        futures[2].is_done = True
        if are_made:
            assert batch.requests[2].state is MASKED
        finish(plan, batch)
        assert ends_of(plan) == (2, 0, 0, 2)
        assert not plan.cancel_plain(futures[2])
        assert ends_of(plan) == (2, 0, 1, 3)

    def test_one_in_a_batch_that_fails(self):
        plan = scheduler()
        futures = enter(plan, 3)
        batch = plan.next_batch(0)
        leave(plan, futures[2])
        plan.failed(batch)
        assert [request.state for request in batch.requests] == [State.FAILED, State.FAILED, State.CANCELLED]
        assert ends_of(plan) == (0, 2, 1, 3)

    def test_one_in_a_batch_whose_halves_are_tried_again(self):
        plan = scheduler()
        futures = enter(plan, 4)
        batch = plan.next_batch(0)
        leave(plan, futures[0])
        assert plan.bisect(batch)
        leave(plan, futures[1])
        parts = [plan.next_batch(0) for _ in range(2)]
        found = [[request.future for request in part.requests] for part in parts]
        assert found == [[futures[2]], [futures[3]]]
        for part in parts:
            finish(plan, part)
        assert ends_of(plan) == (2, 0, 2, 4)

    def test_leaving_is_as_cheap_for_each_of_many(self):
        """The objects are made once, for all that are queued then."""
        plan = scheduler(queue_rows_max=4000)
        futures = enter(plan, 4000)
        random.Random(1).shuffle(futures)
        leave(plan, futures[0])
        made = dict(plan.queue._made)
        for future in futures[1:100]:
            leave(plan, future)
        assert all(plan.queue._made[future] is made[future] for future in futures[100:])
        assert plan.queued_rows == 3900


def test_what_is_queued_stands_in_a_bucket_as_its_objects_would():
    for by_age, rows_max in itertools.product((False, True), (2, 9)):
        plain, objects = BucketQueue(KEY, 3, 4), BucketQueue(KEY, 3, 4)
        futures = [Caller() for _ in range(5)]
        plain.extend([(future, at, 10 + at) for at, future in enumerate(futures)])
        for at, future in enumerate(futures):
            objects.push(Request(1, KEY, 0, 10 + at, payload=at, future=future))
        for bucket in (plain, objects):
            assert (bucket.rows, bucket.requests, bucket.head_rows(), bucket.head_priority) == (5, 5, 1, 0)
            assert bucket.oldest_arrival_ns() == 10
            assert bucket.overdue_ns() == 10 + PATIENCE_NS
        (chosen, rows), (right, right_rows) = plain.choose(rows_max, by_age), objects.choose(rows_max, by_age)
        assert rows == right_rows == min(rows_max, 5)
        assert [future for future, _, _ in chosen.entries] == [request.future for request in right]
        plain.take(chosen, rows)
        objects.take(right, rows)
        assert [request.future for request in plain.waiting()] == [r.future for r in objects.waiting()]
        assert [r.future for r in plain.newest(0)] == [r.future for r in objects.newest(0)]
        assert repr(plain) == repr(objects)


def test_an_empty_bucket_has_no_head():
    bucket = BucketQueue(KEY, 3, 4)
    assert (bucket.head_rows(), bucket.head_priority) == (0, -1)


def test_plain_requests_are_a_sequence_of_requests():
    futures = [Caller() for _ in range(3)]
    requests = PlainRequests([(future, "p", 4) for future in futures], KEY)
    assert (len(requests), holds(requests, futures[1]), holds(requests, Caller())) == (3, True, False)
    requests.launch()
    assert [request.future for request in requests] == futures
    assert requests[0] is next(iter(requests))
    assert requests[1:] == tuple(requests)[1:]
    assert (len(requests), [request.payload for request in requests]) == (3, ["p"] * 3)
    assert (holds(requests, futures[1]), holds(requests, Caller())) == (True, False)
    assert complete(requests) == (3, 12)


def test_objects_made_before_the_launch_are_launched_too():
    requests = PlainRequests([(Caller(), None, 0)], KEY)
    assert requests[0].state is QUEUED
    requests.launch()
    assert requests[0].state is IN_FLIGHT


def test_those_of_several_buckets_that_share_a_batch_are_launched_once():
    class Company(OneSize):
        def join(self, bucket, others, side_by_side=1):
            return bucket.key, tuple(
                (other, *other.choose(2)) for other in others if other is not bucket and other.rows
            )

    plan = scheduler(rows_max=8, company=Company())
    first, second = enter(plan, 3), enter(plan, 3, key=BatchKey(("other",)))
    batch = plan.next_batch(0)
    assert [request.future for request in batch.requests] == [*first, *second[:2]]
    assert {request.state for request in batch.requests} == {IN_FLIGHT}
    assert plan.queued_rows == 1
    finish(plan, batch)
    assert futures_of(plan.next_batch(0)) == second[2:]
    assert ends_of(plan) == (5, 0, 0, 6)


def test_a_batch_of_them_shows_how_many():
    requests = PlainRequests([(Caller(), None, 0)], KEY)
    assert "requests=1 " in repr(Batch(KEY, requests, 1, 1, None, 0))
