"""Speak HTTP/1.1 on an event loop: sockets, answers, timeouts. ``http_reader.py`` reads the requests.

An inference takes a short path: its body is decoded in the callback that delivers its last byte, and its
answer is written in the callback of its batch, with no task in between. Every other request is a task that
awaits :meth:`Api.respond`.
"""

import asyncio
import fcntl
import socket
import sys
import termios
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol

from asynctrt._util import clock
from asynctrt.errors import (
    AsynctrtError,
    OverloadError,
    RequestError,
    TooLargeError,
    UnauthorizedError,
)
from asynctrt.kserve.codec import FAST_NBYTES
from asynctrt.serving.admission import Caller, Inference, address_of
from asynctrt.serving.api import (
    INFERENCES,
    Answer,
    Api,
    Headers,
    ModelRoute,
    encoded_answer,
    error_answer,
)
from asynctrt.serving.coding import accepted_coding
from asynctrt.serving.http_reader import HttpRequest, RequestReader
from asynctrt.serving.log import AccessLog
from asynctrt.serving.memory import UNCOUNTED_NBYTES, ClientAccount, ClientPace, Hold
from asynctrt.serving.paced import SLICE_NBYTES, PacedTransport
from asynctrt.serving.places import Places
from asynctrt.serving.responses import ID_HEADER, STOPPING

RATE_MIN: Final = 1024
"""Bytes a second that a client has to read, over ``write_timeout``, of answers that wait for it."""
SWEEP_S: Final = 0.25
"""Seconds between checks of all connections for timeouts."""
SWEEP_CONNECTIONS: Final = 500
"""Connections checked in one turn of the event loop: 0.5 ms."""

CLOSED_MAX: Final = 40
"""Disconnected clients' connections closed in one turn of the event loop: 1 ms. All clients may
disconnect at once."""

JOIN_NBYTES_MAX: Final = SLICE_NBYTES
"""The pieces of a larger body are passed to the transport one by one instead of being joined."""

SPARE: Final = 32
"""Connections beyond ``max_connections``, for health checks and to tell clients that there are too many."""
REFUSED_S: Final = 2.0
"""Time for a refused client to read why and to close."""

PROBE_S: Final = 0.01
"""Delay between a client's end and probing whether it is still there, and between probing and checking."""
TCP_CLOSED: Final = 7
"""The state of a connection that its client has reset, which the event loop sees only on I/O."""

COPIED_NBYTES: Final = 4
"""Bytes read in a nanosecond: even input that is dropped takes time."""

PIPELINE_MAX: Final = 64
PIPELINE_NBYTES_MAX: Final = UNCOUNTED_NBYTES
"""Limits on the requests, and bytes, that a client may send ahead of its answers before reading pauses."""

ERRORS: Final = {401: UnauthorizedError, 413: TooLargeError, 431: TooLargeError, 503: OverloadError}
"""The error for a refusal with a given status; :class:`RequestError` for any other."""

REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
VERSION: Final = b"HTTP/1.1 "
"""The beginning of every answer."""
CONTINUE: Final = VERSION + b"100 Continue\r\n\r\n"
ID_LINE: Final = b"X-Request-ID: %b\r\n"
BINARY_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
    b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\nX-Request-ID: "
)
"""The head of an answer, up to its id."""


class Connection(Protocol):
    """The hub's interface to a connection, whether HTTP or websocket."""

    def check_times(self, tick: int) -> None:
        """Close the connection if a timeout has expired; ``tick`` counts sweeps."""

    def drain(self) -> None:
        """Close the connection once its accepted requests are answered."""

    def abort(self) -> None:
        """Close the connection at once."""


UpgradeHandler = Callable[["HttpConnection", "Hub", "HttpRequest", bytes], None]


