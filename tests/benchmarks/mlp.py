"""A 512-2048-512 x 2 MLP: the engine against raw ONNX Runtime, with one thread per batch and with two.

It writes the model to a temporary file and runs what ``asynctrt bench MODEL`` runs.
"""

import tempfile
from functools import partial
from pathlib import Path

import anyio
import numpy as np
from onnx import TensorProto

from asynctrt.bench import model_report, run_cases
from asynctrt.options import Options
from tests.benchmarks.common import arguments, console, save, show
from tests.models import node
from tests.models import save as save_model


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


def main():
    options = arguments(__doc__, repeats=5, seconds=0.5, threads=1, contexts=0)
    with tempfile.TemporaryDirectory() as folder:
        path = mlp_onnx(Path(folder) / "mlp.onnx")
        engine = Options(contexts=options.contexts or None)
        report = model_report(path, engine, {}, options.threads, options.repeats)
        with console.status("measuring"):
            anyio.run(
                partial(run_cases, report, options.seconds, lambda case: None),
                backend_options={"use_uvloop": True},
            )
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
