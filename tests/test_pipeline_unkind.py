"""Pipelines whose stages, callers and servers are unkind: what fails, hangs, cheats or takes too much."""

import asyncio
import contextvars
import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import asynctrt
import asynctrt.pipeline
from asynctrt import Pipeline, TensorSpec
from asynctrt.errors import (
    DeadlineError,
    EngineClosedError,
    ExecutionError,
    InputError,
    OptionsError,
    OverloadError,
    QueueFullError,
    UsageError,
)
from asynctrt.serving.admission import Admission, Inference
from asynctrt.testing import LatchDevice
from tests.helpers import WAIT_S, until
from tests.models import double_model, rows
from tests.scheduling.support import count_operations

pytestmark = pytest.mark.anyio
X, Y = TensorSpec("x", "float32", (4,)), TensorSpec("y", "float32", (4,))


def pipeline(*stages, **kw):
    return Pipeline(*stages, **{"inputs": X, "outputs": Y, **kw})


def same(given):
    return {"y": given["x"]}


class Blocking:
    """A stage that holds its thread until it is let."""

    def __init__(self):
        self.begun, self.gate = threading.Event(), threading.Event()

    def __call__(self, given):
        self.begun.set()
        assert self.gate.wait(WAIT_S)
        return {"y": given["x"]}


class OwnError(BaseException):
    pass


ERRORS = [StopIteration("end"), SystemExit(3), asyncio.CancelledError(), StopAsyncIteration(), OwnError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["thread", "loop"])
async def test_whatever_a_stage_raises_is_its_request_s_error_and_no_more(error, where):
    def in_thread(given):
        if given["x"][0, 0] < 0:
            raise error
        return {"y": given["x"]}

    async def on_loop(given):
        return in_thread(given)

    async with pipeline(in_thread if where == "thread" else on_loop) as one, asyncio.timeout(WAIT_S):
        with pytest.raises(ExecutionError):
            await one.infer(rows(-1))
        assert (await one.infer(rows(1)))["y"][0, 0] == 1
        assert (one.statistics().failed, one.statistics().cancelled) == (1, 0)


async def test_a_stage_may_find_the_inputs_wrong_and_an_engine_within_may_not():
    def stage(given):
        raise InputError("not a picture")

    async with asynctrt.open(double_model()) as engine, pipeline(stage) as one:
        with pytest.raises(InputError, match="^not a picture$"):
            await one.infer(rows(1))

        async def many(given, call):
            async with asyncio.TaskGroup() as group:
                group.create_task(call.infer(engine, given["x"][:, : int(given["x"][0, 0])]))
            raise AssertionError

        async with pipeline(many) as other:
            with pytest.raises(ExecutionError, match="called 'double' wrongly: InputError"):
                await other.infer(rows(2))
            await engine.drain()
            with pytest.raises(EngineClosedError, match="draining"):  # And no group of one.
                await other.infer(rows(4))


async def test_only_what_has_not_begun_says_so_when_an_engine_within_is_full():
    device = LatchDevice()
    options = {"device": device, "contexts": 1, "max_rows": 1, "max_queue_rows": 1}
    async with asynctrt.open(double_model(), **options) as engine:
        spec = {"inputs": engine.inputs, "outputs": engine.outputs}
        async with pipeline(engine, **spec) as first, pipeline(lambda given: given, engine, **spec) as second:
            held = [engine.submit(rows(1))]
            await device.wait_held()
            held.append(engine.submit(rows(2)))
            with pytest.raises(QueueFullError):  # Clients send this again, whatever it does.
                await first.infer(rows(3))
            with pytest.raises(OverloadError, match="a part of the request had begun") as caught:
                await second.infer(rows(3))
            assert type(caught.value) is OverloadError
            assert type(caught.value.__cause__) is QueueFullError
            device.open()
            await asyncio.gather(*held)


async def test_what_waits_for_a_thread_is_refused_in_time_and_forgotten_when_its_caller_goes():
    stage = Blocking()
    async with pipeline(stage) as one, asyncio.timeout(WAIT_S):
        first = asyncio.ensure_future(one.infer(rows(1)))
        await asyncio.to_thread(stage.begun.wait, WAIT_S)
        # The thread is held, and does not have to be let for these to end.
        with pytest.raises(DeadlineError, match="before one of its threads was free"):
            await one.infer(rows(2), timeout=0.01)
        held = []
        for _ in range(20):
            sent = rows(3)
            held.append(weakref.ref(sent))
            call = one.submit(sent)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
        del sent, call
        await until(lambda: one.statistics().in_flight_batches == 1)
        gc.collect()
        assert [ref() for ref in held] == [None] * 20
        stage.gate.set()
        await first
        assert (await one.infer(rows(4)))["y"][0, 0] == 4


