"""Batches on a device that copies while it computes: launched just in time, in as many lanes as pay."""

import pytest

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.scheduling.concurrency import (
    LEAD_MARGIN_NS,
    STUCK_NS_MIN,
    Concurrency,
    Lanes,
    choose_lanes,
    lanes_that_pay,
)
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS, Policy
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.scheduling.support import KEY, enter, make_batch, submit, took, usual_ns

MS = 1_000_000
COMPUTE_NS = 10 * MS
COPY_NS = MS
STAGING_NS = MS // 2
WARM_UP = 16
LEAD_NS = STAGING_NS + COPY_NS + LEAD_MARGIN_NS


def pipelined(*, rows_max=8, contexts=4, lanes_max=1, delay_ns_max=0, **kw):
    """A scheduler that has seen batches of each size, which all take as long."""
    policy = Policy(
        rows_max,
        delay_ns_max=delay_ns_max,
        concurrency=1 + lanes_max,
        is_pipelined=True,
        lanes_max=lanes_max,
        **kw,
    )
    plan = Scheduler(
        policy=policy,
        shapes=Shapes(rows_max=rows_max, rows_fixed=None, profiles=None),
        queue_rows_max=64,
        priorities=3,
        contexts=contexts,
        arenas=0,
        in_flight_max=contexts,
    )
    now_ns = 0
    for number in range(WARM_UP):
        submit(plan, rows=1 + number % rows_max, now_ns=now_ns)
        now_ns = run(plan, plan.next_batch(now_ns), now_ns)
    return plan, now_ns


def run(plan, batch, now_ns):
    """Let a batch go through the device, and return when it has."""
    plan.started(batch, batch.launched_ns + STAGING_NS)
    now_ns = max(now_ns, batch.launched_ns + STAGING_NS) + COPY_NS + COMPUTE_NS
    end(plan, batch, now_ns)
    return now_ns


def end(plan, batch, now_ns):
    if batch.is_timed:
        plan.times.observe_copies(batch, COPY_NS, 0)
    plan.landed(batch, now_ns)
    plan.finished(batch, now_ns, took(COPY_NS, COMPUTE_NS, 0))


def in_flight(plan, now_ns, rows=1):
    """Launch a batch and put it on the device."""
    submit(plan, rows=rows, now_ns=now_ns)
    batch = plan.next_batch(now_ns)
    assert batch.reason is Reason.IDLE
    plan.started(batch, now_ns + STAGING_NS)
    return batch, now_ns + STAGING_NS + COPY_NS + COMPUTE_NS


