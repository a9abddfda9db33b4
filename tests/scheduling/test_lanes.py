"""Batches on a device that copies while it computes: launched just in time, in as many lanes as pay."""

import itertools
import random
import statistics
from collections import OrderedDict, deque
from itertools import pairwise

import pytest

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.estimates import LEAD_MARGIN_NS, LEAD_MARGIN_NS_MAX
from asynctrt.scheduling.lanes import (
    ALONE_FIRST,
    CLASSES,
    FIRST_TRIAL,
    GIVE_UP_BATCHES,
    STUCK_NS_MIN,
    WARM_UP,
    Lanes,
    _Trial,
)
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS, Policy
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from tests.scheduling.support import KEY, make_batch, submit

MS = 1_000_000
COMPUTE_NS = 10 * MS
COPY_NS = MS
STAGING_NS = MS // 2
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
        plan.observe_copies(batch, copy_in_ns=COPY_NS, copy_out_ns=0)
    plan.landed(batch, now_ns)
    plan.finished(batch, now_ns, COPY_NS, COMPUTE_NS, 0)


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

    @pytest.mark.parametrize("late", [0.0, 0.05, 0.3])
    def test_how_early_depends_on_how_many_are_late(self, late):
        plan, now_ns = pipelined()
        leads_ns = []
        numbers = random.Random(1)
        first, free_ns = in_flight(plan, now_ns)
        for _ in range(3000):
            submit(plan, now_ns=free_ns - 9 * MS)
            assert plan.next_batch(free_ns - 9 * MS) is None
            due_ns = plan.next_wakeup()
            leads_ns.append(free_ns - due_ns)
            batch = plan.next_batch(due_ns)
            plan.started(batch, due_ns + STAGING_NS)
            end(plan, first, free_ns)
            in_place_ns = due_ns + STAGING_NS + COPY_NS
            if batch.is_timed:
                plan.observe_wait(batch, 0 if numbers.random() < late else free_ns - in_place_ns)
            first, free_ns = batch, max(free_ns, in_place_ns) + COMPUTE_NS
        least_ns, most_ns = LEAD_NS - LEAD_MARGIN_NS, LEAD_NS - LEAD_MARGIN_NS + LEAD_MARGIN_NS_MAX
        assert min(leads_ns) >= least_ns
        assert max(leads_ns) <= most_ns
        assert leads_ns[0] == LEAD_NS
        last_ns = statistics.median(leads_ns[-1000:])
        if late > 0.2:  # There is no telling, so they are as early as can be.
            assert last_ns > LEAD_NS + LEAD_MARGIN_NS
        else:  # Those that are late would be so all the same.
            assert last_ns < LEAD_NS - LEAD_MARGIN_NS // 4

    def test_a_batch_that_came_too_late_to_be_early_says_nothing_of_how_early_to_be(self):
        plan, now_ns = pipelined()
        first, free_ns = in_flight(plan, now_ns)
        for _ in range(200):
            submit(plan, now_ns=free_ns - 1)
            batch = plan.next_batch(free_ns - 1)
            plan.started(batch, free_ns)
            end(plan, first, free_ns)
            if batch.is_timed:
                plan.observe_wait(batch, 0)
            first, free_ns = batch, free_ns + COPY_NS + COMPUTE_NS
        submit(plan, now_ns=free_ns - 9 * MS)
        assert plan.next_batch(free_ns - 9 * MS) is None
        assert free_ns - plan.next_wakeup() <= LEAD_NS

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
        assert plan.usual_ns(before)[1] == COMPUTE_NS
        plan.forget_times(("another",))
        assert plan.usual_ns(before)[1] == COMPUTE_NS
        plan.forget_times(before.key.cost_key)
        assert plan.usual_ns(before)[1] == 0
        end(plan, before, free_ns)
        for number in range(2 * WARM_UP):
            submit(plan, rows=1 + number % 8, now_ns=free_ns)
            free_ns = run(plan, plan.next_batch(free_ns), free_ns)
        assert plan.usual_ns(before)[1] == COMPUTE_NS

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
                plan.observe_copies(batch, copy_in_ns=rows * 4 * MS, copy_out_ns=0)
                plan.landed(batch, now_ns)
                plan.finished(batch, now_ns, rows * 4 * MS, rows * 5 * MS, 0)
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
        assert plan.next_batch(now_ns + STUCK_NS_MIN).lane != hangs.lane


