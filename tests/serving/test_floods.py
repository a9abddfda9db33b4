"""Whoever sends much that is worth little, or nothing to its end, harms himself alone: on every protocol."""

import asyncio
import contextlib
import gzip
import itertools
import os
import resource
import socket
import zlib
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest
import tritonclient.grpc.service_pb2 as pb
from websockets.exceptions import ConnectionClosed

from asynctrt.serving import grpc_server
from asynctrt.serving.grpc_connections import (
    GrpcConnections,
    _Sockets,
    connections,
    descriptors,
    end_of,
    surplus,
)
from asynctrt.serving.grpc_server import HEALTH_SERVICE, SERVICE
from asynctrt.serving.http import PIPELINE_MAX, SPARE
from asynctrt.serving.http_reader import SLICE_NBYTES, RequestReader
from asynctrt.serving.overhead import NBYTES_MAX, Overhead
from asynctrt.serving.turns import LONE_TURN_NS
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.serving.support import WAIT_S, address, ask, connected, handshake, request, serving
from tests.serving.test_frames import opened
from tests.serving.test_http import INFER, infer, outputs
from tests.serving.test_websocket import binary

pytestmark = pytest.mark.anyio
TOKEN = "good"
GOOD = (("authorization", f"Bearer {TOKEN}"),)
HEADERS = tuple((name.encode(), value.encode()) for name, value in GOOD)
HEAD = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
KEY = b"abcd"


def floods():
    """What is sent once, and then again and again, by protocol and element."""
    shake = handshake()
    return {
        ("http", "chunks of a byte"): (HEAD, b"1\r\na\r\n"),
        ("http", "chunk extensions"): (HEAD, b"1;" + b"x" * 40 + b"\r\na\r\n"),
        ("websocket", "fragments of a byte"): (shake + b"\x02\x80" + KEY, b"\x00\x81" + KEY + b"x"),
        ("websocket", "empty fragments"): (shake + b"\x02\x80" + KEY, b"\x00\x80" + KEY),
        ("websocket", "empty messages"): (shake, b"\x81\x80" + KEY),
        ("websocket", "pings"): (shake, b"\x89\x80" + KEY),
        ("websocket", "pings with data"): (shake, b"\x89\xfd" + KEY + bytes(125)),
        ("websocket", "pongs"): (shake, b"\x8a\x80" + KEY),
    }


async def pour(raw, piece):
    """Send a piece again and again."""
    while True:
        raw.send(piece)
        await raw.writer.drain()
        await asyncio.sleep(0)


