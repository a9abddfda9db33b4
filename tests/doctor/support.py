"""Facts of a healthy machine with a GPU, to spoil one at a time; and libraries compiled for a test."""

import shutil
import subprocess
from dataclasses import replace

from asynctrt.doctor import conclude
from asynctrt.doctor.children import Ending, ProbeOutcome
from asynctrt.doctor.facts import Facts
from tests.helpers import needed

GPU = {"name": "NVIDIA H200", "major": 9, "minor": 0}

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


def package(version, told=None, **more):
    path = "/site/tensorrt_libs/libnvinfer.so"
    libraries = {"library": path, "library_version": told or version, "runtime_error": None}
    return answered({"version": version, **libraries, **more})


MISSING = answered({"missing": True, "error": "ModuleNotFoundError"})

HEALTHY = Facts(
    env={},
    device=None,
    python="3.11.7",
    gpu_signs=("/dev/nvidia0", "/dev/nvidiactl"),
    distributions={
        "numpy": "2.4.6",
        "tensorrt-cu13": "11.4.0.106",
        "tensorrt-cu13-bindings": "11.4.0.106",
        "tensorrt-cu13-libs": "11.4.0.106",
        "onnxruntime": "1.32.0",
    },
    driver=driver(),
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
        if isinstance(before, dict) and isinstance(value, dict):
            made[name] = {**before, **value}
        else:
            made[name] = value
    return conclude(replace(HEALTHY, **made))


def without_gpu(**changes):
    """Return the report about a machine without a GPU or driver."""
    missing = "OSError: libcuda.so.1: cannot open shared object file: No such file or directory"
    return report(
        **{
            "driver": failed(missing),
            "engines": {"cuda:0": failed("DeviceUnavailableError")},
            "gpu_signs": (),
            **changes,
        }
    )


def compiled(folder, name, source):
    """Compile C to a library; return its path."""
    needed(shutil.which("cc") is not None, "there is no C compiler: run .ci/packages")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    command = ["cc", "-shared", "-fPIC", "-O0", f"-Wl,-soname,{name}", "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, timeout=30)
    return path
