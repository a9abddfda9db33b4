"""Pipelines: deadlines, priorities, overload, errors, arrays and closing, and how they are served."""

import asyncio
import contextvars
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import asynctrt
import asynctrt.client
import asynctrt.pipeline
from asynctrt import Pipeline, TensorSpec, loadtest
from asynctrt.errors import (
    DeadlineError,
    DeviceLostError,
    EngineClosedError,
    ExecutionError,
    InputError,
    ModelNotReadyError,
    OptionsError,
    OverloadError,
    QueueFullError,
    UsageError,
)
from asynctrt.serving.admission import Admission, Inference
from asynctrt.testing import LatchDevice, serve_locally
from tests.helpers import WAIT_S, until
from tests.models import double_model, failing_model, rows
from tests.scheduling.support import count_operations

pytestmark = pytest.mark.anyio
X, Y = TensorSpec("x", "float32", (4,)), TensorSpec("y", "float32", (4,))


def pipeline(function, **kw):
    return Pipeline(function, **{"inputs": X, "outputs": Y, **kw})


def returning(function):
    """Return a coroutine function that returns what a function does."""

    async def stage(given):
        return function(given)

    return stage


async def same(given):
    return {"y": given["x"]}


def around(engine, **kw):
    """Return a pipeline that adds one before an engine, and subtracts one after it."""

    async def stage(given):
        x = await asyncio.to_thread(np.add, given["x"], 1)
        return {"y": (await engine.infer(x))["output"] - 1}

    return pipeline(stage, **kw)


def blocked(gate, **kw):
    async def stage(given):
        await gate.wait()
        return {"y": given["x"]}

    return pipeline(stage, **kw)


async def test_requests_share_batches_of_the_engine_within():
    device = LatchDevice(concurrency=1)
    async with (
        asynctrt.open(double_model(), device=device, contexts=1, max_rows=8) as engine,
        around(engine, name="around") as one,
    ):
        calls = [asyncio.ensure_future(one.infer(rows(value))) for value in range(50)]
        await until(lambda: engine.statistics().submitted == 50)
        device.open()
        results = await asyncio.gather(*calls)
        assert [result["y"][0, 0] for result in results] == [2 * value + 1 for value in range(50)]
        assert engine.statistics().batches <= 8
        done = one.statistics()
        assert (done.submitted, done.succeeded, done.rows, done.in_flight_batches) == (50, 50, 50, 0)
        assert results[0].timing.compute_ns > 0
    assert one.state == "closed"


async def test_each_engine_gets_what_is_left_of_the_time_and_the_priority():
    device = LatchDevice(concurrency=1)
    async with (
        asynctrt.open(double_model(), device=device, contexts=1, max_rows=1, priorities=2) as engine,
        around(engine, priorities=3) as one,
    ):
        busy = engine.submit(rows(0))
        await device.wait_held()
        with pytest.raises(DeadlineError):  # It waits in the engine's queue until its time is over.
            await one.infer(rows(1), timeout=0.05)
        order = []
        calls = []
        for value, priority in ((1, 0), (2, 0), (3, 2)):
            call = asyncio.ensure_future(one.infer(rows(value), priority=priority))
            call.add_done_callback(lambda _, value=value: order.append(value))
            calls.append(call)
            await until(lambda: engine.statistics().queued_requests == len(calls))
        device.open()
        await asyncio.gather(busy, *calls)
        assert order[0] == 3
        assert one.statistics().expired == 1
        with pytest.raises(InputError, match="priority"):
            await one.infer(rows(1), priority=3)


async def test_overload_cancelling_and_closing():
    device = LatchDevice()
    async with asynctrt.open(double_model(), device=device) as engine:
        one = around(engine, max_in_flight=3, close_timeout=0.01)
        calls = [asyncio.ensure_future(one.infer(rows(1))) for _ in range(3)]
        await device.wait_held()
        with pytest.raises(QueueFullError, match="3 rows are in flight in 'pipeline'"):
            await one.infer(rows(1))
        with pytest.raises(InputError, match="larger max_in_flight"):
            await one.infer(rows(1, 2, 3, 4))
        calls[0].cancel()
        await until(lambda: one.statistics().cancelled == 1)
        assert one.statistics().refused == 1
        await one.aclose()  # What is held does not end by itself.
        assert calls[0].cancelled()
        for call in calls[1:]:  # Nobody cancelled these.
            with pytest.raises(EngineClosedError, match="'pipeline' is closed"):
                await call
        with pytest.raises(EngineClosedError, match="is closed"):
            await one.infer(rows(1))
        await one.aclose()
        device.open()
        assert (await engine.infer(rows(2)))["output"][0, 0] == 4  # The engine is its owner's.


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda given: 1 / 0, "ZeroDivisionError"),
        (lambda given: None, "returned a NoneType, not arrays by name"),
        (lambda given: {"z": given["x"]}, r"output 'y' is missing: 'pipeline' returned \['z'\]"),
        (lambda given: {"y": given["x"][:, :2]}, r"shape \(1, 2\)"),
        (lambda given: {"y": np.concatenate([given["x"]] * 2)}, r"shape \(2, 4\)"),
        (lambda given: {"y": given["x"] * 1j}, "complex64"),
    ],
)
async def test_a_function_that_is_wrong_fails_its_request_alone(function, says):
    async with pipeline(returning(function)) as wrong:
        with pytest.raises(ExecutionError, match=says):
            await wrong.infer(rows(1))
        assert wrong.statistics().failed == 1


