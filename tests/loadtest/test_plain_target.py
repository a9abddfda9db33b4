"""Load tests of what does not speak KServe: any address, any websocket, any coroutine function."""

import asyncio
import gc
import json
import sys

import numpy as np
import pytest
from aiohttp import web
from aiohttp.connector import Connection
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

from asynctrt import loadtest
from asynctrt.errors import ConnectionLostError, OptionsError, TargetError, UsageError
from asynctrt.loadtest.plain_target import open_plain_target
from asynctrt.loadtest.targets import TargetSpec
from tests.loadtest.support import answering, serving_app
from tests.serving.test_asgi import running

pytestmark = pytest.mark.anyio
QUICK = {"seconds": 0.2, "warmup": 0.0}


class Application:
    """Doubles what it gets, and remembers it."""

    def __init__(self):
        self.seen = []
        self.sockets = 0
        routes = [Route("/double", self.double, methods=["GET", "POST"]), WebSocketRoute("/talk", self.talk)]
        self.app = Starlette(routes=[*routes, Route("/busy", self.busy)])

    async def double(self, request):
        body = await request.body()
        self.seen.append((request.method, dict(request.headers), body))
        values = json.loads(body)["values"] if body else [1]
        return JSONResponse({"doubled": [[2 * value for value in values]]})

    async def busy(self, request):
        return JSONResponse({"error": "later"}, 503)

    async def talk(self, socket):
        await socket.accept()
        self.sockets += 1
        async for text in socket.iter_text():
            self.seen.append(text)
            if text == "leave":
                await socket.close(4000)
                return
            await socket.send_text(json.dumps({"doubled": [2 * value for value in json.loads(text)]}))


async def test_json_over_http_with_arrays_from_python():
    application = Application()
    async with running(application.app) as address:
        report = await loadtest.run(
            f"http://{address}/double",
            body={"values": "${x[0]}"},
            headers={"X-Key": "secret"},
            token="s3cret",
            inputs={"x": np.arange(12, dtype=np.float32).reshape(4, 3)},
            expect={"doubled": 2 * np.arange(12).reshape(4, 3)},
            callers=2,
            **QUICK,
        )
    (run,) = report.runs
    assert run.answered == run.requests > 4
    method, headers, body = application.seen[0]
    assert (method, headers["x-key"], headers["authorization"]) == ("POST", "secret", "Bearer s3cret")
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {"values": [0.0, 1.0, 2.0]}
    assert {tuple(json.loads(one[2])["values"]) for one in application.seen} == {
        (0.0, 1.0, 2.0),
        (3.0, 4.0, 5.0),
        (6.0, 7.0, 8.0),
        (9.0, 10.0, 11.0),
    }
    said = report.as_text()
    assert "secret" not in said
    assert json.loads(said)["settings"]["inputs"] == {"x": "float32 (4, 3)"}


@pytest.mark.tier2
async def test_any_address_without_a_body():
    application = Application()
    async with running(application.app) as address:
        report = await loadtest.run(f"http://{address}/double", rate=200, seconds="300ms", warmup="0s")
        assert report.runs[0].answered == report.runs[0].requests > 0
        assert {method for method, _, _ in application.seen} == {"GET"}
        with pytest.raises(Exception, match=r'/busy answered with status 503: \{"error":"later"\}$'):
            await loadtest.run(f"http://{address}/busy", **QUICK)
        with pytest.raises(TargetError, match="/none answered with status 404: Not Found$"):
            await loadtest.run(f"http://{address}/none", **QUICK)
        with pytest.raises(OptionsError, match="there are no arrays|inputs"):
            await loadtest.run(f"http://{address}/double", body="${x}", **QUICK)
    with pytest.raises(TargetError, match=r"cannot be reached: Cannot connect to host [\w.]+:\d+ \["):
        await loadtest.run("http://127.0.0.1:9/double", **QUICK)


async def test_an_answer_with_many_and_long_headers():
    lines = [f"X-{number}: a" for number in range(200)] + ["X-Long: " + 12_000 * "a", "Content-Length: 2"]
    text = "\r\n".join(["HTTP/1.1 200 OK", *lines, "", "{}"])
    async with answering(text.encode()) as where:
        target = await open_plain_target(TargetSpec(where))
        assert await target.start(target.prepare({})) == b"{}"
        await target.aclose()


