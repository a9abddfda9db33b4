"""Check that any bytes given to the binary decoder become the call that they encode, or a caller's error.

The functions `check_*` are the properties, which tests/serving/test_fuzz.py tries with Hypothesis.
"""

import json
import math
import re
import struct

import ml_dtypes
import numpy as np
import orjson

from asynctrt.errors import CallerError, UnsupportedError
from asynctrt.kserve.datatypes import datatype_of, read_bytes
from asynctrt.kserve.json_codec import JsonCodec, dump
from asynctrt.tensors import TensorSpec

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", ml_dtypes.bfloat16, "S8"),
]
DIMS = [(), (2,), ("length",), ("length", 2)]
INPUTS = tuple(
    TensorSpec(f"in{number}", np.dtype(dtype), DIMS[number % len(DIMS)])
    for number, dtype in enumerate(DTYPES)
)
OUTPUTS = tuple(TensorSpec(spec.name.replace("in", "out"), spec.dtype, spec.dims) for spec in INPUTS)
BY_NAME = {spec.name: spec for spec in INPUTS}

RAW_INPUTS = tuple(
    TensorSpec("input", np.dtype(dtype), dims)
    for dtype, dims in [
        *(("float32", (4,)), ("float32", ("n",)), ("float64", (2, "n")), ("int64", ())),
        *(("S8", ()), ("S8", ("n",)), ("uint8", ("n", "m")), ("int16", (0,)), ("bool", (1, "n", 3))),
    ]
)

MESSAGE_CHARS_MAX = 1000
"""An error must not quote a large request at length."""

LEADING_ID = re.compile(rb'\{"id":"[^"\\]*"')
ANY_ID = re.compile(rb'"id"(\s*:\s*)"[^"\\]*"')


def make_codec():
    """Return a codec for a model with an input of each datatype, with fixed and with open dimensions."""
    return JsonCodec("all", "1", INPUTS, OUTPUTS)


def wire_of(array):
    """Return the raw bytes of a tensor."""
    if array.dtype.kind != "S":
        return array.tobytes()
    return b"".join(struct.pack("<I", len(item)) + item for item in array.ravel().tolist())


def good_message(request_id="good"):
    """Return a valid message for `make_codec()`, and the length of its header."""
    tensors = wire_of(np.array([b"ab", b"", b"\0b", b""], "S8")) + struct.pack("<2q", 1, -1)
    inputs = [
        {"name": "in13", "datatype": "BYTES", "shape": [2, 2], "parameters": {"binary_data_size": 20}},
        {"name": "in8", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}},
    ]
    head = json.dumps({"id": request_id, "inputs": inputs}, separators=(",", ":")).encode()
    return head + tensors, len(head)


# ---- the properties


def check_message(body, head_nbytes):
    """Check what a message is decoded to, and that it does not depend on what was decoded before."""
    used = make_codec()
    first = _outcome(used, body, head_nbytes)
    relatives = list(_relatives(body, head_nbytes)) if first[0] == "call" else []
    for message in (*relatives, (body, head_nbytes)):
        assert _outcome(used, *good_message())[0] == "call"
        assert _outcome(used, *message) == _outcome(make_codec(), *message), message
    assert _outcome(used, *good_message("other")) == _outcome(make_codec(), *good_message("other"))
    return first[0]


def check_plain(body):
    """Check that plain JSON is decoded to the values that it holds, or is the caller's error."""
    try:
        call = make_codec().decode_plain(body)
    except CallerError as error:
        check_error(error)
        return "error"
    content = orjson.loads(body)
    assert ("instances" in content) != ("inputs" in content)
    if "instances" in content:
        rows = content["instances"]
        assert call.layout.rows == len(rows)
        given = {name: [row[name] for row in rows] for name in rows[0]}
    else:
        given = content["inputs"]
    assert list(call.inputs) == list(given)
    for name, array in call.inputs.items():
        assert array.dtype == BY_NAME[name].dtype
        assert _are_same(array, given[name]), (array, given[name])
    assert call.layout.plain in ("predictions", "outputs")
    return "call"


def check_raw(spec, body):
    """Check that a body without a header is decoded to a row of the model's only input."""
    codec = JsonCodec("raw", "1", [spec], OUTPUTS[:2])
    try:
        call = codec.decode_raw(body)
    except CallerError as error:
        check_error(error)
        return
    (array,) = call.inputs.values()
    assert array.shape[0] == 1
    assert spec.dims == tuple(
        [dim if isinstance(dim, str) else size for dim, size in zip(spec.dims, array.shape[1:], strict=True)]
    )
    assert (array.ravel().tolist() == [body]) if spec.dtype.kind == "S" else (array.tobytes() == body)


