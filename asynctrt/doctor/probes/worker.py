"""Open an engine in a worker process, end the worker, and see whether another takes its place.

As the probe of engines, it is asynctrt at work, so it imports all of it.
"""

import asyncio
import logging
import os
import signal
from typing import Any

import numpy as np

import asynctrt
from asynctrt import clock
from asynctrt.backends.base import Model

MODEL = "asynctrt.doctor.probes.worker:double"


def double() -> Model:
    """Return a model that doubles rows of 16 values, for the worker to open."""
    x, y = (asynctrt.TensorSpec(name, np.float32, (16,)) for name in "xy")
    return asynctrt.FunctionModel(lambda inputs: 2 * inputs["x"], inputs=x, outputs=y)


def probe() -> dict[str, Any]:
    """Tell how long it takes to open, to answer, and to answer again after the worker was killed."""
    logging.getLogger("asynctrt").setLevel(logging.CRITICAL)  # It would warn of the worker that is killed.
    return asyncio.run(_try())


async def _try() -> dict[str, Any]:
    rows = np.ones((3, 16), np.float32)
    began = clock.now_ns()
    async with asynctrt.open(MODEL, isolation="process") as engine:
        opened = clock.now_ns()
        first = await engine.infer(rows)
        answered = clock.now_ns()
        pid = engine.workers[0].pid
        assert pid is not None, "an engine that answers has a worker"
        os.kill(pid, signal.SIGKILL)
        second = await engine.infer(rows)
        recovered = clock.now_ns()
    return {
        "open_ms": (opened - began) / 1e6,
        "answer_ms": (answered - opened) / 1e6,
        "recovery_ms": (recovered - answered) / 1e6,
        "is_right": all(np.array_equal(result["y"], 2 * rows) for result in (first, second)),
    }