class TestJustInTime:
    def test_a_batch_is_launched_so_early_that_it_has_been_copied_in_when_the_device_is_free(self):
        plan, now_ns = pipelined()
        first, free_ns = in_flight(plan, now_ns)
        submit(plan, now_ns=now_ns + MS)
        assert plan.next_batch(now_ns + MS) is None
        assert plan.next_wakeup() == free_ns - LEAD_NS
        assert plan.next_batch(free_ns - LEAD_NS - 1) is None
        later = submit(plan, now_ns=free_ns - LEAD_NS - 1)
        batch = plan.next_batch(free_ns - LEAD_NS)
        assert (batch.reason, batch.rows) == (Reason.AHEAD, 2)
        assert later in batch.requests, "it could grow until then"
        assert (first.lane, batch.lane) == (0, 0)
        assert plan.next_wakeup() is None

    def test_plain_requests_grow_until_then_too(self):
        plan, now_ns = pipelined()
        plan.times.times_all = True
        _, free_ns = in_flight(plan, now_ns)
        futures = enter(plan, now_ns=now_ns + MS)
        assert plan.next_batch(now_ns + MS) is None
        assert plan.next_wakeup() == free_ns - LEAD_NS
        futures += enter(plan, 2, now_ns=now_ns + 2 * MS)
        assert plan.next_batch(now_ns + 2 * MS) is None
        batch = plan.next_batch(free_ns - LEAD_NS)
        assert (batch.reason, batch.rows) == (Reason.AHEAD, 3)
        assert [request.future for request in batch.requests] == futures

    def test_one_batch_that_is_not_full_is_ahead_and_no_more(self):
        plan, now_ns = pipelined()
        first, free_ns = in_flight(plan, now_ns)
        submit(plan, now_ns=now_ns)
        ahead = plan.next_batch(free_ns - LEAD_NS)
        plan.started(ahead, free_ns - LEAD_NS + STAGING_NS)
        submit(plan, now_ns=free_ns)
        assert plan.next_batch(free_ns) is None
        end(plan, first, free_ns)
        assert plan.next_batch(free_ns) is None, "there is one that computes now"
        assert plan.next_wakeup() == free_ns + COMPUTE_NS - LEAD_NS

    @pytest.mark.parametrize("lanes_max", [1, 4])
    def test_what_batches_of_a_shape_took_is_forgotten_when_they_run_in_another_way(self, lanes_max):
        plan, now_ns = pipelined(lanes_max=lanes_max)
        before, free_ns = in_flight(plan, now_ns)
        assert usual_ns(plan, before)[1] == COMPUTE_NS
        plan.run_anew(("another",), {})
        assert usual_ns(plan, before)[1] == COMPUTE_NS
        plan.run_anew(before.key.shape, {})
        assert usual_ns(plan, before)[1] == 0
        end(plan, before, free_ns)
        for number in range(2 * WARM_UP):
            submit(plan, rows=1 + number % 8, now_ns=free_ns)
            free_ns = run(plan, plan.next_batch(free_ns), free_ns)
        assert usual_ns(plan, before)[1] == COMPUTE_NS

    def test_with_nothing_in_flight_nothing_waits(self):
        plan, now_ns = pipelined()
        submit(plan, now_ns=now_ns)
        assert plan.next_batch(now_ns).reason is Reason.IDLE

    def test_what_has_landed_is_not_waited_for_though_its_outputs_are_being_copied(self):
        plan, now_ns = pipelined()
        first, free_ns = in_flight(plan, now_ns)
        submit(plan, now_ns=now_ns)
        plan.landed(first, free_ns)
        assert plan.next_batch(free_ns).reason is Reason.IDLE

    def test_a_full_batch_does_not_wait(self):
        plan, now_ns = pipelined(rows_max=4)
        in_flight(plan, now_ns)
        submit(plan, rows=4, now_ns=now_ns)
        assert plan.next_batch(now_ns).reason is Reason.FULL

    def test_a_batch_that_may_grow_waits_though_one_behind_it_is_full(self):
        plan, now_ns = pipelined(rows_max=4)
        _, free_ns = in_flight(plan, now_ns)
        submit(plan, now_ns=now_ns)
        submit(plan, shape="full", rows=4, now_ns=now_ns)
        assert plan.next_batch(now_ns) is None
        due_ns = plan.next_wakeup()
        assert due_ns == free_ns - LEAD_NS
        submit(plan, now_ns=due_ns - 1)
        assert [plan.next_batch(due_ns).rows for _ in range(2)] == [2, 4]

    def test_a_deadline_ends_the_wait(self):
        plan, now_ns = pipelined()
        in_flight(plan, now_ns)
        submit(plan, now_ns=now_ns, deadline_ns=now_ns + 3 * MS)
        assert plan.next_batch(now_ns) is None
        assert plan.next_wakeup() == now_ns + 3 * MS - DEADLINE_MARGIN_NS
        assert plan.next_batch(now_ns + 3 * MS - DEADLINE_MARGIN_NS) is not None

    def test_while_a_batch_is_staged_no_other_is_launched(self):
        plan, now_ns = pipelined()
        submit(plan, now_ns=now_ns)
        staged = plan.next_batch(now_ns)
        submit(plan, now_ns=now_ns)
        staged_ns = now_ns + STAGING_NS
        assert plan.next_batch(staged_ns) is None
        plan.started(staged, staged_ns)
        assert plan.next_batch(staged_ns) is None
        assert plan.next_wakeup() == staged_ns + COPY_NS + COMPUTE_NS - LEAD_NS

    @pytest.mark.parametrize("fails", ["staged", "on the device"])
    def test_a_batch_that_fails_is_not_waited_for(self, fails):
        plan, now_ns = pipelined()
        submit(plan, now_ns=now_ns)
        batch = plan.next_batch(now_ns)
        if fails == "on the device":
            plan.started(batch, now_ns)
        other, _ = submit(plan, now_ns=now_ns), plan.failed(batch)
        assert plan.next_batch(now_ns).requests == (other,)

    def test_next_to_a_batch_of_a_shape_that_was_never_seen_one_may_wait_on_the_device(self):
        plan, now_ns = pipelined()
        submit(plan, shape="never seen", now_ns=now_ns)
        plan.started(plan.next_batch(now_ns), now_ns)
        for _ in range(2):
            submit(plan, now_ns=now_ns)
            batch = plan.next_batch(now_ns)
        assert batch is None
        assert plan.in_flight == 2

    def test_a_delay_of_its_own_counts_too(self):
        plan, now_ns = pipelined(delay_ns_max=20 * MS)
        _, free_ns = in_flight(plan, now_ns)
        submit(plan, now_ns=now_ns)
        assert plan.next_batch(free_ns - LEAD_NS) is None
        assert plan.next_batch(now_ns + 20 * MS).reason is Reason.DELAY

    @pytest.mark.parametrize(("contexts", "rows"), [(2, 2), (1, 4)])
    def test_an_idle_device_gets_half_if_the_rest_is_copied_meanwhile(self, contexts, rows):
        """Which takes a context to be copied in for."""
        expected_rows = rows
        plan, now_ns = pipelined(contexts=contexts)
        # Copies take nearly as long as computing, and half of the rows half as long.
        for rows in (2, 4):
            for _ in range(16):
                submit(plan, rows=rows, now_ns=now_ns)
                batch = plan.next_batch(now_ns)
                plan.started(batch, now_ns)
                now_ns += 20 * MS
                plan.times.observe_copies(batch, rows * 4 * MS, 0)
                plan.landed(batch, now_ns)
                plan.finished(batch, now_ns, took(rows * 4 * MS, rows * 5 * MS, 0))
        for _ in range(4):
            submit(plan, now_ns=now_ns)
        assert plan.next_batch(now_ns).rows == expected_rows

    def test_it_gets_all_of_them_if_halves_compute_for_as_long(self):
        plan, now_ns = pipelined()
        for _ in range(4):
            submit(plan, now_ns=now_ns)
        assert plan.next_batch(now_ns).rows == 4


