"""The digests of plans that this user has built on this machine, as one way to trust a plan.

Write access to the file decides what runs as this user, so only this user may have it.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asynctrt._util.files import foreign_access, locked, make_private, open_regular, write_whole
from asynctrt.errors import UsageError

RECORDS_MAX: Final = 4096
"""The maximum number of digests kept; the oldest are dropped first."""

FILE_NBYTES_MAX: Final = 1 << 20

LINE: Final = re.compile(r"[0-9a-f]{64}")


def records_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the file of the digests, which need not exist."""
    state = env.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "asynctrt" / "built-here"


def record(digest: str, path: Path | None = None) -> None:
    """Record that this user has built a plan.

    :param digest: the plan's SHA-256, in hexadecimal.
    :param path: the file of the digests. Default: the file of this user.
    :raises UsageError: if the file cannot be written, or other users can write it.
    """
    path = path or records_path()
    try:
        make_private(path.parent)
    except OSError as error:
        raise UsageError(f"{str(path.parent)!r} cannot be made: {error.strerror}") from error
    with locked(path.with_name(path.name + ".lock")):
        known = [one for one in _read(path) if one != digest]
        kept = [*known, digest][-RECORDS_MAX:]
        write_whole(path, "".join(f"{one}\n" for one in kept), mode=0o600)


def is_recorded(digest: str, path: Path | None = None) -> bool:
    """Return whether this user has built a plan.

    :raises UsageError: if the file cannot be read, or other users can write it.
    """
    return digest in _read(path or records_path())


def _read(path: Path) -> list[str]:
    try:
        folder = path.parent.stat()
        with open_regular(path, follow=False) as file:
            status = os.fstat(file.fileno())
            content = file.read(FILE_NBYTES_MAX)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"the digests of plans that were built here cannot be read from {str(path)!r}: {error.strerror}"
        ) from error
    for what, found in ((path.parent, folder), (path, status)):
        access = foreign_access(what, found)
        if access is not None:
            raise UsageError(
                f"{access}, who could let their own plans run: chmod go-w {what}; or remove it, and build "
                "the plans again"
            )
    return [line for line in content.decode(errors="replace").splitlines() if LINE.fullmatch(line)]
