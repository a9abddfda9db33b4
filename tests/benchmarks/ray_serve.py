"""What a call through Ray Serve costs, by the rows that it has: requests and rows a second, and latency.

``python -m tests.benchmarks.ray_serve``: a model that does nothing but copy 16 numbers a row, on the host
device; 64 callers in one process call it in this process, through a handle to one replica, and to two on two
nodes of a local cluster. A replica is a process: where there are few cores, all share them.
"""

import asyncio
import statistics
import time

import numpy as np

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.tensors import TensorSpec
from tests.benchmarks.common import arguments, save, show
from tests.ray_cluster import two_nodes

PATH = "tests.benchmarks.ray_serve:copying"
SETTINGS = {"max_rows": 512, "max_queue_rows": 1 << 20}
ROWS = (1, 8, 64, 512)


def copying():
    """A model that copies its input."""

    def compute(inputs, outputs):
        outputs["output"][...] = inputs["input"]

    return FunctionModel(
        compute,
        inputs=TensorSpec("input", "float32", (16,)),
        outputs=TensorSpec("output", "float32", (16,)),
    )


async def measure(infer, rows, callers, seconds):
    """Call in a closed loop for a time, after a third of it for warming up."""
    inputs = {"input": np.ones((rows, 16), np.float32)}
    begin, latencies = time.perf_counter() + seconds / 3, []

    async def caller():
        while (began := time.perf_counter()) < begin + seconds:
            result = await infer(inputs)
            assert result["output"].shape == (rows, 16)
            if (ended := time.perf_counter()) >= begin and ended <= begin + seconds:
                latencies.append(ended - began)

    await asyncio.gather(*(caller() for _ in range(callers)))
    rate = len(latencies) / seconds
    return {
        "rows_a_call": rows,
        "callers": callers,
        "requests_per_s": rate,
        "rows_per_s": rate * rows,
        "p50_ms": statistics.median(latencies) * 1e3 if latencies else None,
    }


async def compare(where, infer, options):
    sizes = [int(rows) for rows in options.rows.split(",")]
    cases = [(rows, callers) for callers in (options.callers, 1) for rows in sizes]
    return [{"where": where, **await measure(infer, *case, options.seconds)} for case in cases]


async def in_process(options):
    async with asynctrt.open(PATH, **SETTINGS) as engine:
        return await compare("in process", engine.infer, options)


def through_ray(options):
    """Yield the figures with one replica, and with two, on a cluster of two nodes."""
    from ray import serve

    import asynctrt.ray

    with two_nodes():
        for count in (1, 2):
            application = asynctrt.ray.application(
                PATH, replicas=count, deployment={"max_replicas_per_node": 1}, **SETTINGS
            )
            handle = serve.run(application, route_prefix=None)
            where = f"{count} replica{'s' * (count > 1)}"
            yield from asyncio.run(compare(where, handle.infer.remote, options))


def main():
    options = arguments(__doc__, seconds=3.0, callers=64, rows=",".join(map(str, ROWS)))
    figures = [*asyncio.run(in_process(options)), *through_ray(options)]
    show(
        "Calls through Ray Serve, by their rows",
        ("", "callers", "rows a call", "requests/s", "rows/s", "p50, ms"),
        [
            (
                one["where"],
                str(one["callers"]),
                str(one["rows_a_call"]),
                f"{one['requests_per_s']:,.0f}",
                f"{one['rows_per_s']:,.0f}",
                "-" if one["p50_ms"] is None else f"{one['p50_ms']:.2f}",
            )
            for one in figures
        ],
    )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
