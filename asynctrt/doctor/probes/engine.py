"""Send one request through an engine, on the host device or on a GPU with the double of TensorRT.

Unlike the others, it is asynctrt at work, so it imports all of it.
"""

import asyncio
from typing import Any

import numpy as np

import asynctrt
from asynctrt import clock
from asynctrt.backends.base import Model
from asynctrt.devices.base import Device
from asynctrt.loading import find_device
from asynctrt.tensors import Array

PINNED_NBYTES = 64 << 20
"""Staging memory that is allocated by way of trial."""

ROUNDS = 100


def probe(name: str, with_engine: str) -> dict[str, Any]:
    """Try memory and events of a device; then, unless ``with_engine`` is empty, a request."""
    device = find_device(name)
    try:
        found = {"device": name, **_try_device(device)}
        if with_engine:
            found["engine"] = asyncio.run(_try_engine(device))
        return found
    finally:
        device.close()


def _try_device(device: Device) -> dict[str, Any]:
    device.activate()
    pinned = device.allocate_staging(PINNED_NBYTES)
    pinned.close()
    stream = device.create_stream()
    event = device.create_event()
    took = []
    for _ in range(ROUNDS):
        began = clock.now_ns()
        stream.record(event)
        assert event.synchronize(10), "an event did not come within 10 s"
        took.append(clock.now_ns() - began)
    stream.close(10)
    figures = device.memory()
    return {
        "event_us": float(np.median(took)) / 1000,
        "free_nbytes": figures.free_nbytes,
        "total_nbytes": figures.total_nbytes,
        "module_loading": device.module_loading,
    }


async def _try_engine(device: Device) -> dict[str, Any]:
    rows = np.ones((3, 16), np.float32)
    capability = device.compute_capability
    if capability is None:
        model, expected = _function(rows)
    else:
        model, expected = _double(device, capability, rows)
    began = clock.now_ns()
    async with asynctrt.open(model, device=device, contexts=2) as engine:
        opened = clock.now_ns()
        result = await engine.infer(rows)
        answered = clock.now_ns()
        is_right = bool(np.array_equal(result[model.outputs[0].name], expected))
    model.close()
    return {
        "open_ms": (opened - began) / 1e6,
        "answer_ms": (answered - opened) / 1e6,
        "is_right": is_right,
    }


def _function(rows: Array) -> tuple[Model, Array]:
    """Return a Python function as a model, and its right answer."""
    x, y = (asynctrt.TensorSpec(name, rows.dtype, rows.shape[1:]) for name in "xy")
    return asynctrt.FunctionModel(lambda inputs: 2 * inputs["x"], inputs=x, outputs=y), 2 * rows


def _double(device: Device, capability: tuple[int, int], rows: Array) -> tuple[Model, Array]:
    """Return the double of TensorRT as a model, whose kernels are compiled here, and its right answer."""
    # Only where there is a GPU: the host needs nothing of it.
    from asynctrt.backends.tensorrt import TensorRTModel  # noqa: PLC0415
    from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, double_plan  # noqa: PLC0415

    spec = EngineSpec()
    plan = double_plan(spec, compute_capability=capability)
    double = StrictTensorRT(device, compute_capability=capability)
    model = TensorRTModel(plan, device=device, flavour=double)
    return model, spec.expected(rows)[model.outputs[0].name]
