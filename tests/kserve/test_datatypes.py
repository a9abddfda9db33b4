"""KServe's datatypes and NumPy's."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from asynctrt.errors import ExecutionError, InputError, ModelError, RequestError
from asynctrt.kserve.datatypes import (
    DATATYPES,
    check_nbytes,
    datatype_of,
    from_json,
    read_bytes,
    read_tensor,
    to_json,
    write_bytes,
)
from asynctrt.tensors import TensorSpec


@pytest.mark.parametrize("name", [*DATATYPES, "S3", "object"])
def test_every_dtype_has_a_name(name):
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    assert datatype_of(TensorSpec("x", dtype)) == DATATYPES.get(name, "BYTES")


@pytest.mark.parametrize("dtype", ["complex64", "U3", "datetime64[s]", "longdouble"])
def test_dtypes_without_a_name(dtype):
    with pytest.raises(ModelError, match="'x'"):
        datatype_of(TensorSpec("x", dtype))


@pytest.mark.parametrize("kind", ["sequence", "map", "optional"])
def test_what_is_no_tensor(kind):
    with pytest.raises(ModelError, match=f"'x' is a {kind}: export the model without it"):
        datatype_of(TensorSpec("x", object, axis=None, kind=kind))


SPEC = TensorSpec("x", "S4")
TEXT = TensorSpec("x", object)


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
    "elements", [[], [""], ["a", "", "bä", "\0", "x\0"], ["\U0001f600" * 1000, "b"] * 5000]
)
def test_text_there_and_back(elements):
    raw = write_bytes(np.array(elements, object))
    assert len(raw) == sum(4 + len(item.encode()) for item in elements)
    array = read_bytes(TEXT, memoryview(raw), len(elements))
    assert (array.dtype, array.tolist()) == (np.dtype(object), elements)
    if elements:
        as_given = read_bytes(TEXT, memoryview(raw), len(elements), decodes=False)
        assert as_given.tolist() == [item.encode() for item in elements]
    assert from_json(TEXT, elements, (len(elements),)).tolist() == elements


@pytest.mark.parametrize(
    ("elements", "says"),
    [
        ([b"a", b"\xff"], "'x': element 1 is not UTF-8 text .invalid start byte at byte 0"),
        ([b"a"] * 5000 + [b"bc\xc3", b"\xff"], "'x': element 5000 is not UTF-8 text .* at byte 2"),
        ([b"\xed\xa0\x80"], "'x': element 0 is not UTF-8 text"),
    ],
)
def test_bytes_that_are_not_text(elements, says):
    raw = write_bytes(np.array(elements, object))
    with pytest.raises(InputError, match=says):
        read_bytes(TEXT, memoryview(raw), len(elements))


@pytest.mark.parametrize("item", [5, None, "\ud800", bytearray(b"x")])
def test_outputs_that_are_not_strings(item):
    array = np.empty(2, object)
    array[:] = ["a", item]
    for write in (write_bytes, to_json):
        with pytest.raises(ExecutionError, match=f"of type {type(item).__name__}: give str or bytes"):
            write(array)


def test_what_claims_to_be_large_takes_no_memory():
    """Not by a length of an element, and not by their number."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="ends at byte"):
            read_bytes(TEXT, memoryview(b"\xff\xff\xff\xff" * 4), 1)
        with pytest.raises(InputError, match="too few for shape"):
            check_nbytes(TEXT, (1 << 38,), 16)
        with pytest.raises(InputError, match="1 values, but shape"):
            from_json(TEXT, ["a"], (1 << 38,))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


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
        ("float32", [5], (), 5),
        ("float32", 5, (), 5),
        ("object", ["bä\0"], (), "bä\0"),
        ("object", "bä", (), "bä"),
        ("object", [["a"], [""]], (2, 1), [["a"], [""]]),
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
        ("float32", [1, 2], ()),
        ("float32", {"a": 1}, ()),
        ("float32", None, ()),
        ("object", [1], (1,)),
        ("object", [None], (1,)),
        ("object", [["a"], "b"], (2,)),
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
    assert to_json(np.array([["a", b"b\xc3\xa4"]], object)) == ["a", "bä"]
    assert to_json(np.array(1.5)).tolist() == [1.5]
    assert to_json(np.array([[1, 2]], ml_dtypes.bfloat16)).tolist() == [1, 2]
    assert to_json(np.zeros((2, 3), np.int8).T).tolist() == [0] * 6
    with pytest.raises(RequestError, match="binary_data"):
        to_json(np.array([b"\xff"]))


def test_bools_are_0_or_1():
    spec = TensorSpec("x", "bool", (2,))
    assert read_tensor(spec, (1, 2), b"\x00\x01", 0, 2).tolist() == [[False, True]]
    assert read_tensor(spec, (0, 2), b"", 0, 0).tolist() == []
    with pytest.raises(InputError, match="0 or 1"):
        read_tensor(spec, (1, 2), b"\x00\x02", 0, 2)
