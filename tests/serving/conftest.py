"""What tests of servers share."""

import pytest

from asynctrt.serving import command, http


@pytest.fixture
def often(monkeypatch):
    """Look for timeouts five times as often, so that a test may have shorter ones and need not wait long.

    They are counted in looks, and the loop that looks is the clients' too: a pause of it counts once.
    """
    monkeypatch.setattr(http, "SWEEP_S", 0.05)


@pytest.fixture
def command_alone(monkeypatch):
    """Let ``command.serve`` run in this process without setting up the process's log, threads and paths."""
    for name in ("set_up_logging", "shorten_switch_interval", "add_cwd_to_path"):
        monkeypatch.setattr(command, name, lambda *_: None)
