"""A server whose plans are being built: alive and not ready, and stopped at once."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.serving.test_server import ROOT, WAIT_S, call, command

pytestmark = pytest.mark.tier2

BUILDS = """
import os, sys
from pathlib import Path
import asynctrt
from asynctrt.backends.tensorrt import build_process
from tests.models import double_model

PROGRAM = '''
import os
from asynctrt.backends.tensorrt import build_process

def build(order, model, line):
    line.tell(log=[40, f"the builder is {os.getpid()}"])
    open(order["path"]).read()
    os._exit(0)

build_process._build = build
build_process.main()
'''
build_process.child_command = lambda _: [sys.executable, "-c", PROGRAM]

def model():
    try:
        build_process.build_in_process(b"", Path(__file__).with_name("pipe"), None, asynctrt.BuildOptions())
    except asynctrt.BuildError:
        return double_model()  # The builder ended, without a plan; that is all that it does here.
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "builds.py").write_text(BUILDS)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.fixture
def server(folder):
    env = {"PYTHONPATH": f"{folder}:{ROOT}"}
    with command(
        "double=builds:model", "--http-port", "0", "--no-grpc", "--log-level", "info", env=env
    ) as found:
        yield found


def is_running(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_build_ends_with_a_server_that_is_killed(server):
    process, line = server
    builder = int(line(r"the builder is (\d+)"))
    process.kill()
    process.wait(WAIT_S)
    end = time.monotonic() + WAIT_S
    while is_running(builder):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_is_ready_when_the_plan_is_built(server, folder):
    _, line = server
    line(r"the builder is (\d+)")
    (folder / "pipe").write_bytes(b"")
    url = line(r"HTTP.* (http://\S+)")
    assert call(url) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_builder", [False, True])
def test_a_signal_ends_the_build_and_the_server(server, number, to_builder):
    """Ctrl-C in a terminal comes to both, in either order."""
    process, line = server
    builder = int(line(r"the builder is (\d+)"))
    process.send_signal(number)
    if to_builder:
        os.kill(builder, number)
    line("stopped")
    assert process.wait(WAIT_S) == 0
    assert not is_running(builder)
