"""What came of each request, against plain sums over the same requests, window by window."""

import pickle
from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.recorder import (
    BLOCK,
    EXAMPLE_CHARACTERS,
    KINDS_MAX,
    WARM_UP,
    RunRecorder,
    Window,
    merge,
    total,
)

FROM_NS = 1_000
WINDOW_NS = 100


def recorder():
    return RunRecorder(FROM_NS, WINDOW_NS)


def answered(rec, due_ns, done_ns):
    rec.due_ns.append(due_ns)
    rec.done_ns.append(done_ns)


def sent(rec, due_ns, noticed_ns):
    rec.late_due_ns.append(due_ns)
    rec.noticed_ns.append(noticed_ns)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(900, 1_500), st.lists(st.integers(0, 90), min_size=1, max_size=5)), min_size=1
    )
)
def test_pieces_are_counted_by_when_their_request_was_due(answers):
    rec = recorder()
    first, between, pieces = (Counter(), Counter(), Counter())
    for due_ns, steps in answers:
        came_ns = np.cumsum(steps) + due_ns
        rec.streamed(due_ns, array("q", came_ns.tolist()))
        number = window_of(due_ns)
        first[number, steps[0]] += 1
        between.update((number, step) for step in steps[1:])
        pieces.update(map(window_of, came_ns.tolist()))
    windows = pickle.loads(pickle.dumps(rec.take()))
    found = {}
    merge(found, windows)
    for counter, name in ((first, "first"), (between, "between")):
        counted = {
            (number, value): count
            for number, window in found.items()
            for value, count in getattr(window, name).as_mapping().items()
        }
        assert counted == counter
    assert {number: window.pieces for number, window in found.items() if window.pieces} == pieces
    assert total(found.values()).pieces == sum(len(steps) for _, steps in answers)
    assert len(total(found.values()).first) == len(answers)


