"""The digest that identifies a model file."""

import hashlib
from io import BufferedReader
from pathlib import Path

from asynctrt.backends.tensorrt.plan import opened


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Reads the whole file, part by part.

    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it cannot be read.
    """
    with opened(path) as file:
        return digest_of_file(file)


def digest_of_file(file: BufferedReader) -> str:
    """Return the SHA-256 of the whole of an open file, in hexadecimal."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
