"""KServe's datatypes and NumPy's."""

import ml_dtypes
import numpy as np
import pytest

from asynctrt.errors import InputError, ModelError, RequestError
from asynctrt.kserve.datatypes import (
    DATATYPES,
    datatype_of,
    from_json,
    read_bytes,
    read_raw,
    to_json,
    write_bytes,
)
from asynctrt.tensors import TensorSpec


@pytest.mark.parametrize("name", [*DATATYPES, "S3"])
def test_every_dtype_has_a_name(name):
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    assert datatype_of(TensorSpec("x", dtype)) == DATATYPES.get(name, "BYTES")


@pytest.mark.parametrize("dtype", ["complex64", ">f4", "S", "U3", "O", "datetime64[s]", "longdouble"])
def test_dtypes_without_a_name(dtype):
    with pytest.raises(ModelError, match="'x'"):
        datatype_of(TensorSpec("x", dtype))


SPEC = TensorSpec("x", "S4")


@pytest.mark.parametrize("elements", [[], [b""], [b"a", b"", b"abcd"], [b"\x00x", b"\xff\xfe"]])
def test_bytes_there_and_back(elements):
    raw = write_bytes(np.array(elements, "S4"))
    assert len(raw) == sum(4 + len(item) for item in elements)
    assert read_bytes(SPEC, memoryview(raw), len(elements)).tolist() == elements


@pytest.mark.parametrize(
    ("raw", "count", "says"),
    [
        (b"", 1, "ends at byte 4"),
        (b"\x01\x00\x00", 1, "ends at byte"),
        (b"\x02\x00\x00\x00a", 1, "ends at byte 6"),
        (b"\xff\xff\xff\xffa", 1, "ends at byte"),
        (b"\x01\x00\x00\x00ab", 1, "1 bytes are left"),
        (b"\x05\x00\x00\x00abcde", 1, "the model takes at most 4"),
        (b"\x02\x00\x00\x00a\x00", 1, "NUL"),
    ],
)
def test_bytes_that_are_none(raw, count, says):
    with pytest.raises(InputError, match=says):
        read_bytes(SPEC, memoryview(raw), count)


@pytest.mark.parametrize(
    ("dtype", "data", "shape", "expected"),
    [
        ("float32", [1, 2.5, 3, 4], (2, 2), [[1, 2.5], [3, 4]]),
        ("float32", [[1, 2], [3, 4]], (2, 2), [[1, 2], [3, 4]]),
        ("int64", [-(2**63), 2**63 - 1], (2,), [-(2**63), 2**63 - 1]),
        ("bool", [True, False], (1, 2), [[True, False]]),
        ("float16", [0.5], (1, 1), [[0.5]]),
        (ml_dtypes.bfloat16, [0.5, 3], (2,), [0.5, 3]),
        ("S4", [["a", "b\u00e4"], ["", "x"]], (2, 2), [[b"a", "b\u00e4".encode()], [b"", b"x"]]),
        ("float32", [], (0, 4), []),
    ],
)
def test_from_json(dtype, data, shape, expected):
    array = from_json(TensorSpec("x", dtype), data, shape)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "data", "shape"),
    [
        ("float32", 1, (1,)),
        ("float32", {"a": 1}, (1,)),
        ("float32", None, (1,)),
        ("float32", [1, 2], (3,)),
        ("float32", ["1"], (1,)),
        ("float32", [[1], [1, 2]], (3,)),
        ("int8", [200], (1,)),
        ("int32", [1.5], (1,)),
        ("uint8", [-1], (1,)),
        ("bool", [1], (1,)),
        ("S4", [1], (1,)),
        ("S4", ["abcde"], (1,)),
        ("S4", ["a\x00"], (1,)),
        ("float32", [1e300], (1,)),
        ("float32", [None], (1,)),
    ],
)
def test_values_that_do_not_fit(dtype, data, shape):
    with pytest.raises(InputError, match="'x'"):
        from_json(TensorSpec("x", dtype), data, shape)


def test_to_json():
    assert to_json(np.array([[b"a", b""]], "S3")) == ["a", ""]
    assert to_json(np.array([[1, 2]], ml_dtypes.bfloat16)).tolist() == [1, 2]
    assert to_json(np.zeros((2, 3), np.int8).T).tolist() == [0] * 6
    with pytest.raises(RequestError, match="binary_data"):
        to_json(np.array([b"\xff"]))


def test_bools_are_0_or_1():
    spec = TensorSpec("x", "bool", (2,))
    assert read_raw(spec, (1, 2), b"\x00\x01").tolist() == [[False, True]]
    assert read_raw(spec, (0, 2), b"").tolist() == []
    with pytest.raises(InputError, match="0 or 1"):
        read_raw(spec, (1, 2), b"\x00\x02")
