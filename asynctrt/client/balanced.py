"""Call several servers as one: each call goes to the server that is expected to answer it first."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from math import exp2
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from asynctrt._util.loops import running_loop
from asynctrt.client.base import Client, OneServer
from asynctrt.client.persistence import DELAY_S_MIN, NotConnectedError, may_repeat, seconds_of
from asynctrt.errors import (
    AsynctrtError,
    ConnectionLostError,
    LifecycleError,
    QueueFullError,
    UsageError,
    show,
)
from asynctrt.tensors import Array

T = TypeVar("T")
logger = logging.getLogger("asynctrt.client")
Addresses = Callable[[], Awaitable[Sequence[str]]]

REFRESH_S: Final = 1.0
"""How often the addresses are asked for, and servers that failed or were draining are tried again."""
FULL_S: Final = 0.1
"""The assumed time to drain of a server whose queue was full."""
UNKNOWN_S: Final = 1.0
"""The assumed latency of a server that has not answered yet: it gets one call, or more if all are new."""
NEW_SHARE: Final = 0.1
"""The weight of the newest latency in a server's mean."""
FORGOTTEN_S: Final = 5.0
"""A latency counts half after this time, so that a server that was slow is tried again."""


def records(url: str) -> Addresses:
    """Return a function for :func:`connect` that looks up a name, such as a headless Service's.

    :raises UsageError: for an address with TLS, whose certificate has the name.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "ws") or not parts.hostname or not parts.port:
        raise UsageError(f"{show(url)} is not an address such as http://NAME:PORT, without TLS")

    async def look_up() -> list[str]:
        try:
            found = await running_loop().getaddrinfo(parts.hostname, parts.port, type=1)
        except OSError as error:
            raise ConnectionLostError(f"{parts.hostname!r} cannot be resolved: {error}") from error
        hosts = dict.fromkeys(str(where[0]) for *_, where in found)
        named = [f"[{host}]" if ":" in host else host for host in hosts]
        return [parts._replace(netloc=f"{host}:{parts.port}").geturl() for host in named]

    return look_up


class _Server:
    """One of the servers, as far as this client knows it."""

    __slots__ = ("_latency_s", "_since_s", "address", "client", "in_flight", "is_out")

    def __init__(self, address: str, client: OneServer) -> None:
        self.address = address
        self.client = client
        self.in_flight = 0
        self.is_out = False
        """Whether it is left out: it is gone, or draining."""
        self._latency_s = 0.0
        self._since_s = 0.0

    def answered(self, latency_s: float, now_s: float) -> None:
        """Take note of an answer."""
        known = self._latency_s
        self._latency_s = latency_s if not known else known + NEW_SHARE * (latency_s - known)
        self._since_s = now_s

    def expected_s(self, now_s: float) -> float:
        """Estimate when it would answer another call: after its queues, and after this client's calls."""
        if not self._latency_s:
            return self.in_flight * UNKNOWN_S
        passed_s = now_s - self._since_s
        ahead_s = max(0.0, self.client.drain_s - passed_s)
        return ahead_s + (self.in_flight + 1) * self._latency_s * exp2(-passed_s / FORGOTTEN_S)


