"""From counts to figures: what is given, what is missing, what is void."""

import json

import numpy as np
import pytest

from asynctrt.loadtest.command import exit_status
from asynctrt.loadtest.criteria import parse_slo
from asynctrt.loadtest.figures import judge, latencies, make_run
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.plans import WINDOWS_MAX, Limit, make_plan
from asynctrt.loadtest.recorder import ErrorCount, Window
from asynctrt.loadtest.report import Report
from asynctrt.loadtest.runner import NO_ANSWER, NOT_SENT, OWN_ERROR, ProcessResult
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.summary import banners
from asynctrt.loadtest.targets import BatchCounters
from tests.loadtest.support import sample

MS = 1_000_000


def counts(values_ms):
    made = Counts()
    made.add((np.asarray(values_ms, np.float64) * MS).astype(np.int64))
    return made


def window(latency_ms, *, late_ms=0.001, errors=0, sent=None):
    latency = counts(latency_ms)
    sent = len(latency_ms) + errors if sent is None else sent
    return Window(
        sent=sent,
        completed=len(latency_ms),
        latency=latency,
        lateness=counts([late_ms] * sent),
        errors={"Odd": ErrorCount(errors, "said so")} if errors else {},
    )


def outcome_of(**kw):
    """A complete run of ten seconds, unless the arguments say otherwise."""
    usual = {"cpu_ns": 1, "elapsed_ns": 10_050 * MS, "stopped_ns": 10_050 * MS, "last_done_ns": 10_000 * MS}
    return ProcessResult(**{**usual, "exhausted": True, **kw})


STEADY = {number: window([5.0] * 25) for number in range(40)}
"""A hundred answers a second, each after 5 ms."""


def run_of(windows, *, is_server=True, outcome=None, room=None, rows_max=256, **settings):
    settings = LoadSettings(**{"rate": 100, "seconds": 10.0, "warmup": 0.0} | settings)
    plan = make_plan(settings, [sample()], rows_max if room is None else None, room=room)
    outcomes = [outcome or outcome_of()]
    return make_run(settings, plan, windows, outcomes, is_server=is_server, label="a run", parameters={})


def test_throughput_is_of_answers_that_came_while_it_was_measured():
    """40 windows of a quarter of a second; what came after them, or in the warm-up, does not count."""
    windows = {number: window([5.0] * 25) for number in range(-1, 44)}
    run = run_of(windows)
    assert run.seconds == 10.0
    assert run.throughput == run.offered == 100.0
    assert run.requests == run.answered == 1000
    assert run.complete
    assert not run.void
    assert run.latency["p50"] == pytest.approx(5.0, rel=1e-3)
    assert run.latency["mean"] == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, set()),
        (5, {"p50"}),
        (298, {"p50", "p90", "p95"}),
        (299, {"p50", "p90", "p95", "p99"}),
        (2995, {"p50", "p90", "p95", "p99", "p99.9"}),
        (29_956, {"p50", "p90", "p95", "p99", "p99.9", "p99.99"}),
    ],
)
def test_a_percentile_of_too_few_is_missing(count, names):
    found = latencies(counts([1.0] * count))
    assert set(found) == names | {"mean", "max"}


def test_nothing_at_all_has_no_figures():
    assert latencies(Counts()) == {}
    run = run_of({0: window([], errors=3)}, slo="p99<1s,errors<100%")
    assert run.latency == {}
    assert run.error_share == 1.0
    assert run.slo == {"p99<1s": False, "errors<100%": False}
    assert json.dumps(run.errors["Odd"].example) == '"said so"'


def test_a_request_that_failed_took_for_ever():
    """Of 1,000, 985 are fast and 15 fail: p99 is not held, though p99 of the answers is 1 ms."""
    whole = window([1.0] * 985, errors=15)
    slo = parse_slo(["p99<2ms", "p90<2ms", "max<2ms", "mean<2ms", "errors<2%", "errors<1%", "throughput>90"])
    assert judge(slo, whole, 100.0, None)[0] == {
        "p99<2ms": False,
        "p90<2ms": True,
        "max<2ms": False,
        "mean<2ms": False,
        "errors<2%": True,
        "errors<1%": False,
        "throughput>90": True,
    }


