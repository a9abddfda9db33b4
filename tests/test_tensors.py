"""Specs, the check of inputs, results. A refusal names tensor, expected and given."""

import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynctrt.errors import InputError, ModelError
from asynctrt.tensors import SHAPES_MAX, BatchRecord, InferResult, InputCheck, TensorSpec, convert

FLOATS = TensorSpec("x", np.dtype("float32"), (3,))
IDS = TensorSpec("ids", np.dtype("int64"), ("length",))
MASK = TensorSpec("mask", np.dtype("bool"), ("length",))


def admit(inputs, *specs, **kw):
    return InputCheck(specs or (FLOATS,), **kw).admit(inputs)


def refused(inputs, *specs, **kw):
    with pytest.raises(InputError) as caught:
        admit(inputs, *specs, **kw)
    return str(caught.value)


def test_spec_as_text():
    assert str(TensorSpec("x", "float32", (3, "length"))) == "x: float32[rows, 3, length]"
    assert FLOATS.is_fixed
    assert not IDS.is_fixed


@pytest.mark.parametrize("dim", [-1, True])
def test_a_spec_refuses_impossible_dimensions(dim):
    with pytest.raises(ModelError, match="impossible dimension"):
        TensorSpec("x", "float32", (dim,))


def test_resolving_dimensions():
    spec = TensorSpec("x", "float32", ("a", 2, "b"))
    assert spec.resolve({"a": 5, "b": 7}) == (5, 2, 7)
    assert spec.resolve({"a": 5}) is None


@pytest.mark.parametrize("inputs", [{"x": np.zeros((2, 3), np.float32)}, np.zeros((2, 3), np.float32)])
def test_an_array_is_taken_as_it_is(inputs):
    (given_array,), rows, bucket = admit(inputs)
    assert given_array is (inputs["x"] if isinstance(inputs, dict) else inputs)
    assert (rows, bucket) == (2, ())


@pytest.mark.parametrize("specs", [[FLOATS], [IDS], [IDS, MASK]])
def test_a_shape_that_was_checked_before_gives_the_same(specs):
    inputs = {spec.name: np.ones((2, 3), spec.dtype) for spec in specs}
    check = InputCheck(specs)
    first, again = check.admit(inputs), check.admit(inputs)
    assert first[1:] == again[1:] == check._check(inputs)[1:]
    assert all(array is inputs[spec.name] for spec, array in zip(specs, again[0], strict=True))


@pytest.mark.parametrize("specs", [[FLOATS], [IDS, MASK]])
def test_a_shape_that_was_checked_before_does_not_let_another_type_pass(specs):
    check = InputCheck(specs)
    check.admit({spec.name: np.ones((2, 3), spec.dtype) for spec in specs})
    with pytest.raises(InputError, match="complex"):
        check.admit({spec.name: np.ones((2, 3), complex) for spec in specs})


def test_nan_is_looked_for_in_shapes_that_were_checked_before():
    check = InputCheck([FLOATS], check_finite=True)
    check.admit(np.ones((1, 3), np.float32))
    with pytest.raises(InputError, match="NaN"):
        check.admit(np.full((1, 3), np.nan, np.float32))


def test_what_is_remembered_of_shapes_is_bounded():
    check = InputCheck([IDS])
    for length in range(1, 2 * SHAPES_MAX + 10):
        check.admit(np.ones((1, length), np.int64))
    assert len(check._known) <= SHAPES_MAX


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros((2, 3)), ["'x'", "float32", "float64", "astype"]),
        (np.zeros((2, 3), ">f4"), ["'x'", "float32", ">f4"]),
        (np.zeros((2, 4), np.float32), ["'x'", "(rows, 3)", "(2, 4)"]),
        (np.zeros((2, 3, 1), np.float32), ["'x'", "(rows, 3)", "(2, 3, 1)"]),
        (np.zeros(3, np.float32), ["'x'", "(3,)", "array[None]"]),
        (np.float32(1), ["'x'", "()"]),
        (np.zeros((0, 3), np.float32), ["no rows", "(1, 3)"]),
        ([[1, 2], [3]], ["ragged"]),
        ("text", ["'x'", "float32", "<U4"]),
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
    assert "'mask' has 6 on axis 1 ('length')" in message


