"""Settings of a whole process, which a command may change and a library may not."""

import gc
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

DEVICE_LOST: Final = 75
"""The exit status of a server whose device was lost: EX_TEMPFAIL of sysexits.h, "try again"."""

SWITCH_INTERVAL_S: Final = 0.0005
"""How soon a computing thread gets the GIL back from the loop. Python's own 5 ms is too long for a server."""

GC_THRESHOLDS: Final = (10_000, 10, 10)
"""Thresholds of the garbage collector for a process of ours. With Python's own, of which the first is 700, it
goes through hundreds of requests in flight again and again: that took a fifth of a worker's CPU time."""


IN_WORKER: Final = "_ASYNCTRT_IN_WORKER"
"""The environment variable by which a worker, and whatever process it starts, is known."""


def enter_worker() -> None:
    """Make this process known as a worker, to itself and to the processes that it starts."""
    os.environ[IN_WORKER] = "1"


def is_in_worker() -> bool:
    """Return whether this process is a worker, or was started by one."""
    return IN_WORKER in os.environ


def shorten_switch_interval() -> None:
    """Hand the GIL to threads that compute sooner than Python does by default."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def raise_open_files() -> int:
    """Raise this process's soft limit of open files as far as it may, and return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # What a system allows may be less than it says.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def add_cwd_to_path() -> None:
    """Add the working directory to ``sys.path``, as ``python -m`` does, to find ``module:attribute``."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))


def freeze_gc() -> None:
    """Exempt everything that exists from garbage collection, whose full passes would block the loop.

    Call it once everything is loaded.
    """
    gc.collect()
    gc.freeze()


def calm_gc() -> None:
    """Have garbage collected seldom in a process of ours, and never what exists: see :func:`freeze_gc`."""
    freeze_gc()
    gc.set_threshold(*GC_THRESHOLDS)


def tune_process() -> None:
    """Tune this process to answer promptly. Call it once, after all models and modules are loaded.

    It exempts all that exists from garbage collection (``gc.freeze``), whose full passes hold the event
    loop for tens of milliseconds, and makes Python hand the GIL over every 0.5 ms instead of 5. Both are
    settings of the whole process, so no engine does this by itself; ``asynctrt serve`` does.
    """
    shorten_switch_interval()
    freeze_gc()
