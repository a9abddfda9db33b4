"""The scheduler as a whole, event by event. Simulation runs it through everything at once."""

import pytest

from asynctrt.errors import DeviceLostError, EngineClosedError, QueueFullError
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.request import Request, State
from asynctrt.scheduling.scheduler import ARENA_WAIT_NS_MIN, Scheduler


def scheduler(rows_max=4, delay_ns_max=0, queue_rows_max=16, contexts=2, slots=2, **kw):
    return Scheduler(
        policy=Policy(rows_max, delay_ns_max, slots, is_parallel=False),
        queue_rows_max=queue_rows_max,
        priorities=3,
        contexts=contexts,
        arenas=kw.pop("arenas", 0),
        in_flight_max=kw.pop("in_flight_max", contexts),
        **kw,
    )


def submit(plan, rows=1, bucket="b", priority=0, now_ns=0, **kw):
    request = Request(rows, bucket, priority, now_ns, **kw)
    plan.submit(request)
    return request


def complete(plan, launch, now_ns=0, **kw):
    plan.complete(launch, now_ns, copy_in_ns=1, compute_ns=20, copy_out_ns=300, **kw)


def test_an_idle_device_launches_at_once_and_everything_that_is_there():
    plan = scheduler(delay_ns_max=10**6)
    requests = [submit(plan) for _ in range(3)]
    launch = plan.next_launch(0)
    assert launch.requests == requests
    assert launch.rows == 3
    assert plan.queued_requests == plan.queued_rows == 0


def test_a_busy_device_lets_the_batch_grow_and_forms_it_as_late_as_possible():
    plan = scheduler(contexts=4, slots=1)
    submit(plan)
    first = plan.next_launch(0)
    late = [submit(plan) for _ in range(3)]
    assert plan.next_launch(1) is None
    complete(plan, first)
    assert plan.next_launch(2).requests == late


def test_a_full_batch_goes_ahead_of_time_while_contexts_last():
    plan = scheduler(contexts=3, slots=1)
    for _ in range(12):
        submit(plan)
    assert [plan.next_launch(0).rows for _ in range(3)] == [4, 4, 4]


def test_two_interleaved_shapes_do_not_destroy_batching():
    plan = scheduler(contexts=4, slots=4)
    for _ in range(4):
        submit(plan, bucket="a")
        submit(plan, bucket="b")
    launches = [plan.next_launch(0), plan.next_launch(0)]
    assert [(launch.bucket, launch.rows) for launch in launches] == [("a", 4), ("b", 4)]


def test_a_flood_of_one_shape_does_not_keep_another_waiting():
    plan = scheduler(contexts=1, slots=1, queue_rows_max=100)
    for _ in range(40):
        submit(plan, bucket="flood")
    submit(plan, bucket="drop")
    order = []
    for _ in range(3):
        launch = plan.next_launch(0)
        order.append(launch.bucket)
        complete(plan, launch)
    assert order == ["flood", "drop", "flood"]


def test_a_more_urgent_request_overtakes_across_buckets():
    plan = scheduler(contexts=1)
    submit(plan, bucket="calm")
    submit(plan, bucket="urgent", priority=2)
    assert plan.next_launch(0).bucket == "urgent"


def test_a_full_queue_refuses_and_keeps_what_it_has():
    plan = scheduler(queue_rows_max=4)
    kept = submit(plan, rows=3)
    with pytest.raises(QueueFullError, match="holds 3 of at most 4 rows and has no room for 2 more"):
        submit(plan, rows=2)
    assert plan.next_launch(0).requests == [kept]
    assert plan.ledger.totals.refused == 1


def test_parts_are_queued_all_or_none():
    plan = scheduler(queue_rows_max=4)
    with pytest.raises(QueueFullError):
        plan.submit_all([Request(3, "b", 0, 0), Request(2, "b", 0, 0)])
    assert plan.is_idle
    assert plan.ledger.totals.refused == 2


def test_a_queued_request_is_cancelled_without_a_trace():
    plan = scheduler()
    victim, other = submit(plan, rows=2), submit(plan)
    assert plan.cancel(victim)
    assert victim.state is State.CANCELLED
    assert (plan.queued_rows, plan.queued_requests) == (1, 1)
    assert plan.next_launch(0).requests == [other]


