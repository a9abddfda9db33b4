"""Opens the target of a load test. The only module that knows every kind of target."""

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from importlib import import_module
from operator import attrgetter
from typing import Any

from asynctrt._util.process import add_cwd_to_path
from asynctrt._util.validation import changed
from asynctrt.core.loading import is_attribute, name_of
from asynctrt.engine import Engine
from asynctrt.errors import ConnectionLostError, OptionsError, TargetError, UsageError, show
from asynctrt.kserve.client import AnswerError
from asynctrt.loadtest.local_targets import CallTarget, EngineTarget
from asynctrt.loadtest.targets import Call, Target, TargetSpec
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


def _check(spec: TargetSpec, kind: str, *has_effect: str) -> None:
    """Raise :class:`OptionsError` for a part of the spec that has no effect on this kind of target."""
    allowed = {"where", "token", *has_effect}  # The environment may set a token for other targets.
    if spec.scheme in ("https", "wss", "grpcs"):
        allowed.add("tls")
    usual = TargetSpec(spec.where)
    given = [item.name for item in fields(spec) if getattr(spec, item.name) != getattr(usual, item.name)]
    shown = {"options": ", ".join(changed(spec.options)), "tls": "ca, cert, key or insecure"}
    for name in given:
        if name not in allowed:
            if name == "tls" and spec.scheme:
                kind = "an address without TLS, other than https://, wss:// and grpcs://"
            raise OptionsError(f"{shown.get(name, name)} cannot be set for {kind}: it would have no effect")


async def _open(spec: TargetSpec) -> Target:
    is_websocket = spec.scheme in ("ws", "wss")
    if not spec.scheme:
        call = _coroutine_function(spec.where)
        if call is not None:
            _check(spec, "a coroutine function")
            return CallTarget(call)
        _check(spec, "a model that is opened here", "device", "options")
        engine = await open_engine(spec.where, device=spec.device, options=spec.options)
        return EngineTarget(engine, owns=True, name=name_of(spec.where))
    if spec.is_plain and is_websocket:
        _check(spec, "a websocket that does not speak KServe", "headers", "body", "until_message")
    elif spec.is_plain:
        _check(spec, "an address that does not speak KServe", "headers", "body", "method")
    else:
        _check(spec, "a server's model", "headers")
    # Import lazily, because each module needs a different optional dependency.
    if spec.is_plain:
        from asynctrt.loadtest.plain_target import open_plain_target  # noqa: PLC0415

        return await open_plain_target(spec)
    target: Any
    if is_websocket:
        from asynctrt.loadtest.websocket_target import WebsocketTarget  # noqa: PLC0415

        target = WebsocketTarget(spec)
    elif spec.scheme in ("grpc", "grpcs"):
        from asynctrt.loadtest.grpc_target import GrpcTarget  # noqa: PLC0415

        target = GrpcTarget(spec)
    else:
        from asynctrt.loadtest.http_target import HttpTarget  # noqa: PLC0415

        target = HttpTarget(spec)
    try:
        await target.open()
    except BaseException as error:
        await target.aclose()
        if isinstance(error, ConnectionLostError | AnswerError):
            raise TargetError(str(error)) from error
        raise
    opened_target: Target = target
    return opened_target
