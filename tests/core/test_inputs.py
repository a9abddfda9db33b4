"""The check of a call's inputs. A refusal names tensor, expected and given."""

import array
import asyncio
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asynctrt
from asynctrt.core.inputs import InputCheck, as_text
from asynctrt.errors import InputError
from asynctrt.scheduling.key import SHAPES_MAX, BatchKey
from asynctrt.tensors import TensorSpec, convert, holds_text
from tests.models import double_model, rows

FLOATS = TensorSpec("x", np.dtype("float32"), (3,))
IDS = TensorSpec("ids", np.dtype("int64"), ("length",))
MASK = TensorSpec("mask", np.dtype("bool"), ("length",))


def validated(inputs, *specs, **kw):
    return InputCheck(specs or (FLOATS,), **kw).validate(inputs)


def refused(inputs, *specs, **kw):
    with pytest.raises(InputError) as caught:
        validated(inputs, *specs, **kw)
    return str(caught.value)


@pytest.mark.parametrize("inputs", [{"x": np.zeros((2, 3), np.float32)}, np.zeros((2, 3), np.float32)])
def test_an_array_is_taken_as_it_is(inputs):
    (given_array,), rows, key = validated(inputs)
    assert given_array is (inputs["x"] if isinstance(inputs, dict) else inputs)
    assert (rows, key) == (2, BatchKey())


@pytest.mark.parametrize("specs", [[FLOATS], [IDS], [IDS, MASK]])
def test_a_shape_that_was_checked_before_gives_the_same(specs):
    inputs = {spec.name: np.ones((2, 3), spec.dtype) for spec in specs}
    check = InputCheck(specs)
    first, again = check.validate(inputs), check.validate(inputs)
    assert first[1:] == again[1:] == check._check(inputs)[1:]
    assert all(array is inputs[spec.name] for spec, array in zip(specs, again[0], strict=True))


@pytest.mark.parametrize("specs", [[FLOATS], [IDS, MASK]])
def test_a_shape_that_was_checked_before_does_not_let_another_type_pass(specs):
    check = InputCheck(specs)
    check.validate({spec.name: np.ones((2, 3), spec.dtype) for spec in specs})
    with pytest.raises(InputError, match="complex"):
        check.validate({spec.name: np.ones((2, 3), complex) for spec in specs})


def test_what_is_remembered_of_shapes_is_bounded():
    check = InputCheck([IDS])
    for length in range(1, 2 * SHAPES_MAX + 10):
        check.validate(np.ones((1, length), np.int64))
    assert len(check._known) <= SHAPES_MAX


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros((2, 3)), ["'x'", "float32", "float64", "astype"]),
        (np.zeros((2, 4), np.float32), ["'x'", "(rows, 3)", "(2, 4)"]),
        (np.zeros((2, 3, 1), np.float32), ["'x'", "(rows, 3)", "(2, 3, 1)"]),
        (np.zeros(3, np.float32), ["'x'", "(3,)", "array[None]"]),
        (np.float32(1), ["'x'", "()"]),
        (np.zeros((0, 3), np.float32), ["no rows", "(1, 3)"]),
        ([[1, 2], [3]], ["ragged"]),
        ("text", ["'x'", "float32", "text"]),
        ([["a", "b", "c"]], ["'x'", "float32"]),
        ([[1, 2, None]], ["'x'", "object"]),
        ([[1e300, 0, 0]], ["'x'", "holds"]),
        (object(), ["'x'", "object"]),
        (None, ["'x'", "NoneType"]),
    ],
)
def test_what_does_not_fit_is_refused(value, says):
    message = refused({"x": value})
    for part in says:
        assert part in message


def test_names_must_match():
    message = refused({"y": np.zeros((1, 3), np.float32)})
    assert "missing: ['x']" in message
    assert "unknown: ['y']" in message


def test_one_array_is_not_enough_for_two_inputs():
    assert "2 inputs" in refused(np.zeros((1, 3)), IDS, MASK)


def test_rows_are_checked_against_each_other():
    message = refused({"ids": np.zeros((2, 5), np.int64), "mask": np.zeros((3, 5), bool)}, IDS, MASK)
    assert "'mask' has 3 rows" in message
    assert "'ids' has 2" in message


def test_dynamic_dimensions_must_agree_where_they_share_a_name():
    message = refused({"ids": np.zeros((1, 5), np.int64), "mask": np.zeros((1, 6), bool)}, IDS, MASK)
    assert "'mask' has size 6 on axis 1 ('length'), and 'length' is 5 on an earlier axis" in message
    message = refused(np.zeros((1, 5, 6), np.int64), TensorSpec("ids", "int64", ("length", "length")))
    assert "'ids' has size 6 on axis 2 ('length'), and 'length' is 5" in message


def test_the_key_has_the_values_of_the_dynamic_dimensions():
    def key(length):
        return validated(
            {"ids": np.zeros((1, length), np.int64), "mask": np.zeros((1, length), bool)}, IDS, MASK
        )[2]

    assert key(5) == BatchKey((("length", 5),))
    assert key(5) != key(6)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int64", [[1.5, 2]]),
        ("int8", [[300, 0]]),
        ("uint8", [[-1, 0]]),
        ("bool", [[1, 0]]),
        ("float16", [[1e6, 0]]),
        ("int64", [[2**70, 0]]),
    ],
)
def test_a_list_whose_values_would_change_is_refused(dtype, value):
    assert f"is {dtype}" in refused(value, TensorSpec("x", dtype, (2,)))


