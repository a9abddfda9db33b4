"""Any address of HTTP and any websocket as a load test's target: a body goes, and something comes back."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from asynctrt.errors import (
    ConnectionLostError,
    MissingExtraError,
    OptionsError,
    OverloadError,
    TargetError,
    UsageError,
)
from asynctrt.loadtest.headers import TOKEN, Headers, has, headers_of
from asynctrt.loadtest.http_target import read_body
from asynctrt.loadtest.targets import (
    ANSWER_NBYTES_MAX,
    BatchCounters,
    Target,
    TargetSpec,
    without_password,
)
from asynctrt.loadtest.templates import Template
from asynctrt.statistics import BatchTrace
from asynctrt.tensors import Array, TensorSpec

try:
    import aiohttp
    from multidict import CIMultiDict
    from yarl import URL
except ImportError as error:
    raise MissingExtraError("load tests of servers need aiohttp: pip install 'asynctrt[load]'") from error

CLOSE_S: Final = 1.0
"""How long servers have to answer that a websocket is closed."""

TEXT_LENGTH_MAX: Final = 300
"""Characters of an answer that an error quotes."""
OVERLOADED: Final = (429, 503)
HEADERS_NBYTES_MAX: Final = 256 << 10


async def open_plain_target(spec: TargetSpec) -> Target:
    """Open an address of HTTP, or a websocket, that is none of KServe's.

    :raises OptionsError: for headers or a method that are none, or a websocket without a body.
    :raises UsageError: for an address without a host, or a body that cannot be read.
    """
    try:
        url = URL(spec.where, encoded=True)
        is_right = bool(url.host)
    except ValueError:
        is_right = False
    if not is_right:
        raise UsageError(
            f"{without_password(spec.where)!r} is not the address of a server: write "
            f"{spec.scheme}://HOST:PORT/PATH"
        )
    if spec.method is not None and not TOKEN.fullmatch(spec.method):
        raise OptionsError(f"{spec.method!r} is not a method of HTTP, such as POST")
    headers = headers_of(spec)
    template = None if spec.body is None else Template(spec.body)
    if spec.scheme in ("ws", "wss"):
        if template is None:
            raise OptionsError(
                f"{spec.where} is not a websocket of a model (/v2/models/NAME/ws), so what to send has to be "
                "said: set body to a text or to JSON"
            )
        return PlainWebsocketTarget(url, template, _session(headers))
    if template is not None and not has(headers, "Content-Type"):
        kind = "text/plain; charset=utf-8" if template.is_text else "application/octet-stream"
        headers.append(("Content-Type", "application/json" if template.is_json else kind))
    method = (spec.method or ("GET" if template is None else "POST")).upper()
    return PlainHttpTarget(url, method, template, _session(headers))


def _session(headers: Headers) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        # As many connections as requests in flight: waiting for another would make a request late.
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
        headers=CIMultiDict(headers),
        # As a browser takes; the library's own limits are those of a server.
        max_line_size=HEADERS_NBYTES_MAX,
        max_field_size=HEADERS_NBYTES_MAX,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),  # The load test has its own timeout.
    )


class _PlainTarget:
    """What both kinds have in common."""

    inputs: tuple[TensorSpec, ...] = ()
    in_flight_max = None
    has_connections = True

    def __init__(self, url: URL, template: Template | None, session: aiohttp.ClientSession) -> None:
        self.name = url.path.strip("/") or str(url.host)
        self.is_self_contained = template is None or not template.names
        """Whether the same is sent each time, so that no inputs are needed."""
        self._url = url
        self._shown = without_password(str(url))
        self._closing: set[asyncio.Task[None]] = set()
        self._template = template
        self._session = session
        self._create_task = asyncio.get_running_loop().create_task

    def prepare(self, inputs: Mapping[str, Array], priority: int) -> Any:
        """Fill the arrays of a request into the body."""
        return None if self._template is None else self._template.fill(inputs)

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        """Return the arrays of an answer that is JSON; those of a list are called ``answer``."""
        try:
            content = json.loads(answer)
            if isinstance(content, dict):
                return {name: np.asarray(value) for name, value in content.items()}
            return {"answer": np.asarray(content)}
        except ValueError as error:
            raise TargetError(f"{self._shown} did not answer in JSON: {error}") from error

    async def batches(self) -> BatchCounters | None:
        """Return ``None``: what it computes is not known."""
        return None

    def trace(self) -> list[BatchTrace]:
        """Return nothing, for the same reason."""
        return []

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()


class PlainHttpTarget(_PlainTarget):
    """Send a request to one address over HTTP; an answer with a status from 200 to 299 is right."""

    kind = "http"

    def __init__(
        self, url: URL, method: str, template: Template | None, session: aiohttp.ClientSession
    ) -> None:
        super().__init__(url, template, session)
        self._method = method

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        """Send a request."""
        return self._create_task(self._send(prepared))

    async def _send(self, body: bytes | None) -> bytes:
        try:
            asking = self._session.request(self._method, self._url, data=body, allow_redirects=False)
            async with asking as response:
                answer = await read_body(response, ANSWER_NBYTES_MAX)
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise TargetError(f"{self._shown} cannot be reached: {_said(error)}") from error
        except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as error:
            raise TargetError(f"{self._shown} did not answer in HTTP: {_said(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(f"the connection to {self._shown} was lost: {_said(error)}") from error
        if not 200 <= response.status < 300:
            text = " ".join(answer[: 4 * TEXT_LENGTH_MAX].decode(errors="replace").split())
            kind = OverloadError if response.status in OVERLOADED else TargetError
            raise kind(f"status {response.status}: {text:.{TEXT_LENGTH_MAX}}")
        return answer


class _Socket:
    """A websocket on which one message at a time is answered, by one.

    It is read all the time, so that a message that answers nothing is noticed.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answer: asyncio.Future[Any] | None = None
        self.has_spoken = False
        """Whether a message came that nothing had asked for."""
        self.reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self.reading.done()

    async def ask(self, message: bytes, *, is_text: bool) -> Any:
        """Send a message, and return the next one; ``None`` if the server ends the websocket instead."""
        self._answer = asyncio.get_running_loop().create_future()
        if is_text:
            await self._socket.send_str(message.decode())
        else:
            await self._socket.send_bytes(message)
        return await self._answer

    async def close(self) -> None:
        self.reading.cancel()
        await self._socket.close()

    @property
    def close_code(self) -> int | None:
        return self._socket.close_code

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                answer, self._answer = self._answer, None
                if answer is None:
                    self.has_spoken = True
                elif not answer.done():
                    answer.set_result(message.data)
        finally:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(None)


