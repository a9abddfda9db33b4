"""What all tests share: the event loops, the two tiers, and Chromium.

Plain `pytest` runs the first tier. `pytest -m tier2` runs the second: what is slow, what needs more than the
`dev` extra brings, and what is tried once more on uvloop. A test belongs to it if it is marked so, if it uses
Chromium, or if it runs on uvloop and is not about what an event loop does (see `LOOPS` and `TRANSPORTS`).
"""

import gc
import logging
import os
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import WAIT_S, installed

ROOT = Path(__file__).parent
CHROMIUM = Path("/usr/bin/chromium")
LOOPS = ("_util/test_alarm.py", "runtime/completion", "runtime/test_interrupts.py", "runtime/test_jobs.py")
"""Tests of code that depends on how an event loop behaves: timers, threads, interrupts."""
SERVING = (
    *("asgi", "connection_fuzz", "credentials", "disconnect", "floods", "frames", "grpc_server", "hostile"),
    *("http", "lack", "large", "listener", "loop_delays", "low", "memory", "paced", "server", "signals"),
    "turns",
)
TOP = (
    *("batch_citizen", "batch_decorator", "client", "clients", "clients_unkind", "engine", "engine_unkind"),
    *("failures", "left_behind", "limits", "no_threads", "pipeline", "run_on"),
)
TRANSPORTS = (
    *("_util", "gpu", "loadtest", "testing"),
    *(f"contract/test_{name}.py" for name in ("blocking", "engine", "transports")),
    *(f"runtime/test_{name}.py" for name in ("driver", "driver_lost")),
    *(f"serving/test_{name}.py" for name in SERVING),
    *(f"test_{name}.py" for name in TOP),
    *(f"workers/test_{name}.py" for name in ("isolated_engine", "link", "messages", "pool", "tether")),
)
"""Tests of what uses a loop's sockets, pipes, threads or tasks: the second tier has them on uvloop too."""


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    """Run each coroutine test on asyncio and on uvloop."""
    return ("asyncio", {"use_uvloop": request.param})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Run more processes than there are cores: for half of its time a test waits for sockets and timers."""
    cores = len(os.sched_getaffinity(0))
    return cores + (cores + 1) // 2


@cache
def is_among(path, names):
    """Return whether a test's file is one of these, or lies in one of these folders."""
    return any(path.relative_to(ROOT).is_relative_to(name) for name in names)


def pytest_configure():
    """Let Python keep what it compiles, whatever the environment says: tests start a thousand processes."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the second tier, before pytest selects by markers; leave out repetitions that no loop changes."""
    kept, left_out = [], []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        on_uvloop = parameters.get("anyio_backend") and not is_among(item.path, LOOPS)
        if on_uvloop or "chromium" in item.fixturenames:
            item.add_marker(pytest.mark.tier2)
        repeats = on_uvloop and not is_among(item.path, TRANSPORTS)
        (left_out if repeats else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


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


def process_wide():
    """Return what a test must leave to the process as it was: another test, in any file, may depend on it."""
    return logging.getLogger("asynctrt").level, logging.root.manager.disable, sys.getswitchinterval()


@pytest.fixture(autouse=True, scope="module")
def _the_process_is_left_as_it_was():
    """Name the module whose tests change how the whole process logs or switches threads."""
    before = process_wide()
    yield
    after = process_wide()
    assert after == before, f"the log's levels, and the switch interval, were {before}, and are {after}"


@pytest.fixture
def little_reserve(monkeypatch):
    """Let contexts of TensorRT's double be created on a device with hardly any memory."""
    monkeypatch.setattr("asynctrt.backends.tensorrt.memory.RESERVE_NBYTES", 4096)


@pytest.fixture(scope="session")
def chromium():
    """Return the path of Chromium, of which tests expect something for as long as of anything else."""
    from playwright.async_api import expect

    expect.set_options(timeout=1000 * WAIT_S)
    return installed(CHROMIUM)
