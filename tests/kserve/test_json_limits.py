"""JSON of any size: what it takes, what is refused, and tensors of more values than one conversion has."""

import tracemalloc

import numpy as np
import orjson
import pytest

from asynctrt.errors import InputError, RequestError, TooLargeError
from asynctrt.kserve import datatypes
from asynctrt.kserve.datatypes import from_json, read_bytes, strings, write_bytes
from asynctrt.kserve.json_codec import (
    FAST_JSON_NBYTES,
    JSON_LISTS_MAX,
    JsonCodec,
    parse_object,
    parsed_nbytes,
)
from asynctrt.tensors import BatchRecord, InferResult, TensorSpec

LARGE = b" " * FAST_JSON_NBYTES


@pytest.mark.parametrize("blanks", [b"", LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":[1,,2]}',
        b'{"a":[1}',
        b'{"a":1},{}',
        b'{"a":}',
        b'{"a" 1}',
        b"{1:2}",
        b'{"a":1,}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":01}',
        b'{"a":+1}',
        b'{"a":"\n"}',
        b'{"a":[' + b"[" * 2000 + b"]" * 2000 + b"]}",
        b"",
    ],
)
def test_what_is_not_json_is_refused_however_large_it_is(raw, blanks):
    with pytest.raises(RequestError, match="the request is not valid JSON"):
        parse_object(raw + blanks, "the request")


@pytest.mark.parametrize("word", [b"NaN", b"Infinity", b"-Infinity"])
def test_what_json_has_no_numbers_for_is_refused_with_what_to_do(word):
    with pytest.raises(RequestError, match="no NaN and no Infinity: send such numbers as binary data"):
        parse_object(b'{"a":' + word + b"}" + LARGE, "the request")


@pytest.mark.parametrize("raw", [b"[1]", b"7", b"null", b'"a"'])
def test_what_is_no_object_is_refused(raw):
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_object(raw + LARGE, "the request")


def test_of_equal_names_the_last_one_counts():
    assert parse_object(b'{"a":1,"a":2}' + LARGE, "the request") == {"a": 2}


def test_many_bytes_are_refused_with_what_to_do():
    with pytest.raises(TooLargeError, match="has 41 bytes of JSON; at most 40 .* binary data .*max_json"):
        parse_object(b'{"a":1}'.ljust(41), "the request", 40)
    assert parse_object(b'{"a":1}'.ljust(40), "the request", 40) == {"a": 1}


@pytest.mark.parametrize("colon", [b":", b" :", b"\t\r\n :"])
def test_many_names_are_refused(colon):
    names = [b'"%x"' % number + colon + b"0" for number in range(JSON_LISTS_MAX + 1)]
    with pytest.raises(TooLargeError, match="names in its JSON objects"):
        parse_object(b"{%b}" % b",".join(names), "the request")
    assert len(parse_object(b"{%b}" % b",".join(names[1:]), "the request")) == JSON_LISTS_MAX


def test_text_may_have_any_number_of_colons():
    text = "12:30" * (JSON_LISTS_MAX + 1)
    assert parse_object(orjson.dumps({"a": text}), "the request") == {"a": text}


WORST = {
    "numbers": b"300,",
    "floats": b"0.12345678901234567,",
    "strings": b'"a",',
    "lists": b"[],",
    "objects": b"{},",
    "rows": b"[1.5,2.5],",
}


@pytest.mark.parametrize("item", WORST.values(), ids=WORST)
@pytest.mark.parametrize("nbytes", [40_000, 1 << 20])
def test_what_is_counted_for_parsing_is_at_least_what_it_takes(item, nbytes):
    most = JSON_LISTS_MAX - 2 if item[:1] in b"[{" else nbytes
    raw = b'{"a":[%b0]}' % (item * min(most, nbytes // len(item)))
    tracemalloc.start()
    try:
        content = parse_object(raw, "the request")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # The parser has a copy of the text, and 16 bytes for each value, until it is done.
    values = sum(1 + (len(one) if isinstance(one, list) else 0) for one in content["a"])
    assert held + len(raw) + 16 * values <= parsed_nbytes(len(raw))


class TestAnswers:
    """Large answers as JSON are refused, before they are computed if that can be told."""

    X = TensorSpec("x", np.dtype("float32"), ("n",))
    COUNT = 1000

    def codec(self, dtype, dims, json_max):
        return JsonCodec("m", "1", [self.X], [TensorSpec("y", np.dtype(dtype), dims)], json_max=json_max)

    def request(self, codec, *, binary=False):
        values = b"\0" * (4 * self.COUNT)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, self.COUNT]}
        tensor["parameters"] = {"binary_data_size": len(values)}
        head = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary}})
        return codec.decode(head + values, len(head))

    @pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 16), ("float64", 32), ("int8", 4)])
    def test_numbers_of_a_known_shape(self, dtype, nbytes):
        assert self.request(self.codec(dtype, ("n",), nbytes * self.COUNT))
        codec = self.codec(dtype, ("n",), nbytes * self.COUNT - 1)
        with pytest.raises(TooLargeError, match=r'"binary_data_output": true\}\), or raise max_json'):
            self.request(codec)
        assert self.request(codec, binary=True)

    @pytest.mark.parametrize("dtype", ["float32", "object", "S8"])
    def test_what_is_only_known_when_it_is_there(self, dtype):
        codec = self.codec(dtype, ("m",), 4000)
        request = self.request(codec)
        for count, is_refused in ((100, False), (2000, True)):
            values = np.array([["7"] * count]).astype(dtype)
            result = InferResult({"y": values}, (BatchRecord(1, 0),), 0)
            if is_refused:
                with pytest.raises(TooLargeError, match="bytes of JSON; at most 4000 are sent"):
                    codec.encode(request, result)
            else:
                assert orjson.loads(codec.encode(request, result)[0])["outputs"][0]["shape"] == [1, count]


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
        answer, tensors = codec.encode(request, result, lambda: None)
        assert not tensors
        content = orjson.loads(answer)
        assert content == {
            "id": "7",
            "model_name": "m",
            "model_version": "1",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, self.COUNT], "data": values.tolist()}],
        }