class TestFrames:
    @pytest.mark.parametrize(("protocol", "element"), floods())
    async def test_a_flood_ends_its_connection(self, protocol, element):
        first, piece = floods()[protocol, element]
        async with serving(write_timeout=0.1) as server, connected(server) as raw:
            raw.send(first)
            pouring = asyncio.create_task(pour(raw, piece * 200))
            said = await raw.ended()
            assert (b" 400 " if protocol == "http" else b"too many") in said
            pouring.cancel()
            await asyncio.wait([pouring])
            assert (await ask(server, "/v2"))[0] == 200

    async def test_pings_and_small_messages_among_others_are_no_flood(self):
        async with serving() as server, opened(server) as socket:
            for number in range(300):
                await socket.ping()
                await socket.send(binary(number, id=str(number)))
                await socket.recv()
            for _ in range(NBYTES_MAX // 100):
                await socket.send('{"metadata": true, "model_name": "double"}')
                await socket.recv()
            (connection,) = server._hub.connections
            await socket.ping()
            assert connection._overhead.nbytes < 100

    def test_time_forgives(self):
        overhead = Overhead()
        assert not overhead.add(NBYTES_MAX, 0)
        overhead.forgive(100)
        assert not overhead.add(100, 0)
        assert overhead.add(1, 0)
        assert not overhead.add(100, 50)


class TestPipelines:
    async def test_what_is_sent_ahead_is_not_parsed_before_there_is_room(self, monkeypatch):
        """Each parsed request takes a hundred times the memory of its bytes."""
        parsed = 0
        complete = RequestReader.on_message_complete

        def counted(reader):
            nonlocal parsed
            parsed += 1
            complete(reader)

        monkeypatch.setattr(RequestReader, "on_message_complete", counted)
        device, one = LatchDevice(), request("/v2/health/live")
        async with serving(engine={"device": device}) as server, connected(server) as raw:
            raw.send(infer(1))
            await until(lambda: server.api.in_flight == 1)
            count = 50_000 // len(one)
            raw.send(one * count)
            await until(lambda: parsed > PIPELINE_MAX)
            for _ in range(20):
                await asyncio.sleep(0)
            device.open()
            # A slice, and the rest of a request that began in it.
            assert parsed <= 1 + PIPELINE_MAX + SLICE_NBYTES // len(one) + 1
            assert outputs(await raw.answer()) == [2]
            for _ in range(count):
                assert (await raw.answer())[0] == 200

    async def test_a_connection_waits_for_its_clients_turn(self):
        async with serving() as server, connected(server) as raw:
            raw.send(infer(1))
            await raw.answer()
            (connection,) = server._hub.connections
            turns, account = server.api.turns, connection._account
            turns.spend(account, 0, turns.turn_ns)
            connection.data_received(infer(2))
            assert connection._current is None
            assert not connection._transport.is_reading()
            assert outputs(await raw.answer()) == [4]
            assert connection._transport.is_reading()

    async def test_a_websocket_whose_opening_took_a_whole_turn_is_read(self, monkeypatch):
        """The trap: the turn is over, and whose turn it was no longer reads."""
        async with serving() as server:
            monkeypatch.setattr(server._hub, "now_ns", itertools.count(0, LONE_TURN_NS).__next__)
            async with opened(server) as socket:
                for number in range(3):
                    await socket.send(binary(number, id=str(number)))
                    async with asyncio.timeout(WAIT_S):
                        assert await socket.recv()


class TestStrangers:
    async def test_silent_connections_give_way_and_health_checks_are_answered(self):
        async with serving(max_connections=4, tokens=(TOKEN,)) as server:
            async with asyncio.timeout(WAIT_S):
                host, port = address(server)
                silent = [await asyncio.open_connection(host, port) for _ in range(4 + SPARE)]
                for _ in range(3):
                    assert (await ask(server, "/v2/health/live"))[0] == 200
                    assert (await ask(server, "/v2", Authorization=f"Bearer {TOKEN}"))[0] == 200
                    assert (await ask(server, "/v2"))[0] == 401
                assert await silent[0][0].read() == b""
            for _, writer in silent:
                writer.transport.abort()

    async def test_a_client_has_at_most_its_share_and_others_the_rest(self):
        async with serving(max_connections=8, tokens=("a", "b")) as server:
            kept = []
            try:
                for token, status in [*[("a", 200)] * 6, ("a", 503), ("b", 200), ("b", 503)]:
                    manager = connected(server)
                    raw = await manager.__aenter__()
                    kept.append(manager)
                    raw.send(request("/v2", Authorization=f"Bearer {token}"))
                    assert (await raw.answer())[0] == status
            finally:
                for manager in kept:
                    await manager.__aexit__(None, None, None)

    async def test_over_grpc_too_silent_connections_give_way(self):
        """They come again as soon as they are closed, and whoever has sent a request keeps its connection."""
        async with serving(grpc=True, max_connections=8, tokens=(TOKEN,)) as server:

            async def hold():
                while True:
                    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                        async with by_hand(server) as raw:
                            await raw.until("no frame", None)
                    await asyncio.sleep(0.1)

            async def ask(channel):
                method = channel.unary_unary(f"/{SERVICE}/ServerMetadata")
                await method(b"", metadata=GOOD, timeout=WAIT_S)

            async with grpc.aio.insecure_channel(server.grpc_target) as kept:
                await ask(kept)
                changes = []
                kept_state = asyncio.create_task(kept.wait_for_state_change(grpc.ChannelConnectivity.READY))
                kept_state.add_done_callback(changes.append)
                holding = [asyncio.create_task(hold()) for _ in range(12)]
                for _ in range(3):
                    await asyncio.sleep(0.3)
                    options = [("grpc.use_local_subchannel_pool", 1)]
                    async with grpc.aio.insecure_channel(server.grpc_target, options) as channel:
                        await ask(channel)
                    await ask(kept)
                assert not changes
                for task in (*holding, kept_state):
                    task.cancel()
                await asyncio.wait([*holding, kept_state])

    async def test_over_grpc_a_client_cannot_take_all_connections_with_open_calls(self):
        async with serving(grpc=True, max_connections=8, tokens=(TOKEN,), request_timeout=600.0) as server:

            async def hold():
                async with by_hand(server) as raw:
                    raw.send(frame(1, 4, 1, call("ModelStreamInfer", *HEADERS)))
                    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                        await raw.until("no frame", None)

            holding = [asyncio.create_task(hold()) for _ in range(16)]
            await until(lambda: len(server._grpc._streams) >= 8)
            await until(lambda: sum(task.done() for task in holding) >= 8)
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(server.grpc_target, options) as channel:
                method = channel.unary_unary(f"/{SERVICE}/ServerMetadata")
                # gRPC counts the closed connections for a moment longer, and may refuse the first attempt.
                await method(b"", metadata=GOOD, timeout=WAIT_S, wait_for_ready=True)
            for task in holding:
                task.cancel()
            await asyncio.wait(holding)

    def test_which_connections_are_closed(self):
        big, small, one = (f"ipv4:10.0.0.{number}" for number in range(3))
        ends = [end_of(f"{big}:{port}") for port in (1, 2, 3)]
        ends += [end_of(f"{small}:{port}") for port in (1, 2)]
        ends += [end_of(f"{one}:1")]
        known = {end_of(f"{host}:1") for host in (big, small, one)}
        order = [ends[2], ends[1], ends[4]]
        assert surplus(ends, known, set(), 6) == []
        assert surplus(ends, known, set(), 3) == order
        assert surplus(ends, known, set(), 0)[:3] == order
        assert surplus(ends, set(ends), set(), 5) == [ends[2]]
        busy = set(ends[:3])
        assert set(surplus(ends, set(ends), busy, 3)) == set(ends[3:])
        assert surplus(ends, set(ends), busy, 2)[-1] == ends[2]

    @pytest.mark.parametrize(
        ("listens", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")]
    )
    def test_connections_are_found_by_the_names_that_grpc_has_for_them(self, listens, host):
        family = socket.AF_INET6 if ":" in listens else socket.AF_INET
        try:
            listener = socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::")
        except (OSError, ValueError) as error:
            pytest.skip(f"there is no IPv6 here: {error}")
        with listener:
            port = listener.getsockname()[1]
            with socket.create_connection((host, port)) as client, listener.accept()[0] as accepted:
                name = f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"
                peer = f"{name}:{client.getsockname()[1]}"
                assert connections(port) == {end_of(peer): accepted.fileno()}
                one = GrpcConnections(1)
                one.port = port
                one.shut_down([peer])
                client.settimeout(WAIT_S)
                assert client.recv(1) == b""

    def test_a_descriptor_that_is_another_file_by_now_is_left_alone(self, tmp_path):
        here, there = socket.socketpair()
        with here, there, (tmp_path / "file").open("wb") as file:
            before = len(descriptors())
            for other in (file, here):
                _Sockets().shut_down(end_of("ipv4:127.0.0.1:1"), other.fileno())
            assert len(descriptors()) == before
            here.send(b"x")
            assert there.recv(1) == b"x"

    async def test_without_a_free_descriptor_connections_are_closed_and_tokens_revoked(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with serving(grpc=True, max_connections=8, tokens=(TOKEN,)) as server:
            host, port = server.grpc_target.rsplit(":", 1)
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(15)]
            ends = [asyncio.create_task(reader.read()) for reader, _ in silent]
            await until(lambda: len(connections(int(port))) + sum(end.done() for end in ends) >= 15)
            with contextlib.ExitStack() as stack:
                stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 10, hard))
                with contextlib.suppress(OSError):
                    while True:
                        stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
                server.api.use_tokens(("other",))
                await until(lambda: server._grpc._tokens_version == server.api.tokens_version)
                await until(lambda: sum(end.done() for end in ends) >= 7)
            for _, writer in silent:
                writer.transport.abort()

    async def test_names_are_checked_at_the_port_for_metrics_too(self):
        async with serving(metrics_port=0, tokens=(TOKEN,), allow_hosts=("mine.example",)) as server:
            port = int(server.metrics_url.split(":")[2].split("/")[0])
            for name, status in {
                "localhost": 200,
                "127.0.0.1:1": 200,
                "[::1]": 200,
                "mine.example:80": 200,
                "evil.example": 403,
                "[::1].evil.example": 403,
                "127.0.0.1:x.evil.example": 403,
                "evil.example\\@localhost": 403,
                "127.0.0.1/evil": 403,
            }.items():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"GET /metrics HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
                async with asyncio.timeout(WAIT_S):
                    assert int((await reader.read()).split()[1]) == status, name
                writer.close()


