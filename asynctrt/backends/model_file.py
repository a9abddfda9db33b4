"""Open the file of a model, of whichever kind, with an error that says what is wrong with its path."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENAMETOOLONG, ENOENT, ENOTDIR
from io import BufferedReader
from pathlib import Path

from asynctrt._util.files import open_regular
from asynctrt.errors import DESCRIBED_MAX, ModelError, ModelNotFoundError, bounded


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a plan or another model file for reading; a pipe, which would block, is refused."""
    if not _can_exist(path):
        raise _missing(path)
    try:
        with open_regular(path) as file:
            yield file
    except IsADirectoryError as error:
        raise ModelNotFoundError(f"{_shown(path)} is a folder. Give the path of a file in it") from error
    except OSError as error:
        if error.errno in (ENOENT, ENOTDIR, ENAMETOOLONG):
            raise _missing(path) from error
        raise ModelError(
            f"{_shown(path)} cannot be read: {error.strerror}. Check its owner and mode"
        ) from error


def _can_exist(path: Path) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # A lone surrogate.
        return False


def _missing(path: Path) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"there is no file {_shown(path)}. Give the path of an .onnx file or a TensorRT plan; the working "
        f"directory is {str(Path.cwd())!r}"
    )


def _shown(path: Path) -> str:
    return repr(bounded(str(path), DESCRIBED_MAX // 2))
