"""What waits, and the open batch, which requests join without a decision. The rest: with the scheduler."""

import pytest

from asynctrt.errors import EngineClosedError, QueueFullError
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request
from tests.scheduling.support import KEY, scheduler, submit


def plain(count):
    return [Request(1, KEY, 0, 0) for _ in range(count)]


def opened(**kw):
    """A scheduler with an open batch, and the two requests that it is open behind."""
    plan = scheduler(**kw)
    return plan, [submit(plan, key=KEY) for _ in range(2)]


def test_one_row_of_the_same_key_joins_the_open_batch_and_is_queued_like_any_other():
    plan, requests = opened(queue_rows_max=7)
    joined = plain(5)
    assert all(plan.queue.open.join(request) for request in joined)
    assert (plan.queued_rows, plan.queued_requests, plan.queued_by_key()) == (7, 7, {KEY: 7})
    assert repr(plan.queue) == "<Queue requests=7 rows=7>"
    assert plan.next_batch(0).requests == (*requests, *joined[:2])
    assert plan.next_batch(0).requests == tuple(joined[2:])


def test_none_is_open_for_a_lone_request():
    plan = scheduler()
    for _ in range(3):
        submit(plan, key=KEY)
        assert not plan.queue.open.join(*plain(1))
        assert plan.next_batch(0) is not None or plan.in_flight == 2


@pytest.mark.parametrize(
    "request_",
    [
        Request(2, KEY, 0, 0),
        Request(1, KEY, 1, 0),
        Request(1, KEY, 0, 0, 10),
        Request(1, BatchKey(("other",)), 0, 0),
    ],
)
def test_what_needs_a_decision_does_not_join(request_):
    plan, _ = opened()
    assert not plan.queue.open.join(request_)
    assert plan.queue.open.join(*plain(1))


def test_the_open_batch_takes_as_many_as_the_queue_has_room_for():
    plan, _ = opened(queue_rows_max=4)
    first, second, third = plain(3)
    assert plan.queue.open.join(first)
    assert plan.queue.open.join(second)
    assert not plan.queue.open.join(third)
    with pytest.raises(QueueFullError, match="holds 4 of at most 4"):
        plan.queue.submit(third)


@pytest.mark.parametrize("event", ["cancel", "refuse", "next_batch"])
def test_nothing_joins_once_a_decision_was_made(event):
    plan, requests = opened()
    (joined,) = plain(1)
    assert plan.queue.open.join(joined)
    if event == "cancel":
        assert plan.cancel(joined)
    elif event == "refuse":
        plan.refuse(EngineClosedError("closing"))
    else:
        assert plan.next_batch(0).requests == (*requests, joined)
    assert not plan.queue.open.join(*plain(1))


def test_an_urgent_request_goes_before_those_in_the_open_batch():
    plan, requests = opened(contexts=1)
    (joined,) = plain(1)
    assert plan.queue.open.join(joined)
    urgent = submit(plan, key=KEY, priority=1)
    assert plan.next_batch(0).requests == (urgent, *requests, joined)


def test_closing_returns_each_request_once():
    plan, requests = opened()
    joined = plain(2)
    assert all(plan.queue.open.join(request) for request in joined)
    assert plan.close(EngineClosedError("closing")) == [*requests, *joined]
    assert plan.is_idle
