"""Enqueues that wait for the device, or hang: the event loop never does it with them."""

import asyncio
import threading
from collections import Counter

import pytest

from asynctrt.backends.tensorrt import TensorRTOptions
from asynctrt.backends.tensorrt import context as adapter
from asynctrt.backends.tensorrt.memory import DeviceMemory
from asynctrt.devices.arenas import Arenas
from asynctrt.errors import DeviceError, DeviceLostError, DeviceMemoryError
from tests.contract.devices import WAIT_S, Subject
from tests.doubles.tensorrt.context import IExecutionContext
from tests.helpers import until
from tests.models import rows

pytestmark = pytest.mark.anyio
WAITING = {
    "an output that depends on the data": {"data_dependent": True},
    "a plugin": {"waits": True},
}


@pytest.fixture
def subject_of(device):
    made = []

    def make(**kw):
        made.append(Subject(device, **kw))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert each.double.violations() == ()


async def hangs(subject):
    await until(lambda: subject.double.hanging)


async def answers(asked, subject, sent):
    async with asyncio.timeout(WAIT_S):
        subject.compare(await asked, sent)


@pytest.mark.parametrize("why", WAITING)
async def test_the_loop_and_other_batches_go_on_while_an_enqueue_waits(subject_of, why):
    subject = subject_of(**WAITING[why])
    async with subject.open(contexts=2, arenas=2, lanes=1, batch_timeout=None) as engine:
        subject.double.fail_next("hang")
        held = asyncio.create_task(engine.infer(rows(7)))
        await hangs(subject)
        for number in range(5):
            await subject.check(engine, number)
        assert not held.done()
        subject.double.release_hangs()
        await answers(held, subject, rows(7))


@pytest.mark.parametrize("arenas", [1, 3])
async def test_an_enqueue_that_hangs_is_given_up_and_the_others_go_on(subject_of, arenas):
    subject = subject_of()
    engine = await subject.open(contexts=3, arenas=arenas, lanes=1, batch_timeout=0.3, close_timeout=0.5)
    await subject.check(engine)
    subject.double.fail_next("enqueue-hang")
    with pytest.raises(DeviceLostError, match=r"batch 2 .* did not end within the batch_timeout of 0.3 s"):
        await engine.infer(rows(1))
    if arenas == 3:
        assert engine.statistics().contexts_quarantined == 1
        for number in range(20):
            await subject.check(engine, number)
        assert engine.state == "open"
    else:
        assert engine.state == "lost"
    async with asyncio.timeout(WAIT_S):
        await engine.aclose()
    subject.double.release_hangs()


async def test_what_hangs_in_its_enqueue_and_ends_after_all_is_let_go(subject_of):
    subject = subject_of()
    async with subject.open(contexts=2, arenas=2, lanes=1, batch_timeout=0.3) as engine:
        subject.double.fail_next("enqueue-hang")
        with pytest.raises(DeviceLostError):
            await engine.infer(rows(1))
        subject.double.release_hangs()
        await until(lambda: not engine._driver._given_up)
        await subject.check(engine)
        assert engine.statistics().failed == 1


async def test_closing_does_not_wait_for_an_enqueue_that_hangs(subject_of):
    subject = subject_of()
    engine = await subject.open(contexts=2, arenas=2, lanes=1, batch_timeout=None, close_timeout=0.2)
    subject.double.fail_next("enqueue-hang")
    held = asyncio.create_task(engine.infer(rows(1)))
    await hangs(subject)
    async with asyncio.timeout(WAIT_S):
        await engine.aclose()
    with pytest.raises(DeviceLostError, match="close_timeout"):
        await held
    assert engine.state == "closed"
    subject.double.release_hangs()


@pytest.mark.parametrize("is_measured", [False, True], ids=["not measured", "measured to be short"])
async def test_batches_in_one_arena_keep_their_order_across_engines(subject_of, monkeypatch, is_measured):
    """The second would run in the arena while the first still waits in its enqueue, and both be wrong."""
    monkeypatch.setattr(adapter, "ENQUEUE_NS", 10**12)
    waits = subject_of(data_dependent=True)
    quick = subject_of(double=waits.double, bias=3)
    with Arenas(waits.device, 1) as arenas:
        kw = {"contexts": 1, "arenas": 1, "shared_arenas": arenas, "batch_timeout": None}
        async with waits.open(**kw) as first, quick.open(**kw) as second:
            for number in range(10 if is_measured else 0):
                await quick.check(second, number)
            waits.double.fail_next("hang")
            held = asyncio.create_task(first.infer(rows(1)))
            await hangs(waits)
            behind = asyncio.create_task(second.infer(rows(2)))
            await until(lambda: second.statistics().in_flight_batches)
            assert not behind.done()
            waits.double.release_hangs()
            await answers(held, waits, rows(1))
            await answers(behind, quick, rows(2))


