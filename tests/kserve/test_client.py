"""Requests written and answers read, without a wire."""

import json

import numpy as np
import pytest

from asynctrt.errors import InputError, RequestError
from asynctrt.kserve.client import (
    HEAD_NBYTES,
    AnswerError,
    as_arrays,
    describe_request,
    place_outputs,
    read_answer,
    read_output,
    read_outputs,
    read_specs,
    read_values,
    write_request,
)
from asynctrt.kserve.datatypes import write_tensor


def write_binary(inputs):
    arrays = as_arrays(inputs)
    body, headers = write_request(arrays, [write_tensor(array) for array in arrays.values()])
    return body, int(headers[HEAD_NBYTES])


def write_json(inputs):
    body, headers = write_request(as_arrays(inputs), None)
    assert headers == {"Content-Type": "application/json"}
    return body


class TestRequests:
    def test_raw_tensors(self):
        inputs = {"x": np.arange(4, dtype=">i2").reshape(2, 2).T, "w": ["a", "bä"], "b": np.array([True])}
        body, head_nbytes = write_binary(inputs)
        assert json.loads(body[:head_nbytes]) == {
            "parameters": {"binary_data_output": True},
            "inputs": [
                {"name": "x", "datatype": "INT16", "shape": [2, 2], "parameters": {"binary_data_size": 8}},
                {"name": "w", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 12}},
                {"name": "b", "datatype": "BOOL", "shape": [1], "parameters": {"binary_data_size": 1}},
            ],
        }
        assert body[head_nbytes:] == b"\0\0\2\0\1\0\3\0" + b"\1\0\0\0a\3\0\0\0b\xc3\xa4" + b"\1"

    def test_a_priority(self):
        array = np.zeros(1, np.int8)
        for sizes, parameters in (([1], {"binary_data_output": True}), (None, {})):
            told = describe_request({"x": array}, sizes, priority=2)
            assert told["parameters"] == {**parameters, "priority": 2}

    def test_json(self):
        inputs = {"x": np.array([[0.5, np.nan]], np.float16), "w": np.array([b"a"]), "b": np.array([True])}
        assert json.loads(write_json(inputs)) == {
            "inputs": [
                {"name": "x", "datatype": "FP16", "shape": [1, 2], "data": [0.5, None]},
                {"name": "w", "datatype": "BYTES", "shape": [1], "data": ["a"]},
                {"name": "b", "datatype": "BOOL", "shape": [1], "data": [True]},
            ]
        }
        for value in (np.array([np.inf]), np.array([b"\xff"])):
            with pytest.raises(RequestError):
                write_json({"x": value})

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            (np.zeros(1, complex), "no datatype for complex128, the dtype of input 'x'"),
            (np.array([{}], object), "'x' holds objects of type dict, not bytes or text"),
            (["a", "\ud800"], "'x' has text that UTF-8 cannot hold"),
        ],
    )
    def test_what_cannot_be_sent(self, value, says):
        with pytest.raises(InputError, match=says):
            as_arrays({"x": value})

    @pytest.mark.parametrize(
        "value", [[b"a\0", "bä"], ["a\0", "bä"], np.array([b"a\0", "bä"], object), np.array(["a\0b", "c"])]
    )
    def test_strings_are_sent_to_their_last_byte(self, value):
        body, head_nbytes = write_binary({"x": value})
        elements = [item if isinstance(item, bytes) else item.encode() for item in list(value)]
        assert body[head_nbytes:] == b"".join(len(one).to_bytes(4, "little") + one for one in elements)

    def test_a_single_string_and_a_single_number(self):
        body, head_nbytes = write_binary({"w": "bä", "x": np.array(1, np.int16)})
        assert [item["shape"] for item in json.loads(body[:head_nbytes])["inputs"]] == [[], []]
        assert body[head_nbytes:] == b"\3\0\0\0b\xc3\xa4" + b"\1\0"
        assert json.loads(write_json({"w": "bä", "x": np.array(1.5)})) == {
            "inputs": [
                {"name": "w", "datatype": "BYTES", "shape": [], "data": ["bä"]},
                {"name": "x", "datatype": "FP64", "shape": [], "data": [1.5]},
            ]
        }

    def test_objects(self):
        given = as_arrays({"x": np.array([["a", b"bc"]], object), "none": np.zeros((0, 2), object)})
        assert given["x"].tolist() == [[b"a", b"bc"]]
        assert given["none"].shape == (0, 2)


