"""The scheduler as a whole, event by event. Simulation runs it through everything at once."""

import dataclasses
import heapq
import math
import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from asynctrt.errors import (
    DeviceLostError,
    EngineClosedError,
    ExecutionError,
    InputError,
    InternalError,
    QueueFullError,
)
from asynctrt.scheduling.batch import Batch, Reason, RejectedBatch
from asynctrt.scheduling.counters import ARENA_WAIT_NS_MIN
from asynctrt.scheduling.key import FIXED_SHAPE
from asynctrt.scheduling.policies import PART_NS_MIN
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS, Captured, Policy
from asynctrt.scheduling.queues import TURNS_KEPT
from asynctrt.scheduling.request import Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.scheduling.support import (
    KEY,
    Profiles,
    between_operations,
    count_operations,
    finish,
    key_of,
    queued_by_key,
    scheduler,
    submit,
    took,
    usual_ns,
)


def counters(plan):
    return plan.snapshot().counters


def shape_of(batch):
    return batch.key.shape[0]


class TestWhatLaunches:
    def test_an_idle_device_launches_at_once_and_everything_that_is_there(self):
        plan = scheduler(delay_ns_max=10**6)
        requests = [submit(plan) for _ in range(3)]
        batch = plan.next_batch(0)
        assert batch.requests == tuple(requests)
        assert (batch.rows, batch.reason) == (3, Reason.IDLE)
        assert plan.queue.requests == plan.queued_rows == 0

    def test_a_busy_device_lets_the_batch_grow_and_forms_it_as_late_as_possible(self):
        plan = scheduler(contexts=4, concurrency=1)
        submit(plan)
        first = plan.next_batch(0)
        late = [submit(plan) for _ in range(3)]
        assert plan.next_batch(1) is None
        finish(plan, first)
        assert plan.next_batch(2).requests == tuple(late)

    def test_a_full_batch_goes_ahead_of_time_while_contexts_last(self):
        plan = scheduler(contexts=3, concurrency=1)
        for _ in range(12):
            submit(plan)
        assert [plan.next_batch(0).rows for _ in range(3)] == [4, 4, 4]

    def test_the_limit_on_batches_in_flight_holds_with_contexts_to_spare(self):
        plan = scheduler(contexts=3, in_flight_max=1)
        for _ in range(8):
            submit(plan)
        first = plan.next_batch(0)
        assert plan.next_batch(0) is None
        finish(plan, first)
        assert plan.next_batch(0) is not None

    def test_two_interleaved_shapes_do_not_destroy_batching(self):
        plan = scheduler(contexts=4, concurrency=4)
        for _ in range(4):
            submit(plan, shape="a")
            submit(plan, shape="b")
        batches = [plan.next_batch(0), plan.next_batch(0)]
        assert [(shape_of(batch), batch.rows) for batch in batches] == [("a", 4), ("b", 4)]

    def test_a_flood_of_one_shape_does_not_keep_another_waiting(self):
        plan = scheduler(contexts=1, concurrency=1, queue_rows_max=100)
        for _ in range(40):
            submit(plan, shape="flood")
        submit(plan, shape="drop")
        order = []
        for _ in range(3):
            batch = plan.next_batch(0)
            order.append(shape_of(batch))
            finish(plan, batch)
        assert order == ["flood", "drop", "flood"]

    @pytest.mark.parametrize("delay_ns", [0, 500])
    def test_nor_does_it_while_the_device_always_has_enough_in_flight(self, delay_ns):
        """The flood is refilled before each batch ends, so there is never a moment with room to spare."""
        plan = scheduler(contexts=4, concurrency=2, queue_rows_max=1000, delay_ns_max=delay_ns)
        for _ in range(40):
            submit(plan, shape="flood")
        flights = [plan.next_batch(0) for _ in range(4)]
        submit(plan, shape="drop", now_ns=0)
        launched = []
        for now_ns in range(1000, 5000, 1000):
            for _ in range(4):
                submit(plan, shape="flood", now_ns=now_ns)
            finish(plan, flights.pop(0))
            assert plan.in_flight >= 2
            flights.append(plan.next_batch(now_ns))
            launched.append((shape_of(flights[-1]), flights[-1].reason))
        assert ("drop", Reason.TURN) in launched[:2]

    def test_on_a_busy_device_the_more_urgent_goes_first_though_it_is_not_full(self):
        plan = scheduler(contexts=4, concurrency=1, queue_rows_max=100)
        for _ in range(20):
            submit(plan, shape="flood")
        plan.next_batch(0)
        submit(plan, shape="urgent", priority=2)
        batch = plan.next_batch(0)
        assert (shape_of(batch), batch.reason) == ("urgent", Reason.TURN)

    def test_a_more_urgent_request_overtakes_across_buckets(self):
        plan = scheduler(contexts=1)
        submit(plan, shape="calm")
        submit(plan, shape="urgent", priority=2)
        assert shape_of(plan.next_batch(0)) == "urgent"

    def test_rows_are_shared_out_over_idle_cores(self):
        plan = scheduler(rows_max=8, contexts=4, concurrency=4, is_parallel=True)
        submit(plan)
        finish(plan, plan.next_batch(0), compute_ns=100 * PART_NS_MIN)
        for _ in range(8):
            submit(plan)
        assert plan.next_batch(0).rows == 2

    def test_the_reasons_of_batches_are_counted(self):
        plan = scheduler(contexts=5, concurrency=3, delay_ns_max=10**6)
        submit(plan, shape="idle")
        submit(plan, shape="delay")
        submit(plan, shape="deadline", now_ns=100, deadline_ns=10**6 + 5 + DEADLINE_MARGIN_NS)
        reasons = [plan.next_batch(now_ns).reason for now_ns in (0, 10**6, 10**6 + 5)]
        for _ in range(4):
            submit(plan, shape="full", now_ns=10**6)
        submit(plan, shape="turn", now_ns=10**6, priority=1)
        reasons += [plan.next_batch(10**7).reason for _ in range(2)]
        assert reasons == [Reason.IDLE, Reason.DELAY, Reason.DEADLINE, Reason.TURN, Reason.FULL]
        assert counters(plan).launched == {
            **dict.fromkeys(Reason, 1),
            **dict.fromkeys((Reason.AGAIN, Reason.AHEAD, Reason.AGED), 0),
        }


