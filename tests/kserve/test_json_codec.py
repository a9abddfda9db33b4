"""Requests and answers as bytes. What a fuzzer finds is in test_fuzz.py; here is what is meant."""

import json
import math

import numpy as np
import pytest

from asynctrt.errors import InputError, RequestError, TooLargeError, UnsupportedError
from asynctrt.kserve import json_codec
from asynctrt.kserve.codec import IN_HEAD, LAYOUTS_MAX, STRINGS_MAX
from asynctrt.kserve.datatypes import from_json
from asynctrt.kserve.json_codec import JsonCodec
from asynctrt.tensors import BatchRecord, InferResult, TensorSpec

X = TensorSpec("x", "float32", (2,))
N = TensorSpec("n", "int32", ("length",))
Y = TensorSpec("y", "float32", (2,))
Z = TensorSpec("z", "bool", ())


@pytest.fixture
def codec():
    return JsonCodec("m", "3", [X, N], [Y, Z])


def build(inputs=None, raw=b"", **content):
    if inputs is None:
        x, n = np.ones((1, 2), np.float32), np.arange(3, dtype=np.int32)[None]
        inputs = [binary(X, x), binary(N, n)]
        raw = x.tobytes() + n.tobytes()
    head = json.dumps({**content, "inputs": inputs}, separators=(",", ":")).encode()
    return head + raw, len(head)


def binary(spec, array, **changes):
    datatype = {"float32": "FP32", "int32": "INT32"}[array.dtype.name]
    parameters = {"binary_data_size": array.nbytes}
    described = {
        "name": spec.name,
        "datatype": datatype,
        "shape": list(array.shape),
        "parameters": parameters,
    }
    return {**described, **changes}


def result(y=None, z=None):
    y = np.array([[1, 2]], np.float32) if y is None else y
    z = np.array([True]) if z is None else z
    return InferResult({"y": y, "z": z}, (BatchRecord(1, 0),), 0)


def test_binary_tensors_in_order(codec):
    call = codec.decode(*build(id="7"))
    assert call.id == "7"
    np.testing.assert_array_equal(call.inputs["x"], [[1, 1]])
    np.testing.assert_array_equal(call.inputs["n"], [[0, 1, 2]])
    assert call.inputs["n"].dtype == np.int32


def test_binary_and_json_mixed(codec):
    n = np.arange(2, dtype=np.int32)[None]
    x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]}
    call = codec.decode(*build([x, binary(N, n)], n.tobytes()))
    np.testing.assert_array_equal(call.inputs["x"], [[3, 4]])
    np.testing.assert_array_equal(call.inputs["n"], n)


def test_an_answer_has_what_was_asked_for(codec):
    outputs = [{"name": "z"}, {"name": "y", "parameters": {"binary_data": True}}]
    call = codec.decode(*build(id="a", outputs=outputs))
    head, tensors = codec.encode(call, result())
    assert json.loads(head) == {
        "id": "a",
        "model_name": "m",
        "model_version": "3",
        "outputs": [
            {"name": "z", "datatype": "BOOL", "shape": [1], "data": [True]},
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        ],
    }
    assert b"".join(tensors) == np.array([1, 2], np.float32).tobytes()


@pytest.mark.parametrize("request_id", ["", "a", 'with "quotes"', "\u00e4\n", "id", "7-_"])
def test_ids_come_back_as_they_were(codec, request_id):
    for _ in range(3):
        call = codec.decode(*build(id=request_id, parameters={"binary_data_output": True}))
        head, _ = codec.encode(call, result())
        assert json.loads(head).get("id", "") == request_id
        assert head.startswith(b'{"id":') == bool(request_id)


def test_an_answer_of_another_shape_has_another_header(codec):
    """The trap: a header that is remembered for longer than it is true."""
    for rows in (1, 5, 5, 1, 3):
        call = codec.decode(*build(parameters={"binary_data_output": True}))
        head, tensors = codec.encode(call, result(np.ones((rows, 2), np.float32), np.ones(rows, bool)))
        content = json.loads(head)
        assert [output["shape"] for output in content["outputs"]] == [[rows, 2], [rows]]
        assert [output["parameters"]["binary_data_size"] for output in content["outputs"]] == [8 * rows, rows]
        assert [len(tensor) for tensor in tensors] == [8 * rows, rows]


def test_arrays_that_are_not_contiguous_and_empty_ones(codec):
    call = codec.decode(*build(parameters={"binary_data_output": True}))
    y = np.arange(8, dtype=np.float32).reshape(2, 4).T
    _, tensors = codec.encode(call, result(y, np.ones(0, bool)))
    assert bytes(tensors[0]) == np.ascontiguousarray(y).tobytes()
    assert bytes(tensors[1]) == b""


