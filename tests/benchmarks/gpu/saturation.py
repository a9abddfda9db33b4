"""How much of the GPU's throughput is left when rows go through `await engine.infer`?

Rows per second relative to two raw loops, measured in turn (A B C A B C); medians. "one stream": three
batches back to back in one stream, each copied in, computed by a graph and copied out, so copies and kernels
take turns. "overlapped": four batches in four streams, so copies run beside kernels, which is the most that
the GPU can do. The engine has 8 contexts and one arena, and enough callers to fill four batches, each sending
one request after the other. Kernels take the same time for any number of rows.
"""

import statistics

import numpy as np
import uvloop

import asynctrt
from tests.benchmarks.common import arguments, medians, save, show
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.raw import RawLoop
from tests.benchmarks.gpu.support import check, closed_loop, exactly, open_device, rows_of_callers, said

ROWS = 64
DIM = 512
BATCHES = 4
"""Batches that the callers fill."""


async def measure(device, model, rows, options):
    """Measure one length of kernel and one size of request."""
    is_captured = device.prefers_graphs
    contenders = {
        "one stream": RawLoop(device, model, ROWS, depth=3, is_captured=is_captured),
        "overlapped": RawLoop(device, model, ROWS, depth=4, is_overlapped=True, is_captured=is_captured),
    }
    for raw in contenders.values():
        raw.fill(np.ones((ROWS, DIM), np.float32))
    callers = rows_of_callers(BATCHES * ROWS // rows, rows, (DIM,))
    runs = {name: [] for name in contenders}
    engine_runs = []
    async with asynctrt.open(
        model,
        device=device,
        contexts=options.contexts,
        arenas=1,
        max_rows=ROWS,
        graphs=(1, ROWS) if is_captured else "off",
    ) as engine:
        for _ in range(options.repeats):
            for name, raw in contenders.items():
                runs[name].append(raw.batches_per_s(options.seconds) * ROWS)
            engine_runs.append(await closed_loop(engine, exactly(model), callers, options.seconds))
        ended = engine.statistics()
    answer = contenders["one stream"].batches[0].answer()
    check(answer, model.expected(np.ones((ROWS, DIM), np.float32)))
    stages_us = contenders["one stream"].stages_us()
    for raw in contenders.values():
        raw.close()
    middle = medians(engine_runs)
    rates = [run["rows_per_s"] for run in engine_runs]
    # Each run over the raw loop just before it, as they were taken in turn.
    ratios = {name: [rate / raw for rate, raw in zip(rates, runs[name], strict=True)] for name in contenders}
    return {
        "raw_rows_per_s": {name: statistics.median(values) for name, values in runs.items()},
        "engine_rows_per_s": middle["rows_per_s"],
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratio_least": {name: min(values) for name, values in ratios.items()},
        "ratio_most": {name: max(values) for name, values in ratios.items()},
        "raw_stages_us": dict(zip(("copy_in", "compute", "copy_out"), stages_us, strict=True)),
        **{
            figure: middle[figure]
            for figure in ("rows_a_batch", "cpu_us_a_batch", "cpu_us_a_request", "cores")
        },
        "in_flight_contexts": ended.contexts,
        "is_captured": is_captured,
    }


def report(figures, device):
    show(
        f"rows a second through infer over raw loops, float32[{DIM}] rows, batches of {ROWS}",
        (
            "case",
            "raw rows/s",
            "engine rows/s",
            "/ one stream",
            "least-most",
            "/ overlapped",
            "least-most",
            "rows a batch",
            "CPU µs a batch",
            "a request",
        ),
        [
            (
                name,
                f"{case['raw_rows_per_s']['one stream']:,.0f}",
                f"{case['engine_rows_per_s']:,.0f}",
                *(
                    said
                    for raw in ("one stream", "overlapped")
                    for said in (
                        f"{case['ratio'][raw]:.3f}",
                        f"{case['ratio_least'][raw]:.2f}-{case['ratio_most'][raw]:.2f}",
                    )
                ),
                f"{case['rows_a_batch']:.1f}",
                f"{case['cpu_us_a_batch']:.0f}",
                f"{case['cpu_us_a_request']:.2f}",
            )
            for name, case in figures.items()
        ],
        "CPU: of the process, its callers included.",
        device=device,
    )


def main():
    options = arguments(
        __doc__,
        device="cuda:0",
        seconds=0.2,
        repeats=5,
        kernels="100,300,1000",
        contexts=8,
    )
    device = open_device(options.device)
    kernels = kernels_on(device)
    figures = {}

    try:
        for work_us in map(int, filter(None, options.kernels.split(","))):
            for rows in (1, 8):
                model = SpinModel(kernels, work_us * 1000)
                name = f"{work_us} us, {ROWS // rows} requests of {rows}"
                with said(name):
                    found = uvloop.run(measure(device, model, rows, options))
                figures[name] = {"work_us": work_us, "request_rows": rows, **found}
    finally:  # What was measured before something failed is worth having.
        report(figures, device)
        save(options.json, __doc__, {"cases": figures}, device)


if __name__ == "__main__":
    main()
