"""What every client does, over HTTP and over websockets, from coroutines and from threads."""

import asyncio
import threading

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from asynctrt.backends.function import FunctionModel
from asynctrt.client import NotConnectedError, RemoteError, connect, connect_blocking
from asynctrt.client.persistence import DELAY_S_MIN, may_repeat
from asynctrt.errors import (
    ConnectionLostError,
    DeadlineError,
    EngineClosedError,
    ExecutionError,
    InputError,
    ModelNotReadyError,
    OverloadError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UsageError,
    once_begun,
)
from asynctrt.kserve.client import AnswerError
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import free_port, until
from tests.models import double_model, failing_model, rows
from tests.serving.support import WAIT_S, engine_of, serving, taken
from tests.serving.test_asgi import running

pytestmark = pytest.mark.anyio
KINDS = ("http", "ws")


def url_of(server, kind):
    return server.http_url if kind == "http" else server.http_url.replace("http", "ws", 1) + "/v2/ws"


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def two_inputs():
    return FunctionModel(
        lambda inputs: inputs["a"] + inputs["b"],
        inputs=[TensorSpec(name, "float32", (1,)) for name in "ab"],
        outputs=TensorSpec("sum", "float32", (1,)),
    )


@pytest.mark.parametrize("where", ["host", "device", "output"])
async def test_outputs_of_a_client_are_names(kind, where):
    """Their letters would be asked for otherwise: o, u, t, p."""
    async with serving() as server, connect(url_of(server, kind)) as client:
        with pytest.raises(InputError, match=rf"names of the model's outputs, such as \['{where}'\]"):
            await client.infer("double", rows(1), outputs=where)
        answer = await client.infer("double", rows(1), outputs=["output"])
        np.testing.assert_array_equal(answer["output"], 2 * rows(1))


async def test_arrays_with_and_without_a_name(kind):
    models = {"double": double_model(), "a/b c": double_model(), "sum": two_inputs()}
    async with serving(models) as server, connect(url_of(server, kind)) as client:
        for model in ("double", "a/b c"):
            for inputs in (rows(3), {"input": rows(3)}, rows(3).tolist(), {"input": [[3, 3, 3, 3]]}):
                answer = await client.infer(model, inputs, version="1", outputs=["output"])
                assert answer["output"].tolist() == rows(6).tolist()
        answer["output"][...] = 0  # It is the caller's.
        assert (await client.metadata("double"))["inputs"][0]["name"] == "input"
        with pytest.raises(UsageError, match=r"infer\('sum', \{'a': rows"):
            await client.infer("sum", rows(1))
        assert taken(server) == 4
        assert (await client.infer("sum", {"a": [[1]], "b": rows(2)[:, :1]}))["sum"].tolist() == [[3]]
        with pytest.raises(InputError, match="unknown input 'c'"):
            await client.infer("sum", {"a": [[1]], "b": [[2]], "c": [[3]]})
        with pytest.raises(InputError, match="'a' takes shape .* the lists given are ragged"):
            await client.infer("sum", {"a": [[1], [2, 3]], "b": [[2]]})
        assert server.api.in_flight == 0


@pytest.mark.parametrize(
    ("model", "inputs", "error", "says"),
    [
        ("none", rows(1), UnknownModelError, "none"),
        ("double", {"output": rows(1)}, InputError, "input"),
        ("double", rows(1).astype(np.float64), InputError, "FP32"),
        ("broken", rows(-1), ExecutionError, "negative number"),
        ("double", {"input": np.zeros(1, "datetime64[s]")}, InputError, "no datatype"),
        ("double", rows(1)[:, :2], InputError, "shape"),
        ("double", {}, InputError, "missing"),
    ],
)
async def test_errors_are_what_they_were_on_the_server(kind, model, inputs, error, says):
    models = {"double": double_model(), "broken": failing_model()}
    async with serving(models) as server, connect(url_of(server, kind), attempts=3) as client:
        with pytest.raises(error, match=says) as caught:
            await client.infer(model, inputs)
        assert type(caught.value) is error
        assert server.api.in_flight == 0
        assert (await client.infer("double", rows(1)))["output"][0, 0] == 2


async def test_a_token(kind):
    async with serving(tokens=("s3cret",)) as server:
        async with connect(url_of(server, kind), token="s3cret") as client:
            assert (await client.infer("double", rows(1)))["output"][0, 0] == 2
        with pytest.raises(UnauthorizedError):
            async with connect(url_of(server, kind), token="wrong") as client:
                await client.infer("double", rows(1))


