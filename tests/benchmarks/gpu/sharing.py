"""What do shared arenas cost, and what do they save?

8 contexts on 8, 4, 2 and 1 arenas in turn; medians. "fills": a batch takes all multiprocessors, so two could
not compute at once anyway. "small": it takes an eighth of them, so eight could. There are enough callers to
keep every context in flight. Memory is how much less of the device is free (cuMemGetInfo) than before the
engine was opened. "double" is the TensorRT adapter over the strict double, which fills the GPU, and whose
enqueue memory is that of its profile.
"""

import statistics

import uvloop

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from tests.benchmarks.common import arguments, save
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.support import (
    closed_loop,
    exactly,
    open_device,
    rows_of_callers,
    said,
    show,
    verdict,
    verdicts,
)
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan

ARENAS = (8, 4, 2, 1)
CONTEXTS = 8
ROWS = 64
REQUEST_ROWS = 8
DIM = 512
SMALL = 1 / 8


async def measure(device, model, checker, arenas, seconds):
    """Open, measure and close one engine."""
    free_nbytes = device.memory().free_nbytes
    callers = rows_of_callers((CONTEXTS + 2) * ROWS // REQUEST_ROWS, REQUEST_ROWS, (DIM,))
    async with asynctrt.open(
        model,
        device=device,
        contexts=CONTEXTS,
        arenas=arenas,
        max_rows=ROWS,
        graphs=(REQUEST_ROWS, ROWS) if device.prefers_graphs else "off",
    ) as engine:
        used_nbytes = free_nbytes - device.memory().free_nbytes
        before = engine.statistics()
        figures = await closed_loop(engine, exactly(checker), callers, seconds, is_timed=True)
        after = engine.statistics()
    batches = max(after.batches - before.batches, 1)
    return figures | {
        "device_nbytes": used_nbytes,
        "arena_nbytes": after.arena_nbytes,
        "private_nbytes": after.arena_nbytes_private,
        "arena_wait_us": (after.arena_wait_ns - before.arena_wait_ns) / batches / 1e3,
    }


def in_turn(device, model, checker, options):
    """Return medians for each number of arenas, and the throughput relative to 8 arenas in the same round."""
    runs = {arenas: [] for arenas in ARENAS}
    for _ in range(options.repeats):
        for arenas in ARENAS:
            runs[arenas].append(uvloop.run(measure(device, model, checker, arenas, options.seconds)))
    figures = {}
    for arenas, found in runs.items():
        medians = {name: statistics.median(run[name] for run in found) for name in found[0]}
        ratios = [
            run["rows_per_s"] / full["rows_per_s"] for run, full in zip(found, runs[ARENAS[0]], strict=True)
        ]
        figures[arenas] = medians | {
            "throughput_over_8": statistics.median(ratios),
            "throughput_over_8_least": min(ratios),
            "throughput_over_8_most": max(ratios),
        }
    return figures


def report(cases, device):
    show(
        f"{CONTEXTS} contexts on 8, 4, 2 and 1 arenas, batches of {ROWS} rows",
        (
            "case",
            "arenas",
            "rows/s",
            "/ 8 arenas",
            "least-most",
            "p50 ms",
            "p99 ms",
            "arenas MiB",
            "device MiB",
            "waits for it µs",
            "CPU µs a batch",
        ),
        [
            (
                name,
                str(arenas),
                f"{case['rows_per_s']:,.0f}",
                f"{case['throughput_over_8']:.3f}",
                f"{case['throughput_over_8_least']:.2f}-{case['throughput_over_8_most']:.2f}",
                f"{case['p50_us'] / 1e3:.2f}",
                f"{case['p99_us'] / 1e3:.2f}",
                f"{case['arena_nbytes'] / 2**20:,.1f}",
                f"{case['device_nbytes'] / 2**20:,.1f}",
                f"{case['arena_wait_us']:.0f}",
                f"{case['cpu_us_a_batch']:.0f}",
            )
            for name, figures in cases.items()
            for arenas, case in figures.items()
        ],
        device=device,
    )


def main():
    options = arguments(
        __doc__, device="cuda:0", seconds=0.5, repeats=3, mib=256, work_us=500, small_us=2000, double_us=500
    )
    device = open_device(options.device)
    kernels = kernels_on(device)
    enqueue_nbytes = options.mib << 20
    models = {
        f"fills, {options.work_us} us": SpinModel(
            kernels, options.work_us * 1000, enqueue_nbytes=enqueue_nbytes
        ),
        f"small, {options.small_us} us": SpinModel(
            kernels, options.small_us * 1000, enqueue_nbytes=enqueue_nbytes, share=SMALL
        ),
    }
    cases = {}
    try:
        for name, model in models.items():
            with said(name):
                cases[name] = in_turn(device, model, model, options)
        if options.double_us:
            spec = EngineSpec(inputs=(TensorIO("input", dims=(-1, DIM)),), work_ns=options.double_us * 1000)
            double = StrictTensorRT(device)
            model = TensorRTModel(double_plan(spec), device=device, flavour=double)
            name = f"double, {options.double_us} us"
            with said(name):
                cases[name] = in_turn(device, model, spec, options)
            model.close()
            if double.violations():
                raise AssertionError(f"the double saw {double.violations()}")
    finally:  # What was measured before something failed is worth having.
        report(cases, device)
        targets = [
            verdict(
                f"{name}, one arena over eight",
                figures[1]["throughput_over_8"],
                0.95,
                is_at_least=True,
                unit="",
            )
            for name, figures in cases.items()
            if not name.startswith("small")
        ]
        save(options.json, __doc__, {"cases": cases, "targets": verdicts(targets)}, device)


if __name__ == "__main__":
    main()
