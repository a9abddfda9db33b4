"""What is refused because it would be too late, what goes first, and that nothing starves."""

import gc
import weakref
from contextlib import suppress

import pytest

from asynctrt.errors import DeadlineError, DeadlineUnreachableError, EngineClosedError, QueueFullError
from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.batch_times import SURE_SAMPLES
from asynctrt.scheduling.forecast import PROBE_NS_MIN
from asynctrt.scheduling.policy import AGED_EVERY, PATIENCE_NS, Policy
from asynctrt.scheduling.request import Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.scheduling.support import finish, key_of, submit

MS = 1_000_000


def made(rows_max=4, *, contexts=1, priorities=3, queue_rows_max=64, **policy):
    return Scheduler(
        policy=Policy(rows_max, **policy),
        shapes=Shapes(rows_max=rows_max, profiles=None),
        contexts=contexts,
        arenas=0,
        in_flight_max=contexts,
        queue_rows_max=queue_rows_max,
        priorities=priorities,
        times_all=True,
    )


def measured(took_ns=10 * MS, **how):
    """A scheduler that has seen batches of one row and of four, which all take as long."""
    plan = made(**how)
    for rows in (1, 4) * SURE_SAMPLES:
        submit(plan, rows, deadline_ns=10**17)  # From the first deadline on, it notes when batches end.
        finish(plan, plan.next_batch(0), compute_ns=took_ns)
    use_up_the_probe(plan)
    return plan


def counters(plan):
    return plan.snapshot().counters


def shape_of(batch):
    return batch.key.shape[0]


def use_up_the_probe(plan):
    plan.queue._forecast._probe_ns = 10**18


def launched(plan, now_ns):
    batch = plan.next_batch(now_ns)
    plan.started(batch, now_ns)
    return batch


class TestRefusals:
    def test_nothing_is_refused_before_there_are_measurements(self):
        plan = made()
        use_up_the_probe(plan)
        submit(plan, 4)
        launched(plan, 0)
        for _ in range(10):
            submit(plan, 4, deadline_ns=1)
        assert counters(plan).refused_late == 0

    @pytest.mark.parametrize("how", ["late", "late but tried", "late but tried, and there is no room"])
    def test_what_is_refused_is_not_kept(self, how):
        class Rows:
            pass

        plan = measured(queue_rows_max=8, answers_in_time=True)
        submit(plan, 4)
        launched(plan, 0)
        submit(plan, 4 if how == "late but tried" else 8)
        if how != "late":
            plan.queue._forecast._probe_ns = 0
        payload = Rows()
        kept = weakref.ref(payload)
        gc.disable()
        try:
            with suppress(DeadlineUnreachableError, QueueFullError):
                submit(plan, deadline_ns=MS, payload=payload)
            for request in plan.close(EngineClosedError("closed")):
                request.payload = None
            del payload, request
            assert kept() is None
        finally:
            gc.enable()

    def test_what_would_not_be_launched_in_time_is_refused_at_once_with_the_prediction(self):
        plan = measured()
        submit(plan, 4)
        launched(plan, 0)
        submit(plan, 4, deadline_ns=11 * MS)  # Next.
        with pytest.raises(
            DeadlineUnreachableError, match=r"launched in 20\.000 ms.*timeout is 19\.000 ms"
        ) as told:
            submit(plan, 1, deadline_ns=19 * MS)
        assert isinstance(told.value, DeadlineError)
        assert isinstance(told.value, TimeoutError)
        assert told.value.predicted_s == pytest.approx(0.02)
        assert (counters(plan).refused, counters(plan).refused_late) == (1, 1)
        assert plan.queued_rows == 4
        submit(plan, 1, deadline_ns=20 * MS)

    def test_what_goes_first_by_its_deadline_does_not_wait_for_what_is_due_later(self):
        plan = measured()
        submit(plan, 4)
        launched(plan, 0)
        for _ in range(8):
            submit(plan, 4)
        submit(plan, 4, deadline_ns=10 * MS)
        with pytest.raises(DeadlineUnreachableError):
            submit(plan, 4, deadline_ns=9 * MS)

    def test_what_is_more_urgent_goes_first(self):
        plan = measured()
        submit(plan, 4)
        launched(plan, 0)
        for _ in range(8):
            submit(plan, 4, priority=1)
        submit(plan, 4, priority=2, deadline_ns=11 * MS)
        submit(plan, 4, priority=2, deadline_ns=21 * MS)
        with pytest.raises(DeadlineUnreachableError, match="8 rows go first"):
            submit(plan, 4, priority=2, deadline_ns=29 * MS)
        with pytest.raises(DeadlineUnreachableError, match="40 rows go first"):
            submit(plan, 4, priority=0, deadline_ns=100 * MS)

    def test_a_call_in_parts_is_late_if_its_last_part_is_and_then_none_is_queued(self):
        plan = measured()
        submit(plan, 4)
        launched(plan, 0)
        parts = [Request(4, key_of(), 0, 0, 25 * MS) for _ in range(3)]
        with pytest.raises(DeadlineUnreachableError, match="30.000 ms"):
            plan.queue.submit(*parts)
        assert plan.queue.requests == 0
        assert counters(plan).refused_late == 3
        plan.queue.submit(*parts[:2])

    def test_a_closed_engine_says_that_it_is_closed(self):
        plan = measured()
        submit(plan, 4)
        launched(plan, 0)
        plan.close(EngineClosedError("closed"))
        with pytest.raises(EngineClosedError):
            submit(plan, 1, deadline_ns=1)

    def test_an_idle_engine_launches_whatever_has_any_time(self):
        plan = measured()
        submit(plan, 1, deadline_ns=1)
        assert plan.next_batch(0).rows == 1


