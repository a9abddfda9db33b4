"""Facts of a healthy machine with a GPU, to spoil one at a time; and libraries made to be broken."""

import shutil
import subprocess
from dataclasses import replace

from asynctrt.doctor.children import Ending, Outcome
from asynctrt.doctor.diagnosis import conclude
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.libraries import Candidate, SearchPath
from asynctrt.doctor.machine import Machine
from tests.helpers import needed

GIB = 1 << 30

MACHINE = Machine(
    kernel="6.8.0-48-generic",
    cores=16,
    usable_cores=16,
    quota_cores=None,
    throttled=0,
    memory_nbytes=128 * GIB,
    memory_limit_nbytes=64 * GIB,
    memory_used_nbytes=8 * GIB,
    oom_kills=0,
    shm_nbytes=16 * GIB,
    shm_free_nbytes=16 * GIB,
    memlock_nbytes=None,
    descriptors=1 << 20,
    tasks=None,
    clocksource="tsc",
    governors=("performance",),
    scaling_driver="acpi-cpufreq",
    gpus_on_the_bus=1,
    device_nodes=("/dev/nvidia0", "/dev/nvidiactl"),
    kernel_driver="580.95.05",
    mps_daemons=0,
)

GPU = {
    "name": "NVIDIA H200",
    "memory_nbytes": 140 * GIB,
    "major": 9,
    "minor": 0,
    "multiprocessors": 132,
    "integrated": 0,
    "compute_mode": 0,
}

TOLD = {
    "name": "NVIDIA H200",
    "uuid": "GPU-1",
    "free_nbytes": 138 * GIB,
    "total_nbytes": 140 * GIB,
    "mig": 0,
    "mig_parts": 0,
    "compute_mode": 0,
    "persistence": 1,
    "clock_mhz": 1980,
    "clock_max_mhz": 1980,
    "slowed": 0,
    "processes": 0,
    "mps_processes": 0,
    "remapped": [0, 0, 0, 0],
}

ENGINE = {
    "device": "cuda:0",
    "event_us": 6.0,
    "free_nbytes": 138 * GIB,
    "total_nbytes": 140 * GIB,
    "module_loading": "lazy",
    "engine": {"open_ms": 300.0, "answer_ms": 1.0, "is_right": True},
}

WORKER = {"open_ms": 600.0, "answer_ms": 1.0, "recovery_ms": 400.0, "is_right": True}


def answered(value):
    return Outcome(Ending.ANSWERED, value)


def raised(said):
    return Outcome(Ending.RAISED, said=said)


def crashed(said="SIGSEGV"):
    return Outcome(Ending.CRASHED, said=said)


def driver(version=13000, gpus=(GPU,), code=0, name=""):
    return answered({"version": version, "devices": list(gpus), "init": {"code": code, "name": name}})


def nvml(**changes):
    return answered({"through": "pynvml", "driver": "580.95.05", "gpus": [{**TOLD, **changes}]})


def package(version, library=None, **more):
    path = f"/site/tensorrt_libs/libnvinfer.so.{(library or version).split('.')[0]}"
    told = {"path": path, "version": library or version}
    return answered({"version": version, "place": "/site/x", "libraries": [path], "library": told, **more})


MISSING = answered({"missing": True, "error": "ModuleNotFoundError"})

HEALTHY = Facts(
    env={},
    device=None,
    machine=MACHINE,
    search_path=SearchPath((), (), ()),
    distributions={
        "tensorrt-cu13": "11.4.0.106",
        "tensorrt-cu13-bindings": "11.4.0.106",
        "tensorrt-cu13-libs": "11.4.0.106",
        "cuda-bindings": "13.0.1",
        "cuda-core": "1.0.0",
        "onnxruntime": "1.32.0",
    },
    libraries={
        "libcuda.so.1": answered({"path": "/lib/libcuda.so.1", "version": "13.0"}),
        "libcudart.so.13": answered({"path": "/cuda/libcudart.so.13", "version": "13.0"}),
        "libcudnn.so.9": answered({"path": "/cuda/libcudnn.so.9", "version": "9.14.0", "cudart": 13000}),
    },
    driver=driver(),
    nvml=nvml(),
    kernel_log=answered({"xids": {}}),
    packages={
        "tensorrt": package("11.4.0.106"),
        "tensorrt_lean": MISSING,
        "tensorrt_dispatch": MISSING,
        "tensorrt_rtx": MISSING,
        "onnxruntime": answered({"version": "1.32.0", "providers": ["CPUExecutionProvider"]}),
        "cuda.bindings.driver": answered({"version": None}),
    },
    engines={"host": answered({**ENGINE, "device": "host"}), "cuda:0": answered(ENGINE)},
    worker=answered(WORKER),
)


def report(**changes):
    """Return the report about a healthy machine with these facts changed; mappings are updated."""
    made = {}
    for name, value in changes.items():
        before = getattr(HEALTHY, name)
        if name == "machine":
            made[name] = replace(MACHINE, **value)
        elif isinstance(before, dict) and isinstance(value, dict):
            made[name] = {**before, **value}
        else:
            made[name] = value
    return conclude(replace(HEALTHY, **made))


def without_gpu(**changes):
    """Return the report about a machine without a GPU or driver."""
    said = "OSError: libcuda.so.1: cannot open shared object file: No such file or directory"
    machine = {"gpus_on_the_bus": 0, "device_nodes": (), "kernel_driver": None, **changes.pop("machine", {})}
    return report(
        **{
            "driver": raised(said),
            "nvml": answered({"through": "pynvml", "error": "NVMLError_LibraryNotFound"}),
            "engines": {"cuda:0": raised("DeviceUnavailableError")},
            **changes,
        },
        machine=machine,
    )


def files(folder, **contents):
    """Make files; return the folder. Names have two underlines for a point."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def found(*candidates):
    """Return a search path with candidates: pairs of a path and a source."""
    return SearchPath((), (), tuple(Candidate(path.name, path, source) for path, source in candidates))


def compiled(folder, name, source):
    """Compile C to a library; return its path."""
    needed(shutil.which("cc") is not None, "there is no C compiler: run .ci/packages")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    command = ["cc", "-shared", "-fPIC", "-O0", f"-Wl,-soname,{name}", "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, timeout=30)
    return path
