"""What asyncio lacks for an engine: the running loop or a clear error, and waits that are seen through."""

import asyncio
import math
import sys
from asyncio import _get_running_loop
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import Any, Final, TypeVar, cast

from anyio import CancelScope

from asynctrt._util.cancellation import Cancellation, cancelled_by
from asynctrt.errors import UsageError, copy_of

T = TypeVar("T")

WAIT_S_MAX: Final = 3600.0
"""Longer waits are taken in turns: timers of uvloop overflow."""


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running asyncio loop.

    :raises UsageError: without one, or on trio.
    """
    loop = _get_running_loop()
    if loop is not None:
        return loop
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        raise UsageError(
            "asynctrt runs on asyncio, and this is trio. Run the application with "
            "anyio.run(main, backend='asyncio', backend_options={'use_uvloop': True})"
        )
    raise UsageError("no event loop is running. Call it from a coroutine: asyncio.run(main())")


def is_cancelled() -> bool:
    """Return whether the running task was cancelled itself, rather than something that it waits for.

    Who asks keeps no task in a variable: it may end with an error whose traceback has the frame that asks.
    """
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


async def in_lost_thread(function: Callable[[], T]) -> T:
    """Run a blocking function that makes nothing in a thread of its own, which may hang.

    Nobody has to wait for it: neither the end of the process, nor a caller who is cancelled, nor what
    shares threads with others.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def done(result: T | None, error: BaseException | None) -> None:
        if future.done():  # Its caller was cancelled.
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(done, result, error)

    Thread(target=partial(copy_context().run, run), name="asynctrt-look", daemon=True).start()
    return await future


async def in_thread(function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Run a blocking function in a thread that ends with it.

    A cancelled caller still waits for it, and asks it to end: see
    :func:`asynctrt._util.cancellation.current`. What it has made by then is given to ``undo``, so that
    nothing is left behind.
    """
    cancellation = Cancellation()

    def run() -> T:
        with cancelled_by(cancellation):
            return function()

    future, cancelled = await see_through_in_thread(run, cancellation.cancel)
    if cancelled is None:
        return future.result()
    if future.exception() is None and undo is not None:
        undo(future.result())
    raise cancelled


async def see_through_in_thread(
    function: Callable[[], T],
    on_cancel: Callable[[], object] | None = None,
) -> "tuple[asyncio.Future[T], asyncio.CancelledError | None]":
    """Run a blocking function in a thread that ends with it, whatever is cancelled meanwhile.

    :param on_cancel: called when something is.
    :returns: the function's future, which is done, and the cancellation that is still to be raised.
    """
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(1, thread_name_prefix="asynctrt-open")
    try:
        future = loop.run_in_executor(executor, function)
    except RuntimeError:
        # The system refuses another thread (ulimit -u): what is to be closed is closed all the same.
        future = loop.create_future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
    cancelled = await wait_shielded(future, on_cancel=on_cancel)
    executor.shutdown()
    return future, cancelled


async def see_through(begin: Callable[[], "asyncio.Task[Any]"]) -> asyncio.CancelledError | None:
    """Wait until a task has ended, whatever is cancelled meanwhile; raise what it raised.

    A loop that ends cancels every task, and one that has not begun then runs no line of its own.

    :param begin: returns the task; once it was cancelled, another one.
    :returns: the cancellation of the caller that is still to be raised, if there was one.
    """
    cancelled: asyncio.CancelledError | None = None
    while True:
        task = begin()
        cancelled = await wait_shielded(task) or cancelled
        if not task.cancelled():
            result_of(task)
            return cancelled


def result_of(done: "asyncio.Future[T]") -> T:
    """Return the result of a future that several may ask; each gets an error of its own if it failed."""
    if not done.cancelled() and (error := done.exception()) is not None:
        raise copy_of(error)
    return done.result()


async def wait_shielded(
    future: "asyncio.Future[Any]",
    timeout_s: float = math.inf,
    on_cancel: Callable[[], object] | None = None,
) -> asyncio.CancelledError | None:
    """Wait until a future is done or the time is up, whatever is cancelled meanwhile.

    :returns: the cancellation that is still to be raised, if there was one.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    with CancelScope(shield=True):
        while not future.done() and (left_s := end_s - loop.time()) > 0:
            try:
                await asyncio.wait([future], timeout=min(left_s, WAIT_S_MAX))
            except asyncio.CancelledError as error:
                cancelled = error
                if on_cancel is not None:
                    on_cancel()
    return cancelled