class OwnError(BaseException):
    pass


ERRORS = [StopIteration("end"), SystemExit(3), asyncio.CancelledError(), StopAsyncIteration(), OwnError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_whatever_the_function_raises_is_its_request_s_error_and_no_more(error):
    async def stage(given):
        if given["x"][0, 0] < 0:
            raise error
        return {"y": given["x"]}

    async with pipeline(stage) as one, asyncio.timeout(WAIT_S):
        with pytest.raises(ExecutionError):
            await one.infer(rows(-1))
        assert (await one.infer(rows(1)))["y"][0, 0] == 1
        assert (one.statistics().failed, one.statistics().cancelled) == (1, 0)


async def test_errors_that_the_caller_gets_unchanged():
    async def stage(given):
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.infer(given["x"]))
        raise InputError("not a picture")

    async with asynctrt.open(failing_model()) as engine, pipeline(stage) as one:
        with pytest.raises(ExecutionError, match="negative number"):
            await one.infer(rows(-5))
        with pytest.raises(InputError, match="^not a picture$"):
            await one.infer(rows(1))
        with pytest.raises(InputError):
            await one.infer(rows(1).astype("S4"))
        await engine.drain()
        with pytest.raises(EngineClosedError, match="draining"):  # And no group of one.
            await one.infer(rows(4))


async def test_an_engine_that_refuses_the_function_s_inputs_does_not_blame_the_caller():
    @asynctrt.batch
    def refuse(items: list[int]) -> list[int]:
        return [InputError("not a picture") for _ in items]

    async def stage(given):
        await engine.infer(given["x"][:, :2]) if given["x"][0, 0] else await refuse(1)

    async with asynctrt.open(double_model()) as engine, pipeline(stage) as one:
        with pytest.raises(ExecutionError, match=r"'pipeline' failed: InputError.*given \(1, 2\)"):
            await one.infer(rows(1))
        with pytest.raises(InputError, match="^not a picture$"):
            await one.infer(rows(0))


async def test_a_full_engine_within_does_not_say_that_nothing_has_begun():
    device = LatchDevice()
    options = {"device": device, "contexts": 1, "max_rows": 1, "max_queue_rows": 1}
    async with asynctrt.open(double_model(), **options) as engine, around(engine) as one:
        held = [engine.submit(rows(1))]
        await device.wait_held()
        held.append(engine.submit(rows(2)))
        with pytest.raises(OverloadError, match="a part of the request had begun") as caught:
            await one.infer(rows(3))
        assert type(caught.value) is OverloadError
        assert type(caught.value.__cause__) is QueueFullError
        device.open()
        await asyncio.gather(*held)


async def test_a_function_has_its_request_s_context():
    name = contextvars.ContextVar("name")

    async def stage(given):
        assert name.get() == "here"
        return {"y": given["x"]}

    async with pipeline(stage) as one:
        name.set("here")
        await one.infer(rows(1))


async def test_a_function_that_will_not_be_cancelled_keeps_neither_caller_nor_closing(monkeypatch, caplog):
    monkeypatch.setattr(asynctrt.pipeline, "CANCEL_S", 0.01)
    gate = asyncio.Event()

    async def stubborn(given):
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        return {"y": given["x"]}

    one = pipeline(stubborn, close_timeout=0.01)
    async with asyncio.timeout(WAIT_S):
        gone, other = asyncio.ensure_future(one.infer(rows(1))), asyncio.ensure_future(one.infer(rows(2)))
        await until(lambda: one.statistics().in_flight_batches == 2)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        assert gone.cancelled()
        assert one.statistics().in_flight_batches == 2  # It does go on.
        await one.aclose()
        with pytest.raises(EngineClosedError, match="'pipeline' is closed"):
            await other
        assert "2 requests" in caplog.text
        gate.set()
        await until(lambda: one.statistics().in_flight_batches == 0)


