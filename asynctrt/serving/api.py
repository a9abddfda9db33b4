"""Answer requests without sockets: routes, bodies, statuses. HTTP and ASGI build on this module.

Inference begins with :meth:`Api.begin` and ends with its future, so protocol callbacks need no task. Every
other request goes to :meth:`Api.respond`.
"""

import hmac
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import asynctrt
from asynctrt._util import clock
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
from asynctrt.kserve.codec import FAST_NBYTES, DecodedRequest
from asynctrt.kserve.datatypes import Buffer, Pause, brief, no_pause
from asynctrt.kserve.json_codec import dump, mapping, parse_object, parsed_nbytes
from asynctrt.serving.admission import Caller, Inference
from asynctrt.serving.coding import (
    COMPRESS_NBYTES_MIN,
    OFF_LOOP_NBYTES_MIN,
    Body,
    accepted_coding,
    compress,
    decompress,
    inflated_nbytes_max,
)
from asynctrt.serving.memory import SMALL_NBYTES, ClientAccount, Hold, MemoryLimit, default_limit
from asynctrt.serving.repository import Repository
from asynctrt.serving.responses import ID_HEADER, OUR_ERROR, RequestIds, retry_after, told
from asynctrt.serving.served import ServedModel
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.turns import Turns
from asynctrt.serving.worker import ClientThreads, pause

EXTENSIONS: Final = (
    "binary_tensor_data",
    "statistics",
    "model_repository",
    "model_configuration",
    "schedule_policy",
)
"""The extensions of KServe and Triton that are implemented."""

HEALTH: Final = b"/v2/health/"
MODELS: Final = b"/v2/models/"
PLAIN_MODELS: Final = b"/v1/models/"
REPOSITORY: Final = b"/v2/repository/models/"
VERBS: Final = frozenset({"infer", "ready", "config", "stats", "ws"})
PREDICT: Final = ":predict"
INFERENCES: Final = frozenset({"infer", "predict"})
"""The verbs of an inference: in the form of KServe V2, and in plain JSON."""
HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+))(?::[0-9]*)?", re.ASCII)
"""A ``Host`` header: an IPv6 address in brackets, or another name, and optionally a port."""
PAGE: Final = re.compile(rb"https?://([^/?#@\s]+)")
"""The origin of a page that a server may have sent itself, and its host. A proxy may have added TLS."""
NO_WEBSOCKET: Final = (
    "this path is a websocket: connect with ws://, or send Upgrade: websocket and Connection: Upgrade, which "
    "proxies such as nginx do not pass on by themselves"
)
CANCELLED_STATUS: Final = 499
"""Status of a cancelled request: nginx's code for a client that closed the connection."""

CORS_HEADERS: Final = (
    "Authorization, Content-Encoding, Content-Type, Inference-Header-Content-Length, traceparent, "
    "X-Request-ID"
)
"""Headers that pages of allowed origins may send."""

PREFLIGHT: Final = (
    ("Access-Control-Allow-Methods", "GET, HEAD, POST"),
    ("Access-Control-Allow-Headers", CORS_HEADERS),
    ("Access-Control-Max-Age", "600"),
)

RAW_SIGNS: Final = ("content after document", "UTF-8")
"""Parts of the JSON library's messages for a body that continues with raw tensors."""
RAW_TENSORS: Final = (
    "If raw tensors follow the JSON, send its length in the header Inference-Header-Content-Length, or 0 if "
    "the body is one raw tensor alone"
)

ASKED_AT: Final = {
    "": ". Requests to a model go to /v2/models/NAME/infer",
    "status": ". Requests to a model go to /v1/models/NAME:predict",
}
"""What to add for a method that a model's own path, by its verb, does not accept."""

STATES: Final = {
    "READY": "AVAILABLE",
    "LOADING": "LOADING",
    "UNLOADING": "UNLOADING",
    "UNAVAILABLE": "END",
}
"""TensorFlow Serving's names for Triton's states of a model."""

Headers = Mapping[bytes, bytes]
logger = logging.getLogger("asynctrt.serving")


