"""Whatever lies in a slab before a batch, none of it reaches a caller: one suite for all backends.

Between batches every byte of every slab is overwritten, as an earlier batch might have left it: inputs,
outputs and padding, on the host and on a device with memory of its own.
"""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.devices.host import HostDevice
from tests.contract.devices import four_floats, strict
from tests.models import double_model, double_onnx, rows

pytestmark = pytest.mark.anyio
GARBAGE = 0xEE
FIXED = 4


def write(inputs, outputs):
    outputs["output"][...] = 2 * inputs["input"]


def give_back(inputs):
    return 2 * inputs["input"]


async def later(inputs):
    await asyncio.sleep(0)
    return 2 * inputs["input"]


BACKENDS = {
    "written": lambda path, device, fixed: double_model(write, rows_fixed=fixed),
    "returned": lambda path, device, fixed: double_model(give_back, rows_fixed=fixed),
    "coroutine": lambda path, device, fixed: double_model(later, rows_fixed=fixed),
    "onnxruntime": lambda path, device, fixed: OnnxModel(double_onnx(path / "m.onnx", rows=fixed or "batch")),
    "tensorrt": lambda path, device, fixed: strict(device, four_floats(steps=1, fixed_rows=fixed)),
}


def poison(engine):
    """Overwrite every slab of an engine that is idle."""
    buffers = [context._buffers for context in engine._pool.contexts]
    count = 0
    for held in buffers:
        if held is not None:
            for buffer in {id(one): one for one in (held.staging, held.computed_on)}.values():
                buffer.array(np.dtype(np.uint8), (buffer.nbytes,), 0)[:] = GARBAGE
                count += 1
    assert count


def is_garbage(array):
    return (array.reshape(-1).view(np.uint32) == GARBAGE * 0x01010101).any()


@pytest.fixture(params=["unified", "own memory"])
def device(request):
    return HostDevice(in_place="never", threads=2, unified=request.param == "unified")


@pytest.fixture(params=[None, FIXED], ids=["any size", "fixed"])
def fixed(request):
    return request.param


@pytest.fixture(params=BACKENDS)
def opened(request, device, fixed, tmp_path):
    model = BACKENDS[request.param](tmp_path, device, fixed)
    added = 1 if request.param == "tensorrt" else 0
    yield asynctrt.open(model, device=device, contexts=2, max_rows=FIXED), lambda sent: 2 * sent + added
    model.close()


async def test_no_answer_has_any_of_it(opened):
    opening, expected = opened
    async with opening as engine:
        for round_number in range(6):
            poison(engine)
            sent = [rows(*range(number, number + number % 3 + 1)) for number in range(round_number + 1)]
            for given, result in zip(sent, await asyncio.gather(*map(engine.infer, sent)), strict=True):
                np.testing.assert_array_equal(result["output"], expected(given))
                assert not is_garbage(result["output"])
