"""Sends from child processes, so that displaying or evaluating results never delays the sender."""

import asyncio
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import anyio

from asynctrt._util import clock
from asynctrt._util.process import calm_gc, safe_path, shorten_switch_interval
from asynctrt.errors import AsynctrtError, InternalError, TargetError
from asynctrt.loadtest.local import Local
from asynctrt.loadtest.opening import find_modules
from asynctrt.loadtest.plans import ProcessPlan
from asynctrt.loadtest.recorder import Windows
from asynctrt.loadtest.runner import ProcessResult
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import TargetSpec

LEAD_NS: Final = 100_000_000
"""Delay before a run starts once every process is ready, so that the order reaches all of them in time."""
CLOSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ProcessReady:
    """Report that a process has opened its target: the model's name, and the target's kind."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Order:
    """Order a process to plan one run. Once all have planned, :class:`ProcessStart` follows."""

    settings: LoadSettings


@dataclass(frozen=True, slots=True)
class Planned:
    """Report that a run is planned and can start."""

    plan: ProcessPlan


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """Order a process to start the planned run at ``at_ns`` on :func:`asynctrt._util.clock.now_ns`."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Done:
    """Report that a run has ended."""

    outcome: ProcessResult


@dataclass(frozen=True, slots=True)
class ProcessFailed:
    """Report that a process failed, and why."""

    error: AsynctrtError


STOP: Final = "stop"
CLOSE: Final = "close"


def serve_runs(connection: Connection, spec: TargetSpec, settings: LoadSettings, share: int) -> None:
    """Run a child process: open the target, perform the ordered runs, close the target."""
    # Ctrl-C reaches every process of a terminal, but the parent tells its children when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shorten_switch_interval()
    find_modules(spec, settings)
    try:
        anyio.run(
            _serve_runs,
            connection,
            spec,
            settings,
            share,
            backend="asyncio",
            backend_options={"use_uvloop": True},
        )
    except AsynctrtError as error:
        connection.send(ProcessFailed(_portable(error)))
    except BrokenPipeError:
        return  # The parent is gone.
    except Exception as error:
        connection.send(
            ProcessFailed(InternalError(f"a sending process failed: {type(error).__name__}: {error}"))
        )


async def _serve_runs(connection: Connection, spec: TargetSpec, settings: LoadSettings, share: int) -> None:
    orders: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with Local.open(spec, settings) as local:
        is_stopped = False

        def take(order: Any) -> None:
            nonlocal is_stopped
            if isinstance(order, Order):
                is_stopped = False
            elif order in (STOP, CLOSE):
                is_stopped = True
                local.stop()
            if order != STOP:
                orders.put_nowait(order)

        _receive(connection, loop, take, CLOSE)
        calm_gc()
        connection.send(ProcessReady(local.target.name, local.target.kind))
        while isinstance(order := await orders.get(), Order):
            plan = local.plan(order.settings, share, order.settings.processes)
            await local.count()
            connection.send(Planned(plan))
            start = await orders.get()
            if not isinstance(start, ProcessStart):
                return
            if is_stopped:  # Stopped during planning: end the run as soon as it starts.
                loop.call_soon(local.stop)
            connection.send(Done(await local.run(plan, connection.send, start.at_ns)))


def _receive(
    connection: Connection, loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], last: Any
) -> None:
    """Pass every received message to ``take`` on the event loop, and ``last`` when the connection ends.

    A thread reads, because the event loop would need a non-blocking file descriptor, on which a partial
    message would raise an error.
    """

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(take, connection.recv())
            loop.call_soon_threadsafe(take, last)

    threading.Thread(target=read, name="asynctrt-load-read", daemon=True).start()


def _portable(error: AsynctrtError) -> AsynctrtError:
    """Return the error without its cause and with a plain message, so that it can be pickled."""
    made: AsynctrtError = type(error)(str(error))
    return made


class Fleet:
    """Control the sending processes of one target from their parent."""

    def __init__(self, spec: TargetSpec, settings: LoadSettings) -> None:
        context = multiprocessing.get_context("spawn")
        loop = asyncio.get_running_loop()
        self._connections: list[Connection] = []
        self._processes = []
        self._messages: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        for share in range(settings.processes):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve_runs,
                args=(theirs, spec, settings, share),
                name=f"asynctrt-load-{share}",
                daemon=True,
            )
            with safe_path():
                process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
            _receive(mine, loop, partial(self._take, share), None)

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: TargetSpec, settings: LoadSettings) -> "AsyncIterator[Fleet]":
        """Start the processes, and wait until each has opened the target.

        :raises TargetError: if the target cannot be reached or does not answer, or if a process dies.
        :raises AsynctrtError: any other error of a process.
        """
        fleet = cls(spec, settings)
        try:
            for _ in fleet._processes:
                ready = await fleet._next()
                assert isinstance(ready, ProcessReady)
                fleet.name, fleet.kind = ready.name, ready.kind
            yield fleet
        finally:
            with anyio.CancelScope(shield=True):
                await fleet._close()

    name: str
    kind: str

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def run(
        self, settings: LoadSettings, emit: Callable[[Windows], None]
    ) -> tuple[ProcessPlan, list[ProcessResult]]:
        """Perform one run in all processes."""
        self._tell(Order(settings))
        # Planning may be slow, for example to read a trace, so no process starts before all have planned.
        planned = [await self._next() for _ in self._processes]
        self._tell(ProcessStart(clock.now_ns() + LEAD_NS))
        outcomes: list[ProcessResult] = []
        while len(outcomes) < len(self._processes):
            message = await self._next()
            if isinstance(message, Done):
                outcomes.append(message.outcome)
            else:
                emit(message)
        return planned[0].plan, outcomes

    def stop(self) -> None:
        """End the current run."""
        self._tell(STOP)

    def _tell(self, order: Any) -> None:
        """Send an order to every process. If one has ended, its message or its closed pipe reports that."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(order)

    async def _next(self) -> Any:
        share, message = await self._messages.get()
        if isinstance(message, ProcessFailed):
            raise message.error
        if message is None:
            await asyncio.to_thread(self._processes[share].join, CLOSE_S)
            status = self._processes[share].exitcode
            raise TargetError(f"a sending process ended unexpectedly, with exit status {status}")
        return message

    def _take(self, share: int, message: Any) -> None:
        self._messages.put_nowait((share, message))

    async def _close(self) -> None:
        self._tell(CLOSE)
        for process in self._processes:
            await asyncio.to_thread(process.join, CLOSE_S)
            if process.is_alive():
                process.kill()
                await asyncio.to_thread(process.join, CLOSE_S)
        for connection in self._connections:
            connection.close()
