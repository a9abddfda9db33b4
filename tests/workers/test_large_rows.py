"""Large rows are run from where the front wrote them: how often they are copied, and that none is harmed."""

import asyncio
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceError, ExecutionError
from asynctrt.runtime import shared, staging
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from asynctrt.workers import blocks, groups
from tests.contract.devices import DEVICES, strict
from tests.doubles.tensorrt import EngineSpec, TensorIO
from tests.gpu.support import gpu_is_here
from tests.helpers import WAIT_S, until
from tests.workers import local
from tests.workers.models import ONCE, RAISE, WAIT
from tests.workers.test_isolated_engine import gate, opened  # noqa: F401

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]
DIM = 1 << 15
SPEC = EngineSpec(inputs=(TensorIO("input", dims=(-1, DIM)),))
APART = ["host-separate-memory", *(["cuda"] if gpu_is_here() else [])]


def row(first, count=1, dim=DIM):
    """Rows of one number, each 128 KiB."""
    return np.full((count, dim), first, np.float32)


def expected(rows):
    """What the strict double makes of rows."""
    (values,) = SPEC.expected({"input": rows}).values()
    return values


@pytest.fixture
def copied(monkeypatch):
    """The bytes that the CPU has copied of rows, front and worker together."""
    counts = []
    concatenate, copy_rows = np.concatenate, staging.copy_rows

    def counted_concatenate(arrays, *args, out=None, **kwargs):
        if out is not None:
            counts.append(out.nbytes)
        return concatenate(arrays, *args, out=out, **kwargs)

    def counted_copy(rows, view):
        copy_rows(rows, view)
        counts.append(view.nbytes)

    monkeypatch.setattr(np, "concatenate", counted_concatenate)
    for module in (groups, staging, shared):
        monkeypatch.setattr(module, "copy_rows", counted_copy)
    return counts


async def asked(engine, arrays):
    """Ask for all at once, and check every answer."""
    answers = await asyncio.gather(*[engine.infer(array) for array in arrays])
    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_array_equal(next(iter(answer.values())), expected(array))


def settled(workers):
    """Whether everything that was to be pinned is."""
    return not workers.served._blocks._pinning


@pytest.mark.parametrize("sizes", [[1], [3], [1, 2, 1]], ids=str)
async def test_a_batch_of_what_came_in_one_tick_is_copied_once(sizes, copied):
    device = HostDevice(in_place="never", threads=1)
    settings = {"max_rows": 8, "contexts": 1, "graphs": "off"}
    async with local.opened(strict(device, SPEC), device=device, **settings) as (engine, *_):
        for turn in range(3):
            arrays = [row(turn + number, size) for number, size in enumerate(sizes)]
            copied.clear()
            await asked(engine, arrays)
            assert sum(copied) == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("graphs", ["off", "auto"])
async def test_a_device_copies_what_several_ticks_brought_from_where_it_lies(kind, graphs, copied):
    device = DEVICES[kind]()
    settings = {"max_rows": 8, "contexts": 1, "graphs": graphs}
    async with local.opened(strict(device, SPEC), device=device, **settings) as (engine, inner, workers):
        counts = []
        for turn in range(50):
            arrays = [row(10 * turn + number, 1 + number % 2) for number in range(12)]
            before = list(workers.served._blocks._known)
            copied.clear()
            calls = []
            for array in arrays:
                calls.append(engine.submit(array))
                await asyncio.sleep(0)
            answers = await asyncio.gather(*calls)
            for array, answer in zip(arrays, answers, strict=True):
                np.testing.assert_array_equal(next(iter(answer.values())), expected(array))
            if sorted(workers.served._blocks._known) == sorted(before):  # All of them were pinned.
                counts.append(sum(copied) / sum(array.nbytes for array in arrays))
            await until(lambda: settled(workers))
            if len(counts) == 3:
                break
        assert counts == [1, 1, 1]
        assert inner.statistics().batches < 12 * (turn + 1)


