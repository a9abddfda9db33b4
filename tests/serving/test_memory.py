"""What a server holds for its clients has one limit: reading stops before it, and goes on after."""

import asyncio
import gc
import gzip
import itertools
import json
import random
import threading
from collections import Counter
from contextlib import AsyncExitStack

import grpc
import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as pb
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

import asynctrt
from asynctrt.errors import OptionsError
from asynctrt.kserve.json_codec import parsed_nbytes
from asynctrt.serving import api as api_module
from asynctrt.serving import memory as memory_module
from asynctrt.serving.asgi import kserve_app
from asynctrt.serving.coding import decompress
from asynctrt.serving.grpc_server import SERVICE
from asynctrt.serving.memory import UNCOUNTED_NBYTES, ClientPace, Hold, MemoryLimit
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.worker import ClientThreads
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model
from tests.scheduling.support import count_operations
from tests.serving.support import WAIT_S, connected, request, serving
from tests.serving.test_frames import opened

pytestmark = pytest.mark.anyio
CLOSE_S = 8
"""A client that sees nobody obey its close cuts the connection after 10 s."""


@pytest.mark.parametrize(
    ("total", "settings", "expected"),
    [
        (None, {}, 1 << 30),
        (64 << 30, {}, 1 << 30),
        (64 << 30, {"max_body": 1 << 30}, 4 << 30),
        (600 << 20, {}, 120 << 20),
        (600 << 20, {"fronts": 2}, 64 << 20),
        (2000 << 20, {"fronts": 2}, 200 << 20),
        (100 << 20, {}, 64 << 20),
    ],
)
def test_the_default_follows_the_memory_there_is(monkeypatch, total, settings, expected):
    monkeypatch.setattr(memory_module, "memory_nbytes", lambda: total)
    assert memory_module.default_limit(ServerSettings(**settings)) == expected


class Told:
    """Takes down what it is told."""

    def __init__(self):
        self.heard = []

    def __call__(self, *, is_granted):
        self.heard.append(is_granted)


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


