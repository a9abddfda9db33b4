"""What may launch, when, and how much of it: a table a rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from asynctrt.scheduling.latency import LatencyModel
from asynctrt.scheduling.policy import NEVER_NS, PART_NS_MIN, Policy
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import Request, WholeBucket

ROWS_MAX = 8


def policy(delay_ns_max=0, slots=2, is_parallel=False):
    return Policy(ROWS_MAX, delay_ns_max, slots, is_parallel)


def bucket(*arrivals_ns, key="bucket", rows=1, priority=0):
    queue = BucketQueue(key, 3, ROWS_MAX)
    for arrival_ns in arrivals_ns:
        queue.push(Request(rows, key, priority, arrival_ns))
    return queue


@pytest.mark.parametrize(
    ("requests", "delay_ns", "in_flight", "ready_ns"),
    [
        (1, 0, 0, 0),  # Idle: at once.
        (1, 500, 0, 0),  # Idle: at once, whatever the delay.
        (1, 0, 1, 0),  # Work in flight and a slot to spare: at once.
        (1, 500, 1, 600),  # The same with a delay: when the oldest has waited.
        (8, 500, 1, 0),  # Full: at once.
        (8, 0, 2, 0),  # Full, every slot taken: at once, it waits on the device.
        (7, 0, 2, NEVER_NS),  # Not full, every slot taken: it may still grow.
        (7, 500, 2, NEVER_NS),
    ],
)
def test_when_a_bucket_may_launch(requests, delay_ns, in_flight, ready_ns):
    waiting = bucket(*range(100, 100 + requests))
    assert policy(delay_ns_max=delay_ns).ready_ns(waiting, in_flight) == ready_ns


def test_the_wait_does_not_restart_with_each_arrival():
    waiting = bucket(100)
    rules = policy(delay_ns_max=500)
    before = rules.ready_ns(waiting, 1)
    waiting.push(Request(1, "bucket", 0, 550))
    assert rules.ready_ns(waiting, 1) == before == 600


def test_nothing_to_choose_from():
    assert policy().choose([], 0, 0) is None


def test_the_most_urgent_head_wins():
    calm, urgent = bucket(1, key="calm"), bucket(2, key="urgent", priority=2)
    assert policy().choose([calm, urgent], 0, 10) is urgent


def test_equals_are_chosen_in_the_order_of_their_turns():
    a, b = bucket(5, key="a"), bucket(1, key="b")
    assert policy().choose([a, b], 0, 10) is a


def test_a_bucket_that_may_not_launch_yet_does_not_block_one_that_may():
    waiting, full = bucket(100, key="waiting"), bucket(*[100] * 8, key="full")
    assert policy(delay_ns_max=500).choose([waiting, full], 1, 101) is full


def test_after_its_delay_a_bucket_is_chosen():
    waiting = bucket(100)
    rules = policy(delay_ns_max=500)
    assert rules.choose([waiting], 1, 599) is None
    assert rules.choose([waiting], 1, 600) is waiting


def latency_of(expected_ns):
    model = LatencyModel()
    if expected_ns is not None:
        model.observe("bucket", 1, expected_ns)
    return model


@pytest.mark.parametrize(
    ("expected_ns", "in_flight", "buckets", "rows"),
    [
        (None, 0, 1, 8),  # Nothing was measured yet.
        (PART_NS_MIN, 0, 1, 8),  # Too short to gain from being split.
        (2 * PART_NS_MIN, 0, 1, 3),  # Two parts of the 6 rows that wait.
        (100 * PART_NS_MIN, 0, 1, 2),  # No more parts than idle slots.
        (100 * PART_NS_MIN, 1, 1, 3),
        (100 * PART_NS_MIN, 2, 1, 8),  # One idle slot: nothing to share.
        (100 * PART_NS_MIN, 0, 2, 3),  # A slot is left to the other bucket.
    ],
)
def test_on_parallel_slots_rows_are_shared_out(expected_ns, in_flight, buckets, rows):
    rules = policy(slots=3, is_parallel=True)
    assert rules.rows_to_take(bucket(*range(6)), buckets, in_flight, latency_of(expected_ns)) == rows


def test_rows_are_not_shared_out_on_a_device_that_does_one_thing_at_a_time():
    rules = policy(slots=3, is_parallel=False)
    assert rules.rows_to_take(bucket(*range(6)), 1, 0, latency_of(10**9)) == 8


def test_who_configures_a_delay_gets_large_batches():
    rules = policy(slots=3, is_parallel=True, delay_ns_max=1)
    assert rules.rows_to_take(bucket(*range(6)), 1, 0, latency_of(10**9)) == 8


def test_a_whole_bucket_is_never_shared_out():
    rules = policy(slots=3, is_parallel=True)
    key = WholeBucket("bucket", 0)
    latency = LatencyModel()
    latency.observe(key, 1, 10**9)
    assert rules.rows_to_take(bucket(*range(6), key=key), 1, 0, latency) == 8


def test_a_share_has_room_for_the_head():
    waiting = bucket(1, rows=5)
    waiting.push(Request(1, "bucket", 0, 2))
    rules = policy(slots=3, is_parallel=True)
    assert rules.rows_to_take(waiting, 1, 0, latency_of(10**9)) == 5


def test_shares_of_a_long_queue_are_full_batches():
    rules = policy(slots=2, is_parallel=True)
    assert rules.rows_to_take(bucket(*range(100)), 1, 0, latency_of(10**9)) == 8


def measured(sizes, direct_ns=0, graph_ns=0):
    """Batches of these rows took so long; and what the CPU needs to launch one."""
    model = LatencyModel()
    for rows, duration_ns in sizes.items():
        model.observe("bucket", rows, duration_ns)
    model.direct_ns, model.graph_ns = direct_ns, graph_ns
    return model


@pytest.mark.parametrize(
    ("rows", "seen", "direct_ns", "graph_ns", "run"),
    [
        # Captured sizes run as they are, and there is none above the largest.
        (1, {}, 0, 0, 1),
        (8, {8: 900}, 0, 0, 8),
        (9, {8: 100}, 0, 0, 9),
        # What was never tried is tried: else nobody would ever know.
        (3, {}, 0, 0, 8),
        (3, {1: 100}, 0, 0, 8),
        (3, {3: 100}, 0, 0, 8),
        # Measured both ways: the cheaper one, and the captured one among equals.
        (3, {3: 100, 8: 100}, 0, 0, 8),
        (3, {3: 100, 8: 101}, 0, 0, 3),
        (3, {3: 100, 8: 101}, 50, 10, 8),
        (3, {3: 100, 8: 200}, 50, 10, 3),
        (3, {3: 100, 8: 140}, 50, 10, 8),
        (3, {3: 100, 8: 141}, 50, 10, 3),
        # Never run without padding: on the line between the captured sizes around it.
        (3, {1: 100, 8: 800}, 0, 0, 3),
        (3, {1: 100, 8: 800}, 600, 100, 8),  # 300 and 600 are more than 800 and 100.
        (3, {1: 100, 8: 800}, 599, 100, 3),
        (3, {1: 100, 8: 100}, 0, 0, 8),  # A device that is not full takes as long for more.
        (3, {8: 800}, 0, 0, 8),  # Nothing is known below.
        # A size in between that is not captured says nothing about the line.
        (3, {2: 10, 8: 800}, 0, 0, 8),
    ],
)
def test_a_batch_is_padded_to_a_captured_size_where_that_pays(rows, seen, direct_ns, graph_ns, run):
    latency = measured(seen, direct_ns, graph_ns)
    assert policy().rows_to_run("bucket", rows, (1, 8), latency) == run


def test_below_the_smallest_captured_size_there_is_no_line():
    assert policy().rows_to_run("bucket", 3, (8,), measured({8: 800})) == 8
    assert policy().rows_to_run("bucket", 3, (8,), measured({3: 300, 8: 800})) == 3


def test_without_captured_sizes_nothing_is_padded():
    assert policy().rows_to_run("bucket", 3, (), measured({3: 300, 8: 8})) == 3


def test_other_buckets_do_not_decide_about_padding():
    assert policy().rows_to_run("other", 3, (8,), measured({3: 1, 8: 800})) == 8


@given(
    rows=some.integers(1, 70),
    sizes=some.sets(some.integers(1, 64)),
    seen=some.dictionaries(some.integers(1, 70), some.integers(0, 10**9)),
    direct_ns=some.integers(0, 10**6),
    graph_ns=some.integers(0, 10**6),
)
def test_rows_run_as_they_are_or_at_the_next_captured_size(rows, sizes, seen, direct_ns, graph_ns):
    captured = sorted(sizes)
    latency = measured(seen, direct_ns, graph_ns)
    run = policy().rows_to_run("bucket", rows, captured, latency)
    above = [size for size in captured if size >= rows]
    assert run in (rows, *above[:1])
    if rows in sizes:
        assert run == rows
    if run != rows and run in seen and rows in seen:
        assert seen[run] + graph_ns <= seen[rows] + direct_ns
    # The same measurements decide the same way: nothing is remembered.
    assert policy().rows_to_run("bucket", rows, captured, latency) == run
