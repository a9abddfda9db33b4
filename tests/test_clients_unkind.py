"""Clients among unkind servers and users: half answers, lies, silence, floods, forks, other loops."""

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
import pytest
from websockets.asyncio.server import serve

from asynctrt.client import RemoteError, connect, connect_blocking
from asynctrt.errors import (
    ConnectionLostError,
    DeadlineError,
    InputError,
    OptionsError,
    UnauthorizedError,
    UsageError,
)
from asynctrt.kserve.client import AnswerError
from tests.helpers import WAIT_S, until
from tests.models import rows
from tests.serving.support import serving
from tests.test_clients import KINDS, url_of

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]
ROW = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def answer(status="200 OK", body=b"", head="", length=None):
    """A whole answer over HTTP, or one that says that it is longer than it is."""
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{head}\r\n".encode() + body


class Unkind:
    """A server over HTTP that answers each request with the same bytes, and counts them."""

    def __init__(self, raw, *, closes=True):
        self.raw, self.closes = raw, closes
        self.requests, self.open = [], 0

    async def serve(self, reader, writer):
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /v2 "):  # What it takes, which clients ask once.
                    writer.write(answer("404 Not Found", b""))
                    continue
                self.requests.append(head)
                _, _, length = head.lower().partition(b"content-length: ")
                await reader.readexactly(int(length.split(b"\r\n")[0] or 0))
                writer.write(self.raw)
                await writer.drain()
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    @asynccontextmanager
    async def client(self, **settings):
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with connect(f"http://127.0.0.1:{port}", **settings) as client:
            yield client
        server.close()
        await until(lambda: not self.open)  # No connection is left behind.


def address(server):
    return f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def outputs(**more):
    return json.dumps(
        {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [1]} | more]}
    ).encode()


