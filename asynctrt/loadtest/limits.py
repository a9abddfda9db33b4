"""Limits on the requests that this machine can keep in flight: open files and memory."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctrt._util.cgroup import field_of, memory_nbytes
from asynctrt._util.process import raise_open_files

OPEN_FILES: Final = Path("/proc/self/fd")
MEMORY: Final = Path("/proc/meminfo")

SPARE_FILES: Final = 64
"""File descriptors reserved for everything but requests: files of modules, pipes, the event loop."""

REQUEST_NBYTES: Final = 32 << 10
"""Approximate memory of a request in flight besides its body: a task, a connection, kernel buffers."""

MEMORY_SHARE: Final = 0.5
"""Largest share of the available memory to use."""


@dataclass(frozen=True, slots=True)
class Room:
    """The number of requests that one process can have in flight, and the reason for this limit."""

    requests: int
    limit: str


def room(*, body_nbytes: int, has_connections: bool, processes: int = 1) -> Room:
    """Return how many requests this process can have in flight.

    With ``has_connections``, raise the process's soft limit on open files first.

    :param body_nbytes: the bytes of one request.
    :param has_connections: whether each request uses a separate connection.
    :param processes: the number of processes that share the machine's memory.
    """
    free = 1024 * (field_of(MEMORY, "MemAvailable:") or sys.maxsize)
    memory = MEMORY_SHARE * min(free, memory_nbytes() or free) / processes
    by_memory = max(1, int(memory / (REQUEST_NBYTES + body_nbytes)))
    found = Room(by_memory, f"the memory of this machine has room for {by_memory:,} in a process")
    if has_connections:
        files = raise_open_files()
        unused = files - (len(list(OPEN_FILES.iterdir())) if OPEN_FILES.is_dir() else 0)
        by_files = max(1, unused - SPARE_FILES)
        if by_files < by_memory:
            found = Room(by_files, f"a process may have {files:,} open files (ulimit -n)")
    return found
