"""How many requests this machine can keep in flight: open files and memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctrt._util.process import raise_open_files
from asynctrt.loadtest.machine import available_nbytes

OPEN_FILES: Final = Path("/proc/self/fd")

SPARE_FILES: Final = 64
"""Descriptors for everything but requests: files of modules, pipes, the event loop."""

REQUEST_NBYTES: Final = 32 << 10
"""About what a request in flight takes beside its body: a task, a connection, buffers of the kernel."""

MEMORY_SHARE: Final = 0.5
"""How much of the memory that is available may be taken."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many requests one process can have in flight, and by what that is limited."""

    requests: int
    limit: str


def room(*, body_nbytes: int, has_connections: bool, processes: int = 1) -> Room:
    """Return how many requests this process can have in flight. Raises its soft limit of open files.

    :param body_nbytes: the bytes of one request.
    :param has_connections: whether each has a connection of its own.
    :param processes: how many share the memory of the machine.
    """
    memory = MEMORY_SHARE * available_nbytes() / processes
    by_memory = max(1, int(memory / (REQUEST_NBYTES + body_nbytes)))
    found = Room(by_memory, f"the memory of this machine has room for {by_memory:,} in a process")
    if has_connections:
        files = raise_open_files()
        free = files - (len(list(OPEN_FILES.iterdir())) if OPEN_FILES.is_dir() else 0)
        by_files = max(1, free - SPARE_FILES)
        if by_files < by_memory:
            found = Room(by_files, f"a process may have {files:,} open files (ulimit -n)")
    return found
