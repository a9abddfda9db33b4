"""ONNX models that are given as objects: a file's content, a session of ONNX Runtime.

They are recognised, and the names of files beside a model are read, without importing ``onnx`` or
``onnxruntime``, which may not be installed.
"""

import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, Protocol, TypeGuard

from asynctrt.errors import show

EXTERNAL: Final = re.compile(rb"\n\x08location\x12")
"""The bytes in an ONNX file before the name of an external file with weights: a field ``location``."""

MORE: Final = 0x80
"""The bit that is set in each byte of that name's length except the last."""

PATH_MAX: Final = 4096
PART_NBYTES: Final = 16 << 20
"""The number of bytes read from the file at once."""


class InferenceSession(Protocol):
    """``onnxruntime.InferenceSession``, as far as it is needed."""

    def get_inputs(self) -> Any:
        """Return the inputs' names, types and shapes."""

    def get_outputs(self) -> Any:
        """Return the outputs' names, types and shapes."""

    def io_binding(self) -> Any:
        """Return a new I/O binding."""


OnnxObject = bytes | InferenceSession


def is_session(model: object) -> TypeGuard[InferenceSession]:
    """Return whether this is an ``onnxruntime.InferenceSession``."""
    return any(
        kind.__name__ == "InferenceSession" and kind.__module__.partition(".")[0] == "onnxruntime"
        for kind in type(model).__mro__
    )


def is_onnx_object(model: object) -> TypeGuard[OnnxObject]:
    """Return whether this is one of the objects that ONNX Runtime can run."""
    return isinstance(model, bytes | bytearray | memoryview) or is_session(model)


def shown(model: object) -> str:
    """Return a description of a given model for messages: a few words, however large the model is."""
    if isinstance(model, str | os.PathLike):
        return repr(os.fspath(model))
    if isinstance(model, bytes | bytearray | memoryview):
        return f"<a model of {memoryview(model).nbytes:,} bytes>"
    return "<an onnxruntime.InferenceSession>" if is_session(model) else show(model)


def external_names(file: BinaryIO) -> Iterator[str]:
    """Yield the names of external files with weights in an ONNX file, and other texts that look like one."""
    content = b""
    while part := file.read(PART_NBYTES):
        content = content[-2 * PATH_MAX :] + part
        for found in EXTERNAL.finditer(content):
            length, at, shift = 0, found.end(), 0
            while at < len(content):
                length |= content[at] % MORE << shift
                shift, at = shift + 7, at + 1
                if content[at - 1] < MORE:
                    break
            if length < PATH_MAX and at + length <= len(content):  # Otherwise the next part has all of it.
                yield os.fsdecode(content[at : at + length]).replace("\0", "?")