class TestWhatSeemsToHang:
    def test_what_comes_uses_another_lane(self):
        plan, now_ns = pipelined(lanes_max=4)
        hangs, free_ns = in_flight(plan, now_ns)
        submit(plan, now_ns=now_ns)
        behind = plan.next_batch(free_ns)
        plan.started(behind, free_ns)
        assert behind.lane == hangs.lane
        request = submit(plan, now_ns=free_ns)
        assert plan.next_batch(free_ns + 1) is None
        stuck_ns = plan.next_wakeup()
        assert stuck_ns >= now_ns + STUCK_NS_MIN
        other = plan.next_batch(stuck_ns)
        assert other.requests == (request,)
        assert other.lane != hangs.lane
        plan.started(other, stuck_ns)
        end(plan, other, stuck_ns + MS)
        plan.failed(behind, quarantine=True)
        plan.failed(hangs, quarantine=True)
        submit(plan, now_ns=stuck_ns + MS)
        assert plan.next_batch(stuck_ns + MS).lane == 0

    def test_so_does_what_waits_for_a_batch_that_is_never_put_on_the_device(self):
        plan, now_ns = pipelined(lanes_max=2)
        submit(plan, now_ns=now_ns)
        hangs = plan.next_batch(now_ns)
        submit(plan, now_ns=now_ns)
        assert plan.next_batch(now_ns) is None
        assert plan.next_wakeup() == now_ns + STUCK_NS_MIN
        other = plan.next_batch(now_ns + STUCK_NS_MIN)
        assert other.lane != hangs.lane
        # It does not keep others from being launched ahead of time either.
        plan.started(other, now_ns + STUCK_NS_MIN)
        submit(plan, now_ns=now_ns)
        assert plan.next_batch(now_ns + STUCK_NS_MIN) is None
        assert plan.next_wakeup() < now_ns + STUCK_NS_MIN + COPY_NS + COMPUTE_NS


def test_a_batch_that_ends_while_it_is_put_on_the_device_holds_no_later_one_up():
    """Such batches are never told to have started."""
    plan, now_ns = pipelined()
    submit(plan, now_ns=now_ns)
    end(plan, plan.next_batch(now_ns), now_ns)
    _, free_ns = in_flight(plan, now_ns)
    submit(plan, now_ns=now_ns)
    assert plan.next_batch(now_ns) is None
    assert plan.next_wakeup() == free_ns - LEAD_NS


