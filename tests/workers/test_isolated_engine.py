"""An engine in worker processes does what an engine in process does, as far as callers can see."""

import asyncio
import gc
import logging
import os
from contextlib import asynccontextmanager

import numpy as np
import psutil
import pytest

import asynctrt
from asynctrt._util.process import GC_THRESHOLD
from asynctrt.errors import (
    MESSAGE_MAX,
    DeadlineError,
    DeadlineUnreachableError,
    DeviceUnavailableError,
    EngineClosedError,
    ExecutionError,
    InputError,
    InternalError,
    ModelError,
    ModelNotFoundError,
    OptionsError,
    QueueFullError,
    UsageError,
)
from tests.doctor.support import compiled
from tests.gpu.support import gpu_is_here
from tests.helpers import WAIT_S, until
from tests.models import double_onnx
from tests.workers import models
from tests.workers.models import EXIT, INTERRUPT, LOG, LONG_ERROR, RAISE, WAIT, rows, workers_left

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]
KIND = "tests.workers.models:kind"

no_gpu = pytest.mark.skipif(gpu_is_here(), reason="there is a GPU, so its driver answers")


@asynccontextmanager
async def opened(model=KIND, *, within_s=WAIT_S, **settings):
    """An engine in a worker, and afterwards nothing left of it."""
    fds = set(os.listdir("/proc/self/fd"))
    async with (
        asyncio.timeout(within_s),
        asynctrt.open(model, **{"isolation": "process", **settings}) as engine,
    ):
        pids = [worker.pid for worker in engine.workers]
        yield engine
    assert engine.state == "closed"
    assert engine._front._heap.blocks == 0, "blocks were not given back"
    assert (engine._front.requests, engine._front.rows) == (0, 0)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    gc.collect()
    assert not workers_left()
    assert len(set(os.listdir("/proc/self/fd")) - fds) <= 1  # The loop's own come and go.


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """What rows with WAIT wait for: ``gate.touch()``."""
    path = tmp_path / "gate"
    monkeypatch.setenv(models.GATE, str(path))
    return path


async def test_each_caller_gets_its_own_rows():
    async with opened(max_rows=16) as engine:
        assert (engine.name, engine.platform, engine.device_name) == ("kind", "python", "host")
        assert engine.max_rows == 16
        assert engine.inputs == (models.ROW,)
        assert isinstance(engine, asynctrt.Engine)
        calls = [rows(*range(first, first + 1 + first % 7)) for first in range(300)]
        answers = await asyncio.gather(*[engine.infer(call) for call in calls])
        for call, answer in zip(calls, answers, strict=True):
            assert np.array_equal(answer["y"], 2 * call)
            assert 1 <= answer.batch_rows <= 16
            assert answer.timing.queue_ns > 0
        answers[0]["y"][:] = 7  # They are the caller's.
        assert np.array_equal(answers[1]["y"], 2 * calls[1])
        await until(lambda: engine.statistics().rows == sum(map(len, calls)))
        statistics = engine.statistics()
        assert statistics.succeeded == statistics.submitted == len(calls)
        assert sum(statistics.launched.values()) == statistics.batches > 0
        assert statistics.total_ns > statistics.queue_ns > 0


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_real_model(tmp_path, deterministic):
    path = double_onnx(tmp_path / "double.onnx")
    async with opened(str(path), batching="deterministic" if deterministic else "auto") as engine:
        inputs = [np.random.default_rng(number).random((3, 4), np.float32) for number in range(50)]
        answers = await asyncio.gather(*[engine.infer({"input": array}) for array in inputs])
        for array, answer in zip(inputs, answers, strict=True):
            assert np.array_equal(answer["output"], 2 * array)


async def test_rows_of_many_shapes_and_several_tensors():
    async with opened("tests.workers.models:shapes") as engine:
        random = np.random.default_rng(3)
        calls = []
        for _ in range(80):
            count, n, m = random.integers(1, 6, 3)
            calls.append(
                {
                    "a": random.integers(-9, 9, (count, n, m)),
                    "b": random.integers(-9, 9, (count, n, 1)),
                }
            )
        answers = await asyncio.gather(*[engine.infer(call) for call in calls])
        for call, answer in zip(calls, answers, strict=True):
            assert np.array_equal(answer["sum"], call["a"] + call["b"])
            assert np.array_equal(answer["first"], call["a"][:, :, 0] > 0)
            assert answer["first"].dtype == bool