class TestTheQueue:
    def test_a_full_queue_refuses_and_keeps_what_it_has(self):
        plan = scheduler(queue_rows_max=4)
        kept = submit(plan, rows=3)
        with pytest.raises(QueueFullError, match="holds 3 of at most 4 rows and has no room for 2 more"):
            submit(plan, rows=2)
        assert plan.next_batch(0).requests == (kept,)
        assert counters(plan).refused == 1

    def test_a_full_queue_gives_up_the_least_urgent_that_came_last(self):
        plan = scheduler(queue_rows_max=6)
        first, second, third = submit(plan, rows=2, priority=1), submit(plan), submit(plan, rows=2, shape="a")
        fourth = submit(plan, shape="a")
        urgent = submit(plan, rows=2, priority=2)
        assert plan.queue.displaced == [fourth, third]
        assert [one.state for one in (third, fourth)] == [State.FAILED] * 2
        assert plan.queued_rows == 5
        plan.queue.displaced.clear()
        for _ in range(2):
            submit(plan, priority=1)
        assert plan.queue.displaced == [second], "one row was left, and the others are as urgent"
        with pytest.raises(QueueFullError):
            submit(plan, priority=1)
        plan.next_batch(0), plan.next_batch(0)
        assert urgent.state is first.state is State.IN_FLIGHT
        assert (counters(plan).failed, counters(plan).refused) == (3, 1)

    def test_nobody_is_displaced_in_vain(self):
        profiles = Profiles()
        plan = scheduler(queue_rows_max=4, profiles=profiles)
        kept = [submit(plan, rows=2), submit(plan, rows=2, priority=1)]
        before = plan.snapshot().queued_rows
        for rows, priority in ((4, 1), (5, 2), (1, 0)):
            with pytest.raises(QueueFullError):
                submit(plan, rows=rows, priority=priority)
        profiles.ranges = InputError("no such shape")
        with pytest.raises(InputError):
            submit(plan, shape="unknown", priority=2)
        plan.queue.refuse(EngineClosedError("closing"))
        with pytest.raises(EngineClosedError):
            submit(plan, priority=2)
        assert plan.queue.displaced == []
        assert plan.snapshot().queued_rows == before
        assert [one.state for one in kept] == [State.QUEUED] * 2

    def test_parts_displace_as_one(self):
        plan = scheduler(queue_rows_max=8)
        kept = [submit(plan, rows=2) for _ in range(4)]
        parts = [Request(3, KEY, 1, 0) for _ in range(2)]
        plan.queue.submit(*parts)
        assert plan.queue.displaced == kept[:0:-1]
        assert plan.queued_rows == 8
        with pytest.raises(QueueFullError):
            plan.queue.submit(*[Request(2, KEY, 1, 0) for _ in range(2)])
        assert plan.queued_rows == 8

    def test_requests_that_left_are_not_displaced(self):
        plan = scheduler(queue_rows_max=3)
        requests = [submit(plan) for _ in range(3)]
        plan.cancel(requests[2])
        submit(plan, priority=1)
        submit(plan, priority=1)
        assert plan.queue.displaced == [requests[1]]

    def test_who_has_left_is_passed_over_once(self):
        """However many have been cancelled at the end of the queue, the next urgent request costs no more."""
        plan = scheduler(queue_rows_max=4000)
        requests = [submit(plan) for _ in range(4000)]
        for request in requests[2001:]:
            plan.cancel(request)
        for _ in range(1999):
            submit(plan, shape="other", priority=1)
        submit(plan, priority=1)
        assert plan.queue.displaced == [requests[2000]]
        assert count_operations(lambda: submit(plan, priority=1)) < 400
        assert plan.queue.displaced == [requests[2000], requests[1999]]
        assert plan.queued_rows == 4000
        while plan.next_batch(0) is not None:
            pass

    @pytest.mark.parametrize("buckets", [10, 5000])
    def test_displacing_takes_as_much_work_with_ten_buckets_as_with_thousands(self, buckets):
        plan = scheduler(queue_rows_max=buckets)
        for number in range(buckets):
            submit(plan, shape=str(number))
        # Among the first requests of each bucket there is nothing to skip.
        assert count_operations(lambda: submit(plan, priority=1, shape="0")) < 1500
        assert plan.queue.displaced

    def test_parts_are_queued_all_or_none(self):
        plan = scheduler(queue_rows_max=4)
        with pytest.raises(QueueFullError):
            plan.queue.submit(*[Request(3, KEY, 0, 0), Request(2, KEY, 0, 0)])
        assert plan.is_idle
        assert counters(plan).refused == 2
        plan.queue.submit(*[Request(2, KEY, 0, 0), Request(2, KEY, 0, 0)])
        assert plan.queued_rows == 4

    def test_a_queued_request_is_cancelled_without_a_trace(self):
        plan = scheduler()
        victim, other = submit(plan, rows=2), submit(plan)
        assert plan.cancel(victim)
        assert victim.state is State.CANCELLED
        assert (plan.queued_rows, plan.queue.requests) == (1, 1)
        assert plan.next_batch(0).requests == (other,)

    def test_a_request_in_flight_is_masked_and_its_mates_are_untouched(self):
        plan = scheduler()
        victim, mate = submit(plan), submit(plan)
        batch = plan.next_batch(0)
        assert not plan.cancel(victim)
        finish(plan, batch)
        assert (victim.state, mate.state) == (State.CANCELLED, State.DONE)
        assert (counters(plan).succeeded, counters(plan).cancelled) == (1, 1)

    def test_one_request_of_a_batch_in_flight_fails_alone(self):
        plan = scheduler()
        guilty, mate = submit(plan), submit(plan)
        batch = plan.next_batch(0)
        plan.fail_one(guilty)
        assert guilty.state is State.MASKED, "its rows run, and its caller has been told"
        finish(plan, batch)
        assert mate.state is State.DONE
        assert (counters(plan).succeeded, counters(plan).failed, counters(plan).cancelled) == (1, 1, 0)
        assert plan.is_idle

    def test_one_that_was_cancelled_before_does_not_fail_too(self):
        plan = scheduler()
        gone = submit(plan)
        batch = plan.next_batch(0)
        plan.cancel(gone)
        plan.fail_one(gone)
        plan.failed(batch)
        assert (counters(plan).cancelled, counters(plan).failed) == (1, 0)

    def test_cancelling_what_is_over_does_nothing(self):
        plan = scheduler()
        request = submit(plan)
        finish(plan, plan.next_batch(0))
        assert not plan.cancel(request)
        assert request.state is State.DONE
        assert counters(plan).cancelled == 0


