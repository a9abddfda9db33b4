"""Read untrusted files, write files completely or not at all, and lock files."""

import errno
import fcntl
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import DEFAULT_BUFFER_SIZE, BufferedReader
from pathlib import Path
from typing import Any, Final

from asynctrt._util.cancellation import current
from asynctrt.errors import OptionsError, UsageError

CONFIG_NBYTES_MAX: Final = 1 << 20
"""The size limit of files written by hand: settings, tokens, certificates."""

KEY_PARTS_MAX: Final = 100
LONG_KEY: Final = re.compile(rf"(?<![\w-])(?:[\w-]++\.){{{KEY_PARTS_MAX}}}")
"""A key in TOML with more parts than any needs."""

WAIT_S: Final = 0.05
"""Seconds between two attempts to get a lock that is held elsewhere."""


class SpecialFileError(OSError):
    """A file to read is not a regular file, and so may be endless; or it is too large, or lies elsewhere."""


def is_there(path: str | Path) -> bool:
    """Return whether a file or folder of this name exists; false for a name that is too long."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def open_regular(
    path: str | os.PathLike[str], *, within: Path | None = None, follow: bool = True
) -> BufferedReader:
    """Open a regular file for reading. Refuse a pipe, which might block, and a device, which has no end.

    :param within: the folder that the file must lie in, whatever links lead to it.
    :param follow: whether the file itself may be a link.
    :raises SpecialFileError: if it is not a regular file, or lies elsewhere.
    :raises OSError: if it cannot be opened; ``IsADirectoryError`` for a folder.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise SpecialFileError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if within is not None:
            # Links may change at any time, so check the file that is open.
            real = check_within(path, within)
            if not os.path.samestat(status, real.stat()):
                raise SpecialFileError(errno.EINVAL, "it was replaced meanwhile", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_toml(path: Path, nbytes_max: int, what: str) -> dict[str, Any]:
    """Read a TOML file of at most ``nbytes_max`` bytes.

    :param what: what it is, for messages.
    :raises UsageError: if it cannot be read.
    :raises OptionsError: if it is not valid TOML.
    """
    try:
        text = read_regular(path, nbytes_max).decode()
        if LONG_KEY.search(text):  # For one of 100,000 parts, tomllib would need 20 GB.
            raise OptionsError(f"{str(path)!r} has a key of more than {KEY_PARTS_MAX} parts")
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {what} {str(path)!r}: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise OptionsError(f"{str(path)!r} is not valid TOML: {error}") from error


def check_within(path: str | os.PathLike[str], folder: Path) -> Path:
    """Resolve a path that may be a link, and check that it lies in a folder.

    :raises SpecialFileError: if it lies elsewhere.
    """
    real, root = os.path.realpath(path), os.path.realpath(folder)
    if os.path.commonpath([real, root]) != root:
        raise SpecialFileError(errno.EXDEV, f"it is a link out of {os.fspath(folder)!r}", os.fspath(path))
    return Path(real)


def foreign_access(path: Path, status: os.stat_result) -> str | None:
    """Return how a user other than this one and root can change a file or folder; ``None`` if none can."""
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o022 and status.st_uid in (os.getuid(), 0):
        return None
    return f"{str(path)!r} belongs to another user, or can be written by others (mode {mode:o})"


def make_private(folder: Path) -> None:
    """Make a folder that only this user can access, and its missing parents.

    :raises OSError: if that is not possible.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def read_regular(
    path: str | os.PathLike[str],
    nbytes_max: int,
    *,
    within: Path | None = None,
) -> bytes:
    """Read a whole regular file: see :func:`open_regular`.

    :raises SpecialFileError: also if the file has more than ``nbytes_max`` bytes.
    """
    with open_regular(path, within=within) as file:
        # Python allocates the size that it is asked to read, however small the file is.
        content = file.read(min(nbytes_max, os.fstat(file.fileno()).st_size) + 1)
        while len(content) <= nbytes_max and (more := file.read(DEFAULT_BUFFER_SIZE)):
            content += more
    if len(content) > nbytes_max:
        raise SpecialFileError(errno.EFBIG, f"it has more than {nbytes_max:,} bytes", os.fspath(path))
    return content


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write a file completely or not at all. A pipe or a device such as ``/dev/stdout`` is written directly.

    :param mode: the file's mode. While the file is written, its mode never allows more.
    :raises UsageError: if the disk is full, the folder is missing, and so on.
    """
    # An error's text may contain a lone surrogate, which UTF-8 cannot encode.
    raw = content.encode(errors="replace") if isinstance(content, str) else content
    temporary = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(raw)
            return
        target = Path(os.path.realpath(path))  # A link stays a link.
        descriptor, temporary = tempfile.mkstemp(".tmp", f".{target.name}.", target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
        temporary = None
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool | None:
    """Try to lock an open file until it is closed.

    Return false if it is locked elsewhere, and ``None`` if its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # A network file system may not support locks.
        return None
    return True


@contextmanager
def locked(path: Path, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock that only one thread of one process can hold at a time. It ends with its process.

    :param path: the file to lock. It is created if it does not exist, and is not removed.
    :param waiting: called before waiting if the lock is held elsewhere.
    :raises UsageError: if the file cannot be made, or this thread's work is cancelled while it waits.
    """
    cancellation = current()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be made, to be locked: {error.strerror}") from error
    try:
        while (is_locked := _try_lock(descriptor)) is not True:
            if is_locked is None:
                raise UsageError(
                    f"{str(path)!r} cannot be locked: its file system has no locks. Choose another folder"
                )
            if waiting is not None:
                waiting()
                waiting = None
            if cancellation.wait(WAIT_S):
                raise UsageError(f"the wait for the lock on {str(path)!r} was interrupted")
        yield
    finally:
        os.close(descriptor)
