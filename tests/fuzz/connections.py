"""Send any bytes, in any pieces, over several connections at once, to a server in this process.

Each case is made from its seed and number alone. Its connections carry valid requests and websocket messages,
mutated ones, noise and TLS, cut into pieces that are sent in turn with any number of turns of the event loop
between them, while time passes for the server by its own clock. They end in every way that a client can.

Whatever was sent, every answer is HTTP to a strict parser (h11), valid connections get the very answers
that are due, the server answers somebody else, no exception is left over, and once the clients have
gone, nothing of them is left: no connection, no reader, no request, no task, no descriptor. README.md has the
commands.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import resource
import socket
import ssl
import struct
import sys
import tempfile
import time
import tracemalloc
import weakref
from collections import Counter
from itertools import pairwise
from pathlib import Path

import h11
import numpy as np
import uvloop
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.protocol import State
from websockets.uri import parse_uri

from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.tensors import TensorSpec
from tests.serving.support import WEBSOCKET_KEY, handshake, request, serving
from tests.serving.test_websocket import binary, read, text
from tests.serving.tls import certificate

TURNS_MAX = 100_000
"""Turns of the loop within which everything must have come to an end."""
SETTINGS = {
    "max_body": 8 << 10,
    "max_headers": 2 << 10,
    "max_connections": 6,
    "max_requests_per_connection": 3,
    "tokens": (),
}
IN_PLACE = {"device": HostDevice(in_place="always")}
"""Without threads a case goes the same way each time."""


def double(inputs, outputs):
    """Double any float, even one that becomes infinite."""
    with np.errstate(all="ignore"):
        outputs["output"][...] = 2 * inputs["input"]


SPECS = {name: TensorSpec(f"{name[:-1]}", "float32", (4,)) for name in ("inputs", "outputs")}
MODELS = {"double": FunctionModel(double, **SPECS, name="double")}
INFER = "/v2/models/double/infer"
PREDICT = "/v1/models/double:predict"


# ---- what is sent


def tensor(value):
    """Return the JSON of a request with one row, and what it is answered with."""
    item = {"name": "input", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}
    return json.dumps({"inputs": [item]}).encode(), [2.0 * value] * 4


def chunked(rng, body):
    """Return a body in chunks of any sizes, with extensions and trailers."""
    pieces = []
    while body:
        count = rng.randint(1, len(body))
        extension = rng.choice((b"", b"", b"", b";a", b';a="b"'))
        pieces.append(b"%x%b\r\n%b\r\n" % (count, extension, body[:count]))
        body = body[count:]
    return b"".join([*pieces, b"0\r\n", rng.choice((b"", b"", b"X-Trailer: y\r\n")), b"\r\n"])


def valid_request(rng):
    """Return a valid request and what is due: its method, a status, and values if it is an inference."""
    kind = rng.randrange(10)
    if kind < 3:
        value = rng.randrange(1000)
        body, values = tensor(value)
        if kind == 0:
            raw = request(INFER, body)
        elif kind == 1:
            raw = request(INFER, body, Content_Length="").replace(b"Content-Length: \r\n", b"", 1)
            head = raw[: -len(body)].replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
            raw = head + chunked(rng, body)
        else:
            raw = request(INFER, body, Connection="Upgrade, HTTP2-Settings", Upgrade="h2c")
        return raw, ("POST", 200, values)
    if kind == 3:
        return request("/v2/health/live"), ("GET", 200, None)
    if kind in (4, 5):
        return rng.choice(
            [
                (request("/v2", method="HEAD"), ("HEAD", 200, None)),
                (request("/v2/models/none"), ("GET", 404, None)),
            ]
        )
    if kind == 8:
        body = rng.choice((b"{}", b'{"instances":[["a",{},[]]]}', b'{"instances":[]}', b'{"inputs":{"x":1}}'))
        return request(PREDICT, body), ("POST", 400, None)
    if kind == 9:
        value = rng.randrange(1000)
        return request(PREDICT, b'{"instances":[[%d,%d,%d,%d]]}' % ((value,) * 4)), ("POST", 200, None)
    if kind == 6:
        return request(INFER, b"{}", X_Filler="y" * rng.choice((1, 900))), ("POST", 400, None)
    if rng.random() < 0.5:
        return request("/v2/repository/index", b'{"ready":true}'), ("POST", 200, None)
    return request("/v2/models/double/stats", method="GET"), ("GET", 200, None)


def frame(rng, opcode, data, *, fin=True, first=0):
    """Return a masked frame."""
    mask = rng.randbytes(4)
    if len(data) < 126:
        head = struct.pack("!BB", first | fin << 7 | opcode, 128 | len(data))
    else:
        head = struct.pack("!BBH", first | fin << 7 | opcode, 254, len(data))
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
    return head + mask + masked


def messages(rng):
    """Return the frames of valid messages and pings, and the values that are due for each id."""
    due, pieces = {}, []
    for number in range(rng.randint(1, 5)):
        name, value = str(number), rng.randrange(1000)
        due[name] = [2.0 * value]
        is_text = rng.random() < 0.5
        raw = text(value, id=name).encode() if is_text else binary(value, id=name)
        opcode = 1 if is_text else 2
        while rng.random() < 0.4 and len(raw) > 1:
            cut = rng.randint(0, len(raw))
            pieces.append(frame(rng, opcode, raw[:cut], fin=False))
            raw, opcode = raw[cut:], 0
            if rng.random() < 0.4:
                pieces.append(frame(rng, 9, rng.randbytes(rng.randint(0, 125))))
        pieces.append(frame(rng, opcode, raw))
    return b"".join(pieces), due


WORDS = [
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b"\0",
        b"0\r\n\r\n",
        b"GET / HTTP/1.1\r\n",
        b"HTTP/1.0",
        b"HTTP/1.1",
    ),
    *(
        b"Content-Length: 0\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 99999\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding:chunked\r\n", b"Content-Encoding: gzip\r\n"),
    *(b"Connection: close\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Upgrade: websocket\r\n"),
    *(
        b"Host: evil\r\n",
        b"Accept-Encoding: gzip\r\n",
        b"ffffffff\r\n",
        b"POST",
        b"OPTIONS",
        b" ",
        b":",
        b"%ff",
    ),
    *(
        b"\x81\x80",
        b"\x88\x02\x03\xe8",
        b"\x89\x00",
        b"\xff\xff\xff\xff",
        b"\x82\xfe\xff\xff",
        b"\x16\x03\x01\x02",
    ),
    *(b"X: " + b"y" * 3000, b"z" * 9000, b"[" * 500, b'{"a":' * 300),
]


def mutated(rng, raw):
    """Return bytes with some of them changed, removed, doubled, moved or added."""
    raw = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randint(0, len(raw))
        stop = min(len(raw), at + rng.choice((1, 1, 2, 8, 64)))
        action = rng.randrange(7)
        if action == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del raw[at:stop]
        elif action == 2:
            raw[at:at] = raw[at:stop]
        elif action == 3:
            raw[at:at] = rng.choice(WORDS)
        elif action == 4:
            raw[at:stop] = rng.randbytes(stop - at)
        elif action == 5:
            del raw[at:]
        else:
            other = rng.randint(0, len(raw))
            raw[at:stop] = raw[other : other + (stop - at)]
    # Which answers have no body is known of requests that are not mutated alone.
    return bytes(raw).replace(b"HEAD", b"READ")


ODD_HEADERS = {
    "Content-Length": "-1 0 1 99999999999999999999 1e3 0x10 +5 5,5 1_0 2097152",
    "Transfer-Encoding": "chunked gzip,chunked chunked,gzip x",
    "Content-Encoding": "gzip deflate br gzip,gzip \xff",
    "Accept-Encoding": "gzip * gzip;q=0 \xff ;;,,",
    "Inference-Header-Content-Length": f"0 -1 1 {'9' * 18} {'9' * 30} x",
    "Connection": "close keep-alive Upgrade x close,Upgrade",
    "Upgrade": "websocket h2c WebSocket,h2c TLS/1.0",
    "Sec-WebSocket-Version": "13 12 x -1",
    "Sec-WebSocket-Key": f"{WEBSOCKET_KEY} x \xff\xfe",
    "Sec-WebSocket-Protocol": "asynctrt bearer.x \xff ,,",
    "Sec-WebSocket-Extensions": "permessage-deflate ;; \xff",
    "Origin": "http://[ http://t null http://[::1 \xff //[",
    "Expect": "100-continue 200-ok",
    "Host": "a,b [ \xff",
    "Accept": "application/openmetrics-text */*;q=x \xff ;,;",
    "If-None-Match": "*",
    "Authorization": "Bearer \xff",
    "X": "a\rb a\nb",
    "X Y": "z",
    "X\0": "z",
    "": "y",
}
ODD_PATHS = [
    *(
        "/v2/models/double/infer",
        "/v2/",
        "/",
        "*",
        "",
        "//",
        "/v2/ws",
        "/v2/models/double/ws",
        "/metrics",
        "t:80",
    ),
    *(
        "/v2/models/double/versions//infer",
        "/v2/models//infer",
        "/v2/models/%00/infer",
        "/v2/models/%ff/stats",
    ),
    *(
        "/v2/models/double/versions/\xc2\xb2/infer",
        "http://[/v2",
        "http://t/v2",
        "/v2/repository/index",
        "?",
        "/%",
    ),
    *("/v2/repository/models//load", "/v2/health/live?x", "/dashboard/data", "/dashboard/recent?x=1", "/v2#"),
    *("/v2/systemsharedmemory/status", "/v2/trace/setting", "/" + "%ff" * 100, "/\xff\xfe", "/a b", "/\0"),
]
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "CONNECT", "TRACE", "PRI", "get", "M-SEARCH", "")
VERSIONS = ("HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.10", "HTTP", "RTSP/1.0", "")


def odd_request(rng):
    """Return a request of which a header, the path, the method or the version is odd."""
    raw = valid_request(rng)[0] if rng.random() < 0.7 else handshake()
    head, _, body = raw.partition(b"\r\n\r\n")
    (method, path, version), headers = head.split(b"\r\n")[0].split(b" "), head.split(b"\r\n")[1:]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        name = rng.choice(list(ODD_HEADERS))
        line = f"{name}: {rng.choice(['', *ODD_HEADERS[name].split(' ')])}".encode("latin-1")
        if rng.random() < 0.4:
            headers[rng.randrange(len(headers))] = line
        else:
            headers.insert(rng.randint(0, len(headers)), line)
    if rng.random() < 0.4:
        path = rng.choice(ODD_PATHS).encode("latin-1")
    if rng.random() < 0.2:
        method = rng.choice(METHODS).encode()
    if rng.random() < 0.1:
        version = rng.choice(VERSIONS).encode()
    # Which answers have no body is known of valid requests alone.
    line = b" ".join((method, path, version)).replace(b"HEAD", b"READ")
    return b"\r\n".join([line, *headers, b"", body])


def pieces_of(rng, raw):
    """Return the bytes in pieces."""
    how = rng.randrange(5)
    if how < 2 or not raw:
        return [raw]
    if how == 2:
        step = rng.choice((1, 7, 64))
        step = max(step, len(raw) // 60)
        return [raw[start : start + step] for start in range(0, len(raw), step)]
    cuts = sorted({0, len(raw), *(rng.randint(0, len(raw)) for _ in range(rng.randint(1, 6)))})
    return [raw[start:stop] for start, stop in pairwise(cuts)]


class Script:
    """What one client does: what it sends, what it is due, how it ends."""

    def __init__(self, rng):
        self.is_tls = rng.random() < 0.1
        self.due = []
        self.due_values = None
        self.is_valid = False
        self.methods = []
        kind = rng.randrange(10)
        if kind < 3:
            self.is_valid = True
            made = [valid_request(rng) for _ in range(rng.choice((1, 1, 2, 3, 8)))]
            raw, self.due = b"".join(part for part, _ in made), [due for _, due in made]
            self.methods = [method for method, _, _ in self.due]
        elif kind == 3:
            self.is_valid = True
            frames, self.due_values = messages(rng)
            raw = handshake() + frames
        elif kind < 6:
            made = [valid_request(rng)[0] for _ in range(rng.choice((1, 2, 3, 6)))]
            raw = mutated(rng, b"".join(made))
        elif kind == 6:
            raw = b"".join([odd_request(rng) for _ in range(rng.choice((1, 1, 2, 3)))])
        elif kind == 7:
            raw = handshake() + mutated(rng, messages(rng)[0])
        elif kind == 8:
            raw = mutated(rng, handshake() + messages(rng)[0])
        else:
            raw = rng.choice((rng.randbytes(rng.randint(0, 200)), rng.choice(WORDS) * 3, b""))
        self.pieces = pieces_of(rng, raw)
        self.is_broken_tls = self.is_tls and not self.is_valid and rng.random() < 0.5
        self.does_read = self.is_valid or rng.random() < 0.7
        self.end = rng.choice(("close", "reset", "shut"))


# ---- a client


class Client:
    """A socket that neither blocks nor belongs to the loop."""

    def __init__(self, address, script, rng, context):
        self.socket = socket.create_connection(address)
        self.socket.setblocking(False)
        self.script = script
        self.is_open = True
        self.has_ended = False
        """Whether the server has closed."""
        self.unsent = bytearray()
        self.got = bytearray()
        self._rng = rng
        self._tls = None
        self._wanted = bytearray()
        if context is not None:
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
            self._is_shaken = False

    def send(self, piece):
        """Send a piece, now or when there is room."""
        if self._tls is None:
            self.unsent += piece
        else:
            self._wanted += piece
        self.pump()

    def pump(self):
        """Send and receive what is possible now."""
        if not self.is_open:
            return
        if self.script.does_read:
            self._receive()
        if self._tls is not None:
            self._wrap()
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()

    def _receive(self):
        try:
            while True:
                piece = self.socket.recv(1 << 16)
                if not piece:
                    self.has_ended = True
                    break
                if self._tls is None:
                    self.got += piece
                else:
                    self._incoming.write(piece)
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True

    def _wrap(self):
        with contextlib.suppress(ssl.SSLError):
            if not self._is_shaken:
                self._tls.do_handshake()
                self._is_shaken = True
            while self._wanted:
                del self._wanted[: self._tls.write(self._wanted)]
            while piece := self._tls.read(1 << 16):
                self.got += piece
        raw = self._outgoing.read()
        if raw and self.script.is_broken_tls and self._rng.random() < 0.5:
            raw = mutated(self._rng, raw)
        self.unsent += raw

    def shut(self):
        """Say that no more will come."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self, *, reset=False):
        """Go away."""
        if self.is_open:
            self.is_open = False
            if reset:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.close()


