"""Sends from child processes, so that displaying or evaluating results never delays the sender."""

import asyncio
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import anyio

from asynctrt._util import clock
from asynctrt._util.process import calm_gc, safe_path, shorten_switch_interval
from asynctrt.errors import AsynctrtError, InternalError, TargetError
from asynctrt.loadtest.local import LEAD_NS, Local, Planned
from asynctrt.loadtest.opening import find_modules
from asynctrt.loadtest.plans import ProcessPlan
from asynctrt.loadtest.recorder import Windows
from asynctrt.loadtest.runner import ProcessResult
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import TargetSpec

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a load test with a report."""

CLOSE_S: Final = 10.0
"""How long a process may take to close its target; then it is killed."""

# Orders to the processes, each with its content: settings to plan a run by, and the time at which to start it
# (:func:`asynctrt._util.clock.now_ns`).
PLAN, START, STOP, CLOSE = "plan", "start", "stop", "close"
# Their replies: the target is open; a plan; windows of a run; its outcome; an error.
READY, PLANNED, WINDOWS, DONE, FAILED = "ready", "planned", "windows", "done", "failed"


def serve_runs(connection: Connection, spec: TargetSpec, settings: LoadSettings, share: int) -> None:
    """Run a child process: open the target, perform the ordered runs, close the target."""
    # These may be sent to all processes of a group, but the parent tells its children when to stop.
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    shorten_switch_interval()
    find_modules(spec)
    serve = partial(_serve_runs, connection, spec, settings, share)
    try:
        anyio.run(serve, backend="asyncio", backend_options={"use_uvloop": True})
    except BrokenPipeError:
        return  # The parent is gone.
    except Exception as error:
        text = str(error)
        if isinstance(error, AsynctrtError):  # Without its cause, so that it can be pickled.
            connection.send((FAILED, type(error)(text)))
        else:
            why = f"a sending process failed: {type(error).__name__}: {text}"
            connection.send((FAILED, InternalError(why)))


async def _serve_runs(connection: Connection, spec: TargetSpec, settings: LoadSettings, share: int) -> None:
    orders: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with Local.open(spec, settings) as local:
        is_stopped = False

        def take(order: tuple[str, Any]) -> None:
            nonlocal is_stopped
            kind, _ = order
            if kind != START:
                is_stopped = kind != PLAN
            if is_stopped:
                local.stop()
            if kind != STOP:
                orders.put_nowait(order)

        _receive(connection, loop, take, (CLOSE, None))
        calm_gc()
        connection.send((READY, None))
        while (order := await orders.get())[0] == PLAN:
            plan = local.plan(order[1], share, order[1].processes)
            await local.count()
            connection.send((PLANNED, plan))
            kind, start_ns = await orders.get()
            if kind != START:
                return
            if is_stopped:  # Stopped during planning: end the run as soon as it starts.
                loop.call_soon(local.stop)

            def emit(windows: Windows) -> None:
                connection.send((WINDOWS, windows))

            connection.send((DONE, await local.run(plan, emit, start_ns)))


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
                await fleet._next()
            yield fleet
        finally:
            with anyio.CancelScope(shield=True):
                await fleet._close()

    async def perform(
        self, settings: LoadSettings, emit: Callable[[Windows], None], planned: Planned
    ) -> tuple[ProcessPlan, list[ProcessResult]]:
        """Perform one run in all processes, as :meth:`Local.perform` does in this one."""
        self._tell(PLAN, settings)
        # No process starts before all have planned: they start at the same time.
        plans = [await self._next() for _ in self._processes]
        planned(plans[0][1])
        self._tell(START, clock.now_ns() + LEAD_NS)
        outcomes: list[ProcessResult] = []
        while len(outcomes) < len(self._processes):
            kind, content = await self._next()
            if kind == DONE:
                outcomes.append(content)
            else:
                emit(content)
        return plans[0][1], outcomes

    def stop(self) -> None:
        """End the current run."""
        self._tell(STOP)

    def _tell(self, kind: str, content: Any = None) -> None:
        """Send an order to every process. If one has ended, its message or its closed pipe reports that."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send((kind, content))

    async def _next(self) -> tuple[str, Any]:
        share, message = await self._messages.get()
        if message is None:
            await asyncio.to_thread(self._processes[share].join, CLOSE_S)
            status = self._processes[share].exitcode
            raise TargetError(f"a sending process ended unexpectedly, with exit status {status}")
        kind, content = message
        if kind == FAILED:
            raise content
        return kind, content

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