@pytest.mark.parametrize("kind", APART)
async def test_rows_that_are_padded_and_rows_that_are_not_pinned_yet(kind, monkeypatch):
    device = DEVICES[kind]()
    monkeypatch.setattr(blocks, "PINNED_NBYTES_MAX", 3 * 8 * 2 * (DIM * 4 + 4096))
    settings = {"max_rows": 8, "batching": "deterministic"}
    async with local.opened(strict(device, SPEC), device=device, **settings) as (engine, _, workers):
        for turn in range(4):
            await asked(engine, [row(turn * 100 + number, 1 + number % 3) for number in range(30)])
        await until(lambda: settled(workers))
        known = [one.address for one in workers.served._blocks._known.values()]
        assert None in known
        assert set(known) != {None}


async def test_a_device_that_pins_nothing_is_given_what_was_gathered(monkeypatch, caplog):
    device = DEVICES["host-separate-memory"]()

    def refuse(*_):
        raise DeviceError("no page can be pinned")

    monkeypatch.setattr(device, "pin", refuse)
    async with local.opened(strict(device, SPEC), device=device, max_rows=2) as (engine, _, workers):
        for turn in range(6):
            await asked(engine, [row(turn * 10 + number) for number in range(8)])
            await until(lambda: settled(workers))
        assert workers.served._blocks._pinned_nbytes == 0
    assert caplog.text.count("no page can be pinned") == 1


async def test_pages_that_were_given_back_are_pinned_anew(monkeypatch):
    device = DEVICES["host-separate-memory"]()
    pinned = []

    def pin(address, nbytes):
        pinned.append(address)
        return lambda: pinned.remove(address)

    monkeypatch.setattr(device, "pin", pin)
    async with local.opened(strict(device, SPEC), device=device, max_rows=8) as (engine, _, workers):
        await asked(engine, [row(1, 8)])
        await until(lambda: settled(workers) and len(pinned) == 1)
        heap, (before,) = engine._front._heap, workers.served._blocks._known.values()
        await asked(engine, [row(2, 8)])
        assert next(iter(workers.served._blocks._known.values())) is before
        while heap._kept:
            heap._return_oldest()
        await asked(engine, [row(3, 8)])
        (after,) = workers.served._blocks._known.values()
        assert (before.start, before.nbytes) == (after.start, after.nbytes)
        assert after is not before
        await until(lambda: settled(workers) and len(pinned) == 1)
    await until(lambda: not pinned)


async def test_rows_stay_until_the_batch_is_over_though_their_caller_left():
    device = LatchDevice()
    async with local.opened(strict(device, SPEC), device=device, max_rows=8) as (engine, _, workers):
        first = engine.submit(row(1, 2))
        await device.wait_held()
        first.cancel()
        await until(lambda: workers.served._leaving)
        assert engine._front._heap.blocks == 1
        second = engine.submit(row(5, 2))
        await device.wait_held(2)
        assert len(workers.served._blocks._known) == 2, "the first one's memory was used again"
        device.open()
        np.testing.assert_array_equal(next(iter((await second).values())), expected(row(5, 2)))
        await until(lambda: engine._front._heap.blocks == 0)


async def test_a_front_that_is_gone_leaves_nothing_though_a_batch_is_under_way():
    """The worker lets go of its memory once the batch is over; another worker's side has the rows again."""
    device = LatchDevice()
    model = FunctionModel(
        lambda inputs: inputs["x"][:, :1] + 1,
        inputs=TensorSpec("x", "float32", (DIM,)),
        outputs=TensorSpec("y", "float32", (1,)),
    )
    async with local.opened(model, device=device, max_rows=8) as (engine, inner, workers):
        call = engine.submit(row(1, 2))
        await device.wait_held()
        gc.collect()  # Functions that were bound refer to themselves.
        before = mapped(engine)
        workers.all[-1].end("ended by SIGKILL")
        await device.wait_held(2)
        between = mapped(engine)
        device.open()
        assert (await call)["y"].tolist() == [[2], [2]]
        await until(lambda: sum(len(context._bindings_in_place) for context in inner._pool.contexts) == 1)
        gc.collect()
        assert (between, mapped(engine)) == (before + 1, before)