class TestMemory:
    async def test_there_is_room_until_there_is_none(self):
        memory = MemoryLimit(100)
        one, other = Hold(memory.account("a")), Hold(memory.account("b"))
        told = Told()
        assert one.grow(100, told)
        assert not other.grow(1, told)
        assert (memory.nbytes, other.is_waiting, told.heard) == (100, True, [])
        one.set(99)
        await turns()
        assert (memory.nbytes, other.nbytes, told.heard) == (100, 1, [True])

    async def test_a_quarter_is_for_clients_that_hold_nothing(self):
        memory = MemoryLimit(100)
        greedy = memory.account("a")
        assert memory.account("a") is greedy
        kept = Hold(greedy, 50)
        more, fresh = Hold(greedy), Hold(memory.account("b"))
        assert not more.grow(26, Told())
        assert fresh.grow(50, told := Told()) or told.heard == []
        await turns()
        assert (fresh.nbytes, more.is_waiting, memory.nbytes) == (50, True, 100)
        kept.set(0)
        await turns()
        assert more.nbytes == 26

    async def test_one_alone_may_have_more(self):
        memory = MemoryLimit(10)
        assert Hold(memory.account(None)).grow(1000, Told())

    async def test_what_is_forgotten_is_given_back(self):
        memory = MemoryLimit(100)
        holds = [Hold(memory.account(None), 40) for _ in range(2)]
        waiting, gone = Hold(memory.account(None)), Hold(memory.account(None))
        told, unheard = Told(), Told()
        assert not gone.grow(50, unheard)
        assert not waiting.grow(60, told)
        del gone
        holds.pop()
        await turns()
        assert (told.heard, unheard.heard, memory.nbytes) == ([True], [], 100)

    async def test_a_large_one_is_not_passed_for_ever(self):
        memory = MemoryLimit(100)
        held = [Hold(memory.account(number), 10) for number in range(10)]
        large, small = Hold(memory.account("large")), Hold(memory.account("small"))
        order = []
        assert not large.grow(90, lambda *, is_granted: order.append("large"))
        assert not small.grow(10, lambda *, is_granted: order.append("small"))
        for _ in range(8):
            held.pop()
            await turns()
        assert order == []
        held.pop()
        await turns()
        assert order == ["large"]
        held.pop()
        await turns()
        assert order == ["large", "small"]

    async def test_clients_take_turns(self):
        memory = MemoryLimit(120)
        held = Hold(memory.account("x"), 120)
        order = []
        holds = [(name, Hold(memory.account(name))) for name in "aaab"]
        for name, hold in holds:
            assert not hold.grow(20, lambda *, is_granted, name=name: order.append(name))
        held.set(40)
        await turns()
        assert order == ["a", "b"], "a quarter is kept for others"
        held.set(0)
        await turns()
        assert order == ["a", "b", "a", "a"]

    async def test_a_look_is_short_however_many_wait(self):
        def work(count, *, names):
            memory = MemoryLimit(100)
            held = [Hold(memory.account("x"), 50), Hold(memory.account("a"), 25)]
            holds = [Hold(memory.account(number % names or "a")) for number in range(count)]
            for hold in holds:
                hold.grow(60, Told())
            return count_operations(lambda: [memory._look() for _ in held])

        for names in (1, 1000):
            assert work(1000, names=names) < 2 * work(10, names=names) + 100

    async def test_who_waits_for_too_long_is_refused(self, monkeypatch):
        monkeypatch.setattr(memory_module, "WAIT_NS", 20_000_000)
        monkeypatch.setattr(memory_module, "SHORT_NS", 0)
        memory = MemoryLimit(100)
        held = Hold(memory.account("a"), 100)
        told = Told()
        waiting = Hold(memory.account("b"))
        assert not waiting.grow(1, told)
        assert memory.is_short(memory_module.clock.now_ns() + 1)
        async with asyncio.timeout(WAIT_S):
            await until(lambda: told.heard)
            assert not await Hold(memory.account("c")).reserve(1)
        assert (told.heard, waiting.is_waiting, waiting.nbytes, held.nbytes) == ([False], False, 0, 100)
        held.set(0)
        await turns()
        assert told.heard == [False]
        assert not memory.is_short(memory_module.clock.now_ns())
        assert "holds 0 bytes" in memory.refuse()
        assert memory.is_short(memory_module.clock.now_ns())

    async def test_whoever_is_cancelled_while_he_waits_has_nothing(self):
        memory = MemoryLimit(100)
        held = Hold(memory.account("a"), 100)
        waiting = asyncio.create_task(Hold(memory.account("b")).reserve(50))
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting
        held.set(0)
        await turns()
        assert memory.nbytes == 0

    async def test_it_may_be_forgotten_in_any_thread(self):
        memory = MemoryLimit(100)
        holds = [Hold(memory.account(number), 1) for number in range(50)]
        thread = threading.Thread(target=holds.clear)
        thread.start()
        thread.join(WAIT_S)  # The loop stands still meanwhile.
        assert memory.nbytes == 50
        await turns()
        assert memory.nbytes == 0

    @pytest.mark.parametrize("seed", range(20))
    async def test_nobody_waits_while_there_is_room(self, seed):
        draw = random.Random(seed)
        memory = MemoryLimit(1000)
        holds = []
        for _ in range(300):
            match draw.randrange(5):
                case 0 | 1:
                    holds.append(Hold(memory.account(draw.choice("abcd"))))
                    holds[-1].grow(draw.randint(1, 600), Told())
                case 2 if holds:
                    hold = draw.choice(holds)
                    if not hold.is_waiting:
                        hold.grow(hold.nbytes + draw.randint(0, 200), Told())
                case 3 if holds:
                    draw.choice(holds).set(0)
                case 4 if holds:
                    holds.remove(draw.choice(holds))
            hold = None
            if draw.random() < 0.5:
                await turns(2)
                assert memory.nbytes == sum(one.nbytes for one in holds)
                self.check_first(memory)
        holds.clear()
        await turns()
        assert memory.nbytes == 0

    def check_first(self, memory):
        """Nobody holds up the first of those that hold nothing."""
        for account, queue in memory.waiting.items():
            first = next((one() for one in queue if one() is not None and one().is_waiting), None)
            if first is not None and not account.nbytes:
                assert not memory.has_room(account, first._wanted_nbytes)
                return


def test_a_pace_is_that_of_late():
    pace = ClientPace(10)
    assert not pace.is_low(13, 0, 1000, 100), "it has hardly begun"
    assert not pace.is_low(14, 40, 1000, 100)
    assert not pace.is_low(17, 40, 1000, 100)
    assert pace.is_low(18, 79, 1000, 100)
    assert not pace.is_low(22, 119, 1000, 100)