@pytest.mark.parametrize(
    ("head", "error", "says"),
    [
        (
            "Content-Encoding: gzip\r\nContent-Length: 4",
            TargetError,
            "the answer of .* cannot be read: Can not dec",
        ),
        ("Content-Length: 100", ConnectionLostError, "was lost: Not enough data to satisfy content length"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_not_a_status(head, error, says):
    async with answering(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\nabcd".encode()) as where:
        target = await open_plain_target(TargetSpec(where))
        with pytest.raises(error, match=says) as caught:
            await target.start(target.prepare({}))
        assert "400" not in str(caught.value).replace(where, "")
        await target.aclose()


async def test_any_websocket():
    application = Application()
    async with running(application.app) as address:
        report = await loadtest.run(f"ws://{address}/talk", body="[1, 2]", callers=4, **QUICK)
        (run,) = report.runs
        assert run.answered == run.requests > 4
        assert set(application.seen) == {"[1, 2]"}
        assert 1 <= application.sockets <= 6  # A websocket is used again.
        with pytest.raises(Exception, match="closed the websocket instead of answering, with code 4000"):
            await loadtest.run(f"ws://{address}/talk", body="leave", **QUICK)
        with pytest.raises(OptionsError, match="set body to the text"):
            await loadtest.run(f"ws://{address}/talk", **QUICK)
        with pytest.raises(TargetError, match="refuses websockets with status"):
            await loadtest.run(f"ws://{address}/double", body="1", **QUICK)


@pytest.mark.parametrize(("scheme", "path", "body"), [("http", "double", None), ("ws", "talk", "[1]")])
async def test_no_connection_is_left_open(scheme, path, body):
    async with running(Application().app) as address:
        await loadtest.run(f"{scheme}://{address}/{path}", body=body, callers=3, seconds=0.05, warmup=0)
        left = [one for one in gc.get_objects() if isinstance(one, Connection) and not one.closed]
        assert left == []


async def test_a_websocket_that_speaks_unasked():
    """Which of its messages is an answer cannot be told, so that no time of one is believed."""
    answers = 0

    async def greet(socket):
        await socket.accept()
        await socket.send_text("hello")
        await talk(socket, 0)

    async def tick(socket):
        await socket.accept()
        await talk(socket, 1)

    async def talk(socket, quiet):
        nonlocal answers
        async for text in socket.iter_text():
            await socket.send_text(text)
            answers += 1
            if answers > quiet > 0:
                await socket.send_text("tick")

    routes = [WebSocketRoute("/greet", greet), WebSocketRoute("/tick", tick)]
    async with running(Starlette(routes=routes)) as address:
        with pytest.raises(TargetError, match="unsolicited"):
            await loadtest.run(f"ws://{address}/greet", body="x", callers=1, think=0.01, **QUICK)
        answers = 0
        report = await loadtest.run(f"ws://{address}/tick", body="x", callers=1, think=0.01, **QUICK)
    (kind,) = report.runs[0].errors
    assert kind == "TargetError"
    assert "unsolicited" in report.runs[0].errors[kind].example


async def test_a_websocket_whose_answer_was_given_up_is_not_used_again():
    """A late answer would otherwise be taken for that of the next message."""
    gate = asyncio.Event()

    async def talk(socket):
        await socket.accept()
        async for text in socket.iter_text():
            if text == "slow":
                await gate.wait()
            await socket.send_text(text)

    async with running(Starlette(routes=[WebSocketRoute("/talk", talk)])) as address:
        target = await open_plain_target(TargetSpec(f"ws://{address}/talk", body="x"))
        assert await target.start(b"quick") == b"quick"
        slow = target.start(b"slow")
        await asyncio.sleep(0.05)
        slow.cancel()
        await asyncio.wait([slow])
        gate.set()
        assert await target.start(b"next") == b"next"
        await target.aclose()


@pytest.mark.tier2
async def test_a_coroutine_function_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "application_under_load.py").write_text(
        "import asyncio\n"
        "calls = []\n"
        "async def alone():\n"
        "    calls.append(None)\n"
        "    await asyncio.sleep(0)\n"
        "async def ask(inputs):\n"
        "    return {'y': 2 * inputs['x']}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "application_under_load", raising=False)
    report = await loadtest.run("application_under_load:alone", rate=100, **QUICK)
    assert report.runs[0].answered == report.runs[0].requests > 0
    assert len(sys.modules["application_under_load"].calls) == report.runs[0].requests + 1
    inputs = {"x": np.ones((3, 2))}
    where = "application_under_load:ask"
    right = await loadtest.run(where, inputs=inputs, expect={"y": 2 * inputs["x"]}, callers=1, **QUICK)
    wrong = await loadtest.run(where, inputs=inputs, expect={"y": inputs["x"]}, callers=1, **QUICK)
    assert (right.runs[0].error_share, wrong.runs[0].error_share) == (0, 1)
    with pytest.raises(OptionsError, match="the inputs of this target are not known"):
        await loadtest.run(where, **QUICK)


@pytest.mark.parametrize(
    ("where", "body", "is_plain"),
    [
        ("http://h:1", None, False),
        ("http://h:1/", None, False),
        ("http://h:1/v2", None, False),
        ("http://h:1/below/v2/models/m", None, False),
        ("ws://h:1/v2/ws", None, False),
        ("http://h:1/predict", None, True),
        ("http://h:1/", "{}", True),
        ("ws://h:1/ws", "hello", True),
        ("grpc://h:1/m", None, False),
        ("model.onnx", None, False),
    ],
)
def test_which_addresses_are_plain(where, body, is_plain):
    assert TargetSpec(where, body=body).is_plain is is_plain


async def test_misuse():
    with pytest.raises(OptionsError, match="'G ET' is not a method"):
        await loadtest.run(TargetSpec("http://127.0.0.1:9/x", method="G ET"), **QUICK)
    for wrong in ("http:///x", "http://127.0.0.1:99999/x"):
        with pytest.raises(UsageError, match="is not the address of a server"):
            await loadtest.run(wrong, **QUICK)
    with pytest.raises(TargetError, match="http://…@127.0.0.1:9/x cannot be reached"):
        await loadtest.run("http://me:s3cret@127.0.0.1:9/x", **QUICK)


async def test_placeholders_in_the_address_and_the_headers():
    seen = []

    async def item(request):
        seen.append((request.raw_path, request.headers["X-User"], request.headers["X-Same"]))
        return web.json_response({"id": request.match_info["id"]})

    application = web.Application()
    application.router.add_get("/items/{id}", item)
    async with serving_app(application) as url:
        report = await loadtest.run(
            f"{url}/items/${{id}}?q=${{id}}&n=1",
            headers={"X-User": "${name}", "X-Same": "s"},
            inputs={"id": np.array(["a b/c", "ü"]), "name": np.array(["Anna", "Bob"])},
            callers=2,
            **QUICK,
        )
    (run,) = report.runs
    assert set(seen) == {
        ("/items/a%20b%2Fc?q=a%20b%2Fc&n=1", "Anna", "s"),
        ("/items/%C3%BC?q=%C3%BC&n=1", "Bob", "s"),
    }
    assert run.answered > 4


async def test_placeholders_that_cannot_be_filled():
    with pytest.raises(OptionsError, match=r"the request names \$\{id\}, and the arrays are 'x'"):
        await loadtest.run("http://127.0.0.1:9/${id}", inputs={"x": np.ones(3)}, **QUICK)
    with pytest.raises(OptionsError, match="has a character that cannot be in a header"):
        await loadtest.run(
            "http://127.0.0.1:9/",
            method="GET",
            headers=["X: ${x}"],
            inputs={"x": np.array(["a\r\nY: b"])},
            **QUICK,
        )
    with pytest.raises(OptionsError, match="a websocket is opened once for many requests"):
        await loadtest.run("ws://127.0.0.1:9/${id}", body="x", **QUICK)
