"""Engines of the double, and their results."""

import ml_dtypes
import numpy as np
import pytest

from tests.doubles.support import Bench, rows, same
from tests.doubles.tensorrt import EngineSpec, TensorIO


@pytest.fixture
def bench():
    benches = []

    def make(*args, **kwargs):
        benches.append(Bench(*args, **kwargs))
        return benches[-1]

    yield make
    for made in benches:
        made.close()
        assert made.trt.violations() == ()


def test_the_answer_in_closed_form():
    spec = EngineSpec(steps=4)
    x = rows(3, 16)
    # Twice, plus 1; change the sign, plus 2; plus 3; plus 4.
    same(spec.expected(x), {"output": -(2 * x + 1) + 2 + 3 + 4})


def test_the_bias_tells_engines_apart():
    x = rows(2, 16)
    assert not np.array_equal(
        EngineSpec(bias=0).expected(x)["output"], EngineSpec(bias=5).expected(x)["output"]
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int32", "int64"])
def test_every_type_is_computed_as_expected(bench, dtype):
    spec = EngineSpec(inputs=(TensorIO("input", dtype, (-1, 7)),), steps=5)
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    user = bench(spec).user().give(rows(9, 7).astype(numpy_dtype))
    user.run()
    user.check()


def test_bytes_wrap_as_they_do_in_numpy(bench):
    spec = EngineSpec(inputs=(TensorIO("input", "uint8", (-1, 256)),))
    user = bench(spec).user().give(np.arange(512, dtype=np.uint8).reshape(2, 256))
    found = user.run()["output"]
    with np.errstate(over="ignore"):
        x = user.arrays["input"]
        same({"output": found}, {"output": (8 - 2 * x).astype(np.uint8)})


def test_rounding_to_half_and_bfloat_is_to_the_nearest_even(bench):
    values = np.linspace(-300, 300, 2048, dtype=np.float32).reshape(8, 256)
    for dtype in ("float16", "bfloat16"):
        numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        spec = EngineSpec(inputs=(TensorIO("input", dtype, (-1, 256)),), steps=2)
        given = values.astype(numpy_dtype)
        wide = given.astype(np.float32)
        found = bench(spec).user().give(given).run()["output"]
        np.testing.assert_array_equal(found, (-(2 * wide + 1) + 2).astype(numpy_dtype))


def test_several_inputs_each_have_an_output(bench):
    spec = EngineSpec(inputs=(TensorIO("a", "int32", (-1, 3)), TensorIO("b", "float32", (-1, -1, 2))))
    assert [io.name for io in spec.outputs] == ["output_a", "output_b"]
    user = bench(spec).user().give({"a": rows(4, 3, dtype="int32"), "b": rows(4, 5, 2)})
    user.run()
    user.check()


def test_positive_values_are_packed(bench):
    spec = EngineSpec(data_dependent=True, steps=1)
    user = bench(spec).user()
    x = np.full((3, 16), -5, np.float32)
    x[0, 2], x[2, 1], x[2, 9] = 7, 1, 2
    user.give(x)
    found = user.run()
    same(found, spec.expected(x))
    np.testing.assert_array_equal(found["positives"], [[15, 0], [0, 0], [3, 5]])


def test_the_batch_axis_can_be_fixed(bench):
    spec = EngineSpec(fixed_rows=4)
    assert spec.inputs[0].dims == (4, 16)
    made = bench(spec)
    user = made.user()
    assert user.context.infer_shapes() == []
    user.give(rows(4, 16)).run()
    user.check()
    assert not user.context.set_input_shape("input", (3, 16))
