"""HTTP by hand: framing, limits, times, hang-ups. Real sockets, no client library between."""

import asyncio
import gc
import gzip
import json
import socket
import struct
import zlib

import numpy as np
import pytest

from asynctrt.backends.function import FunctionModel
from asynctrt.serving.api import Api
from asynctrt.serving.http import SWEEP_CONNECTIONS, SWEEP_S, Hub
from asynctrt.serving.repository import Repository
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import rows
from tests.serving.support import Held, address, ask, connected, engine_of, request, serving

pytestmark = pytest.mark.anyio
INFER = "/v2/models/double/infer"
MIB = 1 << 20


def json_body(*values, **extra):
    data = rows(*values).ravel().tolist()
    tensor = {"name": "input", "datatype": "FP32", "shape": [len(values), 4], "data": data}
    return json.dumps({"inputs": [tensor], **extra}).encode()


def binary_body(*values, head_extra=None):
    """Header and raw tensor, and the header's length."""
    raw = rows(*values).tobytes()
    tensor = {
        "name": "input",
        "datatype": "FP32",
        "shape": [len(values), 4],
        "parameters": {"binary_data_size": len(raw)},
    }
    content = {"inputs": [tensor], "parameters": {"binary_data_output": True}, **(head_extra or {})}
    head = json.dumps(content, separators=(",", ":")).encode()
    return head + raw, len(head)


def infer(*values, path=INFER, **headers):
    body, length = binary_body(*values)
    return request(path, body, Inference_Header_Content_Length=length, **headers)


def outputs(answer):
    status, headers, body = answer
    assert status == 200, body
    length = int(headers["inference-header-content-length"])
    assert json.loads(body[:length])["outputs"][0]["parameters"]["binary_data_size"] == len(body) - length
    return np.frombuffer(body[length:], np.float32).reshape(-1, 4)[:, 0].tolist()


async def test_many_connections_are_checked_in_turns():
    """To check 10,000 at once would hold the loop for 9 ms, four times a second."""
    checked = []

    class Idle:
        def check_times(self, tick):
            checked.append(self)

        def abort(self):
            pass

    hub = Hub(Api(Repository()))
    idle = [Idle() for _ in range(2 * SWEEP_CONNECTIONS + 1)]
    for one in idle:
        hub.add(one)
    hub._check(list(hub.connections))
    for count in (SWEEP_CONNECTIONS, 2 * SWEEP_CONNECTIONS):
        assert len(checked) == count
        await asyncio.sleep(0)
    assert set(checked) == set(idle)
    assert len(checked) == len(idle)
    checked.clear()
    hub._check(list(hub.connections))
    hub.discard(gone := next(one for one in idle if one not in checked))
    for _ in range(2):
        await asyncio.sleep(0)
    assert set(checked) == set(idle) - {gone}, "it has gone meanwhile"
    hub.close()


