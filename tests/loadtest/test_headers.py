"""Headers go to every kind of target, each as it was given, or are refused."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from asynctrt import loadtest
from asynctrt.errors import AsynctrtError, OptionsError, UsageError
from asynctrt.loadtest.targets import TargetSpec, headers_of

pytestmark = pytest.mark.anyio
QUICK = {"seconds": 0.1, "warmup": 0.0, "callers": 1, "think": 0.02}


class Wire:
    """A server that keeps what was sent to it, as it came, and answers each request in the same way."""

    def __init__(self, answer=b"{}"):
        self.heads = []
        self.bodies = []
        self._answer = answer

    async def _serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                self.heads.append(head.decode())
                self.bodies.append(body)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self._answer))
                writer.write(self._answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    @asynccontextmanager
    async def serving(self):
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def lines(head, name):
    """Return the values of a header, however its name is written."""
    pairs = [line.partition(":") for line in head.split("\r\n")[1:] if line]
    return [value.strip() for key, _, value in pairs if key.lower() == name.lower()]


async def test_over_http_each_is_sent_as_often_as_it_was_given():
    wire = Wire()
    async with wire.serving() as address:
        await loadtest.run(
            f"http://{address}/a%2Fb//c?q=%7B",
            body=b"\xff\x00",
            headers=["content-type: image/png", "X-Two: 1", "X-Two: 2", "Host: models.example"],
            **QUICK,
        )
    head = wire.heads[0]
    assert head.startswith("POST /a%2Fb//c?q=%7B HTTP/1.1\r\n")
    assert lines(head, "Content-Type") == ["image/png"]
    assert lines(head, "X-Two") == ["1", "2"]
    assert lines(head, "Host") == ["models.example"]


async def test_binary_files_over_http(tmp_path):
    content = b"\x89PNG\r\n\xff\x00"
    (tmp_path / "image.png").write_bytes(content)
    wire = Wire()
    async with wire.serving() as address:
        await loadtest.run(f"http://{address}/", body=f"@{tmp_path / 'image.png'}", **QUICK)
    assert set(wire.bodies) == {content}
    assert lines(wire.heads[0], "Content-Type") == ["application/octet-stream"]


@pytest.mark.parametrize(
    ("headers", "token", "says"),
    [
        (("Content-Length: 3",), None, "how the message is sent"),
        (("authorization: Basic x",), "secret", "only one"),
        (("no header",), None, "is not a header"),
        (("a b: 1",), None, "is not a header"),
        ((": 1",), None, "is not a header"),
        (("a\r\nX: 1",), None, "is not a header"),
        (("a: 1\r\nX: 1",), None, "line break"),
        (("Sec-WebSocket-Key: x",), None, "Sec-WebSocket-Key"),
        (("X: a\x00b",), None, "line break"),
    ],
)
def test_what_cannot_be_sent_is_refused(headers, token, says):
    with pytest.raises(OptionsError, match=says):
        headers_of(TargetSpec("http://h/", headers=headers, token=token))


@pytest.mark.parametrize("where", ["http://me:pw@h/x", "http://me:pw@h/v2/models/m", "ws://me:pw@h/x"])
@pytest.mark.parametrize("given", [{"token": "secret"}, {"headers": ["Authorization: Bearer secret"]}])
async def test_a_request_has_one_authorization(where, given):
    with pytest.raises(OptionsError, match="only one") as caught:
        await loadtest.run(where, **given, **({"body": "x"} if "/x" in where else {}), **QUICK)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "header", ["User-Agent: me", "content-type: a/b", "grpc-x: 1", "x-bin: AA==", "X: é"]
)
async def test_what_grpc_does_not_send_is_refused(header):
    with pytest.raises(OptionsError, match=header.partition(":")[0].lower()):
        await loadtest.run("grpc://127.0.0.1:9/m", headers=[header], **QUICK)


async def test_an_address_of_grpc_has_no_user():
    with pytest.raises(UsageError, match="user") as caught:
        await loadtest.run("grpc://me:pw@127.0.0.1:9/m", **QUICK)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("path", ["/x#y", "/a b", "/a\r\nX: y", "/a\tb"])
async def test_an_address_that_would_be_sent_otherwise_is_refused(path):
    for where in (f"http://127.0.0.1:9{path}", f"ws://127.0.0.1:9{path}"):
        with pytest.raises(UsageError, match="cannot be sent"):
            await loadtest.run(where, body="x", **QUICK)


async def test_a_models_websocket_is_opened_with_the_given_host():
    wire = Wire(b'{"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}]}')
    async with wire.serving() as address:
        with pytest.raises(AsynctrtError):  # It does not speak websockets.
            await loadtest.run(
                f"ws://{address}/v2/models/m/ws",
                headers=["Host: models.example", "X-Two: 1", "X-Two: 2"],
                **QUICK,
            )
    head = wire.heads[-1]
    assert head.startswith("GET /v2/models/m/ws HTTP/1.1\r\n")
    assert lines(head, "Host") == ["models.example"]
    assert lines(head, "X-Two") == ["1", "2"]
