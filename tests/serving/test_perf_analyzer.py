"""NVIDIA's own ``perf_analyzer``, the unmodified binary, measures ``asynctrt serve`` over HTTP and gRPC."""

import errno
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
VERSION = "2.47.0"
CACHE = Path(tempfile.gettempdir()) / f"asynctrt-perf-analyzer-{VERSION}"
WHEELS = (f"tritonclient=={VERSION}", "nvidia-cuda-runtime-cu12==12.9.79")
LIBRARIES = ("nvidia/cuda_runtime/lib", "usr/lib/x86_64-linux-gnu")
WAIT_S = 40

TEXT = """
from asynctrt.backends.function import FunctionModel
from asynctrt.tensors import TensorSpec

def echo(inputs, outputs):
    outputs["echo"][...] = inputs["text"]

def text_model():
    return FunctionModel(
        echo, inputs=TensorSpec("text", "S32", ("n",)), outputs=TensorSpec("echo", "S32", ("n",))
    )
"""
"""A module with a model whose rows are texts, any number of them."""

CLIENT = {
    "requests": r"Client: \n    Request count: (\d+)",
    "client_us": r"Avg (?:HTTP|gRPC) time: (\d+) usec",
    "inferences": r"Inference count: (\d+)",
    "executions": r"Execution count: (\d+)",
    "successes": r"Successful request count: (\d+)",
    "server_us": r"Avg request latency: (\d+) usec",
    "overhead_us": r"overhead (\d+) usec",
    "queue_us": r"queue (\d+) usec",
    "compute_input_us": r"compute input (\d+) usec",
    "compute_infer_us": r"compute infer (\d+) usec",
    "compute_output_us": r"compute output (\d+) usec",
}


def run(*command, seconds=10, **kw):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds, **kw)


def fetch(folder):
    """The binary from NVIDIA's wheel, and the two libraries that it does not bring, unpacked to a folder."""
    platforms = ("--platform", "manylinux1_x86_64", "--platform", "manylinux2014_x86_64")
    wheels = (*platforms, "--only-binary", ":all:", "--no-deps", "--dest", str(folder), *WHEELS)
    run(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *wheels, seconds=20)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
    next(folder.glob("*.data/data/bin/perf_analyzer")).chmod(0o755)
    try:
        run("apt-get", "download", "libb64-0d", cwd=folder)
    except subprocess.CalledProcessError:  # A fresh container has no list of packages.
        run("apt-get", "update")
        run("apt-get", "download", "libb64-0d", cwd=folder)
    run("dpkg", "-x", str(next(folder.glob("*.deb"))), str(folder))


def move(folder):
    """Make it the cache, whole, unless somebody else was faster."""
    try:
        folder.rename(CACHE)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


@pytest.fixture(scope="session")
def perf_analyzer():
    """The path of the binary."""
    return get_binary()


