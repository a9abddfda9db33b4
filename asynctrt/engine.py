"""The engine: what ``asynctrt.open`` gives. Read this first.

A request's way, top to bottom: :meth:`Engine.infer` checks its inputs against the model's specs, queues it
(``scheduling``), and awaits. The driver (``runtime``) carries out what the scheduler decides: it puts batches
on pooled contexts (``backends``) of a device (``devices``), and answers the callers when the reaper has seen
a batch's event.
"""

import asyncio
import logging
import sys
import threading
import warnings
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import Context
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from asynctrt import clock
from asynctrt.errors import (
    DeadlineError,
    EngineClosedError,
    InputError,
    OverloadError,
    UsageError,
    once_begun,
    show,
)
from asynctrt.forks import Origin, in_child
from asynctrt.inputs import Checked, Inputs, Outputs
from asynctrt.loops import running_loop, see_through, see_through_in_thread, wait_shielded
from asynctrt.nesting import Run
from asynctrt.options import Options
from asynctrt.parts import EngineParts
from asynctrt.propagation import limits_here, run_here
from asynctrt.runtime.driver import COPY_ON_LOOP_NBYTES_MAX, Driver
from asynctrt.runtime.slots import Slot, SlotBoard
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.key import FIXED_SHAPE, BatchKey
from asynctrt.scheduling.request import Request
from asynctrt.statistics import (
    Batching,
    BatchStatistics,
    BatchTrace,
    PaddingStatistics,
    Statistics,
    WorkerState,
)
from asynctrt.tensors import BatchRecord, Dims, InferResult, TensorSpec, Views, too_many_rows
from asynctrt.validation import int_or_none, output_names, priority_of, timeout_ns_of

STREAM_END_S: Final = 0.1
"""How long a stream whose batches have ended may take to come to rest."""

ABANDONED_S: Final = 3600.0
"""How long is waited at a time for batches that were given up."""

HOST: Final = "host"
"""The default of ``outputs``. Calls compare by identity first, which is cheaper and mostly enough."""

logger = logging.getLogger("asynctrt")


