"""A front of ``asynctrt serve --fronts N``: a complete server, whose workers belong to its parent.

:mod:`asynctrt.serving.fronts` starts it with the arguments ``FD FD FD VERSION``.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvloop

from asynctrt._util.version import __version__
from asynctrt.errors import AsynctrtError
from asynctrt.serving.command import serve
from asynctrt.serving.folder import FoundModels
from asynctrt.serving.fronts import (
    GRACE_S,
    LOOK_S,
    METRICS,
    STATISTICS,
    Begin,
    FrontRefused,
    Scraped,
    Serving,
    answer_scrapes,
    places_in,
)
from asynctrt.serving.served import summed
from asynctrt.serving.server import Server
from asynctrt.workers.messages import receive, send
from asynctrt.workers.spawn import SPAWNER, SharedWorkers


async def _run(ends: Sequence[socket.socket], begin: Begin, places: Sequence[FoundModels]) -> None:
    end, scraping, asking = ends
    loop = asyncio.get_running_loop()
    parent = Scraped(*await asyncio.open_connection(sock=asking))
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
            await asyncio.sleep(LOOK_S)

    shared = SharedWorkers(loop, end, orphaned, stop)
    SPAWNER.set(shared)
    tasks = [loop.create_task(beat())]

    def opened(server: Server) -> None:
        servers.append(server)
        server.api.of_fronts = partial(_of_fronts, parent)
        answers = {METRICS: server.metrics_text, STATISTICS: server.statistics_text}
        tasks.append(loop.create_task(answer_scrapes(scraping, answers)))

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
        send(end, FrontRefused(error))
        raise SystemExit(1) from None
    finally:
        for task in tasks:
            task.cancel()
        shared.close()


async def _of_fronts(parent: Scraped) -> list[dict[str, Any]]:
    """Return the statistics of all fronts; nothing if the parent does not answer."""
    text = await parent.ask(STATISTICS, 2 * GRACE_S)  # The parent itself waits for fronts.
    return summed(json.loads(text)) if text else []


def main() -> None:
    """Run a front. The arguments are its sockets' file descriptors and the parent's version."""
    *numbers, version = sys.argv[1:]
    if version != __version__:
        sys.exit(f"asynctrt {__version__} is installed now, and the server runs {version}: restart it")
    ends = [socket.socket(fileno=int(number)) for number in numbers]
    begin, fds = receive(ends[0])
    if begin is None:
        return
    places = places_in(fds)
    ends[0].settimeout(0)
    uvloop.run(_run(ends, begin, places))
