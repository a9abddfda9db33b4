"""The websocket of an asynctrt server as a load test's target. The model is described over HTTP."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from itertools import cycle
from typing import Any, Final
from urllib.parse import urlsplit

from asynctrt.client import Client, connect
from asynctrt.errors import AsynctrtError, ConnectionLostError, TargetError
from asynctrt.kserve.client import as_arrays
from asynctrt.loadtest.http_target import Pages, open_pages
from asynctrt.loadtest.kserve import Address, read_address
from asynctrt.loadtest.targets import ANSWER_NBYTES_MAX, BatchCounters, Target, TargetSpec, headers_of
from asynctrt.tensors import Array

CONNECTIONS: Final = 4
"""Initial number of websockets."""
REQUESTS_MAX: Final = 200
"""Limit on the requests in flight per websocket; beyond it another is opened. A server reads at most 256 at
once from one."""
IN_FLIGHT_MAX: Final = 1 << 20
"""Limit of each client. It is high enough for only the load test to limit the requests in flight."""

logger = logging.getLogger("asynctrt")


async def open_websocket_target(spec: TargetSpec) -> Target:
    """Open the model at ``ws://HOST:PORT/v2/models/NAME/ws``, or ``wss://`` with TLS.

    With the path ``/v2/ws``, ``spec`` names the model.

    :raises TargetError: if the server cannot be reached, or does not speak the protocol.
    :raises AsynctrtError: the server's refusal: an unknown model, or a missing or wrong token.
    """
    address = read_address(spec)
    about = Address(address.server.replace("ws", "http", 1), address.model, address.version)
    headers = headers_of(spec)
    pages = await open_pages(about, headers, spec.tls)
    stack = AsyncExitStack()
    stack.push_async_callback(pages.aclose)
    try:
        settings: dict[str, Any] = {"ssl": spec.tls.context()} if spec.scheme == "wss" else {}
        server = address.server
        host = next((value for name, value in headers if name.lower() == "host"), None)
        if host is not None:  # The library sends the address's host, and can connect to another one.
            parts = urlsplit(server)
            port = parts.port or (443 if spec.scheme == "wss" else 80)
            settings |= {"host": parts.hostname, "port": port}
            user, at, _ = parts.netloc.rpartition("@")
            server = f"{spec.scheme}://{user}{at}{host}{parts.path}"
        url = f"{server}{pages.address.path}/ws"
        clients = []
        open_one = partial(
            connect,
            url,
            additional_headers=[pair for pair in headers if pair[0].lower() != "host"],
            max_in_flight=IN_FLIGHT_MAX,
            max_size=ANSWER_NBYTES_MAX,
            proxy=None,
            **settings,
        )
        for _ in range(CONNECTIONS):
            client = open_one()
            clients.append(await stack.enter_async_context(client))
        return WebsocketTarget(pages, clients, stack, open_one)
    except BaseException as error:
        await stack.aclose()
        if isinstance(error, ConnectionLostError):
            raise TargetError(str(error)) from error
        raise


class WebsocketTarget:
    """Send to one model over several websockets in turn; open more as the requests in flight increase."""

    kind = "websocket"
    in_flight_max = None

    def __init__(
        self, pages: Pages, clients: list[Client], stack: AsyncExitStack, open_one: Callable[[], Client]
    ) -> None:
        self.name = pages.address.model
        self.inputs = pages.inputs
        self._pages = pages
        self._stack = stack
        self._clients = clients
        self._turns = cycle([client.infer for client in clients])
        self._in_flight = 0
        self._open_one = open_one
        self._growing: asyncio.Task[None] | None = None
        self._create_task = asyncio.get_running_loop().create_task

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
            self._clients.append(await self._stack.enter_async_context(self._open_one()))
            self._turns = cycle([client.infer for client in self._clients])
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