def window_of(time_ns):
    return max(WARM_UP, (time_ns - FROM_NS) // WINDOW_NS)


@pytest.mark.parametrize(
    ("due_ns", "number"),
    [
        (0, WARM_UP),
        (899, WARM_UP),
        (999, WARM_UP),
        (1000, 0),
        (1099, 0),
        (1100, 1),
        (1999, 9),
        (10**9, 9_999_990),
    ],
)
def test_a_request_counts_where_it_was_due(due_ns, number):
    """With its latency, its lateness and its error; the answer counts where it came."""
    rec = recorder()
    sent(rec, due_ns, due_ns + 3)
    answered(rec, due_ns, due_ns + 40)
    rec.failed(due_ns, "Oops", "it went wrong")
    windows = rec.take()
    window = windows[number]
    assert (window.sent, window.answered, window.failed) == (1, 1, 1)
    assert window.latency.as_mapping() == {40: 1}
    assert window.lateness.as_mapping() == {3: 1}
    assert windows[window_of(due_ns + 40)].completed == 1
    assert set(windows) == {number, window_of(due_ns + 40)}


requests = st.lists(
    st.tuples(
        st.integers(0, 2500),  # due
        st.integers(0, 300),  # noticed after that
        st.integers(0, 1600),  # done after that
        st.sampled_from([None, None, None, "NoAnswer", "Refused"]),
    ),
    max_size=60,
)


def expected(given_requests):
    """The same, one by one and without a recorder."""
    windows = {}
    for due_ns, late_ns, took_ns, error in given_requests:
        mine = windows.setdefault(window_of(due_ns), Counter())
        mine["sent"] += 1
        mine["lateness", late_ns] += 1
        if error is not None:
            mine["error", error] += 1
            continue
        mine["latency", late_ns + took_ns] += 1
        windows.setdefault(window_of(due_ns + late_ns + took_ns), Counter())["completed"] += 1
    return windows


def counted(windows):
    """Everything that each window has, comparable."""
    found = {}
    for number, window in windows.items():
        mine = found.setdefault(number, Counter())
        mine["sent"], mine["completed"] = window.sent, window.completed
        for name in ("latency", "lateness"):
            counts = getattr(window, name)
            mine.update({(name, value): count for value, count in counts.as_mapping().items()})
            assert counts.total_ns == sum(value * count for value, count in counts.as_mapping().items())
        mine.update({("error", kind): error.count for kind, error in window.errors.items()})
    return found


def given_to(rec, items):
    for due_ns, late_ns, took_ns, error in items:
        noticed_ns = due_ns + late_ns
        sent(rec, due_ns, noticed_ns)
        if error is not None:
            rec.failed(due_ns, error, "example")
        else:
            answered(rec, due_ns, noticed_ns + took_ns)


@settings(deadline=None)
@given(requests)
def test_windows_are_what_one_by_one_would_make(items):
    """All times are below 2048 here, which the histogram keeps as they are."""
    rec = recorder()
    given_to(rec, items)
    assert counted(rec.take()) == expected(items)
    assert rec.take() == {}


@settings(deadline=None)
@given(requests, st.integers(1, 5), st.data())
def test_parts_add_up_to_the_whole(items, parts, data):
    """However often the windows were taken, from however many processes, merged in whatever order."""
    one = recorder()
    given_to(one, items)
    whole = one.take()
    several = [recorder() for _ in range(parts)]
    taken = []
    for item in items:
        mine = several[data.draw(st.integers(0, parts - 1))]
        given_to(mine, [item])
        if data.draw(st.booleans()):
            taken.append(mine.take())
    taken += [mine.take() for mine in several]
    data.draw(st.randoms()).shuffle(taken)
    windows = {}
    for part in taken:
        merge(windows, pickle.loads(pickle.dumps(part)))
    assert counted(windows) == counted(whole)
    assert counted({0: total(windows.values())}) == counted({0: total(whole.values())})


def test_merging_takes_over_what_is_new_and_leaves_the_rest_as_it_was():
    rec = recorder()
    parts = []
    for _ in range(2):
        given_to(rec, [(1010, 1, 1, None), (1010, 1, 1, "Oops")])
        parts.append(rec.take())
    before = counted(parts[1])
    windows = {}
    for part in parts:
        merge(windows, part)
    assert windows[0] is parts[0][0]
    assert windows[0].errors["Oops"].count == 2
    assert counted(parts[1]) == before


def test_blocks():
    """Flushed when the generator says so, and in the end; either half by itself."""
    rec = recorder()
    for number in range(BLOCK):
        sent(rec, 1000 + number % 500, 1000 + number % 500)
        answered(rec, 1000 + number % 500, 1500 + number % 500)
    rec.flush_done()
    assert (len(rec.due_ns), len(rec.done_ns)) == (0, 0)
    assert len(rec.late_due_ns) == len(rec.noticed_ns) == BLOCK
    rec.flush_sent()
    assert len(rec.late_due_ns) == len(rec.noticed_ns) == 0
    rec.flush_done()
    rec.flush_sent()
    answered(rec, 1000, 1001)
    windows = rec.take()
    assert sum(window.sent for window in windows.values()) == BLOCK
    assert sum(window.completed for window in windows.values()) == BLOCK + 1
    assert sum(window.answered for window in windows.values()) == BLOCK + 1


def test_a_clock_that_seems_to_run_backwards_makes_no_negative_times():
    rec = recorder()
    answered(rec, 1050, 1040)
    sent(rec, 1050, 1049)
    window = rec.take()[0]
    assert window.latency.as_mapping() == window.lateness.as_mapping() == {0: 1}


def test_kinds_of_errors_are_bounded():
    """Those beyond are others; no error is lost, and the first example of each kind stays."""
    rec = recorder()
    for number in range(3 * KINDS_MAX):
        for again in range(2):
            rec.failed(1000, f"Kind{number}", f"{number}, {again}")
    window = rec.take()[0]
    assert len(window.errors) == KINDS_MAX + 1
    assert window.failed == 6 * KINDS_MAX
    assert window.errors["others"].count == 4 * KINDS_MAX
    assert window.errors["others"].example == f"{KINDS_MAX}, 0"
    assert (window.errors["Kind7"].count, window.errors["Kind7"].example) == (2, "7, 0")


def test_kinds_stay_bounded_when_windows_are_merged():
    windows, several = {}, []
    for process in range(4):
        rec = recorder()
        for number in range(2 * KINDS_MAX):
            rec.failed(1000 + 100 * (number % 2), f"Kind{process}-{number}", "example")
        several.append(rec.take())
    for part in several:
        merge(windows, part)
    whole = total(windows.values())
    assert whole.failed == 8 * KINDS_MAX
    assert len(whole.errors) == KINDS_MAX + 1
    assert all(len(window.errors) == KINDS_MAX + 1 for window in windows.values())


def test_examples_are_cut():
    rec = recorder()
    rec.failed(1000, "Long", "x" * (EXAMPLE_CHARACTERS + 1))
    rec.failed(1000, "Empty", "")
    errors = rec.take()[0].errors
    assert errors["Long"].example == "x" * EXAMPLE_CHARACTERS
    assert errors["Empty"].example == ""


def test_nothing():
    assert recorder().take() == {}
    empty = total([])
    assert (empty.sent, empty.completed, empty.answered, empty.failed) == (0, 0, 0, 0)
    assert isinstance(empty.latency, Counts)
    assert counted({0: empty}) == counted({0: Window()})


def test_long_times_are_kept_to_the_histograms_precision():
    rng = np.random.default_rng(1)
    due_ns = rng.integers(FROM_NS, 10**9, 5000)
    took_ns = rng.integers(0, 10**10, 5000)
    rec = recorder()
    for due, took in zip(due_ns.tolist(), took_ns.tolist(), strict=True):
        answered(rec, due, due + took)
    whole = total(rec.take().values())
    assert whole.latency.total_ns == took_ns.sum()
    assert whole.completed == whole.answered == 5000
    exact = np.percentile(took_ns, 99, method="inverted_cdf").item()
    assert whole.latency.percentile(99) == pytest.approx(exact, rel=5e-4)
