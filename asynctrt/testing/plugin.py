"""Fixtures for pytest: an engine, a server, a latch. Your ``conftest.py`` provides the model.

::

    pytest_plugins = ["asynctrt.testing.plugin"]

    @pytest.fixture
    def asynctrt_model():
        return "model.onnx"

pytest does not load this plugin automatically: importing asynctrt takes a third of a second, and every run
of pytest in the environment would pay that.

The fixtures that open something are asynchronous. They work with anyio's plugin, which is installed with
asynctrt, and with pytest-asyncio in either mode.
"""

from collections.abc import AsyncGenerator, Callable, Generator
from importlib.util import find_spec
from typing import Any

import pytest

from asynctrt.engine import Engine
from asynctrt.errors import UsageError
from asynctrt.opening import open as open_engine
from asynctrt.testing.latch import LatchDevice


def _async_fixture(function: Callable[..., Any]) -> Any:
    if find_spec("pytest_asyncio") is None:
        return pytest.fixture(function)
    import pytest_asyncio  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

    return pytest_asyncio.fixture(function)


@pytest.fixture
def asynctrt_model() -> Any:
    """Return the model for :func:`asynctrt_engine`. Override this fixture in your ``conftest.py``.

    :raises UsageError: if it is not overridden.
    """
    raise UsageError(
        "the fixture asynctrt_engine has no model. Define a fixture `asynctrt_model` in conftest.py, or "
        "beside the test, that returns one: a path or a FunctionModel"
    )


@pytest.fixture
def asynctrt_options() -> dict[str, Any]:
    """Return the engine's options. Override this fixture to set some, such as ``max_rows``."""
    return {}


@pytest.fixture
def asynctrt_latch() -> Generator[LatchDevice, None, None]:
    """Return a device that holds batches. If a test uses both, the engine runs on it."""
    latch = LatchDevice()
    yield latch
    latch.open()


@pytest.fixture
def asynctrt_device(request: pytest.FixtureRequest, asynctrt_model: Any) -> Any:
    """Return the engine's device: the latch if the test uses it, or the model's device, or the host."""
    if "asynctrt_latch" in request.fixturenames:
        return request.getfixturevalue("asynctrt_latch")
    return getattr(asynctrt_model, "device", "host")


@_async_fixture
async def asynctrt_engine(
    asynctrt_model: Any, asynctrt_device: Any, asynctrt_options: dict[str, Any]
) -> AsyncGenerator[Engine, None]:
    """Return an open engine, which is closed after the test. Batches that a latch still holds run first."""
    async with open_engine(asynctrt_model, device=asynctrt_device, **asynctrt_options) as engine:
        yield engine
        if isinstance(asynctrt_device, LatchDevice):
            asynctrt_device.open()


@_async_fixture
async def asynctrt_server(asynctrt_engine: Engine, asynctrt_device: Any) -> AsyncGenerator[Any, None]:
    """Return a server for that engine on a free port. The model's name is "model".

    After the test, batches that a latch still holds run first, because closing the server waits for them.
    """
    # Imported only here, because an application without a server does not need the extra `serve`.
    from asynctrt.testing.server import serve_locally  # noqa: PLC0415

    async with serve_locally({"model": asynctrt_engine}) as server:
        yield server
        if isinstance(asynctrt_device, LatchDevice):
            asynctrt_device.open()
