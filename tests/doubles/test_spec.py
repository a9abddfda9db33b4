"""Engines of the double, and their results."""

import ml_dtypes
import numpy as np

from tests.doubles.tensorrt import EngineSpec, TensorIO


def test_rounding_to_half_and_bfloat_is_to_the_nearest_even(bench):
    values = np.linspace(-300, 300, 2048, dtype=np.float32).reshape(8, 256)
    for dtype in ("float16", "bfloat16"):
        numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        spec = EngineSpec(inputs=(TensorIO("input", dtype, (-1, 256)),), steps=2)
        given = values.astype(numpy_dtype)
        wide = given.astype(np.float32)
        made = bench(spec)
        found = made.user().give(given).run()["output"]
        np.testing.assert_array_equal(found, (-(2 * wide + 1) + 2).astype(numpy_dtype))
        assert made.trt.violations() == ()
