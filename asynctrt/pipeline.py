"""Engines and functions as one awaitable, with one deadline and one priority: what stands around a model.

::

    pipeline = asynctrt.Pipeline(decode, engine, label, inputs=image, outputs=[name, score], threads=2)
    result = await pipeline.infer(rows, timeout=0.2, priority=1)

It is an engine to its callers, so servers, load tests and websockets take it wherever they take one.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from threading import get_ident
from typing import Any, Final, Literal, NoReturn, TypeVar, get_origin

import numpy as np

from asynctrt import clock
from asynctrt.engine import Engine, _caller
from asynctrt.errors import (
    DeadlineError,
    DeviceError,
    EngineClosedError,
    ExecutionError,
    LifecycleError,
    OverloadError,
    QueueFullError,
    UsageError,
    describe,
)
from asynctrt.inputs import InputCheck, Inputs
from asynctrt.loops import running_loop
from asynctrt.options import Options
from asynctrt.runtime.slots import Slot
from asynctrt.statistics import BatchStatistics, Statistics
from asynctrt.tensors import Array, BatchRecord, Dims, InferResult, TensorSpec
from asynctrt.validation import priority_of, timeout_ns_of

T = TypeVar("T")
Stage = Engine | Callable[..., Any]

PASSED_ON: Final = (OverloadError, LifecycleError, DeviceError)
"""What an engine within says that holds for the whole: later, elsewhere, or look at the device."""

PLATFORM: Final = "asynctrt_pipeline"


def _nothing(kind: Any) -> Any:
    """Return the value of a statistic of which there is none."""
    origin = get_origin(kind) or kind
    if origin is tuple:
        return ()
    return {} if origin is Mapping else 0.0 if origin is float else 0 if origin is int else None


class Call:
    """One request on its way through a pipeline. A stage with two parameters gets it as its second.

    :param pipeline: where it is.
    :param priority: the request's priority.
    :param deadline_ns: when it has to be answered; ``None`` for no deadline.
    """

    __slots__ = ("_pipeline", "deadline_ns", "priority")

    def __init__(self, pipeline: "Pipeline", priority: int, deadline_ns: int | None) -> None:
        self._pipeline = pipeline
        self.priority = priority
        self.deadline_ns = deadline_ns

    def left(self) -> float | None:
        """Return the seconds until the deadline; ``None`` without one.

        :raises DeadlineError: if it has passed.
        """
        if self.deadline_ns is None:
            return None
        left_ns = self.deadline_ns - clock.now_ns()
        if left_ns <= 0:
            raise DeadlineError(f"{self._pipeline.name!r}: the timeout passed between two stages")
        return left_ns / 1e9

    async def infer(
        self, engine: Engine, inputs: Inputs, *, outputs: Literal["host", "device"] = "host"
    ) -> InferResult:
        """Run rows through an engine, with this request's priority and what is left of its time.

        :param outputs: ``device`` leaves them on the GPU, for the next engine there.
        :raises DeadlineError: if the time is over, or the engine could not begin in time.
        :raises AsynctrtError: whatever the engine raises.
        """
        priority = min(self.priority, engine.options.priorities - 1)
        return await engine.infer(inputs, timeout=self.left(), priority=priority, outputs=outputs)

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread of the pipeline, of which there are ``threads``.

        :raises DeadlineError: if the request's time is over before it begins.
        """
        self.left()
        return await self._pipeline.run_in_thread(partial(self._begin, function, *arguments))

    def _begin(self, function: Callable[..., T], *arguments: Any) -> T:
        self.left()  # It may have waited for a thread.
        return function(*arguments)


