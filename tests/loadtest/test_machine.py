"""What is used while a run goes on. The GPU's figures are NVIDIA's library's, without one there are none."""

import os
import subprocess
import sys

import pytest

from asynctrt.loadtest import machine
from asynctrt.loadtest.machine import ResourceMonitor, gpu_of
from asynctrt.loadtest.targets import TargetSpec

GROWS = """
import sys
for step in sys.stdin:
    ballast = b"x" * 50_000_000 if step == "grow\\n" else None
    print("done", flush=True)
"""


def test_memory_is_the_largest_that_was_seen():
    """Of a process that does nothing else: in this one, what earlier tests left may be freed meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        monitor = ResourceMonitor([child.pid], None)
        seen = []
        for step in ("rest", "grow", "rest"):
            child.stdin.write(f"{step}\n")
            assert child.stdout.readline() == "done\n"
            monitor.look()
            seen.append(monitor._memory_nbytes)
        child.stdin.close()
    used = monitor.close(1.5)
    assert seen[1] >= seen[0] + 40_000_000
    assert used.memory_mb * 1e6 == seen[2] == seen[1]
    assert used.generator_cores == 1.5
    assert (used.gpu_name, used.gpu_share, used.gpu_memory_mb, used.gpu_watts) == (None,) * 4


def test_nothing_was_looked_at():
    assert ResourceMonitor([os.getpid()], None).close(None).memory_mb is None


def test_a_gpu_that_is_not_there_is_missing():
    monitor = ResourceMonitor([os.getpid()], 999)
    monitor.look()
    assert monitor.close(None).gpu_name is None


class Nvml:
    """NVIDIA's library as it answers on a GPU that does not tell its power."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.shares = iter([10, 30])
        self.closed = False

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.closed = True

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetName(self, handle):
        return f"GPU {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return type("Rates", (), {"gpu": next(self.shares)})

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Memory", (), {"used": 3_000_000})

    def nvmlDeviceGetPowerUsage(self, handle):
        raise self.NVMLError("not supported")


def test_a_figure_that_a_gpu_does_not_tell_is_missing_and_the_others_are_not(monkeypatch):
    """Its functions are called as the real library's are named: the real one has each of them."""
    real, double = machine.pynvml, Nvml()
    used = [name for name in dir(double) if name.startswith("nvml")]
    assert all(hasattr(real, name) for name in used)
    monkeypatch.setattr(machine, "pynvml", double)
    monitor = ResourceMonitor([os.getpid()], 1)
    monitor.look()
    monitor.look()
    found = monitor.close(None)
    assert (found.gpu_name, found.gpu_share, found.gpu_memory_mb) == ("GPU 1", 0.2, 3.0)
    assert found.gpu_watts is None
    assert double.closed


@pytest.mark.parametrize(
    ("target", "number"),
    [
        (TargetSpec("model.onnx"), None),
        (TargetSpec("model.plan", device="cuda:3"), 3),
        (TargetSpec("model.plan", device="cuda"), 0),
        (TargetSpec("http://127.0.0.1:8000/v2/models/x"), 0),
        (TargetSpec("grpc://localhost:8001/x"), 0),
        (TargetSpec("http://10.1.2.3:8000/v2/models/x"), None),
        (TargetSpec("http://elsewhere.example/v2/models/x"), None),
        (object(), None),
    ],
)
def test_whose_gpu_it_is(target, number):
    assert gpu_of(target) == number