def test_nan_in_json_is_null_and_infinity_is_no_json(codec):
    head, _ = codec.encode(codec.decode(*build()), result(np.array([[np.nan, 1]], np.float32)))
    assert json.loads(head)["outputs"][0]["data"] == [None, 1]
    with pytest.raises(RequestError, match="infinities"):
        codec.encode(codec.decode(*build()), result(np.array([[np.nan, np.inf]], np.float32)))


def is_reusable(layout):
    """Whether a layout holds no values of inputs."""
    return all(array is None or array is IN_HEAD for *_, array in layout.inputs)


def test_layouts_are_bounded_and_keep_no_values(codec):
    for number in range(LAYOUTS_MAX + 50):
        codec.decode(*build(parameters={"priority": number}))
    assert len(codec._layouts) <= LAYOUTS_MAX
    assert all(is_reusable(layout) for layout in codec._layouts.values())


def test_the_same_head_is_not_parsed_again_and_the_tensors_and_ids_are_each_requests_own(codec, monkeypatch):
    def asked(value, **given):
        x, n = np.full((1, 2), value, np.float32), np.arange(3, dtype=np.int32)[None]
        body, length = build([binary(X, x), binary(N, n)], x.tobytes() + n.tobytes(), **given)
        call = codec.decode(body, length)
        assert call.inputs["x"].tolist() == [[value, value]]
        assert call.id == given.get("id", "")
        return call

    first = asked(1)
    parsed = []
    parse = json_codec.parse_object
    monkeypatch.setattr(json_codec, "parse_object", lambda *given: parsed.append(given) or parse(*given))
    assert asked(2).layout is first.layout
    assert not parsed
    for number in range(3):
        assert asked(3, id=str(number)).layout is first.layout
    assert len(parsed) == 1, "what is remembered has no id"
    body, length = build()
    with pytest.raises(RequestError, match=r"20 bytes.*16 follow"):
        codec.decode(body[:-4], length)
    for number in range(LAYOUTS_MAX + 50):
        asked(4, parameters={"priority": number})
    assert len(codec._heads) <= LAYOUTS_MAX


@pytest.mark.parametrize("given", [{}, {"id": "a"}])
def test_a_head_is_remembered_if_a_tensor_is_called_id(given):
    named = TensorSpec("id", "float32", (2,))
    machine = JsonCodec("m", "3", [named], [Y])
    body, length = build([binary(named, np.zeros((1, 2), np.float32))], bytes(8), **given)
    for request_id in ("a", "b"):
        call = machine.decode(body.replace(b'"a"', f'"{request_id}"'.encode()), length)
        assert call.id == (request_id if given else "")
    assert len(machine._heads) == 1


@pytest.mark.parametrize("more", [{}, {"parameters": {"priority": 2}}])
def test_requests_that_differ_in_their_values_share_a_layout(codec, more):
    def asked(x, n, **given):
        x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": x} | given
        n = {"name": "n", "datatype": "INT32", "shape": [1, 1], "data": n}
        return codec.decode(*build([x, n], **more))

    first, second = asked([3, 4], [5]), asked([[6.5, 7]], [[8]])
    assert [array.tolist() for array in first.inputs.values()] == [[[3, 4]], [[5]]]
    assert [array.tolist() for array in second.inputs.values()] == [[[6.5, 7]], [[8]]]
    assert first.layout is second.layout
    assert is_reusable(first.layout)
    for wrong in (
        True,
        None,
        [1],
        [1, "2"],
        [1, None],
        [[1], [2, 3]],
        [1, [2]],
        {},
        7,
        [1, 2, 3],
        [1, 1e300],
    ):
        with pytest.raises(InputError, match="input 'x'"):
            asked(wrong, [5])
    with pytest.raises(RequestError, match="duplicate input 'x'"):
        codec.decode(*build([{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]}] * 2, **more))
    assert asked([9, 10], [11]).inputs["x"].tolist() == [[9, 10]]


