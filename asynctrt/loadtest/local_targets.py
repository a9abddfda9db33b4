"""Targets in the process that sends: an engine, or an async function of the application."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import numpy as np

from asynctrt.engine import Engine
from asynctrt.errors import TargetError
from asynctrt.loadtest.steps import STEPS, StepTime
from asynctrt.loadtest.targets import BatchCounters
from asynctrt.tensors import Array, InferResult, TensorSpec


class EngineTarget:
    """Send to an engine in this process."""

    kind = "engine"

    def __init__(self, engine: Engine, *, owns: bool, name: str | None = None) -> None:
        self.name = name or engine.name
        self.inputs = engine.inputs
        self.in_flight_max = engine.options.max_queue_rows
        self._engine = engine
        self._owns = owns
        self._submit = engine.submit

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        return dict(inputs)

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        return self._submit(prepared)

    def outputs(self, answer: InferResult) -> Mapping[str, Array]:
        return answer

    async def batches(self) -> BatchCounters | None:
        statistics = self._engine.statistics()
        return BatchCounters(
            statistics.succeeded,
            statistics.rows,
            statistics.batches,
            statistics.queue_ns,
            statistics.copy_in_ns,
            statistics.compute_ns,
            statistics.copy_out_ns,
            {rows: size.count for rows, size in statistics.by_batch_rows.items()},
        )

    async def aclose(self) -> None:
        if self._owns:
            await self._engine.aclose()


def _takes_nothing(call: Any) -> bool:
    try:
        return not inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False  # A built-in function may have no signature.


class CallTarget:
    """Call an async function of the application, and measure whatever it does.

    An async generator function makes users: each request resumes an idle user, or a new one, until it yields.
    """

    kind = "function"
    inputs: tuple[TensorSpec, ...] = ()
    in_flight_max = 16384

    def __init__(self, call: Any) -> None:
        self.name = getattr(call, "__qualname__", type(call).__name__)
        self.is_self_contained = _takes_nothing(call)
        """Whether the function takes no arguments, so that no inputs are needed."""
        self.steps: list[StepTime] = []
        """The steps that have ended. The runner counts them and empties the list."""
        self._call = call
        self._has_users = inspect.isasyncgenfunction(call)
        self._idle: list[AsyncGenerator[Any, Any]] = []
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._context.run(STEPS.set, self.steps)

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        return dict(inputs)

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        # A task for each call, even if it returns a future: two calls may return the same one.
        call = self._resume(prepared) if self._has_users else self._answer(prepared)
        return self._loop.create_task(call, context=self._context.copy())

    async def _answer(self, prepared: Any) -> Any:
        made = self._called(prepared)
        if not inspect.isawaitable(made):
            raise TargetError(
                f"{self.name} is not an async function: it returned {type(made).__name__}, not an awaitable"
            )
        return await made

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        if not isinstance(answer, Mapping):
            raise TargetError(
                f"{self.name} returned {type(answer).__name__}; a checked answer must be a mapping of "
                "arrays by name"
            )
        return {name: np.asarray(value) for name, value in answer.items()}

    def _called(self, prepared: Any) -> Any:
        return self._call() if self.is_self_contained else self._call(prepared)

    async def _resume(self, prepared: Any) -> Any:
        """Resume an idle user until it yields. After an exception, or at its end, a new one replaces it."""
        if self._idle:
            user = self._idle.pop()
            with suppress(StopAsyncIteration):  # Its session is over, and another begins.
                answer = await user.asend(None if self.is_self_contained else prepared)
                self._idle.append(user)
                return answer
        user = self._called(prepared)
        try:
            answer = await anext(user)
        except StopAsyncIteration:
            raise TargetError(
                f"{self.name} ended before its first yield: yield at the end of each request"
            ) from None
        self._idle.append(user)
        return answer

    async def batches(self) -> BatchCounters | None:
        return None

    async def aclose(self) -> None:
        """End the users, so that they can close their connections."""
        while self._idle:
            with suppress(Exception):  # Their errors no longer matter to the results.
                await self._idle.pop().aclose()
