"""Read HTTP/1.1 requests from bytes, without sockets: framing and its limits. The only importer of httptools.

If the end of a request is not certain, it is refused: where a proxy and a server disagree about it, one
client's bytes pass for another's request. After a refusal nothing more is read, and nothing of it is kept.
"""

import logging
from typing import Any, Final, Protocol

from asynctrt.errors import MissingExtraError
from asynctrt.serving.assembly import ASSEMBLED_NBYTES_MIN, Assembly
from asynctrt.serving.memory import UNCOUNTED_NBYTES, ClientPace, Hold
from asynctrt.serving.overhead import Overhead
from asynctrt.serving.responses import OUR_ERROR

try:
    import httptools
except ImportError as error:
    raise MissingExtraError("serving needs httptools: pip install 'asynctrt[serve]'") from error

PIECES_MAX: Final = 1024
PIECES_NBYTES_MAX: Final = UNCOUNTED_NBYTES
"""Limits on the pieces of a body, and their bytes, kept separate until the body is complete. Joining more
would block the event loop: 40 ms for 60 MiB."""

SLICE_NBYTES: Final = 2 << 10
"""Bytes parsed before asking the sink whether to continue. At worst they are 79 requests, or 340 chunks: half
a millisecond."""
LONG_SLICE_NBYTES: Final = 8 << 10
"""The same for a chunked body whose last slice had chunks of a fair size."""
FAIR_PIECES: Final = 4
"""The most pieces of a body in such a slice."""
NOTHING: Final = memoryview(b"")
HEAD_END: Final = b"\r\n\r\n"

PATH_NBYTES_MAX: Final = 8 << 10

KNOWN_HEAD_NBYTES_MAX: Final = 1024
KNOWN_HEADERS_MAX: Final = 32
"""Heads with more bytes or headers are not cached: each open connection keeps its last one."""

KNOWN_IN_VAIN_MAX: Final = 8
"""A connection whose heads differ each time caches this many in a row, and then stops."""

