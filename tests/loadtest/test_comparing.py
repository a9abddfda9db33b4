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
