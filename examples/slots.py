"""Write rows straight into the memory that the model reads: nothing is copied on the CPU."""

import asyncio
from collections.abc import Mapping

import numpy as np

import asynctrt
from asynctrt import Array, TensorSpec

PIXELS = (3, 224, 224)


def brightness(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """The mean of each image."""
    outputs["brightness"][...] = inputs["image"].mean(axis=(1, 2, 3), dtype=np.float32)


async def main() -> None:
    model = asynctrt.FunctionModel(
        brightness,
        inputs=TensorSpec("image", np.dtype("uint8"), PIXELS),
        outputs=TensorSpec("brightness", np.dtype("float32")),
    )

    async def caller(engine: asynctrt.Engine, value: int) -> float:
        async with engine.slot(rows=1) as slot:
            slot["image"][...] = value  # A decoder would write here.
            result = await slot.infer(timeout=1.0)
        return float(result["brightness"][0])

    async with asynctrt.open(model, max_rows=16) as engine:
        print(await asyncio.gather(*[caller(engine, value) for value in range(0, 256, 16)]))


if __name__ == "__main__":
    asyncio.run(main())
