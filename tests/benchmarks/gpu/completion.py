"""How long after the GPU has finished does the coroutine continue?

The kernel notes when it ended, on the GPU's clock, which is compared with the host's before and after each
case. Lateness is the time from there to the coroutine, minus the median of the same for a raw loop that
launches the same graph, records an event and spins in cuEventSynchronize. Host times from launch to coroutine
would also count the engine's work before the launch; here an error in comparing the clocks is in both figures
and cancels. "reaper": a bare event and a coroutine that waits for it. "infer": `await engine.infer` of one
row, which also copies and delivers the answer. One caller sends one request after the other.
"""

import asyncio
from bisect import bisect_left, bisect_right
from functools import partial

import numpy as np
import uvloop

import asynctrt
from asynctrt._util import clock
from asynctrt.runtime.completion import Reaper
from asynctrt.scheduling.batch_times import Times
from tests.benchmarks.common import arguments, quantiles_us, save, show
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.raw import RawLoop
from tests.benchmarks.gpu.support import Load, check, open_device, said

COUNT_MIN = 400
"""Samples of a case at the least, for its 99th percentile, unless it takes four times as long as it may."""

WARM_UP = 25
TIMED_ONE_IN = 16
ROW = np.arange(512, dtype=np.float32).reshape(1, 512)


class Samples:
    """When batches ended on the GPU, and when the host noticed."""

    def __init__(self, kernels, seconds):
        self._kernels = kernels
        self._seconds = seconds
        self._opened_ns = self._begun_ns = clock.now_ns()
        self._pair = kernels.compare_clocks()
        self._ended_ns, self._found_ns, self._resumed_ns = [], [], []
        self._seen = 0

    def add(self, ended_ns, found_ns, resumed_ns):
        """Record one more, unless it belongs to the warm-up; return whether to continue."""
        self._seen += 1
        if self._seen == 1 or (self._seen <= WARM_UP and resumed_ns - self._opened_ns < self._seconds * 1e9):
            self._begun_ns = clock.now_ns()
            return True
        self._ended_ns.append(ended_ns)
        self._found_ns.append(found_ns)
        self._resumed_ns.append(resumed_ns)
        passed = (resumed_ns - self._begun_ns) / 1e9 / self._seconds
        return passed < 1 or (len(self._ended_ns) < COUNT_MIN and passed < 4)

    def end(self):
        """Convert the GPU's times to the host's clock."""
        (gpu_ns, host_ns), (gpu_after_ns, host_after_ns) = self._pair, self._kernels.compare_clocks()
        pace = (host_after_ns - host_ns) / max(gpu_after_ns - gpu_ns, 1)
        ended_ns = np.array(self._ended_ns, dtype=np.int64)
        self._ended_ns = ((ended_ns - gpu_ns) * pace).astype(np.int64) + host_ns
        return self

    @property
    def late_ns(self):
        return np.array(self._resumed_ns, dtype=np.int64) - self._ended_ns

    def figures(self, base_ns, ticks_ns):
        """Lateness over the raw loop's, and how many ticks of a loop with other work began before the batch
        was found, counted from when the raw loop would have seen it."""
        figures = quantiles_us(self.late_ns - base_ns)
        if ticks_ns:
            ticks = [
                bisect_right(ticks_ns, found_ns) - bisect_left(ticks_ns, ended_ns + base_ns)
                for ended_ns, found_ns in zip(self._ended_ns.tolist(), self._found_ns, strict=True)
            ]
            figures["ticks_p99"] = float(np.percentile(ticks, 99))
            figures["ticks_max"] = max(ticks)
        return figures


def raw_late(kernels, model, raw, seconds):
    """Measure the raw loop: launch, record, spin."""
    batch = raw.batches[0]
    finish = kernels.create_finish(batch.stream)
    samples = Samples(kernels, seconds)
    while True:
        batch.launch()
        finish()
        now_ns = clock.now_ns()
        if not samples.add(model.ended_ns, now_ns, now_ns):
            return samples.end()


