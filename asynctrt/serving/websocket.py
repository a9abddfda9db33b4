"""The websocket protocol: many requests in flight on one connection, answered as they finish.

:class:`Session` is the protocol without a socket: messages in, messages out. It fits any websocket library;
``asgi.py`` puts it behind ASGI, and ``frames.py`` behind the server's own sockets.

A **text** message is JSON. A **binary** message is the length of its JSON header in 4 bytes, little-endian,
the header, and raw tensors in the order of the inputs: KServe's binary extension, with the length in front
instead of in an HTTP header. What is asked in one form is answered in it.

* ``{"id": "7", "model_name": "m", "inputs": [...], "outputs": [...], "parameters": {...}}`` is KServe's
  inference request; ``model_name`` and ``model_version`` are needed where the path does not name the model.
  It is answered by KServe's response with the same id, or by
  ``{"id": "7", "error": "...", "status": 503, "type": "QueueFullError"}``. ``parameters`` may have
  ``priority`` (1 is the most urgent) and ``timeout`` (µs in the queue).
* ``{"cancel": "7"}`` drops a request. It is answered with status 499, or, if it was too late, as if nothing
  had been said.
* ``{"ping": anything}`` is answered ``{"pong": anything}``.

When the client hangs up, what it has asked for is cancelled. When the server drains, new requests are
answered with status 503, and the connection is closed with code 1001 once everything before is answered.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from asynctrt import clock
from asynctrt.errors import (
    AsynctrtError,
    EngineClosedError,
    RequestError,
    UnauthorizedError,
    UnknownModelError,
)
from asynctrt.serving.api import CANCELLED_STATUS, Api, Headers, Inference, Target, logger
from asynctrt.serving.datatypes import brief
from asynctrt.serving.wire import dump, parse_object, remember, split_id

PREFIX_NBYTES: Final = 4
ID_CHARS_MAX: Final = 256
GOING_AWAY: Final = 1001
MESSAGE_TOO_BIG: Final = 1009
POLICY_VIOLATION: Final = 1008

PATH: Final = b"/v2/ws"
"""The websocket for every model; one for a single model is at ``/v2/models/NAME/ws``."""

SUBPROTOCOL: Final = "asynctrt"
BEARER: Final = b"bearer."
"""How a browser sends a token, which cannot send headers: as one more subprotocol, ``bearer.TOKEN``."""

Message = bytes | str


class Session:
    """One connection's protocol. It belongs to the event loop, and its methods neither wait nor raise.

    :param send: takes each message to send, ``bytes`` for a binary and ``str`` for a text message.
    :param room: called when requests have ended and :attr:`is_full` holds no more, or none is in flight.
    :param target: the model that every request is for; ``None``: each says it.
    :param peer: the client's address, for the access log.
    """

    def __init__(
        self,
        api: Api,
        send: Callable[[Message], None],
        *,
        room: Callable[[], None] = lambda: None,
        target: Target | None = None,
        headers: Headers | None = None,
        peer: Any = None,
    ) -> None:
        self._peer = peer
        self._api = api
        self._send = send
        self._room = room
        self._target = target
        self._headers = headers or {}
        self._in_flight_max = api.settings.max_requests_per_connection
        self._flights: dict[str | int, Inference] = {}
        self._number = 0
        # Which model a header is for that was seen before: headers repeat, but for the id.
        self._targets: dict[bytes, Target] = {}
        self.is_draining = False

    def __repr__(self) -> str:
        return f"<Session in_flight={len(self._flights)}{' draining' if self.is_draining else ''}>"

    @property
    def in_flight(self) -> int:
        """Requests that are not answered yet."""
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """Whether so many requests are in flight that nothing more should be read."""
        return len(self._flights) >= self._in_flight_max

    def receive(self, message: Message) -> None:
        """Take one message, and do what it says."""
        request_id = ""
        try:
            if isinstance(message, str):
                raw = message.encode("utf-8", "surrogatepass")
                head, start = raw, 0
            else:
                raw = message
                head, start = _head_of(message), PREFIX_NBYTES
            request_id, rest = split_id(head)
            target = self._targets.get(rest)
            if target is None or len(request_id) > ID_CHARS_MAX:
                content = parse_object(head, "the message", self._api.settings.max_json)
                given = content.get("id", "")
                if not isinstance(given, str) or len(given) > ID_CHARS_MAX:
                    raise RequestError(
                        f"id is a string of at most {ID_CHARS_MAX} characters, not {brief(given)}"
                    )
                request_id = given
                if self._control(content, binary=start != 0):
                    return
                target = self._target or _target_of(content)
            self._infer(target, raw, head, start, request_id, rest)
        except AsynctrtError as error:
            self._fail(request_id, error, binary=not isinstance(message, str))
        except Exception as error:
            logger.error("a message could not be taken", exc_info=error)
            internal = AsynctrtError("internal error; the server's log has it")
            self._fail(request_id, internal, binary=not isinstance(message, str))

    def cancel_all(self) -> None:
        """The client has gone away: nobody waits for what it has asked."""
        self._send = _nowhere
        for inference in list(self._flights.values()):
            inference.future.cancel()

    def _infer(
        self, target: Target, raw: bytes, head: bytes, start: int, request_id: str, rest: bytes
    ) -> None:
        began_ns = clock.now_ns()
        served = self._api.repository.find(target.name, target.version)
        try:
            if self.is_draining:
                raise EngineClosedError("the server is draining: send to another one")
            call = served.codec.decode_split(head, request_id, rest, raw, start + len(head))
            if not start and any(binary for _, binary in call.plan.outputs):
                raise RequestError(
                    "the answer to a text message is text: ask for raw tensors in a binary one"
                )
            if call.id in self._flights:
                raise RequestError(f"a request {call.id!r} is in flight already: give each an id of its own")
            then = self._ended if start else self._ended_text
            inference = self._api.submit(served, call, began_ns, self._headers, then)
        except AsynctrtError as error:
            served.count_failure(error, clock.now_ns() - began_ns)
            raise
        if call.id:
            self._flights[call.id] = inference
        else:
            self._number += 1
            self._flights[self._number] = inference
            inference.key = self._number
        if served.codec.knows(rest) and rest not in self._targets:
            remember(self._targets, rest, target)

    def _ended_text(self, inference: Inference) -> None:
        self._ended(inference, binary=False)

    def _ended(self, inference: Inference, *, binary: bool = True) -> None:
        call = inference.call
        was_full = self.is_full
        del self._flights[call.id or inference.key]
        if self._api.log is not None:
            self._api.log("websocket", self._peer, inference)
        future = inference.future
        if future.cancelled():
            content = {"error": "cancelled", "status": CANCELLED_STATUS, "type": "CancelledError"}
            self._say({"id": call.id, **content} if call.id else content, binary=binary)
        else:
            try:
                head, tensors = inference.served.codec.encode(call, future.result())
            except AsynctrtError as error:
                self._fail(call.id, error, binary=binary)
            else:
                if binary:
                    self._send(b"".join((len(head).to_bytes(PREFIX_NBYTES, "little"), head, *tensors)))
                else:
                    self._send(head.decode())
        if was_full or not self._flights:
            self._room()

    def _control(self, content: Mapping[str, Any], *, binary: bool) -> bool:
        """Do what a message says that is no request; False if it is one."""
        if "ping" in content:
            try:
                pong = dump({"pong": content["ping"]})
            except TypeError as error:  # JSON is read deeper than it is written.
                raise RequestError("ping takes something that is not nested as deep") from error
            self._send_json(pong, binary=binary)
            return True
        if "cancel" in content:
            cancel = content["cancel"]
            if not isinstance(cancel, str):
                raise RequestError(f"cancel takes the id of a request, a string, not {brief(cancel)}")
            inference = self._flights.get(cancel)
            if inference is not None:
                inference.future.cancel()
            return True
        return False

    def _fail(self, request_id: str, error: AsynctrtError, *, binary: bool) -> None:
        content = {"error": str(error), "status": error.http_status, "type": type(error).__name__}
        self._say({"id": request_id, **content} if request_id else content, binary=binary)

    def _say(self, content: dict[str, Any], *, binary: bool) -> None:
        self._send_json(dump(content), binary=binary)

    def _send_json(self, raw: bytes, *, binary: bool) -> None:
        if binary:
            self._send(len(raw).to_bytes(PREFIX_NBYTES, "little") + raw)
        else:
            self._send(raw.decode())


def _nowhere(message: Message) -> None:
    """Where the answers go of a client that has gone away."""


def _head_of(message: bytes) -> bytes:
    length = int.from_bytes(message[:PREFIX_NBYTES], "little")
    if len(message) < PREFIX_NBYTES + length:
        raise RequestError(
            "a binary message begins with the length of its JSON header in 4 bytes, little-endian; it has "
            f"{len(message)} bytes in all and says that its header has {length}"
        )
    return message[PREFIX_NBYTES : PREFIX_NBYTES + length]


def _target_of(content: Mapping[str, Any]) -> Target:
    name, version = content.get("model_name"), content.get("model_version", "")
    if not isinstance(name, str) or not name:
        raise RequestError(f"model_name is the name of a model, a string, not {brief(name)}")
    if not isinstance(version, str):
        raise RequestError(f"model_version is a string, not {brief(version)}")
    return Target(name, version, "infer")


def admit(api: Api, path: bytes, headers: Headers) -> Target | None:
    """Which model a websocket is for; ``None``: each message says it.

    :raises AsynctrtError: if its client may not come in, or there is no websocket at the path.
    """
    authorize(api, path, headers)
    if path == PATH:
        return None
    target = api.target(path)
    if target is None or target.verb != "ws":
        raise UnknownModelError(f"websockets are at {PATH.decode()} and at /v2/models/NAME/ws")
    api.repository.find(target.name, target.version)
    return target


def _host_of(origin: str) -> bytes:
    """An origin's host and port; nothing if it is no URL."""
    try:
        return urlsplit(origin).netloc.encode("latin-1")
    except ValueError:
        return b""


def authorize(api: Api, path: bytes, headers: Headers) -> None:
    """Whether a client may open a websocket: by its origin, if it is a browser, and by its token.

    Browsers let every page try to connect to everywhere. A client that is no browser sends no origin.

    :raises UnauthorizedError: if not.
    """
    allowed = api.settings.allow_origins
    origin = headers.get(b"origin")
    if origin is not None and "*" not in allowed:
        text = origin.decode("latin-1")
        host = _host_of(text)
        if text not in allowed and (not host or host != headers.get(b"host")):
            raise UnauthorizedError(
                f"pages of {text:.200} may not open websockets here: start the server with --allow-origins"
            )
    if b"authorization" not in headers:
        for offered in headers.get(b"sec-websocket-protocol", b"").split(b","):
            if offered.strip().startswith(BEARER):
                token = offered.strip()[len(BEARER) :]
                headers = {**headers, b"authorization": b"Bearer " + token}
    api.authorize(path, headers)
