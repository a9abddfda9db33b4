"""A 512-2048-512 x 2 MLP: the engine against raw ONNX Runtime, with one thread per batch and with two.

The raw runtime runs one batch at a time, with the engine's own session settings and with all cores. The cases
run in turn, and all are repeated.
"""

import asyncio
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from onnx import TensorProto

import asynctrt
from asynctrt._util import clock
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.devices.host import HostDevice, cores
from asynctrt.loadtest.samples import random_inputs
from asynctrt.options import Options
from tests.benchmarks.common import arguments, save, show
from tests.benchmarks.overhead import CALLERS, WARM_UP_S, BenchCase, BenchReport, closed_loop, run_cases
from tests.models import node
from tests.models import save as save_model

RAW_ROWS = (1, 8, 32, 64)
RAW_SLICE_S = 0.05
"""Interval at which a raw loop lets the event loop run, so that Ctrl-C works."""


def mlp_onnx(path):
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "input"
    for block in range(2):
        for layer, (wide, narrow) in enumerate([(512, 2048), (2048, 512)]):
            name = f"{block}{layer}"
            matrix = rng.standard_normal((wide, narrow)).astype(np.float32) / np.float32(wide**0.5)
            weights += [(f"w{name}", matrix), (f"b{name}", np.zeros(narrow, np.float32))]
            nodes += [
                node("Gemm", f"{last} w{name} b{name}", f"y{name}"),
                node("Relu", f"y{name}", f"r{name}"),
            ]
            last = f"r{name}"
    nodes.append(node("Identity", last, "output"))
    row = TensorProto.FLOAT, ["rows", 512]
    return save_model(path, nodes, [("input", *row)], [("output", *row)], weights)


def model_report(path, options, intra_op_threads, repeats):
    """Return a report, still empty, on the rows/s of ONNX Runtime alone and of the engine under 1, 32 and 256
    callers."""
    from asynctrt.backends.onnxruntime import OnnxModel

    model = OnnxModel(path, OnnxOptions(intra_op_num_threads=intra_op_threads))
    sessions = {model.intra_op_threads: model}
    if cores() not in sessions:
        sessions[cores()] = OnnxModel(path, OnnxOptions(intra_op_num_threads=cores()))
    cases = [
        BenchCase(
            f"raw, {threads} thread{'s' * (threads > 1)}, batch {rows}",
            {"kind": "raw", "threads": threads, "rows": rows},
            partial(_run_raw, raw, random_inputs(model.inputs, {}, rows), rows),
        )
        for threads, raw in sessions.items()
        for rows in RAW_ROWS
    ]
    cases += [
        BenchCase(
            f"engine, {callers} callers" if callers > 1 else "engine, a lone caller",
            {"kind": "engine", "callers": callers},
            partial(_run_engine, model, options, callers),
        )
        for callers in CALLERS
    ]
    settings = {"max_rows": options.max_rows or 64, "intra_op_threads": model.intra_op_threads}
    return BenchReport(settings, cases, repeats)


async def _run_raw(model, inputs, rows, seconds):
    run = partial(model.session.run, None, dict(inputs))
    await _repeat(run, WARM_UP_S)
    batches, elapsed_ns, cpu_ns = await _repeat(run, seconds)
    return {
        "rows_per_s": batches * rows / elapsed_ns * 1e9,
        "cpu_us_per_row": cpu_ns / (batches * rows) / 1e3,
        "batch_ms": elapsed_ns / batches / 1e6,
    }


async def _repeat(run, seconds):
    """Run back to back for ``seconds``; return how often, and the time and the CPU time in ns."""
    count = elapsed_ns = used_ns = 0
    while elapsed_ns < seconds * 1e9:
        start_ns, start_cpu_ns = clock.now_ns(), clock.cpu_ns()
        end_ns = start_ns
        while end_ns - start_ns < RAW_SLICE_S * 1e9:
            run()
            count += 1
            end_ns = clock.now_ns()
        elapsed_ns += end_ns - start_ns
        used_ns += clock.cpu_ns() - start_cpu_ns
        await asyncio.sleep(0)
    return count, elapsed_ns, used_ns


async def _run_engine(model, options, callers, seconds):
    device = HostDevice(threads=max(1, cores() // model.intra_op_threads))
    async with asynctrt.open(model, device=device, options=options) as engine:
        inputs = [random_inputs(model.inputs, {}, 1) for _ in range(callers)]
        measures, latencies_ns = await closed_loop(engine, inputs, seconds, timed=True)
    p50_ns, p99_ns = np.percentile(latencies_ns, [50, 99]) if latencies_ns else (0.0, 0.0)
    return {
        "rows_per_s": measures["requests_per_s"],
        "cpu_us_per_row": measures["cpu_us_per_request"],
        "mean_batch_rows": measures["mean_batch_rows"],
        "p50_ms": float(p50_ns) / 1e6,
        "p99_ms": float(p99_ns) / 1e6,
    }


def main():
    options = arguments(__doc__, repeats=5, seconds=0.5, threads=1, contexts=0)
    with tempfile.TemporaryDirectory() as folder:
        path = mlp_onnx(Path(folder) / "mlp.onnx")
        engine = Options(contexts=options.contexts or None)
        report = model_report(path, engine, options.threads, options.repeats)
        run_cases(report, options.seconds)
    show(
        "MLP 512-2048-512 x 2",
        ("", "rows/s", "least to most", "CPU µs a row", "mean batch", "p50 ms", "p99 ms"),
        [
            (
                case.name,
                f"{case.median('rows_per_s'):,.0f}",
                "{:,.0f} to {:,.0f}".format(*case.spread("rows_per_s")),
                *(
                    "" if case.median(figure) is None else f"{case.median(figure):.2f}"
                    for figure in ("cpu_us_per_row", "mean_batch_rows", "p50_ms", "p99_ms")
                ),
            )
            for case in report.cases
        ],
        f"{options.threads} threads a batch, medians of {options.repeats} runs in turn;",
    )
    save(options.json, __doc__, report.as_json())


if __name__ == "__main__":
    main()
