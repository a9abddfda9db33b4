"""Websockets over real sockets, with the clients that people use: ``websockets``, and frames by hand."""

import asyncio
import itertools
import json
import socket as sockets
import ssl
from contextlib import AsyncExitStack

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from asynctrt.backends.function import FunctionModel
from asynctrt.serving.turns import LONE_TURN_NS, TURN_NS
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.serving.support import WAIT_S, address, connected, engine_of, request, serving
from tests.serving.test_websocket import binary, read
from tests.serving.tls import certificate

pytestmark = pytest.mark.anyio


def url(server, path="/v2/ws"):
    return server.http_url.replace("http", "ws", 1) + path


def opened(server, path="/v2/ws", **kw):
    return connect(url(server, path), proxy=None, **kw)


async def receive(socket):
    async with asyncio.timeout(WAIT_S):
        return read(await socket.recv())


async def test_fragmented_messages_and_pings():
    message = binary(*range(50), id="x")
    async with serving() as server, opened(server) as socket:
        await socket.send([message[start : start + 37] for start in range(0, len(message), 37)])
        assert (await receive(socket))[1] == [2.0 * value for value in range(50)]
        async with asyncio.timeout(WAIT_S):
            await (await socket.ping())


async def test_compression_is_not_offered_and_not_needed():
    async with serving() as server, opened(server, compression="deflate") as socket:
        await socket.send(binary(1))
        assert (await receive(socket))[1] == [2]


@pytest.mark.parametrize(
    ("path", "status"), [("/v2/other", 404), ("/v2/models/none/ws", 404), ("/v2/models/double", 404)]
)
async def test_no_websocket_there(path, status):
    async with serving() as server:
        with pytest.raises(InvalidStatus) as caught:
            await opened(server, path)
        assert caught.value.response.status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Upgrade": "websocket", "Connection": "Upgrade"},
        {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "x",
            "Sec-WebSocket-Version": "13",
        },
        {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version": "8",
        },
    ],
)  # fmt: skip
async def test_a_broken_handshake(headers):
    async with serving() as server, connected(server) as raw:
        raw.send(request("/v2/ws", **headers))
        status, answered, _ = await raw.answer()
        is_old = headers.get("Sec-WebSocket-Version") == "8"
        assert (status, answered["connection"]) == (426 if is_old else 400, "close")
        assert answered.get("sec-websocket-version") == ("13" if is_old else None)


async def test_a_page_of_another_origin_is_refused():
    async with serving() as server:
        with pytest.raises(InvalidStatus) as caught:
            await opened(server, origin="https://evil.example")
        assert caught.value.response.status_code == 403
        async with opened(server, origin=server.http_url) as socket:
            await socket.send(binary(1))
            assert (await receive(socket))[1] == [2]
    async with (
        serving(allow_origins=("https://good.example",)) as server,
        opened(server, origin="https://good.example"),
    ):
        pass
    async with serving(allow_origins=("*",)) as server, opened(server, origin="https://any.example"):
        pass


async def test_tokens():
    async with serving(tokens=("s3cret",)) as server:
        for kw in (
            {},
            {"additional_headers": {"Authorization": "Bearer no"}},
            {"subprotocols": ["bearer.no"]},
        ):
            with pytest.raises(InvalidStatus) as caught:
                await opened(server, **kw)
            assert caught.value.response.status_code == 401
        async with opened(server, additional_headers={"Authorization": "Bearer s3cret"}):
            pass
        async with opened(server, subprotocols=["asynctrt", "bearer.s3cret"]) as socket:
            assert socket.subprotocol == "asynctrt"


