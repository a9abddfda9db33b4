"""Rows that lie on the device already, and outputs that stay there."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.host import HostDevice
from asynctrt.errors import InputError, QueueFullError
from tests.models import double_model, double_onnx, rows, unnamed_output_onnx

pytestmark = pytest.mark.anyio
WAIT_S = 30


@pytest.fixture(params=[False, True], ids=["separate", "unified"])
def device(request):
    made = HostDevice(in_place="never", unified=request.param)
    yield made
    made.close()


async def test_outputs_stay_and_are_inputs_of_the_next_engine(device):
    async with (
        asynctrt.open(double_model(), device=device) as first,
        asynctrt.open(double_model(), device=device) as second,
    ):
        held = (await first.infer(rows(1, 2, 3), outputs="device"))["output"]
        assert repr(held) == "<DeviceArray float32[3, 4] on host>"
        assert (held.ndim, held.nbytes, held.row_nbytes, len(held)) == (2, 48, 16, 3)
        np.testing.assert_array_equal((await second.infer({"input": held}))["output"], rows(4, 8, 12))
        np.testing.assert_array_equal((await second.infer(held[1:]))["output"], rows(8, 12))
        again = await second.infer(held, outputs="device")
        np.testing.assert_array_equal(again["output"].numpy(), rows(4, 8, 12))
        np.testing.assert_array_equal(held.numpy(), rows(2, 4, 6))


async def test_host_and_device_rows_each_get_their_own_answers(device):
    async with asynctrt.open(double_model(), device=device, max_rows=8) as engine:
        held = (await engine.infer(rows(10, 20), outputs="device"))["output"]

        async def caller(number):
            kind = number % 4
            sent = held[number % 2 : number % 2 + 1] if kind == 0 else rows(number)
            expected = 40 * (number % 2 + 1) if kind == 0 else 2 * number
            result = await engine.infer(sent, outputs="device" if kind in (0, 1) else "host")
            output = result["output"]
            np.testing.assert_array_equal(output if kind > 1 else output.numpy(), rows(expected))

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*[caller(number) for number in range(100)])
        assert engine.statistics().mean_batch_rows > 2


async def test_rows_on_the_device_are_split_and_outputs_there_are_not(device):
    async with asynctrt.open(double_model(), device=device, max_rows=4) as engine:
        held = [(await engine.infer(rows(n, n), outputs="device"))["output"] for n in (1, 2)]
        assert len(held[0]) == 2
        more = asynctrt.DeviceArray(
            device, held[0].address, held[0].dtype, (2, 4), owner=held[0], ready=held[0].ready
        )
        np.testing.assert_array_equal((await engine.infer(more))["output"], rows(4, 4))
        with pytest.raises(InputError, match=r"at most the rows of a batch \(4\), given 5"):
            await engine.infer(rows(*range(5)), outputs="device")


async def test_what_cannot_be_is_refused_before_it_is_queued(device, tmp_path):
    async with asynctrt.open(double_model(), device=device, check_finite=True) as engine:
        held = (await engine.infer(rows(1), outputs="device"))["output"]
        with pytest.raises(InputError, match="check_finite=True"):
            await engine.infer(held)
        with pytest.raises(InputError, match="'host' or 'device', not 'gpu'"):
            await engine.infer(rows(1), outputs="gpu")
        with pytest.raises(IndexError):
            held[::2]
    async with asynctrt.open(double_model(dims=(5,)), device=device) as engine:
        with pytest.raises(InputError, match=r"takes shape \(rows, 5\), given \(1, 4\)"):
            await engine.infer(held)
    async with asynctrt.open(unnamed_output_onnx(tmp_path / "m.onnx"), device=device) as engine:
        with pytest.raises(InputError, match="depends on the data"):
            await engine.infer(np.ones((1, 3), np.float32), outputs="device")
        await engine.infer(np.ones((1, 3), np.float32))


async def test_an_array_of_another_device_is_no_array_here(device):
    other = HostDevice(unified=False)
    async with asynctrt.open(double_model(), device=other) as engine:
        held = (await engine.infer(rows(1), outputs="device"))["output"]
    async with asynctrt.open(double_model(), device=device) as engine:
        with pytest.raises(InputError, match="given DeviceArray"):
            await engine.infer(held)


async def test_memory_of_outputs_goes_with_them():
    device = HostDevice(unified=False, memory_nbytes=1 << 20)
    async with asynctrt.open(double_model(dims=(1000,)), device=device, contexts=1, max_rows=1) as engine:
        sent = rows(1, dims=(1000,))
        before = device.memory().held_nbytes
        kept = [(await engine.infer(sent, outputs="device"))["output"] for _ in range(10)]
        assert device.memory().held_nbytes == before + 10 * 4000
        with pytest.raises(asynctrt.DeviceMemoryError):
            for _ in range(1000):
                kept.append((await engine.infer(sent, outputs="device"))["output"])
        np.testing.assert_array_equal((await engine.infer(sent))["output"], 2 * sent)
        kept.clear()
        assert device.memory().held_nbytes == before
        np.testing.assert_array_equal(
            (await engine.infer(sent, outputs="device"))["output"].numpy(), 2 * sent
        )


async def test_a_full_queue_takes_nothing(device, tmp_path):
    model = double_onnx(tmp_path / "double.onnx")
    async with asynctrt.open(model, device=device, max_rows=2, max_queue_rows=2) as engine:
        sent = [asyncio.create_task(engine.infer(rows(1), outputs="device")) for _ in range(40)]
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        assert any(isinstance(outcome, QueueFullError) for outcome in outcomes)
        for outcome in outcomes:
            if not isinstance(outcome, QueueFullError):
                np.testing.assert_array_equal(outcome["output"].numpy(), rows(2))
