"""The websocket client against a real server: answers, errors, cancelling, connections that are lost."""

import asyncio

import numpy as np
import pytest

from asynctrt.backends.function import FunctionModel
from asynctrt.client import RemoteError, connect
from asynctrt.errors import (
    ConnectionLostError,
    DeadlineError,
    ModelNotReadyError,
    RequestError,
    UnknownModelError,
    UsageError,
)
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model, rows
from tests.serving.support import WAIT_S, address, engine_of, serving

pytestmark = pytest.mark.anyio


def client_of(server, path="/v2/ws", **kw):
    return connect(server.http_url.replace("http", "ws", 1) + path, proxy=None, **kw)


def copy_model(**specs):
    """Gives what it gets, for tensors of any dtype."""

    def function(inputs, outputs):
        for name in specs:
            outputs[f"{name}_out"][...] = inputs[name]

    return FunctionModel(
        function,
        inputs=[TensorSpec(name, dtype, (3,)) for name, dtype in specs.items()],
        outputs=[TensorSpec(f"{name}_out", dtype, (3,)) for name, dtype in specs.items()],
    )


async def test_many_at_once():
    async with serving() as server, client_of(server) as client:
        calls = [client.infer("double", {"input": rows(value)}) for value in range(500)]
        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*calls)
        assert [answer["output"][0, 0] for answer in answers] == [2 * value for value in range(500)]
        assert engine_of(server).statistics().mean_batch_rows > 2
        answers[0]["output"][...] = 0  # It is the caller's.


async def test_bytes_and_text_and_several_tensors():
    model = copy_model(words="S8", ids="int32")
    async with serving({"copy": model}) as server, client_of(server) as client:
        for words in ([["a", "", "bär"]], [[b"longer", b"x", b"\x00y"]], np.array([["q", "w", "e"]])):
            answer = await client.infer("copy", {"words": words, "ids": np.arange(3, dtype=np.int32)[None]})
            expected = [word.encode() if isinstance(word, str) else bytes(word) for word in words[0]]
            assert answer["words_out"].tolist() == [expected]
            assert answer["ids_out"].tolist() == [[0, 1, 2]]
        only = await client.infer(
            "copy", {"words": [["a"] * 3], "ids": np.ones((1, 3), np.int32)}, outputs=["ids_out"]
        )
        assert list(only) == ["ids_out"]


async def test_versions_and_one_models_socket():
    def triple(inputs, outputs):
        outputs["output"][...] = 3 * inputs["input"]

    models = {("double", "1"): double_model(), ("double", "2"): double_model(triple)}
    async with serving(models) as server:
        async with client_of(server) as client:
            for version, factor in (("", 3), ("1", 2), ("2", 3)):
                answer = await client.infer("double", {"input": rows(1)}, version=version)
                assert answer["output"][0, 0] == factor
        async with client_of(server, "/v2/models/double/versions/1/ws") as client:
            assert (await client.infer("", {"input": rows(1)}))["output"][0, 0] == 2


async def test_timeout_and_priority():
    device = LatchDevice(concurrency=1)
    engine = {"device": device, "contexts": 1, "max_rows": 1}
    async with serving(engine=engine) as server, client_of(server) as client:
        order = []

        async def call(value, **kw):
            await client.infer("double", {"input": rows(value)}, **kw)
            order.append(value)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(call(1))
            await until(lambda: device.held == 1)
            tasks.create_task(call(2))
            tasks.create_task(call(3, priority=1))
            await until(lambda: engine_of(server).statistics().queued_requests == 2)
            with pytest.raises(DeadlineError):
                await client.infer("double", {"input": rows(4)}, timeout=0.0001)
            device.open()
        assert order == [1, 3, 2]


async def test_at_most_so_many_in_flight():
    device = LatchDevice()
    async with serving(engine={"device": device}) as server, client_of(server, max_in_flight=2) as client:
        calls = [asyncio.create_task(client.infer("double", {"input": rows(value)})) for value in range(5)]
        await until(lambda: engine_of(server).statistics().submitted == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine_of(server).statistics().submitted == 2
        device.open()
        assert [(await call)["output"][0, 0] for call in calls] == [0, 2, 4, 6, 8]


class TestConnections:
    async def test_another_path(self):
        async with serving() as server:
            with pytest.raises(UnknownModelError, match="404"):
                async with client_of(server, "/elsewhere"):
                    pass

    async def test_a_server_that_is_restarted_under_a_client_that_retries(self):
        async with serving() as server:
            port = address(server)[1]
            client = await client_of(server, attempts=10, idempotent=True).__aenter__()
            assert (await client.infer("double", {"input": rows(1)}))["output"][0, 0] == 2
        lost = asyncio.create_task(client.infer("double", {"input": rows(2)}))
        await asyncio.sleep(0)
        async with serving(http_port=port):
            async with asyncio.timeout(WAIT_S):
                assert (await lost)["output"][0, 0] == 4
                assert (await client.infer("double", {"input": rows(3)}))["output"][0, 0] == 6
            await client.aclose()

    async def test_a_server_that_has_not_loaded_the_model_yet(self):
        async with serving() as server, client_of(server, attempts=50) as client:
            await server.repository.unload("double")
            waiting = asyncio.create_task(client.infer("double", {"input": rows(2)}))
            await until(lambda: server.repository.index()[0]["state"] == "UNAVAILABLE" and client._number > 0)
            await server.repository.load("double")
            async with asyncio.timeout(WAIT_S):
                assert (await waiting)["output"][0, 0] == 4
            await server.repository.unload("double")
            async with client_of(server) as hasty:
                with pytest.raises(ModelNotReadyError):
                    await hasty.infer("double", {"input": rows(2)})

    async def test_a_server_that_does_not_come_back(self):
        async with serving() as server:
            client = await client_of(server, attempts=10, reconnect_timeout=0.05).__aenter__()
        with pytest.raises(ConnectionLostError, match="could not be made again within 0.05 s"):
            async with asyncio.timeout(WAIT_S):
                await client.infer("double", {"input": rows(1)})
        await client.aclose()

    async def test_closing(self):
        device = LatchDevice()
        async with serving(engine={"device": device}) as server:
            client = client_of(server)
            assert "not connected" in repr(client)
            async with client:
                call = asyncio.create_task(client.infer("double", {"input": rows(1)}))
                await until(lambda: device.held == 1)
                assert "in_flight=1" in repr(client)
            with pytest.raises(ConnectionLostError):
                await call
            with pytest.raises(ConnectionLostError, match="closed"):
                await client.infer("double", {"input": rows(1)})
            with pytest.raises(UsageError, match="already entered"):
                await client.__aenter__()
            await client.aclose()
            device.open()


async def test_an_error_of_an_unknown_kind():
    from websockets.asyncio.server import serve

    async def answer(socket):
        async for _ in socket:
            await socket.send('{"id":"1","error":"no coffee","status":418,"type":"__builtins__"}')

    async with serve(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}/", proxy=None) as client:
            with pytest.raises(RemoteError, match="no coffee") as caught:
                await client.infer("double", {"input": rows(1)})
            assert caught.value.status == 418
            assert not isinstance(caught.value, RequestError)
