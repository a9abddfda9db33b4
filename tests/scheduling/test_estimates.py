"""What batches took, and when one will be done: behind those in its arena, beside those in others."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from asynctrt.scheduling.estimates import (
    LEAD_MARGIN_NS,
    QUANTILE,
    SHAPES_MAX,
    TIMED_ALWAYS_NS,
    TIMED_EVERY,
    WINDOW,
    CompletionEstimator,
    LatencyHistory,
)
from asynctrt.scheduling.key import BatchKey
from tests.scheduling.support import make_batch

SHAPE = (("n", 3),)


def seen(*durations_ns, rows=8):
    history = LatencyHistory()
    for duration_ns in durations_ns:
        history.observe(SHAPE, rows, duration_ns)
    return history


def test_no_duration_is_expected_before_one_was_seen():
    assert LatencyHistory().expected_ns(SHAPE, 1) is None


def test_one_outlier_does_not_move_it():
    assert seen(*[1000] * 10, 90_000).expected_ns(SHAPE, 8) == 1000


def test_it_follows_when_the_service_changes():
    history = seen(*[1000] * WINDOW, *[5000] * WINDOW)
    assert history.expected_ns(SHAPE, 8) == 5000


def test_it_is_a_low_quantile():
    assert seen(*range(1, 17)).expected_ns(SHAPE, 8) == 5


def test_a_size_never_seen_takes_the_nearest_smaller_one():
    history = seen(100, rows=2)
    history.observe(SHAPE, 8, 900)
    assert history.expected_ns(SHAPE, 7) == 100
    assert history.expected_ns(SHAPE, 64) == 900
    assert history.expected_ns(SHAPE, 1) is None


def test_shapes_do_not_share_expectations():
    assert seen(100).expected_ns("other", 8) is None


def test_the_least_recently_seen_shape_is_forgotten():
    history = LatencyHistory()
    for shape in range(SHAPES_MAX):
        history.observe(shape, 1, 10)
    history.observe(0, 1, 10)
    history.observe("new", 1, 10)
    assert history.expected_ns(0, 1) == 10
    assert history.expected_ns(1, 1) is None


def test_what_was_seen_is_of_just_that_size():
    history = seen(100, rows=2)
    assert history.has_seen(SHAPE, 2)
    assert not history.has_seen(SHAPE, 3)
    assert not history.has_seen("other", 2)
    assert history.expected_ns(SHAPE, 3) == 100


def test_a_size_is_known_for_sure_when_one_slow_batch_does_no_harm():
    history = LatencyHistory()
    for number, duration_ns in enumerate([5000, 1000, 1000, 1000]):
        assert not history.is_sure(SHAPE, 2), number
        history.observe(SHAPE, 2, duration_ns)
    assert history.is_sure(SHAPE, 2)
    assert not history.is_sure(SHAPE, 3)
    assert not history.is_sure("other", 2)
    history.observe(SHAPE, 2, 5000)
    assert history.expected_ns(SHAPE, 2) == 1000


class Device:
    """What an estimator is told about: batches of one size, in order within an arena."""

    def __init__(self, *, arenas=1, compute_ns=1000, copy_in_ns=0, copy_out_ns=0):
        self.compute = LatencyHistory()
        if compute_ns is not None:
            self.compute.observe(SHAPE, 1, compute_ns)
        self.estimator = CompletionEstimator(lines=arenas, compute=self.compute)
        self.number = 0
        if copy_in_ns or copy_out_ns:
            self.estimator.observe_copies(self.make(None), copy_in_ns=copy_in_ns, copy_out_ns=copy_out_ns)

    def make(self, arena, rows_run=1):
        self.number += 1
        return make_batch(self.number, key=BatchKey(SHAPE), rows_run=rows_run, arena=arena)

    def launch(self, now_ns, arena=0, rows_run=1):
        """A batch, and in how many ns it is expected to be done."""
        batch = self.make(arena, rows_run)
        return batch, self.estimator.started(batch, now_ns)


def test_nothing_is_expected_before_anything_was_seen():
    device = Device(compute_ns=None)
    batch, expected_ns = device.launch(500)
    assert expected_ns is None
    device.estimator.landed(batch, 2000)
    device.compute.observe(SHAPE, 1, 1000)
    assert device.launch(3000)[1] == 1000


def test_alone_it_takes_copy_in_compute_and_copy_out():
    assert Device(copy_in_ns=30, copy_out_ns=7).launch(500)[1] == 30 + 1000 + 7


def test_what_took_long_to_be_put_on_its_stream_computes_meanwhile():
    """Else its end is looked for as much later as putting it there took, as ONNX Runtime's were."""
    device = Device(copy_in_ns=30, copy_out_ns=7)
    for put_ns, left_ns in ((9000, 1037), (8900, 937), (8100, 137), (5000, 0)):
        assert device.estimator.started(device.make(0), 9000, put_ns) == left_ns
        device = Device(copy_in_ns=30, copy_out_ns=7)


