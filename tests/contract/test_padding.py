"""Rows that are padded as they are written into slabs, on every kind of device, with TensorRT's double."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import InputError
from tests.contract.devices import strict
from tests.doubles.tensorrt import EngineSpec, TensorIO
from tests.helpers import WAIT_S

pytestmark = pytest.mark.anyio

RANGE = ((1, 1), (4, 16), (8, 32))
SPEC = EngineSpec(
    inputs=(TensorIO("ids", dims=(-1, -1)), TensorIO("mask", dims=(-1, -1))),
    profiles=({"ids": RANGE, "mask": RANGE},),
)


@pytest.fixture
def model(device):
    made = strict(device, SPEC)
    yield made
    made.close()


async def test_a_plan_whose_dimensions_have_no_common_name(device, model):
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(
            model,
            device=device,
            max_rows=8,
            pad={"ids.1=mask.1": (8, 32)},
            pad_with={"ids": -1, "mask": "mask"},
        ) as engine,
    ):
        calls = [np.full((1, n), n, np.float32) for n in range(1, 33)]
        answers = await asyncio.gather(*map(engine.infer, calls))
        for call, answer in zip(calls, answers, strict=True):
            expected = SPEC.expected({"ids": call, "mask": np.ones_like(call)})
            for name, array in expected.items():
                np.testing.assert_array_equal(answer[name], array)
        assert engine.statistics().batches < 16
        with pytest.raises(InputError, match="padded as one dimension"):
            await engine.infer({"ids": calls[4], "mask": calls[5]})
    assert model.flavour.module.violations() == ()
