"""Call several servers as one: each call goes to the server that is expected to answer it first."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from math import exp2
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from asynctrt._util.loops import running_loop
from asynctrt.client.base import Client, ClientSettings, OneServer
from asynctrt.client.persistence import NotConnectedError
from asynctrt.errors import (
    AsynctrtError,
    ConnectionLostError,
    DeviceLostError,
    LifecycleError,
    OverloadError,
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
"""The least time to drain that is assumed of a server that was too busy for a call."""
UNKNOWN_S: Final = 1.0
"""The assumed latency of a server that has not answered yet: it gets one call, or more if all are new."""
ANSWERS: Final = 10
"""How many of the latest answers count, roughly."""
FORGOTTEN_S: Final = 10.0
"""An estimate halves in this time without an answer, so that a server that was slow is tried again."""


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


class Latency:
    """How long a server's answers take, divided by the calls that this client had in flight there.

    For a server that takes one call after the other, that is the time of one call; for a server that batches,
    it balances the number of calls in flight.
    """

    def __init__(self) -> None:
        self._answers = 0
        self._mean_s = self._at_s = 0.0

    def note(self, latency_s: float, calls: int, now_s: float) -> None:
        """Take note of an answer.

        :param calls: the calls that were in flight when its own was sent.
        """
        self._answers = min(self._answers + 1, ANSWERS)
        self._mean_s += (latency_s / (calls + 1) - self._mean_s) / self._answers
        self._at_s = now_s

    def note_unanswered(self, waited_s: float, calls: int, now_s: float) -> None:
        """Take note of a call whose caller waited for this long, and then gave up."""
        if waited_s > self.expected_s(calls, now_s):
            self.note(waited_s, calls, now_s)

    def expected_s(self, calls: int, now_s: float) -> float:
        """Estimate how long the answer to another call would take."""
        if not self._answers:
            return calls * UNKNOWN_S
        return (calls + 1) * self._mean_s * exp2((self._at_s - now_s) / FORGOTTEN_S)


class _Server:
    """One of the servers, as far as this client knows it."""

    __slots__ = ("address", "client", "free_s", "in_flight", "is_out", "latency")

    def __init__(self, address: str, client: OneServer) -> None:
        self.address = address
        self.client = client
        self.in_flight = 0
        self.is_out = False
        """Whether it is left out: it is gone or draining, or has lost its device."""
        self.latency = Latency()
        self.free_s = 0.0
        """When its queues will be empty, by what it said last."""

    def expected_s(self, now_s: float) -> float:
        """Estimate when it would answer another call: after its queues, and after this client's calls."""
        expected_s = self.latency.expected_s(self.in_flight, now_s)
        return expected_s if self.free_s <= now_s else expected_s + self.free_s - now_s


def sooner_of_two(servers: Sequence[_Server], now_s: float) -> _Server:
    """Return the one of two servers drawn at random that is expected to answer first."""
    count = len(servers)
    first = int(random.random() * count)  # noqa: S311  (not a secret)
    if count == 1:
        return servers[first]
    one, other = servers[first], servers[first - 1 - int(random.random() * (count - 1))]  # noqa: S311
    return one if one.expected_s(now_s) < other.expected_s(now_s) else other


class BalancedClient(Client):
    """A client of several servers, made by :func:`asynctrt.client.connect` for several addresses.

    Of two servers drawn at random, a call goes to the one that is expected to answer first, by what it said
    of its queues and by how long it takes. Servers that are draining, cannot be reached or have lost their
    device are left out, while there are others. A call that such a server has not begun, or that is
    idempotent, is sent once more, to another.
    """

    _delay_s = 0.0

    def __init__(
        self,
        addresses: Sequence[str] | Addresses,
        connect: Callable[[str], OneServer],
        settings: ClientSettings,
    ) -> None:
        super().__init__("several servers", settings)
        self._attempts = max(2, settings.attempts)
        self._addresses = addresses
        self._connect = connect
        self._servers: list[_Server] = []
        self._open: set[_Server] = set()
        """The servers whose clients are open: these, and those left out that still have calls in flight."""
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
        self._servers = []
        for server in list(self._open):
            self._close(server)
        await asyncio.gather(*self._closing)

    @property
    def _is_over(self) -> bool:
        return self._is_closed

    # These two return another coroutine instead of awaiting it, which each call would pay for.

    def _infer(self, *request: Any) -> Coroutine[Any, Any, dict[str, Array]]:
        return self._ask(lambda client: client._infer(*request))

    def _describe(self, model: str, version: str) -> Coroutine[Any, Any, dict[str, Any]]:
        return self._ask(lambda client: client._describe(model, version))

    async def _ask(self, ask: Callable[[OneServer], Awaitable[T]]) -> T:
        """Send a call to one server; while it cannot be reached, to the next."""
        now_s = running_loop().time
        while True:
            began_s = now_s()
            server = self._choose(began_s)
            calls = server.in_flight
            server.in_flight += 1
            try:
                found = await ask(server.client)
                break
            except (ConnectionLostError, LifecycleError, DeviceLostError) as error:
                self._why = error
                self._avoid(server)
                if not (self._servers and server.is_out and isinstance(error, NotConnectedError)):
                    raise
            except OverloadError:
                server.free_s = now_s() + max(server.client.drain_s, FULL_S)
                raise
            except asyncio.CancelledError:
                # Its deadline passed, perhaps because the server hangs: the answer takes at least this long.
                server.latency.note_unanswered(now_s() - began_s, calls, now_s())
                raise
            finally:
                server.in_flight -= 1
                if server.is_out and not server.in_flight:
                    self._close(server)
        ended_s = now_s()
        server.free_s = ended_s + server.client.drain_s
        server.latency.note(ended_s - began_s, calls, ended_s)
        if server.client.is_draining:
            self._avoid(server)
        return found

    def _choose(self, now_s: float) -> _Server:
        if not self._servers:
            raise self._unreachable()
        return sooner_of_two(self._servers, now_s)

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
        # Wait for all: one that still opened afterwards would be opened twice, or never closed.
        joined = await asyncio.gather(
            *[self._join(address) for address in dict.fromkeys(found) if address not in known],
            return_exceptions=True,
        )
        for error in filter(None, joined):
            raise error

    async def _join(self, address: str) -> None:
        client = self._connect(address)
        try:
            await client.__aenter__()
        except ConnectionLostError as error:
            self._why = error
        else:
            server = _Server(address, client)
            self._servers.append(server)
            self._open.add(server)

    def _avoid(self, server: _Server) -> None:
        """Leave out a server, unless it is the only one and may still answer."""
        if len(self._servers) > 1 or server.client._is_over:
            self._leave_out(server)

    def _leave_out(self, server: _Server) -> None:
        """Send no more calls to a server. Its client is closed once its calls have ended."""
        if not server.is_out and not self._is_closed:
            self._servers.remove(server)
            server.is_out = True
            if not server.in_flight:
                self._close(server)

    def _close(self, server: _Server) -> None:
        if server not in self._open:
            return  # The client was closed meanwhile.
        self._open.remove(server)
        task = asyncio.create_task(server.client.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
