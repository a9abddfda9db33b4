"""An application's own test, without sleeps: batches end when the test says so."""

import asyncio
from collections.abc import Mapping

import numpy as np

import asynctrt
from asynctrt import Array, TensorSpec
from asynctrt.testing import LatchDevice


def negate(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """The model under the application."""
    outputs["y"][...] = -inputs["x"]


async def answer_or_apologise(engine: asynctrt.Engine, value: float) -> str:
    """The application under test: it answers within 50 ms, or says sorry."""
    try:
        async with asyncio.timeout(0.05):
            result = await engine.infer(np.full((1, 1), value, np.float32))
    except TimeoutError:
        return "sorry"
    return str(result["y"][0, 0])


async def main() -> None:
    x, y = (TensorSpec(name, np.dtype("float32"), (1,)) for name in "xy")
    model = asynctrt.FunctionModel(negate, inputs=x, outputs=y)
    device = LatchDevice()
    async with asynctrt.open(model, device=device) as engine:
        # The batch is held, so the application must time out, however fast the machine is.
        print(await answer_or_apologise(engine, 1.0))
        assert device.held == 1
        device.open()
        print(await answer_or_apologise(engine, 2.0))


if __name__ == "__main__":
    asyncio.run(main())
