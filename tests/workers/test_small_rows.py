"""Rows that are gathered from a group's own block: nobody else's come there while a batch may read it."""

import threading

import numpy as np
import pytest

from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ExecutionError
from asynctrt.tensors import TensorSpec
from tests.helpers import WAIT_S, until
from tests.workers import local
from tests.workers.models import RAISE

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]
DIM = 1 << 13
ROWS = 100


def rows(first):
    return np.full((ROWS, DIM), first, np.float32)


async def test_a_row_that_fails_is_in_no_batch_that_was_launched_before_it_came(monkeypatch):
    """Its block would be that of a caller who left, whose rows a thread has yet to gather."""
    monkeypatch.setattr("asynctrt.runtime.driver.GATHER_ON_LOOP_NBYTES_MAX", ROWS * DIM)  # Threads gather.
    launched = []

    def compute(inputs):
        if RAISE in inputs["x"][:, 0]:
            raise ValueError("a row is -2")
        launched.append(sorted(set(inputs["x"][:, 0].tolist())))
        return inputs["x"][:, :1] + 1

    model = FunctionModel(
        compute,
        inputs=TensorSpec("x", "float32", (DIM,)),
        outputs=TensorSpec("y", "float32", (1,)),
    )
    device, latch = HostDevice(in_place="never", threads=1), threading.Event()
    settings = {"max_rows": 512, "idempotent": False}
    async with local.opened(model, device=device, contexts=1, front=settings, **settings) as (
        engine,
        inner,
        workers,
    ):
        copiers = inner._driver._copiers
        for _ in range(copiers.threads_max):
            copiers.assist(lambda: latch.wait(WAIT_S))
        gone, mate = engine.submit(rows(1)), engine.submit(rows(2))
        await until(lambda: inner.statistics().in_flight_batches)
        heap = engine._front._heap
        gone.cancel()
        await until(lambda: workers.served._leaving or heap.blocks == 1)
        failing = engine.submit(rows(RAISE))
        await until(lambda: inner.statistics().queued_requests)
        latch.set()
        assert (await mate)["y"][:, 0].tolist() == [3] * ROWS
        with pytest.raises(ExecutionError, match="a row is -2"):
            await failing
        assert launched == [[1, 2]]
        await until(lambda: not workers.served._leaving)
