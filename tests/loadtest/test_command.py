"""``asynctrt load`` without its terminal: flags, files, the gate, exit statuses."""

import json
from dataclasses import replace

import pytest

from asynctrt.errors import OptionsError, UsageError
from asynctrt.loadtest import command
from asynctrt.loadtest.report import Report, SearchResult
from tests.loadtest import reports


@pytest.fixture
def report():
    return reports.single()


def test_flags_become_a_job(tmp_path):
    planned = command.plan(
        "model.onnx",
        {
            "rate": "100..200",
            "max_rows": 8,
            "timeout": 0.5,
            "answer_timeout": 3.0,
            "slo": ["p99<20ms"],
            "dims": ["length=3"],
            "sweep": ["rate=10,20.5", "contexts=1:5", "graphs=auto,off"],
            "json": tmp_path / "a.json",
        },
    )
    job = planned.job
    assert job.settings.rate == "100..200"
    assert (job.target.options.max_rows, job.target.options.timeout) == (8, 0.5)
    assert (job.settings.answer_timeout, job.settings.slo, job.settings.dims) == (
        3.0,
        ("p99<20ms",),
        ("length=3",),
    )
    assert job.sweep == {"rate": [10, 20.5], "contexts": [1, 2, 4], "graphs": ["auto", "off"]}
    assert planned.outputs == [tmp_path / "a.json"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rate": "fast"}, "is not a rate"),
        ({"sweep": ["rate"]}, "has no values"),
        ({"sweep": ["rate=5:1"]}, "the smaller first"),
    ],
)
def test_what_makes_no_sense(given, says):
    with pytest.raises(OptionsError, match=says):
        command.plan("model.onnx", given)


@pytest.mark.parametrize("name", ["json", "report"])
def test_a_file_that_cannot_be_written_is_said_before_the_test(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        command.plan("model.onnx", {name: tmp_path / "file" / "below.html"})
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UsageError, match="is not an .html or .csv file"):
        command.plan("model.onnx", {"report": tmp_path / "a.pdf"})
    with pytest.raises(UsageError, match="is a folder"):
        command.plan("model.onnx", {"json": tmp_path / "folder.json"})


def test_everything_is_written(report, tmp_path):
    given = {"json": tmp_path / "new" / "a.json", "report": tmp_path / "a.html"}
    planned = command.plan("model.onnx", given)
    written = command.write(planned, report)
    assert {path.name for path in written} == {"a.json", "a.html"}
    assert all(path.stat().st_size for path in written)
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == json.loads(json.dumps(report.as_json()))


def test_one_file_that_fails_does_not_cost_the_others(report, tmp_path, monkeypatch):
    planned = command.plan("model.onnx", {"json": tmp_path / "a.json", "report": tmp_path / "a.html"})
    whole = command.write_whole

    def full(path, content):
        if path.suffix == ".json":
            raise UsageError(f"{str(path)!r} cannot be written: No space left on device")
        whole(path, content)

    monkeypatch.setattr(command, "write_whole", full)
    with pytest.raises(UsageError, match=r"No space left on device. Written: .*a\.html"):
        command.write(planned, report)
    assert (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": 1, "runs": []}', '{"format": 99, "runs": [1]}', "[" * 10**5]
)
def test_something_that_is_no_baseline(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=r"a\.json"):
        command.read_report(tmp_path / "a.json")
    with pytest.raises(UsageError, match=r"b\.json.*cannot be read"):
        command.read_report(tmp_path / "b.json")


def test_exit_statuses(report):
    good = replace(report.runs[0], void=(), slo={"p99<1s": True})

    def status(kind="run", search=None, **changes):
        made: Report = replace(report, kind=kind, runs=(replace(good, **changes),), search=search)
        return command.exit_status(made)

    assert status() == 0
    assert status(slo={"p99<1s": False}) == 3
    assert status(slo={"p99<1s": False}, kind="sweep") == 0
    assert status(void=("late",)) == 4
    few = {"unjudged": {"p99.9<1s": "p99.9 needs 2,995 requests, and 100 ended"}}
    assert status(**few) == 5
    assert status(slo={"p99<1s": False}, **few) == 3
    assert status(kind="sweep", **few) == 0
    assert status(void=("late",), **few) == 4
    in_vain, found = (SearchResult(("p99<1s",), holds, None, "") for holds in (None, 100.0))
    assert status(kind="search", search=in_vain) == 3
    assert status(kind="search", search=in_vain, **few) == 5
    assert status(kind="search", search=found, **few) == 0
    assert status(kind="search", search=found, error_share=0.9) == 0  # Far above the rate that holds.
    assert status(kind="search", search=found, void=("late",)) == 4
