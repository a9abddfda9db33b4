"""Listeners: handshakes are counted and bounded, and large answers leave the loop to others."""

import asyncio
import gc
import ssl
import weakref
from contextlib import asynccontextmanager

import numpy as np
import pytest
from websockets.asyncio.client import connect

from asynctrt.backends.function import FunctionModel
from asynctrt.serving.http import SPARE, HttpConnection
from asynctrt.tensors import TensorSpec
from tests.helpers import until
from tests.serving.support import WAIT_S, Raw, request, serving
from tests.serving.test_http import infer, outputs
from tests.serving.test_websocket import binary
from tests.serving.tls import certificate

pytestmark = pytest.mark.anyio
WIDE = 1 << 18


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def encrypted(pair, **settings):
    """A server with TLS, and a way to connect to it."""
    chain, key = pair
    context = ssl.create_default_context(cafile=chain)
    async with serving(tls_certificate=chain, tls_key=key, **settings) as server, asyncio.timeout(WAIT_S):
        port = int(server.http_url.rpartition(":")[2])

        async def opened(tls=context):
            return await asyncio.open_connection("127.0.0.1", port, ssl=tls)

        yield server, opened


async def answer_of(reader):
    return await Raw(reader, None).answer()


def wide_model():
    """A model whose answer has 1 MiB a row: its number, and those that follow."""

    def count_on(inputs, outputs):
        outputs["output"][...] = inputs["input"][:, :1] + np.arange(WIDE, dtype=np.float32)

    given, made = TensorSpec("input", "float32", (4,)), TensorSpec("output", "float32", (WIDE,))
    return FunctionModel(count_on, inputs=given, outputs=made)


async def check_large_answers(reader, writer):
    """Ask for large answers, with a small one between them: they are whole and in order."""
    writer.write(infer(1) + infer(2) + request("/v2/health/live") + infer(3))
    for number in (1, 2, None, 3):
        status, headers, body = await answer_of(reader)
        assert status == 200
        if number is not None:
            values = np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32)
            assert np.array_equal(values, number + np.arange(WIDE, dtype=np.float32))
    writer.write(infer(4, Connection="close"))
    assert len((await answer_of(reader))[2]) > 4 * WIDE
    assert await reader.read() == b""
    writer.close()


async def test_handshakes_count_as_connections_and_the_oldest_makes_room(pair):
    async with encrypted(pair, max_connections=2) as (server, opened):
        silent = [await opened(None) for _ in range(2 + SPARE)]
        await until(lambda: f"handshakes={len(silent)}>" in repr(server._listeners))
        assert server._hub.refused == 0
        reader, writer = await opened()
        assert await silent[0][0].read() == b""
        writer.write(infer(1))
        assert outputs(await answer_of(reader)) == [2]
        for _, one in silent:
            one.transport.abort()
        await until(lambda: "handshakes=0>" in repr(server._listeners))
        writer.write(infer(1))
        assert outputs(await answer_of(reader)) == [2]
        writer.close()


async def test_a_server_stops_while_clients_shake_hands(pair):
    async with encrypted(pair) as (server, opened):
        reader, writer = await opened(None)
        await until(lambda: "handshakes=1>" in repr(server._listeners))
        await server.stop()
        assert await reader.read() == b""
        await until(lambda: "handshakes=0>" in repr(server._listeners))
        writer.close()


async def test_what_is_no_handshake_ends_the_connection(pair):
    async with encrypted(pair) as (server, opened):
        reader, writer = await opened(None)
        writer.write(request("/v2"))
        assert b"HTTP" not in await reader.read()
        await until(lambda: "handshakes=0>" in repr(server._listeners))
        assert not server._hub.connections
        writer.close()


async def test_large_answers_are_whole_and_in_order(pair):
    async with encrypted(pair, models={"double": wide_model()}) as (_, opened):
        await check_large_answers(*await opened())


async def test_a_websocket_with_large_answers(pair):
    async with encrypted(pair, models={"double": wide_model()}) as (server, _):
        context = ssl.create_default_context(cafile=pair[0])
        url = server.http_url.replace("https", "wss") + "/v2/models/double/ws"
        async with connect(url, ssl=context, max_size=None, proxy=None) as socket:
            for number in range(3):
                await socket.send(binary(number, id=str(number)))
            for _ in range(3):
                raw = await socket.recv()
                values = np.frombuffer(raw[-4 * WIDE :], np.float32)
                assert np.array_equal(values, values[0] + np.arange(WIDE, dtype=np.float32))


async def test_nothing_is_left_of_a_connection(pair):
    async with encrypted(pair) as (server, opened):
        gc.collect()
        gc.disable()
        try:
            reader, writer = await opened()
            writer.write(infer(1))
            assert outputs(await answer_of(reader)) == [2]
            (connection,) = map(weakref.ref, server._hub.connections)
            assert isinstance(connection(), HttpConnection)
            writer.transport.abort()
            await until(lambda: connection() is None)
        finally:
            gc.enable()
