"""Clients that hang up: what was computed for them ends, and what they have sent is read as before."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import asynctrt
from asynctrt.serving import CancelOnDisconnect
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model
from tests.serving.support import WAIT_S
from tests.serving.test_asgi import running

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


async def post(address, body, *, chunks=1):
    """Send a request over a socket, and return it before anything is answered."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    writer.write(
        b"POST /predict HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content)
    )
    for part in np.array_split(np.frombuffer(content, np.uint8), chunks):
        writer.write(part.tobytes())
        await writer.drain()
        await asyncio.sleep(0)
    return reader, writer


def fastapi_app(device):
    @asynccontextmanager
    async def lifespan(app):
        async with asynctrt.open(double_model(), device=device) as app.state.engine:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(values: list[float]) -> list[float]:
        return (await app.state.engine.infer(np.array([values], np.float32)))["output"][0].tolist()

    @app.middleware("http")
    async def counted(request: Request, call_next):
        return await call_next(request)

    app.add_middleware(CancelOnDisconnect)
    return app


def starlette_app(device):
    @asynccontextmanager
    async def lifespan(app):
        async with asynctrt.open(double_model(), device=device) as app.state.engine:
            yield

    async def predict(request):
        values = await request.json()
        answer = await request.app.state.engine.infer(np.array([values], np.float32))
        return JSONResponse(answer["output"][0].tolist())

    app = Starlette(routes=[Route("/predict", predict, methods=["POST"])], lifespan=lifespan)
    wrapped = CancelOnDisconnect(app)
    wrapped.state = app.state
    return wrapped


@pytest.mark.parametrize("make", [fastapi_app, starlette_app])
async def test_what_nobody_waits_for_leaves_the_engine(make):
    device = LatchDevice()
    app = make(device)
    async with running(app) as address, asyncio.timeout(WAIT_S):
        clients = [await post(address, [float(number)] * 4) for number in range(8)]
        engine = app.state.engine
        await until(lambda: engine.statistics().submitted == 8)
        for _, writer in clients[1:]:
            writer.close()
        await until(lambda: engine.statistics().cancelled == 7)
        device.open()
        answer = await clients[0][0].read()
        assert answer.endswith(b"[0.0,0.0,0.0,0.0]")
        clients[0][1].close()
        reader, writer = await post(address, [3.0] * 4, chunks=3)
        assert (await reader.read()).endswith(b"[6.0,6.0,6.0,6.0]")
        writer.close()
        assert engine.statistics().cancelled == 7


@pytest.mark.parametrize("framework", [FastAPI, Starlette])
async def test_a_request_that_the_application_does_not_read(framework):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def predict(request: Request):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    app = framework(routes=[Route("/predict", predict, methods=["POST"])])
    app.add_middleware(CancelOnDisconnect)
    async with running(app) as address, asyncio.timeout(WAIT_S):
        _, writer = await post(address, [1])
        await begun.wait()
        writer.close()
        await ended.wait()


async def test_a_request_that_the_application_reads_late():
    async def late(request):
        await asyncio.sleep(0.1)  # Until then it was read ahead.
        return JSONResponse(await request.json())

    app = CancelOnDisconnect(Starlette(routes=[Route("/predict", late, methods=["POST"])]))
    async with running(app) as address, asyncio.timeout(WAIT_S):
        reader, writer = await post(address, [1])
        assert (await reader.read()).endswith(b"[1]")
        writer.close()


async def test_an_answer_in_parts_and_a_body_in_parts():
    async def parts(request):
        taken = [part async for part in request.stream()]

        async def generate():
            for part in taken:
                yield part
                await asyncio.sleep(0)

        return StreamingResponse(generate())

    app = CancelOnDisconnect(Starlette(routes=[Route("/predict", parts, methods=["POST"])]))
    async with running(app) as address, asyncio.timeout(WAIT_S):
        sent = list(range(5000))
        reader, writer = await post(address, sent, chunks=20)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"200 OK" in head
        assert sum(map(len, body.split(b"\r\n"))) >= len(json.dumps(sent))
        writer.close()


async def test_a_handler_may_end_what_it_has_begun():
    ended, begun, go_on = [], asyncio.Event(), asyncio.Event()

    async def save(request):
        async def work():
            begun.set()
            await go_on.wait()
            ended.append(True)

        await asyncio.shield(asyncio.ensure_future(work()))
        return JSONResponse({})

    app = CancelOnDisconnect(Starlette(routes=[Route("/predict", save, methods=["POST"])]))
    async with running(app) as address, asyncio.timeout(WAIT_S):
        _, writer = await post(address, [])
        await begun.wait()
        writer.close()
        go_on.set()
        await until(lambda: ended)


async def test_what_follows_the_answer_in_the_background_goes_on():
    begun, go_on, ended = asyncio.Event(), asyncio.Event(), []

    async def later():
        begun.set()
        await go_on.wait()
        ended.append(True)

    async def answer(request):
        return JSONResponse(await request.json(), background=BackgroundTask(later))

    app = CancelOnDisconnect(Starlette(routes=[Route("/predict", answer, methods=["POST"])]))
    async with running(app) as address, asyncio.timeout(WAIT_S):
        reader, writer = await post(address, [1])
        assert (await reader.read()).endswith(b"[1]")
        writer.close()
        await writer.wait_closed()
        await begun.wait()
        go_on.set()
        await until(lambda: ended)


async def test_an_error_of_the_application_is_the_servers_to_tell():
    async def fails(scope, receive, send):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await CancelOnDisconnect(fails)({"type": "http"}, asyncio.Event().wait, None)


async def test_a_server_that_stops_cancels_the_handler():
    begun = asyncio.Event()

    async def waits(scope, receive, send):
        begun.set()
        await asyncio.Event().wait()

    request = asyncio.create_task(CancelOnDisconnect(waits)({"type": "http"}, asyncio.Event().wait, None))
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


@pytest.mark.parametrize("kind", ["body", "pathsend", "zerocopysend"])
async def test_every_kind_of_answer_is_one(kind):
    """Servers with these extensions send files themselves."""
    gone, ended = asyncio.Event(), []
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive():
        message = next(messages)
        if message["type"] == "http.disconnect":
            await gone.wait()
        return message

    async def answer(scope, receive, send):
        await send({"type": f"http.response.{kind}"})
        gone.set()
        await asyncio.sleep(0.01)
        ended.append(True)

    async with asyncio.timeout(WAIT_S):
        await CancelOnDisconnect(answer)({"type": "http"}, receive, lambda _: asyncio.sleep(0))
    assert ended
