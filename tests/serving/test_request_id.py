"""X-Request-ID: taken or made, echoed, logged, over every protocol."""

import asyncio
import json

import grpc
import pytest

import asynctrt
from asynctrt.kserve.protobuf import message_classes
from asynctrt.serving import kserve_app
from asynctrt.serving.responses import ID_HEADER, RequestIds
from asynctrt.serving.server_log import TextFormatter
from tests.models import double_model, failing_model
from tests.serving.support import WAIT_S, ask, connected, handshake, request, serving
from tests.serving.test_http import infer, json_body

BAD = (b"", b"a b", b"a\tb", b"x" * 129, "\u00e4".encode(), b"a,b", b"${jndi}", b"a\x1b[0m", b"<b>")


@pytest.mark.parametrize("given", [b"a", b"x" * 128, b"7f3e-1", b"a.b:c/d+e=f@g~h_i"])
def test_one_that_is_fit_is_taken(given):
    headers = {ID_HEADER: given}
    assert RequestIds().of(headers) == headers[ID_HEADER] == given


@pytest.mark.parametrize("given", [None, *BAD])
def test_of_any_other_one_is_made_that_stays(given):
    ids = RequestIds()
    headers = {} if given is None else {ID_HEADER: given}
    made = ids.of(headers)
    assert made == headers[ID_HEADER] == ids.of(headers) != given
    assert ids.of({}) != made != RequestIds().of({})


@pytest.mark.anyio
class TestHttp:
    async def test_every_answer_has_it(self):
        async with serving(tokens=["t"]) as server, connected(server) as raw:
            token = {"Authorization": "Bearer t", "X_Request_ID": "mine-1"}
            for number, asked in enumerate(
                [
                    infer(1, **token),
                    request("/v2/models/double/infer", json_body(1), **token),
                    request("/v2/health/live", X_Request_ID="mine-1"),
                    request("/nothing", **token),
                    request("/v2/models/double/infer", b"{}", **token),
                    request("/v2/models/double", X_Request_ID="mine-1"),
                ]
            ):
                raw.send(asked)
                status, headers, _ = await raw.answer()
                assert headers["x-request-id"] == "mine-1", number
            assert status == 401

    async def test_the_access_log_has_it(self, tmp_path):
        path = tmp_path / "access.log"
        async with serving(access_log=path) as server, connected(server) as raw:
            raw.send(infer(1, X_Request_ID="one") + request("/nothing", X_Request_ID="two") + infer(1))
            answered = [(await raw.answer())[1]["x-request-id"] for _ in range(3)]
        lines = [json.loads(line)["request_id"] for line in path.read_text().splitlines()]
        assert lines == answered
        assert lines[:2] == ["one", "two"]

    async def test_an_internal_error_is_logged_with_it(self, caplog, monkeypatch):
        async with serving() as server:
            codec = server.repository.find("double").codec
            monkeypatch.setattr(codec, "decode", lambda *_: 1 / 0)
            body = json_body(1)
            status, headers, _ = await ask(server, "/v2/models/double/infer", body, X_Request_ID="it")
            assert (status, headers["x-request-id"]) == (500, "it")
        (entry,) = [one for one in caplog.records if "internal error" in one.getMessage()]
        assert entry.request_id == "it"
        assert "(request_id: it)" in TextFormatter().format(entry)

    async def test_a_websocket_s_answer_has_it(self):
        async with serving() as server, connected(server) as raw:
            raw.send(handshake(X_Request_ID="socket"))
            status, headers, _ = await raw.answer()
            assert (status, headers["x-request-id"]) == (101, "socket")


@pytest.mark.anyio
async def test_grpc(caplog, tmp_path):
    kinds = message_classes()
    asked = kinds["ModelInferRequest"](model_name="double", raw_input_contents=[b"\0\0\x80\xbf" * 4])
    asked.inputs.add(name="input", datatype="FP32", shape=[1, 4])
    calls = [
        ("ModelInfer", asked.SerializeToString(), grpc.StatusCode.INTERNAL),
        ("ModelInfer", b"", grpc.StatusCode.NOT_FOUND),
        ("ServerLive", b"", grpc.StatusCode.OK),
        ("ServerMetadata", b"", grpc.StatusCode.OK),
    ]
    path = tmp_path / "access.log"
    async with (
        serving({"double": failing_model()}, grpc=True, access_log=path) as server,
        grpc.aio.insecure_channel(server.grpc_target) as channel,
    ):
        for name, body, code in calls:
            for given in ("mine-1", "not fit", None):
                metadata = () if given is None else (("x-request-id", given),)
                call = channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(
                    body, metadata=metadata, timeout=WAIT_S
                )
                assert await call.code() == code, name
                (echoed,) = [value for key, value in await call.trailing_metadata() if key == "x-request-id"]
                assert (echoed == given) == (given == "mine-1")
                assert echoed != "not fit"
    logged = [one.requests for one in caplog.records if one.getMessage().startswith("a batch of")]
    assert logged[0] == ["mine-1"]
    assert len(logged) == 3
    lines = [json.loads(line)["request_id"] for line in path.read_text().splitlines()]
    assert [[line] for line in lines] == logged


@pytest.mark.anyio
async def test_an_application():
    sent = []

    async def send(event):
        sent.append(event)

    async with asynctrt.open(double_model()) as engine:
        app = kserve_app(engine)
        for path, given in ((b"/v2/health/live", b"app"), (b"/nothing", b"app")):
            scope = {"type": "http", "method": "GET", "raw_path": path, "headers": [(b"X-Request-Id", given)]}
            received = iter([{"type": "http.request"}])

            async def receive(received=received):
                for event in received:
                    return event
                return await asyncio.Event().wait()

            async with asyncio.timeout(WAIT_S):
                await app({"path": path.decode(), **scope}, receive, send)
    starts = [dict(event["headers"]) for event in sent if event["type"] == "http.response.start"]
    assert [headers[ID_HEADER] for headers in starts] == [b"app", b"app"]
