"""A system that refuses threads (ulimit -u, pids.max): everybody is answered, and all can be closed."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host.threads import StreamThreads
from asynctrt.errors import ExecutionError
from asynctrt.tensors import TensorSpec
from tests.helpers import WAIT_S
from tests.models import double_model
from tests.runtime.support import ScratchModel
from tests.workers.double import workers
from tests.workers.models import ROW, rows

pytestmark = pytest.mark.anyio
WIDE = 1 << 20


class Refused:
    """Says of which threads no more start: by the beginnings of their names."""

    def __init__(self, monkeypatch):
        self.names = ()
        start = threading.Thread.start

        def refuse(thread):
            if thread.name.startswith(self.names or ("no thread",)):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture
def refused(monkeypatch):
    return Refused(monkeypatch)


def wide(**settings):
    """Doubles rows that are copied in a thread, of as many values as they have."""
    model = FunctionModel(
        lambda inputs: {"y": 2 * inputs["x"]},
        inputs=TensorSpec("x", "float32", ("n",)),
        outputs=TensorSpec("y", "float32", ("n",)),
    )
    return asynctrt.open(model, max_rows=4, idempotent=False, **settings)


def wide_rows():
    return np.ones((1, 2 * WIDE), np.float32)


@pytest.mark.parametrize("is_warm", [False, True])
async def test_no_thread_to_copy_in(refused, is_warm):
    """Neither for the rows nor, where their shape is new, for the memory that they need."""
    async with asyncio.timeout(WAIT_S), wide() as engine:
        if is_warm:
            await engine.infer(wide_rows())
        refused.names = ("asynctrt-copy",)
        answers = await asyncio.gather(*[engine.infer(wide_rows()) for _ in range(4)], return_exceptions=True)
        assert {type(answer) for answer in answers} == {asynctrt.InferResult if is_warm else ExecutionError}
        refused.names = ()
        for _ in range(3):
            assert (await engine.infer(wide_rows()))["y"][0, -1] == 2
    assert engine.state == "closed"


async def test_no_thread_to_join_the_parts_of_a_call_in(refused, monkeypatch):
    monkeypatch.setattr("asynctrt.core.splitting.COPY_ON_LOOP_NBYTES_MAX", 64)
    refused.names = ("asynctrt-copy",)
    async with asyncio.timeout(WAIT_S), asynctrt.open(double_model(), max_rows=2) as engine:
        answer = await engine.infer(rows(*range(16)))
        np.testing.assert_array_equal(answer["output"], 2 * rows(*range(16)))
    assert engine.state == "closed"


@pytest.mark.parametrize("arenas", [0, 1])
async def test_no_thread_for_an_enqueue_that_waits(refused, arenas):
    model = ScratchModel() if arenas else FunctionModel(lambda given: 2 * given["x"], inputs=ROW, outputs=ROW)
    model.capabilities = replace(model.capabilities, enqueue_may_block=True)
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, contexts=2, max_rows=2) as engine:
        refused.names = ("asynctrt-enqueue",)
        for _ in range(3):
            answers = await asyncio.gather(*[engine.infer(rows(1, 2)) for _ in range(8)])
            assert all(next(iter(answer.values()))[1, 0] == 4 for answer in answers)
        refused.names = ()
        await asyncio.gather(*[engine.infer(rows(1, 2)) for _ in range(8)])
    assert engine.state == "closed"


async def test_no_thread_to_stage_and_enqueue_in(refused):
    model = FunctionModel(
        lambda given: 2 * given["x"],
        inputs=TensorSpec("x", "float32", (WIDE,)),
        outputs=TensorSpec("y", "float32", (WIDE,)),
    )
    model.capabilities = replace(model.capabilities, enqueue_may_block=True)
    array = np.ones((4, WIDE), np.float32)
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, max_rows=4) as engine:
        for names in (("asynctrt-enqueue",), ("asynctrt-copy",), ()):
            refused.names = names
            answers = await asyncio.gather(
                *[engine.infer(number * array) for number in range(3)], return_exceptions=True
            )
            for number, answer in enumerate(answers):
                if names != ("asynctrt-enqueue",):
                    assert not isinstance(answer, Exception) or "new thread" in str(answer)
                if not isinstance(answer, Exception):
                    assert (answer["y"] == 2 * number).all()
        assert not isinstance(answers[0], Exception)
    assert engine.state == "closed"


async def test_no_thread_to_open_and_close_in(refused):
    refused.names = ("asynctrt-open",)
    async with asyncio.timeout(WAIT_S), wide() as engine:
        assert (await engine.infer(np.ones((1, 4), np.float32)))["y"].sum() == 8
    assert engine.state == "closed"
    with pytest.raises(asynctrt.ModelNotFoundError):
        await asynctrt.open("nowhere.onnx")


@pytest.mark.tier2
async def test_no_thread_to_copy_in_for_a_worker(refused):
    model = "tests.workers.models:large"
    async with workers(model), asynctrt.open(model, isolation="process") as engine:
        array = np.ones((5, 1 << 20), np.uint8)
        for names in (("asynctrt-copy",), (), ("asynctrt-copy",)):
            refused.names = names
            answers = await asyncio.gather(*[engine.infer(number * array) for number in range(4)])
            assert all((answer["y"] == 2 * number).all() for number, answer in enumerate(answers))
    assert engine._front._heap.blocks == 0


def test_those_threads_that_there_are_serve_what_none_is_started_for(refused):
    threads = StreamThreads(4, "served", lambda: 0)
    threads.join()
    refused.names = ("served",)

    class Served:
        def __init__(self):
            self.done = threading.Event()
            self.gate = threading.Event()

        def serve(self):
            self.gate.wait(WAIT_S)
            self.done.set()

    ones = [Served() for _ in range(4)]
    with pytest.raises(RuntimeError, match="new thread"):
        threads.schedule(ones[0])
    assert threads._tickets == 0, "nobody serves it, so nobody hands its ticket back"
    refused.names = ()
    threads.schedule(ones[0])
    refused.names = ("served",)
    for one in ones[1:]:
        threads.schedule(one)
    for one in ones:
        one.gate.set()
        assert one.done.wait(WAIT_S)
    assert threads.leave(WAIT_S)
