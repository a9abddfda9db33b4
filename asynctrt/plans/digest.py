"""Open a model file, and compute the digest that identifies it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from asynctrt._util.files import open_regular
from asynctrt.errors import ModelError, ModelNotFoundError


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a model file for reading.

    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it cannot be read.
    """
    try:
        with open_regular(path) as file:
            yield file
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no file {str(path)!r}. Give the path of a TensorRT plan or an .onnx file; the working "
            f"directory is {str(Path.cwd())!r}"
        ) from error
    except IsADirectoryError as error:
        raise ModelNotFoundError(f"{str(path)!r} is a folder. Give the path of a file in it") from error
    except OSError as error:
        raise ModelError(
            f"{str(path)!r} cannot be read: {error.strerror}. Check its owner and mode"
        ) from error


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
