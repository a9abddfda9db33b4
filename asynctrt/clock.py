"""The only module that reads a clock. Everything else is given its time, or this module's functions."""

import time
from collections.abc import Callable

now_ns: Callable[[], int] = time.monotonic_ns
"""Monotonic time in ns, on the same base as the loops' ``loop.time()``."""


cpu_ns: Callable[[], int] = time.process_time_ns
"""CPU time in ns that the process has used, all its threads together."""


own_cpu_ns: Callable[[], int] = time.thread_time_ns
"""CPU time in ns that the calling thread has used."""


def cpu_clock_of_thread(ident: int) -> Callable[[], int] | None:
    """A function that reads the CPU time in ns that the running thread ``ident`` has used.

    ``None`` where the platform has no such clock (it is POSIX's ``pthread_getcpuclockid``).
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    clock_id = time.pthread_getcpuclockid(ident)
    return lambda: time.clock_gettime_ns(clock_id)


def wall_ns(at_ns: int) -> int:
    """What the wall clock said, in ns since 1970, when :func:`now_ns` said ``at_ns``."""
    return time.time_ns() - time.monotonic_ns() + at_ns


def wall_ms(at_ns: int) -> int:
    """As :func:`wall_ns`, in ms."""
    return wall_ns(at_ns) // 1_000_000
