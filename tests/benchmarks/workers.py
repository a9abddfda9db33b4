"""What does an engine in a worker process cost?

The same callers in process and with a worker, in turn. CPU time is that of all processes. What deaths cost is
in ``worker_faults``, and what several fronts gain in ``scale``. `--loads large --device cuda:0` is about
large rows on a GPU.
"""

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import uvloop

import asynctrt
from tests.benchmarks.common import arguments, in_turn, median, save, show, spread
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
        latencies_ns, ends = [], False

        async def caller():
            while not ends:
                began_ns = time.monotonic_ns()
                await engine.infer(rows)
                latencies_ns.append(time.monotonic_ns() - began_ns)

        tasks = [asyncio.create_task(caller()) for _ in range(callers)]
        await asyncio.sleep(WARM_UP_S)
        latencies_ns.clear()
        began, cpu, own = time.perf_counter(), cpu_s(), time.process_time()
        await asyncio.sleep(seconds)
        elapsed, cpu, own = time.perf_counter() - began, cpu_s() - cpu, time.process_time() - own
        cpu = max(cpu, own)  # All processes together are counted in ticks of 10 ms.
        count = max(len(latencies_ns), 1)
        p50_ns = float(np.median(latencies_ns))
        ends = True
        await asyncio.gather(*tasks)
    return {
        "requests_per_s": count / elapsed,
        "cpu_us": cpu / count * 1e6,
        "own_cpu_us": own / count * 1e6,
        "p50_us": p50_ns / 1e3,
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
                    kind: lambda name=name, dim=dim, callers=callers, kind=kind: uvloop.run(
                        loaded(
                            *(models[name], dim, callers, options.seconds),
                            isolation=kind,
                            device=options.device,
                        )
                    )
                    for kind in ("none", "process")
                },
                options.repeats,
                f"{name}, {callers}",
            )
            results[f"{name}, {callers}"] = pair
    show(
        "In process, and in a worker process",
        (
            "callers",
            *("requests/s", "worker", "least to most"),
            *("CPU µs", "worker", "front", "ratio", "p50 µs", "worker"),
        ),
        [_cost_line(name, pair["none"], pair["process"]) for name, pair in results.items()],
        f"medians of {options.repeats} runs of {options.seconds:g} s in turn; the ratio is that of pairs;",
    )
    return results


def _cost_line(name, local, worker):
    ratio = float(np.median([b["cpu_us"] / a["cpu_us"] for a, b in zip(local, worker, strict=True)]))
    return (
        name,
        f"{median(local, 'requests_per_s'):,.0f}",
        f"{median(worker, 'requests_per_s'):,.0f}",
        spread(worker, "requests_per_s"),
        *(f"{median(local, 'cpu_us'):.1f}", f"{median(worker, 'cpu_us'):.1f}"),
        f"{median(worker, 'own_cpu_us'):.1f}",
        f"{ratio:.2f}",
        *(f"{median(local, 'p50_us'):,.0f}", f"{median(worker, 'p50_us'):,.0f}"),
    )


def main():
    options = arguments(
        __doc__,
        repeats=3,
        seconds=1.0,
        callers=len(CALLERS),
        loads="",
        device="host",
    )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        mlp = str(mlp_onnx(Path(folder) / "mlp.onnx"))
        results = {"cost": cost(options, mlp)}
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