def test_a_batch_can_compute_when_it_is_gathered_and_copied_in():
    device = Device(copy_in_ns=30)
    batch = device.make(0)._replace(lane=0, launched_ns=100)
    device.estimator.started(batch, 900, 300)
    assert device.estimator.delay_ns(SHAPE, 1) == 200 + 30
    assert device.estimator.lead_ns(SHAPE, 1) == 800 + 30 + LEAD_MARGIN_NS


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
    device.estimator.landed(batch, 1000)
    assert device.launch(50_000)[1] == 1000


@pytest.mark.parametrize("late_ns", [-400, 0, 700])
def test_what_ends_early_or_late_moves_those_behind_it(late_ns):
    device = Device()
    first, _ = device.launch(0)
    second, _ = device.launch(0)
    device.estimator.landed(first, 1000 + late_ns)
    assert device.launch(1000 + late_ns)[1] == 2 * 1000
    device.estimator.landed(second, 2000 + late_ns)
    assert device.launch(2000 + late_ns)[1] == 2 * 1000


def test_one_that_is_late_does_not_move_what_had_to_be_copied_in_anyway():
    device = Device(copy_in_ns=5000)
    first, _ = device.launch(0)
    device.launch(4000)  # There at 9000, long after the first has computed.
    device.estimator.landed(first, 6500)
    assert device.launch(6500)[1] == 5000 + 1000


def test_a_copy_out_that_ends_after_a_later_one_moves_nothing_back():
    device = Device()
    # The first has more to be copied out, and so ends after the second.
    device.estimator.observe_copies(device.make(None, rows_run=8), copy_in_ns=0, copy_out_ns=900)
    first, second, _ = (device.launch(0, rows_run=rows_run)[0] for rows_run in (8, 1, 1))
    device.estimator.landed(second, 2000)
    assert device.launch(2000)[1] == 2 * 1000, "the first has computed, too, and is copied out"
    device.estimator.landed(first, 2100)
    assert device.launch(2100)[1] == 3 * 1000 - 100


def test_a_batch_that_failed_is_not_waited_for():
    device = Device(arenas=2, compute_ns=10**9)
    for arena in (0, None):
        batch, _ = device.launch(0, arena)
        device.estimator.forget(batch)
        device.estimator.forget(batch)
        assert device.launch(10, arena)[1] == 10**9
    behind, _ = device.launch(20, 1)
    failed, _ = device.launch(30, 1)
    device.estimator.forget(failed)
    device.estimator.landed(behind, 10**9)
    assert device.launch(10**9, 1)[1] == 10**9


def test_a_new_size_a_long_batch_and_one_in_a_few_are_timed():
    """To take times costs; what is short and well known need not be timed each time."""
    device = Device(compute_ns=None)
    asked = []

    def wants_times(batch):
        return device.estimator.wants_times(batch.number, batch.key.cost_key, batch.rows_run)

    for _ in range(4 * TIMED_EVERY):
        asked.append(wants_times(device.make(0)))
        device.compute.observe(SHAPE, 1, TIMED_ALWAYS_NS - 1)
    # As long as one slow batch among them would spoil what is expected, each is.
    assert all(asked[:QUANTILE])
    assert sum(asked[QUANTILE:]) == 4
    assert wants_times(device.make(0, rows_run=2)), "a smaller one says nothing about a larger one"
    device.compute.observe(SHAPE, 8, TIMED_ALWAYS_NS)
    assert all(wants_times(device.make(0, rows_run=8)) for _ in range(2 * TIMED_EVERY))


