"""The websocket of an asynctrt server as a load test's target. The model is described over HTTP."""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from itertools import cycle
from typing import Any, Final
from urllib.parse import urlsplit

from asynctrt.client import Client, connect
from asynctrt.errors import AsynctrtError
from asynctrt.kserve.client import as_arrays
from asynctrt.loadtest.http_target import Pages
from asynctrt.loadtest.kserve import Address, read_address
from asynctrt.loadtest.targets import ANSWER_NBYTES_MAX, BatchCounters, Headers, TargetSpec, headers_of
from asynctrt.tensors import Array

CONNECTIONS: Final = 4
"""Initial number of websockets."""
REQUESTS_MAX: Final = 200
"""Limit on the requests in flight per websocket; beyond it another is opened. A server reads at most 256 at
once from one."""

logger = logging.getLogger("asynctrt")


class WebsocketTarget:
    """Send to the model at ``ws://HOST:PORT/v2/models/NAME/ws`` over several websockets in turn.

    More websockets are opened as the requests in flight increase.
    """

    kind = "websocket"
    in_flight_max = None

    def __init__(self, spec: TargetSpec) -> None:
        address, headers = read_address(spec), headers_of(spec)
        about = Address(address.server.replace("ws", "http", 1), address.model, address.version)
        self.name = address.model
        self._open_one = _opener(spec, address, headers)
        self._pages = Pages(about, headers, spec.tls)
        self._clients: list[Client] = []
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self._pages.aclose)
        self._in_flight = 0
        self._growing: asyncio.Task[None] | None = None
        self._create_task = asyncio.get_running_loop().create_task

    async def open(self) -> None:
        """Read the server's description of the model, and open the first websockets."""
        await self._pages.read()
        self.inputs = self._pages.inputs
        for _ in range(CONNECTIONS):
            await self._add()

    async def _add(self) -> None:
        """Open one more websocket."""
        self._clients.append(await self._stack.enter_async_context(self._open_one()))
        self._turns = cycle([client.infer for client in self._clients])

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        return as_arrays(inputs)

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        self._in_flight += 1
        if self._in_flight > REQUESTS_MAX * len(self._clients) and self._growing is None:
            self._growing = self._create_task(self._grow())
        # The address names the model.
        sent = self._create_task(next(self._turns)("", prepared))
        sent.add_done_callback(self._ended)
        return sent

    def _ended(self, _: object) -> None:
        self._in_flight -= 1

    async def _grow(self) -> None:
        """Open one more websocket in the background. If that fails, keep using the existing ones."""
        try:
            await self._add()
        except AsynctrtError as error:
            logger.debug("another websocket could not be opened: %s", error)
        finally:
            self._growing = None

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        arrays: dict[str, Array] = answer
        return arrays

    async def batches(self) -> BatchCounters | None:
        return await self._pages.counters()

    async def aclose(self) -> None:
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.wait([self._growing])
        await self._stack.aclose()


def _opener(spec: TargetSpec, address: Address, headers: Headers) -> Callable[[], Client]:
    """Return a function that makes one websocket's client."""
    settings: dict[str, Any] = {"ssl": spec.tls.context()} if spec.scheme == "wss" else {}
    server = address.server
    host = next((value for name, value in headers if name.lower() == "host"), None)
    if host is not None:  # The library sends the address's host, and can connect to another one.
        parts = urlsplit(server)
        port = parts.port or (443 if spec.scheme == "wss" else 80)
        settings |= {"host": parts.hostname, "port": port}
        user, at, _ = parts.netloc.rpartition("@")
        server = f"{spec.scheme}://{user}{at}{host}{parts.path}"
    return partial(
        connect,
        f"{server}{address.path}/ws",
        additional_headers=[pair for pair in headers if pair[0].lower() != "host"],
        max_in_flight=sys.maxsize,  # Only the load test limits them.
        max_size=ANSWER_NBYTES_MAX,
        proxy=None,
        **settings,
    )
