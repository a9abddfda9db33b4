"""A whole engine under a seeded mixture of all that callers do: each answer is right, and all adds up."""

import asyncio
import random
import time

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.host import HostDevice
from asynctrt.errors import AsynctrtError, DeadlineError, EngineClosedError, ExecutionError
from asynctrt.tensors import TensorSpec

pytestmark = pytest.mark.anyio
WAIT_S = 50
POISON = -1.0


def triple(inputs, outputs):
    """Rows of any length times three; a row that begins with POISON fails its batch."""
    x = inputs["x"]
    if x.size and (x[:, 0] == POISON).any():
        raise ValueError("poison")
    outputs["y"][...] = 3 * x


def slow_triple(inputs, outputs):
    """The same, slow enough for rows to be shared out over idle cores."""
    time.sleep(0.0008)
    triple(inputs, outputs)


def model(function):
    return asynctrt.FunctionModel(
        function, inputs=TensorSpec("x", "float32", ("n",)), outputs=TensorSpec("y", "float32", ("n",))
    )


class Soak:
    def __init__(self, engine, seed):
        self.engine = engine
        self.random = random.Random(seed)
        self.ends = {}

    async def caller(self, number):
        rng = self.random
        count, length = rng.choice([1, 1, 1, 2, 5, 40]), rng.choice([2, 2, 2, 7])
        sent = np.full((count, length), number + 1, np.float32)
        if rng.random() < 0.02:
            sent[rng.randrange(count), 0] = POISON
        timeout = rng.choice([None] * 6 + [5.0, 0.0])
        task = asyncio.create_task(self.engine.infer(sent, timeout=timeout, priority=rng.randrange(3)))
        if rng.random() < 0.15:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        try:
            result = await task
        except asyncio.CancelledError:
            self.note("cancelled")
        except AsynctrtError as error:
            self.note(type(error).__name__)
        else:
            np.testing.assert_array_equal(result["y"], 3 * sent)
            result["y"][...] = 0
            self.note("answered")

    def note(self, end):
        self.ends[end] = self.ends.get(end, 0) + 1


@pytest.mark.parametrize(
    "device",
    [
        lambda: HostDevice(),
        lambda: HostDevice(in_place="never", threads=3),
        lambda: HostDevice(unified=False, in_place="never"),
    ],
    ids=["host", "threads", "separate-memory"],
)
@pytest.mark.parametrize("seed", range(3))
async def test_everything_at_once(device, seed):
    settings = {"max_rows": 8, "max_queue_rows": 2048, "contexts": 3}
    if seed % 2:
        settings["max_delay"] = 0.0005
    function = slow_triple if seed == 2 else triple
    async with asyncio.timeout(WAIT_S):
        async with asynctrt.open(model(function), device=device(), **settings) as engine:
            soak = Soak(engine, seed)
            for wave in range(6):
                callers = [soak.caller(100 * wave + number) for number in range(150)]
                await asyncio.gather(*callers)
            await engine.drain()
            statistics = engine.statistics()
            with pytest.raises(EngineClosedError):
                await engine.infer(np.ones((1, 2), np.float32))
    assert sum(soak.ends.values()) == 900
    assert soak.ends["answered"] > 400
    for end in ("cancelled", ExecutionError.__name__, DeadlineError.__name__):
        assert soak.ends.get(end, 0) > 0, soak.ends
    assert statistics.queued_requests == statistics.in_flight_batches == 0
    assert statistics.submitted == (
        statistics.succeeded + statistics.failed + statistics.cancelled + statistics.expired
    )
    assert not engine._driver._flights