class TestAnswersInTime:
    def test_time_to_compute_is_set_aside(self):
        plan = measured(answers_in_time=True)
        request = submit(plan, 1, deadline_ns=30 * MS)
        assert (request.deadline_ns, request.reserve_ns) == (20 * MS, 10 * MS)
        launched(plan, 0)
        waits = submit(plan, 1, deadline_ns=21 * MS)
        with pytest.raises(DeadlineUnreachableError, match=r"answered in 20\.000 ms.*timeout is 19\.000 ms"):
            submit(plan, 1, deadline_ns=19 * MS)
        assert plan.queue.expire(12 * MS) == [waits], "it could not be answered in time any more"

    def test_what_takes_too_long_by_itself_is_refused_although_nothing_waits(self):
        plan = measured(answers_in_time=True)
        with pytest.raises(DeadlineUnreachableError, match="answered in 10.000 ms"):
            submit(plan, 1, deadline_ns=9 * MS)

    def test_full_batches_wait_for_the_device(self):
        """What is launched cannot make room for what is due earlier."""
        plan = measured(answers_in_time=True, contexts=3)
        for _ in range(3):
            submit(plan, 4)
        launched(plan, 0)
        assert plan.next_batch(0) is None

    def test_a_wrong_prediction_refuses_for_a_while_and_not_for_ever(self):
        """Batches took a second once, and take 5 ms now. Requests have 50 ms."""
        plan = measured(1000 * MS, answers_in_time=True)
        plan.queue._forecast._probe_ns = 0
        now_ns, taken = 0, []
        for _ in range(2000):
            now_ns += 50 * MS
            try:
                submit(plan, 1, now_ns=now_ns, deadline_ns=now_ns + 50 * MS)
            except DeadlineUnreachableError:
                taken.append(False)
                continue
            taken.append(True)
            batch = launched(plan, now_ns)
            now_ns += 5 * MS
            finish(plan, batch, now_ns, compute_ns=5 * MS)
        assert not any(taken[1:100]), "a probe takes the device for as long as was told"
        assert all(taken[-900:])

    def test_what_is_right_is_tried_now_and_then_alone(self):
        plan = measured(10 * MS, answers_in_time=True)
        plan.queue._forecast._probe_ns = 0
        taken = 0
        for now_ns in range(0, 1000 * MS, MS):
            try:
                submit(plan, 1, now_ns=now_ns, deadline_ns=now_ns + 9 * MS)
            except DeadlineUnreachableError:
                continue
            taken += 1
            finish(plan, launched(plan, now_ns), now_ns, compute_ns=10 * MS)
        assert taken == pytest.approx(1000 * MS / max(80 * MS, PROBE_NS_MIN), abs=1)


class TestOrder:
    def test_the_earliest_deadline_goes_first_and_those_without_one_after_it(self):
        plan = made(1)
        requests = [submit(plan, deadline_ns=due) for due in (50 * MS, 10 * MS, 30 * MS)]
        free = submit(plan)
        soon = submit(plan, deadline_ns=20 * MS)
        order = []
        for _ in range(5):
            batch = plan.next_batch(0)
            order += batch.requests
            finish(plan, batch)
        assert order == [requests[1], soon, requests[2], requests[0], free]

    def test_later_deadlines_do_not_keep_a_request_without_one_waiting_for_more_than_its_patience(self):
        plan = made(1, queue_rows_max=10**4)
        free = submit(plan)
        order, now_ns = [], 0
        while free.state is State.QUEUED:
            submit(plan, now_ns=now_ns, deadline_ns=now_ns + 20 * MS)
            batch = plan.next_batch(now_ns)
            order += batch.requests
            now_ns += 5 * MS
            finish(plan, batch, now_ns)
        assert PATIENCE_NS - 25 * MS <= now_ns <= PATIENCE_NS + 5 * MS

    def test_the_bucket_of_the_earliest_deadline_has_every_second_turn(self):
        plan = made(1)
        for shape in ("a", "b", "c"):
            for _ in range(3):
                submit(plan, shape=shape)
        for number in range(3):
            submit(plan, shape="late", deadline_ns=(number + 1) * MS)
        order = []
        for _ in range(7):
            batch = plan.next_batch(0)
            order.append(shape_of(batch))
            finish(plan, batch)
        assert order == ["late", "a", "late", "b", "late", "c", "a"]

    @pytest.mark.parametrize("shape", ["b", "other"])
    def test_one_batch_in_some_starts_with_what_has_waited_for_too_long(self, shape):
        """Whether it may share a batch with what is more urgent, or not."""
        plan = made(1)
        waiting = [submit(plan) for _ in range(3)]
        now_ns = PATIENCE_NS
        reasons = []
        for _ in range(4 * AGED_EVERY):
            submit(plan, shape=shape, priority=2, now_ns=now_ns)
            batch = plan.next_batch(now_ns)
            reasons.append(batch.reason)
            if batch.reason is Reason.AGED:
                assert batch.requests == (waiting.pop(0),)
            finish(plan, batch, now_ns)
        assert not waiting
        assert [number for number, reason in enumerate(reasons) if reason is Reason.AGED] == [7, 15, 23]

    def test_the_urgent_always_go_first_before_that(self):
        plan = made(1)
        waits = submit(plan)
        for number in range(4 * AGED_EVERY):
            now_ns = number * PATIENCE_NS // (4 * AGED_EVERY)
            submit(plan, priority=1, now_ns=now_ns)
            batch = plan.next_batch(now_ns)
            assert batch.requests[0].priority == 1
            finish(plan, batch, now_ns)
        assert waits.state is State.QUEUED
