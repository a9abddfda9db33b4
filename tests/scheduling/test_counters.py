"""Counters: what is added for a batch, and what is not."""

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.counters import ARENA_WAIT_NS_MIN, Counters
from tests.scheduling.support import make_batch, took

TIMES = {"copy_in_ns": 1, "compute_ns": 20, "copy_out_ns": 300, "arena_wait_ns": 0}


def add(counters, batch, now_ns=1000, arrivals_ns=(10, 20), **times):
    counters.add_batch(batch, now_ns, len(arrivals_ns), sum(arrivals_ns), took(**{**TIMES, **times}))


def test_it_begins_with_nothing():
    counters = Counters()
    assert counters.ended == counters.batches == 0
    assert counters.launched == dict.fromkeys(Reason, 0)
    assert counters.by_rows == {}


def test_times_are_counted_once_for_each_request_and_once_for_each_size():
    counters = Counters()
    add(counters, make_batch(rows=2, launched_ns=100))
    assert (counters.succeeded, counters.batches, counters.rows, counters.queue_ns) == (2, 1, 2, 90 + 80)
    assert (counters.copy_in_ns, counters.compute_ns, counters.copy_out_ns) == (2, 40, 600)
    assert counters.total_ns == 990 + 980
    size = counters.by_rows[2]
    assert (size.count, size.copy_in_ns, size.compute_ns, size.copy_out_ns) == (1, 1, 20, 300)
    add(counters, make_batch(rows=2, launched_ns=100))
    assert (counters.by_rows[2].count, counters.by_rows[2].compute_ns) == (2, 40)


def test_requests_that_are_answered_to_nobody_are_in_no_sum_of_times():
    counters = Counters()
    add(counters, make_batch(rows=2, launched_ns=100), arrivals_ns=[20])
    assert (counters.succeeded, counters.rows) == (1, 2)
    assert (counters.queue_ns, counters.compute_ns, counters.total_ns) == (80, 20, 980)
    add(counters, make_batch(rows=2, launched_ns=100), arrivals_ns=[])
    assert (counters.succeeded, counters.rows, counters.batches) == (1, 4, 2)


def test_a_batch_is_known_by_the_rows_that_were_asked_for_and_padding_is_counted_apart():
    counters = Counters()
    add(counters, make_batch(rows=3, rows_run=8))
    assert (counters.rows, counters.rows_padded) == (3, 5)
    assert list(counters.by_rows) == [3]


def test_batches_that_the_device_timed_are_counted():
    counters = Counters()
    for is_timed in (True, False, True):
        add(counters, make_batch(is_timed=is_timed))
    assert (counters.batches, counters.batches_timed) == (3, 2)


def test_waits_for_an_arena_are_counted_from_a_certain_length_on():
    counters = Counters()
    for wait_ns in (0, ARENA_WAIT_NS_MIN, ARENA_WAIT_NS_MIN + 1, 10**6):
        add(counters, make_batch(arena=0), arena_wait_ns=wait_ns)
    assert counters.arena_waits == 2
    assert counters.arena_wait_ns == 2 * ARENA_WAIT_NS_MIN + 1 + 10**6
    assert counters.busy_ns == 4 * 20


def test_without_an_arena_none_was_busy():
    counters = Counters()
    add(counters, make_batch(arena=None), arena_wait_ns=10**6)
    assert (counters.busy_ns, counters.arena_waits, counters.arena_wait_ns) == (0, 0, 0)
    add(counters, make_batch(arena=None, lane=0), arena_wait_ns=10**6)
    assert (counters.busy_ns, counters.arena_waits, counters.arena_wait_ns) == (0, 1, 10**6), "in its lane"


def test_all_ways_for_a_request_to_end_count_as_ended():
    assert Counters(succeeded=1, failed=20, cancelled=300, expired=4000, refused=50_000).ended == 4321
