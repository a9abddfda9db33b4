"""Where a user's function runs: in a thread, the same one with one context, or on the loop if told so."""

import asyncio
import logging
import sqlite3
import threading

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.host.streams import HELD_NS
from asynctrt.tensors import TensorSpec
from asynctrt.testing.latch import LatchDevice

pytestmark = pytest.mark.anyio

WAIT_S = 20
QUICK_CALLS = 300
SPECS = {"inputs": TensorSpec("x", "float32", ()), "outputs": TensorSpec("y", "float32", ())}
ROW = {"x": np.ones(1, np.float32)}


def here():
    return threading.get_ident()


async def after_quick_calls(last, **settings):
    """Call a decorated function often enough to be known as quick, and then with something to do."""

    @asynctrt.batch(items=True, **settings)
    def call(items):
        return [item() for item in items]

    async with call:
        for _ in range(QUICK_CALLS):
            await call(here)
        return await asyncio.wait_for(call(last), WAIT_S)


async def test_a_function_that_was_quick_may_wait_for_the_loop():
    loop = asyncio.get_running_loop()

    async def on_the_loop():
        return threading.get_ident()

    def wait():
        # With a time limit, as the loop would stand still if it were the one that waits.
        return asyncio.run_coroutine_threadsafe(on_the_loop(), loop).result(WAIT_S / 4)

    assert await after_quick_calls(wait) == here()


async def test_a_function_that_was_quick_may_run_a_loop_of_its_own():
    assert await after_quick_calls(lambda: asyncio.run(asyncio.sleep(0, "ran"))) == "ran"


@pytest.mark.parametrize("kind", ["decorated", "model", "model on a shared device"])
async def test_with_one_context_it_is_the_same_thread_for_thousands_of_calls(kind):
    threads = set()

    def note(inputs):
        threads.add(here())
        return inputs["x"]

    if kind == "decorated":

        @asynctrt.batch
        def call(x):
            threads.add(here())
            return x

        async with call:
            for _ in range(3000):
                await call(1.0)
    else:
        device = asynctrt.HostDevice(threads=3)
        others = [
            asynctrt.FunctionModel(lambda inputs: inputs["x"], **SPECS)
            for _ in range(2 * (kind == "model on a shared device"))
        ]
        engines = [await asynctrt.open(other, device=device, contexts=2) for other in others]
        async with asynctrt.open(asynctrt.FunctionModel(note, **SPECS), device=device, contexts=1) as engine:
            for _ in range(1000):
                await asyncio.gather(*(one.infer(ROW) for one in (engine, *engines, engine)))
        for one in engines:
            await one.aclose()
    assert len(threads) == 1
    assert here() not in threads


async def test_a_connection_that_belongs_to_its_thread_works():
    kept = threading.local()

    @asynctrt.batch(items=True)
    def call(items):
        if not hasattr(kept, "connection"):
            kept.connection = sqlite3.connect(":memory:")
            kept.connection.execute("create table seen (item)")
        kept.connection.executemany("insert into seen values (?)", [(item,) for item in items])
        (seen,) = kept.connection.execute("select count(*) from seen").fetchone()
        return [seen] * len(items)

    async with call:
        assert [await call(number) for number in range(QUICK_CALLS)] == list(range(1, QUICK_CALLS + 1))


class Launching(asynctrt.FunctionModel):
    """A model of a user's own, which puts its work on the stream by itself, as it did with a label."""

    def __init__(self, threads):
        super().__init__(lambda inputs: inputs["x"], **SPECS)
        self.threads = threads

    def create_context(self, device):
        return self

    def bind(self, inputs, outputs):
        self.memory = inputs[0].array, outputs[0].array
        return self

    def enqueue(self, rows, *, profile, stream, arena):
        def work():
            self.threads.add(here())
            self.memory[1][:rows] = self.memory[0][:rows]

        stream.launch(work, label=rows)

    def unbound_outputs(self, rows):
        return {}


