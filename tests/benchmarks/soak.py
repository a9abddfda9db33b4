"""A server's memory over an hour's worth of requests, with connections opened and dropped at random.

An hour at 1,000 requests a second is 3,600,000. They come over HTTP and websockets from clients that stay for
a while, and then close properly, hang up in the middle, or leave half a request behind.
"""

import asyncio
import random
import time
from contextlib import suppress
from urllib.parse import urlsplit

import psutil
import uvloop

from tests.benchmarks.client import Book, Http, WebSocket
from tests.benchmarks.common import arguments, save, show
from tests.benchmarks.serving import INFER, SOCKET, process, wait_until_ready
from tests.helpers import free_port

VISITORS = 48
LOOKS = 20


class Visitors:
    """Run clients that come and go until enough requests have been answered."""

    def __init__(self, port, seed):
        self.book = Book()
        self.book.is_open = True
        self.random = random.Random(seed)
        self.connections = self.dropped = 0
        self.http = urlsplit(f"http://127.0.0.1:{port}" + INFER.format("noop"))
        self.socket = urlsplit(f"ws://127.0.0.1:{port}" + SOCKET.format("noop"))
        self.answered = 0

    async def visit(self):
        kind = self.random.choice([(Http, self.http, 1), (WebSocket, self.socket, 16)])
        protocol, url, depth = kind
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: protocol(self.book, depth, url=url, dim=16, raw=False),
            url.hostname,
            url.port,
        )
        self.connections += 1
        await connection.is_ready
        connection.start()
        await asyncio.sleep(self.random.expovariate(4))
        self.answered += len(self.book.latencies_ns)
        self.book.latencies_ns.clear()
        way = self.random.random()
        if way < 0.3:
            connection.transport.close()
            return
        self.dropped += 1
        if way < 0.6:
            connection.transport.write(
                b"POST / HTTP/1.1\r\nContent-Le" if protocol is Http else b"\x82\xfe\x01"
            )
        connection.transport.abort()

    async def come_and_go(self, requests):
        while self.answered < requests:
            with suppress(ConnectionError):
                await self.visit()


async def soak(port, requests, server, note):
    visitors = Visitors(port, 7)
    tasks = [asyncio.create_task(visitors.come_and_go(requests)) for _ in range(VISITORS)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.2)
        note(visitors, server)
    await asyncio.gather(*tasks)
    return visitors


def main():
    options = arguments(__doc__, requests=3_600_000)
    looks = []
    port = free_port()
    model = "tests.benchmarks.serving:noop"
    command = ("asynctrt", "serve", model, f"--http-port={port}", "--no-grpc", "--write-timeout=2")
    with process(*command) as server:
        wait_until_ready(f"http://127.0.0.1:{port}")

        def note(visitors, server):
            if visitors.answered * LOOKS >= options.requests * len(looks):
                looks.append((visitors.answered, server.memory_info().rss / 1e6))
                print(f"{looks[-1][0]:,} requests, {looks[-1][1]:.1f} MB", flush=True)

        began = time.monotonic()
        visitors = uvloop.run(soak(port, options.requests, server, note))
        elapsed = time.monotonic() - began
        time.sleep(1)
        end = {
            "rss_mb": server.memory_info().rss / 1e6,
            "threads": server.num_threads(),
            "descriptors": server.num_fds(),
            "sockets": len(
                [one for one in server.net_connections() if one.status == psutil.CONN_ESTABLISHED]
            ),
        }
    show(
        "A server's memory",
        ("requests answered", "MB"),
        [(f"{count:,}", f"{mb:.1f}") for count, mb in looks],
        f"{visitors.connections:,} connections, {visitors.dropped:,} of them dropped, in {elapsed:.0f} s;",
    )
    print(end)
    figures = {
        "requests": visitors.answered,
        "connections": visitors.connections,
        "dropped": visitors.dropped,
        "seconds": elapsed,
        "looks": looks,
        "end": end,
    }
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