class Hub:
    """State that a server's connections share: limits, the Date header, the sweep for timeouts.

    :param upgrade: takes over a connection whose client requests a websocket, given that request and the
        bytes that were read after it.
    """

    def __init__(self, api: Api, upgrade: UpgradeHandler | None = None, log: AccessLog | None = None) -> None:
        self.api = api
        self.settings = api.settings
        self.upgrade = upgrade
        self.log = log
        self.loop = asyncio.get_running_loop()
        self.now_ns = clock.now_ns
        self.connections: dict[Connection, tuple[Places[Any], Hashable]] = {}
        """The open connections, and where each has its place."""
        self.known: Places[Any] = Places(self.settings.max_connections)
        """Connections whose clients were authorized."""
        self.strangers: Places[Any] = Places(self.settings.max_connections + SPARE)
        """Connections whose clients have so far sent only requests that anyone may send, or none."""
        self.is_draining = False
        self.refused = 0
        """Connections refused for lack of room."""
        self.tick = 0
        self.request_ticks = ticks_of(self.settings.request_timeout)
        self.idle_ticks = ticks_of(self.settings.idle_timeout)
        self.write_ticks = ticks_of(self.settings.write_timeout)
        self.write_nbytes_min = RATE_MIN * self.settings.write_timeout
        self.refused_ticks = min(self.write_ticks, ticks_of(REFUSED_S))
        self.has_cors = bool(self.settings.allow_origins)
        self.is_short_of_memory = False
        """Whether clients that send or read slowly should make room for others."""
        self._empty: asyncio.Event = asyncio.Event()
        self._empty.set()
        self.end_of_head = b""
        self._flushes: list[Callable[[], None]] = []
        self._ended: deque[Any] = deque()
        self._sweep()

    def __call__(self) -> "HttpConnection":
        """Return a protocol for a new connection."""
        return HttpConnection(self)

    def add(self, connection: Connection, client: Hashable = None) -> None:
        """Register a new connection, as a stranger's."""
        self.greet(client, connection, connection.abort)
        self.connections[connection] = self.strangers, client
        self._empty.clear()

    def greet(self, client: Hashable, holder: Any, leave: Callable[[], object]) -> None:
        """Give a place to a stranger. If there is none, close the oldest one of the client with the most."""
        while self.known.taken + self.strangers.taken >= self.strangers.places_max and self.strangers.taken:
            self.refused += 1
            self.strangers.free_one()
        self.strangers.take(client, holder, leave)

    def know(self, connection: Connection, client: Hashable) -> bool:
        """Keep a connection whose client was authorized. Return whether there is room for it."""
        places, stranger = self.connections[connection]
        if not self.known.has_room(client):
            self.refused += 1
            return False
        places.give_back(stranger, connection)
        self._settle(connection, client)
        return True

    def replace(self, connection: Connection, by: Connection) -> None:
        """Give a connection's place to another one that continues it."""
        places, client = self.connections.pop(connection)
        places.give_back(client, connection)
        self._settle(by, client)

    def _settle(self, connection: Connection, client: Hashable) -> None:
        self.known.take(client, connection, connection.abort)
        self.connections[connection] = self.known, client

    def discard(self, connection: Connection) -> None:
        """Forget a connection that is gone."""
        place = self.connections.pop(connection, None)
        if place is not None:
            place[0].give_back(place[1], connection)
        if not self.connections:
            self._empty.set()

    def close_soon(self, transport: Any) -> bool:
        """Close a transport whose client has sent its end, a few in each turn of the event loop.

        :returns: the result for ``eof_received``: whether the transport stays open until then. With TLS it
            cannot.
        """
        if transport.get_extra_info("ssl_object") is not None:
            return False
        if not self._ended:
            self.loop.call_soon(self._close_some)
        self._ended.append(transport)
        return True

    def _close_some(self) -> None:
        for _ in range(min(CLOSED_MAX, len(self._ended))):
            self._ended.popleft().close()
        if self._ended:
            self.loop.call_soon(self._close_some)

    def at_end_of_tick(self, flush: Callable[[], None]) -> None:
        """Call ``flush`` after the callbacks that are due now."""
        if not self._flushes:
            self.loop.call_soon(self._flush)
        self._flushes.append(flush)

    def _flush(self) -> None:
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            flush()

    def drain(self) -> None:
        """Close idle connections now, and the others once their accepted requests are answered."""
        self.is_draining = True
        for connection in list(self.connections):
            connection.drain()

    async def wait_empty(self) -> None:
        """Return when no connection is left."""
        await self._empty.wait()

    def close(self) -> None:
        """Close every connection now, and stop the sweep."""
        self._timer.cancel()
        for connection in list(self.connections):
            connection.abort()

    def _sweep(self) -> None:
        self._timer = self.loop.call_later(SWEEP_S, self._sweep)
        self.tick += 1
        self.end_of_head = _end_of_head(self.api.drain)
        self.is_short_of_memory = self.api.memory.is_short(self.now_ns())
        self._check(list(self.connections))

    def _check(self, connections: list[Connection]) -> None:
        """Check the timeouts of some connections, and of the rest after other callbacks had their turn."""
        for connection in connections[-SWEEP_CONNECTIONS:]:
            if connection in self.connections:
                connection.check_times(self.tick)
        del connections[-SWEEP_CONNECTIONS:]
        if connections:
            self.loop.call_soon(self._check, connections)


