"""The real packages, where there is no GPU: what they say then becomes a typed error, and nothing crashes.

Each in a process of its own, which has to come to its end as usual: what a library without a driver makes was
seen to crash when it was destroyed. What they do with a GPU is in
``tests/gpu/test_tensorrt_real.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.tensorrt import EngineSpec, double_plan
from tests.gpu.support import gpu_is_here

ROOT = Path(__file__).parents[3]

PROGRAM = """
import logging, sys
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice

class Cuda(HostDevice):
    name = "cuda:0"

logging.basicConfig(stream=sys.stdout)
try:
    print("opened", TensorRTModel(sys.argv[1], device=Cuda(), flavour=sys.argv[2]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def opened(path, flavour):
    """Open a plan with a real package, and return the report."""
    command = [sys.executable, "-c", PROGRAM, str(path), flavour]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50, cwd=ROOT)
    return done.stdout


@pytest.mark.skipif(gpu_is_here(), reason="there is a GPU, so they start")
@pytest.mark.parametrize("flavour", ["tensorrt_lean", "tensorrt_dispatch"])
def test_a_runtime_without_a_driver(tmp_path, flavour):
    path = tmp_path / "model.plan"
    path.write_bytes(double_plan(EngineSpec()))
    said = opened(path, flavour)
    assert said.startswith(("ERROR:asynctrt.tensorrt", "DeviceUnavailableError"))
    assert f"DeviceUnavailableError: {flavour}" in said
    assert "cannot start on cuda:0" in said
    assert "CUDA initialization failure" in said, "what the library said is in the message"
    assert "nvidia-smi" in said


@pytest.mark.skipif(gpu_is_here(), reason="there is a GPU, so it starts")
def test_tensorrt_for_rtx_without_a_driver(tmp_path, rtx_plan):
    path = tmp_path / "model.plan"
    path.write_bytes(rtx_plan())
    said = opened(path, "tensorrt_rtx")
    assert "DeviceUnavailableError: " in said
    assert "model.plan" in said
    assert "nvidia-smi" in said
    assert "TensorRT said: " in said


@pytest.mark.skipif(gpu_is_here(), reason="with a GPU, the damage is what is told")
def test_without_a_flavour_the_one_for_the_plan_is_taken(tmp_path, rtx_plan):
    path = tmp_path / "model.plan"
    path.write_bytes(rtx_plan())
    program = PROGRAM.replace("flavour=sys.argv[2]", "flavour=None")
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50, cwd=ROOT)
    assert "tensorrt_rtx" in done.stdout


FACILITIES = """
import sys, weakref
from importlib import import_module

from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.jit import check_options
from asynctrt.backends.tensorrt_options import TensorRTOptions

module = import_module(sys.argv[1])
here = Flavour(sys.argv[1], module, is_real=True)
for options in (
    {"refit_from": sys.argv[0]},
    {"runtime_cache": "cache"},
):
    try:
        check_options(here, TensorRTOptions(**options))
        print(*options, "is there")
    except Exception as error:
        print(*options, type(error).__name__)
for name in ("Refitter", "OnnxParserRefitter", "IRuntimeConfig", "IRuntimeCache"):
    # What is kept alive for one of them is kept by a weak reference to it.
    print(name, getattr(getattr(module, name, None), "__weakrefoffset__", None))
"""


@pytest.mark.parametrize("flavour", ["tensorrt_rtx", "tensorrt_lean", "tensorrt_dispatch"])
def test_what_the_real_packages_have(tmp_path, flavour):
    program = tmp_path / "facilities.py"
    program.write_text(FACILITIES)
    command = [sys.executable, str(program), flavour]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=50, cwd=tmp_path, env=env
    )
    lines = done.stdout.splitlines()
    there = "is there" if flavour == "tensorrt_rtx" else "OptionsError"
    assert lines[:2] == [f"{name} {there}" for name in ("refit_from", "runtime_cache")]
    offsets = dict(line.split() for line in lines[2:])
    assert "0" not in offsets.values()
    has_all = flavour == "tensorrt_rtx"
    assert (offsets["OnnxParserRefitter"] != "None", offsets["IRuntimeCache"] != "None") == (has_all, has_all)
