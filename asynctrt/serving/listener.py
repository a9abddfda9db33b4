"""Accept a server's connections: all that wait in one turn of the event loop, with or without TLS.

A loop's own server falls short of that. uvloop's accepts one connection in a turn, and turns are long under
load: of 512 clients that connected at once, a hundred had no answer after three seconds, while the others
had sixty. With ``ssl=``, handshakes are not counted until they are done, and an answer is encrypted as a
whole: 60 MiB block the event loop for 300 ms.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from functools import partial
from typing import Any, Final

from asynctrt.errors import UsageError
from asynctrt.serving.admission import address_of
from asynctrt.serving.http import Hub
from asynctrt.serving.paced import PacedTransport
from asynctrt.serving.server_log import PERIOD_NS

ACCEPTED_AT_ONCE: Final = 128
"""Connections accepted in one turn of the event loop: 5 ms."""
HANDSHAKE_S: Final = 10.0
"""Time for a client's handshake."""
RETRY_S: Final = 1.0
"""Delay before accepting again after a failure, such as too many open files."""

logger = logging.getLogger("asynctrt.serving")


class Listener:
    """Accepts TCP connections for a hub, after a handshake if there is TLS.

    Connections and handshakes together are limited by the hub's limit on connections.

    :param server: a server that is bound, but not serving.
    :param tls: the context for handshakes.
    """

    def __init__(
        self, hub: Hub, server: asyncio.Server, backlog: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._hub = hub
        self._server = server
        self._tls = tls
        self.sockets = server.sockets
        """The listening sockets."""
        self._listening = [socket.socket(fileno=os.dup(one.fileno())) for one in self.sockets]
        self._paused: set[asyncio.TimerHandle] = set()
        self._tell_s = 0.0
        # Accepted connections that the hub does not have yet.
        self._opening: dict[asyncio.Task[None], socket.socket] = {}
        for one in self._listening:
            one.settimeout(0)
            one.listen(backlog)
            hub.loop.add_reader(one, self._accept, one)

    def __repr__(self) -> str:
        what = "opening" if self._tls is None else "handshakes"
        return f"<Listener {'open' if self._listening else 'closed'} {what}={len(self._opening)}>"

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        listening, self._listening = self._listening, []
        for one in listening:
            self._hub.loop.remove_reader(one)
            one.close()
        for timer in self._paused:
            timer.cancel()
        self._server.close()

    def abort(self) -> None:
        """Stop accepting, and abort unfinished handshakes."""
        self.close()
        for task in self._opening:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        """Accept the waiting connections."""
        hub = self._hub
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, peer = listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # The client has already disconnected.
                continue
            except OSError as error:
                self._tell(error)
                hub.loop.remove_reader(listening)
                self._paused = {timer for timer in self._paused if timer.when() > hub.loop.time()}
                self._paused.add(hub.loop.call_later(RETRY_S, self._resume, listening))
                return
            accepted.settimeout(0)
            task = hub.loop.create_task(self._open(accepted))
            self._opening[task] = accepted
            task.add_done_callback(self._opened)
            if self._tls is not None:
                address = address_of(peer)
                hub.greet(address, task, task.cancel)
                task.add_done_callback(partial(hub.strangers.give_back, address))

    def _tell(self, error: OSError) -> None:
        """Log why connections are not accepted, at intervals."""
        now_s = self._hub.loop.time()
        if now_s >= self._tell_s:
            self._tell_s = now_s + PERIOD_NS / 1e9
            logger.error("cannot accept a connection: %s", error)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._hub.loop.add_reader(listening, self._accept, listening)

    async def _open(self, accepted: socket.socket) -> None:
        """Turn an accepted socket into a connection of the hub, after a handshake if there is TLS."""
        factory: Any = self._hub
        settings: dict[str, Any] = {}
        if self._tls is not None:
            factory = partial(PacedTransport, self._hub)
            settings = {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_S}
        with contextlib.suppress(OSError):  # The client misbehaved or disconnected.
            await self._hub.loop.connect_accepted_socket(factory, accepted, **settings)

    def _opened(self, task: asyncio.Task[None]) -> None:
        accepted = self._opening.pop(task)
        if task.cancelled():
            accepted.close()  # The task may not have begun.


def cannot_listen(host: str, port: int, error: Exception, option: str) -> UsageError:
    """Return the error for an address that a server cannot listen on."""
    fix = f"Choose another {option}; 0 picks a free one"
    why, number = str(error), getattr(error, "errno", None)
    # From Python 3.13 on, asyncio sets no errno for an address that is not this machine's.
    if number is None and "could not bind on any address" in why:
        number = errno.EADDRNOTAVAIL
    if isinstance(error, OSError):
        # Without the address, which asyncio repeats in the error's text.
        is_of_lookup = isinstance(error, socket.gaierror)
        why = (error.strerror or why) if number is None or is_of_lookup else os.strerror(number)
    if number == errno.EACCES:
        fix = "Ports below 1024 need a privilege that this user lacks: choose a higher one"
    elif number not in (errno.EADDRINUSE, None):
        fix = "Use an address of this machine, such as 127.0.0.1 or 0.0.0.0"
    return UsageError(f"cannot listen on {host} port {port}: {why}. {fix}")
