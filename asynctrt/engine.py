"""The engine: ``asynctrt.open`` and what it gives. Read this first.

A request's way, top to bottom: :meth:`Engine.infer` checks its inputs against the model's specs, queues it
(``scheduling``), and awaits. The driver (``runtime``) launches batches on leased contexts (``backends``) of
a device (``devices``), and answers the callers when the reaper has seen a batch's event.
"""

import asyncio
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, Self, Unpack

import anyio

from asynctrt import clock
from asynctrt.backends.base import Model
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.base import Device
from asynctrt.errors import EngineClosedError, InputError, UsageError
from asynctrt.loading import (
    Built,
    build_on,
    in_thread,
    profiles_of,
    running_loop,
    settled,
    timeout_ns_of,
)
from asynctrt.options import Options, Settings
from asynctrt.runtime.driver import Driver
from asynctrt.runtime.slots import Slot, SlotBoard
from asynctrt.scheduling.ledger import Launch
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.request import Request
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.statistics import BatchStatistics, BatchTrace, Statistics
from asynctrt.tensors import BatchRecord, DeviceBucket, Dims, InferResult, InputCheck, Inputs, TensorSpec

STREAM_END_S: Final = 0.1
"""How long a stream whose batches have ended may take to come to rest."""

logger = logging.getLogger("asynctrt")


def open(  # noqa: A001  (it is the module's verb, as in io.open and tarfile.open)
    model: str | os.PathLike[str] | Model,
    *,
    device: str | Device = "host",
    shared_arenas: Arenas | None = None,
    options: Options | None = None,
    **settings: Unpack[Settings],
) -> "Opening":
    """Load a model onto a device and put an engine in front of it.

    Use it as ``async with asynctrt.open(...) as engine:``, or ``engine = await asynctrt.open(...)`` and
    ``await engine.aclose()`` in the end. Loading is done in a thread; the engine belongs to the running loop.

    :param model: a path to an ``.onnx`` file, or to a TensorRT plan (``.plan``, ``.engine``, ``.trt``), which
        is code: open only plans that you trust; ``"module:attribute"``, a model in a Python module or a
        function there that makes one; or a model object, which stays the caller's to close.
    :param device: ``"host"``, ``"cuda:0"`` and so on, or a device object.
    :param shared_arenas: the enqueue memory to work in, shared with other engines on the same device object.
    :param options: an :class:`Options`; ``settings`` are single options, and win over it.
    :raises OptionsError: at once, for an option that is unknown or impossible.
    :raises ModelNotFoundError, ModelError: when it is entered, for a model that cannot be served.
    :raises DeviceUnavailableError: when it is entered, for a device that is not here.
    :raises MissingExtraError: when it is entered, if the model needs a package that is not installed.
    """
    return Opening(model, device, shared_arenas, Options.from_settings(options, dict(settings)))


class Opening:
    """An engine about to be opened: enter it with ``async with``, or await it."""

    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        device: str | Device,
        shared_arenas: Arenas | None,
        options: Options,
    ) -> None:
        self._model = model
        self._device = device
        self._shared_arenas = shared_arenas
        self._options = options
        self._engine: Engine | None = None

    def __repr__(self) -> str:
        return f"<asynctrt.open({self._model!r}): not entered yet, use 'async with' or 'await'>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Engine, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise UsageError(
            f"this engine is not open yet, so it has no {name!r}: "
            "async with asynctrt.open(...) as engine, or engine = await asynctrt.open(...)"
        )

    def __enter__(self) -> None:
        raise UsageError("an engine is opened with 'async with', not with 'with'")

    def __exit__(self, *_: object) -> None:
        raise UsageError("an engine is opened with 'async with', not with 'with'")

    def __await__(self) -> "Generator[Any, None, Engine]":
        return self._open().__await__()

    async def __aenter__(self) -> "Engine":
        if self._engine is not None:
            raise UsageError("this engine was entered before. Call asynctrt.open(...) again for another")
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._engine is not None:
            await self._engine.aclose()

    async def _open(self) -> "Engine":
        loop = running_loop()
        if self._shared_arenas is not None:
            self._shared_arenas.claim(get_ident())
        build = partial(build_on, self._model, self._device, self._options, self._shared_arenas)
        built = await in_thread(build, undo=lambda built: built.close(STREAM_END_S))
        return Engine(loop, built, self._options)


