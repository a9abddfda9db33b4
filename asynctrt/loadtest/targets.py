"""The protocol of a load test's target, and the names of targets.

::

    model.onnx, package.module:factory      an engine, opened in the process that sends
    ws://HOST:PORT/v2/models/NAME/ws        asynctrt's websocket
    http://HOST:PORT/v2/models/NAME         any KServe V2 server over HTTP
    grpc://HOST:PORT/NAME                   any KServe V2 server over gRPC
    http://HOST:PORT/PATH                   any HTTP server: an optional body, and an answer
    ws://HOST:PORT/PATH                     any websocket: a message, and an answer of one or several
    package.module:coroutine_function       any coroutine function
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import urlsplit

from asynctrt._util.validation import changed
from asynctrt.errors import OptionsError, UsageError
from asynctrt.loadtest.tls import Tls
from asynctrt.options import Options
from asynctrt.tensors import Array, TensorSpec

ANSWER_NBYTES_MAX: Final = 256 << 20
"""Limit on the bytes of one answer, so that a server cannot exhaust the memory of a load test."""

SCHEMES: Final = ("http", "https", "grpc", "grpcs", "ws", "wss")

SEND_APART: Final = (
    "several processes can only send to a server or call a coroutine function module:name: serve the engine, "
    "and give its address"
)

PASSWORD: Final = re.compile(r"(://)[^/?#@\s]*@")
"""Matches the user and the password before the host of an address."""

TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Matches the name of a header or method."""

OURS: Final = frozenset(
    {"content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"}
    | {"inference-header-content-length", "sec-websocket-key", "sec-websocket-version"}
    | {"sec-websocket-accept", "sec-websocket-extensions"}
)
"""Headers that describe how a message is sent, so only its sender can set them."""

Headers = list[tuple[str, str]]
"""Headers in the order in which they are sent."""

Call = Callable[[Mapping[str, Array]], Awaitable[Mapping[str, Array]]]
"""A function as a target: takes the request's arrays by name, and returns the answer's arrays."""


def without_password(text: str) -> str:
    """Return a text with the users and passwords of its addresses hidden."""
    return PASSWORD.sub(r"\1…@", text)


@dataclass(frozen=True, slots=True)
class BatchCounters:
    """Counters of a target, in total or since an earlier reading. Times are in ns, summed over requests."""

    requests: int
    rows: int
    batches: int
    queue_ns: int
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int
    by_rows: Mapping[int, int]
    """Batches by their number of rows."""

    def since(self, before: "BatchCounters") -> "BatchCounters":
        """Return the difference from an earlier reading."""
        sizes = sorted(self.by_rows.keys() | before.by_rows.keys())
        by_rows = {rows: self.by_rows.get(rows, 0) - before.by_rows.get(rows, 0) for rows in sizes}
        names = [item.name for item in fields(self) if item.name != "by_rows"]
        grown = {name: getattr(self, name) - getattr(before, name) for name in names}
        return BatchCounters(**grown, by_rows={rows: count for rows, count in by_rows.items() if count})


