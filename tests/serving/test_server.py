"""The server as a whole: ports, readiness, draining, a second start; and as a process, with signals."""

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from typer.main import get_command

from asynctrt.cli.app import app
from asynctrt.client import connect
from asynctrt.core import loading
from asynctrt.devices.cuda import context
from asynctrt.errors import ConnectionLostError, OptionsError, UsageError
from asynctrt.serving import Repository, Server, ServerSettings
from asynctrt.serving.grpc_server import HEAD_NBYTES
from asynctrt.testing import LatchDevice
from tests.cli.test_app import asynctrt_commands
from tests.helpers import free_port, until
from tests.models import double_model, double_onnx, rows, scale_onnx
from tests.serving.support import WAIT_S, ask, connected, engine_of, opener_of, request, serving, settle_grpc
from tests.serving.test_http import infer
from tests.serving.tls import certificate

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.anyio
class TestInProcess:
    async def test_alive_before_ready(self):
        gate = asyncio.Event()
        repository = Repository()

        async def opened():
            import asynctrt

            await gate.wait()
            return await asynctrt.open(double_model())

        repository.add("double", opener=opened)
        settings = ServerSettings(http_port=0, grpc=False, metrics_port=0)
        async with Server(repository, settings) as server:
            loading = asyncio.create_task(repository.load_all())
            assert (await ask(server, "/v2/health/live"))[0] == 200
            assert (await ask(server, "/v2/health/ready"))[0] == 503
            status, _, body = await ask(server, "/v2/models/double/infer", b"{}")
            assert (status, "not loaded yet" in json.loads(body)["error"]) == (503, True)
            assert server.metrics_url.startswith("http://127.0.0.1:")
            assert await asyncio.to_thread(statuses_at, server.metrics_url) == {
                "/metrics": 200,
                "/": 404,
                "/v2": 404,
                "/v2/health/ready": 404,
                "/v2/models/double/infer": 404,
                "/dashboard/data": 404,
            }
            gate.set()
            await loading
            assert (await ask(server, "/v2/health/ready"))[0] == 200

    async def test_draining_answers_what_was_taken_and_refuses_the_rest(self):
        device = LatchDevice()
        async with serving(engine={"device": device}, drain_delay=0.05) as server:
            async with connected(server) as busy, connected(server) as idle:
                busy.send(infer(1) + infer(2))
                await until(lambda: device.held == 1)
                idle.send(request("/v2/health/ready"))
                assert (await idle.answer())[0] == 200
                stopping = asyncio.create_task(server.stop())
                await until(lambda: server.repository.is_draining)
                idle.send(request("/v2/health/ready"))
                assert (await idle.answer())[0] == 503, "not ready, and still answering"
                assert await idle.ended() == b""
                device.open()
                status, headers, body = await busy.answer()
                assert (status, headers["connection"]) == (200, "close")
                assert json.loads(body[: int(headers["inference-header-content-length"])])
                assert await busy.ended() == b""
                async with asyncio.timeout(WAIT_S):
                    await stopping
            with pytest.raises(OSError, match="Connect|refused"):
                await ask(server, "/v2")

    async def test_draining_is_bounded(self):
        device = LatchDevice()
        engine = {"device": device, "close_timeout": 0.05}
        async with serving(engine=engine, drain_timeout=0.05) as server, connected(server) as stuck:
            stuck.send(infer(1))
            await until(lambda: device.held == 1)
            async with asyncio.timeout(WAIT_S):
                await server.stop()
            assert await stuck.ended() == b""
        device.open()

    async def test_hurrying(self):
        device = LatchDevice()
        engine = {"device": device, "close_timeout": 0.05}
        async with serving(engine=engine, drain_delay=99) as server, connected(server) as stuck:
            stuck.send(infer(1))
            await until(lambda: device.held == 1)
            stopping = asyncio.create_task(server.stop())
            await until(lambda: server.repository.is_draining)
            server.hurry()
            async with asyncio.timeout(WAIT_S):
                await stopping
                await server.wait_stopped()
        device.open()

    async def test_a_port_in_use(self):
        async with serving() as server:
            port = int(server.http_url.rpartition(":")[2])
            for settings in (
                {"http_port": port, "grpc": False},
                {"http_port": 0, "grpc": False, "metrics_port": port},
                {"http_port": 0, "grpc_port": port},
            ):
                with pytest.raises(UsageError, match=f"port {port}|:{port}"):
                    async with Server(Repository(), ServerSettings(**settings)):
                        pass
            with pytest.raises(UsageError, match="Use an address of this machine"):
                async with Server(Repository(), ServerSettings(host="203.0.113.1", http_port=0, grpc=False)):
                    pass

    async def test_certificates_that_cannot_be_used(self, tmp_path):
        chain, key = certificate(tmp_path)
        for pair in ((chain, chain), (key, key), (tmp_path / "none", key)):
            settings = ServerSettings(http_port=0, grpc=False, tls_certificate=pair[0], tls_key=pair[1])
            with pytest.raises(OptionsError, match="cannot be used"):
                async with Server(Repository(), settings):
                    pass

    async def test_connections_opened_and_dropped_at_random(self):
        """The soak in small: nothing is left of any of them."""
        random = np.random.default_rng(7)
        async with serving(engine={"max_rows": 8}) as server:

            async def visitor(number):
                for _ in range(random.integers(1, 4)):
                    async with connected(server) as raw:
                        for _ in range(random.integers(0, 4)):
                            raw.send(infer(number)[: random.integers(1, 400)])
                        if random.random() < 0.5:
                            raw.send(infer(number))
                        await asyncio.sleep(0)

            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*[visitor(number) for number in range(100)])
            await until(lambda: not server._hub.connections and server.api.in_flight == 0)
            assert server.repository.find("double").pending == 0
            assert engine_of(server).statistics().queued_requests == 0
            assert (await ask(server, "/v2/health/ready"))[0] == 200


