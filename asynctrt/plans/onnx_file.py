"""Inspection of an ONNX file without a runtime. The only importer of ``onnx``.

External weights are not read: only the paths and sizes of their files are examined.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asynctrt.backends.onnx_axes import UNKNOWN, Declared, read_axes
from asynctrt.backends.tensorrt.plan import opened
from asynctrt.errors import MissingExtraError, ModelError
from asynctrt.plans.digest import digest_of_file

try:
    import onnx
    from onnx import AttributeProto, TensorProto
except ImportError as error:
    raise MissingExtraError(
        "looking into ONNX files needs the package onnx: pip install 'asynctrt[inspect]'"
    ) from error

Dim = int | str | None
"""A size, a name, or ``None`` for a dimension that has neither."""

TYPES: Final = {"float32": "float", "float64": "double", "sequence": "seq"}
"""ONNX Runtime's names of types that have another name here."""

STANDARD_DOMAINS: Final = frozenset(("ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training"))


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
class Weights:
    """The model's constants: initialisers and constants in nodes."""

    tensors: int
    nbytes: int
    by_dtype: dict[str, int]
    """Bytes of each type."""


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """An external file that holds weights."""

    location: str
    """Its path as in the model, relative to the model's folder."""
    nbytes: int | None
    """Its size, or ``None`` if there is no such file."""
    is_inside: bool
    """Whether it is in the model's folder: runtimes look for it only there."""


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
    graph: str
    metadata: dict[str, str]
    inputs: tuple[OnnxTensor, ...]
    outputs: tuple[OnnxTensor, ...]
    weights: Weights
    external: tuple[ExternalFile, ...]
    operators: dict[str, int]
    """How often each occurs, the most frequent first, including subgraphs and functions."""
    foreign_operators: tuple[str, ...]
    """Operators of domains other than ONNX's own, which a runtime may lack."""
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
    nodes = list(_nodes(model))
    operators = Counter(map(_operator, nodes))
    functions = {f"{_domain(one)}::{_text(one.name)}" for one in model.functions}
    weights = list(_weights(model, nodes))
    return OnnxFile(
        path=str(path),
        nbytes=nbytes,
        digest=digest,
        ir_version=model.ir_version,
        opsets={_domain(one): one.version for one in model.opset_import},
        producer=" ".join(filter(None, map(_text, (model.producer_name, model.producer_version)))),
        model_version=model.model_version,
        graph=_text(model.graph.name),
        metadata={_text(one.key): _text(one.value) for one in model.metadata_props},
        inputs=inputs,
        outputs=outputs,
        weights=_sum(weights),
        external=_external(path, weights),
        operators=dict(operators.most_common()),
        foreign_operators=tuple(sorted(name for name in operators if "::" in name and name not in functions)),
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


def _nodes(model: Any) -> Iterator[Any]:
    """Yield every node, also of subgraphs and functions, without recursion at any depth."""
    left = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while left:
        node = left.pop()
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                left.extend(attribute.g.node)
            for graph in attribute.graphs:
                left.extend(graph.node)


def _operator(node: Any) -> str:
    domain, kind = _domain(node), _text(node.op_type)
    return kind if domain in STANDARD_DOMAINS else f"{domain}::{kind}"


def _domain(owner: Any) -> str:
    return _text(owner.domain) or "ai.onnx"


def _text(given: str | bytes) -> str:
    """Return a string of the file, which protobuf returns as bytes if it is not UTF-8."""
    return given.decode(errors="replace") if isinstance(given, bytes) else given


def _weights(model: Any, nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the constant tensors of the graph, of subgraphs, and of nodes."""
    yield from model.graph.initializer
    for sparse in model.graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
            if attribute.type == AttributeProto.GRAPH:
                yield from attribute.g.initializer
            for graph in attribute.graphs:
                yield from graph.initializer


def _sum(tensors: Iterable[Any]) -> Weights:
    count, by_dtype = 0, Counter[str]()
    for tensor in tensors:
        count += 1
        by_dtype[_dtype(tensor.data_type)] += _nbytes(tensor)
    return Weights(count, by_dtype.total(), dict(by_dtype.most_common()))


def _nbytes(tensor: Any) -> int:
    if tensor.raw_data:
        return len(tensor.raw_data)
    if tensor.data_type == TensorProto.STRING:
        return int(sum(len(text) for text in tensor.string_data))
    # The name of a type has its number of bits: float32, uint4, float8_e4m3fn, complex128. A bool has 8.
    bits = re.search(r"\d+", _dtype(tensor.data_type))
    elements = max(0, math.prod(int(dim) for dim in tensor.dims))
    return math.ceil(elements * (int(bits[0]) if bits else 8) / 8)


def _external(path: Path, tensors: Iterable[Any]) -> tuple[ExternalFile, ...]:
    places = dict.fromkeys(
        _text(entry.value)
        for tensor in tensors
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if _text(entry.key) == "location"
    )
    folder = os.path.realpath(path.parent)
    found = []
    for place in places:
        # A damaged name may contain a zero byte, which no file name has.
        real = Path(os.path.realpath(path.parent / place.replace("\0", "?")))
        is_inside = os.path.commonpath([folder, real]) == folder
        # Files outside the folder are not examined at all, not even for their sizes.
        is_there = is_inside and real.is_file()
        found.append(ExternalFile(place, real.stat().st_size if is_there else None, is_inside))
    return tuple(found)


def find_batching(model: str, inputs: tuple[OnnxTensor, ...], outputs: tuple[OnnxTensor, ...]) -> BatchAxes:
    """Return the axis that counts rows, by the same rules as when an ONNX model is opened."""
    try:
        axes = read_axes(model, [_declared(one) for one in inputs], [_declared(one) for one in outputs])
    except ModelError as error:
        return BatchAxes(None, str(error), "", "", ())
    free = dict.fromkeys(dim for spec in axes.inputs for dim in spec.dims if isinstance(dim, str))
    firsts = [
        one.dims[spec.axis]
        for one, spec in zip(inputs, axes.inputs, strict=True)
        if one.dims and spec.axis is not None
    ]
    names = {str(dim) for dim in firsts if _is_name(dim)}
    rows = axes.rows_fixed if axes.rows_fixed is not None else " or ".join(sorted(names)) or None
    return BatchAxes(None if axes.alone else rows, None, axes.alone, axes.doubt, tuple(free))


def _declared(one: OnnxTensor) -> Declared:
    """Return a tensor as ONNX Runtime would describe it."""
    if one.kind != "tensor":
        return Declared(one.name, f"{TYPES.get(one.kind, one.kind)}()", ())
    return Declared(one.name, f"tensor({TYPES.get(one.dtype or '', one.dtype)})", tuple(one.dims or ()))


def _is_name(dim: Dim) -> bool:
    return isinstance(dim, str) and not UNKNOWN.fullmatch(dim)
