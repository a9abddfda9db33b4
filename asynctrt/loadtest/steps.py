"""Named steps of a coroutine function under load, which get separate figures."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from asynctrt._util import clock


@dataclass(frozen=True, slots=True)
class StepTime:
    """Hold when a step began and ended, and whether it ended with an exception."""

    name: str
    began_ns: int
    ended_ns: int
    has_failed: bool


STEPS: Final[ContextVar[list[StepTime] | None]] = ContextVar("asynctrt_load_steps", default=None)
"""The list to which the steps of the current request are appended; ``None`` outside a load test."""


@asynccontextmanager
async def step(name: str) -> AsyncIterator[None]:
    """Time a part of a coroutine function under load: ``async with step("login"): ...``.

    The report has the count, the failures and the latency of each step. A step that ends with an exception
    has failed, and its time does not count. Outside a load test, this does nothing.

    :param name: the name of the step; steps with the same name are counted together.
    """
    steps = STEPS.get()
    if steps is None:
        yield
        return
    began_ns, has_failed = clock.now_ns(), True
    try:
        yield
        has_failed = False
    finally:
        steps.append(StepTime(name, began_ns, clock.now_ns(), has_failed))