def statuses_at(url):
    """The status of each page, by path, at the port of this URL."""
    host = url.removeprefix("http://").partition("/")[0]
    found = {}
    for path in ("/metrics", "/", "/v2", "/v2/health/ready", "/v2/models/double/infer", "/dashboard/data"):
        connection = http.client.HTTPConnection(host, timeout=WAIT_S)
        connection.request("POST" if path.endswith("infer") else "GET", path)
        found[path] = connection.getresponse().status
        connection.close()
    return found


@contextmanager
def command(*arguments, env=None, cwd=ROOT):
    """``asynctrt serve`` as a process; gives it and a function that waits for a line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "asynctrt", "serve", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    killer = threading.Timer(WAIT_S, process.kill)
    killer.start()
    seen = []

    def line(pattern):
        for text in process.stderr:
            seen.append(text)
            found = re.search(pattern, text)
            if found:
                return found[1] if found.groups() else text
        raise AssertionError("".join(seen))

    try:
        yield process, line
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


def call(url, model="double", **kw):
    async def once():
        async with connect(url.replace("http", "ws", 1) + "/v2/ws", proxy=None, **kw) as client:
            return (await client.infer(model, {"input": rows(3)}))["output"][0, 0]

    return anyio.run(once)


def load(url):
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)) as connection:
        connection.request("POST", "/v2/repository/models/double/load")
        return connection.getresponse().status


class TestAsAProcess:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_serve_and_stop_on_a_signal(self, tmp_path, number):
        path = double_onnx(tmp_path / "double.onnx")
        with command(str(path), "--http-port", "0", "--grpc-port", "0") as (process, line):
            url = line(r"HTTP.* (http://\S+)")
            line(r"gRPC")
            line(r"metrics")
            assert call(url) == 6
            process.send_signal(number)
            line("stopped")
            assert process.wait(WAIT_S) == 0

    @pytest.mark.tier2
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_while_it_loads(self, tmp_path, number):
        (tmp_path / "slow.py").write_text(
            "import time\nfrom tests.models import double_model\n"
            "def model():\n    time.sleep(1)\n    return double_model()\n"
        )
        env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        with command("slow:model", "--http-port", "0", "--no-grpc", env=env) as (process, line):
            line("loading 1 model")
            process.send_signal(number)
            line("stopped")
            assert process.wait(WAIT_S) == 0

    @pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.tier2)])
    def test_a_model_that_is_never_loaded_does_not_keep_it(self, tmp_path, signals):
        """By a signal it ends when the time to drain is over, and at once by a second one."""
        (tmp_path / "stuck.py").write_text(
            "import sys, time\n"
            "print('stuck', file=sys.stderr, flush=True)\n"
            "while True:\n    time.sleep(0.1)\n"
        )
        flags = ["--http-port", "0", "--no-grpc", "--drain-timeout", "0.2" if signals == 1 else "3600"]
        env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        with command("stuck:model", *flags, env=env) as (process, line):
            line("stuck")
            process.send_signal(signal.SIGINT)
            line("SIGINT: stopping")
            while signals == 2 and process.poll() is None:  # What comes at once is still the first one.
                process.send_signal(signal.SIGINT)
                time.sleep(0.05)
            line("a model that is being loaded cannot be interrupted: the process ends without it")
            assert process.wait(WAIT_S) == 1

    def test_a_folder_that_changes_while_it_is_served(self, tmp_path):
        scale_onnx(tmp_path / "double/1/model.onnx", 2)
        flags = ["--model-control", "--http-port", "0", "--no-grpc"]
        with command(str(tmp_path), *flags) as (process, line):
            line("loading 1 model$")
            url = line(r"HTTP.* (http://\S+)")
            assert call(url) == 6
            scale_onnx(tmp_path / "double/2/model.onnx", 5)
            assert load(url) == 200
            line("unloaded model double version 1, which is not")
            assert call(url) == 15
            (tmp_path / "double/2/model.onnx").write_bytes(b"broken")
            assert load(url) == 400
            line("cannot load model double")
            assert call(url) == 15
            process.send_signal(signal.SIGINT)
            line("stopped")
            assert process.wait(WAIT_S) == 0

    @pytest.mark.tier2
    def test_a_folder_with_a_model_that_cannot_be_loaded(self, tmp_path):
        scale_onnx(tmp_path / "good/1/model.onnx", 2)
        (tmp_path / "bad/1").mkdir(parents=True)
        with command(str(tmp_path), "--http-port", "0", "--no-grpc") as (process, line):
            assert line(r"bad/1/model\.onnx").startswith("ModelNotFoundError: "), "it was said before"
            assert process.wait(WAIT_S) == 1
        with command(str(tmp_path), "--http-port", "0", "--no-grpc", "--model-control") as (process, line):
            line("loaded model good version 1")
            assert line(r"bad/1/model\.onnx").startswith("error: "), "it was said before"
            process.terminate()
            assert process.wait(WAIT_S) == 0

    def test_flags_environment_and_file(self, tmp_path):
        port = free_port()
        config = tmp_path / "serve.toml"
        path = double_onnx(tmp_path / "a.onnx")
        config.write_text(
            f'http_port = 1\ngrpc = false\ntokens = ["file"]\nmax_rows = 16\n'
            f'[[models]]\nname = "double"\nversion = 2\npath = "{path}"\nmax_rows = 4\n'
            f'[[models]]\npath = "tests.models:double_model"\n'
        )
        env = {"ASYNCTRT_SERVE_HTTP_PORT": "2", "ASYNCTRT_SERVE_TOKENS": "from the-environment"}
        arguments = ["--config", str(config), "--http-port", str(port)]
        with command(*arguments, env=env) as (process, line):
            url = line(r"HTTP.* (http://\S+)")
            line("metrics")
            assert url == f"http://127.0.0.1:{port}", "the flag wins over the environment, that over the file"
            assert call(url, token="the-environment") == 6
            assert call(url, "double_model", token="from") == 6
            import urllib.request

            asked = urllib.request.Request(
                f"{url}/v2/models/double/config", headers={"Authorization": "Bearer from"}
            )
            with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
                assert json.load(answer)["max_batch_size"] == 4
            process.terminate()
            assert process.wait(WAIT_S) == 0

    @pytest.mark.tier2
    def test_killed_and_restarted_under_a_client_that_retries(self, tmp_path):
        path, port = str(double_onnx(tmp_path / "double.onnx")), str(free_port())

        async def main():
            def start():
                return command(path, "--http-port", port, "--no-grpc")

            with start() as (process, line):
                url = line(r"HTTP.* (http://\S+)").replace("http", "ws") + "/v2/ws"
                client = await connect(url, proxy=None, attempts=100, idempotent=True).__aenter__()
                assert (await client.infer("double", {"input": rows(1)}))["output"][0, 0] == 2
                process.kill()
                process.wait(WAIT_S)
                waiting = asyncio.create_task(client.infer("double", {"input": rows(2)}))
                await asyncio.sleep(0)
                with start() as (second, again):
                    await asyncio.to_thread(again, "HTTP")
                    async with asyncio.timeout(WAIT_S):
                        assert (await waiting)["output"][0, 0] == 4
                    second.terminate()
                    assert await asyncio.to_thread(second.wait, WAIT_S) == 0
                await client.aclose()

        anyio.run(main)

    @pytest.mark.tier2
    @pytest.mark.timeout(240)
    def test_what_is_wrong_is_said_in_a_line(self):
        wrong = [
            ([], "no model to serve"),
            (["docs"], "no model to serve"),
            (["docs", "--fronts", "2"], "no model to serve"),
            (["nothing.onnx"], "there is no file 'nothing.onnx'"),
            (["no.module:model"], "cannot be imported"),
            (["tests.models:rows"], "rows"),
            (["tests.models:nothing"], "has no 'nothing'"),
            (["=x"], "NAME=PATH"),
            (["m=tests.models:double_model", "m=tests.models:double_model"], "duplicate version 1"),
            (["tests.models:double_model", "--http-port", "70000"], "0 to 65535"),
            (["tests.models:double_model", "--host", "203.0.113.1"], "Use an address of this machine"),
            (["tests.models:double_model", "--max-rows", "0"], "max_rows"),
            (["tests.models:double_model", "--device", "cuda:0"], "cuda:0"),
            (["tests.models:double_model", "--tls-key", "x"], "go together"),
            (["--config", "nothing.toml"], "cannot read the configuration"),
            (["--config", "tests/conftest.py"], "not valid TOML"),
        ]
        commands = [
            ["serve", *given, "--no-grpc", *([] if "--http-port" in given else ["--http-port", "0"])]
            for given, _ in wrong
        ]
        for (given, says), (code, _, err) in zip(wrong, asynctrt_commands(*commands), strict=True):
            assert (code, says in err, "Traceback" in err) == (1, True, False), given

    @pytest.mark.tier2
    @pytest.mark.timeout(240)
    def test_a_misspelt_name_in_a_file(self, tmp_path):
        wrong = (
            ("http_prot = 1", "did you mean 'http_port'"),
            ("max_batch_size = 1", "did you mean 'max_rows'"),
            ('[[models]]\npath = "x.onnx"\nmax_row = 1', "the model 'x': .*max_rows"),
            ('[[models]]\npath = "x.onnx"\nname = "big"\nweight = "1"', "the model 'big': weight"),
            ('[[models]]\npath = "x.onnx"\nmax_rows = -1', "the model 'x': max_rows"),
            ("[[models]]\nname = 'x'", "needs a path"),
            ("models = 3", r"\[\[models\]\]"),
        )
        files = [tmp_path / f"{number}.toml" for number in range(len(wrong))]
        for file, (text, _) in zip(files, wrong, strict=True):
            file.write_text(text)
        found = asynctrt_commands(*(("serve", "--config", file) for file in files))
        for (text, says), (code, _, err) in zip(wrong, found, strict=True):
            assert (code, bool(re.search(says, err))) == (1, True), text

    @pytest.mark.tier2
    def test_a_second_server_on_the_same_port(self, tmp_path):
        path, port = str(double_onnx(tmp_path / "double.onnx")), str(free_port())
        with command(path, "--http-port", port, "--no-grpc") as (_, line):
            url = line(r"HTTP.* (http://\S+)")
            done = subprocess.run(
                [sys.executable, "-m", "asynctrt", "serve", path, "--http-port", port, "--no-grpc"],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
            assert done.returncode == 1
            assert f"port {port}" in done.stderr
            assert call(url) == 6
        with pytest.raises(ConnectionLostError):
            call(url)


def test_every_setting_is_an_option():
    options = {name for given in get_command(app).commands["serve"].params for name in given.opts}
    assert {f"--{name.replace('_', '-')}" for name in ServerSettings.__dataclass_fields__} <= options


def test_one_limit_of_gpu_memory_for_all_models(monkeypatch):
    monkeypatch.setattr(context, "_limit_nbytes", None)
    monkeypatch.setattr(loading, "_gpu_memory_nbytes", None)
    Server(Repository(), ServerSettings())
    assert context._limit_nbytes is None
    Server(Repository(), ServerSettings(gpu_memory=5000))
    assert context._limit_nbytes == 5000


@pytest.mark.anyio
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_connections_that_come_at_once_are_accepted_at_once(tmp_path, encrypted):
    """Not one in each turn of the loop, which may be long: uvloop's own server does that."""
    settings = {}
    if encrypted:
        settings["tls_certificate"], settings["tls_key"] = certificate(tmp_path)
    async with serving(**settings) as server:
        port = int(server.http_url.rpartition(":")[2])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        try:
            for _ in range(10):
                await asyncio.sleep(0)
            shaking = sum(len(listener._opening) for listener in server._listeners)
            assert len(server._hub.connections) + shaking == len(clients)
        finally:
            for client in clients:
                client.close()


