"""Two GPUs on one event loop: each engine's work goes to its own, whichever was used last."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import InputError
from tests.contract.devices import four_floats, strict
from tests.gpu.support import gpu_count, torch_is_here
from tests.models import rows

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")]
WAIT_S = 60


@pytest.fixture
def devices():
    from asynctrt.devices.cuda import CudaDevice

    made = [CudaDevice(ordinal) for ordinal in range(2)]
    yield made
    for device in made:
        device.close()


@pytest.mark.parametrize("graphs", ["off", "auto"])
async def test_engines_on_two_gpus_side_by_side(devices, graphs):
    spec = four_floats()
    models = [strict(device, spec) for device in devices]
    engines = [
        await asynctrt.open(model, device=device, contexts=3, arenas=1, max_rows=8, graphs=graphs)
        for model, device in zip(models, devices, strict=True)
    ]
    assert [engine.device_name for engine in engines] == ["cuda:0", "cuda:1"]

    async def caller(number):
        sent = rows(number, number + 1)
        expected = spec.expected({"input": sent})["output"]
        held = (await engines[number % 2].infer(sent, outputs="device"))["output"]
        np.testing.assert_array_equal(held.numpy(), expected)
        result = await engines[(number // 2) % 2].infer(sent)
        np.testing.assert_array_equal(result["output"], expected)

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*[caller(number) for number in range(300)])
    if torch_is_here():
        import torch

        tensor = torch.ones(1, 4, device="cuda:1")
        with pytest.raises(InputError, match="is on cuda:1, but this engine runs on cuda:0"):
            await engines[0].infer(tensor)
        await engines[1].infer(tensor)
    for engine, model in zip(engines, models, strict=True):
        assert model.flavour.module.violations() == ()
        await engine.aclose()
        model.close()