class Pipeline(Engine):
    """Stages that a request goes through in turn. Each takes what the one before gave: arrays by name.

    A stage is

    - an :class:`Engine`, which batches the request with others (a :class:`FunctionModel` for a function over
      batches);
    - a function, which is called in a thread: ``stage(inputs)``, or ``stage(inputs, call)``;
    - a coroutine function, likewise, on the event loop. With ``call.infer(engine, ...)`` and
      ``call.in_thread(function, ...)`` it can do anything: several engines at once, one for each of many
      pieces.

    A request's timeout counts from its arrival to the beginning of its last stage, and each engine gets what
    is left of it; likewise its priority, as far as an engine has so many. Nothing but what the engines do
    themselves is batched, and requests overtake each other.

    The engines stay their owner's to close. ``async with`` closes the pipeline's threads, and waits for what
    is under way.

    :param stages: one or more.
    :param inputs: what it takes, one spec or several; likewise ``outputs``. An output may have named
        dimensions that no input has.
    :param name: what it is called in messages, on servers and in metrics.
    :param threads: threads for stages that are plain functions, and for ``call.in_thread``.
    :param priorities: levels of priority.
    :param timeout: as in :class:`Options`, for requests without one of their own.
    :param max_in_flight: rows that may be under way; more are refused with ``QueueFullError``.
    :param close_timeout: seconds that :meth:`aclose` waits for requests under way.
    :raises OptionsError: for an impossible option.
    :raises UsageError: without stages, for a stage that is none of these, or without a running loop.
    """

    def __init__(
        self,
        *stages: Stage,
        inputs: TensorSpec | Sequence[TensorSpec],
        outputs: TensorSpec | Sequence[TensorSpec],
        name: str = "pipeline",
        threads: int = 1,
        priorities: int = 1,
        timeout: float | None = None,
        max_in_flight: int = 256,
        close_timeout: float = 5.0,
    ) -> None:
        # Nothing of Engine.__init__ applies: there is no device, and no batch is formed here.
        self._loop = running_loop()
        self._is_running = self._loop.is_running
        self._thread = get_ident()
        self._is_urgent = False
        self._opened_at = _caller()
        self._options = Options(
            max_rows=max_in_flight,
            max_queue_rows=max_in_flight,
            priorities=priorities,
            timeout=timeout,
            close_timeout=close_timeout,
        )
        if not stages:
            raise UsageError("a pipeline needs a stage: an engine, a function, a coroutine function")
        self._stages = [(stage, self._runner_of(stage)) for stage in stages]
        self._engines = [stage for stage in stages if isinstance(stage, Engine)]
        self._name = name
        self._inputs = (inputs,) if isinstance(inputs, TensorSpec) else tuple(inputs)
        self._outputs = (outputs,) if isinstance(outputs, TensorSpec) else tuple(outputs)
        self._check = InputCheck(self._inputs, check_finite=False, check_key=None, import_array=None)
        self._default_ns = None if timeout is None else timeout_ns_of(timeout)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"asynctrt-{name}")
        self._tasks: dict[asyncio.Task[InferResult], int] = {}
        self._counts: Counter[str] = Counter()
        self._sizes: dict[int, tuple[int, int]] = {}
        self._state = "open"

    def __repr__(self) -> str:
        return (
            f"<Pipeline {self._name!r} {self.state} stages={len(self._stages)} in_flight={len(self._tasks)}>"
        )

    @property
    def state(self) -> str:
        """``open``, ``draining``, ``closed``; ``lost`` or ``suspended``, if an engine that is a stage is."""
        if self._state == "open":
            return next((one.state for one in self._engines if one.state in ("lost", "suspended")), "open")
        return self._state

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name

    @property
    def platform(self) -> str:
        """``asynctrt_pipeline``."""
        return PLATFORM

    @property
    def device_name(self) -> str:
        """The device of the first engine that is a stage; ``host`` if none is."""
        return self._engines[0].device_name if self._engines else "host"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What it takes."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What it gives."""
        return self._outputs

    @property
    def max_rows(self) -> int:
        """Rows that one request may have, and that may be under way."""
        return self._options.max_queue_rows

    @property
    def urgent(self) -> None:
        """``None``: only engines have a part for urgent requests."""
        return

    async def infer(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Literal["host", "device"] = "host",
    ) -> InferResult:
        """Send rows through all stages.

        :param inputs: as for :meth:`Engine.infer`.
        :param timeout: seconds until its last stage has begun.
        :param priority: for the engines within.
        :param outputs: ``host``.
        :raises InputError: for inputs that do not fit ``inputs``.
        :raises QueueFullError: if too many rows are under way, here or in an engine within.
        :raises DeadlineError: if the timeout passed.
        :raises EngineClosedError: if it is draining or closed.
        :raises ExecutionError: if a stage failed, or gave something else than ``outputs``.
        :raises UsageError: on another event loop, and for ``outputs="device"``.
        """
        if outputs != "host":
            raise UsageError("a pipeline's own outputs are on the host; between its engines use call.infer")
        future = self.submit(inputs, timeout=timeout, priority=priority)
        try:
            return await future
        except asyncio.CancelledError:
            future.cancel()
            raise

    def submit(
        self, inputs: Inputs, *, timeout: float | None = None, priority: int = 0
    ) -> "asyncio.Future[InferResult]":
        """Do what :meth:`infer` does, for callers that are no coroutines. To cancel the future cancels it."""
        self._check_loop()
        arrays, rows, _ = self._check.validate(inputs)
        level = priority_of(priority, self._options.priorities)
        timeout_ns = self._default_ns if timeout is None else timeout_ns_of(timeout)
        if self._state != "open":
            self._counts["refused"] += 1
            raise EngineClosedError(f"{self._name!r} is {self._state}: send to another engine")
        under_way = sum(self._tasks.values())
        if under_way + rows > self._options.max_queue_rows:
            self._counts["refused"] += 1
            raise QueueFullError(
                f"{under_way} rows are under way in {self._name!r}, and at most "
                f"{self._options.max_queue_rows} may be: {rows} more have no room. Retry later, send less, "
                "or give it a larger max_in_flight"
            )
        now_ns = clock.now_ns()
        call = Call(self, level, None if timeout_ns is None else now_ns + timeout_ns)
        named = {spec.name: array for spec, array in zip(self._inputs, arrays, strict=True)}
        task = self._loop.create_task(self._run(named, rows, call, now_ns))
        self._tasks[task] = rows
        self._counts["submitted"] += 1
        task.add_done_callback(partial(self._ended, rows=rows, began_ns=now_ns))
        return task

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Run a function in one of the pipeline's threads."""
        return await self._loop.run_in_executor(self._threads, function)

    async def _run(self, given: Mapping[str, Any], rows: int, call: Call, arrival_ns: int) -> InferResult:
        try:
            for _, run in self._stages:
                call.left()
                given = await run(given, call)
            outputs = self._checked_outputs(given, rows)
        except PASSED_ON:
            raise
        except Exception as error:
            raise ExecutionError(f"a stage of {self._name!r} failed: {describe(error)}") from error
        record = BatchRecord(rows, arrival_ns)
        record.compute_ns = clock.now_ns() - arrival_ns
        return InferResult(outputs, (record,), arrival_ns)

    def _runner_of(self, stage: Stage) -> Callable[[Any, Call], Awaitable[Any]]:
        if isinstance(stage, Engine):
            engine = stage
            return lambda given, call: call.infer(engine, given)
        if not callable(stage):
            raise UsageError(
                f"{stage!r} is not a stage of a pipeline: an engine, a function or a coroutine function is"
            )
        takes_call = len(inspect.signature(stage).parameters) > 1
        function: Callable[..., Any] = stage if takes_call else lambda given, _: stage(given)
        if inspect.iscoroutinefunction(stage) or inspect.iscoroutinefunction(type(stage).__call__):
            return function
        return lambda given, call: call.in_thread(function, given, call)

    def _checked_outputs(self, given: Any, rows: int) -> dict[str, Array]:
        """Return the outputs that the last stage gave, in their own dtypes.

        :raises ExecutionError: if one is missing, or is something else than it should be.
        """
        if not isinstance(given, Mapping):
            raise ExecutionError(f"the last stage gave a {type(given).__name__}, not arrays by name")
        found = {}
        for spec in self._outputs:
            if spec.name not in given:
                raise ExecutionError(f"output {spec.name!r} is missing: the last stage gave {sorted(given)}")
            array = np.asarray(given[spec.name])
            if spec.dtype.kind == "S" and array.dtype.kind == "U":
                array = np.char.encode(array, "utf-8")
            fixed = all(
                isinstance(dim, str) or dim == size
                for dim, size in zip(spec.dims, array.shape[1:], strict=False)
            )
            if array.ndim != 1 + len(spec.dims) or array.shape[0] != rows or not fixed:
                raise ExecutionError(
                    f"output {spec.name!r} has shape {array.shape}, and should be {spec}, {rows} rows"
                )
            if spec.dtype.kind != "S" and array.dtype != spec.dtype:
                if not np.can_cast(array.dtype, spec.dtype, "same_kind"):
                    raise ExecutionError(
                        f"output {spec.name!r} is {array.dtype}, and should be {spec.dtype.name}"
                    )
                array = array.astype(spec.dtype)
            found[spec.name] = array
        return found

    def _ended(self, task: "asyncio.Task[InferResult]", *, rows: int, began_ns: int) -> None:
        del self._tasks[task]
        if task.cancelled():
            self._counts["cancelled"] += 1
            return
        error = task.exception()
        if error is not None:
            self._counts["expired" if isinstance(error, DeadlineError) else "failed"] += 1
            return
        took_ns = clock.now_ns() - began_ns
        count, sum_ns = self._sizes.get(rows, (0, 0))
        self._sizes[rows] = (count + 1, sum_ns + took_ns)

    def statistics(self) -> Statistics:
        """Return a snapshot. Each request counts as a batch of its own, whose compute time is all it took."""
        sizes = self._sizes.items()
        succeeded = sum(count for _, (count, _) in sizes)
        total_ns = sum(sum_ns for _, (_, sum_ns) in sizes)
        # What only an engine has: it is nothing here, of whatever kind.
        none = {field.name: _nothing(field.type) for field in fields(Statistics)}
        known = {
            "state": self.state,
            **{
                name: self._counts[name]
                for name in ("submitted", "failed", "cancelled", "expired", "refused")
            },
            "succeeded": succeeded,
            "rows": sum(rows * count for rows, (count, _) in sizes),
            "batches": succeeded,
            "batches_timed": succeeded,
            "compute_ns": total_ns,
            "total_ns": total_ns,
            "in_flight_batches": len(self._tasks),
            "contexts": 1,
            "by_batch_rows": {rows: BatchStatistics(count, 0, sum_ns, 0) for rows, (count, sum_ns) in sizes},
        }
        return Statistics(**{**none, **known})

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when all that were taken have been answered."""
        self._check_loop()
        if self._state == "open":
            self._state = "draining"
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def aclose(self) -> None:
        """Refuse new requests, wait up to ``close_timeout`` for those under way, cancel the rest. Idempotent.

        The engines within stay open. A function that still runs in a thread is not waited for.
        """
        self._check_loop()
        if self._state != "closed":
            self._state = "closed"
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=self._options.close_timeout)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        self._threads.shutdown(wait=False, cancel_futures=True)

    def slot(self, *, rows: int = 1, dims: Mapping[str, Dims] | None = None) -> Slot:
        """Refuse: a pipeline has no slab to write into.

        :raises UsageError: always.
        """
        self._lacks("slots")

    def tracing(self, *, batches: int = 4096, timed: bool = True) -> NoReturn:
        """Refuse: trace the engines within.

        :raises UsageError: always.
        """
        self._lacks("batches of its own to trace")

    async def suspend(self) -> None:
        """Refuse: suspend the engines within.

        :raises UsageError: always.
        """
        self._lacks("weights to suspend")

    async def resume(self) -> None:
        """Refuse: resume the engines within.

        :raises UsageError: always.
        """
        self._lacks("weights to resume")

    def _lacks(self, what: str) -> NoReturn:
        raise UsageError(f"{self!r} has no {what}: its engines do")
