"""What batches took, and when one will be done: behind those in its arena, beside those in others."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from asynctrt.scheduling.batch_times import (
    FORGOTTEN_AFTER,
    SURE_SAMPLES,
    TIMED_ALWAYS_NS,
    TIMED_EVERY,
    WINDOW,
    BatchTimes,
    Times,
)
from asynctrt.scheduling.concurrency import LEAD_MARGIN_NS, Concurrency
from asynctrt.scheduling.key import KEYS_KEPT_MAX, BatchKey
from tests.scheduling.support import make_batch

SHAPE = (("n", 3),)


def seen(*durations_ns, rows=8):
    history = Times()
    for duration_ns in durations_ns:
        history.observe(SHAPE, rows, duration_ns)
    return history


def test_no_duration_is_expected_before_one_was_seen():
    assert Times().typical(SHAPE, 1) is None


def test_one_outlier_does_not_move_it():
    assert seen(*[1000] * 10, 90_000).typical(SHAPE, 8) == 1000


def test_it_follows_when_the_service_changes():
    history = seen(*[1000] * WINDOW, *[5000] * WINDOW)
    assert history.typical(SHAPE, 8) == 5000


def test_it_is_a_low_quantile():
    assert seen(*range(1, 17)).typical(SHAPE, 8) == 5


def test_a_size_never_seen_is_on_the_line_between_its_neighbours_and_above_them_takes_as_long_at_least():
    history = seen(100, rows=2)
    history.observe(SHAPE, 8, 900)
    history.observe(SHAPE, 10, 1100)
    assert history.typical(SHAPE, 5) == 500
    assert history.typical(SHAPE, 9) == 1000
    assert history.typical(SHAPE, 64) == 1100
    assert history.typical(SHAPE, 1) is None, "of smaller ones nothing is known"


def test_sizes_of_which_too_few_were_seen_may_be_ignored():
    history = seen(*[100] * SURE_SAMPLES, rows=2)
    history.observe(SHAPE, 8, 900)
    assert history.typical(SHAPE, 8, SURE_SAMPLES) == history.typical(SHAPE, 5, SURE_SAMPLES) == 100
    assert seen(100).typical(SHAPE, 8, SURE_SAMPLES) is None


def test_shapes_do_not_share_expectations():
    assert seen(100).typical("other", 8) is None


def test_the_least_recently_seen_shape_is_forgotten():
    history = Times()
    for shape in range(KEYS_KEPT_MAX):
        history.observe(shape, 1, 10)
    history.observe(0, 1, 10)
    history.observe("new", 1, 10)
    assert history.typical(0, 1) == 10
    assert history.typical(1, 1) is None


def test_what_was_seen_is_of_just_that_size():
    history = seen(100, rows=2)
    assert history.has_seen(SHAPE, 2)
    assert not history.has_seen(SHAPE, 3)
    assert not history.has_seen("other", 2)
    assert history.typical(SHAPE, 3) == 100


def test_a_size_is_known_for_sure_when_one_slow_batch_does_no_harm():
    history = Times()
    for number, duration_ns in enumerate([5000, 1000, 1000, 1000]):
        assert not history.is_sure(SHAPE, 2), number
        history.observe(SHAPE, 2, duration_ns)
    assert history.is_sure(SHAPE, 2)
    assert not history.is_sure(SHAPE, 3)
    assert not history.is_sure("other", 2)
    history.observe(SHAPE, 2, 5000)
    assert history.typical(SHAPE, 2) == 1000


class Device:
    """What an estimator is told about: batches of one size, in order within an arena."""

    def __init__(self, *, arenas=1, compute_ns=1000, copy_in_ns=0, copy_out_ns=0):
        self.times = BatchTimes()
        self.compute = self.times.compute
        if compute_ns is not None:
            self.compute.observe(SHAPE, 1, compute_ns)
        self.lines = Concurrency(self.times, arenas=arenas)
        self.number = 0
        if copy_in_ns or copy_out_ns:
            self.times.observe_copies(self.make(None), copy_in_ns, copy_out_ns)

    def make(self, arena, rows_run=1):
        self.number += 1
        return make_batch(self.number, key=BatchKey(SHAPE), rows_run=rows_run, arena=arena)

    def launch(self, now_ns, arena=0, rows_run=1):
        """A batch, and in how many ns it is expected to be done."""
        batch = self.make(arena, rows_run)
        self.lines.launched(batch)
        return batch, self.lines.started(batch, now_ns)


def test_nothing_is_expected_before_anything_was_seen():
    device = Device(compute_ns=None)
    batch, expected_ns = device.launch(500)
    assert expected_ns is None
    device.lines.landed(batch, 2000)
    device.compute.observe(SHAPE, 1, 1000)
    assert device.launch(3000)[1] == 1000


def test_alone_it_takes_copy_in_compute_and_copy_out():
    assert Device(copy_in_ns=30, copy_out_ns=7).launch(500)[1] == 30 + 1000 + 7


def test_what_took_long_to_be_put_on_its_stream_computes_meanwhile():
    """Else its end is looked for as much later as putting it there took, as ONNX Runtime's were."""
    device = Device(copy_in_ns=30, copy_out_ns=7)
    for put_ns, left_ns in ((9000, 1037), (8900, 937), (8100, 137), (5000, 0)):
        batch = device.make(0)
        device.lines.launched(batch)
        assert device.lines.started(batch, 9000, put_ns) == left_ns
        device = Device(copy_in_ns=30, copy_out_ns=7)


