"""Whole connections of any bytes, a few cases of them, and what they have found. See tests/fuzz/README.md."""

import asyncio
import gc
import tempfile
import tracemalloc
import weakref
from pathlib import Path

import pytest

from tests.fuzz.connections import fuzz
from tests.helpers import until
from tests.serving.support import WEBSOCKET_KEY, connected, handshake, request, serving

GONE = {
    "an idle websocket": [handshake()],
    "a websocket in the middle of a message": [
        handshake(),
        b"\x02\xfe\xff\xff" + bytes(4 + 65535) + b"\x00\xfe\xff\xff" + bytes(4 + 60000),
    ],
    "a websocket that broke the protocol": [handshake(), b"\xff\x80" + bytes(4)],
    "a websocket whose key is none": [handshake(Sec_WebSocket_Key=WEBSOCKET_KEY + "x")],
    "a websocket of another version": [handshake(Sec_WebSocket_Version=8)],
    "a websocket of another origin": [handshake(Origin="https://evil.example")],
    "a request in the middle of its body": [
        request("/v2/models/double/infer", b"x" * 1000)[:-10],
        b"",
    ],
    "a request in the middle of a large body": [
        request("/v2/models/double/infer", bytes(700_000))[:-10],
        b"",
    ],
    "a websocket in the middle of a large message": [
        handshake(),
        bytes((0x82, 0xFF)) + (700_000).to_bytes(8, "big") + bytes(600_000),
        b"",
    ],
    "a request whose answer is being made": [request("/v2/repository/index", b"{}")],
    "no HTTP": [b"\0" * 100],
}
"""What clients have sent when they go away."""


@pytest.mark.anyio
@pytest.mark.parametrize("pieces", GONE.values(), ids=GONE)
async def test_nothing_of_a_connection_outlives_it(pieces):
    """The trap: what refers to itself stays until a collection, which counts objects and not bytes."""
    async with serving() as server:
        hub, taken, held = server._hub, [], weakref.WeakSet()
        add, replace = hub.add, hub.replace

        def noted(connection, client):
            taken.append(True)
            held.add(connection)
            add(connection, client)

        def replaced(connection, by):
            held.add(by)
            replace(connection, by)

        hub.add, hub.replace = noted, replaced
        gc.collect()
        gc.disable()
        try:
            async with connected(server) as raw:
                for piece in pieces:
                    raw.send(piece)
                    if piece.startswith(b"GET"):
                        await raw.answer()
                await until(lambda: taken)
            await until(lambda: not hub.connections)
            await until(lambda: not held)
            await until(lambda: not server.api.memory.nbytes)
        finally:
            gc.enable()


@pytest.mark.anyio
async def test_a_client_that_resets_while_its_request_is_refused():
    """The trap: to end the sending of a connection that is reset raises, which nobody expects."""
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with serving() as server, connected(server) as raw:
        raw.send(request("/v2"))
        await raw.answer()
        (connection,) = server._hub.connections
        transport = connection._transport
        ended = []

        class Reset:
            """A transport that does not know yet that its peer is gone."""

            def __getattr__(self, name):
                return getattr(transport, name)

            def write_eof(self):
                ended.append(True)
                raise OSError(107, "Transport endpoint is not connected")

        connection._transport = Reset()
        raw.send(b"GET /v2 HTTP/9.9\r\n\r\n")
        await until(lambda: not server._hub.connections)
        assert ended
    assert not faults


def test_connections_of_any_bytes(tmp_path):
    figures = asyncio.run(fuzz(40, 7, tmp_path))
    assert figures["answers"] > 100


@pytest.mark.tier2
@pytest.mark.timeout(120)
def test_connections_of_any_bytes_leave_no_memory():
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fuzz(30, 8, Path(folder)))  # What is made once.
        gc.collect()
        tracemalloc.start()
        try:
            figures = asyncio.run(fuzz(150, 9, Path(folder)))
        finally:
            tracemalloc.stop()
    # Eight connections at most, of 8 KiB bodies, and what this test itself keeps of them.
    assert figures["traced_peak_kib"] < 24 << 10
    assert figures["traced_left_kib"] < 1 << 10