class Engine:
    """A model behind ``await``. Made by :func:`open`; belongs to the event loop that it was opened on."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        built: Built,
        options: Options,
    ) -> None:
        device, model, pool, sizes = built.device, built.model, built.pool, built.sizes
        self._loop = loop
        # Together they say whether this is the engine's loop. asyncio.get_running_loop() says it too, but
        # makes a system call each time before Python 3.12 (145 ns against 40).
        self._is_running = loop.is_running
        self._thread = get_ident()
        self._built = built
        self._device = device
        self._model = model
        self._pool = pool
        self._options = options
        self._rows_max = sizes.rows_max
        self._sizes = sizes
        self._now_ns = clock.now_ns
        self._opened_ns = clock.now_ns()
        profiles = profiles_of(model, sizes.rows_max)
        self._limit_of = None if profiles is None else profiles.limit_of
        self._input_check = InputCheck(
            model.inputs,
            check_finite=options.check_finite,
            check_dims=None if profiles is None else profiles.check,
            import_array=device.import_array,
        )
        self._admit = self._input_check.admit
        self._timeout_ns = None if options.timeout is None else timeout_ns_of(options.timeout)
        self._scheduler = Scheduler(
            policy=Policy(
                rows_max=sizes.rows_max,
                delay_ns_max=int(options.max_delay * 1e9),
                # A slot without a context to fill it is none.
                slots=min(device.slots, sizes.in_flight_max),
                is_parallel=device.is_parallel and model.rows_fixed is None,
            ),
            queue_rows_max=options.max_queue_rows,
            priorities=options.priorities,
            contexts=sizes.contexts,
            arenas=sizes.arenas,
            in_flight_max=sizes.in_flight_max,
            arena_users=None if built.arenas is None else built.arenas.users,
            kind_of=None if profiles is None else profiles.kind_of,
            limit_of=self._limit_of,
        )
        self._driver = Driver(
            loop=loop,
            scheduler=self._scheduler,
            pool=pool,
            now_ns=self._now_ns,
            model=model,
            device=device,
            waiting=options.waiting,
            batch_timeout_ns=None if options.batch_timeout is None else timeout_ns_of(options.batch_timeout),
            admitted=None if profiles is None else profiles.admitted,
        )
        self._slots = SlotBoard(
            loop=loop,
            pool=pool,
            slabs_max=sizes.contexts + 1,
            limit_of=self._rows_limit,
            waiting_rows_max=options.max_queue_rows,
        )
        self._state = "open"
        self._closing: asyncio.Task[None] | None = None
        self._opened_at = _caller()

    def __repr__(self) -> str:
        return (
            f"<Engine {self._model.name!r} on {self._device.name} {self.state} "
            f"queued={self._scheduler.queued_requests} "
            f"in_flight={len(self._scheduler.ledger.in_flight)}>"
        )

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") != "closed":
            warnings.warn(
                f"{self!r}, opened at {self._opened_at}, was never closed. Use 'async with', or "
                "await engine.aclose()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def state(self) -> str:
        """``open``, ``draining``, ``closing`` or ``closed``; ``lost`` if nothing can run on it any more."""
        return "lost" if self._state == "open" and self._driver.lost is not None else self._state

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def platform(self) -> str:
        """What runs the model, in KServe's words: ``onnxruntime_onnx``, ``tensorrt_plan``, ``python``."""
        return str(getattr(self._model, "platform", "custom"))

    @property
    def device_name(self) -> str:
        """The device's name: ``host``, ``cuda:0``."""
        return self._device.name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the model takes."""
        return self._model.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What the model gives."""
        return self._model.outputs

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
        outputs: Literal["host", "device"] = "host",
    ) -> InferResult:
        """Run rows through the model, batched with those of other callers.

        :param inputs: arrays by tensor name, each ``(rows, *dims)`` of the tensor's dtype; or one array, if
            the model has one input. Nested lists are converted. The arrays are read until this returns or
            raises: do not write to them meanwhile. More rows than a batch holds are split, and rejoined.
            Arrays on the engine's own GPU (DLPack, ``__cuda_array_interface__``) are taken where they are.
        :param timeout: seconds that the request may be queued; ``None`` takes the engine's default.
        :param priority: 0 up to the engine's ``priorities - 1``; a larger one goes first.
        :param outputs: ``device`` leaves them on the engine's GPU, each as a :class:`DeviceArray`.
        :raises InputError: for inputs that do not fit the model, before anything is queued.
        :raises QueueFullError, DeadlineError: under overload.
        :raises EngineClosedError: when the engine is draining or closed, or is closed meanwhile.
        :raises ExecutionError, DeviceError: when the batch failed.
        :raises UsageError: on another event loop than the engine's.
        """
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()
        arrays, rows, bucket = self._admit(inputs)
        if outputs != "host":
            bucket = self._bucket_on_device(outputs, bucket, rows)
        if timeout is None and not priority:
            timeout_ns = self._timeout_ns
        else:
            timeout_ns = self._checked_timeout_ns(timeout, priority)
        if rows > self._rows_max or (self._limit_of is not None and rows > self._limit_of(bucket)):
            return await self._infer_split(arrays, rows, bucket, timeout_ns, priority)
        request = self._driver.submit(arrays, rows, bucket, priority, timeout_ns)
        try:
            result: InferResult = await request.future
        except (asyncio.CancelledError, GeneratorExit):
            self._driver.cancel(request)
            raise
        return result

    def submit(
        self, inputs: Inputs, *, timeout: float | None = None, priority: int = 0
    ) -> "asyncio.Future[InferResult]":
        """What :meth:`infer` does, for callers that are no coroutines: a protocol's callbacks, for one.

        Arguments and errors are those of :meth:`infer`; what is wrong with the call is raised here, and the
        rest by the future. To cancel the future is to cancel the request.
        """
        # The first lines of `infer`, once more: a method for both costs 0.1 of the 2.5 µs of a call.
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()
        arrays, rows, bucket = self._admit(inputs)
        if timeout is None and not priority:
            timeout_ns = self._timeout_ns
        else:
            timeout_ns = self._checked_timeout_ns(timeout, priority)
        if rows > self._rows_max or (self._limit_of is not None and rows > self._limit_of(bucket)):
            return self._loop.create_task(self._infer_split(arrays, rows, bucket, timeout_ns, priority))
        future = _Answer(loop=self._loop)
        future.driver = self._driver
        future.request = self._driver.submit(arrays, rows, bucket, priority, timeout_ns, future)
        return future

    def slot(self, *, rows: int = 1, dims: Mapping[str, Dims] | None = None) -> Slot:
        """Rows of a slab to write inputs straight into: ``async with engine.slot(rows=4) as slot``.

        :param rows: how many, up to ``max_rows``.
        :param dims: the dimensions of one row, by input name, where the model leaves them open.
        :raises InputError: for an impossible number of rows, or missing dimensions.
        """
        self._check_loop()
        bucket = self._slot_bucket(dims or {})
        rows_max = self._rows_limit(bucket)
        if not (isinstance(rows, int) and 1 <= rows <= rows_max):
            raise InputError(f"a slot has 1 to {rows_max} rows, not {rows!r}")
        return Slot(self._slots, bucket, rows, self._infer_placed)

    def statistics(self) -> Statistics:
        """A snapshot of what the engine has done and is doing."""
        ledger = self._scheduler.ledger
        totals = ledger.totals
        return Statistics(
            state=self.state,
            submitted=self._scheduler.submitted,
            succeeded=totals.succeeded,
            failed=totals.failed,
            cancelled=totals.cancelled,
            expired=totals.expired,
            refused=totals.refused,
            rows=totals.rows,
            batches=totals.batches,
            queue_ns=totals.queue_ns,
            copy_in_ns=totals.copy_in_ns,
            compute_ns=totals.compute_ns,
            copy_out_ns=totals.copy_out_ns,
            total_ns=totals.total_ns,
            queued_requests=self._scheduler.queued_requests,
            queued_rows=self._scheduler.queued_rows,
            in_flight_batches=len(ledger.in_flight),
            rows_padded=totals.rows_padded,
            batches_timed=totals.batches_timed,
            contexts=self._sizes.contexts,
            contexts_quarantined=len(ledger.quarantined),
            arenas=self._sizes.arenas,
            arena_waits=totals.arena_waits,
            arena_wait_ns=totals.arena_wait_ns,
            arena_busy_share=self._busy_share(totals.busy_ns),
            arena_nbytes=self._pool.arenas_nbytes,
            arena_nbytes_private=self._sizes.contexts * self._model.enqueue_nbytes,
            graphs=self._pool.graph_sizes,
            memory_nbytes=self._pool.nbytes + self._slots.nbytes,
            by_batch_rows=MappingProxyType(
                {
                    rows: BatchStatistics(size.count, size.copy_in_ns, size.compute_ns, size.copy_out_ns)
                    for rows, size in sorted(totals.by_size.items())
                }
            ),
        )

    @contextmanager
    def tracing(self, *, batches: int = 4096) -> Iterator[deque[BatchTrace]]:
        """The last ``batches`` batches that were answered while inside: ``with engine.tracing() as trace``.

        A GPU takes the times of every batch then, which makes batches wait for each other that need not.

        :raises UsageError: inside of another one.
        """
        if self._driver.observe is not None:
            raise UsageError("this engine's batches are being traced already")
        trace: deque[BatchTrace] = deque(maxlen=batches)

        def observe(launch: Launch, record: BatchRecord, now_ns: int) -> None:
            times = record.copy_in_ns, record.compute_ns, record.copy_out_ns, now_ns
            requests = len(launch.requests)
            trace.append(
                BatchTrace(launch.context, launch.arena, launch.rows, requests, launch.launched_ns, *times)
            )

        self._driver.observe = observe
        try:
            yield trace
        finally:
            self._driver.observe = None

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when all that were taken have been answered."""
        self._check_loop()
        if self._state == "open":
            self._state = "draining"
            self._driver.refuse(
                EngineClosedError(f"{self._model.name!r} is draining: send to another engine")
            )
        await self._driver.wait_idle()

    async def aclose(self) -> None:
        """Fail what is queued, let what is in flight finish, and give everything back. Idempotent.

        Batches that do not end within ``close_timeout`` are failed with ``DeviceLostError`` and what they
        use is abandoned.
        """
        self._check_loop()
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        # A caller who is cancelled waits all the same: a loop that ends then must not leave it half closed.
        cancelled = await settled(self._closing)
        self._closing.result()
        if cancelled is not None:
            raise cancelled

    async def _close(self) -> None:
        self._state = "closing"
        why = f"{self._model.name!r} is closed"
        self._slots.refuse(why)
        self._driver.fail_queued(EngineClosedError(why))
        with anyio.move_on_after(self._options.close_timeout):
            await self._driver.wait_idle()
        self._driver.close()
        await in_thread(self._give_back)
        self._state = "closed"

    def _give_back(self) -> None:
        """Blocks: joins threads, frees memory, unloads the model."""
        self._driver.end_copies(STREAM_END_S)
        abandoned = self._built.close(STREAM_END_S, self._slots.close)
        if abandoned:
            logger.error("%r: %d contexts were abandoned while they ran", self, abandoned)

    async def _infer_split(
        self,
        arrays: tuple[Any, ...],
        rows: int,
        bucket: Hashable,
        timeout_ns: int | None,
        priority: int,
    ) -> InferResult:
        """More rows than a batch holds: parts in order, all queued or none, rejoined in the end."""
        if rows > self._options.max_queue_rows:
            raise InputError(
                f"{rows} rows are more than the queue can ever hold ({self._options.max_queue_rows}). "
                "Send them in several calls, or open the engine with a larger max_queue_rows"
            )
        parts_max = self._rows_limit(bucket)
        requests = self._driver.submit_parts(
            [
                (tuple(array[start : start + parts_max] for array in arrays), min(parts_max, rows - start))
                for start in range(0, rows, parts_max)
            ],
            bucket,
            priority,
            timeout_ns,
        )
        futures = [request.future for request in requests]
        try:
            parts = await asyncio.gather(*futures)
        except BaseException:
            # One part failed or the caller went away: nobody waits for the others any more.
            for request, future in zip(requests, futures, strict=True):
                future.cancel()
                self._driver.cancel(request)
            raise
        return InferResult.join(parts)

    async def _infer_placed(
        self, payload: Any, rows: int, bucket: Hashable, timeout: float | None, priority: int
    ) -> InferResult:
        """For slots: rows that lie in a slab already, so there is nothing to check or to split."""
        self._check_loop()
        timeout_ns = self._checked_timeout_ns(timeout, priority)
        request = self._driver.submit(payload, rows, bucket, priority, timeout_ns)
        try:
            result: InferResult = await request.future
        except (asyncio.CancelledError, GeneratorExit):
            self._driver.cancel(request)
            raise
        return result

    def _checked_timeout_ns(self, timeout: float | None, priority: int) -> int | None:
        """The timeout in ns, with the priority checked on the way."""
        if not (isinstance(priority, int) and 0 <= priority < self._options.priorities):
            raise InputError(
                f"priority is 0 to {self._options.priorities - 1} on this engine, not {priority!r}"
            )
        return self._timeout_ns if timeout is None else timeout_ns_of(timeout)

    def _busy_share(self, busy_ns: int) -> float:
        """Which share of the time since it was opened its arenas computed for it."""
        passed_ns = max(self._now_ns() - self._opened_ns, 1) * self._sizes.arenas
        return busy_ns / passed_ns if passed_ns else 0.0

    def _bucket_on_device(self, outputs: str, bucket: Hashable, rows: int) -> DeviceBucket:
        """The bucket of a request whose outputs stay on the device."""
        if outputs != "device":
            raise InputError(f"outputs is 'host' or 'device', not {outputs!r}")
        rows_max = self._rows_limit(bucket)
        if rows > rows_max:
            raise InputError(
                f"outputs='device' takes at most the rows of a batch ({rows_max}), given {rows}. "
                "Send them in several calls"
            )
        return DeviceBucket(bucket.bucket if isinstance(bucket, DeviceBucket) else bucket, has_outputs=True)

    def _rows_limit(self, bucket: Hashable) -> int:
        """Rows that one batch of this bucket holds at the most.

        :raises InputError: for a bucket that no profile of the model takes.
        """
        return self._rows_max if self._limit_of is None else self._limit_of(bucket)

    def _check_loop(self) -> None:
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()

    def _slot_bucket(self, dims: Mapping[str, Dims]) -> Hashable:
        shapes = []
        for spec in self._model.inputs:
            shape = tuple(dims.get(spec.name, spec.dims))
            fits = len(shape) == len(spec.dims) and all(
                isinstance(given, int) and given >= 0 and (isinstance(dim, str) or dim == given)
                for dim, given in zip(spec.dims, shape, strict=False)
            )
            if not fits:
                raise InputError(
                    f"input {spec.name!r} has rows of shape {spec.dims}, given {shape}. Say it as "
                    f"engine.slot(rows=..., dims={{{spec.name!r}: (...)}})"
                )
            shapes.append(tuple(int(dim) for dim in shape))
        return tuple(self._input_check.symbols(shapes).items())

    def _wrong_loop(self) -> UsageError:
        running_loop()
        return UsageError(
            f"{self!r} belongs to the event loop that it was opened on, and this is another one. Open an "
            "engine on each loop, or hand the call over: asyncio.run_coroutine_threadsafe(coroutine, loop)"
        )


class _Answer(asyncio.Future[InferResult]):
    """The future of :meth:`Engine.submit`: to cancel it takes its request out of the queue at once."""

    driver: Driver
    request: Request | None = None

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
