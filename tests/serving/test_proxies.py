"""nginx and haproxy in front of a server: framing, connections that are reused, websockets, gRPC."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import pytest
import tritonclient.grpc.aio as triton_aio
from websockets.asyncio.client import connect

from asynctrt.serving.http import HttpConnection
from tests.helpers import free_port, installed, until
from tests.serving.support import WAIT_S, address, connected, request, serving
from tests.serving.test_http import INFER, infer, outputs
from tests.serving.test_http_reader import REFUSED, WHOLE
from tests.serving.test_websocket import binary, read

pytestmark = [pytest.mark.tier2, pytest.mark.anyio]

UNLOAD = (
    b"POST /v2/repository/models/double/unload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
)
NEXT = b"GET /v2/models/none HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"

NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors crit;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_header_timeout 1s; client_body_timeout 1s; proxy_read_timeout 1s;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream models {{ server {host}:{port}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{front};
    location /v2/repository/ {{ return 403; }}
    location /inner {{ return 403; }}
    location / {{
      proxy_pass http://models; proxy_http_version 1.1;
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $connection_upgrade;
      proxy_set_header Host localhost; proxy_set_header X-Request-ID $request_id;
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    }}
  }}
  server {{ listen 127.0.0.1:{grpc_front} http2; location / {{ grpc_pass grpc://{grpc}; }} }}
}}
"""
HAPROXY = """
global
  maxconn 256
defaults
  mode http
  timeout connect 5s
  timeout client 1s
  timeout server 1s
  timeout tunnel 10s
  option forwardfor
  http-reuse always
  retry-on conn-failure empty-response
frontend front
  bind 127.0.0.1:{front}
  http-request deny if {{ path_beg /v2/repository/ /inner }}
  http-request set-header Host localhost
  unique-id-format %[uuid]
  unique-id-header X-Request-ID
  default_backend models
backend models
  server one {host}:{port}
"""


class Front:
    """A proxy's address, and the paths that reached the server behind it."""

    def __init__(self, server, port, grpc_port):
        self.server = server
        self.port = port
        self.grpc_port = grpc_port
        self.taken = []

    async def ask(self, raw):
        """Send bytes, and return all that comes until the proxy closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw)
            async with asyncio.timeout(WAIT_S):
                with contextlib.suppress(ConnectionError):
                    return await reader.read()
            return b""
        finally:
            writer.transport.abort()


@pytest.fixture(params=["nginx", "haproxy"])
async def front(request, tmp_path, monkeypatch):
    command = installed(Path("/usr/sbin") / request.param)
    async with serving(model_control=True, grpc=True) as server:
        host, port = address(server)
        front = Front(server, free_port(), free_port())
        take = HttpConnection.take

        def noted(connection, taken):
            front.taken.append((taken.path, dict(taken.headers)))
            take(connection, taken)

        monkeypatch.setattr(HttpConnection, "take", noted)
        settings = {"nginx": NGINX, "haproxy": HAPROXY}[request.param]
        config = tmp_path / "config"
        config.write_text(
            settings.format(
                folder=tmp_path,
                host=host,
                port=port,
                front=front.port,
                grpc_front=front.grpc_port,
                grpc=server.grpc_target,
            )
        )
        flags = ["-c", config, "-p", tmp_path] if request.param == "nginx" else ["-db", "-f", config]
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(command, *flags, stdout=log, stderr=log)
        try:
            await until(lambda: _is_listening(front.port) or process.returncode is not None)
            assert process.returncode is None, (tmp_path / "log").read_text()
            yield front
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(WAIT_S):
                await process.wait()


def _is_listening(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def through(front):
    """A connection to the proxy."""

    class There:
        http_url = f"http://127.0.0.1:{front.port}"

    return connected(There())


TABLE = {**WHOLE, **{name: raw for name, (_, raw) in REFUSED.items()}}


async def test_no_request_is_smuggled(front):
    """C1 and the table of framings: what the proxy forwards is one request, and it forbids the other."""
    for name, raw in TABLE.items():
        front.taken.clear()
        raw = raw.replace(b"/outer", INFER.encode(), 1)
        got = await front.ask(raw + NEXT)
        paths = [path for path, _ in front.taken]
        assert b"/inner" not in paths, name
        assert paths in (
            [],
            [INFER.encode()],
            [b"/v2/models/none"],
            [INFER.encode(), b"/v2/models/none"],
        ), (name, paths)
        if name in WHOLE:
            assert paths[:1] == [INFER.encode()], (name, got)
        # What a proxy takes for a request of its own is answered, and the body is forbidden as one.
        assert got.count(b"HTTP/1.1 ") <= 2 + got.count(b"HTTP/1.1 403"), (name, got)
        # Nobody else gets an answer that was not for them: all the reused connections are asked.
        for value in range(3):
            async with through(front) as raw_connection:
                raw_connection.send(infer(value))
                assert outputs(await raw_connection.answer()) == [2 * value], name


async def test_a_forbidden_request_in_a_body_does_not_run(front):
    for upgrade in ("h2c", "websocket", "foo"):
        body = UNLOAD + NEXT
        got = await front.ask(request(INFER, body, Upgrade=upgrade, Connection="Upgrade") + NEXT)
        assert b"403" not in got.split(b"\r\n", 1)[0]
        assert (await front.ask(UNLOAD + NEXT)).startswith(b"HTTP/1.1 403")
    assert not any(path.startswith(b"/v2/repository") for path, _ in front.taken)
    assert front.server.repository.find("double", "")


async def test_pipelined_requests_are_answered_in_order(front):
    async with through(front) as raw:
        for value in range(20):
            raw.send(infer(value))
        for value in range(20):
            assert outputs(await raw.answer()) == [2 * value]
    # The proxies name the client and the request; neither changes what is answered.
    headers = front.taken[-1][1]
    assert headers[b"x-forwarded-for"] == b"127.0.0.1"
    assert len(headers[b"x-request-id"]) >= 32


async def test_connections_that_the_server_has_closed_lose_nothing(front):
    """The proxy finds out when it sends: it asks again on a new connection."""
    hub = front.server._hub
    for value in range(10):
        async with through(front) as raw:
            raw.send(request("/v2/models/double/stats", method="GET"))
            assert (await raw.answer())[0] == 200
            raw.send(infer(value))
            assert outputs(await raw.answer()) == [2 * value]
        hub.tick += hub.idle_ticks + 1
        for connection in list(hub.connections):
            connection.check_times(hub.tick)


async def test_websockets(front):
    async with connect(f"ws://127.0.0.1:{front.port}/v2/ws", proxy=None) as client:
        for number in range(20):
            await client.send(binary(number, id=str(number)))
        answers = [read(await client.recv()) for _ in range(20)]
    assert {content["id"]: values for content, values in answers} == {
        str(number): [2 * number] for number in range(20)
    }


@pytest.mark.parametrize("front", ["nginx"], indirect=True)
async def test_grpc(front):
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{front.grpc_port}") as client:
        assert await client.is_server_live()
        metadata = await client.get_model_metadata("double", as_json=True)
        assert json.loads(json.dumps(metadata))["name"] == "double"
