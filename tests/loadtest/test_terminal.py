"""What a load test shows in a terminal."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from asynctrt.loadtest.recorder import ErrorCount, Window
from asynctrt.loadtest.report import StreamFigures
from asynctrt.loadtest.session import Progress
from asynctrt.loadtest.summary import DASH
from asynctrt.loadtest.terminal import LiveView, progress_view, show, show_lines
from tests.loadtest import reports


def shown(report, *, width=140):
    console = Console(file=io.StringIO(), width=width)
    show(console, report)
    return console.file.getvalue()


def rendered(view, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue()


def window(latency_ms, errors=0):
    made = Window(sent=len(latency_ms) + errors, completed=len(latency_ms))
    made.latency.add(np.array(latency_ms, np.int64) * 1_000_000)
    made.lateness.add(np.full(made.sent, 2_000, np.int64))
    if errors:
        made.errors["Odd"] = ErrorCount(errors, "x")
    return made


KINDS = ["single", "repeats", "sweep", "search", "void", "few", "unanswered", "empty"]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("kind", [*KINDS, "hostile", "search_in_vain"])
def test_every_kind_of_report_is_shown(kind, width):
    report = getattr(reports, kind)()
    text = shown(report, width=width)
    assert max(map(cell_len, text.split("\n"))) <= width
    rules = [line for line in text.split("\n") if "──" in line]
    assert all(line.endswith("─ ") for line in rules), "no column is cut off"
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    if report.void:
        assert "VOID" in text
    if report.search is not None and report.search.holds is not None:
        assert f"{report.search.holds:,.0f} requests/s hold" in text


def test_figures_are_those_of_the_run():
    report = reports.single()
    run = report.runs[0]
    text = shown(report)
    assert f"{run.throughput:,.0f}" in text
    assert f"{run.latency['p50']:.3g}" in text
    assert "p99<20ms is held" in text


def test_a_missing_percentile_is_not_made_up():
    report = reports.single()
    run = replace(report.runs[0], latency={"p50": 1.5, "mean": 1.6, "max": 9.0})
    text = shown(replace(report, runs=(run, report.runs[0])))
    line = next(line for line in text.splitlines() if " 1.50 " in line)
    assert DASH in line


def test_intervals_are_those_over_the_repetitions():
    report = reports.repeats()
    within = report.intervals["p99"]
    assert f"(95%: {within.low:.2f} to {within.high:.2f})\n" in shown(report)
    assert "95%:" not in shown(reports.single())


def test_what_servers_say_is_no_markup():
    text = shown(reports.hostile())
    assert "<script>" in text


def test_a_target_that_was_missed_is_said():
    report = reports.single()
    run = replace(report.runs[0], slo={"p99<1ms": False})
    assert "The slo is not held\n  p99<1ms: " in shown(replace(report, runs=(run,)))


def test_what_too_few_requests_do_not_tell_is_said():
    report = reports.single()
    run = replace(report.runs[0], slo={}, unjudged={"p99.9<1s": "p99.9 needs 2,995 requests, and 100 ended"})
    text = shown(replace(report, runs=(run,)))
    assert "too few" in text
    assert "  p99.9<1s: p99.9 needs 2,995 requests, and 100 ended\n" in text
    assert "not held" not in text


def test_answers_in_pieces_have_a_table():
    report = reports.single()
    assert "pieces" not in shown(report)
    stream = StreamFigures(1234.0, {"p50": 20.5, "p99": 31.0}, {"p50": 7.25})
    lines = shown(replace(report, runs=(replace(report.runs[0], stream=stream),)), width=80).splitlines()
    (line,) = (line for line in lines if "1,234" in line)
    assert line.split()[-4:] == ["20.5", "31", "7.25", DASH]


def test_how_far_it_is():
    progress = Progress(number=2, count=5, label="rate=100", seconds=10.0, started_ns=0)
    text = rendered(progress_view("load x", progress, 4_000_000_000))
    assert "run 2 of 5" in text
    assert "4 s, 6 s to go" in text
    assert "warming up" in text
    progress.windows = {number: window([5] * 100, errors=number == 3) for number in range(-1, 9)}
    text = rendered(progress_view("load x", progress, 14_000_000_000))
    assert "waiting for the last answers" in text
    rows = {
        line.split()[0]: line.split() for line in text.splitlines() if line.split()[:1] in (["now"], ["so"])
    }
    assert rows["now"][1] == "400"  # A hundred each quarter of a second.
    assert rows["now"][4] == "0"
    assert rows["so"][-2] == "1"


def test_the_live_view_is_drawn_now_and_then_and_leaves_nothing():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with LiveView(console, "load x") as view:
        for _ in range(1000):
            view.watch(Progress(number=1, count=1, label="a run", seconds=5.0))
    text = console.file.getvalue()
    assert text.count("a run") < 20
    assert "load x" in text


def test_errors_of_a_step_are_shares_in_two_reports():
    console = Console(file=io.StringIO(), width=100)
    show_lines(console, ([("login errors", 0.02, 0.0)], []), "a.json", "b.json")
    assert "2%" in console.file.getvalue()
