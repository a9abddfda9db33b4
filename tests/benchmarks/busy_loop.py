"""How late is a batch noticed on a loop that is never idle? A callback burns 20 µs every tick.

It compares the engine as it is with one whose guard cannot hand the GIL over.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt.devices.host import HostDevice
from asynctrt.devices.host.threads import StreamThreads
from tests.benchmarks.common import arguments, report, save
from tests.benchmarks.gpu.support import Load
from tests.benchmarks.mlp import mlp_onnx


async def lateness_us(path, rows, requests, *, is_busy, is_guarded):
    """Return the time in µs from the end of a batch's work to its caller, and from its launch to its work."""
    lend = StreamThreads.lend_gil
    if not is_guarded:
        StreamThreads.lend_gil = lambda self: False
    late = []
    try:
        async with asynctrt.open(path, device=HostDevice(in_place="never"), contexts=1) as engine:
            row = np.ones((rows, 512), np.float32)
            for _ in range(5):
                await engine.infer(row)
            alone = min([(await engine.infer(row)).timing.compute_ns for _ in range(10)])
            load = Load("busy" if is_busy else "idle")
            for _ in range(requests):
                sent_ns = clock.now_ns()
                await engine.infer(row)
                late.append((clock.now_ns() - sent_ns - alone) / 1000)
            load.end()
    finally:
        StreamThreads.lend_gil = lend
    return late


def main():
    options = arguments(__doc__, requests=100, rows=64)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        path = mlp_onnx(Path(folder) / "mlp.onnx")
        measure = partial(lateness_us, path, options.rows)
        cases = {
            "idle loop": (options.requests, False, True),
            "busy loop": (options.requests, True, True),
            "busy loop, GIL not handed over": (max(options.requests // 10, 5), True, False),
        }
        for name, (requests, is_busy, is_guarded) in cases.items():
            late = uvloop.run(measure(requests, is_busy=is_busy, is_guarded=is_guarded))
            figures[name] = {
                "p50_us": float(np.percentile(late, 50)),
                "p99_us": float(np.percentile(late, 99)),
                "requests": len(late),
            }
    report(
        f"latency over the compute time, batches of {options.rows} rows of the MLP",
        {name: [case] for name, case in figures.items()},
        p50_us=",.0f",
        p99_us=",.0f",
    )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
