"""The memory that this process may use, on its machine or in its container."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may limit its memory, of version 2 or 1.

    In a container only some are visible.
    """
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / path.lstrip("/")
        yield group
        while group != top:
            group = group.parent
            yield group


def available_memory(root: Path = ROOT) -> int | None:
    """Return how many bytes of memory Linux can provide without swapping, or ``None`` if it is not known."""
    kib = field_of(root / "proc/meminfo", "MemAvailable:")
    return None if kib is None else kib * 1024


def memory_nbytes(root: Path = ROOT) -> int | None:
    """Return the bytes of memory that this process may use: the machine's memory or its container's limit."""
    kib = field_of(root / "proc/meminfo", "MemTotal:")
    known = [] if kib is None else [kib * 1024]
    for group in _groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = text_of(group / name) or ""
            if limit.isdigit():  # Version 1 writes no limit as one beyond any machine's memory.
                known.append(int(limit))
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
