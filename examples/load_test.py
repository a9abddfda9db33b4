"""Test an application's speed: put a load on its engine, and check the result against an slo.

``python examples/load_test.py``, or as a test: ``assert report.holds``.
"""

import asyncio
from collections.abc import Mapping

import numpy as np

import asynctrt
from asynctrt import Array, TensorSpec, loadtest


def double(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """Double the rows."""
    outputs["y"][...] = 2 * inputs["x"]


async def main() -> None:
    x, y = (TensorSpec(name, np.dtype("float32"), (4,)) for name in "xy")
    model = asynctrt.FunctionModel(double, inputs=x, outputs=y)
    async with asynctrt.open(model) as engine:
        # 500 requests per second, whether or not answers come; latency counts from when each was due.
        report = await loadtest.run(engine, rate=500, seconds=1.0, warmup=0.2, slo="p99<250ms,errors<1%")
    (run,) = report.runs
    print(f"{run.answered} of {run.requests} answered, {run.error_share:.0%} errors")
    print(f"held: {report.holds}, p50 {run.latency['p50']:.2f} ms, p99 {run.latency['p99']:.2f} ms")
    if run.batches is not None:
        print(
            f"{run.batches.mean_rows:.1f} rows per batch, {run.batches.compute:.3f} ms of compute per request"
        )


if __name__ == "__main__":
    asyncio.run(main())
