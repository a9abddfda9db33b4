"""Speak the websocket protocol: many requests in flight on one connection, answered as they finish.

:class:`WebSocketSession` is the protocol without a socket: messages in, messages out. It fits any websocket
library; ``asgi.py`` connects it to ASGI, and ``frames.py`` to the server's own sockets.

A **text** message is JSON. A **binary** message is the length of its JSON header in 4 bytes, little-endian,
the header, and raw tensors in the order of the inputs: KServe's binary extension, with the length in front
instead of in an HTTP header. Each request is answered in the form that it came in.

* ``{"id": "7", "model_name": "m", "inputs": [...], "outputs": [...], "parameters": {...}}`` is KServe's
  inference request; ``model_name`` and ``model_version`` are needed if the path does not name the model.
  It is answered by KServe's response with the same id, or by
  ``{"id": "7", "error": "...", "status": 503, "type": "QueueFullError"}``. ``parameters`` may have
  ``priority`` (1 is the most urgent) and ``timeout`` (µs in the queue).
* ``{"cancel": "7"}`` cancels a request, which is then answered with status 499, or normally if it is too
  late.
* ``{"id": "8", "metadata": true, "model_name": "m"}`` is answered
  ``{"id": "8", "metadata": {"inputs": [...], "outputs": [...], ...}}``: KServe's description of the model.

When the client disconnects, its requests are cancelled. When the server drains, new requests are answered
with status 503, and the connection is closed with code 1001 once all others are answered.
"""

import asyncio
from base64 import urlsafe_b64decode
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

from asynctrt._util import clock
from asynctrt.errors import (
    AsynctrtError,
    EngineClosedError,
    RequestError,
    UnknownModelError,
)
from asynctrt.kserve.codec import FAST_NBYTES, LAYOUT_NBYTES_MAX, DecodedRequest
from asynctrt.kserve.datatypes import LENGTH_NBYTES, Buffer, Pause, brief, no_pause
from asynctrt.kserve.json_codec import dump, is_slow_json, parse_object, parsed_nbytes, split_id
from asynctrt.serving.admission import Caller, Inference, address_of, error_of
from asynctrt.serving.api import CANCELLED_STATUS, Api, Headers, ModelRoute, logger
from asynctrt.serving.coding import Body
from asynctrt.serving.memory import Hold
from asynctrt.serving.responses import OUR_ERROR, STOPPING
from asynctrt.serving.served import ServedModel
from asynctrt.serving.worker import pause

ID_CHARS_MAX: Final = 256
GOING_AWAY: Final = 1001
MESSAGE_TOO_BIG: Final = 1009
POLICY_VIOLATION: Final = 1008

PATH: Final = b"/v2/ws"
"""The websocket for every model; that of a single model is at ``/v2/models/NAME/ws``."""

SUBPROTOCOL: Final = "asynctrt"
BEARER: Final = b"bearer."
"""Prefix of a subprotocol ``bearer.TOKEN``, with which a browser sends its token: it cannot set headers."""
BEARER64: Final = b"bearer64."
"""Prefix for the token in URL-safe Base64, unpadded: a subprotocol may not contain ``=`` or ``/``."""

Message = bytes | str
Encoded = tuple[bytes, list[Buffer]]