class TestDeadlinesAndDelays:
    def test_deadlines_take_requests_out_of_the_queue_only(self):
        plan = scheduler(contexts=1)
        flying = submit(plan, deadline_ns=100)
        plan.next_batch(0)
        waiting, patient = submit(plan, deadline_ns=100), submit(plan)
        assert plan.next_wakeup() == 100
        assert plan.queue.expire(99) == []
        assert plan.queue.expire(100) == [waiting]
        assert [request.state for request in (flying, waiting, patient)] == [
            State.IN_FLIGHT,
            State.EXPIRED,
            State.QUEUED,
        ]
        assert plan.next_wakeup() is None
        assert counters(plan).expired == 1

    def test_a_request_without_any_time_to_wait_is_launched_by_an_idle_engine(self):
        """It is due as it arrives, so only those expire that had a chance to be launched."""
        plan = scheduler()
        request = submit(plan, now_ns=100, deadline_ns=100)
        assert plan.queue.expire(120, arrived_by_ns=99) == []
        assert plan.next_batch(120).requests == (request,)

    def test_and_expires_in_a_busy_one_once_it_had_its_chance(self):
        plan = scheduler(contexts=1)
        submit(plan)
        plan.next_batch(0)
        request = submit(plan, now_ns=100, deadline_ns=100)
        assert plan.queue.expire(120, arrived_by_ns=99) == []
        assert plan.next_batch(120) is None
        assert plan.queue.expire(120, arrived_by_ns=120) == [request]
        assert plan.queue.requests == plan.queued_rows == 0

    def test_the_end_of_a_delay_is_a_time_to_wake_up(self):
        plan = scheduler(delay_ns_max=500)
        submit(plan)
        plan.next_batch(0)
        submit(plan, now_ns=30)
        assert plan.next_batch(40) is None
        assert plan.next_wakeup() == 530
        batch = plan.next_batch(530)
        assert (batch.rows, batch.reason) == (1, Reason.DELAY)

    def test_the_earlier_of_a_delay_and_a_deadline_wakes(self):
        plan = scheduler(delay_ns_max=10**7)
        submit(plan, shape="flying")
        plan.next_batch(0)
        submit(plan, shape="a", deadline_ns=10**6)
        submit(plan, shape="b", deadline_ns=10**9)
        assert plan.next_wakeup() == 10**6 - DEADLINE_MARGIN_NS
        batch = plan.next_batch(10**6 - DEADLINE_MARGIN_NS)
        assert (shape_of(batch), batch.reason) == ("a", Reason.DEADLINE)

    def test_while_no_context_is_free_a_delay_wakes_nobody(self):
        plan = scheduler(delay_ns_max=500, contexts=1)
        submit(plan)
        plan.next_batch(0)
        submit(plan)
        assert plan.next_wakeup() is None

    def test_a_deadline_wakes_even_then(self):
        plan = scheduler(delay_ns_max=500, contexts=1)
        submit(plan)
        plan.next_batch(0)
        submit(plan, deadline_ns=10**6)
        assert plan.next_wakeup() == 10**6


