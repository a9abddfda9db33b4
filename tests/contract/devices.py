"""All devices, for the contract suites."""

from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.testing import LatchDevice
from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan
from tests.gpu.support import gpu_is_here


def open_latch(**kw):
    device = LatchDevice(**kw)
    device.open()
    return device


DEVICES = {
    "host": HostDevice,
    "host-in-place": lambda: HostDevice(in_place="always"),
    "host-threads": lambda: HostDevice(in_place="never"),
    "host-one-thread": lambda: HostDevice(in_place="never", threads=1),
    "host-separate-memory": lambda: HostDevice(in_place="never", unified=False),
    "latch": open_latch,
    "latch-separate-memory": lambda: open_latch(unified=False),
}

if gpu_is_here():
    from asynctrt.devices.cuda import CudaDevice

    DEVICES["cuda"] = CudaDevice


def strict(device, spec):
    """A plan of the strict double, through the TensorRT adapter."""
    return TensorRTModel(double_plan(spec), device=device, flavour=StrictTensorRT(device))


def four_floats(**kw):
    """An engine whose rows are four floats in and four out."""
    return EngineSpec(inputs=(TensorIO("input", dims=(-1, 4)),), **kw)