async def test_work_that_a_model_of_ones_own_launches_stays_in_its_thread():
    threads = set()
    async with asynctrt.open(Launching(threads), contexts=1) as engine:
        for _ in range(QUICK_CALLS):
            await engine.infer(ROW)
    assert len(threads) == 1
    assert here() not in threads


@pytest.mark.parametrize("unified", [True, False])
async def test_a_plain_function_that_returns_awaitables_is_called_in_a_thread(unified):
    """What follows a batch that was awaited on the loop does not run there, either."""
    called, awaited = set(), set()

    async def later(x):
        awaited.add(here())
        return x

    def call(inputs):
        called.add(here())
        return later(inputs["x"].copy())

    device = asynctrt.HostDevice(unified=unified)
    async with asynctrt.open(asynctrt.FunctionModel(call, **SPECS), device=device, contexts=1) as engine:
        for _ in range(QUICK_CALLS):
            await asyncio.gather(*(engine.infer(ROW) for _ in range(3)))
    assert awaited == {here()}
    assert len(called) == 1
    assert here() not in called


DEVICES = {
    "host": asynctrt.HostDevice,
    "separate memory": lambda: asynctrt.HostDevice(unified=False),
    "never in place": lambda: asynctrt.HostDevice(in_place="never"),
    "never in place, separate memory": lambda: asynctrt.HostDevice(in_place="never", unified=False),
    "always in place": lambda: asynctrt.HostDevice(in_place="always"),
}


@pytest.mark.parametrize("device", DEVICES)
async def test_a_function_for_the_loop_runs_there_from_the_first_call(device):
    threads, loops = set(), set()

    def call(inputs):
        threads.add(here())
        loops.add(asyncio.get_running_loop())
        return inputs["x"]

    model = asynctrt.FunctionModel(call, **SPECS, run_on="loop")
    async with asynctrt.open(model, device=DEVICES[device]()) as engine:
        for number in range(50):
            answers = await asyncio.gather(*(engine.infer({"x": ROW["x"] * number}) for _ in range(3)))
            assert [answer["y"].tolist() for answer in answers] == [[number]] * 3
    assert threads == {here()}
    assert loops == {asyncio.get_running_loop()}


@pytest.mark.parametrize("device", DEVICES)
async def test_what_a_function_for_the_loop_raises_fails_its_batch_alone(device):
    def call(inputs):
        if inputs["x"][0] < 0:
            raise ValueError("negative")
        return inputs["x"]

    model = asynctrt.FunctionModel(call, **SPECS, run_on="loop")
    async with asynctrt.open(model, device=DEVICES[device](), max_rows=1) as engine:
        for _ in range(3):
            with pytest.raises(asynctrt.ExecutionError) as caught:
                await engine.infer({"x": -ROW["x"]})
            assert isinstance(caught.value.__cause__, ValueError)
            assert (await engine.infer(ROW))["y"].tolist() == [1.0]


async def test_a_decorated_function_for_the_loop_runs_there():
    assert await after_quick_calls(here, run_on="loop") == here()

    class Service:
        @asynctrt.batch(run_on="loop")
        def call(self, x):
            return [here()] * len(x)

    service = Service()
    async with service.call:
        assert await service.call(1.0) == here()


async def test_a_latch_holds_a_function_for_the_loop_as_any_other():
    threads = set()

    def call(inputs):
        threads.add(here())
        return inputs["x"]

    device = LatchDevice()
    async with asynctrt.open(asynctrt.FunctionModel(call, **SPECS, run_on="loop"), device=device) as engine:
        task = asyncio.create_task(engine.infer(ROW))
        await device.wait_held(1)
        assert not threads
        device.release()
        await asyncio.wait_for(task, WAIT_S)
        device.open()
    assert threads == {here()}


