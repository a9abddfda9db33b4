"""Serve the protocols in your own ASGI application: Starlette, FastAPI, uvicorn, hypercorn, ...

An engine belongs to an event loop, and an application is created before the loop. So :func:`kserve_app` also
accepts a function that returns an engine, which is called when a client connects.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from asynctrt.engine import Engine
from asynctrt.errors import AsynctrtError, QueueFullError, RequestError, TooLargeError, UsageError, show
from asynctrt.serving.admission import Caller, address_of
from asynctrt.serving.api import Api, Headers, ModelRoute, error_answer
from asynctrt.serving.disconnect import CancelOnDisconnect
from asynctrt.serving.memory import UNCOUNTED_NBYTES, Hold
from asynctrt.serving.repository import Repository
from asynctrt.serving.responses import ID_HEADER
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.websocket import (
    MESSAGE_TOO_BIG,
    POLICY_VIOLATION,
    SUBPROTOCOL,
    Message,
    WebSocketSession,
    authorize_route,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Source = Engine | Repository | Callable[[], Engine | Repository]


def kserve_app(engine: Source, *, name: str = "model", settings: ServerSettings | None = None) -> "KServeApp":
    """Return an ASGI application with KServe V2 over HTTP and the websockets.

    :param engine: an open engine, a :class:`Repository` with several, or a function that returns either.
    :param name: the model's name, for a single engine.
    :param settings: limits and tokens; the ASGI server determines addresses and timeouts.
    """
    return KServeApp(engine, name, settings or ServerSettings())


class KServeApp:
    """The ASGI application that :func:`kserve_app` returns."""

    def __init__(self, source: Source, name: str, settings: ServerSettings) -> None:
        self._source = source
        self._name = name
        self._settings = settings
        self._api: Api | None = None
        self._engine: Engine | Repository | None = None
        self._respond = CancelOnDisconnect(self._answer)

    def api(self) -> Api:
        """Return the API for the engine or repository, created when it is first needed."""
        source = self._source
        engine = source if isinstance(source, Engine | Repository) else source()
        if self._api is None or engine is not self._engine:
            self._api = Api(self._repository(engine), self._settings)
            self._engine = engine
        return self._api

    def _repository(self, engine: Engine | Repository) -> Repository:
        if isinstance(engine, Repository):
            return engine
        if not isinstance(engine, Engine):
            raise UsageError(f"expected an open engine, or a function that returns one, not {show(engine)}")
        repository = Repository(self._settings)
        repository.add(self._name, engine)
        return repository

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or one connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            api, path, headers = self.api(), _path(scope), _headers(scope)
            api.ids.of(headers)
            await _serve_websocket(api, path, headers, receive, send, scope.get("client"))
        else:
            await self._respond(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        api, path, headers = self.api(), _path(scope), _headers(scope)
        request_id = api.ids.of(headers)
        caller = Caller(address_of(scope.get("client")))
        answer = api.preflight(scope["method"].encode(), headers)
        try:
            if answer is None:
                api.authorize(path, headers)
            hold = Hold(api.identify(caller, headers))
            body = await _read_body(receive, api.settings.max_body, hold)
            caller.received_nbytes = hold.nbytes
        except (RequestError, QueueFullError) as error:
            answer = error_answer(error)
        if answer is None:
            answer = await api.respond(scope["method"], path, headers, body, caller, hold, is_authorized=True)
        answer = api.with_cors(headers, answer)
        raw = b"".join(answer.body)
        lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in answer.headers]
        lines += [(b"content-length", str(len(raw)).encode()), (ID_HEADER, request_id)]
        await send({"type": "http.response.start", "status": answer.status, "headers": lines})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else raw})


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in scope["headers"]}


def _path(scope: Scope) -> bytes:
    """Return the path below the mount point, still quoted, since names may hold quoted slashes."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    root = scope.get("root_path", "").encode()
    return raw[len(root) :] if root and raw.startswith(root) else raw


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return


async def _read_body(receive: Receive, nbytes_max: int, hold: Hold) -> bytes:
    pieces = []
    nbytes = 0
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise RequestError("the client disconnected before its request was complete")
        pieces.append(event.get("body", b""))
        nbytes += len(pieces[-1])
        if nbytes > nbytes_max:
            raise TooLargeError(f"the body exceeds the {nbytes_max} bytes that this server accepts")
        if nbytes > max(UNCOUNTED_NBYTES, hold.nbytes) and not await hold.reserve(
            min(2 * nbytes, nbytes_max)
        ):
            raise QueueFullError(hold.account.memory.refuse())
        if not event.get("more_body", False):
            if hold.nbytes:
                hold.set(nbytes)  # Up to twice the size was reserved.
            return b"".join(pieces)


async def _serve_websocket(
    api: Api,
    path: bytes,
    headers: Headers,
    receive: Receive,
    send: Send,
    peer: Any,
) -> None:
    await receive()  # The first event is websocket.connect.
    try:
        route = authorize_route(api, path, headers)
    except AsynctrtError:
        # Closing before accepting makes the ASGI server answer with status 403.
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        return
    offered = [item.strip() for item in headers.get(b"sec-websocket-protocol", b"").split(b",")]
    chosen = SUBPROTOCOL if SUBPROTOCOL.encode() in offered else None
    await send({"type": "websocket.accept", "subprotocol": chosen})
    await _AsgiConnection(api, route, headers, receive, send, peer).run()


class _AsgiConnection:
    """One websocket, with a reading task and a writing task."""

    def __init__(
        self,
        api: Api,
        route: ModelRoute | None,
        headers: Headers,
        receive: Receive,
        send: Send,
        peer: Any,
    ) -> None:
        self._settings = api.settings
        self._receive = receive
        self._send = send
        self._out: asyncio.Queue[Message] = asyncio.Queue()
        self._room = asyncio.Event()
        self._session = WebSocketSession(
            api, self._out.put_nowait, room=self._room.set, route=route, headers=headers, peer=peer
        )

    async def run(self) -> None:
        writer = asyncio.create_task(self._write())
        try:
            while True:
                # An answer that the client has not received counts as a request in flight.
                while (
                    self._session.is_full or self._out.qsize() >= self._settings.max_requests_per_connection
                ):
                    self._room.clear()
                    await self._room.wait()
                event = await self._receive()
                if event["type"] != "websocket.receive":
                    return
                message = event.get("bytes")
                if message is None:
                    message = event["text"]
                if len(message) > self._settings.max_body:
                    await self._send({"type": "websocket.close", "code": MESSAGE_TOO_BIG})
                    return
                self._session.receive(message)
        finally:
            self._session.cancel_all()
            writer.cancel()

    async def _write(self) -> None:
        while True:
            message = await self._out.get()
            kind = "text" if isinstance(message, str) else "bytes"
            try:
                await self._send({"type": "websocket.send", kind: message})
            except Exception:
                return  # The client has disconnected; the reading task notices too.
            self._room.set()
