"""Frames as RFC 6455 has them and as it forbids them, by hand to a real server.

The families of cases are those of the Autobahn test suite. They need an echo, which the session is here.
"""

import asyncio
import struct
from importlib.metadata import version

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from asynctrt.serving import frames
from tests.serving.support import WAIT_S, connected, handshake, serving

pytestmark = pytest.mark.anyio
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
LIMIT = 100_000
OK, PROTOCOL, INVALID, TOO_BIG = 1000, 1002, 1007, 1009
UNFINISHED = PROTOCOL if version("websockets").startswith("15.") else OK
"""What a client is answered that closes within a message."""
WORD = "κόσμε".encode()


class Echo:
    """A session that gives each message back."""

    is_full = is_draining = False
    in_flight = 0

    def __init__(self, api, send, **kw):
        self.account = api.memory.account(None)
        self.receive = lambda message, _: send(message)

    def check_token(self):
        pass

    def cancel_all(self):
        self.receive = None


def frame(opcode, data=b"", *, fin=1, reserved=0, masked=1, length=None):
    """A frame; ``length`` may be said in more bytes than it needs."""
    first = fin << 7 | reserved << 4 | opcode
    size = len(data)
    if length is None:
        length = 0 if size < 126 else 2 if size < 1 << 16 else 8
    head = struct.pack("!BB", first, masked << 7 | {0: size, 2: 126, 8: 127}[length])
    head += size.to_bytes(length, "big") if length else b""
    mask = b"\x37\xfa\x21\x3d"
    data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data)) if masked else data
    return head + (mask if masked else b"") + data


def close(code=None, why=b""):
    return frame(CLOSE, b"" if code is None else code.to_bytes(2, "big") + why)


def parts(opcode, *data):
    """A message in frames."""
    last = len(data) - 1
    return [frame(0 if at else opcode, part, fin=int(at == last)) for at, part in enumerate(data)]


