"""Inspect a model file of any kind without running it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asynctrt.plans.plan_file import PlanFile, is_plan, read_beginning, read_plan_file

if TYPE_CHECKING:  # It needs an optional package.
    from asynctrt.plans.onnx_file import OnnxFile

ONNX_SUFFIX: Final = ".onnx"


def inspect(path: str | os.PathLike[str]) -> "PlanFile | OnnxFile":
    """Return what a model file says without running the model. Reads the whole file; blocks.

    :param path: a TensorRT plan, recognised by its content, or an ONNX model.
    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it is neither, or is damaged.
    :raises MissingExtraError: for an ONNX model, if the package ``onnx`` is not installed.
    """
    path = Path(path)
    beginning = read_beginning(path)
    # An ONNX model has no signature. Any other file is read as a plan, whose errors explain the mismatch.
    if not is_plan(beginning) and (path.suffix == ONNX_SUFFIX or beginning[:1] == b"\x08"):
        from asynctrt.plans.onnx_file import read_onnx_file  # noqa: PLC0415  (it is optional)

        return read_onnx_file(path)
    return read_plan_file(path)