@pytest.mark.parametrize(("share", "launches_ahead"), [(1 / 2, False), (1 / 3, True)])
def test_none_is_launched_ahead_where_putting_it_on_the_device_takes_about_as_long_as_computing(
    share, launches_ahead
):
    """It would have to be launched at once, and could not grow."""
    enqueue_ns = int(share * COMPUTE_NS)
    plan, now_ns = pipelined(may_enqueue_slowly=True)
    for _ in range(8):
        submit(plan, rows=4, now_ns=now_ns)
        batch = plan.next_batch(now_ns)
        now_ns += STAGING_NS + enqueue_ns
        plan.started(batch, now_ns, now_ns - enqueue_ns)
        now_ns += COMPUTE_NS
        end(plan, batch, now_ns)
    _, free_ns = in_flight(plan, now_ns, rows=4)
    submit(plan, rows=4, now_ns=now_ns)
    assert plan.next_batch(now_ns) is None
    assert (plan.next_wakeup() < free_ns) is launches_ahead


def test_a_batch_that_may_still_grow_may_have_other_lanes_than_a_full_one():
    lanes = Lanes(growing=((2, 4), (8, 2)), full=3)
    found = [lanes.allowed(rows, rows_max=8) for rows in range(1, 9)]
    assert found == [4, 4, 2, 2, 2, 2, 2, 3]
    assert lanes.by_rows(8) == {2: 4, 7: 2, 8: 3}
    assert lanes.allowed(4, rows_max=4) == 3, "batches of this shape hold less"
    assert lanes.allowed(9, rows_max=16) == 2, "batches of this shape hold more"
    assert Lanes().allowed(1, rows_max=16) == 1


@pytest.mark.parametrize(("count", "expected"), [(1, {8: 1}), (4, {8: 4})])
def test_a_fixed_number_of_lanes_is_that_of_all_batches(count, expected):
    assert Lanes.fixed(count, 8).by_rows(8) == expected


@pytest.mark.parametrize(
    ("gains", "lanes_max", "expected"),
    [
        ((), 1, 1),
        ((1.14,), 2, 1),
        ((1.16,), 2, 2),
        ((1.9, 1.16, 1.14, 2.0), 16, 4),
        ((2.0, 2.0, 2.0, 2.0), 12, 12),
        # From 8 to 12 is half a doubling.
        ((2.0, 2.0, 2.0, 1.08), 12, 12),
        ((2.0, 2.0, 2.0, 1.07), 12, 8),
    ],
)
def test_lanes_are_doubled_while_that_pays(gains, lanes_max, expected):
    rates = {1: 100.0}
    for gain in gains:
        lanes = max(rates)
        rates[min(2 * lanes, lanes_max)] = gain * rates[lanes]
    assert lanes_that_pay(rates.__getitem__, lanes_max, 1.15) == expected


def test_full_batches_get_lanes_for_less_and_smaller_ones_no_fewer_than_larger_ones():
    work = {16: {1: 10, 2: 13, 4: 13.1}, 4: {1: 10, 2: 18, 4: 20}, 1: {1: 10, 2: 14, 4: 16}}
    lanes = choose_lanes((1, 4, 16), lambda rows, count: work[rows][count], 16, 4)
    assert lanes == Lanes(growing=((1, 2), (4, 2), (16, 1)), full=2)


def test_what_could_not_be_measured_has_one_lane():
    assert choose_lanes((1, 16), lambda rows, count: None, 16, 4) == Lanes()
    # Where the time was up at the small ones, these count as large.
    lanes = choose_lanes((1, 16), lambda rows, count: 10.0 * count if rows == 16 else None, 16, 4)
    assert [lanes.allowed(rows, 16) for rows in (1, 15, 16)] == [4, 4, 4]


def test_where_all_lanes_compute_the_next_batch_goes_to_the_one_that_is_done_first():
    times = BatchTimes()
    times.seed(KEY, {1: 10, 2: 20, 3: 30})
    lanes, batches = Concurrency(times, lanes=Lanes.fixed(3, 8), lanes_max=3), []
    for number, rows in enumerate((3, 1, 2)):
        batches.append(make_batch(number, key=KEY, rows=rows, lane=lanes.acquire(3)))
        lanes.launched(batches[-1])
        lanes.started(batches[-1], 0)
    assert [batch.lane for batch in batches] == [0, 1, 2]
    assert lanes.acquire(3) == 1
    lanes.left(batches[2])
    assert lanes.acquire(3) == 2, "nothing is in it"
