"""One side of ``compare_commits``: measures the asynctrt on its ``PYTHONPATH``, one case after the other.

It uses only the public API, so that it runs against any commit. It reads lines of JSON from standard input,
``{"case": NAME, "seconds": S}``, and answers each with a line of JSON.

usage: python -P compare_commits_child.py LOOP MODEL.onnx
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np

import asynctrt

DIM = 16
MLP_DIM = 512
WARM_UP_S = 0.15


def echo(inputs, outputs):
    outputs["output"][...] = inputs["input"]


def echo_model():
    spec = np.dtype("float32"), (DIM,)
    return asynctrt.FunctionModel(
        echo, inputs=asynctrt.TensorSpec("input", *spec), outputs=asynctrt.TensorSpec("output", *spec)
    )


async def closed_loop(callers, call, seconds):
    """Let ``callers`` coroutines await ``call()`` in a loop; return time and CPU time per call in µs."""
    count = 0
    is_over = False

    async def caller():
        nonlocal count
        while not is_over:
            await call()
            count += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
        await asyncio.sleep(WARM_UP_S)
        before, start_ns, start_cpu_ns = count, time.perf_counter_ns(), time.process_time_ns()
        await asyncio.sleep(seconds)
        made, took_ns, cpu_ns = (
            count - before,
            time.perf_counter_ns() - start_ns,
            time.process_time_ns() - start_cpu_ns,
        )
        is_over = True
    return {"us": took_ns / max(made, 1) / 1e3, "cpu_us": cpu_ns / max(made, 1) / 1e3}


async def overhead(device, callers, seconds):
    """Measure what a request to a no-op model costs."""
    rows = {"input": np.random.default_rng(0).random((1, DIM), np.float32)}
    async with asynctrt.open(echo_model(), device=device) as engine:
        return await closed_loop(callers, lambda: engine.infer(rows), seconds)


async def slot(device, seconds):
    """Measure what a request costs a lone caller who takes a slot and writes its rows into the slab."""

    async def call():
        async with engine.slot(rows=1) as held:
            held["input"][...] = 1.0
            await held.infer()

    async with asynctrt.open(echo_model(), device=device) as engine:
        return await closed_loop(1, call, seconds)


async def mlp(path, callers, seconds):
    """Measure what a row of a perceptron costs in ONNX Runtime, with one thread per batch."""
    rows = {"input": np.random.default_rng(0).random((1, MLP_DIM), np.float32)}
    async with asynctrt.open(path) as engine:
        return await closed_loop(callers, lambda: engine.infer(rows), seconds)


async def isolated(callers, seconds):
    """Measure what a request to a no-op model in a worker process costs."""
    rows = {"input": np.random.default_rng(0).random((1, DIM), np.float32)}
    model = f"{Path(__file__).stem}:echo_model"
    async with asynctrt.open(model, isolation="process") as engine:
        return await closed_loop(callers, lambda: engine.infer(rows), seconds)


def cases(path):
    """Return the cases by name: functions that measure for some seconds."""
    in_place = {"host": lambda: "host", "immediate": lambda: asynctrt.HostDevice(in_place="always")}
    found = {}
    for device, create in in_place.items():
        for callers in (1, 32, 256):
            who = f"{callers} callers" if callers > 1 else "a lone caller"
            found[f"infer, {device}, {who}"] = lambda seconds, create=create, callers=callers: overhead(
                create(), callers, seconds
            )
        found[f"slot.infer, {device}, a lone caller"] = lambda seconds, create=create: slot(create(), seconds)
    for callers in (1, 32, 256):
        who = f"{callers} callers" if callers > 1 else "a lone caller"
        found[f"infer, worker process, {who}"] = lambda seconds, callers=callers: isolated(callers, seconds)
        found[f"ONNX MLP, {who}"] = lambda seconds, callers=callers: mlp(path, callers, seconds)
    return found


def main():
    sys.setswitchinterval(0.0005)  # As every command of the package does.
    loop, path = sys.argv[1:]
    sys.path.append(str(Path(__file__).parent))  # For workers, which open the model by its name.
    known = cases(path)
    print(json.dumps({"file": asynctrt.__file__, "cases": list(known)}), flush=True)
    factory = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer = runner.run(known[asked["case"]](asked["seconds"]))
            except Exception as error:  # A commit may lack something; the other cases go on.
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
