"""How many healthy requests are answered beside callers whose rows make the model raise, or end its process.

256 callers ask again at once, each for a row; some of them for a bad one only. A batch takes 2 ms and 20 µs a
row, and as long when it fails. ``python -m tests.benchmarks.bad_rows --seconds 4``.
"""

import asyncio
import logging
import os
import time

import numpy as np

import asynctrt
from asynctrt.errors import AsynctrtError
from tests.benchmarks.common import arguments, save

CALLERS = 256
SHARES = {"0": 0, "1%": 3, "12/256": 12, "5%": 13, "25%": 64, "50%": 128}
RAISES, ENDS = 1.0, 2.0
"""What the second value of a bad row asks for."""


def behave(inputs):
    asked = inputs["x"][:, 1]
    time.sleep(0.002 + 20e-6 * len(asked))
    if (asked == RAISES).any():
        raise ValueError("a bad row")
    if (asked == ENDS).any():
        os._exit(9)
    return 2 * inputs["x"]


def model():
    """Double rows of two values, or do what they ask for."""
    x, y = (asynctrt.TensorSpec(name, "float64", (2,)) for name in "xy")
    return asynctrt.FunctionModel(behave, inputs=x, outputs=y)


WAYS = {
    "in process, raises": (model, RAISES, {}),
    "worker, raises": ("tests.benchmarks.bad_rows:model", RAISES, {"isolation": "process"}),
    "worker, crashes": ("tests.benchmarks.bad_rows:model", ENDS, {"isolation": "process"}),
}


async def measure(way, bad_callers, seconds):
    """Return the healthy answers a second, how many healthy ones failed, the longest wait, and the state."""
    opened, bad, settings = WAYS[way]
    answered = failed = 0
    longest = 0.0
    async with asynctrt.open(opened() if callable(opened) else opened, max_rows=64, **settings) as engine:
        end = time.monotonic() + seconds

        async def call(number, is_bad):
            nonlocal answered, failed, longest
            while time.monotonic() < end:
                number += 1
                start = time.monotonic()
                try:
                    answer = await engine.infer(np.array([[number, bad if is_bad else 0.0]]))
                except AsynctrtError:
                    failed += not is_bad
                    await asyncio.sleep(0.001)
                else:
                    assert answer["y"][0, 0] == 2 * number
                    answered += 1
                if not is_bad:
                    longest = max(longest, time.monotonic() - start)

        tasks = [asyncio.create_task(call(n * 10**6, n < bad_callers)) for n in range(CALLERS)]
        await asyncio.wait(tasks, timeout=seconds)
        rate, state = answered / seconds, engine.state
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        return rate, failed, longest, state


def main():
    options = arguments(__doc__, seconds=4.0, only="", shares=",".join(SHARES))
    logging.disable(logging.CRITICAL)
    figures = []
    for way in WAYS:
        if options.only in way:
            for share in options.shares.split(","):
                bad_callers = SHARES[share]
                rate, failed, longest, state = asyncio.run(measure(way, bad_callers, options.seconds))
                print(
                    f"{way:20} {share:>7}  {rate:8.0f}/s answered  {failed:7} healthy failed  "
                    f"longest {longest:6.2f} s  {state}",
                    flush=True,
                )
                figures.append(
                    {
                        "way": way,
                        "bad_callers": bad_callers,
                        "answered_per_s": rate,
                        "healthy_failed": failed,
                        "longest_s": longest,
                    }
                )
    save(options.json, "bad rows", figures)


if __name__ == "__main__":
    main()