@runtime_checkable
class Target(Protocol):
    """Something that answers requests. It belongs to the event loop on which it was opened."""

    name: str
    """The model's name."""
    kind: str
    """``engine``, ``function``, ``http``, ``grpc`` or ``websocket``."""
    inputs: tuple[TensorSpec, ...]
    """The inputs of one row; empty if they are unknown."""

    @property
    def in_flight_max(self) -> int | None:
        """Return the limit on rows in flight, such as an engine's queue length; ``None`` if it is unknown."""

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        """Encode a request as far as possible, because it is sent many times."""

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        """Send a prepared request. Cancelling the future gives up the request."""

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        """Return the arrays of an answer by name."""

    async def batches(self) -> BatchCounters | None:
        """Return the target's counters so far; ``None`` if it has none."""

    async def aclose(self) -> None:
        """Close everything that was opened for this target."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Name a target. Unlike the target itself, its spec can be sent to other processes.

    :param where: a path or an address, as in the module's description. Reports omit a user and a password in
        it.
    :param token: the server's bearer token.
    :param device: the device of an engine.
    :param options: the options of an engine.
    :param body: the body to send to a server that does not speak KServe; see
        :mod:`asynctrt.loadtest.templates`.
    :param headers: the headers of every request, each as ``Name: value``.
    :param method: the HTTP method. Default: POST with a body, GET without.
    :param until_message: how to recognise the last message of a websocket's answer; see
        :func:`asynctrt.loadtest.streams.ending`. Default: an answer is one message.
    :param tls: whom to trust over TLS, and the client's own certificate.
    """

    where: str
    token: str | None = field(default=None, repr=False)
    device: str = "host"
    options: Options = field(default_factory=Options)
    body: str | bytes | None = None
    headers: tuple[str, ...] = field(default=(), repr=False)
    method: str | None = None
    until_message: str | None = None
    tls: Tls = field(default_factory=Tls)

    @property
    def scheme(self) -> str:
        """The scheme of the address, such as ``http``; empty for an engine.

        :raises UsageError: for an unknown scheme.
        """
        scheme, mark, _ = self.where.partition("://")
        if not mark:
            return ""
        if scheme.lower() not in SCHEMES:
            raise UsageError(
                f"{self.where!r}: unknown scheme {scheme!r}; valid schemes: {', '.join(SCHEMES)}"
            )
        return scheme.lower()

    @property
    def is_server(self) -> bool:
        """Whether the target is a server, so that several processes can send to it."""
        return bool(self.scheme)

    @property
    def is_plain(self) -> bool:
        """Whether the target is an HTTP address or a websocket that does not speak KServe."""
        if self.scheme not in ("http", "https", "ws", "wss"):
            return False
        try:
            path = urlsplit(self.where).path.rstrip("/")
        except ValueError:
            return False
        is_kserve = not path or path.endswith("/v2") or "/v2/" in path
        return not is_kserve or self.body is not None or self.method is not None

    def describe(self) -> dict[str, Any]:
        """Describe the target for a report, without the token, headers and passwords."""
        where = without_password(self.where)
        described: dict[str, Any] = {"where": where}
        if not self.is_server:  # A server has its own.
            described |= {"device": self.device, "options": changed(self.options)}
        if self.tls.insecure:
            described["insecure"] = True
        if self.is_plain:  # Leave out the headers, which may be secret.
            body = f"{len(self.body)} bytes" if isinstance(self.body, bytes) else self.body
            described |= {"body": body, "method": self.method, "until_message": self.until_message}
        return described


def headers_of(spec: TargetSpec) -> Headers:
    """Return the headers of every request in the given order, followed by the token's, if there is one.

    :raises OptionsError: for an invalid header, a header that describes how a message is sent, or a second
        authorization.
    """
    found = [_header(text) for text in spec.headers]
    for name, _ in found:
        if name.lower() in OURS:
            raise OptionsError(f"the header {name!r} cannot be given: it says how the message is sent")
    has_password = PASSWORD.search(spec.where) is not None
    if has_password + bool(spec.token) + has(found, "Authorization") > 1:
        raise OptionsError(
            "a token, the header Authorization, and a user in the address say the same: give only one of them"
        )
    if spec.token:
        found.append(("Authorization", f"Bearer {spec.token}"))
    return found


def has(headers: Sequence[tuple[str, str]], name: str) -> bool:
    """Return whether a header is present, ignoring case."""
    return any(given.lower() == name.lower() for given, _ in headers)


def _header(text: str) -> tuple[str, str]:
    name, mark, value = text.partition(":")
    if not mark or not TOKEN.fullmatch(name.strip()):
        raise OptionsError(f"{text!r} is not a header: write 'Name: value'")
    if not value.strip().isprintable():
        raise OptionsError(f"the header {name.strip()!r} has a line break, or another character that ends it")
    return name.strip(), value.strip()
