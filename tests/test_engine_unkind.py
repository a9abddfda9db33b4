"""The engine among unkind callers, models and loops: nobody else loses anything by them."""

import asyncio
import contextvars
import gc
import os
import threading
import weakref

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeadlineError,
    DeviceLostError,
    ExecutionError,
    InputError,
    OverloadError,
    QueueFullError,
)
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import Gate, double, double_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30


def sized(function, dims=("n",)):
    return FunctionModel(
        function, inputs=TensorSpec("x", "float32", dims), outputs=TensorSpec("y", "float32", (1,))
    )


def total(inputs, outputs):
    outputs["y"][:, 0] = inputs["x"].sum(axis=1)


def opened_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("submits", [False, True])
async def test_a_call_that_loses_a_part_to_urgent_work_does_not_say_that_nothing_has_begun(submits):
    device = LatchDevice()
    options = {"device": device, "contexts": 1, "max_rows": 2, "max_queue_rows": 4, "priorities": 2}
    async with asynctrt.open(double_model(), **options) as engine:
        split = (engine.submit if submits else engine.infer)(rows(1, 2, 3, 4))
        split = asyncio.ensure_future(split)
        await device.wait_held()
        urgent = engine.submit(rows(5, 6, 7, 8), priority=1)
        with pytest.raises(OverloadError, match="a part of the request had begun") as caught:
            await split
        assert not isinstance(caught.value, QueueFullError)
        device.open()
        assert (await urgent)["output"][:, 0].tolist() == [10, 12, 14, 16]


class TestTurns:
    @pytest.mark.parametrize("priority", [0, 2])
    async def test_a_flood_of_one_shape_does_not_starve_another(self, priority):
        """The lone one is never full and the flood always is, with more contexts than threads."""
        device = LatchDevice(concurrency=2)
        async with asynctrt.open(sized(total), device=device, contexts=4, max_rows=4) as engine:
            flood = [asyncio.create_task(engine.infer(np.ones((1, 3), np.float32))) for _ in range(80)]
            await until(lambda: device.held == 4)
            lone = asyncio.create_task(engine.infer(np.ones((1, 5), np.float32), priority=priority))
            await asyncio.sleep(0)
            batches = 0
            async with asyncio.timeout(WAIT_S):
                while not lone.done():
                    assert batches < 12, "the flood goes before it again and again"
                    waiting = engine.statistics().batches
                    device.release()
                    await until(lambda waiting=waiting: engine.statistics().batches > waiting)
                    await asyncio.sleep(0)
                    batches += 1
            assert lone.result()["y"][0, 0] == 5
            assert engine.statistics().queued_requests > 20
            assert engine.statistics().launched["turn"] >= 1
            device.open()
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*flood)

    async def test_why_batches_were_launched_is_counted_and_traced(self):
        async with asynctrt.open(double_model(), max_rows=2) as engine:
            with engine.tracing() as trace:
                await engine.infer(rows(1))
                await asyncio.gather(*[engine.infer(rows(value)) for value in range(6)])
            statistics = engine.statistics()
            assert trace[0].reason == "idle"
            assert {batch.reason for batch in trace} == {"idle", "full"}
            assert sum(statistics.launched.values()) == statistics.batches == len(trace)
            assert statistics.launched["full"] == sum(batch.reason == "full" for batch in trace)


class TestTracing:
    async def test_a_trace_that_is_not_timed_changes_nothing(self):
        class Timed(HostDevice):
            timing_is_free = False

        async def share(**kw):
            async with asynctrt.open(double_model(), device=Timed(in_place="always"), contexts=1) as engine:
                for value in range(20):
                    await engine.infer(rows(value))
                before = engine.statistics()
                with engine.tracing(**kw) as trace:
                    for value in range(64):
                        await engine.infer(rows(value))
                timed = engine.statistics().batches_timed - before.batches_timed
                assert sum(batch.is_timed for batch in trace) == timed
                return timed

        assert await share(timed=False) == 8
        assert await share() == 64


