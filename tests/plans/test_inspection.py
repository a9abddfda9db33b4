"""`asynctrt inspect` as a user types it, and its text."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from asynctrt.errors import MissingExtraError
from asynctrt.plans.inspection import inspect
from asynctrt.plans.text import lines_of
from tests.backends.tensorrt.conftest import rtx_plan  # noqa: F401  (a fixture)
from tests.gpu.support import gpu_is_here
from tests.models import double_onnx, sequence_onnx
from tests.plans.test_plan_file import RTX

WAIT_S = 50


def text(path):
    return "\n".join(lines_of(inspect(path)))


def test_text_of_an_onnx_model(tmp_path):
    shown = text(sequence_onnx(tmp_path / "m.onnx"))
    assert "input         tokens: float32[batch, length]" in shown
    assert "batching      on the axis 'batch'; --open tries" in shown
    assert "free          length; --open tries whether rows of all sizes share batches" in shown
    assert "exactly 4 rows" in text(double_onnx(tmp_path / "fixed.onnx", rows=4))
    assert "of any size, without a name" in text(double_onnx(tmp_path / "none.onnx", rows=None))
    assert "float32[?, 4]" in text(double_onnx(tmp_path / "none.onnx", rows=None))
    assert "none, each request runs alone: " in text(double_onnx(tmp_path / "two.onnx", dims=("batch",)))


def test_text_of_a_plan():
    shown = text(RTX)
    assert "kind          a plan of TensorRT for RTX 1." in shown
    assert "compute capability " + ", ".join(inspect(RTX).compute_capabilities) in " ".join(shown.split())
    assert "--open, only if you trust it" in shown
    assert max(map(len, shown.splitlines())) <= 80 or str(RTX) in shown


def test_names_in_a_file_cannot_write_to_the_terminal(tmp_path):
    shown = text(double_onnx(tmp_path / "m.onnx", rows="\x1b[2Jrows\nkind  a lie"))
    assert "\x1b" not in shown
    assert "\nkind  a lie" not in shown


def test_json_is_plain(tmp_path):
    found = dataclasses.asdict(inspect(sequence_onnx(tmp_path / "m.onnx")))
    again = json.loads(json.dumps(found))
    assert again["inputs"][0] == {
        "name": "tokens",
        "kind": "tensor",
        "dtype": "float32",
        "dims": ["batch", "length"],
    }
    assert json.loads(json.dumps(dataclasses.asdict(inspect(RTX))))["tag"] == "vtrt"


def test_onnx_is_named_where_it_is_missing(tmp_path, monkeypatch):
    path = double_onnx(tmp_path / "m.onnx")
    monkeypatch.delitem(sys.modules, "asynctrt.plans.onnx_file", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'asynctrt\[inspect\]'"):
        inspect(path)
    assert inspect(RTX).tag == "vtrt", "plans need no more"


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "asynctrt", "inspect", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.tier2
def test_the_command(tmp_path):
    path = double_onnx(tmp_path / "m.onnx")
    status, out, _ = command(path)
    assert (status, "batching" in out) == (0, True)
    status, out, _ = command(path, "--open", "--json")
    report = json.loads(out)
    assert (status, report["refused"], report["opened"]["device"]) == (0, None, "host")
    assert report["file"]["digest"] == inspect(path).digest
    status, _, err = command(tmp_path / "missing.onnx")
    assert (status, "ModelNotFoundError: there is no file" in err) == (1, True)
    status, _, err = command(path, "--open", "--onnx", "nonsense=1")
    assert (status, "OptionsError" in err) == (1, True)


@pytest.mark.tier2
@pytest.mark.skipif(gpu_is_here(), reason="with a GPU it is opened, or refused for another reason")
def test_a_real_plan_that_cannot_be_opened_here_is_described_and_its_refusal_said():
    status, out, err = command(RTX, "--open")
    assert status == 1
    assert "a plan of TensorRT for RTX" in out
    assert "DeviceUnavailableError: " in err
    status, out, err = command(RTX, "--open", "--json")
    report = json.loads(out)
    assert (status, report["opened"]) == (1, None)
    assert report["refused"].startswith("DeviceUnavailableError: ")
    assert report["file"]["tag"] == "vtrt"


@pytest.mark.tier2
def test_a_plan_that_was_built_just_now(rtx_plan, tmp_path):  # noqa: F811
    path = tmp_path / "model.plan"
    path.write_bytes(rtx_plan("SM86", "SM89"))
    found = inspect(path)
    assert found.compute_capabilities == ("8.6", "8.9")
    assert found.runners[0].verdict == "yes"
