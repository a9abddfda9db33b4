"""What waits behind a batch that hangs is answered by a second worker, as long as the first takes nothing."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import PoisonError
from asynctrt.workers import link, original, pulse
from asynctrt.workers.stand_ins import HOST
from tests.helpers import until
from tests.workers.double import workers
from tests.workers.models import HANG, STOP, rows
from tests.workers.test_faults import answered, check
from tests.workers.test_isolated_engine import opened as opened_for_real

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]
KIND = "tests.workers.models:kind"
LARGE = "tests.workers.models:large"


@pytest.fixture(autouse=True)
def found_soon(request, monkeypatch):
    """A worker that answers nothing is found out after some hundredths of a second."""
    if "costs_others" not in request.node.name:
        monkeypatch.setattr(pulse, "STUCK_S", 0.05)
        for module in (link, pulse):
            monkeypatch.setattr(module, "LOOK_S", 0.02)


def opened(model=KIND, **settings):
    return asynctrt.open(model, max_queue_rows=100_000, **{"isolation": "process", **settings})


async def right(engine, *firsts):
    check(firsts, await answered(engine, firsts))


async def hangs(engine, worker, array):
    """Let the worker have a batch that it does not answer, and something behind it."""
    worker.holds = True
    hanging = engine.submit(array)
    await until(lambda: engine._front.links[0].groups)
    (group,) = engine._front.links[0].groups.values()
    engine._memory.words[group.launched] = 1
    return hanging, engine.submit(array)


@pytest.mark.parametrize("spare", [False, True])
async def test_what_is_behind_a_batch_that_hangs_goes_to_another_worker_until_it_ends(spare):
    async with workers(KIND) as made, opened(isolation="spare" if spare else "process") as engine:
        await right(engine, 1)
        await until(lambda: len(made.all) == 1 + spare)
        first = made.all[0]
        hanging, behind = await hangs(engine, first, rows(7))
        assert np.array_equal((await behind)["y"], 2 * rows(7))
        await right(engine, 2, 3, 4)
        assert not hanging.done()
        assert len(made.all) == 2, "the spare takes what waits, if there is one"
        first.holds = False
        first.look()
        assert np.array_equal((await hanging)["y"], 2 * rows(7))
        await until(lambda: made.all[1].how_it_ended)
        await until(lambda: len(engine.workers) == 1)
        await right(engine, 5)
        statistics = engine.statistics()
        assert (statistics.succeeded, statistics.failed, statistics.worker_deaths) == (7, 0, 0)
    assert engine._front._heap.blocks == 0


async def test_a_first_batch_that_hangs_keeps_others_waiting_no_longer_than_an_opening_may_take(monkeypatch):
    monkeypatch.setattr(original, "OPENING_S_MIN", 0.3)
    monkeypatch.setattr(original, "OPENING_FACTOR", 0)
    async with workers(KIND) as made, opened() as engine:
        began_s = asyncio.get_running_loop().time()
        hanging, behind = await hangs(engine, made.all[0], rows(7))
        assert np.array_equal((await behind)["y"], 2 * rows(7))
        assert asyncio.get_running_loop().time() - began_s > 0.3, "a first batch may be slow"
        assert not hanging.done()
        made.all[0].holds = False
        made.all[0].look()
        assert np.array_equal((await hanging)["y"], 2 * rows(7))
        await until(lambda: len(engine.workers) == 1)


async def test_large_rows_that_are_moved_stay_what_they_are():
    async with workers(LARGE) as made, opened(LARGE) as engine:
        array = np.ones((1, 1 << 20), np.uint8)
        await engine.infer(array)
        made.all[0].holds = True
        hanging = engine.submit(array)
        await until(lambda: engine._front.links[0].groups)
        (group,) = engine._front.links[0].groups.values()
        engine._memory.words[group.launched] = 1
        calls = [engine.submit(array * number) for number in range(8)]
        await asyncio.sleep(0)
        calls[3].cancel()
        for number, call in enumerate(calls):
            if number != 3:
                assert np.array_equal((await call)["y"], array * number * 2)
        hanging.cancel()
    assert engine._front._heap.blocks == 0


async def test_without_idempotent_what_a_worker_has_stays_with_it():
    async with workers(KIND) as made, opened(idempotent=False) as engine:
        await right(engine, 1)
        hanging, behind = await hangs(engine, made.all[0], rows(7))
        await until(lambda: len(made.all) == 2)
        await right(engine, 2, 3)  # It has not been given these.
        assert not behind.done()
        made.all[0].holds = False
        made.all[0].look()
        for call in (hanging, behind):
            assert np.array_equal((await call)["y"], 2 * rows(7))
    assert engine._front._heap.blocks == 0


async def test_where_there_is_no_room_for_a_second_worker_they_wait(caplog):
    async with workers(KIND) as made, opened() as engine:
        await right(engine, 1)
        made.why_not = "has no room"
        hanging, behind = await hangs(engine, made.all[0], rows(7))
        await until(lambda: "no second worker could be started" in caplog.text)
        await until(lambda: len(engine.workers) == 1)
        await asyncio.sleep(0.1)
        assert len(made.all) == 2, "it was tried again and again"
        assert not behind.done()
        made.all[0].holds = False
        made.all[0].look()
        for call in (hanging, behind):
            assert np.array_equal((await call)["y"], 2 * rows(7))
        await right(engine, 2)
    assert engine._front._heap.blocks == 0


async def test_on_a_device_with_memory_of_its_own_the_spare_alone_stands_in():
    async with workers(KIND) as made, opened(device=f"not the {HOST}") as engine:
        await right(engine, 1)
        hanging, behind = await hangs(engine, made.all[0], rows(7))
        await asyncio.sleep(0.2)
        assert len(made.all) == 1
        made.all[0].holds = False
        made.all[0].look()
        for call in (hanging, behind):
            assert np.array_equal((await call)["y"], 2 * rows(7))


async def test_an_engine_that_is_closed_ends_its_second_workers():
    async with workers(KIND) as made, opened(close_timeout=0.05) as engine:
        await right(engine, 1)
        hanging, behind = await hangs(engine, made.all[0], rows(7))
        await behind
    assert all(worker.how_it_ended for worker in made.all)
    assert isinstance((await asyncio.gather(hanging, return_exceptions=True))[0], asynctrt.EngineClosedError)
    assert engine._front._heap.blocks == 0


@pytest.mark.timeout(130)
@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("row", [HANG, STOP])
async def test_what_hangs_costs_others_seconds_and_not_the_batch_timeout(spare, row):
    isolation = "spare" if spare else "process"
    async with opened_for_real(isolation=isolation, contexts=1, batch_timeout=12.0, within_s=120) as engine:
        await engine.infer(rows(1))
        if spare:
            await until(lambda: engine.workers[0].spare == "ready")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        hanging = engine.submit(rows(row))
        await until(lambda: engine._front.links[0].groups)
        (group,) = engine._front.links[0].groups.values()
        await until(lambda: engine._memory.words[group.launched])
        behind = [engine.submit(rows(number)) for number in range(2, 9)]
        check(range(2, 9), await asyncio.gather(*behind, return_exceptions=True))
        assert loop.time() - began_s < 12, "they waited for the batch_timeout"
        longest_s = 0.0
        while not hanging.done():
            before_s = loop.time()
            check([9], await answered(engine, [9]))
            longest_s = max(longest_s, loop.time() - before_s)
        assert longest_s < 10
        with pytest.raises(PoisonError):
            await hanging
        await until(lambda: len(engine.workers) == 1)
        check([10], await answered(engine, [10]))
        assert engine.statistics().succeeded >= 9
    assert engine._front._heap.blocks == 0
