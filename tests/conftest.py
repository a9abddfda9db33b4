"""What all tests share: the event loops, the two tiers, and Chromium.

Plain `pytest` runs the first tier. `pytest -m tier2` runs the second: what is slow, what needs more than the
`dev` extra brings, and what is tried once more on uvloop. A test belongs to it if it is marked so, if it uses
Chromium, or if it runs on uvloop and is not about what an event loop does (see `LOOPS`).
"""

import gc
from pathlib import Path

import pytest

from tests.helpers import installed

ROOT = Path(__file__).parent
CHROMIUM = Path("/usr/bin/chromium")
LOOPS = (
    "contract/test_engine.py",
    "runtime",
    "serving/test_http.py",
    "serving/test_server.py",
    "_util/test_alarm.py",
    "test_engine.py",
)
"""Tests of code that depends on how an event loop behaves: timers, threads, sockets, cancellation."""


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    """Run each coroutine test on asyncio and on uvloop."""
    return ("asyncio", {"use_uvloop": request.param})


def pytest_addoption(parser):
    """Add `--ran`."""
    parser.addoption("--ran", type=Path, metavar="FILE", help="note there what passed on this machine")


def pytest_terminal_summary(terminalreporter, config):
    """Note what ran, if that was asked for."""
    if config.getoption("--ran"):
        # Not before it is needed: it looks for a GPU.
        from tests.ran import note

        note(config.getoption("--ran"), terminalreporter.stats)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what belongs to the second tier, before pytest selects by markers."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        path = item.path.relative_to(ROOT)
        again = parameters.get("anyio_backend") and not any(path.is_relative_to(one) for one in LOOPS)
        if again or "chromium" in item.fixturenames:
            item.add_marker(pytest.mark.tier2)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage while tests are imported and listed: there is next to none, in more and more."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Keep what importing the tests has made out of garbage collections, which are many here."""
    # Its plugin imports it in the end anyway, and it asks then who refers to trio's random numbers, which the
    # garbage collector does not say of what is frozen.
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_engine_is_forgotten():
    """Raise the warning about an engine that was never closed in the module that forgot it.

    What is left then is what tests have imported and what is cached: later collections need not look at it.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def little_reserve(monkeypatch):
    """Let contexts of TensorRT's double be created on a device with hardly any memory."""
    monkeypatch.setattr("asynctrt.backends.tensorrt.memory.RESERVE_NBYTES", 4096)


@pytest.fixture(scope="session")
def chromium():
    """Return the path of Chromium."""
    return installed(CHROMIUM)