class TestHowBatchesEnd:
    def test_a_failed_batch_frees_its_context_and_fails_its_requests(self):
        plan = scheduler(contexts=1)
        requests = [submit(plan), submit(plan)]
        batch = plan.next_batch(0)
        plan.cancel(requests[0])
        plan.failed(batch)
        assert [request.state for request in requests] == [State.CANCELLED, State.FAILED]
        assert counters(plan).failed == 1
        submit(plan)
        assert plan.next_batch(0) is not None

    def test_a_quarantined_batch_keeps_its_context(self):
        plan = scheduler(contexts=1)
        submit(plan)
        plan.failed(plan.next_batch(0), quarantine=True)
        submit(plan)
        assert plan.next_batch(0) is None
        assert plan.snapshot().contexts_quarantined == 1

    def test_with_its_last_context_in_quarantine_it_is_stuck(self):
        plan = scheduler(contexts=4, arenas=2)
        batches = []
        for shape in "ab":
            submit(plan, shape=shape)
            batches.append(plan.next_batch(0))
        assert [batch.arena for batch in batches] == [0, 1]
        for batch in batches:
            assert not plan.is_stuck
            plan.failed(batch, quarantine=True)
        assert plan.is_stuck

    @pytest.mark.parametrize("again", ["finished", "failed", "quarantined"])
    @pytest.mark.parametrize("first", ["finished", "failed"])
    def test_a_batch_ends_once(self, first, again):
        plan = scheduler()
        submit(plan)
        batch = plan.next_batch(0)
        if first == "finished":
            finish(plan, batch)
        else:
            plan.failed(batch)
        before = plan.snapshot(), repr(plan)
        with pytest.raises(InternalError, match="not in flight"):
            if again == "finished":
                plan.finished(batch, 0, took(copy_in_ns=1, compute_ns=1, copy_out_ns=1))
            else:
                plan.failed(batch, quarantine=again == "quarantined")
        assert (plan.snapshot(), repr(plan)) == before

    def test_a_batch_of_another_scheduler_is_not_in_flight_here(self):
        one, other = scheduler(), scheduler()
        for plan in (one, other):
            submit(plan)
        batch = one.next_batch(0)
        other.next_batch(0)
        with pytest.raises(InternalError, match="not in flight"):
            other.failed(batch)

    def test_a_batch_that_failed_is_not_expected_any_more(self):
        plan = scheduler(contexts=2, arenas=1)
        submit(plan)
        finish(plan, plan.next_batch(0), compute_ns=10**9)
        submit(plan)
        batch = plan.next_batch(0)
        assert plan.started(batch, 0) == 10**9
        plan.failed(batch)
        submit(plan)
        assert plan.started(plan.next_batch(50), 50) == 10**9


class TestProfiles:
    def test_batches_are_kept_on_contexts_of_their_profile(self):
        profiles = Profiles(profile=lambda shape, rows: int(rows > 1))
        plan = scheduler(profiles=profiles)
        contexts = {}
        for rows in (1, 2, 2, 1, 2):
            submit(plan, rows=rows)
            batch = plan.next_batch(0)
            assert batch.profile == (rows > 1)
            assert contexts.setdefault(rows, batch.context) == batch.context
            finish(plan, batch)
        assert contexts[1] != contexts[2]
        asked = [question for question in profiles.asked if question != KEY.shape]
        assert asked == [(KEY.shape, 1), (KEY.shape, 2)], "once for each size"

    def test_the_profile_is_chosen_for_the_rows_that_are_executed(self):
        profiles = Profiles(ranges=((3, 8),), profile=lambda shape, rows: rows)
        plan = scheduler(rows_max=8, profiles=profiles)
        submit(plan)
        batch = plan.next_batch(0)
        assert (batch.rows, batch.rows_run, batch.profile) == (1, 3, 3)

    def test_a_shape_has_its_own_limit(self):
        profiles = Profiles(ranges=lambda shape: ((1, shape[0]),))
        plan = scheduler(rows_max=8, profiles=profiles, contexts=4, concurrency=4)
        for _ in range(4):
            submit(plan, shape=2)
            submit(plan, shape=3)
        assert [plan.next_batch(0).rows for _ in range(4)] == [2, 3, 2, 1]


class Garbage(Exception):
    def __str__(self):
        raise RuntimeError("nor a message")


FAULTS = [
    RuntimeError("third-party bug"),
    Garbage(),
    DeviceLostError("lost"),
    InputError("no profile"),
    "garbage",
    None,
    float("nan"),
]


