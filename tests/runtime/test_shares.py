"""Engines that divide a device by weight: which do, on which loop, and what their batches get."""

import asyncio
import gc
import time
import weakref
from functools import partial

import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import OptionsError
from asynctrt.runtime import shares
from asynctrt.runtime.shares import join_device
from asynctrt.tensors import TensorSpec
from tests.models import double_model, rows
from tests.runtime.support import WAIT_S

SPECS = {
    "inputs": TensorSpec("input", "float32", (4,)),
    "outputs": TensorSpec("output", "float32", (4,)),
}


def sleeper(name, seconds, log):
    """A model whose batches take so long, and no core."""

    def work(inputs):
        began = time.perf_counter()
        time.sleep(seconds)
        log.append((name, time.perf_counter() - began))
        return inputs["input"]

    return FunctionModel(work, **SPECS)


def join(loop, device, weight=1.0):
    return join_device(loop, device, weight, overlaps=False, wake=lambda: None)


def test_engines_on_one_device_and_loop_divide_it():
    loop, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    first, second = join(loop, HostDevice()), join(loop, HostDevice())
    elsewhere = join(other, HostDevice())
    assert first._shares is second._shares
    assert elsewhere._shares is not first._shares
    for one in (loop, other):
        one.close()


def test_a_loop_that_is_gone_leaves_nothing_behind():
    before = len(shares._devices._by_loop)
    loop = asyncio.new_event_loop()
    join(loop, HostDevice())
    assert len(shares._devices._by_loop) == before + 1
    loop.close()
    del loop
    gc.collect()
    assert len(shares._devices._by_loop) == before


def test_an_engine_that_is_never_closed_keeps_no_loop():
    """What it has joined with leads back to its loop."""
    loop = asyncio.new_event_loop()
    kept = join_device(loop, HostDevice(), 1.0, overlaps=False, wake=partial(loop.call_soon, print))
    assert kept._shares.members
    gone = weakref.ref(loop)
    loop.close()
    del loop, kept
    gc.collect()
    assert gone() is None


def test_a_part_of_a_device_counts_as_the_whole():
    loop = asyncio.new_event_loop()
    device = HostDevice(threads=2)
    parts = device.partition(0.5)
    joined = [join(loop, one) for one in (device, *parts)]
    assert len({id(share._shares) for share in joined}) == 1
    loop.close()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("ours", "theirs", "unified"), [(3.0, 1.0, True), (1.0, 1.0, True), (1.0, 1.0, False)]
)
async def test_two_that_are_flooded_get_time_by_weight(ours, theirs, unified):
    """Not by batches: those of one take longer."""
    device, log = HostDevice(threads=1, in_place="never", unified=unified), []
    settings = {"device": device, "max_rows": 1, "contexts": 2, "max_queue_rows": 2000}
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(sleeper("ours", 0.004, log), weight=ours, **settings) as first,
        asynctrt.open(sleeper("theirs", 0.001, log), weight=theirs, **settings) as second,
    ):
        tasks = [
            asyncio.create_task(engine.infer(rows(1))) for engine in (first, second) for _ in range(1000)
        ]
        while len(log) < 300:
            await asyncio.sleep(0.01)
        took_s = [sum(seconds for name, seconds in log if name == which) for which in ("ours", "theirs")]
        used = [engine.statistics().device_ns for engine in (first, second)]
        held = [engine.statistics().held_ns for engine in (first, second)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert used[0] / used[1] == pytest.approx(ours / theirs, rel=0.25)
    assert took_s[0] / took_s[1] == pytest.approx(ours / theirs, rel=0.25)
    assert [ns / 1e9 for ns in used] == pytest.approx(took_s, rel=0.25)
    assert sum(held) > 0


@pytest.mark.anyio
async def test_without_a_weight_nothing_is_divided():
    async with asynctrt.open(double_model(), device=HostDevice()) as engine:
        await engine.infer(rows(1))
        assert engine._scheduler.room.share is None
        assert engine.statistics().device_ns == engine.statistics().held_ns == 0


@pytest.mark.anyio
async def test_what_takes_none_of_the_device_has_no_weight_there():
    async def elsewhere(inputs):
        return inputs["input"]

    with pytest.raises(OptionsError, match="takes none"):
        await asynctrt.open(FunctionModel(elsewhere, **SPECS), device=HostDevice(), weight=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight": 0}, "weight must be a number ≥ 0.001 and ≤ 1000"),
        ({"weight": float("nan")}, "weight must be a number"),
        ({"weight": 2, "isolation": "process"}, "with isolation"),
    ],
)
def test_weights_that_cannot_be_are_refused(settings, said):
    with pytest.raises(OptionsError, match=said):
        asynctrt.Options(**settings)


@pytest.mark.anyio
async def test_one_whose_batches_fail_gets_no_more_than_its_part():
    device, log = HostDevice(threads=1, in_place="never"), []

    def fail(inputs):
        began = time.perf_counter()
        time.sleep(0.002)
        log.append(("theirs", time.perf_counter() - began))
        raise ValueError("no")

    settings = {"device": device, "max_rows": 1, "contexts": 2, "max_queue_rows": 2000}
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(sleeper("ours", 0.002, log), weight=1, **settings) as first,
        asynctrt.open(FunctionModel(fail, **SPECS), weight=1, **settings) as second,
    ):
        tasks = [
            asyncio.create_task(engine.infer(rows(1))) for engine in (first, second) for _ in range(1000)
        ]
        while len(log) < 200:
            await asyncio.sleep(0.01)
        took_s = [sum(seconds for name, seconds in log if name == which) for which in ("ours", "theirs")]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert second.statistics().device_ns > 0
    assert took_s[0] / sum(took_s) == pytest.approx(0.5, rel=0.25)


@pytest.mark.anyio
async def test_one_that_is_lost_holds_nobody_up_though_it_is_not_closed():
    device, log = HostDevice(threads=1, in_place="never"), []
    settings = {"device": device, "max_rows": 1, "contexts": 2}
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(sleeper("ours", 0.001, log), weight=1, **settings) as first,
        asynctrt.open(sleeper("theirs", 0.001, log), weight=100, **settings) as second,
    ):
        task = asyncio.create_task(second.infer(rows(1)))
        while not second.statistics().in_flight_batches:
            await asyncio.sleep(0)
        shares = first._scheduler.room.share._shares
        # What an interrupt leaves in flight is never told to have ended.
        second._driver._interrupted(KeyboardInterrupt())
        assert shares.members == [first._scheduler.room.share]
        with pytest.raises(asynctrt.DeviceLostError):
            await task
        await first.infer(rows(1))
