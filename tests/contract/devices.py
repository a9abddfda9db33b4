"""All devices, for the contract suites."""

import numpy as np

from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.testing import LatchDevice
from tests.contract.plans import WAIT_S, AnySubject, RealSubject, plans_are_here
from tests.contract.waiting import WaitingDevice
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan
from tests.gpu.support import gpu_is_here
from tests.models import rows

__all__ = ["DEVICES", "WAIT_S", "WITH_PLANS", "RealSubject", "Subject", "four_floats", "strict", "subject_on"]


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
    "host-frees-wait": WaitingDevice,
    "latch": open_latch,
    "latch-separate-memory": lambda: open_latch(unified=False),
}

if gpu_is_here():
    from asynctrt.devices.cuda import CudaDevice

    DEVICES["cuda"] = CudaDevice

WITH_PLANS = ("plans",) if plans_are_here() else ()
"""What the suites run on besides the devices: the real TensorRT and its plans."""


def strict(device, spec, options=None):
    """A plan of the strict double, through the TensorRT adapter."""
    return TensorRTModel(double_plan(spec), device=device, flavour=StrictTensorRT(device), options=options)


def some_floats(count, **kw):
    """An engine whose rows are so many floats in and as many out."""
    return EngineSpec(inputs=(TensorIO("input", dims=(-1, count)),), **kw)


def four_floats(**kw):
    """An engine whose rows are four floats in and four out."""
    return some_floats(4, **kw)


class Subject(AnySubject):
    """A strict double and a model of it on one device."""

    is_real = False
    input, output = "input", "output"
    rows = staticmethod(rows)

    def __init__(self, device, *, double=None, options=None, floats=4, **kw):
        self.device = device
        self.double = double or StrictTensorRT(device)
        self.spec = some_floats(floats, **kw)
        self.options = options
        self.model = self.load()

    def load(self):
        """Open the plan once more."""
        plan = double_plan(self.spec)
        return TensorRTModel(plan, device=self.device, flavour=self.double, options=self.options)

    def compare(self, result, sent):
        """Check an answer."""
        for name, expected in self.spec.expected({"input": sent}).items():
            np.testing.assert_array_equal(result[name], expected)

    def close(self):
        self.double.release_hangs()
        self.model.close()


def subject_on(name, **spec):
    """Return a subject on a device of that name; on ``plans``, the real TensorRT with its plan."""
    if name == "plans":
        from asynctrt.devices.cuda import CudaDevice

        return RealSubject(CudaDevice(0))
    return Subject(DEVICES[name](), **spec)
