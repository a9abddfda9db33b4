"""A TensorRT plan behind ``await``, on two contexts that share one block of enqueue memory.

    python examples/tensorrt_plan.py model.plan

Without a plan (and without a GPU) the strict double stands in for TensorRT, on the CPU: it computes real
answers, and raises on whatever the library leaves undefined. An application's own tests can use it too.
"""

import asyncio
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, double_plan

OPTIONS = asynctrt.Options(contexts=2, arenas=1, max_rows=16)


def some_rows(spec: asynctrt.TensorSpec, rows: int) -> npt.NDArray[Any]:
    """Rows for an input; a dimension that the plan leaves open is 8 here."""
    dims = [8 if isinstance(dim, str) else dim for dim in spec.dims]
    return np.ones((rows, *dims), spec.dtype)


async def use(engine: asynctrt.Engine) -> None:
    inputs = {spec.name: some_rows(spec, 1) for spec in engine.inputs}
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(engine.infer(inputs)) for _ in range(200)]
    statistics = engine.statistics()
    print(f"{engine.name} on {engine.device_name}:", *(str(spec) for spec in engine.outputs))
    print(f"{len(answers)} answers in {statistics.batches} batches of {statistics.mean_batch_rows:.1f} rows")
    private = statistics.arena_nbytes_private
    print(f"enqueue memory: {statistics.arena_nbytes:,} bytes; a workspace a context: {private:,}")


async def main() -> None:
    if len(sys.argv) > 1:
        # A plan is code: open only plans that you trust.
        async with asynctrt.open(sys.argv[1], device="cuda:0", options=OPTIONS) as engine:
            await use(engine)
        return
    device = asynctrt.HostDevice()
    double = StrictTensorRT(device)
    model = TensorRTModel(double_plan(EngineSpec()), device=device, flavour=double)
    async with asynctrt.open(model, device=device, options=OPTIONS) as engine:
        await use(engine)
    model.close()
    print("violations:", double.violations())


if __name__ == "__main__":
    asyncio.run(main())
