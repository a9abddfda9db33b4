"""Wake the event loop at a given time, to within tens of microseconds.

The loops' own timers are not precise enough: uvloop rounds to the nearest millisecond, so that 0.3 ms fires
after 2 µs, and asyncio rounds up. A Linux ``timerfd`` in the loop's selector is punctual on both
(tests/benchmarks/lateness.py).
"""

import asyncio
import ctypes
import os
import weakref
from collections.abc import Callable
from contextvars import Context
from functools import cache, partial
from typing import Final, Protocol

from asynctrt._util.forks import in_child, seal

FAR_NS: Final = 2**62
"""A time later than any alarm, and within the range of the kernel's and the loops' timers."""

TICKS_BEFORE_NS: Final = 2_000_000
"""Without a timerfd, the loop's timer waits until this long before the alarm, and ticks cover the rest."""


class Alarm(Protocol):
    """A timer that calls back once for each :meth:`set`, or once for several."""

    def set(self, when_ns: int) -> None:
        """Ask for a call by ``when_ns``. It may come earlier: then check the time and set the alarm again."""

    def close(self) -> None:
        """Stop all further calls, and let go of the callback, whose owner holds the alarm. Idempotent."""


def _nothing() -> None:
    """Do nothing: what a closed alarm calls."""


def create_alarm(
    loop: asyncio.AbstractEventLoop,
    callback: Callable[[], None],
    now_ns: Callable[[], int],
    *,
    context: Context | None = None,
) -> Alarm:
    """Make the most punctual alarm that this platform has.

    :param context: the context to run ``callback`` in. Default: the caller's context, either now or at a call
        of :meth:`Alarm.set`.
    """
    try:
        return TimerfdAlarm(loop, callback if context is None else partial(context.run, callback))
    except (OSError, AttributeError, NotImplementedError):
        return TickAlarm(loop, callback, now_ns, context=context)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


@cache
def libc() -> ctypes.PyDLL:
    """Return the C library, which ctypes would make new types of functions for at each opening.

    PyDLL, because the calls return at once. CDLL would release the GIL, and then have to wait for it if other
    threads want it.
    """
    return ctypes.PyDLL(None, use_errno=True)


class Timerfd:
    """A ``timerfd`` on ``CLOCK_MONOTONIC``, through libc, because Python has it only since 3.13.

    :raises OSError: if the system cannot create one.
    :raises AttributeError: if the system does not support timerfd.
    """

    _CLOCK_MONOTONIC = 1
    _ABSOLUTE = 1

    def __init__(self) -> None:
        functions = libc()
        self._settime = functions.timerfd_settime
        self.fd = functions.timerfd_create(self._CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        # A closed loop drops its readers, and nothing else would close the file descriptor then.
        self._close = weakref.finalize(self, os.close, self.fd)
        in_child(self, Timerfd._let_go)
        self._spec = _Itimerspec()
        self._spec_ref = ctypes.byref(self._spec)

    def set(self, when_ns: int) -> None:
        """Fire at a time of the monotonic clock, at once if it has passed. Replaces an earlier time."""
        # A value of 0 would disarm the timer.
        seconds, nanoseconds = divmod(min(max(when_ns, 1), FAR_NS), 1_000_000_000)
        self._spec.value.seconds = seconds
        self._spec.value.nanoseconds = nanoseconds
        self._apply()

    def _let_go(self) -> None:
        """Leave the timer to the parent, in a forked child."""
        seal(self.fd)
        self.fd = -1

    def _apply(self) -> None:
        if self.fd >= 0 and self._settime(self.fd, self._ABSOLUTE, self._spec_ref, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def stop(self) -> None:
        """Disarm the timer until it is set again, and forget that it has fired."""
        self._spec.value.seconds = self._spec.value.nanoseconds = 0
        self._apply()

    def close(self) -> None:
        """Close the file descriptor. No thread may be reading it."""
        self._close()
        self.fd = -1


class TimerfdAlarm:
    """A :class:`Timerfd` in the loop's selector."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._timer = Timerfd()
        self._armed_ns: int | None = None
        self._callback = callback
        self._loop = loop
        loop.add_reader(self._timer.fd, self._fire)

    def set(self, when_ns: int) -> None:
        if self._timer.fd < 0 or (self._armed_ns is not None and self._armed_ns <= when_ns):
            return
        self._armed_ns = when_ns
        self._timer.set(when_ns)

    def close(self) -> None:
        if self._timer.fd >= 0:
            self._loop.remove_reader(self._timer.fd)
            self._timer.close()
        self._callback = _nothing

    def _fire(self) -> None:
        self._armed_ns = None
        try:
            self._callback()
        finally:
            # Most callbacks set the timer again, which makes the kernel forget that it has fired.
            if self._armed_ns is None and self._timer.fd >= 0:
                self._timer.stop()


class TickAlarm:
    """An alarm by the loop's timer until shortly before the time, then by reading the clock each tick."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        callback: Callable[[], None],
        now_ns: Callable[[], int],
        *,
        context: Context | None = None,
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._now_ns = now_ns
        self._context = context
        self._armed_ns: int | None = None
        self._handle: asyncio.Handle | None = None

    def set(self, when_ns: int) -> None:
        if self._armed_ns is not None and self._armed_ns <= when_ns:
            return
        self._armed_ns = when_ns
        if self._handle is not None:
            self._handle.cancel()
        # Even if the time has passed, do not call back from within this call.
        self._schedule(when_ns - self._now_ns())

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        # Earlier than any time, so a late call of `set` does nothing.
        self._armed_ns = -1
        self._callback, self._handle = _nothing, None

    def _approach(self) -> None:
        assert self._armed_ns is not None
        left_ns = self._armed_ns - self._now_ns()
        if left_ns <= 0:
            self._armed_ns = self._handle = None
            self._callback()
        else:
            self._schedule(left_ns)

    def _schedule(self, left_ns: int) -> None:
        """Check again at the next tick or, if much time is left, after most of it."""
        if left_ns > 2 * TICKS_BEFORE_NS:
            delay_s = (min(left_ns, FAR_NS) - TICKS_BEFORE_NS) / 1e9
            self._handle = self._loop.call_later(delay_s, self._approach, context=self._context)
        else:
            self._handle = self._loop.call_soon(self._approach, context=self._context)
