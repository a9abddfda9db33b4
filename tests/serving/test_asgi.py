"""The protocols inside of applications: Starlette under uvicorn, with real sockets."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import asynctrt
from asynctrt.serving import Repository, ServerSettings, kserve_app
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model
from tests.serving.support import WAIT_S
from tests.serving.test_http import binary_body, json_body
from tests.serving.test_websocket import binary, read, text

# uvicorn still speaks to the websockets library in a way that it calls old.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@asynccontextmanager
async def running(app):
    """An application under uvicorn; gives its address."""
    config = uvicorn.Config(app, port=0, log_level="critical", access_log=False, ws="websockets-sansio")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    task = asyncio.create_task(server._serve() if hasattr(server, "_serve") else server.serve())
    await until(lambda: server.started or task.done())
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(WAIT_S):
            await task


async def test_a_websocket_in_an_application_whose_engine_opens_with_it():
    @asynccontextmanager
    async def lifespan(app):
        async with asynctrt.open(double_model()) as app.state.engine:
            yield

    async def index(request):
        return PlainTextResponse("hello")

    mounted = Mount("/kserve", kserve_app(lambda: app.state.engine))
    app = Starlette(routes=[Route("/", index), mounted], lifespan=lifespan)
    async with running(app) as address:
        url = f"{address}/kserve/v2/models/model/ws"
        async with connect(f"ws://{url}", proxy=None) as socket, asyncio.timeout(WAIT_S):
            for number in range(20):
                await socket.send(binary(number, id=str(number)))
                await socket.send(text(number, id=f"t{number}"))
            read_all = [read(await socket.recv()) for _ in range(40)]
            answers = {content["id"]: values for content, values in read_all}
            assert answers["t7"] == answers["7"] == [14]
        async with aiohttp.ClientSession() as session, session.get(f"http://{url}") as response:
            assert response.status == 426


async def test_kserve_beside_other_routes():
    async with asynctrt.open(double_model()) as engine:
        repository = Repository()
        repository.add("a name/with all", engine)

        async def index(request):
            return PlainTextResponse("hello")

        app = Starlette(routes=[Route("/", index), Mount("/models", kserve_app(repository))])
        async with running(app) as address, aiohttp.ClientSession(f"http://{address}") as session:
            async with session.get("/") as response:
                assert await response.text() == "hello"
            async with session.get("/models/v2/models/a%20name%2Fwith%20all/ready") as response:
                assert response.status == 200
            path = "/models/v2/models/a%20name/with%20all/infer"
            async with session.post(path, data=json_body(1)) as response:
                assert (await response.json())["outputs"][0]["data"] == [2] * 4
            body, length = binary_body(3)
            headers = {"Inference-Header-Content-Length": str(length)}
            async with session.post(path, data=body, headers=headers) as response:
                answer = await response.read()
                assert answer.endswith(b"\x00\x00\xc0\x40" * 4)
            async with session.post(path, data=b"{") as response:
                assert (response.status, "error" in await response.json()) == (400, True)
            async with connect(f"ws://{address}/models/v2/ws", proxy=None) as socket:
                message = text(1).replace("double", "a name/with all")
                await socket.send(message)
                assert read(await socket.recv())[1] == [2]


async def test_limits_tokens_and_origins():
    settings = ServerSettings(max_body=1000, tokens=("s3cret",), max_requests_per_connection=2)
    async with asynctrt.open(double_model()) as engine:
        app = kserve_app(engine, name="double", settings=settings)
        async with running(app) as address, aiohttp.ClientSession(f"http://{address}") as session:
            async with session.get("/v2") as response:
                assert response.status == 401
            headers = {"Authorization": "Bearer s3cret"}
            async with session.post("/v2/models/double/infer", data=b"x" * 1001, headers=headers) as response:
                assert response.status == 413
            for kw in ({}, {"additional_headers": headers, "origin": "https://evil.example"}):
                with pytest.raises(InvalidStatus):
                    await connect(f"ws://{address}/v2/ws", proxy=None, **kw)
            async with (
                connect(
                    f"ws://{address}/v2/models/double/ws",
                    proxy=None,
                    subprotocols=["asynctrt", "bearer.s3cret"],
                ) as socket,
                asyncio.timeout(WAIT_S),
            ):
                assert socket.subprotocol == "asynctrt"
                for number in range(30):
                    await socket.send(binary(number, id=str(number)))
                answers = [read(await socket.recv()) for _ in range(30)]  # In the order in which they end.
                assert {head["id"]: data for head, data in answers} == {str(n): [2 * n] for n in range(30)}
                await socket.send(b"x" * 1001)
                with pytest.raises(ConnectionClosed) as caught:
                    await socket.recv()
                assert caught.value.rcvd.code == 1009


async def test_hanging_up_cancels():
    device = LatchDevice(concurrency=1)
    async with asynctrt.open(double_model(), device=device, contexts=1, max_rows=1) as engine:
        app = kserve_app(engine, name="double")
        async with running(app) as address:
            async with connect(f"ws://{address}/v2/ws", proxy=None) as socket:
                for number in range(3):
                    await socket.send(binary(number, id=str(number)))
                await until(lambda: engine.statistics().queued_requests == 2)
            await until(lambda: engine.statistics().cancelled == 3)
            async with aiohttp.ClientSession() as session:
                url = f"http://{address}/v2/models/double/infer"
                call = asyncio.create_task(session.post(url, data=json_body(1)))
                await until(lambda: engine.statistics().queued_requests == 1)
                call.cancel()
                await asyncio.wait([call])
            await until(lambda: engine.statistics().cancelled == 4)
            device.open()
