"""Where requests wait: the order within a bucket, the turns of buckets, deadlines, and tombstones."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.key import KEYS_KEPT_MAX
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS, Policy
from asynctrt.scheduling.queues import (
    SEARCHED_MAX,
    TOMBSTONES_MIN,
    TURNS_KEPT,
    BucketQueue,
    Buckets,
    Deadlines,
)
from asynctrt.scheduling.request import NO_DEADLINE_NS, Change, Request, State, change
from tests.scheduling.support import KEY, count_operations, key_of

ROWS_MAX = 20
PRIORITIES = 3
EVER_NS = NO_DEADLINE_NS


def request(rows=1, priority=0, arrival_ns=0, key=KEY, **kw):
    return Request(rows, key, priority, arrival_ns, **kw)


def queue_of(*requests):
    queue = BucketQueue(KEY, PRIORITIES, ROWS_MAX)
    for each in requests:
        queue.push(each)
    return queue


def take(queue, rows_max):
    chosen, rows = queue.choose(rows_max)
    queue.take(chosen, rows)
    return list(chosen)


def leave(queue, victim, what=Change.CANCEL):
    change(victim, what)
    queue.discard(victim)


def places(queue):
    return sum(map(len, queue._by_priority))


class TestOneBucket:
    def test_taking_launches_what_was_chosen(self):
        a, b = request(), request()
        queue = queue_of(a, b)
        take(queue, 1)
        assert (a.state, b.state) == (State.IN_FLIGHT, State.QUEUED)
        assert (queue.requests, queue.rows) == (1, 1)

    def test_taking_some_of_many_plain_requests_does_not_copy_the_others(self):
        queue = queue_of()
        queue.extend([(number, "payload", 0) for number in range(5)])
        waiting = queue.entries
        chosen, rows = queue.choose(2)
        queue.take(chosen, rows)
        assert ([entry[0] for entry in chosen.entries], queue.rows) == ([0, 1], 3)
        assert [entry[0] for entry in waiting] == [2, 3, 4]
        assert queue.entries is waiting

    def test_what_does_not_fit_is_passed_over_and_heads_the_next_batch(self):
        first, large, small = request(3), request(4), request(1)
        queue = queue_of(first, large, small)
        assert take(queue, 4) == [first, small]
        assert take(queue, 4) == [large]

    def test_passing_over_keeps_the_order_of_those_passed_over(self):
        requests = [request(3), request(4), request(2), request(1)]
        queue = queue_of(*requests)
        assert take(queue, 4) == [requests[0], requests[3]]
        assert list(queue.waiting()) == [requests[1], requests[2]]

    def test_looking_past_what_does_not_fit_is_bounded(self):
        small_and_late = request(1)
        large = [request(4) for _ in range(SEARCHED_MAX)]
        queue = queue_of(request(3), *large, small_and_late)
        assert small_and_late not in take(queue, 4)

    def test_a_large_request_is_not_starved_by_small_ones_that_keep_coming(self):
        large = request(4)
        queue = queue_of(request(1), large)
        batches = []
        while not batches or large not in batches[-1]:
            for _ in range(8):
                queue.push(request(1))
            batches.append(take(queue, 4))
        assert len(batches) == 2

    def test_tombstones_are_swept_before_they_pile_up(self):
        queue = queue_of(request())
        for _ in range(10 * TOMBSTONES_MIN):
            victim = request()
            queue.push(victim)
            leave(queue, victim)
            assert places(queue) <= 2 * queue.requests + TOMBSTONES_MIN

    def test_tombstones_of_batches_taken_past_a_large_head_are_swept_too(self):
        """The head does not fit into shares, so what is taken leaves its place behind it."""
        queue = queue_of(request(8))
        for _ in range(10 * TOMBSTONES_MIN):
            queue.push(request(1, priority=0))
            chosen = [each for each in queue.waiting() if each.rows == 1]
            queue.take(chosen, len(chosen))
            assert places(queue) <= 2 * queue.requests + TOMBSTONES_MIN

    def test_a_queue_that_was_emptied_remembers_nothing(self):
        a, b = request(deadline_ns=3), request(deadline_ns=5)
        queue = queue_of(a, b)
        queue.deadline_ns = 3
        leave(queue, a)
        take(queue, 8)
        assert queue.head() is None
        assert (places(queue), queue.deadline_ns) == (0, NO_DEADLINE_NS)
        assert repr(queue) == f"<BucketQueue {KEY!r} requests=0 rows=0>"

    @settings(max_examples=200, deadline=None)
    @given(
        some.lists(
            some.tuples(
                some.sampled_from(["push", "push", "push", "cancel", "expire", "choose", "take"]),
                some.integers(0, 10**6),  # Which one.
                some.integers(1, 8),  # Rows of a request.
                some.integers(0, PRIORITIES - 1),
            ),
            max_size=120,
        )
    )
    def test_whatever_leaves_from_wherever_rows_requests_and_order_stay_right(self, events):
        queue, alive, arrived = BucketQueue(KEY, PRIORITIES, ROWS_MAX), [], 0
        for what, choice, rows, priority in events:
            rows_max = 8 + choice % 13
            if what == "push":
                arrived += 1
                alive.append(request(rows, priority, arrival_ns=arrived))
                queue.push(alive[-1])
            elif what in ("cancel", "expire") and alive:
                victim = alive.pop(choice % len(alive))
                leave(queue, victim, Change.CANCEL if what == "cancel" else Change.EXPIRE)
            elif what in ("take", "choose"):
                before = list(queue.waiting())
                chosen, chosen_rows = queue.choose(rows_max)
                assert list(queue.waiting()) == before
                assert queue.choose(rows_max) == (chosen, chosen_rows)
                assert chosen_rows == sum(each.rows for each in chosen) <= rows_max
                assert bool(chosen) == bool(alive)
                # The order of the queue, and its head first.
                assert [each for each in before if each in chosen] == list(chosen)
                assert list(chosen[:1]) == before[:1]
                if what != "choose":
                    queue.take(chosen, chosen_rows)
                    alive = [each for each in alive if each not in chosen]
            urgent_first = sorted(alive, key=lambda each: (-each.priority, each.arrival_ns))
            assert list(queue.waiting()) == urgent_first
            assert queue.head() is (urgent_first[0] if urgent_first else None)
            assert (queue.requests, queue.rows) == (len(alive), sum(each.rows for each in alive))
            if alive:
                assert queue.oldest_arrival_ns() == min(each.arrival_ns for each in alive)
            assert places(queue) <= 2 * queue.requests + TOMBSTONES_MIN


def parts_of(count, rows=ROWS_MAX, **kw):
    return [request(rows, **kw) for _ in range(count)]


def batches(queue, count):
    return [take(queue, ROWS_MAX) for _ in range(count)]


class TestSplitCalls:
    def test_who_comes_next_has_a_turn_between_the_parts(self):
        queue, parts = queue_of(), parts_of(4)
        queue.push(*parts)
        first, second = request(arrival_ns=1), request(arrival_ns=2)
        queue.push(first)
        assert batches(queue, 1) == [parts[:1]]
        queue.push(second)
        assert batches(queue, 2) == [[first, second], parts[1:2]]
        assert batches(queue, 2) == [parts[2:3], parts[3:]]
        assert repr(queue) == f"<BucketQueue {KEY!r} requests=0 rows=0>"

    def test_two_calls_take_turns(self):
        queue, a, b = queue_of(), parts_of(3), parts_of(2, arrival_ns=1)
        queue.push(*a)
        queue.push(*b)
        assert batches(queue, 5) == [a[:1], b[:1], a[1:2], b[1:], a[2:]]

    def test_a_last_part_that_is_small_shares_its_batch(self):
        queue, parts, other = queue_of(), [request(ROWS_MAX), request(3)], request(arrival_ns=1)
        queue.push(*parts)
        queue.push(other)
        assert batches(queue, 2) == [parts[:1], [other, parts[1]]]

    def test_a_deadline_decides_before_turns_do(self):
        queue, parts = queue_of(), parts_of(2, deadline_ns=50)
        queue.push(*parts)
        sooner, later = request(deadline_ns=40), request(ROWS_MAX, deadline_ns=60)
        for each in (later, sooner):
            queue.push(each)
        assert batches(queue, 4) == [[sooner], parts[:1], parts[1:], [later]]

    def test_a_deadline_after_which_patience_has_long_ended_does_not(self):
        queue = BucketQueue(KEY, PRIORITIES, ROWS_MAX, patience_ns=10)
        parts, other = parts_of(2, deadline_ns=500), request(arrival_ns=1, deadline_ns=600)
        queue.push(*parts)
        queue.push(other)
        assert batches(queue, 3) == [parts[:1], [other], parts[1:]]

    def test_only_the_part_in_the_queue_is_ahead_of_who_comes_next(self):
        queue = queue_of(request(2))
        queue.push(*parts_of(5))
        assert queue.rows_ahead(request()) == 2 + ROWS_MAX
        queue.push(*parts_of(3, priority=1))
        assert queue.rows_ahead(request()) == 2 + ROWS_MAX + 3 * ROWS_MAX
        assert queue.rows_ahead(request(priority=1)) == ROWS_MAX

    @pytest.mark.parametrize("gone", [[0], [1], [0, 1], [2, 1], [3]])
    def test_what_follows_a_part_that_leaves_goes_on(self, gone):
        queue, parts = queue_of(), parts_of(4)
        queue.push(*parts)
        for number in gone:
            leave(queue, parts[number])
        assert batches(queue, 4 - len(gone)) == [[each] for each in parts if each.state is State.IN_FLIGHT]
        assert queue.requests == 0

    def test_the_last_part_is_the_first_to_make_room(self):
        parts, other = parts_of(3), request()
        queue = queue_of(other)
        queue.push(*parts)
        assert list(queue.newest(0)) == [*parts[:0:-1], parts[0], other]

    @pytest.mark.parametrize("count", [10, 1000])
    def test_many_parts_cost_a_batch_no_more_than_few(self, count):
        queue = queue_of()
        queue.push(*parts_of(count))
        assert count_operations(lambda: take(queue, ROWS_MAX)) < 100

    @settings(max_examples=200, deadline=None)
    @given(
        some.lists(
            some.tuples(
                some.sampled_from(["one", "call", "leave", "take"]),
                some.integers(0, 10**6),  # Which one, and how many parts.
                some.integers(0, PRIORITIES - 1),
                some.sampled_from([EVER_NS, 30, 90]),
            ),
            max_size=80,
        )
    )
    def test_each_part_is_taken_once_and_in_order(self, events):
        queue, alive, calls, taken = queue_of(), [], [], []
        last = [("take", 0, 0, 0)] * 500  # More batches than there can be.
        for arrived, (what, choice, priority, deadline_ns) in enumerate(events + last):
            if arrived > len(events) and not alive:
                break
            keywords = {"priority": priority, "arrival_ns": arrived, "deadline_ns": deadline_ns}
            if what == "one":
                alive.append(request(1 + choice % ROWS_MAX, **keywords))
                queue.push(alive[-1])
            elif what == "call":
                calls.append([*parts_of(1 + choice % 5, **keywords), request(1 + choice % 7, **keywords)])
                queue.push(*calls[-1])
                alive += calls[-1]
            elif what == "leave" and alive:
                leave(queue, alive.pop(choice % len(alive)))
            elif what == "take":
                chosen = take(queue, ROWS_MAX)
                assert bool(chosen) == bool(alive)
                assert sum(each.rows for each in chosen) <= ROWS_MAX
                taken += chosen
                alive = [each for each in alive if each not in chosen]
            assert set(queue.waiting()) == set(alive)
            assert (queue.requests, queue.rows) == (len(alive), sum(each.rows for each in alive))
            assert places(queue) <= 2 * queue.requests + TOMBSTONES_MIN
        assert not alive
        assert len(taken) == len(set(taken))
        for parts in calls:
            order = [taken.index(part) for part in parts if part in taken]
            assert order == sorted(order)


class Board:
    """Buckets with their queues, driven as the scheduler drives them."""

    def __init__(self, *, delay_ns_max=0, concurrency=2, rows_max=8, priorities=PRIORITIES):
        self.buckets = Buckets(Policy(rows_max, delay_ns_max, concurrency), priorities)
        self.rows_max = rows_max
        self.priorities = priorities

    def push(self, name="b", *arrivals_ns, count=1, rows=1, priority=0, **kw):
        """Push a request for each arrival, or ``count`` that arrived at 0; returns the last."""
        key = key_of(name)
        bucket = self.buckets.by_key.get(key)
        if bucket is None:
            bucket = BucketQueue(key, self.priorities, self.rows_max)
            self.buckets.add(bucket)
        for arrival_ns in arrivals_ns or [0] * count:
            pushed = Request(rows, key, priority, arrival_ns, **kw)
            if bucket.push(pushed):
                self.buckets.pushed(bucket, pushed.priority, pushed.deadline_ns)
        return pushed

    def leave(self, victim, what=Change.CANCEL):
        bucket = self.buckets.by_key.get(victim.key)
        leave(bucket, victim, what)
        self.buckets.left(bucket)

    def pick(self, now_ns=0, in_flight=0):
        """The name of the bucket whose turn it is, and why; nothing is taken."""
        picked = self.buckets.pick(now_ns, in_flight)
        return picked and (picked[0].key.shape[0], picked[1])

    def launch(self, now_ns=0, in_flight=0):
        """As :meth:`pick`, and its batch is launched."""
        picked = self.buckets.pick(now_ns, in_flight)
        if picked is None:
            return None
        bucket, reason = picked
        bucket.take(*bucket.choose(self.rows_max))
        self.buckets.launched(bucket)
        return bucket.key.shape[0], reason


class TestWhenABucketLaunches:
    @pytest.mark.parametrize(
        ("requests", "delay_ns", "in_flight", "now_ns", "reason"),
        [
            (1, 0, 0, 100, Reason.IDLE),  # Idle: at once.
            (1, 500, 0, 100, Reason.IDLE),  # Idle: at once, whatever the delay.
            (1, 0, 1, 100, Reason.IDLE),  # Work in flight and room to spare: at once.
            (1, 500, 1, 599, None),  # The same with a delay: when the oldest has waited.
            (1, 500, 1, 600, Reason.DELAY),
            (8, 500, 1, 108, Reason.FULL),  # Full: at once.
            (8, 0, 2, 108, Reason.FULL),  # Full on a busy device: at once, it waits there.
            (7, 0, 2, 10**9, None),  # Not full on a busy device: it may still grow.
            (7, 500, 2, 10**9, None),
        ],
    )
    def test_alone(self, requests, delay_ns, in_flight, now_ns, reason):
        board = Board(delay_ns_max=delay_ns)
        board.push("b", *range(100, 100 + requests))
        assert board.pick(now_ns, in_flight) == (reason and ("b", reason))

    def test_nothing_to_choose_from(self):
        assert Board().pick() is None

    def test_the_most_urgent_head_wins(self):
        board = Board()
        board.push("calm")
        board.push("urgent", priority=2)
        board.push("middle", priority=1)
        assert [board.launch()[0] for _ in range(3)] == ["urgent", "middle", "calm"]

    def test_a_request_makes_the_bucket_urgent_that_it_joins(self):
        board = Board()
        board.push("first")
        board.push("second")
        urgent = board.push("second", priority=1)
        assert board.pick()[0] == "second"
        board.leave(urgent)
        assert board.pick()[0] == "first"

    def test_equals_are_chosen_in_the_order_of_their_turns(self):
        board = Board()
        board.push("a", 5)
        board.push("b", 1)
        assert [board.launch(10)[0] for _ in range(2)] == ["a", "b"]

    def test_a_bucket_that_may_not_launch_yet_does_not_block_one_that_may(self):
        board = Board(delay_ns_max=500)
        board.push("waiting", 100)
        board.push("full", *[100] * 8)
        assert board.pick(101, 1) == ("full", Reason.FULL)

    def test_a_bucket_that_was_emptied_is_in_no_order(self):
        board = Board(delay_ns_max=500)
        victims = [board.push(name, 100, priority=2) for name in "ab"]
        board.push("c", 100)
        for victim in victims:
            board.leave(victim)
        assert len(board.buckets) == 1
        assert board.pick(100, 0) == ("c", Reason.IDLE)
        assert board.pick(600, 1) == ("c", Reason.DELAY)


class TestTurnsOnABusyDevice:
    """With enough in flight nothing launches unless a bucket is full, and then the turn decides among all."""

    def test_a_bucket_that_is_not_full_has_its_turn_beside_a_flood(self):
        board = Board(concurrency=2)
        board.push("flood", count=100)
        board.push("drop")
        assert [board.launch(in_flight=2) for _ in range(4)] == [
            ("flood", Reason.FULL),
            ("drop", Reason.TURN),
            ("flood", Reason.FULL),
            ("flood", Reason.FULL),
        ]

    @pytest.mark.parametrize(("drops", "full"), [(["d"], 8), (["d", "e"], 16), (["d", "e", "f"], 24)])
    def test_one_that_had_its_turn_lately_lets_full_batches_go_first(self, drops, full):
        board = Board(concurrency=2)
        board.push("flood", count=1000)
        launched = []
        for _ in range(100):
            for name in drops:
                if key_of(name) not in board.buckets.by_key or not board.buckets.by_key[key_of(name)].rows:
                    board.push(name)
            launched.append(board.launch(in_flight=2)[0])
        assert launched[: len(drops) + 1] == ["flood", *drops]
        for name in drops:
            turns = [number for number, one in enumerate(launched) if one == name]
            assert max(after - before for before, after in pairwise(turns)) <= full + len(drops)
            # Each takes one batch in so many, although it always has work.
            assert len(turns) <= 2 + 100 // full

    def test_buckets_that_all_fill_batches_take_turns(self):
        board = Board(concurrency=2)
        for name in "abc":
            board.push(name, count=80)
        assert "".join(board.launch(in_flight=2)[0] for _ in range(9)) == "abcabcabc"

    def test_two_that_fill_batches_beside_one_that_does_not(self):
        board = Board(concurrency=2)
        for name, count in (("a", 400), ("b", 400), ("d", 1)):
            board.push(name, count=count)
        launched = []
        for _ in range(40):
            launched.append(board.launch(in_flight=2)[0])
            if launched[-1] == "d":
                board.push("d")
        assert "".join(launched[:6]) == "aaaabd"
        assert abs(launched.count("a") - launched.count("b")) <= 4
        assert 3 <= launched.count("d") <= 6

    def test_a_more_urgent_one_goes_first(self):
        board = Board(concurrency=2)
        board.push("flood", count=100)
        board.push("urgent", priority=2)
        assert board.launch(in_flight=2) == ("urgent", Reason.TURN)
        assert board.launch(in_flight=2) == ("flood", Reason.FULL)

    def test_a_flood_that_is_more_urgent_goes_first(self):
        board = Board(concurrency=2)
        board.push("flood", count=16, priority=1)
        board.push("drop")
        assert [board.launch(in_flight=2) for _ in range(3)] == [("flood", Reason.FULL)] * 2 + [None]
        assert board.launch(in_flight=1) == ("drop", Reason.IDLE)

    def test_when_the_full_ones_are_gone_the_others_may_grow_again(self):
        board = Board(concurrency=2)
        board.push("a", count=8)
        board.push("b", count=3)
        assert board.launch(in_flight=2) == ("a", Reason.FULL)
        assert board.launch(in_flight=2) is None
        board.push("b", count=5)
        assert board.launch(in_flight=3) == ("b", Reason.FULL)

    def test_a_full_one_that_shrinks_is_not_full_any_more(self):
        board = Board(concurrency=1)
        victim = board.push("a", count=8)
        assert board.pick(in_flight=1) == ("a", Reason.FULL)
        board.leave(victim, Change.EXPIRE)
        assert board.pick(in_flight=1) is None
        board.push("a")
        assert board.pick(in_flight=1) == ("a", Reason.FULL)

    def test_one_whose_delay_is_over_has_its_turn_too(self):
        board = Board(concurrency=1, delay_ns_max=500)
        board.push("drop", 100)
        board.push("flood", *[100] * 40)
        assert board.launch(200, 1) == ("flood", Reason.FULL)
        assert board.launch(600, 1) == ("flood", Reason.FULL), "it was full before the other was ready"
        assert board.launch(600, 1) == ("drop", Reason.TURN)

    @settings(max_examples=200, deadline=None)
    @given(
        priorities=some.lists(some.integers(0, 2), min_size=2, max_size=6),
        events=some.lists(
            some.tuples(some.sampled_from(["push", "push", "take", "cancel"]), some.integers(0, 10**6)),
            max_size=150,
        ),
        in_flight=some.integers(0, 3),
    )
    def test_no_bucket_is_passed_over_for_ever(self, priorities, events, in_flight):
        """The requests of one bucket are equally urgent here, so it keeps its place until its turn.

        That comes after one of each other bucket, and those that buckets which fill batches keep.
        """
        board = Board(concurrency=2, rows_max=2)
        queued = {name: [] for name in range(len(priorities))}
        passed_over = dict.fromkeys(queued, 0)
        for what, choice in events:
            name = choice % len(priorities)
            if what == "push":
                queued[name].append(board.push(name, rows=1 + choice % 2, priority=priorities[name]))
            elif what == "cancel" and queued[name]:
                board.leave(queued[name].pop(choice % len(queued[name])))
                if not queued[name]:
                    passed_over[name] = 0
            elif what == "take":
                launched = board.launch(in_flight=in_flight)
                may = in_flight < 2 or any(sum(r.rows for r in waiting) >= 2 for waiting in queued.values())
                assert (launched is not None) == (may and any(queued.values()))
                if launched is None:
                    continue
                taken, passed_over[launched[0]] = launched[0], 0
                queued[taken] = [each for each in queued[taken] if each.state is State.QUEUED]
                for other, waiting in queued.items():
                    if waiting and other != taken:
                        assert priorities[other] <= priorities[taken], "a less urgent one went first"
                        if priorities[other] == priorities[taken]:
                            passed_over[other] += 1
                            assert passed_over[other] < (TURNS_KEPT + 1) * len(priorities)


class TestDelays:
    def test_the_delay_is_counted_from_the_oldest_and_does_not_restart_with_each_arrival(self):
        board = Board(delay_ns_max=500)
        board.push("b", 100)
        for now_ns in range(150, 600, 75):
            board.push("b", now_ns)
            assert board.pick(now_ns, 1) is None
            assert board.buckets.wakeup_ns(1) == 600
        assert board.pick(599, 1) is None
        assert board.pick(600, 1) == ("b", Reason.DELAY)

    def test_what_a_batch_left_behind_waits_from_its_own_arrival(self):
        board = Board(delay_ns_max=500)
        board.push("b", *[100] * 8)
        board.push("b", 300)
        assert board.launch(310, 1) == ("b", Reason.FULL)
        assert board.pick(310, 1) is None
        assert board.buckets.wakeup_ns(1) == 800
        assert board.launch(800, 1) == ("b", Reason.DELAY)

    def test_what_a_batch_left_behind_may_have_waited_long_enough_already(self):
        board = Board(delay_ns_max=500)
        board.push("b", 100, rows=5)
        board.push("b", 100, rows=5)
        assert board.launch(200, 1) == ("b", Reason.FULL)
        assert board.launch(599, 1) is None
        assert board.launch(600, 1) == ("b", Reason.DELAY)

    def test_when_the_oldest_is_cancelled_the_next_one_counts(self):
        board = Board(delay_ns_max=500)
        oldest = board.push("b", 100)
        board.push("b", 400)
        board.leave(oldest)
        assert board.pick(600, 1) is None
        assert board.buckets.wakeup_ns(1) == 900
        assert board.pick(900, 1) == ("b", Reason.DELAY)

    def test_a_bucket_that_was_emptied_starts_anew(self):
        board = Board(delay_ns_max=500)
        board.leave(board.push("b", 100))
        assert board.buckets.wakeup_ns(1) is None
        board.push("b", 590)
        assert board.pick(600, 1) is None
        assert board.pick(1090, 1) == ("b", Reason.DELAY)

    def test_a_deadline_that_is_near_launches_early(self):
        board = Board(delay_ns_max=10**9)
        due_ns = 10**7
        board.push("b", 100, deadline_ns=due_ns)
        assert board.buckets.wakeup_ns(1) == due_ns - DEADLINE_MARGIN_NS
        assert board.pick(due_ns - DEADLINE_MARGIN_NS - 1, 1) is None
        assert board.pick(due_ns - DEADLINE_MARGIN_NS, 1) == ("b", Reason.DEADLINE)

    def test_the_deadline_of_whoever_joins_counts_and_of_whoever_leaves_does_not(self):
        board = Board(delay_ns_max=10**9)
        board.push("b", 100)
        assert board.buckets.wakeup_ns(1) == 10**9 + 100
        hasty = board.push("b", 200, deadline_ns=10**7)
        board.push("b", 300, deadline_ns=10**8)
        assert board.buckets.wakeup_ns(1) == 10**7 - DEADLINE_MARGIN_NS
        board.leave(hasty)
        assert board.pick(10**7, 1) is None
        assert board.buckets.wakeup_ns(1) == 10**8 - DEADLINE_MARGIN_NS
        assert board.pick(10**8 - DEADLINE_MARGIN_NS, 1) == ("b", Reason.DEADLINE)

    def test_the_first_of_several_delays_wakes_and_none_does_while_the_device_is_busy(self):
        board = Board(delay_ns_max=500, concurrency=2)
        for name, arrival_ns in (("a", 300), ("b", 100), ("c", 200)):
            board.push(name, arrival_ns)
        assert board.buckets.wakeup_ns(1) == 600
        assert board.buckets.wakeup_ns(2) is None
        assert board.launch(600, 1) == ("b", Reason.DELAY)
        assert board.buckets.wakeup_ns(1) == 700

    def test_buckets_whose_delays_are_over_take_turns_in_the_order_in_which_they_ended(self):
        board = Board(delay_ns_max=500)
        for name, arrival_ns in (("a", 300), ("b", 100), ("c", 200)):
            board.push(name, arrival_ns)
        assert [board.launch(10**6, 1)[0] for _ in range(3)] == ["b", "c", "a"]

    @settings(max_examples=200, deadline=None)
    @given(
        events=some.lists(
            some.tuples(
                some.sampled_from(["push", "push", "pass", "cancel", "take"]),
                some.integers(0, 2),
                some.integers(0, 10**6),
                some.booleans(),
            ),
            max_size=80,
        ),
        in_flight=some.integers(1, 2),
    )
    def test_nothing_launches_early_or_sleeps_past_its_time(self, events, in_flight):
        """Only one that has been full or ready, and shrank, may go early: its batch had no reason to wait.

        One that becomes ready is found by the next look, if it still is then.
        """
        delay_ns, now_ns = 2_000_000, 0
        board = Board(delay_ns_max=delay_ns, concurrency=2, rows_max=3)
        queued, was_ready = {0: [], 1: [], 2: []}, set()

        def ready_ns(waiting):
            due_ns = min(each.deadline_ns for each in waiting) - DEADLINE_MARGIN_NS
            return min(waiting[0].arrival_ns + delay_ns, due_ns)

        for what, name, choice, has_deadline in events:
            if what == "push":
                deadline_ns = now_ns + 4 * choice if has_deadline else NO_DEADLINE_NS
                queued[name].append(board.push(name, now_ns, deadline_ns=deadline_ns))
            elif what == "pass":
                now_ns += choice
            elif what == "cancel" and queued[name]:
                board.leave(queued[name].pop(choice % len(queued[name])))
            waits = {other for other, waiting in queued.items() if waiting}
            is_ready = {
                other for other in waits if len(queued[other]) >= 3 or ready_ns(queued[other]) <= now_ns
            }
            was_ready = (was_ready & waits) | is_ready
            if what == "take":
                launched = board.launch(now_ns, in_flight)
                is_busy = in_flight >= 2 and all(len(waiting) < 3 for waiting in queued.values())
                if launched is None:
                    assert is_busy or not is_ready
                else:
                    assert not is_busy
                    assert launched[0] in was_ready
                    queued[launched[0]] = [r for r in queued[launched[0]] if r.state is State.QUEUED]
                    was_ready.discard(launched[0])
            wakeup_ns = board.buckets.wakeup_ns(1)
            for other, waiting in queued.items():
                is_filling = waiting and not board.buckets.by_key[key_of(other)].is_ready
                if is_filling and ready_ns(waiting) > now_ns:
                    assert wakeup_ns is not None
                    assert wakeup_ns <= ready_ns(waiting)


class TestManyBuckets:
    def test_only_those_with_work_are_counted_and_listed(self):
        board = Board()
        for name in range(5):
            board.push(name)
        board.launch()
        assert len(board.buckets) == 4
        assert sorted(bucket.key.shape[0] for bucket in board.buckets) == [1, 2, 3, 4]

    def test_empty_ones_are_kept_for_the_next_request_of_their_key_and_are_bounded(self):
        board = Board()
        board.push("kept")
        kept = board.buckets.by_key.get(key_of("kept"))
        board.launch()
        board.push("kept")
        assert board.buckets.by_key.get(key_of("kept")) is kept
        for name in range(10 * KEYS_KEPT_MAX):
            board.leave(board.push(name))
            assert len(board.buckets.by_key) <= KEYS_KEPT_MAX + len(board.buckets)
        assert board.buckets.by_key.get(key_of("kept")) is kept, "one with work is never dropped"

    def test_clearing_takes_what_waits_and_forgets_the_rest(self):
        board = Board(delay_ns_max=500)
        requests = [board.push(name, priority=name % PRIORITIES) for name in range(9)]
        board.push("full", count=8)
        board.leave(requests.pop())
        cleared = board.buckets.clear()
        assert len(cleared) == 16
        assert set(requests) < set(cleared)
        assert (len(board.buckets), list(board.buckets)) == (0, [])
        assert board.pick(EVER_NS, 0) is None
        assert board.buckets.wakeup_ns(0) is None

    @pytest.mark.parametrize("delay_ns", [0, 500])
    @pytest.mark.parametrize("in_flight", [0, 1, 2])
    def test_finding_the_next_one_takes_as_much_work_among_ten_as_among_thousands(self, delay_ns, in_flight):
        def work(buckets):
            board = Board(delay_ns_max=delay_ns, priorities=1)
            for name in range(buckets):
                board.push(name, name)
            board.push("full", *[0] * 8)
            # The delays that are over by now are paid for by their buckets, once for each.
            board.pick(10**6, in_flight)
            return count_operations(lambda: [board.launch(10**6, in_flight) for _ in range(5)])

        assert work(5000) == work(10)


class TestDeadlines:
    def test_they_stay_bounded_by_what_is_queued(self):
        deadlines = Deadlines()
        for ns in range(20 * TOMBSTONES_MIN):
            each = request(deadline_ns=10**9 - ns)
            deadlines.push(each, queued_max=1)
            change(each, Change.LAUNCH)
            assert len(deadlines.line) <= 2 * 1 + TOMBSTONES_MIN + 1

    @given(
        some.lists(some.tuples(some.sampled_from(["push", "go", "due"]), some.integers(0, 30)), max_size=80)
    )
    def test_it_is_what_a_sorted_list_is(self, steps):
        deadlines, queued, now_ns = Deadlines(), [], 0
        for step, number in steps:
            if step == "push":
                queued.append(request(arrival_ns=now_ns, deadline_ns=now_ns + number))
                deadlines.push(queued[-1], queued_max=len(queued))
            elif step == "go" and queued:
                change(queued.pop(number % len(queued)), Change.LAUNCH)
            elif step == "due":
                now_ns += number // 3
                arrived_by_ns = now_ns - number % 3
                due = [one for one in queued if one.deadline_ns <= now_ns]
                found = deadlines.pop_due(now_ns, arrived_by_ns)
                assert [one.deadline_ns for one in found] == sorted(one.deadline_ns for one in found)
                assert {id(one) for one in found} == {
                    id(one) for one in due if one.arrival_ns <= arrived_by_ns
                }
                for one in found:
                    change(one, Change.EXPIRE)
                    queued.remove(one)
            assert deadlines.earliest_ns() == min((one.deadline_ns for one in queued), default=None)
            assert bool(deadlines.line) or not queued
