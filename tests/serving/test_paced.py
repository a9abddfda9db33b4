"""Large answers go out, and large requests come in, in pieces: others have their turn in between."""

import asyncio
import itertools
import zlib

import numpy as np
import pytest
from websockets.asyncio.client import connect

from asynctrt.backends.function import FunctionModel
from asynctrt.errors import RequestError, TooLargeError
from asynctrt.serving import paced
from asynctrt.serving.assembly import ASSEMBLED_NBYTES_MIN, Assembly
from asynctrt.serving.coding import DEFLATED_NBYTES, INFLATED_NBYTES, decompress
from asynctrt.serving.http import CLOSED_MAX, HttpConnection
from asynctrt.serving.http_reader import PIECES_NBYTES_MAX, RequestReader
from asynctrt.serving.paced import SLICE_NBYTES, PacedTransport
from asynctrt.serving.turns import LONE_TURN_NS
from asynctrt.tensors import TensorSpec
from tests.helpers import until
from tests.models import rows
from tests.serving.support import WAIT_S, address, serving
from tests.serving.test_listener import WIDE, check_large_answers, wide_model

pytestmark = pytest.mark.anyio
MIB = 1 << 20


class Wire:
    """A transport that notes what is written."""

    def __init__(self):
        self.written = []
        self.is_closed = False

    def write(self, data):
        self.written.append(bytes(data))

    def is_closing(self):
        return self.is_closed

    def close(self):
        self.is_closed = True

    def get_write_buffer_size(self):
        return 0

    def set_protocol(self, protocol):
        self.protocol = protocol

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.written.append("eof")


class Writer(asyncio.Protocol):
    """What the protocol of a connection is told."""

    def __init__(self):
        self.said = []

    def pause_writing(self):
        self.said.append("pause")

    def resume_writing(self):
        self.said.append("resume")

    def connection_lost(self, exc):
        self.said.append("lost")


@pytest.fixture
def ends():
    wire, protocol = Wire(), Writer()
    connection = PacedTransport(lambda: protocol)
    connection.connection_made(wire)
    return wire, protocol, connection


