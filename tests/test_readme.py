"""The README tells the truth: its snippets run, its commands are those of CI, its tables are the code's."""

import asyncio
import dataclasses
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import asynctrt
from asynctrt.options import Options
from tests.models import double_onnx, rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """What the snippets define, all but the first, which runs by itself."""
    scope = {"asynctrt": asynctrt, "np": np}
    for snippet in PYTHON[1:]:
        exec(snippet, scope)
    return scope


def test_the_ten_lines_run_as_they_are(tmp_path, monkeypatch, capsys):
    double_onnx(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[0], {})
    assert re.search(r"\[\[.*\]\] 64 Timing\(queue_ns=\d+", capsys.readouterr().out)


def test_batching_priorities_overload(names, tmp_path, capsys):
    path = double_onnx(tmp_path / "model.onnx")
    result = asyncio.run(names["careful"](path, rows(3)))
    assert result["output"].tolist() == rows(6).tolist()
    assert "succeeded=1" in capsys.readouterr().out


def test_without_a_copy(names, tmp_path):
    async def run():
        async with asynctrt.open(double_onnx(tmp_path / "model.onnx")) as engine:
            return await names["without_a_copy"](engine, rows(4))

    assert asyncio.run(run()).tolist() == rows(8).tolist()


def test_a_function_as_a_model(names):
    assert (asyncio.run(names["use_it"]())["y"] == 2).all()


def test_ci_runs_the_test_command():
    assert SHELL[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_commands_name_extras_that_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in SHELL:
        assert set(re.findall(r"\.\[(\w+)\]", command)) <= set(extras)
    for extra in ("cpu", "cli", "demo", "dev"):
        assert f"`{extra}`" in README
        assert extra in extras


def test_the_table_of_options_is_complete_and_right():
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", README, re.MULTILINE))
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    assert list(table) == list(defaults)
    for name, default in defaults.items():
        if default is not None:
            assert table[name].strip("`").replace('"', "'") == repr(default)


def test_the_picture_is_there():
    assert (ROOT / ".readme" / "way.svg").exists()
    assert ".readme/way.svg" in README
