"""The benchmarks' own machinery: what they measure, in which order, and what they say when cut short."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import anyio
import pytest

import asynctrt
from asynctrt.bench import BenchCase, BenchReport, describe_machine, model_report, overhead_report, run_cases
from asynctrt.errors import ModelError, OptionsError
from asynctrt.options import Options
from tests.models import double_onnx, mixed_onnx, sequence_onnx

SECONDS = 0.05


def run(report):
    done = []
    anyio.run(partial(run_cases, report, SECONDS, lambda case: done.append(case.name)))
    return done


def test_cases_run_in_turn():
    async def measure(seconds):
        return {"figure": seconds}

    report = BenchReport("title", {}, [BenchCase(name, {}, measure) for name in "ab"], repeats=3)
    assert run(report) == ["a", "b"] * 3
    assert report.is_complete


def test_a_report_that_was_cut_short_has_what_there_is():
    figures = iter([5.0, 1.0, 9.0])

    async def measure(seconds):
        try:
            return {"figure": next(figures)}
        except StopIteration:
            raise KeyboardInterrupt from None

    report = BenchReport("title", {}, [BenchCase("a", {}, measure), BenchCase("b", {}, measure)], repeats=2)
    with pytest.raises(KeyboardInterrupt):
        run(report)
    a, b = report.cases
    assert (a.median("figure"), a.spread("figure")) == (7.0, (5.0, 9.0))
    assert (b.median("figure"), b.median("other"), b.spread("other")) == (1.0, None, None)
    content = report.as_json()
    assert not content["complete"]
    assert [case["runs"] for case in content["cases"]] == [
        [{"figure": 5.0}, {"figure": 9.0}],
        [{"figure": 1.0}],
    ]


def check_cases(report, *, max_rows):
    """The report of a model has the model alone and an engine, and figures of each."""
    assert {case.labels["kind"] for case in report.cases} == {"raw", "engine"}
    for case in report.cases:
        assert case.median("rows_per_s") > 0
        if case.labels["kind"] == "engine":
            assert 0 < case.median("p50_ms") <= case.median("p99_ms")
            assert case.median("mean_batch_rows") <= max_rows


def test_overhead():
    report = overhead_report(Options(), repeats=1)
    assert len(run(report)) == 10
    for case in report.cases:
        assert case.median("requests_per_s") > 0
        assert case.median("cpu_us_per_request") > 0
        assert case.median("mean_batch_rows") >= 1
    assert report.cases[-1].labels == {"device": "host", "callers": 1, "max_delay": 0.002}
    json.dumps(report.as_json())


@pytest.mark.tier2
def test_a_model(tmp_path):
    report = model_report(mixed_onnx(tmp_path / "m.onnx"), Options(max_rows=16), {}, 1, repeats=1)
    run(report)
    check_cases(report, max_rows=16)


@pytest.mark.tier2
def test_a_model_with_dynamic_dimensions(tmp_path):
    path = sequence_onnx(tmp_path / "m.onnx")
    with pytest.raises(OptionsError, match="dynamic dimensions.*--dims length=..."):
        model_report(path, Options(), {}, 1, repeats=1)
    report = model_report(path, Options(), {"length": 9}, 1, repeats=1)
    run(report)
    assert report.is_complete


def test_a_model_with_a_fixed_batch(tmp_path):
    report = model_report(double_onnx(tmp_path / "m.onnx", rows=4), Options(max_rows=4), {}, 1, repeats=1)
    run(report)
    assert {case.labels.get("rows") for case in report.cases} == {4, None}
    check_cases(report, max_rows=4)


def test_the_machine_is_described():
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["versions"]["asynctrt"] == asynctrt.__version__


def test_a_plan_is_measured_under_load_instead(tmp_path):
    with pytest.raises(ModelError, match=r"asynctrt load .*m.plan --device cuda:0"):
        model_report(tmp_path / "m.plan", Options(), {}, 1, 1)


def test_the_version_is_of_the_onnxruntime_that_runs(monkeypatch):
    """The packages ``onnxruntime`` and ``onnxruntime-gpu`` install the same module: either may be in use."""
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(__version__="0.0.7"))
    assert describe_machine()["versions"]["onnxruntime"] == "0.0.7"
