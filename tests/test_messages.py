"""However large a value is that a caller or a model gives, what is said about it is short."""

import asyncio
import dataclasses
import sys
import tracemalloc

import numpy as np
import pytest

import asynctrt
from asynctrt import FunctionModel, Options, Pipeline, TensorSpec
from asynctrt.client import connect
from asynctrt.doctor import diagnose
from asynctrt.errors import (
    MESSAGE_MAX,
    SHOWN_MAX,
    AsynctrtError,
    ExecutionError,
    InputError,
    ModelError,
    OptionsError,
    copy_for,
    describe,
)
from asynctrt.tensors import InferResult
from tests.helpers import WAIT_S
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio

LONG = "a" * 1_000_000
SHORT_MAX = 2000
"""Characters of a message that shows a value or two, and the names of all options."""


class Verbose:
    def __repr__(self):
        return LONG


VALUES = {
    "text": LONG,
    "bytes": bytes(1_000_000),
    "list": [LONG, *range(100_000)],
    "dict": {LONG: LONG},
    "object": Verbose(),
    "number": 10**1_000_000,
    "array": np.zeros((3, 4_000)),
}


@pytest.fixture(autouse=True)
def _print_everything():
    with np.printoptions(threshold=sys.maxsize):
        yield


def values():
    return pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


async def opened(*args, **settings):
    async with asynctrt.open(*args, **settings):
        pass


def is_short(error):
    assert isinstance(error, AsynctrtError | TypeError | KeyError), describe(error)
    assert len(str(error)) <= SHORT_MAX


async def refused(call):
    """Check that a call is refused shortly, if it is."""
    try:
        found = call()
        if asyncio.iscoroutine(found):
            await found
        elif isinstance(found, Pipeline):
            await found.aclose()
    except Exception as error:
        is_short(error)


@values()
class TestValues:
    async def test_options(self, value):
        for field in dataclasses.fields(Options):
            given = {field.name: value}
            await refused(lambda given=given: Options(**given))
            await refused(lambda given=given: asynctrt.batch(**given))

    async def test_opening(self, value):
        model = double_model()
        await refused(lambda: opened(value))
        await refused(lambda: opened(model, device=value))
        await refused(lambda: opened("model.onnx", onnx={"session_config": value}))
        await refused(lambda: opened("model.onnx", onnx={LONG: value}))
        await refused(lambda: opened("model.plan", tensorrt={LONG: value}))
        await refused(lambda: opened("model.plan", tensorrt=value))

    async def test_calls(self, value):
        async with asyncio.timeout(WAIT_S), asynctrt.open(double_model()) as engine:
            await refused(lambda: engine.infer(value))
            await refused(lambda: engine.infer({"input": value}))
            await refused(lambda: engine.infer({LONG: value}))
            for name in ("timeout", "priority", "outputs"):
                await refused(lambda name=name: engine.infer(rows(1), **{name: value}))
            await refused(lambda: engine.infer(rows(1), outputs=[value]))
            result = await engine.infer(rows(1))
            assert isinstance(result, InferResult)
            await refused(lambda: result[value])

    async def test_within(self, value):
        for name in ("timeout", "priority"):
            await refused(lambda name=name: asynctrt.within(**{name: value}).__enter__())

    async def test_models(self, value):
        spec = TensorSpec("x", "float32")
        for place in range(4):
            given = ["x", "float32", (), 0]
            given[place] = value
            await refused(lambda given=given: TensorSpec(*given))
        await refused(lambda: FunctionModel(value, inputs=spec, outputs=spec))
        await refused(lambda: FunctionModel(len, inputs=value, outputs=spec))
        await refused(lambda: FunctionModel(len, inputs=spec, outputs=spec, run_on=value))
        await refused(lambda: asynctrt.batch(value))
        await refused(lambda: asynctrt.batch(key=value)(len))
        await refused(lambda: asynctrt.limit_gpu_memory(value))

    async def test_pipelines(self, value):
        async def stage(_):
            return value

        spec = TensorSpec("x", "float32")
        await refused(lambda: Pipeline(value, inputs=spec, outputs=spec))
        await refused(lambda: Pipeline(stage, inputs=value, outputs=spec))
        await refused(lambda: Pipeline(stage, inputs=spec, outputs=value))
        for name in ("max_in_flight", "priorities", "timeout", "close_timeout"):
            await refused(lambda name=name: Pipeline(stage, inputs=spec, outputs=spec, **{name: value}))
        async with asyncio.timeout(WAIT_S), Pipeline(stage, inputs=spec, outputs=spec) as pipeline:
            with pytest.raises(ExecutionError) as caught:
                await pipeline.infer(np.ones(1, np.float32))
            is_short(caught.value)

    async def test_servers(self, value):
        if isinstance(value, str):
            await refused(lambda: connect(value))
            await refused(lambda: diagnose(value))


