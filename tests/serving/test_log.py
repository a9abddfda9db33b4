"""The access log: a JSON object for each request."""

import json
from pathlib import Path

import pytest

from asynctrt.errors import UsageError
from tests.serving.support import connected, request, serving
from tests.serving.test_http import infer, outputs

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
