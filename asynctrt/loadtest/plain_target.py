"""Any HTTP address or websocket as a load test's target: send a body, and receive an answer."""

import asyncio
import contextlib
import json
from array import array
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import numpy as np

from asynctrt._util import clock
from asynctrt.errors import (
    ConnectionLostError,
    MissingExtraError,
    OptionsError,
    TargetError,
    UsageError,
)
from asynctrt.loadtest.http_target import failure, open_session, quoted, read_body, too_long, unsuccessful
from asynctrt.loadtest.streams import DONE, Events, IsLast, Streamed, ending
from asynctrt.loadtest.targets import (
    ANSWER_NBYTES_MAX,
    TOKEN,
    BatchCounters,
    Headers,
    Target,
    TargetSpec,
    has,
    headers_of,
    without_password,
)
from asynctrt.loadtest.templates import Template, fill_line, has_places
from asynctrt.tensors import Array, TensorSpec

try:
    import aiohttp
    from multidict import CIMultiDict
    from yarl import URL
except ImportError as error:
    raise MissingExtraError("load tests of servers need aiohttp: pip install 'asynctrt[load]'") from error

CLOSE_S: Final = 1.0
"""Timeout for servers to close websockets, and to end a stream after its last event."""
SETTLE_S: Final = (0.2, 1.0)
"""Minimum and maximum time to listen after the first answer, which is not measured. Within these limits, the
time is as long as that answer took, because further messages of the answer would come by then."""
EVENT_STREAM: Final = "text/event-stream"


async def open_plain_target(spec: TargetSpec) -> Target:
    """Open an HTTP address or a websocket that does not speak KServe.

    :raises OptionsError: for an invalid header, method or ``until_message``, or a websocket without a body.
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
    if "#" in spec.where or not spec.where.isprintable() or " " in spec.where:
        shown = without_password(spec.where)
        raise UsageError(f"{shown!r} has a character that cannot be sent: a space is %20, and # is %23")
    if spec.method is not None and not TOKEN.fullmatch(spec.method):
        raise OptionsError(f"{spec.method!r} is not a method of HTTP, such as POST")
    headers, ssl = headers_of(spec), spec.tls.used_by(spec.scheme)
    template = None if spec.body is None else Template(spec.body)
    if spec.scheme in ("ws", "wss"):
        if template is None:
            raise OptionsError(
                f"{spec.where} is not the websocket of a model (/v2/models/NAME/ws): set body to the text or "
                "JSON to send"
            )
        is_last = None if spec.until_message is None else ending(spec.until_message)
        if "${" in spec.where or any("${" in text for text in spec.headers):
            raise OptionsError(
                "a websocket is opened once for many requests, so its address and headers cannot have "
                "placeholders"
            )
        return PlainWebsocketTarget(url, template, open_session(headers, ssl), is_last)
    if template is not None and not has(headers, "Content-Type"):
        kind = "text/plain; charset=utf-8" if template.is_text else "application/octet-stream"
        headers.append(("Content-Type", "application/json" if template.is_json else kind))
    method = (spec.method or ("GET" if template is None else "POST")).upper()
    varied = [pair for pair in headers if has_places(pair[1])]
    session = open_session([pair for pair in headers if pair not in varied], ssl)
    return PlainHttpTarget(spec.where, method, template, session, varied)


class _PlainTarget:
    """The common part of both kinds of targets."""

    inputs: tuple[TensorSpec, ...] = ()
    in_flight_max = None
    has_connections = True

    def __init__(self, url: URL, template: Template | None, session: aiohttp.ClientSession) -> None:
        self.name = url.path.strip("/") or str(url.host)
        self.is_self_contained = template is None or not template.names
        """Whether every request is the same, so that no inputs are needed."""
        self._url = url
        self._shown = without_password(str(url))
        self._closing: set[asyncio.Task[None]] = set()
        self._template = template
        self._session = session
        self._create_task = asyncio.get_running_loop().create_task

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        """Fill a request's arrays into the body, if there is one."""
        return None if self._template is None else self._template.fill(inputs)

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        """Parse an answer, or its last piece, as JSON, and return its arrays by name.

        JSON that is not an object becomes one array called ``answer``.
        """
        if isinstance(answer, Streamed):
            answer = answer.last
        try:
            content = json.loads(answer)
            if isinstance(content, dict):
                return {name: np.asarray(value) for name, value in content.items()}
            return {"answer": np.asarray(content)}
        except (ValueError, RecursionError) as error:
            raise TargetError(f"{self._shown} did not answer in JSON: {error}") from error

    async def batches(self) -> BatchCounters | None:
        """Return ``None``, because the server has no statistics of batches."""
        return None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)
        await self._session.close()
        if self._closing:  # Their servers did not respond; closing the session ends these tasks.
            await asyncio.wait(self._closing)

    def _close(self, closing: Coroutine[Any, Any, None]) -> None:
        """Run ``closing`` in the background."""
        task = self._create_task(closing)
        self._closing.add(task)  # The event loop holds tasks only weakly.
        task.add_done_callback(self._closing.discard)


