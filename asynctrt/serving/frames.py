"""Speak websocket frames on an event loop, with the sans-I/O protocol of ``websockets``.

This is the only importer of ``websockets`` on the server's side.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from asynctrt.errors import AsynctrtError, CallerError, MissingExtraError, UnauthorizedError
from asynctrt.kserve.datatypes import LENGTH_NBYTES, Buffer
from asynctrt.serving.api import ModelRoute, UpgradeError, error_answer
from asynctrt.serving.assembly import ASSEMBLED_NBYTES_MIN, Assembly
from asynctrt.serving.frame_cutter import FINAL, FRAMES_MAX, KEY_NBYTES, MASKED, FrameCutter
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

try:
    from websockets.frames import CloseCode, Frame, Opcode, apply_mask  # type: ignore[attr-defined]  # Not exported.
    from websockets.http11 import Request
    from websockets.protocol import State
    from websockets.server import ServerProtocol
except ImportError as error:
    raise MissingExtraError("websockets need websockets: pip install 'asynctrt[serve]'") from error

FORGIVEN_NBYTES: Final = 16
"""Bytes of overhead forgiven at each sweep, so that ten pings a second are always accepted."""

SLICE_NBYTES: Final = 4 << 10
LONG_SLICE_NBYTES: Final = 64 << 10
"""Bytes parsed at a time; the second in the middle of a long message."""

HEAD_NBYTES: Final = 2 + KEY_NBYTES
"""The smallest head of a frame."""

# Module-level names, because looking up an enumeration's member takes time for each message.
TEXT, BINARY, CONT = Opcode.TEXT, Opcode.BINARY, Opcode.CONT
DATA: Final = (BINARY, TEXT, CONT)
OPEN: Final = State.OPEN

WHOLE: Final = {FINAL | TEXT: TEXT, FINAL | BINARY: BINARY}
"""The opcodes of messages that consist of one frame, by its first byte."""


def upgrade(connection: HttpConnection, hub: Hub, request: HttpRequest, rest: bytes) -> None:
    """Turn an HTTP connection into the websocket that its client requests, or answer with an error.

    :param rest: the bytes that were read after the request.
    """
    try:
        route = authorize_route(hub.api, request.path, request.headers)
        connection.know(with_token(request.headers))
        protocol = _Protocol(
            subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]  # It is a NewType of str.
            select_subprotocol=lambda _, offered: SUBPROTOCOL if SUBPROTOCOL in offered else None,  # type: ignore[arg-type, return-value]
            max_size=hub.settings.max_body,
        )
        # The library parses requests itself, so rebuild this one for it.
        lines = [b"GET " + request.path + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in request.headers.items()]
        protocol.receive_data(b"\r\n".join(lines) + b"\r\n\r\n")
        asked = next((event for event in protocol.events_received() if isinstance(event, Request)), None)
        if asked is None:
            raise _refusal(protocol)
        response = protocol.accept(asked)
        response.headers["X-Request-ID"] = hub.api.ids.of(request.headers).decode()
        if response.status_code != 101:
            raise _refusal(protocol)
    except AsynctrtError as error:
        connection.answer(request, error_answer(error))
        return
    protocol.send_response(response)
    transport = connection.hand_over()
    socket = SocketConnection(hub, protocol, route, request.headers, transport.get_extra_info("peername"))
    hub.replace(connection, socket)
    transport.set_protocol(socket)
    socket.connection_made(transport)
    if rest:
        socket.data_received(rest)


class _Protocol(ServerProtocol):
    """The library's protocol, which also allows clients to close in the middle of a message."""

    def recv_frame(self, frame: Frame) -> None:
        """Handle a frame. A close frame may come between a message's frames; the message is then dropped."""
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


