"""What waits behind a batch that hangs is answered by the workers of other devices."""

import asyncio

import numpy as np
import pytest

import asynctrt
from tests.helpers import WAIT_S, until
from tests.workers.double import workers
from tests.workers.models import rows
from tests.workers.test_faults import answered, check

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]
KIND = "tests.workers.models:kind"
LARGE = "tests.workers.models:large"


@pytest.fixture(autouse=True)
def found_soon(monkeypatch):
    """A worker that answers nothing is found out after some hundredths of a second."""
    monkeypatch.setattr("asynctrt.workers.pulse.STUCK_S", 0.05)
    for module in ("link", "pulse"):
        monkeypatch.setattr(f"asynctrt.workers.{module}.LOOK_S", 0.02)


def opened(model=KIND, **settings):
    return asynctrt.open(
        model, **{"max_queue_rows": 100_000, "isolation": "process", "device": "host,host", **settings}
    )


async def both_answer(engine, made, array):
    """Let both workers answer a request."""
    for worker in made.all:
        worker.holds = True
    calls = []
    for one in engine._front.links:
        calls.append(engine.submit(array))
        await until(lambda one=one: one.groups)
    for worker in made.all:
        worker.holds = False
        worker.look()
    await asyncio.gather(*calls)


async def hangs(engine, made, array):
    """Let the first worker have a batch that it does not answer, and another."""
    first, second = engine._front.links
    made.all[0].holds = made.all[1].holds = True
    hanging = engine.submit(array)
    await until(lambda: first.groups)
    other = engine.submit(array)
    await until(lambda: second.groups)
    behind = engine.submit(array)
    await until(lambda: len(first.groups) == 2)
    (group, _) = first.groups.values()
    engine._memory.words[group.launched] = 1
    made.all[1].holds = False
    made.all[1].look()
    await other
    return hanging, behind


def ends(worker):
    worker.holds = False
    worker.look()


@pytest.mark.parametrize("has_answered", [False, True])
async def test_what_is_behind_a_batch_that_hangs_goes_to_another_device_until_it_ends(has_answered):
    async with workers(KIND) as made, opened() as engine, asyncio.timeout(WAIT_S):
        if has_answered:
            await both_answer(engine, made, rows(7))
        hanging, behind = await hangs(engine, made, rows(7))
        assert np.array_equal((await behind)["y"], 2 * rows(7))
        check(range(2, 5), await answered(engine, range(2, 5)))
        assert not hanging.done()
        assert engine._front.links[0].is_stuck
        ends(made.all[0])
        assert np.array_equal((await hanging)["y"], 2 * rows(7))
        await until(lambda: not engine._front.links[0].is_stuck)
        statistics = engine.statistics()
        assert statistics.succeeded == 6 + 2 * has_answered
        assert (statistics.failed, statistics.worker_deaths) == (0, 0)
        await until(lambda: engine._front._heap.blocks == 0)


async def test_large_rows_that_are_moved_stay_what_they_are():
    async with workers(LARGE) as made, opened(LARGE) as engine:
        array = np.ones((1, 1 << 20), np.uint8)
        hanging, behind = await hangs(engine, made, array)
        calls = [engine.submit(array * number) for number in range(8)]
        await asyncio.sleep(0)
        calls[3].cancel()
        for number, call in enumerate(calls):
            if number != 3:
                assert np.array_equal((await call)["y"], array * number * 2)
        assert np.array_equal((await behind)["y"], array * 2)
        hanging.cancel()
    assert engine._front._heap.blocks == 0


async def test_without_idempotent_what_a_worker_has_stays_with_it():
    async with workers(KIND) as made, opened(idempotent=False) as engine:
        hanging, behind = await hangs(engine, made, rows(7))
        await until(lambda: engine._front.links[0].is_stuck)
        check([2, 3], await answered(engine, [2, 3]))  # It has not been given these.
        assert not behind.done()
        ends(made.all[0])
        for call in (hanging, behind):
            assert np.array_equal((await call)["y"], 2 * rows(7))
    assert engine._front._heap.blocks == 0


async def test_the_only_worker_gets_what_it_may_answer_beside_a_batch_that_hangs():
    """Its other contexts go on."""
    async with workers(KIND) as made, opened(device="host") as engine, asyncio.timeout(WAIT_S):
        await engine.infer(rows(1))
        (link,), (worker,) = engine._front.links, made.all
        worker.holds = True
        hanging = engine.submit(rows(7))
        await until(lambda: link.is_stuck)
        call = engine.submit(rows(8))
        await until(lambda: len(link.groups) == 2)
        ends(worker)
        await asyncio.gather(hanging, call)
