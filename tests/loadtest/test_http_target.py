"""KServe over HTTP as a target: our server, and others that answer in their own way."""

import asyncio
import contextlib
import json
import zlib
from contextlib import asynccontextmanager
from urllib.parse import quote

import numpy as np
import pytest
from aiohttp import web

from asynctrt.errors import (
    ConnectionLostError,
    OverloadError,
    RequestError,
    TargetError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedError,
)
from asynctrt.kserve.client import HEAD_NBYTES
from asynctrt.loadtest import http_target
from asynctrt.tensors import TensorSpec
from tests.helpers import WAIT_S
from tests.loadtest.kserve_support import ServerContract, answer, fails, target_at
from tests.loadtest.support import serving_app, turns
from tests.models import rows

pytestmark = pytest.mark.anyio

MODEL = "/v2/models/m"
METADATA = {
    "name": "m",
    "platform": "other",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
}
STATISTICS = {
    "inference_count": "7",
    "execution_count": 3,
    "inference_stats": {
        name: {"count": 5, "ns": ns}
        for ns, name in enumerate(("success", "queue", "compute_input", "compute_infer", "compute_output"))
    },
    "batch_stats": [{"batch_size": 2, "compute_infer": {"count": 3, "ns": 1}}],
}


class TestOurServer(ServerContract):
    kind = "http"
    wrong_input = RequestError
    model_failure = TargetError

    def where(self, server, model="double", version=""):
        path = f"/v2/models/{quote(model, safe='')}" if model else ""
        return f"{server.http_url}{path}{f'/versions/{version}' if version else ''}"


class Other:
    """Somebody else's server: what it has at each path, and what it was sent."""

    def __init__(self, pages):
        self.pages = {MODEL: METADATA, **pages}
        self.url = ""
        self.requests = []

    async def serve(self, request):
        body = await request.read()
        self.requests.append((request.method, request.path, dict(request.headers), body))
        page = self.pages.get(request.path, (404, "<html>Not found</html>"))
        if callable(page):
            page = await page(request)
        if isinstance(page, web.StreamResponse):
            return page
        status, content = page if isinstance(page, tuple) else (200, page)
        if isinstance(content, dict | list):
            return web.json_response(content, status=status)
        return web.Response(status=status, text=content, content_type="text/html")


@asynccontextmanager
async def other(pages):
    server = Other(pages)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", server.serve)
    async with serving_app(app) as server.url:
        yield server


@asynccontextmanager
async def asked(pages, path=MODEL, **kw):
    """Another server, and a target that is its model."""
    async with other(pages) as server, target_at(server.url + path, **kw) as target:
        yield server, target


def outputs(*described):
    return {
        "model_name": "m",
        "outputs": [
            dict(zip(("name", "datatype", "shape", "data"), item, strict=True)) for item in described
        ],
    }


class TestLimits:
    """A server does not decide how much memory a load test takes."""

    @pytest.mark.parametrize("path", ["infer", "stats"])
    @pytest.mark.parametrize("kind", ["length", "pieces"])
    async def test_an_answer_of_any_size_is_not_read(self, monkeypatch, kind, path):
        monkeypatch.setattr(http_target, "ANSWER_NBYTES_MAX", 1 << 20)
        written = 0

        async def page(request):
            nonlocal written
            response = web.StreamResponse()
            if kind == "length":
                response.content_length = 10**12
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                while written < 64 << 20:
                    await response.write(bytes(1 << 16))
                    written += 1 << 16
            return response

        async with asked({f"{MODEL}/{path}": page}) as (_, target):
            if path == "stats":
                assert await target.batches() is None
            else:
                with pytest.raises(TargetError, match="more than 1,048,576 bytes"):
                    await answer(target, {"x": rows(1)})
            assert written < 32 << 20

    async def test_what_is_unpacked_counts(self, monkeypatch):
        monkeypatch.setattr(http_target, "ANSWER_NBYTES_MAX", 1 << 20)

        async def page(_):
            packed = zlib.compress(bytes(4 << 20))
            return web.Response(body=packed, headers={"Content-Encoding": "deflate"})

        async with other({"/any": page}) as server, target_at(f"{server.url}/any") as target:
            error = await fails(target.start(target.prepare({})))
            assert type(error) is TargetError
            assert "more than 1,048,576 bytes" in str(error)


