"""Which requests a batch takes so that it ends in time, and which are too late for any."""

import pytest

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.batch_times import SURE_SAMPLES, WINDOW
from asynctrt.scheduling.policy import AGED_EVERY, Policy
from asynctrt.scheduling.request import Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.scheduling.support import Profiles, finish, key_of, make_batch, submit

MS = 1_000_000
MARGIN = MS // 4  # A 16th of the shortest batch.


def took_ns(rows):
    """Two ms a row, and two besides."""
    return (2 + 2 * rows) * MS


def measured(*, rows_max=4, pipelined=False, sizes=(1, 2, 3, 4), samples=SURE_SAMPLES, part=1.0, **policy):
    """A scheduler that knows what batches take: a part of what `took_ns` says."""
    plan = Scheduler(
        policy=Policy(
            rows_max, answers_in_time=True, is_pipelined=pipelined, concurrency=1 + pipelined, **policy
        ),
        shapes=Shapes(rows_max=rows_max, profiles=None),
        contexts=3,
        arenas=int(pipelined),
        in_flight_max=3,
        queue_rows_max=1000,
        priorities=3,
        times_all=True,
    )
    for _ in range(max(samples, 16 * pipelined)):
        for rows in sizes:
            submit(plan, rows, now_ns=-9_000 * MS)
            finish(plan, plan.next_batch(-9_000 * MS), -9_000 * MS, compute_ns=int(took_ns(rows) * part))
    plan.queue._forecast._probe_ns = 10**18
    return plan


def take(plan, *timeouts_ms, now_ms=0.0, rows=1, **how):
    """Queue requests with these timeouts, from the earliest to the latest."""
    now_ns = int(now_ms * MS)
    return [
        submit(plan, rows, now_ns=now_ns, deadline_ns=now_ns + int(timeout * MS), **how)
        for timeout in timeouts_ms
    ]


def launch(plan, now_ms=0.0):
    batch = plan.next_batch(int(now_ms * MS))
    if batch is not None:
        plan.started(batch, int(now_ms * MS))
    return batch


@pytest.mark.parametrize(
    ("timeouts_ms", "launched", "given_up"),
    [
        # All are in time together: 4 rows take 10 ms.
        ([10.6, 10.6, 10.6, 10.6], 4, 0),
        # The first is not, and goes first: the others wait for 4 ms, and then take 8 ms.
        ([9, 14, 14, 14], 3, 0),
        ([5, 14, 14, 14], 1, 0),
        # If that makes more of the others late than it saves, it is given up.
        ([5, 11, 11, 11], 3, 1),
        # As if it is as many, but there are enough to fill a batch.
        ([5, 11, 13, 13, 13], 4, 1),
        ([5, 11, 20, 20, 20], 4, 1),
        # If it is as many, and there are not, the one that may still be in time goes first.
        ([5, 10, 20], 1, 0),
        # Who cannot be in time even alone makes room: then the others are.
        ([4.1, 7, 20], 2, 1),
    ],
)
def test_a_batch_ends_in_time_for_all_in_it(timeouts_ms, launched, given_up):
    plan = measured()
    requests = take(plan, *timeouts_ms)
    batch = launch(plan)
    assert batch.rows == launched
    assert len(plan.queue.expire(0)) == given_up
    for request in batch.requests:
        assert took_ns(batch.rows) + MARGIN <= request.deadline_ns + request.reserve_ns
    assert [request.state for request in requests].count(State.EXPIRED) == given_up
    assert plan.snapshot().counters.expired == given_up


def test_short_batches_have_a_tenth_of_a_millisecond_to_spare():
    plan = measured(part=0.1)
    tight, other = take(plan, 0.68, 9)  # Together they compute for 0.6 ms, alone for 0.4.
    assert launch(plan).requests == (tight,)
    assert other.state is State.QUEUED


def test_the_wait_for_the_device_is_counted():
    plan = measured(pipelined=True)
    submit(plan, 4)
    assert launch(plan).rows == 4  # Until 10 ms.
    late, soon = take(plan, 15.5, 40, now_ms=0.1)
    # Together they would be answered at 16 ms, which is too late for one; alone at 14 ms, and 18 ms.
    batch = launch(plan, 9.95)
    assert batch.requests == (late,)
    assert plan.queue.expire(int(9.95 * MS)) == []
    assert soon.state is State.QUEUED


def test_a_batch_begins_when_the_device_is_free_and_it_has_been_copied():
    plan = measured(pipelined=True)
    submit(plan, 4)
    launch(plan)  # Until 10 ms.
    late, other = take(plan, 14.17, 40, now_ms=0.1)
    # In 0.1 ms it is in place, and at 14.3 ms it would have ended.
    batch = launch(plan, 9.99)
    assert batch.requests == (other,)
    assert plan.queue.expire(int(9.95 * MS)) == [late]