def test_what_is_usual_is_what_was_timed():
    device = Device(compute_ns=None)
    assert device.estimator.usual_ns(device.make(0)) == (0, 0, 0)
    device.estimator.observe_copies(device.make(0), copy_in_ns=5, copy_out_ns=7)
    assert device.estimator.usual_ns(device.make(0)) == (5, 0, 7)
    device.compute.observe(SHAPE, 1, 600)
    assert device.estimator.usual_ns(device.make(0)) == (5, 600, 7)


def test_slabs_share_their_copy_times_and_rows_on_the_device_have_their_own():
    device = Device()
    slot, on_device = BatchKey(SHAPE, 3), BatchKey(SHAPE, on_device=True)
    device.estimator.observe_copies(make_batch(key=slot), copy_in_ns=5, copy_out_ns=7)
    assert device.estimator.usual_ns(make_batch(key=BatchKey(SHAPE))) == (5, 1000, 7)
    assert device.estimator.usual_ns(make_batch(key=BatchKey(SHAPE, 4))) == (5, 1000, 7)
    assert device.estimator.usual_ns(make_batch(key=on_device)) == (0, 1000, 0)


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
        device.estimator.landed(batch, now_ns)
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
    compute = LatencyHistory()
    estimator = CompletionEstimator(lines=arenas, compute=compute)
    flights, now_ns, number = [], 10**9, 0
    for what, choice, took_ns in events:
        if what == "wait":
            now_ns += choice
        elif what == "launch":
            number += 1
            arena = choice % arenas if arenas else None
            batch = make_batch(number, key=BatchKey(choice % 2), rows=1 + choice % 3, arena=arena)
            expected_ns = estimator.started(batch, now_ns)
            known_ns = compute.expected_ns(batch.key.shape, batch.rows_run)
            assert (expected_ns is None) == (known_ns is None)
            assert expected_ns is None or expected_ns >= known_ns >= 0
            flights.append(batch)
        elif flights:
            batch = flights.pop(choice % len(flights))
            if what == "fail":
                estimator.forget(batch)
            else:
                estimator.landed(batch, now_ns)
                if choice % 3:
                    estimator.observe_copies(batch, copy_in_ns=took_ns, copy_out_ns=took_ns)
                compute.observe(batch.key.shape, batch.rows_run, took_ns)
    for batch in flights:
        estimator.landed(batch, now_ns)
    compute.observe("new", 1, 777)
    for arena in range(arenas):
        number += 1
        assert estimator.started(make_batch(number, key=BatchKey("new"), arena=arena), now_ns) == 777


def test_what_a_batch_takes_is_by_what_was_seen_last():
    """The trap: it is asked for each request, so it is remembered; each batch may change it."""
    compute = LatencyHistory()
    estimator = CompletionEstimator(lines=0, compute=compute)
    key, other = BatchKey(), BatchKey((("n", 2),))
    assert estimator.service_ns(key, 4) is None
    for _ in range(QUANTILE):
        compute.observe(key.cost_key, 4, 1000)
    assert (estimator.service_ns(key, 4), estimator.service_ns(other, 4)) == (1000, None)
    assert estimator.service_ns(key, 4) == 1000
    estimator.observe_copies(make_batch(key=key, rows=4), copy_in_ns=30, copy_out_ns=5)
    assert estimator.service_ns(key, 4) == 1035
    for _ in range(WINDOW):
        compute.observe(key.cost_key, 4, 500)
    assert estimator.service_ns(key, 4) == 535


def test_what_batches_of_a_shape_took_can_be_forgotten():
    history = LatencyHistory()
    for shape in ("a", "b"):
        history.observe(shape, 1, 100)
    history.forget("a")
    history.forget("never seen")
    assert history.expected_ns("a", 1) is None
    assert history.expected_ns("b", 1) == 100