class TestOthers:
    async def test_one_that_speaks_json_alone(self):
        said = outputs(
            ("words", "BYTES", [2], ["bär", ""]),
            ("flags", "BOOL", [2, 1], [[True], [False]]),
            ("halves", "FP16", ["2"], [0.5, None]),
            ("brains", "BF16", [1], [0.5]),
            ("ids", "INT64", [1, 2], [2**62, -1]),
            ("large", "UINT64", [1], [2**64 - 1]),
            ("none", "FP32", [0, 4], []),
        )
        pages = {"/v2": {"name": "other", "extensions": []}, MODEL + "/infer": said}
        async with asked(pages) as (server, target):
            assert target.inputs == (TensorSpec("x", "float32", (4,)),)
            given = await answer(target, {"x": rows(1), "words": [["a"]]})
            assert {name: array.dtype.name for name, array in given.items()} == {
                "words": "object",
                "flags": "bool",
                "halves": "float16",
                "brains": "bfloat16",
                "ids": "int64",
                "large": "uint64",
                "none": "float32",
            }
            assert given["words"].tolist() == ["bär".encode(), b""]
            assert given["flags"].tolist() == [[True], [False]]
            assert given["halves"][0] == 0.5
            assert np.isnan(given["halves"][1])
            assert given["ids"].tolist() == [[2**62, -1]]
            assert given["large"].tolist() == [2**64 - 1]
            assert given["none"].shape == (0, 4)
            method, _, headers, body = server.requests[-1]
            assert (method, headers["Content-Type"]) == ("POST", "application/json")
            assert HEAD_NBYTES not in headers
            assert json.loads(body) == {
                "inputs": [
                    {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]},
                    {"name": "words", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
                ],
            }
            assert await target.batches() is None

    async def test_one_that_takes_raw_tensors_and_gives_json(self):
        pages = {MODEL + "/infer": outputs(("y", "FP32", [1, 4], [2, 2, 2, 2]))}
        async with asked(pages, token="s3cret") as (server, target):
            given = await answer(target, {"x": rows(1)})
            assert given["y"].tolist() == rows(2).tolist()
            _, _, headers, body = server.requests[-1]
            head = json.loads(body[: int(headers[HEAD_NBYTES])])
            assert head["parameters"] == {"binary_data_output": True}
            assert body.endswith(rows(1).tobytes())
            assert headers["Accept-Encoding"] == "identity"
            assert headers["Authorization"] == "Bearer s3cret"
            assert int(headers["Content-Length"]) == len(body)

    async def test_one_behind_a_path(self):
        async with other({"/behind" + MODEL: METADATA}) as server:
            for path in ("/behind/v2/models/m", "/behind/v2/models/m/infer"):
                async with target_at(server.url + path) as target:
                    assert target.name == "m"
                    assert server.requests[-2][1] == "/behind" + MODEL

    @pytest.mark.parametrize(
        ("inputs", "dims"),
        [
            ([], []),
            (None, []),
            ([{"name": "x", "datatype": "FP32", "shape": ["-1", "-1", "3"]}], [("x.1", 3)]),
            ([{"name": "x", "datatype": "FP32", "shape": [8, 3, 224]}], [(8, 3, 224)]),
            ([{"name": "x", "datatype": "FP32", "shape": []}], [()]),
        ],
    )
    async def test_what_a_row_is(self, inputs, dims):
        async with asked({MODEL: METADATA | {"inputs": inputs}}) as (_, target):
            assert [spec.dims for spec in target.inputs] == dims

    @pytest.mark.parametrize(
        "page",
        [
            {"model_stats": [STATISTICS]},
            {"model_stats": [STATISTICS, STATISTICS]},
        ],
    )
    async def test_statistics(self, page):
        async with asked({MODEL + "/stats": page}) as (_, target):
            times = len(page["model_stats"])
            found = await target.batches()
            assert (found.requests, found.rows, found.batches) == (5 * times, 7 * times, 3 * times)
            assert (found.queue_ns, found.copy_in_ns, found.compute_ns, found.copy_out_ns) == tuple(
                number * times for number in (1, 2, 3, 4)
            )
            assert found.by_rows == {2: 3 * times}

    @pytest.mark.parametrize(
        "page",
        [
            (400, {"error": "what?"}),
            (404, "<html>"),
            (501, {"error": "not implemented"}),
            (500, ""),
            "<html>",
            {},
            {"model_stats": None},
            {"model_stats": [{}]},
            {"model_stats": ["x"]},
            {"model_stats": [STATISTICS | {"inference_count": "many"}]},
            {"model_stats": [STATISTICS | {"batch_stats": [{}]}]},
        ],
    )
    async def test_no_statistics_that_could_be_read(self, page):
        async with asked({MODEL + "/stats": page}) as (_, target):
            assert await target.batches() is None


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "content", "error", "says"),
        [
            (400, {"error": "no such shape"}, RequestError, "no such shape"),
            (401, {"error": "who?"}, UnauthorizedError, "who?"),
            (404, {"error": "gone"}, UnknownModelError, "gone"),
            (413, {"error": "too long"}, TooLargeError, "too long"),
            (501, {"error": "no"}, UnsupportedError, "no"),
            (503, {"error": "later"}, OverloadError, "later"),
            (500, {"error": "broken"}, TargetError, "status 500.*broken"),
            (429, {"error": "slowly"}, OverloadError, "status 429.*slowly"),
            (503, "<h1>no\n upstream</h1>", OverloadError, "status 503: <h1>no upstream</h1>"),
            (400, ["error"], TargetError, "status 400"),
            (400, {"detail": "x"}, TargetError, 'status 400: {"detail": "x"}'),
            (302, "elsewhere", TargetError, "status 302: elsewhere"),
            (500, "", TargetError, "status 500: nothing else"),
            (400, {"error": "x" * 9000}, RequestError, "^x{300}$"),
            (500, "x" * 9000, TargetError, "status 500: x{300}$"),
        ],
    )
    async def test_statuses(self, status, content, error, says):
        async with asked({MODEL + "/infer": (status, content)}) as (server, target):
            failure = await fails(target.start(target.prepare({"x": rows(1)})))
            assert type(failure) is error
            with pytest.raises(error, match=says):
                raise failure
            server.pages[MODEL + "/infer"] = outputs(("y", "INT8", [1], [1]))
            assert (await answer(target, {"x": rows(1)}))["y"].tolist() == [1]

    @pytest.mark.parametrize(
        ("page", "error", "says"),
        [
            (
                (404, "<html>Apache</html>"),
                TargetError,
                "/v2/models/m answered with status 404: <html>Apache",
            ),
            ("<html>Welcome</html>", TargetError, "/v2/models/m is not in KServe's form"),
            ([1], TargetError, "is not in KServe's form"),
            ((404, {"error": "no m"}), UnknownModelError, "no m"),
            ((400, {"error": "unknown model"}), RequestError, "unknown model"),
            ((503, {"error": "starting"}), OverloadError, "starting"),
            (METADATA | {"inputs": [{}]}, TargetError, "metadata cannot be read: 'name' is missing"),
            (METADATA | {"inputs": ["x"]}, TargetError, "metadata cannot be read"),
            (METADATA | {"inputs": 1}, TargetError, "metadata cannot be read"),
            (
                METADATA | {"inputs": [{"name": "x", "datatype": "STRING", "shape": [1]}]},
                TargetError,
                "'x' has the unknown datatype 'STRING'",
            ),
            (
                METADATA | {"inputs": [{"name": "x", "datatype": "FP32", "shape": ["n"]}]},
                TargetError,
                "metadata cannot be read",
            ),
        ],
    )
    async def test_at_opening(self, page, error, says):
        with pytest.raises(error, match=says):
            async with asked({MODEL: page}):
                pass

    @pytest.mark.parametrize(
        ("page", "headers", "says"),
        [
            *((body, {}, "the answer cannot be read") for body in (b"", b"<html>", b"[]", b"{}")),
            (json.dumps(outputs(("y", "FP33", [1], [1]))).encode(), {}, "the answer cannot be read"),
            (zlib.compress(b"{}"), {"Content-Encoding": "deflate"}, "compressed with deflate"),
            (b"{}", {HEAD_NBYTES: "two"}, "'two', not a number"),
        ],
    )
    async def test_answers_that_nobody_can_read(self, page, headers, says):
        async def answered(_):
            return web.Response(body=page, headers=headers)

        async with asked({MODEL + "/infer": answered}) as (_, target):
            with pytest.raises(TargetError, match=says):
                await answer(target, {"x": rows(1)})

    async def test_an_answer_that_ends_in_the_middle(self):
        async def page(request):
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b"{")
            request.transport.abort()
            return response

        async with asked({MODEL + "/infer": page}) as (_, target):
            error = await fails(target.start(target.prepare({"x": rows(1)})))
            assert isinstance(error, ConnectionLostError), error

    async def test_a_server_that_says_nothing(self, monkeypatch):
        entered, left = asyncio.Event(), asyncio.Event()

        async def page(_):
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        async with asked({MODEL + "/infer": page, MODEL + "/stats": page}) as (server, target):
            future = target.start(target.prepare({"x": rows(1)}))
            await entered.wait()
            future.cancel()
            await left.wait()  # The server was told.
            monkeypatch.setattr(http_target, "PAGE_S", 0.01)
            with pytest.raises(ConnectionLostError, match="did not answer within 0.01 s"):
                await target.batches()
            server.pages[MODEL] = page
            with pytest.raises(TargetError, match="/v2/models/m did not answer within 0.01 s"):
                async with target_at(server.url + MODEL):
                    pass

    async def test_an_answer_that_is_given_up_takes_its_connection_along(self):
        """Without a length, it is read piece by piece."""
        entered, left = asyncio.Event(), asyncio.Event()

        async def page(request):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"{")
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        async with asked({MODEL + "/infer": page}) as (_, target):
            future = target.start(target.prepare({"x": rows(1)}))
            await entered.wait()
            await turns()  # It reads the first piece.
            future.cancel()
            async with asyncio.timeout(WAIT_S):
                await left.wait()

    async def test_what_is_no_http(self):
        async def greet(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            with pytest.raises(TargetError, match=f"127.0.0.1:{port}/v2/models/m did not answer in HTTP"):
                async with target_at(f"http://127.0.0.1:{port}{MODEL}"):
                    pass

    async def test_a_host_that_there_is_none_of(self):
        with pytest.raises(TargetError, match="http://nowhere.invalid:1/v2/models/m cannot be reached"):
            async with target_at(f"http://nowhere.invalid:1{MODEL}"):
                pass
