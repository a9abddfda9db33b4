"""The probes themselves, on libraries that are made for it: a driver, cuDNN, and ones that crash."""

import asyncio
import json
import os
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.host import HostDevice
from asynctrt.doctor.children import Ending, ask
from asynctrt.doctor.probes import engine, kernel_log, library, nvml
from tests.doctor.support import compiled

WAIT_S = 20

DRIVER = """
#include <string.h>
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "A made-up GPU", size); return 0; }
int cuDeviceTotalMem_v2(size_t *nbytes, int device) { *nbytes = 1 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    if (attribute == 16) return 1;
    *value = attribute == 75 ? 9 : 0;
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
    assert value["devices"][1] == {
        "name": "A made-up GPU",
        "memory_nbytes": 1 << 30,
        "major": 9,
        "minor": 0,
        "multiprocessors": None,
        "integrated": 0,
        "compute_mode": 0,
    }


def test_versions_and_files_of_libraries(tmp_path):
    compiled(
        tmp_path,
        "libcudnn.so.9",
        "#include <stddef.h>\nsize_t cudnnGetVersion() { return 91400; }"
        "size_t cudnnGetCudartVersion() { return 12040; }",
    )
    value = asked("library", json.dumps(["libcudnn.so.9"]), path=tmp_path).value["libcudnn.so.9"]
    assert value == {"path": str(tmp_path / "libcudnn.so.9"), "version": "9.14.0", "cudart": 12040}


def test_a_library_that_crashes_as_it_is_loaded(tmp_path):
    compiled(
        tmp_path, "libnvrtc.so.13", "__attribute__((constructor)) void start() { *(volatile int *)8 = 1; }"
    )
    outcome = asked("library", json.dumps(["libnvrtc.so.13"]), path=tmp_path)
    assert outcome.ending is Ending.CRASHED
    assert outcome.said.startswith("SIGSEGV, in File")


@pytest.mark.parametrize(
    ("stem", "number", "version"),
    [
        ("libcudart", 12080, "12.8"),
        ("libcuda", 13000, "13.0"),
        ("libcudnn", 8907, "8.9.7"),
        ("libcudnn", 91400, "9.14.0"),
        ("libnvinfer", 8601, "8.6.1"),
        ("libnvinfer", 101303, "10.13.3"),
    ],
)
def test_versions_that_are_one_number(stem, number, version):
    assert library._text(stem, number) == version


def test_a_package_that_is_missing_or_broken(tmp_path):
    assert ask("package", "no_such_package", timeout_s=WAIT_S).value["missing"]
    (tmp_path / "broken.py").write_text("import not_there_either")
    value = asked("package", "broken", path=tmp_path, PYTHONPATH=str(tmp_path)).value
    assert (value["missing"], value["error"]) == (
        False,
        "ModuleNotFoundError: No module named 'not_there_either'",
    )


def test_faults_in_the_log_of_the_kernel(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=python, Ch 00000008\n"
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=2\n6,1,2,-;usb: something else\n"
        "4,1,2,-;NVRM: Xid (PCI:0000:3c:00): 79, GPU has fallen off the bus.\n"
    )
    assert kernel_log.probe(str(log)) == {"xids": {"31 PCI:0000:3b:00": 2, "79 PCI:0000:3c:00": 1}}


@pytest.mark.parametrize("package", nvml.BINDINGS)
def test_the_questions_have_these_names_in_the_real_packages(package):
    module = import_module(package)
    assert [
        name for name in nvml.BINDINGS[package].values() if not callable(getattr(module, name, None))
    ] == []


class FakeNvml:
    """A GPU that tells some things and refuses others, as virtual ones do."""

    def __getattr__(self, name):
        def refuse(*args):
            raise RuntimeError("not supported")

        return refuse

    def nvmlSystemGetDriverVersion(self):
        return "580.95.05"

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(free=1, total=2, used=1)

    def nvmlDeviceGetMigMode(self, handle):
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index:
            raise RuntimeError("not found")
        return object()

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [1, 2]


def test_what_a_gpu_does_not_tell_is_left_open():
    told = nvml.read(nvml.Nvml(FakeNvml(), nvml.BINDINGS["pynvml"]))
    (gpu,) = told["gpus"]
    assert told["driver"] == "580.95.05"
    assert (gpu["free_nbytes"], gpu["total_nbytes"], gpu["mig"], gpu["mig_parts"]) == (1, 2, 1, 1)
    assert gpu["processes"] == 2
    assert gpu["name"] is gpu["persistence"] is gpu["remapped"] is gpu["clock_mhz"] is None


def test_the_engine_that_is_tried_on_a_gpu_is_right():
    """On the host here, where the double takes the same way."""
    device = HostDevice()
    rows = np.ones((3, 16), np.float32)
    model, expected = engine._double(device, (9, 0), rows)

    async def run():
        async with asynctrt.open(model, device=device, contexts=2) as opened:
            return await opened.infer(rows)

    result = asyncio.run(run())
    np.testing.assert_array_equal(result[model.outputs[0].name], expected)
    model.close()
    device.close()


@pytest.mark.tier2
def test_an_engine_on_the_host():
    value = ask("engine", "host", "1", timeout_s=WAIT_S).value
    assert value["engine"]["is_right"]
    assert value["event_us"] > 0


def test_probes_that_look_at_the_machine_need_no_other_package():
    """They tell what is wrong even where a package is broken."""
    for module in (kernel_log, library, nvml):
        names = {name.split(".")[0] for name in vars(module) if name in sys.modules}
        assert names <= set(sys.stdlib_module_names)
