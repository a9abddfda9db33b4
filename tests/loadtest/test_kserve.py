"""Addresses, and what goes over the wire, without a wire. The rest is tried through the targets."""

import json

import numpy as np
import pytest

from asynctrt.errors import InputError, OptionsError, RequestError, UsageError
from asynctrt.loadtest.kserve import (
    Address,
    as_arrays,
    choose_model,
    read_address,
    read_answer,
    read_grpc_address,
    write_binary,
    write_json,
)
from asynctrt.loadtest.targets import TargetSpec


@pytest.mark.parametrize(
    ("where", "address"),
    [
        ("http://h:1", ("http://h:1", "", "")),
        ("http://h:1/", ("http://h:1", "", "")),
        ("http://h/v2", ("http://h", "", "")),
        ("https://h:1/v2/models/m", ("https://h:1", "m", "")),
        ("http://h:1/v2/models/m/", ("http://h:1", "m", "")),
        ("http://h:1/v2/models/m/versions/2", ("http://h:1", "m", "2")),
        ("http://h:1/v2/models/m/versions/2/infer", ("http://h:1", "m", "2")),
        ("http://h:1/v2/models/m/infer", ("http://h:1", "m", "")),
        ("http://h:1/v2/models/infer", ("http://h:1", "infer", "")),
        ("http://h:1/v2/models/versions/2", ("http://h:1", "versions/2", "")),
        ("http://h:1/v2/models/a%2Fb%20c", ("http://h:1", "a/b c", "")),
        ("http://h:1/v2/models/a/b", ("http://h:1", "a/b", "")),
        ("http://[::1]:1/v2/models/m", ("http://[::1]:1", "m", "")),
        ("http://h:1/gate/v2", ("http://h:1/gate", "", "")),
        ("http://h:1/gate/v2/models/m", ("http://h:1/gate", "m", "")),
        ("ws://h:1", ("ws://h:1", "", "")),
        ("ws://h:1/v2/ws", ("ws://h:1", "", "")),
        ("wss://h:1/v2/models/m/ws", ("wss://h:1", "m", "")),
        ("ws://h:1/v2/models/m/versions/2/ws", ("ws://h:1", "m", "2")),
        ("ws://h:1/v2/models/m", ("ws://h:1", "m", "")),
        ("ws://h:1/v2/models/ws", ("ws://h:1", "ws", "")),
    ],
)
def test_addresses(where, address):
    assert read_address(TargetSpec(where)) == Address(*address)
    if not address[1]:
        assert read_address(TargetSpec(where, model="x")) == Address(address[0], "x")


@pytest.mark.parametrize(
    "where",
    [
        *("http://", "http://:1", "http://h:x", "http://h:70000", "http://h:0", "http://[h", "http://h/x"),
        *("http://h/v2/x", "http://h/v2/models", "http://h/v2/ws", "http://h/v2?x=1", "http://h/v2#x"),
        *("ws://h/ws", "ws://h/v2/infer", "http://h/v1/models/m", "http://h/v2x"),
    ],
)
def test_what_is_no_address(where):
    with pytest.raises(UsageError, match="is no .*address.*: (http|ws)://HOST:PORT/v2/models/NAME"):
        read_address(TargetSpec(where))


def test_addresses_of_grpc():
    for where, address in [
        ("grpc://h:1", ("grpc://h:1", "", "")),
        ("grpc://h:1/", ("grpc://h:1", "", "")),
        ("grpcs://h:1/m", ("grpcs://h:1", "m", "")),
        ("grpc://[::1]:1/m", ("grpc://[::1]:1", "m", "")),
        ("grpc://h:1/a/b", ("grpc://h:1", "a/b", "")),
        ("grpc://h:1/a%2Fb/versions/3", ("grpc://h:1", "a/b", "3")),
    ]:
        assert read_grpc_address(TargetSpec(where)) == Address(*address)
    for where in ("grpc://", "grpc://h", "grpc://h/m", "grpc://:1/m", "grpc://h:x/m", "grpc://h:1/m?x"):
        with pytest.raises(UsageError, match="grpc://HOST:PORT/NAME"):
            read_grpc_address(TargetSpec(where))


def test_a_path_is_quoted():
    assert Address("", "a/b c").path == "/v2/models/a%2Fb%20c"
    assert Address("", "größe", "2").path == "/v2/models/gr%C3%B6%C3%9Fe/versions/2"


def test_one_model_is_said_once():
    assert read_address(TargetSpec("http://h:1/v2/models/m", model="m")).model == "m"
    for where in ("http://h:1/v2/models/m", "ws://h:1/v2/models/m/ws"):
        with pytest.raises(OptionsError, match="'m', and the option model says 'x'"):
            read_address(TargetSpec(where, model="x"))
    with pytest.raises(OptionsError, match="give one of them"):
        read_grpc_address(TargetSpec("grpc://h:1/m", model="x"))


def test_the_only_model():
    assert choose_model({"m"}, "here") == "m"
    with pytest.raises(OptionsError, match="here does not say which .* has 'a', 'b': .* --model NAME"):
        choose_model({"b", "a"}, "here")
    with pytest.raises(OptionsError, match="none that are ready"):
        choose_model(set(), "here")


class TestRequests:
    def test_raw_tensors(self):
        inputs = {"x": np.arange(4, dtype=">i2").reshape(2, 2).T, "w": ["a", "bä"], "b": np.array([True])}
        body, head_nbytes = write_binary(inputs, 2)
        assert json.loads(body[:head_nbytes]) == {
            "parameters": {"binary_data_output": True, "priority": 2},
            "inputs": [
                {"name": "x", "datatype": "INT16", "shape": [2, 2], "parameters": {"binary_data_size": 8}},
                {"name": "w", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 12}},
                {"name": "b", "datatype": "BOOL", "shape": [1], "parameters": {"binary_data_size": 1}},
            ],
        }
        assert body[head_nbytes:] == b"\0\0\2\0\1\0\3\0" + b"\1\0\0\0a\3\0\0\0b\xc3\xa4" + b"\1"
        assert b"priority" not in write_binary(inputs, 0)[0]

    def test_json(self):
        inputs = {"x": np.array([[0.5, np.nan]], np.float16), "w": np.array([b"a"]), "b": np.array([True])}
        assert json.loads(write_json(inputs, 0)) == {
            "inputs": [
                {"name": "x", "datatype": "FP16", "shape": [1, 2], "data": [0.5, None]},
                {"name": "w", "datatype": "BYTES", "shape": [1], "data": ["a"]},
                {"name": "b", "datatype": "BOOL", "shape": [1], "data": [True]},
            ]
        }
        for value in (np.array([np.inf]), np.array([b"\xff"])):
            with pytest.raises(RequestError, match="binary_data"):
                write_json({"x": value}, 0)

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            (np.zeros(1, complex), "'x' is complex128"),
            (np.array([{}], object), "'x' holds objects: dict, not bytes or text"),
            (np.array([b"a\0"], object), "'x' has bytes that end in a NUL"),
        ],
    )
    def test_what_cannot_be_sent(self, value, says):
        with pytest.raises(InputError, match=says):
            as_arrays({"x": value})

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
    given = read_answer(body, len(head))
    assert {name: array.tolist() for name, array in given.items()} == {
        "r": [1, 2],
        "j": [7],
        "w": [[b"abcd"], [b""]],
        "e": [],
        "f": [np.inf],
    }
