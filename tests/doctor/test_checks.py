"""What facts mean: a healthy machine has no finding that asks for anything, and each fault has its own."""

from dataclasses import replace

import pytest

from asynctrt.doctor.children import Ending, ProbeOutcome
from asynctrt.doctor.findings import SICK, Level
from tests.doctor.support import (
    ENGINE,
    GPU,
    HEALTHY,
    MISSING,
    answered,
    crashed,
    driver,
    failed,
    find,
    package,
    report,
    without_gpu,
)

HUNG = ProbeOutcome(Ending.HUNG, said="it did not end within 60 s")
NO_FILE = "cannot open shared object file: No such file or directory"


def test_a_healthy_machine():
    made = report()
    assert {one.level for one in made.findings} == {Level.OK}
    assert made.status == 0
    assert {one.check for one in made.findings} >= {"driver", "python", "tensorrt", "engine"}


def test_a_machine_without_a_gpu_is_no_sick_one():
    made = without_gpu()
    assert {one.level for one in made.findings} == {Level.OK, Level.NOTE}
    assert find(made, "driver.missing")[0].level is Level.NOTE


def test_a_machine_without_a_gpu_that_is_asked_for_one():
    made = without_gpu(device="cuda:0")
    assert find(made, "driver.missing")[0].level is Level.ERROR
    assert made.status == SICK


def with_packages(**changes):
    return lambda: report(packages=changes)


E, W, N = Level.ERROR, Level.WARNING, Level.NOTE

FAULTS = [
    # The driver.
    ("driver.missing", E, lambda: report(driver=failed(f"OSError: libcuda.so.1: {NO_FILE}"))),
    ("driver.broken", E, lambda: report(driver=failed("OSError: libcuda.so.1: file too short"))),
    ("driver.broken", E, lambda: report(driver=crashed())),
    ("driver.broken", E, lambda: report(driver=HUNG)),
    ("driver.init", E, lambda: report(driver=driver(gpus=(), code=803, name="CUDA_ERROR_X"))),
    ("driver.init", E, lambda: report(driver=driver(gpus=(), code=4711))),
    ("driver.init", E, lambda: report(driver=driver(gpus=()))),
    ("driver.init", E, lambda: report(driver=driver(gpus=(), code=803), env={"CUDA_VISIBLE_DEVICES": "0"})),
    ("driver.old", E, lambda: report(driver=driver(version=11040), distributions={})),
    ("driver.old", E, lambda: report(driver=driver(version=12080))),
    ("driver.hidden", E, lambda: report(driver=driver(gpus=()), env={"CUDA_VISIBLE_DEVICES": ""})),
    ("driver.hidden", E, lambda: report(driver=driver(gpus=(), code=100), env={"CUDA_VISIBLE_DEVICES": "9"})),
    # Packages.
    ("tensorrt.missing", W, with_packages(tensorrt=MISSING)),
    ("tensorrt.mismatch", E, with_packages(tensorrt=package("11.4.0.106", told="10.13.3.9"))),
    ("tensorrt.broken", E, with_packages(tensorrt=crashed())),
    ("tensorrt.broken", E, with_packages(tensorrt=HUNG)),
    (
        "tensorrt.broken",
        E,
        with_packages(
            tensorrt=answered({"missing": False, "error": f"ImportError: libnvinfer.so.11: {NO_FILE}"})
        ),
    ),
    ("tensorrt.broken", E, with_packages(tensorrt=package("11.4.0.106", runtime_error="TypeError: nullptr"))),
    ("tensorrt.library", W, with_packages(tensorrt=package("11.4.0.106", library=None))),
    ("tensorrt.parts", E, lambda: report(distributions={"tensorrt-cu13-libs": "11.3.0.1"})),
    ("tensorrt.parts", E, lambda: report(distributions={"tensorrt-cu12-bindings": "11.4.0.106"})),
    ("tensorrt.gpu", E, lambda: report(driver=driver(gpus=({**GPU, "major": 7},)))),
    ("cuda_python", E, lambda: report(packages={"cuda.bindings.driver": MISSING})),
    ("cuda_python", E, lambda: report(packages={"cuda.bindings.driver": crashed()})),
    ("onnxruntime", N, with_packages(onnxruntime=MISSING)),
    ("onnxruntime", E, with_packages(onnxruntime=answered({"missing": False, "error": "ImportError: x"}))),
    ("onnxruntime", E, with_packages(onnxruntime=crashed())),
    ("onnxruntime.several", W, lambda: report(distributions={"onnxruntime-gpu": "1.32.0"})),
    (
        "onnxruntime.cuda",
        W,
        with_packages(
            onnxruntime=answered(
                {"version": "1", "providers": ["CUDA"], "cuda_error": f"libcudnn.so.9: {NO_FILE}"}
            )
        ),
    ),
    # Engines.
    ("engine.failed", E, lambda: report(engines={"cuda:0": failed("DeviceMemoryError: ...")})),
    ("engine.failed", E, lambda: report(engines={"host": crashed()})),
    ("engine.failed", E, lambda: report(engines={"cuda:0": HUNG})),
    ("engine.failed", E, lambda: report(engines={"cuda:0": replace(HUNG, value=ENGINE)})),
    ("engine.wrong", E, lambda: report(engines={"cuda:0": answered({**ENGINE, "is_right": False})})),
    ("workers", W, lambda: report(engines={"worker": failed("PermissionError: memfd_create")})),
    ("workers", W, lambda: report(engines={"worker": crashed()})),
    ("workers", W, lambda: report(engines={"worker": HUNG})),
    ("workers", W, lambda: report(engines={"worker": answered({**ENGINE, "is_right": False})})),
]


@pytest.mark.parametrize(("check", "level", "spoil"), FAULTS, ids=[f"{one[0]}-{one[1]}" for one in FAULTS])
def test_each_fault_has_its_finding(check, level, spoil):
    made = spoil()
    findings = find(made, check)
    assert level in {one.level for one in findings}
    assert made.status == (SICK if E in {one.level for one in made.findings} else 0)
    for one in made.findings:
        assert one.what
        # Whatever is not as it should be says what to do about it.
        assert bool(one.fix) == (one.level is not Level.OK), one


def test_a_driver_that_is_too_old_names_the_packages_that_need_more():
    brought = {"nvidia-cuda-runtime": "13.0.48", "nvidia-cuda-runtime-cu12": "12.9.79"}
    (finding,) = find(report(driver=driver(version=12080), distributions=brought), "driver.old")
    assert "supports CUDA 12.8" in finding.what
    assert "nvidia-cuda-runtime, tensorrt-cu13, tensorrt-cu13-bindings" in finding.what
    assert "nvidia-cuda-runtime-cu12" not in finding.what
    assert "-cu12" in finding.fix


def test_what_is_right_in_spite_of_appearances():
    assert not find(report(env={"CUDA_VISIBLE_DEVICES": "0"}), "driver.hidden")
    assert not find(report(distributions={"tensorrt-cu13": "11.4.0.106.post1"}), "tensorrt.parts")
    assert not find(report(distributions={"rapidocr-onnxruntime": "1.4.4"}), "onnxruntime.several")
    assert find(report(packages={"tensorrt": package("11.4.0.106", told="11.4.0")}), "tensorrt")
    assert {one.level for one in report(packages={"tensorrt_rtx": package("1.7.1.116")}).findings} == {
        Level.OK
    }
    assert HEALTHY.expects_gpu
