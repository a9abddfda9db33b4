"""Settings of a whole process, which a command may change and a library may not."""

import gc
import json
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
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


def open_files_max() -> int:
    """Return how many open files this process may have once its limit is raised."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def raise_open_files() -> int:
    """Raise this process's soft limit of open files as far as it may, and return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # What a system allows may be less than it says.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


PROGRAM: Final = (
    "import json, sys; sys.path[:], last = json.loads(sys.argv.pop(1)); "
    "from importlib import import_module; import_module('asynctrt._util.process').look_last(last); "
    "import_module(sys.argv.pop(1)).main()"
)
"""What a child process runs: the ``main`` of a module, with a given ``sys.path``."""

SAFE_PATH: Final = "PYTHONSAFEPATH"


class _InstalledFirst:
    """Finds top-level modules everywhere but in the folders where they are looked for last.

    The end of ``sys.path`` does not suffice: a module there comes before a namespace package, as ``google``
    and ``cuda`` are, wherever that is.
    """

    def __init__(self) -> None:
        self.last: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, unless it is in one of these folders or is no top-level module."""
        if path is not None:
            return None
        return PathFinder.find_spec(name, [entry for entry in sys.path if entry not in self.last], target)


_installed_first: Final = _InstalledFirst()


def look_last(folders: Sequence[str]) -> None:
    """Let modules be found in these folders that are found nowhere else."""
    new = [folder for folder in folders if folder not in sys.path]
    if not new:
        return
    if _installed_first not in sys.meta_path:
        at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(at, _installed_first)
    _installed_first.last += new
    sys.path += new


def add_cwd_to_path() -> None:
    """Let ``module:attribute`` be found in the working directory, if it is not installed.

    Others may be able to write there: no file there may take the place of an installed package.
    """
    if "" not in sys.path:
        look_last([str(Path.cwd())])


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a child process that calls ``main`` in a module of ours.

    It finds modules where this process does, from the first import on. Python by itself would look for them
    in the working directory first.
    """
    last = _installed_first.last
    path = [entry for entry in sys.path if isinstance(entry, str) and entry not in last]
    own = str(Path(__file__).parents[1])
    if own not in path:
        path.append(own)
    return [sys.executable, "-P", "-c", PROGRAM, json.dumps([path, last]), module, *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep the Python processes that are started meanwhile from importing from the working directory."""
    before, path = os.environ.get(SAFE_PATH), sys.path[:]
    os.environ[SAFE_PATH] = "1"
    sys.path[:] = [entry for entry in path if entry not in _installed_first.last]
    try:
        yield
    finally:
        sys.path[:] = path
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


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
