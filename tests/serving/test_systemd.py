"""What a supervisor such as systemd is told, at a socket of either kind, or nobody."""

import os
import socket

import pytest

from asynctrt.errors import UsageError
from asynctrt.serving.systemd import notify_ready, passed_socket


@pytest.mark.parametrize("is_abstract", [False, True], ids=["file", "abstract"])
def test_a_supervisor_is_told(is_abstract, tmp_path, monkeypatch):
    name = f"asynctrt-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind("\0" + name if is_abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if is_abstract else name)
        notify_ready()
        assert supervisor.recv(100, socket.MSG_DONTWAIT) == b"READY=1"


def test_without_a_supervisor_nothing_is_told(monkeypatch, caplog):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_ready()
    assert not caplog.records


def test_a_supervisor_that_is_gone_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_ready()
    assert "NOTIFY_SOCKET" in caplog.text


def test_a_socket_for_another_process_or_none_is_not_taken(monkeypatch):
    monkeypatch.delenv("LISTEN_PID", raising=False)
    assert passed_socket() is None
    monkeypatch.setenv("LISTEN_PID", str(os.getppid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert passed_socket() is None


@pytest.mark.parametrize("count", ["2", "many"])
def test_one_socket_is_taken(monkeypatch, count):
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", count)
    with pytest.raises(UsageError, match="one ListenStream="):
        passed_socket()