async def test_outputs_whose_shapes_depend_on_the_data():
    async with opened("tests.workers.models:found", max_rows=8) as engine:
        calls = [np.arange(rows * 5, dtype=np.float32).reshape(rows, 5) - 7 for rows in (1, 3, 2, 8)]
        answers = await asyncio.gather(*[engine.infer(call) for call in calls])
        alone = [await engine.infer(call) for call in calls]
        for call, answer, other in zip(calls, answers, alone, strict=True):
            assert answer["output"].shape == call.shape
            assert np.array_equal(answer["output"], other["output"])
            found = [row[row == row] for row in other["positives"]]
            assert len(found) == len(call)
            assert other["positives"].shape[0] == len(call)
            assert answer["positives"].shape[1] >= other["positives"].shape[1]


async def test_rows_too_large_to_copy_on_the_loop():
    async with opened("tests.workers.models:large", max_rows=8) as engine:
        calls = [np.full((count, 1 << 20), count, np.uint8) for count in (1, 5, 8, 2, 20)]
        answers = await asyncio.gather(*[engine.infer(call) for call in calls])
        for call, answer in zip(calls, answers, strict=True):
            assert answer["y"].shape == call.shape
            assert (answer["y"] == call[0, 0] + 1).all()
        assert answers[-1].batches == 3


async def test_closing_while_large_rows_are_copied():
    async with opened("tests.workers.models:large", max_rows=8) as engine:
        calls = [engine.submit(np.zeros((8, 1 << 20), np.uint8)) for _ in range(4)]
        await asyncio.sleep(0)
        await engine.aclose()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, EngineClosedError | asynctrt.InferResult) for one in outcomes)
        assert any(isinstance(one, EngineClosedError) for one in outcomes)


async def test_what_is_wrong_with_a_call_is_said_at_once():
    async with opened(max_queue_rows=64) as engine:
        with pytest.raises(InputError, match="takes shape"):
            await engine.infer(np.zeros((1, 5), np.float32))
        with pytest.raises(InputError, match="more than the queue can ever hold"):
            await engine.infer(np.zeros((65, 4), np.float32))
        with pytest.raises(InputError, match="priority"):
            await engine.infer(rows(1), priority=7)
        with pytest.raises(InputError, match="isolation='none'"):
            await engine.infer(rows(1), outputs="device")
        with pytest.raises(UsageError, match="isolation='none'"):
            engine.tracing()
        assert engine.statistics().submitted == 0


async def test_a_row_that_makes_the_model_fail_fails_alone():
    async with opened(max_rows=32) as engine:
        firsts = [RAISE if number in (5, 17) else number + 1 for number in range(40)]
        answers = await asyncio.gather(*[engine.infer(rows(one)) for one in firsts], return_exceptions=True)
        for first, answer in zip(firsts, answers, strict=True):
            if first == RAISE:
                assert isinstance(answer, ExecutionError)
                assert "this request alone" in str(answer)
                assert "ValueError: a row is -2" in "".join(answer.__notes__)
            else:
                assert np.array_equal(answer["y"], 2 * rows(first))
        assert engine.workers[0].deaths == 0
        assert engine.statistics().failed == 2


@pytest.mark.parametrize("asked", [RAISE, EXIT, INTERRUPT])
@pytest.mark.parametrize("model", [KIND, "tests.workers.models:on_loop"])
async def test_callers_who_always_send_what_fails_fail_nobody_else(model, asked):
    """Whatever the model raises, and in each batch: the worker goes on."""
    answered = dict.fromkeys(range(64), 0)

    async def call(engine, number):
        while min([answered[one] for one in range(8, 64)]) < 10:
            if number < 8:
                with pytest.raises(ExecutionError, match="while it ran this request alone.*a row is"):
                    await engine.infer(rows(asked))
            else:
                assert (await engine.infer(rows(number)))["y"][0, 0] == 2 * number
                answered[number] += 1

    async with opened(model, max_rows=16) as engine:
        await asyncio.gather(*[call(engine, number) for number in answered])
        assert engine.workers[0].deaths == 0


