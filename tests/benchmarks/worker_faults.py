"""Faults in workers, on a GPU (``--device cuda:0``) or on the host: what is lost, and how long it takes.

``kills``: requests whose every answer is checked while workers are ended by SIGKILL. ``faults``: a fault that
happens once (an illegal address, on a GPU), a row that ends its worker whenever it is computed, and one that
hangs, beside callers whose answers are checked: how long until they are answered, and the row is refused.
"""

import asyncio
import logging
import os
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt.errors import AsynctrtError, PoisonError
from tests.benchmarks.common import answered_again_s, arguments, outcome_of, save
from tests.benchmarks.gpu.support import open_device
from tests.gpu.fallible import GATE

HOST, GPU = "tests.workers.models:kind", "tests.gpu.fallible:kind"
CALLERS = 32


def row(first):
    return np.array([[first, 1, 2, 3]], np.float32)


def open_gate():
    """Let the next batch write where it must not."""
    Path(os.environ[GATE]).touch()


class Callers:
    """Callers who ask again at once, check every answer, and note when each came."""

    def __init__(self, engine, requests=None):
        self._engine, self._left = engine, requests
        self.answered = self.lost = self.wrong = self.twice = 0
        self.ends = []
        self.is_over = False

    async def call(self, number):
        first = 1 + number % 1000
        sent = row(first)
        while not self.is_over and (self._left is None or self._left > 0):
            if self._left is not None:
                self._left -= 1
            future = self._engine.submit(sent)
            calls = []
            future.add_done_callback(calls.append)
            try:
                answer = await future
            except AsynctrtError:
                self.lost += 1
                continue
            self.answered += 1
            self.ends.append(time.perf_counter())
            self.wrong += not np.array_equal(answer["y"], 2 * sent)
            self.twice += len(calls) > 1

    def longest_pause_s(self, since_s):
        """Return the longest time without an answer since then."""
        ends = [since_s, *(end for end in self.ends if end > since_s)]
        return max((after - before for before, after in pairwise(ends)), default=float("nan"))


async def killed(model, given, device, **settings):
    """Kill a worker now and then while requests are answered."""
    random = np.random.default_rng(1)
    pauses = []
    async with asynctrt.open(model, device=device, **{"isolation": "process", **settings}) as engine:
        callers = Callers(engine, given.requests)

        async def kill():
            while True:
                await asyncio.sleep(random.uniform(0.5, 1.5) * given.every)
                alive = [worker for worker in engine.workers if worker.state == "open"]
                if alive:
                    worker = alive[random.integers(len(alive))]
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
                    pauses.append(await answered_again_s(callers))

        killing = asyncio.create_task(kill())

        began_s = time.perf_counter()
        await asyncio.gather(*[callers.call(number) for number in range(CALLERS)])
        seconds = time.perf_counter() - began_s
        killing.cancel()
        deaths = sum(worker.deaths for worker in engine.workers)
    return {"kills": deaths, **outcome_of(callers, given.requests, pauses, seconds)}


async def faulted(model, given, device, first, **settings):
    """Send a row that ends its worker, or hangs, beside callers; without one, let a batch fail once."""
    async with asynctrt.open(
        model, device=device, batch_timeout=given.batch_timeout, **{"isolation": "process", **settings}
    ) as engine:
        callers = Callers(engine)
        tasks = [asyncio.create_task(callers.call(number)) for number in range(8)]
        await asyncio.sleep(1.0)
        began_s = time.perf_counter()
        try:
            if first is None:
                open_gate()
            await engine.infer(row(first or 1.0))
            refused = "answered"
        except PoisonError:
            refused = "PoisonError"
        except AsynctrtError as error:
            refused = type(error).__name__
        refused_s = time.perf_counter() - began_s
        await asyncio.sleep(1.0)
        callers.is_over = True
        await asyncio.gather(*tasks)
        deaths = sum(worker.deaths for worker in engine.workers)
    return {
        "longest_pause_ms": callers.longest_pause_s(began_s) * 1e3,
        "refused_ms": refused_s * 1e3,
        "refused_with": refused,
        "deaths": deaths,
        "answered": callers.answered,
        "lost": callers.lost,
        "wrong": callers.wrong,
    }


def main():
    given = arguments(
        __doc__, device="host", requests=100_000, every=2.0, repeats=3, batch_timeout=1.0, only=""
    )
    logging.getLogger("asynctrt").setLevel(logging.CRITICAL)  # Each death is an error there.
    devices = given.device.split(",")  # Of two, kills concern both.
    model, ends, hangs = (HOST, -1.0, -3.0) if devices[0] == "host" else (GPU, -1.0, -2.0)
    results = {}
    os.environ[GATE] = f"{tempfile.mkdtemp()}/fault"

    def keep(name, found):
        results[name] = found
        print(f"{name}: {found}", flush=True)
        save(given.json, __doc__, results)  # What fails later takes nothing along.

    if given.only in "kills":
        kinds = {"one worker": {}, "one worker and a spare": {"isolation": "spare"}}
        for name, settings in kinds.items():
            keep(f"kills, {name}", uvloop.run(killed(model, given, devices[0], **settings)))
        two = given.device if len(devices) > 1 else f"{devices[0]},{devices[0]}"
        keep("kills, two workers", uvloop.run(killed(model, given, two)))
    if given.only in "faults":
        rows = [("a row that ends its worker", ends), ("a row that hangs", hangs)]
        if model == GPU:
            rows.insert(0, ("an illegal address, once", None))
        for what, first in rows:
            for name, settings in (("one worker", {}), ("and a spare", {"isolation": "spare"})):
                runs = [
                    uvloop.run(faulted(model, given, devices[0], first, **settings))
                    for _ in range(given.repeats)
                ]
                pause_ms = statistics.median(run["longest_pause_ms"] for run in runs)
                refused_ms = statistics.median(run["refused_ms"] for run in runs)
                keep(
                    f"{what}, {name}",
                    {"longest_pause_ms": pause_ms, "refused_ms": refused_ms, "runs": runs},
                )
    device = open_device(devices[0])
    save(given.json, __doc__, results, device)
    device.close()


if __name__ == "__main__":
    main()
