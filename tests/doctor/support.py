"""Facts of a healthy machine with a GPU, to spoil one at a time; and libraries compiled for a test."""

import shutil
import subprocess
from dataclasses import replace

from asynctrt.doctor import conclude
from asynctrt.doctor.children import Ending, ProbeOutcome
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.machine import Machine
from tests.helpers import needed

GIB = 1 << 30

MACHINE = Machine(
    usable_cores=16,
    quota_cores=None,
    memory_nbytes=128 * GIB,
    memory_limit_nbytes=64 * GIB,
    memory_used_nbytes=8 * GIB,
    oom_kills=0,
    descriptors=1 << 20,
    gpu_signs=("/dev/nvidia0", "/dev/nvidiactl"),
)

GPU = {"name": "NVIDIA H200", "major": 9, "minor": 0, "compute_mode": 0}

TOLD = {
    "name": "NVIDIA H200",
    "free_nbytes": 138 * GIB,
    "total_nbytes": 140 * GIB,
    "mig": 0,
    "mig_parts": 0,
}

COPIED = {"is_right": True, "ms": {"copied": 5.0}}
ENGINE = {"is_right": True, "ms": {"opened": 300.0, "answered": 1.0}}


def answered(value):
    return ProbeOutcome(Ending.ANSWERED, value)


def failed(said):
    return ProbeOutcome(Ending.FAILED, said=said)


def crashed(said="SIGSEGV"):
    return ProbeOutcome(Ending.CRASHED, said=said)


def driver(version=13000, gpus=(GPU,), code=0, name=""):
    return answered({"version": version, "devices": list(gpus), "init": {"code": code, "name": name}})


def nvml(**changes):
    return answered({"gpus": [{**TOLD, **changes}]})


def package(version, told=None, **more):
    path = "/site/tensorrt_libs/libnvinfer.so"
    libraries = {"library": path, "library_version": told or version, "runtime_error": None}
    return answered({"version": version, **libraries, **more})


MISSING = answered({"missing": True, "error": "ModuleNotFoundError"})

HEALTHY = Facts(
    env={},
    device=None,
    python="3.11.7",
    machine=MACHINE,
    distributions={
        "numpy": "2.4.6",
        "tensorrt-cu13": "11.4.0.106",
        "tensorrt-cu13-bindings": "11.4.0.106",
        "tensorrt-cu13-libs": "11.4.0.106",
        "onnxruntime": "1.32.0",
    },
    driver=driver(),
    nvml=nvml(),
    packages={
        "tensorrt": package("11.4.0.106"),
        "tensorrt_lean": MISSING,
        "tensorrt_dispatch": MISSING,
        "tensorrt_rtx": MISSING,
        "onnxruntime": answered({"version": "1.32.0", "providers": ["CPUExecutionProvider"]}),
        "cuda.bindings.driver": answered({"version": "unknown"}),
    },
    engines={"host": answered(ENGINE), "cuda:0": answered(COPIED), "worker": answered(ENGINE)},
)


def find(made, check):
    """Return the findings of one check."""
    return [one for one in made.findings if one.check == check]


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
    machine = {"gpu_signs": (), **changes.pop("machine", {})}
    missing = "OSError: {}: cannot open shared object file: No such file or directory"
    return report(
        **{
            "driver": failed(missing.format("libcuda.so.1")),
            "nvml": failed(missing.format("libnvidia-ml.so.1")),
            "engines": {"cuda:0": failed("DeviceUnavailableError")},
            **changes,
        },
        machine=machine,
    )


def compiled(folder, name, source):
    """Compile C to a library; return its path."""
    needed(shutil.which("cc") is not None, "there is no C compiler: run .ci/packages")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    command = ["cc", "-shared", "-fPIC", "-O0", f"-Wl,-soname,{name}", "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, timeout=30)
    return path
