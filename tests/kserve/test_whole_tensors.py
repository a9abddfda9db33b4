"""Strings, tensors without rows and tensors whose rows are not on the first axis, in every encoding."""

import json
from math import prod

import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as triton

from asynctrt.errors import ExecutionError, InputError, TooLargeError
from asynctrt.kserve.client import read_answer
from asynctrt.kserve.codec import FAST_STRINGS_NBYTES, STRINGS_MAX
from asynctrt.kserve.datatypes import PIECE, datatype_of, to_json, write_tensor
from asynctrt.kserve.json_codec import JsonCodec
from asynctrt.kserve.protobuf import ProtobufCodec
from asynctrt.tensors import BatchRecord, InferResult, TensorSpec

STATE = TensorSpec("state", "float32", (2, "width"), axis=1)
FACTOR = TensorSpec("factor", "float64", (), axis=None)
TEXT = TensorSpec("text", object, ("n",))
NOTE = TensorSpec("note", object, (), axis=None)
TABLE = TensorSpec("table", "int32", ("width",), axis=None)
INPUTS = [STATE, FACTOR, TEXT, NOTE]
OUTPUTS = [STATE, TEXT, FACTOR, NOTE, TABLE]

ROWS = 5
ARRAYS = {
    "state": np.arange(30, dtype=np.float32).reshape(2, ROWS, 3),
    "factor": np.array(0.5),
    "text": np.array([["a", "bä\0"]] * ROWS, object),
    "note": np.array("", object),
}
ANSWER = ARRAYS | {"table": np.arange(3, dtype=np.int32)}


def described(spec, array, **more):
    return {"name": spec.name, "datatype": datatype_of(spec), "shape": list(array.shape), **more}


def as_json(arrays, **settings):
    items = [described(spec, arrays[spec.name], data=to_json(arrays[spec.name])) for spec in INPUTS]
    body = json.dumps({"inputs": items}, default=np.ndarray.tolist).encode()
    codec = JsonCodec("m", "1", INPUTS, OUTPUTS, **settings)
    return codec, codec.decode(body, len(body))


def as_binary(arrays, **settings):
    tensors = [bytes(write_tensor(arrays[spec.name])) for spec in INPUTS]
    items = [
        described(spec, arrays[spec.name], parameters={"binary_data_size": len(tensor)})
        for spec, tensor in zip(INPUTS, tensors, strict=True)
    ]
    head = json.dumps({"inputs": items, "parameters": {"binary_data_output": True}}).encode()
    codec = JsonCodec("m", "1", INPUTS, OUTPUTS, **settings)
    codec.decode(b"".join((head, *tensors)), len(head))  # The next one finds its layout.
    return codec, codec.decode(b"".join((head, *tensors)), len(head))


def message(arrays):
    request = triton.ModelInferRequest(model_name="m")
    for spec in INPUTS:
        request.inputs.add(**described(spec, arrays[spec.name]))
    return request


def as_raw(arrays, **settings):
    request = message(arrays)
    request.raw_input_contents.extend(bytes(write_tensor(arrays[spec.name])) for spec in INPUTS)
    codec = ProtobufCodec("m", "1", INPUTS, OUTPUTS, **settings)
    return codec, codec.decode(request)


def as_contents(arrays, **settings):
    request = message(arrays)
    fields = "fp32_contents", "fp64_contents", "bytes_contents", "bytes_contents"
    for item, field in zip(request.inputs, fields, strict=True):
        values = arrays[item.name].reshape(-1).tolist()
        if field == "bytes_contents":
            values = [value.encode() for value in values]
        getattr(item.contents, field).extend(values)
    codec = ProtobufCodec("m", "1", INPUTS, OUTPUTS, **settings)
    return codec, codec.decode(request)


def result(**changes):
    return InferResult(ANSWER | changes, (BatchRecord(ROWS, 0),), 0)


@pytest.fixture(params=[as_json, as_binary, as_raw, as_contents])
def encoding(request):
    return request.param


def test_inputs(encoding):
    _, request = encoding(ARRAYS)
    assert {name: (array.dtype, array.shape, array.tolist()) for name, array in request.inputs.items()} == {
        name: (array.dtype, array.shape, array.tolist()) for name, array in ARRAYS.items()
    }
    assert request.layout.rows == ROWS
    expected = sum(array.nbytes for array in ARRAYS.values())
    assert expected < request.nbytes < expected + 2000  # Strings take more memory than their letters.


def test_outputs(encoding):
    codec, request = encoding(ARRAYS)
    for _ in range(2):
        encoded = codec.encode(request, result())
        if isinstance(codec, JsonCodec):
            head, tensors = encoded
            outputs = read_answer(b"".join((head, *tensors)), len(head))
        else:
            answer = triton.ModelInferResponse.FromString(encoded)
            outputs = {}
            for item, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
                assert item.datatype == datatype_of({spec.name: spec for spec in OUTPUTS}[item.name])
                body = json.dumps({"outputs": [decoded(item, raw)]}).encode()
                outputs |= read_answer(body + raw, len(body))
        assert {name: array.shape for name, array in outputs.items()} == {
            name: array.shape for name, array in ANSWER.items()
        }
        for name in ("state", "factor", "table"):
            assert outputs[name].tolist() == ANSWER[name].tolist()
        assert outputs["text"].tolist() == [[b"a", b"b\xc3\xa4\0"]] * ROWS
        assert outputs["note"].tolist() == b""


def decoded(item, raw):
    parameters = {"binary_data_size": len(raw)}
    return {"name": item.name, "datatype": item.datatype, "shape": list(item.shape), "parameters": parameters}