class Answer(NamedTuple):
    """An HTTP answer. ``body`` is a sequence of pieces."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: Sequence[Buffer]
    inference: Inference | None = None
    """What it answers, for the access log."""


class ModelRoute(NamedTuple):
    """A parsed path of a model: ``/v2/models/NAME[/versions/VERSION][/VERB]``.

    Paths of plain JSON, ``/v1/models/NAME[/versions/VERSION][:predict]``, have the verbs ``status`` and
    ``predict``.
    """

    name: str
    version: str
    verb: str


Then = Callable[[Inference], None]


@dataclass(slots=True)
class Page:
    """An additional page of the server, such as one of the dashboard's."""

    respond: Callable[[Headers], Answer | Awaitable[Answer]]
    is_open: bool = False
    """Whether it is served without a token."""


@dataclass(slots=True)
class Api:
    """The API over the models of a repository.

    ``pages`` maps paths to additional pages, such as the dashboard's. ``observe`` is called after each
    inference, for tracing. ``log`` is called with protocol, peer and inference after each inference that did
    not come over HTTP: connections log HTTP requests. ``failed`` is called with each failed inference and its
    error. ``unauthorized`` counts refused tokens, hosts and origins. ``checks_hosts`` is for a server without
    tokens.
    """

    repository: Repository
    settings: ServerSettings = field(default_factory=ServerSettings)
    pages: dict[str, Page] = field(default_factory=dict)
    observe: Callable[[Inference], None] | None = None
    log: Callable[[str, Any, Inference], None] | None = None
    failed: Callable[[Inference, BaseException], None] | None = None
    in_flight: int = 0
    unauthorized: int = 0
    foreign: str = ""
    """The most recently refused host or origin, for the log."""
    checks_hosts: bool = False
    has_models: bool = True
    """Whether it answers more than its pages."""
    of_fronts: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
    """Returns the statistics of all fronts, if this server is one of several."""
    ids: RequestIds = field(default_factory=RequestIds)
    worker: ClientThreads = field(default_factory=ClientThreads)
    memory: MemoryLimit = field(init=False)
    turns: Turns = field(default_factory=Turns)
    tokens_version: int = 0
    """Changes whenever a token may have been revoked."""
    _tokens: frozenset[bytes] = frozenset()
    """The tokens, digested with a key of this process: looking one up reveals nothing about the others."""
    _token_key: bytes = field(default_factory=secrets.token_bytes)
    _client_header: bytes = b""
    _is_by_token: bool = False

    def __post_init__(self) -> None:
        self.use_tokens(self.settings.tokens)
        self.memory = MemoryLimit(self.settings.max_memory or default_limit(self.settings))
        self._client_header = (self.settings.client_header or "").lower().encode()

    def _digest(self, token: bytes) -> bytes:
        return hmac.digest(self._token_key, token, "sha256")

    @property
    def has_tokens(self) -> bool:
        """Whether requests need a token."""
        return bool(self._tokens)

    def use_tokens(self, tokens: Sequence[str]) -> None:
        """Accept only these tokens from now on. Connections that used another token are closed soon."""
        self._tokens = frozenset(self._digest(token.encode()) for token in tokens)
        self.tokens_version += 1
        # A single token for everyone does not tell clients apart.
        self._is_by_token = len(self._tokens) > 1

    @property
    def drain(self) -> str:
        """The longest time that a model needs for its queue, in seconds; ``draining`` if the server stops."""
        if self.repository.is_draining:
            return "draining"
        return f"{max([served.drain_s for served in self.repository], default=0.0):.4f}"

    @property
    def names_clients(self) -> bool:
        """Whether requests may name their client, so that a connection may carry requests of several."""
        return bool(self._client_header) or self._is_by_token

    def named(self, headers: Headers) -> bytes | None:
        """Return the client's name in an authorized request, if clients are distinguished by name."""
        if self._client_header and (name := headers.get(self._client_header)):
            return name
        if self._is_by_token and (given := headers.get(b"authorization")):
            return given.partition(b" ")[2].strip()
        return None

    def client(self, caller: Caller, headers: Headers) -> Hashable:
        """Return the client that a request is accounted to, for fair shares of models, memory and time.

        Call this only for authorized requests: before that, anyone could claim any name.
        """
        name = self.named(headers)
        return caller.address if name is None else name

    def identify(self, caller: Caller, headers: Headers) -> ClientAccount:
        """Return the account of a request's client, and make it the connection's account."""
        client = self.client(caller, headers)
        if caller.account is None or client != caller.client:
            caller.client = client
            caller.account = self.memory.account(client)
        return caller.account

    # ---- inference

    def route(self, path: bytes) -> ModelRoute | None:
        """Parse a model's path; ``None`` if it is not one."""
        if not self.has_models:
            return None
        if path.startswith(MODELS):
            return _route(path)
        return _plain_route(path) if path.startswith(PLAIN_MODELS) else None

    def is_slow(self, route: ModelRoute, headers: Headers, body: Body) -> bool:
        """Return whether to use :meth:`begin_slow`, because decoding would block the event loop."""
        if len(body) <= FAST_NBYTES:
            return False
        try:
            codec = self.repository.find(route.name, route.version).codec
        except AsynctrtError:
            return False
        return codec.is_slow(body, _json_nbytes_of(route, headers, body))

    async def begin_slow(
        self, route: ModelRoute, headers: Headers, body: Body, caller: Caller, hold: Hold | None
    ) -> Inference:
        """Like :meth:`begin`, but decode in a thread, which holds the body's memory until it is done."""
        began_ns = clock.now_ns()
        hold = hold or Hold(self.account(caller), caller.received_nbytes)
        served = self.repository.find(route.name, route.version)
        try:
            decoding = partial(_decoded, served, route, headers, body, pause)
            nbytes = parsed_nbytes(min(_json_nbytes_of(route, headers, body), self.settings.max_json))
            del body  # Nothing else may keep it while the request waits.
            running = self.worker.run(decoding, self.client(caller, headers), hold, nbytes)
            del decoding, hold
            request = await running
            return self.submit(served, request, began_ns, headers, caller)
        except AsynctrtError as error:
            served.count_failure(error, clock.now_ns() - began_ns)
            raise

    def begin(
        self, route: ModelRoute, headers: Headers, body: Body, caller: Caller, then: Then | None = None
    ) -> Inference:
        """Decode an inference request and submit it to its engine. ``then`` is called when it has ended.

        :raises AsynctrtError: if the request is refused; the failure has already been counted.
        """
        began_ns = clock.now_ns()
        served = self.repository.find(route.name, route.version)
        try:
            request = _decoded(served, route, headers, body, no_pause)
            return self.submit(served, request, began_ns, headers, caller, then)
        except AsynctrtError as error:
            served.count_failure(error, clock.now_ns() - began_ns)
            raise

    def submit(
        self,
        served: ServedModel,
        request: DecodedRequest,
        began_ns: int,
        headers: Headers,
        caller: Caller,
        then: Then | None = None,
    ) -> Inference:
        """Submit a decoded request to its engine and count its outcome. The caller may cancel it.

        :raises QueueFullError: if the server is already answering ``max_requests`` requests, or has no memory
            for this one.
        """
        if self.in_flight >= self.settings.max_requests:
            raise QueueFullError(f"the server is answering {self.in_flight} requests, its limit: retry later")
        nbytes = request.layout.answer_nbytes + request.nbytes
        hold = self.hold(caller, nbytes) if nbytes > SMALL_NBYTES else None
        name = self.client(caller, headers)
        inference = served.submit(request, caller, name, began_ns, headers, self._ended)
        inference.client = name
        inference.hold = hold
        inference.then = then
        self.in_flight += 1
        return inference

    def account(self, caller: Caller) -> ClientAccount:
        """Return the account of the client of a connection's latest request."""
        if caller.account is None:
            caller.account = self.memory.account(caller.client)
        return caller.account

    def hold(self, caller: Caller, nbytes: int) -> Hold:
        """Reserve a request's memory. The caller already holds a part of it.

        A request whose body waited for memory is admitted with an answer of up to the body's size, so that
        the upload was not in vain.
        """
        account = self.account(caller)
        if not self.memory.has_room(account, nbytes - 2 * caller.received_nbytes):
            raise QueueFullError(self.memory.refuse())
        return Hold(account, nbytes)

    def _ended(self, inference: Inference) -> None:
        self.in_flight -= 1
        error = inference.served.ended(inference)
        if error is not None and self.failed is not None:
            self.failed(inference, error)
        if self.observe is not None:
            self.observe(inference)
        if inference.then is not None:
            inference.then(inference)

    async def infer(
        self, route: ModelRoute, headers: Headers, body: Body, caller: Caller, hold: Hold | None
    ) -> Answer:
        """Answer an inference, with threads where decoding, encoding or compressing it takes long."""
        if self.is_slow(route, headers, body):
            beginning = self.begin_slow(route, headers, body, caller, hold)
            del body
            inference = await beginning
        else:
            inference = self.begin(route, headers, body, caller)
            del body
        if hold is not None:
            # The inputs are views of the body, whose memory the inference holds from here on.
            hold.set(max(0, hold.nbytes - inference.request.kept_nbytes))
        del hold
        await inference.answer()
        answer = await self.infer_answer(inference)
        return await self.compressed(headers, answer, inference.client)

    async def infer_answer(self, inference: Inference) -> Answer:
        """Return the answer to a completed inference, encoding it in a thread if that is slow."""
        codec, result = inference.served.codec, inference.future.result()
        if codec.is_slow_answer(inference.request.layout, result):
            encoding = partial(codec.encode, inference.request, result, pause)
            return encoded_answer(*await self.worker.run(encoding, inference.client), inference)
        return encoded_answer(*codec.encode(inference.request, result), inference)

    # ---- everything

    async def respond(
        self,
        method: str,
        path: bytes,
        headers: Headers,
        body: Body,
        caller: Caller | None = None,
        hold: Hold | None = None,
        *,
        is_authorized: bool = False,
    ) -> Answer:
        """Answer any request. Errors become answers too.

        :param hold: the memory of its body, if that is large.
        :param is_authorized: whether :meth:`authorize` accepted the request before its body was read.
        """
        caller = caller or Caller()
        try:
            if not is_authorized:
                self.authorize(path, headers)
            if not self.has_models and self.page(path.decode("latin-1")) is None:
                raise UnknownModelError(f"there is nothing here but {', '.join(self.pages)}")
            coding = headers.get(b"content-encoding", b"identity").strip().lower()
            if coding != b"identity" and body:
                hold = Hold(self.account(caller))
                body = await self.decompressed(coding, body, hold, self.client(caller, headers))
                caller.received_nbytes += hold.nbytes
            return await self._respond(method, path, headers, body, caller, hold)
        except Exception as error:
            return error_answer(error, headers)

    def authorize(self, path: bytes, headers: Headers) -> None:
        """Check a request's bearer token, its ``Host``, and the origin of the page that sent it."""
        if path.startswith(HEALTH):
            return
        if self.checks_hosts:
            self._check_host(headers.get(b"host", b""))
        if b"origin" in headers:
            self._check_origin(headers)
        if not self._tokens:
            return
        if self.is_open(path):
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        if kind.lower() != b"bearer" or self._digest(given) not in self._tokens:
            what = "the bearer token is wrong" if given else "this server requires a bearer token"
            self.unauthorized += 1
            raise UnauthorizedError(f"{what}: send the header Authorization: Bearer TOKEN")

    def is_open(self, path: bytes) -> bool:
        """Return whether a page needs no token even if the server requires one."""
        if path.startswith(HEALTH):
            return True
        page = self.page(path.decode("latin-1"))
        return page is not None and page.is_open

    def page(self, path: str) -> Page | None:
        """Return the page at a path, which may end with a slash."""
        return self.pages.get(path) or self.pages.get(path.rstrip("/"))

    def _check_origin(self, headers: Headers) -> None:
        """Refuse requests from pages of other origins: browsers let any page send requests to any server."""
        if self._is_allowed(headers[b"origin"]):
            return
        page = PAGE.fullmatch(headers[b"origin"])
        if page is None or page[1] != headers.get(b"host"):
            text = headers[b"origin"].decode("latin-1")
            self._refused(f"origin {text:.200}")
            raise ForeignError(
                f"pages of {text:.200} may not use this server: allow them with --allow-origins"
            )

    def _refused(self, foreign: str) -> None:
        self.unauthorized += 1
        self.foreign = foreign

    def preflight(self, method: bytes, headers: Headers) -> Answer | None:
        """Return the answer to a browser's CORS preflight for an allowed origin; ``None`` for other requests.

        A preflight has no token. A browser sends one before any request that is not a simple form.
        """
        if method != b"OPTIONS" or b"access-control-request-method" not in headers:
            return None
        if not self._is_allowed(headers.get(b"origin", b"")):
            return None
        return Answer(204, PREFLIGHT, ())

    def with_cors(self, headers: Headers, answer: Answer) -> Answer:
        """Let the page that sent a request read the answer, with CORS headers, if its origin is allowed."""
        origin = headers.get(b"origin", b"")
        if not self._is_allowed(origin):
            return answer
        added = (
            ("Access-Control-Allow-Origin", origin.decode("latin-1")),
            ("Access-Control-Expose-Headers", "Inference-Header-Content-Length, X-Request-ID"),
            ("Vary", "Origin"),
        )
        return answer._replace(headers=answer.headers + added)

    def _is_allowed(self, origin: bytes) -> bool:
        allowed = self.settings.allow_origins
        return bool(origin and allowed) and ("*" in allowed or origin.decode("latin-1") in allowed)

    def check_sender(self, headers: Headers) -> None:
        """Refuse to change the served models for a page of another site, even if it sends no ``Origin``."""
        if self._tokens or b"origin" in headers:
            return  # :meth:`authorize` has checked it.
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise ForeignError("models are not loaded and unloaded for pages of other sites")

    def _check_host(self, host: bytes) -> None:
        """Refuse host names that are not this server's.

        DNS rebinding can point a page's host name at this server after the page has loaded, which gives the
        page the server's origin. An IP address cannot be rebound.
        """
        text = host.decode("latin-1")
        name = _name_of(text)
        if host and "*" not in self.settings.allow_hosts and not _is_address(name):
            own = (*self.settings.allow_hosts, self.settings.host, socket.gethostname())
            if name not in map(str.lower, own) and text not in own:
                self._refused(f"host {text:.200}")
                raise ForeignError(
                    f"this server does not answer as {text:.200}, as any name can be made to lead to it: "
                    "allow the name with --allow-hosts, or require a token with --tokens"
                )

    async def _respond(
        self,
        method: str,
        path: bytes,
        headers: Headers,
        body: Body,
        caller: Caller,
        hold: Hold | None,
    ) -> Answer:
        text = path.decode("latin-1")
        page = self.page(text)
        if page is not None:
            _allow(method, "GET")
            answer = page.respond(headers)
            return answer if isinstance(answer, Answer) else await answer
        text = text.rstrip("/")
        route = self.route(path) if text != "/v2/models/stats" else None
        if route is not None:
            return await self._model(method, route, headers, body, caller, hold)
        match text:
            case "/v2" | "/v1/models":
                _allow(method, "GET")
                return json_answer(self.server_metadata() if text == "/v2" else self.names())
            case "/v2/health/live" | "/v2/health/ready":
                _allow(method, "GET")
                return self._health(text[len("/v2/health/") :])
            case "/v2/ws":
                raise UpgradeError(NO_WEBSOCKET)
            case "/v2/models/stats":
                _allow(method, "GET")
                return json_answer({"model_stats": await self.all_statistics()})
            case "/v2/repository/index":
                _allow(method, "POST")
                return json_answer(self.index(self._parsed(body).get("ready", False)))
        if path.startswith(REPOSITORY):
            _allow(method, "POST")
            self.check_sender(headers)
            name, _, verb = text[len(REPOSITORY) :].rpartition("/")
            await self.control(unquote(name), verb, mapping(self._parsed(body), "parameters", "the request"))
            return Answer(200, (), ())
        if text.startswith(("/v2/systemsharedmemory", "/v2/cudasharedmemory", "/v2/trace", "/v2/logging")):
            raise UnsupportedError(f"this server does not implement {text:.200}")
        raise UnknownModelError(
            f"no page at {text:.200}; KServe V2 is under /v2, and plain JSON at /v1/models/NAME:predict"
        )

    def _health(self, what: str) -> Answer:
        holds = self.repository.is_live if what == "live" else self.repository.is_ready
        return json_answer({what: holds}, 200 if holds else 503)

    async def _model(
        self,
        method: str,
        route: ModelRoute,
        headers: Headers,
        body: Body,
        caller: Caller,
        hold: Hold | None,
    ) -> Answer:
        _allow(method, "POST" if route.verb in INFERENCES else "GET", ASKED_AT.get(route.verb, ""))
        if route.verb in INFERENCES:
            return await self.infer(route, headers, body, caller, hold)
        if route.verb == "ready":
            try:
                self.repository.find_ready(route.name, route.version)
            except AsynctrtError as error:
                # Clients read 400 as "not ready", and any other status as a broken server.
                return json_answer({"error": str(error)}, 400)
            return json_answer({"name": route.name, "ready": True})
        if route.verb == "status":
            return self._status(route)
        if route.verb == "ws":
            raise UpgradeError(NO_WEBSOCKET)
        if route.verb == "stats":
            return json_answer({"model_stats": await self.all_statistics(route.name, route.version)})
        return json_answer(self.describe(route.verb, route.name, route.version))

    def _status(self, route: ModelRoute) -> Answer:
        """Return a model's status as KServe V1 and TensorFlow Serving state it."""
        entries = [
            item
            for item in self.repository.index()
            if item["name"] == route.name and route.version in ("", item["version"])
        ]
        if not entries:
            self.repository.find(route.name, route.version)  # It says what is unknown.
        is_ready = any(item["state"] == "READY" for item in entries)
        versions = [
            {
                "version": item["version"],
                "state": STATES[item["state"]],
                "status": {
                    "error_code": "UNKNOWN" if item["reason"] else "OK",
                    "error_message": item["reason"],
                },
            }
            for item in entries
        ]
        content = {"name": route.name, "ready": is_ready, "model_version_status": versions}
        return json_answer(content, 200 if is_ready else 503)

    def describe(self, verb: str, name: str, version: str) -> dict[str, Any]:
        """Return a model's metadata (no verb) or its ``config``."""
        served = self.repository.find(name, version)
        if verb == "config":
            return served.config()
        return served.metadata(self.repository.versions(name))

    def names(self) -> dict[str, list[str]]:
        """Return KServe V1's list of models."""
        return {"models": list(dict.fromkeys(served.name for served in self.repository))}

    def server_metadata(self) -> dict[str, Any]:
        """Return KServe's server metadata."""
        return {"name": "asynctrt", "version": asynctrt.__version__, "extensions": list(EXTENSIONS)}

    async def all_statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return statistics as :meth:`statistics` does, but summed over all fronts."""
        own = self.statistics(name, version)
        if self.of_fronts is None:
            return own
        wanted = {(one["name"], one["version"]) for one in own}
        return [one for one in await self.of_fronts() if (one["name"], one["version"]) in wanted] or own

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return this process's statistics of all models, of one, or of one version."""
        if version:
            return [self.repository.find(name, version).statistics()]
        if name:
            self.repository.find(name)
        return [served.statistics() for served in self.repository if not name or served.name == name]

    def index(self, ready: object) -> list[dict[str, str]]:
        """List the repository's models; only the ready ones if ``ready`` is true."""
        if not isinstance(ready, bool):
            raise RequestError(f"ready must be true or false, not {brief(ready)}")
        return [item for item in self.repository.index() if not ready or item["state"] == "READY"]

    def _parsed(self, body: Body) -> dict[str, Any]:
        """Parse the body of a request to the repository, which may be empty."""
        return parse_object(body, "the request", self.settings.max_json) if body else {}

    async def control(self, name: str, verb: str, parameters: Iterable[str]) -> None:
        """Load or unload a model."""
        given = [parameter for parameter in parameters if parameter != "unload_dependents"]
        if given:
            raise UnsupportedError(
                f"unsupported parameter {min(given)!r:.40}: models are loaded as the server is configured"
            )
        if verb not in ("load", "unload"):
            raise UnknownModelError(f"unknown action {verb!r:.40}; models have load and unload")
        if not self.settings.model_control:
            raise CallerError(
                "this server does not let clients load or unload models: start it with --model-control"
            )
        try:
            await (self.repository.load(name) if verb == "load" else self.repository.unload(name))
        except AsynctrtError as error:
            # Only the log may say where the server's files are.
            if not isinstance(error, UnknownModelError):
                logger.warning("cannot %s model %s: %s", verb, name, error)
            raise told(error) from error

    async def decompressed(
        self, coding: bytes, body: Body, hold: Hold, client: Hashable, nbytes_max: int | None = None
    ) -> Body:
        """Decompress a body, in a thread if the result may be large.

        :param hold: is set to the memory of the result.
        :param nbytes_max: the largest size of the result. Default: ``max_body``.
        """
        if coding not in (b"gzip", b"deflate"):
            raise _CodingError(f"unknown Content-Encoding {coding!r:.40}; supported: gzip, deflate")
        if nbytes_max is None:
            nbytes_max = self.settings.max_body
        if len(body) <= OFF_LOOP_NBYTES_MIN:
            # A few bytes may expand a thousandfold.
            with suppress(TooLargeError):
                return decompress(body, min(OFF_LOOP_NBYTES_MIN, nbytes_max))
        if not await hold.reserve(min(nbytes_max, inflated_nbytes_max(len(body)))):
            raise QueueFullError(self.memory.refuse())
        inflated = await self.worker.run(partial(decompress, body, nbytes_max), client, hold)
        hold.set(len(inflated))
        return inflated

    async def compressed(self, headers: Headers, answer: Answer, client: Hashable) -> Answer:
        """Compress an inference's answer if it is large enough and the client accepts that.

        No other answers are compressed: NVIDIA's asyncio client decompresses only inferences.
        """
        nbytes = sum(len(piece) for piece in answer.body)
        coding = (
            accepted_coding(headers.get(b"accept-encoding", b"")) if nbytes >= COMPRESS_NBYTES_MIN else None
        )
        if coding is None or any(name == "Content-Encoding" for name, _ in answer.headers):
            return answer
        work = partial(compress, coding, answer.body)
        body = await self.worker.run(work, client) if nbytes >= OFF_LOOP_NBYTES_MIN else work()
        added = (("Content-Encoding", coding), ("Vary", "Accept-Encoding"))
        return answer._replace(headers=answer.headers + added, body=(body,))


