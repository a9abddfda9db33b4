"""What tests of servers share."""

import pytest

from asynctrt.serving import http


@pytest.fixture
def often(monkeypatch):
    """Look for timeouts five times as often, so that a test may have shorter ones and need not wait long.

    They are counted in looks, and the loop that looks is the clients' too: a pause of it counts once.
    """
    monkeypatch.setattr(http, "SWEEP_S", 0.05)