async def test_a_function_has_its_request_s_context():
    name = contextvars.ContextVar("name")

    def stage(given):
        assert name.get() == "here"
        return {"y": given["x"]}

    async with pipeline(stage) as one:
        name.set("here")
        await one.infer(rows(1))


async def test_a_stage_that_will_not_be_cancelled_keeps_neither_caller_nor_closing(monkeypatch, caplog):
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

    async def stage(given):
        await gate.wait()
        return {"y": given["x"]}

    one = pipeline(stage, close_timeout=WAIT_S)
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
    def in_place(given):
        given["x"] += 1
        return {"y": given["x"]}

    constant = np.zeros((1, 4), np.float32)
    constant.flags.writeable = False
    async with (
        pipeline(in_place) as wrong,
        pipeline(same) as view,
        pipeline(lambda _: {"y": constant}) as kept,
    ):
        sent = rows(1)
        with pytest.raises(ExecutionError, match="read-only"):
            await wrong.infer(sent)
        assert sent[0, 0] == 1
        answer = await view.infer(sent)
        answer["y"][...] = 7
        assert sent[0, 0] == 1
        (await kept.infer(sent))["y"][...] = 7


NAMED = TensorSpec("y", "S4", ("n",)), TensorSpec("z", "float32", ("n",))


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
    async with pipeline(lambda _: {"y": given}, outputs=spec) as one:
        if says is None:
            assert (await one.infer(rows(1)))["y"].dtype == spec.dtype
        else:
            with pytest.raises(ExecutionError, match=says):
                await one.infer(rows(1))


async def test_dimensions_of_one_name_agree():
    def stage(given):
        return {"y": np.full((1, 2), b"a"), "z": np.zeros((1, int(given["x"][0, 0])), np.float32)}

    async with pipeline(stage, outputs=NAMED) as one:
        assert (await one.infer(rows(2)))["z"].shape == (1, 2)
        with pytest.raises(ExecutionError, match=r"'z' has shape \(1, 3\).*n=2"):
            await one.infer(rows(3))


async def test_what_stages_are_called_with():
    def scaled(given, factor=3):
        return {"y": factor * given["x"]}

    def optional(given, call=None):
        return {"y": given["x"] + call.priority}

    def options(given, **_):
        return {"y": given["x"]}

    async def later(given):
        return {"y": given["x"]}

    for stage, value in ((scaled, 3), (optional, 2), (options, 1), (lambda given: later(given), 1)):
        async with pipeline(stage, priorities=2) as one:
            assert (await one.infer(rows(1), priority=1))["y"][0, 0] == value
    for wrong in (lambda: None, lambda a, b, c: None, lambda a, *, call: None):
        with pytest.raises(UsageError, match=r"called as stage\(inputs\) or stage\(inputs, call\)"):
            pipeline(wrong)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"threads": 0}, OptionsError, "threads must be a whole number ≥ 1, not 0"),
        ({"threads": "2"}, OptionsError, "threads must be"),
        ({"max_in_flight": 0}, OptionsError, "max_in_flight must be"),
        ({"inputs": ()}, UsageError, "the inputs of a pipeline"),
        ({"outputs": [Y, Y]}, UsageError, "the outputs of a pipeline"),
        ({"outputs": ["y"]}, UsageError, "the outputs of a pipeline"),
    ],
)
async def test_impossible_options(options, error, says):
    with pytest.raises(error, match=says):
        pipeline(same, **options)


async def test_more_rows_than_may_ever_be_under_way_are_the_caller_s_mistake():
    async with pipeline(same, max_in_flight=2) as one:
        with pytest.raises(InputError, match="larger max_in_flight"):
            await one.infer(rows(1, 2, 3))


async def test_the_state_is_that_of_an_engine_within_that_takes_nothing():
    engine = await asynctrt.open(double_model())
    async with pipeline(engine, inputs=engine.inputs, outputs=engine.outputs) as one:
        assert one.state == "open"
        await engine.drain()
        assert one.state == "draining"
        await engine.aclose()
        assert one.state == "closed"
        with pytest.raises(EngineClosedError):
            await one.infer(rows(1))


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

    async def stage(given):
        await gate.wait()
        return {"y": given["x"]}

    async with pipeline(stage, max_in_flight=64) as one, asyncio.timeout(WAIT_S):
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

    async def stage(given):
        await gate.wait()
        return {"y": given["x"]}

    async with pipeline(stage, max_in_flight=under_way + 1) as one, asyncio.timeout(WAIT_S):
        sent = [one.submit(rows(1)) for _ in range(under_way)]
        assert count_operations(lambda: sent.append(one.submit(rows(1)))) < 200
        with pytest.raises(QueueFullError, match=f"{under_way + 1} rows are in flight"):
            one.submit(rows(1))
        gate.set()
        await asyncio.gather(*sent)
        sent = [one.submit(rows(1)) for _ in range(under_way + 1)]
        await asyncio.gather(*sent)