SINGLE: Final = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"inference-header-content-length",
        b"origin",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that a request may have only once: given two, a proxy may have checked the one that is not used."""

DIFFERENT: Final = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
"""Headers with which a request does not simply end after ``Content-Length`` bytes."""

logger = logging.getLogger("asynctrt.serving")


class HttpRequest:
    """One complete request."""

    __slots__ = (
        "began_ns",
        "body",
        "headers",
        "hold",
        "is_authorized",
        "is_broken",
        "keep_alive",
        "known",
        "method",
        "path",
        "version",
    )

    def __init__(
        self,
        method: bytes,
        path: bytes,
        version: str,
        headers: dict[bytes, bytes],
        *,
        keep_alive: bool,
        known: "KnownHead | None" = None,
    ) -> None:
        self.method = method
        self.path = path
        """The target's path: without a query, and without the host that a proxy's client sends."""
        self.version = version
        self.headers = headers
        self.body: bytes | bytearray | memoryview = b""
        self.keep_alive = keep_alive
        self.known = known
        """The head that it shares with the previous request, if it does."""
        self.hold: Hold | None = None
        """The memory of its body, if that is large."""
        self.began_ns = 0
        self.is_authorized = False
        """Whether its token, host and origin were checked before its body was read."""
        self.is_broken = False
        """Whether it, or the input behind it, was refused before its end was read."""

    @property
    def is_websocket(self) -> bool:
        """Whether it requests a websocket."""
        is_asked = self.headers.get(b"upgrade", b"").lower() == b"websocket"
        return is_asked and self.method == b"GET" and self.version == "1.1"


class KnownHead:
    """A head that was parsed and accepted, cached so that the same bytes need not be parsed again."""

    __slots__ = (
        "admitted",
        "has_body",
        "head",
        "head_nbytes",
        "headers",
        "method",
        "nbytes",
        "path",
        "route",
    )

    def __init__(self, head: bytes, request: HttpRequest, body_nbytes: int) -> None:
        self.head = head
        self.head_nbytes = len(head)
        self.nbytes = len(head) + body_nbytes
        self.has_body = body_nbytes > 0
        self.method = request.method
        self.path = request.path
        # A copy, since the request's own headers receive its id.
        self.headers = request.headers.copy()
        self.admitted: int | None = None
        """Set by the sink: the version of the rules by which it admitted a request with this head."""
        self.route: Any = None
        """Set by the sink: where its requests go, if that needs no further look at them."""

    @classmethod
    def of(cls, request: HttpRequest, fed: bytes, body_nbytes: int) -> "KnownHead | None":
        """Return the head of a request, if ``fed`` is that request and cannot be read differently.

        :param fed: the bytes in which the request comes first. No request was unfinished before them.
        :param body_nbytes: its ``Content-Length``, or 0.
        """
        end = len(fed) - body_nbytes
        headers = request.headers
        if (
            request.version != "1.1"
            or not len(HEAD_END) <= end <= KNOWN_HEAD_NBYTES_MAX
            or len(headers) > KNOWN_HEADERS_MAX
            or body_nbytes > UNCOUNTED_NBYTES
            or not DIFFERENT.isdisjoint(headers)
        ):
            return None
        head = fed[:end]
        # It is one head if its first empty line is its end, even to a parser that accepts a lone CR or LF.
        is_one = head.find(HEAD_END) + len(HEAD_END) == end
        if not is_one or not head.count(b"\r") == head.count(b"\n") == head.count(b"\r\n"):
            return None
        return cls(head, request, body_nbytes)

    def request(self) -> HttpRequest:
        """Return a new request with this head."""
        return HttpRequest(self.method, self.path, "1.1", self.headers.copy(), keep_alive=True, known=self)


class RequestSink(Protocol):
    """A reader's interface to the connection that it reads for."""

    def wants_more(self) -> bool:
        """Return whether to continue parsing the input: there is room, and time."""

    def admit(self, request: HttpRequest) -> None:
        """Refuse a request before its body if its head suffices to refuse it."""

    def reserve(self, request: HttpRequest, nbytes: int) -> None:
        """Hold memory for ``nbytes`` of a body, or stop reading until there is some."""

    def take(self, request: HttpRequest) -> None:
        """Answer a complete request, or queue it."""

    def switch(self, request: HttpRequest, rest: bytes) -> None:
        """Open the websocket that a request asks for; ``rest`` was read after it."""

    def refuse(self, request: HttpRequest, status: int, why: str) -> None:
        """Refuse a request that was read in part."""


