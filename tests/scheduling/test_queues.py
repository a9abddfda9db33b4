"""Bucket queues and the heap of deadlines: order, bounds, tombstones."""

from hypothesis import given
from hypothesis import strategies as st

from asynctrt.scheduling.queues import LOOKAHEAD_MAX, TOMBSTONES_MIN, BucketQueue, DeadlineHeap
from asynctrt.scheduling.request import Change, Request, State, change

ROWS_MAX = 20


def request(rows=1, priority=0, arrival_ns=0, **kw):
    return Request(rows, "bucket", priority, arrival_ns, **kw)


def queue_of(*requests, priorities=3):
    queue = BucketQueue("bucket", priorities, ROWS_MAX)
    for each in requests:
        queue.push(each)
    return queue


def cancel(queue, victim):
    change(victim, Change.CANCEL)
    queue.discard(victim)


def test_first_in_first_out_within_a_priority():
    a, b, c = (request() for _ in range(3))
    assert queue_of(a, b, c).take(2) == [a, b]


def test_a_larger_priority_goes_first_and_the_rest_of_the_batch_is_filled_from_below():
    low, high, middle = request(priority=0), request(priority=2), request(priority=1)
    assert queue_of(low, high, middle).take(8) == [high, middle, low]


def test_take_launches_what_it_takes():
    a, b = request(), request()
    queue = queue_of(a, b)
    queue.take(1)
    assert (a.state, b.state) == (State.IN_FLIGHT, State.QUEUED)
    assert (queue.requests, queue.rows) == (1, 1)


def test_what_does_not_fit_is_passed_over_and_heads_the_next_batch():
    first, large, small = request(3), request(4), request(1)
    queue = queue_of(first, large, small)
    assert queue.take(4) == [first, small]
    assert queue.take(4) == [large]


def test_passing_over_keeps_the_order_of_those_passed_over():
    requests = [request(3), request(4), request(2), request(1)]
    queue = queue_of(*requests)
    assert queue.take(4) == [requests[0], requests[3]]
    assert queue.waiting() == [requests[1], requests[2]]


def test_looking_past_what_does_not_fit_is_bounded():
    small_and_late = request(1)
    large = [request(4) for _ in range(LOOKAHEAD_MAX)]
    queue = queue_of(request(3), *large, small_and_late)
    assert small_and_late not in queue.take(4)


def test_a_large_request_is_not_starved_by_small_ones_that_keep_coming():
    large = request(4)
    queue = queue_of(request(1), large)
    batches = []
    while not batches or large not in batches[-1]:
        for _ in range(8):
            queue.push(request(1))
        batches.append(queue.take(4))
    assert len(batches) == 2


def test_the_oldest_arrival_counts_over_all_priorities():
    assert queue_of(request(arrival_ns=7), request(priority=2, arrival_ns=9)).oldest_arrival_ns() == 7


def test_a_discarded_request_is_neither_head_nor_taken_nor_counted():
    a, b = request(2), request(3)
    queue = queue_of(a, b)
    cancel(queue, a)
    assert queue.head() is b
    assert (queue.requests, queue.rows) == (1, 3)
    assert queue.take(8) == [b]


def test_tombstones_are_swept_before_they_pile_up():
    queue = queue_of(request())
    for _ in range(10 * TOMBSTONES_MIN):
        victim = request()
        queue.push(victim)
        cancel(queue, victim)
        assert sum(map(len, queue._lanes)) <= queue.requests + TOMBSTONES_MIN + 1


def test_a_reused_queue_remembers_nothing():
    a = request()
    queue = queue_of(a)
    cancel(queue, a)
    queue.reuse("other", ROWS_MAX)
    assert queue.head() is None
    assert repr(queue) == "<BucketQueue 'other' requests=0 rows=0>"


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2), st.booleans()), max_size=40),
    st.integers(8, 20),
)
def test_taking_until_empty_gives_each_live_request_once(plan, rows_max):
    queue = BucketQueue("bucket", 3, ROWS_MAX)
    alive = []
    for rows, priority, is_cancelled in plan:
        each = request(rows, priority)
        queue.push(each)
        if is_cancelled:
            cancel(queue, each)
        else:
            alive.append(each)
    taken = []
    while queue.requests:
        batch = queue.take(rows_max)
        assert batch, "a queue with work gave none"
        assert sum(each.rows for each in batch) <= rows_max
        taken += batch
    assert sorted(map(id, taken)) == sorted(map(id, alive))
    assert queue.rows == 0


def test_deadlines_come_out_in_order_and_only_when_due():
    heap = DeadlineHeap()
    late, soon, same = (request(deadline_ns=ns) for ns in (30, 10, 10))
    for each in (late, soon, same):
        heap.push(each, queued_max=3)
    assert heap.earliest_ns() == 10
    assert heap.pop_due(9) == []
    assert heap.pop_due(10) == [soon, same]
    assert heap.earliest_ns() == 30


def test_a_request_that_left_the_queue_has_no_deadline_any_more():
    heap = DeadlineHeap()
    gone, waits = request(deadline_ns=10), request(deadline_ns=20)
    for each in (gone, waits):
        heap.push(each, queued_max=2)
    change(gone, Change.LAUNCH)
    assert heap.earliest_ns() == 20
    assert heap.pop_due(100) == [waits]


def test_the_heap_stays_bounded_by_what_is_queued():
    heap = DeadlineHeap()
    for ns in range(20 * TOMBSTONES_MIN):
        each = request(deadline_ns=10**9 - ns)
        heap.push(each, queued_max=1)
        change(each, Change.LAUNCH)
        assert len(heap) <= 2 * 1 + TOMBSTONES_MIN + 1