def ticks_of(seconds: float) -> int:
    """Convert seconds to a number of sweeps, at least 1."""
    return max(1, round(seconds / SWEEP_S))


def _end_of_head(drain: str) -> bytes:
    return (
        f"Date: {formatdate(usegmt=True)}\r\nServer: asynctrt\r\nAsynctrt-Drain-Seconds: {drain}\r\n\r\n"
    ).encode()


class Writing:
    """Distinguishes a client that takes its answers slowly from one that takes none.

    Bytes that wait in the kernel count as not taken: its buffer is so large that a slow client would seem to
    stall for a long time, and then to take much at once.
    """

    __slots__ = ("_hold", "_pace", "_taken", "since")

    def __init__(self) -> None:
        self.since: int | None = None
        """The tick since which answers wait for the client, reset whenever it has taken enough."""
        self._taken: int | None = None
        self._hold: Hold | None = None
        self._pace = ClientPace(0)

    def pause(self, tick: int) -> None:
        """Start measuring: answers wait from now on."""
        self.since = tick
        self._taken = None
        self._pace = ClientPace(tick)

    def resume(self) -> None:
        """Stop measuring: the client has taken them."""
        self.since = self._hold = None

    def count(self, transport: Any, make: Callable[[], Hold]) -> None:
        """Count the memory of unsent bytes, if they are many."""
        nbytes = transport.get_write_buffer_size()
        if self._hold is not None:
            self._hold.set(nbytes)
        elif nbytes > UNCOUNTED_NBYTES:
            self._hold = make()
            self._hold.set(nbytes)

    def is_stalled(self, tick: int, hub: Hub, transport: Any, written: int) -> bool:
        """Return whether the client took too little within ``write_timeout``.

        :param written: the total bytes written to the transport so far, if writing continued meanwhile.
        """
        assert self.since is not None
        taken = written - transport.get_write_buffer_size() - unsent_nbytes(transport)
        if self._taken is None:
            self._taken = taken
        if hub.is_short_of_memory and self._hold is not None:
            done = taken - self._taken
            if self._pace.is_low(tick, done, self._hold.nbytes, hub.request_ticks):
                return True
        if tick - self.since <= hub.write_ticks:
            return False
        if taken - self._taken < hub.write_nbytes_min:
            return True
        self.since, self._taken = tick, taken
        self._pace = ClientPace(tick)
        return False


def unsent_nbytes(transport: Any) -> int:
    """Return how many written bytes the kernel still holds, unacknowledged by the client; 0 if unknown."""
    try:
        raw = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, AttributeError, ValueError):
        return 0
    return int.from_bytes(raw, sys.byteorder)


def is_reset(transport: Any) -> bool:
    """Return whether a client has reset the connection."""
    try:
        state = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except (OSError, AttributeError):
        return False
    return bool(state[0] == TCP_CLOSED)


def end_writing(transport: Any) -> None:
    """Tell the client that nothing more follows, and continue reading."""
    try:
        transport.write_eof()
    except OSError:  # The client has reset the connection, but the transport does not know yet.
        transport.abort()


