"""Serve engines over sockets: KServe V2 over HTTP and gRPC, websockets, metrics, a dashboard.

As a server::

    async with Server(repository, ServerSettings(http_port=8000)) as server:
        await server.serve()

Or inside your ASGI application::

    app = Starlette(routes=[Mount("/kserve", kserve_app(engine))])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from asynctrt.serving.settings import ServerSettings

if TYPE_CHECKING:
    from asynctrt.serving.asgi import kserve_app
    from asynctrt.serving.disconnect import CancelOnDisconnect
    from asynctrt.serving.folder import ModelFolder
    from asynctrt.serving.repository import Repository
    from asynctrt.serving.server import Server

__all__ = [
    "CancelOnDisconnect",
    "ModelFolder",
    "Repository",
    "Server",
    "ServerSettings",
    "kserve_app",
]


MODULES: Final = {
    "CancelOnDisconnect": "disconnect",
    "ModelFolder": "folder",
    "Repository": "repository",
    "Server": "server",
    "kserve_app": "asgi",
}


def __getattr__(name: str) -> Any:
    """Import each part when it is used: an application without gRPC needs no ``grpcio``."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"asynctrt.serving.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return all public names, whether they have been imported or not."""
    return sorted({*globals(), *__all__})
