"""Shared by the GPU benchmarks: the device, callers of an engine, loops with other work."""

import asyncio
from contextlib import contextmanager

import numpy as np

from asynctrt._util import clock
from asynctrt.devices.host import HostDevice
from tests.benchmarks.common import asked_again, quantiles_us


def open_device(name, **settings):
    """Return the device to measure; the host device gets separate memory, for the same copies."""
    if name == "host":
        return HostDevice(threads=1, unified=False)
    from asynctrt.devices.cuda import CudaDevice, find_cuda_device

    device = find_cuda_device(name)
    return CudaDevice(device.ordinal, **settings) if settings else device


def check(answer, expected):
    """Check that every output is right bit by bit."""
    for name, values in expected.items():
        if not np.array_equal(answer[name], values):
            raise AssertionError(f"a wrong answer: {name} is {answer[name]}, and should be {values}")


def exactly(model):
    """Return a check of answers, for a model that can compute the expected ones."""
    return lambda rows, answer: check(answer, model.expected(rows))


async def closed_loop(engine, check_answer, inputs, seconds):
    """Return the figures of callers of an engine: see :func:`asked_again`."""
    latencies_ns, elapsed_ns, cpu_ns, before, after = await asked_again(
        engine.infer, inputs, seconds, check_answer, engine.statistics
    )
    batches = max(after.batches - before.batches, 1)
    return {
        "rows_per_s": (after.rows - before.rows) / elapsed_ns * 1e9,
        "batches_per_s": batches / elapsed_ns * 1e9,
        "rows_a_batch": (after.rows - before.rows) / batches,
        "cpu_us_a_batch": cpu_ns / 1e3 / batches,
        "cpu_us_a_request": cpu_ns / 1e3 / max(after.succeeded - before.succeeded, 1),
        "cores": cpu_ns / elapsed_ns,
        # Where no request ended meanwhile, each took as long at the least.
        **quantiles_us(latencies_ns or [elapsed_ns]),
    }


def rows_of_callers(callers, rows, row):
    """Return a different array of integers for each caller."""
    values = np.arange(callers * rows, dtype=np.float32).reshape(callers, rows, *[1] * len(row))
    return [np.ascontiguousarray(np.broadcast_to(value, (rows, *row))) for value in values]


def burn(duration_ns):
    """Keep the CPU busy."""
    end_ns = clock.now_ns() + duration_ns
    while clock.now_ns() < end_ns:
        pass


class Load:
    """Give the loop other work if it is to be ``busy``, not ``idle``, and record when its ticks began."""

    BUSY_NS = 20_000

    def __init__(self, kind):
        self.ticks_ns = []
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        if kind == "busy":
            self._loop.call_soon(self._burn)

    def _burn(self):
        self.ticks_ns.append(clock.now_ns())
        burn(self.BUSY_NS)
        if not self._is_over:
            self._loop.call_soon(self._burn)

    def end(self):
        self._is_over = True


@contextmanager
def said(what):
    """Print what is being measured, and how long that took."""
    start_ns = clock.now_ns()
    yield
    print(f"  measured {what}: {(clock.now_ns() - start_ns) / 1e9:.1f} s", flush=True)
