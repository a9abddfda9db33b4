"""Write files completely or not at all."""

import os
import tempfile
from pathlib import Path

from asynctrt.errors import UsageError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all. A pipe or a device such as ``/dev/stdout`` is written directly.

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
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
        temporary = None
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