def test_a_batch_can_compute_when_it_is_gathered_and_copied_in():
    device = Device(copy_in_ns=30)
    batch = make_batch(key=BatchKey(SHAPE), lane=0, launched_ns=100)
    lanes = Concurrency(device.times, lanes_max=1)
    lanes.launched(batch)
    lanes.started(batch, 900, 300)
    assert device.times.delay_ns(batch.key, 1) == 200 + 30
    assert device.times.enqueue_ns(batch.key, 1) == 600
    assert lanes.lead_ns(batch.key, 1) == 800 + 30 + LEAD_MARGIN_NS


def test_the_rows_that_are_run_count_not_those_that_were_asked_for():
    device = Device()
    device.compute.observe(SHAPE, 8, 5000)
    assert device.launch(0, rows_run=8)[1] == 5000


def test_in_one_arena_it_comes_after_those_before_it():
    device = Device()
    assert [device.launch(now_ns)[1] for now_ns in (0, 100, 200)] == [1000, 1900, 2800]


def test_its_copies_overlap_with_the_computing_before_it():
    device = Device(copy_in_ns=300, copy_out_ns=50)
    assert device.launch(0)[1] == 300 + 1000 + 50
    assert device.launch(0)[1] == 300 + 2 * 1000 + 50


def test_arenas_do_not_wait_for_each_other():
    device = Device(arenas=2)
    assert [device.launch(0, arena)[1] for arena in (0, 1, 0, 1)] == [1000, 1000, 2000, 2000]


def test_without_arenas_nobody_waits():
    device = Device(arenas=0)
    assert [device.launch(0, None)[1] for _ in range(3)] == [1000] * 3


def test_an_arena_that_is_free_again_is_not_waited_for():
    device = Device()
    batch, _ = device.launch(0)
    device.lines.landed(batch, 1000)
    assert device.launch(50_000)[1] == 1000


@pytest.mark.parametrize("late_ns", [-400, 0, 700])
def test_what_ends_early_or_late_moves_those_behind_it(late_ns):
    device = Device()
    first, _ = device.launch(0)
    second, _ = device.launch(0)
    device.lines.landed(first, 1000 + late_ns)
    assert device.launch(1000 + late_ns)[1] == 2 * 1000
    device.lines.landed(second, 2000 + late_ns)
    assert device.launch(2000 + late_ns)[1] == 2 * 1000


def test_one_that_is_late_does_not_move_what_had_to_be_copied_in_anyway():
    device = Device(copy_in_ns=5000)
    first, _ = device.launch(0)
    device.launch(4000)  # There at 9000, long after the first has computed.
    device.lines.landed(first, 6500)
    assert device.launch(6500)[1] == 5000 + 1000


def test_a_copy_out_that_ends_after_a_later_one_moves_nothing_back():
    device = Device()
    # The first has more to be copied out, and so ends after the second.
    device.times.observe_copies(device.make(None, rows_run=8), 0, 900)
    first, second, _ = (device.launch(0, rows_run=rows_run)[0] for rows_run in (8, 1, 1))
    device.lines.landed(second, 2000)
    assert device.launch(2000)[1] == 2 * 1000, "the first has computed, too, and is copied out"
    device.lines.landed(first, 2100)
    assert device.launch(2100)[1] == 3 * 1000 - 100


