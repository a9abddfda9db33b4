"""`asynctrt inspect` as a user types it, and its text."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from asynctrt.plans.opened import open_file
from asynctrt.plans.plan_file import find_plan
from asynctrt.plans.text import lines_of_opened, lines_of_plan
from tests.backends.tensorrt.conftest import rtx_plan  # noqa: F401  (a fixture)
from tests.gpu.support import gpu_is_here
from tests.models import double_onnx
from tests.plans.test_plan_file import RTX

WAIT_S = 50
NASTY = "\x1b[2Jn\nkind  a lie"


def text(path):
    return "\n".join(lines_of_plan(find_plan(path)))


def test_text_of_a_plan():
    shown = text(RTX)
    assert "kind          a plan of TensorRT for RTX 1." in shown
    assert "compute capability " + ", ".join(find_plan(RTX).compute_capabilities) in " ".join(shown.split())
    assert "--open, only if you trust it" in shown
    assert max(map(len, shown.splitlines())) <= 80 or str(RTX) in shown


def test_names_in_a_file_cannot_write_to_the_terminal(tmp_path):
    shown = "\n".join(lines_of_opened(open_file(double_onnx(tmp_path / "m.onnx", dims=(NASTY,)))))
    assert "\x1b" not in shown
    assert "\nkind  a lie" not in shown


def test_json_is_plain():
    assert json.loads(json.dumps(dataclasses.asdict(find_plan(RTX))))["tag"] == "vtrt"


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
    assert (status, "batching" in out, "input         input: float32[rows, 4]" in out) == (0, True, True)
    status, out, _ = command(path, "--json")
    report = json.loads(out)
    assert (status, report["refused"], report["opened"]["device"]) == (0, None, "host")
    assert report["file"] is None
    status, _, err = command(tmp_path / "missing.onnx")
    assert (status, "ModelNotFoundError: there is no file" in err) == (1, True)
    status, _, err = command(path, "--onnx", "nonsense=1")
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
    found = find_plan(path)
    assert found.compute_capabilities == ("8.6", "8.9")
