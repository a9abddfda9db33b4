"""Pipelines: a coroutine function over engines, behind the interface of one engine.

::

    async def read(inputs):
        pixels = await asyncio.to_thread(decode, inputs["image"])
        scores = await engine.infer(pixels)
        return {"name": names_of(scores["scores"])}

    pipeline = asynctrt.Pipeline(read, inputs=image, outputs=name)
    result = await pipeline.infer(rows, timeout=0.2, priority=1)

A pipeline is an engine to its callers, so servers, load tests and websockets accept it as one.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from asynctrt._util import clock
from asynctrt._util.loops import is_cancelled, running_loop, wait_shielded
from asynctrt._util.validation import count, output_names, priority_of, timeout_ns_of
from asynctrt.backends.function import is_coroutine_function
from asynctrt.batching import Batched
from asynctrt.core.inputs import InputCheck, Inputs, Outputs
from asynctrt.engine import HOST, Engine
from asynctrt.errors import (
    DeadlineError,
    DeviceError,
    EngineClosedError,
    ExecutionError,
    InputError,
    LifecycleError,
    OverloadError,
    QueueFullError,
    UsageError,
    describe,
    once_begun,
    show,
)
from asynctrt.limits import Limits, hold_from_here, limits_here
from asynctrt.options import Options
from asynctrt.statistics import Batching, BatchStatistics, Statistics
from asynctrt.tensors import Array, BatchRecord, InferResult, TensorSpec, cast, too_many_rows

logger = logging.getLogger("asynctrt")

PASSED_ON: Final = (OverloadError, LifecycleError, DeviceError, InputError)
"""Errors of the function that also apply to the pipeline's caller: retry later, use another engine, look at
the device, or correct the inputs. An engine's ``InputError`` does not: its inputs come from the function."""

PLATFORM: Final = "asynctrt_pipeline"

CANCEL_S: Final = 1.0
"""Seconds that a function may take to end after closing has cancelled it."""