def test_plain_requests_that_differ_in_their_values_share_a_layout(codec):
    def asked(x, n):
        return codec.decode_plain(json.dumps({"instances": [{"x": x, "n": n}]}).encode())

    first, second = asked([3, 4], [5]), asked([6.5, 7], [8])
    assert [array.tolist() for array in second.inputs.values()] == [[[6.5, 7]], [[8]]]
    assert first.layout is second.layout
    for wrong in ([1, "2"], [1, None], [1, [2]], [1, 2, 3]):
        with pytest.raises(InputError, match="input 'x'"):
            asked(wrong, [5])
    assert first.inputs["x"].tolist() == [[3, 4]]


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1), (1, 1, 3)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_lists_of_numbers_become_floats_however_they_nest(dtype, shape):
    spec = TensorSpec("x", dtype, shape[1:])
    for values in ([1.5, 2, True], [0.1, 1e-300, -0.0], [1, 2, 3]):
        nested = np.array(values, object).reshape(shape).tolist()
        for data in (values, nested):
            array = from_json(spec, data, shape)
            assert array.dtype == dtype
            np.testing.assert_array_equal(array, np.array(values, np.float64).astype(dtype).reshape(shape))
            array[...] = 0  # It is the request's own.
    deep = 1.0
    for _ in range(40):
        deep = [deep]
    with pytest.raises(InputError, match="nests lists more than 32 deep"):
        from_json(TensorSpec("x", dtype, ()), deep, (1,))
    assert from_json(spec, [], (0, *shape[1:])).shape == (0, *shape[1:])


def test_scheduling(codec):
    layout = codec.decode(*build(parameters={"priority": 2, "timeout": 1500})).layout
    assert (layout.priority, layout.timeout) == (2, 0.0015)
    layout = codec.decode(*build(parameters={"priority": 0, "timeout": 0})).layout
    assert (layout.priority, layout.timeout) == (0, None)


def item(**changes):
    return {**binary(X, np.ones((1, 2), np.float32)), **changes}


@pytest.mark.parametrize(
    ("inputs", "content", "error", "says"),
    [
        ([item()], {"id": 7}, RequestError, "id must be a string"),
        ([item(), item()], {}, RequestError, "duplicate input 'x'"),
        ([item(name=None)], {}, RequestError, "with a name"),
        (["x"], {}, RequestError, "with a name"),
        ("x", {}, RequestError, "list of tensors"),
        ([item(shape=[1, -2])], {}, RequestError, "none negative"),
        ([item(shape=[1, True])], {}, RequestError, "none negative"),
        ([item(shape=[1] * 40)], {}, RequestError, "at most 32"),
        ([item(shape=None)], {}, RequestError, "at most 32"),
        ([item(shape=[])], {}, InputError, "takes shape \\(rows, 2\\), given \\(\\)"),
        ([item(shape=[2**40, 2**40])], {}, RequestError, "more elements"),
        ([item(shape=[2, 2])], {}, InputError, "takes 16 bytes, but 8 are given"),
        ([item(shape=[1, 3])], {}, InputError, "takes shape \\(rows, 2\\)"),
        ([item(parameters={"binary_data_size": -8})], {}, RequestError, "number of bytes"),
        ([item(parameters={"binary_data_size": 8.0})], {}, RequestError, "number of bytes"),
        ([item(parameters=[])], {}, RequestError, "must be an object"),
        ([item(parameters={})], {}, RequestError, "neither data nor"),
        ([item(data=[1, 2])], {}, RequestError, "both data and"),
        ([item(parameters={"shared_memory_region": "r"})], {}, UnsupportedError, "shared memory"),
        ([item()] * 5, {}, RequestError, "duplicate input 'x'"),
        ([item()], {"outputs": [{"name": "y"}] * 2}, RequestError, "duplicate output 'y'"),
        (
            [item()],
            {"outputs": [{"name": "y", "parameters": {"classification": 3}}]},
            UnsupportedError,
            "scores",
        ),
        (
            [item()],
            {"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
            RequestError,
            "true or false",
        ),
        ([item()], {"parameters": {"binary_data_output": "yes"}}, RequestError, "true or false"),
        ([item()], {"parameters": {"timeout": 1.5}}, RequestError, "microseconds"),
    ],
)
def test_what_is_wrong_is_named(codec, inputs, content, error, says):
    with pytest.raises(error, match=says):
        codec.decode(*build(inputs, bytes(8), **content))


def test_lengths_that_lie(codec):
    body, length = build()
    for changed, given, says in (
        (body, len(body) + 1, "the message has"),
        (body[:-1], length, "20 bytes of tensors after the header, but 19"),
        (body + b"x", length, "but 21 follow it"),
        (body, length - 1, "not valid JSON"),
        (body, length + 1, "not valid JSON"),
        (body, 0, "not valid JSON"),
    ):
        with pytest.raises(RequestError, match=says):
            codec.decode(changed, given)


@pytest.mark.parametrize(
    ("dims", "shape", "error", "says"),
    [
        ((2,), [5, 2], InputError, "5 rows are more than the queue can ever hold"),
        ((2,), [4, 3], InputError, "takes shape"),
        (("n",), [1, STRINGS_MAX + 1], TooLargeError, "elements of BYTES"),
    ],
)
@pytest.mark.parametrize("data", [None, [1]])
def test_a_shape_is_checked_before_values_are_read(dims, shape, error, says, data):
    """The trap: byte strings are read one by one, for seconds, and then their number is too large."""
    codec = JsonCodec("m", "1", [TensorSpec("s", "S8", dims)], [Y], rows_max=4)
    raw = b"\xff" * 4 * shape[0] * shape[1]  # No string has such a length: to read the first one would fail.
    tensor = {"name": "s", "datatype": "BYTES", "shape": shape}
    tensor |= {"parameters": {"binary_data_size": len(raw)}} if data is None else {"data": data}
    with pytest.raises(error, match=says):
        codec.decode(*build([tensor], raw if data is None else b""))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ([1, 1, 100], "inputs of these shapes are padded to 12800 bytes; at most 10000 are accepted"),
        ([4, 33, 10], "padded to 10240 bytes"),
        ([1, 1, 40], "give outputs of 10240 bytes"),
        ([1, 1, 30], None),
        ([4, 33, 1], None),
        ([1, 65, 1], None),
    ],
)
def test_what_is_padded_is_counted_as_it_is_then(shape, says):
    """The trap: of two open dimensions one is padded, and one element a row becomes very many."""
    wide, out = TensorSpec("x", "float32", ("s", "d")), TensorSpec("y", "float64", ("s", "d"))
    codec = JsonCodec("m", "1", [wide], [out], answer_max=10_000, pad={"s": (32, 64), "t": (8,)})
    tensor = {"name": "x", "datatype": "FP32", "shape": shape}
    raw = bytes(4 * math.prod(shape))
    call = build([tensor | {"parameters": {"binary_data_size": len(raw)}}], raw)
    if says is None:
        assert codec.decode(*call).inputs["x"].shape == tuple(shape)
    else:
        with pytest.raises(TooLargeError, match=says):
            codec.decode(*call)