def _refusal(protocol: ServerProtocol) -> CallerError:
    """Return the error that says why a websocket is refused."""
    why = f"invalid websocket request: {protocol.handshake_exc}"
    is_old = getattr(protocol.handshake_exc, "name", "") == "Sec-WebSocket-Version"
    error = UpgradeError(f"{why}; the version is 13") if is_old else CallerError(why)
    _forget_frames(protocol.handshake_exc)
    return error


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that the library keeps.

    They refer to the connection, and it to them: its input would stay in memory until the next collection.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def whole_messages(data: bytes, nbytes_max: int) -> tuple[list[Frame], int]:
    """Read small messages of one frame each without the library, which takes 6 µs for each.

    :param nbytes_max: larger messages are left for the library to refuse.
    :returns: the messages that ``data`` begins with, at most :data:`FRAMES_MAX`, and the bytes they take.
    """
    messages: list[Frame] = []
    start, stop = 0, len(data)
    while stop - start >= HEAD_NBYTES and len(messages) < FRAMES_MAX:
        opcode, size, key = WHOLE.get(data[start]), data[start + 1] ^ MASKED, start + 2
        if size == 126:
            size, key = data[key] << 8 | data[key + 1], key + 2
        elif size > 126:  # The frame is large, or not masked.
            break
        at = key + KEY_NBYTES
        end = at + size
        # Very short messages are mostly overhead, which is counted for what the library reads.
        if opcode is None or end > stop or not LENGTH_NBYTES <= size <= nbytes_max:
            break
        messages.append(Frame(opcode, apply_mask(data[at:end], data[key:at])))
        start = end
    return messages, start


def frame_head(opcode: int, nbytes: int) -> bytes:
    """Return the head of an unfragmented frame of a server, which does not mask."""
    first = FINAL | opcode
    if nbytes < 126:
        return bytes((first, nbytes))
    if nbytes < 1 << 16:
        return bytes((first, 126, nbytes >> 8, nbytes & 0xFF))
    return bytes((first, 127)) + nbytes.to_bytes(8, "big")


