"""Call a server from Python: over a websocket or HTTP, from coroutines or from threads.

::

    async with asynctrt.client.connect("ws://127.0.0.1:8000/v2/ws") as client:
        outputs = await client.infer("resnet", rows, timeout=0.5)

    with asynctrt.client.connect_blocking("http://127.0.0.1:8000") as client:
        outputs = client.infer("resnet", {"input": rows})

``asynctrt[client]`` installs its dependencies. :data:`JAVASCRIPT` is a client for browsers, with types beside
it.
"""

from pathlib import Path
from typing import Final

from asynctrt.client.balanced import records
from asynctrt.client.base import Client
from asynctrt.client.blocking import BlockingClient, connect_blocking
from asynctrt.client.connecting import connect
from asynctrt.client.persistence import NotConnectedError, RemoteError

__all__ = [
    "JAVASCRIPT",
    "BlockingClient",
    "Client",
    "NotConnectedError",
    "RemoteError",
    "connect",
    "connect_blocking",
    "records",
]

JAVASCRIPT: Final = Path(__file__).with_name("asynctrt.js")
"""A client for browsers: one module without dependencies. Serve it with your application's own files."""