class TestRaw:
    def test_a_dynamic_row(self):
        call = JsonCodec("m", "1", [N], [Y]).decode_raw(np.arange(7, dtype=np.int32).tobytes())
        assert call.inputs["n"].tolist() == [list(range(7))]

    def test_a_string(self):
        call = JsonCodec("m", "1", [TensorSpec("s", "S8", (1,))], [Y]).decode_raw(b"hello")
        assert call.inputs["s"].tolist() == [[b"hello"]]

    @pytest.mark.parametrize("nbytes", [0, 7, 9, 12])
    def test_no_row(self, nbytes):
        with pytest.raises(RequestError, match="is not one row of"):
            JsonCodec("m", "1", [X], [Y]).decode_raw(bytes(nbytes))

    def test_a_model_with_several_inputs(self, codec):
        with pytest.raises(RequestError, match="has 2"):
            codec.decode_raw(bytes(8))


@pytest.mark.parametrize("blank", ["", " ", "\n  "])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_is_the_same_however_it_is_written_and_whatever_its_id(codec, blank, is_first):
    body, length = build()
    content = json.loads(body[:length])
    layouts = []
    for request_id in ("a", "b", "", "c d"):
        stated = {"id": request_id}
        head = json.dumps(
            stated | content if is_first else content | stated, separators=("," + blank, ":" + blank)
        )
        call = codec.decode(head.encode() + body[length:], len(head))
        assert call.id == request_id
        layouts.append(call.layout)
    assert len(set(map(id, layouts))) == 1
    assert codec.decode(body, length).layout is layouts[0]


def test_what_is_nested_deeper_than_can_be_written_is_decoded_and_not_remembered(codec):
    body, length = build(more=[])
    nested = b"[" * 600 + b"]" * 600
    head = body[:length].replace(b"[]", nested)
    calls = [codec.decode(head + body[length:], len(head)) for _ in range(2)]
    assert calls[0].layout is not calls[1].layout


def test_an_id_that_is_said_twice_is_not_remembered_wrongly(codec):
    """JSON's last one counts. A header with two ids must not stand for one with another first id."""
    body, length = build()
    for first in ("a", "b"):
        head = b'{"id":"' + first.encode() + b'","id":"last",' + body[1:length]
        assert codec.decode(head + body[length:], len(head)).id == "last"
    for first in ("a", "b"):
        head = b'{"id":"' + first.encode() + b'","\\u0069d":"last",' + body[1:length]
        assert codec.decode(head + body[length:], len(head)).id == "last"
