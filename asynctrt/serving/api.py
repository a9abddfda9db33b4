"""What a server answers, without sockets: routes, bodies, statuses. HTTP and ASGI stand on it.

Two ways lead through it. Inference is begun with :meth:`Api.begin` and ends with its future, so that a
protocol's callbacks need no task; everything else is :meth:`Api.respond`.
"""

import asyncio
import hmac
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import asynctrt
from asynctrt import clock
from asynctrt.errors import (
    AsynctrtError,
    CallerError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedError,
)
from asynctrt.serving.datatypes import Buffer, brief
from asynctrt.serving.repository import Repository, ServedModel
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.wire import Call, dump, mapping, parse_object
from asynctrt.tensors import InferResult

EXTENSIONS: Final = (
    "binary_tensor_data",
    "statistics",
    "model_repository",
    "model_configuration",
    "schedule_policy",
)
"""What of KServe's and Triton's extensions is there."""

MODELS: Final = b"/v2/models/"
REPOSITORY: Final = b"/v2/repository/models/"
ELSEWHERE: Final = ("/trace/setting", "/generate", "/generate_stream")
"""Routes of a model's in Triton that are not here."""
VERBS: Final = frozenset({"infer", "ready", "config", "stats", "ws"})
CANCELLED_STATUS: Final = 499
"""That of a request that was cancelled: nginx's code for a client that went away."""

COMPRESS_NBYTES_MIN: Final = 512
"""A smaller answer is not worth compressing."""
OFF_LOOP_NBYTES_MIN: Final = 256 << 10
"""From this size on compressing and decompressing is done in a thread."""

Headers = Mapping[bytes, bytes]
logger = logging.getLogger("asynctrt.serving")


class Answer(NamedTuple):
    """An HTTP answer. ``body`` is in pieces, to be sent one after the other."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: Sequence[Buffer]


class Target(NamedTuple):
    """A model's route: ``/v2/models/NAME[/versions/VERSION][/VERB]``."""

    name: str
    version: str
    verb: str


class Inference:
    """One inference on its way."""

    __slots__ = ("began_ns", "call", "future", "headers", "key", "served")

    def __init__(
        self,
        served: ServedModel,
        call: Call,
        future: "asyncio.Future[InferResult]",
        began_ns: int,
        headers: Headers,
    ) -> None:
        self.served = served
        self.call = call
        self.future = future
        self.began_ns = began_ns
        self.headers = headers
        self.key = 0
        """For a caller that has to tell requests without an id apart."""


Then = Callable[[Inference], None]


@dataclass(slots=True)
class Page:
    """Something else that the server has at a path."""

    respond: Callable[[Headers], Answer]
    is_open: bool = False
    """Whether it needs no token."""