async def test_a_row_whose_caller_left_does_not_fail_its_last_neighbour():
    async with opened(max_rows=32) as engine:
        guilty, innocent = engine.submit(rows(RAISE)), engine.submit(rows(3))
        await asyncio.sleep(0)
        guilty.cancel()
        assert np.array_equal((await innocent)["y"], 2 * rows(3))


async def test_without_idempotent_a_batch_fails_whole():
    async with opened(idempotent=False) as engine:
        answers = await asyncio.gather(
            *[engine.infer(rows(one)) for one in (1, RAISE, 2)], return_exceptions=True
        )
        assert all(isinstance(answer, ExecutionError) for answer in answers)
        assert len({id(answer) for answer in answers}) == 3


async def test_an_error_that_does_not_fit_where_the_outputs_would_be():
    async with opened() as engine:
        with pytest.raises(ExecutionError, match="long long") as raised:
            await engine.infer(rows(LONG_ERROR))
        told = [str(raised.value), *raised.value.__notes__]
        assert 2000 < len(told[0]) <= MESSAGE_MAX < sum(map(len, told)) < 4 * MESSAGE_MAX
        assert np.array_equal((await engine.infer(rows(3)))["y"], 2 * rows(3))


async def test_a_timeout_that_passes_in_the_worker_s_queue(gate):
    async with opened(max_rows=1, contexts=1) as engine:
        held = engine.submit(rows(WAIT))
        await until(lambda: engine.statistics().in_flight_batches == 1)
        with pytest.raises(DeadlineError, match="timeout of 50.000 ms"):
            await engine.infer(rows(1), timeout=0.05)
        gate.touch()
        await held
        assert engine.statistics().expired == 1


async def test_what_would_be_too_late_is_refused_as_in_process():
    async with opened("tests.workers.models:slow", max_rows=1, timeout_until="answer") as engine:
        for _ in range(3):
            await engine.infer(rows(1), timeout=WAIT_S)
        answers = []  # One that would be late is tried now and then, to learn whether that is still so.
        for _ in range(8):
            answers += await asyncio.gather(engine.infer(rows(1), timeout=0.01), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, DeadlineUnreachableError)]
        assert len(refused) >= 4
        assert "the request would be answered in" in str(refused[0])
        assert 0.04 < refused[0].predicted_s < WAIT_S
        statistics = engine.statistics()
        assert (statistics.refused, statistics.refused_late) == (len(refused),) * 2
        assert statistics.submitted == statistics.succeeded + statistics.failed + statistics.expired


@pytest.mark.parametrize(("device", "contexts"), [("host", 2), ("host,host", 1)])
async def test_requests_of_one_tick_are_spread_over_all_that_can_compute(device, contexts):
    settings = {"max_rows": 32, "contexts": contexts, "device": device}
    async with opened("tests.workers.models:slow", **settings) as engine:
        for _ in range(4):
            await engine.infer(rows(1))
        answers = await asyncio.gather(*[engine.infer(rows(number)) for number in range(32)])
        assert all(np.array_equal(answer["y"], 2 * rows(number)) for number, answer in enumerate(answers))
        assert {answer.batch_rows for answer in answers} == {16}  # Not one batch of 32.


async def test_the_limit_of_gpu_memory_is_that_of_each_worker():
    try:
        for nbytes in (None, 1 << 20):
            asynctrt.limit_gpu_memory(nbytes)
            async with opened("tests.workers.models:limited") as engine:
                assert (await engine.infer(rows(1)))["y"][0, 0] == (nbytes or -1)
    finally:
        asynctrt.limit_gpu_memory(None)


async def test_a_worker_collects_garbage_seldom_and_not_what_was_there_before():
    async with opened("tests.workers.models:collects") as engine:
        (*thresholds, frozen) = (await engine.infer(rows(1)))["y"][0]
    assert thresholds[0] == GC_THRESHOLD
    assert frozen > 10_000


