"""What do connections that do nothing cost a server: memory, CPU, and others' latency?

Each has sent one request, or opened a websocket, and then says nothing. Both ends have an open file for each,
so there are no more than a process may have (`ulimit -n`).
"""

import asyncio
import resource
import ssl
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.common import arguments, save, show
from tests.benchmarks.serving import cpu_s, load, process, wait_until_ready
from tests.fuzz.connections import handshake
from tests.helpers import free_port
from tests.serving.tls import certificate

BATCH = 100
"""Connections that are opened at a time."""
SPARE = 200
"""Open files that are for something else."""
WATCH_S = 3.0

REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
KINDS = {"HTTP": (REQUEST, False), "websocket": (handshake(), False), "HTTP with TLS": (REQUEST, True)}


def files_max():
    """Return how many files this process may open, once it may open as many as it is allowed to."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def opened(port, count, first, context):
    """Open connections that have had one answer each."""

    async def one():
        streams = await asyncio.open_connection("localhost", port, ssl=context)
        streams[1].write(first)
        await streams[0].readuntil(b"\r\n\r\n")
        return streams

    found = []
    while len(found) < count:
        found += await asyncio.gather(*[one() for _ in range(min(BATCH, count - len(found)))])
    return found


async def measured(server, root, port, count, first, context, seconds):
    """Measure the server with so many connections against none."""
    url = f"{root}/v2/models/noop/infer"
    alone = None if context else await asyncio.to_thread(load, server, url, seconds, connections=8)
    await opened(port, BATCH, first, context)
    before = server.memory_info().rss
    streams = await opened(port, count, first, context)
    taken = server.memory_info().rss - before
    began, cpu = time.perf_counter(), cpu_s(server)
    await asyncio.sleep(max(WATCH_S, seconds))
    share = (cpu_s(server) - cpu) / (time.perf_counter() - began)
    beside = None if context else await asyncio.to_thread(load, server, url, seconds, connections=8)
    assert not any(reader.at_eof() for reader, _ in streams), "the server has closed some"
    for _, writer in streams:
        writer.transport.abort()
    return {
        "connections": count,
        "nbytes": taken / count,
        "cpu_share": share,
        "alone": alone,
        "beside": beside,
    }


def measure(kind, count, seconds, folder):
    """Measure one kind of connection on a server of its own."""
    first, is_encrypted = KINDS[kind]
    port, flags, context = free_port(), [], None
    if is_encrypted:
        chain, key = certificate(folder)
        flags = [f"--tls-certificate={chain}", f"--tls-key={key}"]
        context = ssl.create_default_context(cafile=chain)
    with ExitStack() as stack:
        flags += [f"--max-connections={count + SPARE}", "--idle-timeout=3600", "--no-grpc"]
        server = stack.enter_context(
            process("asynctrt", "serve", "tests.benchmarks.serving:noop", *flags, f"--http-port={port}")
        )
        root = f"{'https' if context else 'http'}://localhost:{port}"
        wait_until_ready(root, context)
        return asyncio.run(measured(server, root, port, count, first, context, seconds))


def main():
    options = arguments(__doc__, connections=10_000, seconds=2.0, only="")
    count = min(options.connections, files_max() - 2 * SPARE)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            kind: measure(kind, count, options.seconds, Path(folder))
            for kind in KINDS
            if options.only in kind
        }

    def p99_ms(figures):
        return "" if figures is None else f"{figures['p99_us'] / 1e3:.1f}"

    show(
        f"{count:,} connections that do nothing",
        ("connections", "KiB each", "CPU", "p99 ms of 8 others: alone", "beside them"),
        [
            (
                kind,
                f"{figures['nbytes'] / 1024:.1f}",
                f"{figures['cpu_share']:.1%}",
                p99_ms(figures["alone"]),
                p99_ms(figures["beside"]),
            )
            for kind, figures in results.items()
        ],
    )
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
