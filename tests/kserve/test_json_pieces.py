"""JSON that is parsed in pieces is what it is when it is parsed at once, or refused alike."""

import random

import numpy as np
import orjson
import pytest

from asynctrt.errors import InputError, RequestError
from asynctrt.kserve import datatypes, json_pieces
from asynctrt.kserve.datatypes import from_json, read_bytes, strings, write_bytes
from asynctrt.kserve.json_codec import JsonCodec, parse_object
from asynctrt.kserve.json_pieces import DEPTH_MAX, loads_in_pieces, no_pause
from asynctrt.tensors import TensorSpec

LEAVES = (1, 2.5, -3, "a", 'x,"y', "\\", '\\"', "[", "]}", True, None, "é,", "", " ", "\ud7ff", {}, [])
MARKS = b'[]{},:"\\ 1'


def document(random, depth=0):
    choice = random.random()
    if depth > 4 or choice < 0.3:
        return random.choice(LEAVES)
    if choice < 0.7:
        return [document(random, depth + 1) for _ in range(random.randrange(6))]
    names = [random.choice('abc,:"\\[') + str(random.randrange(3)) for _ in range(random.randrange(5))]
    return {name: document(random, depth + 1) for name in names}


def damaged(random, raw):
    for _ in range(random.choice((0, 0, 1, 2, 4))):
        if not raw:
            break
        at = random.randrange(len(raw))
        match random.randrange(4):
            case 0:
                del raw[at]
            case 1:
                raw.insert(at, random.choice(MARKS))
            case 2:
                raw[at] = random.choice(MARKS)
            case _:
                other = random.randrange(len(raw))
                raw[at], raw[other] = raw[other], raw[at]
    return bytes(raw)


def parsed(parse, raw):
    try:
        return orjson.dumps(parse(raw))
    except (ValueError, RequestError):
        return None


@pytest.mark.parametrize("nbytes", [1, 2, 5, 16])
def test_it_is_what_a_parser_makes_of_the_whole(monkeypatch, nbytes):
    monkeypatch.setattr(json_pieces, "PIECE_NBYTES", nbytes)
    dice = random.Random(nbytes)
    good = 0
    for _ in range(400):
        option = orjson.OPT_INDENT_2 if dice.random() < 0.3 else None
        raw = damaged(dice, bytearray(orjson.dumps(document(dice), option=option)))
        expected = parsed(orjson.loads, raw)
        assert parsed(lambda raw: loads_in_pieces(raw, orjson.loads, no_pause), raw) == expected, raw
        good += expected is not None
    assert 100 < good < 390


def test_the_lock_is_given_up_between_pieces():
    sizes, pauses = [], []
    raw = orjson.dumps({"data": list(range(50_000))})

    def loads(piece):
        sizes.append(len(piece))
        return orjson.loads(piece)

    assert loads_in_pieces(raw, loads, lambda: pauses.append(1)) == orjson.loads(raw)
    assert max(sizes) <= json_pieces.PIECE_NBYTES + 2
    assert len(pauses) == len(sizes) > len(raw) // json_pieces.PIECE_NBYTES


def test_what_nests_deep_is_refused():
    for depth, is_refused in ((DEPTH_MAX, False), (DEPTH_MAX + 1, True)):
        raw = b"[" * depth + b" " * json_pieces.PIECE_NBYTES + b"]" * depth
        if is_refused:
            with pytest.raises(RequestError, match="64 deep"):
                loads_in_pieces(raw, orjson.loads, no_pause)
        else:
            assert loads_in_pieces(raw, orjson.loads, no_pause) == orjson.loads(raw)


@pytest.mark.parametrize(
    "raw",
    [b'{"a":[1,' + b" " * 40_000 + b",2]}", b'{"a":[1}' + b" " * 40_000, b"[1]" + b" " * 40_000 + b",[2]"],
    ids=["missing", "brackets", "two"],
)
def test_messages_name_the_request(raw):
    with pytest.raises(RequestError, match=r"valid JSON"):
        parse_object(raw, "the request", pause=lambda: None)


