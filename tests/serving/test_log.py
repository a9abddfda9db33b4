"""The access log: a JSON object for each request."""

import asyncio
import json
from pathlib import Path

import pytest
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from asynctrt.client import connect
from asynctrt.errors import UsageError
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import rows
from tests.serving.support import connected, engine_of, request, serving
from tests.serving.test_http import infer, json_body, outputs

pytestmark = pytest.mark.anyio


async def test_the_access_log(tmp_path):
    path = tmp_path / "access.log"
    async with serving(access_log=path) as server, connected(server) as raw:
        raw.send(infer(1) + request("/nothing") + infer(2, Connection="close"))
        assert outputs(await raw.answer()) == [2]
        assert (await raw.answer())[0] == 404
        assert outputs(await raw.answer()) == [4]
    first, second, third = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["path"], first["status"], first["model"]) == ("/v2/models/double/infer", 200, "double")
    assert first["batch_rows"] == 1
    assert first["duration_us"] >= first["queue_us"] + first["compute_us"]
    assert (second["method"], second["path"], second["status"]) == ("GET", "/nothing", 404)
    assert third["time"] >= first["time"] > 1.7e9
    with pytest.raises(UsageError, match="access log"):
        async with serving(access_log=tmp_path / "no" / "folder"):
            pass


async def test_a_json_answer_is_encoded_once_and_logged_with_its_model(tmp_path, monkeypatch):
    path = tmp_path / "access.log"
    encoded = []
    async with serving(access_log=path) as server, connected(server) as raw:
        codec = server.repository.find("double").codec
        encode = codec.encode
        monkeypatch.setattr(codec, "encode", lambda *call: encoded.append(call) or encode(*call))
        raw.send(request("/v2/models/double/infer", json_body(1)))
        assert (await raw.answer())[0] == 200
    assert len(encoded) == 1
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert (line["model"], line["batch_rows"]) == ("double", 1)


async def test_a_full_disk_costs_lines_and_no_requests():
    async with serving(access_log=Path("/dev/full")) as server, connected(server) as raw:
        raw.send(infer(1) + infer(2))
        assert outputs(await raw.answer()) == [2]
        assert outputs(await raw.answer()) == [4]
        server._log.flush()
        raw.send(infer(3))
        assert outputs(await raw.answer()) == [6]


async def test_standard_output(capfdbinary):
    async with serving(access_log=Path("-")) as server, connected(server) as raw:
        raw.send(request("/v2/models/double"))
        await raw.answer()
    (line,) = capfdbinary.readouterr().out.splitlines()
    assert json.loads(line)["path"] == "/v2/models/double"


async def test_inferences_over_other_protocols(tmp_path):
    path = tmp_path / "access.log"
    device = LatchDevice(concurrency=1)
    engine = {"device": device, "contexts": 1, "max_rows": 1}
    async with serving(access_log=path, grpc=True, engine=engine) as server:
        url = server.http_url.replace("http", "ws", 1) + "/v2/ws"
        async with connect(url, proxy=None) as client:
            first, second = [
                asyncio.create_task(client.infer("double", {"input": rows(value)})) for value in (1, 2)
            ]
            await until(lambda: engine_of(server).statistics().queued_requests == 1)
            second.cancel()
            await until(lambda: engine_of(server).statistics().cancelled == 1)
            device.open()
            assert (await first)["output"][0, 0] == 2
        async with InferenceServerClient(server.grpc_target) as client:
            tensor = InferInput("input", [1, 4], "FP32")
            tensor.set_data_from_numpy(rows(3))
            result = await client.infer("double", [tensor], request_id="g")
            assert result.as_numpy("output")[0, 0] == 6
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seen = [(line["method"], line["status"], line["model"], "batch_rows" in line) for line in lines]
    assert seen == [
        ("websocket", 499, "double", False),
        ("websocket", 200, "double", True),
        ("grpc", 200, "double", True),
    ]
    assert all("127.0.0.1" in line["peer"] for line in lines)
    assert lines[2]["id"] == "g"
