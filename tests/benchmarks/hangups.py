"""A thousand clients hang up at once while a server is loaded: do the other clients notice?

A 512-2048-512 x 2 MLP at a steady rate. In the middle of the run a thousand connections send a request each
and are reset. What is queued for them is dropped; the latencies of the others are compared with a run without
hang-ups.
"""

import asyncio
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from tests.benchmarks.client import Book, Http
from tests.benchmarks.common import arguments, in_turn, median, save, show
from tests.benchmarks.mlp import mlp_onnx
from tests.benchmarks.serving import INFER, ROOT, load, process, wait_until_ready
from tests.helpers import free_port

HANG_UPS = 1000


async def hang_up(url, count):
    """Connect, send a request, and reset every connection."""
    loop = asyncio.get_running_loop()
    book = Book()
    connections = []
    for _ in range(count):
        _, connection = await loop.create_connection(
            lambda: Http(book, 1, paced=True, url=url, dim=512, raw=False), url.hostname, url.port
        )
        connections.append(connection)
    for connection in connections:
        connection.send(0)
    for connection in connections:
        one = connection.transport.get_extra_info("socket")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.transport.abort()
    await asyncio.sleep(0.1)


def measure(server, url, seconds, rate, hang_ups):
    """Measure the steady load, with hang-ups in the middle if there are to be any."""
    helper = None
    if hang_ups:
        code = f"import tests.benchmarks.hangups as it; it.later({seconds / 2 + 0.7}, {url!r}, {hang_ups})"
        helper = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        return load(server, url, seconds, rate=rate, connections=64, dim=512)
    finally:
        if helper is not None:
            helper.wait()


def later(seconds, url, count):
    time.sleep(seconds)
    uvloop.run(hang_up(urlsplit(url), count))


def main():
    options = arguments(__doc__, repeats=3, seconds=4.0, rate=4000.0, hang_ups=HANG_UPS)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        port = free_port()
        path = mlp_onnx(Path(folder) / "mlp.onnx")
        server = stack.enter_context(
            process("asynctrt", "serve", f"mlp={path}", f"--http-port={port}", "--no-grpc")
        )
        wait_until_ready(f"http://127.0.0.1:{port}")
        url = f"http://127.0.0.1:{port}" + INFER.format("mlp")
        runs = {
            name: lambda count=count: measure(server, url, options.seconds, options.rate, count)
            for name, count in (("undisturbed", 0), ("with hang-ups", options.hang_ups))
        }
        results = in_turn(runs, options.repeats, "hang-ups")
    show(
        f"{options.hang_ups:,} clients hang up at once",
        ("", "requests/s", "p50 ms", "p99 ms"),
        [
            (
                name,
                f"{median(done, 'requests_per_s'):,.0f}",
                f"{median(done, 'p50_us') / 1e3:.2f}",
                f"{median(done, 'p99_us') / 1e3:.2f}",
            )
            for name, done in results.items()
        ],
        f"medians of {options.repeats} runs of {options.seconds:g} s in turn;",
    )
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
