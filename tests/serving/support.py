"""What the tests of serving share: a real server on free ports, and HTTP by hand."""

import asyncio
import mmap
import tracemalloc
import weakref
from contextlib import asynccontextmanager, suppress

import grpc
import ml_dtypes
import numpy as np

import asynctrt
from asynctrt.serving.latency import LoopDelays
from asynctrt.serving.memory import MemoryLimit
from asynctrt.serving.metrics import Metrics
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import Sampler
from asynctrt.serving.server import Server
from asynctrt.serving.settings import ServerSettings
from tests.helpers import until
from tests.models import double_model

DTYPES = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "BYTES": "S16",
}
"""A dtype for each datatype of the KServe protocol."""
WAIT_S = 30
WEBSOCKET_KEY = "dGhlIHNhbXBsZSBub25jZQ=="
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def metrics_of(repository, sampler=None, memory=None):
    """The metrics of a server with three connections and two requests."""
    sampler = sampler or Sampler(repository, connections=lambda: 3, in_flight=lambda: 2, lag_ns=lambda: 0)
    delays = LoopDelays()
    delays.close()
    return Metrics(repository, sampler, delays, memory or MemoryLimit(1000), lambda: {"memory": 7})


@asynccontextmanager
async def serving(models=None, *, engine=None, is_inner=False, **settings):
    """A server with these models, ``double`` if there are none: by name, or by (name, version).

    ``engine`` are the options of their engines, ``settings`` those of the server. A model may be a pair, with
    options of its own. ``is_inner`` is for one that ends before another, which goes on using gRPC.
    """
    settings = {"http_port": 0, "grpc_port": 0, "grpc": False} | settings
    of_server = ServerSettings(**settings)
    repository = Repository(of_server)
    for key, model in (models or {"double": double_model()}).items():
        name, version = key if isinstance(key, tuple) else (key, "1")
        options = {} if engine is None else dict(engine)
        if isinstance(model, tuple):
            model, own = model
            options |= own
        repository.add(name, version=version, opener=opener_of(model, options))
    try:
        async with Server(repository, of_server) as server:
            await repository.load_all()
            yield server
    finally:
        if settings["grpc"] and not is_inner:
            await settle_grpc()


def opener_of(model, options):
    async def opened():
        return await asynctrt.open(model, **options)

    return opened


def engine_of(server, name="double", version=""):
    return server.repository.find(name, version).engine


def taken(server, name="double", version=""):
    """How many requests a model has taken: those that its engine has, and those that wait before it."""
    served = server.repository.find(name, version)
    return served.engine.statistics().submitted + served.admission.gate.waiting


def address(server):
    """Host and port of a server's HTTP."""
    host, _, port = server.http_url.partition("://")[2].rpartition(":")
    return host, int(port)


class Held:
    """Counts the bytes that Python holds, and those of messages that are put together in mapped memory."""

    def __init__(self, monkeypatch):
        self.maps = weakref.WeakSet()

        class Mapped(mmap.mmap):
            def __new__(cls, *given, **more):
                made = super().__new__(cls, *given, **more)
                self.maps.add(made)
                return made

        monkeypatch.setattr("asynctrt.serving.assembly.mmap.mmap", Mapped)
        tracemalloc.start()

    def nbytes(self):
        return tracemalloc.get_traced_memory()[0] + sum(len(one) for one in self.maps if not one.closed)

    def stop(self):
        tracemalloc.stop()


class Raw:
    """A connection that is written to and read from byte by byte."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    def send(self, raw):
        self.writer.write(raw)

    async def answer(self, *, to_head=False):
        """Status, headers (lower case) and body of the next answer."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {}
            for line in lines[1:-2]:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            length = 0 if to_head else int(headers.get("content-length", 0))
            body = await self.reader.readexactly(length)
            return int(lines[0].split()[1]), headers, body

    async def ended(self):
        """What is left until the server closes."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    def close(self):
        self.writer.close()


@asynccontextmanager
async def connected(server, **kw):
    host, port = address(server)
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 26, **kw)
    raw = Raw(reader, writer)
    try:
        yield raw
    finally:
        writer.transport.abort()


def request(path, body=b"", *, method=None, **headers):
    """An HTTP request; ``_`` in header names stands for ``-``."""
    method = method or ("POST" if body else "GET")
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if body or method == "POST":
        headers.setdefault("Content_Length", len(body))
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def handshake(path="/v2/ws", **headers):
    """The request that opens a websocket."""
    given = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": 13}
    return request(path, **(given | {"Sec_WebSocket_Key": WEBSOCKET_KEY} | headers))


async def ask(server, path, body=b"", **kw):
    """One request on a connection of its own."""
    async with connected(server) as raw:
        raw.send(request(path, body, **kw))
        return await raw.answer(to_head=kw.get("method") == "HEAD")


async def settle_grpc():
    """Let gRPC hand over what it still has for this event loop.

    It has one queue for all loops of a process. What is in it for a loop that has been closed raises in the
    loop of a later test, whichever that is. Its tasks wait for what is yet to come; a server that has stopped
    may leave some. A call that fails comes after all that was put into the queue before.
    """
    await until(lambda: not any(map(_is_of_grpc, asyncio.all_tasks())))
    async with grpc.aio.insecure_channel("unix:/nobody/listens/here") as channel:
        with suppress(grpc.aio.AioRpcError):
            await channel.unary_unary("/asynctrt/Nothing")(b"", timeout=WAIT_S)


def _is_of_grpc(task):
    return "cython" in type(task.get_coro()).__module__
