"""What facts mean: a healthy machine has no finding that asks for anything, and each fault has its own."""

from dataclasses import replace

import pytest

from asynctrt.doctor.children import Ending, Outcome
from asynctrt.doctor.findings import SICK, Level
from tests.doctor.support import (
    ENGINE,
    GIB,
    GPU,
    HEALTHY,
    MISSING,
    WORKER,
    answered,
    crashed,
    driver,
    found,
    nvml,
    package,
    raised,
    report,
    without_gpu,
)

HUNG = Outcome(Ending.HUNG, said="it did not end within 60 s")
NO_FILE = "cannot open shared object file: No such file or directory"


def test_a_healthy_machine():
    made = report()
    assert {one.level for one in made.findings} == {Level.OK}
    assert (made.status(), made.status(strict=True)) == (0, 0)
    assert {one.check for one in made.findings} >= {
        "driver",
        "gpu.memory",
        "tensorrt",
        "engine",
        "cuda_python",
    }


def test_a_machine_without_a_gpu_is_no_sick_one():
    made = without_gpu()
    assert made.status(strict=True) == 0
    assert made.find("driver.missing")[0].level is Level.NOTE
    assert made.find("engine.gpu")[0].level is Level.UNKNOWN


def test_a_machine_without_a_gpu_that_is_asked_for_one():
    made = without_gpu(device="cuda:0")
    assert made.find("driver.missing")[0].level is Level.ERROR
    assert made.status() == SICK


def with_machine(**changes):
    return lambda: report(machine=changes)


def with_gpu(**changes):
    return lambda: report(driver=driver(gpus=({**GPU, **changes},)))


def with_nvml(**changes):
    return lambda: report(nvml=nvml(**changes))


def with_packages(**changes):
    return lambda: report(packages=changes)


def with_env(**env):
    return lambda: report(env=env)


E, W, N, U = Level.ERROR, Level.WARNING, Level.NOTE, Level.UNKNOWN