async def test_a_deadline_ends_the_call_and_its_request(kind):
    device = LatchDevice()
    async with serving(engine={"device": device}) as server, connect(url_of(server, kind)) as client:
        with pytest.raises(DeadlineError, match=r"no answer within the deadline of 0\.2 s"):
            await client.infer("double", {"input": rows(1)}, deadline=0.2)
        await until(lambda: server.api.in_flight == 0)  # It was cancelled on the server.
        device.open()
        assert (await client.infer("double", rows(2), deadline=WAIT_S))["output"][0, 0] == 4


class TestWhatIsSentAgain:
    @pytest.mark.parametrize(
        ("error", "surely", "if_idempotent"),
        [
            (NotConnectedError(), True, True),
            (QueueFullError(), True, True),
            (ModelNotReadyError(), True, True),
            (ConnectionLostError(), False, True),
            (EngineClosedError(), False, True),
            (DeadlineError(), False, False),
            (InputError(), False, False),
            (ExecutionError(), False, False),
            (RemoteError(), False, False),
            (OverloadError(), False, True),
            (once_begun(QueueFullError()), False, True),
            (once_begun(EngineClosedError()), False, True),
        ],
    )
    async def test_by_its_error(self, error, surely, if_idempotent):
        assert may_repeat(error, is_idempotent=False) == surely
        assert may_repeat(error, is_idempotent=True) == if_idempotent

    async def test_not_what_a_server_may_have_begun(self, kind):
        device = LatchDevice()
        async with (
            serving(engine={"device": device}) as server,
            connect(url_of(server, kind), attempts=5) as client,
        ):
            call = asyncio.create_task(client.infer("double", {"input": rows(1)}))
            await device.wait_held()
            for connection in list(server._hub.connections):
                connection.abort()
            with pytest.raises(ConnectionLostError):
                await call
            await until(lambda: server.api.in_flight == 0)
            assert taken(server) == 1
            # The same call, and its user says that it may be computed twice.
            call = asyncio.create_task(client.infer("double", {"input": rows(2)}, idempotent=True))
            await until(lambda: taken(server) == 2)
            for connection in list(server._hub.connections):
                connection.abort()
            await until(lambda: server.api.in_flight == 0)
            device.open()
            assert (await call)["output"][0, 0] == 4
            assert taken(server) == 3

    async def test_what_a_full_queue_refused(self, kind):
        device = LatchDevice()
        engine = {"device": device, "max_rows": 1, "max_queue_rows": 1}
        async with serving(engine=engine) as server:
            busy = [engine_of(server).submit(rows(1)) for _ in range(1)]
            await device.wait_held(1)
            busy.append(engine_of(server).submit(rows(1)))
            await device.wait_held(2)
            busy.append(engine_of(server).submit(rows(1)))
            async with connect(url_of(server, kind), attempts=20) as client:
                call = asyncio.create_task(client.infer("double", {"input": rows(2)}))
                await until(lambda: engine_of(server).statistics().refused or taken(server) > 3)
                device.open()
                assert (await call)["output"][0, 0] == 4
            await asyncio.gather(*busy)

    async def test_what_found_no_server(self):
        port = free_port()
        async with connect(f"http://127.0.0.1:{port}/v2") as hasty:
            with pytest.raises(NotConnectedError, match=f"cannot connect to http://127.0.0.1:{port}:"):
                await hasty.infer("double", {"input": rows(1)})
        async with connect(f"http://127.0.0.1:{port}", attempts=100) as client:
            call = asyncio.create_task(client.infer("double", {"input": rows(2)}, deadline=WAIT_S))
            await asyncio.sleep(DELAY_S_MIN)
            async with serving(http_port=port):
                assert (await call)["output"][0, 0] == 4


