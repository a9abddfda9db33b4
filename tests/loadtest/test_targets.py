"""Targets in this process, and how a target is said."""

import asyncio
import itertools

import numpy as np
import pytest

import asynctrt
from asynctrt import loadtest
from asynctrt.errors import ModelNotFoundError, OptionsError, TargetError, UsageError
from asynctrt.loadtest.local_targets import CallTarget
from asynctrt.loadtest.opening import opened
from asynctrt.loadtest.targets import BatchCounters, TargetSpec
from asynctrt.options import Options
from tests.loadtest.support import Target
from tests.models import double_model, double_onnx, rows

pytestmark = pytest.mark.anyio


async def test_an_engine_that_is_open_is_not_closed():
    async with asynctrt.open(double_model()) as engine:
        async with opened(engine) as target:
            assert (target.kind, target.inputs) == ("engine", engine.inputs)
            prepared = target.prepare({"input": rows(1)})
            answers = await asyncio.gather(*(target.start(prepared) for _ in range(5)))
            assert all((target.outputs(answer)["output"] == rows(2)).all() for answer in answers)
            counters = await target.batches()
            assert (counters.requests, counters.rows) == (5, 5)
        assert engine.statistics().state == "open"
        with engine.tracing():  # The target no longer traces.
            pass


async def test_a_path_is_opened_and_closed(tmp_path):
    spec = TargetSpec(str(double_onnx(tmp_path / "double.onnx")), options=Options(max_rows=3))
    async with opened(spec) as target:
        assert target.name == "double"
        engine = target._engine
        assert engine.max_rows == 3
    assert engine.statistics().state == "closed"


async def test_what_is_not_there():
    with pytest.raises(ModelNotFoundError):
        async with opened(TargetSpec("nothing.onnx")):
            pass


@pytest.mark.parametrize("where", ["ftp://here/model", "htp://127.0.0.1:8000", "://x"])
async def test_a_scheme_that_there_is_none_of(where):
    with pytest.raises(UsageError, match="valid schemes: http"):
        async with opened(TargetSpec(where)):
            pass


def test_a_scheme_may_be_in_capitals():
    assert TargetSpec("HTTP://127.0.0.1:8000/x").scheme == "http"
    assert TargetSpec("Grpc://127.0.0.1:8000/x").is_server


async def test_something_that_is_no_target():
    with pytest.raises(UsageError, match="a path, an address, an engine or an async function"):
        async with opened(5):
            pass


@pytest.mark.parametrize(
    ("where", "given"),
    [
        ("tests.loadtest.support:turns", {"body": "x"}),
        ("tests.loadtest.support:turns", {"device": "cuda:0"}),
        ("tests.loadtest.support:turns", {"options": Options(max_rows=3)}),
        ("model.onnx", {"method": "GET"}),
        ("model.onnx", {"headers": ("A: b",)}),
        ("http://127.0.0.1:9/v2/models/m", {"device": "cuda:0"}),
        ("http://127.0.0.1:9/v2/models/m", {"options": Options(max_rows=3)}),
        ("grpc://127.0.0.1:9/m", {"method": "GET"}),
        ("grpc://127.0.0.1:9/m", {"body": "x"}),
        ("ws://127.0.0.1:9/x", {"body": "x", "method": "GET"}),
        ("ws://127.0.0.1:9/v2/models/m/ws", {"until_message": "3"}),
        ("http://127.0.0.1:9/x", {"until_message": "3"}),
    ],
)
async def test_what_has_no_effect_on_a_target_is_refused(where, given):
    name = "max_rows" if "options" in given else list(given)[-1]
    with pytest.raises(OptionsError, match=f"{name}.* cannot be set"):
        async with opened(TargetSpec(where, **given)):
            pass


async def test_a_target_of_the_users_own_stays_open():
    mine = Target()
    async with opened(mine) as target:
        assert target is mine
    assert not mine.closed


async def test_an_async_function():
    async def twice(inputs):
        await asyncio.sleep(0)
        return {"y": [[2.0, 4.0]], "x": inputs["x"]}

    target = CallTarget(twice)
    assert target.name.endswith("twice")
    answer = await target.start(target.prepare({"x": rows(1)}))
    assert target.outputs(answer)["y"].tolist() == [[2.0, 4.0]]
    assert await target.batches() is None


async def test_a_function_that_gives_a_future():
    loop = asyncio.get_running_loop()

    def later(inputs):
        future = loop.create_future()
        loop.call_soon(future.set_result, {"y": np.ones(1)})
        return future

    assert (await CallTarget(later).start({}))["y"].tolist() == [1.0]


async def test_requests_that_are_given_one_future_or_raise_what_cannot_be_shown_are_all_counted():
    class Unkind(Exception):
        def __str__(self):
            raise ValueError("no")

    shared = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, shared.set_result, {})
    turns = itertools.count(1)

    def call():
        return shared if next(turns) % 3 else failing()

    async def failing():
        raise Unkind

    report = await loadtest.run(call, callers=6, requests=60, seconds="20s", warmup=0)
    run = report.runs[0]
    assert run.complete
    assert run.answered + run.errors["Unkind"].count == run.requests == 60
    assert "its message cannot be read" in run.errors["Unkind"].example


async def test_a_function_that_is_not_async():
    with pytest.raises(TargetError, match="is not an async function: it returned dict"):
        await CallTarget(dict).start({})


async def test_an_answer_that_cannot_be_checked():
    with pytest.raises(TargetError, match="returned list"):
        CallTarget(dict).outputs([1])


def test_counters_between_two_looks():
    before = BatchCounters(1, 2, 3, 4, 5, 6, 7, {1: 2, 4: 1})
    after = BatchCounters(11, 22, 33, 44, 55, 66, 77, {1: 2, 4: 5, 8: 1})
    assert after.since(before) == BatchCounters(10, 20, 30, 40, 50, 60, 70, {4: 4, 8: 1})


def test_a_token_is_not_shown():
    spec = TargetSpec("http://here", token="s3cret")
    assert "s3cret" not in repr(spec)
    assert "s3cret" not in str(spec.describe())
    assert TargetSpec("m.onnx", options=Options(max_rows=4)).describe()["options"] == {"max_rows": 4}
    assert TargetSpec("http://me:s3cret@here/a@b").describe()["where"] == "http://…@here/a@b"
    assert spec.is_server
    assert not TargetSpec("model.onnx").is_server
    assert not TargetSpec("package.module:attribute").is_server