class WebSocketSession:
    """One connection's protocol. Its methods belong to the event loop, and neither wait nor raise.

    :param send: sends a message, ``bytes`` as binary and ``str`` as text.
    :param send_pieces: sends a binary message given in pieces. Default: join and ``send`` them.
    :param room: called when :attr:`is_full` becomes false, or no request is in flight any more.
    :param route: the model of every request; ``None`` if each request names one.
    :param peer: the client's address.
    """

    def __init__(
        self,
        api: Api,
        send: Callable[[Message], None],
        *,
        room: Callable[[], None] = lambda: None,
        send_pieces: Callable[[Sequence[Buffer]], None] | None = None,
        route: ModelRoute | None = None,
        headers: Headers | None = None,
        peer: Any = None,
    ) -> None:
        self._peer = peer
        self._api = api
        self._send = send
        self._send_pieces = send_pieces or (lambda pieces: self._send(b"".join(pieces)))
        self._room = room
        self._route = route
        self._headers = with_token(headers or {})
        self._caller = Caller(address_of(peer))
        self.account = api.identify(self._caller, self._headers)
        """The account of the client, which all its connections share."""
        self._tokens_version = api.tokens_version
        self._latest = b"", ModelRoute("", "", "infer")
        """The head without its id, and the model, of the latest request that was parsed."""
        self._in_flight_max = api.settings.max_requests_per_connection
        self._answer_nbytes_max = api.settings.max_body
        self._answer_nbytes = 0
        self._was_full = False
        self._flights: dict[str | int, Inference] = {}
        self._number = 0
        # The message being decoded in a thread: no other is accepted meanwhile, so they stay in order.
        self._decoding: asyncio.Task[None] | None = None
        self._hold: Hold | None = None
        self._encoding: set[asyncio.Task[Encoded]] = set()
        self.is_draining = False

    def __repr__(self) -> str:
        return f"<WebSocketSession in_flight={len(self._flights)}{' draining' if self.is_draining else ''}>"

    @property
    def in_flight(self) -> int:
        """How many requests have not been answered."""
        return len(self._flights) + (self._decoding is not None)

    @property
    def is_full(self) -> bool:
        """Whether to pause reading: too many requests are in flight, or too many rows wait, or too many bytes
        of answers are due. ``room`` is called once that has changed."""
        self._was_full = is_full = (
            self._decoding is not None
            or len(self._flights) >= self._in_flight_max
            or self._answer_nbytes >= self._answer_nbytes_max
            or self._caller.has_much_waiting
        )
        return is_full

    def new_hold(self) -> Hold:
        """Return a new hold that counts memory for this client."""
        return Hold(self.account)

    def check_token(self) -> None:
        """Check the token that opened the websocket, if tokens may have been revoked since."""
        if self._tokens_version != self._api.tokens_version:
            authorize(self._api, PATH, self._headers)
            self._tokens_version = self._api.tokens_version

    def receive(self, message: Message | bytearray | memoryview, hold: Hold | None = None) -> None:
        """Handle one message.

        :param hold: its memory, kept while it is being decoded.
        """
        seen = _Seen(is_binary=not isinstance(message, str))
        self._caller.received_nbytes = 0 if hold is None else hold.nbytes
        try:
            raw: Body
            if isinstance(message, str):
                raw = message.encode("utf-8", "surrogatepass")
                head, start = raw, 0
            else:
                raw = message
                head, start = _head_of(message), LENGTH_NBYTES
            if len(raw) > FAST_NBYTES and (is_slow_json(len(head)) or self._is_slow(head, raw, start)):
                self._begin_slowly(seen, head, raw, start, hold)
            else:
                request = self._read_known(seen, head, raw, start + len(head)) if start else None
                self._act(seen, request or self._read(seen, head, raw, start, no_pause))
        except Exception as error:
            self._refuse(seen, error)

    def _begin_slowly(self, seen: "_Seen", head: bytes, raw: Body, start: int, hold: Hold | None) -> None:
        """Handle a message that takes long to decode: a thread does it."""
        self._hold = hold
        running = self._api.worker.run(
            partial(self._read, seen, head, raw, start, pause),
            self._caller.client,
            hold or self.new_hold(),
            parsed_nbytes(min(len(head), self._api.settings.max_json)),
        )
        self._decoding = asyncio.get_running_loop().create_task(self._handle_slowly(seen, running))
        self._decoding.add_done_callback(self._decoded)

    def _decoded(self, task: "asyncio.Task[None]") -> None:
        self._decoding = self._hold = None
        if not task.cancelled():
            self._room()

    async def _handle_slowly(
        self, seen: "_Seen", running: Coroutine[Any, Any, DecodedRequest | None]
    ) -> None:
        try:
            self._act(seen, await running)
        except Exception as error:
            self._refuse(seen, error)

    def _is_slow(self, head: bytes, raw: Body, start: int) -> bool:
        """Return whether reading a message's tensors would block the event loop."""
        try:
            route = self._route or _route_of(parse_object(head, "the message"))
            codec = self._api.repository.find(route.name, route.version).codec
        except AsynctrtError:
            return False
        return codec.is_slow(raw, start + len(head))

    def _read(
        self, seen: "_Seen", head: bytes, raw: Body, start: int, between: Pause
    ) -> DecodedRequest | None:
        """Parse and decode a message, on the event loop or in a thread; ``None`` if it is not a request.

        Both in one step: parsed JSON takes several times the memory of its text, and must not wait.
        """
        content = parse_object(head, "the message", self._api.settings.max_json)
        seen.request_id = _id_of(content)
        if _is_control(content):
            seen.content = content
            return None
        route = self._route or _route_of(content)
        seen.served = served = self._api.repository.find(route.name, route.version)
        known = head if len(head) <= LAYOUT_NBYTES_MAX else b""
        request = served.codec.decode_parsed(content, len(head), raw, start + len(head), between, head=known)
        self._latest = split_id(known)[0], route
        return request

    def _read_known(self, seen: "_Seen", head: bytes, raw: Body, start: int) -> DecodedRequest | None:
        """Decode a request whose head equals an earlier one's but for the id, without parsing it again."""
        rest, request_id = split_id(head)
        route = self._route
        if route is None:
            latest, route = self._latest
            if rest != latest:
                return None
        try:
            served = self._api.repository.find(route.name, route.version)
        except AsynctrtError:
            return None  # What else is wrong with the request is found out by parsing it.
        request = served.codec.decode_known(rest, request_id, raw, start)
        if request is not None:
            seen.served = served
            seen.request_id = request_id
        return request

    def _act(self, seen: "_Seen", request: DecodedRequest | None) -> None:
        """Do what a message asks for."""
        if request is None:
            self._control(seen.content, binary=seen.is_binary)
        else:
            self._submit(seen, request)

    def _refuse(self, seen: "_Seen", error: Exception) -> None:
        """Answer a message that could not be handled, and count the failure for its model."""
        if seen.served is not None and isinstance(error, AsynctrtError):
            seen.served.count_failure(error, clock.now_ns() - seen.began_ns)
        self._failed(seen.request_id, error, binary=seen.is_binary)

    def _failed(self, request_id: str, error: BaseException | None, *, binary: bool) -> None:
        """Answer a message that was cancelled or could not be handled."""
        text, status = "cancelled", CANCELLED_STATUS
        if not isinstance(error, asyncio.CancelledError):
            if not isinstance(error, AsynctrtError):
                logger.error("failed to handle a websocket message", exc_info=error)
                error = AsynctrtError(OUR_ERROR)
            text, status = str(error), error.http_status
        content = {"error": text, "status": status, "type": type(error).__name__}
        self._say({"id": request_id, **content} if request_id else content, binary=binary)

    def cancel_all(self) -> None:
        """Cancel every request, because the client has disconnected."""
        # These are methods of the connection, which refers to its session. The cycle would keep both in
        # memory, with the input of an incomplete message, until the next collection.
        self._send = self._send_pieces = _nowhere
        self._room = _nothing
        if self._decoding is not None:
            self._decoding.cancel()
        for task in self._encoding:
            task.cancel()
        for inference in list(self._flights.values()):
            inference.cancel()

    def _submit(self, seen: "_Seen", request: DecodedRequest) -> None:
        served = seen.served
        assert served is not None, "a decoded request has a model"
        if self.is_draining:
            raise EngineClosedError(STOPPING)
        if not seen.is_binary and any(wanted for _, wanted in request.layout.outputs):
            raise RequestError("a text message is answered as text: request raw tensors in a binary message")
        if request.id in self._flights:
            raise RequestError(f"a request with id {request.id!r} is in flight: give each its own id")
        then = self._ended if seen.is_binary else self._ended_text
        inference = self._api.submit(served, request, seen.began_ns, self._headers, self._caller, then)
        self._answer_nbytes += request.layout.answer_nbytes
        if request.id:
            self._flights[request.id] = inference
        else:
            self._number += 1
            self._flights[self._number] = inference
            inference.key = self._number

    def _ended_text(self, inference: Inference) -> None:
        self._ended(inference, binary=False)

    def _ended(self, inference: Inference, *, binary: bool = True) -> None:
        request, future, codec = inference.request, inference.future, inference.served.codec
        encoded: Encoded | None = None
        error = error_of(future)
        if error is None:
            result = future.result()
            if not request.layout.is_simple and codec.is_slow_answer(request.layout, result):
                work = partial(codec.encode, request, result, pause)
                task = asyncio.get_running_loop().create_task(self._api.worker.run(work, inference.client))
                self._encoding.add(task)
                task.add_done_callback(partial(self._encoded, inference, binary=binary))
                return
            try:
                encoded = codec.encode(request, result)
            except AsynctrtError as refused:
                error = refused
        self._answer(inference, encoded, error, binary=binary)

    def _encoded(self, inference: Inference, task: "asyncio.Task[Encoded]", *, binary: bool) -> None:
        """Answer with the result of encoding in a thread. Until then the request counts as in flight.

        This is a callback, because a task cancelled before its first step never runs, and the request would
        stay.
        """
        self._encoding.discard(task)
        error = error_of(task)
        self._answer(inference, task.result() if error is None else None, error, binary=binary)

    def _answer(
        self, inference: Inference, encoded: Encoded | None, error: BaseException | None, *, binary: bool
    ) -> None:
        request = inference.request
        del self._flights[request.id or inference.key]
        self._answer_nbytes -= request.layout.answer_nbytes
        if self._api.log is not None:
            self._api.log("websocket", self._peer, inference)
        if encoded is not None:
            head, tensors = encoded
            if binary:
                self._send_pieces((len(head).to_bytes(LENGTH_NBYTES, "little"), head, *tensors))
            else:
                self._send(head.decode())
        else:
            self._failed(request.id, error, binary=binary)
        if self._was_full or not self._flights:
            self._room()

    def _control(self, content: Mapping[str, Any], *, binary: bool) -> None:
        """Handle a message that is not a request."""
        if _asks_for_metadata(content):
            route = self._route or _route_of(content)
            found = self._api.repository.find(route.name, route.version)
            metadata = found.metadata(self._api.repository.versions(found.name))
            self._say({"id": _id_of(content), "metadata": metadata}, binary=binary)
        else:
            cancel = content["cancel"]
            if not isinstance(cancel, str):
                raise RequestError(f"cancel must be the id of a request, a string, not {brief(cancel)}")
            inference = self._flights.get(cancel)
            if inference is not None:
                inference.cancel()

    def _say(self, content: dict[str, Any], *, binary: bool) -> None:
        raw = dump(content)
        if binary:
            self._send(len(raw).to_bytes(LENGTH_NBYTES, "little") + raw)
        else:
            self._send(raw.decode())


