"""The engine as its users meet it: opening, inferring, overload, cancelling, closing, misuse."""

import asyncio
import copy
import gc
import itertools
import os
import pickle
import resource
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import anyio
import numpy as np
import pytest
import trio

import asynctrt
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeadlineError,
    DeviceLostError,
    DeviceUnavailableError,
    EngineClosedError,
    ExecutionError,
    InputError,
    ModelError,
    ModelNotFoundError,
    OptionsError,
    QueueFullError,
    UsageError,
)
from asynctrt.scheduling import policies
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import Gate, double_model, double_onnx, failing_model, lying_onnx, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30


@asynccontextmanager
async def latched(model=None, **settings):
    """An engine whose batches end when the test releases them, and its device."""
    device = LatchDevice(concurrency=settings.pop("slots", 2))
    settings.setdefault("contexts", 2)
    async with asynctrt.open(model or double_model(), device=device, **settings) as engine:
        yield engine, device


def send(engine, *values, **kw):
    return asyncio.create_task(engine.infer(rows(*values), **kw))


def answer(task):
    return task.result()["output"][:, 0].tolist()


class TestOpening:
    async def test_with_await(self):
        engine = await asynctrt.open(double_model())
        assert engine.statistics().state == "open"
        await engine.aclose()
        async with await asynctrt.open(double_model()) as engine:
            await engine.infer(rows(1))

    @pytest.mark.parametrize(
        ("model", "error", "says"),
        [
            ("missing.onnx", ModelNotFoundError, "no file 'missing.onnx'"),
            (".", ModelNotFoundError, "is a folder"),
            ("model.plan", DeviceUnavailableError, "TensorRT plan.*device='cuda:0'"),
            (object(), ModelError, "is not a path and not a model"),
            (None, ModelError, "is not a path and not a model"),
        ],
    )
    async def test_a_model_that_is_none(self, model, error, says):
        with pytest.raises(error, match=says):
            await asynctrt.open(model)

    @pytest.mark.parametrize(
        ("device", "says"),
        [
            ("cuda:99", "cuda:99"),
            ("cpu", "'cpu' is not a device"),
            ("", "is not a device"),
            (0, "0 is not a device, nor the name of one"),
            (None, "None is not a device"),
        ],
    )
    async def test_a_device_that_is_none(self, device, says):
        with pytest.raises(DeviceUnavailableError, match=says):
            await asynctrt.open(double_model(), device=device)

    async def test_a_fixed_batch_axis_is_filled(self, tmp_path):
        path = double_onnx(tmp_path / "m.onnx", rows=8)
        for settings in ({"batching": "on"}, {"max_rows": 4}):
            with pytest.raises(ModelError, match="batches of exactly 8 rows.*max_rows=8"):
                await asynctrt.open(path, **settings)
        async with asynctrt.open(path, max_rows=8) as engine:
            results = await asyncio.gather(*[engine.infer(rows(value)) for value in range(11)])
            assert [result["output"][0, 0] for result in results] == [2 * value for value in range(11)]
            assert (await engine.infer(rows(*range(20))))["output"][19, 0] == 38

    async def test_more_rows_than_the_model_takes(self):
        with pytest.raises(OptionsError, match="max_rows is 32.*at most 16 rows"):
            await asynctrt.open(double_model(rows_max=16), max_rows=32)
        async with asynctrt.open(double_model(rows_max=16)) as engine:
            assert engine.max_rows == 16

    async def test_a_model_object_stays_the_callers(self):
        closed = []
        model = double_model()
        model.close = lambda: closed.append(True)
        async with asynctrt.open(model):
            pass
        assert not closed

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
    async def test_an_engine_cannot_be_copied(self, copied):
        async with asynctrt.open(double_model()) as engine:
            with pytest.raises(UsageError, match="cannot be copied or pickled.*Open another"):
                copied({"engine": engine}["engine"])

    @pytest.mark.parametrize("steps", [1, 2, 3])
    @pytest.mark.parametrize("is_pipeline", [False, True])
    def test_a_loop_that_ends_when_closing_has_hardly_begun(self, steps, is_pipeline):
        async def main():
            engine = await asynctrt.open(double_model())
            engines.append(engine)
            if is_pipeline:
                pipeline = asynctrt.Pipeline(engine.infer, inputs=engine.inputs, outputs=engine.outputs)
                engines.append(pipeline)
            tasks = [asyncio.create_task(one.aclose()) for one in engines]
            for _ in range(steps):
                await asyncio.sleep(0)
            return tasks

        engines = []
        asyncio.run(main())
        assert {one.state for one in engines} == {"closed"}

    async def test_what_is_not_open_says_so(self):
        opening = asynctrt.open(double_model())
        assert "not entered yet" in repr(opening)
        assert not hasattr(opening, "infer")
        with pytest.raises(UsageError, match="not open yet, so it has no 'infer'"):
            opening.infer
        with pytest.raises(AttributeError):
            opening.nonsense
        with pytest.raises(UsageError, match="'async with', not with 'with'"), opening:
            pass

    async def test_entering_twice(self):
        opening = asynctrt.open(double_model())
        async with opening:
            with pytest.raises(UsageError, match="entered before"):
                await opening.__aenter__()

    @pytest.mark.parametrize("fails", [False, True])
    async def test_being_cancelled_while_opening_leaves_nothing(self, fails):
        """Loading cannot be stopped half way: what it has made is given back when it is done."""
        loading, go_on, contexts = threading.Event(), threading.Event(), []
        model = double_model()
        create_context = model.create_context

        def create_slowly(device):
            loading.set()
            assert go_on.wait(WAIT_S)
            if fails:
                raise MemoryError("no room for a context")
            context = create_context(device)
            context.close = lambda: contexts.remove(context)
            contexts.append(context)
            return context

        model.create_context = create_slowly
        before = threading.active_count()
        opening = asyncio.ensure_future(asynctrt.open(model, contexts=3)._open())
        await until(loading.is_set)
        for _ in range(3):
            opening.cancel()
            await asyncio.sleep(0)
        assert not opening.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not contexts
        assert threading.active_count() == before

    async def test_a_refused_engine_does_not_keep_the_threads_of_its_device(self):
        device = HostDevice(in_place="never")
        model = double_model()
        model.create_context = lambda device: 1 / 0
        before = threading.active_count()
        for _ in range(3):
            with pytest.raises(ModelError, match="could not be set up on 'host': ZeroDivisionError"):
                await asynctrt.open(model, device=device)
        async with asynctrt.open(double_model(), device=device) as engine:
            await engine.infer(rows(1))
            assert threading.active_count() > before
        assert threading.active_count() == before

    async def test_being_cancelled_by_a_scope_while_opening(self):
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with asynctrt.open(double_model()) as engine:
                await engine.infer(rows(1))
        assert scope.cancelled_caught

    @pytest.mark.parametrize("side", ["inputs", "outputs"])
    async def test_a_model_whose_tensors_cannot_be_told_apart(self, side):
        for specs in ((), (TensorSpec("x", "float32", (4,)),) * 2):
            model = double_model()
            setattr(model, side, specs)
            with pytest.raises(ModelError, match=f"needs {side}, each with a unique name"):
                await asynctrt.open(model)

    async def test_arenas_that_it_shares_with_another(self):
        device = HostDevice(threads=2, in_place="never")
        models = [double_model(), double_model()]
        for model in models:
            model.capabilities = replace(model.capabilities, enqueue_nbytes=1000)
        with Arenas(device, 1) as arenas:
            async with (
                asynctrt.open(models[0], device=device, shared_arenas=arenas, contexts=2) as one,
                asynctrt.open(models[1], device=device, shared_arenas=arenas, contexts=2) as other,
            ):
                sent = [engine.infer(rows(value)) for value in range(20) for engine in (one, other)]
                results = await asyncio.gather(*sent)
                assert [result["output"][0, 0] for result in results[::2]] == [2 * n for n in range(20)]
                for engine in (one, other):
                    assert engine.statistics().arena_nbytes == arenas.nbytes == 1024
                    assert engine.statistics().arenas == 1

    async def test_arenas_of_another_device_object(self):
        model = double_model()
        model.capabilities = replace(model.capabilities, enqueue_nbytes=1000)
        says = "belong to another device object than the engine"
        with Arenas(HostDevice(), 1) as arenas, pytest.raises(OptionsError, match=says):
            await asynctrt.open(model, shared_arenas=arenas)