@given(st.lists(st.lists(st.integers(-200, 400), min_size=2, max_size=2), min_size=1, max_size=4))
def test_conversion_keeps_every_value_or_refuses(value):
    spec = TensorSpec("x", "uint8", (2,))
    try:
        (converted,), _, _ = validated(value, spec)
    except InputError:
        assert any(not 0 <= item <= 255 for row in value for item in row)
    else:
        assert converted.tolist() == value


def test_infinity_in_a_list_is_a_value_like_any_other():
    (converted,), _, _ = validated([[float("inf"), float("nan"), 0.0]])
    assert np.isinf(converted[0, 0])
    assert np.isnan(converted[0, 1])


class Foreign:
    """An array of some other library."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_arrays_of_other_libraries_are_taken_and_checked_as_arrays():
    value = np.zeros((1, 3), np.float32)
    assert validated(Foreign(value))[0][0] is value
    assert "float64" in refused(Foreign(np.zeros((1, 3))))
    assert "on another device" in refused(Foreign(TypeError("on another device")))


def test_buffers_are_taken():
    (given_array,), _, _ = validated(memoryview(np.ones((1, 3), np.float32)))
    assert given_array.tolist() == [[1, 1, 1]]
    assert "'x' takes shape" in refused(array.array("f", [1, 2, 3]))


def test_strided_arrays_are_taken():
    assert validated(np.ones((6, 3), np.float32)[::2])[1] == 3


def test_nan_passes():
    assert validated(np.array([[0, 0, 0], [0, np.nan, 0]], np.float32))[1] == 2


class Refuses(np.ndarray):
    """An array that cannot be put beside plain ones, as one with units cannot."""

    def __array_function__(self, *_):
        raise TypeError("units do not agree")

    def __array_ufunc__(self, *_, **__):
        raise TypeError("units do not agree")

    def __array_finalize__(self, _):
        self.unit = "m"


@pytest.mark.parametrize(
    "value",
    [
        np.ones((1, 3), np.float32).view(Refuses),
        np.ones((1, 3), np.float32).view(np.matrix),
        np.ma.masked_array(np.ones((1, 3), np.float32)),
        np.ma.masked_array(np.ones((1, 3), np.float32), mask=np.zeros((1, 3), bool)),
        np.ones(1, [("x", np.float32, 3)]).view(np.recarray).x.view(Refuses),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_array_of_a_subclass_is_taken_as_a_plain_one(value):
    """Else one caller's array could fail the other callers of its batch."""
    (plain,), rows, _ = validated(value)
    assert type(plain) is np.ndarray
    assert rows == 1
    assert np.shares_memory(plain, value.view(np.ndarray))
    joined = np.concatenate([np.ones((1, 3), np.float32), plain])
    assert joined.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.anyio
async def test_one_callers_subclass_does_not_harm_the_others_of_its_batch():
    async with asynctrt.open(double_model()) as engine:
        results = await asyncio.gather(
            engine.infer(rows(1)), engine.infer(rows(2).view(Refuses)), engine.infer(rows(3))
        )
    assert [result["output"][0, 0] for result in results] == [2, 4, 6]
    assert [type(result["output"]) for result in results] == [np.ndarray] * 3
    assert results[0].batch_rows == 3


def test_masked_values_are_refused():
    values = np.ma.masked_array(np.ones((2, 3), np.float32), mask=[[0, 0, 0], [0, 1, 0]])
    assert "'x' has masked values" in refused(values)
    assert "array.filled(value)" in refused(values)
    kind = np.dtype([("a", "i4"), ("b", [("c", "f4")])])
    spec = TensorSpec("x", kind)
    structured = np.ma.masked_array(np.zeros(2, kind), mask=[(0, (0,)), (0, (1,))])
    assert "masked values" in refused(structured, spec)
    assert validated(np.ma.masked_array(np.zeros(2, kind)), spec)[1] == 2


def test_what_looks_at_values_does_not_go_by_shapes_alone():
    """A worker checks the arrays of a block once, and whatever comes there later has passed."""
    assert InputCheck([FLOATS]).looks_at_shapes_alone
    assert not InputCheck([TensorSpec("text", "object")]).looks_at_shapes_alone


@pytest.mark.parametrize("kind", ["numbers", "text"])
def test_a_long_text_among_many_short_values_takes_no_memory_for_each(kind):
    """NumPy's own array of text holds every item in as many bytes as the longest."""
    long = "x" * 100_000
    tracemalloc.start()
    try:
        if kind == "numbers":
            with pytest.raises(InputError, match="'x' is float32; some of the values given are text"):
                convert(TensorSpec("x", np.dtype("float32"), ("n",)), [[1.0] * 10_000 + [long]])
        else:
            found = as_text(TensorSpec("x", np.dtype(object), ()), ["a\0", long, b"b", *["c"] * 10_000])
            assert found[:3].tolist() == ["a\0", long, "b"]
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        ("a", True),
        (b"a", True),
        ([1, ["a"]], True),
        ([[[(1, "a")]]], True),
        ([[1.0], [2]], False),
        (1, False),
        ([], False),
    ],
)
def test_text_in_lists_is_found(value, holds):
    assert holds_text(value) is holds


def test_a_list_that_holds_itself_is_an_input_error():
    loop = [1.0]
    loop.append(loop)
    with pytest.raises(InputError):
        convert(TensorSpec("x", np.dtype("float32"), ("n",)), loop)