def mapped(engine):
    """How often this process has mapped the memory of a front."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    ends = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    return sum(end - begin == engine._memory.nbytes for begin, end in ends)


async def test_a_worker_runs_large_rows_in_shared_memory():
    async with opened("tests.workers.models:whereabouts", max_rows=4) as engine:
        for _ in range(5):
            assert (await engine.infer(row(1, 3)))["y"].tolist() == [[True]] * 3
        answers = await asyncio.gather(*[engine.infer(row(number)) for number in range(12)])
        assert all(answer["y"].all() for answer in answers)


async def test_a_model_that_writes_to_rows_and_fails_does_not_fail_their_neighbours():
    async with opened("tests.workers.models:in_place", max_rows=8) as engine:
        firsts = [1, 2, RAISE, 3, 4]
        answers = await asyncio.gather(
            *[engine.infer(row(first)) for first in firsts], return_exceptions=True
        )
        for first, answer in zip(firsts, answers, strict=True):
            if first == RAISE:
                assert isinstance(answer, ExecutionError)
            else:
                assert (answer["y"] == first + 1).all()


async def test_a_model_that_writes_to_rows_and_dies_gets_them_as_they_were(gate):  # noqa: F811
    async with opened("tests.workers.models:in_place", max_rows=8) as engine:
        firsts = [1, ONCE, 2]
        answers = await asyncio.gather(*[engine.infer(row(first)) for first in firsts])
        for first, answer in zip(firsts, answers, strict=True):
            assert (answer["y"] == first + 1).all()
        assert engine.workers[0].deaths == 1


async def test_what_a_caller_who_left_does_with_its_arrays_is_its_own(gate):  # noqa: F811
    """A batch is computed again, and of those whose callers left nothing is read any more."""
    async with opened("tests.workers.models:in_place", max_rows=8) as engine:
        arrays = [row(first) for first in (WAIT, 2, 3)]
        calls = [engine.submit(array) for array in arrays]
        (worker,) = engine._front.links
        await until(lambda: worker.groups)
        (group,) = worker.groups.values()
        await until(lambda: engine._memory.words[group.launched])
        calls[0].cancel()
        await asyncio.sleep(0)
        arrays[0].shape = (2, DIM // 2)
        os.kill(engine.workers[0].pid, 9)
        answers = await asyncio.gather(*calls[1:])
        for first, answer in zip((2, 3), answers, strict=True):
            assert (answer["y"] == first + 1).all()


async def test_parts_of_what_no_batch_holds_beside_others():
    device = LatchDevice(concurrency=1)
    settings = {"max_rows": 8, "contexts": 1}
    async with local.opened(strict(device, SPEC), device=device, **settings) as (engine, inner, _):
        arrays = [row(1), row(2, 2), row(3, 20)]
        calls = [engine.submit(arrays[0])]
        await device.wait_held()
        for array in arrays[1:]:
            calls.append(engine.submit(array))
            await until(lambda: len(engine._front.links[0].groups) == len(calls))
        await until(lambda: inner.statistics().queued_rows == 22)
        device.open()
        for array, call in zip(arrays, calls, strict=True):
            np.testing.assert_array_equal(next(iter((await call).values())), expected(array))
        assert inner.statistics().batches == 5  # The parts come one after the other, with turns between.


@pytest.mark.parametrize("dim", [DIM, DIM + 7])
async def test_batches_of_one_group_run_where_it_lies(dim):
    """Each group begins at a multiple of 256 bytes, whatever a row has."""
    spec = EngineSpec(inputs=(TensorIO("input", dims=(-1, dim)),))
    device = LatchDevice()
    async with local.opened(strict(device, spec), device=device, max_rows=8) as (engine, inner, _):
        calls = []
        for number in range(2):
            calls.append(engine.submit(row(number, 1 + number, dim)))
            await device.wait_held(number + 1)
        assert sum(len(context._bindings_in_place) for context in inner._pool.contexts) == 2
        device.open()
        for number, call in enumerate(calls):
            (values,) = spec.expected({"input": row(number, 1 + number, dim)}).values()
            np.testing.assert_array_equal(next(iter((await call).values())), values)


async def test_a_system_that_refuses_a_thread_to_pin_is_no_concern_of_callers(monkeypatch):
    device = DEVICES["host-separate-memory"]()

    class Refusing(ThreadPoolExecutor):
        def submit(self, *_, **__):
            raise RuntimeError("can't start new thread")

    async with local.opened(strict(device, SPEC), device=device, max_rows=2) as (engine, _, workers):
        monkeypatch.setattr(blocks, "ThreadPoolExecutor", Refusing)
        await asked(engine, [row(number) for number in range(8)])
        assert (workers.served._blocks._pinned_nbytes, workers.served._blocks._pinning) == (0, 0)
        monkeypatch.undo()
        await asked(engine, [row(1, 2)])


async def test_pages_that_change_while_they_are_pinned_are_unpinned_before_others_are_pinned(monkeypatch):
    """CUDA refuses to pin what is pinned already, and after a refusal nothing is pinned any more."""
    device = DEVICES["host-separate-memory"]()
    latch, pinned = threading.Event(), set()

    def pin(address, _):
        latch.wait(WAIT_S)
        if address in pinned:
            raise DeviceError("it is pinned already")
        pinned.add(address)
        return lambda: pinned.remove(address)

    monkeypatch.setattr(device, "pin", pin)
    async with local.opened(strict(device, SPEC), device=device, max_rows=8) as (engine, _, workers):
        for turn in range(3):
            await asked(engine, [row(turn, 8)])
            while engine._front._heap._kept:
                engine._front._heap._return_oldest()
        latch.set()
        await until(lambda: settled(workers))
        (block,) = workers.served._blocks._known.values()
        assert (len(pinned), block.address) == (1, block.buffer.address)
    await until(lambda: not pinned)


async def test_memory_stays_mapped_until_it_is_unpinned(monkeypatch):
    """Else other memory may have its addresses, which the device takes for the pages that it knows."""
    device = DEVICES["host-separate-memory"]()
    begun, latch = threading.Event(), threading.Event()

    def unpin():
        begun.set()
        latch.wait(WAIT_S)

    monkeypatch.setattr(device, "pin", lambda *_: unpin)
    async with local.opened(strict(device, SPEC), device=device, max_rows=8) as (engine, _, workers):
        gc.collect()  # Functions that were bound refer to themselves.
        before = mapped(engine)
        await asked(engine, [row(1)])
        await until(lambda: settled(workers))
        workers.all[-1].end("ended by SIGKILL")
        await until(begun.is_set)
        await asked(engine, [row(1)])
        gc.collect()
        between = mapped(engine)
        latch.set()

        def is_gone():
            gc.collect()
            return mapped(engine) == before

        await until(is_gone)
        assert between == before + 1


@pytest.mark.parametrize(("dim", "count"), [(4, 20), (DIM, 20)], ids=["small", "large"])
async def test_rows_of_a_split_call_stay_as_well_though_their_caller_left(dim, count):
    """A thread may be gathering them."""
    spec = EngineSpec(inputs=(TensorIO("input", dims=(-1, dim)),))
    device = LatchDevice()
    async with local.opened(strict(device, spec), device=device, max_rows=8) as (engine, _, workers):
        call = engine.submit(row(1, count, dim))
        await device.wait_held()
        call.cancel()
        await until(lambda: workers.served._leaving)
        workers.served.beat(0)
        await asyncio.sleep(0)
        assert engine._front._heap.blocks == 1
        device.open()
        await until(lambda: given_back(engine, workers))


async def test_rows_stay_though_one_of_their_parts_failed():
    begun, latch = threading.Event(), threading.Event()

    def compute(inputs):
        if inputs["x"][0, 0]:
            begun.wait(WAIT_S)
            raise ValueError("one part")
        begun.set()
        latch.wait(WAIT_S)
        return inputs["x"][:, :1]

    model = FunctionModel(
        compute,
        inputs=TensorSpec("x", "float32", (DIM,)),
        outputs=TensorSpec("y", "float32", (1,)),
    )
    device = HostDevice(in_place="never", threads=2)
    async with local.opened(model, device=device, max_rows=2, contexts=2) as (engine, _, workers):
        call = engine.submit(np.concatenate([row(0, 2), row(1, 2)]))
        await until(lambda: workers.served._leaving)
        workers.served.beat(0)
        assert (call.done(), engine._front._heap.blocks) == (False, 1)
        latch.set()
        await until(lambda: given_back(engine, workers))
        with pytest.raises(ExecutionError, match="one part"):
            await call


def given_back(engine, workers):
    """Whether all blocks are, once the worker has looked."""
    workers.served.beat(0)
    return engine._front._heap.blocks == 0
