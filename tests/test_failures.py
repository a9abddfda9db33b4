"""Nothing of a failure is shared or kept: however a request ends, its caller's arrays die with it."""

import asyncio
import gc
import traceback
import weakref
from contextlib import asynccontextmanager
from types import TracebackType

import numpy as np
import pytest

import asynctrt
from asynctrt import FunctionModel, Pipeline, TensorSpec
from asynctrt.client import connect, connect_blocking
from asynctrt.errors import (
    CallerError,
    DeadlineError,
    DeviceLostError,
    DeviceUnavailableError,
    EngineClosedError,
    ExecutionError,
    InputError,
    OverloadError,
    PoisonError,
    QueueFullError,
)
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.serving.support import serving
from tests.workers import double, local
from tests.workers.models import SEGFAULT

pytestmark = pytest.mark.anyio

WIDTH = 1000
X, Y = TensorSpec("x", "float32", (WIDTH,)), TensorSpec("y", "float32", (WIDTH,))
KEPT_S = 2


class Watch:
    """Arrays of callers, and whether any is left."""

    def __init__(self):
        self.references = []

    def rows(self, count=1):
        array = np.ones((count, WIDTH), np.float32)
        self.references.append(weakref.ref(array))
        return array

    def left(self):
        return [reference for reference in self.references if reference() is not None]


@pytest.fixture(scope="module", autouse=True)
def others():
    """Leave what other modules made out of each collection, of which there are many here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def watch():
    """Nothing that is watched may be left, nor any traceback in a cycle, without the collector's help."""
    gc.collect()
    gc.disable()
    gc.freeze()  # What earlier tests have left does not count.
    try:
        yield Watch()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def all_gone(watch):
    """Check that all arrays die at once, and that no cycle of an error and its traceback is left."""
    assert watch.references
    async with asyncio.timeout(KEPT_S):
        await until(lambda: not watch.left())
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    cycles = [each for each in gc.garbage if type(each) is TracebackType]
    assert not cycles, "".join(traceback.format_tb(cycles[0]))


async def ends(call, *, with_error):
    """Await a call that fails so, and keep nothing of it."""
    try:
        with pytest.raises(with_error):
            await call
    finally:
        del call  # A future has its error, whose traceback has this frame.


async def cancelled(task):
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def fails(inputs):
    raise ValueError(f"bad: {inputs['x'].shape}")


async def fails_later(inputs):
    await asyncio.sleep(0)
    raise ValueError(f"bad: {inputs['x'].shape}")


def refuses(_inputs):
    raise InputError("not a picture")


def exits(_inputs):
    raise SystemExit(3)


def narrow(inputs):
    return inputs["x"][:, :3]


def same(inputs):
    return inputs["x"]


def named(inputs):
    return {"y": inputs["x"]}


def fails_twice(inputs):
    raise ExceptionGroup("both", [ValueError(inputs["x"].shape), KeyError("x")])


def model(function=same):
    return FunctionModel(function, inputs=X, outputs=Y)


FUNCTIONS = [fails, fails_later, refuses, narrow]


