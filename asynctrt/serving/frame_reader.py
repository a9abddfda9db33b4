"""Read a client's websocket frames from bytes, without sockets: RFC 6455, without extensions.

A large frame is passed on in pieces, as it arrives: unmasking 60 MiB at once would block the event loop.
"""

from typing import Final, NamedTuple

from asynctrt.errors import MissingExtraError

try:
    from websockets.frames import apply_mask  # type: ignore[attr-defined]  # Not exported.
except ImportError as error:
    raise MissingExtraError("websockets need websockets: pip install 'asynctrt[serve]'") from error

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
"""Opcodes. Those from ``CLOSE`` on belong to control frames."""
OPCODES: Final = frozenset({CONT, TEXT, BINARY, CLOSE, PING, PONG})

FINAL: Final = 0x80
RESERVED: Final = 0x70
OPCODE: Final = 0x0F
MASKED: Final = 0x80
KEY_NBYTES: Final = 4
HEAD_NBYTES: Final = 2 + KEY_NBYTES
"""The smallest head of a frame."""
CONTROL_NBYTES_MAX: Final = 125

PROTOCOL_ERROR, INVALID_DATA, TOO_BIG = 1002, 1007, 1009
CODES: Final = frozenset({*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)})
"""The codes with which a client may close a connection."""

PIECES_MAX: Final = 16
"""Pieces read at a time, each at most a frame."""


class FrameError(Exception):
    """The client violates the protocol, or its message is too large."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Piece(NamedTuple):
    """A control frame, or the next bytes of a message."""

    opcode: int
    """For a message, ``TEXT`` or ``BINARY`` in each piece."""
    data: bytes
    is_first: bool = True
    is_last: bool = True
    nbytes: int = 0
    """The size of the frame that the piece belongs to."""


class FrameReader:
    """Splits a connection's bytes into pieces of messages, and control frames.

    :param nbytes_max: the largest message.
    """

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        # Input, and the index of its first byte that has not been read.
        self._input, self._at = b"", 0
        # The current frame, and how many of its bytes are missing: None between frames.
        self._frame = CONT
        self._left: int | None = None
        self._nbytes = 0
        self._key = b""
        # The current message; its opcode is CONT between messages.
        self._opcode = CONT
        self._message_nbytes = 0
        self._is_first = self._is_final = False
        self.has_more = False
        """Whether :meth:`read` may return more without more input."""

    def __repr__(self) -> str:
        return f"<FrameReader {'idle' if self.is_idle else 'reading'} left={self._left or 0}>"

    @property
    def is_idle(self) -> bool:
        """Whether the last message is complete and nothing of the next frame has arrived."""
        return self._opcode == CONT and self._left is None and self._at == len(self._input)

    def feed(self, data: bytes) -> None:
        """Keep bytes for :meth:`read`."""
        self._input, self._at = (self._input[self._at :] + data if self._input else data), 0
        self.has_more = True

    def close(self) -> None:
        """Drop the input."""
        self._input, self._at = b"", 0
        self.has_more = False

    def read(self) -> list[Piece]:
        """Return the next pieces.

        :raises FrameError: if the client breaks the protocol. What it sent before has been returned.
        """
        pieces: list[Piece] = []
        self.has_more = False
        try:
            while (piece := self._next()) is not None:
                pieces.append(piece)
                if len(pieces) == PIECES_MAX:
                    self.has_more = self._at < len(self._input)
                    break
        except FrameError:
            if not pieces:
                raise
            self.has_more = True  # The frame is still there, and raises again.
        if self._at == len(self._input):
            self._input, self._at = b"", 0
        return pieces

    def _next(self) -> Piece | None:
        """Return the next piece; ``None`` if not enough has arrived."""
        left, opcode = self._left if self._left is not None else self._begin(), self._frame
        if left is None:
            return None
        start = self._at
        nbytes = min(left, len(self._input) - start)
        if nbytes < left:
            # The key repeats, and each piece begins with its first byte. Control frames come whole.
            nbytes = nbytes // KEY_NBYTES * KEY_NBYTES if opcode < CLOSE else 0
            if not nbytes:
                return None
        self._at = start + nbytes
        data = apply_mask(self._input[start : self._at], self._key)
        is_whole = nbytes == left
        self._left = None if is_whole else left - nbytes
        if opcode >= CLOSE:
            return Piece(opcode, data)
        piece = Piece(self._opcode, data, self._is_first, is_whole and self._is_final, self._nbytes)
        self._is_first = False
        if piece.is_last:
            self._opcode = CONT
        return piece

    def _begin(self) -> int | None:
        """Read the head of the next frame; return the frame's size, or ``None`` if not enough has arrived."""
        raw, start = self._input, self._at
        end = start + HEAD_NBYTES
        if len(raw) < start + 2:
            return None
        first, nbytes = raw[start], raw[start + 1] ^ MASKED
        if nbytes > CONTROL_NBYTES_MAX:
            if nbytes & MASKED:
                raise FrameError(PROTOCOL_ERROR, "a client's frames must be masked")
            end += 2 if nbytes == 126 else 8
            nbytes = int.from_bytes(raw[start + 2 : end - KEY_NBYTES], "big")
        if len(raw) < end:
            return None
        self._check(first, nbytes)
        self._at, self._key = end, raw[end - KEY_NBYTES : end]
        self._frame = opcode = first & OPCODE
        self._nbytes = self._left = nbytes
        if opcode < CLOSE:
            if opcode != CONT:
                self._opcode, self._is_first, self._message_nbytes = opcode, True, 0
            self._message_nbytes += nbytes
            self._is_final = first >= FINAL
        return nbytes

    def _check(self, first: int, nbytes: int) -> None:
        """Check a frame with this first byte and size.

        :raises FrameError: if it must not come now.
        """
        opcode, is_within = first & OPCODE, self._opcode != CONT
        if first & RESERVED or opcode not in OPCODES:
            raise FrameError(PROTOCOL_ERROR, "reserved bits or an unknown opcode")
        if opcode >= CLOSE:
            if first < FINAL or nbytes > CONTROL_NBYTES_MAX:
                raise FrameError(PROTOCOL_ERROR, "a control frame is too long, or fragmented")
        elif (opcode == CONT) != is_within:
            raise FrameError(PROTOCOL_ERROR, "a message within another, or the continuation of none")
        elif nbytes + self._message_nbytes * is_within > self._nbytes_max:
            raise FrameError(TOO_BIG, f"the message exceeds {self._nbytes_max} bytes")


def check_close(data: bytes) -> None:
    """Check the content of a close frame.

    :raises FrameError: if its code is not one of a client's, or its reason is not text.
    """
    if data and (len(data) < 2 or int.from_bytes(data[:2], "big") not in CODES):
        raise FrameError(PROTOCOL_ERROR, "not the code of a close")
    try:
        data[2:].decode()
    except UnicodeDecodeError:
        raise FrameError(INVALID_DATA, "the reason of a close must be UTF-8") from None


def frame_head(opcode: int, nbytes: int) -> bytes:
    """Return the head of an unfragmented frame of a server, which does not mask."""
    first = FINAL | opcode
    if nbytes <= CONTROL_NBYTES_MAX:
        return bytes((first, nbytes))
    if nbytes < 1 << 16:
        return bytes((first, 126, nbytes >> 8, nbytes & 0xFF))
    return bytes((first, 127)) + nbytes.to_bytes(8, "big")