class TestAModelThatFails:
    """Its code is foreign, and is asked before any request leaves its queue."""

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
    def test_about_a_profile_rejects_this_batch_and_the_others_go_on(self, fault):
        def profile(shape, rows):
            return fault if shape == ("bad",) else 0

        plan = scheduler(profiles=Profiles(profile=profile), contexts=2, arenas=2)
        guilty = [submit(plan, shape="bad", priority=2) for _ in range(3)]
        innocent = [submit(plan, shape="good") for _ in range(2)]
        rejected = plan.next_batch(0)
        assert isinstance(rejected, RejectedBatch)
        assert rejected.requests == tuple(guilty)
        if isinstance(fault, DeviceLostError | InputError):
            assert rejected.error is fault
        else:
            assert isinstance(rejected.error, ExecutionError)
        assert all(request.state is State.FAILED for request in guilty)
        assert (plan.queue.requests, plan.queued_rows, plan.in_flight) == (2, 2, 0)
        batch = plan.next_batch(0)
        assert batch.requests == tuple(innocent)
        assert batch.number == 1
        finish(plan, batch)
        assert plan.is_idle
        assert (counters(plan).failed, counters(plan).succeeded) == (3, 2)
        for context in range(2):
            submit(plan, shape=f"good {context}")
            assert plan.next_batch(0) is not None, "no context was held"

    def test_and_goes_on_when_the_model_has_recovered(self):
        profiles = Profiles(profile=RuntimeError("for now"))
        plan = scheduler(profiles=profiles)
        submit(plan)
        assert isinstance(plan.next_batch(0), RejectedBatch)
        assert plan.next_batch(0) is None
        profiles.profile = 1
        submit(plan)
        assert plan.next_batch(0).profile == 1

    def test_only_the_requests_of_one_batch_are_rejected_at_a_time(self):
        plan = scheduler(rows_max=4, profiles=Profiles(profile=RuntimeError()), queue_rows_max=100)
        requests = [submit(plan) for _ in range(6)]
        plan.cancel(requests[1])
        rejected = []
        while plan.queued_rows:
            rejected.append(plan.next_batch(0).requests)
        assert rejected == [(requests[0], *requests[2:5]), (requests[5],)]
        assert plan.next_wakeup() is None

    @pytest.mark.parametrize("fault", [*FAULTS, (), ((3, 2),), ((0, 4),)], ids=repr)
    def test_about_the_rows_of_a_shape_refuses_the_request_and_changes_nothing(self, fault):
        plan = scheduler(profiles=Profiles(ranges=lambda shape: fault if shape == ("bad",) else ((1, 4),)))
        submit(plan, shape="good")
        before = repr(plan), plan.snapshot(), queued_by_key(plan), len(plan.queue.buckets.by_key)
        expected = type(fault) if isinstance(fault, DeviceLostError | InputError) else ExecutionError
        for _ in range(2):
            with pytest.raises(expected):
                submit(plan, shape="bad", deadline_ns=5)
            with pytest.raises(expected):
                plan.queue.submit(*[Request(1, key_of("bad"), 0, 0) for _ in range(2)])
            with pytest.raises(expected):
                plan.limit(key_of("bad"))
        assert (repr(plan), plan.snapshot(), queued_by_key(plan), len(plan.queue.buckets.by_key)) == before
        assert plan.next_wakeup() is None
        assert plan.next_batch(0).rows == 1


class TestRowsRun:
    def test_rows_are_padded_to_a_captured_size(self):
        plan = scheduler(rows_max=8, captured=Captured((1, 8)))
        submit(plan, rows=3, shape=FIXED_SHAPE)
        batch = plan.next_batch(0)
        assert (batch.rows, batch.rows_run) == (3, 8)
        finish(plan, batch, compute_ns=700)
        assert (counters(plan).rows, counters(plan).rows_padded) == (3, 5)
        assert list(counters(plan).by_rows) == [3], "a batch is known by the rows that were asked for"
        submit(plan, rows=8, shape=FIXED_SHAPE)
        assert usual_ns(plan, plan.next_batch(0))[1] == 700, "but it took as long as those that were executed"

    @pytest.mark.parametrize("variant", [{"on_device": True}, {"outputs_on_device": True}])
    def test_so_are_rows_on_the_device(self, variant):
        plan = scheduler(rows_max=8, captured=Captured((1, 8)))
        submit(plan, rows=3, shape=FIXED_SHAPE._replace(**variant))
        assert plan.next_batch(0).rows_run == 8

    def test_so_are_rows_of_other_shapes(self):
        """If any size is captured, it is captured of each shape that rows can have."""
        plan = scheduler(rows_max=8, captured=Captured((1, 8)))
        submit(plan, rows=3)
        assert plan.next_batch(0).rows_run == 8

    def test_a_batch_that_was_not_timed_teaches_nothing(self):
        plan = scheduler(rows_max=4, concurrency=1)
        for _ in range(7):
            submit(plan)
            batch = plan.next_batch(0)
            finish(plan, batch, compute_ns=1000 if batch.is_timed else 7)
        submit(plan)
        assert usual_ns(plan, plan.next_batch(0))[1] == 1000
        assert (counters(plan).batches, counters(plan).batches_timed) == (7, 4)

    def test_a_device_that_times_for_nothing_times_all(self):
        plan = scheduler(times_all=True)
        for _ in range(20):
            submit(plan)
            batch = plan.next_batch(0)
            assert batch.is_timed
            finish(plan, batch)
        plan.times.times_all = False
        submit(plan)
        assert not plan.next_batch(0).is_timed