# ---- what came back


def answers_of(raw, methods=()):
    """Read answers as a strict client does: (status, body) of each, and what follows a 101.

    The last may be cut off: the client may have gone away before its end.
    """
    answers = []
    methods = list(methods)
    while raw:
        is_switched = raw.startswith(b"HTTP/1.1 101 ")
        method = methods.pop(0) if methods else "GET"
        reader = h11.Connection(h11.CLIENT)
        headers = [("Host", "t")] + [("Connection", "Upgrade"), ("Upgrade", "websocket")] * is_switched
        reader.send(h11.Request(method=method, target="/", headers=headers))
        reader.send(h11.EndOfMessage())
        reader.receive_data(raw)
        body, answer = b"", None
        while True:
            event = reader.next_event()
            if event is h11.NEED_DATA:
                return answers, b""
            if isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    answers.append((101, b""))
                    return answers, reader.trailing_data[0]
                assert event.status_code == 100, event
            elif isinstance(event, h11.Response):
                answer = event
                names = [name for name, _ in event.headers]
                assert len(names) == len(set(names)), names
                assert names.count(b"content-length") == (answer.status_code != 204), answer
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
        answers.append((answer.status_code, body))
        raw = reader.trailing_data[0]
        if (b"connection", b"close") in list(answer.headers):
            # A connection is refused before it is known that a HEAD comes.
            assert not raw or method == "HEAD", f"bytes after the last answer: {raw[:200]!r}"
            return answers, b""
    return answers, b""


