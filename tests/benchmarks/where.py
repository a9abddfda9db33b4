"""Where each microsecond of a request goes: the steps of its way, timed by themselves, in batches of 64.

The steps are called as the engine calls them, on the engine's own objects. What is left of the whole is the
loop's part: resuming tasks, coroutines, futures' callbacks, and that caches are colder there than here.
"""

import timeit

import numpy as np
import uvloop

import asynctrt
from asynctrt.bench import OVERHEAD_DIM, closed_loop, echo_model
from asynctrt.devices.host import HostDevice
from asynctrt.runtime import batch
from asynctrt.scheduling.request import QUEUED
from asynctrt.tensors import BatchRecord
from tests.benchmarks.common import arguments, save, show

BATCH = 64


def ns(function, number, per):
    function()
    return min(timeit.repeat(function, number=number, repeat=5)) / number / per * 1e9


async def steps(seconds):
    async with asynctrt.open(echo_model(), device=HostDevice(in_place="always")) as engine:
        row = np.random.default_rng(0).random((1, OVERHEAD_DIM), np.float32)
        await engine.infer(row)
        driver, scheduler, pool = engine._driver, engine._scheduler, engine._pool
        requests = [driver._request((row,), 1, (), 0, None) for _ in range(BATCH)]
        slab = pool._bays[0].slab((), pool.layout(()))
        record = BatchRecord(BATCH, 0)
        outputs = batch.copy_out(slab.outputs, None, BATCH, shared=True)

        def schedule():
            for request in requests:
                request.state = QUEUED
                scheduler.submit(request)
            launch = scheduler.next_launch(0)
            scheduler.complete(launch, 0, copy_in_ns=0, compute_ns=0, copy_out_ns=0)

        def deliver():
            for request in requests:
                request.future = driver._create_future()
            batch.deliver(requests, outputs, record)

        def futures():
            for request in requests:
                request.future = driver._create_future()

        inputs = {"input": row}
        lease = pool.lease(_launch(scheduler, requests), None)
        futures_ns = ns(futures, 500, BATCH)
        parts = {
            "check the inputs": ns(lambda: engine._admit(inputs), 20_000, 1),
            "make the request, look at the clock": ns(
                lambda: driver._request((row,), 1, (), 0, None), 20_000, 1
            )
            - futures_ns,
            "make its future": futures_ns,
            "queue it, launch it, end it": ns(schedule, 500, BATCH),
            "gather its row into the slab": ns(
                lambda: batch.gather(requests, slab.inputs, BATCH), 2000, BATCH
            ),
            "a batch on the device, divided by 64": ns(lambda: lease.enqueue(BATCH), 5000, BATCH),
            "copy its row out": ns(
                lambda: batch.copy_out(slab.outputs, None, BATCH, shared=True), 2000, BATCH
            ),
            "make the result, resolve the future": ns(deliver, 500, BATCH) - futures_ns,
        }
    async with asynctrt.open(echo_model(), device=HostDevice(in_place="always")) as engine:
        measures, _ = await closed_loop(engine, [{"input": row}] * 256, seconds, timed=False)
    whole = measures["cpu_us_per_request"] * 1000
    parts["the loop: resume the task, await, the rest"] = whole - sum(parts.values())
    return parts, whole


def _launch(scheduler, requests):
    for request in requests:
        request.state = QUEUED
        scheduler.submit(request)
    launch = scheduler.next_launch(0)
    scheduler.complete(launch, 0, copy_in_ns=0, compute_ns=0, copy_out_ns=0)
    return launch


def main():
    options = arguments(__doc__, seconds=1.0)
    parts, whole = uvloop.run(steps(options.seconds))
    lines = [(name, f"{part:,.0f}", f"{part / whole:.0%}") for name, part in parts.items()]
    lines.append(("the whole, 256 callers", f"{whole:,.0f}", "100%"))
    show("CPU of one request", ("", "ns", "share"), lines)
    save(options.json, __doc__, {**parts, "whole": whole})


if __name__ == "__main__":
    main()
