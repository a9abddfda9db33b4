"""A front of ``asynctrt serve --fronts N``: a complete server, whose workers belong to its parent.

:mod:`asynctrt.serving.fronts` starts it with the arguments ``FD FD VERSION``.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final

import uvloop

from asynctrt.errors import AsynctrtError
from asynctrt.serving.command import serve
from asynctrt.serving.folder import FoundModels
from asynctrt.serving.fronts import Begin, Refused, Serving, answer_scrapes, places_in
from asynctrt.serving.server import Server
from asynctrt.version import __version__
from asynctrt.workers.messages import receive, send
from asynctrt.workers.spawn import SPAWNER, SharedWorkers

BEAT_S: Final = 0.5
"""Interval at which the parent is informed that the event loop runs, and whether a model is lost."""


async def _run(
    end: socket.socket, metrics: socket.socket, begin: Begin, places: Sequence[FoundModels]
) -> None:
    loop = asyncio.get_running_loop()
    servers: list[Server] = []

    def orphaned() -> None:
        stop(at_once=True)

    def stop(*, at_once: bool) -> None:
        if not servers:
            logging.shutdown()
            os._exit(0)  # No request was accepted yet, and opening a model may hang.
        for server in servers:
            (server.end if at_once else server.ask)()

    async def beat() -> None:
        while True:
            states = [served.engine.state for server in servers for served in server.repository]
            shared.beat(is_lost="lost" in states)
            await asyncio.sleep(BEAT_S)

    shared = SharedWorkers(loop, end, orphaned, stop)
    SPAWNER.set(shared)
    tasks = [loop.create_task(beat())]

    def opened(server: Server) -> None:
        servers.append(server)
        tasks.append(loop.create_task(answer_scrapes(metrics, server.metrics_text)))

    lines: list[str] = []
    try:
        await serve(
            begin.config,
            lines.append,
            opened=opened,
            loaded=lambda: send(end, Serving(tuple(lines))),
            listens_last=begin.is_replacement,
            places=places,
        )
    except AsynctrtError as error:
        send(end, Refused(error))
        raise SystemExit(1) from None
    finally:
        for task in tasks:
            task.cancel()
        shared.close()


def main() -> None:
    """Run a front. The arguments are its sockets' file descriptors and the parent's version."""
    if sys.argv[3] != __version__:
        sys.exit(f"asynctrt {__version__} is installed now, and the server runs {sys.argv[3]}: restart it")
    end, metrics = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    begin, fds = receive(end)
    if begin is None:
        return
    places = places_in(fds)
    end.settimeout(0)
    uvloop.run(_run(end, metrics, begin, places))