GOOD = close(OK)
CASES = {
    # 1, 9: sizes of messages.
    **{
        f"{opcode} of {size}": ([frame(opcode, b"*" * size), GOOD], [(opcode, b"*" * size)], OK)
        for opcode in (TEXT, BINARY)
        for size in (0, 1, 125, 126, 127, 128, 65535, 65536, LIMIT)
    },
    "too large": ([frame(BINARY, bytes(LIMIT + 1))], [], TOO_BIG),
    "too large in parts": (parts(BINARY, bytes(LIMIT), b"x"), [], TOO_BIG),
    # 2: pings.
    "a ping": ([frame(PING), GOOD], [(PONG, b"")], OK),
    "a ping of 125": ([frame(PING, b"\xfe" * 125), GOOD], [(PONG, b"\xfe" * 125)], OK),
    "a ping of 126": ([frame(PING, b"x" * 126)], [], PROTOCOL),
    "pongs that nobody asked for": ([frame(PONG), frame(PONG, b"x"), GOOD], [], OK),
    "ten pings": (
        [frame(PING, b"%d" % number) for number in range(10)] + [GOOD],
        [(PONG, b"%d" % number) for number in range(10)],
        OK,
    ),
    # 3: reserved bits.
    **{
        f"reserved {bits} of {opcode}": ([frame(opcode, b"", reserved=bits)], [], PROTOCOL)
        for bits in range(1, 8)
        for opcode in (TEXT, PING, CLOSE)
    },
    # 4: opcodes.
    **{f"opcode {code}": ([frame(code, b"x")], [], PROTOCOL) for code in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    # 5: fragments.
    "two parts": ([*parts(TEXT, b"a", b"b"), GOOD], [(TEXT, b"ab")], OK),
    "parts that are empty": ([*parts(TEXT, b"", b"", b""), GOOD], [(TEXT, b"")], OK),
    "a ping between parts": (
        [frame(TEXT, b"a", fin=0), frame(PING, b"p"), frame(0, b"b"), GOOD],
        [(PONG, b"p"), (TEXT, b"ab")],
        OK,
    ),
    "a ping in parts": ([frame(PING, b"a", fin=0), frame(0, b"b")], [], PROTOCOL),
    "a continuation of nothing": ([frame(0, b"a")], [], PROTOCOL),
    "a continuation of nothing that goes on": ([frame(0, b"a", fin=0)], [], PROTOCOL),
    "a continuation after a message": ([*parts(TEXT, b"a", b"b"), frame(0)], [], PROTOCOL),
    "a message within another": ([frame(TEXT, b"a", fin=0), frame(TEXT, b"b")], [], PROTOCOL),
    # 6: UTF-8.
    "letters": ([frame(TEXT, WORD), GOOD], [(TEXT, WORD)], OK),
    "letters that are split": ([*parts(TEXT, *[bytes([one]) for one in WORD]), GOOD], [(TEXT, WORD)], OK),
    **{
        f"no letters, {wrong.hex()}": ([frame(TEXT, b"a" + wrong)], [], INVALID)
        for wrong in (b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xce", b"\xff")
    },
    "bytes are no letters": ([frame(BINARY, b"\xff"), GOOD], [(BINARY, b"\xff")], OK),
    # 7: closing.
    "closed without a code": ([close()], [], 1005),
    "closed twice": ([GOOD, GOOD], [], OK),
    "a ping after the close": ([GOOD, frame(PING)], [], OK),
    "a message after the close": ([GOOD, frame(TEXT, b"x")], [], OK),
    "closed between parts": ([frame(TEXT, b"a", fin=0), GOOD, frame(0, b"b")], [], UNFINISHED),
    "a reason": ([close(OK, b"x" * 123)], [], OK),
    "a reason too long": ([close(OK, b"x" * 124)], [], PROTOCOL),
    "a reason without letters": ([close(OK, b"\xff")], [], INVALID),
    "half a code": ([frame(CLOSE, b"\x03")], [], PROTOCOL),
    **{f"code {code}": ([close(code)], [], code) for code in (1000, 1001, 1007, 1011, 3000, 4999)},
    **{f"code {code}": ([close(code)], [], PROTOCOL) for code in (0, 999, 1004, 1005, 1006, 1016, 5000)},
    # 10, and what is in none of the families: lengths and masks.
    "parts of 1300": (
        [*parts(TEXT, *[b"*" * 1300] * 50), GOOD],
        [(TEXT, b"*" * 65000)],
        OK,
    ),
    "a frame without a mask": ([frame(TEXT, b"x", masked=0)], [], PROTOCOL),
    "a length beyond 63 bits": ([b"\x82\xff" + b"\xff" * 8 + bytes(4)], [], (PROTOCOL, TOO_BIG)),
}  # fmt: skip


@pytest.mark.parametrize("step", [1 << 20, 997])
async def test_every_frame_is_answered_as_it_should_be(monkeypatch, step):
    """Each case on a connection of its own: the answers, and the code of the close that follows them."""
    monkeypatch.setattr(frames, "WebSocketSession", Echo)
    async with serving(max_body=LIMIT) as server:
        for name, (sent, due, code) in CASES.items():
            async with connected(server) as raw:
                raw.send(handshake())
                await raw.answer()
                # What was read when a client closes is not answered any more, so it waits for its answers.
                waits = due and sent[-1] is GOOD
                wire, last = b"".join(sent[:-1] if waits else sent), GOOD if waits else b""
                for start in range(0, len(wire), step):
                    raw.send(wire[start : start + step])
                    await asyncio.sleep(0)
                expected = sum(len(frame(opcode, data, masked=0)) for opcode, data in due)
                async with asyncio.timeout(WAIT_S):
                    got = await raw.reader.readexactly(expected)
                raw.send(last)
                answers, closing = read(got + await raw.ended())
                assert (answers, closing in (code if isinstance(code, tuple) else (code,))) == (due, True), (
                    name,
                    answers[:3],
                    closing,
                )


def read(raw):
    """The messages and pongs, and the code of the close."""
    protocol = ClientProtocol(parse_uri("ws://localhost/"), state=State.OPEN, max_size=None)
    protocol.receive_data(raw)
    found = [event for event in protocol.events_received() if isinstance(event, Frame)]
    assert found, "no close"
    assert found[-1].opcode is Opcode.CLOSE, found
    return [(int(one.opcode), bytes(one.data)) for one in found[:-1]], protocol.close_rcvd.code
