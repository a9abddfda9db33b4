"""Large frames in fragments are the same messages, whatever pieces they come in."""

import random

import pytest
from websockets.frames import Frame, Opcode

from asynctrt.serving import frame_cutter
from asynctrt.serving.frame_cutter import FRAMES_MAX, FrameCutter
from asynctrt.serving.frames import whole_messages
from tests.fuzz.parsers import Library, masked

MAX = 10_000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Frames count as large from 40 bytes on."""
    monkeypatch.setattr(frame_cutter, "LARGE_NBYTES", 40)


def in_pieces(dice, raw, most):
    while raw:
        nbytes = dice.randint(1, most)
        yield raw[:nbytes]
        raw = raw[nbytes:]


def conversation(dice):
    """Messages of some frames each, with control frames between them."""
    raw = b""
    for _ in range(dice.randint(1, 6)):
        opcode = dice.choice((Opcode.TEXT, Opcode.BINARY))
        count = dice.choice((1, 1, 2, 3))
        for number in range(count):
            data = dice.randbytes(dice.choice((0, 1, 39, 40, 41, 42, 43, 125, 126, 127, 300)))
            if opcode is Opcode.TEXT:
                data = data.hex().encode()
            raw += masked(opcode if number == 0 else Opcode.CONT, data, fin=number == count - 1)
            if dice.random() < 0.3:
                raw += masked(Opcode.PING, dice.randbytes(dice.choice((0, 3, 125))))
    return raw


@pytest.mark.parametrize("most", [1, 3, 7, 50, 5000])
def test_messages_are_the_same_in_any_pieces(most):
    dice = random.Random(most)
    for _ in range(60):
        raw = conversation(dice)
        if dice.random() < 0.3:
            raw = bytearray(raw)
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
            raw = bytes(raw)
        whole, cut, cutter = Library(MAX), Library(MAX), FrameCutter(MAX)
        for piece in in_pieces(dice, raw, most):
            whole.feed(piece)
            while piece:
                cut.feed(cutter.feed(piece))
                piece = piece[cutter.taken :]
        assert cut.said == whole.said


@pytest.mark.parametrize("nbytes", [4, 125, 126, 127, 128, 4000])
@pytest.mark.parametrize("opcode", [Opcode.BINARY, Opcode.TEXT])
def test_small_messages_are_read_without_the_library(opcode, nbytes):
    """It would take a fifth of the time of a small request."""
    data = (bytes(range(32)) * 125)[:nbytes]
    one = masked(opcode, data)
    for count in (1, 2, FRAMES_MAX):
        messages, taken = whole_messages(one * count, MAX)
        assert [(frame.opcode, frame.data, frame.fin) for frame in messages] == [(opcode, data, True)] * count
        assert taken == count * len(one)
    messages, taken = whole_messages(one * (FRAMES_MAX + 1), MAX)
    assert (len(messages), taken) == (FRAMES_MAX, FRAMES_MAX * len(one))


@pytest.mark.parametrize("seed", range(20))
def test_the_library_would_read_the_same(seed):
    """Whatever is wrong with the bytes: first what is read without it, and then what it reads of the rest."""
    dice = random.Random(seed)
    for _ in range(60):
        raw = bytearray(conversation(dice))
        for _ in range(dice.choice((0, 0, 1, 3))):
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
        raw = bytes(raw[: dice.choice((len(raw), dice.randint(1, len(raw))))])
        most = dice.choice((40, MAX))
        whole, rest = Library(most), Library(most)
        messages, taken = whole_messages(raw, most)
        whole.feed(raw)
        rest.feed(raw[taken:])
        begun = [(frame.opcode, frame.data) for frame in messages]
        assert (begun + rest.said[0], rest.said[1]) == whole.said


def test_a_large_frame_is_read_in_pieces_as_it_comes():
    data = bytes(range(256)) * 20
    raw, reader, cutter = masked(Opcode.BINARY, data), Library(MAX), FrameCutter(MAX)
    for start in range(0, len(raw), 500):
        reader.feed(cutter.feed(raw[start : start + 500]))
        assert cutter.is_between_frames == (start + 500 >= len(raw))
    assert reader.messages == [(Opcode.BINARY, data)]
    assert reader.largest <= 500


@pytest.mark.parametrize("known", range(14))
def test_a_head_of_which_a_part_has_come_is_not_between_frames(known):
    cutter = FrameCutter(1 << 20)
    raw = masked(Opcode.BINARY, bytes(70_000))
    cutter.feed(raw[:known])
    assert cutter.is_between_frames == (known == 0)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (masked(Opcode.BINARY, bytes(MAX + 1))[:14], 1009),
        (Frame(Opcode.BINARY, bytes(500)).serialize(mask=False), 1002),
        (masked(Opcode.BINARY, bytes(MAX), fin=False) + masked(Opcode.CONT, b"ab"), 1009),
        (bytes([0xC2]) + masked(Opcode.BINARY, bytes(500))[1:], 1002),
        (masked(Opcode.CONT, bytes(500)), 1002),
    ],
    ids=["large", "unmasked", "two", "reserved", "continued"],
)
def test_what_the_library_refuses_is_left_to_it(raw, code):
    whole, cut = Library(MAX), Library(MAX)
    whole.feed(raw)
    cut.feed(FrameCutter(MAX).feed(raw))
    assert cut.said == whole.said == ([], code)
