"""Pipelines: stages in turn, deadlines and priorities kept, overload, closing, and served like a model."""

import asyncio
import math
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import asynctrt
import asynctrt.client
from asynctrt import Pipeline, TensorSpec, loadtest
from asynctrt.errors import (
    DeadlineError,
    EngineClosedError,
    ExecutionError,
    InputError,
    QueueFullError,
    UsageError,
)
from asynctrt.testing import LatchDevice, serve_locally
from tests.helpers import until
from tests.models import double_model, failing_model, rows

pytestmark = pytest.mark.anyio
X, Y = TensorSpec("x", "float32", (4,)), TensorSpec("y", "float32", (4,))


def prepare(given):
    return {"input": given["x"] + 1}


def label(given):
    return {"y": given["output"] - 1}


def pipeline(*stages, **kw):
    return Pipeline(*stages, **{"inputs": X, "outputs": Y, **kw})


async def test_functions_in_threads_around_an_engine():
    seen = set()

    def watched(given):
        seen.add(threading.current_thread().name.rpartition("_")[0])
        return prepare(given)

    device = LatchDevice(concurrency=1)
    async with (
        asynctrt.open(double_model(), device=device, contexts=1, max_rows=8) as engine,
        pipeline(watched, engine, label, threads=2, name="around") as around,
    ):
        calls = [asyncio.ensure_future(around.infer(rows(value))) for value in range(50)]
        await until(lambda: engine.statistics().submitted == 50)
        device.open()
        results = await asyncio.gather(*calls)
        assert [result["y"][0, 0] for result in results] == [2 * value + 1 for value in range(50)]
        assert seen == {"asynctrt-around"}
        assert engine.statistics().batches <= 1 + math.ceil(49 / 8), "different callers share batches"
        done = around.statistics()
        assert (done.submitted, done.succeeded, done.rows, done.in_flight_batches) == (50, 50, 50, 0)
        assert results[0].timing.compute_ns > 0
    assert around.state == "closed"
    assert not [one for one in threading.enumerate() if one.name.startswith("asynctrt-around") and one.daemon]


async def test_engines_chained_and_one_for_each_of_many_pieces():
    async def pieces(given, call):
        parts = await asyncio.gather(*(call.infer(engine, given["x"][:, [at] * 4]) for at in range(4)))
        return {"y": np.stack([part["output"][:, 0] for part in parts], axis=1)}

    async with asynctrt.open(double_model()) as engine, pipeline(pieces) as several:
        sent = np.arange(8, dtype=np.float32).reshape(2, 4)
        assert (await several.infer(sent))["y"].tolist() == (2 * sent).tolist()
        async with pipeline(prepare, engine, lambda given: {"x": given["output"]}, several) as chained:
            assert (await chained.infer({"x": sent}))["y"].tolist() == (4 * (sent + 1)).tolist()


async def test_each_engine_gets_what_is_left_of_the_time_and_the_priority():
    device = LatchDevice(concurrency=1)
    async with (
        asynctrt.open(double_model(), device=device, contexts=1, max_rows=1, priorities=2) as engine,
        pipeline(prepare, engine, label, priorities=3) as around,
    ):
        busy = engine.submit(rows(0))
        await device.wait_held()
        # It waits in the engine's queue until its time is over.
        with pytest.raises(DeadlineError):
            await around.infer(rows(1), timeout=0.05)
        order = []
        calls = []
        for value, priority in ((1, 0), (2, 0), (3, 2)):
            call = asyncio.ensure_future(around.infer(rows(value), priority=priority))
            call.add_done_callback(lambda _, value=value: order.append(value))
            calls.append(call)
            await until(lambda: engine.statistics().queued_requests == len(calls))
        device.open()
        await asyncio.gather(busy, *calls)
        assert order[0] == 3
        assert around.statistics().expired == 1
        with pytest.raises(InputError, match="priority"):
            await around.infer(rows(1), priority=3)


async def test_a_timeout_that_passes_before_a_stage_ends_it_there():
    gate, ran = threading.Event(), []

    def slow(given):
        assert gate.wait(30)
        return given

    async def then(given):
        ran.append(given)
        return {"y": given["x"]}

    async with pipeline(slow, then) as one:
        late = asyncio.ensure_future(one.infer(rows(1), timeout=0.02))
        behind = asyncio.ensure_future(one.infer(rows(2), timeout=0.02))
        await asyncio.sleep(0.05)
        gate.set()
        for call in (late, behind):
            with pytest.raises(DeadlineError):
                await call
        assert not ran


