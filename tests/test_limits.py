"""One deadline and one priority for all that a piece of work asks of engines."""

import asyncio

import numpy as np
import pytest

import asynctrt
import asynctrt.client
from asynctrt import FunctionModel, Pipeline, TensorSpec, within
from asynctrt.errors import DeadlineError, InputError
from asynctrt.limits import limits_here
from asynctrt.testing import LatchDevice, serve_locally
from tests.helpers import WAIT_S, until
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio
X, Y = TensorSpec("x", "float32", (4,)), TensorSpec("y", "float32", (4,))


def asked(engine, **own):
    """Send a request; return its timeout in seconds, and its priority."""
    future = engine.submit(rows(1), **own)
    request = future.request
    future.cancel()
    if request is None:  # A plain one has neither.
        return None, 0
    has_deadline = request.deadline_ns < 1 << 62
    return (request.deadline_ns - request.arrival_ns) / 1e9 if has_deadline else None, request.priority


async def test_the_stricter_of_both_holds():
    async with asynctrt.open(double_model(), timeout=30, priorities=3) as engine:
        assert asked(engine) == (30, 0)
        with within(20, priority=1):
            left, priority = asked(engine)
            assert 19 < left <= 20
            assert priority == 1
            assert asked(engine, timeout=10) == (10, 1)
            assert asked(engine, timeout=25, priority=2)[0] < 20
            assert asked(engine, priority=2)[1] == 2
            with within(25):
                assert asked(engine)[0] < 20
                assert asked(engine)[1] == 1
            with within(5, priority=9):
                assert asked(engine)[0] <= 5
                assert asked(engine)[1] == 2  # It has no higher one.
            assert asked(engine)[0] > 19
        assert asked(engine) == (30, 0)
        with within(priority=2):
            assert asked(engine) == (30, 2)


async def test_a_deadline_for_an_engine_without_a_timeout():
    async with asynctrt.open(double_model()) as engine:
        assert asked(engine) == (None, 0)
        with within(20):
            assert asked(engine)[0] <= 20


async def test_when_the_time_is_over_nothing_is_asked():
    async with asynctrt.open(double_model()) as engine, Pipeline(engine.infer, inputs=X, outputs=Y) as around:
        with within(0):
            for target in (engine, around):
                with pytest.raises(DeadlineError, match="of asynctrt.within.* passed .* ms before"):
                    await target.infer(rows(1))
        assert engine.statistics().submitted == 0
        assert (await engine.infer(rows(1)))["output"][0, 0] == 2


async def test_a_request_that_waits_when_the_time_is_over():
    device = LatchDevice(concurrency=1)
    async with asynctrt.open(double_model(), device=device, contexts=1, max_rows=1) as engine:
        first = asyncio.create_task(engine.infer(rows(1)))
        await until(lambda: device.held)
        with within(0.02):
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(DeadlineError, match="in the queue"):
                    await engine.infer(rows(1))
        device.open()
        await first
        assert engine.statistics().expired == 1


async def test_tasks_and_threads_are_inside_that_were_started_there():
    async with asynctrt.open(double_model(), priorities=3) as engine:

        async def inside():
            return asked(engine)[1]

        with within(20, priority=2):
            task = asyncio.create_task(inside())
            in_thread = asyncio.create_task(asyncio.to_thread(limits_here))
        assert await inside() == 0
        assert await task == 2
        assert (await in_thread).priority == 2


async def test_the_function_of_a_pipeline():
    seen = []
    async with asynctrt.open(double_model(), priorities=3) as engine:

        async def stage(given):
            seen.append(asked(engine))
            return {"y": (await engine.infer(given["x"]))["output"]}

        async with Pipeline(stage, inputs=X, outputs=Y, priorities=3) as around:
            result = await around.infer(rows(1), timeout=20, priority=1)
            assert result["y"][0, 0] == 2
            with within(5, priority=2):
                await around.infer(rows(1), timeout=20)
            await around.infer(rows(1))
    (first, _), (second, _), _ = seen
    assert 19 < first <= 20
    assert second <= 5
    assert [priority for _, priority in seen] == [1, 2, 0]
    assert seen[2][0] is None


async def test_an_engine_outlives_the_work_that_opens_it():
    seen = []

    def double(inputs):
        seen.append(limits_here())
        return {"y": 2 * inputs["x"]}

    with within(0.001, priority=1):
        engine = await asynctrt.open(FunctionModel(double, inputs=X, outputs=Y))
    async with engine:
        await engine.infer(rows(1))
    assert seen == [None]


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_what_a_client_asks_of_a_server(scheme):
    device = LatchDevice(concurrency=1)
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(double_model(), device=device, contexts=1, max_rows=1) as engine,
        serve_locally({"double": engine}) as server,
        asynctrt.client.connect(server.http_url if scheme == "http" else server.websocket_url) as client,
    ):
        call = asyncio.create_task(client.infer("double", {"input": rows(1)}))
        await until(lambda: device.held)
        for left in (0, 0.05):
            with within(left), pytest.raises(DeadlineError):
                await client.infer("double", {"input": rows(1)})
        device.open()
        assert np.array_equal((await call)["output"], 2 * rows(1))


@pytest.mark.parametrize("settings", [{"timeout": -1}, {"timeout": "x"}, {"priority": -1}, {"priority": 1.5}])
def test_limits_that_are_none(settings):
    (name,) = settings
    with pytest.raises(InputError, match=f"{name} must be a"), within(**settings):
        pass
    assert limits_here() is None
