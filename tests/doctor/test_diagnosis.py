"""The whole way, with real probes on this machine: a fake driver, a hidden one, and what crashes or hangs."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from asynctrt.doctor import SICK, Level, diagnose
from asynctrt.doctor.children import Ending, Outcome, ask
from asynctrt.doctor.diagnosis import conclude
from asynctrt.doctor.facts import gather
from asynctrt.errors import OptionsError
from tests.doctor.support import compiled
from tests.doctor.test_probes import DRIVER
from tests.gpu.support import gpu_is_here

ROOT = Path(__file__).parents[2]
WAIT_S = 50

no_gpu = pytest.mark.skipif(gpu_is_here(), reason="there is a GPU, so these are other findings")


def no_children(probe, *args, timeout_s, env):
    return Outcome(Ending.RAISED, said=f"{probe} was not run")


@pytest.mark.parametrize(
    ("device", "kwargs", "says"),
    [
        ("cuda", {}, "'cuda' is not a device"),
        ("cuda:x", {}, "is not a device"),
        (None, {"timeout": 0}, "timeout must be"),
    ],
)
def test_what_cannot_be_examined_is_refused_at_once(device, kwargs, says):
    with pytest.raises(OptionsError, match=says):
        diagnose(device, **kwargs)


def test_all_probes_fail_and_there_is_a_report_all_the_same():
    done = []
    facts = gather(timeout_s=1, ask=no_children, on_done=done.append, env={})
    made = conclude(facts)
    assert made.at(Level.ERROR)
    assert {"driver", "nvml", "kernel_log", "package onnxruntime"} <= set(done)


@pytest.mark.tier2
def test_one_library_that_crashes_does_not_hide_the_others(tmp_path):
    """They are loaded in one child, and one by one if that ends badly."""
    compiled(tmp_path, "libnvrtc.so.13", "__attribute__((constructor)) void start() { __builtin_trap(); }")
    compiled(tmp_path, "libcudart.so.13", "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }")

    def libraries_alone(probe, *args, timeout_s, env):
        run = ask if probe == "library" else no_children
        return run(probe, *args, timeout_s=timeout_s, env=env)

    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    facts = gather(timeout_s=WAIT_S, ask=libraries_alone, env=env)
    assert facts.libraries["libnvrtc.so.13"].ending is Ending.CRASHED
    assert facts.libraries["libcudart.so.13"].value["path"] == str(tmp_path / "libcudart.so.13")
    made = conclude(facts)
    assert "SIG" in made.find("library.crash")[0].what


def doctor(*arguments, limit=None, **env):
    """Run the command; return its status and its report."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "asynctrt", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        cwd=ROOT,
        env={**os.environ, **env},
        preexec_fn=limit,
    )
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == done.returncode
    return done.returncode, {one["check"]: one for one in report["findings"]}


@no_gpu
@pytest.mark.tier2
def test_this_machine_without_a_gpu_or_with_one_that_is_asked_for():
    status, found = doctor()
    assert (status, found["driver.missing"]["level"]) == (0, "note")
    assert found["engine"]["what"].startswith("host: ")
    status, found = doctor("--device", "cuda:0")
    assert (status, found["driver.missing"]["level"]) == (SICK, "error")


