"""Opens the target of a load test. The only module that knows every kind of target."""

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from operator import attrgetter
from typing import Any

from asynctrt._util.process import add_cwd_to_path
from asynctrt.core.loading import is_attribute, name_of
from asynctrt.engine import Engine
from asynctrt.errors import OptionsError, UsageError, show
from asynctrt.loadtest.local_targets import CallTarget, EngineTarget
from asynctrt.loadtest.targets import Call, Target, TargetSpec
from asynctrt.loadtest.tls import Tls
from asynctrt.opening import open as open_engine


@asynccontextmanager
async def opened(target: "TargetSpec | Engine | Target | Call") -> AsyncIterator[Target]:
    """Open a target, and at the end close whatever was opened for it.

    :raises UsageError: for an invalid target.
    :raises TargetError: if the target cannot be reached, or does not speak the expected protocol.
    :raises AsynctrtError: if an engine cannot be opened.
    """
    if isinstance(target, TargetSpec):
        made = await _open(target)
    elif isinstance(target, Engine):
        made = EngineTarget(target, owns=False)
    elif isinstance(target, Target):
        made = target
    elif callable(target):
        made = CallTarget(target)
    else:
        raise UsageError(
            f"the target must be a path, an address, an engine or an async function, not {show(target)}"
        )
    try:
        yield made
    finally:
        if made is not target:
            await made.aclose()


def find_modules(spec: TargetSpec) -> None:
    """Allow importing from the working directory if the target is a ``module:attribute``."""
    if is_attribute(spec.where):
        add_cwd_to_path()


def _coroutine_function(where: str) -> Call | None:
    """Return the coroutine function or async generator function ``module:name``; ``None`` if it is something
    else, such as a model."""
    module, _, name = where.partition(":")
    if not is_attribute(where):
        return None
    try:
        found: Any = attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return None  # Opening it as a model reports the error.
    return found if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found) else None


async def _open(spec: TargetSpec) -> Target:
    if spec.until_message is not None and not (spec.is_plain and spec.scheme in ("ws", "wss")):
        raise OptionsError(
            "until_message is for websockets that do not speak KServe: the end of any other answer is known"
        )
    if spec.tls != Tls() and spec.scheme not in ("https", "wss", "grpcs"):
        raise OptionsError(
            "ca, cert, key and insecure are for addresses with TLS: https://, wss:// and grpcs://"
        )
    if not spec.scheme:
        call = _coroutine_function(spec.where)
        if call is not None:
            return CallTarget(call)
        engine = await open_engine(spec.where, device=spec.device, options=spec.options)
        return EngineTarget(engine, owns=True, name=name_of(spec.where))
    # Import lazily, because each module needs a different optional dependency.
    if spec.is_plain:
        from asynctrt.loadtest.plain_target import open_plain_target  # noqa: PLC0415

        return await open_plain_target(spec)
    if spec.scheme in ("ws", "wss"):
        from asynctrt.loadtest.websocket_target import open_websocket_target  # noqa: PLC0415

        return await open_websocket_target(spec)
    if spec.scheme in ("grpc", "grpcs"):
        from asynctrt.loadtest.grpc_target import open_grpc_target  # noqa: PLC0415

        return await open_grpc_target(spec)
    from asynctrt.loadtest.http_target import open_http_target  # noqa: PLC0415

    return await open_http_target(spec)