class TestInputs:
    async def test_nan_is_a_value_and_stays_in_its_row(self):
        async with asynctrt.open(double_model()) as engine:
            results = await asyncio.gather(*[engine.infer(rows(value)) for value in (1, np.nan, 3)])
            assert [result["output"][0, 0] for result in results[::2]] == [2, 6]
            assert np.isnan(results[1]["output"]).all()

    async def test_outputs_belong_to_the_caller(self):
        async with asynctrt.open(double_model()) as engine:
            first, second = await asyncio.gather(engine.infer(rows(1)), engine.infer(rows(2)))
            first["output"][...] = -1
            assert second["output"].tolist() == rows(4).tolist()
            await engine.infer(rows(9))
            assert (first["output"] == -1).all()
            assert second["output"].tolist() == rows(4).tolist()

    @pytest.mark.parametrize("timeout", [-1, float("nan"), "1"])
    async def test_timeouts_that_are_none(self, timeout):
        async with asynctrt.open(double_model()) as engine:
            with pytest.raises(InputError, match="timeout must be a number of seconds"):
                await engine.infer(rows(1), timeout=timeout)


class TestBatching:
    async def test_all_requests_of_a_tick_are_one_batch(self):
        async with asynctrt.open(double_model()) as engine:
            results = await asyncio.gather(*[engine.infer(rows(value)) for value in range(10)])
            assert [result.batch_rows for result in results] == [10] * 10

    async def test_a_batch_grows_while_the_device_is_busy(self):
        async with latched(slots=1, contexts=1) as (engine, device):
            first = send(engine, 1)
            await until(lambda: device.held)
            later = [send(engine, value) for value in range(5)]
            await asyncio.sleep(0)
            device.open()
            await asyncio.gather(first, *later)
            assert [task.result().batch_rows for task in (first, *later)] == [1] + [5] * 5

    async def test_several_batches_are_in_flight(self):
        async with latched(contexts=3, slots=3, max_rows=2) as (engine, device):
            tasks = [send(engine, value) for value in range(6)]
            await until(lambda: device.held == 3)
            assert engine.statistics().in_flight_batches == 3
            device.release(last=True)
            await tasks[4]
            assert [task.done() for task in tasks] == [False] * 4 + [True] * 2
            device.open()
            await asyncio.gather(*tasks)

    @pytest.mark.parametrize(("contexts", "sizes"), [(1, {8: 1}), (2, {4: 2})])
    async def test_rows_are_shared_out_over_as_many_cores_as_there_are_contexts_for(self, contexts, sizes):
        def slowly(inputs, outputs):
            time.sleep(0.002)  # What the model takes, so that sharing it out pays.
            double_model().function(inputs, outputs)

        device = HostDevice(threads=2)
        async with asynctrt.open(double_model(slowly), device=device, contexts=contexts) as engine:
            for _ in range(2):  # The first round shows how long a batch takes.
                before = dict(engine.statistics().by_batch_rows)
                await asyncio.gather(*[engine.infer(rows(value)) for value in range(8)])
                after = engine.statistics().by_batch_rows
            last = {
                size: batches.count - (before[size].count if size in before else 0)
                for size, batches in after.items()
            }
            assert {size: count for size, count in last.items() if count} == sizes

    async def test_a_slow_first_batch_does_not_have_all_that_follow_divided(self, monkeypatch):
        """Batches that are always divided are never measured whole again: the first would count for ever."""
        # What is divided at all: the first batch, but no later one, however slow the machine is.
        monkeypatch.setattr(policies, "PART_NS_MIN", 10_000_000)
        naps = iter([0.05])

        def work(inputs, outputs):
            time.sleep(next(naps, 0.0))  # Its first run, in which it loads something.
            double_model().function(inputs, outputs)

        # On the loop, where its later runs take no time: in threads, two halves may well be quicker.
        model = double_model(work, run_on="loop")
        async with asynctrt.open(model, device=HostDevice(threads=2)) as engine:
            sizes = set()
            for _ in range(2000):
                answers = await asyncio.gather(*[engine.infer(rows(value)) for value in range(8)])
                sizes = {answer.batch_rows for answer in answers}
                if engine.statistics().batches > 8 and sizes == {8}:
                    break
            assert sizes == {8}

    async def test_a_more_urgent_request_is_served_first(self):
        async with latched(slots=1, contexts=1, max_rows=1) as (engine, device):
            order = []

            async def caller(name, priority):
                await engine.infer(rows(1), priority=priority)
                order.append(name)

            tasks = [asyncio.create_task(caller("first", 0))]
            await until(lambda: device.held)
            tasks += [asyncio.create_task(caller(f"priority {level}", level)) for level in (0, 2, 1)]
            await asyncio.sleep(0)
            device.open()
            await asyncio.gather(*tasks)
            assert order == ["first", "priority 2", "priority 1", "priority 0"]

    async def test_an_idle_engine_does_not_wait_for_its_delay(self):
        async with latched(max_delay=1.0) as (engine, device):
            task = send(engine, 1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert device.held == 1
            device.open()
            await task

    async def test_a_delay_fills_a_batch_while_another_is_in_flight(self):
        async with latched(contexts=2, max_delay=1.0, max_rows=3) as (engine, device):
            first = send(engine, 0)
            await until(lambda: device.held)
            rest = []
            for value in range(1, 4):
                assert device.held == 1
                rest.append(send(engine, value))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            await until(lambda: device.held == 2)
            device.open()
            await asyncio.gather(first, *rest)
            assert [task.result().batch_rows for task in rest] == [3, 3, 3]

    async def test_a_delay_ends_by_its_timer(self):
        async with latched(contexts=2, max_delay=0.0005) as (engine, device):
            first = send(engine, 0)
            await until(lambda: device.held)
            second = send(engine, 1)
            await until(lambda: device.held == 2)
            device.open()
            await asyncio.gather(first, second)
            assert second.result().timing.queue_ns >= 500_000

    async def test_the_delay_of_a_batch_does_not_slide_with_each_arrival(self):
        """The trap: a wait that restarts with each item never ends under a steady trickle."""
        async with latched(contexts=2, max_delay=0.002, max_rows=10**4) as (engine, device):
            tasks = [send(engine, 0)]
            await until(lambda: device.held)
            async with asyncio.timeout(WAIT_S):
                while device.held == 1 and len(tasks) < 9000:
                    tasks.append(send(engine, 1))
                    await asyncio.sleep(0)
            assert device.held == 2
            device.open()
            await asyncio.gather(*tasks)


class TestOverload:
    async def test_a_queue_filled_to_the_brim(self):
        async with latched(contexts=1, max_rows=2, max_queue_rows=4) as (engine, device):
            flying = send(engine, 0, 0)
            await until(lambda: device.held)
            queued = [send(engine, value, value) for value in (1, 2)]
            await asyncio.sleep(0)
            for _ in range(3):
                with pytest.raises(QueueFullError, match="4 of at most 4 rows"):
                    await engine.infer(rows(9))
            assert engine.statistics().refused == 3
            device.open()
            await asyncio.gather(flying, *queued)
            assert [answer(task) for task in queued] == [[2, 2], [4, 4]]
            await engine.infer(rows(1))

    async def test_a_split_request_is_taken_whole_or_not_at_all(self):
        async with latched(contexts=1, max_rows=2, max_queue_rows=6) as (engine, device):
            flying, queued = send(engine, 0, 0), None
            await until(lambda: device.held)
            queued = send(engine, 1, 2)
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await engine.infer(rows(*range(5)))
            assert engine.statistics().queued_rows == 2
            device.open()
            await asyncio.gather(flying, queued)

    async def test_a_timeout_of_zero_is_for_what_can_be_launched_at_once(self):
        async with latched(slots=1, contexts=1, max_rows=1) as (engine, device):
            first = send(engine, 1)
            await until(lambda: device.held)
            first_alone = asyncio.create_task(engine.infer(rows(2), timeout=0))
            with pytest.raises(DeadlineError, match="timeout of 0.000 ms passed.*did not reach the device"):
                await first_alone
            device.open()
            await first
            result = await engine.infer(rows(3), timeout=0)
            assert result["output"][0, 0] == 6
            assert engine.statistics().expired == 1

    async def test_as_many_as_can_be_launched_at_once_are_although_making_them_takes_longer_than_they_have(
        self, monkeypatch
    ):
        async with asynctrt.open(double_model(), max_rows=64) as engine:
            # Each look at the clock is 1 ms later than the last: 64 submissions take longer than the timeout.
            ticks = itertools.count(asynctrt._util.clock.now_ns(), 1_000_000)
            monkeypatch.setattr(engine._driver, "_now_ns", lambda: next(ticks))
            outcomes = await asyncio.gather(*[engine.infer(rows(1), timeout=0.005) for _ in range(64)])
            assert len(outcomes) == 64
            assert engine.statistics().expired == 0

    @pytest.mark.parametrize("timeout", [3600, 1e30, float("inf")])
    async def test_a_timeout_of_an_hour_and_of_for_ever(self, timeout):
        async with asynctrt.open(double_model()) as engine:
            await engine.infer(rows(1), timeout=timeout)

    async def test_a_deadline_is_enforced_by_timer_while_queued_and_others_go_on(self):
        async with latched(contexts=1, slots=1) as (engine, device):
            flying = send(engine, 0, timeout=0.001)
            await until(lambda: device.held)
            hurried, patient = send(engine, 1, timeout=0.001), send(engine, 2)
            with pytest.raises(DeadlineError, match="1.000 ms"):
                await asyncio.wait_for(hurried, WAIT_S)
            device.open()
            await asyncio.gather(flying, patient)
            assert (answer(flying), answer(patient)) == ([0], [4])

    async def test_the_engines_default_timeout(self):
        async with latched(contexts=1, slots=1, timeout=0.001) as (engine, device):
            flying = send(engine, 0, timeout=WAIT_S)
            await until(lambda: device.held)
            with pytest.raises(DeadlineError):
                await asyncio.wait_for(engine.infer(rows(1)), WAIT_S)
            device.open()
            await flying


class TestCancelling:
    @pytest.mark.parametrize("victims", [[1], [0, 2], [0, 1, 2, 3]])
    @pytest.mark.parametrize("where", ["queued", "in flight"])
    async def test_one_half_or_all_of_a_batch(self, where, victims):
        async with latched(contexts=1, slots=1) as (engine, device):
            blocker = send(engine, 9)
            await until(lambda: device.held)
            if where == "in flight":
                device.release()
                await blocker
            tasks = [send(engine, value) for value in range(4)]
            await until(
                lambda: device.held if where == "in flight" else engine.statistics().queued_requests == 4
            )
            for victim in victims:
                tasks[victim].cancel()
            await asyncio.sleep(0)
            device.open()
            async with asyncio.timeout(WAIT_S):
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for number, outcome in enumerate(outcomes):
                if number in victims:
                    assert isinstance(outcome, asyncio.CancelledError)
                else:
                    assert outcome["output"].tolist() == rows(2 * number).tolist()
            # Where every task was done before, gather returns at once, from Python 3.12 on.
            await until(lambda: not engine.statistics().in_flight_batches)
            statistics = engine.statistics()
            assert statistics.cancelled == len(victims)
            queued_rows = 4 - len(victims) if where == "queued" else 4
            assert statistics.rows == 1 + queued_rows, "what was cancelled in the queue must not be computed"

    async def test_cancelling_in_the_tick_of_the_answer(self):
        async with latched() as (engine, device):
            victim, mate = send(engine, 1), send(engine, 2)
            await until(lambda: device.held)
            device.open()
            victim.cancel()
            await asyncio.wait([victim, mate], timeout=WAIT_S)
            assert victim.cancelled()
            assert answer(mate) == [4]

    async def test_who_comes_after_a_split_request_has_a_turn_between_its_parts(self):
        seen = []

        def note(inputs):
            seen.append(float(inputs["input"][0, 0]))
            return 2 * inputs["input"]

        async with asynctrt.open(double_model(note), max_rows=2, contexts=1) as engine:
            seen.clear()
            large, small = engine.submit(rows(*range(20))), engine.submit(rows(99))
            assert (await small)["output"][0, 0] == 198
            assert (await large)["output"][:, 0].tolist() == list(range(0, 40, 2))
        assert seen == [0, 99, *range(2, 20, 2)]

    async def test_a_split_request_that_was_submitted_is_answered_though_the_engine_drains_at_once(self):
        async with asynctrt.open(double_model(), max_rows=2) as engine:
            future = engine.submit(rows(1, 2, 3, 4, 5))
            await engine.drain()
            assert (await future)["output"][:, 0].tolist() == [2, 4, 6, 8, 10]

    async def test_a_split_request_that_is_cancelled_at_once_leaves_nothing_queued(self):
        async with latched(contexts=1, slots=1, max_rows=2) as (engine, device):
            future = engine.submit(rows(1, 2, 3, 4, 5))
            future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
            await until(lambda: engine.statistics().cancelled == 3)
            assert engine.statistics().queued_requests == 0
            device.open()
            await engine.drain()

    async def test_cancelling_a_split_request_cancels_all_its_parts(self):
        async with latched(contexts=1, slots=1, max_rows=2) as (engine, device):
            task = send(engine, *range(6))
            await until(lambda: device.held)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.statistics().queued_requests == 0
            device.open()
            await engine.infer(rows(1))
            assert engine.statistics().cancelled == 3

    async def test_a_cancel_scope_of_anyio(self):
        async with latched() as (engine, device):
            with anyio.move_on_after(0.001) as scope:
                await engine.infer(rows(1))
            assert scope.cancelled_caught
            device.open()
            assert engine.statistics().cancelled == 1

    async def test_a_coroutine_that_is_thrown_away_leaves_the_queue(self):
        async with latched(contexts=1, slots=1) as (engine, device):
            blocker = send(engine, 1)
            await until(lambda: device.held)
            forgotten = engine.infer(rows(2))
            forgotten.send(None)
            assert engine.statistics().queued_requests == 1
            forgotten.close()
            assert engine.statistics().queued_requests == 0
            device.open()
            await blocker


class TestDisplacing:
    async def test_urgent_work_takes_the_place_of_ordinary_work_in_a_full_queue(self):
        device = LatchDevice(concurrency=1)
        async with asynctrt.open(
            double_model(), device=device, contexts=1, max_rows=2, max_queue_rows=4
        ) as engine:
            running = send(engine, 0)
            await until(lambda: device.held)
            ordinary = [send(engine, value) for value in range(1, 5)]
            await until(lambda: engine.statistics().queued_rows == 4)
            split = asyncio.create_task(engine.infer(rows(5, 6, 7), priority=1))
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait(ordinary[1:])
            for task in ordinary[1:]:
                with pytest.raises(QueueFullError, match="of priority 0, was taken out of a full queue"):
                    task.result()
            with pytest.raises(QueueFullError, match="4 of at most 4 rows"):
                await engine.infer(rows(8))
            device.open()
            async with asyncio.timeout(WAIT_S):
                assert (await split)["output"][:, 0].tolist() == [10, 12, 14]
                await asyncio.wait([running, ordinary[0]])
            assert answer(ordinary[0]) == [2]
            statistics = engine.statistics()
            assert (statistics.failed, statistics.refused, statistics.submitted) == (3, 1, 7)


class TestFailing:
    async def test_a_split_request_fails_as_a_whole(self):
        async with asynctrt.open(failing_model(), max_rows=2) as engine:
            with pytest.raises(ExecutionError):
                await engine.infer(rows(1, 1, -1, 1, 1))
            await engine.infer(rows(1))

    @pytest.mark.parametrize("shape", [(1, 3), (3, 2), ()])
    async def test_an_output_that_turns_out_to_have_no_batch_axis(self, shape):
        model = double_model()
        model.outputs = (TensorSpec("output", "float32", ("found",)),)
        context = model.create_context(HostDevice())
        bind = context.bind

        def bind_unbound(inputs, outputs):
            assert outputs == (None,)
            binding = bind(inputs, ())
            binding.unbound_outputs = lambda count: {"output": np.zeros(shape, np.float32)}
            binding._function = lambda inputs, outputs: None
            return binding

        context.bind = bind_unbound
        model.create_context = lambda device: context
        async with asynctrt.open(model, contexts=1) as engine:
            with pytest.raises(ExecutionError, match="first axis does not count rows"):
                await asyncio.gather(engine.infer(rows(1)), engine.infer(rows(1)))

    async def test_an_onnx_model_whose_output_shape_is_not_what_it_says(self, tmp_path):
        """Each request runs alone, or fails if it must batch: what was in memory before is no answer."""
        path = lying_onnx(tmp_path / "m.onnx")
        async with asynctrt.open(path) as engine:
            answers = await asyncio.gather(*[engine.infer(rows(n, 9, dims=(2,))) for n in range(5)])
            assert [answer["output"].tolist() for answer in answers] == [[[n, n]] for n in range(5)]
        async with asynctrt.open(path, batching="on") as engine:
            with pytest.raises(ExecutionError, match="output 'output'"):
                await engine.infer(rows(1, 2, dims=(2,)))
            await engine.infer(rows(1, dims=(2,)))


class TestClosing:
    async def test_inferring_afterwards(self):
        async with asynctrt.open(double_model()) as engine:
            pass
        with pytest.raises(EngineClosedError, match="'double' is closed"):
            await engine.infer(rows(1))
        assert engine.statistics().refused == 1

    async def test_what_is_queued_fails_and_what_is_in_flight_finishes(self):
        async with latched(contexts=1, slots=1) as (engine, device):
            flying = send(engine, 1)
            await until(lambda: device.held)
            queued = [send(engine, value) for value in range(3)]
            await asyncio.sleep(0)
            closing = asyncio.create_task(engine.aclose())
            async with asyncio.timeout(WAIT_S):
                outcomes = await asyncio.gather(*queued, return_exceptions=True)
                assert [type(outcome) for outcome in outcomes] == [EngineClosedError] * 3
                assert not flying.done()
                device.open()
                await closing
                await flying
            assert answer(flying) == [2]

    async def test_draining_answers_what_was_taken_and_refuses_the_rest(self):
        async with latched(contexts=1, slots=1, max_rows=1) as (engine, device):
            tasks = [send(engine, value) for value in range(3)]
            await until(lambda: device.held)
            draining = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineClosedError, match="draining"):
                await engine.infer(rows(1))
            assert not draining.done()
            device.open()
            async with asyncio.timeout(WAIT_S):
                await draining
                await asyncio.gather(*tasks)
            assert engine.statistics().state == "draining"
            await engine.drain()

    async def test_draining_an_engine_whose_last_request_is_cancelled(self):
        async with latched(contexts=1, slots=1) as (engine, device):
            flying = send(engine, 1)
            await until(lambda: device.held)
            queued = send(engine, 2)
            await asyncio.sleep(0)
            draining = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            queued.cancel()
            await asyncio.sleep(0)
            device.release()
            async with asyncio.timeout(WAIT_S):
                await draining
                await flying

    async def test_being_cancelled_while_closing_closes_all_the_same(self):
        async with latched() as (engine, device):
            task = send(engine, 1)
            await until(lambda: device.held)
            closing = asyncio.create_task(engine.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.sleep(0)
            device.open()
            await task
            async with asyncio.timeout(WAIT_S):
                await engine.aclose()
            assert engine.statistics().state == "closed"

    async def test_closing_inside_a_cancelled_scope(self):
        with anyio.CancelScope() as scope:
            async with asynctrt.open(double_model()) as engine:
                await engine.infer(rows(1))
                scope.cancel()
        assert engine.statistics().state == "closed"

    async def test_an_engine_that_is_never_closed_warns_where_it_was_made(self):
        engine = await asynctrt.open(double_model())
        closing = engine._give_back, engine._driver.close
        with pytest.warns(ResourceWarning, match=r"opened at .*test_engine\.py:\d+, was never closed"):
            del engine
            gc.collect()
            await asyncio.sleep(0)
            closing[1]()
            closing[0]()
            del closing
            gc.collect()

    async def test_nothing_is_left_of_engines_that_were_closed(self):
        async def cycle():
            async with asynctrt.open(double_model(), device=HostDevice(in_place="never")) as engine:
                await asyncio.gather(*[engine.infer(rows(value)) for value in range(5)])

        await cycle()
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await cycle()
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before

    @pytest.mark.parametrize("left", [0, 1])
    async def test_nothing_is_left_of_an_engine_that_found_too_few_descriptors(self, left):
        model, made, closed = double_model(), [], []
        create_context = model.create_context

        def created(device):
            context = create_context(device)
            close = context.close
            context.close = lambda: (closed.append(context), close())
            made.append(context)
            return context

        model.create_context = created
        before = len(os.listdir("/proc/self/fd"))
        with descriptors_left(left), pytest.raises(DeviceUnavailableError, match="ulimit -n"):
            await asynctrt.open(model, contexts=2)
        assert len(made) == 2
        assert closed == made
        assert len(os.listdir("/proc/self/fd")) == before
        async with asynctrt.open(model) as engine:
            await engine.infer(rows(1))


@contextmanager
def descriptors_left(count):
    """Take all descriptors but a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in taken[len(taken) - count :]:
            os.close(descriptor)
        del taken[len(taken) - count :]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


class TestLoops:
    async def test_an_engine_from_another_loop_in_another_thread(self):
        async with asynctrt.open(double_model()) as engine:
            caught = []

            def elsewhere():
                for call in (lambda: engine.infer(rows(1)), engine.drain, engine.aclose):
                    try:
                        asyncio.run(call())
                    except UsageError as error:
                        caught.append(str(error))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            await until(lambda: not thread.is_alive())
            assert len(caught) == 3
            assert all("event loop" in text for text in caught)
            await engine.infer(rows(1))


def test_an_engine_whose_loop_has_ended():
    engine = asyncio.run(opened())
    for call in (lambda: engine.infer(rows(1)), engine.drain, engine.aclose):
        with pytest.raises(UsageError, match="belongs to the event loop"):
            asyncio.run(call())
    give_up(engine)


def give_up(engine):
    """What an application cannot do any more once its loop has ended, so that the test leaves nothing."""
    engine._driver.close()
    engine._give_back()
    engine._state = "closed"


async def opened():
    return await asynctrt.open(double_model())


def test_outside_a_loop():
    coroutine = opened()
    with pytest.raises(UsageError, match=r"no event loop is running.*asyncio.run\(main\(\)\)"):
        coroutine.send(None)


def test_on_trio():
    with pytest.raises(UsageError, match="this is trio.*anyio.run"):
        trio.run(opened)


class TestStatistics:
    async def test_a_snapshot(self):
        async with latched(contexts=1, slots=1, max_rows=2) as (engine, device):
            tasks = [send(engine, value) for value in range(5)]
            await until(lambda: device.held)
            before = engine.statistics()
            assert (before.queued_requests, before.queued_rows, before.in_flight_batches) == (3, 3, 1)
            assert (before.contexts, before.arenas, before.mean_batch_rows) == (1, 0, 0)
            assert before.memory_nbytes >= 2 * 2 * 16
            device.open()
            await asyncio.gather(*tasks)
            after = engine.statistics()
            assert (after.submitted, after.succeeded, after.rows, after.batches) == (5, 5, 5, 3)
            assert after.mean_batch_rows == 5 / 3
            assert {size: batches.count for size, batches in after.by_batch_rows.items()} == {1: 1, 2: 2}
            assert all(batches.compute_ns > 0 for batches in after.by_batch_rows.values())
            assert before.succeeded == 0

    async def test_of_arenas_graphs_and_padding(self):
        model = double_model()
        model.capabilities = replace(model.capabilities, enqueue_nbytes=1000)
        model.capabilities = replace(model.capabilities, is_capturable=True)
        async with asynctrt.open(model, contexts=3, arenas=2, max_rows=8, graphs=(1, 8)) as engine:
            before = engine.statistics()
            assert (before.contexts, before.arenas, before.graphs) == (3, 2, (1, 8))
            assert (before.arena_nbytes, before.arena_nbytes_private) == (2 * 1024, 3 * 1000)
            assert before.memory_nbytes == 3 * 512 + 2 * 1024
            assert before.arena_busy_share == 0
            assert before.arena_waits == before.arena_wait_ns == before.rows_padded == 0
            await asyncio.gather(*[engine.infer(rows(value)) for value in range(5)])
            after = engine.statistics()
            assert (after.rows, after.rows_padded, after.batches) == (5, 3, 1)
            assert 0 < after.arena_busy_share <= 1
            assert before.arena_busy_share == 0, "a snapshot stays as it was"

    async def test_a_batch_that_waits_for_its_arena_is_counted(self):
        gate = Gate()
        model = double_model(gate)
        model.capabilities = replace(model.capabilities, enqueue_nbytes=1000)
        device = HostDevice(threads=2, in_place="never")
        async with asynctrt.open(model, device=device, contexts=2, arenas=1, max_rows=1) as engine:
            tasks = [send(engine, value) for value in range(2)]
            await until(lambda: gate.entered.acquire(blocking=False))
            await until(lambda: engine.statistics().in_flight_batches == 2)
            # The second lies on the device and can only wait for the first: let that take its time.
            until_ns = time.monotonic_ns() + 5_000_000
            await until(lambda: time.monotonic_ns() > until_ns)
            assert not gate.entered.acquire(blocking=False)
            gate.go.release(2)
            await asyncio.gather(*tasks)
            statistics = engine.statistics()
            assert statistics.arena_waits in (1, 2)  # A busy machine may let the first wait for its thread.
            assert 4_000_000 < statistics.arena_wait_ns < statistics.total_ns
            assert statistics.arena_busy_share <= 1

    async def test_the_state_of_an_engine_whose_batches_all_hang(self):
        gate = Gate()
        device = HostDevice(threads=1, in_place="never")
        async with asynctrt.open(double_model(gate), device=device, contexts=1, batch_timeout=0.01) as engine:
            assert engine.state == engine.statistics().state == "open"
            with pytest.raises(DeviceLostError, match="batch_timeout of 0.01 s"):
                await engine.infer(rows(1))
            assert engine.state == engine.statistics().state == "lost"
            assert engine.statistics().contexts_quarantined == 1
            with pytest.raises(DeviceLostError, match="no context of 'Gate' is left"):
                await engine.infer(rows(1))
            gate.go.release()
        assert engine.state == "closed"


class TestSubmit:
    async def test_what_is_wrong_with_the_call_is_raised_at_once(self):
        async with latched(max_rows=1, max_queue_rows=1) as (engine, device):
            with pytest.raises(InputError, match="float32"):
                engine.submit(np.zeros((1, 4)))
            futures = [engine.submit(rows(number)) for number in range(1)]
            with pytest.raises(QueueFullError):
                engine.submit(rows(9))
            device.open()
            await asyncio.gather(*futures)

    async def test_to_cancel_it_is_to_cancel_the_request(self):
        async with latched(max_rows=1, slots=1, contexts=1) as (engine, device):
            flying, queued, last = [engine.submit(rows(value)) for value in (1, 2, 3)]
            await until(lambda: device.held == 1)
            assert queued.cancel()
            assert engine.statistics().queued_requests == 1, "it has left the queue at once"
            assert flying.cancel()
            assert not flying.cancel(), "once is enough"
            device.open()
            assert (await last)["output"][0, 0] == 6
            statistics = engine.statistics()
            assert (statistics.cancelled, statistics.succeeded, statistics.rows) == (2, 1, 2)
            with pytest.raises(asyncio.CancelledError):
                await queued

    async def test_it_leaves_no_cycle_behind(self):
        """A request and its future know each other until it ends; the collector must not be needed."""
        async with asynctrt.open(double_model()) as engine:
            await engine.infer(rows(0))
            gc.collect()
            gc.disable()
            try:
                others = [item for item in gc.get_objects() if type(item).__name__ == "Request"]
                await asyncio.gather(*[engine.submit(rows(value)) for value in range(50)])
                engine.submit(rows(1)).cancel()
                await engine.infer(rows(0))  # A queue forgets who has left it when it is next looked at.
                left = [item for item in gc.get_objects() if type(item).__name__ == "Request"]
                assert len(left) <= len(others)
            finally:
                gc.enable()

    async def test_from_another_loop(self):
        async with asynctrt.open(double_model()) as engine:
            with pytest.raises(UsageError, match="another one"):
                await asyncio.to_thread(asyncio.run, self._submit(engine))

    async def _submit(self, engine):
        engine.submit(rows(1))


async def test_batches_are_traced_while_asked_for():
    async with asynctrt.open(double_model(), max_rows=4, contexts=2) as engine:
        await engine.infer(rows(0))
        with engine.tracing(batches=3) as trace:
            await asyncio.gather(*[engine.infer(rows(value)) for value in range(8)])
            assert sum(batch.rows for batch in trace) == 8
            assert all(batch.rows == batch.requests for batch in trace)
            assert {batch.context for batch in trace} <= {0, 1}
            for batch in trace:
                assert batch.arena is None
                assert batch.launched_ns + batch.compute_ns <= batch.answered_ns
            for _ in range(5):
                await engine.infer(rows(1))
            assert len(trace) == 3  # The last ones.
            with pytest.raises(asynctrt.UsageError, match="being traced already"), engine.tracing():
                pass
        await engine.infer(rows(2))
        assert len(trace) == 3
        with engine.tracing() as again:
            await engine.infer(rows(3))
        assert len(again) == 1


async def test_a_caller_who_is_cancelled_while_it_closes_waits_until_it_is_closed():
    """As Ctrl-C does it: the loop ends with its main task, and the engine must not be half closed then."""
    gate = Gate()
    engine = await asynctrt.open(double_model(gate), device=HostDevice(threads=1, in_place="never"))
    request = asyncio.ensure_future(engine.infer(rows(1)))
    await until(lambda: gate.entered.acquire(blocking=False))
    closing = asyncio.create_task(engine.aclose())
    await until(lambda: engine.statistics().state == "closing")
    for _ in range(2):
        closing.cancel()
        await asyncio.sleep(0)
        assert not closing.done()
    gate.go.release()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert engine.statistics().state == "closed"
    assert (await request)["output"].tolist() == rows(2).tolist()
