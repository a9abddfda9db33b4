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
from typing import Final

from asynctrt._util.clock import NEVER_NS
from asynctrt._util.forks import in_child, seal
from asynctrt.errors import DeviceUnavailableError

CLOCK_MONOTONIC: Final = 1
ABSOLUTE: Final = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


@cache
def libc() -> ctypes.PyDLL:
    """Return the C library, which ctypes would make new types of functions for at each opening.

    PyDLL, because the calls return at once. CDLL would release the GIL, and then have to wait for it if other
    threads want it. Python itself has ``timerfd`` only since 3.13.
    """
    return ctypes.PyDLL(None, use_errno=True)


def _nothing() -> None:
    """Do nothing: what a closed alarm calls."""


class Alarm:
    """A timer that calls back once for each :meth:`set`, or once for several.

    :param context: the context to run ``callback`` in. Default: the caller's context.
    :raises DeviceUnavailableError: if the system refuses a timer.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None], *, context: Context | None = None
    ) -> None:
        functions = libc()
        self._settime = functions.timerfd_settime
        self._fd: int = functions.timerfd_create(CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise DeviceUnavailableError(
                f"no timer could be made: {os.strerror(ctypes.get_errno())}. Raise the limit of "
                "open files (ulimit -n)"
            )
        # A closed loop drops its readers, and nothing else would close the file descriptor then.
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        in_child(self, Alarm._let_go)
        self._spec = _Itimerspec()
        self._spec_ref = ctypes.byref(self._spec)
        self._armed_ns: int | None = None
        self._callback: Callable[[], object] = callback
        if context is not None:
            self._callback = partial(context.run, callback)
        self._loop = loop
        loop.add_reader(self._fd, self._fire)

    def set(self, when_ns: int) -> None:
        """Ask for a call by ``when_ns``. It may come earlier: then check the time and set the alarm again."""
        if self._fd < 0 or (self._armed_ns is not None and self._armed_ns <= when_ns):
            return
        self._armed_ns = when_ns
        # A value of 0 would disarm the timer.
        self._arm(*divmod(min(max(when_ns, 1), NEVER_NS), 1_000_000_000))

    def close(self) -> None:
        """Stop all further calls, and let go of the callback, whose owner holds the alarm. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._close_fd()
            self._fd = -1
        self._callback = _nothing

    def _let_go(self) -> None:
        """Leave the timer to the parent, in a forked child."""
        seal(self._fd)
        self._fd = -1

    def _arm(self, seconds: int, nanoseconds: int) -> None:
        self._spec.value.seconds, self._spec.value.nanoseconds = seconds, nanoseconds
        if self._settime(self._fd, ABSOLUTE, self._spec_ref, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        self._armed_ns = None
        try:
            self._callback()
        finally:
            # Most callbacks set the timer again, which makes the kernel forget that it has fired.
            if self._armed_ns is None and self._fd >= 0:
                self._arm(0, 0)