class TestClosing:
    def test_refusing_lets_the_queue_go_on(self):
        plan = scheduler()
        submit(plan)
        plan.queue.refuse(EngineClosedError("draining"))
        with pytest.raises(EngineClosedError, match="draining"):
            submit(plan)
        assert plan.next_batch(0) is not None

    def test_closing_takes_what_was_to_be_tried_again(self):
        plan = scheduler()
        requests = [submit(plan) for _ in range(4)]
        batch = plan.next_batch(0)
        plan.cancel(requests[3])
        assert plan.bisect(batch)
        plan.cancel(requests[2])
        other = submit(plan)
        assert plan.close(EngineClosedError("closed")) == [*requests[:2], other]
        assert requests[2].state is State.CANCELLED
        assert plan.is_idle
        totals = counters(plan)
        assert (totals.failed, totals.cancelled, totals.ended) == (3, 2, 5)

    def test_nothing_is_tried_again_after_closing(self):
        plan = scheduler()
        submit(plan), submit(plan)
        batch = plan.next_batch(0)
        plan.close(EngineClosedError("closed"))
        assert not plan.bisect(batch)
        plan.failed(batch)
        assert plan.is_idle

    def test_closing_takes_everything_queued_and_leaves_what_is_in_flight(self):
        plan = scheduler(contexts=1, delay_ns_max=500)
        flying = submit(plan)
        batch = plan.next_batch(0)
        waiting = [submit(plan, shape="a"), submit(plan, shape="c", priority=1, deadline_ns=9)]
        assert plan.close(EngineClosedError("closed")) == waiting
        assert all(request.state is State.FAILED for request in waiting)
        assert plan.queue.expire(10) == []
        assert plan.next_wakeup() is None
        finish(plan, batch)
        assert flying.state is State.DONE
        assert plan.is_idle
        assert plan.next_batch(10**9) is None

    def test_each_refusal_is_a_fresh_error_of_the_type_that_was_given(self):
        plan = scheduler()
        plan.close(DeviceLostError("lost"))
        errors = []
        for _ in range(2):
            with pytest.raises(DeviceLostError, match="lost") as caught:
                submit(plan)
            errors.append(caught.value)
        assert errors[0] is not errors[1]


class TestSnapshots:
    def test_a_batch_is_counted_with_its_times(self):
        plan = scheduler(contexts=1, arenas=1)
        for now_ns in (10, 20):
            submit(plan, now_ns=now_ns)
        finish(plan, plan.next_batch(100), now_ns=1000, arena_wait_ns=ARENA_WAIT_NS_MIN + 1)
        totals = counters(plan)
        assert (totals.batches, totals.rows, totals.queue_ns) == (1, 2, 90 + 80)
        assert (totals.copy_in_ns, totals.compute_ns, totals.copy_out_ns) == (2, 40, 600)
        assert (totals.total_ns, totals.busy_ns) == (990 + 980, 20)
        assert (totals.arena_waits, totals.arena_wait_ns) == (1, ARENA_WAIT_NS_MIN + 1)
        size = totals.by_rows[2]
        assert (size.count, size.copy_in_ns, size.compute_ns, size.copy_out_ns) == (1, 1, 20, 300)

    def test_a_masked_request_is_in_no_sum_of_times(self):
        plan = scheduler()
        gone, there = [submit(plan, now_ns=now_ns) for now_ns in (10, 20)]
        batch = plan.next_batch(100)
        plan.cancel(gone)
        finish(plan, batch, now_ns=1000)
        totals = counters(plan)
        assert (totals.succeeded, totals.cancelled, totals.rows) == (1, 1, 2)
        assert (totals.queue_ns, totals.compute_ns, totals.total_ns) == (80, 20, 980)
        assert there.state is State.DONE

    def test_a_snapshot_is_the_callers_own(self):
        plan = scheduler()
        submit(plan)
        finish(plan, plan.next_batch(0))
        before = plan.snapshot()
        kept = dataclasses.asdict(before.counters)
        submit(plan)
        finish(plan, plan.next_batch(0))
        assert dataclasses.asdict(before.counters) == kept
        before.counters.by_rows.clear()
        before.counters.launched.clear()
        assert plan.snapshot().counters.by_rows[1].count == 2
        assert plan.snapshot().counters.launched[Reason.IDLE] == 2

    @pytest.mark.parametrize("look", [lambda plan: plan.snapshot(), repr])
    def test_another_thread_may_look_in_the_middle_of_everything(self, look):
        plan = scheduler(contexts=8, in_flight_max=8, queue_rows_max=10**6)
        in_flight, shapes = [], count()

        def go_on():
            """What the loop's thread may do in between: each dictionary grows and shrinks."""
            submit(plan, shape=str(next(shapes)))
            batch = plan.next_batch(0)
            if batch is not None:
                in_flight.append(batch)
            if len(in_flight) > 4 or batch is None:
                finish(plan, in_flight.pop(0))
                submit(plan, shape=str(next(shapes)))

        for _ in range(20):
            go_on()
        done = between_operations(look, plan, go_on=go_on)
        assert done > 20

    def test_what_is_queued_and_in_flight(self):
        plan = scheduler(contexts=1)
        submit(plan)
        plan.next_batch(0)
        submit(plan, rows=2)
        submit(plan, rows=3, shape="a")
        snapshot = plan.snapshot()
        assert (snapshot.queued_requests, snapshot.queued_rows, snapshot.in_flight_batches) == (2, 5, 1)
        assert queued_by_key(plan) == {key_of("b"): 2, key_of("a"): 3}

    def test_repr_shows_the_state(self):
        plan = scheduler()
        submit(plan, rows=2)
        assert repr(plan) == (
            "<Scheduler open queued=1 rows=2 in_flight=0 <ContextAllocator free=2 quarantined=0>>"
        )
        plan.close(EngineClosedError("closed"))
        assert repr(plan) == (
            "<Scheduler closed queued=0 rows=0 in_flight=0 <ContextAllocator free=2 quarantined=0>>"
        )


