"""NVIDIA's own ``perf_analyzer``, the unmodified binary, measures ``asynctrt serve`` over HTTP and gRPC."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers import installed

pytestmark = pytest.mark.tier2
ROOT = Path(__file__).parent.parent.parent
FOLDER = Path.home() / ".cache" / "asynctrt" / "perf_analyzer-2.47.0"
BINARY = FOLDER / "tritonclient-2.47.0.data" / "data" / "bin" / "perf_analyzer"
LIBRARY = FOLDER / "nvidia" / "cuda_runtime" / "lib"
"""Where .ci/packages puts the program and the library that its wheel lacks."""
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


@pytest.fixture(scope="session")
def perf_analyzer():
    """Return the path of the program."""
    return installed(BINARY)


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
    done = subprocess.run(
        [binary, "-m", model, "-i", protocol, "-u", served.addresses[protocol], *map(str, flags)],
        env=os.environ | {"LD_LIBRARY_PATH": str(LIBRARY)},
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


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        ("nothing", (), "unknown model 'nothing'"),
        ("double", ("-x", 7), "unknown version '7' of 'double'"),
        (
            "text",
            ("--shape", "text:1", "--string-length", 33),
            "element 0 has 33 bytes; the model takes at most 32",
        ),
        ("double", ("--shared-memory", "system"), "this server does not implement"),
    ],
)
def test_what_the_server_does_not_have_is_said(perf_analyzer, served, protocol, model, flags, says):
    status, said, _ = analyze(perf_analyzer, served, protocol, model, "--request-count", 20, *flags)
    assert status != 0, said
    assert says in said
