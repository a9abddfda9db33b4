"""Events, streams and graphs of the host device: work in order, on a thread or in place."""

import asyncio
import ctypes
import logging
import threading
from abc import ABC, abstractmethod
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Final, Literal

import numpy as np

from asynctrt._util import clock
from asynctrt.devices.base import Buffer, Event, Stream
from asynctrt.devices.host.threads import StreamThreads
from asynctrt.errors import DeviceError, ExecutionError
from asynctrt.limits import hold_from_here, hold_no_longer

InPlace = Literal["auto", "always", "never"]

RunOn = Literal["thread", "loop", "auto"]
"""Where work runs: in a thread, on the event loop that launches it, or on the loop if that is quicker."""

HELD_NS: Final = 100_000_000
"""A run that holds the event loop for longer than this is logged; asyncio's debug mode has the same bound."""

logger = logging.getLogger("asynctrt")


class HostEvent:
    """A flag that a stream sets when it reaches the event."""

    __slots__ = (
        "_callback",
        "_lock",
        "_reached",
        "_stream",
        "_time_ns",
        "_waiters",
        "error",
        "recording",
    )

    def __init__(self) -> None:
        self.error: BaseException | None = None
        # Recordings are counted, so that a stream waits for the right one even if the event has been recorded
        # again by the time the stream gets there.
        self.recording = 0
        """The number of the latest recording."""
        self._reached = 0
        self._time_ns = 0
        self._callback: Callable[[], None] | None = None
        self._stream: HostStream | None = None
        self._lock = threading.Lock()
        self._waiters: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<HostEvent {'done' if self._reached == self.recording else 'pending'}>"

    @property
    def is_abandoned(self) -> bool:
        """Whether it is pending on a stream that was abandoned."""
        stream = self._stream
        return self._reached != self.recording and stream is not None and stream.is_abandoned

    def query(self) -> bool:
        return self._reached == self.recording

    def has_reached(self, recording: int) -> bool:
        """Return whether that recording is done."""
        return self._reached >= recording

    def is_running(self) -> bool:
        stream = self._stream
        return self._reached != self.recording and stream is not None and stream.is_running

    def nudge(self) -> bool:
        if self._reached == self.recording or self._stream is None:
            return False
        return self._stream.threads.lend_gil()

    def on_done(self, callback: Callable[[], None]) -> bool:
        # This method stores the callback and then checks the flag; the stream's thread sets the flag and then
        # checks for a callback. At least one of the two therefore sees the other without a lock. If both do,
        # there is one redundant call, which is harmless.
        self._callback = callback
        return self._reached != self.recording

    def synchronize(self, timeout_s: float | None = None) -> bool:
        reached = threading.Event()
        self.call_when_reached(self.recording, reached.set)
        return reached.wait(timeout_s)

    def call_when_reached(self, recording: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, now or from a thread of the stream, when that recording is done."""
        with self._lock:
            # The same order as in on_done; the lock allows removing the callback.
            self._waiters.append(callback)
            if self._reached < recording:
                return
            self._waiters.remove(callback)
        callback()

    def elapsed_ns(self, since: Event) -> int:
        if not isinstance(since, HostEvent):
            raise _foreign(since)
        return self._time_ns - since._time_ns

    def begin(self, stream: "HostStream") -> None:
        """Mark the event as pending on ``stream``."""
        if self._reached != self.recording:
            raise _pending(self)
        self.error = None
        self._callback = None
        self._stream = stream
        self.recording += 1

    def withdraw(self) -> None:
        """Undo :meth:`begin` if the event is still pending."""
        if self._reached != self.recording:
            self.recording -= 1

    def reach(self, time_ns: int, error: BaseException | None) -> None:
        """Mark the event as done, and call its waiters."""
        self.error = error
        self._time_ns = time_ns
        self._reached = self.recording
        if self._waiters:
            with self._lock:
                waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter()
        callback = self._callback
        if callback is not None:
            callback()


class Unfinished(ABC):
    """Work that continues elsewhere after it was started, such as a coroutine on an event loop."""

    @abstractmethod
    def start(self, finish: Callable[[BaseException | None], None]) -> None:
        """Continue it, and call ``finish`` with its error, once, from any thread, when it has finished."""

    @abstractmethod
    def cancel(self) -> None:
        """Request, from any thread, that it finish soon. Idempotent."""


Work = Callable[[], object]
"""Work that a stream runs. If it returns an :class:`Unfinished`, that blocks the stream but no thread."""


class Launched(partial[bool]):
    """Queued work that runs in a thread. All other queued operations take negligible time."""


class OnLoop(Unfinished):
    """Work that runs on the event loop although it was queued for a thread."""

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._work = work
        self._loop = loop
        self._name = name
        self._is_given_up = threading.Event()
        self._left: Unfinished | None = None
        self._finish: Callable[[BaseException | None], None] = lambda _: None

    def start(self, finish: Callable[[BaseException | None], None]) -> None:
        """Run it on its loop, from any thread, and call `finish` when it has finished."""
        self._finish = finish
        if _get_running_loop() is self._loop:
            self._run()
            return
        try:
            self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            finish(ExecutionError("the function runs on the event loop (run_on='loop'), which is closed"))

    def cancel(self) -> None:
        """Prevent it from starting, or cancel the work that it started."""
        self._is_given_up.set()
        if self._left is not None:
            self._left.cancel()

    def _run(self) -> None:
        if self._is_given_up.is_set():
            self._finish(ExecutionError("the function's batch was given up before it began"))
            return
        left: object = None
        failed: BaseException | None = None
        start_ns = clock.now_ns()
        try:
            left = self._work()
        except BaseException as error:
            failed = error
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise_on_loop(error)
        warn_if_held(self._name, clock.now_ns() - start_ns)
        if isinstance(left, Unfinished):
            self._left = left
            left.start(self._finish)
            if self._is_given_up.is_set():
                left.cancel()
        else:
            self._finish(failed)


class HostStream:
    """An ordered queue of work that runs on a thread of the device or, if permitted, in place."""

    def __init__(
        self, *, threads: StreamThreads, in_place: InPlace, now_ns: Callable[[], int], handle: int
    ) -> None:
        self.threads = threads
        self.handle = handle
        self.is_computing = False
        """Whether work of this stream is running now: on a thread, in place, or as :class:`Unfinished`."""
        self.is_abandoned = False
        """Whether its work was abandoned as hung."""
        self.ran_ns = 0
        """How long its work has run so far, in ns, in place or on threads."""
        self._name = "the work"
        self._in_place = in_place
        self._now_ns = now_ns
        self._operations: deque[Callable[[], bool]] = deque()
        # Guards the transition from served to idle against an operation that arrives at the same time.
        self._lock = threading.Lock()
        self._is_served = False
        # One entry for each scheduled turn of a thread.
        # The turns that threads have yet to take, each with a lock to release at its end.
        self._turns: list[threading.Lock | None] = []
        self._awaited: HostEvent | None = None
        self._unfinished: Unfinished | None = None
        self._error: BaseException | None = None
        self._captured: HostGraph | None = None
        self._closed = False
        threads.join()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "busy" if self._is_served else "idle"
        return f"<HostStream {state} pending={len(self._operations)}>"

    @property
    def is_running(self) -> bool:
        """Whether it is running, rather than waiting for a thread or for another stream."""
        awaited = self._awaited
        # Work blocked by an abandoned stream is not waiting for its turn: it hangs too.
        return self.is_computing or (awaited is not None and awaited.is_abandoned)

    def belong_to(self, model: str, *, keeps_thread: bool) -> None:
        """Set, before it has work, the model that the log names, and whether one thread runs all of it."""
        self._name = repr(model)
        if keeps_thread:
            self.threads.settle(self)

    def launch(
        self,
        work: Work,
        *,
        label: Hashable = None,
        run_on: RunOn = "thread",
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Run ``work`` after everything launched earlier.

        :param label: a key for its duration: runs with the same label take about equally long, on all streams
            of the device.
        :param run_on: ``thread``: in a thread of the device; if runs with its label were measured to be
            shorter than a hand-over, the call usually returns once it is done. ``loop``: on the running event
            loop, at once if the stream is idle. ``auto``: in place if runs with its label were measured to be
            shorter than a hand-over, otherwise in a thread; use it only for work that never waits for the
            loop or for anything else. A device with ``in_place="always"`` runs everything in place.
        :param loop: the event loop for ``loop`` if none is running in this thread; it must be free to run it.
        :raises ExecutionError: for ``loop``, if there is no event loop.

        An exception from the work becomes the error of the next event recorded here, and the stream goes on.
        Work that runs in place is called by the launching thread, so KeyboardInterrupt and SystemExit also
        concern the application: the running event loop raises them once it regains control. Without a running
        loop they are raised here.
        """
        if self._captured is not None:
            self._captured.add(partial(HostStream.launch, work=work, label=label, run_on=run_on, loop=loop))
            return
        if self._in_place != "auto" or run_on == "loop":
            label = None
        is_short = label is not None and self.threads.paces.is_short(label)
        in_place = self._in_place == "always"
        if run_on == "loop" and not in_place:
            running = _get_running_loop()
            loop = running or loop
            if loop is None:
                raise ExecutionError(
                    f"{self._name} runs on the event loop (run_on='loop'), and none is running in the thread "
                    "that launched it"
                )
            in_place = self._in_place == "auto" and running is not None
            if self._is_served or not in_place:
                work = partial(OnLoop, work, loop, self._name)
        if self._is_served:
            self._put(Launched(self._run, work, label, in_place=False))
        elif in_place or (is_short and run_on == "auto"):
            self._run(work, label, in_place=True)
        elif is_short and self.threads.may_lend():
            self._run_in_thread(work, label)
        else:
            self._put(Launched(self._run, work, label, in_place=False))

    def _run_in_thread(self, work: Work, label: Hashable) -> None:
        """Run short work in a thread, and wait for it, for a short time.

        The thread gets the GIL at once. If this thread went on instead, an event loop, it would compete for
        the GIL, form smaller batches meanwhile, and be woken for the result.
        """
        served = threading.Lock()
        served.acquire()
        self._put(Launched(self._run, work, label, in_place=False, is_awaited=True), served)
        try:
            self.threads.lend_gil_until(served)
        except BaseException as error:
            raise_on_loop(error)  # The work is under way.

    def record(self, event: Event) -> None:
        if not isinstance(event, HostEvent):
            raise _foreign(event)
        if self._captured is not None:
            self._captured.add(partial(HostStream.record, event=event))
            return
        if self._is_served:
            reach = partial(self._reach, event)
            event.begin(self)
            try:
                self._put(reach)
            except BaseException:
                # A thread removes an operation only after running it. If the operation is not in the queue,
                # it has either run or was never added.
                if reach not in tuple(self._operations):
                    event.withdraw()
                raise
        elif event._reached != event.recording:
            raise _pending(event)
        else:
            # An idle stream reaches the event at once, so this combines `begin` and `reach`; there cannot be
            # a waiter yet. Most events are recorded this way.
            event.error, self._error = self._error, None
            event._callback = None
            event._stream = self
            event._time_ns = self._now_ns()
            event.recording = event._reached = event.recording + 1

    def wait(self, event: Event) -> None:
        if not isinstance(event, HostEvent):
            raise _foreign(event)
        if self._captured is not None:
            self._captured.add(partial(HostStream.wait, event=event))
            return
        if self._is_served or not event.query():
            self._put(partial(self._await, event, event.recording))

    def copy(self, target: Buffer, source: Buffer, *, offset: int, nbytes: int) -> None:
        into = target.array(np.dtype(np.uint8), (nbytes,), offset)
        out_of = source.array(np.dtype(np.uint8), (nbytes,), offset)
        self.launch(partial(np.copyto, into, out_of), label=("copy", nbytes), run_on="auto")

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        def copy() -> None:
            ctypes.memmove(target, source, nbytes)

        self.launch(copy, label=("copy", nbytes), run_on="auto")

    @property
    def is_capturing(self) -> bool:
        return self._captured is not None

    def begin_capture(self) -> None:
        if self._captured is not None:
            raise DeviceError(f"{self!r} is capturing already")
        self._captured = HostGraph()

    def end_capture(self) -> "HostGraph":
        graph, self._captured = self._captured, None
        if graph is None:
            raise DeviceError(f"{self!r} is not capturing")
        return graph

    def abandon(self) -> None:
        """Replace the thread that serves it, which ends if the work ever does, and cancel unfinished work."""
        self.is_abandoned = True
        self.threads.replace(self)
        self._cancel()

    def drain(self, timeout_s: float) -> bool:
        if self._closed:
            return True
        self._captured = None
        self._cancel()
        if self._is_served:
            last = HostEvent()
            self.record(last)
            return last.synchronize(timeout_s)
        return True

    def close(self, timeout_s: float) -> bool:
        if self._closed:
            return True
        if not self.drain(timeout_s):
            return False
        self._closed = True
        self.threads.unsettle(self)
        return self.threads.leave(timeout_s)

    def serve(self) -> None:
        """Run queued work in a thread until none is left or an event must be waited for."""
        try:
            served = self._turns.pop()
        except IndexError:
            return  # The turn was taken back.
        self._go_through(may_run=True)
        if served is not None:
            served.release()

    def _go_through(self, *, may_run: bool) -> None:
        """Run queued operations. Without ``may_run``, leave the first work and all after it to a thread."""
        while True:
            while self._operations:
                operation = self._operations[0]
                if not may_run and isinstance(operation, Launched):
                    self._schedule()
                    return
                if not operation():
                    return
                self._operations.popleft()
                self.threads.hand_back()
            with self._lock:
                if not self._operations:
                    self._is_served = False
                    return

    def _put(self, operation: Callable[[], bool], served: "threading.Lock | None" = None) -> None:
        """Queue an operation. If the stream was idle, a thread releases ``served`` once it has run it."""
        if self._closed:
            raise DeviceError(f"{self!r} is closed")
        self.threads.check()
        is_first = False
        try:
            with self._lock:
                self._operations.append(operation)
                if self._is_served:
                    return
                is_first = self._is_served = True
            self._schedule(served)
        except BaseException:
            with self._lock:
                if is_first:
                    self._is_served = False
                if not self._is_served and operation in self._operations:
                    self._operations.remove(operation)  # No thread will run it: the caller gets the error.
            raise

    def _schedule(self, served: "threading.Lock | None" = None) -> None:
        """Schedule the stream on a thread, or raise. An interrupt after a thread has started is raised
        later."""
        self._turns.append(served)
        try:
            self.threads.schedule(self)
        except BaseException as error:
            try:
                self._turns.pop()
            except IndexError:
                raise_on_loop(error)
                return
            raise

    def _run(self, work: Work, label: Hashable, *, in_place: bool, is_awaited: bool = False) -> bool:
        start_ns = self._now_ns()
        left: object = None
        if not in_place:
            self.threads.hand_back()
        # In place it runs in the context of some caller, whose limits are not its limits.
        token = hold_from_here(None) if in_place else None
        self.is_computing = True
        try:
            left = work()
        except BaseException as error:
            self._error = self._error or error
            if in_place and isinstance(error, KeyboardInterrupt | SystemExit):
                raise_on_loop(error)
        finally:
            self.is_computing = False
            if token is not None:
                hold_no_longer(token)
        took_ns = self._now_ns() - start_ns
        self.ran_ns += took_ns
        if took_ns > HELD_NS and in_place:
            warn_if_held(self._name, took_ns)
        if label is not None:
            self.threads.paces.observe(label, took_ns, in_place=in_place or is_awaited)
        if left is not None and isinstance(left, Unfinished):
            return self._suspend(left, in_place=in_place)
        return True

    def _suspend(self, unfinished: Unfinished, *, in_place: bool) -> bool:
        """Block later operations until ``unfinished`` has finished; return False, as :meth:`_await` does."""
        over = HostEvent()
        over.begin(self)
        over.call_when_reached(over.recording, self._go_on)
        resume = partial(self._resume, over)
        self._unfinished = unfinished
        self.is_computing = True

        def finish(error: BaseException | None) -> None:
            over.reach(self._now_ns(), error)

        token = hold_from_here(None)  # As in `_run`.
        try:
            if in_place:
                self._is_served = True
                self._operations.append(resume)
            else:
                self._operations[0] = resume
            unfinished.start(finish)
        except BaseException as error:
            if not isinstance(error, Exception):
                unfinished.cancel()  # It may have started.
                if in_place:
                    raise_on_loop(error)
            finish(error)
        finally:
            hold_no_longer(token)
        return False

    def _resume(self, over: HostEvent) -> bool:
        self._unfinished = None
        self.is_computing = False
        self._error = self._error or over.error
        return True

    def _go_on(self) -> None:
        """Continue after unfinished work: run cheap operations here, and work in a thread."""
        self._go_through(may_run=self._in_place == "always")

    def _cancel(self) -> None:
        unfinished = self._unfinished
        if unfinished is not None:
            unfinished.cancel()

    def _reach(self, event: HostEvent) -> bool:
        error, self._error = self._error, None
        event.reach(self._now_ns(), error)
        return True

    def _await(self, event: HostEvent, recording: int) -> bool:
        """Return True if the event is done; otherwise schedule the stream for when it is."""
        if event.has_reached(recording):
            self._awaited = None
            return True
        self._awaited = event
        event.call_when_reached(recording, self._schedule)
        return False


class HostGraph:
    """Captured operations, which `launch` puts on a stream again."""

    def __init__(self) -> None:
        self._operations: list[Callable[[HostStream], None]] = []

    def __repr__(self) -> str:
        return f"<HostGraph operations={len(self._operations)}>"

    def add(self, operation: Callable[[HostStream], None]) -> None:
        """Append an operation. Called by the capturing stream."""
        self._operations.append(operation)

    def launch(self, *, stream: Stream) -> None:
        assert isinstance(stream, HostStream)
        for operation in self._operations:
            operation(stream)

    def close(self) -> None:
        self._operations.clear()


def _pending(event: HostEvent) -> DeviceError:
    return DeviceError(f"{event!r} is recorded again before it was done")


def _foreign(event: Event) -> DeviceError:
    return DeviceError(f"{event!r} is not an event of the host device")


def warn_if_held(name: str, took_ns: int) -> None:
    """Log that a run held the running event loop for long, if it did."""
    if took_ns > HELD_NS and _get_running_loop() is not None:
        logger.warning(
            "%s held the event loop for %.0f ms in one go: nothing else ran there, and batch_timeout cannot "
            "end such a run. Let a plain function run in a thread (run_on='thread'); in a coroutine "
            "function, await asyncio.to_thread(...) for what blocks",
            name,
            took_ns / 1e6,
        )


def raise_on_loop(error: BaseException) -> None:
    """Raise ``error`` from the running loop as soon as the code that launched the work has returned to it."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise error from None
    loop.call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error