class HttpConnection(asyncio.Protocol):
    """One connection. Its requests are answered in order, one at a time."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._api = hub.api
        self._turns = hub.api.turns
        self._account: ClientAccount
        """The account of its client, which all the client's connections share."""
        self._transport: Any = None
        # ``None`` once reading has stopped: the connection and its reader refer to each other, which would
        # keep the input in memory after the connection.
        self._reader: RequestReader | None = RequestReader(
            self,
            max_headers=hub.settings.max_headers,
            max_body=hub.settings.max_body,
            has_websockets=hub.upgrade is not None,
        )
        # Complete requests: one is being answered, the others wait behind it.
        self._current: HttpRequest | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._waiting_nbytes = 0
        self._is_throttled = False
        self._is_resting = False
        self._is_short = False
        """Whether it waits for memory for the body being read."""
        self._is_reading = True
        self._is_awaited = False
        """Whether a client waits for ``100 Continue``, which is sent once earlier requests are answered."""
        self._refused: tuple[HttpRequest, Answer] | None = None
        """A refused request whose client waits before its body, and the answer to send after earlier ones."""
        self._inference: Inference | None = None
        self._caller: Caller
        """The caller that its requests are submitted for."""
        self._task: asyncio.Task[None] | None = None
        self._is_known = False
        """Whether its client was authorized."""
        self._until_ns = 0
        """The end of its client's turn."""
        self._is_ending = False
        self._is_handed_over = False
        self._is_half_closed = False
        """Whether its client has stopped sending, but waits for answers."""
        self._has_begun = False
        """Whether the beginning of the current answer was sent."""
        self._is_refused = False
        self._writing = Writing()
        self._touched = hub.tick

    def __repr__(self) -> str:
        return f"<HttpConnection {'busy' if self._current else 'idle'} waiting={len(self._waiting)}>"

    # ---- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._caller = Caller(address_of(transport.get_extra_info("peername")))
        self._account = self._api.account(self._caller)
        self._hub.add(self, self._caller.address)
        if self._hub.is_draining:
            self._is_refused = True
            self._refuse(503, STOPPING)

    def connection_lost(self, exc: Exception | None) -> None:
        # The client has disconnected, so cancel its requests.
        self._end()
        self._hub.discard(self)
        self._waiting.clear()
        self._writing.resume()
        if self._inference is not None:
            self._inference.cancel()
        if self._task is not None:
            # A cancelled task keeps its frame, which refers to the connection and the request's body.
            self._task.cancel()
            self._task = None

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is not None and (self._is_resting or reader.rest):
            reader.keep(data)  # It was read before the pause took effect.
        else:
            self._read(data)

    def _read(self, data: bytes = b"") -> None:
        """Parse new input, or the rest of earlier input, until its client's turn ends."""
        hub, reader, turns, account = self._hub, self._reader, self._turns, self._account
        left_ns = turns.turn_ns - account.spent_ns
        if account.waiting or left_ns <= 0:
            left_ns = turns.left_ns(account)
            if not left_ns:
                if reader is not None:
                    reader.keep(data)
                self._rest()
                return
        now_ns = hub.now_ns
        began_ns = now_ns() - len(data) // COPIED_NBYTES
        self._until_ns = until_ns = began_ns + left_ns
        if reader is not None:
            if data:
                reader.feed(data, hub.tick)
            else:
                reader.go_on(hub.tick)
            if reader.began is not None:
                self._touched = hub.tick
        ended_ns = now_ns()
        turns.spend(account, began_ns, ended_ns)
        if ended_ns >= until_ns:
            self._rest()
        elif reader is not None and reader.rest:
            self._set_reading()

    def wants_more(self) -> bool:
        """Return whether there is room for more requests, and time left in the client's turn."""
        return not (self._is_throttled or self._is_short) and self._hub.now_ns() < self._until_ns

    def eof_received(self) -> bool:
        # A client that has only closed its sending side looks like one that has disconnected.
        is_half_closed = self._has_unanswered and not self._is_ending
        if not is_half_closed or self._transport.get_extra_info("ssl_object") is not None:
            return self._hub.close_soon(self._transport)
        self._is_half_closed = True
        self._hub.loop.call_later(PROBE_S, self._probe)
        return True

    @property
    def _has_unanswered(self) -> bool:
        return self._current is not None or self._has_next

    @property
    def _has_next(self) -> bool:
        """Whether requests were read behind the one being answered."""
        return bool(self._waiting or (self._reader is not None and self._reader.rest))

    def _probe(self) -> None:
        """Send the beginning of the answer: a client that has disconnected resets the connection."""
        if self._current is not None and not self._transport.is_closing():
            self._has_begun = True
            self._transport.write(VERSION)
            self._hub.loop.call_later(PROBE_S, self._look_for_reset)

    def _look_for_reset(self) -> None:
        if not self._transport.is_closing() and is_reset(self._transport):
            self._hub.close_soon(self._transport)

    def pause_writing(self) -> None:
        self._writing.pause(self._hub.tick)

    def resume_writing(self) -> None:
        self._writing.resume()
        self._touched = self._hub.tick
        if self._current is None:
            self._next()

    def _rest(self) -> None:
        """Stop reading until the client's next turn."""
        if not (self._is_resting or self._is_handed_over or self._transport.is_closing()):
            self._is_resting = True
            self._set_reading()
            self._turns.wait(self._account, self._rested)

    def _rested(self) -> None:
        if self._is_handed_over or self._transport.is_closing():
            return
        self._is_resting = False
        if self._reader is not None and self._reader.rest and not self._is_held:
            self._read()
        else:
            # It reads before it can check whose turn it is.
            self._turns.charge(self._account, UNCOUNTED_NBYTES // COPIED_NBYTES)
        self._set_reading()
        if self._is_half_closed and not self._has_unanswered:
            self._close()

    @property
    def _is_held(self) -> bool:
        """Whether it waits for room: for requests to be answered, or for memory."""
        return self._is_throttled or self._is_short

    def _set_reading(self) -> None:
        """Pause or resume reading. Before reading more, parse what was read, in the client's turn."""
        has_rest = self._reader is not None and len(self._reader.rest) > 0
        if has_rest and not self._is_held and not self._is_resting:
            self._rest()
            return
        should_read = not (self._is_resting or self._is_held or has_rest or self._is_half_closed)
        if should_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = should_read
            if should_read:
                self._transport.resume_reading()
                if self._reader is not None:
                    self._reader.restart(self._hub.tick)  # Until now the client could not continue.
            else:
                self._transport.pause_reading()

    # ---- the reader's calls

    def admit(self, request: HttpRequest) -> None:
        """Refuse an unauthorized request before its body; tell a client that waits for it to continue."""
        known, version = request.known, self._api.tokens_version
        if known is not None and known.admitted == version:
            request.is_authorized = True
            return
        try:
            if request.method != b"OPTIONS":
                self._let_in(request)
                if known is not None and not self._api.names_clients:
                    known.admitted = version
        except AsynctrtError as error:
            self.refuse(request, error.http_status, str(error))
            return
        expected = _expected(request)
        if expected is None:
            return
        if expected.lower() != b"100-continue":
            self.refuse(request, 417, "Expect must be 100-continue or absent")
        elif self._current is None and not self._waiting:
            self._transport.write(CONTINUE)
        else:
            self._is_awaited = True  # Sent now, it would seem to answer an earlier request.

    def _let_in(self, request: HttpRequest) -> None:
        """Authorize a request, and keep its connection unless anyone may send the request."""
        self._api.authorize(request.path, request.headers)
        request.is_authorized = True
        if self._is_known or not self._api.is_open(request.path):
            self.know(request.headers)

    def know(self, headers: Headers) -> None:
        """Keep the connection, since the client of a request with these headers was authorized."""
        if self._is_known and not self._api.names_clients:
            return
        self._account = self._api.identify(self._caller, headers)
        if not self._is_known and not self._hub.know(self, self._caller.client):
            raise OverloadError(
                f"the server has {self._hub.settings.max_connections} connections, its limit, or this client "
                "its share of them: close some, or retry later"
            )
        self._is_known = True

    def reserve(self, request: HttpRequest, nbytes: int) -> None:
        """Hold memory for a body; if there is none, stop reading until there is."""
        if request.hold is None:
            request.hold = self._new_hold()
        # Not again while it waits: input that arrives then was read before the pause took effect.
        if not request.hold.is_waiting and not request.hold.grow(nbytes, self._got_memory):
            self._is_short = True
            self._set_reading()

    def _got_memory(self, *, is_granted: bool) -> None:
        """Continue reading a body, or refuse it."""
        self._is_short = False
        if not is_granted:
            self._refuse(503, self._api.memory.refuse())
        self._set_reading()

    def _new_hold(self) -> Hold:
        return Hold(self._account)

    def _go_on(self) -> None:
        """Tell a client that has waited for earlier answers to send its body."""
        self._is_awaited = False
        if self._reader is not None and not self._transport.is_closing():
            self._transport.write(CONTINUE)
            self._reader.restart(self._hub.tick)  # Until now the client was right to wait.

    def take(self, request: HttpRequest) -> None:
        """Answer a complete request, or queue it behind the one being answered."""
        self._is_awaited = False
        if self._is_short and request.hold is not None:
            # Its end had already been read when memory was requested.
            request.hold.set(len(request.body))
            self._is_short = False
            self._set_reading()
        if self._current is None and not self._waiting and self._writing.since is None:
            self._start(request)
        else:
            self._waiting.append(request)
            self._waiting_nbytes += len(request.body)
            self._throttle()

    def switch(self, request: HttpRequest, rest: bytes) -> None:
        """Become a websocket; ``rest`` is what was read after its request."""
        if self._current is not None or self._waiting:
            self.refuse(
                request, 400, "a websocket cannot be opened while an earlier request is being answered"
            )
            return
        assert self._hub.upgrade is not None
        self._hub.upgrade(self, self._hub, request, rest)

    def refuse(self, request: HttpRequest, status: int, why: str) -> None:
        """Refuse a request before its end is read, and stop reading: where the next begins is unknown."""
        self._stop_reading()
        if self._is_ending:
            return
        last = self._waiting[-1] if self._waiting else self._current
        if last is not None and _expected(request) is None:
            # Earlier requests are still being answered: those answers are the last.
            last.keep_alive = False
            last.is_broken = True
            return
        answer = error_answer(ERRORS.get(status, RequestError)(why))._replace(status=status)
        request.keep_alive = False
        request.is_broken = True
        if last is not None:
            request.hold = None
            self._refused = request, answer
            self._waiting.append(request)
            return
        self._current = request
        self._send(answer)

    def _stop_reading(self) -> None:
        """Release the input of an unfinished request; drop what the client still sends."""
        self._is_awaited = False
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._is_short = False
        self._set_reading()  # Further input is dropped.

    # ---- answering

    def _start(self, request: HttpRequest) -> None:
        self._current = request
        self._api.ids.of(request.headers)
        if self._hub.log is not None:
            request.began_ns = clock.now_ns()
        known = request.known
        if known is not None and known.route is not None and request.is_authorized:
            self._infer(known.route, request)
            return
        if not request.is_authorized and not self._is_let_in(request):
            return
        if request.method == b"POST" and b"content-encoding" not in request.headers:
            route = self._api.route(request.path)
            if route is not None and route.verb in INFERENCES:
                if known is not None:
                    known.route = route
                self._infer(route, request)
                return
        method, caller = request.method.decode("latin-1"), self._received(request)
        respond = partial(self._api.respond, method, request.path, request.headers, request.body, caller)
        self._answer_later(request, partial(respond, request.hold, is_authorized=True))

    def _is_let_in(self, request: HttpRequest) -> bool:
        """Authorize a request without a body, or answer it: with a refusal, or as a preflight."""
        answer = self._api.preflight(request.method, request.headers)
        try:
            if answer is None:
                self._let_in(request)
                return True
        except AsynctrtError as error:
            request.keep_alive = request.keep_alive and isinstance(error, UnauthorizedError)
            answer = error_answer(error, request.headers)
        self._send(answer)
        return False

    def _infer(self, route: ModelRoute, request: HttpRequest) -> None:
        headers, body = request.headers, request.body
        if (b"accept-encoding" in headers and accepted_coding(headers[b"accept-encoding"])) or (
            len(body) > FAST_NBYTES and self._api.is_slow(route, headers, body)
        ):
            infer = partial(self._api.infer, route, headers, body, self._received(request), request.hold)
            request.body, request.hold = b"", None
            self._answer_later(request, infer)
            return
        try:
            caller = self._received(request)
            self._inference = self._api.begin(route, headers, body, caller, self._inferred)
        except Exception as error:
            self._send(error_answer(error, request.headers))
        # The inputs are views of the body, which their batch releases; their memory has been counted.
        request.body = b""
        request.hold = None

    def _received(self, request: HttpRequest) -> Caller:
        """Return the caller for a request, with the memory that is held for its body."""
        self._caller.received_nbytes = 0 if request.hold is None else request.hold.nbytes
        return self._caller

    def _answer_later(self, request: HttpRequest, ask: Callable[[], Awaitable[Answer]]) -> None:
        """Answer the current request with what ``ask`` returns, in a task."""
        self._task = self._hub.loop.create_task(self._answer(request, ask))

    async def _answer(self, request: HttpRequest, ask: Callable[[], Awaitable[Answer]]) -> None:
        try:
            asking = ask()
            del ask  # It holds the request's body.
            answer = await asking
        except Exception as error:
            answer = error_answer(error, request.headers)
        self._task = None
        self._send(answer)

    def _inferred(self, inference: Inference) -> None:
        """Answer an inference whose future is done."""
        self._inference = None
        request = self._current
        # A transport may be closing one loop iteration before connection_lost is called.
        if request is None or self._is_ending or self._transport.is_closing():
            return
        try:
            decoded, codec, result = inference.request, inference.served.codec, inference.future.result()
            layout = decoded.layout
            if not layout.is_simple and codec.is_slow_answer(layout, result):
                self._answer_later(request, partial(self._api.infer_answer, inference))
                return
            head, tensors = codec.encode(decoded, result)
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            why = AsynctrtError("the request was cancelled") if is_cancelled else error
            self._send(error_answer(why, request.headers))
            return
        hub = self._hub
        if (
            not tensors
            or not request.keep_alive
            or request.version == "1.0"
            or self._is_half_closed
            or hub.is_draining
            or (hub.has_cors and b"origin" in request.headers)
        ):
            self._send(encoded_answer(head, tensors, inference))
            return
        nbytes = len(head) + sum(map(len, tensors))
        start = layout.http_head
        if not start or decoded.id:
            start = BINARY_HEAD % (len(head), nbytes)
            if head is layout.answer:
                layout.http_head = start
        self._write((start, request.headers[ID_HEADER], b"\r\n", hub.end_of_head, head), tensors, nbytes)
        self._done(200, nbytes, inference)

    def _send(self, answer: Answer) -> None:
        request = self._current
        if request is None or self._is_ending or self._transport.is_closing():
            return
        if self._hub.has_cors:
            answer = self._api.with_cors(request.headers, answer)
        status = answer.status
        nbytes = sum([len(piece) for piece in answer.body])
        begun, self._has_begun = self._has_begun, False
        lines = [b"" if begun else VERSION, b"%d " % status, REASONS[status], b"\r\n"]
        lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in answer.headers]
        if status != 204:  # A 204 has no body, and must not state a length.
            lines.append(b"Content-Length: %d\r\n" % nbytes)
        is_last = self._hub.is_draining or (self._is_half_closed and not self._has_next)
        if not request.keep_alive or is_last:
            request.keep_alive = False
            lines.append(b"Connection: close\r\n")
        elif request.version == "1.0":
            lines.append(b"Connection: keep-alive\r\n")
        lines += [ID_LINE % self._api.ids.of(request.headers), self._hub.end_of_head]
        body = () if request.method == b"HEAD" else answer.body
        self._write(lines, body, nbytes)
        self._done(status, nbytes, answer.inference)

    def _write(self, head: Sequence[bytes], body: Sequence[Any], nbytes: int) -> None:
        if nbytes > JOIN_NBYTES_MAX:
            # Not writelines: in Python 3.12.0 to 3.12.8, 3.13.0 and 3.13.1 asyncio's never reports that a
            # client takes nothing (CVE-2024-12254), so answers would pile up.
            is_paused = self._writing.since is not None
            self._transport = PacedTransport.between(self._transport, self, is_paused=is_paused)
            self._transport.write(b"".join(head))
            for piece in body:
                self._transport.write(piece)
            self._writing.count(self._transport, self._new_hold)
        else:
            self._transport.write(b"".join((*head, *body)))

    def _done(self, status: int, nbytes: int, inference: Inference | None = None) -> None:
        request, self._current = self._current, None
        self._touched = self._hub.tick
        assert request is not None
        if self._hub.log is not None:
            peer = self._transport.get_extra_info("peername")
            self._hub.log.write(peer, request, status, nbytes, inference)
        if request.is_broken and not self._is_half_closed and self._transport.can_write_eof():
            # The client may still be sending. Closing now would discard the answer, so input is read and
            # dropped until the client closes or the sweep's timeout expires.
            self._end()
            end_writing(self._transport)
        elif not request.keep_alive:
            self._close()
        elif self._waiting:
            self._hub.loop.call_soon(self._next)
        elif self._is_awaited:
            self._go_on()

    def _next(self) -> None:
        """Answer the next waiting request, if that is possible now."""
        if self._waiting and self._current is None and self._writing.since is None and not self._is_ending:
            request = self._waiting.popleft()
            self._waiting_nbytes -= len(request.body)
            self._throttle()
            if self._refused is not None and self._refused[0] is request:
                self._current = request
                self._send(self._refused[1])
            else:
                self._start(request)

    def _throttle(self) -> None:
        """Pause or resume reading, depending on how much was sent ahead of its answers."""
        is_much = len(self._waiting) >= PIPELINE_MAX or self._waiting_nbytes > PIPELINE_NBYTES_MAX
        if is_much != self._is_throttled:
            self._is_throttled = is_much
            self._set_reading()

    # ---- ending

    def check_times(self, tick: int) -> None:
        """Close the connection if a timeout has expired."""
        hub = self._hub
        if self._is_half_closed:
            self._look_for_reset()
        if self._writing.since is not None:
            self._writing.count(self._transport, self._new_hold)
            if self._writing.is_stalled(tick, hub, self._transport, 0):
                self.abort()
        elif self._is_ending:
            if tick - self._touched > (hub.refused_ticks if self._is_refused else hub.write_ticks):
                self.abort()
        elif self._reader is not None and self._reader.began is not None:
            why = self._is_late(self._reader, tick)
            if why:
                self._refuse(408, why)
            elif hub.is_draining and self._current is None and tick - self._touched > hub.refused_ticks:
                # Wait for uploads that continue, but not for a stalled one.
                self._refuse(503, STOPPING)
        elif self._current is None and tick - self._touched > self._idle_ticks:
            self._close()

    @property
    def _idle_ticks(self) -> int:
        """How long it may be idle: while its client is not authorized, no longer than a request may take."""
        hub = self._hub
        return hub.idle_ticks if self._is_known else min(hub.idle_ticks, hub.request_ticks)

    def _is_late(self, reader: RequestReader, tick: int) -> str:
        """Return why to stop waiting for the rest of a request, or an empty string."""
        hub = self._hub
        if self._is_held or self._is_resting or self._is_awaited:  # The client cannot continue.
            return ""
        if reader.began is not None and tick - reader.began > hub.request_ticks:
            return f"the request did not arrive within {hub.settings.request_timeout:g} s"
        lags = hub.is_short_of_memory and reader.lags(tick, hub.request_ticks)
        return "the body arrives slowly, and its memory is needed for others" if lags else ""

    def drain(self) -> None:
        """Close the connection once its complete requests are answered."""
        is_reading = self._reader is not None and self._reader.began is not None
        if self._current is None and not is_reading:
            self._close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._end()
        self._transport.abort()

    def _close(self) -> None:
        self._end()
        self._transport.close()

    def _end(self) -> None:
        self._is_ending = True
        self._stop_reading()

    def _refuse(self, status: int, why: str) -> None:
        """Refuse the request that the client may have begun to send."""
        self.refuse(HttpRequest(b"", b"", "1.1", {}, keep_alive=False), status, why)

    def answer(self, request: HttpRequest, answer: Answer) -> None:
        """Answer a request whose websocket was refused."""
        request.keep_alive = False
        self._current = request
        self._send(answer)

    def hand_over(self) -> Any:
        """Give up the transport to another protocol, and return it."""
        self._end()
        # The other protocol expects that reading is on. Resume it now: later the other may have paused it.
        self._is_resting = self._is_throttled = False
        self._set_reading()
        self._is_handed_over = True
        return self._transport


def _expected(request: HttpRequest) -> bytes | None:
    """Return the client's expectation before it sends a body; ``None`` if it does not wait.

    HTTP/1.0 has no interim answers, so a client of that version must not be sent one.
    """
    return None if request.version == "1.0" else request.headers.get(b"expect")