@pytest.mark.parametrize("submits", [False, True], ids=["infer", "submit"])
@pytest.mark.parametrize("rows", [1, 9], ids=["one batch", "split"])
class TestEngine:
    def call(self, engine, array, submits, **settings):
        return (engine.submit if submits else engine.infer)(array, **settings)

    @pytest.mark.parametrize("function", FUNCTIONS)
    @pytest.mark.parametrize("isolates", [False, True])
    async def test_a_batch_that_fails(self, watch, function, isolates, rows, submits):
        async with asynctrt.open(model(function), max_rows=4, idempotent=isolates) as engine:
            for _ in range(3):
                call = self.call(engine, watch.rows(rows), submits)
                await ends(call, with_error=ExecutionError)
                del call
            await all_gone(watch)

    async def test_one_part_that_fails(self, watch, rows, submits):
        def third(inputs):
            if inputs["x"].max() > 1:
                raise ValueError("bad")
            return inputs["x"]

        async with asynctrt.open(model(third), max_rows=4, idempotent=False) as engine:
            array = watch.rows(rows)
            array[-1] = 2
            call = self.call(engine, array, submits)
            await ends(call, with_error=ExecutionError)
            del call, array
            await all_gone(watch)

    async def test_inputs_that_do_not_fit(self, watch, rows, submits):
        async def infer():
            await self.call(engine, watch.rows(rows)[:, 1:], submits)

        async with asynctrt.open(model(), max_rows=4) as engine:
            await ends(infer(), with_error=InputError)
            await all_gone(watch)

    async def test_an_engine_that_is_closed(self, watch, rows, submits):
        async def infer():
            await self.call(engine, watch.rows(rows), submits)

        engine = await asynctrt.open(model(), max_rows=4)
        await engine.aclose()
        await ends(infer(), with_error=EngineClosedError)
        await all_gone(watch)

    async def test_what_cannot_be_put_on_a_stream(self, watch, rows, submits):
        class Refusing(FunctionModel):
            def create_context(self, device):
                context = super().create_context(device)
                bind = context.bind
                context.bind = lambda inputs, outputs: Refuses(bind(inputs, outputs))
                return context

        class Refuses:
            def __init__(self, binding):
                self.unbound_outputs = binding.unbound_outputs

            def enqueue(self, *_, **__):
                raise ValueError("no")

        refusing = Refusing(same, inputs=X, outputs=Y)
        async with asynctrt.open(refusing, max_rows=4, device=LatchDevice()) as engine:
            call = self.call(engine, watch.rows(rows), submits)
            await ends(call, with_error=ExecutionError)
            del call
            await all_gone(watch)

    @pytest.mark.parametrize("end", ["timeout", "cancel", "full", "displaced", "close", "hang"])
    async def test_what_waits_in_the_queue(self, watch, end, rows, submits):
        device = LatchDevice(concurrency=1)
        settings = {"close_timeout": 0.0} if end == "hang" else {}
        async with asynctrt.open(
            model(), device=device, contexts=1, max_rows=4, max_queue_rows=9, priorities=2, **settings
        ) as engine:
            first = asyncio.ensure_future(engine.infer(np.ones((4, WIDTH), np.float32)))
            await device.wait_held(1)
            if end == "full":
                second = asyncio.ensure_future(engine.infer(np.ones((9, WIDTH), np.float32)))
                await until(lambda: engine.statistics().queued_rows == 9)

                async def infer():
                    await self.call(engine, watch.rows(rows), submits)

                await ends(infer(), with_error=QueueFullError)
                device.open()
                await second
            else:
                timeout = 0.001 if end == "timeout" else None
                call = asyncio.ensure_future(self.call(engine, watch.rows(rows), submits, timeout=timeout))
                await until(lambda: engine.statistics().queued_rows == rows)
                if end == "timeout":
                    await ends(call, with_error=DeadlineError)
                elif end == "cancel":
                    await cancelled(call)
                elif end == "displaced":
                    urgent = engine.submit(np.ones((9, WIDTH), np.float32), priority=1)
                    await ends(call, with_error=OverloadError)
                    device.open()
                    await urgent
                else:
                    closing = asyncio.ensure_future(engine.aclose())
                    await ends(call, with_error=EngineClosedError)
                    if end == "close":
                        device.open()
                    await closing
                del call
            device.open()
            await asyncio.gather(first, return_exceptions=True)
            del first
            await all_gone(watch)

    async def test_what_is_cancelled_behind_others_in_the_queue(self, watch, rows, submits):
        device = LatchDevice(concurrency=1)
        async with asynctrt.open(model(), device=device, contexts=1, max_rows=4) as engine:
            others = [asyncio.ensure_future(engine.infer(np.ones((1, WIDTH), np.float32)))]
            await device.wait_held(1)
            others.append(asyncio.ensure_future(engine.infer(np.ones((1, WIDTH), np.float32))))
            await until(lambda: engine.statistics().queued_rows == 1)
            call = asyncio.ensure_future(self.call(engine, watch.rows(rows), submits))
            await until(lambda: engine.statistics().queued_rows == 1 + rows)
            await cancelled(call)
            del call
            await all_gone(watch)
            device.open()
            await asyncio.gather(*others)

    @pytest.mark.parametrize("end", ["cancel", "close", "batch_timeout"])
    async def test_what_runs(self, watch, end, rows, submits):
        go = asyncio.Event()

        async def waits(inputs):
            await go.wait()
            return inputs["x"]

        settings = {"cancel": {}, "close": {"close_timeout": 0.0}, "batch_timeout": {"batch_timeout": 0.05}}
        async with asynctrt.open(model(waits), max_rows=4, contexts=4, **settings[end]) as engine:
            call = asyncio.ensure_future(self.call(engine, watch.rows(rows), submits))
            await until(lambda: engine.statistics().in_flight_batches == -(-rows // 4))
            if end == "cancel":
                await cancelled(call)
                go.set()  # What runs reads the caller's arrays until it is over.
            elif end == "close":
                closing = asyncio.ensure_future(engine.aclose())
                await ends(call, with_error=DeviceLostError)
                await closing
            else:
                await ends(call, with_error=DeviceLostError)
            del call
            await all_gone(watch)


@pytest.mark.parametrize("mates", [0, 1])
async def test_an_array_that_changes_while_it_waits(watch, mates):
    async with asynctrt.open(model(), max_rows=4) as engine:
        others = [engine.submit(np.ones((1, WIDTH), np.float32)) for _ in range(mates)]
        array = watch.rows()
        call = engine.submit(array)
        array.shape = (WIDTH, 1)
        await ends(call, with_error=InputError)
        await asyncio.gather(*others)
        del call, array
        await all_gone(watch)


async def raises_in_coroutine(_items):
    await asyncio.sleep(0)
    raise ValueError("bad")


def raises_at_once(_items):
    raise ValueError("bad")


def fails_each(items):
    return [ValueError("bad") for _ in items]


def too_few(items):
    return items[1:]


@pytest.mark.parametrize("items", [False, True], ids=["stacked", "items"])
class TestBatch:
    @pytest.mark.parametrize("isolates", [False, True])
    @pytest.mark.parametrize("function", [raises_in_coroutine, raises_at_once, fails_each, too_few])
    async def test_a_function_that_fails(self, watch, function, isolates, items):
        decorated = asynctrt.batch(items=items, idempotent=isolates)(function)
        async with decorated:
            for _ in range(3):
                await ends(decorated(watch.rows()), with_error=(ValueError, ExecutionError))
            await all_gone(watch)

    async def test_groups_that_fail(self, watch, items):
        @asynctrt.batch(items=items, key="kind", max_rows=8)
        async def function(arrays, kind):
            await asyncio.sleep(0)
            raise ValueError(kind)

        async with function:
            for _ in range(3):
                calls = [asyncio.ensure_future(function(watch.rows(), kind)) for kind in range(4)]
                await asyncio.wait(calls)
                for call in calls:
                    assert isinstance(call.exception(), ExecutionError)
                del call, calls
            await all_gone(watch)

    @pytest.mark.parametrize("waits_in", ["queue", "batch"])
    @pytest.mark.parametrize("end", ["cancel", "close"])
    async def test_a_caller_who_goes_away(self, watch, end, waits_in, items):
        began = asyncio.Event()

        @asynctrt.batch(items=items, max_rows=1, close_timeout=0.0)
        async def function(_items):
            began.set()
            await asyncio.Event().wait()

        async with function:
            calls = [asyncio.ensure_future(function(watch.rows())) for _ in range(2)]
            await began.wait()
            await until(lambda: function.statistics().queued_requests == 1)
            if end == "cancel":
                calls = calls if waits_in == "batch" else calls[::-1]
                await cancelled(calls[0])
                await cancelled(calls[1])
            else:
                await function.aclose()
                await asyncio.wait(calls)
                for call in calls:
                    assert call.exception() is not None
                del call
            del calls
            if end == "cancel":
                await function.aclose()
            await all_gone(watch)


async def gives_nothing(_inputs):
    return {}


PIPELINE = [fails, fails_later, refuses, exits, narrow, fails_twice, gives_nothing]


@pytest.mark.parametrize("submits", [False, True], ids=["infer", "submit"])
class TestPipeline:
    def call(self, pipeline, array, submits, **settings):
        return (pipeline.submit if submits else pipeline.infer)(array, **settings)

    @pytest.mark.parametrize("function", PIPELINE)
    async def test_a_function_that_fails(self, watch, function, submits):
        async def stage(inputs):
            found = function(inputs)
            return await found if asyncio.iscoroutine(found) else found

        async with Pipeline(stage, inputs=X, outputs=Y) as pipeline:
            for _ in range(3):
                call = self.call(pipeline, watch.rows(), submits)
                await ends(call, with_error=(ExecutionError, InputError))
                del call
            await all_gone(watch)

    @pytest.mark.parametrize("rows", [1, 9])
    @pytest.mark.parametrize("function", FUNCTIONS)
    async def test_an_engine_that_fails(self, watch, function, rows, submits):
        async with (
            asynctrt.open(model(function), max_rows=4) as engine,
            Pipeline(engine.infer, inputs=X, outputs=Y) as pipeline,
        ):
            call = self.call(pipeline, watch.rows(rows), submits)
            await ends(call, with_error=ExecutionError)
            del call
            await all_gone(watch)

    @pytest.mark.parametrize("end", ["cancel", "close", "full"])
    async def test_what_is_under_way(self, watch, end, submits):
        began = asyncio.Event()

        async def stage(inputs):
            began.set()
            await asyncio.Event().wait()

        async with Pipeline(stage, inputs=X, outputs=Y, max_in_flight=1, close_timeout=0.0) as pipeline:
            call = asyncio.ensure_future(self.call(pipeline, watch.rows(), submits))
            await began.wait()
            if end == "cancel":
                await cancelled(call)
            elif end == "close":
                await pipeline.aclose()
                await ends(call, with_error=EngineClosedError)
            else:

                async def infer():
                    await self.call(pipeline, watch.rows(), submits)

                await ends(infer(), with_error=QueueFullError)
                await cancelled(call)
            del call
            await all_gone(watch)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rows", [1, 4])
async def test_a_worker_s_batch_that_fails(watch, function, rows):
    async with local.opened(model(function), device="host", max_rows=4) as (isolated, _, _):
        for _ in range(3):
            await ends(isolated.infer(watch.rows(rows)), with_error=ExecutionError)
        await all_gone(watch)


@pytest.mark.parametrize("mates", [0, 1])
async def test_an_array_that_changes_before_a_worker_has_it(watch, mates):
    async with double.workers(model()), asynctrt.open("double", isolation="process") as engine:
        others = [asyncio.ensure_future(engine.infer(np.ones((1, WIDTH), np.float32))) for _ in range(mates)]
        array = watch.rows()
        call = asyncio.ensure_future(engine.infer(array))
        await until(lambda: engine.statistics().submitted == mates + 1)
        array.shape = (WIDTH, 1)
        await ends(call, with_error=InputError)
        await asyncio.gather(*others)
        del call, array
        await all_gone(watch)


@pytest.mark.parametrize("end", ["cancel", "close", "die"])
async def test_what_a_worker_has(watch, end):
    async with (
        double.workers(model()) as workers,
        asynctrt.open("double", isolation="process", close_timeout=0.0) as engine,
    ):
        rows = watch.rows()
        workers.all[0].holds = end != "die"
        if end == "die":
            rows[:] = SEGFAULT
        call = asyncio.ensure_future(engine.infer(rows))
        del rows
        if end == "die":
            await ends(call, with_error=PoisonError)
        else:
            await until(lambda: engine.statistics().submitted == 1)
        if end == "cancel":
            await cancelled(call)
        elif end == "close":
            closing = asyncio.ensure_future(engine.aclose())
            await ends(call, with_error=EngineClosedError)
            await closing
        del call
        await all_gone(watch)


def url_of(server, kind):
    return server.http_url if kind == "http" else server.http_url.replace("http", "ws", 1) + "/v2/ws"


@asynccontextmanager
async def connected(kind, function=same, **settings):
    async with (
        serving({"x": model(function)}, engine={"close_timeout": 0.0}, drain_timeout=0.0) as server,
        connect(url_of(server, kind), **settings) as client,
    ):
        yield server, client


@pytest.mark.parametrize("kind", ["http", "ws"])
class TestClients:
    @pytest.mark.parametrize("function", FUNCTIONS)
    async def test_a_batch_that_fails(self, watch, function, kind):
        async with connected(kind, function) as (_, client):
            for _ in range(3):
                await ends(client.infer("x", watch.rows()), with_error=ExecutionError)
            await all_gone(watch)

    async def test_what_the_server_refuses(self, watch, kind):
        async with connected(kind) as (_, client):
            await ends(client.infer("x", watch.rows()[:, 1:]), with_error=CallerError)
            await ends(client.infer("y", {"x": watch.rows()}), with_error=CallerError)
            await all_gone(watch)

    async def test_a_call_that_blocks_a_thread(self, watch, kind):
        def infer():
            with pytest.raises(ExecutionError):
                client.infer("x", watch.rows())

        async with connected(kind, fails) as (server, _):
            client = connect_blocking(url_of(server, kind))
            await asyncio.to_thread(client.__enter__)
            await asyncio.to_thread(infer)
            await all_gone(watch)
            await asyncio.to_thread(client.close)

    @pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
    async def test_what_is_under_way(self, watch, kind, end):
        began = asyncio.Event()

        async def stays(inputs):
            began.set()
            await asyncio.Event().wait()

        settings = {"deadline": 0.1} if end == "deadline" else {}
        async with connected(kind, stays) as (_, client):
            call = asyncio.ensure_future(client.infer("x", watch.rows(), **settings))
            await began.wait()
            if end == "cancel":
                await cancelled(call)
            elif end == "deadline":
                await ends(call, with_error=DeadlineError)
            else:
                await client.aclose()
                await ends(call, with_error=asynctrt.errors.AsynctrtError)
            del call
            await all_gone(watch)


class NotFoundError(Exception):
    """Takes something else than its message, as many classes of applications do."""

    def __init__(self, key, *, where):
        super().__init__(f"no {key!r} in {where}")
        self.key = key


class UncopyableError(Exception):
    def __init__(self, *, code):
        super().__init__()
        self.code = code

    def __str__(self):
        return f"code {self.code}"

    def __copy__(self):
        raise TypeError("there is one of me")


def with_cause(error):
    error.__cause__ = KeyError("why")
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        NotFoundError("x", where="y"),
        UncopyableError(code=3),
        FileNotFoundError(2, "no such file", "x"),
        UnicodeDecodeError("utf8", b"x", 0, 1, "bad"),
        ExceptionGroup("both", [ValueError(1)]),
        with_cause(LookupError("no")),
        InputError("not a picture"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_each_caller_has_an_exception_of_its_own(error):
    @asynctrt.batch(items=True)
    def fails_for_all(items):
        return [error] * len(items)

    async with fails_for_all:
        depths = []
        for _ in range(3):
            given = await asyncio.gather(*map(fails_for_all, range(4)), return_exceptions=True)
            assert len({id(each) for each in (error, *given)}) == 5
            for each in given:
                assert type(each) is type(error)
                assert str(each) == str(error)
                assert vars(each) == vars(error)
                assert each.__cause__ is error.__cause__
                depths.append(len(traceback.extract_tb(each.__traceback__)))
        assert error.__traceback__ is None
        assert len(set(depths)) == 1


async def test_an_exception_that_was_raised_before_is_the_cause():
    try:
        raise ValueError("no")
    except ValueError as caught:
        error = caught
    depth = len(traceback.extract_tb(error.__traceback__))

    @asynctrt.batch(items=True)
    def fails_for_all(items):
        return [error] * len(items)

    async with fails_for_all:
        with pytest.raises(ValueError, match="no") as caught:
            await fails_for_all(1)
    assert caught.value is not error
    assert caught.value.__cause__ is error
    assert len(traceback.extract_tb(error.__traceback__)) == depth


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), StopIteration(5), asyncio.CancelledError("by x")],
)
@pytest.mark.parametrize("waits", [False, True])
async def test_what_is_no_exception_of_a_caller_is_an_error_of_its_item_alone(error, waits):
    @asynctrt.batch(items=True)
    def function(items):
        return [error if item == 1 else item for item in items]

    @asynctrt.batch(items=True)
    async def function_that_waits(items):
        await asyncio.sleep(0)
        return [error if item == 1 else item for item in items]

    decorated = function_that_waits if waits else function
    async with decorated:
        given = await asyncio.gather(*map(decorated, range(3)), return_exceptions=True)
    assert (given[0], given[2]) == (0, 2)
    assert type(given[1]) is ExecutionError
    assert type(error).__name__ in str(given[1])
    assert given[1].__cause__ is error
    assert error.__traceback__ is None


async def test_an_engine_that_does_not_open_for_anybody_is_no_unseen_error(monkeypatch, caplog):
    async def refuse(*_, **__):
        for _ in range(3):
            await asyncio.sleep(0)
        opened.append(True)
        raise DeviceUnavailableError("no threads are left")

    opened = []
    monkeypatch.setattr("asynctrt.batching.open_engine", refuse)
    call = asyncio.ensure_future(asynctrt.batch(lambda x: x)(1))
    await asyncio.sleep(0)
    await cancelled(call)
    await until(lambda: opened)
    await asyncio.sleep(0)
    gc.collect()
    assert not caplog.records


async def test_callers_who_wait_for_an_engine_that_does_not_open_have_each_an_exception(monkeypatch):
    async def refuse(*_, **__):
        raise DeviceUnavailableError("no threads are left")

    monkeypatch.setattr("asynctrt.batching.open_engine", refuse)
    decorated = asynctrt.batch(lambda x: x)
    given = await asyncio.gather(*map(decorated, range(3)), return_exceptions=True)
    assert [type(each) for each in given] == [DeviceUnavailableError] * 3
    assert len({id(each) for each in given}) == 3