class PlainWebsocketTarget(_PlainTarget):
    """Send a message and take the next one for its answer: one at a time on each of as many websockets as
    requests are in flight."""

    kind = "websocket"

    def __init__(self, url: URL, template: Template, session: aiohttp.ClientSession) -> None:
        super().__init__(url, template, session)
        self._idle: list[_Socket] = []
        self._is_text = template.is_text

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        """Send a message."""
        return self._create_task(self._send(prepared))

    async def _send(self, message: bytes) -> bytes:
        socket = None
        while self._idle and socket is None:
            found = self._idle.pop()
            socket = found if found.is_open else None
        if socket is not None and socket.has_spoken:
            self._close(socket)
            raise TargetError(
                f"{self._shown} sends messages that nothing asked for, so that it cannot be told which of "
                "them is an answer"
            )
        try:
            if socket is None:
                made = await self._session.ws_connect(self._url, max_msg_size=ANSWER_NBYTES_MAX, compress=0)
                socket = _Socket(made)
            answer = await socket.ask(message, is_text=self._is_text)
        except aiohttp.ClientConnectorError as error:
            raise TargetError(f"{self._shown} cannot be reached: {_said(error)}") from error
        except aiohttp.WSServerHandshakeError as error:
            raise TargetError(f"{self._shown} refuses websockets with status {error.status}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(f"the connection to {self._shown} was lost: {_said(error)}") from error
        except asyncio.CancelledError:
            # Its answer may still come, and would be taken for that of the next message.
            if socket is not None:
                self._close(socket)
            raise
        if answer is None:
            code = socket.close_code
            raise ConnectionLostError(
                f"{self._shown} closed the websocket instead of answering, with code {code}"
            )
        self._idle.append(socket)
        return answer.encode() if isinstance(answer, str) else bytes(answer)

    def _close(self, socket: _Socket) -> None:
        closing = self._create_task(socket.close())
        self._closing.add(closing)  # The loop itself refers to tasks only weakly.
        closing.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close the websockets, which the session does not do, and then their connections."""
        while self._idle:
            self._close(self._idle.pop())
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)
        await super().aclose()
        if self._closing:  # Their servers said nothing, and cannot any more.
            await asyncio.wait(self._closing)


def _said(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return " ".join(error.message.split())[:TEXT_LENGTH_MAX]
    text = str(error).removeprefix("400, message:").strip()  # A status that nobody gave.
    return f"{text or type(error).__name__:.{TEXT_LENGTH_MAX}}"