class TestBisecting:
    def test_halves_and_new_batches_take_turns_until_one_request_is_left(self):
        plan = scheduler(contexts=1)
        requests = [submit(plan) for _ in range(3)]
        launched = []
        while (batch := plan.next_batch(0)) is not None:
            launched.append((batch.reason, [requests.index(one) for one in batch.requests]))
            if len(launched) == 1:
                requests += [submit(plan, shape="a", priority=2), submit(plan, shape="c")]
            # The third request is the bad one.
            if requests[2] not in batch.requests:
                finish(plan, batch)
            elif not plan.bisect(batch):
                plan.failed(batch)
        assert launched == [
            (Reason.IDLE, [0, 1, 2]),
            (Reason.AGAIN, [0, 1]),
            (Reason.IDLE, [3]),
            (Reason.AGAIN, [2]),
            (Reason.IDLE, [4]),
        ]
        assert [one.state for one in requests].count(State.DONE) == 4
        assert requests[2].state is State.FAILED

    def test_the_part_that_most_wait_for_goes_first(self):
        plan = scheduler(rows_max=8, contexts=2)
        requests = [submit(plan) for _ in range(10)]
        batches = plan.next_batch(0), plan.next_batch(0)
        for batch in reversed(batches):
            plan.bisect(batch)
        parts = []
        while (part := plan.next_batch(0)) is not None:
            parts.append([requests.index(one) for one in part.requests])
            finish(plan, part)
        assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8], [9]]

    @pytest.mark.parametrize("settings", [{"delay_ns_max": 100}, {"in_flight_max": 2, "contexts": 3}])
    def test_a_part_does_not_wait_for_a_batch_that_is_not_due(self, settings):
        plan = scheduler(concurrency=1, **settings)
        requests = [submit(plan) for _ in range(4)]
        plan.bisect(plan.next_batch(0))
        assert plan.next_batch(0).requests == tuple(requests[:2])
        submit(plan, now_ns=1)
        assert plan.next_batch(1).requests == tuple(requests[2:])

    def test_rows_and_profiles_are_asked_anew(self):
        plan = scheduler(rows_fixed=4)
        submit(plan), submit(plan)
        plan.bisect(plan.next_batch(0))
        batch = plan.next_batch(0)
        assert (batch.rows, batch.rows_run, batch.reason) == (1, 4, Reason.AGAIN)

    def test_a_model_that_fails_to_say_rejects_the_part_alone(self):
        profiles = Profiles()
        plan = scheduler(profiles=profiles)
        requests = [submit(plan) for _ in range(2)]
        plan.bisect(plan.next_batch(0))
        profiles.profile = RuntimeError("no more")
        rejected = plan.next_batch(0)
        assert isinstance(rejected, RejectedBatch)
        assert rejected.requests == (requests[0],)
        profiles.profile = 0
        assert plan.next_batch(0).requests == (requests[1],)
        assert counters(plan).failed == 1

    def test_a_batch_that_is_not_in_flight(self):
        plan = scheduler()
        submit(plan), submit(plan)
        batch = plan.next_batch(0)
        finish(plan, batch)
        with pytest.raises(InternalError, match="not in flight"):
            plan.bisect(batch)

    def test_whoever_left_has_no_part(self):
        plan = scheduler()
        requests = [submit(plan) for _ in range(4)]
        batch = plan.next_batch(0)
        plan.cancel(requests[0])
        plan.bisect(batch)
        plan.cancel(requests[1])
        assert plan.next_batch(0).requests == (requests[2],)
        assert plan.next_batch(0).requests == (requests[3],)
        assert [one.state for one in requests[:2]] == [State.CANCELLED] * 2
        assert counters(plan).cancelled == 2

    def test_a_model_that_always_fails_is_asked_twice_for_each_request_at_the_most(self):
        plan = scheduler(rows_max=64, queue_rows_max=10**6, contexts=1)
        for _ in range(3 * 64):
            submit(plan)
        while (batch := plan.next_batch(0)) is not None:
            if not plan.bisect(batch):
                assert len(batch.requests) == 1
                plan.failed(batch)
        assert sum(counters(plan).launched.values()) == 3 * (2 * 64 - 1)
        assert plan.is_idle

    @pytest.mark.parametrize("contexts", [1, 3])
    @pytest.mark.parametrize(
        ("share", "callers", "rate"),
        [(0.001, 1024, 0.6), (0.01, 256, 0.5), (0.05, 256, 0.5), (0.25, 256, 0.4), (0.5, 256, 0.12)],
    )
    def test_every_healthy_request_of_many_callers_is_answered_after_few_runs(
        self, share, callers, rate, contexts
    ):
        """They ask again at once. Batches take as long as their rows say, also when they fail.

        :param rate: how much of the healthy answers there are at least, beside those without any bad ones.
        """
        world = Callers(callers, share, contexts)
        world.run(batches=3000)
        assert world.failed <= world.bad
        assert max(world.runs.values()) <= 1 + math.log2(64)
        # What failed has every second turn at most, and the largest part of it goes first.
        alone = Callers(callers, 0.0, contexts)
        alone.run(batches=100)
        assert world.rate > rate * alone.rate
        assert world.longest_ns < 3000 * world.batch_ns(64)


