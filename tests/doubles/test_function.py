"""Engines of the double that compute a function: an application's own model, without a GPU."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ExecutionError
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan

pytestmark = pytest.mark.anyio
WAIT_S = 30
IMAGE = TensorIO("image", "uint8", (-1, 4, 4, 3))
LOGITS = TensorIO("logits", "float32", (-1, 10))


class Bench:
    def __init__(self, spec, *, unified=True):
        self.device = HostDevice(in_place="never", unified=unified)
        self.double = StrictTensorRT(self.device)
        self.model = TensorRTModel(double_plan(spec), device=self.device, flavour=self.double)

    def open(self, **kw):
        return asynctrt.open(self.model, device=self.device, **kw)

    def close(self):
        self.model.close()
        assert self.double.violations() == ()


def images(number, rows=1):
    return np.random.default_rng(number).integers(8, 255, (rows, 4, 4, 3), np.uint8)


SMALL, LARGE = (((1, 4, 4, 3), (rows // 2, 4, 4, 3), (rows, 4, 4, 3)) for rows in (8, 64))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda inputs: np.zeros((1, 3)), r"gave \(1, 3\) for its output 'logits', which is \(2, 10\)"),
        (lambda inputs: {"other": np.zeros((2, 10))}, r"gave \(\) for its output 'logits'"),
        (lambda inputs: np.zeros((2, 10, 1)), r"gave \(2, 10, 1\)"),
    ],
)
async def test_what_the_function_must_give(function, said):
    spec = EngineSpec(inputs=(IMAGE,), function=function, function_outputs=(LOGITS,))
    with pytest.raises(ValueError, match=said):
        spec.expected(images(1, 2))
    bench = Bench(spec)
    async with bench.open() as engine, asyncio.timeout(WAIT_S):
        with pytest.raises(ExecutionError, match=said):
            await engine.infer(images(1, 2))
    bench.close()
