"""The memory that this process may use, on its machine or in its container."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")

V1_UNLIMITED: Final = 1 << 60
"""A limit of a version 1 cgroup that is not smaller than this means no limit."""


class Cgroup:
    """The control group of this process, of version 2 or 1, and its parent groups."""

    def __init__(self, root: Path = ROOT) -> None:
        self._top = root / "sys/fs/cgroup"
        self._paths = {}
        for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", maxsplit=2)
            for controller in controllers.split(","):
                self._paths[controller] = path.lstrip("/")

    def memory_limit(self) -> int | None:
        """Return the memory limit in bytes, or ``None`` without a limit."""
        found = []
        for folder in self._folders("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                limit = text_of(folder / name) or ""
                if limit.isdigit() and int(limit) < V1_UNLIMITED:
                    found.append(int(limit))
        return min(found, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the groups, innermost first. In a container only some are visible."""
        for top, path in (
            (self._top / controller, self._paths.get(controller)),
            (self._top, self._paths.get("")),
        ):
            if path is None:
                continue
            inner = top / path
            while inner != top and top in inner.parents:
                yield inner
                inner = inner.parent
            yield top


def total_memory(root: Path = ROOT) -> int | None:
    """Return the machine's memory in bytes, or ``None`` if it is not known."""
    kib = field_of(root / "proc/meminfo", "MemTotal:")
    return None if kib is None else kib * 1024


def available_memory(root: Path = ROOT) -> int | None:
    """Return how many bytes of memory Linux can provide without swapping, or ``None`` if it is not known."""
    kib = field_of(root / "proc/meminfo", "MemAvailable:")
    return None if kib is None else kib * 1024


def memory_nbytes(root: Path = ROOT) -> int | None:
    """Return the bytes of memory that this process may use: the machine's memory or its container's limit."""
    known = [nbytes for nbytes in (total_memory(root), Cgroup(root).memory_limit()) if nbytes is not None]
    return min(known, default=None)


def field_of(path: Path, name: str) -> int | None:
    """Return the number that follows a name at the start of a line."""
    for line in (text_of(path) or "").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def text_of(path: Path) -> str | None:
    """Return a file's stripped text, or ``None`` if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