@pytest.mark.parametrize(
    ("figure", "fast", "slow", "failed", "held_is"),
    [
        ("p99.9", 100, 0, 0, None),
        ("p99.9", 2994, 0, 0, None),
        ("p99.9", 2995, 0, 0, True),
        ("p99.9", 99, 1, 0, None),
        ("p99.9", 98, 2, 0, False),  # With 95% confidence, however few there are.
        ("p99.9", 98, 1, 1, False),
        ("p99", 298, 0, 0, None),
        ("p99", 299, 0, 0, True),
        ("p99", 0, 2, 0, False),
        ("p99", 5, 1, 0, None),
        ("p50", 4, 0, 0, None),
        ("p50", 0, 4, 0, None),
        ("p50", 0, 5, 0, False),
        ("mean", 1, 0, 0, True),
    ],
)
def test_too_few_requests_neither_hold_nor_miss(figure, fast, slow, failed, held_is):
    run = run_of({0: window([1.0] * fast + [50.0] * slow, errors=failed)}, slo=f"{figure}<20ms")
    assert run.slo == ({} if held_is is None else {f"{figure}<20ms": held_is})
    assert len(run.unjudged) == (held_is is None)
    assert run.holds is bool(held_is)
    for why in run.unjudged.values():
        assert why.endswith(f"requests, and {fast + slow + failed:,} ended")


def test_goodput_is_of_answers_within_the_target():
    run = run_of({number: window([5.0] * 20 + [50.0] * 5) for number in range(40)}, slo="p99<20ms")
    assert run.goodput == 80.0
    assert run.slo == {"p99<20ms": False}
    assert not run.holds


def test_a_generator_that_is_late_makes_a_server_run_void():
    windows = {number: window([5.0] * 25, late_ms=1.0) for number in range(40)}
    (why,) = run_of(windows).void
    assert "the generator's lateness" in why
    # In its own process the engine holds the loop up, as it would hold an application's.
    assert not run_of(windows, is_server=False).void


def test_a_tail_that_is_the_generators_makes_a_run_void():
    windows = {number: window([5.0] * 980 + [200.0] * 20, late_ms=0.01) for number in range(40)}
    for item in windows.values():
        item.lateness = counts([0.01] * 985 + [150.0] * 15)
        item.lateness.total_ns = len(item.lateness) * 10_000  # The mean alone would not show it.
    (why,) = run_of(windows).void
    assert "p99" in why


def test_a_lateness_that_matters_to_nobody_is_none():
    windows = {number: window([0.05] * 25, late_ms=0.09) for number in range(40)}
    assert not run_of(windows).void


def test_a_generator_that_gave_up_is_void():
    outcome = ProcessResult(elapsed_ns=3000 * MS, stopped_ns=3000 * MS, is_overwhelmed=True)
    run = run_of({number: window([5.0] * 25) for number in range(12)}, outcome=outcome)
    assert "fell seconds behind" in run.void[0]
    assert not run.complete
    assert run.seconds == 3.0


def test_callers_that_use_a_whole_core_are_void():
    outcome = outcome_of(cpu_ns=9_990 * MS, elapsed_ns=10_000 * MS)
    settings = {"rate": None, "callers": 4}
    (why,) = run_of(STEADY, outcome=outcome, **settings).void
    assert "more processes" in why
    assert not run_of(STEADY, outcome=outcome, is_server=False, **settings).void


def test_nothing_due_is_void():
    assert "no request was due" in run_of({}).void[0]


def test_a_run_that_was_stopped_is_of_the_windows_that_were_whole():
    outcome = ProcessResult(elapsed_ns=2900 * MS, stopped_ns=2600 * MS, last_done_ns=2500 * MS)
    windows = {number: window([5.0] * 25) for number in range(11)}
    run = run_of(windows, outcome=outcome)
    assert not run.complete
    assert run.seconds == 2.5
    assert run.throughput == 100.0


def test_a_run_that_was_stopped_before_anything_was_measured_is_none():
    outcome = ProcessResult(elapsed_ns=700 * MS, stopped_ns=200 * MS)
    assert run_of({0: window([5.0])}, outcome=outcome) is None


def test_a_run_of_so_many_requests_ends_with_the_last_answer():
    outcome = outcome_of(elapsed_ns=620 * MS, stopped_ns=620 * MS, last_done_ns=500 * MS)
    run = run_of({0: window([5.0] * 25), 1: window([5.0] * 25)}, outcome=outcome, requests=50)
    assert run.seconds == 0.5
    assert run.throughput == 100.0


def test_the_unanswered_are_neither_answers_nor_errors():
    run = run_of({number: window([5.0] * 20, errors=2, sent=25) for number in range(40)})
    assert (run.answered, run.unanswered, run.error_share) == (800, 120, pytest.approx(80 / 880))


def test_moments_are_at_most_so_many_and_add_up():
    windows = {number: window([5.0] * 25) for number in range(400)}
    run = run_of(windows, seconds=100.0, outcome=outcome_of(elapsed_ns=100_050 * MS))
    assert len(run.moments) <= WINDOWS_MAX
    assert sum(moment.seconds for moment in run.moments) == pytest.approx(100.0)
    assert sum(moment.throughput * moment.seconds for moment in run.moments) == pytest.approx(10_000)