def check_bytes(raw, count):
    """Check that a BYTES tensor has exactly `count` elements, and no bytes beyond them."""
    try:
        array = read_bytes(INPUTS[-1], memoryview(raw), count)
    except CallerError as error:
        check_error(error)
        return
    assert array.shape == (count,)
    assert wire_of(array) == raw


def check_error(error):
    """Check that an error of the caller's has a 4xx status and a short message."""
    assert 400 <= error.http_status < 500 or isinstance(error, UnsupportedError)
    assert len(str(error)) < MESSAGE_CHARS_MAX, str(error)[:200]
    dump({"error": str(error)})


def check_call(call, head, tensors):
    """Compare a decoded call with its message, which is parsed once more without the codec."""
    content = orjson.loads(head)
    parameters = content.get("parameters") or {}
    assert call.id == content.get("id", "")
    assert list(call.inputs) == [item["name"] for item in content["inputs"]]
    for item in content["inputs"]:
        spec, array = BY_NAME[item["name"]], call.inputs[item["name"]]
        assert array.dtype == spec.dtype
        assert item["datatype"] == datatype_of(spec)
        assert list(array.shape) == item["shape"]
        nbytes = (item.get("parameters") or {}).get("binary_data_size")
        if nbytes is None:
            assert _are_same(array, item["data"]), (array, item["data"])
        else:
            assert wire_of(array) == tensors[:nbytes]
            tensors = tensors[nbytes:]
    assert not tensors
    default = parameters.get("binary_data_output", False)
    wanted = content.get("outputs") or [{"name": spec.name} for spec in OUTPUTS]
    assert [(spec.name, binary) for spec, binary in call.layout.outputs] == [
        (item["name"], (item.get("parameters") or {}).get("binary_data", default)) for item in wanted
    ]
    assert call.layout.priority == parameters.get("priority", 0)
    assert (call.layout.timeout or 0) == parameters.get("timeout", 0) / 1e6


def _outcome(codec, body, head_nbytes):
    """Return the decoded call or the error of a message, in a form that can be compared."""
    try:
        call = codec.decode(body, head_nbytes)
    except CallerError as error:
        check_error(error)
        return "error", type(error).__name__, str(error)
    check_call(call, body[:head_nbytes], body[head_nbytes:])
    arrays = [(name, array.shape, array.tobytes()) for name, array in call.inputs.items()]
    layout = call.layout
    return "call", call.id, arrays, layout.outputs, layout.priority, layout.timeout


def _relatives(body, head_nbytes):
    """Yield messages that a cache of headers, which leaves out their ids, may confuse with this one."""
    head, tensors = body[:head_nbytes], body[head_nbytes:]
    found = LEADING_ID.match(head)
    rests = [head[found.end() :]] if found else [b"," + head[1:], b"}" + head[1:]]
    for rest in rests:
        for start in (b"", b'{"id":"other"', b'{"id":""', b'{"id":"\\u0061"', b'{"id":7', b"{"):
            yield start + rest + tensors, len(start) + len(rest)
    ends = (
        b',"id":"other"}',
        b',"id" : ""}',
        b',"parameters":{"id":"other"}}',
        b',"id":"other","id":"last"}',
    )
    others = [head.rstrip()[:-1] + end for end in ends]
    others += [ANY_ID.sub(b'"id":"%b"' % other, head) for other in (b"other", b"")]
    others += [ANY_ID.sub(rb'"id"\1"other"', head, count=1)]
    for other in others:
        yield other + tensors, len(other)


def _are_same(array, data):
    """Return whether an array has the values that stood in JSON, as precisely as its dtype can hold them."""
    values = data
    while any(isinstance(item, list) for item in values):
        values = [part for item in values for part in (item if isinstance(item, list) else [item])]
    given = array.ravel().tolist()
    if len(given) != len(values):
        return False
    if array.dtype.kind == "S":
        return given == [value.encode() for value in values]
    if array.dtype.kind in "biu":
        return given == values
    limits = ml_dtypes.finfo(array.dtype)
    near, tiny = float(limits.eps), float(limits.smallest_subnormal)
    return all(
        math.isclose(one, other, rel_tol=near, abs_tol=tiny) for one, other in zip(given, values, strict=True)
    )