@pytest.fixture
def threads_of(monkeypatch):
    """Count the threads that batches are enqueued by."""
    threads, execute = [], IExecutionContext.execute_async_v3

    def noted(self, handle):
        threads.append(threading.get_ident())
        return execute(self, handle)

    monkeypatch.setattr(IExecutionContext, "execute_async_v3", noted)
    return threads


async def test_enqueues_that_were_measured_to_be_short_are_done_by_the_loop(
    subject_of, monkeypatch, threads_of
):
    monkeypatch.setattr(adapter, "ENQUEUE_NS", 10**12)
    subject = subject_of()
    async with subject.open(contexts=1, arenas=1) as engine:
        for number in range(20):
            await subject.check(engine, number)
    by_loop = [thread == threading.get_ident() for thread in threads_of]
    assert not by_loop[0], "nothing was measured yet"
    assert all(by_loop[-5:])


async def test_slow_changes_of_shape_never_hold_up_the_loop(subject_of, threads_of):
    subject = subject_of(change_ns=20_000_000)
    async with subject.open(contexts=1, arenas=1) as engine:
        for number in range(12):
            sent = rows(*range(number, number + 1 + number % 2))
            await answers(engine.infer(sent), subject, sent)
    assert Counter(threads_of)[threading.get_ident()] == 0


@pytest.mark.parametrize("is_measured", [False, True], ids=["in a thread", "by the loop"])
async def test_a_batch_whose_end_cannot_be_marked_keeps_what_it_uses(subject_of, monkeypatch, is_measured):
    """It may have been put on its stream in part, so that another batch on its context would run into it."""
    monkeypatch.setattr(adapter, "ENQUEUE_NS", 10**12)
    subject = subject_of()
    async with subject.open(contexts=2, arenas=2) as engine:
        for number in range(10 if is_measured else 0):
            await subject.check(engine, number)
        subject.double.fail_next("enqueue")
        stream_type = type(engine._pool.contexts[0].stream)
        with monkeypatch.context() as patched:

            def record(self, event):
                raise DeviceError("no room for an event")

            failing = IExecutionContext.execute_async_v3

            def fail(self, handle):
                patched.setattr(stream_type, "record", record)
                return failing(self, handle)

            patched.setattr(IExecutionContext, "execute_async_v3", fail)
            with pytest.raises(DeviceLostError, match=r"marking its end there.*no room for an event"):
                await engine.infer(rows(1))
        assert engine.statistics().contexts_quarantined == 1
        for number in range(5):
            await subject.check(engine, number)


async def test_what_was_not_warmed_up_in_the_same_memory_is_not_captured(subject_of, caplog):
    """In shared arenas others may run, so the batch before a capture runs in memory of its own.

    TensorRT may then have work left that cannot be part of a graph: the engine runs without graphs.
    """
    subject = subject_of()
    with Arenas(subject.device, 2) as arenas:
        kw = {"contexts": 2, "arenas": 2, "shared_arenas": arenas, "graphs": (1, 4)}
        async with subject.open(**kw) as engine:
            assert engine.statistics().graphs == ()
            said = "cannot be captured as a CUDA graph, so its batches are put on the device call by"
            assert said in caplog.text
            for number in range(5):
                await subject.check(engine, number)
    async with subject.open(contexts=2, arenas=2, graphs=(1, 4)) as engine:
        assert engine.statistics().graphs == (1, 4)
        await subject.check(engine)


async def test_temporary_storage_makes_no_enqueue_wait(subject_of):
    """It is allocated and freed in the order of streams: while one batch hangs, others go on."""
    subject = subject_of(temporary_nbytes=10_000)
    taken, take = [], DeviceMemory.take
    async with subject.open(contexts=3, arenas=3) as engine:
        await subject.check(engine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceMemory, "take", lambda *args, **kw: (taken.append(kw), take(*args, **kw))[1])
            subject.double.fail_next("hang")
            held = asyncio.create_task(engine.infer(rows(7)))
            await hangs(subject)
            for number in range(5):
                await subject.check(engine, number)
            assert not held.done()
            subject.double.release_hangs()
            await answers(held, subject, rows(7))
    assert any(kw.get("stream") for kw in taken)
    assert subject.model.memory_statistics().held_nbytes == subject.model.weights_nbytes


async def test_temporary_storage_that_is_refused_fails_its_batch_alone(subject_of):
    subject = subject_of(temporary_nbytes=10_000, options=TensorRTOptions(memory_budget=14_096))
    async with subject.open(contexts=1, arenas=1) as engine:
        await subject.check(engine)
        memory = subject.model._loaded.memory
        taken = memory.take(1)
        with pytest.raises(DeviceMemoryError, match="Raise memory_budget"):
            await engine.infer(rows(1))
        memory.give_back(taken)
        await subject.check(engine)


async def test_batches_with_temporary_storage_are_captured(subject_of):
    subject = subject_of(temporary_nbytes=10_000)
    async with subject.open(contexts=2, arenas=2, graphs=(1, 4)) as engine:
        assert engine.statistics().graphs == (1, 4)
        for number in range(10):
            await subject.check(engine, number)