# ---- gRPC


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name, value):
    def text(raw):
        assert len(raw) < 127
        return bytes([len(raw)]) + raw

    return b"\x00" + text(name) + text(value)


def call(method, *headers, service=SERVICE):
    """The header block of a call."""
    fields = [
        (b":path", f"/{service}/{method}".encode()),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *headers,
    ]
    return b"\x83\x86" + b"".join(literal(*field) for field in fields)


class Http2:
    """A connection that is written frame by frame. It grants the server all the room it wants, or none."""

    def __init__(self, reader, writer):
        self._reader = reader
        self.send = writer.write
        self.drain = writer.drain
        self.acknowledges = True
        """Whether it acknowledges the server's settings."""
        self.credit = {}
        """Bytes that the server lets a stream send, by its number; 0 is the connection."""

    async def until(self, kind, stream, has_ended=False):
        """Return the next frame of a kind on a stream, or any; with `has_ended`, the one that ends it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                number = int.from_bytes(head[5:], "big")
                if head[3] == 4 and not head[4] & 1 and self.acknowledges:
                    self.send(frame(4, 1, 0))
                elif head[3] == 6 and not head[4] & 1:
                    self.send(frame(6, 1, 0, payload))
                elif head[3] == 8:
                    self.credit[number] = self.credit.get(number, 0) + int.from_bytes(payload, "big")
                if head[3] == kind and stream in (None, number) and (not has_ended or head[4] & 1):
                    return payload


@asynccontextmanager
async def by_hand(server, settings=b""):
    host, port = server.grpc_target.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, settings))
    try:
        yield Http2(reader, writer)
    finally:
        writer.transport.abort()


def fails(code):
    """The trailer that says how a call has ended."""
    return literal(b"grpc-status", str(code.value[0]).encode())[2:]


METHODS = ("ModelInfer", "ModelStreamInfer", "ServerMetadata", "RepositoryIndex", "TraceSetting")


class TestGrpc:
    @pytest.mark.parametrize("method", METHODS)
    async def test_a_message_is_not_read_before_the_token_is_checked(self, method):
        async with serving(grpc=True, tokens=(TOKEN,)) as server, by_hand(server) as raw:
            raw.send(frame(1, 4, 1, call(method)) + frame(0, 0, 1, b"\0\0\x3d\x09\0" + bytes(10_000)))
            assert fails(grpc.StatusCode.UNAUTHENTICATED) in await raw.until(1, 1, has_ended=True)
            assert raw.credit.get(1, 0) < 64 << 10
            assert not server.api.memory.nbytes

    async def test_one_byte_does_not_stand_for_an_earlier_header(self):
        """Otherwise 3,000 bytes would be headers of 1 MB: clients that acknowledge the limits are cut off."""
        async with serving(grpc=True, tokens=(TOKEN,)) as server, by_hand(server) as raw:
            await raw.until(4, 0)  # It is acknowledged in passing.
            indexed = b"\x40" + literal(b"x", b"a" * 100)[1:]
            raw.send(frame(1, 5, 1, call("ModelInfer") + indexed))
            raw.send(frame(1, 5, 3, call("ModelInfer") + b"\xbe" * 3000))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await raw.until(1, 3)

    async def test_a_client_that_ignores_the_limit_on_headers_is_cut_off(self):
        """One that acknowledges it is told what is wrong, and keeps its connection."""
        entry = b"\x40" + literal(b"x", b"a" * 100)[1:]
        async with serving(grpc=True, tokens=(TOKEN,)) as server, by_hand(server) as raw:
            raw.acknowledges = False
            bomb = frame(1, 5, 3, call("ModelInfer") + b"\xbe" * 3000)
            raw.send(frame(1, 5, 1, call("ModelInfer") + entry) + bomb)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await raw.until("no frame", None)
        async with serving(grpc=True, tokens=(TOKEN,), max_headers=1024) as server, by_hand(server) as raw:
            await raw.until(4, 0)
            raw.send(frame(1, 5, 1, call("ModelInfer", *[(b"x", b"a" * 100)] * 120)))
            assert fails(grpc.StatusCode.RESOURCE_EXHAUSTED) in await raw.until(1, 1, has_ended=True)
            raw.send(frame(1, 5, 3, call("ServerLive")))
            assert fails(grpc.StatusCode.OK) in await raw.until(1, 3, has_ended=True)

    async def test_health_is_told_without_reading_anything(self):
        async with serving(grpc=True, tokens=(TOKEN,)) as server, by_hand(server) as raw:
            raw.send(frame(1, 4, 1, call("ServerLive")) + frame(0, 0, 1, b"\0\0\x3d\x09\0" + bytes(10_000)))
            assert fails(grpc.StatusCode.OK) in await raw.until(1, 1, has_ended=True)

    @pytest.mark.parametrize("method", ["ModelInfer", "ServerMetadata"])
    async def test_a_message_without_an_end_is_counted_and_given_up(self, method):
        token = (b"authorization", b"Bearer " + TOKEN.encode())
        async with (
            serving(grpc=True, tokens=(TOKEN,), request_timeout=0.3) as server,
            by_hand(server) as raw,
        ):
            raw.send(frame(1, 4, 1, call(method, token)) + frame(0, 0, 1, b"\0\0\x3d\x09\0"))
            await until(lambda: server.api.memory.nbytes == server._grpc.message_nbytes_max)
            assert fails(grpc.StatusCode.DEADLINE_EXCEEDED) in await raw.until(1, 1, has_ended=True)
            await until(lambda: not server.api.memory.nbytes)

    async def test_messages_without_an_end_leave_room_for_other_clients(self):
        """They make room, too, when others wait for memory."""
        limits = {"max_body": 1 << 20, "max_grpc_message": 1 << 20, "max_memory": 4 << 20}
        async with (
            serving(grpc=True, tokens=("a", "b"), **limits) as server,
            by_hand(server) as raw,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            for stream in range(1, 21, 2):
                raw.send(frame(1, 4, stream, call("ModelInfer", (b"authorization", b"Bearer a"))))
                raw.send(frame(0, 0, stream, b"\0\0\x0f\0\0"))
            await until(lambda: server.api.memory.waiting)
            assert server.api.memory.nbytes == 3 << 20
            metadata = channel.unary_unary(f"/{SERVICE}/ServerMetadata")
            await metadata(b"", metadata=(("authorization", "Bearer b"),), timeout=WAIT_S)
            assert b"did not arrive in time" in await raw.until(1, 1, has_ended=True)

    @pytest.mark.parametrize("method", ["ModelInfer", "ServerMetadata", "ModelStreamInfer"])
    @pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
    async def test_what_becomes_too_large_when_it_is_unpacked_is_refused(self, method, pack):
        async with (
            serving(grpc=True) as server,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            bomb = pack(bytes(8 << 20))
            if method == "ModelStreamInfer":
                stream = channel.stream_stream(f"/{SERVICE}/{method}")(timeout=WAIT_S)
                await stream.write(bomb)
                answer = pb.ModelStreamInferResponse.FromString(await stream.read())
                assert "exceeds" in answer.error_message
                return
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/{method}")(bomb, timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_checks_without_an_end_give_way_to_others(self, monkeypatch):
        monkeypatch.setattr(grpc_server, "STRANGERS_MAX", 2)
        async with (
            serving(grpc=True, tokens=(TOKEN,)) as server,
            by_hand(server) as raw,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            check = channel.unary_unary(f"/{HEALTH_SERVICE}/Check")
            for stream in (1, 3, 5):
                raw.send(frame(1, 4, stream, call("Check", service=HEALTH_SERVICE)))
                raw.send(frame(0, 0, stream, b"\0\0\0\0\x09"))
            assert b"did not arrive in time" in await raw.until(1, 1, has_ended=True)
            assert await check(b"", timeout=WAIT_S)

    async def test_honest_checks_wait_for_each_other(self, monkeypatch):
        begun, address_of = [], grpc_server.address_of
        monkeypatch.setattr(grpc_server, "STRANGERS_MAX", 2)
        monkeypatch.setattr(grpc_server, "CROWD_S", WAIT_S)
        monkeypatch.setattr(grpc_server, "address_of", lambda peer: begun.append(peer) or address_of(peer))
        async with serving(grpc=True) as server, by_hand(server) as raw:
            streams = range(1, 21, 2)
            for stream in streams:
                raw.send(frame(1, 4, stream, call("Check", service=HEALTH_SERVICE)))
                raw.send(frame(0, 0, stream, b"\0\0\0\0\x02"))
            await until(lambda: len(begun) >= len(streams))
            for stream in streams:
                raw.send(frame(0, 1, stream, b"\x0a\0"))
            ends = [await raw.until(1, None, has_ended=True) for _ in streams]
            assert fails(grpc.StatusCode.OK) in ends[0]
            assert not any(b"in time" in end for end in ends)

    async def test_streams_are_bounded_and_whoever_has_the_most_makes_room(self, monkeypatch):
        monkeypatch.setattr(grpc_server, "STRANGERS_MAX", 2)
        limits = {"max_body": 1 << 20, "max_grpc_message": 1 << 20, "max_memory": 2 << 20}
        async with (
            serving(grpc=True, tokens=("a", "b"), **limits) as server,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            method = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")

            async def begun(token):
                stream = method(metadata=(("authorization", f"Bearer {token}"),), timeout=WAIT_S)
                await stream.write(b"\x07")
                assert await stream.read()
                return stream

            first, second = await begun("a"), await begun("a")
            other = await begun("b")
            assert await first.code() is grpc.StatusCode.UNAVAILABLE
            for stream in (second, other):
                await stream.write(b"\x07")
                assert await stream.read()
                stream.cancel()

    @pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
    async def test_answers_that_nobody_takes_end_the_connection_when_others_need_the_room(self, method):
        """The server's room to send is 0 bytes, for ever."""
        no_room = b"\0\4" + bytes(4)
        message = pb.ModelInferRequest(model_name="double")
        tensor = message.inputs.add(name="input", datatype="FP32")
        tensor.shape.extend([1, 4])
        message.raw_input_contents.append(bytes(16))
        body = message.SerializeToString()
        async with (
            serving(grpc=True, write_timeout=0.1) as server,
            by_hand(server, no_room) as raw,
            by_hand(server) as other,
        ):
            raw.send(frame(1, 4, 1, call(method)))
            raw.send(frame(0, 0, 1, b"\0" + len(body).to_bytes(4, "big") + body))
            await until(lambda: server.repository.find("double").engine.statistics().succeeded == 1)
            await until(lambda: server._grpc._sending)
            server.api.memory.refuse()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await raw.until(1, 3)
            await until(lambda: not server._grpc._sending)
            await until(lambda: not server._grpc._streams)
            other.send(frame(1, 4, 1, call("ServerLive")))
            assert fails(grpc.StatusCode.OK) in await other.until(1, 1, has_ended=True)