def test_a_batch_that_ends_while_it_is_put_on_the_device_holds_no_later_one_up():
    """Such batches are never told to have started."""
    plan, now_ns = pipelined()
    submit(plan, now_ns=now_ns)
    end(plan, plan.next_batch(now_ns), now_ns)
    _, free_ns = in_flight(plan, now_ns)
    submit(plan, now_ns=now_ns)
    assert plan.next_batch(now_ns) is None
    assert plan.next_wakeup() == free_ns - LEAD_NS


class World:
    """Keeps a device busy with batches of a number of rows, as many in each lane as there is work for.

    :param late_ns: how long a batch has computed before it is told that it does.
    :param cold: how many times longer the first batch of each size takes.
    """

    def __init__(self, lanes_max, rows_max, slower, contexts=99, late_ns=0, cold=1):
        self.lanes = Lanes(lanes_max, rows_max)
        self._contexts = contexts
        self._slower = slower
        self._late_ns = late_ns
        self._cold = cold
        self._warm = set()
        self.now_ns = self._number = 0
        self.seen = []
        """The lanes that there were for each batch."""

    def run(self, *rows, batches):
        """Let batches of these rows compute in turn; ``slower(lanes, rows)`` says by how much the largest of
        those that do makes all of them slower."""
        waiting = {}  # By lane; the first of each computes.
        left_ns, took_ns = {}, {}
        sizes = itertools.cycle(rows)
        size = next(sizes)
        for _ in range(batches):
            self.seen.append(self.lanes.allowed("b", size))
            while sum(map(len, waiting.values())) < min(2 * self.lanes.allowed("b", size), self._contexts):
                self._number += 1
                lane = self.lanes.acquire(KEY.cost_key, size, lambda _: self.now_ns)
                batch = make_batch(self._number, key=KEY, rows=size, lane=lane)
                batch = batch._replace(launched_ns=self.now_ns)
                self.lanes.launched(batch)
                self.lanes.started(batch, self.now_ns + self._late_ns, (0, 0))
                waiting.setdefault(lane, []).append(batch)
                takes_ns = COMPUTE_NS if size in self._warm else self._cold * COMPUTE_NS
                self._warm.add(size)
                left_ns[self._number], took_ns[self._number] = takes_ns, 0
                size = next(sizes)
            computing = [queue[0] for queue in waiting.values() if queue]
            slower = self._slower(len(computing), max(batch.rows for batch in computing))
            done = min(computing, key=lambda batch: left_ns[batch.number])
            least_ns = left_ns[done.number]
            for batch in computing:
                left_ns[batch.number] -= least_ns
                took_ns[batch.number] += round(slower * least_ns)
            self.now_ns += round(slower * least_ns)
            waiting[done.lane].remove(done)
            self.lanes.landed(done, self.now_ns)
            self.lanes.ended(done, took_ns[done.number])
        for batch in itertools.chain(*waiting.values()):
            self.lanes.forget(batch)
        return self.lanes.allowed("b", max(rows))


KEY = KEY._replace(shape="b")


@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        (lambda lanes, rows: 1.0, 8),
        (lambda lanes, rows: float(lanes), 1),
        (lambda lanes, rows: 0.9 * lanes + 0.1, 1),
        (lambda lanes, rows: 1.0 if lanes <= 4 else lanes / 4, 4),
    ],
    ids=["not at all", "as if one after the other", "hardly less", "from more than four on"],
)
def test_lanes_are_as_many_as_raise_the_throughput(slower, expected):
    """``slower``: by how much batches side by side take longer than one alone."""
    world = World(8, 8, slower)
    world.run(8, batches=WARM_UP)
    assert world.lanes.allowed("b", 8) == 1
    world.run(8, batches=4000)
    assert statistics.mode(world.seen[-1000:]) == expected, "but for a trial"
    assert world.lanes.chosen().get(8, 1) == expected
    # Smaller ones may have more, as they leave more of the device idle.
    assert list(world.lanes.chosen()) == ([1, 3, 7, 8] if expected > 1 else [])


