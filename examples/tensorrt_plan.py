"""A TensorRT plan behind ``await``, on two contexts that share one block of enqueue memory.

    python examples/tensorrt_plan.py model.plan

A plan is code: open only plans that you trust.
"""

import asyncio
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

import asynctrt

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


async def main(path: str) -> None:
    async with asynctrt.open(path, device="cuda:0", options=OPTIONS) as engine:
        await use(engine)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1]))