class SocketConnection(asyncio.Protocol):
    """One websocket connection: converts bytes to messages for a :class:`WebSocketSession`, and back."""

    def __init__(
        self,
        hub: Hub,
        protocol: ServerProtocol,
        route: ModelRoute | None,
        headers: dict[bytes, bytes],
        peer: Any,
    ) -> None:
        self._hub = hub
        self._protocol = protocol
        self._session = WebSocketSession(
            hub.api,
            self._send,
            room=self._room,
            route=route,
            headers=headers,
            peer=peer,
            send_pieces=self._send_pieces,
        )
        self._cutter = FrameCutter(hub.settings.max_body)
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
        self._is_library_due = False
        """Whether the library has read something, and may want to close the connection."""
        self._writing = Writing()
        self._written = 0
        # The tick in which the first bytes of a message that is still incomplete were read.
        self._began: int | None = None
        self._is_partial = False
        self._touched = hub.tick
        self._pinged = False
        self._closed_at: int | None = None
        # Input not handled yet: messages behind those being answered, and unparsed bytes.
        self._frames: deque[Frame] = deque()
        self._unparsed = bytearray()
        self._is_long = False
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
        self._flush()
        if self._hub.is_draining:
            self.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hub.discard(self)
        self._session.cancel_all()
        self._forget_message()
        self._writing.resume()
        _forget_frames(self._protocol.parser_exc)

    def data_received(self, data: bytes) -> None:
        self._touched = self._hub.tick
        self._pinged = False
        if self._is_deaf:
            return
        if self._unparsed or self._frames or self._is_waiting or len(data) > SLICE_NBYTES:
            self._unparsed += data
            data = b""
        if not self._is_waiting:
            self._go_on(data)

    def eof_received(self) -> bool:
        self._unparsed.clear()
        self._protocol.receive_eof()
        return self._hub.close_soon(self._transport)

    def pause_writing(self) -> None:
        self._writing.pause(self._hub.tick)
        self._throttle()

    def resume_writing(self) -> None:
        self._writing.resume()
        self._touched = self._hub.tick
        self._room()

    # ---- frames and messages

    def _go_on(self, piece: bytes = b"") -> None:
        """Handle what was read until its client's turn ends.

        :param piece: a small piece that was read while nothing else was left to parse.
        """
        self._is_waiting = False
        turns, account, now_ns = self._hub.api.turns, self._session.account, self._hub.now_ns
        left_ns = turns.left_ns(account)
        if not left_ns:
            self._unparsed += piece
            self._wait()
            self._throttle()
            return
        began_ns = now_ns()
        # Nothing is held while the connection is read: the end of this method sees to that.
        is_held = not self._is_reading and self._is_held
        if piece and not self._transport.is_closing():
            self._parse(piece)
        while (self._frames or self._unparsed) and not self._transport.is_closing():
            if now_ns() - began_ns > left_ns:
                self._wait()
                break
            if not self._frames:
                self._parse(self._next_piece())
            elif is_held:
                break
            else:
                self._take(self._frames.popleft())
                is_held = self._is_held
        turns.spend(account, began_ns, now_ns())
        if self._is_library_due:
            self._flush()
        if is_held or not self._is_reading or self._frames or self._unparsed or self._is_deaf:
            self._throttle()

    def _wait(self) -> None:
        """Continue in the client's next turn."""
        self._is_waiting = True
        self._hub.api.turns.wait(self._session.account, self._go_on)

    @property
    def _is_held(self) -> bool:
        """Whether messages wait: for requests to end, for the client to read its answers, or for memory."""
        return self._is_short or self._writing.since is not None or self._session.is_full

    def _next_piece(self) -> bytes:
        """Remove and return the next bytes to parse."""
        nbytes = LONG_SLICE_NBYTES if self._is_long else SLICE_NBYTES
        piece = bytes(self._unparsed[:nbytes])
        del self._unparsed[:nbytes]
        return piece

    def _parse(self, piece: bytes) -> None:
        """Parse a piece of what was read."""
        if self._began is None and self._protocol.state is OPEN:
            piece = self._parse_whole(piece)
        if piece:
            self._parse_by_library(piece)

    def _parse_whole(self, piece: bytes) -> bytes:
        """Parse the small messages that a piece begins with; return what is left for the library."""
        messages, nbytes = whole_messages(piece, self._hub.settings.max_body)
        self._frames += messages
        if self._overhead.nbytes:
            data_nbytes = sum([len(message.data) for message in messages])
            self._overhead.add(HEAD_NBYTES * len(messages) + data_nbytes, data_nbytes)
        rest = piece[nbytes:]
        if len(messages) == FRAMES_MAX:
            self._unparsed[:0] = rest
            return b""
        return rest

    def _parse_by_library(self, piece: bytes) -> None:
        protocol = self._protocol
        self._is_library_due = True
        cut = self._cutter.feed(piece)
        if cut:  # The library takes empty data to mean that the client has finished.
            protocol.receive_data(cut)
            self._out += protocol.data_to_send()  # Pongs go before the answers to later messages.
        if self._cutter.taken < len(piece):
            self._unparsed[:0] = piece[self._cutter.taken :]
        events = protocol.events_received()
        self._is_long = not events
        is_flood = False
        for event in events:
            if isinstance(event, Frame):
                self._frames.append(event)
                nbytes = len(event.data)
                is_flood |= self._overhead.add(HEAD_NBYTES + nbytes, nbytes if event.opcode in DATA else 0)
                # Control frames may come between the frames of a message.
                if event.opcode in DATA:
                    self._is_partial = not event.fin
                    if event.fin:
                        self._began = None
        if not self._is_partial and self._cutter.is_between_frames:
            self._began = None
        elif self._began is None:
            self._began = self._hub.tick
        if is_flood:
            self._protocol.fail(POLICY_VIOLATION, "too many control frames, or tiny or empty fragments")
            self._is_deaf = True  # Do not wait for the client's close frame, as that means reading on.
            self._flush()
            self._forget_message()

    def _take(self, frame: Frame) -> None:
        if self._closed_at is not None:
            return  # It cannot be answered, and would wait for memory in vain.
        opcode = frame.opcode
        if opcode is BINARY or opcode is TEXT:
            self._is_text = opcode is TEXT
            if frame.fin:
                self._receive(bytes(frame.data))
                return
            nbytes = self._cutter.large_nbytes
            self._assembly = Assembly(nbytes) if nbytes >= ASSEMBLED_NBYTES_MIN else None
            self._pieces = bytearray()
            self._message_nbytes = 0
            if nbytes > UNCOUNTED_NBYTES:
                self._reserve(nbytes)
            self._append(frame.data)
        elif opcode is CONT:
            self._append(frame.data)
            if frame.fin:
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
            self._protocol.fail(CloseCode.TRY_AGAIN_LATER, self._hub.api.memory.refuse())
            self._flush()
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
            self._protocol.fail(CloseCode.INVALID_DATA, "a text message must be UTF-8")
            self._is_library_due = True
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
        elif self._protocol.state is OPEN and not self._transport.is_closing():
            is_paused = self._writing.since is not None
            self._transport = PacedTransport.between(self._transport, self, is_paused=is_paused)
            self._flush()
            self._written += nbytes
            self._transport.write(frame_head(BINARY, nbytes))
            for piece in pieces:
                self._transport.write(piece)
            self._writing.count(self._transport, self._session.new_hold)

    def _send_frame(self, opcode: int, nbytes: int, pieces: Sequence[Buffer]) -> None:
        """Send a small message of ``nbytes`` in all."""
        if self._protocol.state is not OPEN:
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
        if raw:
            self._written += len(raw)
            self._transport.write(raw)
            if self._writing.since is not None:
                self._writing.count(self._transport, self._session.new_hold)

    def _flush(self) -> None:
        """Write what is due now, and close the connection if the library wants that."""
        self._is_library_due = False
        self._out += self._protocol.data_to_send()
        is_end = b"" in self._out
        self._write_out()
        if self._transport.is_closing():
            return
        if self._protocol.close_expected():
            if self._closed_at is None:
                self._closed_at = self._hub.tick
                # The client may delay its close, and its earlier messages are useless now. Keep the unparsed
                # bytes: without them, the start of its close frame would be unknown.
                unparsed, self._unparsed = self._unparsed, bytearray()
                self._forget_message()
                self._unparsed = unparsed
                self._room()
            is_refused = self._protocol.state is not State.CLOSED and self._protocol.close_rcvd is None
            if is_refused and is_end and self._transport.can_write_eof():
                # The client may still be sending. Closing now would reset the connection and lose the frame
                # that says why; so drop its input until it closes, or the sweep's time is up.
                end_writing(self._transport)
            elif self._protocol.state is State.CLOSED or is_end:
                self._transport.close()

    def _room(self) -> None:
        """Continue with waiting messages after requests have ended or the client reads again."""
        if (self._frames or self._unparsed) and not self._is_waiting and not self._is_held:
            self._wait()
        if not self._is_reading:
            self._throttle()
        if self._session.is_draining and not self._session.in_flight:
            self._say_goodbye()

    def _throttle(self) -> None:
        """Pause reading while input waits or cannot be handled, and resume it afterwards."""
        should_read = not (self._frames or self._unparsed or self._is_deaf or self._is_held)
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
        """Drop input that was not handled, and the incomplete message."""
        self._frames.clear()
        self._unparsed.clear()
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
                self._protocol.fail(POLICY_VIOLATION, why)
                self._flush()
        elif not self._session.in_flight and not self._frames and not self._unparsed:
            silent = tick - self._touched
            if silent > hub.idle_ticks:
                self._transport.abort()
            elif silent > hub.idle_ticks // 2 and not self._pinged and self._protocol.state is OPEN:
                self._pinged = True
                self._protocol.send_ping(b"")
                self._flush()

    def _check_token(self) -> None:
        """Close the connection if its client's token was revoked."""
        try:
            self._session.check_token()
        except UnauthorizedError:
            if self._protocol.state is OPEN:
                self._protocol.fail(POLICY_VIOLATION, "the token was revoked")
                self._flush()

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
        if self._protocol.state is OPEN:
            self._protocol.send_close(GOING_AWAY, "the server is draining")
            self._flush()
