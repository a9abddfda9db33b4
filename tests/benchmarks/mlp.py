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
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.devices.host import HostDevice, cores
from asynctrt.loadtest.samples import random_inputs
from tests.benchmarks.common import WARM_UP_S, arguments, in_turn, report, requests_of, save
from tests.benchmarks.overhead import CALLERS
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


def cases_of(path, options):
    """Return how to measure ONNX Runtime alone, and the engine under 1, 32 and 256 callers."""
    model = OnnxModel(path, OnnxOptions(intra_op_num_threads=options.threads))
    sessions = {model.intra_op_threads: model}
    if cores() not in sessions:
        sessions[cores()] = OnnxModel(path, OnnxOptions(intra_op_num_threads=cores()))
    cases = {
        f"raw, {threads} thread{'s' * (threads > 1)}, batch {rows}": partial(
            _run_raw, raw, random_inputs(model.inputs, {}, rows), rows, options.seconds
        )
        for threads, raw in sessions.items()
        for rows in RAW_ROWS
    }
    return cases | {
        f"engine, {callers} callers" if callers > 1 else "engine, a lone caller": partial(
            _run_engine, model, options.contexts or None, callers, options.seconds
        )
        for callers in CALLERS
    }


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


async def _run_engine(model, contexts, callers, seconds):
    device = HostDevice(threads=max(1, cores() // model.intra_op_threads))
    async with asynctrt.open(model, device=device, contexts=contexts) as engine:
        inputs = [random_inputs(model.inputs, {}, 1) for _ in range(callers)]
        found = await requests_of(engine.infer, inputs, seconds, look=engine.statistics)
    return found | {"rows_per_s": found["requests_per_s"], "cpu_us_per_row": found["cpu_us_per_request"]}


def main():
    options = arguments(__doc__, repeats=5, seconds=0.5, threads=1, contexts=0)
    with tempfile.TemporaryDirectory() as folder:
        path = mlp_onnx(Path(folder) / "mlp.onnx")
        results = in_turn(cases_of(path, options), options.repeats, "MLP")
    figures = {"rows_per_s": ",.0f", "cpu_us_per_row": ".2f", "mean_batch_rows": ".2f"}
    caption = f"{options.threads} threads a batch, medians of {options.repeats} runs in turn;"
    report("MLP 512-2048-512 x 2", results, caption, **figures, p50_us=",.0f", p99_us=",.0f")
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