def frames_of(raw):
    """Read frames as a strict client does."""
    protocol = ClientProtocol(parse_uri("ws://localhost/"), state=State.OPEN, max_size=None)
    protocol.receive_data(raw)
    broken = protocol.parser_exc
    assert broken is None or isinstance(broken, EOFError), broken
    return [event for event in protocol.events_received() if isinstance(event, Frame)]


def values_of(answers):
    """Return the values that each message, by its id, was answered with."""
    found = {}
    for one in answers:
        if one.opcode in (1, 2):
            content, values = read(one.data.decode() if one.opcode == 1 else bytes(one.data))
            assert content["id"] not in found, "answered twice"
            found[content["id"]] = values
    return found


class Watch(logging.Handler):
    """Counts what is kept of connections, and what went wrong without anybody being told."""

    def __init__(self, loop):
        super().__init__(logging.ERROR)
        self.loop = loop
        self.faults = []
        self.held = weakref.WeakSet()
        self.pauses_us = Counter()
        self.longest = (0, 0)
        """The longest pause in µs, and the number of its case."""
        self.number = 0
        loop.set_exception_handler(lambda _, context: self.faults.append(context))
        logging.getLogger("asynctrt").addHandler(self)

    def emit(self, record):
        """Note an error that was logged."""
        self.faults.append(record.getMessage())

    def watch(self, hub):
        """Note every connection that a hub takes, without holding it."""
        add, replace = hub.add, hub.replace

        def noted(connection, client):
            self.held.add(connection)
            add(connection, client)

        def replaced(connection, by):
            self.held.add(by)
            replace(connection, by)

        hub.add, hub.replace = noted, replaced

    async def turn(self):
        """Let the loop run what is due, and note for how long that held it."""
        began = time.perf_counter_ns()
        await asyncio.sleep(0)
        pause_us = (time.perf_counter_ns() - began) // 1000
        self.pauses_us[pause_us] += 1
        self.longest = max(self.longest, (pause_us, self.number))

    def quantile_ms(self, share):
        """Return the pause that this share of all turns stays within."""
        left = share * self.pauses_us.total()
        for pause_us, count in sorted(self.pauses_us.items()):
            left -= count
            if left <= 0:
                return pause_us / 1000
        raise AssertionError("nothing was measured")

    def close(self):
        """Stop counting."""
        logging.getLogger("asynctrt").removeHandler(self)
        self.loop.set_exception_handler(None)
        super().close()