def test_what_a_batch_takes_counts_from_its_launch_where_it_begins_at_once():
    """On a CPU: that it is handed to a thread, and that its end is noticed, takes time as well."""
    plan = measured(sizes=(1,), samples=0)
    for number in range(SURE_SAMPLES):
        submit(plan)
        batch = plan.next_batch(number * 100 * MS)
        finish(plan, batch, (number * 100 + 9) * MS, compute_ns=4 * MS)
    assert plan.times.occupied.late(("b",), 1) == 9 * MS - 301


def test_a_batch_for_what_is_most_overdue_is_not_split():
    plan = measured(patience_ns=MS)
    plan._turns.aged_number = -AGED_EVERY
    first, *others = take(plan, 5, 14, 14, 14)
    for request in (first, *others):
        request.arrival_ns = request.since_ns = -10 * MS
    submit(plan, shape="urgent", priority=1)
    batch = launch(plan)
    assert batch.reason is Reason.AGED
    assert batch.requests == tuple(others)
    assert plan.queue.expire(0) == [first]


def test_the_way_back_of_the_outputs_is_counted():
    plan = measured()
    plan.times.observe_copies(make_batch(rows=4), 0, MS)
    take(plan, 11.2, 11.2, 11.2, 11.2)  # 10 ms, 1 ms to be copied out, and the margin.
    assert launch(plan).rows == 3


def test_one_whose_outputs_would_come_too_late_is_not_computed_for_nothing():
    """Though nobody else wants the device, and it would have computed in time."""
    plan = measured()
    plan.times.observe_copies(make_batch(rows=1), 0, MS)
    (late,) = take(plan, 10)
    assert launch(plan, 5.5) is None  # 4 ms, and 1 ms to be copied out.
    assert plan.queue.expire(int(5.5 * MS)) == [late]


def test_what_waits_for_the_device_for_too_long_is_given_up_before_it_costs_anything():
    plan = measured(pipelined=True)
    submit(plan, 4)
    launch(plan)
    taken, other = take(plan, 16.5, 60, now_ms=0.1)
    # It takes longer than was told.
    batch = launch(plan, 13)
    assert batch.requests == (other,)
    assert plan.queue.expire(13 * MS) == [taken]


def test_a_request_that_tries_a_prediction_goes_in_any_case():
    plan = measured()
    plan.queue._forecast._probe_ns = 0
    (trial,) = take(plan, 1)
    others = take(plan, 9, 9)
    assert set(launch(plan).requests) == {trial, *others}


def test_all_parts_of_a_call_that_tries_a_prediction_go():
    """Else the first of them would be given up, and the last with it, so that nothing was ever measured."""
    plan = measured()
    plan.queue._forecast._probe_ns = 0
    parts = [Request(4, key_of(), 0, 0, deadline_ns=MS) for _ in range(3)]
    plan.queue.submit(*parts)
    for part in parts:
        batch = plan.next_batch(0)
        assert batch.requests == (part,)
        finish(plan, batch)
    assert plan.queue.expire(0) == []


@pytest.mark.parametrize("shapes", [1, 200])
def test_thousands_are_given_up_at_once(shapes):
    """Batches take much longer all of a sudden, so that all that waits is too late."""
    plan = measured(rows_max=1, sizes=(1,), samples=WINDOW)
    plan.queue.rows_max = 2000
    late = [submit(plan, shape=f"{number % shapes}", deadline_ns=10_000 * MS) for number in range(1500)]
    for number in range(shapes):
        for _ in range(WINDOW):
            plan.times.occupied.observe((f"{number}",), 1, 20_000 * MS)
            plan.times.compute.observe((f"{number}",), 1, 20_000 * MS)
    assert launch(plan, 1) is None
    assert set(plan.queue.expire(MS)) == set(late)
    assert plan.is_idle
    assert plan.snapshot().counters.expired == len(late)


def test_what_is_not_sure_is_tried_when_nobody_else_wants_the_device():
    """Some batches took ten times as long, so that most is said to be late."""
    plan = measured(sizes=(1,), samples=WINDOW)
    for _ in range(2):
        submit(plan, 1)
        finish(plan, plan.next_batch(0), 0, compute_ns=40 * MS)
    requests = take(plan, 9, 9, 9)
    assert launch(plan).requests == (requests[0],)
    assert plan.queue.expire(0) == []


def test_nothing_is_given_up_before_there_are_measurements():
    plan = measured(samples=SURE_SAMPLES - 1, sizes=(4,))
    requests = take(plan, 1, 1, 1)
    assert launch(plan).requests == tuple(requests)


def test_a_model_that_fails_to_say_what_it_runs_fails_its_batch():
    profiles = Profiles()
    plan = Scheduler(
        policy=Policy(4, answers_in_time=True),
        shapes=Shapes(rows_max=4, profiles=profiles),
        contexts=1,
        arenas=0,
        in_flight_max=1,
        queue_rows_max=16,
        priorities=1,
        times_all=True,
    )
    for _ in range(SURE_SAMPLES):
        submit(plan, 4)
        finish(plan, plan.next_batch(0), compute_ns=10 * MS)
    profiles.profile = RuntimeError("no")
    (request,) = take(plan, 5, rows=2)
    rejected = plan.next_batch(0)
    assert rejected.requests == (request,)
