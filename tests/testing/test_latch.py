"""The latch device: work is done when the test says so, and in the order that it says."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.testing import LatchDevice, LatchError
from tests.contract.devices import Subject

pytestmark = pytest.mark.anyio


def launch(device, done, name):
    stream = device.create_stream()
    stream.launch(lambda: done.append(name), label="note")
    return stream


def test_work_is_held_until_it_is_released():
    device, done = LatchDevice(), []
    for name in "abc":
        launch(device, done, name)
    assert (device.held, done) == (3, [])
    device.release()
    assert (device.held, done) == (2, ["a"])
    device.release(last=True)
    assert done == ["a", "c"]
    assert repr(device) == "<LatchDevice closed held=1>"


def test_open_lets_everything_pass_and_shut_holds_again():
    device, done = LatchDevice(), []
    launch(device, done, "held")
    device.open()
    launch(device, done, "passes")
    assert done == ["held", "passes"]
    device.shut()
    launch(device, done, "held again")
    assert len(done) == 2


async def test_a_test_waits_for_held_batches():
    device, done = LatchDevice(), []

    async def later(count):
        for _ in range(count):
            await asyncio.sleep(0)
            stream = launch(device, done, "work")
            stream.record(device.create_event())

    async with asyncio.TaskGroup() as group:
        group.create_task(device.wait_held(3))
        group.create_task(later(3))
    await device.wait_held(3)
    with pytest.raises(LatchError, match="3 of 4 batches are held after 0 s"):
        await device.wait_held(4, timeout=0)
    device.release(3)
    assert len(done) == 3


async def test_a_wait_that_cannot_end_and_a_release_that_is_too_early_say_so():
    device = LatchDevice()
    with pytest.raises(LatchError, match="2 to be released, and 0 held: a request reaches the device"):
        device.release(2)
    device.open()
    with pytest.raises(LatchError, match="the latch is open, so it holds no batch back"):
        await device.wait_held()
    with pytest.raises(LatchError, match="0 held: the latch is open"):
        device.release()


async def test_a_batch_that_a_thread_enqueues_is_held_whole():
    """One that is only half there is not one that is held."""
    device = LatchDevice()
    subject = Subject(device, floats=1)
    async with asynctrt.open(subject.model, device=device) as engine:
        for number in range(20):
            sent = np.full((1, 1), number, np.float32)
            future = engine.submit(sent)
            await device.wait_held()
            device.release()
            assert await future == subject.spec.expected(sent)
    subject.model.close()
    assert not subject.double.violations()
