"""``urgent_share``: a part of the device that only requests of the highest priority run on."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeviceLostError,
    DeviceMemoryError,
    EngineClosedError,
    InputError,
    OptionsError,
    UsageError,
)
from asynctrt.testing.tensorrt import EngineSpec
from tests.contract.devices import strict
from tests.helpers import until
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30
URGENT = 2


@pytest.fixture
def model(device):
    made = strict(device, EngineSpec())
    yield made
    made.flavour.module.release_hangs()
    made.close()
    assert made.flavour.module.violations() == ()


def opened(model, device, **kw):
    return asynctrt.open(
        model, device=device, **{"urgent_share": 0.25, "contexts": 1, "graphs": "off", "max_rows": 8} | kw
    )


def sent(number, count=1):
    return np.full((count, 16), number, np.float32)


async def check(engine, number=1, count=1, **kw):
    async with asyncio.timeout(WAIT_S):
        result = await engine.infer(sent(number, count), **kw)
    expected = EngineSpec().expected(sent(number, count))["output"]
    np.testing.assert_array_equal(result["output"], expected)
    return result


async def hangs(model):
    async with asyncio.timeout(WAIT_S):
        while not model.flavour.module.hanging:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("held", "other"), [(0, URGENT), (1, URGENT), (URGENT, 0), (URGENT, 1)])
async def test_neither_waits_for_the_other(device, model, held, other):
    async with opened(model, device) as engine:
        model.flavour.module.fail_next("hang")
        waiting = asyncio.create_task(check(engine, 7, priority=held))
        await hangs(model)
        for number in range(5):
            await check(engine, number, priority=other)
        assert not waiting.done()
        model.flavour.module.release_hangs()
        await waiting


async def test_statistics_are_of_both_and_of_each(device, model):
    async with opened(model, device, contexts=2) as engine:
        await asyncio.gather(*[check(engine, number, count=1) for number in range(5)])
        await asyncio.gather(*[check(engine, number, count=3, priority=URGENT) for number in range(4)])
        both, urgent = engine.statistics(), engine.urgent.statistics()
        assert (both.succeeded, both.rows) == (9, 5 + 12)
        assert (urgent.succeeded, urgent.rows) == (4, 12)
        assert (both.contexts, urgent.contexts) == (4, 2)
        assert both.batches == sum(both.launched.values())
        assert both.batches == sum(size.count for size in both.by_batch_rows.values())
        assert 0 <= both.arena_busy_share <= 1
        assert both.arena_nbytes == 2 * urgent.arena_nbytes > 0
        assert engine.urgent.urgent is None
    async with opened(model, device, urgent_share=None) as engine:
        assert engine.urgent is None


@pytest.mark.parametrize("graphs", ["off", (1, 8)])
async def test_both_at_once(device, model, graphs):
    async with opened(model, device, contexts=2, graphs=graphs) as engine, asyncio.timeout(WAIT_S):
        await asyncio.gather(*[check(engine, n % 50, 1 + n % 11, priority=n % 3) for n in range(150)])
        assert engine.statistics().succeeded >= 150
        assert engine.statistics().graphs == (() if graphs == "off" else graphs)


async def test_traces_have_both(device, model):
    async with opened(model, device) as engine:
        with engine.tracing() as trace:
            await check(engine, count=2)
            await check(engine, count=3, priority=URGENT)
        assert [batch.rows for batch in trace] == [2, 3]
        with pytest.raises(UsageError, match="being traced already"), engine.tracing(), engine.tracing():
            pass
        await check(engine)
        assert len(trace) == 2


async def test_what_is_wrong_with_a_request_is_said_alike(device, model):
    async with opened(model, device) as engine:
        for priority in (0, URGENT):
            with pytest.raises(InputError, match="takes shape"):
                await engine.infer(np.zeros((1, 3), np.float32), priority=priority)
        with pytest.raises(InputError, match="priority"):
            await engine.infer(sent(1), priority=URGENT + 1)
        future = engine.submit(sent(3), priority=URGENT)
        async with asyncio.timeout(WAIT_S):
            assert (await future)["output"].shape == (1, 16)
        assert engine.urgent.statistics().succeeded == 1


async def test_draining_and_closing_answer_both(device, model):
    before = device.memory().held_nbytes
    engine = await opened(model, device)
    model.flavour.module.fail_next("hang", 1)
    waiting = [asyncio.create_task(check(engine, n, priority=n % 3)) for n in range(9)]
    await hangs(model)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    for priority in (0, URGENT):
        with pytest.raises(EngineClosedError, match="is draining"):
            await engine.infer(sent(1), priority=priority)
    model.flavour.module.release_hangs()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(draining, *waiting)
        await engine.aclose()
    assert (engine.state, engine.urgent.state) == ("closed", "closed")
    for priority in (0, URGENT):
        with pytest.raises(EngineClosedError):
            await engine.infer(sent(1), priority=priority)
    await until(lambda: device.memory().held_nbytes == before)  # A device like a GPU frees in a thread.


@pytest.mark.parametrize("priority", [0, URGENT])
async def test_what_hangs_is_abandoned_and_given_back_later(device, model, priority):
    before = device.memory().held_nbytes
    engine = await opened(model, device, close_timeout=0.1)
    model.flavour.module.fail_next("hang")
    waiting = asyncio.create_task(engine.infer(sent(1), priority=priority))
    await hangs(model)
    async with asyncio.timeout(WAIT_S):
        await engine.aclose()
        with pytest.raises(DeviceLostError):
            await waiting
        assert device.memory().held_nbytes > before
        model.flavour.module.release_hangs()
        while device.memory().held_nbytes > before:
            await asyncio.sleep(0.001)


async def test_an_engine_on_which_nothing_urgent_can_run_is_lost(device, model):
    async with opened(model, device, batch_timeout=0.3) as engine:
        model.flavour.module.fail_next("hang")
        with pytest.raises(DeviceLostError, match="did not end within"):
            await engine.infer(sent(1), priority=URGENT)
        assert engine.state == "lost"
        await check(engine)
        model.flavour.module.release_hangs()


async def test_it_is_not_suspended(device, model):
    async with opened(model, device) as engine:
        with pytest.raises(UsageError, match="cannot be suspended with urgent_share"):
            await engine.suspend()
        await check(engine, priority=URGENT)


async def test_what_does_not_fit_leaves_nothing_behind(little_reserve):
    device = HostDevice(unified=False, memory_nbytes=60_000)
    model = strict(device, EngineSpec())
    held = device.memory().held_nbytes
    with pytest.raises(DeviceMemoryError):
        await opened(model, device, max_rows=64)
    assert device.memory().held_nbytes == held
    async with opened(model, device, max_rows=1, urgent_share=None):
        pass
    model.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"urgent_share": 0}, "above 0 and below 1"),
        ({"urgent_share": 1}, "above 0 and below 1"),
        ({"urgent_share": "much"}, "above 0 and below 1"),
        ({"priorities": 1}, "priorities is 1: there is no other"),
    ],
)
def test_impossible_options(settings, says):
    with pytest.raises(OptionsError, match=says):
        opened(double_model(), HostDevice(), **settings)


async def test_arenas_are_not_shared_with_urgent_ones():
    device = HostDevice()
    with Arenas(device, 1) as arenas, pytest.raises(OptionsError, match="Leave one of them out"):
        await opened(double_model(), device, shared_arenas=arenas)


class TestPartitions:
    def test_of_threads(self):
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

    def test_each_part_has_a_thread(self):
        some, rest = HostDevice(threads=1).partition(0.01)
        assert (some.concurrency, rest.concurrency) == (1, 1)

    @pytest.mark.parametrize("share", [0, 1, -1, 1.5])
    def test_shares(self, device, share):
        with pytest.raises(OptionsError, match=f"above 0 and below 1, not {share}"):
            device.partition(share)

    def test_parts_are_not_divided(self, device):
        some, rest = device.partition(0.5)
        with pytest.raises(OptionsError, match="is a part of a device"):
            some.partition(0.5)
        some.close()
        rest.close()

    async def test_a_model_runs_on_any_part_of_its_device(self, device, model):
        some, rest = device.partition(0.5)
        async with (
            asynctrt.open(model, device=some, graphs="off") as one,
            asynctrt.open(model, device=rest, graphs="off") as other,
        ):
            await asyncio.gather(*[check(engine, n) for n in range(10) for engine in (one, other)])
        some.close()
        rest.close()

    async def test_arrays_move_between_parts(self):
        device = HostDevice()
        some, rest = device.partition(0.5)
        model = double_model()
        async with asynctrt.open(model, device=some) as one, asynctrt.open(model, device=rest) as other:
            there = await one.infer(rows(1, 2), outputs="device")
            assert len((await other.infer({"input": there["output"]}))["output"]) == 2