@no_gpu
@pytest.mark.tier2
def test_a_driver_that_is_fake_and_libraries_on_the_path_that_are_not_what_they_seem(tmp_path):
    real, other = tmp_path / "real", tmp_path / "other"
    compiled(real, "libcuda.so.1", DRIVER.replace("INIT", "803"))
    compiled(real, "libcudnn.so.9", "#include <stddef.h>\nsize_t cudnnGetCudartVersion() { return 9000; }")
    compiled(real, "libcudart.so.13", "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }")
    compiled(other, "libcudart.so.13", "int another;")
    (other / "libnvinfer.so.10").symlink_to("libnvinfer.so.10.99")
    (other / "libcublas.so.13").write_text("not a library")
    status, found = doctor("--device", "cuda:0", LD_LIBRARY_PATH=f"{real}:{other}:")
    assert status == SICK
    assert "libcuda and the driver in the kernel are of different versions" in found["driver.init"]["what"]
    assert str(real / "libcudart.so.13") in found["library.shadowed"]["what"]
    assert "libnvinfer.so.10.99, which is not there" in found["library.link"]["what"]
    assert str(other / "libcublas.so.13") in found["library.damaged"]["what"]
    assert "built for CUDA 9, and here is CUDA 13" in found["cudnn.toolkit"]["what"]
    assert "an empty entry" in found["path.relative"]["what"]
    assert found["engine.failed"]["what"].startswith("A minimal engine on cuda:0 fails")


@no_gpu
@pytest.mark.tier2
def test_a_gpu_that_a_variable_hides(tmp_path):
    compiled(tmp_path, "libcuda.so.1", DRIVER.replace("INIT", "100"))
    status, found = doctor("--device", "cuda:0", LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert status == SICK
    assert "CUDA_VISIBLE_DEVICES is '': CUDA shows 0" in found["driver.hidden"]["what"]


@no_gpu
@pytest.mark.tier2
def test_a_driver_that_hangs_and_little_memory_to_lock(tmp_path):
    compiled(
        tmp_path,
        "libcuda.so.1",
        "#include <unistd.h>\n" + DRIVER.replace("return INIT;", "for (;;) pause();"),
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    status, found = doctor(
        "--device",
        "cuda:0",
        "--timeout",
        "8",
        limit=limit,
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert status == SICK
    assert "it did not end within 8 s" in found["driver.broken"]["what"]
    assert "64 KiB" in found["system.memlock"]["what"]


MEMFD = """
#include <errno.h>
int memfd_create(const char *name, unsigned flags) { errno = EPERM; return -1; }
"""


@pytest.mark.tier2
def test_workers_in_a_sandbox_that_forbids_what_they_need(tmp_path):
    library = compiled(tmp_path, "nomemfd.so", MEMFD)
    _, found = doctor(LD_PRELOAD=str(library))
    assert found["workers"]["level"] == "warning"
    assert "memfd_create" in found["workers"]["what"]
    _, found = doctor()
    assert found["workers"]["what"].startswith("Worker processes: one opened in ")


@pytest.mark.tier2
def test_text_fits_a_terminal_and_bad_options_are_refused():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "asynctrt", "doctor", "--device", "tpu:0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "'tpu:0' is not a device" in done.stderr
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "asynctrt", "doctor", "--device", "host"],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stdout
    assert all(len(line) <= 80 or " /" in f" {line.strip()}" for line in done.stdout.splitlines())


@pytest.mark.tier2
@pytest.mark.skipif(not gpu_is_here(), reason="needs a GPU")
def test_a_gpu_and_an_engine_on_it():
    status, found = doctor("--device", "cuda:0")
    assert status == 0, found
    assert found["driver"]["level"] == "ok"
    assert found["gpu.memory"]["level"] == "ok"
    assert found["engine"]["what"].startswith("cuda:0: event seen after")


@pytest.mark.tier2
@pytest.mark.skipif(not gpu_is_here(), reason="needs a GPU")
def test_a_gpu_that_is_full_and_one_that_is_hidden():
    """The memory is taken by this process, which the probes share the GPU with."""
    from asynctrt.devices.cuda import CudaDevice

    device = CudaDevice(0)
    try:
        rest = device.allocate(device.memory().free_nbytes - (256 << 20))
        status, found = doctor("--device", "cuda:0")
        rest.close()
    finally:
        device.close()
    assert status == SICK
    assert found["gpu.memory"]["level"] == "error"
    status, found = doctor("--device", "cuda:0", CUDA_VISIBLE_DEVICES="")
    assert status == SICK
    assert "CUDA_VISIBLE_DEVICES is ''" in found["driver.hidden"]["what"]
