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
from functools import partial
from typing import Final

from asynctrt.serving.http import REFUSED_MAX, Hub
from asynctrt.serving.paced import PacedTransport

HANDSHAKE_S: Final = 10.0
"""Time for a client's handshake."""
RETRY_S: Final = 1.0
"""Pause before connections are accepted again, after that failed: there are too many open files."""

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
                partial(PacedTransport, self._hub),
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
