"""Write files completely or not at all, and lock them against other processes."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asynctrt.errors import UsageError


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write a file completely or not at all. A pipe or a device such as ``/dev/stdout`` is written directly.

    :param mode: who may read it afterwards. It is never more than that meanwhile.
    :raises UsageError: if the disk is full, the folder is missing, and so on.
    """
    # The text of an error may contain half of a surrogate pair, which UTF-8 cannot encode.
    raw = content.encode(errors="replace") if isinstance(content, str) else content
    temporary = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(raw)
            return
        target = Path(os.path.realpath(path))  # A link stays a link.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
        temporary = None
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


@contextmanager
def locked(path: Path, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock that one thread of one process has at a time; it ends with its process, however that ends.

    :param path: a file to lock, which is made if it is not there, and stays.
    :param waiting: called if somebody else has it, before waiting for it.
    :raises UsageError: if the file cannot be made.
    """
    # Not before it is needed: Windows has none.
    import fcntl  # noqa: PLC0415

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be made, to be locked: {error.strerror}") from error
    try:
        if waiting is not None:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                waiting = None
        if waiting is not None:
            waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