class _Seen:
    """What is known about a message by the time it is refused."""

    __slots__ = ("began_ns", "content", "is_binary", "request_id", "served")

    def __init__(self, *, is_binary: bool) -> None:
        self.is_binary = is_binary
        self.began_ns = clock.now_ns()
        self.request_id = ""
        self.served: ServedModel | None = None
        self.content: Mapping[str, Any] = {}
        """The whole message, if it is not a request."""


def _is_control(content: Mapping[str, Any]) -> bool:
    """Return whether a message is not a request."""
    return "cancel" in content or _asks_for_metadata(content)


def _asks_for_metadata(content: Mapping[str, Any]) -> bool:
    return content.get("metadata") is True and "inputs" not in content


def _id_of(content: Mapping[str, Any]) -> str:
    given = content.get("id", "")
    if not isinstance(given, str) or len(given) > ID_CHARS_MAX:
        raise RequestError(f"id must be a string of at most {ID_CHARS_MAX} characters, not {brief(given)}")
    return given


def _nowhere(message: Message | Sequence[Buffer]) -> None:
    """Discard the answer to a client that has disconnected."""


def _nothing() -> None:
    """Do nothing."""


def _head_of(message: Buffer) -> bytes:
    length = int.from_bytes(message[:LENGTH_NBYTES], "little")
    if len(message) < LENGTH_NBYTES + length:
        raise RequestError(
            "a binary message must begin with the length of its JSON header in 4 bytes, little-endian; this "
            f"one has {len(message)} bytes in all and states a header of {length}"
        )
    return bytes(message[LENGTH_NBYTES : LENGTH_NBYTES + length])


