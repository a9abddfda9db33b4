"""For each cause that three pages of questions and answers about crashes name: what would have told it.

The pages ask why a program crashes on one line, why it fails once cuDNN is loaded, and why engines crash now
and then after an update. Many of their causes are findings of the doctor before anything runs. Those that lie
in a program's own code are typed errors when they happen.
"""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from tests.doctor.support import GIB, answered, driver, failed, find, nvml, package, report
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan
from tests.models import double_model

FINDINGS = [
    # Why is PyTorch crashing CUDA on a specific line of code?
    ("too little memory on the GPU", "gpu.memory", lambda: report(nvml=nvml(free_nbytes=1 << 20))),
    ("a driver that misbehaves", "driver.broken", lambda: report(driver=failed("OSError: bad"))),
    # What caused the failure after successfully loading libcudnn.so.7?
    ("a driver that is too old for CUDA", "driver.old", lambda: report(driver=driver(version=12020))),
    ("two halves of a driver", "driver.init", lambda: report(driver=driver(gpus=(), code=803))),
    ("a provider that lacks cuDNN", "onnxruntime.cuda", lambda: without("libcudnn.so.9")),
    ("no GPU to be seen", "driver.hidden", lambda: report(driver=driver(gpus=()), env=HIDDEN)),
    # Why do CUDA engine loads/builds crash intermittently after TensorRT 7 upgrade?
    (
        "a library of TensorRT from before the update",
        "tensorrt.mismatch",
        lambda: report(packages={"tensorrt": package("11.4.0.106", told="10.3.0.26")}),
    ),
    (
        "an update that was done in part",
        "tensorrt.parts",
        lambda: report(distributions={"tensorrt-cu13-libs": "10.3.0.26"}),
    ),
    ("GPU memory near its end", "gpu.memory", lambda: report(nvml=nvml(free_nbytes=9 * GIB))),
    ("memory of the container near its end", "container.memory", lambda: used_up()),
    ("processes killed for memory", "container.oom", lambda: report(machine={"oom_kills": 3})),
    ("too little CPU", "container.cpu", lambda: report(machine={"quota_cores": 0.5})),
]

HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1"}


def without(library):
    said = f"{library}: cannot open shared object file: No such file or directory"
    provider = {"version": "1.32.0", "providers": ["CUDAExecutionProvider"], "cuda_error": said}
    return report(packages={"onnxruntime": answered(provider)})


def used_up():
    return report(machine={"memory_limit_nbytes": 8 * GIB, "memory_used_nbytes": 8 * GIB - 1})


@pytest.mark.parametrize(("cause", "check", "spoil"), FINDINGS, ids=[one[0] for one in FINDINGS])
def test_a_cause_has_its_finding(cause, check, spoil):
    assert not find(report(), check) or {one.level for one in find(report(), check)} == {"ok"}
    assert {one.level for one in find(spoil(), check)} & {"warning", "error"}


def infer(model, rows, **kwargs):
    async def run():
        async with asynctrt.open(model, **kwargs) as engine:
            return await engine.infer(rows)

    return asyncio.run(run())


def test_a_type_that_is_not_the_expected_one_is_refused_before_it_reaches_the_device():
    with pytest.raises(asynctrt.InputError, match="float32"):
        infer(double_model(), np.ones((2, 4), np.complex128))


def test_a_shape_that_is_not_the_expected_one_is_refused_before_it_reaches_the_device():
    with pytest.raises(asynctrt.InputError, match="shape"):
        infer(double_model(), np.ones((2, 5), np.float32))


def test_a_plan_that_was_built_elsewhere_is_refused_with_what_was_found():
    device = HostDevice()
    plan = double_plan(EngineSpec(), version="10.3.0.26")
    with pytest.raises(asynctrt.ModelError, match="built by version 10.3.0.26 of TensorRT, and this is"):
        TensorRTModel(plan, device=device, flavour=StrictTensorRT(device))
    device.close()
