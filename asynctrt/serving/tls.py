"""Speak TLS on a server's connections: so many handshakes at most, and large answers encrypted in pieces.

A loop's own ``ssl=`` has neither. Handshakes are of nobody's count until they are done, and an answer is
encrypted as a whole: 60 MiB hold the event loop for 300 ms.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from asynctrt.serving.http import REFUSED_MAX, Hub

HANDSHAKE_S: Final = 10.0
"""Time for a client's handshake."""
RETRY_S: Final = 1.0
"""Pause before connections are accepted again, after that failed: there are too many open files."""

SLICE_NBYTES: Final = 128 << 10
"""Bytes that are encrypted before it is the turn of others: 0.2 ms, seldom 1."""

logger = logging.getLogger("asynctrt.serving")


class TlsListener:
    """Accept TCP connections, which become those of a hub after a handshake.

    Connections and handshakes together are no more than a hub's connections may be.

    :param server: is bound, and does not serve.
    """

    def __init__(self, hub: Hub, context: ssl.SSLContext, server: asyncio.Server, backlog: int) -> None:
        self._hub = hub
        self._context = context
        self._server = server
        self.sockets = server.sockets
        """The sockets that listen."""
        self._shaking: set[asyncio.Task[None]] = set()
        self._accepting = [
            hub.loop.create_task(self._accept(socket.socket(fileno=os.dup(one.fileno())), backlog))
            for one in self.sockets
        ]

    def __repr__(self) -> str:
        return f"<TlsListener handshakes={len(self._shaking)}>"

    def close(self) -> None:
        """Accept no more."""
        for task in self._accepting:
            task.cancel()
        self._server.close()

    def abort(self) -> None:
        """Accept no more, and give up the handshakes that are not done."""
        self.close()
        for task in self._shaking:
            task.cancel()

    async def _accept(self, listening: socket.socket, backlog: int) -> None:
        loop, hub = self._hub.loop, self._hub
        with listening:
            listening.settimeout(0)
            listening.listen(backlog)
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except ConnectionError:  # It has gone already.
                    continue
                except OSError as error:
                    logger.error("cannot accept a connection: %s", error)  # noqa: TRY400  (it says all)
                    await asyncio.sleep(RETRY_S)
                    continue
                if len(hub.connections) + len(self._shaking) >= hub.settings.max_connections + REFUSED_MAX:
                    hub.refused += 1
                    accepted.close()
                    continue
                task = loop.create_task(self._shake(accepted))
                self._shaking.add(task)
                task.add_done_callback(self._shaking.discard)

    async def _shake(self, accepted: socket.socket) -> None:
        """Shake hands with a client."""
        with contextlib.suppress(OSError):  # What it does wrong, or that it has gone.
            await self._hub.loop.connect_accepted_socket(
                partial(TlsConnection, self._hub),
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )


class TlsConnection(asyncio.Protocol):
    """Stand between a TLS transport and a protocol: the transport of the one, the protocol of the other.

    What is written is encrypted in pieces with turns of the event loop between them.

    :param make: makes the protocol, once the handshake is done.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._transport: Any = None
        self._protocol: Any = None
        self._backlog: deque[memoryview] = deque()
        self._backlog_nbytes = 0
        self._is_paused = False
        """Whether the transport has enough for now."""
        self._is_closing = False
        self._is_due = False
        """Whether its next turn is due."""

    def __repr__(self) -> str:
        return f"<TlsConnection of {self._protocol!r} backlog={self._backlog_nbytes}>"

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
        if not self._backlog:  # Else it knows.
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._backlog:
            self._encrypt()
        else:
            self._protocol.resume_writing()

    # ---- the transport of the protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, which must not change any more; at once, if they are few and nothing waits."""
        if not self._backlog and len(data) <= SLICE_NBYTES:
            self._transport.write(data)
            return
        is_first = not self._backlog
        self._backlog.append(memoryview(data).cast("B"))
        self._backlog_nbytes += len(self._backlog[-1])
        if is_first and not self._is_paused:
            self._protocol.pause_writing()
            self._encrypt()

    def _encrypt(self) -> None:
        """Send the next piece of what waits, and go on after others had their turn."""
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
        elif not self._is_paused:
            self._protocol.resume_writing()

    def _take_turn(self) -> None:
        self._is_due = False
        self._encrypt()

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
        """Return whether it is closed, or will be."""
        return self._is_closing or bool(self._transport.is_closing())

    def set_protocol(self, protocol: Any) -> None:
        """Give what is read to another protocol from now on."""
        self._protocol = protocol

    def get_write_buffer_size(self) -> int:
        """Return how many bytes are not sent yet."""
        return self._backlog_nbytes + int(self._transport.get_write_buffer_size())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the connection."""
        return self._transport.get_extra_info(name, default)

    def can_write_eof(self) -> bool:
        """Return whether one direction can be closed alone: not of TLS."""
        return False

    def pause_reading(self) -> None:
        """Read no more for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._transport.resume_reading()