def test_an_answers_size_follows_from_the_rows_of_each_tensor(encoding):
    _, request = encoding(ARRAYS)
    # The width is known from the state, and the length of the text from the text.
    assert request.layout.answer_nbytes == (2 * ROWS * 3) * 4 + (ROWS * 2) * 8 + 8 + 8 + 3 * 4
    with pytest.raises(TooLargeError, match="give outputs of 228 bytes; at most 227"):
        encoding(ARRAYS, answer_max=227)


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        (
            "state",
            np.zeros((ROWS, 2, 3), np.float32),
            r"'state' takes shape \(2, rows, width\), given \(5, 2, 3\)",
        ),
        ("factor", np.zeros(1), r"'factor' takes shape \(\), given \(1,\)"),
        ("note", np.array([""], object), r"'note' takes shape \(\)"),
        ("text", np.array("", object), r"'text' takes shape \(rows, n\), given \(\)"),
        ("state", np.zeros((2, 8, 3), np.float32), r"8 rows are more than the queue can ever hold \(7\)"),
    ],
)
def test_shapes_that_do_not_fit(encoding, name, array, says):
    with pytest.raises(InputError, match=says):
        encoding(ARRAYS | {name: array}, rows_max=7)


def test_a_model_without_rows_takes_one_request_at_a_time():
    codec = JsonCodec("m", "1", [TABLE], [TABLE], rows_max=1)
    item = described(TABLE, np.zeros(9, np.int32), data=[0] * 9)
    body = json.dumps({"inputs": [item]}).encode()
    request = codec.decode(body, len(body))
    assert (request.layout.rows, request.layout.answer_nbytes) == (1, 36)


@pytest.mark.parametrize(
    ("spec", "body", "shape"),
    [
        (STATE, np.zeros(6, np.float32).tobytes(), (2, 1, 3)),
        (FACTOR, np.zeros(1).tobytes(), ()),
        (TABLE, np.zeros(9, np.int32).tobytes(), (9,)),
        (NOTE, b"whole", ()),
        (TensorSpec("t", object, (1,)), b"whole", (1, 1)),
    ],
)
def test_a_raw_body_is_one_row_or_all_of_a_tensor(spec, body, shape):
    request = JsonCodec("m", "1", [spec], [spec]).decode_raw(body)
    array = request.inputs[spec.name]
    assert array.shape == shape
    if array.dtype.kind == "O":
        assert array.item() == "whole"


RAW_TEXT = {
    "no length": (b"\1\0\0", "too few for shape"),
    "a length beyond the end": (b"\5\0\0\0abcd", "element 0 of 1 ends at byte 9 of 8"),
    "a negative length": (b"\xff\xff\xff\xffabcd", "ends at byte 4294967299 of 8"),
    "bytes after the end": (b"\1\0\0\0abcd", "3 bytes are left"),
    "not UTF-8": (b"\2\0\0\0a\xff", "tensor 'text': element 0 is not UTF-8 text"),
}


@pytest.mark.parametrize(("raw", "says"), RAW_TEXT.values(), ids=RAW_TEXT)
def test_raw_strings_that_are_none(raw, says):
    item = {"name": "text", "datatype": "BYTES", "shape": [1, 1]}
    head = json.dumps({"inputs": [item | {"parameters": {"binary_data_size": len(raw)}}]}).encode()
    with pytest.raises(InputError, match=says):
        JsonCodec("m", "1", [TEXT], [TEXT]).decode(head + raw, len(head))
    request = triton.ModelInferRequest(raw_input_contents=[raw])
    request.inputs.add(**item)
    with pytest.raises(InputError, match=says):
        ProtobufCodec("m", "1", [TEXT], [TEXT]).decode(request)


def test_contents_that_are_not_text():
    request = triton.ModelInferRequest()
    item = request.inputs.add(name="text", datatype="BYTES", shape=[1, 2])
    item.contents.bytes_contents.extend([b"a", b"\xff"])
    with pytest.raises(InputError, match="tensor 'text': element 1 is not UTF-8 text"):
        ProtobufCodec("m", "1", [TEXT], [TEXT]).decode(request)


@pytest.mark.parametrize("shape", [(1, STRINGS_MAX + 1), (1 << 20, 1 << 19)])
def test_more_strings_than_are_accepted(shape):
    item = {"name": "text", "datatype": "BYTES", "shape": list(shape)}
    head = json.dumps({"inputs": [item | {"parameters": {"binary_data_size": 4}}]}).encode()
    with pytest.raises(TooLargeError, match=f"{prod(shape)} elements of BYTES"):
        JsonCodec("m", "1", [TEXT], [TEXT]).decode(head + bytes(4), len(head))
    request = triton.ModelInferRequest(raw_input_contents=[bytes(4)])
    request.inputs.add(**item)
    with pytest.raises(TooLargeError, match=f"{prod(shape)} elements of BYTES"):
        ProtobufCodec("m", "1", [TEXT], [TEXT]).decode(request)


def test_which_strings_are_encoded_by_a_thread(encoding):
    codec, request = encoding(ARRAYS)
    assert not codec.is_slow_answer(request.layout, result())
    assert codec.is_slow_answer(request.layout, result(text=np.full((PIECE + 1, 1), "", object)))
    large = np.array([["a" * (FAST_STRINGS_NBYTES + 1)]], object)
    assert codec.is_slow_answer(request.layout, result(text=large))


def test_an_output_that_is_not_text_is_the_models_fault(encoding):
    codec, request = encoding(ARRAYS)
    wrong = result(note=np.array(5, object))
    assert not codec.is_slow_answer(request.layout, wrong)
    with pytest.raises(ExecutionError, match="holds 5 of type int: give str or bytes"):
        codec.encode(request, wrong)