def test_a_limit_below_one_request_is_refused():
    with pytest.raises(OptionsError, match="max_memory is 5, less than one request may have: max_body is 6"):
        ServerSettings(max_memory=5, max_body=6)


COLUMNS = 128 << 10
ROW_NBYTES = 4 * COLUMNS


def head(rows=1):
    content = {
        "inputs": [
            {
                "name": "input",
                "shape": [rows, COLUMNS],
                "datatype": "FP32",
                "parameters": {"binary_data_size": rows * ROW_NBYTES},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    return json.dumps(content).encode()


def large(rows=1):
    """The head of a request, and its body."""
    start = head(rows)
    body = start + np.full((rows, COLUMNS), 3, np.float32).tobytes()
    whole = request("/v2/models/double/infer", body, Inference_Header_Content_Length=len(start))
    return whole[: -len(body)], body


def wide_serving(function=None, *, memory=4 * ROW_NBYTES, **settings):
    model = double_model(*([function] if function else []), dims=(COLUMNS,))
    limits = {"max_body": 2 * ROW_NBYTES, "max_memory": memory}
    return serving({"double": model}, engine={"max_rows": 4}, **(limits | settings))


def are_right(answer):
    status, headers, body = answer
    values = np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32)
    return status == 200 and values.size == COLUMNS and bool((values == 6).all())


async def some_of(server, raw, sent, nbytes=UNCOUNTED_NBYTES + 1000):
    """Send a request but for its end, and wait until memory is held for it; return the end."""
    held = server.api.memory.nbytes
    top, body = sent
    raw.send(top + body[:nbytes])
    await until(lambda: server.api.memory.nbytes > held or server.api.memory.waiting)
    return body[nbytes:]


@pytest.fixture(name="impatient")
def _impatient(often, monkeypatch):
    monkeypatch.setattr(memory_module, "SHORT_NS", 0)
    monkeypatch.setattr(memory_module, "PACE_TICKS", 1)


class TestServer:
    @pytest.mark.parametrize("is_chunked", [False, True])
    async def test_bodies_wait_for_memory_and_are_answered(self, is_chunked):
        async with wide_serving() as server, connected(server) as first, connected(server) as second:
            memory = server.api.memory
            others = Hold(memory.account("others"), 2 * ROW_NBYTES)
            left = await some_of(server, first, large())
            top, body = large()
            if is_chunked:
                top = top.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
                body = b"".join(
                    b"%x\r\n%b\r\n" % (len(piece), piece)
                    for piece in [body[start : start + 70_000] for start in range(0, len(body), 70_000)]
                )
                body += b"0\r\n\r\n"
            second.send(top + body)
            await until(lambda: memory.waiting)
            (paused,) = [one for one in server._hub.connections if one._is_short]
            assert not paused._is_reading
            assert repr(memory).endswith("waiting=1>")
            first.send(left)
            assert are_right(await first.answer())
            del others
            assert are_right(await second.answer())
            await until(lambda: not memory.nbytes)
            assert paused._is_reading
            assert not memory.refused

    async def test_who_stands_still_makes_room(self, impatient):
        async with wide_serving() as server, connected(server) as still, connected(server) as other:
            memory = server.api.memory
            others = Hold(memory.account("others"), 2 * ROW_NBYTES)
            await some_of(server, still, large())
            other.send(b"".join(large()))
            await until(lambda: memory.waiting)
            status, _, body = await still.answer()
            assert (status, b"its memory is needed" in body) == (408, True)
            assert are_right(await other.answer())
            del others

    async def test_who_waits_in_vain_is_told(self, monkeypatch):
        monkeypatch.setattr(memory_module, "WAIT_NS", 10_000_000)
        async with wide_serving() as server, connected(server) as raw:
            memory = server.api.memory
            others = Hold(memory.account("others"), 4 * ROW_NBYTES)
            raw.send(b"".join(large()))
            status, _, body = await raw.answer()
            assert (status, b"of at most 2097152" in body, memory.refused) == (503, True, 1)
            assert await raw.ended() == b""
            del others
            async with connected(server) as again:
                again.send(b"".join(large()))
                assert are_right(await again.answer())

    async def test_a_body_whose_end_was_read_with_its_beginning_is_answered(self):
        """The trap: memory is asked for when there is nothing left to read, and what waits is forgotten."""
        async with wide_serving() as server, connected(server) as raw:
            memory = server.api.memory
            await until(lambda: server._hub.connections)
            (connection,) = server._hub.connections
            others = Hold(memory.account("others"), 4 * ROW_NBYTES - 100)
            top, body = large()
            chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            top = top.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
            connection.data_received(top + chunked)
            await until(lambda: memory.waiting)
            del others
            assert are_right(await raw.answer())
            raw.send(b"".join(large()))
            assert are_right(await raw.answer())
            await until(lambda: not memory.nbytes)

    async def test_a_message_whose_end_was_read_with_its_beginning_is_answered(self):
        columns = (UNCOUNTED_NBYTES + 1024) // 4
        content = json.loads(head())
        content["inputs"][0] |= {"shape": [1, columns], "parameters": {"binary_data_size": 4 * columns}}
        start = json.dumps({"model_name": "double", **content}).encode()
        message = len(start).to_bytes(4, "little") + start + np.ones(columns, np.float32).tobytes()
        parts = [message[:120_000], message[120_000:240_000], message[240_000:]]
        frames = [
            Frame(Opcode.CONT if number else Opcode.BINARY, part, fin=number == 2).serialize(mask=True)
            for number, part in enumerate(parts)
        ]
        model = double_model(dims=(columns,))
        limits = {"max_body": 2 * ROW_NBYTES, "max_memory": 4 * ROW_NBYTES}
        async with serving({"double": model}, **limits) as server, opened(server) as socket:
            memory = server.api.memory
            (connection,) = server._hub.connections
            others = Hold(memory.account("others"), 4 * ROW_NBYTES)
            connection.data_received(b"".join(frames))
            async with asyncio.timeout(WAIT_S):
                assert (await socket.recv()).endswith(np.full(columns, 2, np.float32).tobytes())
                await until(lambda: connection._is_reading)
                del others
                await socket.send(message)
                assert (await socket.recv()).endswith(np.full(columns, 2, np.float32).tobytes())
            await until(lambda: not memory.nbytes)

    async def test_messages_wait_for_memory_and_are_answered(self):
        async with wide_serving() as server, opened(server) as socket, connected(server) as first:
            memory = server.api.memory
            others = Hold(memory.account("others"), 2 * ROW_NBYTES)
            left = await some_of(server, first, large())
            content = json.dumps({"model_name": "double", **json.loads(head())}).encode()
            whole = len(content).to_bytes(4, "little") + content + np.ones(COLUMNS, np.float32).tobytes()
            sending = asyncio.create_task(socket.send(whole))
            await until(lambda: memory.waiting)
            (paused,) = [one for one in server._hub.connections if one._is_short]
            assert not paused._is_reading
            del others
            async with asyncio.timeout(WAIT_S):
                await sending
                assert (await socket.recv()).endswith(np.full(COLUMNS, 2, np.float32).tobytes())
                await socket.send([whole[:10_000], whole[10_000:400_000], whole[400_000:]])
                assert (await socket.recv()).endswith(np.full(COLUMNS, 2, np.float32).tobytes())
            first.send(left)
            assert are_right(await first.answer())
            await until(lambda: not memory.nbytes)

    async def test_a_websocket_that_stands_still_makes_room(self, impatient):
        async with wide_serving() as server, opened(server) as still, connected(server) as other:
            memory = server.api.memory
            others = Hold(memory.account("others"), 2 * ROW_NBYTES)
            # A frame that announces a row, and a part of it.
            still.transport.write(bytes((0x82, 0xFF)) + ROW_NBYTES.to_bytes(8, "big") + bytes(4 + 300_000))
            await until(lambda: memory.nbytes > 2 * ROW_NBYTES)
            other.send(b"".join(large()))
            async with asyncio.timeout(WAIT_S):
                await still.wait_closed()
            assert "its memory is needed" in still.close_reason
            assert are_right(await other.answer())
            del others

    async def test_a_message_that_waits_in_vain_is_refused(self, monkeypatch):
        monkeypatch.setattr(memory_module, "WAIT_NS", 10_000_000)
        async with wide_serving() as server, opened(server) as socket:
            others = Hold(server.api.memory.account("others"), 4 * ROW_NBYTES)
            socket.transport.write(bytes((0x82, 0xFF)) + ROW_NBYTES.to_bytes(8, "big") + bytes(4 + 300_000))
            async with asyncio.timeout(WAIT_S):
                await socket.wait_closed()
            assert socket.close_code == 1013
            del others

    async def test_a_websocket_that_waits_while_the_server_stops_is_closed_in_order(self):
        async with wide_serving() as server, opened(server) as socket:
            others = Hold(server.api.memory.account("others"), 4 * ROW_NBYTES)
            # The first fragment of a message, after which the client may send that it closes.
            socket.transport.write(bytes((0x02, 0xFF)) + (300_000).to_bytes(8, "big") + bytes(4 + 300_000))
            await until(lambda: server.api.memory.waiting)
            (paused,) = server._hub.connections
            await until(lambda: not paused._is_reading)
            paused.drain()
            async with asyncio.timeout(CLOSE_S):
                await until(lambda: paused._is_reading)
                await socket.wait_closed()
            assert socket.close_code == 1001
            await until(lambda: not server._hub.connections)
            del others

    async def test_answers_that_nobody_reads_are_counted_and_make_room(self, impatient):
        limits = {"memory": 40 * ROW_NBYTES, "max_body": 20 * ROW_NBYTES}
        async with wide_serving(**limits) as server, connected(server) as idle, connected(server) as other:
            memory = server.api.memory
            idle.writer.transport.pause_reading()
            idle.send(b"".join(large(16)))
            await until(lambda: any(one._writing._hold is not None for one in server._hub.connections))
            (writing,) = [one for one in server._hub.connections if one._writing._hold is not None]
            assert 0 < writing._writing._hold.nbytes == memory.nbytes < 17 * ROW_NBYTES
            others = Hold(memory.account("others"), memory.nbytes_max)
            other.send(b"".join(large()))
            await until(lambda: writing not in server._hub.connections)
            del others
            assert are_right(await other.answer())
            await until(lambda: not memory.nbytes)

    async def test_requests_are_refused_beyond_it(self):
        """Small ones, which nobody was asked to hold back; those that are in progress are answered."""
        gate = threading.Event()
        rows, columns = 4, 4 << 10

        def doubled(inputs, outputs):
            assert gate.wait(WAIT_S)
            np.multiply(inputs["input"], 2, out=outputs["output"])

        limits = {"max_body": 200_000, "max_memory": 400_000}
        model = double_model(doubled, dims=(columns,))
        async with serving({"double": model}, **limits) as server, AsyncExitStack() as stack:
            raws = [await stack.enter_async_context(connected(server)) for _ in range(3)]
            start = json.dumps(
                {
                    "inputs": [{"name": "input", "shape": [rows, columns], "datatype": "FP32"}],
                    "parameters": {"binary_data_output": True},
                }
            )
            start = start.replace('"FP32"', f'"FP32", "parameters": {{"binary_data_size": {16 * columns}}}')
            body = start.encode() + np.full((rows, columns), 3, np.float32).tobytes()
            asked = request("/v2/models/double/infer", body, Inference_Header_Content_Length=len(start))
            for raw in raws[:2]:
                raw.send(asked)
            await until(lambda: server.api.memory.nbytes == 2 * (32 * columns + len(start)))
            raws[2].send(asked)
            status, headers, _ = await raws[2].answer()
            assert (status, headers["asynctrt-error"]) == (503, "QueueFullError")
            gate.set()
            assert [(await raw.answer())[0] for raw in raws[:2]] == [200, 200]
            raws[2].send(asked)
            assert (await raws[2].answer())[0] == 200
            await until(lambda: not server.api.memory.nbytes)

    @pytest.mark.parametrize("protocol", ["http", "websocket", "grpc"])
    async def test_a_message_is_counted_while_one_of_its_tensors_is_in_use(self, protocol):
        """However little of it the tensor is: a view keeps the whole message in memory."""
        device, nbytes = LatchDevice(), 100_000
        start = b"{" + b" " * nbytes + head()[1:]
        tensor = np.full(COLUMNS, 3, np.float32).tobytes()
        async with (
            serving(
                {"double": double_model(dims=(COLUMNS,))}, engine={"device": device}, grpc=True
            ) as server,
            connected(server) as raw,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
            opened(server, "/v2/models/double/ws") as websocket,
        ):
            if protocol == "http":
                length = {"Inference_Header_Content_Length": len(start)}
                raw.send(request("/v2/models/double/infer", start + tensor, **length))
            elif protocol == "websocket":
                await websocket.send(len(start).to_bytes(4, "little") + start + tensor)
            else:
                call = pb.ModelInferRequest(model_name="double", raw_input_contents=[tensor])
                call.inputs.add(name="input", datatype="FP32", shape=[1, COLUMNS])
                call.parameters["padding"].string_param = " " * nbytes
                infer = channel.unary_unary(f"/{SERVICE}/ModelInfer", response_deserializer=bytes)
                asked = infer(call.SerializeToString(), timeout=WAIT_S)
            await until(lambda: device.held == 1)
            counted_nbytes = server.api.memory.nbytes
            device.open()
            assert counted_nbytes >= 2 * ROW_NBYTES + nbytes
            await until(lambda: not server.api.memory.nbytes)
            if protocol == "grpc":
                await asked

    async def test_compressed_bodies_wait_for_what_they_become(self, monkeypatch):
        monkeypatch.setattr(memory_module, "WAIT_NS", 10_000_000)
        async with wide_serving() as server, connected(server) as raw:
            others = Hold(server.api.memory.account("others"), 4 * ROW_NBYTES)
            start = head()
            packed = gzip.compress(start + np.full(COLUMNS, 3, np.float32).tobytes())
            headers = {"Content_Encoding": "gzip", "Inference_Header_Content_Length": len(start)}
            asked = request("/v2/models/double/infer", packed, **headers)
            raw.send(asked)
            assert (await raw.answer())[0] == 503
            del others
            raw.send(asked)
            assert are_right(await raw.answer())
            await until(lambda: not server.api.memory.nbytes)

    async def test_what_a_thread_inflates_for_a_client_that_has_gone_is_counted(self, monkeypatch):
        begun, latch = threading.Event(), threading.Event()

        def slow(*args):
            begun.set()
            latch.wait(WAIT_S)
            return decompress(*args)

        monkeypatch.setattr(api_module, "decompress", slow)
        async with wide_serving() as server:
            memory = server.api.memory
            packed = gzip.compress(random.Random(1).randbytes(64 << 10))
            async with connected(server) as raw:
                raw.send(request("/v2/models/double/infer", packed, Content_Encoding="gzip"))
                await until(begun.is_set)
            try:
                await until(lambda: not server._hub.connections)
                await turns(10)
                assert memory.nbytes == 2 * ROW_NBYTES
            finally:
                latch.set()
            await until(lambda: not memory.nbytes)

    async def test_threads_have_the_memory_of_what_they_decode_by_every_protocol(self, monkeypatch):
        counts, run = [], ClientThreads.run

        async def noted(worker, work, client, hold=None, nbytes=0):
            counts.append((0 if hold is None else hold.nbytes, nbytes))
            return await run(worker, work, client, hold, nbytes)

        monkeypatch.setattr(ClientThreads, "run", noted)
        columns = 100_000
        model = double_model(dims=(columns,))
        tensor = {"name": "input", "shape": [1, columns], "datatype": "FP32", "data": [1.25] * columns}
        text = json.dumps({"inputs": [tensor]}).encode()
        call = pb.ModelInferRequest(model_name="double")
        call.inputs.add(name="input", datatype="FP32", shape=[1, columns]).contents.fp32_contents.extend(
            [1.25] * columns
        )
        path = "/v2/models/double/infer"
        async with (
            serving({"double": model}, grpc=True) as server,
            connected(server) as raw,
            opened(server, "/v2/models/double/ws") as socket,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer", response_deserializer=bytes)
            for ask in ("HTTP", "compressed", "websocket", "gRPC"):
                counts.clear()
                if ask == "gRPC":
                    await infer(call.SerializeToString(), timeout=WAIT_S)
                elif ask == "websocket":
                    await socket.send(text.decode())
                    async with asyncio.timeout(WAIT_S):
                        assert "outputs" in await socket.recv()
                else:
                    packed = ask == "compressed"
                    headers = {"Content_Encoding": "gzip"} if packed else {}
                    raw.send(request(path, gzip.compress(text) if packed else text, **headers))
                    assert (await raw.answer())[0] == 200
                assert counts[0][0] >= 4 * columns, ask
                parsed = 0 if ask == "gRPC" else parsed_nbytes(len(text))
                assert max(nbytes for _, nbytes in counts) == parsed, ask
            await until(lambda: not server.api.memory.nbytes)

    async def test_what_a_thread_decodes_for_a_client_that_has_gone_is_counted(self):
        begun, latch = threading.Event(), threading.Event()
        worker, memory = ClientThreads(), MemoryLimit(100)

        def work():
            begun.set()
            latch.wait(WAIT_S)

        try:
            first, second = [
                asyncio.create_task(worker.run(work, name, Hold(memory.account(name), 40))) for name in "ab"
            ]
            await until(begun.is_set)
            first.cancel()
            second.cancel()
            await asyncio.wait([first, second])
            del first, second
            await turns()
            assert memory.nbytes == 80
        finally:
            latch.set()
        await until(lambda: not memory.nbytes)
        worker.close()

    async def test_the_memory_of_what_a_thread_cannot_decode_is_free_at_once(self):
        """Without waiting for the garbage collector."""
        text = json.dumps({"inputs": [{"data": [1] * 50_000}]}).encode()
        async with serving() as server, connected(server) as raw:
            gc.disable()
            try:
                for packed in ({}, {"Content_Encoding": "gzip"}):
                    body = text if not packed else gzip.compress(text)
                    raw.send(request("/v2/models/double/infer", body, **packed))
                    assert (await raw.answer())[0] == 400
                    await until(lambda: not server.api.memory.nbytes)
            finally:
                gc.enable()

    async def test_an_answer_over_grpc_is_counted_until_it_is_sent(self):
        async with (
            wide_serving(grpc=True) as server,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            call = pb.ModelInferRequest(
                model_name="double", raw_input_contents=[np.full(COLUMNS, 3, np.float32).tobytes()]
            )
            call.inputs.add(name="input", datatype="FP32", shape=[1, COLUMNS])
            memory, counts = server.api.memory, []
            added = Hold.set
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer", response_deserializer=bytes)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Hold, "set", lambda hold, nbytes: [counts.append(nbytes), added(hold, nbytes)])
                answer = await infer(call.SerializeToString(), timeout=WAIT_S)
            assert len(answer) > ROW_NBYTES
            assert len(answer) in counts
            await until(lambda: not memory.nbytes)

    async def test_an_application_reads_no_more_than_there_is_memory_for(self):
        top, body = large()
        assert top
        events = [{"type": "http.request", "body": body[:UNCOUNTED_NBYTES], "more_body": True}]
        events += [{"type": "http.request", "body": body[UNCOUNTED_NBYTES:][:1000], "more_body": True}]
        events += [{"type": "http.request", "body": body[UNCOUNTED_NBYTES + 1000 :]}]
        answered, events_read = [], []

        async def take():
            if not events:
                await asyncio.Event().wait()
            events_read.append(True)
            return events.pop(0)

        async def send(event):
            answered.append(event)

        settings = ServerSettings(max_body=2 * ROW_NBYTES, max_memory=4 * ROW_NBYTES)
        async with asynctrt.open(double_model(dims=(COLUMNS,))) as engine:
            app = kserve_app(engine, name="double", settings=settings)
            memory = app.api().memory
            others = Hold(memory.account("others"), 4 * ROW_NBYTES)
            async with asyncio.timeout(WAIT_S):
                serving_it = asyncio.create_task(app(scope_of(), take, send))
                await until(lambda: memory.waiting)
                assert len(events_read) == 2
                del others
                await serving_it
            assert answered[0]["status"] == 200
            assert answered[1]["body"].endswith(np.full(COLUMNS, 6, np.float32).tobytes())
            await until(lambda: not memory.nbytes)

    @pytest.mark.parametrize("packed", [False, True])
    async def test_a_body_in_an_application_is_counted_once_while_it_runs(self, packed):
        """Its inputs are views of it. A compressed one is kept beside them."""
        _, body = large()
        device, answered = LatchDevice(), []
        sent = gzip.compress(body) if packed else body

        async def take():
            if answered:
                await asyncio.Event().wait()
            answered.append({"type": "http.request", "body": sent})
            return answered[0]

        async def send(event):
            answered.append(event)

        settings = ServerSettings(max_body=2 * ROW_NBYTES, max_memory=16 * ROW_NBYTES)
        async with asynctrt.open(double_model(dims=(COLUMNS,)), device=device) as engine:
            app = kserve_app(engine, name="double", settings=settings)
            memory = app.api().memory
            scope = scope_of(**({"content_encoding": "gzip"} if packed else {}))
            async with asyncio.timeout(WAIT_S):
                serving_it = asyncio.create_task(app(scope, take, send))
                await until(lambda: device.held == 1)
                row, answer = ROW_NBYTES, ROW_NBYTES
                assert row + answer <= memory.nbytes <= row + answer + UNCOUNTED_NBYTES
                device.open()
                await serving_it
            assert answered[1]["status"] == 200
            del serving_it
            await until(lambda: not memory.nbytes)


def scope_of(**headers):
    """Return the scope of a request to infer, as an application gets it."""
    given = {"host": "localhost", "inference_header_content_length": str(len(head()))} | headers
    return {
        "type": "http",
        "method": "POST",
        "path": "/v2/models/double/infer",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
    }


class Client:
    """One who sends requests of some rows in any of the ways there are, and may go away at any point."""

    def __init__(self, server, seed):
        self.server = server
        self.draw = random.Random(seed)
        self.ends = Counter()

    async def run(self, count):
        for _ in range(count):
            kind = self.draw.choice(["length", "chunked", "gzip", "frame", "fragments"])
            rows = self.draw.choice([1, 1, 1, 2, 3])
            over = self.over_websocket if kind.startswith("f") else self.over_http
            try:
                self.ends[await over(kind, rows)] += 1
            except (OSError, asyncio.IncompleteReadError, ConnectionClosed):
                self.ends["cut"] += 1

    def check(self, values, rows):
        assert values.size == rows * COLUMNS
        assert (values == 6).all()
        return "answered"

    async def over_http(self, kind, rows):
        top, body = large(rows)
        if kind == "gzip":
            packed = gzip.compress(body, 1)
            top = top.replace(b"Content-Length: %d" % len(body), b"Content-Length: %d" % len(packed))
            top = top.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
            body = packed
        elif kind == "chunked":
            top = top.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        async with connected(self.server) as raw:
            for part in self.cut(top + body):
                raw.send(part)
                await raw.writer.drain()
                if self.draw.random() < 0.03:
                    return "gone"
            if self.draw.random() < 0.1:
                return "gone"
            status, headers, answer = await raw.answer()
            if status != 200:
                return status
            return self.check(
                np.frombuffer(answer[int(headers["inference-header-content-length"]) :], np.float32), rows
            )

    async def over_websocket(self, kind, rows):
        start, body = head(rows), large(rows)[1]
        start = json.dumps({"model_name": "double", **json.loads(start)}).encode()
        message = len(start).to_bytes(4, "little") + start + body[len(head(rows)) :]
        async with opened(self.server, max_size=None, close_timeout=0.1) as socket:
            if self.draw.random() < 0.1:
                first = bytes((0x82, 0xFF)) + len(message).to_bytes(8, "big") + bytes(4)
                socket.transport.write(first + message[: self.draw.randrange(len(message))])
                await asyncio.sleep(0)
                socket.transport.abort()
                return "gone"
            await socket.send(list(self.cut(message)) if kind == "fragments" else message)
            answer = await socket.recv()
            size = int.from_bytes(answer[:4], "little")
            content = json.loads(answer[4 : 4 + size])
            if "error" in content:
                return content["status"]
            return self.check(np.frombuffer(answer[4 + size :], np.float32), rows)

    def cut(self, raw):
        count = self.draw.choice([1, 3, 10])
        places = sorted({0, len(raw), *(self.draw.randrange(len(raw)) for _ in range(count))})
        return [raw[start:stop] for start, stop in itertools.pairwise(places)]


@pytest.mark.tier2
@pytest.mark.timeout(120)
async def test_a_storm_leaves_nothing_and_gets_right_answers(monkeypatch, caplog):
    """Many more bytes than there is memory for, from clients of all kinds, of which some go away."""
    monkeypatch.setattr(memory_module, "WAIT_NS", 1_000_000_000)
    limits = {"memory": 8 * ROW_NBYTES, "max_body": 4 * ROW_NBYTES}
    async with wide_serving(**limits) as server:
        memory, most = server.api.memory, 0
        clients = [Client(server, seed) for seed in range(24)]
        running = asyncio.gather(*[client.run(6) for client in clients])
        while not running.done():
            most = max(most, memory.nbytes)
            await asyncio.sleep(0)
        await running
        await until(lambda: not server._hub.connections)
        await until(lambda: not memory.nbytes)
        await until(lambda: not memory.waiting)
        ends = sum([client.ends for client in clients], Counter())
        assert ends["answered"] > 50, ends
        assert set(ends) <= {"answered", "gone", "cut", 503}, ends
        # A request that was waited for is answered, whatever its answer takes.
        assert ROW_NBYTES < most < 2 * memory.nbytes_max
    assert not [entry for entry in caplog.records if entry.levelname in ("ERROR", "CRITICAL")]
