"""The engine that ``asynctrt.open`` returns to a user. Read this first.

Three kinds of engine share one interface. A :class:`LocalEngine` runs its model on a device in this process,
an :class:`IsolatedEngine` runs it in worker processes, and a :class:`Pipeline` sends requests through other
engines and functions. To follow a request, start at :meth:`DrivenEngine.infer`.
"""

import asyncio
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
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
from asynctrt.statistics import Batching, BatchTrace, Statistics, WorkerState
from asynctrt.tensors import InferResult, TensorSpec

STREAM_END_S: Final = 0.1
"""Seconds to wait for a stream to become idle after its batches have ended."""

HOST: Final = "host"
"""The default of ``outputs``. Calls first compare by identity, which is cheap and usually enough."""


class Engine(ABC):
    """A model that coroutines call with ``await engine.infer(...)``.

    :func:`open` creates it. It belongs to the event loop that it was opened on.

    :param loop: the event loop that it may be used on.
    :param options: the options that it was opened with.
    """

    _state = "closed"
    """``open`` once a subclass is fully constructed; ``closed`` again when everything has been released."""

    _elsewhere = ""
    """What to use instead of ``tracing``, if its batches run elsewhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: Options) -> None:
        self._options = options
        self._loop = loop
        # Together they tell whether a call runs on the engine's loop. asyncio.get_running_loop() would do so
        # too, but before Python 3.12 it makes a system call each time.
        self._is_running = loop.is_running
        self._thread = get_ident()
        self._origin = Origin()
        self._closing: asyncio.Task[None] | None = None
        self._opened_at = _caller()
        in_child(self, Engine._let_go)

    def _let_go(self) -> None:
        """Make every call in a forked child fail the check for the engine's event loop."""
        self._thread = 0

    def __del__(self) -> None:
        if self._state != "closed" and self._origin.is_here:
            # Still release its threads and memory. If the loop is closed, garbage collection ends them.
            with suppress(RuntimeError):
                # Wait for two iterations of the loop: if it stops in this one, it must not destroy a task.
                self._loop.call_soon_threadsafe(self._loop.call_soon, self._close_soon, context=Context())
            warnings.warn(
                f"{self!r}, opened at {self._opened_at}, was never closed. Use 'async with', or "
                "await engine.aclose()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    def __reduce__(self) -> NoReturn:
        """Refuse to copy or pickle the engine.

        :raises UsageError: always.
        """
        raise UsageError(
            f"{self!r} cannot be copied or pickled: it belongs to its event loop. Open another engine where "
            "you need one"
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
        if error is None or self._origin.is_here:  # In a forked child, an exception must propagate.
            await self.aclose()

    @property
    @abstractmethod
    def state(self) -> str:
        """``open``, ``draining``, ``closing``, ``closed``; or ``lost`` if it can run nothing any more."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The model's name."""

    @property
    @abstractmethod
    def platform(self) -> str:
        """The model's platform by KServe's name: ``onnxruntime_onnx``, ``tensorrt_plan``, ``python``."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The device's name: ``host``, ``cuda:0``."""

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """The current state of each device's worker process; empty without ``isolation="process"``."""
        return ()

    @property
    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the model's inputs."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The specs of the model's outputs."""

    @property
    def has_plain_rows(self) -> bool:
        """Whether the rows of every tensor are contiguous in memory, one after the other."""
        return all(spec.axis == 0 for spec in (*self.inputs, *self.outputs))

    @property
    @abstractmethod
    def batching(self) -> Batching:
        """Whether rows of different requests share batches, and why."""

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """The maximum number of rows in one batch."""

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
        """Run rows through the model, in a batch with rows of other callers.

        :param inputs: arrays by tensor name, each of shape ``(rows, *dims)`` and of the tensor's dtype; or
            one array if the model has one input. Nested lists are converted. The engine reads the arrays
            until this call returns or raises: do not write to them meanwhile. A request with more rows than
            a batch holds is split, and its results are joined again. Arrays on the engine's own GPU (DLPack,
            ``__cuda_array_interface__``) are used in place.
        :param timeout: seconds that the request may be queued; ``None`` for the engine's default.
        :param priority: from 0 to the engine's ``priorities - 1``; a higher priority goes first.
        :param outputs: the names of the outputs to return. An output that no caller of a batch names is
            copied neither from the device nor out of the batch. Requests that name different outputs still
            share batches. ``host`` copies all outputs to the host; ``device`` leaves all on the engine's GPU,
            each as a :class:`DeviceArray`.
        :raises InputError: if the inputs do not fit the model, or an output does not exist. Nothing is
            queued then.
        :raises QueueFullError, DeadlineError: under overload.
        :raises EngineClosedError: if the engine is draining or closed, or closes before the answer.
        :raises ExecutionError, DeviceError: if the batch failed.
        :raises UsageError: if called on another event loop than the engine's, or in a forked process.
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
        """Queue a request from code that is not a coroutine, such as a protocol's callback.

        The arguments and errors are the same as for :meth:`infer`. An error in the call is raised here; any
        later error is set on the future. Cancelling the future cancels the request.
        """

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return a snapshot of the engine's counters and current load."""

    def tracing(
        self, *, batches: int = 4096, timed: bool = True
    ) -> AbstractContextManager[deque[BatchTrace]]:
        """Collect batches answered inside the block, at most the last ``batches``.

        Use it as ``with engine.tracing() as trace``.

        :param timed: whether a GPU times every batch, which makes some batches wait for each other. If
            false, an untimed batch is reported with the times of another batch of its size.
        :raises UsageError: if tracing is already on, or the engine is a pipeline or runs in worker processes,
            so that its batches run elsewhere.
        """
        raise UsageError(f"{self!r} runs no batches itself, and has no tracing: {self._elsewhere}")

    @abstractmethod
    async def drain(self) -> None:
        """Refuse new requests from now on, and wait until every accepted request has been answered."""

    async def aclose(self) -> None:
        """Fail queued requests, let batches in flight finish, and release all resources. Idempotent.

        Batches that do not end within ``close_timeout`` fail with ``DeviceLostError``, and the resources that
        they use are abandoned.
        """
        self._check_loop()
        # Even a cancelled caller waits: if the loop ends then, the engine must not be left half closed.
        cancelled = await see_through(self._close_soon)
        if cancelled is not None:
            raise cancelled

    def _close_soon(self) -> asyncio.Task[None]:
        """Return the task that closes the engine; create it if there is none."""
        if self._closing is None or self._closing.cancelled():
            self._closing = self._loop.create_task(self._close())
        return self._closing

    @abstractmethod
    async def _close(self) -> None:
        """Close the engine completely, even if an ending loop cancels every task, including this one."""

    def _check_loop(self) -> None:
        """Check that the caller is on the engine's event loop and in its process.

        :raises UsageError: if not.
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
    """Return the file and line of the nearest frame outside this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("asynctrt."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
