"""Send a request through an engine on the host device or in a worker, or try a GPU's memory and events.

Unlike the other probes it imports asynctrt. A GPU is tried without a model, because TensorRT may be missing.
"""

import asyncio
from typing import Any

import numpy as np

import asynctrt
from asynctrt._util import clock
from asynctrt.backends.base import Model
from asynctrt.core.loading import find_device
from asynctrt.devices.base import Device

STAGING_NBYTES = 64 << 20

TIMEOUT_S = 10
"""The time limit for a copy on an idle device."""


def double() -> Model:
    """Return a model that doubles rows of 16 values; a worker opens it by its name."""
    x, y = (asynctrt.TensorSpec(name, np.float32, (16,)) for name in "xy")
    return asynctrt.FunctionModel(lambda inputs: 2 * inputs["x"], inputs=x, outputs=y)


def probe(name: str) -> dict[str, Any]:
    """Try a device by name, or a ``worker``; return whether the answer was right, and times."""
    if name == "worker":
        return asyncio.run(_infer("asynctrt.doctor.probes.engine:double", isolation="process"))
    if name == "host":
        return asyncio.run(_infer(double()))
    device = find_device(name)
    try:
        return _copy(device)
    finally:
        device.close()


async def _infer(model: Model | str, **settings: Any) -> dict[str, Any]:
    rows = np.ones((3, 16), np.float32)
    began = clock.now_ns()
    async with asynctrt.open(model, **settings) as engine:
        opened = clock.now_ns()
        result = await engine.infer(rows)
        answered = clock.now_ns()
    is_right = bool(np.array_equal(result["y"], 2 * rows))
    return {
        "is_right": is_right,
        "ms": {"opened": (opened - began) / 1e6, "answered": (answered - opened) / 1e6},
    }


def _copy(device: Device) -> dict[str, Any]:
    """Copy bytes to the GPU and back on a stream, and wait for an event after the copies."""
    device.activate()
    sent, received = (device.allocate_staging(STAGING_NBYTES) for _ in range(2))
    memory = device.allocate(STAGING_NBYTES)
    stream, event = device.create_stream(), device.create_event()
    count = STAGING_NBYTES // 4
    there, back = (buffer.array(np.dtype(np.uint32), (count,), 0) for buffer in (sent, received))
    there[:] = np.arange(count, dtype=np.uint32)
    began = clock.now_ns()
    stream.copy(memory, sent, offset=0, nbytes=STAGING_NBYTES)
    stream.copy(received, memory, offset=0, nbytes=STAGING_NBYTES)
    stream.record(event)
    assert event.synchronize(TIMEOUT_S), f"copies did not end within {TIMEOUT_S} s"
    copied = clock.now_ns()
    is_right = bool(np.array_equal(there, back))
    stream.close(TIMEOUT_S)
    for buffer in (memory, sent, received):
        buffer.close()
    return {"is_right": is_right, "ms": {"64 MiB copied there and back": (copied - began) / 1e6}}