async def reaper_late(kernels, model, batch, seconds):
    """Measure the reaper alone: launch a batch, and await its event."""
    loop = asyncio.get_running_loop()
    reaper = Reaper(loop, clock.now_ns)
    latency = Times()
    samples = Samples(kernels, seconds)
    is_wanted = True
    found_ns = number = 0

    def found(future):
        nonlocal found_ns
        found_ns = clock.now_ns()
        future.set_result(None)

    try:
        while is_wanted:
            future = loop.create_future()
            # As the engine does, which takes the times of a few batches only: they cost the GPU some.
            is_timed = number < WARM_UP or not number % TIMED_ONE_IN
            (batch.launch_timed if is_timed else batch.launch)()
            expected_ns = latency.typical((), batch.rows)
            reaper.watch(batch.end, partial(found, future), expected_ns=expected_ns)
            await future
            resumed_ns = clock.now_ns()
            number += 1
            if is_timed:
                latency.observe((), batch.rows, sum(batch.stages_ns()))
            is_wanted = samples.add(model.ended_ns, found_ns, resumed_ns)
            check(batch.answer(), model.expected(batch.slab.inputs[0][: batch.rows]))
    finally:
        reaper.close()
    return samples.end()


async def infer_late(kernels, model, engine, seconds):
    """Measure the whole engine, and the cores that it used, including its caller."""
    samples = Samples(kernels, seconds)
    is_wanted = True
    start_ns, start_cpu_ns = clock.now_ns(), clock.cpu_ns()
    while is_wanted:
        answer = await engine.infer(ROW)
        resumed_ns = clock.now_ns()
        is_wanted = samples.add(model.ended_ns, resumed_ns, resumed_ns)
        check(answer, model.expected(ROW))
    cores = (clock.cpu_ns() - start_cpu_ns) / (clock.now_ns() - start_ns)
    return samples.end(), cores


def opened(model, device):
    graphs = "off" if device.name == "host" else (1,)
    return asynctrt.open(model, device=device, contexts=2, arenas=1, max_rows=1, graphs=graphs)


async def measure(device, kernels, work_us, options, figures):
    """Measure all loops with one length of kernel."""
    model = SpinModel(kernels, work_us * 1000)
    raw = RawLoop(device, model, 1, depth=1, is_captured=device.prefers_graphs)
    raw.fill(ROW)
    bases = [raw_late(kernels, model, raw, options.seconds).late_ns]
    base_ns = int(np.median(bases[0]))
    async with opened(model, device) as engine:
        for kind in options.loops.split(","):
            load = Load(kind)
            reaper = await reaper_late(kernels, model, raw.batches[0], options.seconds)
            infer, cores = await infer_late(kernels, model, engine, options.seconds)
            load.end()
            figures[f"{work_us} us, {kind} loop"] = {
                "work_us": work_us,
                "loop": kind,
                "reaper": reaper.figures(base_ns, load.ticks_ns),
                "infer": infer.figures(base_ns, []),
                "cores": cores,
            }
    bases.append(raw_late(kernels, model, raw, options.seconds).late_ns)
    figures[f"{work_us} us, raw"] = {
        "work_us": work_us,
        "before": quantiles_us(bases[0]),
        "after": quantiles_us(bases[1]),
    }
    raw.close()


def report(figures, kernels, device):
    """Return the tables."""
    raw = [case for case in figures.values() if "before" in case]
    show(
        "raw: from the end of the kernel to the return of cuEventSynchronize, spinning; taken off below",
        ("kernel", "before: p50 µs", "p99", "after: p50 µs", "p99"),
        [
            (f"{case['work_us']} µs", *(f"{case[when][q]:.1f}" for when in ("before", "after") for q in Q))
            for case in raw
        ],
        f"{kernels.said}.",
        device=device,
    )
    show(
        "µs from completion to coroutine over raw, one request at a time",
        ("case", "reaper p50", "p99", "infer p50", "p99", "cores", "ticks to find: p99", "max", "samples"),
        [
            (
                name,
                *(f"{case['reaper'][q]:.1f}" for q in Q),
                *(f"{case['infer'][q]:.1f}" for q in Q),
                f"{case['cores']:.2f}",
                *(
                    f"{case['reaper'][t]:g}" if t in case["reaper"] else ""
                    for t in ("ticks_p99", "ticks_max")
                ),
                str(case["infer"]["count"]),
            )
            for name, case in figures.items()
            if "loop" in case
        ],
        "cores: of the process during infer, its caller included.",
        device=device,
    )


Q = ("p50_us", "p99_us")


def main():
    options = arguments(
        __doc__,
        device="cuda:0",
        seconds=0.5,
        kernels="50,200,1000,5000",
        loops="idle,busy",
    )
    device = open_device(options.device)
    kernels = kernels_on(device)
    figures = {}
    try:
        for work_us in map(int, filter(None, options.kernels.split(","))):
            with said(f"kernels of {work_us} us"):
                uvloop.run(measure(device, kernels, work_us, options, figures))
    finally:  # What was measured before something failed is worth having.
        report(figures, kernels, device)
        save(options.json, __doc__, {"cases": figures}, device)


if __name__ == "__main__":
    main()
