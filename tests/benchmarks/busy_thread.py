"""What does a thread that computes in Python cost the callers of an engine beside it?

Python lets such a thread keep the GIL for 5 ms at a time, and whatever the event loop calls that lets go of
the GIL, be it to wait for sockets or to ask a GPU, may have to wait as long for it. Measured are a lone
caller and 64, of a model whose batches take 2 ms: in process and with a worker, with and without what
``asynctrt.tune_process()`` sets.
"""

import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import uvloop

import asynctrt
from asynctrt._util.process import SWITCH_INTERVAL_S
from asynctrt.tensors import TensorSpec
from tests.benchmarks.common import arguments, medians, report, requests_of, save
from tests.benchmarks.gpu.support import open_device

CALLERS = (1, 64)
STEADY = {"cuda": "tests.gpu.fallible:steady", "host": "tests.benchmarks.busy_thread:steady"}
STEADY_S = 0.002
PYTHONS_OWN_S = sys.getswitchinterval()
KINDS = {
    "in process": ({}, PYTHONS_OWN_S),
    "in process, tuned": ({}, SWITCH_INTERVAL_S),
    "a worker": ({"isolation": "process"}, PYTHONS_OWN_S),
    "a worker, tuned": ({"isolation": "process"}, SWITCH_INTERVAL_S),
}


def steady():
    """Return a model on the host device whose batches take 2 ms each, whatever their rows."""

    def work(inputs, outputs):
        np.multiply(inputs["x"], 2, out=outputs["y"])
        time.sleep(STEADY_S)

    row = TensorSpec("x", "float32", (16,)), TensorSpec("y", "float32", (16,))
    return asynctrt.FunctionModel(work, inputs=row[0], outputs=row[1], name="steady")


@contextmanager
def busy_threads(count):
    """Run threads that compute in Python meanwhile."""
    is_over = False

    def compute():
        number = 0
        while not is_over:
            number += 1

    threads = [threading.Thread(target=compute) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over = True
        for thread in threads:
            thread.join()


async def latency(engine, callers, seconds):
    """Return the figures of callers who each send again once they are answered."""
    row = np.ones((1, *engine.inputs[0].dims), np.float32)
    return await requests_of(engine.infer, [row] * callers, seconds)


async def measured(options):
    """Return the runs by kind, busy threads and callers, the kinds in turn."""
    model = STEADY["host" if options.device == "host" else "cuda"]
    engines = {}
    for settings, _ in KINDS.values():
        isolation = settings.get("isolation", "none")
        if isolation not in engines:
            engines[isolation] = await asynctrt.open(model, device=options.device, **settings)
            await latency(engines[isolation], max(CALLERS), options.seconds / 2)
    runs = {}
    try:
        for _ in range(options.repeats):
            for kind, (settings, interval_s) in KINDS.items():
                engine = engines[settings.get("isolation", "none")]
                sys.setswitchinterval(interval_s)
                for threads in (0, options.threads):
                    with busy_threads(threads):
                        for callers in CALLERS:
                            found = await latency(engine, callers, options.seconds)
                            runs.setdefault((kind, threads, callers), []).append(found)
                            print(
                                f"  {kind}, {threads} threads, {callers} callers: "
                                f"{found['p50_us'] / 1e3:.2f} ms",
                                flush=True,
                            )
    finally:
        sys.setswitchinterval(PYTHONS_OWN_S)
        for engine in engines.values():
            await engine.aclose()
    return {
        f"{kind}; {threads} threads; {callers} callers": found
        for (kind, threads, callers), found in runs.items()
    }


def main():
    options = arguments(__doc__, device="host", seconds=1.0, repeats=3, threads=1)
    runs = uvloop.run(measured(options))
    formats = {"p50_us": ",.0f", "p99_us": ",.0f", "requests_per_s": ",.0f"}
    report("Beside a thread that computes in Python", runs, **formats)
    figures = {name: medians(found) for name, found in runs.items()}
    save(options.json, __doc__, figures, device=open_device(options.device))


if __name__ == "__main__":
    main()
