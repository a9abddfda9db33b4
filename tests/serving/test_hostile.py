"""What foreign clients, browsers' pages and slow readers may not do to a server."""

import asyncio
import gzip
import json
import threading
from base64 import urlsafe_b64encode
from types import SimpleNamespace

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from asynctrt.errors import TooLargeError
from asynctrt.kserve.json_codec import JSON_LISTS_MAX, JSON_VALUES_MAX, parse_object
from asynctrt.serving import api as api_module
from asynctrt.serving import http
from asynctrt.serving.frames import SocketConnection
from asynctrt.serving.http import Writing
from tests.helpers import until
from tests.serving.support import WAIT_S, ask, connected, handshake, request, serving
from tests.serving.test_frames import opened
from tests.serving.test_http import INFER, infer, json_body, outputs
from tests.serving.test_websocket import binary

pytestmark = pytest.mark.anyio
PAGE = "https://page.example"
UNLOAD = "/v2/repository/models/double/unload"


class TestHosts:
    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8000", "127.evil.example", "localhost.evil"]
    )
    async def test_a_rebound_name_can_do_nothing(self, host):
        async with serving() as server:
            for path, body in (("/v2", b""), ("/metrics", b""), ("/", b""), (INFER, json_body(1))):
                async with connected(server) as raw:
                    raw.send(request(path, body).replace(b"Host: localhost", b"Host: " + host.encode()))
                    status, _, answer = await raw.answer()
                    assert (status, "--allow-hosts" in json.loads(answer)["error"]) == (403, True)
            with pytest.raises(InvalidStatus):
                await opened(server, additional_headers={"Host": host})

    @pytest.mark.parametrize("host", ["127.0.0.1:8000", "[::1]", "localhost:1", "10.1.2.3", "a.localhost"])
    async def test_addresses_and_this_machine(self, host):
        async with serving() as server, connected(server) as raw:
            raw.send(infer(1).replace(b"Host: localhost", b"Host: " + host.encode()))
            assert outputs(await raw.answer()) == [2]

    async def test_names_that_are_allowed(self):
        named = infer(1).replace(b"Host: localhost", b"Host: Models.example:8000")
        for settings in ({"allow_hosts": ("models.example",)}, {"allow_hosts": ("*",)}, {"tokens": ("s",)}):
            async with serving(**settings) as server, connected(server) as raw:
                raw.send(named.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer s\r\n\r\n", 1))
                assert outputs(await raw.answer()) == [2]

    async def test_any_name_for_health(self):
        async with serving() as server, connected(server) as raw:
            raw.send(request("/v2/health/ready").replace(b"Host: localhost", b"Host: probe"))
            assert (await raw.answer())[0] == 200


class TestPages:
    async def test_a_form_of_another_site_changes_nothing(self):
        async with serving(model_control=True) as server:
            assert (await ask(server, UNLOAD, b"{}", Sec_Fetch_Site="cross-site"))[0] == 403
            assert (await ask(server, "/v2/models/double/ready"))[0] == 200
            assert (await ask(server, UNLOAD, b"{}", Sec_Fetch_Site="same-origin"))[0] == 200

    async def test_a_preflight_needs_no_token_and_an_allowed_origin(self):
        asked = {"Access_Control_Request_Method": "POST", "method": "OPTIONS"}
        async with serving(tokens=("s3cret",), allow_origins=(PAGE,)) as server:
            status, headers, _ = await ask(server, INFER, Origin=PAGE, **asked)
            assert (status, headers["access-control-allow-origin"], headers["vary"]) == (204, PAGE, "Origin")
            assert "content-length" not in headers
            assert "POST" in headers["access-control-allow-methods"]
            allowed = headers["access-control-allow-headers"].split(", ")
            assert {"Authorization", "X-Request-ID"} <= set(allowed)
            for kw in (
                {"Origin": "https://evil.example", **asked},
                asked,
                {"method": "OPTIONS", "Origin": PAGE},
            ):
                status, headers, _ = await ask(server, INFER, **kw)
                refusal = 403 if "evil" in kw.get("Origin", "") else 401
                assert (status, "access-control-allow-methods" in headers) == (refusal, False)

    async def test_answers_to_pages_of_allowed_origins(self):
        async with serving(allow_origins=(PAGE,)) as server:
            for path, body, status in (
                (INFER, json_body(1), 200),
                (INFER, b"{", 400),
                ("/v2", b"", 200),
                ("/nothing", b"", 404),
            ):
                given, headers, _ = await ask(server, path, body, Origin=PAGE)
                assert (given, headers["access-control-allow-origin"]) == (status, PAGE)
            async with connected(server) as raw:
                raw.send(infer(1, Origin=PAGE))
                answer = await raw.answer()
                assert outputs(answer) == [2]
                exposed = answer[1]["access-control-expose-headers"].split(", ")
                assert exposed == ["Inference-Header-Content-Length", "X-Request-ID"]
            _, headers, _ = await ask(server, INFER, json_body(1))
            assert "access-control-allow-origin" not in headers


class TestTokensOfBrowsers:
    async def test_any_token_fits_a_subprotocol(self):
        async with serving(tokens=("a/b+c==",)) as server:
            coded = urlsafe_b64encode(b"a/b+c==").decode().rstrip("=")
            async with opened(server, subprotocols=["asynctrt", f"bearer64.{coded}"]) as socket:
                assert socket.subprotocol == "asynctrt"
            for wrong in ("bearer64.", "bearer64.x", "bearer64.eA"):
                with pytest.raises(InvalidStatus):
                    await opened(server, subprotocols=["asynctrt", wrong])


class TestSlowClients:
    def writing(self, monkeypatch, *, unsent=0):
        monkeypatch.setattr(http, "unsent_nbytes", lambda transport: state.unsent)
        state = SimpleNamespace(left=1000, unsent=unsent, get_write_buffer_size=lambda: state.left)
        return (
            state,
            SimpleNamespace(write_ticks=4, write_nbytes_min=100, is_short_of_memory=False),
            Writing(),
        )

    async def test_a_client_that_reads_slowly_but_steadily_is_served(self, monkeypatch):
        state, hub, writing = self.writing(monkeypatch)
        writing.pause(0)
        for tick in range(1, 60):
            state.left -= 30
            assert not writing.is_stalled(tick, hub, state, 0)

    async def test_one_that_trickles_is_not(self, monkeypatch):
        state, hub, writing = self.writing(monkeypatch)
        writing.pause(0)
        stalled = []
        for tick in range(1, 8):
            state.left -= 10
            stalled.append(writing.is_stalled(tick, hub, state, 0))
        assert stalled.index(True) == 4, "after write_timeout"

    async def test_what_the_kernel_still_holds_is_not_taken(self, monkeypatch):
        state, hub, writing = self.writing(monkeypatch)
        writing.pause(0)
        for tick in range(1, 5):
            assert not writing.is_stalled(tick, hub, state, 0)
        state.left, state.unsent = 0, 1000
        assert writing.is_stalled(5, hub, state, 0)
        state.left, state.unsent = 1000, 0
        assert not writing.is_stalled(5, hub, state, 200), "more was written meanwhile, and taken"

    async def test_the_kernel_says_what_it_holds(self):
        async with serving() as server, connected(server) as raw:
            raw.send(infer(1))
            await raw.answer()
            (connection,) = server._hub.connections
            await until(lambda: http.unsent_nbytes(connection._transport) == 0)
            assert http.unsent_nbytes(SimpleNamespace(get_extra_info=lambda name: None)) == 0

    @pytest.mark.parametrize("frame", [b"\x82\xfe\x10\x00mask", b"\x02\x81mask1"])
    async def test_a_websocket_message_without_end(self, often, frame):
        """The first is a piece of a frame, the second a whole frame of a message that does not go on."""
        async with serving(request_timeout=0.05) as server, opened(server) as socket:
            socket.transport.write(frame)
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(ConnectionClosed) as caught:
                    await socket.recv()
            assert caught.value.rcvd.code == 1008

    @pytest.mark.tier2
    async def test_nothing_of_it_is_kept_while_the_client_does_not_close(self):
        async with (
            asyncio.timeout(WAIT_S),
            serving(request_timeout=0.25) as server,
            connected(server) as raw,
        ):
            raw.send(handshake())
            await until(lambda: any(isinstance(one, SocketConnection) for one in server._hub.connections))
            (connection,) = server._hub.connections
            raw.send(b"\x82\xff" + (8 << 20).to_bytes(8, "big") + b"mask" + bytes(6 << 20))
            await until(lambda: connection._assembly is not None and connection._assembly.has_room(2 << 20))
            await until(lambda: connection._closed_at is not None)
            assert not connection._transport.is_closing()
            assert connection._assembly is None
            assert not connection._frames
            assert not connection._unparsed

    async def test_messages_that_come_whole_are_not_cut(self, often):
        async with serving(request_timeout=0.05) as server, opened(server) as socket:
            (connection,) = [one for one in server._hub.connections if hasattr(one, "_began")]
            tick = server._hub.tick
            while server._hub.tick < tick + 4:
                await socket.send(binary(1))
                await socket.recv()
                assert connection._began is None


class TestTheLoopIsNotHeld:
    async def test_a_small_body_that_becomes_large_is_decompressed_in_a_thread(self, monkeypatch):
        threads = []
        decompress = api_module.decompress

        def watched(body, nbytes_max):
            threads.append((threading.current_thread() is threading.main_thread(), nbytes_max))
            return decompress(body, nbytes_max)

        monkeypatch.setattr(api_module, "decompress", watched)
        async with serving() as server:
            coding = {"Content_Encoding": "gzip"}
            assert (await ask(server, INFER, gzip.compress(json_body(1)), **coding))[0] == 200
            assert threads == [(True, api_module.OFF_LOOP_NBYTES_MIN)]
            threads.clear()
            bomb = gzip.compress(bytes(8 << 20))
            assert len(bomb) < 10_000
            assert (await ask(server, INFER, bomb, **coding))[0] in (400, 413)
            assert threads == [(True, api_module.OFF_LOOP_NBYTES_MIN), (False, server.settings.max_body)]

    @pytest.mark.parametrize("item", [b"[]", b"{}", b"[0]"])
    async def test_json_of_many_lists(self, item):
        raw = b'{"a":[' + b",".join([item] * JSON_LISTS_MAX) + b"]}"
        with pytest.raises(TooLargeError, match="one flat list"):
            parse_object(raw, "the request")

    async def test_json_of_many_values(self):
        with pytest.raises(TooLargeError, match="send tensors as binary data"):
            parse_object(b'{"a":[' + b"0," * (JSON_VALUES_MAX + 1) + b"0]}", "the request")
        assert len(parse_object(b'{"a":[' + b"0," * 200_000 + b"0]}", "the request")["a"]) == 200_001


class TestWhatClientsAreTold:
    async def test_health_as_kserve_has_it(self):
        async with serving() as server:
            assert json.loads((await ask(server, "/v2/health/live"))[2]) == {"live": True}
            assert json.loads((await ask(server, "/v2/health/ready"))[2]) == {"ready": True}
            ready = json.loads((await ask(server, "/v2/models/double/ready"))[2])
            assert ready == {"name": "double", "ready": True}
            server.repository.is_draining = True
            status, _, body = await ask(server, "/v2/health/ready")
            assert (status, json.loads(body)) == (503, {"ready": False})

    async def test_the_port_of_metrics_serves_nothing_else(self):
        async with serving(metrics_port=0, tokens=("s3cret",)) as server:
            port = int(server.metrics_url.split(":")[2].split("/")[0])
            for path, status in (
                ("/metrics", 200),
                ("/v2", 404),
                ("/v2/health/ready", 404),
                ("/v2/health/live", 404),
                ("/v2/repository/index", 404),
                (INFER, 404),
                ("/", 404),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                body = b"{}" if path in (INFER, "/v2/repository/index") else b""
                writer.write(request(path, body))
                async with asyncio.timeout(WAIT_S):
                    assert int((await reader.readline()).split()[1]) == status, path
                writer.transport.abort()