class BalancedClient(Client):
    """A client of several servers, made by :func:`asynctrt.client.connect` for several addresses.

    Of two servers drawn at random, a call goes to the one that is expected to answer first, by what it said
    of its queues and by how long it takes. Servers that are draining or cannot be reached are left out. A
    call that such a server has not begun, or that is idempotent, is sent once more, to another.
    """

    def __init__(
        self,
        addresses: Sequence[str] | Addresses,
        connect: Callable[[str], OneServer],
        max_in_flight: int,
        attempts: int,
        *,
        idempotent: bool,
    ) -> None:
        super().__init__("several servers", max_in_flight, attempts, idempotent=idempotent)
        self._addresses = addresses
        self._connect = connect
        self._servers: list[_Server] = []
        self._refreshing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._why: AsynctrtError | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        known = ", ".join(server.client.url for server in self._servers)
        return f"<asynctrt.client.BalancedClient of {known or 'no server'}>"

    async def __aenter__(self) -> Self:
        if self._refreshing is not None or self._is_closed:
            raise UsageError("this client was already entered: call connect(...) again for a new one")
        self._enter()
        try:
            await self._refresh()
            if not self._servers:
                raise self._unreachable()
        except BaseException:
            await self.aclose()
            raise
        self._refreshing = asyncio.create_task(self._keep_fresh())
        return self

    async def aclose(self) -> None:
        """Close the connections to all servers. Idempotent."""
        self._origin.check(self)
        self._is_closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        servers, self._servers = self._servers, []
        await asyncio.gather(*[server.client.aclose() for server in servers], *self._closing)

    async def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
        idempotent: bool | None = None,
    ) -> dict[str, Array]:
        def ask(client: OneServer, left_s: float | None) -> Awaitable[dict[str, Array]]:
            return client.infer(
                model,
                inputs,
                version=version,
                outputs=outputs,
                timeout=timeout,
                priority=priority,
                deadline=left_s,
            )

        is_idempotent = self._idempotent if idempotent is None else idempotent
        return await self._send(ask, deadline, is_idempotent=is_idempotent)

    async def metadata(
        self, model: str, *, version: str = "", deadline: float | None = None
    ) -> dict[str, Any]:
        def ask(client: OneServer, left_s: float | None) -> Awaitable[dict[str, Any]]:
            return client.metadata(model, version=version, deadline=left_s)

        return await self._send(ask, deadline, is_idempotent=True)

    async def _send(
        self,
        ask: Callable[[OneServer, float | None], Awaitable[T]],
        deadline: float | None,
        *,
        is_idempotent: bool,
    ) -> T:
        """Send a call until it is answered: once more at once, and then as often as ``attempts`` allows."""
        self._check_loop()
        began_s = now_s = running_loop().time()
        deadline = seconds_of("deadline", deadline)
        tries = 0
        while True:
            try:
                return await self._call(
                    ask, None if deadline is None else max(0.0, began_s + deadline - now_s), now_s
                )
            except NotConnectedError:  # That server is left out now.
                if not self._servers:
                    raise
            except AsynctrtError as error:
                tries += 1
                is_last = tries >= max(2, self._attempts) or self._is_closed
                if is_last or not may_repeat(error, is_idempotent=is_idempotent):
                    raise
            if tries > 1:
                await asyncio.sleep(DELAY_S_MIN)
            now_s = running_loop().time()

    async def _call(
        self, ask: Callable[[OneServer, float | None], Awaitable[T]], left_s: float | None, now_s: float
    ) -> T:
        """Send a call to one server."""
        server = self._choose(now_s)
        server.in_flight += 1
        try:
            found = await ask(server.client, left_s)
        except (ConnectionLostError, LifecycleError) as error:
            self._why = error
            self._leave_out(server)
            raise
        except QueueFullError:
            server.client.drain_s = max(server.client.drain_s, FULL_S)
            raise
        finally:
            server.in_flight -= 1
            if server.is_out and not server.in_flight:
                self._close(server)
        ended_s = running_loop().time()
        server.answered(ended_s - now_s, ended_s)
        if server.client.is_draining:
            self._leave_out(server)
        return found

    def _choose(self, now_s: float) -> _Server:
        """Return the better one of two servers drawn at random."""
        servers = self._servers
        count = len(servers)
        if count < 2:
            if not count:
                raise self._unreachable()
            return servers[0]
        first = int(random.random() * count)  # noqa: S311  (not a secret)
        one, other = servers[first], servers[first - 1 - int(random.random() * (count - 1))]  # noqa: S311
        return one if one.expected_s(now_s) < other.expected_s(now_s) else other

    def _unreachable(self) -> NotConnectedError:
        if self._is_closed:
            return NotConnectedError("this client is closed")
        return NotConnectedError(f"none of the servers can be reached: {self._why or 'there is no address'}")

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._refresh()
            except Exception as error:  # The caller's own function may raise anything.
                logger.warning("the addresses of servers are not known, so the last ones stay: %r", error)

    async def _refresh(self) -> None:
        """Open clients of servers that are new or were left out; leave out any whose address is gone."""
        found = await self._addresses() if callable(self._addresses) else self._addresses
        for server in [one for one in self._servers if one.address not in found]:
            self._leave_out(server)
        known = {server.address for server in self._servers}
        await asyncio.gather(
            *[self._join(address) for address in dict.fromkeys(found) if address not in known]
        )

    async def _join(self, address: str) -> None:
        client = self._connect(address)
        try:
            await client.__aenter__()
        except ConnectionLostError as error:
            self._why = error
        else:
            self._servers.append(_Server(address, client))

    def _leave_out(self, server: _Server) -> None:
        """Send no more calls to a server. Its client is closed once its calls have ended."""
        if not server.is_out and not self._is_closed:
            self._servers.remove(server)
            server.is_out = True
            if not server.in_flight:
                self._close(server)

    def _close(self, server: _Server) -> None:
        task = asyncio.create_task(server.client.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