class TestClosing:
    def test_an_engine_that_closes_while_its_loop_cancels_every_task_is_closed_all_the_same(self):
        gate, engines = Gate(), []
        before = threading.active_count(), opened_files()

        async def ask():
            try:
                await engines[0].infer(rows(1))
            except asyncio.CancelledError:
                gate.go.release()
                raise

        async def main():
            engines.append(await asynctrt.open(double_model(gate), device=HostDevice(in_place="never")))
            tasks = [asyncio.create_task(ask())]
            await until(lambda: engines[0].statistics().in_flight_batches)
            tasks.append(asyncio.create_task(engines[0].aclose()))
            await until(lambda: engines[0].state == "closing")
            return tasks  # asyncio.run cancels them, and the engine's own task that closes it.

        tasks = asyncio.run(main())
        assert all(task.cancelled() for task in tasks)
        assert engines[0].state == "closed"
        assert (threading.active_count(), opened_files()) == before

    @pytest.mark.parametrize(
        "settings", [{"close_timeout": 0.01}, {"close_timeout": 0.01, "batch_timeout": 0.01}], ids=str
    )
    async def test_what_was_given_up_is_given_back_once_it_has_ended(self, settings, caplog):
        gate = Gate()
        before = threading.active_count(), opened_files()
        device = HostDevice(in_place="never", memory_nbytes=1 << 20)
        async with asynctrt.open(double_model(gate), device=device, contexts=1, **settings) as engine:
            asking = asyncio.create_task(engine.infer(rows(1)))
            await until(lambda: engine.statistics().in_flight_batches or asking.done())
        with pytest.raises(DeviceLostError, match="did not end within"):
            await asking
        assert device.memory().held_nbytes > 0
        gate.go.release()
        await until(lambda: (threading.active_count(), opened_files()) == before)
        assert device.memory().held_nbytes == 0


class TestMemory:
    async def test_what_a_batch_held_that_was_given_up_is_let_go_of_once_it_has_ended(self):
        gate = Gate()
        array = np.ones((1, 4), np.float32)
        held = weakref.ref(array)
        device = HostDevice(in_place="never")
        async with asynctrt.open(double_model(gate), device=device, contexts=2, batch_timeout=0.01) as engine:
            with pytest.raises(DeviceLostError, match="batch_timeout"):
                async with asyncio.timeout(WAIT_S):
                    await engine.infer(array)
            del array
            assert engine._driver._given_up
            gate.go.release()
            await until(lambda: not engine._driver._given_up)
            gc.collect()
            assert held() is None

    async def test_what_a_caller_left_behind_in_the_queue_is_let_go_of_at_once(self):
        gate = Gate()
        held = []

        def request(**kw):
            array = np.ones((1, 4), np.float32)
            held.append(weakref.ref(array))
            return asyncio.create_task(engine.infer(array, **kw))

        device = HostDevice(in_place="never")
        async with asynctrt.open(double_model(gate), device=device, contexts=1) as engine:
            first = asyncio.create_task(engine.infer(rows(0)))
            await until(lambda: engine.statistics().in_flight_batches)
            left = [request(), request(timeout=100), request(timeout=0)]
            await asyncio.sleep(0)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            del left, task
            # Not in the very tick in which they ended: the loop itself still holds their answers then.
            await asyncio.sleep(0)
            gc.collect()
            assert not first.done()
            assert [array() for array in held] == [None, None, None]
            gate.go.release()
            await first


class TestModels:
    async def test_the_model_sees_no_callers_context_variables(self):
        tenant = contextvars.ContextVar("tenant", default="nobody")
        seen = set()

        def spy(inputs, outputs):
            seen.add(tenant.get())
            double(inputs, outputs)

        async def caller(name):
            tenant.set(name)
            for value in range(8):
                await engine.infer(rows(value))

        async with asynctrt.open(double_model(spy), device=HostDevice(in_place="always")) as engine:
            await asyncio.gather(*[asyncio.create_task(caller(f"tenant {number}")) for number in range(4)])
        assert seen == {"nobody"}

    @pytest.mark.parametrize("where", ["never", "always"])
    @pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, pytest.fail.Exception])
    async def test_no_exception_of_a_model_leaves_a_caller_without_an_answer(self, where, error):
        def panics(inputs, outputs):
            if (inputs["input"] < 0).any():
                raise error("panic")
            double(inputs, outputs)

        device = HostDevice(in_place=where)
        async with asynctrt.open(double_model(panics), device=device, contexts=2) as engine:
            for _ in range(5):
                with pytest.raises(ExecutionError, match=error.__name__):
                    async with asyncio.timeout(WAIT_S):
                        await engine.infer(rows(-1))
            assert (await engine.infer(rows(2)))["output"][0, 0] == 4
            assert engine.statistics().contexts_quarantined == 0

    async def test_an_error_that_cannot_be_described_costs_nobody_else_an_answer(self):
        class Unspeakable(ValueError):
            def __str__(self):
                raise RuntimeError("no words")

        gate = threading.Barrier(2)

        def function(inputs, outputs):
            with_mate = (inputs["input"] == 7).any() or (inputs["input"] == -1).any()
            if with_mate:
                gate.wait(WAIT_S)
            if (inputs["input"] < 0).any():
                raise Unspeakable
            double(inputs, outputs)

        device = HostDevice(in_place="never", threads=2)
        async with asynctrt.open(double_model(function), device=device, contexts=2, max_rows=1) as engine:
            guilty, innocent = (asyncio.create_task(engine.infer(rows(value))) for value in (-1, 7))
            async with asyncio.timeout(WAIT_S):
                outcomes = await asyncio.gather(guilty, innocent, return_exceptions=True)
                assert isinstance(outcomes[0], ExecutionError)
                assert outcomes[1]["output"][0, 0] == 14
                await engine.infer(rows(1))


