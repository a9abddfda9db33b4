"""Two saved reports beside each other."""

import json
from dataclasses import replace

import pytest

from asynctrt.errors import OptionsError
from asynctrt.loadtest.comparing import differences, gate
from asynctrt.loadtest.report import StepFigures
from tests.loadtest import reports


def content(report):
    return json.loads(report.as_text())


def with_step(report, mean):
    steps = {"login": StepFigures(9, 1, {"mean": mean})}
    return replace(report, runs=tuple(replace(run, steps=steps) for run in report.runs))


def test_figures_and_steps_of_both():
    before = with_step(reports.single(), 2.0)
    after = with_step(replace(before, settings={**before.settings, "rate": 7}), 3.0)
    lines, notes = differences(content(before), content(after))
    found = {name: values for name, *values in lines}
    assert found["p50"] == [before.runs[0].latency["p50"]] * 2
    assert found["login mean"] == [2.0, 3.0]
    assert notes == [f"settings, rate: {before.settings.get('rate')} in A, 7 in B"]


def test_void_and_stopped_reports_are_named():
    before = reports.single()
    after = replace(before, runs=tuple(replace(run, void=("late",), complete=False) for run in before.runs))
    _, notes = differences(content(before), content(after))
    assert notes == [
        "B is void: its figures are the generator's, not the target's",
        "B was stopped early",
    ]


def test_the_gate_is_of_the_second():
    before = content(reports.single())
    after = json.loads(json.dumps(before))
    after["runs"][0]["latency"]["p50"] *= 2
    failed, not_checked = gate(["p50>+50%", "p50>+150%", "errors>0.9"], before, after)
    assert (len(failed), not_checked) == (1, [])
    assert "p50" in failed[0]
    with pytest.raises(OptionsError, match="is not a criterion"):
        gate(["p50"], before, after)


def test_a_table_of_runs_and_steps(tmp_path):
    report = with_step(reports.single(), 2.0)
    (run,) = report.runs
    head, first, second = report.as_csv().splitlines()
    assert head.startswith("run,step,seconds,requests,answered,failed,throughput,goodput,p50_ms,")
    row = dict(zip(head.split(","), second.rsplit(",", head.count(",")), strict=True))
    assert (row["step"], row["requests"], row["answered"], row["failed"]) == ("login", "9", "8", "1")
    assert row["mean_ms"] == "2.0"
    assert f",{run.requests},{run.answered}," in first


FIGURES_NOW = {"p99": 22.0, "throughput": 900.0, "errors": 0.0, "goodput": None}
FIGURES_BEFORE = {"p99": 20.0, "throughput": 1000.0, "errors": 0.0}


def report_with(figures):
    """A report in JSON of one run that has these figures."""
    run = {"throughput": figures.get("throughput"), "error_share": figures.get("errors")}
    return {"runs": [{**run, "latency": {name: figures[name] for name in ("p99",) if name in figures}}]}


@pytest.mark.parametrize(
    ("text", "baseline", "says"),
    [
        ("p99>25ms", None, None),
        ("p99>20ms", None, "p99>20ms: p99 is 22"),
        ("throughput<1000", None, "throughput<1000: throughput is 900"),
        ("p99>+11%", FIGURES_BEFORE, None),
        ("p99>+9%", FIGURES_BEFORE, "p99>+9%: p99 is 22, against 20 in the baseline"),
        ("throughput<-5%", FIGURES_BEFORE, "throughput<-5%: throughput is 900, against 1,000 in the"),
        ("errors>+0%", FIGURES_BEFORE, None),
        ("p99.99>1s", None, "this run has no p99.99"),
        ("goodput<1", None, "this run has no goodput"),
        ("p99>+10%", None, "the baseline has no p99"),
        ("mean>+10%", FIGURES_BEFORE, "this run has no mean"),
        ("goodput<-1%", {}, "this run has no goodput"),
    ],
)
def test_what_fails_says_so_with_its_values(text, baseline, says):
    failed, missing = gate([text], report_with(baseline or {}), report_with(FIGURES_NOW))
    assert len(failed) + len(missing) == (says is not None)
    assert len(missing) == (says is not None and " has no " in says)
    assert says is None or says in (failed or missing)[0]


def test_all_failures_are_told_in_their_order():
    texts = ("p99>1ms", "errors>1%", "throughput<901")
    found, _ = gate(texts, report_with({}), report_with(FIGURES_NOW))
    assert [line.partition(":")[0] for line in found] == ["p99>1ms", "throughput<901"]
