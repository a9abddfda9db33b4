"""What a front does with its workers in the order of events that a test chooses."""

import asyncio
import gc
import os
import random
import threading
import time
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from asynctrt.errors import (
    DeadlineError,
    DeviceLostError,
    DeviceUnavailableError,
    EngineClosedError,
    InputError,
    PoisonError,
)
from asynctrt.runtime.jobs import Copiers
from asynctrt.workers import front, groups, link, spares
from asynctrt.workers.link import FAILURES_MAX
from tests.helpers import WAIT_S, until
from tests.workers import double
from tests.workers.double import KIND, opened, workers
from tests.workers.models import HANG, SEGFAULT, rows

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]
LARGE = "tests.workers.models:large"


async def test_a_worker_that_is_ready_just_when_it_is_closed_is_not_used():
    async with workers(KIND) as made:
        made.starts, made.says_ready_when_killed = False, True
        fds = len(os.listdir("/proc/self/fd"))
        opening = asyncio.create_task(opened().__aenter__())
        await until(lambda: made.all)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(made.all) == 1, "another worker was started for an engine that is closed"
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= fds + 1  # The loop's own come and go.


async def test_who_leaves_while_rows_wait_for_the_copying_thread_takes_nobody_along():
    async with workers(LARGE), opened(LARGE) as engine:
        latch = threading.Event()
        copiers = engine._front._copy_threads()
        for _ in range(copiers.threads_max):
            copiers.assist(latch.wait)
        array = np.ones((1, 1 << 20), np.uint8)
        calls = [engine.submit(array * number) for number in range(8)]
        await asyncio.sleep(0)
        assert len(engine._front._copying) == 1
        calls[3].cancel()
        await asyncio.sleep(0)
        latch.set()
        for number, call in enumerate(calls):
            if number != 3:
                assert np.array_equal((await call)["y"], array * number * 2)
    assert engine._front._heap.blocks == 0


@pytest.mark.parametrize("counts", [[8], [1] * 8, [3, 5], [1, 6, 1]])
async def test_large_rows_are_copied_by_several_threads_at_once(monkeypatch, counts):
    monkeypatch.setattr(front, "Copiers", partial(Copiers, threads_max=2))
    both, threads = threading.Barrier(2), set()
    write = groups._write_part

    def write_with_the_other(*args):
        both.wait(WAIT_S)
        threads.add(threading.current_thread().name.rpartition("-")[0])
        write(*args)

    monkeypatch.setattr(groups, "_write_part", write_with_the_other)
    array = np.arange(8, dtype=np.uint8)[:, None].repeat(1 << 20, 1)
    ends = np.cumsum([0, *counts])
    async with asyncio.timeout(WAIT_S), workers(LARGE), opened(LARGE) as engine:
        answers = await asyncio.gather(*[engine.infer(array[slice(*part)]) for part in pairwise(ends)])
        for part, answer in zip(pairwise(ends), answers, strict=True):
            assert np.array_equal(answer["y"], array[slice(*part)] * 2)
    assert threads == {"asynctrt-copy"}
    assert engine._front._heap.blocks == 0


@pytest.mark.parametrize(("model", "dims"), [(KIND, (4,)), (LARGE, (1 << 20,))])
@pytest.mark.parametrize("others", [0, 5])
async def test_what_a_caller_changes_meanwhile_is_its_own_error(model, dims, others):
    """Here, and in the thread that copies what is large."""
    async with workers(model), opened(model) as engine:
        dtype = engine.inputs[0].dtype
        changed, kept = np.ones((1, *dims), dtype), np.full((1, *dims), 2, dtype)
        calls = [engine.submit(changed), *[engine.submit(kept) for _ in range(others)]]
        changed.shape = (2, dims[0] // 2)
        draining = asyncio.create_task(engine.drain())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], InputError)
        assert "Leave arrays alone" in str(answers[0])
        assert all(np.array_equal(answer["y"], 2 * kept) for answer in answers[1:])
        await draining
        assert (engine.statistics().succeeded, engine.statistics().failed) == (others, 1)
        assert engine._front.links[0].rows == 0
    assert engine._front._heap.blocks == 0