class TestFraming:
    async def test_each_request_is_authorized_once(self, monkeypatch):
        checked = []
        authorize = Api.authorize

        def noted(api, path, headers):
            checked.append(path)
            authorize(api, path, headers)

        monkeypatch.setattr(Api, "authorize", noted)
        async with serving(tokens=("s3cret",)) as server, connected(server) as raw:
            for send, status in (
                (infer(1, Authorization="Bearer s3cret"), 200),
                (request(INFER, method="POST", Authorization="Bearer s3cret"), 400),
                (request("/v2", Authorization="Bearer s3cret"), 200),
                (request(INFER, method="POST"), 401),
                (infer(1), 401),
            ):
                checked.clear()
                raw.send(send)
                assert (await raw.answer())[0] == status
                assert len(checked) == 1

    async def test_a_head_that_was_accepted_is_authorized_again_when_tokens_change(self):
        async with serving(tokens=("old",)) as server, connected(server) as raw:
            for tokens, statuses in ((("new",), (200, 200, 200)), (("old",), (401,))):
                for status in statuses:
                    raw.send(infer(1, Authorization="Bearer old"))
                    assert (await raw.answer())[0] == status
                server.api.use_tokens(tokens)

    async def test_a_request_with_a_known_head_counts_for_its_own_client(self):
        """A connection keeps the last of 8 heads in a row, and then others pass by."""
        async with serving(client_header="X-Client") as server, connected(server) as raw:
            for client in [*(f"c{number}" for number in range(20)), "c7", "c7", "c3", "c7", "c3", "c3"]:
                raw.send(infer(1, X_Client=client))
                assert outputs(await raw.answer()) == [2]
                (connection,) = server._hub.connections
                assert connection._account is server.api.memory.account(client.encode())

    async def test_much_that_is_sent_ahead_is_not_read(self):
        """Bodies that wait behind an answer take memory, so the connection is held."""
        device = LatchDevice()
        async with serving(engine={"device": device}) as server, connected(server) as raw:
            raw.send(infer(1))
            await until(lambda: device.held == 1)
            large = infer(*range(10_000))  # 160 KB.
            for _ in range(25):
                raw.send(large)
            (connection,) = server._hub.connections
            await until(lambda: connection._is_throttled)
            assert len(connection._waiting) < 20
            device.open()
            assert outputs(await raw.answer()) == [2]
            for _ in range(25):
                assert len(outputs(await raw.answer())) == 10_000

    async def test_expect_100_continue(self):
        async with serving() as server, connected(server) as raw:
            whole = infer(4, Expect="100-continue")
            stop = whole.index(b"\r\n\r\n") + 4
            raw.send(whole[:stop])
            assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.send(whole[stop:])
            assert outputs(await raw.answer()) == [8]

    async def test_expect_100_continue_behind_a_request_in_flight(self):
        """Its client waits, and is told to go on once it knows that it is not told of the request before."""
        device = LatchDevice()
        async with serving(engine={"device": device}) as server, connected(server) as raw:
            whole = infer(4, Expect="100-continue")
            stop = whole.index(b"\r\n\r\n") + 4
            raw.send(infer(1) + infer(2) + whole[:stop])
            (connection,) = server._hub.connections
            await until(lambda: device.held == 1 and connection._reader.began is not None)
            # However long the answers before it take, it is not its client that is late.
            for _ in range(3):
                connection.check_times(server._hub.tick + server._hub.request_ticks + 1)
            device.open()
            assert [outputs(await raw.answer()) for _ in range(2)] == [[2], [4]]
            assert (await raw.answer())[0] == 100
            connection.check_times(connection._reader.began + server._hub.request_ticks)
            raw.send(whole[stop:])
            assert outputs(await raw.answer()) == [8]
            raw.send(infer(5))
            assert outputs(await raw.answer()) == [10]

    @pytest.mark.parametrize("sent", [1, 10, None])
    async def test_a_client_that_does_not_wait_for_its_100_is_not_sent_one_for_a_whole_body(self, sent):
        device = LatchDevice()
        async with serving(engine={"device": device}) as server, connected(server) as raw:
            whole = infer(4, Expect="100-continue")
            stop = len(whole) if sent is None else whole.index(b"\r\n\r\n") + 4 + sent
            raw.send(infer(1) + whole[:stop])
            (connection,) = server._hub.connections
            await until(lambda: device.held == 1)
            await until(lambda: connection._waiting if sent is None else connection._reader._body_nbytes)
            device.open()
            assert outputs(await raw.answer()) == [2]
            if sent is not None:
                assert (await raw.answer())[0] == 100
                raw.send(whole[stop:])
            assert outputs(await raw.answer()) == [8]

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Expect": "200-ok"}, 417),
            ({"Expect": "100-continue", "Content_Length": 10 << 30}, 413),
            ({"Expect": "100-continue", "Authorization": "Bearer wrong"}, 401),
        ],
    )
    async def test_who_waits_for_a_100_behind_a_request_in_flight_is_told_of_a_refusal(self, headers, status):
        device = LatchDevice()
        token = {"Authorization": "Bearer right"}
        async with (
            serving(engine={"device": device}, tokens=["right"]) as server,
            connected(server) as raw,
        ):
            given = {"Content_Length": 8} | token | headers
            raw.send(infer(1, **token) + infer(2, **token))
            raw.send(request(INFER, method="POST", **given) + infer(3, **token))
            (connection,) = server._hub.connections
            await until(lambda: device.held == 1 and connection._reader is None)
            device.open()
            assert [outputs(await raw.answer()) for _ in range(2)] == [[2], [4]]
            answer = await raw.answer()
            assert (answer[0], answer[1]["connection"]) == (status, "close")
            assert await raw.ended() == b"", "where the next request begins is unknown"

    async def test_http_1_0_knows_no_100_continue(self):
        async with serving() as server, connected(server) as raw:
            head = (
                "POST /v2/models/double/infer HTTP/1.0",
                "Expect: 100-continue",
                "Content-Length: 2",
                "",
                "",
            )
            raw.send("\r\n".join(head).encode())
            await until(lambda: server._hub.connections)
            (connection,) = server._hub.connections
            await until(lambda: connection._reader.began is not None)
            raw.send(b"{}")
            assert (await raw.answer())[0] == 400

    async def test_http_1_0_and_connection_close(self):
        async with serving() as server:
            async with connected(server) as raw:
                raw.send(b"GET /v2 HTTP/1.0\r\n\r\n")
                status, headers, _ = await raw.answer()
                assert (status, headers["connection"]) == (200, "close")
                assert await raw.ended() == b""
            async with connected(server) as raw:
                raw.send(b"GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
                assert (await raw.answer())[1]["connection"] == "keep-alive"
                for _ in range(2):
                    raw.send(infer(1, Connection="keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
                    answer = await raw.answer()
                    assert answer[1]["connection"] == "keep-alive"
                    assert outputs(answer) == [2]
                raw.send(infer(1, Connection="close"))
                assert outputs(await raw.answer()) == [2]
                assert await raw.ended() == b""

    async def test_head_has_no_body(self):
        async with serving() as server, connected(server) as raw:
            raw.send(request("/v2", method="HEAD") + request("/v2/health/live"))
            status, headers, _ = await raw.answer(to_head=True)
            assert status == 200
            assert int(headers["content-length"]) > 0
            assert (await raw.answer())[0] == 200

    async def test_an_absolute_target_and_a_query(self):
        async with serving() as server, connected(server) as raw:
            raw.send(request("http://elsewhere/v2/models/double?x=1"))
            assert json.loads((await raw.answer())[2])["name"] == "double"

    async def test_answers_have_a_date_and_say_who(self):
        async with serving() as server, connected(server) as raw:
            raw.send(infer(1) + request("/v2"))
            for _ in range(2):
                headers = (await raw.answer())[1]
                assert headers["server"] == "asynctrt"
                assert headers["date"].endswith(" GMT")


class TestLimits:
    @pytest.mark.parametrize("body", [b"no gzip", gzip.compress(b"{}" * 99, mtime=0)[:-9], b"\x1f\x8b"])
    async def test_a_body_that_is_not_compressed_as_it_says(self, body):
        async with serving() as server:
            assert (await ask(server, INFER, body, Content_Encoding="gzip"))[0] == 400

    @pytest.mark.parametrize(
        ("start", "piece"),
        [
            (
                b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"1000\r\n%s\r\n" % bytes(4096),
            ),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * 4096),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"x: y\r\n" * 700),
            (b"GET /", b"a" * 4096),
        ],
        ids=["body", "header", "headers", "target"],
    )
    async def test_they_hold_behind_a_request_in_flight(self, start, piece):
        device = LatchDevice()
        settings = {"max_body": 20_000, "max_headers": 20_000, "engine": {"device": device}}
        async with serving(**settings) as server, connected(server) as raw:
            raw.send(infer(1) + infer(2))
            await until(lambda: device.held == 1)
            (connection,) = server._hub.connections
            raw.send(start)
            for _ in range(1000):
                raw.send(piece)
                await asyncio.sleep(0)
                if connection._reader is None:
                    break
            await until(lambda: connection._reader is None)
            device.open()
            status, headers, _ = await raw.answer()
            assert (status, "connection" in headers) == (200, False)
            status, headers, _ = await raw.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await raw.ended() == b""

    async def test_connections(self):
        async with serving(max_connections=2) as server, connected(server) as one, connected(server) as two:
            for raw in (one, two):
                raw.send(infer(1))
                await raw.answer()
            async with connected(server) as third:
                third.send(request("/v2/health/live"))
                assert (await third.answer())[0] == 200
                third.send(infer(1))
                assert (await third.answer())[0] == 503
                assert await third.ended() == b""
            one.close()
            await until(lambda: len(server._hub.connections) == 1)
            async with connected(server) as fourth:
                fourth.send(infer(1))
                assert outputs(await fourth.answer()) == [2]

    async def test_requests_in_flight(self):
        device = LatchDevice()
        async with (
            serving(max_requests=1, engine={"device": device}) as server,
            connected(server) as first,
            connected(server) as second,
        ):
            first.send(infer(1))
            await until(lambda: server.api.in_flight == 1)
            second.send(infer(2))
            assert (await second.answer())[0] == 503
            device.open()
            assert outputs(await first.answer()) == [2]
            second.send(infer(2))
            assert outputs(await second.answer()) == [4]

    async def test_a_request_that_is_sent_slowly_has_only_so_long(self, often):
        """The trap: a time that begins anew with every byte."""
        async with serving(request_timeout=0.1) as server, connected(server) as raw:
            whole = infer(1)
            answer = asyncio.create_task(raw.answer())
            for byte in whole:
                if answer.done():
                    break
                raw.send(bytes([byte]))
                await asyncio.wait([answer], timeout=0.02)
            assert answer.done(), "it was taken byte by byte"
            status, headers, _ = answer.result()
            assert (status, headers["connection"]) == (408, "close")

    async def test_an_idle_connection_is_closed(self, often):
        async with serving(idle_timeout=0.05) as server, connected(server) as raw:
            raw.send(infer(1))
            assert outputs(await raw.answer()) == [2]
            assert await raw.ended() == b""

    async def test_empty_lines_before_a_request_are_none(self, often):
        """They are skipped, and a client that sends nothing else is idle all the same."""
        async with serving(idle_timeout=0.05) as server, connected(server) as raw:
            raw.send(b"\r\n\r\n" + infer(1))
            assert outputs(await raw.answer()) == [2]
            end = asyncio.create_task(raw.ended())
            while not end.done():  # It ends within WAIT_S.
                raw.send(b"\r\n")
                await asyncio.wait([end], timeout=0.02)
            assert end.result() == b""

    async def test_a_request_in_flight_is_not_idle(self, often):
        device = LatchDevice()
        settings = {"idle_timeout": 0.05, "request_timeout": 0.05, "engine": {"device": device}}
        async with serving(**settings) as server, connected(server) as raw:
            raw.send(infer(1))
            ticks = server._hub.tick
            await until(lambda: server._hub.tick > ticks + 4)
            device.open()
            assert outputs(await raw.answer()) == [2]

    async def test_a_client_that_takes_no_answer(self, often):
        """It is read no further, and cut when it has taken nothing for long enough."""

        def large(inputs, outputs):
            outputs["output"][...] = 1

        model = FunctionModel(
            large,
            inputs=TensorSpec("input", "float32", (4,)),
            outputs=TensorSpec("output", "float32", (1 << 20,)),
        )
        async with serving({"double": model}, write_timeout=0.05, engine={"max_rows": 1}) as server:
            host, port = address(server)
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(slow, (host, port))
                await loop.sock_sendall(slow, infer(1) * 20)
                await until(lambda: server.repository.find("double").engine.statistics().succeeded > 0)
                await until(lambda: not server._hub.connections)
            assert server.repository.find("double").engine.statistics().succeeded < 20
            assert (await ask(server, "/v2"))[0] == 200


class TestHalfClosed:
    """A client that sends no more and waits for its answers."""

    @pytest.mark.parametrize("count", [1, 3, 200])
    async def test_it_is_answered_all_it_has_asked_for_and_then_the_connection_is_closed(self, count):
        async with serving() as server, connected(server) as raw:
            raw.send(b"".join(infer(number) for number in range(count)))
            raw.writer.write_eof()
            for number in range(count):
                answer = await raw.answer()
                assert outputs(answer) == [2 * number]
            assert answer[1]["connection"] == "close"
            assert await raw.ended() == b""
            await until(lambda: not server._hub.connections)

    async def test_what_is_no_inference_and_what_is_refused_is_answered_too(self):
        async with serving() as server:
            for sent, expected in (
                (request("/v2/health/live"), 200),
                (request(INFER, b"no JSON"), 400),
                (request("/v2/models/double/infer", method="POST", Content_Length=1 << 40), 413),
                (b"no HTTP\r\n\r\n", 400),
            ):
                async with connected(server) as raw:
                    raw.send(sent)
                    raw.writer.write_eof()
                    assert (await raw.answer())[0] == expected
                    assert await raw.ended() == b""
            await until(lambda: not server._hub.connections)

    @pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
    @pytest.mark.parametrize("has_gone", [False, True])
    async def test_it_waits_and_the_rest_of_a_request_is_dropped(self, version, has_gone):
        device = LatchDevice(concurrency=1)
        async with serving(engine={"device": device, "contexts": 1, "max_rows": 1}) as server:
            async with connected(server) as raw, connected(server) as other:
                other.send(infer(7))
                await until(lambda: device.held == 1)
                raw.send(infer(1).replace(b"HTTP/1.1", version) + infer(2)[:-3])
                await until(lambda: server.api.in_flight == 2)
                if has_gone:
                    raw.writer.close()
                    await until(lambda: server.api.in_flight == 1)
                else:
                    raw.writer.write_eof()
                    await asyncio.sleep(2 * SWEEP_S)
                device.open()
                assert outputs(await other.answer()) == [14]
                if not has_gone:
                    assert outputs(await raw.answer()) == [2]
                    assert await raw.ended() == b""
            assert engine_of(server).statistics().rows == (1 if has_gone else 2)

    async def test_a_client_that_does_nothing_is_closed(self):
        async with serving() as server, connected(server) as raw:
            raw.send(infer(1))
            assert outputs(await raw.answer()) == [2]
            raw.writer.write_eof()
            assert await raw.ended() == b""


class TestHangUps:
    async def test_a_thousand_hang_ups_at_once(self):
        """Their queued work is dropped; everybody else is answered."""
        device = LatchDevice(concurrency=1)
        async with serving(engine={"device": device, "contexts": 1, "max_rows": 8}) as server:
            engine = engine_of(server)
            served = server.repository.find("double")
            host, port = address(server)
            async with connected(server) as first, connected(server) as patient:
                first.send(infer(1))
                await until(lambda: device.held == 1)
                patient.send(infer(7))
                sockets = []
                loop = asyncio.get_running_loop()
                for _ in range(400):
                    one = socket.socket()
                    one.setblocking(False)
                    await loop.sock_connect(one, (host, port))
                    await loop.sock_sendall(one, infer(2) + infer(3))
                    sockets.append(one)
                await until(lambda: served.pending == 402)
                for one in sockets:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    one.close()
                await until(lambda: served.failures["CANCELED"] == 400)
                await until(lambda: engine.statistics().queued_requests == 1)
                assert (served.pending, served.admission.gate.waiting) == (2, 0)
                await until(lambda: len(server._hub.connections) == 2)
                device.open()
                assert outputs(await first.answer()) == [2]
                assert outputs(await patient.answer()) == [14]
            assert engine.statistics().rows == 2
            assert server.api.in_flight == 0


class TestAnswers:
    @pytest.mark.parametrize("coding", ["gzip", "deflate", "gzip;q=0.5, br", "*, deflate"])
    async def test_compressed_answers(self, coding):
        async with serving() as server, connected(server) as raw:
            raw.send(infer(*range(100), Accept_Encoding=coding))
            status, headers, body = await raw.answer()
            assert headers["content-encoding"] in ("gzip", "deflate")
            assert outputs((status, headers, zlib.decompress(body, 47))) == [
                2 * value for value in range(100)
            ]
            raw.send(infer(1, Accept_Encoding=coding))
            assert "content-encoding" not in (await raw.answer())[1], "a small answer is not worth it"

    @pytest.mark.parametrize("refused", ["identity", "br", "gzip;q=0", "", "gzip;q=0.0, deflate ; q=0"])
    async def test_answers_that_are_not_to_be_compressed(self, refused):
        async with serving() as server, connected(server) as raw:
            raw.send(infer(*range(100), Accept_Encoding=refused))
            assert outputs(await raw.answer()) == [2 * value for value in range(100)]

    @pytest.mark.parametrize(
        ("method", "path", "status", "allow"),
        [
            ("GET", INFER, 405, "POST"),
            ("POST", "/v2/models/double", 405, "GET"),
            ("DELETE", "/v2", 405, "GET"),
            ("POST", "/", 405, "GET"),
            ("GET", "/v2/repository/index", 405, "POST"),
            ("GET", "/nothing", 404, None),
            ("GET", "/v2/models/", 404, None),
            ("GET", "/v2/models/unknown", 404, None),
            ("GET", "/v2/models/double/versions/2", 404, None),
            ("GET", "/v2/models/double/versions/x/ready", 400, None),
            ("GET", "/v2/models/unknown/ready", 400, None),
            ("GET", "/v2/models/double/ws", 426, None),
            ("GET", "/v2/ws", 426, None),
            ("GET", "/v2/ws/", 426, None),
            ("GET", INFER + "/", 405, "POST"),
            ("POST", "/v2/systemsharedmemory/status", 501, None),
            ("POST", "/v2/repository/models/double/load", 400, None),
        ],
    )
    async def test_statuses(self, method, path, status, allow):
        async with serving() as server:
            given, headers, body = await ask(server, path, method=method)
            assert (given, headers.get("allow")) == (status, allow)
            assert json.loads(body)["error"]

    async def test_paths_with_a_slash_at_their_end(self):
        async with serving() as server, connected(server) as raw:
            for path in ("", "/models/double", "/models/double/versions/1/ready", "/models/stats"):
                assert (await ask(server, f"/v2{path}/"))[0] == 200
            assert (await ask(server, "/metrics/"))[0] == 200
            assert (await ask(server, "/v2/repository/index/", method="POST"))[0] == 200
            raw.send(infer(1).replace(INFER.encode(), INFER.encode() + b"/", 1))
            assert outputs(await raw.answer()) == [2]

    @pytest.mark.parametrize("kind", ["application/octet-stream", "application/json"])
    async def test_raw_tensors_without_the_length_of_their_json(self, kind):
        head = json.loads(json_body(1))
        del head["inputs"][0]["data"]
        head["inputs"][0]["parameters"] = {"binary_data_size": 4}
        async with serving() as server:
            body = json.dumps(head).encode() + np.float32(1).tobytes()
            status, _, answer = await ask(server, INFER, body, Content_Type=kind)
            assert (status, "Inference-Header-Content-Length" in json.loads(answer)["error"]) == (400, True)
            status, _, answer = await ask(server, INFER, b'{"inputs"', Content_Type="application/json")
            assert (status, "Inference-Header-Content-Length" in json.loads(answer)["error"]) == (400, False)

    async def test_a_bug_is_answered_500_and_logged(self, caplog):
        def broken(headers):
            raise ZeroDivisionError("secret")

        async with serving() as server:
            server.api.pages["/broken"] = type(server.api.pages["/metrics"])(broken)
            status, _, body = await ask(server, "/broken")
            assert status == 500
            assert b"secret" not in body
            assert "secret" in caplog.text


class TestTokens:
    async def test_every_request_needs_one_but_health(self):
        async with serving(tokens=("s3cret", "other")) as server:
            for path in ("/v2", "/metrics", "/v2/models/double", "/dashboard/data", "/nothing"):
                status, headers, _ = await ask(server, path)
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
            for path in ("/v2/health/live", "/v2/health/ready", "/"):
                assert (await ask(server, path))[0] == 200
            for given in (None, "Bearer", "Bearer wrong", "Bearer s3cret2", "Basic s3cret", "s3cret"):
                async with connected(server) as raw:
                    raw.send(infer(1) if given is None else infer(1, Authorization=given))
                    assert (await raw.answer())[0] == 401
                    assert await raw.ended() == b""
            async with connected(server) as raw:
                for given in ("Bearer s3cret", "bearer other"):
                    raw.send(infer(1, Authorization=given))
                    assert outputs(await raw.answer()) == [2]
            assert engine_of(server).statistics().submitted == 2

    async def test_a_token_in_a_trailer_is_none(self):
        async with serving(tokens=("s3cret",)) as server, connected(server) as raw:
            raw.send(
                b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            raw.send(b"2\r\n{}\r\n0\r\nAuthorization: Bearer s3cret\r\n\r\n")
            assert (await raw.answer())[0] == 401


class TestOrigins:
    """Browsers let any page send a POST to any server, and send its origin with it."""

    FOREIGN = "https://evil.example"
    REBOUND = "http://evil.example:8000"

    @pytest.mark.parametrize("path", [INFER, "/v2/repository/models/double/unload", "/v2/repository/index"])
    async def test_a_foreign_page_can_do_nothing(self, path):
        async with serving(model_control=True) as server:
            body = json_body(1) if path == INFER else b"{}"
            for origin in (self.FOREIGN, "null", ""):
                status, _, answer = await ask(server, path, body, Origin=origin, Content_Type="text/plain")
                assert (status, "--allow-origins" in json.loads(answer)["error"]) == (403, True)
                assert origin in json.loads(answer)["error"]
                assert server.api.foreign == f"origin {origin}"
            assert server.repository.is_ready
            assert engine_of(server).statistics().submitted == 0

    @pytest.mark.parametrize("tokens", [(), ("s3cret",)])
    async def test_the_own_origin_counts_only_if_no_other_name_can_lead_to_it(self, tokens):
        async with serving(tokens=tokens) as server:
            for host in (
                "127.0.0.1:8000",
                "[::1]:8000",
                "localhost",
                "evil.example:8000",
                "127.evil.example",
            ):
                async with connected(server) as raw:
                    whole = infer(1, Origin=f"http://{host}", Authorization="Bearer s3cret")
                    raw.send(whole.replace(b"Host: localhost", f"Host: {host}".encode()))
                    is_refused = not tokens and "evil" in host
                    assert (await raw.answer())[0] == (403 if is_refused else 200), host

    @pytest.mark.parametrize(
        "origin",
        ["ftp://localhost", "http://localhost/", "http://x@localhost", "//localhost", "http://localhost#"],
    )
    async def test_what_is_no_origin_of_a_page_is_not_the_own_one(self, origin):
        async with serving() as server:
            assert (await ask(server, INFER, json_body(1), Origin=origin))[0] == 403

    async def test_an_origin_that_is_allowed(self):
        async with serving(allow_origins=(self.FOREIGN,)) as server:
            assert (await ask(server, INFER, json_body(1), Origin=self.FOREIGN))[0] == 200
            assert (await ask(server, INFER, json_body(1), Origin=self.REBOUND))[0] == 403
        async with serving(allow_origins=("*",)) as server:
            assert (await ask(server, INFER, json_body(1), Origin=self.REBOUND))[0] == 200


class TestMemory:
    """It is given back by reference counts: the cycle collector counts objects, not their bytes."""

    @pytest.fixture(autouse=True)
    def held(self, monkeypatch):
        gc.disable()
        held = Held(monkeypatch)
        yield held
        held.stop()
        gc.enable()

    @pytest.mark.parametrize(
        ("path", "status"), [(INFER, 400), ("/nothing", 404), ("/v2/repository/index", 413)]
    )
    async def test_of_a_connection_that_was_answered(self, held, path, status):
        async with serving(max_json=1000) as server, connected(server) as raw:
            raw.send(request(path, bytes(16 * MIB), Inference_Header_Content_Length=2))
            assert (await raw.answer())[0] == status
            await until(lambda: held.nbytes() < 4 * MIB)
            assert len(server._hub.connections) == 1