@pytest.mark.parametrize("value", [{LONG: 1}, {"max_rows": LONG}, {"timeout": LONG}], ids=str)
async def test_options_say_what_is_wrong(value):
    with pytest.raises(OptionsError) as caught:
        await opened(double_model(), **value)
    is_short(caught.value)


async def test_long_names_of_tensors():
    specs = {"inputs": TensorSpec(LONG, "float32", (4,)), "outputs": TensorSpec(f"{LONG}b", "float32", (4,))}
    async with asynctrt.open(FunctionModel(lambda _: None, **specs, name=LONG)) as engine:
        for wrong in ({"x": rows(1)}, rows(1)[:, :2], rows(1).astype(complex), [[1, [2]]]):
            with pytest.raises(InputError) as caught:
                await engine.infer(wrong)
            assert len(str(caught.value)) <= MESSAGE_MAX
        with pytest.raises(ExecutionError) as failed:
            await engine.infer(rows(1))
        assert len(str(failed.value)) <= MESSAGE_MAX


class LongError(Exception):
    """An error whose text is made anew each time."""

    asked = 0

    def __str__(self):
        LongError.asked += 1
        return 20 * LONG


async def test_what_a_model_raises_is_passed_on_once_and_bounded():
    raised = ValueError(20 * LONG)

    def fails(inputs):
        raise raised

    async with asynctrt.open(double_model(fails), max_rows=64) as engine, asyncio.timeout(WAIT_S):
        calls = [engine.submit(rows(1)) for _ in range(64)]
        tracemalloc.start()
        try:
            errors = await asyncio.gather(*calls, return_exceptions=True)
            peak_nbytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak_nbytes < 3_000_000
    assert {type(error) for error in errors} == {ExecutionError}
    assert {error.__cause__ for error in errors} == {raised}
    assert all(len(str(error)) <= MESSAGE_MAX for error in errors)
    assert all(str(error).endswith("Others are not affected") for error in errors)


async def test_the_text_of_an_error_is_asked_for_once_a_batch():
    def fails(inputs):
        raise LongError

    async with asynctrt.open(double_model(fails), max_rows=64, idempotent=False) as engine:
        LongError.asked = 0
        await asyncio.gather(*[engine.submit(rows(1)) for _ in range(64)], return_exceptions=True)
    assert LongError.asked == 1


async def test_a_stage_and_a_batched_function_likewise():
    async def fails(given):
        raise ValueError(LONG)

    spec = TensorSpec("input", "float32", (4,))
    async with asyncio.timeout(WAIT_S), Pipeline(fails, inputs=spec, outputs=spec) as pipeline:
        for call in (pipeline.infer(rows(1)), asynctrt.batch(fails)(1.0)):
            with pytest.raises(ExecutionError) as caught:
                await call
            assert len(str(caught.value)) <= MESSAGE_MAX


@pytest.mark.parametrize("kind", [ExecutionError, ModelError, asynctrt.errors.ModelNotFoundError])
def test_every_message_is_bounded_and_keeps_its_ends(kind):
    error = kind(f"begin {LONG} end")
    text = str(error)
    assert len(text) == MESSAGE_MAX
    assert text.startswith("begin aaa")
    assert text.endswith("aaa end")
    assert "(1,000,010 characters)" in text
    assert str(copy_for(error)) == text
    assert len(describe(ValueError(LONG))) <= MESSAGE_MAX


@pytest.mark.parametrize("length", [SHOWN_MAX, MESSAGE_MAX])
def test_what_is_short_is_said_whole(length):
    assert str(ExecutionError("x" * length)) == "x" * length