def test_small_batches_may_have_more_lanes_than_large_ones():
    world = World(4, 64, lambda lanes, rows: 1.0)
    world.run(64, batches=2000)
    assert [world.lanes.allowed("b", rows) for rows in (1, 8, 64)] == [4, 4, 4], "what holds for large ones"
    world = World(4, 64, lambda lanes, rows: float(lanes) if rows > 8 else 1.0)
    for _ in range(40):
        world.run(8, batches=100)
        world.run(64, batches=100)
    assert world.lanes.allowed("b", 64) == 1


def test_batches_that_could_as_well_be_larger_get_no_more_lanes():
    """Twice the rows take hardly longer, so they are better off in one batch."""
    world = World(4, 16, lambda lanes, rows: 1.0 + rows / 100)
    for _ in range(30):
        world.run(16, batches=20)
        world.run(4, batches=60)
    assert world.lanes.allowed("b", 4) == world.lanes.allowed("b", 16) or world.lanes.allowed("b", 4) == 1


def test_lanes_that_do_not_pay_any_more_are_given_up():
    busy = [1.0]
    world = World(2, 8, lambda lanes, rows: 1.0 if lanes == 1 else busy[0])
    assert world.run(8, batches=1000) == 2
    busy[0] = 2.0  # Another engine has come to the device, say.
    assert world.run(8, batches=4000) == 1


def test_lanes_that_do_not_pay_are_given_up_although_nothing_ever_waits_for_its_turn():
    """With as many lanes as contexts each batch computes at once."""
    is_full = False
    world = World(4, 8, lambda lanes, rows: float(lanes) if is_full else 1.0, contexts=4)
    assert world.run(8, batches=1000) == 4
    is_full = True  # Another engine has come to the device, say.
    assert world.run(8, batches=8000) == 1


def test_a_launch_that_takes_long_does_not_make_a_batch_look_short():
    """As the first of a graph does: the device computes before it is told that it has the batch."""
    world = World(2, 8, lambda lanes, rows: float(lanes), contexts=2, late_ns=COMPUTE_NS)
    assert world.run(8, batches=400) == 1


def test_the_first_batch_of_a_size_may_take_long():
    """As what it computes with is put on the device then."""
    world = World(2, 64, lambda lanes, rows: float(lanes), contexts=2, cold=3)
    world.run(64, batches=WARM_UP + 2)
    world.run(*range(1, 24), batches=80)  # Of most sizes one was seen before others are tried.
    assert world.lanes.chosen() == {}


class Alone:
    """Lets batches compute one after the other, and says whether each was to be timed."""

    def __init__(self):
        self.lanes = Lanes(2, 64)
        self.now_ns = self.number = 0

    def run(self, rows, compute_ns, context=0):
        lane = self.lanes.acquire("b", rows, lambda _: self.now_ns)
        self.number += 1
        batch = make_batch(self.number, key=KEY, rows=rows, lane=lane, context=context)
        batch = batch._replace(launched_ns=self.now_ns)
        wants_time = self.lanes.wants_time(lane, "b", rows)
        self.lanes.launched(batch)
        self.lanes.started(batch, self.now_ns, (0, 0))
        self.now_ns += compute_ns
        self.lanes.landed(batch, self.now_ns)
        self.lanes.ended(batch, compute_ns)
        return wants_time

    @property
    def times(self):
        return self.lanes._shapes["b"]


def test_the_first_batch_of_a_size_in_each_context_is_compared_with_later_ones():
    """With two contexts, there may be nothing but first ones when a trial begins."""
    alone = Alone()
    alone.run(4, 15 * MS, context=0)
    alone.run(4, 16 * MS, context=1)
    assert alone.times.expected_ns(4) == 15 * MS
    alone.run(8, 30 * MS, context=0)
    alone.run(4, 10 * MS, context=0)
    assert alone.times.expected_ns(4) == 10 * MS
    assert alone.times.expected_ns(8) == 30 * MS, "one later batch says nothing yet"
    alone.run(4, 10 * MS, context=1)
    assert alone.times.expected_ns(8) == 20 * MS, "as the first ones took half as long again"
    alone.run(8, 30 * MS, context=1)
    wants_time = [alone.run(8, 22 * MS) for _ in range(5)]
    assert wants_time == [True] * 4 + [False], "four have computed alone by then"
    assert alone.times.expected_ns(8) == 22 * MS


