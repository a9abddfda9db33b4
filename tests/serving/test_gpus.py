"""The GPUs' readings, from a stand-in for NVIDIA's management library, as unwilling as it is."""

import sys
from types import SimpleNamespace

import pynvml
import pytest

from asynctrt.serving.gpus import GpuFigures, Gpus


class Nvml:
    """Two GPUs, of which the second tells its memory alone; each call needs the library to be open."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *, driver=True):
        self.driver = driver
        self.opened = 0

    def _refuse(self, number=pynvml.NVML_ERROR_NOT_SUPPORTED):
        raise pynvml.NVMLError(number)

    def nvmlInit(self):
        if not self.driver:
            self._refuse(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, number):
        if not self.opened:
            self._refuse(pynvml.NVML_ERROR_UNINITIALIZED)
        if number == 2:
            self._refuse(pynvml.NVML_ERROR_NO_PERMISSION)
        return number

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=25, memory=3) if handle == 0 else self._refuse()

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=80, used=30, free=50)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 250_500 if handle == 0 else self._refuse()


def test_what_each_tells(monkeypatch):
    double = Nvml()
    assert all(hasattr(pynvml, name) for name in dir(double) if name.startswith("nvml"))
    monkeypatch.setitem(sys.modules, "pynvml", double)
    double.__spec__ = object()
    gpus = Gpus()
    assert (
        gpus.read()
        == gpus.read()
        == [GpuFigures("GPU-0", 0.25, 80, 30, 250.5), GpuFigures("GPU-1", None, 80, 30, None)]
    )
    assert double.opened == 1
    gpus.close()
    gpus.close()
    assert (double.opened, gpus.read()) == (0, [])


@pytest.mark.parametrize("missing", ["driver", "package"])
def test_without_a_driver_or_the_package_there_are_none(monkeypatch, missing):
    double = Nvml(driver=False)
    double.__spec__ = object()
    monkeypatch.setitem(sys.modules, "pynvml", double)
    if missing == "package":
        monkeypatch.setattr("asynctrt.serving.gpus.find_spec", lambda name: None)
    gpus = Gpus()
    assert gpus.read() == gpus.read() == []
    gpus.close()