class Fuzzer:
    """A server with and one without TLS, and cases against them."""

    def __init__(self, seed, folder):
        self.seed = seed
        self.folder = folder
        self.statuses = Counter()
        self.requests = 0

    @contextlib.asynccontextmanager
    async def running(self):
        """Serve."""
        chain, key = certificate(self.folder)
        self.context = ssl.create_default_context(cafile=str(chain))
        async with (
            serving(MODELS, engine=IN_PLACE, **SETTINGS) as plain,
            serving(MODELS, engine=IN_PLACE, **SETTINGS, tls_certificate=chain, tls_key=key) as secure,
        ):
            self.servers = plain, secure
            self.addresses = [one._listeners[0].sockets[0].getsockname()[:2] for one in self.servers]
            self.watch = Watch(asyncio.get_running_loop())
            for server in self.servers:
                # Time passes when a case says so.
                server._hub._timer.cancel()
                server._sampling.cancel()
                self.watch.watch(server._hub)
            try:
                # What is made once and kept: a worker thread, codecs, layouts.
                for number in range(3):
                    await self._control(number)
                yield self
            finally:
                self.watch.close()

    def pass_time(self, ticks):
        """Let time pass for the servers."""
        for server in self.servers:
            hub = server._hub
            hub.tick += ticks
            for connection in list(hub.connections):
                connection.check_times(hub.tick)

    async def until(self, condition, clients, what):
        """Give the loop turns until the condition holds."""
        for _ in range(TURNS_MAX):
            if condition():
                return
            for client in clients:
                client.pump()
            await self.watch.turn()
        raise AssertionError(f"{what}: {[(one.script.pieces, bytes(one.got)) for one in clients]}")

    async def case(self, number):
        """Run one case and check all that has to hold."""
        rng = random.Random(f"{self.seed}/{number}")
        tasks, descriptors = len(asyncio.all_tasks()), _descriptors()
        scripts = [Script(rng) for _ in range(rng.choice((1, 2, 2, 3, 4, 8)))]
        has_time = rng.random() < 0.2
        # With time passing, or beyond the limit of connections, valid requests may be refused.
        is_certain = not has_time and len(scripts) < SETTINGS["max_connections"]
        clients = []
        todo = [(script, piece) for script in scripts for piece in (None, *script.pieces)]
        order = list(range(len(todo)))
        rng.shuffle(order)
        # The order among connections is any; the pieces of one are in theirs.
        by_script = {id(script): iter([part for part in todo if part[0] is script]) for script in scripts}
        opened = {}
        try:
            for at in order:
                script, piece = next(by_script[id(todo[at][0])])
                if piece is None:
                    context = self.context if script.is_tls else None
                    client = Client(self.addresses[script.is_tls], script, rng, context)
                    opened[id(script)] = client
                    clients.append(client)
                else:
                    opened[id(script)].send(piece)
                for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
                    await self.watch.turn()
                if has_time and rng.random() < 0.2:
                    self.pass_time(rng.choice((1, 9, 130, 250, 500)))
                for other in clients:
                    other.pump()
                if len(clients) > 1 and rng.random() < 0.02:
                    self._end(rng.choice(clients))
            if len(scripts) < SETTINGS["max_connections"]:
                await self._control(number)
            await self._finish(clients, is_certain)
        finally:
            for client in clients:
                client.close()
        await self._nothing_is_left(tasks, descriptors)
        for client in clients:
            self._check(client, is_certain)

    def _end(self, client):
        client.script.is_valid = False
        client.close(reset=client.script.end == "reset")

    async def _finish(self, clients, is_certain):
        for client in clients:
            script = client.script
            if script.is_valid and is_certain:
                await self.until(lambda client=client: _is_answered(client), clients, "answers are missing")
            if script.end == "shut":
                client.shut()
                script.does_read = True
                await self.until(
                    lambda client=client: client.has_ended or not client.is_open,
                    clients,
                    "a connection whose client has ended is still open",
                )
            client.close(reset=script.end == "reset")

    async def _nothing_is_left(self, tasks, descriptors):
        def is_quiet():
            return (
                not self.watch.held
                and not any(server._hub.connections or server.api.in_flight for server in self.servers)
                and len(asyncio.all_tasks()) <= tasks
                and _descriptors() <= descriptors
            )

        try:
            await self.until(is_quiet, (), "")
        except AssertionError:
            hubs = [server._hub.connections for server in self.servers]
            flights = [server.api.in_flight for server in self.servers]
            raise AssertionError(
                f"left: {hubs}, held {list(self.watch.held)}, in flight {flights}, "
                f"tasks {asyncio.all_tasks()}, descriptors {_descriptors()} of {descriptors}"
            ) from None
        assert not self.watch.faults, self.watch.faults

    async def _control(self, number):
        """Ask as somebody else."""
        value = number % 1000
        body, values = tensor(value)
        script = Script(random.Random(0))
        script.is_valid, script.does_read, script.is_tls = True, True, False
        script.due, script.methods, script.due_values = [("POST", 200, values)], ["POST"], None
        client = Client(self.addresses[0], script, None, None)
        try:
            client.send(request(INFER, body))
            await self.until(lambda: _is_answered(client), (client,), "somebody else is not answered")
        finally:
            client.close()
        ((status, answer),) = answers_of(bytes(client.got))[0]
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, values), client.got

    def _check(self, client, is_certain):
        script = client.script
        answers, rest = answers_of(bytes(client.got), script.methods)
        self.statuses.update(status for status, _ in answers)
        self.requests += len(answers)
        frames = frames_of(rest) if rest else []
        if not (script.is_valid and is_certain):
            return
        if script.due_values is not None:
            assert values_of(frames) == script.due_values
            return
        assert [status for status, _ in answers] == [status for _, status, _ in script.due]
        for (_, body), (_, _, values) in zip(answers, script.due, strict=True):
            if values is not None:
                assert json.loads(body)["outputs"][0]["data"] == values