class TestHttp:
    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"HTTP/1.1 200 OK\r\nContent-Len",
            b"\x00\x01 what\r\n\r\n",
            answer(body=outputs(), length=1000),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            answer(head=f"X: {'a' * 100_000}\r\n"),
        ],
        ids=["nothing", "half a head", "junk", "half a body", "chunks", "huge head"],
    )
    async def test_what_may_have_begun_is_sent_once(self, raw):
        server = Unkind(raw)
        async with server.client(attempts=3) as client:
            with pytest.raises(ConnectionLostError):
                await client.infer("m", ROW, deadline=WAIT_S)
            assert len(server.requests) == 1
            with pytest.raises(ConnectionLostError):
                await client.infer("m", ROW, deadline=WAIT_S, idempotent=True)
            assert len(server.requests) == 1 + 3

    @pytest.mark.parametrize(
        "body",
        [
            b"null",
            b"{}",
            b"[" * 100_000,
            outputs(name=[1]),
            outputs(datatype=[1]),
            outputs(shape=[-5, 10**30]),
            outputs(shape=[0, 10**30]),
            outputs(data={"a": 1}),
            outputs(parameters={"binary_data_size": 10**30}),
        ],
        ids=lambda body: body.decode()[:60],
    )
    async def test_what_cannot_be_read_is_the_server_s_fault(self, body):
        async with Unkind(answer(body=body)).client() as client:
            with pytest.raises(AnswerError):
                await client.infer("m", ROW, deadline=WAIT_S)
            with pytest.raises(AnswerError):  # It asks for the name of the input first.
                await client.infer("m", ROW["x"], deadline=WAIT_S)

    async def test_a_status_without_words_has_its_class(self):
        async with Unkind(answer("401 Unauthorized", b"<h1>no</h1>")).client() as client:
            with pytest.raises(UnauthorizedError, match="status 401: <h1>no"):
                await client.infer("m", ROW)

    async def test_redirects_take_no_token_elsewhere(self):
        there = Unkind(answer(body=outputs()))
        async with there.client() as elsewhere:
            moved = Unkind(answer("307 Moved", head=f"Location: {elsewhere.url}/v2\r\n"))
            async with moved.client(token="secret") as client:
                with pytest.raises(RemoteError, match="status 307"):
                    await client.infer("m", ROW)
        assert (len(moved.requests), there.requests) == (1, [])

    async def test_more_than_max_size_is_not_kept(self):
        huge = answer(body=outputs(data=[1.0] * 100_000, shape=[100_000]), head="Connection: close\r\n")
        async with Unkind(huge).client(max_size=10_000) as client:
            with pytest.raises(AnswerError, match="more than the 10,000 bytes of max_size"):
                await client.infer("m", ROW)
        async with Unkind(huge).client(max_size=10_000_000) as client:
            assert (await client.infer("m", ROW))["y"].shape == (100_000,)

    async def test_an_error_without_end_is_not_read_to_its_end(self):
        stopped = asyncio.Event()

        async def endless(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                while True:
                    writer.write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
                    await writer.drain()
            except ConnectionError:
                stopped.set()
            finally:
                writer.close()

        async with (
            asyncio.timeout(WAIT_S),
            await asyncio.start_server(endless, "127.0.0.1", 0) as other,
            connect(address(other).replace("ws", "http")) as client,
        ):
            with pytest.raises(RemoteError, match="status 500: xxx"):
                await client.infer("m", ROW)
            await stopped.wait()

    @pytest.mark.parametrize(
        "url", ["http://h:1?x=1", "http://h:1#x", "http://[", "http://h:99999", "http://h:x"]
    )
    def test_what_is_no_address(self, url):
        with pytest.raises(UsageError, match="not the address of a server"):
            connect(url)


@pytest.mark.parametrize("token", ["a\r\nX-Admin: 1", "a b", "grüße", "a\n"])
def test_a_token_cannot_be_a_header_more(kind, token):
    with pytest.raises(UsageError, match="printable") as caught:
        connect(f"{kind}://127.0.0.1:1", token=token)
    assert token not in str(caught.value)


@asynccontextmanager
async def silent(kind):
    """The address of a server that takes everything and answers nothing."""

    async def listen(*to):
        if kind == "ws":
            async for _ in to[0]:
                pass
            return
        await to[0].read(-1)
        to[1].close()

    if kind == "ws":
        async with serve(listen, "127.0.0.1", 0) as server:
            yield address(server)
        return
    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


class TestTime:
    async def test_a_deadline_is_for_asking_the_name_as_well(self, kind):
        async with silent(kind) as url, connect(url) as client, asyncio.timeout(WAIT_S):
            with pytest.raises(DeadlineError):
                await client.infer("m", ROW["x"], deadline=0.05)
            with pytest.raises(DeadlineError):
                await client.metadata("m", deadline=0.05)

    @pytest.mark.parametrize("name", ["deadline", "timeout"])
    async def test_what_is_no_time(self, kind, name):
        async with serving() as server, connect(url_of(server, kind)) as client:
            for wrong in (math.nan, -1, "1"):
                with pytest.raises(OptionsError, match=f"{name} must be a number of seconds"):
                    await client.infer("double", {"input": rows(1)}, **{name: wrong})
            answer = await client.infer("double", {"input": rows(1)}, **{name: math.inf})
            assert answer["output"][0, 0] == 2

    async def test_closing_does_not_wait_for_answers(self, kind):
        async with silent(kind) as url, asyncio.timeout(WAIT_S):
            client = connect(url, max_in_flight=1, attempts=3, idempotent=True)
            await client.__aenter__()
            calls = [asyncio.create_task(client.infer("m", ROW)) for _ in range(3)]
            await asyncio.sleep(0.05)
            await client.aclose()
            for call in calls:
                with pytest.raises(ConnectionLostError):
                    await call


async def test_one_answer_that_cannot_be_read_fails_one_request():
    async def lie(socket):
        async for message in socket:
            size = int.from_bytes(message[:4], "little")
            request = json.loads(message[4 : 4 + size])
            text = outputs(datatype="FP7") if request["model_name"] == "liar" else outputs()
            head = json.dumps(json.loads(text) | {"id": request["id"]}).encode()
            await socket.send(len(head).to_bytes(4, "little") + head)

    async with serve(lie, "127.0.0.1", 0) as server, connect(address(server)) as client:
        for _ in range(2):
            with pytest.raises(AnswerError, match="unknown datatype 'FP7'"):
                await client.infer("liar", ROW, deadline=WAIT_S)
            assert (await client.infer("m", ROW, deadline=WAIT_S))["y"].tolist() == [1]


async def test_what_ended_a_websocket_is_what_its_callers_are_told():
    async def babble(socket):
        async for _ in socket:
            await socket.send("what?")

    async with serve(babble, "127.0.0.1", 0) as server, connect(address(server)) as client:
        with pytest.raises(ConnectionLostError, match="does not speak this protocol"):
            await client.infer("m", ROW)


class TestWhere:
    async def test_another_loop(self, kind):
        async with serving() as server, connect(url_of(server, kind)) as client:
            with pytest.raises(UsageError, match="belongs to the event loop on which it was entered"):
                await asyncio.to_thread(lambda: asyncio.run(client.infer("double", {"input": rows(1)})))
            with pytest.raises(UsageError, match="belongs to the event loop"):
                await asyncio.to_thread(lambda: asyncio.run(client.metadata("double")))
            assert (await client.infer("double", {"input": rows(1)}))["output"][0, 0] == 2

    async def test_a_process_that_was_forked(self, kind):
        """Its parent's threads and sockets are not its own; without a check it waits for ever."""

        def work(url):
            with connect_blocking(url) as client:
                client.infer("double", {"input": rows(1)})
                child = os.fork()
                if not child:
                    try:
                        client.infer("double", {"input": rows(1)})
                    except UsageError as error:
                        os._exit(7 if "forked from it" in str(error) else 1)
                    finally:
                        os._exit(2)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
                assert client.infer("double", {"input": rows(2)})["output"][0, 0] == 4

        async with serving() as server:
            await asyncio.to_thread(work, url_of(server, kind))

    def test_a_fork_can_exit(self):
        """As workers of a server that loads its application before it forks do."""
        code = (
            "import os, sys; from asynctrt.client import connect_blocking\n"
            "client = connect_blocking('http://127.0.0.1:1').__enter__()\n"
            "child = os.fork()\n"
            "if not child: sys.exit(3)\n"
            "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
            "client.close(); sys.exit(status)"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S).returncode == 3

    async def test_calls_of_threads_while_another_closes_end(self, kind):
        def work(url):
            client = connect_blocking(url).__enter__()
            ended = []

            def ask():
                try:
                    while True:
                        client.infer("double", {"input": rows(1)})
                except ConnectionLostError as error:
                    ended.append(error)

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            client.infer("double", {"input": rows(1)})
            client.close()
            for thread in threads:
                thread.join(WAIT_S)
            assert len(ended) == 4

        async with serving() as server:
            await asyncio.to_thread(work, url_of(server, kind))

    async def test_a_client_that_could_not_be_entered(self):
        client = connect_blocking("ws://127.0.0.1:9/v2/ws", proxy=None)
        before = threading.active_count()
        # Not the loop's executor, which starts a second thread if the first is slow to say that it is idle.
        with ThreadPoolExecutor(1) as executor:
            for _ in range(2):
                with pytest.raises(ConnectionLostError):
                    await asyncio.get_running_loop().run_in_executor(executor, client.__enter__)
        await until(lambda: threading.active_count() <= before)

    def test_hosts_cannot_be_looked_up_when_the_interpreter_exits(self, kind):
        """asyncio looks them up in threads, and starts none then."""

        async def main():
            await asyncio.get_running_loop().shutdown_default_executor()
            with pytest.raises(ConnectionLostError, match="xecutor"):
                async with connect(
                    f"{kind}://localhost:9", **({"proxy": None} if kind == "ws" else {})
                ) as client:
                    await client.infer("double", ROW)

        asyncio.run(main())

    async def test_a_password_in_an_address_is_sent_and_is_in_no_message(self, kind):
        server = Unkind(answer("401 Unauthorized", b"no"))
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with listening:
            url = f"{kind}://me:pa55@127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            client = connect(url, **({"proxy": None} if kind == "ws" else {}))
            with pytest.raises(UnauthorizedError) as refused:
                async with client:
                    await client.infer("m", ROW)
        assert b"Authorization: Basic bWU6cGE1NQ==" in server.requests[0]
        lost = connect(f"{kind}://me:pa55@127.0.0.1:9", **({"proxy": None} if kind == "ws" else {}))
        with pytest.raises(ConnectionLostError) as unreachable:
            async with lost:
                await lost.infer("m", ROW)
        with pytest.raises(UsageError, match="one authorization") as twice:
            connect(url, token="secret")
        with pytest.raises(UsageError) as unknown:
            connect(url.replace(kind, "ftp", 1))
        said = [str(one.value) for one in (refused, unreachable, twice, unknown)]
        assert "pa55" not in " ".join([*said, repr(client), client.url])

    @pytest.mark.parametrize("host", [f"{'a' * 64}.invalid:80", "127.0.0.1:99999"])
    async def test_addresses_that_cannot_be(self, kind, host):
        with pytest.raises((UsageError, ConnectionLostError)):
            async with connect(f"{kind}://{host}", **({"proxy": None} if kind == "ws" else {})) as client:
                await client.infer("m", ROW)

    @pytest.mark.parametrize(
        ("url", "settings"),
        [
            (None, {}),
            (b"http://127.0.0.1", {}),
            ("http://127.0.0.1", {"token": b"secret"}),
            ("http://127.0.0.1", {"attempts": "2"}),
            ("http://127.0.0.1", {"max_in_flight": 2.5}),
        ],
    )
    def test_settings_of_another_type(self, url, settings):
        with pytest.raises(UsageError):
            connect(url, **settings)

    @pytest.mark.parametrize("names", [{"model": None}, {"model": "\ud800"}, {"model": "m", "version": 1}])
    async def test_names_that_are_no_text(self, kind, names):
        async with serving() as server, connect(url_of(server, kind)) as client:
            with pytest.raises(UsageError, match="must be a text"):
                await client.infer(inputs=ROW, **names)
            with pytest.raises(UsageError, match="must be a text"):
                await client.metadata(**names)

    async def test_masked_inputs_are_refused(self, kind):
        masked = np.ma.masked_array([[1, 2, 3, 4]], [[0, 1, 0, 0]], np.float32)
        async with serving() as server, connect(url_of(server, kind)) as client:
            with pytest.raises(InputError, match=r"masked values.*filled"):
                await client.infer("double", {"input": masked})
            assert (await client.infer("double", {"input": masked.filled(0)}))["output"][0, 0] == 2

    @pytest.mark.parametrize("proxy", ["nothing://127.0.0.1:9", "socks5://127.0.0.1:9"])
    async def test_a_proxy_that_websockets_cannot_use(self, proxy):
        with pytest.raises(UsageError, match="websockets refuses a setting"):
            async with connect("ws://127.0.0.1:9/v2/ws", proxy=proxy):
                pass

    async def test_a_setting_that_websockets_does_not_have(self):
        with pytest.raises(UsageError, match="colour"):
            await connect("ws://127.0.0.1:1", colour=1).__aenter__()
