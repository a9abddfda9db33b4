"""A server goes on, or refuses, and ends on SIGTERM, when there is not enough of something.

Logs that nobody reads, streams that are closed, a full disk, too few descriptors.
"""

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import WAIT_S, free_port
from tests.models import double_onnx

pytestmark = [pytest.mark.tier2, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]
ROWS = {"inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def ask(port, path="/v2/models/double/infer", timeout=WAIT_S):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)) as client:
        client.request("POST" if path.endswith("infer") else "GET", path, json.dumps(ROWS))
        answer = client.getresponse()
        answer.read()
        return answer.status


def full_pipe():
    """Return the ends of a pipe in which there is no room."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    return reading, writing


@contextlib.contextmanager
def serving(folder, *flags, model=None, status=0, env=(), limits=None, **streams):
    """A server in a process of its own, which ends on SIGTERM with this status."""
    port = free_port()
    model = model or str(double_onnx(folder / "double.onnx"))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "asynctrt", "serve", model),
            *(f"--http-port={port}", "--no-grpc", *flags),
        ],
        env={**os.environ, **dict(env)},
        preexec_fn=limits,
        **streams,
    )
    try:
        end = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError):
                if ask(port, "/v2/health/ready", 5) == 200:
                    break
            assert process.poll() is None, process.returncode
            assert time.monotonic() < end
            time.sleep(0.05)
        yield process, port
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == status
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("flags", [(), ("--fronts=2",)], ids=["one", "fronts"])
def test_a_reader_that_stands_still(tmp_path, flags):
    reading, writing = full_pipe()
    flags = [*flags, "--log-level=debug", *(["--access-log=-"] if not flags else [])]
    try:
        with serving(tmp_path, *flags, stdout=writing, stderr=writing) as (_, port):
            assert {ask(port) for _ in range(300)} == {200}
    finally:
        os.close(reading)
        os.close(writing)


HANGS = """
import threading
from pathlib import Path
from tests.models import double_model
made = []
def model():
    if made:
        Path(__file__).with_name("hanging").touch()
        threading.Event().wait()
    made.append(double_model())
    return made[0]
"""


def test_a_model_that_a_client_loads_and_that_hangs(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    flags = ("--model-control", "--drain-timeout=0.5")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with (
        serving(tmp_path, *flags, model="double=hangs:model", status=1, env=env) as (_, port),
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as client,
    ):
        client.request("POST", "/v2/repository/models/double/load")
        end = time.monotonic() + WAIT_S
        while not (tmp_path / "hanging").exists():
            time.sleep(0.01)
            assert time.monotonic() < end
        assert ask(port) == 200


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_standard_streams_that_are_closed(tmp_path, closed):
    def limits():
        for number in closed:
            os.close(number)

    with serving(tmp_path, "--access-log=-", limits=limits) as (process, port):
        assert ask(port) == 200
        for number in closed:
            assert Path(f"/proc/{process.pid}/fd/{number}").readlink() == Path("/dev/null")


def test_a_full_disk(tmp_path):
    with (
        Path("/dev/full").open("wb") as full,
        serving(tmp_path, "--access-log=-", stdout=full, stderr=full) as (_, port),
    ):
        assert {ask(port) for _ in range(10)} == {200}


def test_an_access_log_that_cannot_be_written_is_told_of_once(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as said, serving(tmp_path, "--access-log=/dev/full", stderr=said) as (_, port):
        end = time.monotonic() + WAIT_S
        while "No space left" not in log.read_text():
            assert ask(port) == 200
            assert time.monotonic() < end
        for _ in range(20):
            ask(port)
    assert log.read_text().count("access log") == 1


def test_connections_beyond_the_descriptors_wait_and_are_told_of_once(tmp_path):
    def limits():
        resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))

    log = tmp_path / "log"
    with log.open("wb") as said, serving(tmp_path, limits=limits, stderr=said) as (_, port):
        end = time.monotonic() + WAIT_S
        while "80 files" not in log.read_text():  # It is ready before it has said everything.
            assert time.monotonic() < end
            time.sleep(0.05)
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            while "cannot accept" not in log.read_text():
                assert time.monotonic() < end
                time.sleep(0.05)
        while True:
            with contextlib.suppress(OSError):
                if ask(port, timeout=5) == 200:
                    break
            assert time.monotonic() < end
    assert len(re.findall("cannot accept", log.read_text())) <= 2


def test_descriptors_are_raised_to_what_connections_need(tmp_path):
    def limits():
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

    with serving(tmp_path, "--max-connections=100", limits=limits) as (process, port):
        soft, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft >= 300
        with contextlib.ExitStack() as stack:
            for _ in range(90):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert ask(port) == 200
