"""Speak websockets on an event loop: handshakes, answers, timeouts. ``frame_reader.py`` reads the frames."""

import asyncio
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Sequence
from hashlib import sha1
from typing import Any, Final

from asynctrt.errors import AsynctrtError, CallerError, UnauthorizedError
from asynctrt.kserve.datatypes import Buffer
from asynctrt.serving.api import Headers, ModelRoute, UpgradeError, error_answer
from asynctrt.serving.assembly import ASSEMBLED_NBYTES_MIN, Assembly
from asynctrt.serving.frame_reader import (
    BINARY,
    CLOSE,
    HEAD_NBYTES,
    INVALID_DATA,
    PING,
    PONG,
    TEXT,
    FrameError,
    FrameReader,
    Piece,
    check_close,
    frame_head,
)
from asynctrt.serving.http import JOIN_NBYTES_MAX, HttpConnection, Hub, Writing, end_writing
from asynctrt.serving.http_reader import HttpRequest
from asynctrt.serving.memory import UNCOUNTED_NBYTES, ClientPace, Hold
from asynctrt.serving.overhead import Overhead
from asynctrt.serving.paced import PacedTransport
from asynctrt.serving.websocket import (
    GOING_AWAY,
    POLICY_VIOLATION,
    SUBPROTOCOL,
    Message,
    WebSocketSession,
    authorize_route,
    with_token,
)

GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""What a handshake's key is hashed with."""
TRY_AGAIN_LATER: Final = 1013

FORGIVEN_NBYTES: Final = 16
"""Bytes of overhead forgiven at each sweep, so that ten pings a second are always accepted."""


def upgrade(connection: HttpConnection, hub: Hub, request: HttpRequest, rest: bytes) -> None:
    """Turn an HTTP connection into the websocket that its client requests, or answer with an error.

    :param rest: the bytes that were read after the request.
    """
    try:
        route = authorize_route(hub.api, request.path, request.headers)
        connection.know(with_token(request.headers))
        lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade"]
        lines.append(b"Sec-WebSocket-Accept: " + _accept(request.headers))
    except AsynctrtError as error:
        connection.answer(request, error_answer(error))
        return
    offered = request.headers.get(b"sec-websocket-protocol", b"").split(b",")
    if SUBPROTOCOL.encode() in [name.strip() for name in offered]:
        lines.append(b"Sec-WebSocket-Protocol: " + SUBPROTOCOL.encode())
    lines.append(b"X-Request-ID: " + hub.api.ids.of(request.headers))
    transport = connection.hand_over()
    transport.write(b"\r\n".join(lines) + b"\r\n" + hub.end_of_head)
    socket = SocketConnection(hub, route, request.headers, transport.get_extra_info("peername"))
    hub.replace(connection, socket)
    transport.set_protocol(socket)
    socket.connection_made(transport)
    if rest:
        socket.data_received(rest)


def _accept(headers: Headers) -> bytes:
    """Return what accepts a handshake.

    :raises CallerError: if it is not a valid one.
    """
    if b"upgrade" not in [one.strip() for one in headers.get(b"connection", b"").lower().split(b",")]:
        raise CallerError("invalid websocket request: Connection must be Upgrade")
    key = headers.get(b"sec-websocket-key", b"")
    try:
        is_key = len(b64decode(key, validate=True)) == 16
    except ValueError:
        is_key = False
    if not is_key:
        raise CallerError("invalid websocket request: Sec-WebSocket-Key must be 16 bytes in Base64")
    if headers.get(b"sec-websocket-version") != b"13":
        raise UpgradeError("invalid websocket request: Sec-WebSocket-Version must be 13")
    return b64encode(sha1(key + GUID, usedforsecurity=False).digest())


