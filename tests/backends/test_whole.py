"""Models whose requests run alone, over models that have rows."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt import FunctionModel, InputError, TensorSpec
from asynctrt.backends.whole import run_alone
from asynctrt.devices.host import HostDevice
from tests.contract.devices import strict
from tests.doubles.tensorrt import EngineSpec, TensorIO

pytestmark = pytest.mark.anyio


def total(inputs):
    return {"sum": inputs["x"].sum(axis=0, keepdims=True).repeat(len(inputs["x"]), 0), "y": inputs["x"] + 1}


async def test_a_function_gets_each_request_as_it_is():
    model = FunctionModel(
        total,
        inputs=TensorSpec("x", "float32", ("k",)),
        outputs=[TensorSpec("sum", "float32", ("k",)), TensorSpec("y", "float32", ("k",))],
    )
    alone = run_alone(model, "it says so")
    assert [str(spec) for spec in alone.inputs] == ["x: float32[rows, k]"]
    async with asynctrt.open(alone, device=HostDevice(unified=False)) as engine:
        assert engine.batching.reason == "it says so"
        sent = [np.random.default_rng(n).random((1 + n % 5, 1 + n % 3), np.float32) for n in range(40)]
        for one, answer in zip(sent, await asyncio.gather(*map(engine.infer, sent)), strict=True):
            for name, right in total({"x": one}).items():
                np.testing.assert_array_equal(answer[name], right)


async def test_the_profile_of_a_plan_is_chosen_by_the_rows_of_the_request():
    device = HostDevice(in_place="never")
    spec = EngineSpec(
        inputs=(TensorIO("input", dims=(-1, 4)),),
        profiles=({"input": ((1, 4), (2, 4), (2, 4))}, {"input": ((4, 4), (8, 4), (8, 4))}),
    )
    plan = strict(device, spec)
    async with asynctrt.open(plan, device=device, batching="off", contexts=2) as engine:
        for count in (1, 4, 2, 8, 5):
            sent = np.full((count, 4), count, np.float32)
            expected = spec.expected({"input": sent})
            np.testing.assert_array_equal((await engine.infer(sent))["output"], expected["output"])
        for count in (3, 9):
            with pytest.raises(InputError, match=f"takes {count} rows"):
                await engine.infer(np.zeros((count, 4), np.float32))
    plan.close()
    device.close()
