"""Engines that are suspended and resumed under load, on every device: right answers or a refusal."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions
from asynctrt.errors import SuspendedError
from asynctrt.testing.tensorrt import StrictTensorRT, double_plan
from tests.contract.devices import DEVICES, WAIT_S, four_floats
from tests.models import rows

pytestmark = pytest.mark.anyio
RTX = "tensorrt_rtx"
PAUSE_S = 0.001
"""Between the calls of one caller: a loop that never rests leaves little of the GIL to what unloads."""


def suspendable(double, spec):
    options = TensorRTOptions(suspendable=True)
    return TensorRTModel(
        double_plan(spec, flavour=RTX), device=double.device, flavour=double, options=options
    )


async def more(answered):
    """Wait for answers that come from now on."""
    while not answered.locked():
        await answered.acquire()
    for _ in range(5):
        await answered.acquire()


@pytest.mark.tier2
@pytest.mark.parametrize("graphs", ["off", (1, 4, 8)])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", DEVICES)
async def test_round_and_round_under_load(name, is_shared, graphs):
    """Another engine goes on meanwhile, in the same arenas or in its own."""
    device = DEVICES[name]()
    double = StrictTensorRT(device, flavour=RTX)
    held = device.memory().held_nbytes
    specs = four_floats(weights_nbytes=1 << 20), four_floats(bias=2)
    models = [suspendable(double, spec) for spec in specs]
    kw = {"device": device, "contexts": 2, "max_rows": 8, "graphs": graphs}
    shared = asynctrt.Arenas(device, 2) if is_shared else None
    kw |= {"shared_arenas": shared} if is_shared else {"arenas": 1}
    refused = 0
    is_over = False
    resumed = asyncio.Event()

    async def caller(engine, spec, number, answered):
        nonlocal refused
        while not is_over:
            sent = rows(*range(number, number + number % 3 + 1))
            try:
                result = await engine.infer(sent)
            except SuspendedError:
                refused += 1
                await resumed.wait()
                continue
            answered.release()
            await asyncio.sleep(PAUSE_S)
            np.testing.assert_array_equal(result["output"], spec.expected({"input": sent})["output"])

    async with asynctrt.open(models[0], **kw) as engine, asynctrt.open(models[1], **kw) as other:
        before = models[0].memory_statistics().held_nbytes
        by_first, by_other = asyncio.Semaphore(0), asyncio.Semaphore(0)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(caller(engine, specs[0], number, by_first))
                group.create_task(caller(other, specs[1], number, by_other))
            for _ in range(3):
                resumed.clear()
                await engine.suspend()
                assert models[0].memory_statistics().held_nbytes < before
                await more(by_other)
                await engine.resume()
                resumed.set()
                await more(by_first)
            is_over = True
        assert refused
    for model in models:
        model.close()
    if shared is not None:
        shared.close()
    assert double.violations() == ()
    # What an event loop frees on a GPU is freed by a thread.
    async with asyncio.timeout(WAIT_S):
        while device.memory().held_nbytes > held:
            await asyncio.sleep(PAUSE_S)
    device.close()