async def test_closing_goes_on_when_its_caller_is_cancelled():
    gate = asyncio.Event()
    one = blocked(gate, close_timeout=WAIT_S)
    call = asyncio.ensure_future(one.infer(rows(1)))
    await until(lambda: one.statistics().in_flight_batches)
    closing = asyncio.ensure_future(one.aclose())
    await until(lambda: one.state == "closing")
    closing.cancel()
    await asyncio.sleep(0)
    assert not closing.done()
    gate.set()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert one.state == "closed"
    assert (await call)["y"][0, 0] == 1


async def test_whose_arrays_are_whose():
    async def in_place(given):
        given["x"] += 1
        return {"y": given["x"]}

    constant = np.zeros((1, 4), np.float32)
    constant.flags.writeable = False
    async with (
        pipeline(in_place) as wrong,
        pipeline(same) as view,
        pipeline(returning(lambda _: {"y": constant})) as kept,
    ):
        sent = rows(1)
        with pytest.raises(ExecutionError, match="read-only"):
            await wrong.infer(sent)
        assert sent[0, 0] == 1
        answer = await view.infer(sent)
        answer["y"][...] = 7
        assert sent[0, 0] == 1
        (await kept.infer(sent))["y"][...] = 7


@pytest.mark.parametrize(
    ("spec", "given", "says"),
    [
        (TensorSpec("y", "int8"), np.array([300]), "int64 with values that int8 cannot hold.*wider"),
        (TensorSpec("y", "int8"), np.array([-4]), None),
        (TensorSpec("y", "float16"), np.array([1 / 3]), None),
        (TensorSpec("y", "S8"), np.array([1.5]), "is float64, but should be bytes64"),
        (TensorSpec("y", "float32"), np.array([b"1.5"]), r"is \|S3, but should be float32"),
        (TensorSpec("y", "S4"), np.array(["grüße"]), r"values that \|S4 cannot hold: give it more bytes"),
        (TensorSpec("y", "S4"), np.array(["grü"]), None),
        (TensorSpec("y", "S4"), [b"a"], None),
    ],
)
async def test_outputs_are_of_their_dtype_or_an_error(spec, given, says):
    async with pipeline(returning(lambda _: {"y": given}), outputs=spec) as one:
        if says is None:
            assert (await one.infer(rows(1)))["y"].dtype == spec.dtype
        else:
            with pytest.raises(ExecutionError, match=says):
                await one.infer(rows(1))


async def test_dimensions_of_one_name_agree():
    def stage(given):
        return {"y": np.full((1, 2), b"a"), "z": np.zeros((1, int(given["x"][0, 0])), np.float32)}

    named = TensorSpec("y", "S4", ("n",)), TensorSpec("z", "float32", ("n",))
    async with pipeline(returning(stage), outputs=named) as one:
        assert (await one.infer(rows(2)))["z"].shape == (1, 2)
        with pytest.raises(ExecutionError, match=r"'z' has shape \(1, 3\).*n=2"):
            await one.infer(rows(3))


@pytest.mark.parametrize(
    ("function", "options", "error", "says"),
    [
        (same, {"max_in_flight": 0}, OptionsError, "max_in_flight must be"),
        (same, {"inputs": ()}, UsageError, "the inputs of a pipeline"),
        (same, {"outputs": [Y, Y]}, UsageError, "the outputs of a pipeline"),
        (same, {"outputs": ["y"]}, UsageError, "the outputs of a pipeline"),
        ("model.onnx", {}, UsageError, "takes one coroutine function.*not 'model.onnx'"),
        (lambda given: given, {}, UsageError, "takes one coroutine function"),
    ],
)
async def test_misuse(function, options, error, says):
    with pytest.raises(error, match=says):
        pipeline(function, **options)


async def test_a_served_pipeline_is_not_ready_once_its_engine_is_lost():
    go = threading.Event()
    model = double_model(lambda inputs, outputs: go.wait(WAIT_S))
    async with (
        asynctrt.open(model, contexts=1, batch_timeout=0.01) as engine,
        around(engine, engines=engine) as one,
        serve_locally({"one": one}) as server,
    ):
        assert server.repository.find_ready("one").engine.state == "open"
        with pytest.raises(DeviceLostError):
            await one.infer(rows(1))
        assert one.state == "lost"
        with pytest.raises(ModelNotReadyError):
            server.repository.find_ready("one")
        with pytest.raises(UsageError, match="engines of a pipeline are open engines"):
            pipeline(same, engines=[double_model()])
        go.set()


