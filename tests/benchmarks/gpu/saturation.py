"""How much of the GPU's throughput is left when rows go through `await engine.infer`?

Rows per second relative to two raw loops, measured in turn (A B C A B C); medians. "one stream": three
batches back to back in one stream, each copied in, computed by a graph and copied out, so copies and kernels
take turns. "overlapped": four batches in four streams, so copies run beside kernels, which is the most that
the GPU can do. The engine has 8 contexts and one arena, and enough callers to fill four batches, each sending
one request after the other. Kernels take the same time for any number of rows. "adapter + double" is the
TensorRT adapter over the strict double, whose checks cost CPU time that the real library does not need.
"""

import statistics
from functools import partial

import numpy as np
import uvloop

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from tests.benchmarks.common import arguments, save
from tests.benchmarks.gpu.kernels import SpinModel, kernels_on
from tests.benchmarks.gpu.raw import RawLoop
from tests.benchmarks.gpu.support import (
    check,
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

ROWS = 64
DIM = 512
BATCHES = 4
"""Batches that the callers fill."""


class Double:
    """The TensorRT adapter over the strict double."""

    def __init__(self, device, work_ns):
        spec = EngineSpec(inputs=(TensorIO("input", dims=(-1, DIM)),), work_ns=work_ns)
        self._double = StrictTensorRT(device)
        self.model = TensorRTModel(double_plan(spec), device=device, flavour=self._double)
        self.expected = spec.expected

    def close(self):
        self.model.close()
        if self._double.violations():
            raise AssertionError(f"the double saw {self._double.violations()}")


async def measure(device, model, checker, rows, options, *, is_captured):
    """Measure one length of kernel and one size of request."""
    is_captured = is_captured and device.prefers_graphs
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
        waiting=options.waiting,
        graphs=(1, ROWS) if is_captured else "off",
    ) as engine:
        for _ in range(options.repeats):
            for name, raw in contenders.items():
                runs[name].append(raw.batches_per_s(options.seconds) * ROWS)
            engine_runs.append(await closed_loop(engine, exactly(checker), callers, options.seconds))
        ended = engine.statistics()
    answer = contenders["one stream"].batches[0].answer()
    check(answer, checker.expected(np.ones((ROWS, DIM), np.float32)))
    stages_us = contenders["one stream"].stages_us()
    for raw in contenders.values():
        raw.close()
    medians = {figure: statistics.median(run[figure] for run in engine_runs) for figure in engine_runs[0]}
    rates = [run["rows_per_s"] for run in engine_runs]
    # Each run over the raw loop just before it, as they were taken in turn.
    ratios = {name: [rate / raw for rate, raw in zip(rates, runs[name], strict=True)] for name in contenders}
    return {
        "raw_rows_per_s": {name: statistics.median(values) for name, values in runs.items()},
        "engine_rows_per_s": medians["rows_per_s"],
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratio_least": {name: min(values) for name, values in ratios.items()},
        "ratio_most": {name: max(values) for name, values in ratios.items()},
        "raw_stages_us": dict(zip(("copy_in", "compute", "copy_out"), stages_us, strict=True)),
        **{
            figure: medians[figure]
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


def targets(figures):
    lines = []
    for name, case in figures.items():
        if case.get("double"):
            continue
        target = 0.97 if case["work_us"] >= 300 and case["request_rows"] == 1 else None
        target = 0.90 if case["work_us"] == 100 and case["request_rows"] == 8 else target
        if target is not None:
            ratio = case["ratio"]["one stream"]
            lines.append(verdict(f"{name}, over one stream", ratio, target, is_at_least=True, unit=""))
    return verdicts(lines)


def main():
    options = arguments(
        __doc__,
        device="cuda:0",
        seconds=0.2,
        repeats=5,
        kernels="100,300,1000",
        doubles="300",
        contexts=8,
        waiting="adaptive",
    )
    device = open_device(options.device)
    kernels = kernels_on(device)
    figures = {}

    def case(name, model, checker, rows, **labels):
        with said(name):
            run = partial(measure, device, model, checker, rows, options)
            found = uvloop.run(run(is_captured=labels.get("is_captured", True)))
        figures[name] = {**labels, "request_rows": rows, **found}

    try:
        for work_us in map(int, filter(None, options.kernels.split(","))):
            for rows in (1, 8):
                model = SpinModel(kernels, work_us * 1000)
                name = f"{work_us} us, {ROWS // rows} requests of {rows}"
                case(name, model, model, rows, work_us=work_us)
        for work_us in map(int, filter(None, options.doubles.split(","))):
            model = SpinModel(kernels, work_us * 1000)
            name = f"{work_us} us, {ROWS // 8} requests of 8"
            case(f"{name}, no graphs", model, model, 8, work_us=work_us, double=True, is_captured=False)
            for is_captured in (True, False):
                double = Double(device, work_us * 1000)
                said_so = "graphs" if is_captured else "no graphs"
                case(
                    f"{name}, adapter + double, {said_so}",
                    double.model,
                    double,
                    8,
                    work_us=work_us,
                    double=True,
                    is_captured=is_captured,
                )
                double.close()
    finally:  # What was measured before something failed is worth having.
        report(figures, device)
        save(options.json, __doc__, {"cases": figures, "targets": targets(figures)}, device)


if __name__ == "__main__":
    main()