@pytest.mark.parametrize("wrong", ["threads", "auto", None, True, 1, "x" * 10_000])
def test_what_is_no_place_to_run_is_refused(wrong):
    expected = r"run_on must be 'thread' or 'loop', not "
    with pytest.raises(asynctrt.OptionsError, match=expected) as caught:
        asynctrt.batch(run_on=wrong)
    assert len(str(caught.value)) < 500
    with pytest.raises(asynctrt.OptionsError, match=expected):
        asynctrt.FunctionModel(lambda inputs: inputs["x"], **SPECS, run_on=wrong)


def test_work_for_the_loop_needs_one():
    device = asynctrt.HostDevice()
    stream = device.create_stream()
    with pytest.raises(asynctrt.ExecutionError, match="none is running"):
        stream.launch(lambda: None, run_on="loop")
    assert stream.close(WAIT_S)


class Held:
    """Functions that hold the loop for a given time, of a clock that nothing waits for."""

    def __init__(self, monkeypatch):
        self.ns = 0
        monkeypatch.setattr("asynctrt._util.clock.now_ns", lambda: self.ns)

    def plain(self, inputs):
        self.ns += int(inputs["x"][0]) * HELD_NS // 2
        return inputs["x"]

    async def coroutine(self, inputs):
        await asyncio.sleep(0)
        self.ns += int(inputs["x"][0]) * HELD_NS // 2
        await asyncio.sleep(0)
        return inputs["x"]


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
@pytest.mark.parametrize("in_place", ["auto", "never"])
async def test_what_holds_the_loop_for_long_is_logged_with_its_name(kind, in_place, monkeypatch, caplog):
    held = Held(monkeypatch)
    device = asynctrt.HostDevice(in_place=in_place, now_ns=lambda: held.ns)
    model = asynctrt.FunctionModel(getattr(held, kind), **SPECS, name="the culprit", run_on="loop")
    async with asynctrt.open(model, device=device, batch_timeout=None, max_rows=1) as engine:
        with caplog.at_level(logging.WARNING, "asynctrt"):
            await engine.infer({"x": ROW["x"]})
            assert not caplog.messages
            await engine.infer({"x": 3 * ROW["x"]})
    (message,) = caplog.messages
    assert message.startswith("'the culprit' held the event loop for 150 ms")


async def test_what_takes_long_in_a_thread_is_not_logged(monkeypatch, caplog):
    held = Held(monkeypatch)
    device = asynctrt.HostDevice(now_ns=lambda: held.ns)
    model = asynctrt.FunctionModel(held.plain, **SPECS)
    async with asynctrt.open(model, device=device, batch_timeout=None) as engine:
        await engine.infer({"x": 30 * ROW["x"]})
    assert not caplog.messages


async def test_a_hung_batch_leaves_its_place_to_another_thread():
    """And what other engines have waiting for the thread that hangs runs as well."""
    go, threads = threading.Event(), []

    def call(inputs):
        threads.append(here())
        if inputs["x"][0] < 0:
            assert go.wait(WAIT_S)
        return inputs["x"]

    device = asynctrt.HostDevice(threads=1)
    hanging = asynctrt.FunctionModel(call, **SPECS)
    other = asynctrt.FunctionModel(call, **SPECS)
    try:
        async with (
            asynctrt.open(other, device=device, contexts=1) as second,
            asynctrt.open(hanging, device=device, contexts=1, batch_timeout=0.05, close_timeout=0.1) as first,
        ):
            await first.infer(ROW)
            await second.infer(ROW)
            stuck = asyncio.create_task(first.infer({"x": -ROW["x"]}))
            while len(threads) < 3:
                await asyncio.sleep(0)
            behind = asyncio.create_task(second.infer(ROW))
            with pytest.raises(asynctrt.DeviceLostError):
                await asyncio.wait_for(stuck, WAIT_S)
            await asyncio.wait_for(behind, WAIT_S)
            await asyncio.wait_for(second.infer(ROW), WAIT_S)
            go.set()
    finally:
        go.set()
    assert threads[0] == threads[1] == threads[2]
    assert len(set(threads[3:])) == 1
    assert threads[3] != threads[0]
