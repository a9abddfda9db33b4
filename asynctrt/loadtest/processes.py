"""Sending from processes of their own: what shows or weighs the results then never makes the sender late."""

import asyncio
import contextlib
import gc
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

from asynctrt import clock
from asynctrt.errors import AsynctrtError, InternalError, TargetError
from asynctrt.loadtest.local import Local
from asynctrt.loadtest.plans import Plan
from asynctrt.loadtest.recorder import Windows
from asynctrt.loadtest.runner import Outcome
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import TargetSpec
from asynctrt.process import keep_what_is_there, let_threads_in

GC_THRESHOLDS: Final = (20_000, 50, 1000)
"""The collector's: with Python's own it is a third of what 256 requests on the way cost over HTTP."""
LEAD_NS: Final = 100_000_000
"""From when every process is ready to the first moment, so that each has heard of it by then."""
CLOSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Ready:
    """A process has opened its target, a model of this name and a target of this kind."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Order:
    """Plan one run. When every process has, they are told when it begins."""

    settings: LoadSettings


@dataclass(frozen=True, slots=True)
class Planned:
    """A run can begin."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the run that was planned, at this time of :func:`asynctrt.clock.now_ns`."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Done:
    """A run is over."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failed:
    """It went wrong, and why."""

    error: AsynctrtError


STOP: Final = "stop"
CLOSE: Final = "close"


def serve_runs(connection: Connection, spec: TargetSpec, settings: LoadSettings, share: int) -> None:
    """A process's whole life: open the target, do the runs that are ordered, close it."""
    # Ctrl-C goes to every process of a terminal; the one that shows the results tells the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    let_threads_in()
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
        connection.send(Failed(_portable(error)))
    except BrokenPipeError:
        return  # Who ordered it is gone.
    except Exception as error:
        connection.send(
            Failed(InternalError(f"a process that sends failed: {type(error).__name__}: {error}"))
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
        keep_what_is_there()
        gc.set_threshold(*GC_THRESHOLDS)
        connection.send(Ready(local.target.name, local.target.kind))
        while isinstance(order := await orders.get(), Order):
            plan = local.plan(order.settings, share, order.settings.processes)
            connection.send(Planned(plan))
            start = await orders.get()
            if not isinstance(start, Start):
                return
            if is_stopped:  # While it was planned: it ends as soon as it has begun.
                loop.call_soon(local.stop)
            connection.send(Done(await local.run(plan, connection.send, start.at_ns)))


def _receive(
    connection: Connection, loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], last: Any
) -> None:
    """Hand over to the loop what comes, and ``last`` when there will be no more.

    A thread reads: a descriptor that the loop watches no longer blocks, and then half a message is an error.
    """

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody listens any more.
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(take, connection.recv())
            loop.call_soon_threadsafe(take, last)

    threading.Thread(target=read, name="asynctrt-load-read", daemon=True).start()


def _portable(error: AsynctrtError) -> AsynctrtError:
    """An error that another process can read: without what caused it, and with plain words."""
    made: AsynctrtError = type(error)(str(error))
    return made


class Fleet:
    """The processes of one target, from the side of the one that shows what they find."""

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
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
            _receive(mine, loop, partial(self._take, share), None)

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: TargetSpec, settings: LoadSettings) -> "AsyncIterator[Fleet]":
        """Start the processes, and return when each has opened the target.

        :raises TargetError: if it cannot be reached, or does not answer; or if a process dies.
        :raises AsynctrtError: what else a process says is wrong.
        """
        fleet = cls(spec, settings)
        try:
            for _ in fleet._processes:
                ready = await fleet._next()
                assert isinstance(ready, Ready)
                fleet.name, fleet.kind = ready.name, ready.kind
            yield fleet
        finally:
            with anyio.CancelScope(shield=True):
                await fleet._close()

    name: str
    kind: str

    @property
    def pids(self) -> list[int]:
        """The processes' numbers."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def run(
        self, settings: LoadSettings, emit: Callable[[Windows], None]
    ) -> tuple[Plan, list[Outcome]]:
        """One run of them all."""
        self._tell(Order(settings))
        # To plan takes as long as it takes, a recorded trace has to be read: nobody begins before all have.
        planned = [await self._next() for _ in self._processes]
        self._tell(Start(clock.now_ns() + LEAD_NS))
        outcomes: list[Outcome] = []
        while len(outcomes) < len(self._processes):
            message = await self._next()
            if isinstance(message, Done):
                outcomes.append(message.outcome)
            else:
                emit(message)
        return planned[0].plan, outcomes

    def stop(self) -> None:
        """End the run that is under way."""
        self._tell(STOP)

    def _tell(self, order: Any) -> None:
        """Say it to every process. One that is gone has said so itself, or its end of the pipe has."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(order)

    async def _next(self) -> Any:
        share, message = await self._messages.get()
        if isinstance(message, Failed):
            raise message.error
        if message is None:
            await asyncio.to_thread(self._processes[share].join, CLOSE_S)
            status = self._processes[share].exitcode
            raise TargetError(f"a process that sends has ended by itself, with exit status {status}")
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
