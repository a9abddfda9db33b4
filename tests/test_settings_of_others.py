"""What an application sets for its whole process changes nothing here."""

import asyncio
import decimal
import sys
import warnings

import numpy as np
import pytest

import asynctrt
from asynctrt import FunctionModel, Options, Pipeline, TensorSpec
from asynctrt.errors import InputError
from asynctrt.kserve.client import as_array
from asynctrt.runtime.probe import Sample, made_up
from tests.helpers import WAIT_S
from tests.models import double_model, double_onnx, rows

pytestmark = pytest.mark.anyio
X, Y = TensorSpec("x", "float32", (2,)), TensorSpec("y", "float32", (2,))
TINY, HUGE = 1e-60, 1e300


@pytest.fixture(autouse=True)
def _strict():
    """Everything that may raise does."""
    context = decimal.Context(prec=2, traps=[decimal.Inexact, decimal.Rounded, decimal.FloatOperation])
    limit, printed = sys.getrecursionlimit(), np.get_printoptions()
    before, calls = np.geterr(), decimal.getcontext()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.seterr(all="raise")
        np.set_printoptions(threshold=sys.maxsize, legacy="1.13")
        decimal.setcontext(context)
        sys.setrecursionlimit(300)
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)
            decimal.setcontext(calls)
            np.set_printoptions(**printed)
            np.seterr(**before)


def wide(inputs):
    """Give what is rounded to zero, and to infinity, as float32."""
    return np.full(inputs["x"].shape, (TINY, HUGE))


async def test_lists_are_rounded():
    async with asynctrt.open(double_model()) as engine:
        result = await engine.infer([[TINY, 1, 2, 3]])
        assert result["output"].tolist() == [[0, 2, 4, 6]]
        with pytest.raises(InputError, match="outside that range"):
            await engine.infer([[HUGE, 1, 2, 3]])


@pytest.mark.parametrize("run_on", ["thread", "loop"])
async def test_what_a_function_gives_is_rounded(run_on):
    model = FunctionModel(wide, inputs=X, outputs=Y, run_on=run_on)
    async with asynctrt.open(model) as engine:
        assert (await engine.infer(rows(1, dims=(2,))))["y"].tolist() == [[0, np.inf]]


async def test_what_a_stage_gives_is_rounded():
    async def stage(given):
        return {"y": wide(given)}

    async with asyncio.timeout(WAIT_S), Pipeline(stage, inputs=X, outputs=Y) as one:
        assert (await one.infer(rows(1, dims=(2,))))["y"].tolist() == [[0, np.inf]]


async def test_an_onnx_model_is_tried_and_runs(tmp_path):
    async with asynctrt.open(double_onnx(tmp_path / "model.onnx")) as engine:
        assert engine.batching
        assert (await engine.infer(rows(3)))["output"].tolist() == rows(6).tolist()


async def test_decorated_functions():
    @asynctrt.batch
    def double(x):
        return 2 * x

    async with double:
        assert await asyncio.gather(*map(double, [1.0, TINY, 3])) == [2, 2 * TINY, 6]


def test_made_up_rows_of_narrow_floats():
    for row in "abe":
        assert made_up(TensorSpec("x", "float16"), (100,), row, Sample({}, False, 100)).size == 100


def test_times_are_exact():
    assert Options(timeout=decimal.Decimal("0.123456789")).timeout == 0.123456789


class TestByteOrder:
    SWAPPED = np.dtype("float32").newbyteorder()

    async def test_inputs_and_outputs(self):
        def swap(inputs):
            assert inputs["x"].dtype.isnative
            return (2 * inputs["x"]).astype(self.SWAPPED)

        given = rows(1.5, dims=(2,)).astype(self.SWAPPED)
        async with asynctrt.open(FunctionModel(swap, inputs=X, outputs=Y)) as engine:
            result = (await engine.infer(given))["y"]
            assert (result.tolist(), result.dtype.isnative) == ([[3, 3]], True)

        async def stage(given):
            return {"y": given["x"].astype(self.SWAPPED)}

        async with Pipeline(stage, inputs=X, outputs=Y) as one:
            result = (await one.infer(given))["y"]
            assert (result.tolist(), result.dtype.isnative) == ([[1.5, 1.5]], True)

    async def test_specs_are_native(self):
        spec = TensorSpec("x", self.SWAPPED, (2,))
        assert spec.dtype.isnative
        assert spec == X
        assert TensorSpec("x", [("a", ">i4"), ("b", "<f8")]).dtype.isnative
        async with asynctrt.open(FunctionModel(lambda given: given["x"], inputs=spec, outputs=Y)) as engine:
            result = (await engine.infer(rows(1.5, dims=(2,))))["y"]
            assert result.tolist() == [[1.5, 1.5]]

    async def test_decorated_functions(self):
        @asynctrt.batch
        def double(x):
            return (2 * x).astype(self.SWAPPED)

        async with double:
            found = await asyncio.gather(double(np.ones(2, self.SWAPPED)), double(np.ones(2, np.float32)))
        assert [one.tolist() for one in found] == [[2, 2]] * 2

    def test_clients(self):
        assert as_array("x", np.ones(2, self.SWAPPED)).dtype.isnative