def pages_alone(pages: Mapping[str, Page], settings: ServerSettings) -> Api:
    """Return an API of pages and nothing else, without a token, under the server's own names."""
    alone = replace(settings, tokens=())
    return Api(Repository(), alone, dict(pages), checks_hosts=True, has_models=False)


def _json_nbytes_of(route: ModelRoute, headers: Headers, body: Body) -> int:
    """Return the size of a body's JSON part in bytes."""
    length = _stated_nbytes(headers.get(b"inference-header-content-length", b""))
    return len(body) if length is None or route.verb == "predict" else length


def _stated_nbytes(length: bytes) -> int | None:
    """Return the value of a header that counts bytes; ``None`` if it does not, or has over 18 digits."""
    return int(length) if length.isdigit() and len(length) < 19 else None


def _decoded(
    served: ServedModel, route: ModelRoute, headers: Headers, body: Body, between: Pause
) -> DecodedRequest:
    """Decode an inference request as its route and headers say."""
    length = headers.get(b"inference-header-content-length")
    if route.verb == "predict":
        if length is not None:
            raise RequestError(
                "plain JSON is not followed by raw tensors: leave out Inference-Header-Content-Length, or "
                "use KServe V2 (/v2/models/NAME/infer)"
            )
        return served.codec.decode_plain(body, between)
    if length is None:
        try:
            return served.codec.decode(body, len(body), between)
        except RequestError as error:
            is_raw = headers.get(b"content-type", b"").startswith(b"application/octet-stream")
            if type(error) is RequestError and (is_raw or any(sign in str(error) for sign in RAW_SIGNS)):
                raise RequestError(f"{error}. {RAW_TENSORS}") from error
            raise
    if length == b"0":
        return served.codec.decode_raw(body, between)
    if (head_nbytes := _stated_nbytes(length)) is not None:
        return served.codec.decode(body, head_nbytes, between)
    raise RequestError(f"Inference-Header-Content-Length must be a number of bytes, not {length!r:.40}")