@dataclass(slots=True)
class Api:
    """Answers requests out of a repository.

    ``pages`` are further paths, such as the dashboard's. ``observe`` is called after each inference that has
    ended, for tracing; ``log`` with the protocol, the peer and the inference, for those that are no HTTP
    requests, which are logged as such.
    """

    repository: Repository
    settings: ServerSettings = field(default_factory=ServerSettings)
    pages: dict[str, Page] = field(default_factory=dict)
    observe: Callable[[Inference], None] | None = None
    log: Callable[[str, Any, Inference], None] | None = None
    in_flight: int = 0
    _targets: dict[bytes, Target] = field(default_factory=dict)
    _tokens: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        self._tokens = tuple(token.encode() for token in self.settings.tokens)

    # ---- inference

    def target(self, path: bytes) -> Target | None:
        """What a path says of a model; ``None`` if it is none of a model's."""
        known = self._targets.get(path)
        if known is not None:
            return known
        if not path.startswith(MODELS):
            return None
        target = _target(path)
        if target is not None and len(self._targets) < 1024:
            try:
                self.repository.find(target.name, target.version)
            except AsynctrtError:
                return target  # Not to be remembered: anybody can make such paths up.
            self._targets[path] = target
        return target

    def begin(self, target: Target, headers: Headers, body: bytes, then: Then | None = None) -> Inference:
        """Decode an inference request and hand it to its engine; ``then`` is called when it has ended.

        :raises AsynctrtError: what is wrong with it, counted already.
        """
        began_ns = clock.now_ns()
        served = self.repository.find(target.name, target.version)
        try:
            length = headers.get(b"inference-header-content-length")
            if length is None:
                call = served.codec.decode(body, len(body))
            elif length == b"0":
                call = served.codec.decode_raw(body)
            elif length.isdigit() and len(length) < 19:
                call = served.codec.decode(body, int(length))
            else:
                raise RequestError(
                    f"Inference-Header-Content-Length is a number of bytes, not {length!r:.40}"
                )
            return self.submit(served, call, began_ns, headers, then)
        except AsynctrtError as error:
            served.count_failure(error, clock.now_ns() - began_ns)
            raise

    def submit(
        self,
        served: ServedModel,
        call: Call,
        began_ns: int,
        headers: Headers,
        then: Then | None = None,
    ) -> Inference:
        """Hand a decoded request to its engine. Its end is counted; the future is the caller's to cancel.

        :raises QueueFullError: when the server answers as many requests as it may at once.
        """
        if self.in_flight >= self.settings.max_requests:
            raise QueueFullError(
                f"{self.in_flight} requests are being answered, as many as may be: retry later"
            )
        future = served.submit(call)
        self.in_flight += 1
        inference = Inference(served, call, future, began_ns, headers)
        future.add_done_callback(partial(self._ended, inference, then))
        return inference

    def _ended(self, inference: Inference, then: Then | None, future: "asyncio.Future[InferResult]") -> None:
        self.in_flight -= 1
        inference.served.ended(future, inference.began_ns)
        if self.observe is not None:
            self.observe(inference)
        if then is not None:
            then(inference)

    def infer_answer(self, inference: Inference) -> Answer:
        """The answer to an inference whose future is done.

        :raises AsynctrtError: what it failed with.
        """
        return encoded_answer(*inference.served.codec.encode(inference.call, inference.future.result()))

    # ---- everything

    async def respond(self, method: str, path: bytes, headers: Headers, body: bytes) -> Answer:
        """Answer any request. What goes wrong is an answer too."""
        try:
            self.authorize(path, headers)
            coding = headers.get(b"content-encoding", b"identity").strip().lower()
            if coding != b"identity" and body:
                body = await self._decompressed(coding, body)
            return await self._respond(method, path, headers, body)
        except Exception as error:
            return error_answer(error)

    def authorize(self, path: bytes, headers: Headers) -> None:
        """Whether a request may come in.

        :raises UnauthorizedError: if it needs a token that it does not bring.
        """
        if not self._tokens or path.startswith(b"/v2/health/"):
            return
        page = self.pages.get(path.decode("latin-1"))
        if page is not None and page.is_open:
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        # Every token is compared, so that the time taken does not tell which one was nearly right.
        matches = [hmac.compare_digest(given, token) for token in self._tokens]
        if kind.lower() != b"bearer" or not any(matches):
            what = "a wrong one was given" if given else "none was given"
            raise UnauthorizedError(
                f"this server needs a bearer token, and {what}: Authorization: Bearer TOKEN"
            )

    async def _respond(self, method: str, path: bytes, headers: Headers, body: bytes) -> Answer:
        text = path.decode("latin-1")
        page = self.pages.get(text)
        if page is not None:
            _allow(method, "GET")
            return page.respond(headers)
        target = self.target(path) if text != "/v2/models/stats" else None
        if target is not None:
            return await self._model(method, target, headers, body)
        match text.rstrip("/"):
            case "/v2":
                _allow(method, "GET")
                return json_answer(self.server_metadata())
            case "/v2/health/live":
                _allow(method, "GET")
                return Answer(200, (), ())
            case "/v2/health/ready":
                _allow(method, "GET")
                return Answer(200 if self.repository.is_ready else 503, (), ())
            case "/v2/models/stats":
                _allow(method, "GET")
                return json_answer({"model_stats": self.statistics()})
            case "/v2/repository/index":
                _allow(method, "POST")
                return json_answer(self.index(body))
        if path.startswith(REPOSITORY):
            _allow(method, "POST")
            return await self._control(text, body)
        if text.startswith(("/v2/systemsharedmemory", "/v2/cudasharedmemory", "/v2/trace", "/v2/logging")):
            raise UnsupportedError(f"{text:.200} is a part of the protocol that this server does not have")
        raise UnknownModelError(f"there is nothing at {text:.200}; the protocol begins at /v2")

    async def _model(self, method: str, target: Target, headers: Headers, body: bytes) -> Answer:
        if not target.verb and target.name.endswith(ELSEWHERE):
            self._refuse_elsewhere(target)
        _allow(method, "POST" if target.verb == "infer" else "GET")
        if target.verb == "infer":
            inference = self.begin(target, headers, body)
            try:
                await inference.future
            except asyncio.CancelledError:
                inference.future.cancel()
                raise
            return await self.compressed(headers, self.infer_answer(inference))
        if target.verb == "ready":
            try:
                self.repository.find_ready(target.name, target.version)
            except AsynctrtError as error:
                # Clients take 400 for "no", and whatever else for a broken server.
                return Answer(400, (("Content-Type", "application/json"),), (dump({"error": str(error)}),))
            return Answer(200, (), ())
        if target.verb == "ws":
            raise RequestError("this is a websocket: connect with ws://, or send Upgrade: websocket")
        return json_answer(self.describe(target.verb, target.name, target.version))

    def _refuse_elsewhere(self, target: Target) -> None:
        """Routes of Triton's that look like a model's metadata, unless there is a model of that name."""
        try:
            self.repository.find(target.name, target.version)
        except UnknownModelError:
            raise UnsupportedError(
                f"{target.name:.200} is a part of the protocol that this server does not have"
            ) from None

    def describe(self, verb: str, name: str, version: str) -> dict[str, Any]:
        """A model's metadata (no verb), its ``config`` or its ``stats``."""
        served = self.repository.find(name, version)
        if verb == "config":
            return served.config()
        if verb == "stats":
            return {"model_stats": self.statistics(name, version)}
        return served.metadata(self.repository.versions(name))

    def server_metadata(self) -> dict[str, Any]:
        """What KServe calls the server's metadata."""
        return {"name": "asynctrt", "version": asynctrt.__version__, "extensions": list(EXTENSIONS)}

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """The statistics of all models, of one, or of one version."""
        if version:
            return [self.repository.find(name, version).statistics()]
        if name:
            self.repository.find(name)
        return [served.statistics() for served in self.repository if not name or served.name == name]

    def index(self, body: bytes) -> list[dict[str, str]]:
        """The repository's models; with ``{"ready": true}``, those that are served."""
        content = parse_object(body, "the request", self.settings.max_json) if body else {}
        ready = content.get("ready", False)
        if not isinstance(ready, bool):
            raise RequestError(f"ready is true or false, not {brief(ready)}")
        return [item for item in self.repository.index() if not ready or item["state"] == "READY"]

    async def _control(self, text: str, body: bytes) -> Answer:
        name, _, verb = text[len(REPOSITORY) :].rpartition("/")
        parameters = (
            mapping(parse_object(body, "the request", self.settings.max_json), "parameters", "the request")
            if body
            else {}
        )
        given = [parameter for parameter in parameters if parameter != "unload_dependents"]
        if given:
            raise UnsupportedError(f"a model is loaded as the server was told, not with {given[0]!r:.40}")
        await self.control(unquote(name), verb)
        return Answer(200, (), ())

    async def control(self, name: str, verb: str) -> None:
        """Load or unload a model.

        :raises CallerError: if that is not for clients to do.
        """
        if verb not in ("load", "unload"):
            raise UnknownModelError(f"a model can be loaded or unloaded, not {verb!r:.40}")
        if not self.settings.model_control:
            raise CallerError(
                "clients may not load or unload models here: start the server with --model-control"
            )
        await (self.repository.load(name) if verb == "load" else self.repository.unload(name))

    async def _decompressed(self, coding: bytes, body: bytes) -> bytes:
        if coding not in (b"gzip", b"deflate"):
            raise RequestError(f"Content-Encoding is gzip or deflate, not {coding!r:.40}")
        work = partial(decompress, body, self.settings.max_body)
        return await asyncio.to_thread(work) if len(body) > OFF_LOOP_NBYTES_MIN // 8 else work()

    async def compressed(self, headers: Headers, answer: Answer) -> Answer:
        """The answer to an inference, compressed if its client asks for it and it is worth it.

        Nothing else is compressed: NVIDIA's asyncio client decompresses nothing else.
        """
        nbytes = sum(len(piece) for piece in answer.body)
        coding = (
            accepted_coding(headers.get(b"accept-encoding", b"")) if nbytes >= COMPRESS_NBYTES_MIN else None
        )
        if coding is None or any(name == "Content-Encoding" for name, _ in answer.headers):
            return answer
        work = partial(compress, coding, answer.body)
        body = await asyncio.to_thread(work) if nbytes >= OFF_LOOP_NBYTES_MIN else work()
        added = (("Content-Encoding", coding), ("Vary", "Accept-Encoding"))
        return Answer(answer.status, answer.headers + added, (body,))


