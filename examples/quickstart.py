"""Ten lines: many callers share one model's batches. ``python examples/quickstart.py [model.onnx]``"""

import asyncio
import sys
from pathlib import Path

import numpy as np

import asynctrt


async def main(path: str) -> None:
    async with asynctrt.open(path, device="host") as engine:
        spec = engine.inputs[0]
        shape = [1, *(dim if isinstance(dim, int) else 16 for dim in spec.dims)]
        rows = [np.ones(shape, spec.dtype) for _ in range(1000)]
        results = await asyncio.gather(*[engine.infer({spec.name: row}) for row in rows])
        print(f"{len(results)} answers of {results[0][engine.outputs[0].name].shape}")
        print(f"{engine.statistics().mean_batch_rows:.1f} rows a batch; the first: {results[0].timing}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("model.onnx"))))