def test_batches_are_means_per_request():
    counters = BatchCounters(100, 200, 50, 100 * MS, 200 * MS, 300 * MS, 400 * MS, {4: 50})
    run = run_of({0: window([5.0])}, outcome=outcome_of(batches=counters, answered=100))
    assert run.batches.mean_rows == 4.0
    assert (run.batches.queue, run.batches.copy_in, run.batches.compute, run.batches.copy_out) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("requests", "batches", "answered", "is_told"),
    [
        (100, 50, 100, True),
        (100, 50, 108, True),
        (-258, -90, 100, False),  # It began anew.
        (50, 25, 100, False),  # One of two processes.
        (2124, 2233, 1053, False),  # Another one of them at the end than at the beginning.
        (100, -3, 100, False),
    ],
)
def test_statistics_that_are_not_of_this_run_are_left_out_with_the_reason(
    requests, batches, answered, is_told
):
    counters = BatchCounters(requests, requests, batches, 1, 1, 1, 1, {2: batches})
    run = run_of({0: window([5.0])}, outcome=outcome_of(batches=counters, answered=answered))
    assert (run.batches is not None) == is_told
    assert any("statistics" in note for note in run.notes) != is_told


def test_requests_that_waited_for_a_limit_of_this_machine_make_a_run_void():
    few = Limit(3, "a process may have 67 open files")
    assert not run_of(STEADY, room=few, outcome=outcome_of()).void
    (why,) = run_of(STEADY, room=few, outcome=outcome_of(held_back=7)).void
    assert "7 requests" in why
    assert "67 open files" in why


def test_requests_that_waited_for_a_limit_of_the_target_are_noted():
    run = run_of(STEADY, rows_max=5, outcome=outcome_of(held_back=7))
    assert not run.void
    assert any("the target takes 5 rows at once" in note for note in run.notes)


def test_what_this_machine_lacks_is_no_error_of_the_target():
    windows = {number: window([5.0] * 25) for number in range(40)}
    windows[3].errors[OWN_ERROR] = ErrorCount(4, "Too many open files")
    (why,) = run_of(windows).void
    assert "Too many open files" in why


@pytest.mark.parametrize(("answered", "failed", "status"), [(0, 40, 3), (0, 0, 3), (9, 31, 3), (39, 1, 0)])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_target_that_fails_is_not_good_whatever_else_there_is(answered, failed, status, is_late):
    windows = {0: window([5.0] * answered, errors=failed, late_ms=100.0 if is_late else 0.001)}
    run = run_of(windows)
    report = Report("run", {}, {}, {}, (run,), {})
    assert exit_status(report) == (4 if is_late and status == 0 else status)
    shown = [banner.level for banner in banners(report)]
    assert ("bad" in shown) is (status != 0 or is_late)


def test_a_target_that_tells_nothing_has_no_batches():
    assert run_of({0: window([5.0])}).batches is None


def test_the_histogram_is_of_all_answers():
    run = run_of({number: window([float(number + 1)] * 25) for number in range(40)})
    assert list(run.histogram.values()) == [25] * 40
    assert list(run.histogram) == pytest.approx([number * MS for number in range(1, 41)], rel=1e-3)


@pytest.mark.parametrize(
    ("completed", "errors", "kept"),
    [(25, 0, None), (24, 0, None), (18, 0, 72.0), (0, 0, 0.0), (5, 20, None)],
)
def test_a_target_that_owes_more_and_more_did_not_keep_up(completed, errors, kept):
    windows = {number: window([5.0] * (25 - errors), errors=errors) for number in range(40)}
    for made in windows.values():
        made.completed = completed
    assert run_of(windows).kept == kept
    assert run_of(windows, callers=4, rate=None).kept is None


@pytest.mark.parametrize(
    ("sent", "completed", "keeps_up"), [(10, 9, True), (10, 7, False), (400, 394, True), (400, 390, False)]
)
def test_the_more_requests_the_smaller_a_difference_that_is_not_chance(sent, completed, keeps_up):
    windows = {number: window([5.0] * sent) for number in range(40)}
    for made in windows.values():
        made.completed = completed
    assert (run_of(windows).kept is None) == keeps_up


@pytest.mark.parametrize("kind", [NO_ANSWER, NOT_SENT])
def test_a_target_that_does_not_answer_in_time_did_not_keep_up(kind):
    windows = {number: window([5.0] * 5) for number in range(40)}
    for made in windows.values():
        made.sent, made.errors = 25, {kind: ErrorCount(20, "no answer within 10 s")}
    assert run_of(windows).kept == 20.0