def encoded_answer(head: bytes, tensors: Sequence[Buffer]) -> Answer:
    """The answer to an inference: its JSON header, and the raw tensors that follow it, if there are any."""
    if not tensors:
        return Answer(200, (("Content-Type", "application/json"),), (head,))
    headers = (
        ("Content-Type", "application/octet-stream"),
        ("Inference-Header-Content-Length", str(len(head))),
    )
    return Answer(200, headers, (head, *tensors))


def json_answer(content: object, status: int = 200) -> Answer:
    """JSON."""
    return Answer(status, (("Content-Type", "application/json"),), (dump(content),))


def error_answer(error: BaseException) -> Answer:
    """What a failed request is answered: KServe's ``{"error": ...}`` and the error's own status."""
    if not isinstance(error, AsynctrtError):
        logger.error("a request failed for a reason that is no caller's", exc_info=error)
        return json_answer({"error": "internal error; the server's log has it"}, 500)
    status = error.http_status
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, _MethodError):
        status, headers = 405, (("Allow", error.allowed),)
    elif isinstance(error, UnauthorizedError):
        headers = (("WWW-Authenticate", "Bearer"),)
    return Answer(status, (("Content-Type", "application/json"), *headers), (dump({"error": str(error)}),))


class _MethodError(RequestError):
    """The path has no such method."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


def _allow(method: str, allowed: str) -> None:
    if method != allowed and not (method == "HEAD" and allowed == "GET"):
        raise _MethodError(f"the method here is {allowed}, not {method:.20}", allowed)


def _target(path: bytes) -> Target | None:
    """Names may hold slashes, quoted or not, so a path is read from its ends."""
    parts = path[len(MODELS) :].decode("latin-1").split("/")
    verb = parts.pop() if len(parts) > 1 and parts[-1] in VERBS else ""
    version = ""
    if len(parts) > 2 and parts[-2] == "versions":
        version = unquote(parts.pop())
        parts.pop()
    name = unquote("/".join(parts))
    return Target(name, version, verb) if name else None


def decompress(body: bytes, nbytes_max: int) -> bytes:
    """A body that was compressed with gzip or zlib.

    :raises TooLargeError: if it would be larger than ``nbytes_max``.
    :raises RequestError: if it was not so compressed.
    """
    machine = zlib.decompressobj(wbits=47)  # Either of the two, told by its first bytes.
    try:
        out = machine.decompress(body, nbytes_max + 1)
        if len(out) <= nbytes_max and not machine.eof:
            out += machine.flush()
    except zlib.error as error:
        raise RequestError(f"the body is not compressed as Content-Encoding says: {error}") from error
    if len(out) > nbytes_max:
        raise TooLargeError(f"the body, decompressed, is more than the {nbytes_max} bytes that are taken")
    if not machine.eof:
        raise RequestError("the compressed body ends in the middle")
    return out


def compress(coding: str, pieces: Sequence[Buffer]) -> bytes:
    """The pieces as one body, compressed."""
    machine = zlib.compressobj(1, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return b"".join([*(machine.compress(piece) for piece in pieces), machine.flush()])


def accepted_coding(header: bytes) -> str | None:
    """The coding that an ``Accept-Encoding`` asks for: the one that it names of those that there are.

    Who names both is a library that always does, and tensors of numbers are hardly smaller compressed: an
    answer of 4 MB takes 120 ms so, and 6 ms as it is.
    """
    if not header:
        return None
    asked = []
    for item in header.decode("latin-1").lower().split(","):
        coding, _, weight = item.partition(";")
        refused = weight.replace(" ", "").rstrip("0") in ("q=", "q=0.")
        if coding.strip() in ("gzip", "deflate") and not refused:
            asked.append(coding.strip())
    return asked[0] if len(asked) == 1 else None