async def test_overload_cancelling_and_closing():
    device = LatchDevice()
    async with asynctrt.open(double_model(), device=device) as engine:
        around = pipeline(prepare, engine, label, max_in_flight=3, close_timeout=0.01)
        calls = [asyncio.ensure_future(around.infer(rows(1))) for _ in range(3)]
        await device.wait_held()
        with pytest.raises(QueueFullError, match="3 rows are in flight in 'pipeline'"):
            await around.infer(rows(1))
        calls[0].cancel()
        await until(lambda: around.statistics().cancelled == 1)
        assert around.statistics().refused == 1
        await around.aclose()  # What is held does not end by itself.
        assert calls[0].cancelled()
        for call in calls[1:]:  # Nobody cancelled these.
            with pytest.raises(EngineClosedError, match="'pipeline' is closed"):
                await call
        with pytest.raises(EngineClosedError, match="is closed"):
            await around.infer(rows(1))
        await around.aclose()
        device.open()
        assert (await engine.infer(rows(2)))["output"][0, 0] == 4  # The engine is its owner's.


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (lambda given: 1 / 0, "ZeroDivisionError"),
        (lambda given: None, "returned a NoneType, not arrays by name"),
        (lambda given: {"z": given["x"]}, "output 'y' is missing: the last stage returned \\['z'\\]"),
        (lambda given: {"y": given["x"][:, :2]}, r"shape \(1, 2\)"),
        (lambda given: {"y": np.concatenate([given["x"]] * 2)}, r"shape \(2, 4\)"),
        (lambda given: {"y": given["x"] * 1j}, "complex64"),
    ],
)
async def test_a_stage_that_is_wrong_fails_its_request_alone(stage, says):
    async with pipeline(stage) as wrong:
        with pytest.raises(ExecutionError, match=says):
            await wrong.infer(rows(1))
        assert wrong.statistics().failed == 1


async def test_errors_of_an_engine_within():
    async with asynctrt.open(failing_model()) as engine, pipeline(prepare, engine, label) as around:
        with pytest.raises(ExecutionError, match="negative number"):
            await around.infer(rows(-5))
        async with pipeline(lambda given: {"wrong": given["x"]}, engine) as misused:
            with pytest.raises(ExecutionError, match="InputError") as caught:
                await misused.infer(rows(1))  # Its callers did nothing wrong.
            assert isinstance(caught.value.__cause__, InputError)
        with pytest.raises(InputError):
            await around.infer(rows(1).astype("S4"))


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_served_like_a_model_with_text_of_any_length(scheme):
    def words(given):
        return {"words": np.array([[f"{value:g} grüße" for value in row] for row in given["output"]])}

    outputs = TensorSpec("words", "S64", ("count",))
    async with (
        asynctrt.open(double_model()) as engine,
        pipeline(prepare, engine, words, outputs=outputs, name="reader") as reader,
        serve_locally({"reader": reader}) as server,
    ):
        url = server.http_url if scheme == "http" else server.websocket_url
        async with asynctrt.client.connect(url) as client:
            answer = await client.infer("reader", rows(1, 2), deadline=30)
            assert [text.decode() for text in answer["words"][1]] == ["6 grüße"] * 4
            assert (await client.metadata("reader"))["platform"] == "asynctrt_pipeline"
    assert reader.state == "closed"


async def test_misuse():
    with pytest.raises(UsageError, match="needs a stage"):
        pipeline()
    with pytest.raises(UsageError, match="a coroutine function, not 'model.onnx'"):
        pipeline("model.onnx")
    async with pipeline(lambda given: {"y": given["x"]}) as one:
        with pytest.raises(UsageError, match="on the host"):
            await one.infer(rows(1), outputs="device")
        with pytest.raises(UsageError, match="its engines do"):
            one.tracing()
        assert repr(one) == "<Pipeline 'pipeline' open stages=1 in_flight=0>"


PAGE = (Path(__file__).parent.parent / "docs" / "pipelines.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(
    ("block", "says"), list(zip(BLOCKS, ["bright 0.78\n", "[[0.0, 2.0, 4.0, 6.0]]\n"], strict=True))
)
async def test_the_page_runs_as_it_stands(block, says, capsys):
    await asyncio.to_thread(exec, block, {})
    assert capsys.readouterr().out == says


async def test_a_load_test_takes_a_pipeline():
    async with (
        asynctrt.open(double_model()) as engine,
        pipeline(prepare, engine, label) as around,
    ):
        report = await loadtest.run(around, callers=4, seconds="100ms", warmup=0)
        assert report.runs[0].answered == report.runs[0].requests > 0
