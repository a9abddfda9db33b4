"""Every coroutine test runs on asyncio and on uvloop."""

import contextlib
import gc
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return ("asyncio", {"use_uvloop": request.param})


@pytest.fixture(autouse=True, scope="module")
def _no_engine_is_forgotten():
    """A warning about an engine that was never closed belongs to the module that forgot it."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def chromium():
    """Where Chromium is; installed once if it is not there and may be."""
    if not Path(CHROMIUM).exists() and shutil.which("apt-get"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["apt-get", "install", "-y", "chromium"], capture_output=True, timeout=200, check=False
            )
    if not Path(CHROMIUM).exists():
        pytest.skip("there is no Chromium, and apt-get could not install it")
    return CHROMIUM