class Pipeline(Engine):
    """A coroutine function over engines, behind the interface of one :class:`Engine`.

    The function is called for each request, on the event loop, with the request's arrays by name, and returns
    the outputs by name. It may call engines in any order, one after another or many at once; each engine
    batches these calls with all others. What would block the loop belongs into a thread
    (``asyncio.to_thread``).

    The request's deadline and priority apply to each call of an engine, as in :func:`asynctrt.within`. The
    function itself is not stopped when the time has passed. Requests may overtake each other.

    The function reads the caller's own arrays, so it gets read-only views. If it finds the caller's inputs
    wrong, it raises :class:`InputError`, which reaches the caller unchanged. An engine's ``InputError``
    becomes an :class:`ExecutionError`, since the engine's inputs come from the function.

    Closing the pipeline does not close the engines: that is up to their owner. ``async with`` waits for
    requests in flight.

    :param function: a coroutine function of the inputs.
    :param inputs: the spec or specs of the inputs.
    :param outputs: the spec or specs of the outputs, which may have named dimensions that no input has.
    :param engines: the engines that the function calls. While one of them is lost or closed, so is the
        pipeline's ``state``, and a server reports it as not ready.
    :param name: its name in messages, on servers and in metrics.
    :param priorities: the number of priority levels.
    :param timeout: seconds, as in :class:`Options`, for requests that give no timeout.
    :param max_in_flight: rows that may be in flight; a request that would exceed it is refused with
        ``QueueFullError``.
    :param close_timeout: seconds that :meth:`aclose` waits for requests in flight.
    :raises OptionsError: for an impossible option.
    :raises UsageError: if ``function`` is not a coroutine function, inputs or outputs are missing, or no
        event loop is running.
    """

    _elsewhere = "its engines do"

    def __init__(
        self,
        function: Callable[[dict[str, Array]], Awaitable[Mapping[str, Any]]],
        *,
        inputs: TensorSpec | Sequence[TensorSpec],
        outputs: TensorSpec | Sequence[TensorSpec],
        engines: Engine | Sequence[Engine] = (),
        name: str = "pipeline",
        priorities: int = 1,
        timeout: float | None = None,
        max_in_flight: int = 256,
        close_timeout: float = 5.0,
    ) -> None:
        loop = running_loop()
        if isinstance(function, Engine) or not is_coroutine_function(function):
            raise UsageError(
                "a pipeline takes one coroutine function, which calls engines (await engine.infer(...)) and "
                f"plain functions (await asyncio.to_thread(...)), not {show(function)}"
            )
        engines = (engines,) if isinstance(engines, Engine) else tuple(engines)
        if not all(isinstance(engine, Engine) for engine in engines):
            raise UsageError(f"the engines of a pipeline are open engines, not {show(engines)}")
        max_in_flight = count(1)("max_in_flight", max_in_flight)
        options = Options(
            max_rows=max_in_flight,
            max_queue_rows=max_in_flight,
            priorities=priorities,
            timeout=timeout,
            close_timeout=close_timeout,
        )
        super().__init__(loop, options)
        self._function = function
        self._engines = engines
        self._name = name
        self._inputs = _specs_of("inputs", inputs)
        self._outputs = _specs_of("outputs", outputs)
        self._check = InputCheck(self._inputs)
        self._default_ns = None if timeout is None else timeout_ns_of(timeout)
        self._tasks: dict[asyncio.Task[InferResult], tuple[int, asyncio.Future[InferResult]]] = {}
        self._rows = 0  # Of all tasks.
        self._counts: Counter[str] = Counter()
        self._sizes: dict[int, tuple[int, int]] = {}
        self._state = "open"

    def __repr__(self) -> str:
        return f"<Pipeline {self._name!r} {self.state} in_flight={len(self._tasks)}>"

    @property
    def state(self) -> str:
        """``open``, ``draining``, ``closing`` or ``closed``. While the pipeline is open but one of its
        ``engines`` is not, the state of the first such engine."""
        if self._state != "open":
            return self._state
        return next((engine.state for engine in self._engines if engine.state != "open"), "open")

    @property
    def name(self) -> str:
        return self._name

    @property
    def platform(self) -> str:
        """``asynctrt_pipeline``."""
        return PLATFORM

    @property
    def device_name(self) -> str:
        """``host``, where the function runs."""
        return "host"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._inputs

    @property
    def batching(self) -> Batching:
        """Always on: the engines that the function calls have a ``batching`` with the reason."""
        return Batching(reason="its engines batch")

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._outputs

    @property
    def max_rows(self) -> int:
        """The maximum number of rows of one request, and of all requests in flight."""
        return self._options.max_queue_rows

    async def infer(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Outputs = HOST,
    ) -> InferResult:
        """Run rows through the function.

        :param inputs: as for :meth:`Engine.infer`.
        :param timeout: seconds until the last call of an engine has to begin.
        :param priority: the priority in each engine.
        :param outputs: the names of the outputs to return; ``host`` for all. Other outputs are ignored.
        :raises InputError: if the inputs do not fit ``inputs`` or the function finds them wrong, an output
            does not exist, or there are more rows than ``max_in_flight``.
        :raises QueueFullError: if too many rows are in flight here.
        :raises OverloadError: if one of the engines has no room.
        :raises DeadlineError: if the timeout passed.
        :raises EngineClosedError: if the pipeline is draining or closed, or closes before the answer.
        :raises ExecutionError: if the function failed, or returned something that does not fit ``outputs``.
        :raises UsageError: if called on another event loop, or with ``outputs="device"``.
        """
        future = self.submit(inputs, timeout=timeout, priority=priority, outputs=outputs)
        try:
            return await future
        except (asyncio.CancelledError, GeneratorExit):
            future.cancel()
            raise
        finally:
            del future  # It holds its error, whose traceback holds this frame: break the cycle.

    def submit(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Outputs = HOST,
    ) -> "asyncio.Future[InferResult]":
        self._check_loop()
        if isinstance(outputs, str) and outputs == "device":
            raise UsageError(
                "a pipeline's own outputs are on the host; between its engines, use "
                "engine.infer(..., outputs='device')"
            )
        names = output_names(outputs, [spec.name for spec in self._outputs])
        arrays, rows, _ = self._check.validate(inputs)
        level = priority_of(priority, self._options.priorities)
        timeout_ns = self._default_ns if timeout is None else timeout_ns_of(timeout)
        limits = limits_here()
        if limits is not None:
            timeout_ns, level = limits.stricter(timeout_ns, level, self._options.priorities)
        if self._state != "open":
            self._counts["refused"] += 1
            raise EngineClosedError(f"{self._name!r} is {self._state}: send to another engine")
        if rows > self._options.max_queue_rows:
            raise too_many_rows(rows, self._options.max_queue_rows, "max_in_flight")
        if self._rows + rows > self._options.max_queue_rows:
            self._counts["refused"] += 1
            raise QueueFullError(
                f"{self._rows} rows are in flight in {self._name!r}, which has room for "
                f"{self._options.max_queue_rows}: {rows} more do not fit. Retry later, send less, or give "
                "it a larger max_in_flight"
            )
        now_ns = clock.now_ns()
        limits = Limits(None if timeout_ns is None else now_ns + timeout_ns, level)
        # The answer is separate from the task: the function cannot hold up its caller, and a caller sees only
        # its own cancellation.
        answer: asyncio.Future[InferResult] = self._loop.create_future()
        task = self._loop.create_task(self._run(arrays, rows, limits, now_ns, names))
        self._tasks[task] = rows, answer
        self._rows += rows
        self._counts["submitted"] += 1
        task.add_done_callback(partial(self._ended, began_ns=now_ns))
        answer.add_done_callback(partial(self._answered, task))
        return answer

    async def _run(
        self,
        arrays: tuple[Array, ...],
        rows: int,
        limits: Limits,
        arrival_ns: int,
        names: frozenset[str] | None,
    ) -> InferResult:
        given = {spec.name: array.view() for spec, array in zip(self._inputs, arrays, strict=True)}
        for view in given.values():
            view.flags.writeable = False
        hold_from_here(limits)
        try:
            outputs = self._checked_outputs(await self._function(given), rows, arrays, names)
        except asyncio.CancelledError as cancelled:
            if is_cancelled():
                raise
            # The caller was not cancelled; something that the function waited for was.
            raise ExecutionError(f"{self._name!r} was cancelled by what it waited for") from cancelled
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:  # A function that calls sys.exit() must not end a server.
            # Not kept in a variable: its traceback holds this frame, and each would keep the other alive.
            raise self._error_of(raised)  # noqa: B904  (it has its cause)
        record = BatchRecord(rows, arrival_ns)
        record.compute_ns = clock.now_ns() - arrival_ns
        return InferResult(outputs, (record,), arrival_ns)

    def _error_of(self, error: BaseException) -> BaseException:
        """Return the caller's error when the function raised ``error``."""
        while isinstance(error, BaseExceptionGroup):  # Of a task group.
            error = error.exceptions[0]
        if isinstance(error, PASSED_ON) and not _is_about_a_call(error):
            passed = once_begun(error)  # Another engine may have computed its part.
            passed.__suppress_context__ = True
            return passed
        failed = ExecutionError(f"{self._name!r} failed: {describe(error)}")
        failed.__cause__ = error
        return failed

    def _checked_outputs(
        self, given: Any, rows: int, inputs: tuple[Array, ...], names: frozenset[str] | None
    ) -> dict[str, Array]:
        """Return the function's outputs, each in its spec's dtype and writable.

        :param inputs: the caller's arrays, whose memory the outputs must not share.
        :param names: the names of the outputs that the caller wants; ``None`` for all.
        :raises ExecutionError: if an output is missing or does not fit its spec.
        """
        if not isinstance(given, Mapping):
            raise ExecutionError(f"{self._name!r} returned a {type(given).__name__}, not arrays by name")
        found = {}
        symbols = self._check.symbols([array.shape[1:] for array in inputs])
        for spec in self._outputs:
            if names is not None and spec.name not in names:
                continue
            if spec.name not in given:
                raise ExecutionError(
                    f"output {spec.name!r} is missing: {self._name!r} returned {show(list(given))}"
                )
            array = _as_dtype(spec, np.asarray(given[spec.name]))
            fixed = all(
                symbols.setdefault(dim, size) == size if isinstance(dim, str) else dim == size
                for dim, size in zip(spec.dims, array.shape[1:], strict=False)
            )
            if array.ndim != 1 + len(spec.dims) or array.shape[0] != rows or not fixed:
                named = "".join(f", {dim}={symbols[dim]}" for dim in spec.dims if dim in symbols)
                raise ExecutionError(
                    f"output {spec.name!r} has shape {array.shape}, but should be {spec}, {rows} rows{named}"
                )
            if not array.flags.writeable or any(np.may_share_memory(array, one) for one in inputs):
                array = array.copy()
            found[spec.name] = array
        return found

    def _answered(self, task: "asyncio.Task[InferResult]", answer: "asyncio.Future[InferResult]") -> None:
        if answer.cancelled():
            self._counts["cancelled"] += 1
            task.cancel()

    def _ended(self, task: "asyncio.Task[InferResult]", *, began_ns: int) -> None:
        rows, answer = self._tasks.pop(task)
        self._rows -= rows
        error = None if task.cancelled() else task.exception()
        if answer.done():
            return
        if task.cancelled():
            answer.cancel()  # Something cancelled every task of the loop.
        elif error is not None:
            self._counts["expired" if isinstance(error, DeadlineError) else "failed"] += 1
            answer.set_exception(error)
        else:
            took_ns = clock.now_ns() - began_ns
            requests, sum_ns = self._sizes.get(rows, (0, 0))
            self._sizes[rows] = (requests + 1, sum_ns + took_ns)
            answer.set_result(task.result())

    def statistics(self) -> Statistics:
        """Return a snapshot. Each request counts as a separate batch, with all its time as compute time."""
        self._origin.check(self)
        sizes = dict(self._sizes).items()  # A copy, because other threads may call this.
        succeeded = sum(requests for _, (requests, _) in sizes)
        total_ns = sum(sum_ns for _, (_, sum_ns) in sizes)
        counts = self._counts
        return Statistics(
            self.state,
            submitted=counts["submitted"],
            failed=counts["failed"],
            cancelled=counts["cancelled"],
            expired=counts["expired"],
            refused=counts["refused"],
            succeeded=succeeded,
            rows=sum(rows * requests for rows, (requests, _) in sizes),
            batches=succeeded,
            batches_timed=succeeded,
            compute_ns=total_ns,
            total_ns=total_ns,
            in_flight_batches=len(self._tasks),
            contexts=1,
            batching=self.batching,
            by_batch_rows={
                rows: BatchStatistics(requests, 0, sum_ns, 0) for rows, (requests, sum_ns) in sizes
            },
        )

    async def drain(self) -> None:
        self._check_loop()
        if self._state == "open":
            self._state = "draining"
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _close(self) -> None:
        self._state = "closing"
        await self._wait_ended(self._options.close_timeout)
        for task, (_, answer) in list(self._tasks.items()):
            if not answer.done():
                self._counts["failed"] += 1
                answer.set_exception(EngineClosedError(f"{self._name!r} is closed"))
            task.cancel()
        await self._wait_ended(CANCEL_S)
        if self._tasks:
            logger.error("%r: %d requests still run although they were cancelled", self, len(self._tasks))
        self._state = "closed"

    async def _wait_ended(self, timeout_s: float) -> None:
        """Wait until no request is in flight, or the time is up."""
        end_s = self._loop.time() + timeout_s
        for task in list(self._tasks):
            await wait_shielded(task, end_s - self._loop.time())


