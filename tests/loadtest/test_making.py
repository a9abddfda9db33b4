"""A report from Python: as files, in one line."""

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import asynctrt
from asynctrt import loadtest
from asynctrt.errors import UsageError
from asynctrt.loadtest.making import describe_machine
from tests.models import double_onnx

pytestmark = pytest.mark.anyio


@pytest.fixture
async def report(tmp_path):
    path = double_onnx(tmp_path / "dou<b>le.onnx")
    return await loadtest.run(path, callers=4, seconds="200ms", warmup=0)


@pytest.mark.tier2
async def test_files_of_every_kind(report, tmp_path):
    (saved,) = report.save(tmp_path / "r.json")
    content = json.loads(saved.read_text())
    assert content["runs"][0]["answered"] == report.runs[0].answered > 0
    assert set(content["made"]) == {"at", "host"}
    assert content["made"]["at"].endswith("+00:00")
    (page,) = report.save(str(tmp_path / "r.html"))
    text = page.read_text()
    assert content["made"]["host"] in text
    assert content["made"]["at"] in text
    with pytest.raises(UsageError, match=r"'r.pdf' is not a \.json, \.html or \.csv file"):
        report.save("r.pdf")
    with pytest.raises(UsageError, match="cannot be written"):
        report.save(tmp_path / "none" / "r.json")


async def test_in_one_line(report):
    assert repr(report).startswith("<Report run of ")
    assert len(repr(report.runs[0])) < 120
    assert repr(report.runs[0]).startswith(f"<Run '4 callers': {report.runs[0].answered:,} of ")


@pytest.mark.tier2
async def test_the_page_about_it_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent.parent / "docs" / "load-tests-of-anything.md").read_text()
    with_users, block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    await asyncio.to_thread(exec, with_users, {"__name__": "page"})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["login", "search", "buy"]
    await asyncio.to_thread(exec, block, {"__name__": "page"})
    assert "<Report run of ask, in the application" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0]["error_share"] == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_machine_is_described():
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["versions"]["asynctrt"] == asynctrt.__version__


def test_the_version_is_of_the_onnxruntime_that_runs(monkeypatch):
    """The packages ``onnxruntime`` and ``onnxruntime-gpu`` install the same module: either may be in use."""
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(__version__="0.0.7"))
    assert describe_machine()["versions"]["onnxruntime"] == "0.0.7"
