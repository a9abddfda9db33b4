"""The whole way, with real probes on this machine: a fake driver, a hidden one, and what crashes or hangs."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import asynctrt
from asynctrt.backends.tensorrt_options import FLAVOURS
from asynctrt.doctor import SICK, conclude, diagnose
from asynctrt.doctor.children import Ending, ProbeOutcome
from asynctrt.doctor.facts import find_gpu_signs, gather
from asynctrt.errors import DeviceUnavailableError, OptionsError
from tests.doctor.support import compiled, find
from tests.doctor.test_probes import DRIVER, TENSORRT
from tests.gpu.support import gpu_is_here
from tests.models import double_model

ROOT = Path(__file__).parents[2]
WAIT_S = 50

no_gpu = pytest.mark.skipif(gpu_is_here(), reason="there is a GPU, so these are other findings")


def no_children(probe, *args, **_):
    return ProbeOutcome(Ending.FAILED, said=f"{probe} was not run")


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


def test_signs_of_gpus(tmp_path):
    for number, (vendor, kind) in enumerate(
        (("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000"))
    ):
        folder = tmp_path / f"sys/bus/pci/devices/{number}"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor)
        (folder / "class").write_text(kind)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert [*find_gpu_signs(tmp_path)] == [tmp_path / "dev/nvidia0", tmp_path / "sys/bus/pci/devices/0"]


def test_all_probes_fail_and_there_is_a_report_anyway():
    made = conclude(gather(timeout_s=1, ask=no_children))
    assert "error" in made.counts()
    assert "engine was not run" in find(made, "engine.failed")[0].what


def test_a_gpu_is_used_by_one_process_at_a_time_and_only_if_it_is_there():
    """In exclusive mode a second process is refused."""
    asked = {}

    def ask(probe, *args, **_):
        asked[(probe, *args)] = threading.get_ident()
        if probe == "driver":
            return ProbeOutcome(Ending.ANSWERED, {"version": 13000, "devices": gpus, "init": {"code": 0}})
        return no_children(probe)

    gpus = []
    gather(timeout_s=1, ask=ask)
    assert ("package", "tensorrt") in asked
    assert ("engine", "cuda:0") not in asked
    asked.clear()
    gpus = [{}, {}]
    gather(timeout_s=1, ask=ask)
    using = [("package", name, "runtime") for name in FLAVOURS] + [("engine", f"cuda:{n}") for n in range(2)]
    assert len({asked[one] for one in using}) == 1
    assert {("engine", "host"), ("engine", "worker"), ("package", "onnxruntime")} <= set(asked)


def run_doctor(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "asynctrt", "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        cwd=ROOT,
        env={**os.environ, **env},
    )


def doctor(*arguments, **env):
    """Run the command; return its status and its report."""
    done = run_doctor("--json", *arguments, **env)
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == done.returncode
    return done.returncode, {one["check"]: one for one in report["findings"]}


@no_gpu
def test_the_error_of_a_gpu_that_cannot_be_used_names_the_command():
    async def run():
        await asynctrt.open(double_model(), device="cuda:0")

    with pytest.raises(DeviceUnavailableError, match="asynctrt doctor --device cuda:0"):
        asyncio.run(run())


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
def test_a_driver_that_is_fake_and_packages_that_are_not_what_they_seem(tmp_path):
    compiled(tmp_path, "libcuda.so.1", DRIVER.replace("INIT", "803"))
    library = compiled(tmp_path, "libnvinfer.so.10", "int getInferLibMajorVersion() { return 9; }")
    (tmp_path / "tensorrt.py").write_text(TENSORRT.format(library=str(library)))
    status, found = doctor(
        "--device", "cuda:0", LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=f"{ROOT}:{tmp_path}"
    )
    assert status == SICK
    assert "libcuda does not fit the kernel's driver" in found["driver.init"]["what"]
    assert f"version 10.3.0.26, and the library is 9 ({library})" in found["tensorrt.mismatch"]["what"]
    assert found["engine.failed"]["what"].startswith("Copying to cuda:0 and back fails")


@no_gpu
@pytest.mark.tier2
def test_a_gpu_that_is_seen_and_cannot_be_used(tmp_path):
    compiled(tmp_path, "libcuda.so.1", DRIVER.replace("INIT", "0"))
    library = compiled(tmp_path, "libnvinfer.so.10", "int something;")
    for name in FLAVOURS:
        (tmp_path / f"{name}.py").write_text(TENSORRT.format(library=str(library)))
    status, found = doctor(LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert status == SICK
    assert "cuda:1 A made-up GPU (compute capability 9.None)" in found["driver"]["what"]
    assert "makes no runtime: TypeError: factory function returned" in found["tensorrt.broken"]["what"]
    assert found["engine.failed"]["what"].startswith("Copying to cuda:1 and back ")


@no_gpu
@pytest.mark.tier2
def test_a_gpu_that_a_variable_hides(tmp_path):
    compiled(tmp_path, "libcuda.so.1", DRIVER.replace("INIT", "100"))
    status, found = doctor("--device", "cuda:0", LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert status == SICK
    assert "CUDA_VISIBLE_DEVICES is '', and CUDA shows no GPU" in found["driver.hidden"]["what"]


@no_gpu
@pytest.mark.tier2
def test_a_driver_that_hangs(tmp_path):
    hangs = "#include <unistd.h>\n" + DRIVER.replace("return INIT;", "for (;;) pause();")
    compiled(tmp_path, "libcuda.so.1", hangs)
    status, found = doctor("--device", "cuda:0", "--timeout", "3", LD_LIBRARY_PATH=str(tmp_path))
    assert status == SICK
    assert "it did not end within 3 s" in found["driver.broken"]["what"]


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
    assert found["workers"]["what"].startswith("worker: opened in ")


@pytest.mark.tier2
def test_text_fits_a_terminal_and_bad_options_are_refused():
    done = run_doctor("--device", "tpu:0")
    assert done.returncode == 1
    assert "'tpu:0' is not a device" in done.stderr
    done = run_doctor("--device", "host", COLUMNS="80")
    assert done.returncode == 0, done.stdout
    assert all(len(line) <= 80 or " /" in f" {line.strip()}" for line in done.stdout.splitlines())


@pytest.mark.tier2
@pytest.mark.skipif(not gpu_is_here(), reason="needs a GPU")
def test_a_gpu_and_an_engine_on_it():
    status, found = doctor("--device", "cuda:0")
    assert status == 0, found
    assert found["driver"]["level"] == "ok"
    assert found["engine"]["what"].startswith("cuda:0: 64 MiB copied there and back in ")


@pytest.mark.tier2
@pytest.mark.skipif(not gpu_is_here(), reason="needs a GPU")
def test_a_gpu_that_a_variable_hides_from_its_driver():
    status, found = doctor("--device", "cuda:0", CUDA_VISIBLE_DEVICES="")
    assert status == SICK
    assert "CUDA_VISIBLE_DEVICES is ''" in found["driver.hidden"]["what"]


@pytest.mark.tier2
def test_ctrl_c_does_not_wait_for_a_probe_that_hangs(tmp_path):
    """A package that hangs when it is imported would hold up the end for a minute."""
    (tmp_path / "onnxruntime.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "asynctrt", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        # Shells start what runs in the background with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, b"Traceback" in err) == (130, b"", False)
