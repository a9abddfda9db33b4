"""What nobody closes ends with its loop, or with the last reference: threads and descriptors."""

import asyncio
import gc
import os
import threading
import time
import warnings

import psutil
import pytest
import uvloop

import asynctrt
from asynctrt import FunctionModel, TensorSpec
from tests.helpers import WAIT_S
from tests.models import rows

SPECS = {"inputs": TensorSpec("x", "float32", (4,)), "outputs": TensorSpec("y", "float32", (4,))}

pytestmark = pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")


def copied(inputs):
    return inputs["x"].copy()


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


@pytest.mark.parametrize("waiting", ["adaptive", "thread"])
def test_an_engine_of_a_loop_that_was_closed_by_hand(waiting):
    threads = set()

    async def keep():
        threads.update(await ask(waiting=waiting))

    closed_by_hand(keep())
    collect_until(lambda: have_ended(threads))
    before = descriptors()
    for _ in range(5):
        closed_by_hand(keep())
    collect_until(lambda: have_ended(threads) and descriptors() <= before)
    assert len(threads) >= 6


@pytest.mark.anyio
@pytest.mark.parametrize("waiting", ["adaptive", "thread"])
async def test_an_engine_without_a_reference_is_closed_on_its_loop(waiting):
    before = descriptors()
    threads = await ask(waiting=waiting)
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
