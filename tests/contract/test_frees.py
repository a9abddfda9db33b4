"""Memory of a GPU is freed where nothing waits, since that waits for all work: CUDA's rules, on the host."""

import asyncio
import threading

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import DeviceLostError
from asynctrt.runtime import contexts
from tests.contract.devices import WAIT_S, Subject, TensorRTModel
from tests.contract.waiting import WaitingDevice
from tests.doubles.support import until
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan
from tests.models import rows

pytestmark = pytest.mark.anyio
SEQUENCE = EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),), data_dependent=True)


@pytest.fixture
def device():
    made = WaitingDevice(threads=4)
    yield made
    made.close()


@pytest.fixture
def held(device):
    """A stream with work that does not end before the event is set."""
    stream, release = device.create_stream(), threading.Event()
    stream.launch(lambda: release.wait(WAIT_S), label="held")
    until(lambda: stream.is_computing)
    yield stream, release
    release.set()
    assert stream.close(WAIT_S)


async def test_a_free_on_the_loop_is_found(device):
    device._free(lambda: None)
    assert "memory was freed on an event loop" in device.violations[0]
    assert "test_a_free_on_the_loop_is_found" in device.violations[0]
    device.violations.clear()


async def test_batches_go_on_while_memory_waits_for_one_that_hangs(device, monkeypatch):
    """Other shapes, and outputs that grow, keep what they had; the batch that hangs is not given up yet."""
    monkeypatch.setattr(contexts, "SLAB_NBYTES_MIN", 1)
    double = StrictTensorRT(device)
    model = TensorRTModel(double_plan(SEQUENCE), device=device, flavour=double)
    options = {"contexts": 2, "arenas": 2, "batch_timeout": None}
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, device=device, **options) as engine:
        double.fail_next("hang")
        first = np.ones((1, 4), np.float32)
        hangs = asyncio.create_task(engine.infer(first))
        while not double.hanging:
            await asyncio.sleep(0)
        for length in (*range(1, 33), 5, 32):
            sent = np.full((2, length), -length, np.float32)
            result = await engine.infer(sent)
            for name, expected in SEQUENCE.expected(sent).items():
                np.testing.assert_array_equal(result[name], expected)
        assert not device._gpu._is_freeing, "nothing waits to be freed"
        double.release_hangs()
        np.testing.assert_array_equal((await hangs)["output"], SEQUENCE.expected(first)["output"])
    model.close()
    assert double.violations() == ()


async def test_closing_does_not_wait_for_a_batch_that_hangs(device):
    """What the other contexts have is freed as well, once nothing hangs any more."""
    subject = Subject(device)
    engine = await subject.open(contexts=3, arenas=3, batch_timeout=None, close_timeout=0.2)
    try:
        async with asyncio.timeout(WAIT_S):
            await subject.check(engine)
            subject.double.fail_next("hang")
            hangs = asyncio.create_task(engine.infer(rows(1)))
            while not subject.double.hanging:
                await asyncio.sleep(0)
            await engine.aclose()
            with pytest.raises(DeviceLostError, match="close_timeout"):
                await hangs
            assert device._gpu.hanging
    finally:
        subject.double.release_hangs()
    until(lambda: not device._gpu.hanging)
    subject.model.close()
    until(lambda: not device.memory().held_nbytes)
    assert subject.double.violations() == ()