def test_an_answer_of_both_kinds():
    head = json.dumps(
        {
            "outputs": [
                {"name": "r", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
                {"name": "j", "datatype": "INT8", "shape": [1], "data": [7], "parameters": {}},
                {"name": "w", "datatype": "BYTES", "shape": [2, 1], "parameters": {"binary_data_size": 12}},
                {"name": "e", "datatype": "BYTES", "shape": [0], "parameters": {"binary_data_size": 0}},
                {"name": "f", "datatype": "FP16", "shape": [1], "data": [1e9], "parameters": None},
            ]
        }
    ).encode()
    body = head + np.array([1, 2], np.float32).tobytes() + b"\4\0\0\0abcd\0\0\0\0"
    given = read_answer(body, {HEAD_NBYTES: str(len(head))})
    assert {name: array.tolist() for name, array in given.items()} == {
        "r": [1, 2],
        "j": [7],
        "w": [[b"abcd"], [b""]],
        "e": [],
        "f": [np.inf],
    }


def output(datatype="FP32", shape=(2,), **kw):
    return {"name": "y", "datatype": datatype, "shape": list(shape), **kw}


RAW = {"parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "'outputs' is missing"),
        ({"outputs": 1}, "cannot be read"),
        ({"outputs": [{"name": "y"}]}, "'datatype' is missing"),
        ({"outputs": [output("STRING", **RAW)]}, "unknown datatype 'STRING'"),
        ({"outputs": [output(None, **RAW)]}, "unknown datatype None"),
        ({"outputs": [output()]}, "'data' is missing"),
        ({"outputs": [output(shape=(3,), **RAW)]}, "takes 12 bytes, but 8"),
        ({"outputs": [output("BYTES", shape=(3,), **RAW)]}, "too few for shape"),
        ({"outputs": [output(parameters={"binary_data_size": "8"})]}, "but 8 are given"),
        ({"outputs": [output(shape=("x",), **RAW)]}, "cannot be read"),
        ({"outputs": [output(data=[1])]}, "cannot be read"),
        ({"outputs": [output("INT8", data=["a", "b"])]}, "cannot be read"),
    ],
)
def test_an_answer_that_breaks_the_protocol(content, says):
    with pytest.raises(AnswerError, match=says):
        place_outputs(content)
    with pytest.raises(AnswerError, match=rf"{says}.*; it begins b'"):
        read_answer(json.dumps(content).encode(), {})


def test_fewer_bytes_than_an_answer_says():
    outputs = place_outputs({"outputs": [output(**RAW)]})
    assert read_outputs(outputs, bytes(9), 1)["y"].tolist() == [0, 0]
    with pytest.raises(AnswerError, match="more than the 7 bytes after its header"):
        read_outputs(outputs, bytes(8), 1)


def test_byte_strings_of_an_answer_may_end_in_nul():
    """They are bytes as they came, whether or not that is text."""
    outputs = place_outputs({"outputs": [output("BYTES", parameters={"binary_data_size": 11})]})
    assert read_outputs(outputs, b"\1\0\0\0\0\2\0\0\0\xffb", 0)["y"].tolist() == [b"\0", b"\xffb"]
    with pytest.raises(AnswerError, match="element 1 of 2 ends"):
        read_outputs(outputs, b"\1\0\0\0\0\3\0\0\0ab", 0)


def test_outputs_without_axes():
    outputs = place_outputs(
        {
            "outputs": [
                output(shape=(), parameters={"binary_data_size": 4}),
                output("BYTES", (), parameters={"binary_data_size": 5}) | {"name": "w"},
                output("INT64", (), data=[7]) | {"name": "j"},
            ]
        }
    )
    given = read_outputs(outputs, np.float32(1.5).tobytes() + b"\1\0\0\0a", 0)
    assert {name: (array.shape, array.tolist()) for name, array in given.items()} == {
        "y": ((), 1.5),
        "w": ((), b"a"),
        "j": ((), 7),
    }


def test_outputs_that_stand_alone():
    assert read_output("y", "INT16", [2], b"\1\0\2\0").tolist() == [1, 2]
    with pytest.raises(InputError, match="'y' of shape \\[2\\] takes 4 bytes, but 3"):
        read_output("y", "INT16", [2], b"\1\0\2")
    assert read_values("y", "FP32", [1, 2], [[1, None]]).tolist()[0][0] == 1
    assert np.isnan(read_values("y", "BF16", [1], [None]).astype(np.float32)).all()
    assert read_values("y", "BYTES", [2], ["a", b"b"]).tolist() == [b"a", b"b"]


def test_specs_from_metadata():
    shapes = {"x": [-1, 3, -1], "y": [2], "state": [2, -1, 3], "all": []}
    specs = read_specs({"name": name, "datatype": "FP32", "shape": shape} for name, shape in shapes.items())
    assert [(spec.dims, spec.axis) for spec in specs] == [
        ((3, "x.2"), 0),
        ((2,), None),
        ((2, "state.1", 3), None),
        ((), None),
    ]
    with pytest.raises(AnswerError, match="metadata cannot be read: 'name' is missing"):
        read_specs([{}])
