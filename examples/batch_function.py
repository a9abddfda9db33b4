"""Call a function over many items with one item at a time: calls share batches, without a model file."""

import asyncio

import numpy as np
import numpy.typing as npt

import asynctrt

WEIGHTS = np.random.default_rng(0).random((8, 4), np.float32)


@asynctrt.batch(max_rows=32)
def score(features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Score four classes for each row. It gets ``(rows, 8)``, and each caller gives ``(8,)``."""
    scores: npt.NDArray[np.float32] = features @ WEIGHTS
    return scores


@asynctrt.batch(items=True, max_rows=10, contexts=2)
async def translate(words: list[str]) -> list[str | Exception]:
    """Stand for a service that takes many words at once: two requests at a time, of up to ten words each."""
    await asyncio.sleep(0.01)
    return [word[::-1] if word else ValueError("there is nothing to translate") for word in words]


async def main() -> None:
    rows = np.random.default_rng(1).random((1000, 8), np.float32)
    scores = await asyncio.gather(*[score(row) for row in rows])
    print(f"{len(scores)} answers of {scores[0].shape} in {score.statistics().batches} calls")

    words = [f"word {number}" for number in range(99)] + [""]
    translated = await asyncio.gather(*[translate(word) for word in words], return_exceptions=True)
    print(translated[0], "...", repr(translated[-1]))


if __name__ == "__main__":
    asyncio.run(main())
