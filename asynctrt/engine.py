"""The engine: what ``asynctrt.open`` gives, and what a user holds. Read this first.

Three kinds of it are used alike. A :class:`LocalEngine` has its model on a device in this process, an
:class:`IsolatedEngine` in worker processes, and a :class:`Pipeline` sends requests through other engines and
functions. A request's way begins in :meth:`DrivenEngine.infer`.
"""

import asyncio
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import Context
from threading import get_ident
from types import TracebackType
from typing import Final, NoReturn, Self

from asynctrt._util.forks import Origin, in_child
from asynctrt._util.loops import running_loop, see_through
from asynctrt.core.inputs import Inputs, Outputs
from asynctrt.errors import UsageError
from asynctrt.options import Options
from asynctrt.runtime.slots import Slot
from asynctrt.statistics import Batching, BatchTrace, Statistics, WorkerState
from asynctrt.tensors import Dims, InferResult, TensorSpec

STREAM_END_S: Final = 0.1
"""How long a stream whose batches have ended may take to come to rest."""

HOST: Final = "host"
"""The default of ``outputs``. Calls compare by identity first, which is cheaper and mostly enough."""


class Engine(ABC):
    """A model behind ``await``. Made by :func:`open`; belongs to the event loop that it was opened on.

    :param loop: where it may be used.
    :param options: what it was opened with.
    """

    _state = "closed"
    """Says ``open`` once a kind of engine is made, and ``closed`` again when all was given back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: Options) -> None:
        self._options = options
        self._loop = loop
        # Together they say whether this is the engine's loop. asyncio.get_running_loop() says it too, but
        # makes a system call each time before Python 3.12.
        self._is_running = loop.is_running
        self._thread = get_ident()
        self._origin = Origin()
        self._closing: asyncio.Task[None] | None = None
        self._opened_at = _caller()
        in_child(self, Engine._let_go)

    def _let_go(self) -> None:
        """In a child that was forked: have every call find that this is not where it may be used."""
        self._thread = 0

    def __del__(self) -> None:
        if self._state != "closed" and self._origin.is_here:
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
    @abstractmethod
    def state(self) -> str:
        """``open``, ``draining``, ``closing``, ``closed``; ``lost`` if nothing
        can run on it any more."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The model's name."""

    @property
    @abstractmethod
    def platform(self) -> str:
        """What runs the model, in KServe's words: ``onnxruntime_onnx``, ``tensorrt_plan``, ``python``."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The device's name: ``host``, ``cuda:0``."""

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """The worker process of each device, as it is now; without ``isolation="process"`` there are none."""
        return ()

    @property
    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the model takes."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What the model gives."""

    @property
    def has_plain_rows(self) -> bool:
        """Whether the rows of every tensor lie one after the other in memory."""
        return all(spec.axis == 0 for spec in (*self.inputs, *self.outputs))

    @property
    @abstractmethod
    def batching(self) -> Batching:
        """Whether rows of different requests share batches, and why."""

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Rows that one batch holds at the most."""

    @property
    def options(self) -> Options:
        """The options that it was opened with."""
        return self._options

    @abstractmethod
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

    @abstractmethod
    def submit(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Outputs = HOST,
    ) -> "asyncio.Future[InferResult]":
        """Do what :meth:`infer` does, for callers that are no coroutines: a protocol's callbacks, for one.

        Arguments and errors are those of :meth:`infer`; what is wrong with the call is raised here, and the
        rest by the future. To cancel the future is to cancel the request.
        """

    @abstractmethod
    def slot(self, *, rows: int = 1, dims: Mapping[str, Dims] | None = None) -> Slot:
        """Return rows of a slab to write inputs straight into: ``async with engine.slot(rows=4) as slot``.

        :param rows: how many, up to ``max_rows``, and to as many as ``max_batch_bytes`` leaves of a shape.
        :param dims: the dimensions of one row, by input name, where the model leaves them open.
        :raises InputError: for an impossible number of rows, or missing dimensions.
        :raises UsageError: if the rows of the model's tensors do not lie one after the other, and for an
            engine in worker processes or a pipeline, which have no slabs here.
        """

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return a snapshot of what the engine has done and is doing."""

    @abstractmethod
    def tracing(
        self, *, batches: int = 4096, timed: bool = True
    ) -> AbstractContextManager[deque[BatchTrace]]:
        """Collect the last ``batches`` batches answered while inside: ``with engine.tracing() as trace``.

        :param timed: let a GPU take the times of every batch, which makes batches wait for each other that
            need not. Without it, batches that are not timed have the times of others of their size.
        :raises UsageError: inside of another one, and for an engine in worker processes or a pipeline, whose
            batches run elsewhere.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Refuse new requests from now on, and return when all that were taken have been answered."""

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

    @abstractmethod
    async def _close(self) -> None:
        """Close, and see it through although a loop that ends cancels every task, this one included."""

    def _check_loop(self) -> None:
        """Check that this is the engine's loop, in its process.

        :raises UsageError: elsewhere.
        """
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()

    def _wrong_loop(self) -> UsageError:
        self._origin.check(self)
        running_loop()
        return UsageError(
            f"{self!r} belongs to the event loop that it was opened on, and this is another one. Open an "
            "engine on each loop, or hand the call over: asyncio.run_coroutine_threadsafe(coroutine, loop)"
        )


def _caller() -> str:
    """File and line of the nearest frame outside this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("asynctrt."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