class Engine:
    """A model behind ``await``. Made by :func:`open`; belongs to the event loop that it was opened on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, parts: EngineParts, options: Options) -> None:
        device, model, pool, capacity = parts.device, parts.model, parts.pool, parts.capacity
        self._belong_to(loop)
        self._parts = parts
        self._device, self._model, self._pool = device, model, pool
        self._runs = pool.runs
        self._options = options
        self._capacity = capacity
        self._rows_max = capacity.rows_max
        # Up to this many rows are never split, whatever their shape.
        self._rows_unsplit = 0 if parts.shapes.limit_varies else self._rows_max
        self._has_fixed_shape = all(spec.is_fixed for spec in model.inputs)
        self._now_ns = clock.now_ns
        self._opened_ns = clock.now_ns()
        self._timeout_ns = None if options.timeout is None else timeout_ns_of(options.timeout)
        self._scheduler = parts.create_scheduler(options)
        self._input_check = parts.create_check(options, self._scheduler.limit)
        self._validate = self._input_check.validate
        # Where rows of outputs are joined, if a request had to be split.
        self._axes = {spec.name: spec.axis for spec in model.outputs if spec.axis}
        self._is_plain = all(spec.axis == 0 for spec in (*model.inputs, *model.outputs))
        self._driver = Driver(
            loop=loop,
            scheduler=self._scheduler,
            pool=pool,
            now_ns=self._now_ns,
            model=model,
            device=device,
            waiting=options.waiting,
            batch_timeout_ns=None if options.batch_timeout is None else timeout_ns_of(options.batch_timeout),
            bisects=options.isolate_failures,
        )
        parts.divide_device(self._scheduler, options, loop, self._driver.pump_soon)
        self._slots = SlotBoard(
            loop=loop,
            pool=pool,
            slabs_max=capacity.contexts + 1,
            limit=self._scheduler.limit,
            waiting_rows_max=options.max_queue_rows,
        )
        chooser = parts.create_size_chooser(loop.call_soon)
        if chooser is not None:
            self._driver.on_answer = chooser.answered
        self._state = "open"
        self._closing: asyncio.Task[None] | None = None
        self._opened_at = _caller()

    def __repr__(self) -> str:
        return (
            f"<Engine {self._model.name!r} on {self._device.name} {self.state} "
            f"queued={self._scheduler.queued_requests} "
            f"in_flight={self._scheduler.in_flight}>"
        )

    def _belong_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note where it may be used: on this loop and in this process."""
        self._loop = loop
        # Together they say whether this is the engine's loop. asyncio.get_running_loop() says it too, but
        # makes a system call each time before Python 3.12.
        self._is_running = loop.is_running
        self._thread = get_ident()
        self._origin = Origin()
        in_child(self, Engine._let_go)

    def _let_go(self) -> None:
        """In a child that was forked: have every call find that this is not where it may be used."""
        self._thread = 0

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") != "closed" and self._origin.is_here:
            # Its threads and its memory are given back all the same. On a loop that was closed they are
            # garbage, too, and end as such.
            with suppress(RuntimeError):
                # Two rounds of the loop later: a loop that ends in this one must not have a task destroyed.
                self._loop.call_soon_threadsafe(self._loop.call_soon, self._close_soon, context=Context())
            warnings.warn(
                f"{self!r}, opened at {self._opened_at}, was never closed. Use 'async with', or "
                "await engine.aclose()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        :raises UsageError: always.
        """
        raise UsageError(
            f"{self!r} cannot be copied or pickled: it belongs to its event loop. Open another where one is "
            "needed"
        )

    async def __aenter__(self) -> Self:
        self._origin.check(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self._origin.is_here:  # What ends a child goes on.
            await self.aclose()

    @property
    def state(self) -> str:
        """``open``, ``draining``, ``closing``, ``closed``; ``lost`` if nothing
        can run on it any more."""
        if self._state != "open":
            return self._state
        is_lost = self._device.lost is not None or self._driver.lost is not None
        return "lost" if is_lost else "open"

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def platform(self) -> str:
        """What runs the model, in KServe's words: ``onnxruntime_onnx``, ``tensorrt_plan``, ``python``."""
        return self._model.platform

    @property
    def device_name(self) -> str:
        """The device's name: ``host``, ``cuda:0``."""
        return self._device.name

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """The worker process of each device, as it is now; without ``isolation="process"`` there are none."""
        return ()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the model takes."""
        return self._model.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What the model gives."""
        return self._model.outputs

    @property
    def has_plain_rows(self) -> bool:
        """Whether the rows of every tensor lie one after the other in memory."""
        return self._is_plain

    @property
    def batching(self) -> Batching:
        """Whether rows of different requests share batches, and why."""
        return self._parts.batching

    @property
    def max_rows(self) -> int:
        """Rows that one batch holds at the most."""
        return self._rows_max

    @property
    def options(self) -> Options:
        """The options that it was opened with."""
        return self._options

    async def infer(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Outputs = HOST,
    ) -> InferResult:
        """Run rows through the model, batched with those of other callers.

        :param inputs: arrays by tensor name, each ``(rows, *dims)`` of the tensor's dtype; or one array, if
            the model has one input. Nested lists are converted. The arrays are read until this returns or
            raises: do not write to them meanwhile. More rows than a batch holds are split, and rejoined.
            Arrays on the engine's own GPU (DLPack, ``__cuda_array_interface__``) are taken where they are.
        :param timeout: seconds that the request may be queued; ``None`` takes the engine's default.
        :param priority: 0 up to the engine's ``priorities - 1``; a larger one goes first.
        :param outputs: the names of the outputs to answer with. An output that no caller of a batch names is
            not copied, neither from the device nor out of the batch; requests that name different outputs
            share batches. ``host`` copies all; ``device`` leaves all on the engine's GPU, each as a
            :class:`DeviceArray`.
        :raises InputError: for inputs that do not fit the model, and for an output that it does not have.
            Nothing is queued then.
        :raises QueueFullError, DeadlineError: under overload.
        :raises EngineClosedError: when the engine is draining or closed, or is closed meanwhile.
        :raises ExecutionError, DeviceError: when the batch failed.
        :raises UsageError: on another event loop than the engine's, or in a process that was forked; from
            within the engine's own run of a function, or of one that it waits for.
        """
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()
        arrays, rows, key = self._validate(inputs)
        names = None
        if outputs is not HOST:
            key, names = self._wanted(outputs, key, rows)
        if timeout is None and type(priority) is int and not priority and limits_here() is None:
            timeout_ns, run = self._timeout_ns, None
        else:
            timeout_ns, priority, run = self._checked(timeout, priority)
        if rows > self._rows_unsplit and rows > self._scheduler.limit(key):
            parts = self._split(arrays, rows, key)
            requests = self._driver.submit_parts(parts, key, priority, timeout_ns, names)
            if run is not None:
                self._wait_in(run, requests)
            return await self._rejoined(requests, [request.future for request in requests])
        request = self._driver.submit(arrays, rows, key, priority, timeout_ns, None, names)
        if run is not None:
            self._wait_in(run, [request])
        try:
            result: InferResult = await request.future
        except (asyncio.CancelledError, GeneratorExit):
            self._driver.cancel(request)
            raise
        return result

    def submit(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Outputs = HOST,
    ) -> "asyncio.Future[InferResult]":
        """What :meth:`infer` does, for callers that are no coroutines: a protocol's callbacks, for one.

        Arguments and errors are those of :meth:`infer`; what is wrong with the call is raised here, and the
        rest by the future. To cancel the future is to cancel the request.
        """
        # The first lines of `infer`, once more: they are too hot for a method that serves both.
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()
        arrays, rows, key = self._validate(inputs)
        names = None
        if outputs is not HOST:
            key, names = self._wanted(outputs, key, rows)
        if timeout is None and type(priority) is int and not priority and limits_here() is None:
            timeout_ns, run = self._timeout_ns, None
        else:
            timeout_ns, priority, run = self._checked(timeout, priority)
        if rows > self._rows_unsplit and rows > self._scheduler.limit(key):
            parts = self._split(arrays, rows, key)
            # Queued here, not by the task: what was accepted is answered though the engine drains at once.
            requests = self._driver.submit_parts(parts, key, priority, timeout_ns, names)
            if run is not None:
                self._wait_in(run, requests)
            futures = [request.future for request in requests]
            task = self._loop.create_task(self._rejoined(requests, futures))
            # A task that is cancelled before it has begun runs no line of its own.
            task.add_done_callback(partial(self._give_up, requests, futures))
            # Both: a request lets go of its future when it is answered.
            task.requests, task.parts = requests, futures  # type: ignore[attr-defined]
            return task
        future = _Answer(loop=self._loop)
        future.driver = self._driver
        future.request = self._driver.submit(arrays, rows, key, priority, timeout_ns, future, names)
        if run is not None:
            self._wait_in(run, [future.request])
        return future

    def keep_rows_first(self) -> None:
        """Take and answer arrays with rows first, whatever axis the model has them on: in a worker."""
        self._input_check = self._parts.create_check(self._options, self._scheduler.limit, rows_first=True)
        self._validate = self._input_check.validate
        self._axes = {}
        self._driver.keep_rows_first()

    def _submit_for(
        self, future: Any, checked: Checked, timeout_ns: int | None, priority: int
    ) -> tuple[Driver, Request] | None:
        """Queue checked rows. What stands for the future of their request is answered as that would be.

        :returns: what runs them, and their request; ``None``, and nothing is queued, if they are more than a
            batch holds.
        """
        arrays, rows, key = checked
        if rows > self._rows_unsplit and rows > self._scheduler.limit(key):
            return None
        return self._driver, self._driver.submit(arrays, rows, key, priority, timeout_ns, future)

    def slot(self, *, rows: int = 1, dims: Mapping[str, Dims] | None = None) -> Slot:
        """Rows of a slab to write inputs straight into: ``async with engine.slot(rows=4) as slot``.

        :param rows: how many, up to ``max_rows``, and to as many as ``max_batch_bytes`` leaves of a shape.
        :param dims: the dimensions of one row, by input name, where the model leaves them open.
        :raises InputError: for an impossible number of rows, or missing dimensions.
        """
        self._check_loop()
        if not self._is_plain:
            raise UsageError(
                f"slots are rows that lie one after the other, and the rows of {self.name!r} do not: "
                f"{self.batching}. Give its arrays to infer"
            )
        if dims is None and self._has_fixed_shape:
            key = FIXED_SHAPE
        else:
            key = self._input_check.key_of_dims({} if dims is None else dims)
        rows_max = self._scheduler.limit(key)
        count = int_or_none(rows)
        if count is None or not 1 <= count <= rows_max:
            raise InputError(f"rows of a slot must be a whole number from 1 to {rows_max}, not {show(rows)}")
        return Slot(self._slots, key.shape, count, self._submit_slot)

    def statistics(self) -> Statistics:
        """A snapshot of what the engine has done and is doing."""
        self._origin.check(self)
        snapshot = self._scheduler.snapshot()
        counters, padding, share = snapshot.counters, self._parts.padding, self._scheduler.share
        return Statistics(
            state=self.state,
            submitted=snapshot.submitted,
            succeeded=counters.succeeded,
            failed=counters.failed,
            cancelled=counters.cancelled,
            expired=counters.expired,
            refused=counters.refused,
            refused_late=counters.refused_late,
            rows=counters.rows,
            batches=counters.batches,
            queue_ns=counters.queue_ns,
            copy_in_ns=counters.copy_in_ns,
            compute_ns=counters.compute_ns,
            copy_out_ns=counters.copy_out_ns,
            total_ns=counters.total_ns,
            queued_requests=snapshot.queued_requests,
            queued_rows=snapshot.queued_rows,
            in_flight_batches=snapshot.in_flight_batches,
            rows_padded=counters.rows_padded,
            batches_timed=counters.batches_timed,
            batches_bisected=counters.bisected,
            launched={str(reason): count for reason, count in counters.launched.items()},
            contexts=self._capacity.contexts,
            contexts_quarantined=snapshot.contexts_quarantined,
            worker_deaths=0,
            arenas=self._capacity.arenas,
            arena_waits=counters.arena_waits,
            arena_wait_ns=counters.arena_wait_ns,
            arena_busy_share=self._busy_share(counters.busy_ns),
            arena_nbytes=self._pool.arenas_nbytes,
            arena_nbytes_private=self._capacity.contexts * self._model.enqueue_nbytes,
            lanes=self._scheduler.lanes_chosen(),
            graphs=self._pool.captured.sizes,
            batch_sizes=self._pool.prepared,
            memory_nbytes=self._pool.nbytes + self._slots.nbytes,
            module_loading=self._device.module_loading,
            device_ns=0 if share is None else round(share.used_ns),
            held_ns=0 if share is None else share.held_ns,
            by_batch_rows={
                rows: BatchStatistics(size.count, size.copy_in_ns, size.compute_ns, size.copy_out_ns)
                for rows, size in counters.by_rows.items()
            },
            row_ns_foreign=0.0,
            batching=self._parts.batching,
            padding=PaddingStatistics.of_all({} if padding is None else padding.chosen),
        )

    @contextmanager
    def tracing(self, *, batches: int = 4096, timed: bool = True) -> Iterator[deque[BatchTrace]]:
        """Collect the last ``batches`` batches answered while inside: ``with engine.tracing() as trace``.

        :param timed: let a GPU take the times of every batch, which makes batches wait for each other that
            need not. Without it, batches that are not timed have the times of others of their size.
        :raises UsageError: inside of another one.
        """
        self._origin.check(self)
        if self._driver.observe is not None:
            raise UsageError("this engine's batches are being traced already")
        trace: deque[BatchTrace] = deque(maxlen=batches)

        def observe(batch: Batch, record: BatchRecord, now_ns: int) -> None:
            trace.append(
                BatchTrace(
                    context=batch.context,
                    arena=batch.arena,
                    rows=batch.rows,
                    rows_run=batch.rows_run,
                    requests=len(batch.requests),
                    reason=str(batch.reason),
                    is_timed=batch.is_timed,
                    launched_ns=batch.launched_ns,
                    copy_in_ns=record.copy_in_ns,
                    compute_ns=record.compute_ns,
                    copy_out_ns=record.copy_out_ns,
                    answered_ns=now_ns,
                )
            )

        self._driver.observe = observe
        self._scheduler.times_all = timed or self._device.timing_is_free
        try:
            yield trace
        finally:
            self._driver.observe = None
            self._scheduler.times_all = self._device.timing_is_free

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when all that were taken have been answered."""
        self._check_loop()
        if self._state == "open":
            self._state = "draining"
            self._driver.refuse(EngineClosedError(f"{self.name!r} is draining: send to another engine"))
        await self._driver.wait_idle()

    async def aclose(self) -> None:
        """Fail what is queued, let what is in flight finish, and give everything back. Idempotent.

        Batches that do not end within ``close_timeout`` are failed with ``DeviceLostError`` and what they
        use is abandoned.
        """
        self._check_loop()
        # A caller who is cancelled waits all the same: a loop that ends then must not leave it half closed.
        cancelled = await see_through(self._close_soon)
        if cancelled is not None:
            raise cancelled

    def _close_soon(self) -> asyncio.Task[None]:
        """Return the task that closes it, which begins now at the latest."""
        if self._closing is None or self._closing.cancelled():
            self._closing = self._loop.create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        """Close, and see it through although a loop that ends cancels every task, this one included."""
        why = f"{self.name!r} is closed"
        self._state = "closing"
        self._slots.refuse(why)
        self._driver.fail_queued(EngineClosedError(why))
        await wait_shielded(self._driver.next_idle(), self._options.close_timeout)
        self._driver.close()
        given_back, _ = await see_through_in_thread(self._give_back)
        self._state = "closed"
        given_back.result()

    def _give_back(self) -> None:
        """Blocks: joins threads, frees memory, unloads the model."""
        self._driver.end_threads(STREAM_END_S)
        abandoned = self._parts.close(STREAM_END_S, self._slots.close)
        if abandoned:
            logger.error("%r: %d contexts were abandoned while they ran", self, abandoned)
            # A daemon: what never ends must not keep the interpreter from exiting.
            later = partial(_give_back_later, self._parts, self._slots)
            threading.Thread(target=later, name="asynctrt-abandoned", daemon=True).start()

    def _split(self, arrays: tuple[Any, ...], rows: int, key: BatchKey) -> list[tuple[tuple[Any, ...], int]]:
        """Return the parts of a call with more rows than a batch holds, each arrays and their rows.

        :raises InputError: for more rows than the queue can ever hold.
        """
        if rows > self._options.max_queue_rows:
            raise too_many_rows(rows, self._options.max_queue_rows)
        part = self._scheduler.limit(key)
        return [
            (Views(array[start : start + part] for array in arrays), min(part, rows - start))
            for start in range(0, rows, part)
        ]

    async def _rejoined(
        self, requests: list[Request], futures: list[asyncio.Future[InferResult]]
    ) -> InferResult:
        """Answer a call with more rows than a batch holds, whose parts were all queued."""
        try:
            results = await asyncio.gather(*futures)
        except BaseException as error:
            answered = sum(
                future.done() and not future.cancelled() and future.exception() is None for future in futures
            )
            # One part failed or the caller went away, so the others are of no use any more.
            self._give_up(requests, futures)
            if isinstance(error, OverloadError) and not isinstance(error, DeadlineError):
                raise once_begun(error) from error
            if not isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                f"{error}. The call was split into {len(requests)} batches, of which {answered} had been "
                "computed"
            ) from None
        finally:
            del futures  # They have the error, and its traceback has this frame.
        nbytes = sum(array.nbytes for result in results for array in result.values())
        if nbytes <= COPY_ON_LOOP_NBYTES_MAX:
            return InferResult.join(results, self._axes)
        joined: list[InferResult] = []
        await self._driver.copy_off_loop(lambda: joined.append(InferResult.join(results, self._axes)), nbytes)
        return joined[0]

    def _give_up(
        self, requests: list[Request], futures: list[asyncio.Future[InferResult]], *_: object
    ) -> None:
        """Cancel the parts of a call that are not done. Idempotent."""
        for request, future in zip(requests, futures, strict=True):
            future.cancel()
            self._driver.cancel(request)
            if not future.cancelled():
                future.exception()  # Looked at here, so that asyncio does not miss a reader.

    def _submit_slot(
        self, payload: Any, rows: int, key: BatchKey, timeout: float | None, priority: int
    ) -> Coroutine[Any, Any, InferResult]:
        """Queue rows that lie in a slab already, so that there is nothing to check or to split.

        :returns: what waits for the answer.
        """
        self._check_loop()
        timeout_ns, priority, run = self._checked(timeout, priority)
        request = self._driver.submit(payload, rows, key, priority, timeout_ns)
        if run is not None:
            self._wait_in(run, [request])
        return self._answer(request)

    async def _answer(self, request: Request) -> InferResult:
        try:
            result: InferResult = await request.future
        except (asyncio.CancelledError, GeneratorExit):
            self._driver.cancel(request)
            raise
        return result

    def _checked(self, timeout: float | None, priority: int) -> tuple[int | None, int, Run | None]:
        """Return the timeout in ns, and the priority: a call's own, within those of :func:`asynctrt.within`.

        And the run of a function that the call is made in, if there is one.

        :raises InputError: for a value that is neither.
        :raises DeadlineError: if that work has no time left.
        :raises UsageError: if that run would wait for itself.
        """
        level = priority_of(priority, self._options.priorities)
        timeout_ns = self._timeout_ns if timeout is None else timeout_ns_of(timeout)
        limits = limits_here()
        if limits is None:
            return timeout_ns, level, None
        timeout_ns, level = limits.stricter(timeout_ns, level, self._options.priorities)
        run = run_here()
        if run is not None:
            run.check(self._runs)
        return timeout_ns, level, run

    def _wait_in(self, run: Run, requests: list[Request]) -> None:
        """Note that a run of a function waits for requests of this engine."""
        for request in requests:
            run.wait_for(self._runs, request.future)

    def _busy_share(self, busy_ns: int) -> float:
        """Return the share of the time since it was opened in which its arenas computed for it."""
        passed_ns = max(self._now_ns() - self._opened_ns, 1) * self._capacity.arenas
        return busy_ns / passed_ns if passed_ns else 0.0

    def _wanted(self, outputs: Outputs, key: BatchKey, rows: int) -> tuple[BatchKey, frozenset[str] | None]:
        """Return a request's key, and the names of the outputs that it wants; ``None`` for all."""
        if isinstance(outputs, str) and outputs == "device":
            return self._key_on_device(key, rows), None
        return key, output_names(outputs, [spec.name for spec in self.outputs])

    def _key_on_device(self, key: BatchKey, rows: int) -> BatchKey:
        """Return the key of a request whose outputs stay on the device."""
        if self._axes:
            raise InputError(
                "outputs='device' leaves rows where they are computed, and those of "
                f"{next(iter(self._axes))!r} do not lie one after the other. Ask for outputs='host'"
            )
        if self._options.pad is not None:
            raise InputError("outputs='device' leaves no way to cut them back, and this engine pads its rows")
        rows_max = self._scheduler.limit(key)
        if rows > rows_max:
            raise InputError(
                f"outputs='device' takes the rows of one batch ({rows_max}), given {rows}. "
                "Send them in several calls"
            )
        return key._replace(outputs_on_device=True)

    def _check_open(self) -> None:
        if self._state != "open":
            raise EngineClosedError(f"{self.name!r} is {self._state}: open it again")

    def _check_loop(self) -> None:
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()

    def _wrong_loop(self) -> UsageError:
        self._origin.check(self)
        running_loop()
        return UsageError(
            f"{self!r} belongs to the event loop that it was opened on, and this is another one. Open an "
            "engine on each loop, or hand the call over: asyncio.run_coroutine_threadsafe(coroutine, loop)"
        )


class _Answer(asyncio.Future[InferResult]):
    """The future of :meth:`Engine.submit`: to cancel it takes its request out of the queue at once."""

    __slots__ = ("driver", "request")

    driver: Driver
    request: Request | None

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        if self.request is not None:
            self.driver.cancel(self.request)
            self.request = None
        return True


def _caller() -> str:
    """File and line of the nearest frame outside this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("asynctrt."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _give_back_later(parts: EngineParts, slots: SlotBoard) -> None:
    """Give back what was abandoned once it has ended after all."""
    while parts.close(ABANDONED_S, slots.close):
        pass