class PlainHttpTarget(_PlainTarget):
    """Send requests to one address over HTTP; an answer succeeds if its status is from 200 to 299.

    If an answer is a stream of events, record when each arrives.
    """

    kind = "http"

    def __init__(
        self,
        where: str,
        method: str,
        template: Template | None,
        session: aiohttp.ClientSession,
        headers: Headers,
    ) -> None:
        super().__init__(URL(where, encoded=True), template, session)
        self._method = method
        self._where = where
        self._headers = headers
        if headers or has_places(where):
            self.is_self_contained = False

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        """Fill a request's arrays into the address, the headers and the body."""
        url = URL(fill_line(self._where, inputs, is_address=True), encoded=True)
        headers = CIMultiDict([(name, fill_line(value, inputs)) for name, value in self._headers])
        return url, headers, super().prepare(inputs)

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        """Send a request."""
        return self._create_task(self._send(*prepared))

    async def _send(self, url: URL, headers: Any, body: bytes | None) -> bytes | Streamed:
        try:
            response = await self._session.request(
                self._method, url, headers=headers, data=body, allow_redirects=False
            )
            if response.content_type == EVENT_STREAM and 200 <= response.status < 300:
                try:
                    return await self._read_events(response)
                except BaseException:
                    response.close()
                    raise
            answer = await read_body(response)
        except (aiohttp.ClientError, OSError) as error:
            raise failure(self._shown, error) from error
        if not 200 <= response.status < 300:
            raise unsuccessful(self._shown, response.status, answer)
        return answer

    async def _read_events(self, response: aiohttp.ClientResponse) -> Streamed:
        """Read events until the stream ends or sends ``DONE``."""
        events, came_ns, last, nbytes, is_over = Events(), array("q"), b"", 0, False
        while not is_over:
            part = await response.content.readany()
            now_ns = clock.now_ns()
            nbytes += len(part)
            if nbytes > ANSWER_NBYTES_MAX:
                raise too_long()
            is_over = not part
            for kind, data in events.feed(part or b"\n\n"):  # The last event may lack its empty line.
                if kind == b"error" or data.startswith(b'{"error"'):
                    raise TargetError(f"an error in the stream: {quoted(data)}")
                if data == DONE:
                    is_over = True
                    break
                last = data
                came_ns.append(now_ns)
        if not came_ns:
            raise TargetError(f"{self._shown} sent a stream without any event")
        if not response.content.is_eof():  # Read it to its end, so that the connection can be reused.
            self._close(_read_to_end(response))
        return Streamed(last, came_ns)