def test_a_request_in_flight_is_masked_and_its_mates_are_untouched():
    plan = scheduler()
    victim, mate = submit(plan), submit(plan)
    launch = plan.next_launch(0)
    assert not plan.cancel(victim)
    complete(plan, launch)
    assert (victim.state, mate.state) == (State.CANCELLED, State.DONE)
    totals = plan.ledger.totals
    assert (totals.succeeded, totals.cancelled) == (1, 1)


def test_cancelling_what_is_over_does_nothing():
    plan = scheduler()
    request = submit(plan)
    complete(plan, plan.next_launch(0))
    assert not plan.cancel(request)
    assert request.state is State.DONE
    assert plan.ledger.totals.cancelled == 0


def test_deadlines_take_requests_out_of_the_queue_only():
    plan = scheduler(contexts=1)
    flying = submit(plan, deadline_ns=100)
    plan.next_launch(0)
    waiting, patient = submit(plan, deadline_ns=100), submit(plan)
    assert plan.next_wakeup() == 100
    assert plan.expire(99) == []
    assert plan.expire(100) == [waiting]
    assert (flying.state, waiting.state, patient.state) == (
        State.IN_FLIGHT,
        State.EXPIRED,
        State.QUEUED,
    )
    assert plan.next_wakeup() is None


def test_the_end_of_a_delay_is_a_time_to_wake_up():
    plan = scheduler(delay_ns_max=500, contexts=2)
    submit(plan)
    plan.next_launch(0)
    submit(plan, now_ns=30)
    assert plan.next_launch(40) is None
    assert plan.next_wakeup() == 530
    assert plan.next_launch(530).rows == 1


def test_while_no_context_is_free_a_delay_wakes_nobody():
    plan = scheduler(delay_ns_max=500, contexts=1)
    submit(plan)
    plan.next_launch(0)
    submit(plan)
    assert plan.next_wakeup() is None


def test_a_failed_batch_frees_its_context_and_fails_its_requests():
    plan = scheduler(contexts=1)
    requests = [submit(plan), submit(plan)]
    launch = plan.next_launch(0)
    plan.cancel(requests[0])
    plan.fail(launch)
    assert [request.state for request in requests] == [State.CANCELLED, State.FAILED]
    assert plan.ledger.totals.failed == 1
    submit(plan)
    assert plan.next_launch(0) is not None


def test_a_quarantined_batch_keeps_its_context():
    plan = scheduler(contexts=1)
    submit(plan)
    plan.fail(plan.next_launch(0), quarantine=True)
    submit(plan)
    assert plan.next_launch(0) is None


def test_with_its_last_context_in_quarantine_it_is_stuck():
    plan = scheduler(contexts=4, arenas=2)
    launches = []
    for bucket in "ab":
        submit(plan, bucket=bucket)
        launches.append(plan.next_launch(0))
    assert [launch.arena for launch in launches] == [0, 1]
    for launch in launches:
        assert not plan.is_stuck
        plan.fail(launch, quarantine=True)
    assert plan.is_stuck


def test_batches_are_kept_on_contexts_of_their_kind():
    asked = []

    def kind_of(bucket, rows):
        asked.append((bucket, rows))
        return rows > 1

    plan = scheduler(contexts=2, slots=2, kind_of=kind_of)
    contexts = {}
    for rows in (1, 2, 2, 1, 2):
        submit(plan, rows=rows, bucket="b")
        launch = plan.next_launch(0)
        assert contexts.setdefault(rows, launch.context) == launch.context
        complete(plan, launch)
    assert contexts[1] != contexts[2]
    assert asked == [("b", rows) for rows in (1, 2, 2, 1, 2)]


def test_a_batch_that_failed_is_not_expected_any_more():
    plan = scheduler(contexts=2, arenas=1)
    plan.latency.observe("b", 1, 10**9)
    submit(plan)
    launch = plan.next_launch(0)
    assert plan.timeline.launched(launch, 0) == 10**9
    plan.fail(launch)
    submit(plan)
    assert plan.timeline.launched(plan.next_launch(50), 50) == 10**9


