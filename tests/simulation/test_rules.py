"""Rules that no planted defect of the scheduler breaks alone: what they hold, said to them directly."""

import pytest

from asynctrt.errors import InternalError, QueueFullError
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
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


def submit(scheduler, rules, rows=2):
    request = Request(rows, BatchKey(), 0, 5)
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
