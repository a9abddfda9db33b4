"""Rules that no planted defect of the scheduler breaks alone: what they hold, said to them directly."""

import pytest

from asynctrt.errors import DeadlineUnreachableError, InternalError, QueueFullError
from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.estimates import QUANTILE
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import AGED_EVERY, Policy
from asynctrt.scheduling.request import Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from asynctrt.simulation.device import Flight
from asynctrt.simulation.rules import Limits, Rules


def made(**more):
    policy = Policy(rows_max=4)
    scheduler = Scheduler(
        policy=policy,
        shapes=Shapes(rows_max=4, profiles=None),
        queue_rows_max=8,
        priorities=1,
        contexts=2,
        arenas=0,
        in_flight_max=2,
    )
    return scheduler, Rules(scheduler, Limits(policy, 8, 2, 0, 2, **more))


def submit(scheduler, rules, rows=2, **how):
    request = Request(rows, BatchKey(), 0, 5, **how)
    scheduler.submit(request)
    rules.submitted(request)
    return request


def test_rows_of_another_caller_are_found():
    scheduler, rules = made()
    first, second = submit(scheduler, rules), submit(scheduler, rules)
    batch = scheduler.next_batch(6)
    rules.launched(batch, 6)
    swapped = batch._replace(requests=(second, first))
    first.state = second.state = State.DONE
    with pytest.raises(InternalError, match="request 2 got the rows"):
        rules.answered(Flight(swapped, lambda _: None), 9)


def test_an_expectation_after_the_end_is_found_where_times_are_exact():
    scheduler, rules = made(is_calm=True)
    submit(scheduler, rules)
    batch = scheduler.next_batch(6)
    rules.launched(batch, 6)
    scheduler.finished(batch, 9, 0, 3, 0)
    rules.answered(Flight(batch, lambda _: None), 9)
    submit(scheduler, rules)
    batch = scheduler.next_batch(10)
    rules.launched(batch, 10)
    rules.expected(batch, 10)
    scheduler.finished(batch, 13, 0, 3, 0)
    with pytest.raises(InternalError, match="was expected after its end"):
        rules.answered(Flight(batch, lambda _: None), 13)


def test_a_request_that_vanishes_is_found():
    _, rules = made()
    with pytest.raises(InternalError, match="requests have vanished"):
        rules.end(1)


def test_a_refusal_with_room_left_is_found():
    _, rules = made()
    with pytest.raises(InternalError, match="refused with room left"):
        rules.refused(Request(1, BatchKey(), 0, 5), QueueFullError("full"))


def launched(*rows, how=None, **more):
    """A scheduler with requests of so many rows, what holds its rules, and the batch that it gives."""
    scheduler, rules = made(**more)
    requests = [submit(scheduler, rules, count, **(how or {})) for count in rows]
    return rules, requests, scheduler.next_batch(6)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"context": 7}, "there is no context 7"),
        ({"context": -1}, "there is no context -1"),
        ({"context": 1}, "out of use"),
        ({"arena": 0}, "another arena than its own"),
        ({"rows": 2}, "a batch of 3 rows counts 2"),
        ({"rows_run": 2}, "a batch runs 2 of 3 rows"),
        ({"rows_run": 5}, "a batch runs 5 of 3 rows"),
        ({"rows_run": 4}, "3 rows were padded to 4"),
        ({"profile": 1}, "run with profile 1"),
        ({"key": BatchKey("other")}, "requests of different keys"),
        ({"reason": Reason.FULL}, "called full that is not"),
        ({"reason": Reason.TURN}, "a turn on a device that has room"),
        ({"reason": Reason.AHEAD}, "called ahead of none"),
        ({"reason": Reason.AGED}, "the overdue go first too often"),
        ({"reason": Reason.AGED, "number": AGED_EVERY}, "called aged in which nothing is"),
        ({"is_timed": False}, "not timed although all are"),
    ],
)
def test_what_is_wrong_with_a_batch_is_found(changed, broken):
    rules, _, batch = launched(1, 2, times_all=True)
    rules.quarantined.add(1)
    with pytest.raises(InternalError, match=broken):
        rules.launched(batch._replace(is_timed=True)._replace(**changed), 6)


@pytest.mark.parametrize(
    ("rows", "chosen", "broken"),
    [
        ((1, 1, 1), (0, 0, 1), "in a batch twice"),
        ((1, 1, 1), (1, 2), "leaves the head of its queue behind"),
        ((1, 1, 1), (0, 2), "request 3 went before request 2"),
        ((1, 2, 2), (0, 2), "request 3 went before request 2"),
    ],
)
def test_requests_in_the_wrong_order_are_found(rows, chosen, broken):
    rules, requests, batch = launched(*rows)
    inside = tuple([requests[number] for number in chosen])
    for request in requests:
        request.state = State.IN_FLIGHT if request in inside else State.QUEUED
    count = sum(request.rows for request in inside)
    with pytest.raises(InternalError, match=broken):
        rules.launched(batch._replace(requests=inside, rows=count, rows_run=count), 6)


def test_a_batch_that_is_launched_twice_is_found():
    rules, _, batch = launched(2)
    rules.launched(batch, 6)
    with pytest.raises(InternalError, match="launched that was not queued"):
        rules.launched(batch._replace(context=1 - batch.context), 6)


def test_a_launch_after_the_deadline_is_found():
    rules, _, batch = launched(2, how={"deadline_ns": 6})
    rules._pumped_ns = 5
    with pytest.raises(InternalError, match="launched after its deadline"):
        rules.launched(batch, 6)
    rules._pumped_ns = 4  # It came later, and had no chance before.
    rules.launched(batch, 6)


@pytest.mark.parametrize(
    ("predicted_s", "known", "broken"),
    [
        (1e-10, QUANTILE, "refused that would be in time"),
        (1.0, 0, "before there was anything to make it from"),
        (1.0, QUANTILE, "an idle engine refused"),
    ],
)
def test_a_refusal_for_being_late_that_cannot_be_right_is_found(predicted_s, known, broken):
    _, rules = made()
    rules._timed[(), 1] = known
    error = DeadlineUnreachableError("late")
    error.predicted_s = predicted_s
    with pytest.raises(InternalError, match=broken):
        rules.refused(Request(1, BatchKey(), 0, 5, deadline_ns=1000), error)


def test_wrong_counts_are_found():
    rules, requests, batch = launched(1, 2)
    with pytest.raises(InternalError, match="queued requests are miscounted"):
        rules._check_counts()
    with pytest.raises(InternalError, match="cancelling misjudged"):
        rules.cancelled(requests[0], was_queued=False)
    rules.launched(batch, 6)
    rules._check_counts()
    rules._check_statistics()
    rules.reasons[Reason.AGAIN] += 1
    with pytest.raises(InternalError, match="the reasons of batches are miscounted"):
        rules._check_statistics()
    with pytest.raises(InternalError, match="a batch is expected in the past"):
        rules._timed[(), 3] = 1
        rules.expected(batch, -1)


def test_what_never_ends_is_found():
    scheduler, rules = made()
    submit(scheduler, rules)
    with pytest.raises(InternalError, match="1 requests wait for ever"):
        rules.end(1)
    rules.launched(scheduler.next_batch(6), 6)
    with pytest.raises(InternalError, match="a batch never ended"):
        rules.end(1)