def _is_answered(client):
    """Whether all that is due has come."""
    script, got = client.script, bytes(client.got)
    if client.has_ended:
        return True
    if script.due_values is None:
        return got.count(b"HTTP/1.1 ") >= len(script.due) and len(answers_of(got, script.methods)[0]) >= len(
            script.due
        )
    rest = answers_of(got)[1]
    return sum(one.opcode in (1, 2) for one in frames_of(rest)) >= len(script.due_values)


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


async def fuzz(cases, seed, folder, *, first=0, progress=None):
    """Run cases; return figures.

    :raises AssertionError: naming the command that repeats the first case that fails.
    """
    fuzzer = Fuzzer(seed, folder)
    async with fuzzer.running():
        gc.collect()
        # What refers to itself would stay until a collection; there is none here.
        gc.disable()
        began = time.perf_counter()
        peak, before = 0, tracemalloc.get_traced_memory()[0]
        try:
            for number in range(first, first + cases):
                fuzzer.watch.number = number
                try:
                    await fuzzer.case(number)
                except BaseException as error:
                    raise AssertionError(
                        f"python -m tests.fuzz.connections --cases 1 --first {number} --seed {seed}"
                    ) from error
                if number % 500 == 499:
                    gc.collect()  # What is in cycles is ours, and that of asyncio's TLS.
                if progress is not None and number % 5000 == 4999:
                    progress(number + 1, fuzzer)
        finally:
            gc.enable()
            gc.collect()
        if tracemalloc.is_tracing():
            left, peak = tracemalloc.get_traced_memory()
            peak, before = peak - before, left - before
        watch = fuzzer.watch
        return {
            "cases": cases,
            "seconds": round(time.perf_counter() - began, 1),
            "answers": fuzzer.requests,
            "statuses": dict(sorted(fuzzer.statuses.items())),
            "loop_ms": {f"p{100 * share:g}": watch.quantile_ms(share) for share in (0.5, 0.999, 0.99999)},
            "longest_pause_ms_and_its_case": (watch.longest[0] / 1000, watch.longest[1]),
            "traced_peak_kib": peak >> 10,
            "traced_left_kib": before >> 10,
            "resident_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--trace", action="store_true", help="count the memory that Python takes: slower")
    arguments = parser.parse_args()
    if arguments.trace:
        tracemalloc.start()

    def progress(number, fuzzer):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
        print(f"{number} cases, {fuzzer.requests} answers, {resident} MiB resident", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.Runner(loop_factory=uvloop.new_event_loop if arguments.uvloop else None).run(
            fuzz(
                arguments.cases,
                arguments.seed,
                Path(folder),
                first=arguments.first,
                progress=progress,
            )
        )
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
