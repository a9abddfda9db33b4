"""What does an engine in a worker process cost?

The same callers in process and with a worker, in turn. CPU time is that of all processes. What deaths cost is
in ``worker_faults``, and what several fronts gain in ``scale``. `--loads large --device cuda:0` is about
large rows on a GPU.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import psutil

import asynctrt
from tests.benchmarks.common import arguments, asked_again, in_turn, report, save
from tests.benchmarks.mlp import mlp_onnx

NOOP = "tests.benchmarks.serving:noop"
LOADS = (("no-op", 16), ("MLP", 512), ("large", 150_528))
CALLERS = (1, 8, 64, 256)
WARM_UP_S = 1.5
"""Until the memory of large rows was all used once: to get a new page takes longer than to copy one."""


def large():
    """Return a model of rows of 588 KiB, as a picture of 224 x 224 in float32 has."""
    from asynctrt.backends.function import FunctionModel
    from asynctrt.tensors import TensorSpec

    return FunctionModel(
        lambda inputs: inputs["input"][:, :16],
        inputs=TensorSpec("input", "float32", (150_528,)),
        outputs=TensorSpec("output", "float32", (16,)),
        name="large",
    )


def cpu_s():
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in [own, *own.children(recursive=True)])


async def loaded(model, dim, callers, seconds, **options):
    """Measure so many callers that ask again at once."""
    rows = np.zeros((1, dim), np.float32)
    async with asynctrt.open(model, **options) as engine:
        latencies_ns, elapsed_ns, own_ns, before_s, after_s = await asked_again(
            engine.infer, [rows] * callers, seconds, look=cpu_s, warm_up_s=min(WARM_UP_S, 2 * seconds)
        )
    count = max(len(latencies_ns), 1)
    return {
        "requests_per_s": count / elapsed_ns * 1e9,
        # All processes together are counted in ticks of 10 ms.
        "cpu_us": max(after_s - before_s, own_ns / 1e9) / count * 1e6,
        "own_cpu_us": own_ns / count / 1e3,
        "p50_us": float(np.median(latencies_ns)) / 1e3,
    }


def cost(options, mlp):
    """Measure each load with both, in turn, and show the ratios of the pairs."""
    models = {"no-op": NOOP, "MLP": mlp, "large": "tests.benchmarks.workers:large"}
    if options.device != "host":
        models["large"] = "tests.gpu.fallible:large"
    results = {}
    for name, dim in LOADS:
        if options.loads and name not in options.loads.split(","):
            continue
        for callers in CALLERS[: options.callers]:
            pair = in_turn(
                {
                    kind: partial(
                        loaded,
                        *(models[name], dim, callers, options.seconds),
                        isolation=kind,
                        device=options.device,
                    )
                    for kind in ("none", "process")
                },
                options.repeats,
                f"{name}, {callers}",
            )
            results[f"{name}, {callers}"] = pair
    lines = {f"{name}, {kind}": runs for name, pair in results.items() for kind, runs in pair.items()}
    formats = {"requests_per_s": ",.0f", "cpu_us": ".1f", "own_cpu_us": ".1f", "p50_us": ",.0f"}
    report("In process, and in a worker process", lines, **formats)
    return results


def main():
    options = arguments(
        __doc__,
        repeats=3,
        seconds=1.0,
        callers=len(CALLERS),
        loads="",
        device="host",
    )
    with tempfile.TemporaryDirectory() as folder:
        mlp = str(mlp_onnx(Path(folder) / "mlp.onnx"))
        results = {"cost": cost(options, mlp)}
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