def test_the_bucket_is_the_values_of_the_dynamic_dimensions():
    def bucket(length):
        return admit(
            {"ids": np.zeros((1, length), np.int64), "mask": np.zeros((1, length), bool)}, IDS, MASK
        )[2]

    assert bucket(5) == (("length", 5),)
    assert bucket(5) != bucket(6)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", [[1, 2.5]]),
        ("float16", [[1, 2.5]]),
        ("int8", [[1, -128]]),
        ("uint8", [[0, 255]]),
        ("int64", [[2**62, -5]]),
        ("bool", [[True, False]]),
        ("float32", ([1, 2], [3, 4])),
    ],
)
def test_lists_are_converted(dtype, value):
    (converted,), rows, _ = admit(value, TensorSpec("x", dtype, (2,)))
    assert converted.dtype == dtype
    assert rows == len(value)
    np.testing.assert_array_equal(converted, value)


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
        (converted,), _, _ = admit(value, spec)
    except InputError:
        assert any(not 0 <= item <= 255 for row in value for item in row)
    else:
        assert converted.tolist() == value


def test_infinity_in_a_list_is_a_value_like_any_other():
    (converted,), _, _ = admit([[float("inf"), float("nan"), 0.0]])
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
    assert admit(Foreign(value))[0][0] is value
    assert "float64" in refused(Foreign(np.zeros((1, 3))))
    assert "on another device" in refused(Foreign(TypeError("on another device")))


def test_buffers_are_taken():
    (given_array,), _, _ = admit(memoryview(np.ones((1, 3), np.float32)))
    assert given_array.tolist() == [[1, 1, 1]]
    assert "'x' takes shape" in refused(array.array("f", [1, 2, 3]))


def test_strided_arrays_are_taken():
    assert admit(np.ones((6, 3), np.float32)[::2])[1] == 3


def test_nan_passes_unless_the_engine_was_told_to_look():
    value = np.array([[0, 0, 0], [0, np.nan, 0]], np.float32)
    assert admit(value)[1] == 2
    assert "NaN or an infinity in row 1" in refused(value, check_finite=True)
    assert "row 0" in refused(np.full((1, 3), np.inf, np.float32), check_finite=True)


def result(start=0, rows=2, launched_ns=10):
    record = BatchRecord(rows=8, launched_ns=launched_ns)
    record.copy_in_ns, record.compute_ns, record.copy_out_ns = 1, 2, 3
    return InferResult({"y": np.arange(start, start + rows)}, (record,), arrival_ns=4)


def test_a_result_is_a_mapping():
    answer = result()
    assert list(answer) == ["y"]
    assert len(answer) == 1
    assert answer["y"].tolist() == [0, 1]
    assert answer.batch_rows == 8
    assert repr(answer) == "<InferResult y: (2,) batch_rows=8>"
    with pytest.raises(KeyError, match="'z' is not an output"):
        answer["z"]


def test_timing_of_one_batch():
    assert repr(result().timing) == "Timing(queue_ns=6, copy_in_ns=1, compute_ns=2, copy_out_ns=3)"


def test_joined_parts_keep_their_order_and_add_up():
    whole = InferResult.join([result(0), result(2, launched_ns=50)])
    assert whole["y"].tolist() == [0, 1, 2, 3]
    assert repr(whole.timing) == "Timing(queue_ns=6, copy_in_ns=2, compute_ns=4, copy_out_ns=6)"


def test_whole_numbers_on_both_sides_of_2_to_the_63():
    """NumPy makes floats of such a list."""
    spec = TensorSpec("x", "uint64", (2,))
    assert convert(spec, [[0, 2**64 - 1]]).tolist() == [[0, 2**64 - 1]]
    for wrong in ([[0, 2**64]], [[-1, 2**63]], [[0.5, 2**63]]):
        with pytest.raises(InputError, match="uint64"):
            convert(spec, wrong)
