"""The only module that reads a clock. Other modules receive the time, or call functions of this module."""

import threading
import time
from collections.abc import Callable
from typing import Final

NEVER_NS: Final = 2**62
"""A time later than any other, in 146 years. Twice as much still fits into 63 bits, as timers need."""

now_ns: Callable[[], int] = time.monotonic_ns
"""Monotonic time in ns, on the same base as the loops' ``loop.time()``."""


cpu_ns: Callable[[], int] = time.process_time_ns
"""Total CPU time in ns of all threads of the process."""


sleep_s: Callable[[float], None] = time.sleep
"""Let the calling thread sleep for a number of seconds. Not for a thread with an event loop."""


own_cpu_ns: Callable[[], int] = time.thread_time_ns
"""CPU time in ns of the calling thread."""


def cpu_clock_of_this_thread() -> Callable[[], int]:
    """Return a function that reads, from any thread, the CPU time in ns of the thread that calls this.

    Linux numbers these clocks by thread. The C library's way needs the thread's ``get_ident()``, which
    differs if gevent has patched ``threading``.
    """
    clock_id = ~threading.get_native_id() << 3 | 6
    return lambda: time.clock_gettime_ns(clock_id)


def wall_ns(at_ns: int) -> int:
    """Convert a time of :func:`now_ns` to the wall clock, in ns since 1970."""
    return time.time_ns() - time.monotonic_ns() + at_ns


def wall_ms(at_ns: int) -> int:
    """Convert as :func:`wall_ns` does, to ms."""
    return wall_ns(at_ns) // 1_000_000
