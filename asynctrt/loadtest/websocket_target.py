"""The websocket of an asynctrt server as a load test's target. The model is described over HTTP."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import cycle
from typing import Any, Final

from asynctrt.client import Client, connect
from asynctrt.errors import ConnectionLostError, TargetError
from asynctrt.kserve.client import as_arrays
from asynctrt.loadtest.http_target import Pages, open_pages
from asynctrt.loadtest.kserve import Address, read_address
from asynctrt.loadtest.targets import SERVER_IN_FLIGHT, BatchCounters, Target, TargetSpec
from asynctrt.statistics import BatchTrace
from asynctrt.tensors import Array

CONNECTIONS: Final = 4
"""Number of websockets. A server reads at most 256 requests at once from each."""
IN_FLIGHT_MAX: Final = 1 << 20
"""Limit of each client, so high that only the load test limits the requests in flight."""


async def open_websocket_target(spec: TargetSpec) -> Target:
    """Open the model at ``ws://HOST:PORT/v2/models/NAME/ws``, or ``wss://`` with TLS.

    With ``/v2/ws``, ``spec`` names the model.

    :raises TargetError: if the server cannot be reached, or does not speak the protocol.
    :raises AsynctrtError: the server's refusal: an unknown model, or a missing or wrong token.
    """
    address = read_address(spec)
    about = Address(address.server.replace("ws", "http", 1), address.model, address.version)
    pages = await open_pages(about, spec.token)
    stack = AsyncExitStack()
    stack.push_async_callback(pages.aclose)
    try:
        url = f"{address.server}{pages.address.path}/ws"
        clients = []
        for _ in range(CONNECTIONS):
            client = connect(url, token=spec.token, max_in_flight=IN_FLIGHT_MAX, proxy=None)
            clients.append(await stack.enter_async_context(client))
        return WebsocketTarget(pages, clients, stack)
    except BaseException as error:
        await stack.aclose()
        if isinstance(error, ConnectionLostError):
            raise TargetError(str(error)) from error
        raise


class WebsocketTarget:
    """Send to one model over a few websockets in turn."""

    kind = "websocket"

    def __init__(self, pages: Pages, clients: list[Client], stack: AsyncExitStack) -> None:
        self.name = pages.address.model
        self.inputs = pages.inputs
        self.in_flight_max = SERVER_IN_FLIGHT
        self._pages = pages
        self._stack = stack
        self._turns = cycle([client.infer for client in clients])
        self._create_task = asyncio.get_running_loop().create_task

    def prepare(self, inputs: Mapping[str, Array], priority: int) -> Any:
        return as_arrays(inputs), priority

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        arrays, priority = prepared
        # The address names the model.
        return self._create_task(next(self._turns)("", arrays, priority=priority))

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        arrays: dict[str, Array] = answer
        return arrays

    async def batches(self) -> BatchCounters | None:
        return await self._pages.counters()

    def trace(self) -> list[BatchTrace]:
        return []

    async def aclose(self) -> None:
        await self._stack.aclose()
