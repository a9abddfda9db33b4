"""examples/deploy/asynctrt.service: systemd accepts it, its times agree, and what it says to run is run."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.helpers import free_port
from tests.models import double_onnx

UNIT = Path(__file__).parent.parent / "examples" / "deploy" / "asynctrt.service"
CLOSING_S = 5
"""What stopping has to allow for after the server's own limits."""

pytestmark = [pytest.mark.tier2, pytest.mark.timeout(90)]


def values():
    """Return the unit's settings by name; none is given twice."""
    text = UNIT.read_text().replace("\\\n", " ")
    found = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_stopping_takes_longer_than_the_drain():
    unit = values()
    delay_s, drain_s = (
        float(re.search(rf"--{name}=(\d+)", unit["ExecStart"])[1])
        for name in ("drain-delay", "drain-timeout")
    )
    assert delay_s + drain_s + CLOSING_S <= float(unit["TimeoutStopSec"])
    assert unit["KillMode"] == "mixed"  # The server ends its workers itself, once they have answered.


def test_only_a_server_that_failed_is_started_again():
    unit = values()
    assert "--on-device-lost=exit" in unit["ExecStart"]  # With status 75.
    assert unit["Restart"] == "on-failure"


def test_systemd_accepts_it(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing, a part of systemd")
    program = Path(sys.executable).parent / "asynctrt"
    text = UNIT.read_text().replace("/opt/asynctrt/bin/asynctrt", str(program))
    copy = tmp_path / UNIT.name
    shutil.copy(UNIT.with_suffix(".socket"), tmp_path)
    for content, is_right in ((text, True), (text.replace("KillMode=mixed", "KillMode=gently"), False)):
        copy.write_text(content)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(copy), str(copy.with_suffix(".socket"))],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        # What it only ignores is a line that names the file, and no failure.
        assert (done.returncode == 0 and UNIT.name not in done.stderr) == is_right, done.stderr


@pytest.mark.parametrize("fronts", [1, 2])
def test_it_is_ready_when_its_models_are_loaded(tmp_path, fronts):
    assert values()["Type"] == "notify"
    double_onnx(tmp_path / "double.onnx")
    port = free_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(60)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "asynctrt", "serve", str(tmp_path / "double.onnx"), "--no-grpc"),
                *(f"--http-port={port}", f"--fronts={fronts}"),
            ],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
            stderr=subprocess.DEVNULL,
        )
        try:
            assert supervisor.recv(100) == b"READY=1"
            with urlopen(f"http://127.0.0.1:{port}/v2/health/ready") as answer:
                assert answer.status == 200
        finally:
            process.terminate()
            assert process.wait(30) == 0


def test_connections_wait_at_its_socket_while_it_restarts(tmp_path):
    double_onnx(tmp_path / "double.onnx")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, fd = listening.getsockname()[1], listening.fileno()
        serve = [sys.executable, "-m", "asynctrt", "serve", str(tmp_path / "double.onnx"), "--no-grpc"]
        code = (
            f"import os; os.dup2({fd}, 3); os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
            f"os.execv({sys.executable!r}, {serve!r})"
        )
        command = [sys.executable, "-c", code]
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                process = subprocess.Popen(command, pass_fds=(fd,), stderr=subprocess.DEVNULL)
                try:
                    client.settimeout(60)
                    assert client.recv(100).startswith(b"HTTP/1.1 200 ")
                finally:
                    process.terminate()
                    assert process.wait(30) == 0


def test_what_it_says_to_run_is_run(tmp_path):
    program, command, *arguments = values()["ExecStart"].split()
    assert (program, command) == ("/opt/asynctrt/bin/asynctrt", "serve")
    (tmp_path / "models" / "double" / "1").mkdir(parents=True)
    double_onnx(tmp_path / "models" / "double" / "1" / "model.onnx")
    (tmp_path / "tokens").write_text("secret\n")
    places = {
        "/srv/models": str(tmp_path / "models"),
        "--tokens-file=/etc/asynctrt/tokens": f"--tokens-file={tmp_path / 'tokens'}",
        "--device=cuda:0": "--device=host",
    }
    assert set(places) <= set(arguments)
    done = subprocess.run(
        [sys.executable, "-m", "asynctrt", "serve", *(places.get(one, one) for one in arguments), "--check"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 model on host" in done.stderr