def test_a_batch_that_failed_is_not_waited_for():
    device = Device(arenas=2, compute_ns=10**9)
    for arena in (0, None):
        batch, _ = device.launch(0, arena)
        device.lines.left(batch)
        device.lines.left(batch)
        assert device.launch(10, arena)[1] == 10**9
    behind, _ = device.launch(20, 1)
    failed, _ = device.launch(30, 1)
    device.lines.left(failed)
    device.lines.landed(behind, 10**9)
    assert device.launch(10**9, 1)[1] == 10**9


def test_a_new_size_a_long_batch_and_one_in_a_few_are_timed():
    """To take times costs; what is short and well known need not be timed each time."""
    device = Device(compute_ns=None)
    asked = []

    def wants_times(batch):
        return device.times.wants_times(batch.number, batch.key.shape, batch.rows_run)

    for _ in range(4 * TIMED_EVERY):
        asked.append(wants_times(device.make(0)))
        device.compute.observe(SHAPE, 1, TIMED_ALWAYS_NS - 1)
    # As long as one slow batch among them would spoil what is expected, each is.
    assert all(asked[:SURE_SAMPLES])
    assert sum(asked[SURE_SAMPLES:]) == 4
    assert wants_times(device.make(0, rows_run=2)), "a smaller one says nothing about a larger one"
    device.compute.observe(SHAPE, 8, TIMED_ALWAYS_NS)
    assert all(wants_times(device.make(0, rows_run=8)) for _ in range(2 * TIMED_EVERY))


def test_what_is_usual_is_what_was_timed():
    device = Device(compute_ns=None)
    key = BatchKey(SHAPE)
    assert device.times.usual_ns(key, 1) == (0, 0, 0)
    device.times.observe_copies(device.make(0), 5, 7)
    assert device.times.usual_ns(key, 1) == (5, 0, 7)
    device.compute.observe(SHAPE, 1, 600)
    assert device.times.usual_ns(key, 1) == (5, 600, 7)


def test_rows_on_the_device_have_copy_times_of_their_own():
    device = Device()
    on_device = BatchKey(SHAPE, on_device=True)
    device.times.observe_copies(make_batch(key=BatchKey(SHAPE)), 5, 7)
    assert device.times.usual_ns(BatchKey(SHAPE), 1) == (5, 1000, 7)
    assert device.times.usual_ns(on_device, 1) == (0, 1000, 0)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_under_load_the_expectation_stays_close_to_the_truth(depth):
    """With many batches in one arena an error must not be handed from one expectation to the next."""
    rng = random.Random(depth)
    device, flights, end_ns, now_ns = Device(), [], 0, 0
    for _ in range(1000):
        while len(flights) < depth:
            batch, expected_ns = device.launch(now_ns)
            took_ns = 1000 + rng.randrange(100)
            end_ns = max(end_ns, now_ns) + took_ns
            flights.append((batch, took_ns, end_ns, now_ns + expected_ns))
        batch, took_ns, now_ns, expected_at_ns = flights.pop(0)
        assert abs(expected_at_ns - now_ns) <= 100 * depth
        device.lines.landed(batch, now_ns)
        device.compute.observe(SHAPE, 1, took_ns)


@settings(max_examples=200, deadline=None)
@given(
    arenas=some.integers(0, 3),
    events=some.lists(
        some.tuples(
            some.sampled_from(["launch", "land", "land", "fail", "wait"]),
            some.integers(0, 10**6),  # Which, or how long.
            some.integers(0, 10**6),  # What copying or computing took.
        ),
        max_size=60,
    ),
)
def test_whatever_happens_nothing_is_expected_to_have_ended(arenas, events):
    """And once all have landed, the next batch is expected as if none had ever been there."""
    times = BatchTimes()
    compute, lines = times.compute, Concurrency(times, arenas=arenas)
    flights, now_ns, number = [], 10**9, 0
    for what, choice, took_ns in events:
        if what == "wait":
            now_ns += choice
        elif what == "launch":
            number += 1
            arena = choice % arenas if arenas else None
            batch = make_batch(number, key=BatchKey(choice % 2), rows=1 + choice % 3, arena=arena)
            lines.launched(batch)
            expected_ns = lines.started(batch, now_ns)
            known_ns = compute.typical(batch.key.shape, batch.rows_run)
            assert (expected_ns is None) == (known_ns is None)
            assert expected_ns is None or expected_ns >= known_ns >= 0
            flights.append(batch)
        elif flights:
            batch = flights.pop(choice % len(flights))
            if what == "fail":
                lines.left(batch)
            else:
                lines.landed(batch, now_ns)
                lines.left(batch)
                if choice % 3:
                    times.observe_copies(batch, took_ns, took_ns)
                compute.observe(batch.key.shape, batch.rows_run, took_ns)
    for batch in flights:
        lines.landed(batch, now_ns)
    compute.observe("new", 1, 777)
    for arena in range(arenas):
        number += 1
        batch = make_batch(number, key=BatchKey("new"), arena=arena)
        lines.launched(batch)
        assert lines.started(batch, now_ns) == 777


