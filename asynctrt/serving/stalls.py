"""Detect when something blocks the event loop, for how long, and what it is.

A timer of the loop beats every :data:`BEAT_S`. Its delay is how long a request that arrives at that moment
waits before any work is done for it. Each beat postpones a ``timerfd`` that a thread waits for. The thread
wakes up only when the loop has not beaten for long enough to be worth a line in the log, and then looks at
what the loop's thread is doing. The rest of the time it sleeps in the kernel.
"""

import asyncio
import logging
import os
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import asynctrt
from asynctrt._util import clock
from asynctrt._util.alarm import Timerfd
from asynctrt.kserve.codec import ModelCodec
from asynctrt.serving.http_reader import HttpRequest
from asynctrt.serving.latency import BOUNDS_NS
from asynctrt.serving.served import ServedModel
from asynctrt.serving.server_log import PERIOD_NS

BEAT_S: Final = 0.05
"""Time between beats, which take 0.4% of a slow core. A pause that exceeds the bound by this much is always
noticed."""

STILL_NS: Final = 1_000_000_000
"""The thread logs a pause that lasts this long, because the loop may never get to it."""

FRAMES_MAX: Final = 6
"""Functions that are named, from the innermost."""

THREAD_S: Final = 5.0
"""Time limit for the thread to end."""

PACKAGE: Final = Path(asynctrt.__file__).parent
LOOPS: Final = ("/asyncio/", "/uvloop/")

logger = logging.getLogger("asynctrt.serving")


class Seen(NamedTuple):
    """The activity of the loop's thread during a pause."""

    work: str
    """The request and the model, as far as they are known."""
    stack: str
    """The functions, from the innermost."""


class Stalls:
    """Watches the running event loop until :meth:`close`.

    :param bound_ns: how long the loop may be blocked before that is logged.
    :param now_ns: a clock.
    """

    def __init__(self, bound_ns: int, now_ns: Callable[[], int] = clock.now_ns) -> None:
        self._bound_ns = bound_ns
        self._now_ns = now_ns
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._cpu_ns = clock.cpu_clock_of_this_thread() or clock.cpu_ns
        self.delays = [0] * (len(BOUNDS_NS) + 2)
        """How many beats were late by at most each of ``BOUNDS_NS``, or more; then the sum of the delays in
        ns."""
        self.count = 0
        """Pauses longer than the bound."""
        self._unsaid = 0
        self._said_ns = now_ns() - PERIOD_NS
        # Written by the thread; the loop takes it once it beats again.
        self._seen: Seen | None = None
        self._has_said_still = False
        self._is_closed = False
        self._watchdog: _Watchdog | None = None
        self._due_ns = self._cpu_before_ns = 0
        try:
            self._watchdog = _Watchdog(self._look)
        except (OSError, AttributeError):
            logger.debug("this system has no timerfd: what holds the event loop is not named")
        self._schedule()

    def __repr__(self) -> str:
        return f"<Stalls {self.count} pauses of more than {self._bound_ns / 1e6:g} ms>"

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._is_closed = True
        self._timer.cancel()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def restart(self) -> None:
        """Forget the pause that ends now, because it was intended."""
        self._timer.cancel()
        self._seen, self._has_said_still = None, False
        self._schedule()

    def _schedule(self) -> None:
        # Timers of asyncio and uvloop may be a millisecond early or late.
        self._due_ns = self._now_ns() + int(BEAT_S * 1e9)
        self._cpu_before_ns = self._cpu_ns()
        if self._watchdog is not None:
            self._watchdog.put_off(self._due_ns + self._bound_ns)
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        late_ns = max(0, self._now_ns() - self._due_ns)
        delays = self.delays
        delays[bisect_left(BOUNDS_NS, late_ns)] += 1
        delays[-1] += late_ns
        if late_ns > self._bound_ns:
            self.count += 1
            self._say(late_ns)
        self._schedule()

    def _say(self, late_ns: int) -> None:
        """Log a pause that is over, if none was logged recently."""
        seen, self._seen = self._seen, None
        now_ns = self._now_ns()
        was_said, self._has_said_still = self._has_said_still, False
        if now_ns - self._said_ns < PERIOD_NS and not was_said:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more pauses since the last such line)" if self._unsaid else ""
        self._said_ns, self._unsaid = now_ns, 0
        cpu_ns = self._cpu_ns() - self._cpu_before_ns
        logger.warning(
            "the event loop was held for %d ms, while its thread computed for %d ms%s: %s",
            *(late_ns // 1_000_000, cpu_ns // 1_000_000, more, _told(seen)),
        )

    def _look(self) -> int | None:
        """Look at what blocks the loop. Runs in the watchdog's thread; returns when to look again."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or self._is_closed:
            return None
        now_ns = self._now_ns()
        held_ns = now_ns - self._due_ns
        if held_ns < self._bound_ns:
            return None  # The loop beat between the timer and this line.
        if self._seen is None:
            self._seen = describe(frame)
        if held_ns < STILL_NS:
            return self._due_ns + max(STILL_NS, 2 * self._bound_ns)
        if not self._has_said_still:
            self._has_said_still = True
            logger.error(
                "the event loop has been held for %d ms, and still is: %s",
                *(held_ns // 1_000_000, _told(describe(frame))),
            )
        return None


class _Watchdog:
    """A thread that sleeps until the time last set, however often it is postponed."""

    def __init__(self, look: Callable[[], int | None]) -> None:
        self._look = look
        self._timer = Timerfd(is_blocking=True)
        # Both threads set it.
        self._setting = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="asynctrt-stalls", daemon=True)
        self._thread.start()

    def put_off(self, when_ns: int) -> None:
        with self._setting:
            self._timer.set(when_ns)

    def close(self) -> None:
        self._is_closed = True
        self.put_off(0)
        self._thread.join(THREAD_S)
        if not self._thread.is_alive():
            self._timer.close()

    def _run(self) -> None:
        while True:
            os.read(self._timer.fd, 8)
            if self._is_closed:
                return
            try:
                again_ns = self._look()
            except Exception:
                logger.exception("failed to look at what holds the event loop")
                return
            # If the loop has beaten meanwhile, this overwrites its time, and the next beat sets it again.
            if again_ns is not None and not self._is_closed:
                self.put_off(again_ns)


def describe(frame: FrameType) -> Seen:
    """Return a thread's activity, given its innermost frame."""
    works: list[str] = []
    stack: list[str] = []
    for current in _outwards(frame):
        if len(stack) < FRAMES_MAX:
            stack.append(_place(current))
        for value in list(current.f_locals.values()):
            work = _work(value)
            if work and work not in works:
                works.append(work)
    return Seen(", ".join(works), " < ".join(stack))


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    """Yield frames from the innermost, up to the event loop's own."""
    current: FrameType | None = frame
    while current is not None and not any(part in current.f_code.co_filename for part in LOOPS):
        yield current
        current = current.f_back


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else path.name
    return f"{frame.f_code.co_qualname} ({name}:{frame.f_lineno})"


def _work(value: Any) -> str:
    """Describe the work that a local variable reveals; empty if it reveals none."""
    kind = type(value)
    if kind is HttpRequest:
        return f"{value.method.decode('latin-1'):.20} {value.path.decode('latin-1'):.200}"
    if kind is ServedModel or isinstance(value, ModelCodec):
        return f"model {value.name} version {value.version}"
    return ""


def _told(seen: Seen | None) -> str:
    if seen is None or not seen.stack:
        return "no Python code was seen: the process had no CPU, or the event loop itself was at work"
    return f"{seen.work}: {seen.stack}" if seen.work else seen.stack
