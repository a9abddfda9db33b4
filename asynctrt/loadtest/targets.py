"""What a load test can be aimed at, behind one protocol: an engine, a function, a server.

::

    model.onnx, package.module:factory      an engine, opened in the process that sends
    ws://HOST:PORT/v2/models/NAME/ws        a websocket of asynctrt
    http://HOST:PORT/v2/models/NAME         KServe V2 over HTTP, anybody's
    grpc://HOST:PORT/NAME                   KServe V2 over gRPC, anybody's
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from asynctrt.engine import Engine
from asynctrt.engine import open as open_engine
from asynctrt.errors import TargetError, UsageError
from asynctrt.loading import name_of
from asynctrt.options import Options
from asynctrt.statistics import BatchTrace, Statistics
from asynctrt.tensors import Array, InferResult, TensorSpec

SERVER_IN_FLIGHT: Final = 256
"""Requests to a server that are on the way at once, unless the settings say otherwise."""

SCHEMES: Final = ("http", "https", "grpc", "grpcs", "ws", "wss")

Call = Callable[[Mapping[str, Array]], Awaitable[Mapping[str, Array]]]
"""A function as a target: it takes a request's arrays by name and gives the answer's."""


@dataclass(frozen=True, slots=True)
class BatchCounters:
    """What a target has computed so far, or between two looks. Times are in ns, summed over its requests."""

    requests: int
    rows: int
    batches: int
    queue_ns: int
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int
    by_rows: Mapping[int, int]
    """Batches by their number of rows."""

    def since(self, before: "BatchCounters") -> "BatchCounters":
        """What has come since an earlier look."""
        sizes = {rows: count - before.by_rows.get(rows, 0) for rows, count in self.by_rows.items()}
        return BatchCounters(
            self.requests - before.requests,
            self.rows - before.rows,
            self.batches - before.batches,
            self.queue_ns - before.queue_ns,
            self.copy_in_ns - before.copy_in_ns,
            self.compute_ns - before.compute_ns,
            self.copy_out_ns - before.copy_out_ns,
            {rows: count for rows, count in sorted(sizes.items()) if count},
        )


@runtime_checkable
class Target(Protocol):
    """What answers requests. Belongs to the event loop that it was opened on."""

    name: str
    """Of the model."""
    kind: str
    """``engine``, ``function``, ``http``, ``grpc`` or ``websocket``."""
    inputs: tuple[TensorSpec, ...]
    """What one row is made of; empty where nobody can say."""
    in_flight_max: int
    """Rows that are on the way at once, unless the settings say otherwise."""

    def prepare(self, inputs: Mapping[str, Array], priority: int) -> Any:
        """A request, encoded as far as it can be: it will be sent many times."""

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        """Send it. To cancel the future is to give it up."""

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        """The arrays of an answer."""

    async def batches(self) -> BatchCounters | None:
        """What it has computed so far; ``None`` where nobody can say."""

    def trace(self) -> list[BatchTrace]:
        """The last batches, if this process can see them."""

    async def aclose(self) -> None:
        """Close what was opened for it."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Where a target is, as words: it goes to the processes that send.

    :param where: see the module.
    :param model: which model of a server, if the address does not say.
    :param token: the server's bearer token.
    :param device: for an engine.
    :param options: for an engine.
    """

    where: str
    model: str | None = None
    token: str | None = field(default=None, repr=False)
    device: str = "host"
    options: Options = field(default_factory=Options)

    @property
    def scheme(self) -> str:
        """``http`` and so on; empty for an engine.

        :raises UsageError: for one that there is none of.
        """
        scheme, mark, _ = self.where.partition("://")
        if not mark:
            return ""
        if scheme not in SCHEMES:
            raise UsageError(f"{self.where!r}: there is no {scheme}://. There are: {', '.join(SCHEMES)}")
        return scheme

    @property
    def is_server(self) -> bool:
        """Whether it is somewhere else, so that several processes can send to it."""
        return bool(self.scheme)

    def describe(self) -> dict[str, Any]:
        """What a report says of it: everything but the token."""
        options = {
            name: getattr(self.options, name)
            for name in Options.__dataclass_fields__
            if getattr(self.options, name) != getattr(Options(), name)
        }
        return {"where": self.where, "model": self.model, "device": self.device, "options": options}


@asynccontextmanager
async def opened(target: "TargetSpec | Engine | Target | Call") -> AsyncIterator[Target]:
    """The target, and what was opened for it closed in the end.

    :raises TargetError: if it cannot be reached, or is not what it should be.
    :raises AsynctrtError: if an engine cannot be opened.
    """
    if isinstance(target, TargetSpec):
        made = await _open(target)
    elif isinstance(target, Engine):
        made = EngineTarget(target, owns=False)
    elif isinstance(target, Target):
        made = target
    elif callable(target):
        made = CallTarget(target)
    else:
        raise UsageError(
            f"a load test is aimed at a path, an address, an engine or an async function, not {target!r}"
        )
    try:
        yield made
    finally:
        if made is not target:
            await made.aclose()


async def _open(spec: TargetSpec) -> Target:
    if not spec.scheme:
        engine = await open_engine(spec.where, device=spec.device, options=spec.options)
        return EngineTarget(engine, owns=True, name=name_of(spec.where))
    # Each brings what it needs and no more.
    if spec.scheme in ("ws", "wss"):
        from asynctrt.loadtest.websocket_target import open_websocket_target  # noqa: PLC0415

        return await open_websocket_target(spec)
    if spec.scheme in ("grpc", "grpcs"):
        from asynctrt.loadtest.grpc_target import open_grpc_target  # noqa: PLC0415

        return await open_grpc_target(spec)
    from asynctrt.loadtest.http_target import open_http_target  # noqa: PLC0415

    return await open_http_target(spec)


class EngineTarget:
    """An engine in this process."""

    kind = "engine"

    def __init__(self, engine: Engine, *, owns: bool, name: str | None = None) -> None:
        self.name = name or engine.name
        self.inputs = engine.inputs
        self.in_flight_max = engine.options.max_queue_rows
        self._engine = engine
        self._owns = owns
        self._submit = engine.submit
        self._tracing = engine.tracing()
        self._trace = self._tracing.__enter__()

    def prepare(self, inputs: Mapping[str, Array], priority: int) -> Any:
        return dict(inputs), priority

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        inputs, priority = prepared
        return self._submit(inputs, priority=priority)

    def outputs(self, answer: InferResult) -> Mapping[str, Array]:
        return answer

    async def batches(self) -> BatchCounters | None:
        return engine_counters(self._engine.statistics())

    def trace(self) -> list[BatchTrace]:
        return list(self._trace)

    async def aclose(self) -> None:
        self._tracing.__exit__(None, None, None)
        if self._owns:
            await self._engine.aclose()


def engine_counters(statistics: Statistics) -> BatchCounters:
    """An engine's counters."""
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


class CallTarget:
    """An async function of the application: whatever it does is what is measured."""

    kind = "function"
    inputs: tuple[TensorSpec, ...] = ()
    in_flight_max = 16384

    def __init__(self, call: Call) -> None:
        self.name = getattr(call, "__qualname__", type(call).__name__)
        self._call = call
        self._create_task = asyncio.get_running_loop().create_task

    def prepare(self, inputs: Mapping[str, Array], priority: int) -> Any:
        return dict(inputs)

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        made = self._call(prepared)
        if inspect.iscoroutine(made):
            return self._create_task(made)
        if asyncio.isfuture(made):
            return made
        raise TargetError(
            f"{self.name} is no async function: it gives {type(made).__name__}, not an awaitable"
        )

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        if not isinstance(answer, Mapping):
            raise TargetError(f"{self.name} gives {type(answer).__name__}: to be checked, arrays by name")
        return {name: np.asarray(value) for name, value in answer.items()}

    async def batches(self) -> BatchCounters | None:
        return None

    def trace(self) -> list[BatchTrace]:
        return []

    async def aclose(self) -> None:
        return