FAULTS = [
    # The driver.
    ("driver.missing", E, lambda: report(driver=raised(f"OSError: libcuda.so.1: {NO_FILE}"))),
    ("driver.broken", E, lambda: report(driver=raised("OSError: libcuda.so.1: file too short"))),
    ("driver.broken", E, lambda: report(driver=crashed())),
    ("driver.broken", E, lambda: report(driver=HUNG)),
    ("driver.broken", E, lambda: report(driver=Outcome(Ending.GARBLED, said="its answer was b'\\x00'"))),
    ("driver.broken", E, lambda: report(driver=replace(driver(), ending=Ending.CRASHED))),
    ("driver.init", E, lambda: report(driver=driver(gpus=(), code=803, name="CUDA_ERROR_X"))),
    ("driver.init", E, lambda: report(driver=driver(gpus=(), code=4711))),
    ("driver.no_gpu", E, lambda: report(driver=driver(gpus=()))),
    ("driver.old", E, lambda: report(driver=driver(version=11040))),
    ("driver.hidden", E, lambda: report(driver=driver(gpus=()), env={"CUDA_VISIBLE_DEVICES": ""})),
    ("driver.hidden", E, lambda: report(driver=driver(gpus=(), code=100), env={"CUDA_VISIBLE_DEVICES": "9"})),
    (
        "driver.hidden",
        N,
        lambda: report(machine={"gpus_on_the_bus": 2}, nvml=raised("x"), env={"CUDA_VISIBLE_DEVICES": "1"}),
    ),
    ("driver.faults", W, lambda: report(kernel_log=answered({"xids": {"31 PCI:0000:01:00": 2}}))),
    ("driver.faults", U, lambda: report(kernel_log=raised("PermissionError: ..."))),
    ("device.missing", E, lambda: report(device="cuda:1")),
    # GPUs.
    ("gpu.management", U, lambda: report(nvml=answered({"error": "none can be imported"}))),
    ("gpu.management", U, lambda: report(nvml=HUNG)),
    ("gpu.memory", E, with_nvml(free_nbytes=100 << 20)),
    ("gpu.memory", W, with_nvml(free_nbytes=10 * GIB, processes=3)),
    ("gpu.mig", E, with_nvml(mig=1)),
    ("gpu.mig", N, with_nvml(mig=1, mig_parts=7)),
    ("gpu.persistence", N, with_nvml(persistence=0)),
    ("gpu.clocks", W, with_nvml(slowed=0x40, clock_mhz=345)),
    ("gpu.clocks", N, with_nvml(slowed=0x4)),
    ("gpu.hardware", W, with_nvml(remapped=[0, 1, 0, 0])),
    ("gpu.hardware", E, with_nvml(remapped=[0, 8, 1, 1])),
    ("gpu.exclusive", W, with_gpu(compute_mode=3)),
    ("gpu.prohibited", E, with_gpu(compute_mode=2)),
    ("gpu.mps", W, with_nvml(mps_processes=2)),
    ("gpu.mps", W, with_machine(mps_daemons=1)),
    ("gpu.mps", W, with_env(CUDA_MPS_PIPE_DIRECTORY="/tmp/mps")),
    ("gpu.mps_share", N, with_env(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="25")),
    ("cuda.lazy_loading", W, with_env(CUDA_MODULE_LOADING="EAGER")),
    ("cuda.lazy_loading", W, lambda: report(driver=driver(version=12010))),
    (
        "cuda.lazy_loading",
        W,
        lambda: report(engines={"cuda:0": answered({**ENGINE, "module_loading": "eager"})}),
    ),
    ("cuda.launch_blocking", W, with_env(CUDA_LAUNCH_BLOCKING="1")),
    ("cuda.connections", W, with_env(CUDA_DEVICE_MAX_CONNECTIONS="1")),
    # Packages.
    ("tensorrt.missing", W, with_packages(tensorrt=MISSING)),
    ("tensorrt.mismatch", E, with_packages(tensorrt=package("11.4.0.106", library="10.13.3.9"))),
    ("tensorrt.broken", E, with_packages(tensorrt=crashed())),
    ("tensorrt.broken", E, with_packages(tensorrt=HUNG)),
    (
        "tensorrt.broken",
        E,
        with_packages(
            tensorrt=answered({"missing": False, "error": f"ImportError: libnvinfer.so.11: {NO_FILE}"})
        ),
    ),
    ("tensorrt.library", W, with_packages(tensorrt=answered({"version": "11.4.0.106", "libraries": []}))),
    (
        "tensorrt.elsewhere",
        N,
        with_packages(tensorrt=answered({**package("11.4.0.106").value, "place": "/other/tensorrt"})),
    ),
    ("tensorrt.parts", E, lambda: report(distributions={"tensorrt-cu13-libs": "11.3.0.1"})),
    ("tensorrt.parts", E, lambda: report(distributions={"tensorrt-cu12-bindings": "11.4.0.106"})),
    ("tensorrt.gpu", E, with_gpu(major=7, minor=0)),
    ("tensorrt.gpu", W, with_packages(tensorrt_rtx=package("1.7.1.116", capabilities=["SM89", "SM120"]))),
    ("tensorrt.driver", E, lambda: report(driver=driver(version=12080))),
    ("cuda_python", E, lambda: report(packages={"cuda.bindings.driver": MISSING})),
    ("cuda_python", E, lambda: report(packages={"cuda.bindings.driver": crashed()})),
    ("cuda_python", N, lambda: report(driver=driver(version=12080))),
    ("onnxruntime", N, with_packages(onnxruntime=MISSING)),
    ("onnxruntime", E, with_packages(onnxruntime=answered({"missing": False, "error": "ImportError: x"}))),
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
    # The operating system.
    ("container.oom", W, with_machine(oom_kills=1)),
    ("container.memory", W, with_machine(memory_used_nbytes=60 * GIB)),
    ("container.cpu", W, with_machine(quota_cores=2.5, throttled=100)),
    ("system.cores", N, with_machine(usable_cores=1)),
    ("container.shm", W, with_machine(shm_nbytes=64 << 20, shm_free_nbytes=1 << 20)),
    ("container.shm", N, with_machine(shm_nbytes=64 << 20, shm_free_nbytes=64 << 20)),
    ("container.shm", N, with_machine(shm_nbytes=None)),
    ("system.memlock", W, lambda: report(machine={"memlock_nbytes": 65536}, engines={"cuda:0": raised("x")})),
    ("system.memlock", N, lambda: without_gpu(machine={"memlock_nbytes": 65536})),
    ("system.descriptors", N, with_machine(descriptors=1024)),
    ("system.processes", N, with_machine(tasks=100)),
    ("system.clocksource", W, with_machine(clocksource="hpet")),
    ("system.governor", W, with_machine(governors=("powersave",))),
    ("system.kernel", N, with_machine(kernel="3.10.0-1160.el7")),
    # Engines.
    ("engine.failed", E, lambda: report(engines={"cuda:0": raised("DeviceMemoryError: ...")})),
    ("engine.failed", E, lambda: report(engines={"host": crashed()})),
    ("engine.failed", E, lambda: report(engines={"cuda:0": HUNG})),
    ("engine.event", W, lambda: report(engines={"cuda:0": answered({**ENGINE, "event_us": 5000})})),
    (
        "engine.wrong",
        E,
        lambda: report(
            engines={"cuda:0": answered({**ENGINE, "engine": {**ENGINE["engine"], "is_right": False}})}
        ),
    ),
    ("workers", W, lambda: report(worker=raised("PermissionError: memfd_create"))),
    ("workers", W, lambda: report(worker=crashed())),
    ("workers", W, lambda: report(worker=HUNG)),
    ("workers", W, lambda: report(worker=answered({**WORKER, "is_right": False}))),
]