def numbered(*frames):
    """Return the frames of one call after another: each is a function of its stream's number."""
    return lambda count: b"".join(one(2 * count + 1) for one in frames)


BEGINNING = call("ModelInfer", (b"authorization", b"Bearer " + TOKEN.encode()))
STREAM = call("ModelStreamInfer", (b"authorization", b"Bearer " + TOKEN.encode()))
GRPC_FLOODS = {
    "settings": (b"", frame(4, 0, 0, b"\0\3\0\0\0\x64")),
    "pings": (b"", frame(6, 0, 0, bytes(8))),
    "room to send": (b"", frame(8, 0, 0, b"\0\0\0\1")),
    "priorities": (b"", frame(2, 0, 1, b"\0\0\0\0\1")),
    "unknown frames": (b"", frame(0x77, 0, 0, bytes(100))),
    "empty data": (frame(1, 4, 1, BEGINNING), frame(0, 0, 1)),
    "empty headers": (frame(1, 0, 1, BEGINNING), frame(9, 0, 1)),
    "headers without an end": (frame(1, 0, 1, BEGINNING), frame(9, 0, 1, literal(b"x", bytes(100)))),
    "empty messages of a stream": (frame(1, 4, 1, STREAM), frame(0, 0, 1, bytes(5))),
    "calls that are reset": (
        b"",
        numbered(partial(frame, 1, 4, payload=BEGINNING), partial(frame, 3, 0, payload=b"\0\0\0\x08")),
    ),
    "calls without a token": (
        b"",
        numbered(partial(frame, 1, 4, payload=call("ModelInfer")), partial(frame, 0, 1, payload=bytes(5))),
    ),
    "calls of unknown methods": (b"", numbered(partial(frame, 1, 5, payload=call("Unknown")))),
}
"""What is sent once, and then again and again. gRPC's core ends some of these connections."""


