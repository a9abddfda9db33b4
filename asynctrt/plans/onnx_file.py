"""Inspection of an ONNX file without a runtime, and without its external weights."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asynctrt.backends.onnx_axes import UNKNOWN, Declared, read_axes
from asynctrt.backends.tensorrt.plan import opened
from asynctrt.errors import MissingExtraError, ModelError
from asynctrt.plans.digest import digest_of_file
from asynctrt.tensors import varying_dims

try:
    import onnx
    from onnx import TensorProto
except ImportError as error:
    raise MissingExtraError(
        "looking into ONNX files needs the package onnx: pip install 'asynctrt[inspect]'"
    ) from error

Dim = int | str | None
"""A size, a name, or ``None`` for a dimension that has neither."""

TYPES: Final = {"float32": "float", "float64": "double", "sequence": "seq"}
"""ONNX Runtime's names of types that have another name here."""


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """An input or output."""

    name: str
    kind: str
    """``tensor``, ``sequence``, ``map``, ``optional`` or ``sparse_tensor``."""
    dtype: str | None
    """NumPy's name, ``string``, or ``None``."""
    dims: tuple[Dim, ...] | None
    """The dimensions; ``None`` if not even their number is known."""


@dataclass(frozen=True, slots=True)
class BatchAxes:
    """The axis that counts rows, and whether batching is possible."""

    rows: str | int | None
    """The name of the axis that counts rows, or its fixed size; ``None`` if it has no name."""
    refusal: str | None
    """Why the model cannot be opened, or ``None``."""
    alone: str
    """Why each request runs alone, as far as shapes tell; empty if rows may share batches."""
    doubt: str
    """The question that opening the model settles by running made-up rows; empty if there is none."""
    free_dims: tuple[str, ...]
    """Names of dimensions besides rows that differ from request to request."""


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """The content of an ONNX file, found without a runtime."""

    path: str
    nbytes: int
    digest: str
    """SHA-256 of the file itself, in hexadecimal."""
    ir_version: int
    opsets: dict[str, int]
    """The version of each operator set."""
    producer: str
    model_version: int
    metadata: dict[str, str]
    inputs: tuple[OnnxTensor, ...]
    outputs: tuple[OnnxTensor, ...]
    batching: BatchAxes


def read_onnx_file(path: Path) -> OnnxFile:
    """Read an ONNX file without its external weights.

    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it is not an ONNX model.
    """
    with opened(path) as file:
        digest, nbytes = digest_of_file(file), os.fstat(file.fileno()).st_size
        file.seek(0)
        try:
            model = onnx.load_model_from_string(file.read())
        except Exception as error:
            said = str(error).strip().split("\n")[0] or type(error).__name__
            raise ModelError(f"{str(path)!r} is not an ONNX model: {said}. Export the model again") from error
    if not model.ir_version or not model.graph.output:
        raise ModelError(
            f"{str(path)!r} is not an ONNX model, or an empty one: it has no version or no outputs. Export "
            "the model again"
        )
    return _describe(path, nbytes, digest, model)


def _describe(path: Path, nbytes: int, digest: str, model: Any) -> OnnxFile:
    constants = {_text(tensor.name) for tensor in model.graph.initializer}
    inputs = tuple(_tensor(info) for info in model.graph.input if _text(info.name) not in constants)
    outputs = tuple(_tensor(info) for info in model.graph.output)
    return OnnxFile(
        path=str(path),
        nbytes=nbytes,
        digest=digest,
        ir_version=model.ir_version,
        opsets={_text(one.domain) or "ai.onnx": one.version for one in model.opset_import},
        producer=" ".join(filter(None, map(_text, (model.producer_name, model.producer_version)))),
        model_version=model.model_version,
        metadata={_text(one.key): _text(one.value) for one in model.metadata_props},
        inputs=inputs,
        outputs=outputs,
        batching=find_batching(path.stem, inputs, outputs),
    )


def _tensor(info: Any) -> OnnxTensor:
    kind = str(info.type.WhichOneof("value") or "unknown").removesuffix("_type")
    if kind != "tensor":
        return OnnxTensor(_text(info.name), kind, None, None)
    given = info.type.tensor_type
    dims = None
    if given.HasField("shape"):
        dims = tuple(map(_dim, given.shape.dim))
    return OnnxTensor(_text(info.name), kind, _dtype(given.elem_type), dims)


def _dim(dim: Any) -> Dim:
    if dim.dim_param:
        return _text(dim.dim_param)
    # Some exporters write -1 for an unknown size.
    return int(dim.dim_value) if dim.HasField("dim_value") and dim.dim_value >= 0 else None


def _dtype(number: int) -> str:
    """Return NumPy's name of a type, or ONNX's own where NumPy has none."""
    if number == TensorProto.STRING:
        return "string"
    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(number).name)
    except (KeyError, TypeError):
        return f"type {number}"


def _text(given: str | bytes) -> str:
    """Return a string of the file, which protobuf returns as bytes if it is not UTF-8."""
    return given.decode(errors="replace") if isinstance(given, bytes) else given


def find_batching(model: str, inputs: tuple[OnnxTensor, ...], outputs: tuple[OnnxTensor, ...]) -> BatchAxes:
    """Return the axis that counts rows, by the same rules as when an ONNX model is opened."""
    try:
        axes = read_axes(model, [_declared(one) for one in inputs], [_declared(one) for one in outputs])
    except ModelError as error:
        return BatchAxes(None, str(error), "", "", ())
    firsts = [
        one.dims[spec.axis]
        for one, spec in zip(inputs, axes.inputs, strict=True)
        if one.dims and spec.axis is not None
    ]
    names = {str(dim) for dim in firsts if _is_name(dim)}
    rows = axes.rows_fixed if axes.rows_fixed is not None else " or ".join(sorted(names)) or None
    return BatchAxes(None if axes.alone else rows, None, axes.alone, axes.doubt, varying_dims(axes.inputs))


def _declared(one: OnnxTensor) -> Declared:
    """Return a tensor as ONNX Runtime would describe it."""
    if one.kind != "tensor":
        return Declared(one.name, f"{TYPES.get(one.kind, one.kind)}()", ())
    return Declared(one.name, f"tensor({TYPES.get(one.dtype or '', one.dtype)})", tuple(one.dims or ()))


def _is_name(dim: Dim) -> bool:
    return isinstance(dim, str) and not UNKNOWN.fullmatch(dim)
