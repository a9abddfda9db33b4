"""Frames are read as the websockets library reads them, whatever pieces they come in."""

import random

import pytest
from websockets.frames import Opcode

from asynctrt.serving.frame_reader import PIECES_MAX, FrameReader
from tests.fuzz.parsers import check_frames, masked

MAX = 10_000
SIZES = (0, 1, 39, 40, 41, 42, 43, 125, 126, 127, 300)


def conversation(dice):
    """Messages of some frames each, with control frames between them, some of it broken."""
    raw = b""
    for _ in range(dice.randint(1, 6)):
        opcode = dice.choice((Opcode.TEXT, Opcode.BINARY))
        count = dice.choice((1, 1, 2, 3))
        for number in range(count):
            data = dice.randbytes(dice.choice(SIZES)).hex().encode()
            raw += masked(opcode if number == 0 else Opcode.CONT, data, fin=number == count - 1)
            if dice.random() < 0.3:
                # Not longer: within a message, the library counts it as a part of the message.
                raw += masked(Opcode.PING, dice.randbytes(dice.choice((0, 3))))
    raw = bytearray(raw)
    for _ in range(dice.choice((0, 0, 1, 3))):
        raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    return bytes(raw)


@pytest.mark.parametrize("piece", [1, 3, 7, 50, 5000])
@pytest.mark.parametrize("most", [1000, MAX])
def test_the_library_would_read_the_same(piece, most):
    dice = random.Random(piece)
    for _ in range(100):
        check_frames(conversation(dice), [piece], most)


def test_a_large_frame_is_read_in_pieces_as_it_comes():
    data = bytes(range(256)) * 20
    raw, reader, read = masked(Opcode.BINARY, data), FrameReader(MAX), []
    for start in range(0, len(raw), 500):
        reader.feed(raw[start : start + 500])
        read += reader.read()
        assert reader.is_idle == (start + 500 >= len(raw))
    assert b"".join(piece.data for piece in read) == data
    assert len(read) == len(raw) // 500 + 1
    assert [read[0].is_first, read[-1].is_last, {piece.nbytes for piece in read}] == [True, True, {len(data)}]


def test_few_frames_are_read_at_a_time():
    reader = FrameReader(MAX)
    reader.feed(masked(Opcode.BINARY, b"abcd") * (PIECES_MAX + 1))
    assert (len(reader.read()), reader.has_more) == (PIECES_MAX, True)
    assert (len(reader.read()), reader.has_more, reader.is_idle) == (1, False, True)


@pytest.mark.parametrize("known", range(14))
def test_a_head_of_which_a_part_has_come_is_not_idle(known):
    reader = FrameReader(1 << 20)
    reader.feed(masked(Opcode.BINARY, bytes(70_000))[:known])
    assert reader.read() == []
    assert reader.is_idle == (known == 0)
