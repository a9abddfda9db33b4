"""Where does the time of a request go? Times the steps of its way separately, in batches of 64.

The steps are called as the engine calls them, on the engine's own objects. The rest of the whole is the
loop's: resuming tasks, coroutines, callbacks of futures, and colder caches.
"""

import timeit
from functools import partial

import numpy as np
import uvloop

import asynctrt
from asynctrt.devices.host import HostDevice
from asynctrt.runtime import staging
from asynctrt.runtime.inflight import InFlight
from asynctrt.runtime.spans import copy_out
from asynctrt.scheduling.key import FIXED_SHAPE
from asynctrt.scheduling.request import NO_DEADLINE_NS, QUEUED, Request
from asynctrt.tensors import BatchRecord
from tests.benchmarks.common import arguments, save, show
from tests.benchmarks.overhead import OVERHEAD_DIM, closed_loop, echo_model

BATCH = 64


def ns(function, number, per):
    function()
    return min(timeit.repeat(function, number=number, repeat=5)) / number / per * 1e9


async def steps(seconds):
    async with asynctrt.open(echo_model(), device=HostDevice(in_place="always")) as engine:
        row = np.random.default_rng(0).random((1, OVERHEAD_DIM), np.float32)
        await engine.infer(row)
        driver, scheduler, pool = engine._driver, engine._scheduler, engine._pool
        requests = [request_of(driver, row) for _ in range(BATCH)]
        record = BatchRecord(BATCH, 0)

        def launched():
            for request in requests:
                request.state = QUEUED
                scheduler.submit(request)
            return scheduler.next_batch(0)

        def schedule():
            batch = launched()
            scheduler.finished(batch, 0, copy_in_ns=0, compute_ns=0, copy_out_ns=0)
            return batch

        def deliver():
            for request in requests:
                request.future, request.payload = driver._create_future(), (row,)
            staging.deliver(requests, outputs, record)

        def futures():
            for request in requests:
                request.future = driver._create_future()

        inputs = {"input": row}
        batch = schedule()
        source = pool.source(batch)
        flight = InFlight(batch, pool.contexts[batch.context], source)
        outputs = copy_out(source.slab.outputs, None, BATCH)
        gather_ns = ns(source.stage, 2000, BATCH)
        futures_ns = ns(futures, 500, BATCH)
        parts = {
            "check the inputs": ns(lambda: engine._validate(inputs), 20_000, 1),
            "make the request, look at the clock": ns(lambda: request_of(driver, row), 20_000, 1)
            - futures_ns,
            "make its future": futures_ns,
            "queue it, launch it, end it": ns(schedule, 500, BATCH),
            "gather its row into the slab": gather_ns,
            "a batch on the device, divided by 64": ns(
                partial(flight.context.enqueue, flight.source, flight.events), 5000, BATCH
            ),
            "copy its row out": ns(lambda: copy_out(source.slab.outputs, None, BATCH), 2000, BATCH),
            "make the result, resolve the future": ns(deliver, 500, BATCH) - futures_ns,
        }
    async with asynctrt.open(echo_model(), device=HostDevice(in_place="always")) as engine:
        measures, _ = await closed_loop(engine, [{"input": row}] * 256, seconds, timed=False)
    whole = measures["cpu_us_per_request"] * 1000
    parts["the loop: resume the task, await, the rest"] = whole - sum(parts.values())
    return parts, whole


def request_of(driver, row):
    return Request(1, FIXED_SHAPE, 0, driver._now_ns(), NO_DEADLINE_NS, (row,), driver._create_future())


def main():
    options = arguments(__doc__, seconds=1.0)
    parts, whole = uvloop.run(steps(options.seconds))
    lines = [(name, f"{part:,.0f}", f"{part / whole:.0%}") for name, part in parts.items()]
    lines.append(("the whole, 256 callers", f"{whole:,.0f}", "100%"))
    show("CPU of one request", ("", "ns", "share"), lines)
    save(options.json, __doc__, {**parts, "whole": whole})


if __name__ == "__main__":
    main()