async def test_what_a_pipeline_has_not():
    async with pipeline(same) as one:
        with pytest.raises(UsageError, match="on the host"):
            await one.infer(rows(1), outputs="device")
        with pytest.raises(UsageError, match="its engines do"):
            one.tracing()
        with pytest.raises(UsageError, match="takes one coroutine function.*<Pipeline 'pipeline' open"):
            pipeline(one)


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_served_like_a_model_with_text_of_any_length(scheme):
    async def words(given):
        doubled = (await engine.infer(given["x"]))["output"]
        return {"words": np.array([[f"{value:g} grüße" for value in row] for row in doubled])}

    outputs = TensorSpec("words", "S64", ("count",))
    async with (
        asynctrt.open(double_model()) as engine,
        pipeline(words, outputs=outputs, name="reader") as reader,
        serve_locally({"reader": reader}) as server,
    ):
        url = server.http_url if scheme == "http" else server.websocket_url
        async with asynctrt.client.connect(url) as client:
            answer = await client.infer("reader", rows(1, 2), deadline=30)
            assert [text.decode() for text in answer["words"][1]] == ["4 grüße"] * 4
            assert (await client.metadata("reader"))["platform"] == "asynctrt_pipeline"
    assert reader.state == "closed"


def submit(admission, lane, count=1):
    layout = SimpleNamespace(rows=count, timeout=None, wanted="host")
    request = SimpleNamespace(layout=layout, inputs={"x": rows(*range(count))}, nbytes=16 * count)
    inference = Inference(None, request, 0, {}, lane, admission, 0, lambda _: None)
    admission.submit(inference)
    return inference


async def test_what_waits_for_a_pipeline_is_never_split():
    gate = asyncio.Event()

    async def stage(given):
        await gate.wait()
        return {"y": given["x"][:, : len(given["x"])]}

    # What is given for some rows cannot always be joined to what is given for others.
    async with (
        pipeline(stage, max_in_flight=8, outputs=TensorSpec("y", "float32", ("n",))) as one,
        asyncio.timeout(WAIT_S),
    ):
        admission = Admission(one)
        lane = admission.gate.lane("client")
        sent = [submit(admission, lane, 6), submit(admission, lane, 3)]
        assert [one.has_future for one in sent] == [True, False]
        gate.set()
        assert [(await one.answer())["y"].shape for one in sent] == [(6, 4), (3, 3)]


async def test_one_client_of_a_server_cannot_take_all_of_it():
    gate = asyncio.Event()
    async with blocked(gate, max_in_flight=64) as one, asyncio.timeout(WAIT_S):
        admission = Admission(one)

        greedy, modest = admission.gate.lane("greedy"), admission.gate.lane("modest")
        sent = [submit(admission, greedy) for _ in range(64)]
        with pytest.raises(QueueFullError, match="this client has the most"):
            submit(admission, greedy)
        assert one.statistics().in_flight_batches == 48
        sent += [submit(admission, modest) for _ in range(8)]
        gate.set()
        answers = await asyncio.gather(*(one.answer() for one in sent), return_exceptions=True)
        assert not any(isinstance(answer, Exception) for answer in answers[64:])
        assert {type(answer) for answer in answers[:64] if isinstance(answer, Exception)} <= {QueueFullError}


@pytest.mark.parametrize("under_way", [10, 2000])
async def test_a_request_costs_as_much_beside_few_as_beside_thousands(under_way):
    gate = asyncio.Event()
    async with blocked(gate, max_in_flight=under_way + 1) as one, asyncio.timeout(WAIT_S):
        sent = [one.submit(rows(1)) for _ in range(under_way)]
        assert count_operations(lambda: sent.append(one.submit(rows(1)))) < 200
        with pytest.raises(QueueFullError, match=f"{under_way + 1} rows are in flight"):
            one.submit(rows(1))
        gate.set()
        await asyncio.gather(*sent)
        sent = [one.submit(rows(1)) for _ in range(under_way + 1)]
        await asyncio.gather(*sent)


PAGE = (Path(__file__).parent.parent / "docs" / "pipelines.md").read_text()


async def test_the_page_runs_as_it_stands(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    await asyncio.to_thread(exec, block, {})
    assert capsys.readouterr().out == "bright 0.78\n"


async def test_a_load_test_takes_a_pipeline():
    async with asynctrt.open(double_model()) as engine, around(engine) as one:
        report = await loadtest.run(one, callers=4, seconds="100ms", warmup=0)
        assert report.runs[0].answered == report.runs[0].requests > 0
