"""Settings of a whole process, which a command may change and a library may not."""

import gc
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

INTERRUPTED: Final = 130
"""The exit status after Ctrl-C, as in a shell: 128 plus the number of SIGINT."""

DEVICE_LOST: Final = 75
"""The exit status of a server whose device was lost: EX_TEMPFAIL of sysexits.h, "try again"."""

SWITCH_INTERVAL_S: Final = 0.0005
"""How soon a computing thread gets the GIL back from the loop. Python's default of 5 ms is too long for a
server."""

GC_THRESHOLD: Final = 10_000
"""New objects between two collections in our processes. With Python's default, 700, the collector scans
hundreds of requests in flight again and again, which took a fifth of a worker's CPU time."""

IN_WORKER: Final = "_ASYNCTRT_IN_WORKER"
"""The environment variable that marks a worker and every process that it starts."""


def enter_worker() -> None:
    """Mark this process, and the processes that it starts, as a worker."""
    os.environ[IN_WORKER] = "1"


def is_in_worker() -> bool:
    """Return whether this process is a worker, or was started by one."""
    return IN_WORKER in os.environ


def shorten_switch_interval() -> None:
    """Make Python hand the GIL to computing threads sooner than by default."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def open_files_max() -> int:
    """Return the maximum number of open files of this process once its limit is raised."""
    return _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _open_files(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def raise_open_files() -> int:
    """Raise this process's soft limit of open files as far as possible, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # A system may allow less than it reports.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from importlib import import_module; import_module(sys.argv.pop(1)).main()"
)
"""The program of a child process: run a module's ``main`` with a given ``sys.path``."""

SAFE_PATH: Final = "PYTHONSAFEPATH"


def add_cwd_to_path() -> None:
    """Search the working directory for the module of ``module:attribute`` if it is not installed.

    Other users may be able to write there, so it comes last: no file there replaces an installed module.
    """
    folder = str(Path.cwd())
    if "" not in sys.path and folder not in sys.path:
        sys.path.append(folder)


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a child process that calls ``main`` in one of our modules.

    From its first import on, the child finds modules where this process does. By default Python would search
    the working directory first.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]
    own = str(Path(__file__).parents[2])
    if own not in path:
        path.append(own)
    return [sys.executable, "-P", "-c", PROGRAM, json.dumps(path), module, *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep Python processes that are started inside the block from importing from the working directory."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def freeze_gc() -> None:
    """Exempt all existing objects from garbage collection, whose full passes would block the loop.

    Call this once everything is loaded.
    """
    gc.collect()
    gc.freeze()


def calm_gc() -> None:
    """Collect garbage rarely in one of our processes, and exempt existing objects: :func:`freeze_gc`."""
    freeze_gc()
    gc.set_threshold(GC_THRESHOLD)


def tune_process() -> None:
    """Tune this process to answer promptly. Call it once, after all models and modules are loaded.

    It exempts all existing objects from garbage collection (``gc.freeze``), because full passes hold the
    event loop for tens of milliseconds, and makes Python hand over the GIL every 0.5 ms instead of 5. Both
    settings affect the whole process, so no engine applies them by itself; ``asynctrt serve`` does.
    """
    shorten_switch_interval()
    freeze_gc()
