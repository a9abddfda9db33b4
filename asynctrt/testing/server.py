"""An asynctrt server for an application's own tests, on ports that the system picks."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from typing import Any

from asynctrt._util.validation import check_names
from asynctrt.engine import Engine
from asynctrt.opening import open as open_engine
from asynctrt.serving import Repository, Server, ServerSettings


class LocalServer:
    """A server that accepts connections from this machine only. :func:`serve_locally` makes it.

    :param server: the server itself, for everything that this class does not have.
    """

    def __init__(self, server: Server) -> None:
        self.server = server

    def __repr__(self) -> str:
        return f"<LocalServer {self.http_url}>"

    @property
    def http_url(self) -> str:
        """The server's address for HTTP, such as ``http://127.0.0.1:40001``."""
        return self.server.http_url

    @property
    def websocket_url(self) -> str:
        """The address of its websocket for all models, as ``asynctrt.client.connect`` takes it."""
        return f"ws{self.http_url.removeprefix('http')}/v2/ws"

    @property
    def grpc_target(self) -> str | None:
        """The server's address for gRPC as ``host:port``; ``None`` without ``grpc=True``."""
        return self.server.grpc_target


@asynccontextmanager
async def serve_locally(
    models: Mapping[str, Any], *, engine: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncGenerator[LocalServer, None]:
    """Serve models on free ports for as long as the ``async with`` lasts.

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
        yield LocalServer(await stack.enter_async_context(Server(repository)))
