"""Targets whose answers come when the test says so, and the plans of short runs."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from aiohttp import web

from asynctrt._util import clock
from asynctrt.loadtest.local import LEAD_NS, Local
from asynctrt.loadtest.recorder import merge, total
from asynctrt.loadtest.runner import Runner
from asynctrt.loadtest.samples import Sample
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import BatchCounters
from asynctrt.tensors import TensorSpec

SPEC = TensorSpec("x", np.dtype("float32"), (2,))


class Target:
    """Keeps the futures of its requests; ``on_start`` may answer them at once."""

    name = "double"
    kind = "function"
    inputs = (SPEC,)
    in_flight_max = 1000

    def __init__(self, on_start=None):
        self.loop = asyncio.get_running_loop()
        self.on_start = on_start
        self.futures = []
        self.sent_ns = []
        self.prepared = []
        self.requests = 0
        self.closed = False

    def prepare(self, inputs):
        return dict(inputs)

    def start(self, prepared):
        future = self.loop.create_future()
        self.requests += 1
        self.sent_ns.append(clock.now_ns())
        self.prepared.append(prepared)
        self.futures.append(future)
        if self.on_start is not None:
            self.on_start(self, future)
        return future

    def outputs(self, answer):
        return answer

    async def batches(self):
        return BatchCounters(self.requests, self.requests, self.requests, 0, 0, 0, 0, {1: self.requests})

    async def aclose(self):
        self.closed = True


def at_once(target, future):
    future.set_result({})


def sample(value=1.0, **kw):
    return Sample({"x": np.full((1, 2), value, np.float32)}, 1, **kw)


async def run(target, samples=None, *, share=0, shares=1, started=None, **settings):
    """One run, as it comes out: plan, outcome, windows, and all windows as one."""
    settings = {"seconds": 0.2, "warmup": 0.0} | settings
    local = Local(target, samples or [sample()])
    plan = local.plan(LoadSettings(**settings), share, shares)
    windows = {}
    await local.count()
    start_ns = clock.now_ns() + LEAD_NS
    task = asyncio.ensure_future(local.run(plan, lambda more: merge(windows, more), start_ns))
    if started is not None:
        await started(local, target, task)
    async with asyncio.timeout(30):
        outcome = await task
    return plan, outcome, windows, total(windows.values())


@asynccontextmanager
async def serving_app(application, **site):
    """The address of an aiohttp application."""
    runner = web.AppRunner(application, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, **site).start()
        scheme = "https" if site.get("ssl_context") else "http"
        yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(*pieces):
    """The address of a server that answers a request with these bytes, one after the other, and closes."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"


async def turns(count=50):
    """Let the event loop run this often."""
    for _ in range(count):
        await asyncio.sleep(0)


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns

    async def tick_until(self, is_over, step_ns):
        """Move on by ``step_ns`` each turn of the event loop."""
        async with asyncio.timeout(60):
            while not is_over():
                self.ns += step_ns
                await asyncio.sleep(0)


async def run_by(clock, target, drive, **settings):
    """One run by a clock that ``drive(task)`` moves: its outcome and windows."""
    settings = {"seconds": 0.2, "warmup": 0.0} | settings
    samples = [sample()]
    # It always looks at the clock, since an alarm waits for the real one.
    plan = replace(Local(target, samples).plan(LoadSettings(**settings)), near_ns=1 << 62)
    windows = {}
    runner = Runner(target, samples, [None], plan, now_ns=clock)
    task = asyncio.ensure_future(runner.run(0, lambda more: merge(windows, more)))
    try:
        await drive(task)
        async with asyncio.timeout(30):
            return await task, windows
    finally:
        task.cancel()
