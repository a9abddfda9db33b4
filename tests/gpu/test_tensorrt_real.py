"""The real TensorRT packages on a GPU, through the adapter, with our logger, recorder and allocator.

Each package in a process of its own, as the tests beside it must not depend on how these libraries end. A
plan that TensorRT 11 would run has to be built by the full package, which PyPI does not carry; so what is
seen of lean and dispatch is how they refuse. TensorRT for RTX builds its plan here, and runs it where it
supports the GPU.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu import differential
from tests.gpu.sides import PLANS
from tests.gpu.support import gpu_is_here
from tests.helpers import needed

pytestmark = pytest.mark.skipif(not gpu_is_here(), reason="needs a GPU")

ROOT = Path(__file__).parents[2]
IDENTITY = Path(__file__).parent / "identity.rtx.plan"

PROGRAM = """
import json, os, sys
import numpy as np
from asynctrt.backends.base import TensorMemory
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.cuda import CudaDevice

path, flavour = sys.argv[1:3]
device = CudaDevice(0)
report = {"compute_capability": list(device.compute_capability), "gpu": device.gpu}

def run(model):
    context = model.create_context(device)
    stream, event = device.create_stream(), device.create_event()
    staging = [device.allocate_staging(4096) for _ in range(2)]
    buffers = [device.allocate(4096) for _ in range(2)]
    nbytes = model.capabilities.enqueue_nbytes
    arena = device.allocate(max(nbytes, 256))
    dtype = np.dtype("float32")
    memory = [
        TensorMemory(spec.name, dtype, (4,), buffer.address, None)
        for spec, buffer in zip((*model.inputs, *model.outputs), buffers)
    ]
    binding = context.bind((memory[0],), (memory[1],))
    x = staging[0].array(dtype, (64, 4), 0)
    y = staging[1].array(dtype, (64, 4), 0)
    equal = []
    for rows in (1, 64, 8):
        x[...] = np.random.default_rng(rows).normal(size=x.shape)
        y[...] = 0
        stream.copy(buffers[0], staging[0], offset=0, nbytes=4096)
        binding.enqueue(rows, profile=None, stream=stream, arena=arena if nbytes else None)
        stream.copy(staging[1], buffers[1], offset=0, nbytes=rows * 16)
        stream.record(event)
        assert event.synchronize(30)
        equal.append(bool((x[:rows] == y[:rows]).all()))
    context.close()
    stream.close(5)
    for buffer in (*staging, *buffers, arena):
        buffer.close()
    return equal

try:
    model = TensorRTModel(path, device=device, flavour=flavour)
    report["opened"] = repr(model)
    report["specs"] = [str(spec) for spec in (*model.inputs, *model.outputs)]
    report["equal"] = run(model)
    report["held"] = model.memory_statistics().held_nbytes
    model.close()
except Exception as error:
    report["error"] = type(error).__name__
    report["message"] = str(error)
report["device"] = device.memory().held_nbytes
print(json.dumps(report), flush=True)
os._exit(0)
"""


def run_with(flavour, program, *arguments):
    """Run a program that uses a package, if that is installed, in a process of its own."""
    needed(find_spec(flavour), f"{flavour} is not installed")
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=55, cwd=ROOT)


def opened(path, flavour):
    """Open a plan with a real package, run it if it opens, and return the report."""
    done = run_with(flavour, PROGRAM, str(path), flavour)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(report, indent=2))  # Shown with -rP: what the libraries say differs between versions.
    return report


def forged(tmp_path, version):
    """A plan that has the header of TensorRT's, of that version, and nothing behind it that makes sense."""
    content = bytearray(IDENTITY.read_bytes())
    content[0:4] = content[28:32] = b"ftrt"
    content[24:28] = bytes(version)
    path = tmp_path / "forged.plan"
    path.write_bytes(content)
    return path


def version_of(flavour):
    done = run_with(flavour, f"import {flavour}; print({flavour}.__version__)")
    return tuple(int(part) for part in done.stdout.strip().split(".")[:4])


@pytest.mark.parametrize("flavour", ["tensorrt_lean", "tensorrt_dispatch"])
def test_a_damaged_plan(tmp_path, flavour):
    report = opened(forged(tmp_path, version_of(flavour)), flavour)
    assert report["error"] == "ModelError"
    assert "TensorRT said: " in report["message"]
    assert "forged.plan" in report["message"]
    assert report["device"] == 0, "all memory came back"


@pytest.mark.parametrize("flavour", ["tensorrt_lean", "tensorrt_dispatch"])
def test_a_plan_of_another_version(tmp_path, flavour):
    report = opened(forged(tmp_path, (10, 13, 2, 6)), flavour)
    assert report["error"] == "ModelError"
    assert "10.13.2.6" in report["message"]
    assert "TensorRT said: " in report["message"]


def test_a_damaged_plan_of_tensorrt_for_rtx(tmp_path):
    content = bytearray(IDENTITY.read_bytes())
    content[64:4096] = bytes(4096 - 64)
    path = tmp_path / "damaged.plan"
    path.write_bytes(content)
    report = opened(path, "tensorrt_rtx")
    assert report["error"] == "ModelError"
    assert "TensorRT said: " in report["message"]


def test_the_plan_of_tensorrt_for_rtx():
    """On a GPU that it supports the answers are right; on another the refusal says which it would run on."""
    from asynctrt.backends.tensorrt import read_header

    supported = read_header(IDENTITY.read_bytes()).compute_capabilities
    report = opened(IDENTITY, "tensorrt_rtx")
    if tuple(report["compute_capability"]) in supported:
        assert report["specs"] == ["x: float32[rows, 4]", "y: float32[rows, 4]"]
        assert report["equal"] == [True, True, True]
        assert report["device"] == 0
    else:
        assert report["error"] == "ModelError"
        assert report["gpu"] in report["message"]
        assert "8.0, 8.6, 8.9" in report["message"]
        assert "TensorRT said: " in report["message"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PLANS)
def test_a_full_gpu_ends_no_process(name):
    """Opening, capturing and swapping fail with errors of ours, or work, however little another leaves."""
    setting = differential.setting_from_environment()
    if not (setting.flavour and setting.plans):
        pytest.skip("needs what ASYNCTRT_TEST_FLAVOUR and ASYNCTRT_TEST_PLANS name")
    command = [sys.executable, "-m", "tests.gpu.full", str(Path(setting.plans) / f"{name}-vcx.plan")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1] == "survived"
    assert "UNTYPED" not in done.stdout


@pytest.mark.timeout(240)
def test_nothing_but_what_is_known_differs_from_the_double(tmp_path):
    setting = differential.setting_from_environment()
    if not (setting.flavour and setting.plans):
        pytest.skip("needs what ASYNCTRT_TEST_FLAVOUR and ASYNCTRT_TEST_PLANS name")
    assert differential.main(["--json", str(tmp_path / "found.json")]) == 0