def test_what_a_batch_takes_is_by_what_was_seen_last():
    """The trap: it is asked for each request, so it is remembered; each batch may change it."""
    times = BatchTimes()
    compute = times.compute
    key, other = BatchKey(), BatchKey((("n", 2),))
    assert times.service_ns(key, 4) is None
    for _ in range(SURE_SAMPLES):
        compute.observe(key.shape, 4, 1000)
    assert (times.service_ns(key, 4), times.service_ns(other, 4)) == (1000, None)
    assert times.service_ns(key, 4) == 1000
    times.observe_copies(make_batch(key=key, rows=4), 30, 5)
    assert times.service_ns(key, 4) == 1035
    for _ in range(WINDOW):
        compute.observe(key.shape, 4, 500)
    assert times.service_ns(key, 4) == 535


def test_what_batches_of_a_shape_took_can_be_forgotten():
    history = Times()
    for shape in ("a", "b"):
        history.observe(shape, 1, 100)
    history.forget("a")
    history.forget("never seen")
    assert history.typical("a", 1) is None
    assert history.typical("b", 1) == 100


def test_what_was_measured_before_the_first_request_is_sure():
    times = BatchTimes()
    times.seed(BatchKey(SHAPE), {1: 100, 8: 800})
    assert times.service_ns(BatchKey(SHAPE), 4) == 400
    assert times.compute.late(SHAPE, 8) == 800
    assert not times.wants_times(1, SHAPE, 8)


def promised(*sizes, count=SURE_SAMPLES):
    """Times that have seen batches: rows and how long they took."""
    times = Times()
    for rows, took_ns in sizes:
        for _ in range(count):
            times.observe("s", rows, took_ns)
    return times


def told(times, *sizes):
    return [times.late("s", rows) for rows in sizes]


def test_nothing_is_said_of_too_few():
    times = promised((4, 100), count=SURE_SAMPLES - 1)
    assert told(times, 4) == [None]
    times.observe("s", 4, 100)
    assert told(times, 4) == [100]


@pytest.mark.parametrize(
    ("sizes", "rows", "expected"),
    [
        ([(4, 100)], (1, 4, 9), [100, 100, 100]),
        ([(4, 100), (8, 200)], (1, 4, 5, 6, 8, 64), [100, 100, 125, 150, 200, 200]),
        ([(1, 50), (4, 110), (64, 700)], (1, 2, 3, 34), [50, 70, 90, 405]),
        # More rows never take less.
        ([(4, 300), (8, 200)], (4, 6, 8), [300, 300, 300]),
    ],
)
def test_between_known_sizes_it_is_a_line_and_beyond_them_the_nearest(sizes, rows, expected):
    assert told(promised(*sizes), *rows) == expected


def test_it_is_on_the_late_side():
    times = promised(*[(4, 100)] * 14, (4, 170), (4, 900), count=1)
    assert told(times, 4) == [170]
    for _ in range(WINDOW):
        times.observe("s", 4, 80)
    assert told(times, 4) == [80]


def test_sizes_that_are_alike_say_something_together():
    times = promised((33, 100), (40, 110), (50, 130), (60, 140), count=1)
    assert told(times, 40, 60) == [140, 140]


def test_those_that_are_known_by_themselves_need_no_others():
    times = promised((33, 100), count=SURE_SAMPLES)
    times.observe("s", 60, 900)
    assert told(times, 33, 60) == [100, 100]


def test_what_is_not_seen_again_is_forgotten():
    """What is said to take too long is not tried any more."""
    times = promised((64, 10_000), (1, 50))
    for _ in range(FORGOTTEN_AFTER - SURE_SAMPLES):
        times.observe("s", 1, 50)
    assert told(times, 64) == [10_000]
    times.observe("s", 1, 50)
    assert told(times, 64) == [50]
    times.observe("s", 64, 200)
    assert told(times, 64) == [50], "those that were forgotten do not count"


def test_shapes_are_apart_and_bounded():
    times = promised((4, 100))
    for number in range(KEYS_KEPT_MAX - 1):
        times.observe(number, 4, 900)
    assert told(times, 4) == [100]
    times.observe("one more", 4, 900)
    assert told(times, 4) == [None]
