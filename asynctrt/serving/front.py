"""A front of ``asynctrt serve --fronts N``: a complete server, whose workers belong to its parent.

:mod:`asynctrt.serving.fronts` starts it.
"""

import asyncio
import json
import logging
import os
import pickle
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvloop

from asynctrt.errors import AsynctrtError
from asynctrt.serving.command import serve
from asynctrt.serving.folder import FoundModels
from asynctrt.serving.fronts import (
    GRACE_S,
    LOOK_S,
    METRICS,
    STATISTICS,
    Begin,
    Serving,
    Texts,
    content_of,
)
from asynctrt.serving.served import summed
from asynctrt.serving.server import Server
from asynctrt.workers.messages import Failed, Stop, send
from asynctrt.workers.process import first_message
from asynctrt.workers.spawn import SPAWNER, SharedWorkers


async def _run(end: socket.socket, begin: Begin, places: Sequence[FoundModels]) -> None:
    loop = asyncio.get_running_loop()
    servers: list[Server] = []

    def hear(message: Any, fds: list[int]) -> None:
        if isinstance(message, Stop):
            stop(at_once=message.at_once)
        else:
            parent.hear(message, fds)

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

    shared = SharedWorkers(loop, end, hear)
    SPAWNER.set(shared)
    parent = Texts(shared.send)
    beating = loop.create_task(beat())

    def opened(server: Server) -> None:
        servers.append(server)
        parent.known = {METRICS: server.metrics_text, STATISTICS: server.statistics_text}
        server.api.of_fronts = partial(_of_fronts, parent)

    lines: list[str] = []
    try:
        await serve(
            begin.config,
            lines.append,
            opened=opened,
            loaded=lambda: shared.send(Serving(tuple(lines))),
            listens_last=begin.is_replacement,
            places=places,
        )
    except AsynctrtError as error:
        send(end, Failed(error))
        raise SystemExit(1) from None
    finally:
        beating.cancel()
        shared.close()


async def _of_fronts(parent: Texts) -> list[dict[str, Any]]:
    """Return the statistics of all fronts; nothing if the parent does not answer."""
    text = await parent.ask(STATISTICS, 2 * GRACE_S)  # The parent itself waits for fronts.
    return summed(json.loads(text)) if text else []


def main() -> None:
    """Run a front."""
    end, begin, fds = first_message()
    places = pickle.loads(content_of(fds))  # noqa: S301  (from the parent)
    end.settimeout(0)
    uvloop.run(_run(end, begin, places))
