"""``weight``: engines that divide a device answer as others do, whatever becomes of one of them."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.arenas import Arenas
from asynctrt.errors import DeviceLostError
from tests.contract.devices import strict
from tests.doubles.tensorrt import EngineSpec

pytestmark = pytest.mark.anyio
WAIT_S = 30
REQUESTS = 60


@pytest.fixture
def models(device):
    made = [strict(device, EngineSpec()) for _ in range(2)]
    yield made
    for model in made:
        model.flavour.module.release_hangs()
        model.close()
        assert model.flavour.module.violations() == ()


def opened(model, device, weight, **kw):
    return asynctrt.open(model, device=device, weight=weight, **{"contexts": 2, "max_rows": 4} | kw)


async def check(engine, number):
    rows = np.full((2, 16), number, np.float32)
    result = await engine.infer(rows)
    np.testing.assert_array_equal(result["output"], EngineSpec().expected(rows)["output"])


async def check_all(*engines):
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for engine in engines:
            for number in range(REQUESTS):
                group.create_task(check(engine, number))


@pytest.mark.parametrize("shares_arenas", [False, True])
async def test_all_are_answered_and_all_they_took_is_counted(device, models, shares_arenas):
    arenas = Arenas(device, 1) if shares_arenas else None
    settings = {"shared_arenas": arenas} if shares_arenas else {}
    async with (
        opened(models[0], device, 3, **settings) as first,
        opened(models[1], device, 1, **settings) as second,
    ):
        await check_all(first, second)
        shares = first._scheduler.room.share._shares
        assert shares.members == [first._scheduler.room.share, second._scheduler.room.share]
        assert shares.in_flight == 0
        for engine in (first, second):
            assert engine.statistics().device_ns > 0
            assert not engine._scheduler.room.share.is_held
    if arenas is not None:
        arenas.close()
    assert not shares.members


async def test_one_that_hangs_does_not_keep_the_other_from_the_device(device, models):
    """Although it has by far the larger part, and waits for nothing but what hangs."""
    async with (
        opened(models[0], device, 100, contexts=1, batch_timeout=WAIT_S, close_timeout=0.1) as stuck,
        opened(models[1], device, 1) as second,
    ):
        await check_all(stuck, second)
        models[0].flavour.module.fail_next("hang")
        waiting = [asyncio.create_task(check(stuck, number)) for number in range(REQUESTS)]
        async with asyncio.timeout(WAIT_S):
            while not models[0].flavour.module.hanging:
                await asyncio.sleep(0)
        await check_all(second)
        assert not any(task.done() for task in waiting)
        models[0].flavour.module.release_hangs()
        async with asyncio.timeout(WAIT_S):
            done = await asyncio.gather(*waiting, return_exceptions=True)
        assert not any(error for error in done if not isinstance(error, DeviceLostError))


async def test_one_that_is_closed_leaves_all_to_the_other(device, models):
    async with opened(models[0], device, 1) as first:
        second = await opened(models[1], device, 100)
        waiting = [asyncio.create_task(check(second, number)) for number in range(REQUESTS)]
        await asyncio.sleep(0)
        await second.aclose()
        await check_all(first)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert first._scheduler.room.share._shares.members == [first._scheduler.room.share]