class Callers:
    """Callers who always ask again, of which a share sends what makes batches fail, in simulated time."""

    def __init__(self, callers, share, contexts):
        limits = {"contexts": contexts, "concurrency": contexts, "in_flight_max": contexts}
        self.plan = scheduler(rows_max=64, queue_rows_max=callers, **limits)
        self.random = random.Random(5)
        self.callers = callers
        self.bad_callers = set(self.random.sample(range(callers), round(share * callers)))
        self.caller_of, self.runs = {}, Counter()
        self.bad, self.failed = set(), set()
        self.answered = self.longest_ns = self.now_ns = 0

    @staticmethod
    def batch_ns(rows):
        return 2_000_000 + 20_000 * rows

    @property
    def rate(self):
        return self.answered / self.now_ns

    def ask(self, caller):
        request = submit(self.plan, now_ns=self.now_ns)
        self.caller_of[request] = caller
        if caller in self.bad_callers:
            self.bad.add(request)

    def run(self, batches):
        for caller in self.random.sample(range(self.callers), self.callers):
            self.ask(caller)
        flights = []
        for _ in range(batches):
            while (batch := self.plan.next_batch(self.now_ns)) is not None:
                self.runs.update(batch.requests)
                heapq.heappush(flights, (self.now_ns + self.batch_ns(batch.rows), batch.number, batch))
            self.now_ns, _, batch = heapq.heappop(flights)
            over = batch.requests
            if self.bad.isdisjoint(batch.requests):
                finish(self.plan, batch, self.now_ns)
                self.answered += len(over)
            elif self.plan.bisect(batch):
                over = ()
            else:
                self.plan.failed(batch)
                self.failed.update(over)
            for request in over:
                self.longest_ns = max(self.longest_ns, self.now_ns - request.arrival_ns)
                self.ask(self.caller_of.pop(request))


@pytest.mark.parametrize("delay_ns", [0, 500])
def test_deciding_takes_as_much_work_with_ten_buckets_waiting_as_with_thousands(delay_ns):
    """Submitting, launching and finishing, of buckets that come and go."""

    def work(buckets):
        plan = scheduler(delay_ns_max=delay_ns, queue_rows_max=10_000, contexts=1, priorities=1)
        for number in range(buckets):
            submit(plan, shape=number)
        finish(plan, plan.next_batch(10**6))

        def turns():
            for number in range(5):
                submit(plan, shape=f"new {number}", now_ns=10**6)
                finish(plan, plan.next_batch(10**6))
                plan.next_wakeup()
                plan.queue.expire(10**6)

        return count_operations(turns)

    assert work(5000) == work(10)


@settings(max_examples=100, deadline=None)
@given(
    shapes=some.integers(2, 6),
    events=some.lists(
        some.tuples(
            some.sampled_from(["submit", "submit", "cancel", "pump", "end"]), some.integers(0, 10**6)
        ),
        max_size=150,
    ),
    contexts=some.integers(1, 4),
    concurrency=some.integers(1, 2),
)
def test_no_bucket_waits_for_more_batches_than_turns_allow(shapes, events, contexts, concurrency):
    """That is one of each other bucket, and those that buckets which fill batches keep."""
    plan = scheduler(
        rows_max=2, contexts=contexts, concurrency=concurrency, queue_rows_max=10_000, priorities=1
    )
    queued, flights, passed_over = [], [], {}
    # Whatever came before, one shape that fills every batch is then there as long as it takes.
    flood = [("submit", 1), ("submit", 1 + 2 * shapes), ("end", 0), ("pump", 0)] * 11 * shapes
    for what, choice in events + flood:
        if what == "submit":
            queued.append(submit(plan, rows=1 + choice % 2, shape=choice % shapes))
        elif what == "cancel" and queued:
            plan.cancel(queued.pop(choice % len(queued)))
        elif what == "end" and flights:
            finish(plan, flights.pop(choice % len(flights)))
        elif what == "pump" and (batch := plan.next_batch(0)) is not None:
            assert isinstance(batch, Batch)
            flights.append(batch)
            queued = [request for request in queued if request.state is State.QUEUED]
            passed_over.pop(batch.key, None)
            for key in {request.key for request in queued} - {batch.key}:
                passed_over[key] = passed_over.get(key, 0) + 1
        waiting = {request.key for request in queued}
        passed_over = {key: count for key, count in passed_over.items() if key in waiting}
        assert all(count < (TURNS_KEPT + 1) * shapes for count in passed_over.values())
    assert plan.queue.requests == len(queued)


def test_half_of_the_rows_is_put_on_an_idle_device_first_as_both_are_padded():
    shapes = Shapes(rows_max=8, profiles=None)
    shapes.restrict((4, 8))
    policy = Policy(8, concurrency=2, is_pipelined=True)
    plan = Scheduler(
        policy=policy,
        shapes=shapes,
        queue_rows_max=64,
        priorities=3,
        contexts=2,
        arenas=0,
        in_flight_max=2,
    )
    now_ns = 0
    for rows in (4, 8) * 16:
        submit(plan, rows=rows)
        batch = plan.next_batch(now_ns)
        plan.started(batch, now_ns)
        now_ns += 20 * 1_000_000
        plan.times.observe_copies(batch, rows * 1_000_000, 0)
        plan.landed(batch, now_ns)
        plan.finished(batch, now_ns, took(rows * 1_000_000, (rows + 1) * 1_000_000, 0))
    for _ in range(6):
        submit(plan)
    # 4 + 5 + 5 ms instead of 8 + 9.
    batch = plan.next_batch(now_ns)
    assert (batch.rows, batch.rows_run) == (3, 4)