SEES = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void)
{
    FILE *file = fopen("SEEN", "w");
    fputs(getenv("CUDA_VISIBLE_DEVICES"), file);
    fclose(file);
}
"""
"""A driver that does nothing but write down which GPUs it may show."""


@no_gpu
@pytest.mark.parametrize("uuid", ["MIG-5c89852c-d268-c3f3", "GPU-5c89", "MIG-GPU-5c89/1/0"])
async def test_a_part_of_a_gpu_is_the_only_one_that_its_worker_sees(tmp_path, monkeypatch, uuid):
    seen = tmp_path / "seen"
    compiled(tmp_path, "libcuda.so.1", SEES.replace("SEEN", str(seen)))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceUnavailableError, match="cuda:0 cannot be used"):
        await asynctrt.open(KIND, device=f"cuda:{uuid}", isolation="process")
    assert seen.read_text() == uuid
    with pytest.raises(DeviceUnavailableError, match="set CUDA_VISIBLE_DEVICES to it"):
        await asynctrt.open(KIND, device=f"cuda:{uuid}")


async def test_the_engine_s_own_timeout_counts(gate):
    async with opened(max_rows=1, contexts=1, timeout=0.05) as engine:
        held = engine.submit(rows(WAIT), timeout=WAIT_S)
        await until(lambda: engine.statistics().in_flight_batches == 1)
        answers = await asyncio.gather(*[engine.infer(rows(1)) for _ in range(3)], return_exceptions=True)
        assert all(isinstance(answer, DeadlineError) for answer in answers)
        gate.touch()
        await held


async def test_who_goes_away_takes_its_rows_along(gate):
    async with opened(max_rows=1, contexts=1) as engine:
        held = engine.submit(rows(WAIT))
        await until(lambda: engine.statistics().in_flight_batches == 1)
        queued = [engine.submit(rows(number)) for number in range(1, 4)]
        unsent = engine.submit(rows(9))
        unsent.cancel()
        await until(lambda: len(engine._front._held) == 0 and engine.workers[0].groups > 1)
        for one in queued:
            one.cancel()
        assert engine.statistics().cancelled == 4
        held.cancel()
        # The worker knows it, too; what its batch may still read stays.
        await until(lambda: engine.workers[0].groups == 1)
        gate.touch()
        assert np.array_equal((await engine.infer(rows(5)))["y"], 2 * rows(5))
        await until(lambda: not engine.workers[0].groups)
        await until(lambda: engine.statistics().batches == 2)  # Neither of the others was computed.


async def test_one_caller_of_a_group_goes_away():
    async with opened() as engine:
        calls = [engine.submit(rows(number)) for number in range(1, 30)]
        await asyncio.sleep(0)
        calls[3].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for number, answer in enumerate(answers, start=1):
            if number == 4:
                assert isinstance(answer, asyncio.CancelledError)
            else:
                assert np.array_equal(answer["y"], 2 * rows(number))


async def test_urgent_requests_go_first(gate):
    async with opened(max_rows=1, contexts=1) as engine:
        order = []

        async def call(priority):
            await engine.infer(rows(1), priority=priority)
            order.append(priority)

        held = engine.submit(rows(WAIT))
        await until(lambda: engine.statistics().in_flight_batches == 1)
        calls = [asyncio.create_task(call(priority)) for priority in (0, 0, 2, 1)]
        await until(lambda: engine.statistics().queued_requests >= 4)
        await asyncio.sleep(0.2)
        gate.touch()
        await asyncio.gather(held, *calls)
        assert order == [2, 1, 0, 0]


async def test_a_full_queue_refuses(gate):
    async with opened(max_rows=1, contexts=1, max_queue_rows=4) as engine:
        held = engine.submit(rows(WAIT))
        await until(lambda: engine.statistics().in_flight_batches == 1)
        answers = [engine.submit(rows(1)) for _ in range(4)]
        with pytest.raises(QueueFullError, match="max_queue_rows"):
            await engine.infer(rows(1))
        gate.touch()
        await asyncio.gather(held, *answers)
        statistics = engine.statistics()
        assert (statistics.submitted, statistics.refused, statistics.succeeded) == (5, 1, 5)


async def test_closing_fails_what_is_queued_and_sees_the_rest_through(gate):
    async with opened(max_rows=1, contexts=1) as engine:
        held = engine.submit(rows(WAIT))
        await until(lambda: engine.statistics().in_flight_batches == 1)
        queued = engine.submit(rows(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.aclose())
        with pytest.raises(EngineClosedError):
            await queued
        gate.touch()
        assert np.array_equal((await held)["y"], 2 * rows(WAIT))
        await closing
        with pytest.raises(EngineClosedError):
            await engine.infer(rows(1))


async def test_draining_answers_everything():
    async with opened() as engine:
        calls = [engine.submit(rows(number)) for number in range(1, 50)]
        await engine.drain()
        assert engine.state == "draining"
        assert all(call.done() for call in calls)
        with pytest.raises(EngineClosedError):
            await engine.infer(rows(1))


async def test_what_the_model_logs_is_logged_here(caplog):
    with caplog.at_level(logging.INFO, "asynctrt"):
        async with opened() as engine:
            await engine.infer(rows(LOG))
            await until(lambda: "told by the model" in caplog.text)
            assert f"worker {engine.workers[0].pid}" in caplog.text


@pytest.mark.parametrize(
    ("model", "settings", "error", "match"),
    [
        ("nothing.onnx", {}, ModelNotFoundError, "nothing.onnx"),
        ("tests.workers.models:nothing", {}, ModelError, "nothing"),
        ("tests.workers.models:refuses", {}, asynctrt.AsynctrtError, "Local"),
        ("tests.workers.models:refuses_at_length", {}, asynctrt.AsynctrtError, "long long"),
        ("tests.workers.models:refuses_and_stays", {}, asynctrt.AsynctrtError, "and stays"),
        ("tests.workers.models:dies", {}, asynctrt.DeviceLostError, "status 3"),
        (KIND, {"device": "cuda:99"}, asynctrt.AsynctrtError, "cuda:99"),
        (KIND, {"device": "host,nowhere"}, DeviceUnavailableError, "nowhere"),
        (KIND, {"device": ["host", "host"], "isolation": "none"}, OptionsError, "isolation='process'"),
        (models.kind(), {}, UsageError, "module:attribute"),
    ],
)
async def test_what_cannot_be_opened_is_said_as_in_process(model, settings, error, match):
    with pytest.raises(error, match=match):
        async with asynctrt.open(model, **{"isolation": "process", **settings}):
            pass
    assert not workers_left()


async def test_whoever_stops_waiting_for_it_leaves_no_process():
    task = asyncio.ensure_future(asynctrt.open(KIND, isolation="process")._open())
    await until(lambda: workers_left())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not workers_left()


async def test_two_workers_share_the_work():
    async with opened(device="host,host", max_rows=4) as engine:
        assert engine.device_name == "host,host"
        calls = [rows(number) for number in range(1, 200)]
        answers = await asyncio.gather(*[engine.infer(call) for call in calls])
        for call, answer in zip(calls, answers, strict=True):
            assert np.array_equal(answer["y"], 2 * call)
        await until(lambda: engine.statistics().rows == len(calls))
        shares = [link.counts.rows for link in engine._front.links]
        assert min(shares) >= len(calls) // 8, shares
        assert len({worker.pid for worker in engine.workers}) == 2


async def test_an_answer_that_cannot_be_taken_fails_its_callers_alone(monkeypatch, caplog):
    async with opened() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._front, "_copied", None)  # A rule of ours that is broken.
            with pytest.raises(InternalError, match="could not be taken: 'NoneType' object is not callable"):
                await engine.infer(rows(1))
        assert np.array_equal((await engine.infer(rows(2)))["y"], 2 * rows(2))
        assert (engine.statistics().failed, engine.statistics().succeeded) == (1, 1)
    assert "could not be taken" in caplog.text
