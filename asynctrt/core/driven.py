"""An engine whose requests a driver carries out: the entry point of a request.

:meth:`DrivenEngine.infer` checks the inputs against the model's specs, queues them with the driver, and
awaits the answer. In this process the driver is that of ``runtime``: it carries out the scheduler's decisions
(``scheduling``), puts batches on pooled contexts (``backends``) of a device (``devices``), and answers the
callers when the reaper has seen a batch's event. With worker processes it is their front (``workers``).
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, Protocol

from asynctrt._util.validation import output_names, priority_of, timeout_ns_of
from asynctrt.core.description import Description
from asynctrt.core.inputs import InputCheck, Inputs, Outputs
from asynctrt.core.splitting import SplitCall
from asynctrt.engine import HOST, Engine
from asynctrt.errors import AsynctrtError, EngineClosedError
from asynctrt.limits import limits_here
from asynctrt.options import Options
from asynctrt.runtime.driver import Driver
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request
from asynctrt.statistics import Batching
from asynctrt.tensors import InferResult, TensorSpec

NO_PRIORITY: Final = 0
"""The default, compared by identity: a 0 of another type or object takes the longer way."""


class RequestDriver(Protocol):
    """A driver: takes requests and answers them."""

    def submit(
        self,
        payload: Any,
        rows: int,
        key: BatchKey,
        priority: int,
        timeout_ns: int | None,
        future: "asyncio.Future[InferResult] | None" = None,
        outputs: frozenset[str] | None = None,
    ) -> Request:
        """Queue rows, or raise and change nothing.

        :param outputs: the names of the outputs that the caller wants; ``None`` for all.
        """

    def cancel(self, request: Request) -> None:
        """Drop the request of a caller that was cancelled."""

    def refuse(self, why: AsynctrtError) -> None:
        """Refuse new requests; still answer the accepted ones."""

    async def wait_idle(self) -> None:
        """Wait until every request is answered."""


class DrivenEngine(Engine):
    """An engine that checks requests and passes them to a driver.

    :param limit: returns the rows that one batch of a key holds.
    :param rows_unsplit: up to this many rows are never split, whatever their key.
    :param split: queues a call with more rows than a batch holds, in parts. It takes the arrays, their rows,
        key, priority, timeout in ns and outputs; it raises ``InputError`` for more rows than the queue holds.
    :param plain: has a shorter way for plain requests: one row, without a deadline, priority or choice of
        outputs. Default: ``driver`` takes them like all others.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        description: Description,
        *,
        driver: RequestDriver,
        check: InputCheck,
        limit: Callable[[BatchKey], int],
        rows_unsplit: int,
        split: Callable[..., SplitCall],
        plain: Driver | None = None,
    ) -> None:
        super().__init__(loop, options)
        self.description = description
        """Its facts that do not change."""
        self._driver = driver
        self._check_of_inputs = check
        self._validate = check.validate
        self._limit = limit
        self._rows_unsplit = rows_unsplit
        self._split = split
        self._timeout_ns = None if options.timeout is None else timeout_ns_of(options.timeout)
        self._plain = plain if self._timeout_ns is None else None

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def platform(self) -> str:
        return self.description.platform

    @property
    def device_name(self) -> str:
        return self.description.device_name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.description.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.description.outputs

    @property
    def batching(self) -> Batching:
        return self.description.batching

    @property
    def max_rows(self) -> int:
        return self.description.max_rows

    async def infer(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Outputs = HOST,
    ) -> InferResult:
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()
        arrays, rows, key = self._validate(inputs)
        if (
            (rows == 1 and timeout is None and priority is NO_PRIORITY and outputs is HOST)
            and (plain := self._plain) is not None
            and limits_here() is None
        ):
            future = plain.submit_plain(arrays, key)
            try:
                return await future
            except (asyncio.CancelledError, GeneratorExit):
                plain.cancel_plain(future)
                raise
            finally:
                del future  # An exception in it holds this frame.
        queued = self._queue(arrays, rows, key, timeout, priority, outputs)
        if isinstance(queued, SplitCall):
            return await queued.joined()
        try:
            return await queued.future  # type: ignore[no-any-return]
        except (asyncio.CancelledError, GeneratorExit):
            self._driver.cancel(queued)
            raise

    def submit(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Outputs = HOST,
    ) -> "asyncio.Future[InferResult]":
        # Repeats the first lines of `infer`: this path is too hot for a call to a common method.
        if not self._is_running() or get_ident() != self._thread:
            raise self._wrong_loop()
        arrays, rows, key = self._validate(inputs)
        future = _Answer(loop=self._loop)
        future.leave = future.request = None
        if (
            (rows == 1 and timeout is None and priority is NO_PRIORITY and outputs is HOST)
            and (plain := self._plain) is not None
            and limits_here() is None
        ):
            plain.submit_plain(arrays, key, future)
            future.leave = plain.cancel_plain
            return future
        queued = self._queue(arrays, rows, key, timeout, priority, outputs, future)
        if isinstance(queued, SplitCall):
            return queued.begin(self._loop)
        future.leave, future.request = self._driver.cancel, queued
        return future

    async def drain(self) -> None:
        self._check_loop()
        if self._state == "open":
            self._state = "draining"
            self._driver.refuse(EngineClosedError(f"{self.name!r} is draining: send to another engine"))
        await self._driver.wait_idle()

    @abstractmethod
    def _key_on_device(self, key: BatchKey, rows: int) -> BatchKey:
        """Return the key of a request whose outputs stay on the device.

        :raises InputError: if they cannot.
        """

    def _queue(
        self,
        arrays: tuple[Any, ...],
        rows: int,
        key: BatchKey,
        timeout: float | None,
        priority: int,
        outputs: Outputs,
        future: "asyncio.Future[InferResult] | None" = None,
    ) -> Request | SplitCall:
        """Queue a call that is not plain.

        A split call is queued here, not in its task: an accepted call is answered even if the engine drains
        right away.

        :raises InputError: for an invalid timeout, priority or choice of outputs.
        """
        names = None
        if outputs is not HOST:
            key, names = self._wanted(outputs, arrays, rows, key)
        timeout_ns, priority = self._checked(timeout, priority)
        if self._fits(rows, key):
            return self._driver.submit(arrays, rows, key, priority, timeout_ns, future, names)
        return self._split(arrays, rows, key, priority, timeout_ns, names)

    def _fits(self, rows: int, key: BatchKey) -> bool:
        return rows <= self._rows_unsplit or rows <= self._limit(key)

    def _checked(self, timeout: float | None, priority: int) -> tuple[int | None, int]:
        """Return a call's timeout in ns and its priority, limited by :func:`asynctrt.within`.

        :raises InputError: for an invalid timeout or priority.
        :raises DeadlineError: if no time is left within :func:`asynctrt.within`.
        """
        level = priority_of(priority, self._options.priorities)
        timeout_ns = self._timeout_ns if timeout is None else timeout_ns_of(timeout)
        limits = limits_here()
        if limits is None:
            return timeout_ns, level
        return limits.stricter(timeout_ns, level, self._options.priorities)

    def _wanted(
        self, outputs: Outputs, arrays: tuple[Any, ...], rows: int, key: BatchKey
    ) -> tuple[BatchKey, frozenset[str] | None]:
        """Return a request's key, and the names of the outputs that it wants; ``None`` for all."""
        if isinstance(outputs, str) and outputs == "device":
            return self._key_on_device(self._check_of_inputs.key_as_given(arrays, key), rows), None
        return key, output_names(outputs, [spec.name for spec in self.outputs])


class _Answer(asyncio.Future[InferResult]):
    """The future of :meth:`DrivenEngine.submit`: cancelling it removes its request from the queue at once."""

    __slots__ = ("leave", "request")

    leave: "Callable[[Any], None] | None"
    """Takes its request out of the queue; ``None`` until it is queued."""
    request: Request | None
    """Its request; ``None`` for a plain one, which is known by its future."""

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        if self.leave is not None:
            self.leave(self if self.request is None else self.request)
            self.leave = self.request = None
        return True
