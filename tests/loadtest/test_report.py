"""What is found: its figures by name, as JSON and back, and on a disk that is full."""

import dataclasses
import errno
import json
import os
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt._util.files import write_whole
from asynctrt.errors import UsageError
from asynctrt.loadtest.criteria import FIGURES
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.report import (
    FORMAT,
    BatchFigures,
    ErrorCount,
    Interval,
    Moment,
    Report,
    Run,
    SearchResult,
    StreamFigures,
    mean_figures,
)

INF, NAN = float("inf"), float("nan")


def make_run(**changed):
    """A run with everything in it that a run may have."""
    counts = Counts()
    counts.add(np.array([1_000_000, 2_000_000, 2_000_000], np.int64))
    given_values = {
        "label": "run",
        "seconds": 10.0,
        "complete": True,
        "void": (),
        "notes": ("a note",),
        "offered": 100.0,
        "requests": 1000,
        "answered": 990,
        "unanswered": 1,
        "rows": 1.0,
        "throughput": 99.0,
        "goodput": 98.0,
        "error_share": 0.01,
        "errors": {"Refused": ErrorCount(9, 'said "no"')},
        "latency": {"p50": 1.5, "p99": 3.25, "mean": 1.75, "max": 4.0},
        "lateness": {},
        "slo": {"p99<20ms": True},
        "batches": BatchFigures(990, 100, 9.9, 0.1, 0.2, 0.3, 0.4, {8: 30, 10: 70}),
        "generator_cores": 0.5,
        "moments": (Moment(0.0, 0.25, 100.0, 99.0, 1.5, None, 4.0, 1, None),),
        "histogram": counts.as_mapping(),
        "stream": StreamFigures(297.0, {"p50": 1.25, "mean": 1.5, "max": 3.0}, {"mean": 0.25}),
        "unjudged": {},
        "parameters": {"rate": 100},
    }
    return Run(**{**given_values, **changed})


def make_report(*runs, **changed):
    given_values = {
        "kind": "run",
        "target": {"where": "model.onnx", "model": None, "options": {"max_rows": 8}},
        "settings": {"rate": 100, "callers": None, "slo": ("p99<20ms",), "seconds": 10.0},
        "machine": {"cpu": "a CPU", "gpus": []},
        "runs": runs or (make_run(),),
        "intervals": {},
    }
    return Report(**{**given_values, **changed})


def parts(value):
    """A value and everything in it."""
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(part)


def as_text(report):
    return json.dumps(report.as_json(), allow_nan=False)


# ---- figures


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"slo": {}}, True),
        ({"slo": {"p99<20ms": True, "errors<1%": False}}, False),
        ({"void": ("it was late",)}, False),
        ({"unjudged": {"p99.9<20ms": "p99.9 needs 2,995 requests, and 100 ended"}}, False),
        ({"complete": False}, True),
    ],
)
def test_whether_a_run_holds(changed, holds):
    assert make_run(**changed).holds is holds
    assert make_report(make_run(), make_run(**changed)).holds is holds


def test_no_run_holds_nothing():
    report = dataclasses.replace(make_report(), runs=())
    assert not report.holds
    assert report.figure("p99") is None


def test_figures_by_the_names_that_criteria_have():
    run = make_run()
    assert {name: run.figure(name) for name in FIGURES} == {
        "p50": 1.5,
        "p90": None,
        "p95": None,
        "p99": 3.25,
        "p99.9": None,
        "p99.99": None,
        "mean": 1.75,
        "max": 4.0,
        "throughput": 99.0,
        "goodput": 98.0,
        "errors": 0.01,
    }


@pytest.mark.parametrize(
    ("values", "mean"),
    [([1.0], 1.0), ([1.0, 2.0, 6.0], 3.0), ([1.0, None], None), ([None], None), ([0.0, 0.0], 0.0)],
)
def test_a_reports_figure_is_the_mean_of_its_runs(values, mean):
    """If every run has it: a mean of some would be of others than the next figure's."""
    report = make_report(*[make_run(goodput=value) for value in values])
    assert report.figure("goodput") == mean


def test_the_means_of_some_runs():
    """Of the figures that each of them has."""
    runs = [make_run(throughput=90.0, goodput=None), make_run(throughput=110.0, latency={"p50": 2.5})]
    assert mean_figures(runs) == {"p50": 2.0, "throughput": 100.0, "errors": pytest.approx(0.01)}
    assert mean_figures([]) == {}


def test_what_runs_say_is_said_once():
    first = make_run(void=("late", "busy"), complete=False)
    report = make_report(first, make_run(), make_run(void=("busy",)))
    assert report.void == ("late", "busy")
    assert not report.complete
    assert make_report().complete


# ---- as JSON

WHOLE = make_report(
    make_run(kept=7.5),
    make_run(goodput=None, offered=None, batches=None),
    kind="search",
    intervals={"p99": Interval(3.0, 2.0, 4.0, 3)},
    search=SearchResult(("p99<20ms",), 100.0, None, "it was stopped"),
)


def test_what_is_not_known_is_not_there():
    content = WHOLE.as_json()
    assert all(None not in part.values() for part in parts(content) if isinstance(part, dict))
    assert "p99" not in content["runs"][0]["moments"][0]
    assert content["runs"][0]["generator_cores"] == 0.5
    assert {"goodput", "offered", "batches"}.isdisjoint(content["runs"][1])
    assert "callers" not in content["settings"]
    assert "search" not in make_report().as_json()


