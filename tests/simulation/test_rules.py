"""Rules that no planted defect of the scheduler breaks alone: what they hold, said to them directly."""

import pytest

from asynctrt.errors import DeadlineUnreachableError, InternalError, QueueFullError
from asynctrt.scheduling.batch import Reason, RejectedBatch
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policies import RunAs, TakeOneRequest
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queue import Queue
from asynctrt.scheduling.queues import Buckets
from asynctrt.scheduling.request import Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.simulation.device import Flight
from tests.simulation.rules import OVERDUE_PAUSE_MAX, OVERDUE_PAUSE_MIN, Limits, ModelDefectError, Rules


def made(policy=None, priorities=1, **more):
    policy = policy or Policy(rows_max=4)
    scheduler = Scheduler(
        policy=policy,
        shapes=Shapes(rows_max=4, profiles=None),
        queue_rows_max=8,
        priorities=priorities,
        contexts=2,
        arenas=0,
        in_flight_max=2,
    )
    return scheduler, Rules(scheduler, Limits(policy, 8, 2, 0, 2, **more))


def submit(scheduler, rules, rows=2, *, key=None, priority=0, arrival_ns=5, **how):
    request = Request(rows, key or BatchKey(), priority, arrival_ns, **how)
    scheduler.queue.submit(request)
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
        ({"reason": Reason.AGED, "number": OVERDUE_PAUSE_MIN}, "called aged in which nothing is"),
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
        (1e-10, 2, "refused that would be in time"),
        (1.0, 0, "before there was enough to make it from"),
        (1.0, 2, "an idle engine refused"),
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


def from_model():
    """What a scheduler raises after its model did."""
    error = InternalError("the model raised")
    error.__cause__ = ModelDefectError("planted")
    return error


@pytest.mark.parametrize(
    ("told", "broken"),
    [
        (lambda rules, one: rules.expired([one], 9, 9), "an expired request goes on"),
        (lambda rules, one: rules.rejected(RejectedBatch((one,), from_model())), "a rejected request goes"),
        (
            lambda rules, one: rules.rejected(RejectedBatch((one,), ValueError("no"))),
            "a batch was rejected: ValueError: no",
        ),
        (lambda rules, one: rules.row_refused(one), "a request that failed alone goes on"),
        (lambda rules, one: rules.closed([one], InternalError("over")), "queued at the end goes on"),
        (lambda rules, one: rules.refused(one, ValueError("no")), "a request was refused: ValueError: no"),
        (lambda rules, one: rules._end(one, State.DONE), "ended otherwise than its batch"),
        (
            lambda rules, one: rules.displaced([one], Request(8, BatchKey(), 1, 5)),
            "a displaced request goes on",
        ),
        (
            lambda rules, one: rules.displaced([one], Request(1, BatchKey(), 1, 5)),
            "more requests were displaced than had to be",
        ),
    ],
)
def test_a_request_that_goes_on_or_has_to_go_for_nothing_is_found(told, broken):
    scheduler, rules = made()
    request = submit(scheduler, rules, deadline_ns=8)
    with pytest.raises(InternalError, match=broken):
        told(rules, request)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"state": State.DONE}, "is not queued"),
        ({"reserve_ns": 1}, "time is set aside that nobody asked for"),
    ],
)
def test_a_request_that_is_taken_wrongly_is_found(changed, broken):
    _, rules = made()
    request = Request(1, BatchKey(), 0, 5)
    for name, value in changed.items():
        setattr(request, name, value)
    with pytest.raises(InternalError, match=broken):
        rules.submitted(request)


def test_a_request_that_leaves_twice_is_found():
    scheduler, rules = made()
    request = submit(scheduler, rules, deadline_ns=8)
    assert scheduler.queue.expire(9) == [request]
    rules.expired([request], 9, 9)
    with pytest.raises(InternalError, match="request 1 left the queue twice"):
        rules.expired([request], 9, 9)


def test_parts_of_a_failed_batch_that_are_wrong_are_found():
    rules, requests, batch = launched(1, 2)
    rules.launched(batch, 6)
    with pytest.raises(InternalError, match="a batch of one request was bisected"):
        rules.bisected(batch._replace(requests=requests[:1]))
    rules._again.append(tuple(requests))
    with pytest.raises(InternalError, match="came back as something else"):
        rules._take_again((requests[1], requests[0]))
    rules._again.append(tuple(requests))
    with pytest.raises(InternalError, match="a part of a batch that failed is never tried again"):
        rules.end(2)


def test_a_scheduler_that_is_not_idle_in_the_end_is_found():
    scheduler, rules = made()
    scheduler.queue.submit(Request(1, BatchKey(), 0, 5))
    with pytest.raises(InternalError, match="the scheduler is not idle"):
        rules.end(0)


def test_contexts_out_of_use_that_are_miscounted_are_found():
    _, rules = made()
    rules.quarantined.add(1)
    with pytest.raises(InternalError, match="0 contexts are counted out of use"):
        rules._check_statistics()


