"""Shared by the GPU benchmarks: the device, callers in a loop, loops with other work."""

import asyncio
from contextlib import contextmanager

import numpy as np

from asynctrt._util import clock
from asynctrt.devices.host import HostDevice
from asynctrt.loadtest.making import describe_machine
from tests.benchmarks.common import describe_gpu

WARM_UP_S = 0.1


def open_device(name, **settings):
    """Return the device to measure; the host device gets separate memory, for the same copies."""
    if name == "host":
        return HostDevice(threads=1, unified=False)
    from asynctrt.devices.cuda import CudaDevice, find_cuda_device

    device = find_cuda_device(name)
    return CudaDevice(device.ordinal, **settings) if settings else device


def show(title, columns, lines, caption="", *, device):
    """Print a plain table, for log files and for machines without rich."""
    lines = [tuple(columns), *(tuple(line) for line in lines)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        first, *others = zip(line, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]).rstrip())
        if line is lines[0]:
            print("  ".join("-" * width for width in widths))
    gpu = describe_gpu(device)
    machine = describe_machine()
    on = f"{machine['cpu']}, {machine['cores']} cores"
    if gpu is not None:
        on = f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; {on}"
    print(f"{caption} On: {on}".strip(), flush=True)


def quantiles_us(times_ns):
    """Return the median, the 99th percentile and the maximum, in µs."""
    p50, p99 = np.percentile(times_ns, [50, 99])
    return {"p50_us": p50 / 1e3, "p99_us": p99 / 1e3, "max_us": max(times_ns) / 1e3, "count": len(times_ns)}


def check(answer, expected):
    """Check that every output is right bit by bit."""
    for name, values in expected.items():
        if not np.array_equal(answer[name], values):
            raise AssertionError(f"a wrong answer: {name} is {answer[name]}, and should be {values}")


def exactly(model):
    """Return a check of answers, for a model that can compute the expected ones."""
    return lambda rows, answer: check(answer, model.expected(rows))


async def asked_again(infer, inputs, seconds, check_answer, look=lambda: None):
    """Have one caller for each of ``inputs`` send it again and again, for ``seconds`` after a warm-up.

    Each caller's last answer is checked: ``check_answer(rows, answer)``.

    :param look: called when the measurement begins and when it ends.
    :returns: the latencies and the elapsed and the CPU time in ns, and what ``look`` returned.
    """
    is_over = is_measured = False
    latencies_ns = []

    async def caller(rows):
        answer = None
        while not is_over:
            sent_ns = clock.now_ns()
            answer = await infer(rows)
            if is_measured:
                latencies_ns.append(clock.now_ns() - sent_ns)
        check_answer(rows, answer)

    async with asyncio.TaskGroup() as group:
        for rows in inputs:
            group.create_task(caller(rows))
        await asyncio.sleep(WARM_UP_S)
        is_measured = True
        before, start_ns, start_cpu_ns = look(), clock.now_ns(), clock.cpu_ns()
        await asyncio.sleep(seconds)
        after, elapsed_ns, cpu_ns = look(), clock.now_ns() - start_ns, clock.cpu_ns() - start_cpu_ns
        is_measured, is_over = False, True
    return latencies_ns, elapsed_ns, cpu_ns, before, after


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