async def test_tls(tmp_path):
    chain, key = certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(chain))
    async with serving(tls_certificate=chain, tls_key=key) as server:
        host, port = address(server)
        assert server.http_url == f"https://{host}:{port}"
        async with connect(f"wss://localhost:{port}/v2/ws", ssl=trusting, proxy=None) as socket:
            for number in range(5):
                await socket.send(binary(number))
                assert (await receive(socket))[1] == [2 * number]
        connector = aiohttp.TCPConnector(ssl=trusting)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"https://localhost:{port}/v2/models/double") as response,
        ):
            assert (await response.json())["name"] == "double"
    # The transport of a TLS connection ends a tick after its socket.
    await asyncio.sleep(0)


async def test_backpressure_holds_a_connection_and_no_other():
    """What is too much is not read, and so not lost: it goes on when there is room."""
    device = LatchDevice(concurrency=1)
    engine = {"device": device, "contexts": 1, "max_rows": 1}
    async with (
        serving(max_requests_per_connection=3, engine=engine) as server,
        opened(server) as greedy,
        opened(server) as modest,
    ):
        for number in range(40):
            await greedy.send(binary(number, id=str(number)))
        await until(lambda: server.api.in_flight == 3)
        await modest.send(binary(99))
        await until(lambda: server.api.in_flight == 4)
        assert engine_of(server).statistics().submitted == 4
        device.open()
        assert (await receive(modest))[1] == [198]
        answers = [await receive(greedy) for _ in range(40)]
        assert [content["id"] for content, _ in answers] == [str(number) for number in range(40)]


async def test_a_connection_that_rested_when_it_became_a_websocket_reads_as_that_says():
    """The trap: after its rest it read on, although the websocket had all that it may have by then."""
    device = LatchDevice(concurrency=1)
    shake = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": "13"}
    shake["Sec_WebSocket_Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    frames = Frame(Opcode.BINARY, binary(1)).serialize(mask=True)
    frames += Frame(Opcode.TEXT, b'{"cancel": ""}').serialize(mask=True) * 8000
    options = {"engine": {"device": device}, "max_requests_per_connection": 1}
    async with serving(**options) as server, connected(server), AsyncExitStack() as stack:
        stack.callback(device.open)
        await until(lambda: server._hub.connections)
        (connection,) = server._hub.connections
        connection.data_received(request("/v2/ws", **shake) + frames)
        (socket,) = server._hub.connections
        for _ in range(5):
            await asyncio.sleep(0)
        assert not socket._is_reading
        assert not socket._transport.is_reading()
        device.open()
        await until(lambda: socket._is_reading)
        assert socket._transport.is_reading()


async def test_turns_are_shorter_while_there_are_others(monkeypatch):
    """Someone else's request waits for a turn of the flood to be read, and for others to be answered."""
    message = Frame(Opcode.TEXT, b'{"cancel": ""}').serialize(mask=True)
    async with serving() as server, opened(server):
        (connection,) = server._hub.connections
        turns = server.api.turns
        taken = []
        monkeypatch.setattr(connection._session, "receive", lambda one, _: taken.append(one))
        monkeypatch.setattr(server._hub, "now_ns", itertools.count(0, 20_000).__next__)

        async def turn():
            """Return how many messages are handled before others have their turn, 20 µs each."""
            taken.clear()
            # The handshake took a part of this round's turn, which is long on a busy machine: begin another.
            turns.charge(connection._session.account, turns.turn_ns)
            await until(lambda: turns.left_ns(connection._session.account) == turns.turn_ns)
            connection.data_received(message * 1000)
            handled = len(taken)
            await until(lambda: len(taken) == 1000)
            return handled

        assert 0.8 * LONE_TURN_NS / 20_000 < await turn() <= LONE_TURN_NS / 20_000
        other = server.api.memory.account("other")
        turns.spend(other, turns._latest_ns, turns._latest_ns + 1)
        assert 0.8 * TURN_NS / 20_000 < await turn() <= TURN_NS / 20_000


async def test_a_client_that_takes_no_answers_is_cut(often):
    """Answers that nobody takes hold the connection, and end it in the end."""
    async with serving(write_timeout=0.05, engine={"max_rows": 500, "max_queue_rows": 1 << 20}) as server:
        host, port = address(server)
        loop = asyncio.get_running_loop()
        with sockets.socket() as slow:
            slow.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
            slow.setblocking(False)
            await loop.sock_connect(slow, (host, port))
            key = "dGhlIHNhbXBsZSBub25jZQ=="
            shake = request(
                "/v2/ws",
                Upgrade="websocket",
                Connection="Upgrade",
                Sec_WebSocket_Key=key,
                Sec_WebSocket_Version=13,
            )
            await loop.sock_sendall(slow, shake)
            message = binary(*range(500), id="x").replace(b'"id":"x"', b'"id": ""')
            frame = b"\x82\xfe" + len(message).to_bytes(2, "big") + bytes(4) + message
            sending = asyncio.create_task(loop.sock_sendall(slow, frame * 5000))
            await until(lambda: engine_of(server).statistics().succeeded > 10)
            await until(lambda: not server._hub.connections)
            sending.cancel()
            await asyncio.wait([sending])
        assert engine_of(server).statistics().submitted < 5000


async def test_an_idle_connection_is_asked_and_then_closed(often):
    async with (
        serving(idle_timeout=0.15) as server,
        opened(server, ping_interval=None) as alive,
        connected(server) as dead,
    ):
        dead.send(
            request(
                "/v2/ws",
                Upgrade="websocket",
                Connection="Upgrade",
                Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==",
                Sec_WebSocket_Version=13,
            )
        )
        await dead.answer()
        left = await dead.ended()
        assert left == b"\x89\x00", "it was pinged, did not answer, and was cut"
        await alive.send(binary(1))
        assert (await receive(alive))[1] == [2]


async def test_text_that_is_no_utf_8():
    async with serving() as server, opened(server) as socket:
        await socket.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosed) as caught:
            await receive(socket)
        assert caught.value.rcvd.code == 1007


