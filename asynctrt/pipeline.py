"""Pipelines: engines and functions as one awaitable, with one deadline and one priority.

::

    pipeline = asynctrt.Pipeline(decode, engine, label, inputs=image, outputs=[name, score], threads=2)
    result = await pipeline.infer(rows, timeout=0.2, priority=1)

A pipeline is an engine to its callers, so servers, load tests and websockets accept it as one.
"""

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from asynctrt._util import clock
from asynctrt._util.loops import is_cancelled, running_loop, wait_shielded
from asynctrt._util.nesting import Runs
from asynctrt._util.validation import count, output_names, priority_of, timeout_ns_of
from asynctrt.backends.function import is_coroutine_function
from asynctrt.core.inputs import InputCheck, Inputs, Outputs
from asynctrt.core.stages import as_dtype, first_of, outcome_of, read_only, specs_of, takes_call
from asynctrt.engine import HOST, Engine
from asynctrt.errors import (
    CallerError,
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
from asynctrt.limits import Limits, hold_from_here, limits_here, run_here, run_in
from asynctrt.options import Options
from asynctrt.statistics import Batching, BatchStatistics, Statistics
from asynctrt.tensors import Array, BatchRecord, InferResult, TensorSpec, too_many_rows

logger = logging.getLogger("asynctrt")

T = TypeVar("T")
Stage = Engine | Callable[..., Any]

PASSED_ON: Final = (OverloadError, LifecycleError, DeviceError, InputError)
"""Errors of an engine or a stage that also apply to the pipeline's caller: retry later, use another engine,
look at the device, or correct the inputs."""

PLATFORM: Final = "asynctrt_pipeline"

CANCEL_S: Final = 1.0
"""Seconds that a stage may take to end after closing has cancelled it."""


class Call:
    """One request in a pipeline. A stage with two parameters gets it as the second argument.

    :param pipeline: the pipeline that runs it.
    :param priority: the request's priority.
    :param deadline_ns: its deadline in ns; ``None`` for no deadline.
    """

    __slots__ = ("_pipeline", "deadline_ns", "priority")

    def __init__(self, pipeline: "Pipeline", priority: int, deadline_ns: int | None) -> None:
        self._pipeline = pipeline
        self.priority = priority
        self.deadline_ns = deadline_ns

    def left(self) -> float | None:
        """Return the seconds until the deadline, or ``None`` without a deadline.

        :raises DeadlineError: if it has passed.
        """
        if self.deadline_ns is None:
            return None
        left_ns = self.deadline_ns - clock.now_ns()
        if left_ns <= 0:
            raise DeadlineError(f"{self._pipeline.name!r}: the timeout passed between two stages")
        return left_ns / 1e9

    async def infer(self, engine: Engine, inputs: Inputs, *, outputs: Outputs = "host") -> InferResult:
        """Run rows through an engine, with this request's priority and its remaining time.

        :param outputs: the names of the outputs to copy; or ``device``, which leaves all on the GPU for the
            next engine there.
        :raises DeadlineError: if the deadline has passed, or the engine could not begin in time.
        :raises ExecutionError: if the engine rejects the inputs: they come from a stage, not from the caller.
        :raises AsynctrtError: for any other error of the engine.
        """
        priority = min(self.priority, engine.options.priorities - 1)
        try:
            return await engine.infer(inputs, timeout=self.left(), priority=priority, outputs=outputs)
        except CallerError as error:
            raise ExecutionError(
                f"a stage of {self._pipeline.name!r} called {engine.name!r} wrongly: {describe(error)}"
            ) from error

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in one of the pipeline's ``threads``.

        :raises DeadlineError: if the request's deadline passes before a thread is free.
        """
        return await self._pipeline.run_in_thread(partial(function, *arguments), timeout=self.left())


class Pipeline(Engine):
    """A chain of stages behind the interface of one :class:`Engine`.

    Each stage takes the arrays by name that the stage before it returned. A stage is

    - an :class:`Engine`, which batches the request with others (open a :class:`FunctionModel` for a function
      over batches);
    - a function, which is called in a thread: as ``stage(inputs, call)`` if it has a second parameter that is
      required or named ``call``, otherwise as ``stage(inputs)``;
    - a coroutine function, called in the same way on the event loop. With ``call.infer(engine, ...)`` and
      ``call.in_thread(function, ...)`` it can combine work freely: call several engines at once, or one
      engine for each of many pieces.

    The first stage reads the caller's own arrays, so it gets read-only views. If a stage finds the caller's
    inputs wrong, it raises :class:`InputError`, which reaches the caller unchanged.

    A request's timeout covers the time from its arrival to the start of its last stage; each engine gets the
    remaining time. Each engine also gets the request's priority, or its own highest if that is lower. A stage
    that has begun is not stopped. Only the engines batch, and requests may overtake each other.

    Closing the pipeline does not close the engines: that is up to their owner. ``async with`` waits for
    requests in flight and ends the pipeline's threads.

    :param stages: one or more stages.
    :param inputs: the spec or specs of the inputs.
    :param outputs: the spec or specs of the outputs, which may have named dimensions that no input has.
    :param name: its name in messages, on servers and in metrics.
    :param threads: the number of threads for stages that are plain functions, and for ``call.in_thread``.
    :param priorities: the number of priority levels.
    :param timeout: seconds, as in :class:`Options`, for requests that give no timeout.
    :param max_in_flight: rows that may be in flight; a request that would exceed it is refused with
        ``QueueFullError``.
    :param close_timeout: seconds that :meth:`aclose` waits for requests in flight.
    :raises OptionsError: for an impossible option.
    :raises UsageError: if stages, inputs or outputs are missing, a stage is not of a kind listed above, or
        no event loop is running.
    """

    _elsewhere = "its engines do"

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
        loop = running_loop()
        threads = count(1)("threads", threads)
        max_in_flight = count(1)("max_in_flight", max_in_flight)
        options = Options(
            max_rows=max_in_flight,
            max_queue_rows=max_in_flight,
            priorities=priorities,
            timeout=timeout,
            close_timeout=close_timeout,
        )
        super().__init__(loop, options)
        if not stages:
            raise UsageError("a pipeline needs a stage: an engine, a function or a coroutine function")
        self._stages = [(stage, self._runner_of(stage)) for stage in stages]
        self._engines = [stage for stage in stages if isinstance(stage, Engine)]
        self._has_plain_stage = any(
            not isinstance(stage, Engine) and not is_coroutine_function(stage) for stage in stages
        )
        self._name = name
        self._inputs = specs_of("inputs", inputs)
        self._outputs = specs_of("outputs", outputs)
        self._check = InputCheck(self._inputs, check_key=None, import_array=None)
        self._default_ns = None if timeout is None else timeout_ns_of(timeout)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"asynctrt-{name}")
        self._runs = Runs(name)  # Of its threads: a stage that waits for one could wait for itself.
        # The executor's queue is unbounded and keeps cancelled work, so submit only when a thread is free.
        self._free_threads = asyncio.Semaphore(threads)
        self._tasks: dict[asyncio.Task[InferResult], tuple[int, asyncio.Future[InferResult]]] = {}
        self._rows = 0  # Of all tasks.
        self._counts: Counter[str] = Counter()
        self._sizes: dict[int, tuple[int, int]] = {}
        self._state = "open"

    def __repr__(self) -> str:
        return (
            f"<Pipeline {self._name!r} {self.state} stages={len(self._stages)} in_flight={len(self._tasks)}>"
        )

    @property
    def state(self) -> str:
        """``open``, ``draining``, ``closing`` or ``closed``. While the pipeline is open but an engine among
        its stages is not, the state of the first such engine."""
        if self._state == "open":
            states = [one.state for one in self._engines]
            return next((state for state in states if state != "open"), "open")
        return self._state

    @property
    def name(self) -> str:
        return self._name

    @property
    def platform(self) -> str:
        """``asynctrt_pipeline``."""
        return PLATFORM

    @property
    def device_name(self) -> str:
        """The device of the first stage that is an engine; ``host`` if no stage is one."""
        return self._engines[0].device_name if self._engines else "host"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._inputs

    @property
    def batching(self) -> Batching:
        """Always on: each step batches as its engine does, whose ``batching`` gives the reason."""
        return Batching(reason="each step batches as its engine does")

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
        """Send rows through all stages.

        :param inputs: as for :meth:`Engine.infer`.
        :param timeout: seconds until the last stage has to begin.
        :param priority: the priority in each stage's engine.
        :param outputs: the names of the outputs to return; ``host`` for all. Other outputs of the last stage
            are ignored.
        :raises InputError: if the inputs do not fit ``inputs`` or a stage finds them wrong, an output does
            not exist, or there are more rows than ``max_in_flight``.
        :raises QueueFullError: if too many rows are in flight, here or in an engine that is the first stage.
        :raises OverloadError: if an engine has no room after part of the request has begun.
        :raises DeadlineError: if the timeout passed.
        :raises EngineClosedError: if the pipeline is draining or closed, or closes before the answer.
        :raises ExecutionError: if a stage failed, or returned something that does not fit ``outputs``.
        :raises UsageError: if called on another event loop, with ``outputs="device"``, or from a plain
            function among its stages, which occupies the thread that the call would wait for.
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
                "call.infer(..., outputs='device')"
            )
        names = output_names(outputs, [spec.name for spec in self._outputs])
        arrays, rows, _ = self._check.validate(inputs)
        level = priority_of(priority, self._options.priorities)
        timeout_ns = self._default_ns if timeout is None else timeout_ns_of(timeout)
        limits = limits_here()
        if limits is not None:
            timeout_ns, level = limits.stricter(timeout_ns, level, self._options.priorities)
        if self._has_plain_stage and (run := run_here()) is not None:
            run.check(self._runs)
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
        call = Call(self, level, None if timeout_ns is None else now_ns + timeout_ns)
        # The answer is separate from the task: a stage cannot hold up its caller, and a caller sees only its
        # own cancellation.
        answer: asyncio.Future[InferResult] = self._loop.create_future()
        task = self._loop.create_task(self._run(arrays, rows, call, now_ns, names))
        self._tasks[task] = rows, answer
        self._rows += rows
        self._counts["submitted"] += 1
        task.add_done_callback(partial(self._ended, began_ns=now_ns))
        answer.add_done_callback(partial(self._answered, task))
        return answer

    async def run_in_thread(self, function: Callable[[], T], *, timeout: float | None = None) -> T:
        """Run a function in one of the pipeline's threads, in the caller's context.

        :param timeout: seconds to wait for a free thread.
        :raises DeadlineError: if no thread becomes free in that time.
        :raises UsageError: if called from a thread of the pipeline, or from a run that such a thread waits
            for.
        """
        over: asyncio.Future[None] = self._loop.create_future()
        try:
            if (run := run_here()) is not None:
                run.check(self._runs)
                run.wait_for(self._runs, over)
            return await self._in_thread(function, timeout)
        finally:
            over.cancel()

    async def _in_thread(self, function: Callable[[], T], timeout: float | None) -> T:
        has_thread = False
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout if self._free_threads.locked() else None):
                has_thread = await self._free_threads.acquire()
        if not has_thread:
            # Raised outside the handler: a TimeoutError would stay as the context, and its traceback holds
            # the task.
            raise DeadlineError(f"{self._name!r}: the timeout passed before one of its threads was free")
        job: Future[Callable[[], T]] = Future()
        job.add_done_callback(self._thread_is_free)
        work = partial(copy_context().run, outcome_of, partial(run_in, self._runs, function))
        try:
            self._threads.submit(_do, [(job, work)])
        except BaseException:
            # If the executor cannot start a thread, it raises but keeps the work queued, where another of its
            # threads may still find it. Only if the work has not begun, it never does.
            if job.cancel():
                raise
        try:
            return (await asyncio.wrap_future(job))()
        finally:
            del job, work  # They hold the error, whose traceback holds this frame.

    def _thread_is_free(self, _: object) -> None:
        with suppress(RuntimeError):  # On a closed loop nothing waits for it.
            self._loop.call_soon_threadsafe(self._free_threads.release)

    async def _run(
        self,
        arrays: tuple[Array, ...],
        rows: int,
        call: Call,
        arrival_ns: int,
        names: frozenset[str] | None,
    ) -> InferResult:
        given: Any = {spec.name: read_only(array) for spec, array in zip(self._inputs, arrays, strict=True)}
        stages = 0
        # For a stage that calls engines directly.
        hold_from_here(Limits(call.deadline_ns, call.priority, run_here()))
        try:
            for _, run in self._stages:
                call.left()
                given = await run(given, call)
                stages += 1
            outputs = self._checked_outputs(given, rows, arrays, names)
        except asyncio.CancelledError as cancelled:
            if is_cancelled():
                raise
            # The caller was not cancelled; something that a stage waited for was.
            raise ExecutionError(
                f"a stage of {self._name!r} was cancelled by what it waited for"
            ) from cancelled
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:  # A stage that calls sys.exit() must not end a server.
            # Not kept in a variable: its traceback holds this frame, and each would keep the other alive.
            raise self._error_of(first_of(raised), stages)  # noqa: B904  (it has its cause)
        record = BatchRecord(rows, arrival_ns)
        record.compute_ns = clock.now_ns() - arrival_ns
        return InferResult(outputs, (record,), arrival_ns)

    def _error_of(self, error: BaseException, stages: int) -> BaseException:
        """Return the caller's error when a stage raised ``error`` after ``stages`` other stages had ended."""
        if isinstance(error, PASSED_ON):
            has_begun = stages or not isinstance(self._stages[0][0], Engine)
            passed = once_begun(error) if has_begun else error
            passed.__suppress_context__ = True
            return passed
        failed = ExecutionError(f"a stage of {self._name!r} failed: {describe(error)}")
        failed.__cause__ = error
        return failed

    def _runner_of(self, stage: Stage) -> Callable[[Any, Call], Awaitable[Any]]:
        if isinstance(stage, Engine):
            engine = stage
            return lambda given, call: call.infer(engine, given)
        if not callable(stage):
            raise UsageError(
                "a stage of a pipeline must be an engine, a function or a coroutine function, not "
                f"{show(stage)}"
            )
        function: Callable[..., Any] = stage if takes_call(stage) else lambda given, _: stage(given)
        if is_coroutine_function(stage):
            return function

        async def in_thread(given: Any, call: Call) -> Any:
            found = await call.in_thread(function, given, call)
            return await found if inspect.isawaitable(found) else found

        return in_thread

    def _checked_outputs(
        self, given: Any, rows: int, inputs: tuple[Array, ...], names: frozenset[str] | None
    ) -> dict[str, Array]:
        """Return the last stage's outputs, each in its spec's dtype and writable.

        :param inputs: the caller's arrays, whose memory the outputs must not share.
        :param names: the names of the outputs that the caller wants; ``None`` for all.
        :raises ExecutionError: if an output is missing or does not fit its spec.
        """
        if not isinstance(given, Mapping):
            raise ExecutionError(f"the last stage returned a {type(given).__name__}, not arrays by name")
        found = {}
        symbols = self._check.symbols([array.shape[1:] for array in inputs])
        for spec in self._outputs:
            if names is not None and spec.name not in names:
                continue
            if spec.name not in given:
                raise ExecutionError(
                    f"output {spec.name!r} is missing: the last stage returned {show(list(given))}"
                )
            array = as_dtype(spec, np.asarray(given[spec.name]))
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

    async def aclose(self) -> None:
        """Refuse new requests, wait up to ``close_timeout`` for those in flight, fail the rest. Idempotent.

        The rest fail with ``EngineClosedError``, and their stages are cancelled. A function that still runs
        in a thread is not awaited. The engines of the stages stay open. Even a cancelled caller waits.
        """
        await super().aclose()

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
            logger.error("%r: %d requests still run in stages that were cancelled", self, len(self._tasks))
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._state = "closed"

    async def _wait_ended(self, timeout_s: float) -> None:
        """Wait until no request is in flight, or the time is up."""
        end_s = self._loop.time() + timeout_s
        for task in list(self._tasks):
            await wait_shielded(task, end_s - self._loop.time())


def _do(only: list[tuple["Future[Any]", Callable[[], Any]]]) -> None:
    """Do the work of the only job of a list in a thread, unless the job was cancelled."""
    # Popped, as the executor keeps the arguments of its calls.
    job, work = only.pop()
    if job.set_running_or_notify_cancel():
        job.set_result(work())
    del job, work  # They hold the error, whose traceback leads to this frame.