@asynccontextmanager
async def loaded_before(dims, **settings):
    """A server over gRPC that loads its model before it listens there, as the command does."""
    settings = ServerSettings(http_port=0, grpc_port=0, **settings)
    repository = Repository(settings)
    repository.is_starting = True
    repository.add("double", opener=opener_of(double_model(dims=dims), {"max_rows": 16}))
    async with Server(repository, settings) as server:
        await repository.load_all()
        assert server.grpc_target is None
        await server.start_grpc()
        yield server
    await settle_grpc()


@pytest.mark.anyio
class TestMessagesOverGrpc:
    """By default they may be as large as full batches of the models that are loaded before it is ready."""

    WIDE = (3, 224, 224)

    @pytest.mark.parametrize(
        ("dims", "settings", "expected"),
        [
            ((4,), {}, 4 << 20),
            (WIDE, {}, 16 * 4 * 3 * 224 * 224 + HEAD_NBYTES),
            ((8, *WIDE), {}, 16 << 20),
            (WIDE, {"max_grpc_message": 4 << 20}, 4 << 20),
            (WIDE, {"max_body": 1 << 20}, 1 << 20),
        ],
        ids=["small", "wide", "huge", "stated", "bodies"],
    )
    async def test_the_limit(self, dims, settings, expected):
        async with loaded_before(dims, **settings) as server:
            assert server._grpc.message_nbytes_max == expected

    async def test_full_batches_fit(self):
        batch = np.ones((16, *self.WIDE), np.float32)
        given = triton.InferInput("input", batch.shape, "FP32")
        given.set_data_from_numpy(batch)
        async with (
            loaded_before(self.WIDE) as server,
            triton.InferenceServerClient(server.grpc_target) as client,
        ):
            answer = await client.infer("double", [given])
        assert answer.as_numpy("output").shape == batch.shape

    async def test_a_model_that_is_loaded_later_is_warned_of_once(self, caplog, monkeypatch):
        monkeypatch.setattr("asynctrt.serving.server.SAMPLE_S", 0.01)
        async with serving(grpc=True, engine={"max_rows": 16}) as server:
            server.repository.add(
                "wide",
                version="1",
                opener=opener_of(double_model(dims=self.WIDE), {"max_rows": 16}),
            )
            await server.repository.load("wide")

            def warnings():
                return [item.getMessage() for item in caplog.records if "full batch" in item.getMessage()]

            await until(warnings)
            await asyncio.sleep(0.1)  # It would be said again.
            (line,) = warnings()
        assert line.startswith("model wide: a full batch has ")
        assert line.endswith("or start the server with a larger max_grpc_message")

    async def test_a_port_in_use_is_found_before_models_are_loaded(self):
        async with serving(grpc=True) as server:
            repository = Repository()
            repository.is_starting = True
            settings = ServerSettings(http_port=0, grpc_port=server._grpc_port)
            with pytest.raises(UsageError, match="in use.*grpc_port"):
                async with Server(repository, settings):
                    pass

    async def test_a_server_that_starts_is_not_ready(self):
        async with serving() as server:
            server.repository.is_starting = True
            assert (await ask(server, "/v2/health/ready"))[0] == 503
            server.repository.is_starting = False
            assert (await ask(server, "/v2/health/ready"))[0] == 200