@pytest.mark.tier2
class TestGrpcFloods:
    @pytest.mark.parametrize("element", GRPC_FLOODS)
    async def test_others_are_answered_meanwhile_and_nothing_is_held(self, element):
        first, piece = GRPC_FLOODS[element]
        if not callable(piece):
            piece = partial(lambda piece, _: piece, piece)

        async def flood(server):
            counts = itertools.count()
            with contextlib.suppress(ConnectionError):
                async with by_hand(server) as raw:
                    raw.send(first)
                    while True:
                        raw.send(b"".join(piece(next(counts)) for _ in range(50)))
                        await raw.drain()
                        await asyncio.sleep(0)

        async with (
            serving(grpc=True, tokens=(TOKEN,)) as server,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            pouring = [asyncio.create_task(flood(server)) for _ in range(2)]
            for _ in range(10):
                method = channel.unary_unary(f"/{SERVICE}/ServerMetadata")
                await method(b"", metadata=GOOD, timeout=WAIT_S, wait_for_ready=True)
                assert (await ask(server, "/v2", Authorization=f"Bearer {TOKEN}"))[0] == 200
            for task in pouring:
                task.cancel()
            for ended in await asyncio.gather(*pouring, return_exceptions=True):
                assert ended is None or isinstance(ended, asyncio.CancelledError)
            served = server._grpc
            await until(lambda: not (server.api.memory.nbytes or served._streams or served._reading))


class TestTokens:
    async def test_a_revoked_one_ends_websockets_and_streams(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("kept\nrevoked\n")
        async with (
            serving(grpc=True, tokens_file=path) as server,
            opened(server, additional_headers={"Authorization": "Bearer kept"}) as kept,
            opened(server, additional_headers={"Authorization": "Bearer revoked"}) as revoked,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            method = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
            streams = {
                name: method(metadata=(("authorization", f"Bearer {name}"),), timeout=WAIT_S)
                for name in ("kept", "revoked")
            }
            for stream in streams.values():
                await stream.write(b"\x07")
                assert await stream.read()
            path.write_text("kept\n")
            await server.reload()
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(ConnectionClosed) as closed:
                    await revoked.recv()
            assert closed.value.rcvd.code == 1008
            assert await streams["revoked"].code() is grpc.StatusCode.UNAUTHENTICATED
            await kept.send(binary(1))
            assert await kept.recv()
            await streams["kept"].write(b"\x07")
            assert await streams["kept"].read()
            streams["kept"].cancel()
