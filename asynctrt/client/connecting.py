"""The choice of a client by the scheme of an address."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from asynctrt.client.balanced import Addresses, BalancedClient
from asynctrt.client.base import Client, ClientSettings, OneServer
from asynctrt.client.persistence import without_credentials
from asynctrt.client.websocket import WebSocketClient
from asynctrt.errors import UsageError, show


def connect(
    url: str | Sequence[str] | Addresses,
    *,
    token: str | None = None,
    max_in_flight: int = 256,
    attempts: int = 1,
    idempotent: bool = False,
    reconnect_timeout: float = 30.0,
    max_size: int | None = None,
    **settings: Any,
) -> Client:
    """Return a client of the server at ``url``, or of several. Enter it with ``async with``.

    :param url: ``ws://HOST:PORT/v2/ws`` for every model, ``.../v2/models/NAME/ws`` for one; or
        ``http://HOST:PORT`` for every model of any KServe V2 server; ``wss://`` and ``https://`` with TLS. A
        websocket has many requests in flight on one connection; HTTP takes a connection for each. Or several
        of these; or a coroutine function that returns them, which is asked once a second
        (:func:`asynctrt.client.records` makes one). Each call then goes to the server that is expected to
        answer first, and once to another if that one is gone, draining or full.
    :param token: the server's bearer token, if it requires one.
    :param max_in_flight: requests in flight at once; further calls wait. Beyond the server's own limit
        (``max_requests_per_connection``) requests wait on the connection.
    :param attempts: the maximum number of times a request is sent. It is retried if the server has certainly
        not begun it: there was no connection, its queue was full, or the model was not loaded.
    :param idempotent: whether a request may be computed twice, so that it is also retried if its connection
        was lost or the server stopped.
    :param reconnect_timeout: seconds to keep trying to connect again after a websocket was lost.
    :param max_size: the largest answer in bytes; ``None`` for no limit.
    :param settings: passed to ``websockets.asyncio.client.connect`` or to ``aiohttp.TCPConnector``: ``ssl``
        and others.
    :raises UsageError: if ``max_in_flight`` or ``attempts`` is less than 1, ``url`` is not such an address,
        ``token`` is not valid in a header, or there are both a token and a password in the address (messages
        never show the password); on entering, for an unknown setting.
    :raises MissingExtraError: for HTTP without aiohttp.
    :raises ConnectionLostError: on entering, if there is no server at the address of a websocket, or
        at any of several.
    :raises UnauthorizedError: on entering, if the websocket's server refuses the token.
    """
    given = ClientSettings(
        token=token,
        max_in_flight=max_in_flight,
        attempts=attempts,
        idempotent=idempotent,
        reconnect_timeout=reconnect_timeout,
        max_size=max_size,
        library=settings,
    )
    if callable(url) or (isinstance(url, list | tuple) and url):
        # A lost websocket is opened again with the next look at the addresses.
        member = partial(_connect, settings=replace(given, reconnect_timeout=0.0))
        for address in () if callable(url) else url:
            member(address)  # It says what is wrong with an address.
        return BalancedClient(url, member, given)
    return _connect(url, given)


def _connect(url: object, settings: ClientSettings) -> OneServer:
    """Return a client of the server at ``url``."""
    if not isinstance(url, str):
        raise UsageError(
            f"the address of a server is a str such as http://HOST:PORT, not a {type(url).__name__}"
        )
    shown = without_credentials(url)
    if settings.token and url != shown:
        raise UsageError(
            f"{shown!r} was given with a user and a password, and with a token as well. A request has one "
            "authorization: leave out one of them"
        )
    scheme = url.partition("://")[0]
    if scheme in ("http", "https"):
        # Imported only when needed: applications that use websockets do not need aiohttp.
        from asynctrt.client.http import HttpClient  # noqa: PLC0415

        return HttpClient(url, settings)
    if scheme not in ("ws", "wss"):
        raise UsageError(f"{show(shown)} is not an address such as ws://HOST:PORT/v2/ws or http://HOST:PORT")
    return WebSocketClient(url, settings)
