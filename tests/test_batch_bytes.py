"""Rows of any size: a batch holds as many as ``BATCH_NBYTES_MAX`` leaves room for, and memory no more."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.core import assembly
from asynctrt.devices.host import HostDevice
from asynctrt.tensors import TensorSpec
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan

WAIT_S = 20
MIB = 1 << 20
pytestmark = pytest.mark.anyio


class Sums:
    """A model with rows of any length, ``output = 2 * input``, that notes the rows of each batch."""

    def __init__(self):
        self.batches = []
        self.model = FunctionModel(
            self._double,
            inputs=TensorSpec("input", "float32", ("n",)),
            outputs=TensorSpec("output", "float32", ("n",)),
        )

    def _double(self, inputs):
        self.batches.append(len(inputs["input"]))
        return {"output": 2 * inputs["input"]}


@pytest.mark.parametrize("in_place", ["never", "always"])
async def test_one_large_row_takes_no_memory_for_others(in_place, monkeypatch):
    monkeypatch.setattr(assembly, "BATCH_NBYTES_MAX", MIB)
    sums = Sums()
    device = HostDevice(in_place=in_place, threads=2, unified=in_place == "always")
    async with asynctrt.open(sums.model, device=device, contexts=2) as engine:
        large = np.ones((1, 2 * MIB), np.float32)
        async with asyncio.timeout(WAIT_S):
            result = await engine.infer(large)
        np.testing.assert_array_equal(result["output"], 2 * large)
        # 8 MiB come and 8 go, on either side; for 64 rows that would be 1 GiB. The other context has 1 MiB,
        # and as much was too small here.
        sides = 1 if device.unified else 2
        assert 16 * MIB <= engine.statistics().memory_nbytes / sides <= 18 * MIB


async def test_a_call_of_many_large_rows_is_split_and_answered_in_order(monkeypatch):
    monkeypatch.setattr(assembly, "BATCH_NBYTES_MAX", 8 * 1024)
    sums = Sums()
    async with asynctrt.open(sums.model, contexts=1, max_rows=16) as engine:
        given = np.arange(10 * 256, dtype=np.float32).reshape(10, 256)  # 1 KiB in, and 1 KiB out.
        async with asyncio.timeout(WAIT_S):
            result = await engine.infer(given)
            np.testing.assert_array_equal(result["output"], 2 * given)
            assert max(sums.batches) <= 4
            sums.batches.clear()
            await engine.infer(given[:, :8])
        assert sums.batches == [10], "small rows of the same model are not split"


async def test_rows_of_one_shape_are_what_the_options_say(monkeypatch):
    monkeypatch.setattr(assembly, "BATCH_NBYTES_MAX", 1)
    model = FunctionModel(
        lambda inputs: {"output": inputs["input"]},
        inputs=TensorSpec("input", "float32", (1024,)),
        outputs=TensorSpec("output", "float32", (1024,)),
    )
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, contexts=1, max_rows=8) as engine:
        assert (await engine.infer(np.ones((8, 1024), np.float32))).batch_rows == 8


@pytest.mark.parametrize("sizes", [[(8, 16)], [(1, 2), (8, 16)]])
async def test_what_pads_a_batch_has_memory_though_max_rows_is_less(sizes):
    """TensorRT writes as many rows as it is told, wherever they lie."""
    device = HostDevice(in_place="never", threads=2)
    trt = StrictTensorRT(device)
    shapes = [{"input": ((least, 64), (most, 64), (most, 64))} for least, most in sizes]
    spec = EngineSpec(inputs=(TensorIO("input", dims=(-1, 64)),), profiles=shapes)
    model = TensorRTModel(double_plan(spec), device=device, flavour=trt)
    async with asynctrt.open(model, device=device, max_rows=4, contexts=1, graphs="off") as engine:
        given = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
        async with asyncio.timeout(WAIT_S):
            result = await engine.infer(given)
        np.testing.assert_array_equal(result["output"], spec.expected(given)["output"])
        assert engine.statistics().rows_padded == 5
        assert engine.statistics().memory_nbytes >= 2 * 8 * 64 * 4, "eight rows in, and eight out"
    model.close()
    assert trt.violations() == ()