class TestPieces:
    async def test_one_is_sent_in_an_iteration_of_the_loop(self, ends):
        wire, protocol, connection = ends
        data = rows(*range(SLICE_NBYTES // 4)).tobytes()  # Four slices.
        connection.write(data)
        connection.write(b"behind")
        for count in range(1, 6):
            assert len(wire.written) == count
            assert connection.get_write_buffer_size() == len(data) + 6 - sum(map(len, wire.written))
            assert protocol.said == ["pause"] + ["resume"] * (count == 5)
            await asyncio.sleep(0)
        assert b"".join(wire.written) == data + b"behind"
        assert max(map(len, wire.written)) == SLICE_NBYTES

    async def test_little_is_written_at_once(self, ends):
        wire, protocol, connection = ends
        for data in (b"a", bytes(SLICE_NBYTES), b"c"):
            connection.write(data)
        assert wire.written == [b"a", bytes(SLICE_NBYTES), b"c"]
        assert not protocol.said

    async def test_who_reads_slowly_is_waited_for(self, ends):
        wire, protocol, connection = ends
        connection.write(bytes(3 * SLICE_NBYTES))
        connection.pause_writing()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(wire.written) == 1
        for _ in range(9):
            connection.resume_writing()
            connection.pause_writing()
        assert len(wire.written) == 2, "it has one turn in an iteration"
        await asyncio.sleep(0)
        assert len(wire.written) == 2
        assert protocol.said == ["pause"]
        connection.resume_writing()
        assert len(wire.written) == 3
        assert protocol.said == ["pause", "resume"]

    async def test_what_waits_is_sent_before_it_closes(self, ends):
        wire, _, connection = ends
        connection.write(bytes(2 * SLICE_NBYTES))
        connection.close()
        assert connection.is_closing()
        assert not wire.is_closed
        await asyncio.sleep(0)
        assert len(wire.written) == 2
        assert wire.is_closed

    async def test_nothing_is_kept_for_who_has_gone(self, ends):
        wire, protocol, connection = ends
        connection.write(bytes(2 * SLICE_NBYTES))
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert len(wire.written) == 1
        assert connection.get_write_buffer_size() == 0
        assert protocol.said == ["pause", "lost"]
        connection.data_received(b"late")

    async def test_its_end_comes_behind_what_waits(self, ends):
        wire, _, connection = ends
        connection.write(bytes(2 * SLICE_NBYTES))
        connection.write_eof()
        assert "eof" not in wire.written
        await asyncio.sleep(0)
        assert wire.written[1:] == [bytes(SLICE_NBYTES), "eof"]

    async def test_one_that_comes_between_does_not_say_twice_that_enough_is_written(self):
        wire, protocol = Wire(), Writer()
        connection = PacedTransport.between(wire, protocol, is_paused=True)
        assert wire.protocol is connection
        connection.write(bytes(2 * SLICE_NBYTES))
        assert not wire.written
        assert not protocol.said
        connection.resume_writing()
        await asyncio.sleep(0)
        assert len(wire.written) == 2
        assert protocol.said == ["resume"]


@pytest.fixture
def writes(monkeypatch):
    """The sizes of what was written in turns of its own."""
    found, send_next = [], PacedTransport._send_next

    def watched(self):
        before = self.get_write_buffer_size()
        send_next(self)
        found.append(before)

    monkeypatch.setattr(paced.PacedTransport, "_send_next", watched)
    return found


async def test_large_answers_are_whole_and_in_order(writes):
    async with serving({"double": wide_model()}) as server, asyncio.timeout(WAIT_S):
        await check_large_answers(*await asyncio.open_connection(*address(server)))
        assert len(writes) >= 4 * (4 * WIDE // SLICE_NBYTES)


class Reading(Wire):
    """A transport that notes when it is to read."""

    def pause_reading(self):
        self.written.append("pause")

    def resume_reading(self):
        self.written.append("resume")

    def abort(self):
        self.is_closed = True

    def get_extra_info(self, name, default=None):
        return default


async def test_no_more_of_a_request_is_read_than_its_clients_turn_allows(monkeypatch):
    """uvloop reads 32 times 250 KB in one turn if it is let, which takes 10 ms."""
    async with serving() as server:
        wire = Reading()
        connection = HttpConnection(server._hub)
        connection.connection_made(wire)
        connection.data_received(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n")
        assert not wire.written
        # It is a turn between any two looks at the clock.
        monkeypatch.setattr(server._hub, "now_ns", itertools.count(0, LONE_TURN_NS // 2).__next__)
        for _ in range(3):
            connection.data_received(bytes(SLICE_NBYTES))
            connection.data_received(b"and a little that was read already")
            assert wire.written == ["pause"]
            await until(lambda: wire.written == ["pause", "resume"])
            wire.written.clear()
        for _ in range(2):
            connection.data_received(bytes(SLICE_NBYTES))
        connection.abort()
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert wire.written == ["pause"], "nothing is read from who has gone"


async def test_clients_that_go_all_at_once_are_closed_a_few_at_a_time():
    async with serving() as server:
        hub, wires = server._hub, [Reading() for _ in range(2 * CLOSED_MAX + 1)]
        connections = [HttpConnection(hub) for _ in wires]
        for connection, wire in zip(connections, wires, strict=True):
            connection.connection_made(wire)
            assert connection.eof_received()
        for closed in (0, CLOSED_MAX, 2 * CLOSED_MAX, len(wires)):
            assert sum(wire.is_closed for wire in wires) == closed
            await asyncio.sleep(0)
        assert not hub._ended
        wires[0].get_extra_info = lambda name, default=None: "TLS"
        assert not hub.close_soon(wires[0]), "a TLS transport closes itself"
        for connection in connections:
            connection.connection_lost(None)


class Taken:
    """Notes the requests that a reader gives."""

    def __init__(self):
        self.bodies = []

    def wants_more(self):
        return True

    def admit(self, request):
        pass

    def reserve(self, request, nbytes):
        assert nbytes <= 64 * MIB

    def take(self, request):
        self.bodies.append(request.body)

    def refuse(self, request, status, why):
        self.bodies.append(status)


@pytest.mark.parametrize("nbytes", [0, 1, MIB - 1, MIB, 3 * MIB + 7])
@pytest.mark.parametrize("piece", [4096, 250_000])
def test_a_large_body_is_what_was_sent(nbytes, piece):
    sink = Taken()
    reader = RequestReader(sink, max_headers=8192, max_body=4 * MIB, has_websockets=False)
    sent = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    raw = b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % nbytes + sent
    raw = 2 * raw
    for start in range(0, len(raw), piece):
        reader.feed(raw[start : start + piece], 1)
    assert [bytes(body) for body in sink.bodies] == [sent, sent]
    assert isinstance(sink.bodies[0], memoryview) == (nbytes >= MIB)
    reader.close()


def test_what_is_announced_takes_no_memory_before_it_comes():
    sink = Taken()
    reader = RequestReader(sink, max_headers=8192, max_body=64 * MIB, has_websockets=False)
    reader.feed(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % (64 * MIB), 1)
    reader.feed(bytes(PIECES_NBYTES_MAX), 1)
    assert reader._assembly is None
    reader.feed(bytes(2), 1)
    reader.feed(bytes(2), 1)
    assert repr(reader._assembly) == f"<Assembly {PIECES_NBYTES_MAX + 4} of {64 * MIB}>"
    reader.close()
    assert reader._assembly is None


def test_an_assembly_takes_no_more_than_was_announced():
    assembly = Assembly(4)
    assembly.add(b"abc")
    assert assembly.has_room(1)
    assert not assembly.has_room(2)
    with pytest.raises(ValueError, match="structures"):
        assembly.add(b"de")
    assert bytes(assembly.whole()) == b"abc"


@pytest.mark.parametrize("level", [0, 9])
@pytest.mark.parametrize(
    "nbytes", [0, 1, INFLATED_NBYTES, ASSEMBLED_NBYTES_MIN - 1, ASSEMBLED_NBYTES_MIN, 3 * MIB]
)
def test_a_body_is_inflated_in_pieces(level, nbytes):
    sent = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    packed = zlib.compress(sent, level)
    found = decompress(packed, max(1, nbytes))
    assert bytes(found) == sent
    assert isinstance(found, memoryview) == (nbytes >= ASSEMBLED_NBYTES_MIN)
    if nbytes:
        with pytest.raises(TooLargeError):
            decompress(packed, nbytes - 1)
    for broken, why in (
        (packed[:-1], "truncated"),
        (packed + b"more", "follows"),
        (packed + bytes(DEFLATED_NBYTES), "follows"),
        (b"?" + packed[1:], "not compressed"),
    ):
        with pytest.raises(RequestError, match=why):
            decompress(broken, 4 * MIB)


async def test_a_websocket_message_in_fragments_beside_a_large_one():
    """What a large frame said of its size is nothing that the fragments of the next message must keep to."""
    lengths = []
    model = FunctionModel(
        lambda inputs: lengths.append(inputs["input"].shape[1]) or {"output": inputs["input"][:, -1:]},
        inputs=TensorSpec("input", "float32", ("n",)),
        outputs=TensorSpec("output", "float32", (1,)),
    )
    async with serving({"last": model}) as server:
        url = server.http_url.replace("http", "ws") + "/v2/models/last/ws"
        async with asyncio.timeout(WAIT_S), connect(url, max_size=None, proxy=None) as socket:
            for mib in (2, 5, 1):
                values = np.arange(mib * MIB // 4, dtype=np.float32)
                head = b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1,%d],"parameters":' % len(
                    values
                )
                head += b'{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}' % values.nbytes
                raw = len(head).to_bytes(4, "little") + head + values.tobytes()
                parts = [raw] if mib == 2 else [raw[at : at + 100_000] for at in range(0, len(raw), 100_000)]
                await socket.send(parts if len(parts) > 1 else raw)
                assert np.frombuffer((await socket.recv())[-4:], np.float32)[0] == values[-1]
    assert lengths == [MIB // 2, 5 * MIB // 4, MIB // 4]