class TestTensorsInPieces:
    """Each conversion, with more values than a piece has."""

    FLOATS = TensorSpec("x", np.dtype("float32"), ("n",))
    STRINGS = TensorSpec("x", np.dtype("S8"), ("n",))
    COUNT = 3 * datatypes.PIECE + 5

    def test_numbers(self):
        values = [number / 3 for number in range(self.COUNT)]
        pauses = []
        array = from_json(self.FLOATS, values, (1, self.COUNT), lambda: pauses.append(1))
        assert array.dtype == np.float32
        assert np.array_equal(array[0], np.array(values, "f4"))
        assert len(pauses) > 3

    def test_rows(self):
        rows = np.arange(self.COUNT * 2).reshape(-1, 2).tolist()
        array = from_json(self.FLOATS, rows, (self.COUNT, 2))
        assert np.array_equal(array, rows)

    @pytest.mark.parametrize("bad", [[[1, 2], [3]], [[1, 2], 3], [[[1], [2]], [[3, 4]]], [[], [1]]])
    def test_ragged_lists(self, bad):
        with pytest.raises(InputError, match="ragged"):
            from_json(self.FLOATS, bad, (3,))

    @pytest.mark.parametrize("value", ["text", None, {}, 2.5, True], ids=str)
    def test_a_value_of_a_later_piece_that_does_not_fit(self, value):
        spec = TensorSpec("x", np.dtype("int32"), ("n",))
        values = [1] * self.COUNT
        values[-1] = value
        if value is True:
            assert from_json(spec, values, (1, self.COUNT))[0, -1] == 1
            return
        with pytest.raises(InputError, match="int32"):
            from_json(spec, values, (1, self.COUNT))

    def test_byte_strings(self):
        spec = TensorSpec("x", np.dtype("S8"), ("n",))
        elements = [str(number).encode() for number in range(self.COUNT)]
        array = strings(spec, elements)
        assert array.tolist() == elements
        raw = write_bytes(array)
        assert read_bytes(spec, memoryview(raw), self.COUNT).tolist() == elements
        assert from_json(spec, [item.decode() for item in elements], (1, self.COUNT))[0].tolist() == elements

    @pytest.mark.parametrize(("element", "says"), [(b"123456789", "has 9 bytes"), (b"a\0", "ends in a NUL")])
    def test_a_byte_string_of_a_later_piece_that_does_not_fit(self, element, says):
        elements = [b"a"] * self.COUNT
        elements[-2] = element
        with pytest.raises(InputError, match=f"element {self.COUNT - 2} {says}"):
            strings(self.STRINGS, elements)

    def test_too_long_and_a_nul_in_one_piece(self):
        """Their sizes must not make up for each other."""
        with pytest.raises(InputError, match="element 1 has 9 bytes"):
            strings(self.STRINGS, [b"a", b"123456789", b"a\0"])

    def test_a_request_and_its_answer(self):
        codec = JsonCodec("m", "1", [self.FLOATS], [TensorSpec("y", np.dtype("float32"), ("n",))])
        values = np.arange(self.COUNT, dtype="f4")
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, self.COUNT], "data": values}
        head = orjson.dumps({"id": "7", "inputs": [tensor]}, option=orjson.OPT_SERIALIZE_NUMPY)
        assert codec.is_slow(head, len(head))
        request = codec.decode(head, len(head), lambda: None)
        result = {"y": values[None]}
        assert codec.is_slow_answer(request.layout, result)
        answer, tensors = codec.encode(request, result, lambda: None)
        assert not tensors
        content = orjson.loads(answer)
        assert content == {
            "id": "7",
            "model_name": "m",
            "model_version": "1",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, self.COUNT], "data": values.tolist()}],
        }
