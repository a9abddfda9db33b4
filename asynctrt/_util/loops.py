"""Additions to asyncio: the running loop or a clear error, and waits that survive cancellation."""

import asyncio
import math
import sys
from asyncio import _get_running_loop
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from threading import Thread
from typing import Any, Final, TypeVar, cast

from anyio import CancelScope

from asynctrt._util.cancellation import Cancellation, cancelled_by
from asynctrt.errors import UsageError, copy_of

T = TypeVar("T")

WAIT_S_MAX: Final = 3600.0
"""Longer waits are split into several, because uvloop's timers overflow."""


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running asyncio loop.

    :raises UsageError: if no loop is running, or on trio.
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
    """Return whether the running task itself was cancelled, rather than something that it waits for.

    With this function a caller keeps no task in a variable. The task may end with an error whose traceback
    holds the caller's frame, which would make a reference cycle.
    """
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


async def in_lost_thread(function: Callable[[], T]) -> T:
    """Run a blocking function that may hang, and leaves nothing to release, in a separate daemon thread.

    Neither the end of the process, nor a cancelled caller, nor a shared thread pool has to wait for it.
    """
    future, thread = _thread_for(partial(copy_context().run, function), "asynctrt-look", is_daemon=True)
    thread.start()
    return await future


def _thread_for(
    function: Callable[[], T], name: str, *, is_daemon: bool
) -> "tuple[asyncio.Future[T], Thread]":
    """Return a thread that will run a function, and the future of its result."""
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
        del error  # Breaks a cycle: its traceback holds this frame.

    return future, Thread(target=run, name=name, daemon=is_daemon)


_OPENING: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("asynctrt-opening", default=None)


def opening_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that waits for this thread's function, if :func:`in_thread` runs it."""
    return _OPENING.get()


async def in_thread(function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Run a blocking function in a thread that ends with it.

    A cancelled caller asks the function to end (:func:`asynctrt._util.cancellation.current`) and still waits
    for it. If the function returns a result despite that, ``undo`` gets it, so that nothing leaks.
    """
    cancellation, loop = Cancellation(), asyncio.get_running_loop()

    def run() -> T:
        _OPENING.set(loop)  # The thread, and its context, end with the function.
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
    timeout_s: float = math.inf,
) -> "tuple[asyncio.Future[T], asyncio.CancelledError | None]":
    """Run a blocking function in a thread that ends with it, and wait for it despite any cancellation.

    :param on_cancel: called on each cancellation.
    :param timeout_s: how long to wait. The function runs on after that, until the process ends.
    :returns: the function's future, completed unless the time is up, and the cancellation that the caller
        must still raise.
    """
    # The end of the process must not wait for what may never end.
    future, thread = _thread_for(function, "asynctrt-open", is_daemon=timeout_s < math.inf)
    try:
        thread.start()
    except RuntimeError:
        # The system refuses another thread (ulimit -u). Run it here, so that resources are still closed.
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
    cancelled = await wait_shielded(future, timeout_s, on_cancel)
    if future.done() and thread.ident is not None:
        thread.join()
    return future, cancelled


async def see_through(begin: Callable[[], "asyncio.Task[Any]"]) -> asyncio.CancelledError | None:
    """Wait until a task has ended, despite any cancellation, and raise its error.

    An ending loop cancels every task, and a task cancelled before it starts runs none of its code.

    :param begin: returns the task; if that was cancelled, returns a new one.
    :returns: the caller's cancellation that must still be raised, if there was one.
    """
    cancelled: asyncio.CancelledError | None = None
    while True:
        task = begin()
        cancelled = await wait_shielded(task) or cancelled
        if not task.cancelled():
            result_of(task)
            return cancelled


def result_of(done: "asyncio.Future[T]") -> T:
    """Return the result of a future that several callers share; if it failed, raise a copy of its error."""
    if not done.cancelled() and (error := done.exception()) is not None:
        raise copy_of(error)
    return done.result()


async def wait_shielded(
    future: "asyncio.Future[Any]",
    timeout_s: float = math.inf,
    on_cancel: Callable[[], object] | None = None,
) -> asyncio.CancelledError | None:
    """Wait until a future is done or the time is up, despite any cancellation.

    :returns: the cancellation that the caller must still raise, if there was one.
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
