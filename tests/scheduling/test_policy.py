"""When a bucket is ready, how many rows a batch takes, and how many are executed: a table a rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.batch_times import BatchTimes, Times
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policies import PART_NS_MIN, SpreadOverCores
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS, NOT_CAPTURED, Captured, Policy
from asynctrt.scheduling.queues import BucketQueue, Buckets
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request
from tests.scheduling.support import scheduler, submit

ROWS_MAX = 8
SHAPE = (("n", 3),)


def policy(*, delay_ns_max=0, concurrency=2, is_parallel=False, captured=NOT_CAPTURED):
    return Policy(ROWS_MAX, delay_ns_max, concurrency, is_parallel, captured)


@pytest.mark.parametrize(
    ("delay_ns", "deadline_ns", "ready_ns"),
    [
        (0, NO_DEADLINE_NS, 100),
        (500, NO_DEADLINE_NS, 600),
        (500, 10**9, 600),  # The delay is over long before the deadline.
        (10**9, 10**7, 10**7 - DEADLINE_MARGIN_NS),  # The deadline comes first, and is met.
        (10**9, 200, 200 - DEADLINE_MARGIN_NS),  # It is too close to wait for anything.
    ],
)
def test_a_bucket_is_ready_when_its_oldest_has_waited_or_shortly_before_a_deadline(
    delay_ns, deadline_ns, ready_ns
):
    assert policy(delay_ns_max=delay_ns).ready_ns(100, deadline_ns) == ready_ns


def latency_of(expected_ns):
    history = Times()
    if expected_ns is not None:
        history.observe(SHAPE, 1, expected_ns)
    return history


def rows_to_take(rules, rows, latency, *, head_rows=1, buckets=1, in_flight=0, rows_max=ROWS_MAX):
    times, waiting = BatchTimes(), Buckets(rules, 1)
    times.compute = latency
    for number in reversed(range(buckets)):
        bucket = BucketQueue(BatchKey((("n", 3 + number),)), 1, rows_max)
        waiting.add(bucket)
        bucket.push(Request(head_rows, bucket.key, 0, 0))
        bucket.push(Request(rows - head_rows, bucket.key, 0, 0))
        waiting.pushed(bucket, 0, NO_DEADLINE_NS)
    return SpreadOverCores(rules, waiting, times).rows_max(bucket, in_flight, Reason.IDLE)


@pytest.mark.parametrize(
    ("expected_ns", "in_flight", "buckets", "rows"),
    [
        (None, 0, 1, 8),  # Nothing was measured yet.
        (PART_NS_MIN, 0, 1, 8),  # Too short to gain from being split.
        (2 * PART_NS_MIN, 0, 1, 3),  # Two parts of the 6 rows that wait.
        (100 * PART_NS_MIN, 0, 1, 2),  # No more parts than idle cores.
        (100 * PART_NS_MIN, 1, 1, 3),
        (100 * PART_NS_MIN, 2, 1, 8),  # One idle core: nothing to share.
        (100 * PART_NS_MIN, 0, 2, 3),  # A core is left to the other bucket.
    ],
)
def test_on_parallel_cores_rows_are_shared_out(expected_ns, in_flight, buckets, rows):
    rules = policy(concurrency=3, is_parallel=True)
    assert rows_to_take(rules, 6, latency_of(expected_ns), buckets=buckets, in_flight=in_flight) == rows


@pytest.mark.parametrize(
    ("rows", "is_parallel", "delay_ns_max"), [(2, True, 0), (6, False, 0), (6, True, 1)], ids=str
)
def test_rows_are_not_shared_out_on_one_core_nor_where_a_delay_asks_for_large_batches(
    rows, is_parallel, delay_ns_max
):
    plan = scheduler(
        rows_max=8, concurrency=3, contexts=3, is_parallel=is_parallel, delay_ns_max=delay_ns_max
    )
    plan.times.seed(BatchKey(SHAPE), {1: 10**9})
    for _ in range(6):
        submit(plan, key=BatchKey(SHAPE))
    assert plan.next_batch(10**9).rows == rows


def test_a_share_has_room_for_the_head():
    rules = policy(concurrency=3, is_parallel=True)
    assert rows_to_take(rules, 6, latency_of(10**9), head_rows=5) == 5


@pytest.mark.parametrize(("part_ns", "rows"), [(PART_NS_MIN // 10, 8), (PART_NS_MIN, 3)])
def test_what_the_parts_took_counts_more_than_what_the_whole_took_once(part_ns, rows):
    """The first batch of all is slow, as everything is cold, and a size that is always shared out is never
    measured again."""
    rules, history = policy(concurrency=2, is_parallel=True), latency_of(2 * PART_NS_MIN)
    history.observe(SHAPE, 3, part_ns)
    history.observe(SHAPE, 6, 10 * PART_NS_MIN)
    assert rows_to_take(rules, 6, history) == rows


@pytest.mark.parametrize("rows_max", [3, 8])
def test_shares_of_a_long_queue_are_full_batches(rows_max):
    rules = policy(concurrency=2, is_parallel=True)
    assert rows_to_take(rules, 100, latency_of(10**9), rows_max=rows_max) == rows_max


def measured(sizes):
    """Batches of these rows took so long."""
    history = Times()
    for rows, duration_ns in sizes.items():
        history.observe(SHAPE, rows, duration_ns)
    return history


@pytest.mark.parametrize(
    ("rows", "seen", "direct_ns", "graph_ns", "run"),
    [
        # Captured sizes run as they are, and there is none above the largest.
        (1, {}, 0, 0, 1),
        (8, {8: 900}, 0, 0, 8),
        (9, {8: 100}, 0, 0, 9),
        # A size that was never tried is tried: else its cost would never be known.
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
    rules = policy(captured=Captured((1, 8), direct_ns, graph_ns))
    assert rules.rows_to_run(SHAPE, rows, measured(seen)) == run


def test_below_the_smallest_captured_size_there_is_no_line():
    rules = policy(captured=Captured((8,)))
    assert rules.rows_to_run(SHAPE, 3, measured({8: 800})) == 8
    assert rules.rows_to_run(SHAPE, 3, measured({3: 300, 8: 800})) == 3


def test_without_captured_sizes_nothing_is_padded():
    assert policy().rows_to_run(SHAPE, 3, measured({3: 300, 8: 8})) == 3


def test_what_launching_costs_is_not_known_from_the_start():
    assert tuple(NOT_CAPTURED) == ((), 0, 0)


def test_other_shapes_do_not_decide_about_padding():
    assert policy(captured=Captured((8,))).rows_to_run("other", 3, measured({3: 1, 8: 800})) == 8


@given(
    rows=some.integers(1, 70),
    sizes=some.sets(some.integers(1, 64)),
    seen=some.dictionaries(some.integers(1, 70), some.integers(0, 10**9)),
    direct_ns=some.integers(0, 10**6),
    graph_ns=some.integers(0, 10**6),
)
def test_rows_run_as_they_are_or_at_the_next_captured_size(rows, sizes, seen, direct_ns, graph_ns):
    rules = policy(captured=Captured(tuple(sorted(sizes)), direct_ns, graph_ns))
    latency = measured(seen)
    run = rules.rows_to_run(SHAPE, rows, latency)
    above = sorted(size for size in sizes if size >= rows)
    assert run in (rows, *above[:1])
    if rows in sizes:
        assert run == rows
    if run != rows and run in seen and rows in seen:
        assert seen[run] + graph_ns <= seen[rows] + direct_ns
    # The same measurements decide the same way: nothing is remembered.
    assert rules.rows_to_run(SHAPE, rows, latency) == run