class SocketConnection(asyncio.Protocol):
    """One websocket connection: converts bytes to messages for a :class:`WebSocketSession`, and back."""

    def __init__(
        self,
        hub: Hub,
        route: ModelRoute | None,
        headers: dict[bytes, bytes],
        peer: Any,
    ) -> None:
        self._hub = hub
        self._session = WebSocketSession(
            hub.api,
            self._send,
            room=self._room,
            route=route,
            headers=headers,
            peer=peer,
            send_pieces=self._send_pieces,
        )
        self._reader = FrameReader(hub.settings.max_body)
        self._transport: Any = None
        self._pieces = bytearray()
        self._assembly: Assembly | None = None
        self._is_text = False
        self._message_nbytes = 0
        """Bytes of the message being assembled."""
        self._hold: Hold | None = None
        """The message's memory, if it is large."""
        self._pace = ClientPace(0)
        self._is_short = False
        """Whether the message waits for memory."""
        self._is_reading = True
        self._is_flushing = False
        self._out: list[bytes] = []
        """Frames to write at the end of the tick."""
        self._writing = Writing()
        self._written = 0
        # The tick in which the first bytes of a message that is still incomplete were read.
        self._began: int | None = None
        self._touched = hub.tick
        self._pinged = False
        self._closed_at: int | None = None
        """The tick in which the connection sent a close frame."""
        self._is_over = False
        """Whether further input is dropped."""
        self._frames: deque[Piece] = deque()
        """Messages behind those being answered."""
        self._is_waiting = False
        """Whether it waits for its client's next turn."""
        self._overhead = Overhead()
        self._is_deaf = False
        """Whether the connection no longer reads anything."""

    def __repr__(self) -> str:
        return f"<SocketConnection {self._session!r}>"

    # ---- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._hub.is_draining:
            self.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hub.discard(self)
        self._session.cancel_all()
        self._forget_message()
        self._writing.resume()

    def data_received(self, data: bytes) -> None:
        self._touched = self._hub.tick
        self._pinged = False
        if self._is_over:
            return
        self._reader.feed(data)
        if not self._is_waiting:
            self._go_on()

    def eof_received(self) -> bool:
        self._drop_input()
        return self._hub.close_soon(self._transport)

    def pause_writing(self) -> None:
        self._writing.pause(self._hub.tick)
        self._throttle()

    def resume_writing(self) -> None:
        self._writing.resume()
        self._touched = self._hub.tick
        self._room()

    # ---- frames and messages

    def _go_on(self) -> None:
        """Handle what was read until its client's turn ends."""
        self._is_waiting = False
        turns, account, now_ns = self._hub.api.turns, self._session.account, self._hub.now_ns
        left_ns = turns.left_ns(account)
        if not left_ns:
            self._wait()
            self._throttle()
            return
        began_ns = now_ns()
        # Nothing is held while the connection is read: the end of this method sees to that.
        is_held = not self._is_reading and self._is_held
        frames, reader = self._frames, self._reader
        while (frames or reader.has_more) and not self._transport.is_closing():
            if not frames:
                self._read()
            elif is_held:
                break
            else:
                self._take(frames.popleft())
                is_held = self._is_held
            if now_ns() - began_ns > left_ns:
                if self._has_input:
                    self._wait()
                break
        turns.spend(account, began_ns, now_ns())
        if is_held or not self._is_reading or self._has_input or self._is_deaf:
            self._throttle()

    @property
    def _has_input(self) -> bool:
        """Whether there is input that was not handled yet."""
        return bool(self._frames) or self._reader.has_more

    def _wait(self) -> None:
        """Continue in the client's next turn."""
        self._is_waiting = True
        self._hub.api.turns.wait(self._session.account, self._go_on)

    @property
    def _is_held(self) -> bool:
        """Whether messages wait: for requests to end, for the client to read its answers, or for memory."""
        return self._is_short or self._writing.since is not None or self._session.is_full

    def _read(self) -> None:
        """Read the next frames, and handle control frames."""
        reader, overhead = self._reader, self._overhead
        try:
            pieces = reader.read()
        except FrameError as error:
            self._fail(error.code, str(error))
            return
        for piece in pieces:
            opcode, nbytes = piece.opcode, len(piece.data)
            is_data = opcode < CLOSE
            # Larger pieces only lower the count.
            is_counted = not is_data or nbytes < HEAD_NBYTES or overhead.nbytes
            if is_counted and overhead.add(HEAD_NBYTES + nbytes, nbytes if is_data else 0):
                # Do not wait for the client's close frame, as that means reading on.
                self._is_deaf = True
                self._fail(POLICY_VIOLATION, "too many control frames, or tiny or empty fragments")
                return
            if is_data:
                self._frames.append(piece)
                if piece.is_last:
                    self._began = None
            elif opcode == PING:
                self._send_frame(PONG, nbytes, (piece.data,))
            elif opcode == CLOSE:
                self._close(piece.data)
                return
        if reader.is_idle:
            self._began = None
        elif self._began is None:
            self._began = self._hub.tick

    def _take(self, piece: Piece) -> None:
        if self._closed_at is not None:
            return  # It cannot be answered, and would wait for memory in vain.
        if piece.is_first:
            self._is_text = piece.opcode == TEXT
            if piece.is_last:
                self._receive(piece.data)
                return
            nbytes = piece.nbytes
            self._assembly = Assembly(nbytes) if nbytes >= ASSEMBLED_NBYTES_MIN else None
            self._pieces = bytearray()
            self._message_nbytes = 0
            if nbytes > UNCOUNTED_NBYTES:
                self._reserve(nbytes)
        self._append(piece.data)
        if piece.is_last:
            assembly, self._assembly = self._assembly, None
            pieces, self._pieces = self._pieces, bytearray()
            self._receive(pieces if assembly is None else assembly.whole())

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next fragment of a message."""
        self._message_nbytes = nbytes = self._message_nbytes + len(data)
        if nbytes > UNCOUNTED_NBYTES and (self._hold is None or nbytes > self._hold.nbytes):
            # The client fragments the message itself, and the number of fragments is unknown.
            self._reserve(min(2 * nbytes, self._hub.settings.max_body))
        assembly = self._assembly
        if assembly is None:
            self._pieces += data
        elif assembly.has_room(len(data)):
            assembly.add(data)
        else:
            # The client fragments the message itself: the size was only that of its first frame.
            self._assembly = None
            self._pieces += assembly.whole()
            self._pieces += data

    def _reserve(self, nbytes: int) -> None:
        """Hold memory for a message; if there is none, stop reading until there is."""
        if self._hold is None:
            self._hold = self._session.new_hold()
            self._pace = ClientPace(self._hub.tick)
        if not self._hold.is_waiting and not self._hold.grow(nbytes, self._got_memory):
            self._is_short = True

    def _got_memory(self, *, is_granted: bool) -> None:
        """Continue reading a message, or refuse it."""
        self._is_short = False
        if not is_granted:
            self._fail(TRY_AGAIN_LATER, self._hub.api.memory.refuse())
        self._room()

    def _receive(self, raw: bytes | bytearray | memoryview) -> None:
        hold, self._hold = self._hold, None
        if self._is_short and hold is not None:
            hold.set(len(raw))  # Its end had already been read when memory was requested.
            self._is_short = False
        if not self._is_text:
            self._session.receive(raw, hold)
            return
        try:
            text = str(raw, "utf-8")
        except UnicodeDecodeError:
            self._fail(INVALID_DATA, "a text message must be UTF-8")
            return
        self._session.receive(text, hold)

    def _send(self, message: Message) -> None:
        if isinstance(message, str):
            raw = message.encode()
            self._send_frame(TEXT, len(raw), (raw,))
        else:
            self._send_frame(BINARY, len(message), (message,))

    def _send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send a binary message. Large ones are not joined or copied, which would block the event loop."""
        nbytes = sum(map(len, pieces))
        if nbytes <= JOIN_NBYTES_MAX:
            self._send_frame(BINARY, nbytes, pieces)
        elif self._closed_at is None and not self._transport.is_closing():
            if type(self._transport) is not PacedTransport:
                is_paused = self._writing.since is not None
                self._transport = PacedTransport.between(self._transport, self, is_paused=is_paused)
            self._write_out()
            self._written += nbytes
            self._transport.write(frame_head(BINARY, nbytes))
            for piece in pieces:
                self._transport.write(piece)
            self._writing.count(self._transport, self._session.new_hold)

    def _send_frame(self, opcode: int, nbytes: int, pieces: Sequence[Buffer]) -> None:
        """Send a small message of ``nbytes`` in all."""
        if self._closed_at is not None:
            return
        self._out.append(b"".join((frame_head(opcode, nbytes), *pieces)))
        if not self._is_flushing:
            # A batch's answers arrive one by one; write one client's answers of a loop iteration at once.
            self._is_flushing = True
            self._hub.at_end_of_tick(self._write_out)

    def _write_out(self) -> None:
        """Write the frames that are due."""
        self._is_flushing = False
        if not self._out or self._transport.is_closing():
            return
        raw = b"".join(self._out)
        self._out = []
        self._written += len(raw)
        self._transport.write(raw)
        if self._writing.since is not None:
            self._writing.count(self._transport, self._session.new_hold)

    # ---- closing

    def _say_close(self, data: bytes) -> None:
        """Send a close frame, once; nothing is sent after it, and messages are not handled any more."""
        if self._closed_at is None:
            self._send_frame(CLOSE, len(data), (data,))
            self._closed_at = self._hub.tick
            self._write_out()
            self._forget_message()
            self._room()

    def _close(self, data: bytes) -> None:
        """Close the connection, as its client has asked with a close frame."""
        try:
            check_close(data)
        except FrameError as error:
            self._fail(error.code, str(error))
            return
        self._say_close(data)
        self._drop_input()
        self._transport.close()

    def _fail(self, code: int, why: str) -> None:
        """Close the connection for a reason that the client can read."""
        is_first = self._closed_at is None
        self._say_close(code.to_bytes(2, "big") + why.encode())
        self._drop_input()
        if is_first and self._transport.can_write_eof():
            # The client may still be sending. Closing now would reset the connection and lose the frame that
            # says why; so drop its input until it closes, or the sweep's time is up.
            end_writing(self._transport)
        else:
            self._transport.close()

    def _drop_input(self) -> None:
        self._is_over = True
        self._reader.close()
        self._began = None
        self._throttle()

    def _room(self) -> None:
        """Continue with waiting messages after requests have ended or the client reads again."""
        if self._has_input and not self._is_waiting and not self._is_held:
            self._wait()
        if not self._is_reading:
            self._throttle()
        if self._session.is_draining and not self._session.in_flight:
            self._say_goodbye()

    def _throttle(self) -> None:
        """Pause reading while input waits or cannot be handled, and resume it afterwards."""
        should_read = not (self._has_input or self._is_deaf or self._is_held)
        if should_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = should_read
            if should_read:
                if self._began is not None:
                    self._began = self._hub.tick  # Until now the client could not continue sending.
                    self._pace = ClientPace(self._hub.tick)
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _forget_message(self) -> None:
        """Drop messages that were not handled, and the incomplete one."""
        self._frames.clear()
        self._pieces = bytearray()
        self._assembly = None
        self._hold = None
        self._is_short = False

    # ---- the hub's calls

    def check_times(self, tick: int) -> None:
        """Close the connection if a timeout has expired; ping a silent client."""
        hub = self._hub
        self._overhead.forgive(FORGIVEN_NBYTES)
        self._check_token()
        if self._writing.since is not None:
            self._writing.count(self._transport, self._session.new_hold)
            if self._writing.is_stalled(tick, hub, self._transport, self._written):
                self._transport.abort()
        elif self._closed_at is not None:
            if tick - self._closed_at > (hub.refused_ticks if self._is_deaf else hub.write_ticks):
                self._transport.abort()
        elif self._began is not None and self._is_reading:
            why = self._is_late(tick - self._began)
            if why:
                self._fail(POLICY_VIOLATION, why)
        elif not self._session.in_flight and not self._has_input:
            silent = tick - self._touched
            if silent > hub.idle_ticks:
                self._transport.abort()
            elif silent > hub.idle_ticks // 2 and not self._pinged:
                self._pinged = True
                self._send_frame(PING, 0, ())

    def _check_token(self) -> None:
        """Close the connection if its client's token was revoked."""
        try:
            self._session.check_token()
        except UnauthorizedError:
            if self._closed_at is None:
                self._fail(POLICY_VIOLATION, "the token was revoked")

    def _is_late(self, ticks: int) -> str:
        """Return why a message that began ``ticks`` ago is too late, or an empty string."""
        hub, hold = self._hub, self._hold
        if ticks > hub.request_ticks:
            return f"the message did not arrive within {hub.settings.request_timeout:g} s"
        if not hub.is_short_of_memory or hold is None:
            return ""
        lags = self._pace.is_low(hub.tick, self._message_nbytes, hold.nbytes, hub.request_ticks)
        return "the message arrives slowly, and its memory is needed for others" if lags else ""

    def drain(self) -> None:
        """Refuse new requests, and close once all others are answered."""
        self._session.is_draining = True
        if not self._session.in_flight:
            self._say_goodbye()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _say_goodbye(self) -> None:
        self._say_close(GOING_AWAY.to_bytes(2, "big") + b"the server is draining")