def test_refusing_lets_the_queue_go_on():
    plan = scheduler()
    submit(plan)
    plan.refuse(EngineClosedError("draining"))
    with pytest.raises(EngineClosedError, match="draining"):
        submit(plan)
    assert plan.next_launch(0) is not None


def test_closing_takes_everything_queued_and_leaves_what_is_in_flight():
    plan = scheduler(contexts=1)
    flying = submit(plan)
    launch = plan.next_launch(0)
    waiting = [submit(plan, bucket="a"), submit(plan, bucket="b", priority=1)]
    assert plan.close(EngineClosedError("closed")) == waiting
    assert all(request.state is State.FAILED for request in waiting)
    complete(plan, launch)
    assert flying.state is State.DONE
    assert plan.is_idle


def test_each_refusal_is_a_fresh_error_of_the_type_that_was_given():
    plan = scheduler()
    plan.close(DeviceLostError("lost"))
    errors = []
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="lost") as caught:
            submit(plan)
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_totals_by_batch_size():
    plan = scheduler()
    for now_ns in (10, 20):
        submit(plan, now_ns=now_ns)
    complete(plan, plan.next_launch(100), now_ns=1000)
    totals = plan.ledger.totals
    assert (totals.batches, totals.rows, totals.queue_ns) == (1, 2, 90 + 80)
    assert (totals.copy_in_ns, totals.compute_ns, totals.copy_out_ns) == (2, 40, 600)
    assert totals.total_ns == 990 + 980
    size = totals.by_size[2]
    assert (size.count, size.copy_in_ns, size.compute_ns, size.copy_out_ns) == (1, 1, 20, 300)


def test_a_masked_request_is_in_no_sum_of_times():
    plan = scheduler()
    gone, there = [submit(plan, now_ns=now_ns) for now_ns in (10, 20)]
    launch = plan.next_launch(100)
    plan.cancel(gone)
    complete(plan, launch, now_ns=1000)
    totals = plan.ledger.totals
    assert (totals.succeeded, totals.cancelled, totals.rows) == (1, 1, 2)
    assert (totals.queue_ns, totals.compute_ns, totals.total_ns) == (80, 20, 980)
    assert there.state is State.DONE


def test_rows_that_fill_a_batch_up_are_counted_apart():
    plan = scheduler(rows_max=8)
    submit(plan, rows=3)
    launch = plan.next_launch(0)
    assert launch.rows_run == 3, "as many as there are, until somebody says otherwise"
    launch.rows_run = plan.rows_to_run(launch, launch.rows, (1, 8))
    assert launch.rows_run == 8
    complete(plan, launch)
    totals = plan.ledger.totals
    assert (totals.rows, totals.rows_padded) == (3, 5)
    assert list(totals.by_size) == [3], "a batch is known by the rows that were asked for"
    assert plan.latency.has_seen("b", 8), "but it took as long as it did because of those that ran"
    assert not plan.latency.has_seen("b", 3)


def test_a_batch_that_was_not_timed_teaches_nothing():
    plan = scheduler()
    for is_timed in (False, True):
        submit(plan)
        complete(plan, plan.next_launch(0), is_timed=is_timed)
        assert plan.latency.has_seen("b", 1) is is_timed
    totals = plan.ledger.totals
    assert (totals.batches, totals.batches_timed) == (2, 1)


def test_waits_for_an_arena_are_counted_if_they_are_any():
    plan = scheduler(contexts=1, arenas=1)
    for wait_ns in (0, ARENA_WAIT_NS_MIN, ARENA_WAIT_NS_MIN + 1, 10**6):
        submit(plan)
        complete(plan, plan.next_launch(0), arena_wait_ns=wait_ns)
    totals = plan.ledger.totals
    assert totals.arena_waits == 2
    assert totals.arena_wait_ns == 2 * ARENA_WAIT_NS_MIN + 1 + 10**6
    assert totals.busy_ns == 4 * 20


def test_repr_shows_the_state():
    plan = scheduler()
    submit(plan, rows=2)
    assert repr(plan) == (
        "<Scheduler open queued=1 rows=2 buckets=1 <Ledger free=2 in_flight=0 quarantined=0>>"
    )
