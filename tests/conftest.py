"""Every coroutine test runs on asyncio and on uvloop."""

import gc

import pytest


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return ("asyncio", {"use_uvloop": request.param})


@pytest.fixture(autouse=True, scope="module")
def _no_engine_is_forgotten():
    """A warning about an engine that was never closed belongs to the module that forgot it."""
    yield
    gc.collect()
