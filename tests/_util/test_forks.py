"""What a forked child has of its parent says so at the first call, and the parent does not notice."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import asynctrt
from asynctrt import FunctionModel, HostDevice, Pipeline, TensorSpec
from asynctrt.client import connect, connect_blocking
from asynctrt.devices.arenas import Arenas
from asynctrt.testing import serve_locally
from tests.helpers import WAIT_S
from tests.models import double_model, rows

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform"),
]
SPECS = {"inputs": TensorSpec("x", "float32", (4,)), "outputs": TensorSpec("y", "float32", (4,))}
ROOT = Path(__file__).parent.parent.parent


def forked(function):
    """Return what a function returns in a child, as JSON; one that waits is ended."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # There are threads.
        pid = os.fork()
    if not pid:
        signal.alarm(WAIT_S)
        try:
            os.write(writing, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        text = said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child waited"
    return json.loads(text)


def outcome(call):
    """Return what comes of a call where no loop runs: its error, or that it would wait."""
    try:
        given = call()
        if inspect.iscoroutine(given):
            given.send(None)
            given.close()
            return "waits"
    except asynctrt.UsageError as error:
        return f"UsageError: {error}"
    except BaseException as error:
        return type(error).__name__
    return "passes"


def on_a_loop(call):
    """Return what comes of a call on a new loop."""

    async def run():
        given = call()
        return await given if inspect.iscoroutine(given) else given

    return outcome(lambda: asyncio.run(asyncio.wait_for(run(), 10)))


def enter(one):
    async def entered():
        async with one:
            pass

    return entered()


def trace(engine):
    with engine.tracing():
        pass


def calls_of(engine):
    """Return what every engine can be asked."""
    given = np.zeros((1, 4), np.float32)
    return {
        "enter": lambda: enter(engine),
        "infer": lambda: engine.infer(given),
        "submit": lambda: engine.submit(given),
        "statistics": engine.statistics,
        "drain": engine.drain,
        "aclose": engine.aclose,
    }


@asynccontextmanager
async def an_engine():
    async with asynctrt.open(FunctionModel(lambda given: given["x"], **SPECS)) as engine:
        yield calls_of(engine) | {"tracing": lambda: trace(engine)}
        await engine.infer(np.zeros((1, 4), np.float32))


@asynccontextmanager
async def a_pipeline():
    async def same(given):
        return {"y": given["x"]}

    async with Pipeline(same, **SPECS) as pipeline:
        yield calls_of(pipeline)
        await pipeline.infer(np.zeros((1, 4), np.float32))


@asynccontextmanager
async def a_worker_engine():
    async with asynctrt.open("tests.workers.models:kind", isolation="process") as engine:
        yield calls_of(engine)
        await engine.infer(np.zeros((1, 4), np.float32))


@asynccontextmanager
async def a_device():
    device = HostDevice()
    stream = device.create_stream()
    yield {
        "a stream": device.create_stream,
        "allocate": lambda: device.allocate(8),
        "partition": lambda: device.partition(0.5),
        "an engine on it": lambda: asynctrt.open(double_model(), device=device)._open(),
        "launch": lambda: stream.launch(print),
        "close": device.close,
    }
    assert stream.close(WAIT_S)


@asynccontextmanager
async def arenas():
    device = HostDevice()
    with Arenas(device, 1) as shared:
        yield {
            "an engine in them": lambda: asynctrt.open(
                double_model(), device=device, shared_arenas=shared
            )._open(),
            "reserve": lambda: shared.reserve(8),
            "close": shared.close,
        }


def a_client(scheme):
    @asynccontextmanager
    async def opened():
        async with (
            serve_locally({"double": double_model()}) as server,
            connect(getattr(server, f"{scheme}_url")) as client,
        ):
            yield {
                "infer": lambda: client.infer("double", {"input": rows(1)}),
                "metadata": lambda: client.metadata("double"),
                "aclose": client.aclose,
            }
            await client.infer("double", {"input": rows(1)})

    return opened


@asynccontextmanager
async def a_blocking_client():
    async with serve_locally({"double": double_model()}) as server:
        client = await asyncio.to_thread(connect_blocking(server.http_url).__enter__)
        yield {
            "infer": lambda: client.infer("double", {"input": rows(1)}),
            "submit": lambda: client.submit("double", {"input": rows(1)}),
            "metadata": lambda: client.metadata("double"),
            "close": client.close,
        }
        await asyncio.to_thread(client.infer, "double", {"input": rows(1)})
        await asyncio.to_thread(client.close)


@asynccontextmanager
async def a_server():
    async with serve_locally({"double": double_model()}) as server:
        yield {"start": server.start, "stop": server.stop}


KINDS = {
    "server": a_server,
    "engine": an_engine,
    "pipeline": a_pipeline,
    "worker engine": a_worker_engine,
    "device": a_device,
    "arenas": arenas,
    "HTTP client": a_client("http"),
    "websocket client": a_client("websocket"),
    "blocking client": a_blocking_client,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [outcome, on_a_loop])
async def test_every_call_in_a_child_says_whose_it_is(kind, where):
    async with asyncio.timeout(WAIT_S), KINDS[kind]() as calls:
        found = forked(lambda: {name: where(call) for name, call in calls.items()})
    wrong = {
        name: said
        for name, said in found.items()
        if not (said.startswith("UsageError: ") and "forked from it" in said and "spawn" in said)
    }
    if where is outcome:  # To open an engine takes a loop.
        wrong = {name: said for name, said in wrong.items() if not name.startswith("an engine")}
    assert not wrong


async def test_a_function_has_another_engine_in_a_child():
    """Servers that fork their workers have decorated it before."""

    @asynctrt.batch
    def double(x):
        return 2 * x

    async def call():
        async with double:
            return int(await double(2))

    async with double:
        assert await double(1) == 2
        engine = double.engine
        assert forked(lambda: asyncio.run(call())) == 4
        assert "forked from it" in forked(lambda: outcome(lambda: engine.aclose()))
        assert await double(3) == 6


ENDS = """
import asyncio, os, sys
import numpy as np
import asynctrt

async def main():
    async with asynctrt.open("tests.workers.models:kind", isolation="process", max_rows=4) as engine:
        async def ask(value):
            answer = await engine.infer(np.full((1, 4), value, np.float32))
            assert answer["y"][0, 0] == 2 * value

        for turn in range(5):
            under_way = [asyncio.ensure_future(ask(value)) for value in range(1, 41)]
            await asyncio.sleep(0)
            child = os.fork()
            if not child:
                sys.exit(3)
            await asyncio.gather(*under_way)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            await asyncio.gather(*[ask(value) for value in range(100, 140)])
        assert engine.statistics().submitted == 400

asyncio.run(asyncio.wait_for(main(), 25))
"""


@pytest.mark.tier2
def test_a_child_that_ends_with_its_parents_loop_leaves_the_workers_alone():
    """Its copies of tasks are cancelled, and its copies of engines are left."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
