"""A load client for the benchmarks of serving, as light as possible in Python: prebuilt bytes, no library.

``python -m tests.benchmarks.client http://127.0.0.1:8000/v2/models/noop/infer`` prints one line of JSON. It
reads only the status of an answer.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from functools import partial
from urllib.parse import urlsplit

import numpy as np
import uvloop

OPEN_S = 0.5
"""Left out at the beginning."""
QUANTILES = np.linspace(0, 100, 201)
"""What several clients tell of their latencies, so that these can be put together."""


def infer_head(dim):
    return (
        b'"inputs":[{"name":"input","shape":[1,%d],"datatype":"FP32","parameters":{"binary_data_size":%d}}],'
        b'"outputs":[{"name":"output","parameters":{"binary_data":true}}]}' % (dim, 4 * dim)
    )


class Book:
    """Record latencies from a time on."""

    def __init__(self):
        self.latencies_ns = []
        self.is_open = False
        self.errors = 0

    def note(self, sent_ns, now_ns):
        if self.is_open:
            self.latencies_ns.append(now_ns - sent_ns)


class Connection(asyncio.Protocol):
    """Keep ``depth`` requests in flight."""

    def __init__(self, book, depth):
        self.book = book
        self.depth = depth
        self.sent = []
        self.buffer = b""
        self.is_ready = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, exc):
        self.book.errors += self.book.is_open
        if not self.is_ready.done():
            self.is_ready.set_exception(ConnectionError("closed while connecting"))

    def start(self):
        for number in range(self.depth):
            self.send(number)

    def answered(self, number, *, ok=True):
        self.book.note(self.sent[number], time.monotonic_ns())
        self.book.errors += not ok


class Http(Connection):
    """Send one request after the other, so that answers need not be told apart."""

    def __init__(self, book, depth, *, url, dim, raw, text=b""):
        super().__init__(book, depth)
        head = b"" if raw else b"{" + infer_head(dim)
        body = text or head + bytes(4 * dim)
        kind = b"json" if text else b"octet-stream"
        length = b"" if raw or text else b"Inference-Header-Content-Length: %d\r\n" % len(head)
        self.request = (
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/%s\r\n%s"
            b"Content-Length: %d\r\n\r\n%s" % (url.path.encode(), kind, length, len(body), body)
        )

    def connection_made(self, transport):
        super().connection_made(transport)
        self.is_ready.set_result(None)

    def send(self, number):
        self.sent = [time.monotonic_ns()]
        self.transport.write(self.request)

    def data_received(self, data):
        self.buffer += data
        while True:
            stop = self.buffer.find(b"\r\n\r\n")
            if stop < 0:
                return
            head = self.buffer[:stop].lower()
            start = head.find(b"content-length: ", head.find(b"\r\ncontent-length: ")) + 16
            end = head.find(b"\r\n", start)
            total = stop + 4 + int(head[start : end if end > 0 else stop])
            if len(self.buffer) < total:
                return
            self.answered(0, ok=self.buffer[9:12] == b"200")
            self.buffer = self.buffer[total:]
            self.send(0)


class WebSocket(Connection):
    """Keep ``depth`` requests in flight, told apart by their ids."""

    def __init__(self, book, depth, *, url, dim, raw):
        super().__init__(book, depth)
        self.url = url
        self.raw = raw
        self.frames = []
        for number in range(depth):
            head = b'{"id":"%d",' % number + infer_head(dim)
            message = len(head).to_bytes(4, "little") + head + bytes(4 * dim)
            small = len(message) < 126
            length = bytes([0x80 | len(message)]) if small else b"\xfe" + len(message).to_bytes(2, "big")
            self.frames.append(b"\x82" + length + bytes(4) + message)
        self.sent = [0] * depth

    def connection_made(self, transport):
        super().connection_made(transport)
        transport.write(
            b"GET %s HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            % self.url.path.encode()
        )

    def send(self, number):
        self.sent[number] = time.monotonic_ns()
        self.transport.write(self.frames[number])

    def data_received(self, data):
        self.buffer += data
        if not self.is_ready.done():
            head, found, self.buffer = self.buffer.partition(b"\r\n\r\n")
            if found:
                assert b" 101 " in head, head
                self.is_ready.set_result(None)
            return
        out = []
        start = 0
        buffer = self.buffer
        while len(buffer) - start >= 4:
            length = buffer[start + 1]
            at = start + 2
            if length == 126:
                length, at = int.from_bytes(buffer[start + 2 : start + 4], "big"), start + 4
            if len(buffer) < at + length:
                break
            # An echo server returns the request, and ours an answer: both begin with the id.
            number = int(buffer[at + 11 : buffer.index(b'"', at + 11)])
            self.answered(number, ok=b'"error"' not in buffer[at : at + 40])
            self.sent[number] = time.monotonic_ns()
            out.append(self.frames[number])
            start = at + length
        self.buffer = buffer[start:]
        if out:
            self.transport.write(b"".join(out))


async def sockets(options, url, book):
    kind = WebSocket
    if url.scheme == "http":
        kind = partial(Http, text=bytes.fromhex(options.body))
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(options.connections):
        _, connection = await loop.create_connection(
            lambda: kind(book, options.depth, url=url, dim=options.dim, raw=options.raw),
            url.hostname,
            url.port,
        )
        await connection.is_ready
        connections.append(connection)
    for connection in connections:
        connection.start()
    return connections


async def grpc_callers(options, url, book):
    import grpc

    # Channels of one process to one address share a connection unless they are told not to.
    settings = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(url.netloc, settings) for _ in range(options.channels)]
    body = bytes.fromhex(options.body)

    async def caller(call):
        while True:
            began_ns = time.monotonic_ns()
            try:
                await call(body)
            except grpc.aio.AioRpcError as error:
                book.errors += 1
                print(error, file=sys.stderr)
                return
            book.note(began_ns, time.monotonic_ns())

    calls = [channel.unary_unary(url.path) for channel in channels]
    callers = [caller(calls[number % len(calls)]) for number in range(options.connections)]
    return [asyncio.create_task(one) for one in callers]


async def run(options):
    url = urlsplit(options.url)
    book = Book()
    connect = grpc_callers if url.scheme == "grpc" else sockets
    kept = await connect(options, url, book)  # Tasks that nothing refers to would be collected.
    if options.told:
        print("connected", flush=True)
        opens_ns = int(await asyncio.to_thread(sys.stdin.readline))
        await asyncio.sleep((opens_ns - time.monotonic_ns()) / 1e9)
    else:
        await asyncio.sleep(OPEN_S)
    book.is_open, began, cpu = True, time.monotonic(), time.process_time()
    print("open", flush=True)
    await asyncio.sleep(options.seconds)
    book.is_open, elapsed = False, time.monotonic() - began
    del kept
    latencies = np.array(book.latencies_ns or [math.nan]) / 1e3
    count = len(book.latencies_ns)
    figures = {
        "requests": count,
        "requests_per_s": count / elapsed,
        "p50_us": float(np.percentile(latencies, 50)),
        "p99_us": float(np.percentile(latencies, 99)),
        "errors": book.errors,
        "client_cpu_us": (time.process_time() - cpu) / max(count, 1) * 1e6,
    }
    if options.told:
        figures["quantiles_us"] = np.percentile(latencies, QUANTILES).tolist()
    print(json.dumps(figures), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--raw", action="store_true", help="send the tensor alone")
    parser.add_argument("--body", default="", help="the message, in hex, for grpc, and for HTTP as JSON")
    parser.add_argument("--channels", type=int, default=1, help="connections, for grpc")
    parser.add_argument(
        "--told", action="store_true", help="say 'connected', and read from which time on to measure, in ns"
    )
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
