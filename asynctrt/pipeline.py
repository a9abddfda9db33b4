"""Engines and functions as one awaitable, with one deadline and one priority: what stands around a model.

::

    pipeline = asynctrt.Pipeline(decode, engine, label, inputs=image, outputs=[name, score], threads=2)
    result = await pipeline.infer(rows, timeout=0.2, priority=1)

It is an engine to its callers, so servers, load tests and websockets take it wherever they take one.
"""

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import fields
from functools import partial
from typing import Any, Final, NoReturn, TypeVar, get_origin

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
from asynctrt.tensors import Array, BatchRecord, Dims, InferResult, TensorSpec, too_many_rows

logger = logging.getLogger("asynctrt")

T = TypeVar("T")
Stage = Engine | Callable[..., Any]

PASSED_ON: Final = (OverloadError, LifecycleError, DeviceError, InputError)
"""What an engine within says that holds for the whole: later, elsewhere, or look at the device. And what a
stage says about the inputs."""

PLATFORM: Final = "asynctrt_pipeline"

CANCEL_S: Final = 1.0
"""How long a stage that is cancelled by closing may take to end."""


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

    async def infer(self, engine: Engine, inputs: Inputs, *, outputs: Outputs = "host") -> InferResult:
        """Run rows through an engine, with this request's priority and what is left of its time.

        :param outputs: the names of the outputs to copy; or ``device``, which leaves all on the GPU, for the
            next engine there.
        :raises DeadlineError: if the time is over, or the engine could not begin in time.
        :raises ExecutionError: if the engine cannot take the inputs: they are a stage's, not the caller's.
        :raises AsynctrtError: whatever else the engine raises.
        """
        priority = min(self.priority, engine.options.priorities - 1)
        try:
            return await engine.infer(inputs, timeout=self.left(), priority=priority, outputs=outputs)
        except CallerError as error:
            raise ExecutionError(
                f"a stage of {self._pipeline.name!r} called {engine.name!r} wrongly: {describe(error)}"
            ) from error

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread of the pipeline, of which there are ``threads``.

        :raises DeadlineError: if the request's time is over before a thread is free.
        """
        return await self._pipeline.run_in_thread(partial(function, *arguments), timeout=self.left())


class Pipeline(Engine):
    """Stages that a request goes through in turn. Each takes what the one before gave: arrays by name.

    A stage is

    - an :class:`Engine`, which batches the request with others (a :class:`FunctionModel` for a function over
      batches);
    - a function, which is called in a thread: ``stage(inputs)``, or ``stage(inputs, call)`` if it has a
      second parameter that needs an argument or is called ``call``;
    - a coroutine function, likewise, on the event loop. With ``call.infer(engine, ...)`` and
      ``call.in_thread(function, ...)`` it can do anything: several engines at once, one for each of many
      pieces.

    The first stage reads the caller's own arrays, so it gets views that cannot be written to. A stage that
    finds the caller's inputs wrong raises :class:`InputError`, which the caller gets as it is.

    A request's timeout counts from its arrival to the beginning of its last stage, and each engine gets what
    is left of it; likewise its priority, as far as an engine has so many. What has begun is not stopped.
    Nothing but what the engines do themselves is batched, and requests overtake each other.

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
    :raises UsageError: without stages, inputs or outputs, for a stage that is none of these, or without a
        running loop.
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
            raise UsageError("a pipeline needs a stage: an engine, a function, a coroutine function")
        self._stages = [(stage, self._runner_of(stage)) for stage in stages]
        self._engines = [stage for stage in stages if isinstance(stage, Engine)]
        self._has_plain_stage = any(
            not isinstance(stage, Engine) and not is_coroutine_function(stage) for stage in stages
        )
        self._name = name
        self._inputs = specs_of("inputs", inputs)
        self._outputs = specs_of("outputs", outputs)
        self._check = InputCheck(self._inputs, check_finite=False, check_key=None, import_array=None)
        self._default_ns = None if timeout is None else timeout_ns_of(timeout)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"asynctrt-{name}")
        self._runs = Runs(name)  # Of its threads, which are what a stage may wait for itself by.
        # The executor's queue has no bound, and keeps what was cancelled: only what can begin is put there.
        self._free_threads = asyncio.Semaphore(threads)
        self._tasks: dict[asyncio.Task[InferResult], tuple[int, asyncio.Future[InferResult]]] = {}
        self._rows = 0  # Of all of them.
        self._counts: Counter[str] = Counter()
        self._sizes: dict[int, tuple[int, int]] = {}
        self._state = "open"

    def __repr__(self) -> str:
        return (
            f"<Pipeline {self._name!r} {self.state} stages={len(self._stages)} in_flight={len(self._tasks)}>"
        )

    @property
    def state(self) -> str:
        """``open``, ``draining``, ``closing``, ``closed``; while it is open, the state of the first engine
        among its stages that is not."""
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
        """The device of the first engine that is a stage; ``host`` if none is."""
        return self._engines[0].device_name if self._engines else "host"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._inputs

    @property
    def batching(self) -> Batching:
        """On: each step batches as its own engine does, which says why."""
        return Batching(reason="each step batches as its engine does")

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._outputs

    @property
    def max_rows(self) -> int:
        """Rows that one request may have, and that may be under way."""
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
        :param timeout: seconds until its last stage has begun.
        :param priority: for the engines within.
        :param outputs: the names of the outputs that the answer is to have; ``host`` for all. The others that
            the last stage gives are not looked at.
        :raises InputError: for inputs that do not fit ``inputs`` or that a stage finds wrong, for a name
            that is not among its outputs, and for more rows than may ever be under way.
        :raises QueueFullError: if too many rows are under way, here or in an engine that is its first stage.
        :raises OverloadError: if an engine within has no room when something has begun.
        :raises DeadlineError: if the timeout passed.
        :raises EngineClosedError: if it is draining or closed, or is closed meanwhile.
        :raises ExecutionError: if a stage failed, or gave something else than ``outputs``.
        :raises UsageError: on another event loop, for ``outputs="device"``, and from within a plain stage
            of its own, which holds the thread that this call would wait for.
        """
        future = self.submit(inputs, timeout=timeout, priority=priority, outputs=outputs)
        try:
            return await future
        except (asyncio.CancelledError, GeneratorExit):
            future.cancel()
            raise
        finally:
            del future  # It has its error, and the error's traceback has this frame.

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
            raise UsageError("a pipeline's own outputs are on the host; between its engines use call.infer")
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
                f"{self._rows} rows are under way in {self._name!r}, and at most "
                f"{self._options.max_queue_rows} may be: {rows} more have no room. Retry later, send less, "
                "or give it a larger max_in_flight"
            )
        now_ns = clock.now_ns()
        call = Call(self, level, None if timeout_ns is None else now_ns + timeout_ns)
        # The answer is not the task: a stage cannot keep its caller, and a caller sees no cancellation but
        # its own.
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

        :param timeout: seconds until a thread is free.
        :raises DeadlineError: if none is by then.
        :raises UsageError: from within a thread of the pipeline, or a run that one of them waits for.
        """
        future: asyncio.Future[Callable[[], T]] = self._loop.create_future()
        try:
            if (run := run_here()) is not None:
                run.check(self._runs)
                run.wait_for(self._runs, future)
            return await self._in_thread(function, future, timeout)
        finally:
            future.cancel()  # It may not have begun.
            del future  # It has what was raised, whose traceback has this frame.

    async def _in_thread(
        self,
        function: Callable[[], T],
        future: "asyncio.Future[Callable[[], T]]",
        timeout: float | None,
    ) -> T:
        has_thread = False
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout if self._free_threads.locked() else None):
                has_thread = await self._free_threads.acquire()
        if not has_thread:
            # Not as a TimeoutError is handled: it would stay the context, and its traceback has the task.
            raise DeadlineError(f"{self._name!r}: the timeout passed before one of its threads was free")
        # The executor keeps what it was given even if it then cannot start a thread for it. One that it has
        # already, or starts for the next, would find it there: whoever takes this decides.
        turn: list[tuple[Callable[[], Callable[[], Any]], asyncio.Future[Any]]]
        turn = [(partial(copy_context().run, outcome_of, partial(run_in, self._runs, function)), future)]
        try:
            self._threads.submit(self._work, turn)
        except BaseException:
            if _taken(turn) is not None:
                self._free_threads.release()
                raise
        try:
            return (await future)()
        finally:
            del future  # It has what was raised, whose traceback has this frame.

    def _work(self, turn: "list[tuple[Callable[[], Callable[[], Any]], asyncio.Future[Any]]]") -> None:
        """Run in a thread, and say on the loop what came of it."""
        taken = _taken(turn)
        if taken is None:
            return  # Its caller was told that there is no thread.
        work, future = taken
        outcome = None if future.cancelled() else work()
        with suppress(RuntimeError):  # A loop that is closed waits for nothing.
            self._loop.call_soon_threadsafe(self._worked, future, outcome)
        del taken, future, outcome  # They have what was raised, whose traceback leads to this frame.

    def _worked(self, future: "asyncio.Future[Any]", outcome: Callable[[], Any] | None) -> None:
        self._free_threads.release()
        if not future.done():
            future.set_result(outcome)

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
        # For a stage that asks engines by itself.
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
            # Not its caller, but something that a stage waited for was cancelled.
            raise ExecutionError(
                f"a stage of {self._name!r} was cancelled by what it waited for"
            ) from cancelled
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:  # A stage that calls sys.exit() must not end a server.
            # No variable has it: this frame is in its traceback, and each would keep the other.
            raise self._error_of(first_of(raised), stages)  # noqa: B904  (it has its cause)
        record = BatchRecord(rows, arrival_ns)
        record.compute_ns = clock.now_ns() - arrival_ns
        return InferResult(outputs, (record,), arrival_ns)

    def _error_of(self, error: BaseException, stages: int) -> BaseException:
        """Return what a caller gets when a stage raised ``error`` after ``stages`` others had ended."""
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
                f"{show(stage)} is not a stage of a pipeline: an engine, a function or a coroutine function "
                "is"
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
        """Return the outputs that the last stage gave, each of its dtype, and the caller's to write to.

        :param inputs: the caller's arrays, which must not lie under the outputs.
        :param names: of the outputs that the caller wants; ``None`` for all.
        :raises ExecutionError: if one is missing, or is something else than it should be.
        """
        if not isinstance(given, Mapping):
            raise ExecutionError(f"the last stage gave a {type(given).__name__}, not arrays by name")
        found = {}
        symbols = self._check.symbols([array.shape[1:] for array in inputs])
        for spec in self._outputs:
            if names is not None and spec.name not in names:
                continue
            if spec.name not in given:
                raise ExecutionError(
                    f"output {spec.name!r} is missing: the last stage gave {show(list(given))}"
                )
            array = as_dtype(spec, np.asarray(given[spec.name]))
            fixed = all(
                symbols.setdefault(dim, size) == size if isinstance(dim, str) else dim == size
                for dim, size in zip(spec.dims, array.shape[1:], strict=False)
            )
            if array.ndim != 1 + len(spec.dims) or array.shape[0] != rows or not fixed:
                named = "".join(f", {dim}={symbols[dim]}" for dim in spec.dims if dim in symbols)
                raise ExecutionError(
                    f"output {spec.name!r} has shape {array.shape}, and should be {spec}, {rows} rows{named}"
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
            answer.cancel()  # By whoever cancels every task of the loop.
        elif error is not None:
            self._counts["expired" if isinstance(error, DeadlineError) else "failed"] += 1
            answer.set_exception(error)
        else:
            took_ns = clock.now_ns() - began_ns
            requests, sum_ns = self._sizes.get(rows, (0, 0))
            self._sizes[rows] = (requests + 1, sum_ns + took_ns)
            answer.set_result(task.result())

    def statistics(self) -> Statistics:
        """Return a snapshot. Each request counts as a batch of its own, whose compute time is all it took."""
        self._origin.check(self)
        sizes = dict(self._sizes).items()  # A copy: other threads may ask.
        succeeded = sum(requests for _, (requests, _) in sizes)
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
            "rows": sum(rows * requests for rows, (requests, _) in sizes),
            "batches": succeeded,
            "batches_timed": succeeded,
            "compute_ns": total_ns,
            "total_ns": total_ns,
            "in_flight_batches": len(self._tasks),
            "contexts": 1,
            "by_batch_rows": {
                rows: BatchStatistics(requests, 0, sum_ns, 0) for rows, (requests, sum_ns) in sizes
            },
        }
        return Statistics(**{**none, **known})

    async def drain(self) -> None:
        self._check_loop()
        if self._state == "open":
            self._state = "draining"
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def aclose(self) -> None:
        """Refuse new requests, wait up to ``close_timeout`` for those under way, fail the rest. Idempotent.

        Those fail with ``EngineClosedError``, and their stages are cancelled. The engines within stay open. A
        function that still runs in a thread is not waited for. A caller who is cancelled waits all the same.
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
            logger.error("%r: %d requests go on in stages that were cancelled", self, len(self._tasks))
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._state = "closed"

    async def _wait_ended(self, timeout_s: float) -> None:
        """Wait until no request is under way, or the time is up."""
        end_s = self._loop.time() + timeout_s
        for task in list(self._tasks):
            await wait_shielded(task, end_s - self._loop.time())

    def slot(self, *, rows: int = 1, dims: Mapping[str, Dims] | None = None) -> NoReturn:
        """Refuse: a pipeline has no slab to write into.

        :raises UsageError: always.
        """
        self._lacks("slots")

    def tracing(self, *, batches: int = 4096, timed: bool = True) -> NoReturn:
        """Refuse: trace the engines within.

        :raises UsageError: always.
        """
        self._lacks("batches of its own to trace")

    def _lacks(self, what: str) -> NoReturn:
        raise UsageError(f"{self!r} has no {what}: its engines do")


def _taken(turn: "list[T]") -> "T | None":
    """Take what one of two threads may have; ``None`` for the later one."""
    try:
        return turn.pop()
    except IndexError:
        return None
