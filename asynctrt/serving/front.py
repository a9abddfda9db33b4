"""A front of ``asynctrt serve --fronts N``: a whole server, whose workers its parent has.

It is started by :mod:`asynctrt.serving.fronts` with the arguments ``FD FD VERSION``.
"""

import asyncio
import socket
import sys

import uvloop

from asynctrt.errors import AsynctrtError
from asynctrt.serving.command import serve
from asynctrt.serving.fronts import Begin, Refused, Serving, answer_scrapes
from asynctrt.serving.server import Server
from asynctrt.version import __version__
from asynctrt.workers.messages import receive, send
from asynctrt.workers.spawn import SPAWNER, SharedWorkers


async def _run(end: socket.socket, metrics: socket.socket, begin: Begin) -> None:
    loop = asyncio.get_running_loop()
    servers: list[Server] = []

    def orphaned() -> None:
        for server in servers:
            server.end()

    shared = SharedWorkers(loop, end, orphaned)
    SPAWNER.set(shared)
    scrapes: list[asyncio.Task[None]] = []

    def opened(server: Server) -> None:
        servers.append(server)
        scrapes.append(loop.create_task(answer_scrapes(metrics, server.metrics_text)))

    lines: list[str] = []
    try:
        await serve(
            begin.config,
            lines.append,
            opened=opened,
            loaded=lambda: send(end, Serving(tuple(lines))),
            listens_last=begin.is_replacement,
        )
    except AsynctrtError as error:
        send(end, Refused(error))
        raise SystemExit(1) from None
    finally:
        for task in scrapes:
            task.cancel()
        shared.close()


def main() -> None:
    """Run a front; the arguments are the descriptors of its sockets, and the parent's version."""
    if sys.argv[3] != __version__:
        sys.exit(f"asynctrt {__version__} is installed now, and the server runs {sys.argv[3]}: restart it")
    end, metrics = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    begin, _ = receive(end)
    if begin is None:
        return
    end.settimeout(0)
    uvloop.run(_run(end, metrics, begin))
