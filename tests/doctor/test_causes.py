"""For each cause that three pages of questions and answers about crashes name: what would have told it.

The pages ask why a program crashes on one line, why it fails once cuDNN is loaded, and why engines crash now
and then after an update. Most of their causes are findings of the doctor before anything runs. Those that lie
in a program's own code are typed errors when they happen.
"""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, double_plan
from tests.doctor.support import GIB, answered, driver, files, found, nvml, package, raised, report
from tests.models import double_model

ELF = b"\x7fELF"


def mixed_libraries(folder):
    first = files(folder / "a", libcudart__so__13=ELF + b"1") / "libcudart.so.13"
    second = files(folder / "b", libcudart__so__13=ELF + b"2") / "libcudart.so.13"
    return report(search_path=found((first, "LD_LIBRARY_PATH"), (second, "ldconfig")))


def broken_link(folder):
    (folder / "libcudnn.so.9").symlink_to(folder / "gone")
    return report(search_path=found((folder / "libcudnn.so.9", "ldconfig")))


def missing_dependency(folder):
    path = files(folder, libcudnn__so__9=ELF) / "libcudnn.so.9"
    said = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
    return report(
        search_path=found((path, "ldconfig")), libraries={"libcudnn.so.9": answered({"error": said})}
    )


def cudnn(version, cudart, **more):
    value = {"path": "/x/libcudnn.so.9", "version": version, "cudart": cudart}
    return report(libraries={"libcudnn.so.9": answered(value), **more})


FINDINGS = [
    # Why is PyTorch crashing CUDA on a specific line of code?
    ("reading or writing beyond memory", "driver.faults", lambda _: xid(31)),
    ("a kernel that was launched wrongly", "driver.faults", lambda _: xid(13)),
    ("too little memory on the GPU", "gpu.memory", lambda _: report(nvml=nvml(free_nbytes=1 << 20))),
    ("a driver that misbehaves", "driver.broken", lambda _: report(driver=raised("OSError: bad"))),
    ("faulty hardware, in its log", "driver.faults", lambda _: xid(48)),
    ("faulty hardware, in its memory", "gpu.hardware", lambda _: report(nvml=nvml(remapped=[0, 3, 1, 0]))),
    # What caused the failure after successfully loading libcudnn.so.7?
    ("a driver that is too old for CUDA", "runtime.newer", lambda _: report(driver=driver(version=12020))),
    ("two halves of a driver", "driver.init", lambda _: report(driver=driver(gpus=(), code=803))),
    ("a link of cuDNN that points nowhere", "library.link", broken_link),
    ("a search path with another version", "library.shadowed", mixed_libraries),
    ("a search path that lacks a library", "library.needs", missing_dependency),
    ("cuDNN for another toolkit", "cudnn.toolkit", lambda _: cudnn("9.1.0", 12040)),
    (
        "parts of two versions of cuDNN",
        "cudnn.mixed",
        lambda _: cudnn("9.1.0", 13000, **{"libcudnn_ops.so.9": answered({"path": "/y/libcudnn_ops.so.9"})}),
    ),
    ("no GPU to be seen", "driver.hidden", lambda _: report(driver=driver(gpus=()), env=HIDDEN)),
    # Why do CUDA engine loads/builds crash intermittently after TensorRT 7 upgrade?
    ("CUDA libraries from several places", "library.shadowed", mixed_libraries),
    (
        "a library of TensorRT from before the update",
        "tensorrt.mismatch",
        lambda _: report(packages={"tensorrt": package("11.4.0.106", library="10.3.0.26")}),
    ),
    (
        "an update that was done in part",
        "tensorrt.parts",
        lambda _: report(distributions={"tensorrt-cu13-libs": "10.3.0.26"}),
    ),
    (
        "a driver that is too old for TensorRT",
        "tensorrt.driver",
        lambda _: report(driver=driver(version=12020)),
    ),
    (
        "a GPU that the build does not know",
        "tensorrt.gpu",
        lambda _: report(packages={"tensorrt_rtx": package("1.7.1.116", capabilities=["SM89"])}),
    ),
    ("GPU memory near its end", "gpu.memory", lambda _: report(nvml=nvml(free_nbytes=9 * GIB))),
    ("memory of the container near its end", "container.memory", lambda _: used_up()),
    ("processes killed for memory", "container.oom", lambda _: report(machine={"oom_kills": 3})),
    ("too little CPU", "container.cpu", lambda _: report(machine={"quota_cores": 0.5})),
]

HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1"}


def xid(number):
    return report(kernel_log=answered({"xids": {f"{number} PCI:0000:01:00": 1}}))


def used_up():
    return report(machine={"memory_limit_nbytes": 8 * GIB, "memory_used_nbytes": 8 * GIB - 1})


@pytest.mark.parametrize(("cause", "check", "spoil"), FINDINGS, ids=[one[0] for one in FINDINGS])
def test_a_cause_has_its_finding(cause, check, spoil, tmp_path):
    assert not report().find(check) or {one.level for one in report().find(check)} == {"ok"}
    assert {one.level for one in spoil(tmp_path).find(check)} & {"warning", "error"}


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
