"""The only module that reads a clock. Other modules are given the time, or functions of this module."""

import time
from collections.abc import Callable

now_ns: Callable[[], int] = time.monotonic_ns
"""Monotonic time in ns, on the same base as the loops' ``loop.time()``."""


cpu_ns: Callable[[], int] = time.process_time_ns
"""CPU time in ns that all threads of the process have used together."""


sleep_s: Callable[[float], None] = time.sleep
"""Let the calling thread sleep for so many seconds. Not for a thread with an event loop."""


own_cpu_ns: Callable[[], int] = time.thread_time_ns
"""CPU time in ns that the calling thread has used."""


def cpu_clock_of_thread(ident: int) -> Callable[[], int] | None:
    """Return a function that reads the CPU time in ns that the running thread ``ident`` has used.

    Return ``None`` on platforms without POSIX's ``pthread_getcpuclockid``.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    clock_id = time.pthread_getcpuclockid(ident)
    return lambda: time.clock_gettime_ns(clock_id)


def wall_ns(at_ns: int) -> int:
    """Convert a time of :func:`now_ns` to the wall clock, in ns since 1970."""
    return time.time_ns() - time.monotonic_ns() + at_ns


def wall_ms(at_ns: int) -> int:
    """Convert as :func:`wall_ns` does, to ms."""
    return wall_ns(at_ns) // 1_000_000
