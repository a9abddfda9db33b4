"""PyTorch tensors on the GPU: read where they lie, in the order of their stream, and returned there."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import InputError
from tests.contract.devices import four_floats, strict
from tests.gpu.support import gpu_is_here, torch_is_here

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not gpu_is_here() or not torch_is_here(), reason="needs a GPU and PyTorch"),
]
WAIT_S = 60


@pytest.fixture
def device():
    from asynctrt.devices.cuda import CudaDevice

    made = CudaDevice(0)
    yield made
    made.close()


@pytest.fixture
def spec():
    return four_floats(steps=2)


@pytest.fixture
def model(device, spec):
    made = strict(device, spec)
    yield made
    made.close()


@pytest.mark.parametrize("protocol", ["dlpack", "cuda_array_interface"])
@pytest.mark.parametrize("own_stream", [False, True])
async def test_a_tensor_is_read_after_the_work_that_writes_it(device, model, spec, protocol, own_stream):
    import torch

    class Offered:
        def __init__(self, tensor):
            self.__cuda_array_interface__ = {
                **tensor.__cuda_array_interface__,
                "version": 3,
                "stream": torch.cuda.current_stream().cuda_stream or 1,
            }

    async with asynctrt.open(model, device=device, max_rows=8) as engine:
        stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
        for number in range(50):
            with torch.cuda.stream(stream):
                tensor = torch.zeros(2, 4, device="cuda")
                torch.cuda._sleep(2_000_000)  # About a millisecond: who does not wait reads zeros.
                tensor += number
                sent = tensor if protocol == "dlpack" else Offered(tensor)
                async with asyncio.timeout(WAIT_S):
                    result = await engine.infer({"input": sent})
            expected = spec.expected({"input": np.full((2, 4), number, np.float32)})["output"]
            np.testing.assert_array_equal(result["output"], expected)


async def test_outputs_stay_and_torch_reads_them(device, model, spec):
    import torch

    async with asynctrt.open(model, device=device, max_rows=8) as engine:

        async def caller(number):
            sent = torch.full((2, 4), float(number % 7), device="cuda")
            async with asyncio.timeout(WAIT_S):
                result = await engine.infer(sent, outputs="device")
            held = torch.as_tensor(result["output"], device="cuda")
            expected = spec.expected({"input": sent.cpu().numpy()})["output"]
            np.testing.assert_array_equal((held * 2).cpu().numpy(), 2 * expected)

        await asyncio.gather(*[caller(number) for number in range(200)])


async def test_memory_of_outputs_is_used_again(device, model):
    import torch

    async with asynctrt.open(model, device=device, max_rows=8) as engine:
        for _ in range(3):
            for _ in range(300):
                await engine.infer(torch.ones(8, 4, device="cuda"), outputs="device")
            free = device.memory().free_nbytes
        assert device.memory().free_nbytes == free


async def test_what_cannot_be_taken_is_refused(device, model):
    import torch

    async with asynctrt.open(model, device=device, max_rows=8) as engine:
        with pytest.raises(InputError, match="not in C order.*contiguous"):
            await engine.infer(torch.ones(4, 4, device="cuda").t())
        with pytest.raises(InputError, match="is float32, given float64"):
            await engine.infer(torch.ones(4, 4, device="cuda", dtype=torch.float64))
        with pytest.raises(InputError, match=r"takes shape \(rows, 4\), given \(4, 5\)"):
            await engine.infer(torch.ones(4, 5, device="cuda"))
        np.testing.assert_array_equal(
            (await engine.infer(torch.ones(1, 4)))["output"],
            (await engine.infer(torch.ones(1, 4, device="cuda")))["output"],
        )
