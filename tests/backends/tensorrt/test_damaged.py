"""Ten thousand damaged headers and plans: no crash of the process, a typed error each or a plan that runs.

Through the double all the way, and through the real TensorRT for RTX as far as it goes without a GPU.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from asynctrt.backends.tensorrt import TensorRTModel, read_header
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceError, ModelError, OptionsError
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan

COUNT = 2500
ROOT = Path(__file__).parents[3]
PLAN = double_plan(EngineSpec())
RTX = (ROOT / "tests" / "gpu" / "identity.rtx.plan").read_bytes()


def damaged(whole, random):
    """Return a plan with bytes changed, cut off, added, or swapped; more often in its header."""
    changed = bytearray(whole)
    for _ in range(random.integers(1, 5)):
        end = 64 if random.random() < 0.6 else len(changed)
        changed[random.integers(end)] = random.integers(256)
    kind = random.integers(8)
    if kind == 0:
        del changed[random.integers(len(changed)) :]
    elif kind == 1:
        changed += random.bytes(random.integers(1, 50))
    elif kind == 2:
        start, length = random.integers(len(changed)), random.integers(1, 9)
        changed[start : start + length] = b"\xff" * length
    return bytes(changed)


@pytest.mark.parametrize("whole", [PLAN, RTX], ids=["tensorrt", "rtx"])
def test_headers(whole):
    random = np.random.default_rng(11)
    outcomes = Counter()
    for _ in range(2500):
        content = damaged(whole[:4096], random)
        try:
            read_header(content, nbytes=len(whole))
            outcomes["read"] += 1
        except ModelError:
            outcomes["refused"] += 1
    assert min(outcomes["read"], outcomes["refused"]) > 100


@pytest.mark.tier2
def test_plans_through_the_double():
    random = np.random.default_rng(12)
    device = HostDevice()
    trt = StrictTensorRT(device)
    outcomes = Counter()
    for _ in range(COUNT):
        try:
            model = TensorRTModel(damaged(PLAN, random), device=device, flavour=trt)
            model.close()
            outcomes["opened"] += 1
        except (ModelError, DeviceError, OptionsError) as error:
            outcomes[type(error).__name__] += 1
    device.close()
    assert trt.violations() == ()
    assert outcomes["ModelError"] > COUNT // 2


REAL = """
import sys
import numpy as np
import tensorrt_rtx
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import AsynctrtError
from tests.backends.tensorrt.test_damaged import RTX, damaged

class Cuda(HostDevice):
    name = "cuda:0"
    gpu = "none"
    compute_capability = (8, 9)

random, device, outcomes = np.random.default_rng(14), Cuda(), {}
for _ in range(int(sys.argv[1])):
    try:
        TensorRTModel(damaged(RTX, random), device=device, flavour="tensorrt_rtx").close()
        kind = "opened"
    except AsynctrtError as error:
        kind = type(error).__name__
    outcomes[kind] = outcomes.get(kind, 0) + 1
print(outcomes)
"""


@pytest.mark.tier2
def test_plans_through_the_real_library():
    done = subprocess.run(
        [sys.executable, "-c", REAL, "500"], capture_output=True, text=True, timeout=50, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert "ModelError" in done.stdout