def test_everything_that_is_known_is_there():
    """By the names of the fields, down to the last; what is empty, 0 or False is known."""

    def compare(value, found):
        if dataclasses.is_dataclass(value):
            for item in dataclasses.fields(value):
                if getattr(value, item.name) is not None:
                    compare(getattr(value, item.name), found[item.name])
        elif isinstance(value, dict):
            known = {str(name): part for name, part in value.items() if part is not None}
            assert known.keys() == found.keys()
            for name, part in known.items():
                compare(part, found[name])
        elif isinstance(value, tuple | list):
            assert len(value) == len(found)
            for part, other in zip(value, found, strict=True):
                compare(part, other)
        else:
            assert found == value
            assert type(found) is type(value)

    content = WHOLE.as_json()
    compare(WHOLE, content)
    assert content["format"] == FORMAT
    assert content["complete"] is True
    assert content["runs"][0]["batches"]["by_rows"] == {"8": 30, "10": 70}
    assert set(content["runs"][0]) == {item.name for item in dataclasses.fields(Run)}


def test_it_goes_through_json_unchanged():
    assert json.loads(as_text(WHOLE)) == WHOLE.as_json()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.int64(8), 8),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (True, True),
        (2**70, 2**70),
        (INF, "inf"),  # A tolerance may be without bounds; JSON has no word for it.
        (-INF, "-inf"),
        (NAN, "nan"),
        (np.float64(INF), "inf"),
        ("\ud800", "\ud800"),
        (b"raw", "b'raw'"),
        (("a", ("b",)), ["a", ["b"]]),
        ({1: {2: 3}}, {"1": {"2": 3}}),
    ],
)
def test_values_of_other_types(value, found):
    content = make_report(settings={"value": value}).as_json()["settings"]["value"]
    assert content == found
    assert type(content) is type(found)
    assert json.loads(as_text(make_report(settings={"value": value})))["settings"]["value"] == found


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), anything, max_size=4))
def test_any_settings_are_json_that_everybody_reads(told):
    """Without NaN and infinity, which are no JSON."""
    report = make_report(settings=told, machine=told)
    assert json.loads(as_text(report)) == report.as_json()
    assert all(None not in part.values() for part in parts(report.as_json()) if isinstance(part, dict))


# ---- on the disk


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_report_is_saved(tmp_path):
    path = tmp_path / "report.json"
    WHOLE.save(path)
    assert json.loads(path.read_text()) == WHOLE.as_json()
    assert json.loads(path.read_text())["format"] == 1
    assert names(tmp_path) == ["report.json"]


@pytest.mark.parametrize("content", ["text \u00e4 \u2713", "", b"\x00\xff", "x" * 1_000_000])
@pytest.mark.parametrize("before", [None, "something longer or shorter that was there before"])
def test_a_file_is_written_as_a_whole(tmp_path, content, before):
    path = tmp_path / "report"
    if before is not None:
        path.write_text(before)
    write_whole(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert names(tmp_path) == ["report"]


def test_text_that_is_no_unicode(tmp_path):
    """What a server says goes into a page, and it may say anything."""
    write_whole(tmp_path / "page.html", "<p>\ud800</p>")
    assert (tmp_path / "page.html").read_text() == "<p>?</p>"


FAILURES = {
    "the disk is full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "the disk is broken": OSError(errno.EIO, os.strerror(errno.EIO)),
    "there is no reason": OSError("just so"),
}


@pytest.mark.parametrize("function", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("error", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("before", [None, "as it was"])
def test_what_was_there_stays_if_it_cannot_be_written(tmp_path, monkeypatch, function, error, before):
    path = tmp_path / "report.json"
    if before is not None:
        path.write_text(before)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(UsageError) as caught:
        WHOLE.save(path)
    monkeypatch.undo()
    assert str(caught.value) == f"{str(path)!r} cannot be written: {error.strerror or error}"
    assert names(tmp_path) == ([] if before is None else ["report.json"])
    assert before is None or path.read_text() == before


def test_nothing_is_left_of_a_writing_that_was_interrupted(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("as it was")

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        WHOLE.save(path)
    assert names(tmp_path) == ["report.json"]
    assert path.read_text() == "as it was"


@pytest.mark.parametrize("where", ["missing/report.json", "file/report.json", "folder"])
def test_where_nothing_can_be_written(tmp_path, where):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        write_whole(tmp_path / where, "x")
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_a_link(tmp_path, is_there):
    """What it points to is written."""
    (tmp_path / "deeper").mkdir()
    target, link = tmp_path / "deeper" / "report.json", tmp_path / "latest.json"
    if is_there:
        target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert names(tmp_path / "deeper") == ["report.json"]


@pytest.mark.parametrize("by_link", [False, True])
def test_a_pipe_stays_a_pipe(tmp_path, by_link):
    """As /dev/stdout may be one: to replace it by a file would be the end of it for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = pipe
    if by_link:
        path = tmp_path / "link"
        path.symlink_to(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, "through it")
        assert os.read(reading, 100) == b"through it"
    finally:
        os.close(reading)
    assert pipe.is_fifo()
    assert path.is_symlink() is by_link
