"""Fixtures of the TensorRT adapter's tests."""

import subprocess
import sys
from pathlib import Path

import pytest
import tensorrt_lean
import tensorrt_rtx

from asynctrt.devices.host import HostDevice
from tests.backends.tensorrt.helpers import Bench
from tests.doubles.tensorrt import StrictTensorRT

BUILDER = Path(__file__).parents[2] / "gpu" / "build_identity_plan.py"


MODULES = {
    "double": lambda: StrictTensorRT(HostDevice()),
    "tensorrt_lean": lambda: tensorrt_lean,
    "tensorrt_rtx": lambda: tensorrt_rtx,
}


@pytest.fixture(params=MODULES)
def module(request):
    """A package with TensorRT's interfaces."""
    return MODULES[request.param]()


@pytest.fixture
def bench():
    """Make benches, close them, and check that the double found no violation."""
    made = []

    def make(*args, **kw):
        made.append(Bench(*args, **kw))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.trt.violations() == ()


@pytest.fixture(scope="session")
def rtx_plan(tmp_path_factory):
    """Plans that the real TensorRT for RTX builds, each once. In a process of its own, as it is a large
    library."""
    built = {}

    def build(*capabilities):
        if capabilities not in built:
            path = tmp_path_factory.mktemp("rtx") / "identity.plan"
            command = [sys.executable, str(BUILDER), str(path), *capabilities]
            subprocess.run(command, check=True, capture_output=True, timeout=50)
            built[capabilities] = path.read_bytes()
        return built[capabilities]

    return build
