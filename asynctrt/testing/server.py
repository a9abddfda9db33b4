"""An asynctrt server for an application's own tests, on ports that the system picks."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from typing import Any

from asynctrt._util.validation import check_names
from asynctrt.engine import Engine
from asynctrt.opening import open as open_engine
from asynctrt.serving import Repository, Server, ServerSettings


@asynccontextmanager
async def serve_locally(
    models: Mapping[str, Any], *, engine: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncGenerator[Server, None]:
    """Serve models on free ports, for this machine only, for as long as the ``async with`` lasts.

    ::

        async with serve_locally({"double": model}) as server:
            answer = httpx.get(f"{server.http_url}/v2/models/double")

    :param models: by name, open engines or anything that ``asynctrt.open`` takes.
    :param engine: the options of engines that this opens, including ``device``.
    :param settings: the server's settings (:class:`asynctrt.serving.ServerSettings`); gRPC is off by default.
    :raises OptionsError: if a setting is unknown.
    """
    check_names(settings, [field.name for field in fields(ServerSettings)], "setting")
    settings = {"http_port": 0, "grpc_port": 0, "grpc": False, "drain_timeout": 5.0} | settings
    async with AsyncExitStack() as stack:
        repository = Repository(ServerSettings(**settings))
        for name, model in models.items():
            opened = model
            if not isinstance(model, Engine):
                opened = await stack.enter_async_context(open_engine(model, **(engine or {})))
            repository.add(name, opened)
        yield await stack.enter_async_context(Server(repository))