def test_what_two_sizes_say_of_others_ends_not_far_from_them():
    alone = Alone()
    alone.run(14, MS)
    alone.run(16, MS)
    assert [rows for rows in range(1, 65) if alone.times.is_known(rows)] == [13, 14, 15, 16, 17, 18]
    alone.run(4, MS)
    assert [rows for rows in range(1, 65) if alone.times.is_known(rows)] == list(range(1, 33))


def test_what_is_remembered_of_batches_is_bounded():
    """Whatever comes: shapes that are never seen again, beside a trial that few batches tell anything of."""
    world = World(4, 64, lambda lanes, rows: 1.0)
    world.run(4, batches=100)
    lanes = world.lanes
    trial = _Trial(CLASSES - 1, 4, 8, None, 0)
    lanes._unfinished[trial.key] = trial
    for number in range(10_000, 50_000):
        key = KEY._replace(shape=(("length", number),))
        lane = lanes.acquire(key.cost_key, 1, lambda _: world.now_ns)
        batch = make_batch(number, key=key, rows=1, lane=lane)._replace(launched_ns=world.now_ns)
        lanes.launched(batch)
        lanes.started(batch, world.now_ns, (0, 0))
        world.now_ns += COMPUTE_NS
        lanes.landed(batch, world.now_ns)
        lanes.ended(batch)

    def count(value, depth=6):
        if depth and isinstance(value, (dict, OrderedDict)):
            return sum(count(each, depth - 1) + 1 for each in value.values())
        if depth and isinstance(value, (list, set, deque)):
            return sum(count(each, depth - 1) + 1 for each in value)
        if depth and hasattr(type(value), "__slots__") and not isinstance(value, tuple):
            return sum(count(getattr(value, name), depth - 1) for name in type(value).__slots__)
        return 1

    assert sum(count(value) for value in vars(lanes).values()) < 20_000


def test_larger_batches_get_fewer_lanes_though_smaller_ones_beside_them_have_more():
    is_full = False
    world = World(4, 64, lambda lanes, rows: float(lanes) if is_full and rows > 8 else 1.0)
    world.run(4, batches=1000)
    assert world.run(64, batches=1000) == 4
    is_full = True  # Another engine has come to the device, say.
    assert world.run(4, 4, 4, 64, batches=20_000) == 1


def test_the_first_batches_compute_alone_unless_one_seems_to_hang():
    plan, now_ns = pipelined(lanes_max=4)
    fresh = Scheduler(
        policy=plan._policy,
        shapes=Shapes(rows_max=8, rows_fixed=None, profiles=None),
        queue_rows_max=64,
        priorities=3,
        contexts=4,
        arenas=0,
        in_flight_max=4,
    )
    for number in range(ALONE_FIRST):
        batch, end_ns = in_flight(fresh, now_ns)
        submit(fresh, rows=8, now_ns=now_ns)
        assert fresh.next_batch(now_ns) is None, number
        stuck_ns = fresh.next_wakeup()
        assert stuck_ns >= now_ns + STUCK_NS_MIN
        if number == 1:
            hangs, batch = batch, fresh.next_batch(stuck_ns)
            assert batch.lane != hangs.lane
            fresh.started(batch, stuck_ns)
            end(fresh, batch, stuck_ns + MS)
            fresh.failed(hangs, quarantine=True)
            break
        end(fresh, batch, end_ns)
        now_ns = end_ns
        second = fresh.next_batch(now_ns)
        fresh.started(second, now_ns)
        now_ns += 2 * MS
        end(fresh, second, now_ns)