async def test_the_first_of_many_in_one_batch_is_found():
    async with workers(KIND) as made, opened() as engine:
        calls = [engine.submit(rows(SEGFAULT if number == 0 else number)) for number in range(4096)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], PoisonError)
        assert [answer["y"][0, 0] for answer in answers[1:]] == [2 * number for number in range(1, 4096)]
        await until(lambda: engine.state == "open")
        assert len(made.all) == 1 + 3
    assert engine._front._heap.blocks == 0


@pytest.mark.parametrize(("requests", "bad"), [(64, 1), (64, 16), (64, 64), (512, 256), (4096, 4)])
async def test_however_many_end_their_worker_nobody_else_fails(requests, bad):
    """Each ends one worker alone, after the two that they end together; the others are run twice more."""
    async with workers(KIND) as made, opened() as engine:
        deadly = set(random.Random(requests).sample(range(requests), bad))
        calls = [engine.submit(rows(SEGFAULT if number in deadly else number)) for number in range(requests)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for number, answer in enumerate(answers):
            if number in deadly:
                assert isinstance(answer, PoisonError)
            else:
                assert answer["y"][0, 0] == 2 * number
        await until(lambda: engine.state == "open")
        assert engine.workers[0].deaths == 2 + bad
        assert made.runs <= 2 * requests + requests
    assert engine._front._heap.blocks == 0


async def test_others_have_a_turn_before_each_suspect_that_ends_its_worker():
    async with workers(KIND) as made, opened() as engine:
        made.starts = False
        bad = [engine.submit(rows(SEGFAULT)) for _ in range(8)]
        for turn in range(9):
            await until(lambda turn=turn: len(made.all) == 2 + turn)
            call = engine.submit(rows(1 + turn)) if turn else None
            await until(lambda: engine._front._held)
            made.all[-1].say_ready()
            if call is not None:
                assert (await call)["y"][0, 0] == 2 * (1 + turn)
                assert sum(one.done() for one in bad) <= turn
        answers = await asyncio.gather(*bad, return_exceptions=True)
        assert {type(answer) for answer in answers} == {PoisonError}


async def test_who_waits_with_suspects_that_end_well_has_every_second_turn():
    """They would be tried for a minute without end, if they had all the turns."""
    async with workers(KIND) as made, opened() as engine:
        calls = [engine.submit(rows(number)) for number in range(1, 4001)]
        for _ in range(2):
            made.all[-1].holds = True
            count = len(made.all)
            await until(lambda: engine.workers[0].groups)
            for group in engine._front.links[0].groups.values():
                engine._memory.words[group.launched] = 1
            made.all[-1].end("ended by SIGKILL")
            await until(lambda count=count: len(made.all) == count + 1 and made.all[-1].receiver)
        assert not any(call.done() for call in calls)
        assert (await engine.infer(rows(5)))["y"][0, 0] == 10
        assert sum(call.done() for call in calls) < 2000
        assert [(await call)["y"][0, 0] for call in calls] == [2 * number for number in range(1, 4001)]
        assert engine.workers[0].deaths == 2


@pytest.mark.parametrize("bad", [1, 3])
async def test_requests_that_hang_are_suspected_at_once_and_found_alone(monkeypatch, bad):
    monkeypatch.setattr(link, "LOOK_S", 0.02)
    monkeypatch.setattr(link, "SILENCE_S_MIN", 0.1)
    async with workers(KIND), opened(batch_timeout=0.1) as engine:
        calls = [engine.submit(rows(HANG if number < bad else number)) for number in range(16)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for number, answer in enumerate(answers):
            if number < bad:
                assert isinstance(answer, PoisonError)
                assert "event loop had not run for" in str(answer)
            else:
                assert answer["y"][0, 0] == 2 * number
        assert engine.workers[0].deaths == 1 + bad


async def test_suspects_that_nobody_waits_for_any_more_leave_nothing_behind():
    async with workers(KIND) as made, opened() as engine:
        calls = [engine.submit(rows(SEGFAULT), priority=number) for number in (0, 1)]
        await until(lambda: len(made.all) == 3)
        made.starts = False
        await until(lambda: len(made.all) == 4)  # One was found, and the other waits for this worker.
        for call in calls:
            call.cancel()
        await asyncio.sleep(0)
        made.starts = True
        made.all[-1].say_ready()
        assert np.array_equal((await engine.infer(rows(1)))["y"], 2 * rows(1))
        assert engine._front._heap.blocks == 0


@pytest.mark.parametrize("waits", [True, False])
async def test_a_suspect_of_an_engine_that_is_being_closed_is_answered_and_leaves_nothing_behind(waits):
    async with workers(KIND) as made, opened(close_timeout=0.05) as engine:
        call = engine.submit(rows(SEGFAULT))
        await until(lambda: len(made.all) == 2)
        made.starts, made.all[1].holds = False, True
        await until(lambda: engine.workers[0].groups)
        (group,) = engine._front.links[0].groups.values()
        engine._memory.words[group.launched] = 1
        closing = asyncio.create_task(engine.aclose())
        await until(lambda: engine.state == "closing")
        made.all[1].end("ended by SIGKILL")
        assert engine._front.links[0]._trials.waiting == [group]
        if not waits:
            call.cancel()
        await closing
        assert (call.done(), call.cancelled()) == (True, not waits)
        if waits:
            with pytest.raises(EngineClosedError):
                await call
        assert engine._front._heap.blocks == 0


async def test_who_waits_for_the_answers_of_an_engine_goes_on_if_it_is_closed_without_them():
    async with workers(KIND) as made, opened(close_timeout=0.05) as engine:
        made.all[0].holds = True
        call = engine.submit(rows(1))
        await until(lambda: engine.workers[0].groups)
        (group,) = engine._front.links[0].groups.values()
        engine._memory.words[group.launched] = 1
        waiting = asyncio.create_task(engine.drain())
        await until(lambda: engine._front._idle_waiters)
        await engine.aclose()
        with pytest.raises(EngineClosedError):
            await call
        await waiting


async def opening_with_workers_that_do_not_attach(made):
    """Begin to open an engine; return when its worker is ready and has not got the memory yet."""
    made.attaches = False

    async def open_it():
        return await opened()

    opening = asyncio.create_task(open_it())
    await until(lambda: made.all and made.all[0].receiver)
    return opening


async def test_a_worker_that_others_end_just_when_it_is_ready_is_replaced():
    """The fronts of a server share it, and one of them may have sent it what ends it."""
    async with workers(KIND) as made:
        opening = await opening_with_workers_that_do_not_attach(made)
        made.attaches = True
        made.all[0].end("ended by SIGSEGV")
        async with await opening as engine:
            assert np.array_equal((await engine.infer(rows(1)))["y"], 2 * rows(1))
            assert (len(made.all), engine.workers[0].deaths) == (2, 1)


async def test_workers_that_end_as_soon_as_they_are_ready_are_given_up(monkeypatch):
    monkeypatch.setattr(spares, "PAUSE_S", 0.001)
    async with workers(KIND) as made:
        opening = await opening_with_workers_that_do_not_attach(made)
        for number in range(FAILURES_MAX):
            await until(lambda number=number: len(made.all) > number and made.all[number].receiver)
            made.all[number].end("ended by SIGSEGV")
        with pytest.raises(DeviceLostError, match="as did the 4 before it"):
            await opening
        assert len(made.all) == FAILURES_MAX


async def test_workers_that_end_before_they_begin_a_batch_are_given_up(monkeypatch):
    monkeypatch.setattr(spares, "PAUSE_S", 0.001)
    async with workers(KIND) as made, opened() as engine:
        monkeypatch.setattr(double.Worker, "look", lambda _: None)
        call = engine.submit(rows(1))
        for number in range(FAILURES_MAX):
            await until(lambda number=number: len(made.all) > number and engine.workers[0].groups)
            made.all[number].end("ended by SIGSEGV")
        with pytest.raises(DeviceLostError, match="as did the 4 before it"):
            await call
        assert engine.workers[0].deaths == FAILURES_MAX


async def test_workers_that_end_without_requests_now_and_then_are_replaced(monkeypatch):
    monkeypatch.setattr(link, "SOON_NS", 0)
    async with workers(KIND) as made, opened() as engine:
        for number in range(2 * FAILURES_MAX):
            await until(lambda number=number: len(made.all) > number and engine.state == "open")
            await asyncio.sleep(0)
            made.all[number].end("ended by SIGKILL")
            assert engine.state == "restarting"
        assert np.array_equal((await engine.infer(rows(1)))["y"], 2 * rows(1))


async def test_what_expires_while_there_is_no_worker_leaves_nothing_behind():
    async with workers(KIND) as made, opened() as engine:
        made.starts = False
        made.all[0].end("ended by SIGKILL")
        calls = [engine.submit(rows(1), timeout=0.001) for _ in range(5)]
        left = engine.submit(rows(1))
        for call in calls:
            with pytest.raises(DeadlineError):
                await call
        assert engine._front._heap.blocks == 1
        left.cancel()
        await until(lambda: engine._front._heap.blocks == 0)


async def test_what_a_lost_device_had_goes_to_the_others_at_once(monkeypatch):
    monkeypatch.setattr(link, "FAILURES_MAX", 1)
    async with workers(KIND) as made, opened(device="host,host") as engine:
        made.all[0].holds = True
        call = engine.submit(rows(1))
        await until(lambda: engine._front.links[0].groups)
        made.why_not = "cannot have it"
        made.all[0].end("ended by SIGBUS")
        assert np.array_equal((await call)["y"], 2 * rows(1))
        await until(lambda: [worker.state for worker in engine.workers] == ["lost", "open"])
        assert engine.state == "open"


async def test_a_front_that_was_stopped_itself_does_not_blame_its_worker():
    async with workers(KIND) as made, opened(batch_timeout=0.7) as engine:
        time.sleep(1.2)  # noqa: ASYNC251  (Ctrl-Z stops all processes, so no worker has shown that it runs)
        engine._front.links[0]._look_after()
        await asyncio.sleep(0)
        assert not made.all[0].how_it_ended
        await until(lambda: made.all[0].how_it_ended)  # It is silent still.
        assert engine.workers[0].deaths == 1


async def test_a_start_that_fails_in_an_unforeseen_way_is_said():
    async with workers(KIND) as made:

        async def start(*_):
            raise ValueError("not foreseen")

        made.start = start
        with pytest.raises(ValueError, match="not foreseen"):
            await opened().__aenter__()


async def test_no_descriptors_for_rings(monkeypatch):
    async with workers(KIND), opened() as engine:
        link = engine._front.links[0]
        numbers = iter([os.eventfd(0)])
        monkeypatch.setattr(os, "eventfd", lambda *_: next(numbers, None) or _too_many())
        call = engine.submit(rows(1))
        link.kill()
        with pytest.raises(DeviceLostError, match="Too many open files"):
            await call
        monkeypatch.undo()
        assert engine.state == "lost"
    assert not link._closes


def _too_many():
    raise OSError(24, os.strerror(24))


async def test_spares_that_die_are_replaced_after_longer_and_longer_pauses(monkeypatch, caplog):
    monkeypatch.setattr(spares, "PAUSE_S", 0.001)
    async with workers(KIND) as made, opened(isolation="spare") as engine:
        for number in range(1, 5):
            await until(lambda: engine.workers[0].spare == "ready")
            assert len(made.all) == 1 + number
            made.all[-1].end("ended by SIGKILL")
        assert (engine.state, engine.workers[0].deaths) == ("open", 0)
        told = [record.message.rpartition(" after ")[2] for record in caplog.records]
        assert told == ["0 s", "0.001 s", "0.002 s", "0.004 s"]
        made.all[0].end("ended by SIGKILL")
        assert np.array_equal((await engine.infer(rows(1)))["y"], 2 * rows(1))
        await until(lambda: engine.workers[0].spare == "ready")


async def test_a_spare_that_is_due_is_not_started_for_an_engine_that_is_closed():
    async with workers(KIND) as made:
        async with opened(isolation="spare") as engine:
            await until(lambda: engine.workers[0].spare == "ready")
            made.all[-1].end("ended by SIGKILL")
            assert engine._front.links[0]._spares.is_due
        assert not engine._front.links[0]._spares.is_due


async def test_a_worker_that_cannot_have_the_memory_of_its_front_is_not_tried_again():
    async with workers(KIND) as made:
        made.why_not = "cannot have it"
        with pytest.raises(DeviceUnavailableError, match="the worker cannot have it"):
            await opened().__aenter__()
        assert len(made.all) == 1


async def test_later_it_is_tried_a_few_times(monkeypatch):
    monkeypatch.setattr(spares, "PAUSE_S", 0.001)
    async with workers(KIND) as made, opened() as engine:
        await engine.infer(rows(1))
        made.why_not = "cannot have it"
        made.all[0].end("ended by SIGKILL")
        with pytest.raises(DeviceLostError, match="cannot have it, as did the 4 before it"):
            await engine.infer(rows(1))
        assert len(made.all) == 1 + 5