class TestCalls:
    @pytest.mark.parametrize("priority", [None, 0.0, "", True, False, 1.5, -1, 3, "high"])
    async def test_a_priority_that_is_none_is_refused_and_leaves_nothing_behind(self, priority):
        async with asynctrt.open(double_model()) as engine:
            with pytest.raises(InputError, match="priority must be a whole number from 0 to 2"):
                await engine.infer(rows(1), priority=priority)
            with pytest.raises(InputError, match="priority must be"):
                engine.submit(rows(1), priority=priority)
            async with asyncio.timeout(WAIT_S):
                await engine.drain()

    async def test_a_priority_of_numpy(self):
        async with asynctrt.open(double_model()) as engine:
            await engine.infer(rows(1), priority=np.int64(1))

    async def test_more_rows_than_the_queue_can_hold_are_refused_by_submit_at_once(self):
        async with asynctrt.open(double_model(), max_rows=2, max_queue_rows=8) as engine:
            with pytest.raises(InputError, match="9 rows are more than the queue can ever hold"):
                engine.submit(rows(*range(9)))

    async def test_a_split_that_expires_says_what_was_computed(self):
        device = LatchDevice(concurrency=1)
        async with asynctrt.open(double_model(), device=device, contexts=1, max_rows=2) as engine:
            split = asyncio.create_task(engine.infer(rows(*range(6)), timeout=0.05))
            await until(lambda: device.held)
            device.release()
            await until(lambda: engine.statistics().batches == 1)
            with pytest.raises(DeadlineError, match="split into 3 batches; 1 had been computed"):
                async with asyncio.timeout(WAIT_S):
                    await split
            device.open()

    async def test_large_parts_are_joined_off_the_loop(self, monkeypatch):
        monkeypatch.setattr("asynctrt.core.splitting.COPY_ON_LOOP_NBYTES_MAX", 64)
        threads = set()
        join = asynctrt.InferResult.join

        def spy(*parts):
            threads.add(threading.current_thread())
            return join(*parts)

        monkeypatch.setattr(asynctrt.InferResult, "join", spy)
        async with asynctrt.open(double_model(), max_rows=2) as engine:
            result = await engine.infer(rows(*range(16)))
        np.testing.assert_array_equal(result["output"], 2 * rows(*range(16)))
        assert len(threads) == 1
        assert threading.main_thread() not in threads

    @pytest.mark.parametrize("ends", ["drain", "aclose"])
    async def test_who_has_got_all_parts_is_answered_though_the_engine_ends_meanwhile(
        self, monkeypatch, ends
    ):
        monkeypatch.setattr("asynctrt.core.splitting.COPY_ON_LOOP_NBYTES_MAX", 64)
        begun, go = threading.Event(), threading.Event()
        join = asynctrt.InferResult.join

        def slow(*parts):
            begun.set()
            assert go.wait(WAIT_S)
            return join(*parts)

        monkeypatch.setattr(asynctrt.InferResult, "join", slow)
        async with asyncio.timeout(WAIT_S), asynctrt.open(double_model(), max_rows=2) as engine:
            call = asyncio.ensure_future(engine.infer(rows(*range(16))))
            await until(begun.is_set)
            ending = asyncio.ensure_future(getattr(engine, ends)())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not ending.done()
            go.set()
            np.testing.assert_array_equal((await call)["output"], 2 * rows(*range(16)))
            await ending

    @pytest.mark.parametrize("limit", [64, 1 << 20], ids=["in a thread", "on the loop"])
    async def test_draining_waits_until_parts_are_joined(self, monkeypatch, limit):
        monkeypatch.setattr("asynctrt.core.splitting.COPY_ON_LOOP_NBYTES_MAX", limit)
        for _ in range(20):
            async with asyncio.timeout(WAIT_S), asynctrt.open(double_model(), max_rows=2) as engine:
                call = asyncio.ensure_future(engine.infer(rows(*range(16))))
                await asyncio.sleep(0)
                await engine.drain()
                assert call.done()

    async def test_many_calls_at_once_are_joined_one_after_the_other(self, monkeypatch):
        monkeypatch.setattr("asynctrt.core.splitting.COPY_ON_LOOP_NBYTES_MAX", 64)
        begun, go = [], threading.Event()
        join = asynctrt.InferResult.join
        monkeypatch.setattr(
            asynctrt.InferResult, "join", lambda *parts: (begun.append(1), go.wait(WAIT_S), join(*parts))[-1]
        )
        async with asyncio.timeout(WAIT_S), asynctrt.open(double_model(), max_rows=2) as engine:
            calls = [asyncio.ensure_future(engine.infer(rows(*range(16)))) for _ in range(5)]
            await until(lambda: engine.statistics().succeeded == 5 * 8)
            await until(lambda: begun)
            calls[-1].cancel()  # One of the first is being joined.
            with pytest.raises(asyncio.CancelledError):
                await calls.pop()
            assert len(begun) == 1
            go.set()
            for result in await asyncio.gather(*calls):
                np.testing.assert_array_equal(result["output"], 2 * rows(*range(16)))
        assert len(begun) == 4

    async def test_who_has_got_all_parts_is_answered_though_they_are_not_joined_in_time(self, monkeypatch):
        monkeypatch.setattr("asynctrt.core.splitting.COPY_ON_LOOP_NBYTES_MAX", 64)
        begun, go = threading.Event(), threading.Event()
        join = asynctrt.InferResult.join
        monkeypatch.setattr(
            asynctrt.InferResult, "join", lambda *parts: (begun.set(), go.wait(WAIT_S), join(*parts))[-1]
        )
        async with (
            asyncio.timeout(WAIT_S),
            asynctrt.open(double_model(), max_rows=2, close_timeout=0.01) as engine,
        ):
            call = asyncio.ensure_future(engine.infer(rows(*range(16))))
            await until(begun.is_set)
            await engine.aclose()
            assert not call.done()
            go.set()
            np.testing.assert_array_equal((await call)["output"], 2 * rows(*range(16)))

    async def test_who_comes_to_join_parts_once_the_engine_is_closed_is_answered(self, monkeypatch):
        monkeypatch.setattr("asynctrt.core.splitting.COPY_ON_LOOP_NBYTES_MAX", 64)
        async with (
            asyncio.timeout(WAIT_S),
            asynctrt.open(double_model(), max_rows=2, close_timeout=0.01) as engine,
        ):
            late = asyncio.Event()
            gathered = asyncio.gather

            async def gather(*futures):
                answers = await gathered(*futures)
                await late.wait()
                return answers

            monkeypatch.setattr(asyncio, "gather", gather)
            call = asyncio.ensure_future(engine.infer(rows(*range(16))))
            await until(lambda: engine.statistics().succeeded == 8)
            await engine.aclose()
            late.set()
            np.testing.assert_array_equal((await call)["output"], 2 * rows(*range(16)))


class TestStatistics:
    async def test_from_another_thread_while_batches_of_new_sizes_are_answered(self):
        async with asynctrt.open(
            double_model(), max_rows=512, device=HostDevice(in_place="always")
        ) as engine:
            stop, broken, taken = threading.Event(), [], 0

            def watch():
                nonlocal taken
                while not stop.is_set():
                    try:
                        engine.statistics()
                        repr(engine)
                    except Exception as error:
                        broken.append(error)
                        return
                    taken += 1

            watcher = threading.Thread(target=watch)
            watcher.start()
            await until(lambda: taken)
            for count in range(1, 400):
                await engine.infer(rows(*range(count)))
            await until(lambda: taken > 20 or broken)
            stop.set()
            watcher.join(WAIT_S)
            assert not broken