@pytest.mark.parametrize(("enqueue_ns", "expected"), [(COMPUTE_NS, 2), (COMPUTE_NS // 10, 1)])
def test_batches_that_take_long_to_be_put_on_the_device_are_put_there_side_by_side(enqueue_ns, expected):
    """However they compute there: it waits for them all the same."""
    world = World(4, 8, lambda lanes, rows: float(lanes))
    world.lanes.enqueue_ns = lambda shape, rows: enqueue_ns
    assert world.run(8, batches=1000) == expected


def test_what_it_takes_to_put_a_batch_on_the_device_is_learned_where_that_may_be_long():
    plan, now_ns = pipelined(lanes_max=4, may_enqueue_slowly=True)
    for _ in range(8):
        submit(plan, rows=4, now_ns=now_ns)
        batch = plan.next_batch(now_ns)
        now_ns += STAGING_NS + COMPUTE_NS
        plan.started(batch, now_ns, now_ns - COMPUTE_NS)
        end(plan, batch, now_ns + MS)
        now_ns += MS
    in_flight(plan, now_ns, rows=4)
    submit(plan, rows=4, now_ns=now_ns)
    second = plan.next_batch(now_ns)
    assert second is not None, "it does not wait for the first"
    plan.started(second, now_ns + STAGING_NS)
    submit(plan, rows=4, now_ns=now_ns)
    assert plan.next_batch(now_ns + COMPUTE_NS) is None, "threads have enough to do"


def test_where_all_lanes_compute_the_next_batch_goes_to_the_one_that_is_done_first():
    lanes = Lanes(3, 8)
    for number in (1, 2, 3):
        batch = make_batch(number, key=KEY, lane=lanes.acquire(KEY.cost_key, 1, lambda _: 0))
        lanes.launched(batch)
    assert lanes.acquire(KEY.cost_key, 1, {0: 30, 1: 10, 2: 20}.__getitem__) == 1
    lanes.landed(make_batch(3, key=KEY, lane=2), MS)
    assert lanes.acquire(KEY.cost_key, 1, {0: 30, 1: 10, 2: 20}.__getitem__) == 2, "nothing is in it"


def test_a_trial_is_short_and_each_one_in_vain_is_followed_by_a_longer_pause():
    world = World(2, 8, lambda lanes, rows: float(lanes))
    world.run(8, batches=20_000)
    tried = [number for number, lanes in enumerate(world.seen) if lanes == 2 and number >= WARM_UP]
    begins = [number for number, before in zip(tried, [-100, *tried], strict=False) if number > before + 1]
    assert 3 <= len(begins) <= 12
    assert begins[0] >= FIRST_TRIAL
    pauses = [later - earlier for earlier, later in pairwise(begins)]
    assert all(later > 1.1 * earlier for earlier, later in pairwise(pauses))
    assert all(later > 1.9 * earlier for earlier, later in pairwise(pauses[1:])), pauses
    assert pauses[-1] > 20 * pauses[0]
    assert len(tried) < 0.01 * 20_000


def test_fewer_lanes_are_not_tried_where_batches_do_not_notice_one_another():
    """Under load a trial costs latency, and no outcome of it could be better."""
    world = World(8, 8, lambda lanes, rows: 1.0)
    world.run(8, batches=4000)
    world.seen.clear()
    world.run(8, batches=40_000)
    assert set(world.seen) == {8}


def in_a_trial():
    """Lanes that a trial has just begun in, and the number of the next batch."""
    world = World(4, 8, lambda lanes, rows: float(lanes))
    while world.lanes.allowed("b", 8) == 1 or len(world.seen) < WARM_UP:
        world.run(8, batches=1)
    assert world.lanes.allowed("b", 8) == 4
    return world


@pytest.mark.parametrize("is_started", [True, False], ids=["not measured", "never started"])
def test_a_trial_ends_though_of_no_batch_is_it_known_when_it_computed(is_started):
    world = in_a_trial()
    lanes = world.lanes
    for number in range(10_000, 10_000 + GIVE_UP_BATCHES):
        assert lanes.allowed("b", 8) == 4
        lane = lanes.acquire("b", 8, lambda _: 0)
        batch = make_batch(number, key=KEY, rows=8, lane=lane)._replace(launched_ns=world.now_ns)
        lanes.launched(batch)
        if is_started:
            lanes.started(batch, world.now_ns, None)
        world.now_ns += COMPUTE_NS
        lanes.landed(batch, world.now_ns)
        lanes.ended(batch)
    assert lanes.allowed("b", 8) == 1