class _Socket:
    """A websocket with one request at a time, answered by one or several messages.

    It is read continuously, so that unsolicited messages are noticed.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, is_last: IsLast | None) -> None:
        self._socket = socket
        self._is_last = is_last
        self._answer: asyncio.Future[Any] | None = None
        self._came_ns = array("q")
        self._nbytes = 0
        self.has_spoken = False
        """Whether an unsolicited message came."""
        self.reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self.reading.done()

    async def ask(self, message: bytes, *, is_text: bool) -> Any:
        """Send a message, and return its answer; ``None`` if the server closes the websocket instead."""
        self._answer = asyncio.get_running_loop().create_future()
        self._came_ns, self._nbytes = array("q"), 0
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
                if self._answer is None:
                    self.has_spoken = True
                else:
                    self._take(self._answer, message.data)
        finally:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(None)

    def _take(self, answer: "asyncio.Future[Any]", data: str | bytes) -> None:
        """Handle one message of an answer, and set the result if it is the last."""
        if self._is_last is None:
            self._answer = None
            if not answer.done():
                answer.set_result(_bytes(data))
            return
        self._came_ns.append(clock.now_ns())
        self._nbytes += len(data)
        is_long = self._nbytes > ANSWER_NBYTES_MAX
        text = data if isinstance(data, str) else data.decode(errors="replace")
        if is_long or self._is_last(len(self._came_ns), text):
            self._answer = None
            if answer.done():
                return
            if is_long:
                answer.set_exception(too_long())
            else:
                answer.set_result(Streamed(_bytes(data), self._came_ns))


class PlainWebsocketTarget(_PlainTarget):
    """Send a message; the answer is the next message, or all messages up to the last of the answer.

    Each request in flight uses a separate websocket.
    """

    kind = "websocket"

    def __init__(
        self, url: URL, template: Template, session: aiohttp.ClientSession, is_last: IsLast | None
    ) -> None:
        super().__init__(url, template, session)
        self._is_last = is_last
        self._idle: list[_Socket] = []
        self._is_text = template.is_text
        self._is_tried = False

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        """Send a message."""
        return self._create_task(self._send(prepared))

    async def _send(self, message: bytes) -> bytes | Streamed:
        began_ns = clock.now_ns()
        socket = self._free()
        try:
            if socket is None:
                made = await self._session.ws_connect(self._url, max_msg_size=ANSWER_NBYTES_MAX, compress=0)
                socket = _Socket(made, self._is_last)
            answer: bytes | Streamed | None = await socket.ask(message, is_text=self._is_text)
        except aiohttp.WSServerHandshakeError as error:
            raise TargetError(f"{self._shown} refuses websockets with status {error.status}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise failure(self._shown, error) from error
        except (asyncio.CancelledError, TargetError):
            # Its answer may still come, and would be mistaken for the answer to the next message.
            if socket is not None:
                self._close(socket.close())
            raise
        if answer is None:
            code = socket.close_code
            raise ConnectionLostError(
                f"{self._shown} closed the websocket instead of answering, with code {code}"
            )
        self._idle.append(socket)
        if not self._is_tried:
            self._is_tried = True
            least_s, most_s = SETTLE_S
            await asyncio.sleep(min(max(least_s, (clock.now_ns() - began_ns) / 1e9), most_s))
            if socket.has_spoken:
                raise self._unasked()
        return answer

    def _free(self) -> _Socket | None:
        """Return an idle websocket; ``None`` if there is none.

        :raises TargetError: if an unsolicited message came on it.
        """
        while self._idle:
            socket = self._idle.pop()
            if not socket.is_open:
                continue
            if socket.has_spoken:
                self._close(socket.close())
                raise self._unasked()
            return socket
        return None

    def _unasked(self) -> TargetError:
        """Return the error for an unsolicited message."""
        return TargetError(
            f"{self._shown} sends unsolicited messages, so answers cannot be matched to requests. If an "
            "answer has several messages, describe the last one with until_message (--until-message)"
        )

    async def aclose(self) -> None:
        """Close the websockets, which the session does not close, and then the session."""
        while self._idle:
            self._close(self._idle.pop().close())
        await super().aclose()


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read the rest of an answer if it ends soon, so that the connection can be reused."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, TargetError):
        async with asyncio.timeout(CLOSE_S):
            await read_body(response)


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)
