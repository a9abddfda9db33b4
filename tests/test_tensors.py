"""Specs, results, timing, and the conversion of lists."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

from asynctrt._util.validation import show
from asynctrt.errors import ExecutionError, InputError, ModelError
from asynctrt.tensors import BatchRecord, InferResult, TensorSpec, convert, varying_dims

FLOATS = TensorSpec("x", np.dtype("float32"), (3,))
IDS = TensorSpec("ids", np.dtype("int64"), ("length",))


def test_spec_as_text():
    assert str(TensorSpec("x", "float32", (3, "length"))) == "x: float32[rows, 3, length]"
    assert FLOATS.is_fixed
    assert not IDS.is_fixed


@pytest.mark.parametrize(
    "dims",
    [5, None, "batch", (None,), (2.5,), (3.0,), (-1,), (True,), (b"n",), ([3],), np.array(3)],
)
def test_dimensions_that_are_refused(dims):
    with pytest.raises(ModelError, match="the dims of 'x' must be a tuple") as caught:
        TensorSpec("x", "float32", dims)
    assert f"not {show(dims)}. Leave out the axis that counts rows" in str(caught.value)


@pytest.mark.parametrize(("dims", "kept"), [((), ()), ([3, "n"], (3, "n")), ((np.int64(3), 0), (3, 0))])
def test_dimensions(dims, kept):
    made = TensorSpec("x", "float32", dims).dims
    assert made == kept
    assert [type(dim) for dim in made] == [type(dim) for dim in kept]


@pytest.mark.parametrize("name", [None, 5, b"x", ("x",)])
def test_a_name_is_a_string(name):
    with pytest.raises(ModelError, match="the name of a tensor must be a string, not"):
        TensorSpec(name, "float32")


@pytest.mark.parametrize("dtype", [None, "float33", "", 5, [("a", "O")], 1.5, [1], "f4,,"])
def test_a_dtype_is_one_of_values_in_fixed_memory(dtype):
    with pytest.raises(ModelError, match="the dtype of 'x' must be a NumPy dtype"):
        TensorSpec("x", dtype)


@pytest.mark.parametrize("dtype", ["float32", np.float16, "S5", [("a", "i4")], float, ml_dtypes.bfloat16])
def test_dtypes(dtype):
    assert TensorSpec("x", dtype).dtype == np.dtype(dtype)


def test_resolving_dimensions():
    spec = TensorSpec("x", "float32", ("a", 2, "b"))
    assert spec.resolve({"a": 5, "b": 7}) == (5, 2, 7)
    assert spec.resolve({"a": 5}) is None


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
    with pytest.raises(KeyError, match="no output 'z'"):
        answer["z"]


def test_timing_of_one_batch():
    assert repr(result().timing) == "Timing(queue_ns=6, copy_in_ns=1, compute_ns=2, copy_out_ns=3)"


def test_joined_parts_keep_their_order_and_add_up():
    whole = InferResult.join([result(0), result(2, launched_ns=50)])
    assert whole["y"].tolist() == [0, 1, 2, 3]
    assert repr(whole.timing) == "Timing(queue_ns=6, copy_in_ns=2, compute_ns=4, copy_out_ns=6)"


def test_parts_with_data_dependent_outputs_of_different_shapes_cannot_be_joined():
    wide, narrow = (InferResult({"hits": np.ones((2, size))}, (), 0) for size in (3, 2))
    with pytest.raises(ExecutionError, match=r"output 'hits' has shapes \[\(2, 2\), \(2, 3\)\]"):
        InferResult.join([wide, narrow])


@pytest.mark.parametrize(
    "change", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_result_is_copied_and_pickled(change):
    made = change(result())
    assert made["y"].tolist() == [0, 1]
    assert (made.batch_rows, repr(made.timing)) == (8, repr(result().timing))


def test_whole_numbers_on_both_sides_of_2_to_the_63():
    """NumPy makes floats of such a list."""
    spec = TensorSpec("x", "uint64", (2,))
    assert convert(spec, [[0, 2**64 - 1]]).tolist() == [[0, 2**64 - 1]]
    for wrong in ([[0, 2**64]], [[-1, 2**63]], [[0.5, 2**63]]):
        with pytest.raises(InputError, match="uint64"):
            convert(spec, wrong)


def test_the_names_of_dimensions_that_vary_come_in_their_order():
    specs = TensorSpec("a", "float32", ("n", 3)), TensorSpec("b", "int8", ("m", "n"))
    assert varying_dims(specs) == ("n", "m")
