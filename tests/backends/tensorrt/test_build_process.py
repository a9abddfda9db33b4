"""Building in a process of its own: what goes over and back, and what becomes of a crash."""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import asynctrt
from asynctrt._util.cancellation import Cancellation, cancelled_by
from asynctrt.backends.tensorrt import build_process
from asynctrt.backends.tensorrt.build_process import _built_of, build_in_process
from asynctrt.errors import BuildError, OptionsError, UsageError
from tests.models import double_onnx


def crashing(tmp_path, monkeypatch, code):
    """Let the process that builds run this instead."""
    monkeypatch.setattr(build_process, "child_command", lambda _: [sys.executable, "-c", code])
    return build_in_process(b"model", tmp_path / "m.onnx", None, asynctrt.BuildOptions())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with the signal SIGSEGV"),
        ("print('[1, 2')", "the builder crashed"),
        ("import sys; sys.stderr.write('cannot'); sys.exit(3)", "the builder crashed"),
        ('print(\'{"built": {}, "nbytes": 9}\')', "the builder crashed"),
    ],
)
def test_a_crash_of_the_builder_is_an_error(tmp_path, monkeypatch, code, said):
    with pytest.raises(BuildError, match=said):
        crashing(tmp_path, monkeypatch, code)


SILENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(sys.argv[1], "w").close()
signal.pause()
"""


def test_a_build_that_reports_nothing_ends_when_it_is_cancelled(tmp_path, monkeypatch):
    """A build of TensorRT 8 has no monitor that could end it."""
    begun, cancellation = tmp_path / "begun", Cancellation()
    command = [sys.executable, "-c", SILENT, str(begun)]
    monkeypatch.setattr(build_process, "child_command", lambda _: command)
    made = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kw: made.append(popen(*args, **kw)) or made[0])

    def build():
        with cancelled_by(cancellation):
            build_in_process(b"model", tmp_path / "m.onnx", None, asynctrt.BuildOptions())

    with ThreadPoolExecutor(1) as thread:
        building = thread.submit(build)
        while not begun.exists():
            assert not building.done()
        cancellation.cancel()
        with pytest.raises(UsageError, match="m.onnx' was interrupted"):
            building.result(timeout=20)
    assert made[0].returncode == -signal.SIGKILL


@pytest.mark.tier2
def test_damaged_models_are_built_or_refused(tmp_path):
    """The parser of 1.7 crashes on some of these, in its own process."""
    random = np.random.default_rng(1)
    path = double_onnx(tmp_path / "m.onnx")
    whole, outcomes = path.read_bytes(), []
    for _ in range(8):
        changed = bytearray(whole)
        for _ in range(4):
            changed[random.integers(len(changed))] = random.integers(256)
        try:
            build_in_process(bytes(changed), path, "tensorrt_rtx", asynctrt.BuildOptions())
            outcomes.append("built")
        except (BuildError, OptionsError) as error:
            outcomes.append(type(error).__name__)
    assert "BuildError" in outcomes


def test_what_is_sent_over_comes_back_as_it_was():
    import dataclasses

    from asynctrt.backends.tensorrt.builder import Built
    from asynctrt.backends.tensorrt.profiles import NetworkTensor

    built = Built(
        b"",
        "tensorrt",
        "10.14.1.48",
        (NetworkTensor("x", "FLOAT", (-1, 4), ("n", None)),),
        (NetworkTensor("y", "FLOAT", (-1,), (None,), is_shape_tensor=True),),
        ({"x": ((1, 4), (2, 4), (3, 4))},),
        ("libnvinfer_vc_plugin.so",),
    )
    told = json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(built)), default=str))
    del told["content"]
    assert _built_of(told, b"") == built