def _is_about_a_call(error: BaseException) -> bool:
    """Return whether an engine or a client refused the inputs that the function gave it."""
    place = error.__traceback__
    if place is None or not isinstance(error, InputError):
        return False
    while place.tb_next is not None:
        place = place.tb_next
    raised_in = str(place.tb_frame.f_globals.get("__name__"))
    # A batched function returns an error for an item, and its caller raises it.
    return bool(raised_in.startswith("asynctrt.") and raised_in != Batched.__module__)


def _specs_of(what: str, given: TensorSpec | Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the specs of a pipeline's inputs or outputs.

    :raises UsageError: if there are no specs, for anything but specs, and for a name that occurs twice.
    """
    specs = (given,) if isinstance(given, TensorSpec) else tuple(given)
    names = {spec.name for spec in specs if isinstance(spec, TensorSpec)}
    if not specs or len(names) < len(specs):
        raise UsageError(f"the {what} of a pipeline are TensorSpecs with different names, not {show(given)}")
    return specs


def _as_dtype(spec: TensorSpec, array: Array) -> Array:
    """Convert an output to its spec's dtype, if no value changes except in a float's precision.

    :raises ExecutionError: if a value would change.
    """
    if spec.dtype.kind == "S" and array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.dtype == spec.dtype:
        return array
    is_text = spec.dtype.kind == "S"
    if is_text != (array.dtype.kind == "S") or not (
        is_text or np.can_cast(array.dtype, spec.dtype, "same_kind")
    ):
        raise ExecutionError(f"output {spec.name!r} is {array.dtype}, but should be {spec.dtype.name}")
    converted = cast(array, spec.dtype)
    if spec.dtype.kind in "iuS" and not np.array_equal(converted, array):
        raise ExecutionError(
            f"output {spec.name!r} is {array.dtype} with values that {spec.dtype} cannot hold: "
            + ("give it more bytes" if is_text else "give it a wider dtype")
        )
    return converted