@pytest.mark.parametrize(("check", "level", "spoil"), FAULTS, ids=[f"{one[0]}-{one[1]}" for one in FAULTS])
def test_each_fault_has_its_finding(check, level, spoil):
    made = spoil()
    findings = made.find(check)
    assert level in {one.level for one in findings}
    assert made.status(strict=True) == (SICK if {one.level for one in made.findings} & {E, W} else 0)
    for one in made.findings:
        assert one.what
        # All that is not as it should be says why that matters, and what can be mended says how.
        assert bool(one.why) == (one.level is not Level.OK), one
        assert one.fix or one.level in (Level.OK, Level.UNKNOWN), one


def test_two_halves_of_a_driver(tmp_path):
    (tmp_path / "libcuda.so.570.1.2").write_bytes(b"\x7fELF")
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.570.1.2")
    path = found((tmp_path / "libcuda.so.1", "ldconfig"))
    (finding,) = report(search_path=path).find("driver.mismatch")
    assert "libcuda is 570.1.2" in finding.what
    assert "580.95.05" in finding.what
    assert finding.level is E
    assert not report(search_path=path, machine={"kernel_driver": "570.1.2"}).find("driver.mismatch")
    compat = tmp_path / "compat"
    compat.mkdir()
    (compat / "libcuda.so.1").symlink_to(tmp_path / "libcuda.so.570.1.2")
    (finding,) = report(search_path=found((compat / "libcuda.so.1", "LD_LIBRARY_PATH"))).find(
        "driver.mismatch"
    )
    assert finding.level is N


def test_what_is_right_in_spite_of_appearances():
    assert not report(env={"CUDA_VISIBLE_DEVICES": "0"}).find("driver.hidden")
    assert report(machine={"memlock_nbytes": 65536}).find("system.memlock")[0].level is Level.OK
    pstate = report(machine={"governors": ("powersave",), "scaling_driver": "intel_pstate"})
    assert pstate.find("system.governor")[0].level is Level.OK
    newer = with_packages(tensorrt_rtx=package("1.7.1.116", capabilities=["SM80", "SM90"]))()
    assert not newer.find("tensorrt.gpu")
    assert HEALTHY.expects_gpu