class RequestReader:
    """Splits a connection's bytes into requests.

    :param sink: receives the requests. It and its reader refer to each other until :meth:`close`.
    :param max_headers: the most bytes of a head, of trailers, or of a chunk's extensions.
    :param max_body: the most bytes of a body.
    :param has_websockets: whether the sink opens websockets.
    """

    def __init__(self, sink: RequestSink, *, max_headers: int, max_body: int, has_websockets: bool) -> None:
        self._sink = sink
        self._max_headers = max_headers
        self._max_body = max_body
        self._has_websockets = has_websockets
        self._parser: Any = httptools.HttpRequestParser(self)
        self._tick = 0
        self.began: int | None = None
        """The tick in which the first byte of an unfinished request was read."""
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_nbytes = 0
        self._unread_nbytes = 0
        self._request: HttpRequest | None = None
        self._has_body = False
        self._is_resuming = False
        self._body: list[bytes | bytearray] = []
        self._body_nbytes = 0
        self._announced_nbytes = self._reserved_nbytes = 0
        self._pace = ClientPace(0)
        self._assembly: Assembly | None = None
        self._websocket: HttpRequest | None = None
        # The bytes being fed, until a request in them is complete, if none was unfinished before them.
        self._fed: bytes | None = None
        self._known: KnownHead | None = None
        self._known_in_vain = 0
        self.rest = NOTHING
        """Input that has not been parsed yet."""
        self._pieces = 0
        """Pieces of a body in the last parsed slice."""
        self._overhead = Overhead()

    def __repr__(self) -> str:
        state = "closed" if self._parser is None else "idle" if self.began is None else "reading"
        return f"<RequestReader {state} body={self._body_nbytes}>"

    def keep(self, data: bytes) -> None:
        """Keep bytes for :meth:`go_on` to parse."""
        self.rest = memoryview(bytes(self.rest) + data)

    def feed(self, data: bytes, tick: int) -> None:
        """Parse bytes, and pass each request that they complete to the sink, while it wants more."""
        self._tick = tick
        if self.began is not None:
            self.rest = memoryview(data)
            self.go_on(tick)
            return
        known = self._known
        if known is not None and len(data) == known.nbytes and data.startswith(known.head):
            self._feed_known(known, data)
            return
        self._fed = data
        self.rest = memoryview(data)
        self.go_on(tick)
        self._fed = None

    def go_on(self, tick: int) -> None:
        """Parse a slice of the input, and more while the sink wants more."""
        self._tick = tick
        while self.rest and self._parser is not None:
            nbytes = self._slice_nbytes()
            piece, self.rest = self.rest[:nbytes], self.rest[nbytes:]
            self._parse(piece)
            if self.rest and not self._sink.wants_more():
                return
        if not self.rest or self._parser is None:
            self.rest = NOTHING  # Even an empty view would refer to the whole input.

    def _slice_nbytes(self) -> int:
        """Return how many bytes to parse at a time."""
        if self._request is None:
            return SLICE_NBYTES
        left = self._announced_nbytes - self._body_nbytes
        if left > 0:
            return max(left, SLICE_NBYTES)  # It is a single piece.
        return LONG_SLICE_NBYTES if 0 < self._pieces <= FAIR_PIECES else SLICE_NBYTES

    def _parse(self, data: memoryview) -> None:
        """Pass bytes to the parser, which calls back below."""
        rest = data
        # After a request with an Upgrade header, the parser returns the rest, to be parsed anew.
        while self._parser is not None and len(rest):
            fed = rest
            rest = NOTHING
            position = None
            request, body_nbytes, self._pieces = self._request, self._body_nbytes, 0
            try:
                self._parser.feed_data(fed)
            except httptools.HttpParserUpgrade as upgrade:
                position = upgrade.args[0]
            except httptools.HttpParserCallbackError:
                logger.exception("failed to parse a request")
                self._refuse(500, OUR_ERROR)
            except httptools.HttpParserError as error:
                self._refuse(400, f"not a valid HTTP request: {error}")
            else:
                if self.began is not None:
                    self._count(len(fed))
                if request is not None and request is self._request:
                    self._weigh(len(fed), self._body_nbytes - body_nbytes)
            if position is not None:
                # Not in the except block, or that exception would be the context of every later error.
                rest = self._after_upgrade(fed[position:])

    def _weigh(self, nbytes: int, body_nbytes: int) -> None:
        """Refuse a body that arrives in tiny chunks."""
        if self._overhead.add(nbytes, body_nbytes):
            self._refuse(400, "the body comes in chunks that are too small: send larger ones")

    def _feed_known(self, known: KnownHead, data: bytes) -> None:
        """Do what the parser would do with the same head and a body of its length."""
        self._known_in_vain = 0
        request = known.request()
        try:
            if known.has_body:
                self._sink.admit(request)
                if self._parser is None:
                    return  # It was refused.
                request.body = data[known.head_nbytes :]
            self._sink.take(request)
        except Exception:
            logger.exception("failed to parse a request")
            self._refuse(500, OUR_ERROR)

    def _remember(self, request: HttpRequest) -> None:
        """Cache the head of a complete request, if that may be of use."""
        fed, self._fed = self._fed, None
        if not request.keep_alive:
            self._known = None  # The parser reads no further requests, nor does this.
        elif fed is not None and self._known_in_vain < KNOWN_IN_VAIN_MAX:
            self._known_in_vain += 1
            self._known = KnownHead.of(request, fed, self._announced_nbytes)

    def lags(self, tick: int, ticks_max: int) -> bool:
        """Return whether a body that memory is held for arrives too slowly to be complete in time."""
        request = self._request
        if request is None or request.hold is None:
            return False
        return self._pace.is_low(tick, self._body_nbytes, self._reserved_nbytes, ticks_max)

    def restart(self, tick: int) -> None:
        """Restart the time limit of an unfinished request: until now its client could not continue."""
        if self.began is not None:
            self.began = tick
            self._pace = ClientPace(tick)

    def close(self) -> None:
        """Stop reading, and release the input."""
        self._parser = None
        self.began = None
        self._body = []
        self._assembly = None
        self._headers = {}
        self._request = self._websocket = None
        self._known = self._fed = None
        self.rest = NOTHING

    def _count(self, nbytes: int) -> None:
        """Count bytes that completed nothing: an unfinished header, trailer or chunk extension."""
        # It is -1 after a piece in which the request began or its body grew, because it is unknown how much
        # of that piece belongs to what follows.
        self._unread_nbytes += nbytes if self._unread_nbytes >= 0 else 1
        if self._unread_nbytes > self._max_headers:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the headers exceed {self._max_headers} bytes")

    def _refuse(self, status: int, why: str) -> None:
        if self._parser is not None:
            request = self._request or HttpRequest(b"", self._url, "1.1", {}, keep_alive=False)
            self.close()
            self._sink.refuse(request, status, why)

    def _after_upgrade(self, rest: memoryview) -> memoryview:
        """Continue after a request with an ``Upgrade`` header; return the bytes still to be read."""
        if self._parser is None:
            return NOTHING
        request, self._websocket = self._websocket, None
        if request is not None:
            read = bytes(rest) + bytes(self.rest)
            self.rest = NOTHING
            self._sink.switch(request, read)
            return self.rest
        self._parser = httptools.HttpRequestParser(self)
        if self._request is not None:
            # The parser also leaves the body to another protocol. The body would then be read as the next
            # request, as in request smuggling. So a new parser is given the body's length, and reads it.
            self._is_resuming = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % self._framing())
            self._is_resuming = False
        return rest

    def _framing(self) -> bytes:
        if b"transfer-encoding" in self._headers:
            return b"Transfer-Encoding: chunked\r\n"
        return b"Content-Length: %s\r\n" % self._headers[b"content-length"]

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._is_resuming or self._parser is None:
            return
        self.began = self._tick
        self._unread_nbytes = -1
        self._url = b""
        self._headers = {}
        self._head_nbytes = 0
        self._request = None
        self._body = []
        self._assembly = None
        self._body_nbytes = self._announced_nbytes = 0
        self._reserved_nbytes = UNCOUNTED_NBYTES
        self._overhead = Overhead()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request's target."""
        if self._is_resuming or self._parser is None:
            return
        self._url += url
        if len(self._url) > PATH_NBYTES_MAX:
            self._refuse(414, f"the request's target exceeds {PATH_NBYTES_MAX} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers, which follow a chunked body, are ignored."""
        if self._request is not None or self._parser is None:
            return
        name = name.lower()
        headers = self._headers
        if name in headers:
            if name in SINGLE:
                self._refuse(400, f"a request has one header {name.decode('latin-1')}, not two")
                return
            value = headers[name] + b", " + value
        headers[name] = value
        self._head_nbytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        """Check the head, and refuse an unacceptable request before its body."""
        if self._request is not None or self._parser is None:
            return
        if self._head_nbytes > self._max_headers:
            self._refuse_headers()
            return
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        method = parser.get_method()
        refusal = self._refusal(method, version)
        if refusal is not None:
            self._refuse(*refusal)
            return
        length = headers.get(b"content-length", b"0")
        self._has_body = length.strip(b"0") != b"" or b"transfer-encoding" in headers
        request = HttpRequest(
            method, _path_of(self._url), version, headers, keep_alive=parser.should_keep_alive()
        )
        self._request = request
        self._announced_nbytes = int(length) if b"transfer-encoding" not in headers else 0
        if self._announced_nbytes > self._max_body:
            self._refuse(
                413,
                f"the body has {self._announced_nbytes} bytes; this server accepts at most {self._max_body}",
            )
        elif self._has_body:
            self._sink.admit(request)

    def _refusal(self, method: bytes, version: str) -> tuple[int, str] | None:
        """Return the status and reason with which to refuse the head; ``None`` if it is acceptable."""
        headers = self._headers
        if version != "1.1" and version != "1.0":
            return 505, f"this server speaks HTTP/1.1, not HTTP/{version}"
        if version == "1.1" and b"host" not in headers:
            return 400, "an HTTP/1.1 request must have a Host header"
        if method == b"CONNECT":
            return 501, "this server is not a proxy"
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if version == "1.0":
                return 400, "an HTTP/1.0 request has a Content-Length, not a Transfer-Encoding"
            if coding.lower() != b"chunked":
                return 501, f"unknown Transfer-Encoding {coding!r:.40}; supported: chunked"
        return None

    def on_body(self, piece: bytes) -> None:
        """Take a piece of the body."""
        if self._parser is None:
            return
        self._unread_nbytes = -1
        self._pieces += 1
        assembly = self._assembly
        if assembly is not None:
            assembly.add(piece)
        else:
            self._keep(piece)
        self._body_nbytes += len(piece)
        if self._body_nbytes > self._max_body:
            self._refuse(413, f"the body exceeds the {self._max_body} bytes that this server accepts")
        elif self._body_nbytes > self._reserved_nbytes and self._request is not None:
            # Reserve all that was announced, so that an upload once begun can end; else twice what is there.
            self._reserved_nbytes = max(self._announced_nbytes, min(2 * self._body_nbytes, self._max_body))
            if self._request.hold is None:
                self._pace = ClientPace(self._tick)
            self._sink.reserve(self._request, self._reserved_nbytes)

    def _keep(self, piece: bytes) -> None:
        """Keep a piece of a body until the body is complete, or large enough to be assembled in place."""
        pieces = self._body
        if self._announced_nbytes >= ASSEMBLED_NBYTES_MIN and self._body_nbytes > PIECES_NBYTES_MAX:
            # Not earlier: announced bytes may never arrive.
            assembly = self._assembly = Assembly(self._announced_nbytes)
            for kept in (*pieces, piece):
                assembly.add(kept)
            pieces.clear()
            return
        if len(pieces) == PIECES_MAX or (len(pieces) > 1 and self._body_nbytes > PIECES_NBYTES_MAX):
            # Chunks of one byte each would take many times the memory of their content.
            self._body = pieces = [bytearray(b"".join(pieces))]
        if pieces and type(pieces[0]) is bytearray:
            pieces[0] += piece
        else:
            pieces.append(piece)

    def on_message_complete(self) -> None:
        """Give the complete request to the sink."""
        request = self._request
        if self._parser is None or request is None:
            return
        if self._parser.should_upgrade():
            if self._has_body:
                return  # The body has only been skipped so far.
            if self._has_websockets and request.is_websocket:
                self._websocket = request
                return
        body, self._body = self._body, []
        assembly, self._assembly = self._assembly, None
        if assembly is not None:
            request.body = assembly.whole()
        else:
            request.body = body[0] if len(body) == 1 else b"".join(body)
        self._request = None
        self._headers = {}
        self.began = None
        self._remember(request)
        self._sink.take(request)


def _path_of(url: bytes) -> bytes:
    """Return a target's path, without its query and the host that a proxy's client may send."""
    path = url.partition(b"?")[0]
    if path.startswith(b"/"):
        return path
    try:
        return httptools.parse_url(url).path or b"/"
    except httptools.HttpParserError:
        return path
