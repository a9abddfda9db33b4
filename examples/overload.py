"""Overload an engine: what callers see with priorities, timeouts and a full queue. Nothing hangs."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

import numpy as np

import asynctrt
from asynctrt import Array, TensorSpec


def slow_double(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """Double the rows, which takes 10 ms per batch."""
    time.sleep(0.01)
    outputs["y"][...] = 2 * inputs["x"]


async def main() -> None:
    spec = np.dtype("float32")
    model = asynctrt.FunctionModel(
        slow_double, inputs=TensorSpec("x", spec, (4,)), outputs=TensorSpec("y", spec, (4,))
    )
    outcomes: Counter[str] = Counter()

    async def caller(engine: asynctrt.Engine, number: int) -> None:
        urgent = number % 10 == 0
        try:
            await engine.infer(np.ones((1, 4), np.float32), timeout=0.05, priority=2 if urgent else 0)
        except asynctrt.OverloadError as error:  # QueueFullError or DeadlineError: retry later, or shed load.
            outcomes[f"{'urgent' if urgent else 'ordinary'}: {type(error).__name__}"] += 1
        else:
            outcomes[f"{'urgent' if urgent else 'ordinary'}: answered"] += 1

    async with asynctrt.open(model, max_rows=8, contexts=1, max_queue_rows=100) as engine:
        async with asyncio.TaskGroup() as callers:
            for number in range(150):
                callers.create_task(caller(engine, number))
        for outcome, count in sorted(outcomes.items()):
            print(f"{count:4} {outcome}")
        print(engine.statistics())


if __name__ == "__main__":
    asyncio.run(main())
