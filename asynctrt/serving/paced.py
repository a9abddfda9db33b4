"""Send large answers in pieces, with turns of the event loop between them.

A transport passes each write to the kernel, or encrypts it, as a whole: 60 MiB block the event loop for 10 ms
if the client reads as fast as they are sent, and for 300 ms with TLS.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

SLICE_NBYTES: Final = 128 << 10
"""Bytes sent in one turn of the event loop: 0.1 ms, with TLS 0.2, rarely 1."""


class PacedTransport(asyncio.Protocol):
    """A layer between a transport and a protocol, which acts as the transport of the one and the protocol of
    the other."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._transport: Any = None
        self._protocol: Any = None
        self._backlog: deque[memoryview] = deque()
        self._backlog_nbytes = 0
        self._is_paused = False
        """Whether the transport has paused writing."""
        self._is_closing = False
        self._ends_writing = False
        self._is_due = False
        """Whether its next turn is scheduled."""

    @classmethod
    def between(cls, transport: Any, protocol: Any, *, is_paused: bool) -> "PacedTransport":
        """Insert a layer between a transport and its protocol, unless it is one already, and return it."""
        if isinstance(transport, cls):
            return transport
        paced = cls(lambda: protocol)
        paced._transport, paced._protocol, paced._is_paused = transport, protocol, is_paused
        transport.set_protocol(paced)
        return paced

    def __repr__(self) -> str:
        return f"<PacedTransport of {self._protocol!r} backlog={self._backlog_nbytes}>"

    # ---- the protocol of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._protocol = self._make()
        self._protocol.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._protocol is not None:
            self._protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        self._backlog.clear()
        self._backlog_nbytes = 0
        if protocol is not None:
            protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        keeps_open: bool | None = self._protocol.eof_received()
        return keeps_open

    def pause_writing(self) -> None:
        self._is_paused = True
        if not self._backlog:  # Otherwise the protocol is already paused.
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._backlog:
            self._send_next()
        else:
            self._protocol.resume_writing()

    # ---- the transport of the protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, which must not change afterwards; at once, if they are few and nothing waits."""
        if not self._backlog and len(data) <= SLICE_NBYTES:
            self._transport.write(data)
            return
        is_first = not self._backlog
        self._backlog.append(memoryview(data).cast("B"))
        self._backlog_nbytes += len(self._backlog[-1])
        if is_first and not self._is_paused:
            self._protocol.pause_writing()
            self._send_next()

    def _send_next(self) -> None:
        """Send the next waiting piece, and continue after other callbacks had their turn."""
        if self._is_due or self._is_paused or not self._backlog or self._transport.is_closing():
            return
        head = self._backlog.popleft()
        if len(head) > SLICE_NBYTES:
            self._backlog.appendleft(head[SLICE_NBYTES:])
            head = head[:SLICE_NBYTES]
        self._backlog_nbytes -= len(head)
        self._transport.write(head)
        if self._backlog:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)
        elif self._is_closing:
            self._transport.close()
        elif self._ends_writing:
            self._transport.write_eof()
        elif not self._is_paused:
            self._protocol.resume_writing()

    def _take_turn(self) -> None:
        self._is_due = False
        self._send_next()

    def close(self) -> None:
        """Close once everything is sent."""
        self._is_closing = True
        if not self._backlog:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._is_closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether it is closed or closing."""
        return self._is_closing or bool(self._transport.is_closing())

    def set_protocol(self, protocol: Any) -> None:
        """Pass input to another protocol from now on."""
        self._protocol = protocol

    def get_write_buffer_size(self) -> int:
        """Return the number of unsent bytes."""
        return self._backlog_nbytes + int(self._transport.get_write_buffer_size())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the connection."""
        return self._transport.get_extra_info(name, default)

    def can_write_eof(self) -> bool:
        """Return whether one direction can be closed alone, which TLS does not allow."""
        return bool(self._transport.can_write_eof())

    def write_eof(self) -> None:
        """Close the sending direction once everything is sent."""
        self._ends_writing = True
        if not self._backlog:
            self._transport.write_eof()

    def pause_reading(self) -> None:
        """Pause reading."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        self._transport.resume_reading()