def test_a_queue_over_its_bound_is_found(monkeypatch):
    monkeypatch.setattr(Queue, "_make_room", lambda self, requests, rows: None)
    scheduler, rules = made()
    for _ in range(2):
        submit(scheduler, rules, 4)
    with pytest.raises(InternalError, match="the queue is over its bound"):
        submit(scheduler, rules, 1)


def test_one_that_failed_alone_and_is_answered_with_its_batch_is_found():
    scheduler, rules = made()
    alone, other = submit(scheduler, rules), submit(scheduler, rules)
    batch = scheduler.next_batch(6)
    rules.launched(batch, 6)
    scheduler.fail_one(alone)
    rules.row_refused(alone)
    scheduler.failed(batch)
    assert (alone.state, other.state) == (State.CANCELLED, State.FAILED)
    alone.state = State.FAILED
    with pytest.raises(InternalError, match="a request that failed alone was answered again"):
        rules.failed(batch, quarantine=False)


def test_company_for_a_request_that_is_to_be_alone_is_found(monkeypatch):
    monkeypatch.setattr(TakeOneRequest, "rows_max", lambda self, *_: 4)
    monkeypatch.setattr(RunAs, "find", lambda self, key, rows: (4, None))
    scheduler, rules = made(Policy(rows_max=4, is_alone=True))
    for _ in range(2):
        submit(scheduler, rules, 1)
    with pytest.raises(InternalError, match="to be alone has company"):
        rules.launched(scheduler.next_batch(6), 6)


def test_a_prediction_of_a_closed_engine_is_found():
    scheduler, rules = made()
    why = InternalError("over")
    rules.closed(scheduler.close(why), why)
    with pytest.raises(InternalError, match="a closed engine tells how late"):
        rules.refused(Request(1, BatchKey(), 0, 5, deadline_ns=1000), DeadlineUnreachableError("late"))


def test_a_less_urgent_bucket_that_goes_first_is_found(monkeypatch):
    def pick(self, now_ns, in_flight):
        return min(self, key=lambda bucket: bucket.priority), Reason.IDLE

    monkeypatch.setattr(Buckets, "pick", pick)
    scheduler, rules = made(priorities=2)
    submit(scheduler, rules, key=BatchKey("urgent"), priority=1)
    submit(scheduler, rules, key=BatchKey("other"))
    with pytest.raises(InternalError, match="a less urgent bucket went first"):
        rules.launched(scheduler.next_batch(6), 6)


def test_what_is_less_overdue_than_another_and_goes_first_is_found(monkeypatch):
    def overdue(self, now_ns):
        return max(self, key=lambda bucket: bucket.oldest_arrival_ns())

    monkeypatch.setattr(Buckets, "overdue", overdue)
    scheduler, rules = made(Policy(rows_max=4, patience_ns=10), priorities=2)
    scheduler._number = OVERDUE_PAUSE_MAX
    submit(scheduler, rules, key=BatchKey("first"), arrival_ns=5)
    submit(scheduler, rules, key=BatchKey("second"), arrival_ns=6, priority=1)
    batch = scheduler.next_batch(20)
    assert batch.reason is Reason.AGED
    with pytest.raises(InternalError, match="another is more overdue"):
        rules.launched(batch, 20)


@pytest.mark.parametrize(
    ("late_ns", "broken"),
    [
        (None, "nobody watches when the device wants the next batch"),
        (201, "the next batch would be late"),
        (200, None),
    ],
)
def test_a_next_batch_that_comes_late_is_found(monkeypatch, late_ns, broken):
    """On a device that copies while it computes; the batch there ends at 106."""
    policy = Policy(rows_max=4, is_pipelined=True, concurrency=2)
    scheduler, rules = made(policy, is_calm=True, batch_ns=100)
    submit(scheduler, rules)
    batch = scheduler.next_batch(6)
    rules.launched(batch, 6)
    rules._timed[batch.key.shape, batch.rows_run] = 1
    rules.expected(batch, 100)
    submit(scheduler, rules, 1)
    monkeypatch.setattr(Scheduler, "next_wakeup", lambda self: None if late_ns is None else 106 + late_ns)
    if broken is None:
        rules.pumped(7)
        return
    with pytest.raises(InternalError, match=broken):
        rules.pumped(7)


def test_rows_of_a_bucket_that_are_miscounted_are_found(monkeypatch):
    """Those of all buckets together are right."""

    def submitted(self, request):
        submit_one(self, request)
        self._bucket.rows += (request.key.shape == "more") - (request.key.shape == "fewer")

    submit_one = Queue.submit
    monkeypatch.setattr(Queue, "submit", submitted)
    scheduler, rules = made()
    for name in ("more", "fewer"):
        submit(scheduler, rules, key=BatchKey(name))
    with pytest.raises(InternalError, match="the rows of a bucket are miscounted"):
        rules._check_statistics()