class TestHttp:
    async def test_answers_of_other_servers(self):
        answers = iter(
            [
                b"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\nContent-Length: 5\r\n\r\n<p>no",
                b"HTTP/1.1 413 Too\r\nConnection: close\r\nContent-Length: 15\r\n\r\n" + b'{"error":"big"}',
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n[]",
            ]
        )

        async def answer(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /v2 "):  # What it takes; it has no such page.
                writer.close()
                return
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(next(answers))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
            port = other.sockets[0].getsockname()[1]
            async with connect(f"http://127.0.0.1:{port}") as client:
                with pytest.raises(RemoteError, match="answered with status 502: <p>no") as caught:
                    await client.infer("m", {"input": rows(1)})
                assert caught.value.status == 502
                with pytest.raises(TooLargeError, match="^big$"):
                    await client.infer("m", {"input": rows(1)})
                with pytest.raises(AnswerError, match="the answer"):
                    await client.infer("m", {"input": rows(1)})

    async def test_misuse(self):
        client = connect("http://127.0.0.1:1")
        with pytest.raises(NotConnectedError, match="async with"):
            await client.infer("m", {"input": rows(1)})
        async with client:
            with pytest.raises(UsageError, match="already entered"):
                await client.__aenter__()
        with pytest.raises(NotConnectedError, match="closed"):
            await client.infer("m", {"input": rows(1)})
        await client.aclose()
        with pytest.raises(UsageError, match="colour"):
            await connect("http://127.0.0.1:1", colour=1).__aenter__()


class TestBlocking:
    async def test_from_threads(self, kind):
        def work(url):
            with connect_blocking(url, attempts=2) as client:
                futures = [client.submit("double", {"input": rows(value)}) for value in range(50)]
                assert [one.result(WAIT_S)["output"][0, 0] for one in futures] == [*range(0, 100, 2)]
                found = []
                threads = [
                    threading.Thread(target=lambda: found.append(client.infer("double", rows(4))))
                    for _ in range(3)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(WAIT_S)
                assert [one["output"][0, 0] for one in found] == [8, 8, 8]
                with pytest.raises(UnknownModelError):
                    client.infer("none", rows(1))
                assert client.metadata("double")["name"] == "double"
                with pytest.raises(UsageError, match="already entered"):
                    client.__enter__()
            with pytest.raises(NotConnectedError, match="closed"):
                client.infer("double", rows(1))
            client.close()

        async with serving() as server:
            await asyncio.to_thread(work, url_of(server, kind))

    async def test_a_deadline(self, kind):
        device = LatchDevice()

        def work(url):
            with connect_blocking(url) as client, pytest.raises(DeadlineError):
                client.infer("double", {"input": rows(1)}, deadline=0.1)

        async with serving(engine={"device": device}) as server:
            await asyncio.to_thread(work, url_of(server, kind))
            device.open()

    async def test_no_server_there(self):
        before = threading.active_count()
        with pytest.raises(ConnectionLostError), connect_blocking("ws://127.0.0.1:9/v2/ws", proxy=None):
            pass
        await until(lambda: threading.active_count() == before)

    async def test_a_future_that_is_cancelled_cancels_its_request(self, kind):
        device = LatchDevice()
        async with serving(engine={"device": device}) as server:
            client = connect_blocking(url_of(server, kind))
            await asyncio.to_thread(client.__enter__)
            future = client.submit("double", {"input": rows(1)})
            await device.wait_held()
            future.cancel()
            await until(lambda: server.api.in_flight == 0)
            device.open()
            await asyncio.to_thread(client.close)


def test_impossible_settings():
    for url in ("http://127.0.0.1:1", "ws://127.0.0.1:1"):
        for wrong in ({"attempts": 0}, {"max_in_flight": 0}):
            with pytest.raises(UsageError, match="at least 1"):
                connect(url, **wrong)
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        connect("http://")


class PlainServer:
    """A server of KServe V2 that takes JSON alone, as MLServer does; it doubles ``x``."""

    def __init__(self, extensions=()):
        self.requests = []
        self._extensions = extensions
        self.app = Starlette(
            routes=[
                Route("/v2", self.about),
                Route("/v2/models/m", self.model),
                Route("/v2/models/m/infer", self.infer, methods=["POST"]),
            ]
        )

    async def about(self, request):
        if self._extensions is None:
            return JSONResponse({"error": "not found"}, 404)
        return JSONResponse({"name": "plain", "version": "1", "extensions": list(self._extensions)})

    async def model(self, request):
        tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
        return JSONResponse({"name": "m", "platform": "", "inputs": [tensor], "outputs": [tensor]})

    async def infer(self, request):
        if request.headers["content-type"] != "application/json":
            return JSONResponse({"error": "not JSON"}, 422)
        sent = await request.json()
        self.requests.append(sent)
        (given,) = sent["inputs"]
        answer = {**given, "name": "y", "data": [2 * value for value in given["data"]]}
        return JSONResponse({"model_name": "m", "outputs": [answer]})


async def test_a_server_without_raw_tensors_gets_json():
    server = PlainServer()
    async with running(server.app) as where, connect(f"http://{where}") as client:
        sent = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
        for _ in range(2):
            answer = await client.infer("m", sent, outputs=["y"], priority=3)
            np.testing.assert_array_equal(answer["y"], 2 * sent["x"])
        for unfit in (np.full((1, 4), np.inf, np.float32), np.array([b"\xff"])):
            with pytest.raises(RequestError) as refused:
                await client.infer("m", {"x": unfit})
            assert "binary_data" not in str(refused.value), "this server does not take it"
    assert server.requests[0]["outputs"] == [{"name": "y"}]
    assert server.requests[0]["parameters"] == {"priority": 3}
    assert "binary" not in str(server.requests)


async def test_a_server_that_tells_nothing_gets_raw_tensors():
    server = PlainServer(extensions=None)
    async with running(server.app) as where, connect(f"http://{where}") as client:
        with pytest.raises(RemoteError, match="not JSON"):
            await client.infer("m", {"x": np.ones((1, 4), np.float32)})