def _route_of(content: Mapping[str, Any]) -> ModelRoute:
    name, version = content.get("model_name"), content.get("model_version", "")
    if not isinstance(name, str) or not name:
        raise RequestError(f"model_name must be the name of a model, a string, not {brief(name)}")
    if not isinstance(version, str):
        raise RequestError(f"model_version must be a string, not {brief(version)}")
    return ModelRoute(name, version, "infer")


def authorize_route(api: Api, path: bytes, headers: Headers) -> ModelRoute | None:
    """Authorize a client that opens a websocket; return the model at its path, ``None`` at :data:`PATH`."""
    authorize(api, path, headers)
    if path.rstrip(b"/") == PATH:
        return None
    route = api.route(path)
    if route is None or route.verb != "ws":
        raise UnknownModelError(f"websockets are at {PATH.decode()} and at /v2/models/NAME/ws")
    api.repository.find(route.name, route.version)
    return route


def _token_of(offered: bytes) -> bytes:
    """Return the token in a subprotocol's name; empty if there is none."""
    if offered.startswith(BEARER):
        return offered[len(BEARER) :]
    if not offered.startswith(BEARER64):
        return b""
    coded = offered[len(BEARER64) :]
    try:
        return urlsafe_b64decode(coded + b"=" * (-len(coded) % 4))
    except ValueError:
        return b""


def authorize(api: Api, path: bytes, headers: Headers) -> None:
    """Check the origin and the token of a client that opens a websocket."""
    api.authorize(path, with_token(headers))


def with_token(headers: Headers) -> Headers:
    """Return a client's headers, with a token offered as a subprotocol moved to ``Authorization``."""
    if b"authorization" not in headers:
        for offered in headers.get(b"sec-websocket-protocol", b"").split(b","):
            token = _token_of(offered.strip())
            if token:
                return {**headers, b"authorization": b"Bearer " + token}
    return headers