def get_binary():
    """The path of the binary. What runs at the same time may fetch it too; one of them wins."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("perf_analyzer is for Linux on x86-64")
    if not CACHE.exists():
        folder = Path(tempfile.mkdtemp(dir=CACHE.parent))
        try:
            fetch(folder)
            move(folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"perf_analyzer could not be fetched: {error} {getattr(error, 'stderr', None) or ''}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return next(CACHE.glob("*.data/data/bin/perf_analyzer"))


class Served:
    """``asynctrt serve`` in a process of its own."""

    def __init__(self, folder, *models):
        if not models:
            (folder / "texts.py").write_text(TEXT)
            models = ("double=tests.models:double_model", "text:3=texts:text_model")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asynctrt", "serve", *models, "--http-port", "0", "--grpc-port", "0"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addresses = {}
        bound = threading.Timer(WAIT_S, self.process.kill)
        bound.start()
        said = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.match(r"(HTTP|gRPC)\b.* (?:http://)?(\S+:\d+)$", line):
                self.addresses[found[1].lower()] = found[2]
            if line.startswith("metrics"):
                break
        bound.cancel()
        if len(self.addresses) < 2:
            self.process.kill()
        assert set(self.addresses) == {"http", "grpc"}, "".join(said)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Served(tmp_path_factory.mktemp("models"))
    try:
        yield server
    finally:
        status, said = server.stop()
    assert status == 0, said
    assert "Traceback" not in said


def analyze(binary, served, protocol, model, *flags):
    """Run it to its end: exit status, what it said, and the figures in that."""
    libraries = os.pathsep.join(str(CACHE / folder) for folder in LIBRARIES)
    done = subprocess.run(
        [binary, "-m", model, "-i", protocol, "-u", served.addresses[protocol], *map(str, flags)],
        env=os.environ | {"LD_LIBRARY_PATH": libraries},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    found = {name: re.search(pattern, done.stdout) for name, pattern in CLIENT.items()}
    figures = {name: int(match[1]) for name, match in found.items() if match}
    return done.returncode, done.stdout, figures


def check(figures, said, *, rows=1, slack):
    """The server counts what the client has seen but for requests at the windows' edges; times add up."""
    assert set(figures) == set(CLIENT), said
    assert abs(figures["successes"] - figures["requests"]) <= slack, said
    assert figures["inferences"] == rows * figures["successes"], said
    assert 0 < figures["executions"] <= figures["successes"], said
    parts = ("overhead_us", "queue_us", "compute_input_us", "compute_infer_us", "compute_output_us")
    # Each is rounded down to whole microseconds.
    assert abs(figures["server_us"] - sum(figures[name] for name in parts)) <= len(parts), said
    assert 0 < figures["server_us"] <= figures["client_us"], said


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_measurement(perf_analyzer, served, protocol, concurrency):
    """Three windows, by requests or by time, are averaged; they are stable whatever they are."""
    windows = ("--measurement-mode", "count_windows", "--measurement-request-count", 50)
    if concurrency == 1:
        windows = ("--measurement-mode", "time_windows", "--measurement-interval", 250)
    stable = ("--stability-percentage", 999, "--percentile", 50, "--max-trials", 3)
    status, said, figures = analyze(
        perf_analyzer, served, protocol, "double", "--concurrency-range", concurrency, *windows, *stable
    )
    assert status == 0, said
    assert figures["requests"] >= 50, said
    check(figures, said, slack=4 * concurrency)
    if concurrency == 1:
        # Nobody to share a batch with.
        assert figures["executions"] == figures["successes"], said


@pytest.mark.parametrize(
    ("protocol", "model", "rows", "flags"),
    [
        ("http", "double", 4, ("-b", 4, "--async")),
        ("http", "double", 1, ("--input-tensor-format", "json", "--output-tensor-format", "json")),
        ("http", "text", 1, ("-x", 3, "--shape", "text:2", "--string-length", 20)),
        ("grpc", "double", 4, ("-b", 4, "--streaming", "--async")),
    ],
    ids=["http-async", "http-json", "http-texts", "grpc-stream"],
)
def test_so_many_requests(perf_analyzer, served, protocol, model, rows, flags):
    """One window, of a number of requests that the client chooses."""
    status, said, figures = analyze(perf_analyzer, served, protocol, model, "--request-count", 60, *flags)
    assert status == 0, said
    assert figures["requests"] == 60, said
    check(figures, said, rows=rows, slack=4)


def test_requests_that_are_larger_than_a_batch(perf_analyzer, served):
    """Each is split in two, and is one request all the same."""
    status, said, figures = analyze(perf_analyzer, served, "http", "double", "-b", 65, "--request-count", 20)
    assert status == 0, said
    assert abs(figures["successes"] - 20) <= 4, said
    # The last look may come between the two parts of a request.
    assert figures["inferences"] - 65 * figures["successes"] in (0, 64, 1), said
    assert figures["executions"] - 2 * figures["successes"] in (0, 1), said


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        ("nothing", (), "there is no model 'nothing'"),
        ("double", ("-x", 7), "there is no version '7' of 'double'"),
        ("text", ("--shape", "text:1", "--string-length", 33), "element 0 has 33 bytes; the model takes 32"),
        ("double", ("--shared-memory", "system"), "a part of the protocol that this server does not have"),
    ],
)
def test_what_the_server_does_not_have_is_said(perf_analyzer, served, protocol, model, flags, says):
    status, said, _ = analyze(perf_analyzer, served, protocol, model, "--request-count", 20, *flags)
    assert status != 0, said
    assert says in said
