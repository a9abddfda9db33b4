"""What goes wrong on a device, on purpose: one batch fails, typed, and the rest goes on or says why not."""

import asyncio
import os
import subprocess
import sys

import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeviceLostError,
    DeviceMemoryError,
    EngineClosedError,
    ExecutionError,
    InputError,
)
from tests.contract.devices import DEVICES, WITH_PLANS, Subject
from tests.helpers import needed, until

pytestmark = pytest.mark.anyio
WAIT_S = 60
MIB = 1 << 20


@pytest.mark.parametrize("graphs", ["off", "auto", "1,4"])
async def test_a_refused_enqueue_fails_its_batch_alone(subject, graphs):
    needed(not subject.is_real or graphs == "off", "a graph of the real TensorRT is not refused")
    async with subject.open() as engine:
        await subject.check(engine)
        subject.double.fail_next("enqueue")
        with pytest.raises(ExecutionError, match="enqueue|execute"):
            await engine.infer(subject.rows(1))
        for number in range(10):
            await subject.check(engine, number)
        assert engine.statistics().failed == 1
        assert engine.state == "open"
    assert subject.double.violations() == ()


@pytest.mark.parametrize("arenas", [1, 3])
async def test_a_batch_that_hangs_is_given_up_and_the_others_go_on(subject, arenas):
    engine = await subject.open(contexts=3, arenas=arenas, batch_timeout=0.3, close_timeout=0.5)
    await subject.check(engine)
    subject.double.fail_next("hang")
    with pytest.raises(DeviceLostError, match=r"batch 2 .* did not end within the batch_timeout of 0.3 s"):
        await engine.infer(subject.rows(1))
    statistics = engine.statistics()
    if arenas == 3:
        assert statistics.contexts_quarantined == 1
        assert engine.state == "open"
        for number in range(20):
            await subject.check(engine, number)
    else:
        # Nothing can come after it in the only arena.
        assert statistics.contexts_quarantined == 3
        assert engine.state == "lost"
        with pytest.raises(DeviceLostError, match="Only a new process helps"):
            await engine.infer(subject.rows(1))
    async with asyncio.timeout(WAIT_S):
        await engine.aclose()
    assert engine.state == "closed"
    subject.double.release_hangs()


async def test_every_context_hangs(subject):
    engine = await subject.open(
        contexts=2, arenas=2, lanes=2, batch_timeout=0.3, close_timeout=0.5, max_rows=1
    )
    subject.double.fail_next("hang", 2)
    sent = [asyncio.create_task(engine.infer(subject.rows(n))) for n in range(6)]
    async with asyncio.timeout(WAIT_S):
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DeviceLostError] * 6
    assert engine.state == "lost"
    with pytest.raises(DeviceLostError):
        await engine.infer(subject.rows(1))
    assert engine.statistics().contexts_quarantined == 2
    await engine.aclose()
    subject.double.release_hangs()


async def test_wrong_inputs_never_reach_the_device(subject):
    async with subject.open() as engine:
        right = subject.rows(1)
        for wrong in (right.astype("f8"), right[:, 1:], right[0], {"other": right}):
            with pytest.raises(InputError):
                await engine.infer(wrong)
        assert engine.statistics().submitted == 0
        await subject.check(engine)


@pytest.mark.parametrize("state", ["idle", "queued", "in flight", "draining", "cancelled"])
async def test_closing_in_every_state(subject, state):
    engine = await subject.open(contexts=1, arenas=1, close_timeout=20)
    async with asyncio.timeout(WAIT_S):
        sent = []
        if state != "idle":
            sent = [asyncio.create_task(engine.infer(subject.rows(n))) for n in range(30)]
            await asyncio.sleep(0)
        if state == "in flight":
            await asyncio.wait([sent[0]])
        if state == "draining":
            draining = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
        if state == "cancelled":
            for task in sent:
                task.cancel()
        await engine.aclose()
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        if state == "draining":
            await draining
    for number, outcome in enumerate(outcomes):
        if not isinstance(outcome, EngineClosedError | asyncio.CancelledError):
            subject.compare(outcome, subject.rows(number))
    assert engine.state == "closed"
    assert subject.double.violations() == ()


@pytest.mark.parametrize("what", ["context-memory"])
async def test_a_context_for_which_there_is_no_memory(subject, what):
    needed(not subject.is_real, "the real TensorRT is not told to have no memory")
    held = subject.device.memory().held_nbytes
    subject.double.fail_next(what)
    with pytest.raises(DeviceMemoryError):
        await subject.open()
    await until(lambda: subject.device.memory().held_nbytes == held)  # A device like a GPU frees in a thread.
    async with subject.open() as engine:
        await subject.check(engine)


def small(device, nbytes):
    """A device of the same kind that may hold so much."""
    if isinstance(device, HostDevice):
        return HostDevice(in_place="never", unified=False, memory_nbytes=nbytes)
    return type(device)(memory_nbytes=nbytes)


async def test_what_does_not_fit_is_refused_before_it_is_made_with_the_arithmetic(device):
    little = small(device, 16 * MIB)
    subject = Subject(little, steps=40)
    held = little.memory().held_nbytes
    with pytest.raises(DeviceMemoryError, match=r"arenas of \d+ bytes need .* there is room for .*budget"):
        await subject.open(contexts=4096, arenas=4096)
    assert little.memory().held_nbytes == held
    async with subject.open() as engine:
        await subject.check(engine)
    await until(lambda: little.memory().held_nbytes == held)  # A device like a GPU frees in a thread.
    subject.model.close()
    little.close()


@pytest.mark.parametrize("where", ["host", *(["cuda:0"] if "cuda" in DEVICES else []), *WITH_PLANS])
def test_an_illegal_address_ends_the_device_for_this_process(where):
    """In a process of its own: what is lost stays lost in it."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.contract.lost_device", where],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "as it should be"