def encoded_answer(head: bytes, tensors: Sequence[Buffer], inference: Inference) -> Answer:
    """Return the answer to an inference: its JSON head, then its raw tensors, if any."""
    if not tensors:
        return Answer(200, (("Content-Type", "application/json"),), (head,), inference)
    headers = (
        ("Content-Type", "application/octet-stream"),
        ("Inference-Header-Content-Length", str(len(head))),
    )
    return Answer(200, headers, (head, *tensors), inference)


def json_answer(content: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    """Return an answer with a JSON body."""
    return Answer(status, (("Content-Type", "application/json"), *headers), (dump(content),))


def error_answer(error: BaseException, asked: Headers | None = None) -> Answer:
    """Return the answer to a failed request: KServe's ``{"error": ...}`` with the error's status."""
    if not isinstance(error, AsynctrtError):
        known = (asked or {}).get(ID_HEADER, b"").decode("latin-1")
        extra = {"request_id": known} if known else None
        logger.error("a request failed with an internal error", exc_info=error, extra=extra)
        return json_answer({"error": OUR_ERROR}, 500)
    status = error.http_status
    headers: tuple[tuple[str, str], ...] = (("Asynctrt-Error", type(error).__name__),)
    if isinstance(error, _MethodError):
        status, headers = 405, (("Allow", error.allowed),)
    elif isinstance(error, _CodingError):
        headers = (("Accept-Encoding", "gzip, deflate"),)
    elif isinstance(error, UpgradeError):
        headers = (("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"))
    elif isinstance(error, ForeignError):
        headers = (("Asynctrt-Error", "UnauthorizedError"),)
    elif isinstance(error, UnauthorizedError):
        headers += (("WWW-Authenticate", "Bearer"),)
    else:
        headers += retry_after(error)
    return json_answer({"error": str(error)}, status, headers)


class _MethodError(RequestError):
    """The path does not accept the method."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class ForeignError(UnauthorizedError):
    """The request's host, or the page that sent it, is not allowed. A token makes no difference."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"


class UpgradeError(RequestError):
    """The path is a websocket's, but the request does not ask for a websocket of a supported version."""

    http_status = 426


class _CodingError(RequestError):
    """The body has an unsupported content encoding."""

    http_status = 415


def _name_of(host: str) -> str:
    """Return a host in lower case without its port, or an empty string if it is not a host."""
    match = HOST.fullmatch(host.lower())
    return "" if match is None else match[1] or match[2]


def _is_address(name: str) -> bool:
    """Return whether a host name is an address or ``localhost``."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _allow(method: str, allowed: str, hint: str = "") -> None:
    if method != allowed and not (method == "HEAD" and allowed == "GET"):
        raise _MethodError(f"this path accepts {allowed}, not {method:.20}{hint}", allowed)


def _route(path: bytes) -> ModelRoute | None:
    """Parse a model's path from both ends, since names may hold slashes, quoted or not."""
    parts = path[len(MODELS) :].decode("latin-1").rstrip("/").split("/")
    verb = parts.pop() if len(parts) > 1 and parts[-1] in VERBS else ""
    return _model_route(parts, verb)


def _plain_route(path: bytes) -> ModelRoute | None:
    """Parse a model's path of plain JSON."""
    text = path[len(PLAIN_MODELS) :].decode("latin-1").rstrip("/")
    verb = "predict" if text.endswith(PREDICT) else "status"
    return _model_route(text.removesuffix(PREDICT).split("/"), verb)


def _model_route(parts: list[str], verb: str) -> ModelRoute | None:
    version = ""
    if len(parts) > 2 and parts[-2] == "versions":
        version = unquote(parts.pop())
        parts.pop()
    name = unquote("/".join(parts))
    return ModelRoute(name, version, verb) if name else None
