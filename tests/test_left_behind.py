"""What is never closed ends with its loop or its last reference: threads and descriptors.

What is closed leaves nothing in cycles: ``tune_process`` keeps the collector from ever looking at them.
"""

import asyncio
import gc
import os
import threading
import time
import warnings
import weakref

import numpy as np
import psutil
import pytest
import uvloop

import asynctrt
from asynctrt import FunctionModel, TensorSpec
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from asynctrt.runtime.results import ResultMemory
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan
from tests.helpers import WAIT_S
from tests.models import double_onnx, rows

SPECS = {"inputs": TensorSpec("x", "float32", (4,)), "outputs": TensorSpec("y", "float32", (4,))}

LARGE = 1 << 16
"""The values of a row whose memory is used again."""

pytestmark = pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")


def copied(inputs):
    return inputs["x"].copy()


def large_rows():
    return FunctionModel(
        copied, inputs=TensorSpec("x", "float32", (LARGE,)), outputs=TensorSpec("y", "float32", (LARGE,))
    )


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def have_ended(threads):
    return not any(thread.is_alive() for thread in threads)


def collect_until(condition):
    """Collect garbage, of which threads that end let go, until the condition holds."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        gc.collect()
        time.sleep(0.001)


def closed_by_hand(call, make=asyncio.new_event_loop):
    """Run a call on a loop that is closed without the steps of a runner."""
    loop = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        loop.run_until_complete(call)
        loop.close()


async def ask(**settings):
    """Open an engine, ask it, and leave it open; return its threads."""
    before = set(threading.enumerate())
    engine = await asynctrt.open(FunctionModel(copied, **SPECS), **settings)
    await engine.infer(rows(1))
    return set(threading.enumerate()) - before


def test_an_engine_of_a_loop_that_was_closed_by_hand():
    threads = set()

    async def keep():
        threads.update(await ask())

    closed_by_hand(keep())
    collect_until(lambda: have_ended(threads))
    before = descriptors()
    for _ in range(5):
        closed_by_hand(keep())
    collect_until(lambda: have_ended(threads) and descriptors() <= before)
    assert len(threads) >= 6


@pytest.mark.anyio
async def test_an_engine_without_a_reference_is_closed_on_its_loop():
    before = descriptors()
    threads = await ask()
    async with asyncio.timeout(WAIT_S):
        while not have_ended(threads) or descriptors() > before:
            gc.collect()
            await asyncio.sleep(0.001)
    assert threads


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_functions_leave_nothing_of_loops_that_were_closed_by_hand(make):
    @asynctrt.batch
    def double(x):
        return 2 * x

    async def call():
        before = set(threading.enumerate())
        assert await double(1) == 2
        threads.append(set(threading.enumerate()) - before)

    threads = []
    for _ in range(5):
        closed_by_hand(call(), make)
    collect_until(lambda: have_ended(set.union(*threads)))
    assert all(threads)


@pytest.mark.tier2
@pytest.mark.filterwarnings("ignore:(subprocess .* is still running|unclosed <socket):ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_engine_with_a_worker_on_a_loop_that_was_closed_by_hand():
    async def keep():
        engine = await asynctrt.open("tests.workers.models:kind", isolation="process")
        await engine.infer(rows(1))
        workers.extend(psutil.Process(worker.pid) for worker in engine.workers)

    workers = []
    before = descriptors()
    for _ in range(2):
        closed_by_hand(keep())
    collect_until(lambda: descriptors() <= before)
    assert len(workers) == 2
    collect_until(
        lambda: all(not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE for worker in workers)
    )


@pytest.fixture
def no_collector():
    """Collect nothing, and what earlier tests have left not at all."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def found_in_cycles():
    """Return what of ours only the collector would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    kinds = {found if isinstance(found, type) else type(found) for found in gc.garbage}
    return sorted(kind.__name__ for kind in kinds if kind.__module__.startswith("asynctrt"))


def function_model(_):
    return FunctionModel(copied, **SPECS)


def varying_function_model(_):
    return FunctionModel(copied, inputs=TensorSpec("x", "float32", ("n",)), outputs=SPECS["outputs"])


def onnx_model(folder):
    return double_onnx(folder / "double.onnx")


def plan_model(_):
    device = HostDevice(unified=False)
    spec = EngineSpec(inputs=(TensorIO("input", dims=(-1, 4)),))
    return TensorRTModel(double_plan(spec), device=device, flavour=StrictTensorRT(device))


KINDS = {
    "function": (function_model, {}),
    "function-weight": (function_model, {"weight": 1.0}),
    "varying-function": (varying_function_model, {"pad": {"n": (2, 4)}}),
    "onnx": (onnx_model, {"max_delay": 0.001}),
    "plan": (plan_model, {"contexts": 2, "max_rows": 8}),
}


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_closed_engine_leaves_nothing_to_the_collector(kind, tmp_path, no_collector):
    make, settings = KINDS[kind]
    model = make(tmp_path)
    device = model.device if kind == "plan" else "host"
    for _ in range(2):
        engine = await asynctrt.open(model, device=device, **settings)
        await asyncio.gather(*[engine.infer(rows(each)) for each in range(20)])
        await engine.infer(rows(1, 2), timeout=WAIT_S, priority=1)
        await engine.aclose()
        del engine
    assert not found_in_cycles()


@pytest.mark.anyio
@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_a_closed_engine_that_is_kept_keeps_no_memory_of_results(monkeypatch, isolation):
    made, init = weakref.WeakSet(), ResultMemory.__init__
    monkeypatch.setattr(ResultMemory, "__init__", lambda self: init(self) or made.add(self))

    def held():
        return sum(one.nbytes for one in made)

    engine = await asynctrt.open("tests.test_left_behind:large_rows", isolation=isolation)
    answer = await engine.infer(np.ones((1, LARGE), np.float32))
    assert held() == answer["y"].nbytes
    await engine.aclose()
    assert held() == 0
    assert engine.state == "closed"
