"""The probes themselves, on libraries and packages made for it: a driver, TensorRT, and broken ones."""

import os
import sys

import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.doctor.children import Ending, ask
from asynctrt.doctor.probes import driver, engine, package
from tests.doctor.support import compiled

WAIT_S = 20

DRIVER = """
#include <string.h>
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "A made-up GPU", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    if (attribute == 76) return 1;
    *value = 9;
    return 0;
}
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_OF_OURS"; return 0; }
"""


def asked(probe, *args, path, **env):
    return ask(probe, *args, timeout_s=WAIT_S, env={**os.environ, "LD_LIBRARY_PATH": str(path), **env})


@pytest.mark.parametrize("init", [0, 803])
def test_the_driver_and_its_devices(tmp_path, init):
    compiled(tmp_path, "libcuda.so.1", DRIVER.replace("INIT", str(init)))
    value = asked("driver", path=tmp_path).value
    assert value["version"] == 13000
    assert value["init"] == {"code": init, "name": "CUDA_ERROR_OF_OURS"}
    if init:
        assert value["devices"] == []
        return
    assert len(value["devices"]) == 2
    assert value["devices"][1] == {"name": "A made-up GPU", "major": 9, "minor": None}


TENSORRT = """
import ctypes
ctypes.CDLL({library!r})
__version__ = "10.3.0.26"

class Logger:
    ERROR = 1

    def __init__(self, level):
        pass

class Runtime:
    def __init__(self, logger):
        raise TypeError("factory function returned nullptr")
"""


def version_of(**parts):
    return "\n".join(f"int getInferLib{name}() {{ return {number}; }}" for name, number in parts.items())


@pytest.mark.parametrize(
    ("source", "version"),
    [
        (version_of(MajorVersion=10, MinorVersion=4, PatchVersion=0, BuildVersion=7), "10.4.0.7"),
        (version_of(Version=101303, MajorVersion=10, MinorVersion=13, PatchVersion=3), "10.13.3"),
        (version_of(Version=8601), "8.6.1"),
        ("", None),
    ],
)
def test_the_library_that_tensorrt_has_loaded(tmp_path, source, version):
    library = compiled(tmp_path / "lib s", "libnvinfer.so.10", f"int something;\n{source}")
    (tmp_path / "tensorrt.py").write_text(TENSORRT.format(library=str(library)))
    value = asked("package", "tensorrt", path="", PYTHONPATH=str(tmp_path)).value
    assert value == {
        "version": "10.3.0.26",
        "library": str(library),
        "library_version": version,
        "runtime_error": None,
    }


def test_a_runtime_of_tensorrt_is_made_only_if_asked_for(tmp_path):
    library = compiled(tmp_path, "libnvinfer.so.10", "int something;")
    (tmp_path / "tensorrt.py").write_text(TENSORRT.format(library=str(library)))
    value = asked("package", "tensorrt", "runtime", path="", PYTHONPATH=str(tmp_path)).value
    assert value["runtime_error"] == "TypeError: factory function returned nullptr"


ONNXRUNTIME = """
__version__ = "1.32.0"

def get_available_providers():
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]

def preload_dlls():
    print("noise")
"""


@pytest.mark.parametrize(
    ("provider", "error"),
    [
        ("int loads;", None),
        ("extern int Provider_GetHost(); int (*host)() = Provider_GetHost;", None),
        ("extern int cudnnCreate(); int (*create)() = cudnnCreate;", "undefined symbol: cudnnCreate"),
    ],
)
def test_onnxruntime_with_a_provider_for_cuda(tmp_path, provider, error):
    capi = tmp_path / "onnxruntime" / "capi"
    compiled(capi, "libonnxruntime_providers_cuda.so", provider)
    (capi.parent / "__init__.py").write_text(ONNXRUNTIME)
    value = asked("package", "onnxruntime", path="", PYTHONPATH=str(tmp_path)).value
    assert value["providers"][0] == "CUDAExecutionProvider"
    assert value["cuda_error"] is None if error is None else error in value["cuda_error"]


def test_a_package_that_is_missing_or_broken(tmp_path):
    assert ask("package", "no_such_package", timeout_s=WAIT_S).value["missing"]
    (tmp_path / "broken.py").write_text("import not_there_either")
    value = asked("package", "broken", path=tmp_path, PYTHONPATH=str(tmp_path)).value
    assert (value["missing"], value["error"]) == (
        False,
        "ModuleNotFoundError: No module named 'not_there_either'",
    )


def test_a_package_that_crashes_as_it_is_imported(tmp_path):
    source = "__attribute__((constructor)) void start() { *(volatile int *)8 = 1; }"
    library = compiled(tmp_path, "libnvinfer.so.10", source)
    (tmp_path / "tensorrt.py").write_text(TENSORRT.format(library=str(library)))
    outcome = asked("package", "tensorrt", path="", PYTHONPATH=str(tmp_path))
    assert (outcome.ending, outcome.said) == (Ending.CRASHED, "SIGSEGV")


def test_what_is_copied_to_a_gpu_comes_back():
    """On the host here, which takes the same way."""
    device = HostDevice()
    value = engine._copy(device)
    assert value["is_right"]
    assert device.memory().held_nbytes == 0
    device.close()


@pytest.mark.tier2
@pytest.mark.parametrize("name", ["host", "worker"])
def test_an_engine_on_the_host_and_in_a_worker(name):
    value = ask("engine", name, timeout_s=WAIT_S).value
    assert value["is_right"]
    assert set(value["ms"]) == {"opened", "answered"}


def test_probes_that_look_at_the_machine_need_no_other_package():
    """They say what is wrong even where a package is broken."""
    for module in (driver, package):
        names = {name.split(".")[0] for name in vars(module) if name in sys.modules}
        assert names <= set(sys.stdlib_module_names)