async def test_a_clean_close_while_draining():
    device = LatchDevice()
    async with serving(engine={"device": device}) as server, opened(server) as busy, opened(server) as idle:
        await busy.send(binary(1, id="1"))
        await until(lambda: server.api.in_flight == 1)
        stopping = asyncio.create_task(server.stop())
        with pytest.raises(ConnectionClosed) as caught:
            await receive(idle)
        assert caught.value.rcvd.code == 1001
        await busy.send(binary(2, id="2"))
        content, _ = await receive(busy)
        assert (content["id"], content["status"]) == ("2", 503)
        device.open()
        assert (await receive(busy))[1] == [2]
        with pytest.raises(ConnectionClosed) as caught:
            await receive(busy)
        assert caught.value.rcvd.code == 1001
        async with asyncio.timeout(WAIT_S):
            await stopping


async def test_answers_that_nobody_reads_are_bounded_in_bytes():
    """The trap: 256 requests of 100 bytes, whose answers have 4 MiB each."""

    def large(inputs, outputs):
        outputs["output"][...] = 1

    model = FunctionModel(
        large,
        inputs=TensorSpec("input", "float32", (4,)),
        outputs=TensorSpec("output", "float32", (1 << 18,)),
    )
    head = {"parameters": {"binary_data_output": True}, "model_name": "large"}
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    raw = json.dumps(head | {"inputs": [tensor]}).encode()
    message = len(raw).to_bytes(4, "little") + raw + bytes(16)
    async with (
        serving({"large": model}, max_body=4 << 20) as server,
        opened(server, max_size=None, max_queue=1) as socket,
    ):
        for _ in range(64):
            await socket.send(message)
        await until(lambda: engine_of(server, "large").statistics().submitted >= 4)
        (connection,) = server._hub.connections
        await until(lambda: connection._writing.since is not None and not connection._session.in_flight)
        assert engine_of(server, "large").statistics().submitted <= 24
        async with asyncio.timeout(WAIT_S):
            for _ in range(64):
                assert len(await socket.recv()) > 1 << 20
