"""Small findings of a review, each on a real socket."""

import asyncio
import json
import logging
import os
import signal
from pathlib import Path

import grpc
import pytest

from asynctrt.kserve.protobuf import message_classes
from asynctrt.serving import http as http_module
from asynctrt.serving.command import serve
from asynctrt.serving.server_log import PERIOD_NS
from tests.helpers import until
from tests.models import double_model
from tests.serving.support import WAIT_S, ask, connected, handshake, request, serving

pytestmark = pytest.mark.anyio
INFER = "/v2/models/double/infer"
BODY = b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'


async def test_an_unknown_coding_is_415_and_says_which_are_known():
    async with serving() as server:
        status, headers, _ = await ask(server, INFER, BODY, Content_Encoding="br")
    assert (status, headers["accept-encoding"]) == (415, "gzip, deflate")


async def test_http_1_0_has_no_websockets():
    async with serving() as server, connected(server) as raw:
        raw.send(handshake().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await raw.answer())[0] == 426
    async with serving() as server, connected(server) as raw:
        raw.send(handshake())
        assert (await raw.answer())[0] == 101


async def test_a_websocket_is_told_that_its_message_is_too_large():
    """It is still sending by then: closing would reset the connection, and the reason would be lost."""
    async with serving(max_body=100_000) as server, connected(server) as raw:
        raw.send(handshake())
        assert (await raw.answer())[0] == 101
        nbytes = 8 << 20
        raw.send(bytes((0x82, 0xFF)) + nbytes.to_bytes(8, "big") + bytes(4))
        async with asyncio.timeout(WAIT_S):
            for _ in range(nbytes >> 16):
                raw.send(bytes(1 << 16))
                await raw.writer.drain()
        said = await raw.ended()
        assert said[0] == 0x88
        assert int.from_bytes(said[2:4], "big") == 1009
        raw.close()
        await until(lambda: not server._hub.connections)


async def test_an_upload_that_stands_still_does_not_hold_the_shutdown(often, monkeypatch):
    monkeypatch.setattr(http_module, "REFUSED_S", 0.05)
    async with serving(drain_timeout=WAIT_S) as server, connected(server) as raw:
        raw.send(request(INFER, BODY)[:-10])
        await until(lambda: any(c._reader.began is not None for c in server._hub.connections))
        stopping = asyncio.create_task(server.stop())
        status, headers, _ = await raw.answer()
        assert (status, headers["connection"]) == (503, "close")
        raw.close()
        async with asyncio.timeout(WAIT_S / 2):
            await stopping


async def test_which_models_there_are_is_told_with_the_token_alone():
    kinds = message_classes()
    async with (
        serving(grpc=True, tokens=("secret",)) as server,
        grpc.aio.insecure_channel(server.grpc_target) as channel,
    ):

        async def asked(service, token=None):
            metadata = (("authorization", f"Bearer {token}"),) if token else None
            body = kinds["HealthCheckRequest"](service=service).SerializeToString()
            async with asyncio.timeout(WAIT_S):
                return await channel.unary_unary("/grpc.health.v1.Health/Check")(body, metadata=metadata)

        serves = kinds["HealthCheckResponse"](status="SERVING").SerializeToString()
        assert await asked("") == serves
        assert await asked("double", "secret") == serves
        for name in ("double", "other"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked(name)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_model_of_any_name_is_reached():
    """As in Triton, /v2/models/stats is about all models. All else of one with that name is there."""
    async with serving({"stats": double_model()}) as server:
        assert (await ask(server, "/v2/models/stats/infer", BODY))[0] == 200
        assert (await ask(server, "/v2/models/stats/ready"))[0] == 200
        for path in ("/v2/models/stats/versions/1", "/v2/models/stat%73"):
            status, _, body = await ask(server, path)
            assert (status, json.loads(body)["name"]) == (200, "stats")


async def test_floods_of_wrong_tokens_are_one_line(caplog):
    async with serving(tokens=("secret",)) as server:
        for _ in range(3):
            assert (await ask(server, "/v2", Authorization="Bearer wrong"))[0] == 401
        server._refusals._told_ns -= PERIOD_NS
        server._refusals.tick()
        lines = [record.getMessage() for record in caplog.records if "token" in record.getMessage()]
        assert len(lines) == 1
        assert lines[0].startswith("refused 3 requests within ")


async def test_sighup_opens_the_access_log_anew(tmp_path, caplog):
    path = tmp_path / "access.log"
    async with serving(access_log=path) as server:
        running = asyncio.create_task(server.serve())
        assert (await ask(server, "/v2"))[0] == 200
        await until(lambda: server._log._lines or path.read_bytes())  # It is flushed every second.
        path.rename(tmp_path / "access.log.1")
        with caplog.at_level(logging.INFO):
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: any("to reload" in record.getMessage() for record in caplog.records))
        assert (await ask(server, "/v2/health/live"))[0] == 200
        await until(lambda: server._log._lines or path.read_bytes())  # It is flushed every second.
        # A folder that is gone: the file that is open is written on.
        server._log._path = tmp_path / "no" / "access.log"
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: any("nothing has changed" in record.getMessage() for record in caplog.records))
        running.cancel()
        await asyncio.wait([running])
    first, second = (json.loads(file.read_text()) for file in (tmp_path / "access.log.1", path))
    assert (first["path"], second["path"]) == ("/v2", "/v2/health/live")


@pytest.mark.usefixtures("command_alone")
async def test_names_do_not_control_the_terminal(monkeypatch):
    """What the command says goes through one place, whatever is in it."""
    from asynctrt.serving import command

    async def load(server, say, *, is_loaded):
        say("a model named \x1b[2Jred\x9b")
        server._asked.set()

    monkeypatch.setattr(command, "_load", load)
    config = command.configure({"models": ["none.onnx"], "http_port": 0, "grpc": False}, {})
    said = []
    async with asyncio.timeout(WAIT_S):
        await serve(config, said.append)
    assert said == ["a model named \ufffd[2Jred\ufffd", "stopped"]


def test_relative_paths_in_a_file_are_those_of_its_folder(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "models").mkdir()
    path = tmp_path / "conf/serve.toml"
    path.write_text(
        'tokens_file = "tokens"\naccess_log = "/var/log/access"\n[[models]]\npath = "a.onnx"\n'
        '[[models]]\npath = "../models"\n[[models]]\npath = "package.module:attribute"\n'
    )
    monkeypatch.chdir(tmp_path)
    from asynctrt.serving import command

    content = command.read_config(Path("conf/serve.toml"))
    assert content["tokens_file"] == "conf/tokens"
    assert content["access_log"] == "/var/log/access"
    config = command.configure({"models": ["b.onnx"]}, {"models": content["models"]})
    paths = [model.path for model in config.models]
    assert paths == ["conf/a.onnx", "conf/../models", "package.module:attribute", "b.onnx"]
    assert config.models[1].is_folder
