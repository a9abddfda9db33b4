"""Devices in two parts, each with an engine: neither computes in the other's place."""

import asyncio
import gc

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.host import HostDevice
from asynctrt.errors import OptionsError
from tests.contract.devices import strict
from tests.doubles.tensorrt import EngineSpec
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30


@pytest.fixture
def model(device):
    made = strict(device, EngineSpec())
    yield made
    made.flavour.module.release_hangs()
    made.close()
    assert made.flavour.module.violations() == ()


async def check(engine, number=1):
    sent = np.full((1, 16), number, np.float32)
    async with asyncio.timeout(WAIT_S):
        result = await engine.infer(sent)
    np.testing.assert_array_equal(result["output"], EngineSpec().expected(sent)["output"])


def test_of_threads():
    device = HostDevice(threads=8)
    some, rest = device.partition(0.25)
    assert (some.concurrency, rest.concurrency) == (2, 6)
    assert some.whole is rest.whole is device.whole is device
    buffer = some.allocate(1000)
    assert device.memory().held_nbytes == rest.memory().held_nbytes == 1000
    buffer.close()
    assert device.memory().held_nbytes == 0
    stream = some.create_stream()
    assert device.stream_of(stream.handle) is stream
    assert stream.close(WAIT_S)


def test_memory_of_a_part_that_is_gone_is_counted_until_it_is_freed():
    """Outputs that stay on the device, for one, outlive the engine and the part that it ran on."""
    device = HostDevice(threads=2)
    buffers = [part.allocate(1000) for part in device.partition(0.5)]
    gc.collect()
    assert device.memory().held_nbytes == 2000
    for buffer in buffers:
        buffer.close()
    assert device.memory().held_nbytes == 0


def test_each_part_has_a_thread():
    some, rest = HostDevice(threads=1).partition(0.01)
    assert (some.concurrency, rest.concurrency) == (1, 1)


@pytest.mark.parametrize("share", [0, 1, -1, 1.5])
def test_shares(device, share):
    with pytest.raises(OptionsError, match=f"above 0 and below 1, not {share}"):
        device.partition(share)


def test_parts_are_not_divided(device):
    some, rest = device.partition(0.5)
    with pytest.raises(OptionsError, match="is a part of a device"):
        some.partition(0.5)
    some.close()
    rest.close()


async def test_a_model_runs_on_any_part_of_its_device(device, model):
    some, rest = device.partition(0.5)
    async with (
        asynctrt.open(model, device=some, graphs="off") as one,
        asynctrt.open(model, device=rest, graphs="off") as other,
    ):
        await asyncio.gather(*[check(engine, n) for n in range(10) for engine in (one, other)])
    some.close()
    rest.close()


async def test_arrays_move_between_parts():
    device = HostDevice()
    some, rest = device.partition(0.5)
    model = double_model()
    async with asynctrt.open(model, device=some) as one, asynctrt.open(model, device=rest) as other:
        there = await one.infer(rows(1, 2), outputs="device")
        assert len((await other.infer({"input": there["output"]}))["output"]) == 2


@pytest.mark.parametrize("held", [0, 1])
async def test_neither_waits_for_the_other(device, model, held):
    parts = device.partition(0.25)
    async with (
        asynctrt.open(model, device=parts[0], contexts=1, graphs="off") as some,
        asynctrt.open(model, device=parts[1], contexts=1, graphs="off") as rest,
    ):
        engines = some, rest
        model.flavour.module.fail_next("hang")
        waiting = asyncio.create_task(check(engines[held], 7))
        async with asyncio.timeout(WAIT_S):
            while not model.flavour.module.hanging:
                await asyncio.sleep(0)
        for number in range(5):
            await check(engines[1 - held], number)
        assert not waiting.done()
        model.flavour.module.release_hangs()
        await waiting
    for part in parts:
        part.close()
