"""Find the axis of each tensor of an ONNX model that counts rows, or why each request must run alone."""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.errors import ModelError, OptionsError
from asynctrt.tensors import TensorSpec

DTYPES: Final = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    "tensor(string)": "object",
} | {f"tensor({kind}{bits})": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
"""NumPy's dtype for each ONNX Runtime type that NumPy supports."""

ML_DTYPES: Final = {
    "tensor(bfloat16)": ("bfloat16", 16),
    "tensor(float8e4m3fn)": ("float8_e4m3fn", 17),
    "tensor(float8e5m2)": ("float8_e5m2", 19),
}
"""The ``ml_dtypes`` dtype for each type that NumPy does not support, and its number in ONNX."""

UNKNOWN: Final = re.compile(r"|\?|-1|None|dynamic|unk__\d+")
"""Placeholders that exporters write for an unknown dimension. They are not names: two of them may differ."""

BATCH: Final = re.compile(r"batch|^[nb]$|^bs$", re.IGNORECASE)
"""Common names for the axis of rows."""

KINDS: Final = {"seq": "sequence", "map": "map", "optional": "optional", "sparse_tensor": "sparse tensor"}


class Axes(NamedTuple):
    """The tensors of a model, and what is known about its rows."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    rows_fixed: int | None
    alone: str
    """The reason why each request must run alone; empty if rows may share batches."""
    doubt: str
    """The reason to doubt that an output has one row per row of the inputs; empty if there is none."""


class Declared(NamedTuple):
    """An input or output as ONNX Runtime's ``NodeArg`` describes it."""

    name: str
    type: str
    shape: tuple[int | str | None, ...]


def declared(args: Sequence[Any]) -> tuple[Declared, ...]:
    """Return the contents of ONNX Runtime's ``NodeArg`` objects, without keeping the session alive."""
    return tuple(Declared(arg.name, arg.type, tuple(arg.shape or ())) for arg in args)


class Arg(NamedTuple):
    """An input or output as the file declares it: dimensions are sizes, names, or ``None`` where unknown."""

    name: str
    side: str
    dtype: np.dtype[Any]
    kind: str
    shape: tuple[int | str | None, ...]

    def spec(self, axis: int | None) -> TensorSpec:
        """Return the spec with rows on ``axis``; unnamed dimensions are named after the tensor and axis."""
        dims = [
            f"{self.name}.{at}" if dim is None else dim for at, dim in enumerate(self.shape) if at != axis
        ]
        return TensorSpec(self.name, self.dtype, dims, axis, self.kind)


def read_axes(name: str, inputs: Sequence[Any], outputs: Sequence[Any], options: OnnxOptions) -> Axes:
    """Return the specs that ONNX Runtime's ``NodeArg`` objects describe, and what is known about rows."""
    given = [_read(name, "input", arg) for arg in inputs]
    results = [_read(name, "output", arg) for arg in outputs]
    if not results:
        raise ModelError(f"{name!r} has no outputs")
    _check_names(name, given, results, options)
    rows = _Rows(given, results, options)
    alone = rows.why_alone()
    if alone:
        return whole_axes(given, results, alone)
    return Axes(
        tuple(arg.spec(rows.axis(arg)) for arg in given),
        tuple(arg.spec(rows.axis(arg)) for arg in results),
        rows.fixed,
        "",
        rows.doubt(),
    )


def read_whole_axes(name: str, inputs: Sequence[Any], outputs: Sequence[Any], reason: str) -> Axes:
    """Return the same as :func:`read_axes` for requests that run alone, whose tensors have no rows."""
    given = [_read(name, "input", arg) for arg in inputs]
    return whole_axes(given, [_read(name, "output", arg) for arg in outputs], reason)


def whole_axes(inputs: Sequence[Arg], outputs: Sequence[Arg], reason: str) -> Axes:
    """Return the axes of a model whose requests run alone."""
    specs = [tuple(arg.spec(None) for arg in side) for side in (inputs, outputs)]
    return Axes(specs[0], specs[1], None, reason, "")


class _Rows:
    """The information about the rows of a model in its declared shapes.

    Rows are on the first axis unless the options say otherwise, or every tensor has one dimension with the
    same batch name. Inputs that are scalars, or of shape ``[1]``, are shared by all rows.
    """

    def __init__(self, inputs: Sequence[Arg], outputs: Sequence[Arg], options: OnnxOptions) -> None:
        self._options = options
        self._inputs, self._outputs = inputs, outputs
        told = {arg.name for arg in inputs} & set(options.shared)
        self.guessed = {
            arg.name
            for arg in inputs
            if arg.kind == "tensor" and arg.shape in ((), (1,)) and arg.name not in options.batch_axis
        } - told
        if told | self.guessed == {arg.name for arg in inputs}:
            self.guessed = set()  # Some input must have rows.
        self._common = told | self.guessed
        self._with_rows = [arg for arg in inputs if arg.name not in self._common]
        self.symbol = self._symbol()
        firsts = [self._rows_of(arg) for arg in self._with_rows if self._has_axis(arg)]
        self._names = {dim for dim in firsts if isinstance(dim, str)}
        self._sizes = {dim if isinstance(dim, int) else None for dim in firsts}
        self.fixed = next(iter(self._sizes)) if len(self._sizes) == 1 else None

    def _symbol(self) -> str | None:
        """Return the name that counts rows, if every tensor has one dimension of that name."""
        if self._options.batch_axis or not self._with_rows:
            return None
        shapes = [arg.shape for arg in (*self._with_rows, *self._outputs)]
        names = {dim for dim in shapes[0] if isinstance(dim, str)}
        found = [
            name for name in names if BATCH.search(name) and all(shape.count(name) == 1 for shape in shapes)
        ]
        return found[0] if len(found) == 1 else None

    def axis(self, arg: Arg) -> int | None:
        """Return the axis that counts rows."""
        if arg.side == "input" and arg.name in self._common:
            return None
        if self.symbol is not None:
            return arg.shape.index(self.symbol)
        return self._options.batch_axis.get(arg.name, 0)

    def _has_axis(self, arg: Arg) -> bool:
        axis = self.axis(arg)
        return axis is not None and axis < len(arg.shape)

    def _rows_of(self, arg: Arg) -> int | str | None:
        axis = self.axis(arg)
        assert axis is not None
        return arg.shape[axis]

    def why_alone(self) -> str:
        """Return why the shapes do not allow rows to share a batch; empty if they do."""
        for arg in (*self._inputs, *self._outputs):
            if arg.kind != "tensor":
                return f"{arg.side} {arg.name!r} is a {arg.kind}"
        if not self._with_rows:
            return "no input has rows" if self._inputs else "the model has no inputs"
        return self._why_inputs() or self._why_outputs()

    def _why_inputs(self) -> str:
        for arg in self._with_rows:
            if not self._has_axis(arg):
                return (
                    f"input {arg.name!r} has no axis for rows (onnx={{'shared': [{arg.name!r}]}} says that "
                    "all rows of a batch have it in common)"
                )
        if len(self._sizes) > 1:
            shapes = {arg.name: _shown(arg.shape) for arg in self._with_rows}
            return (
                f"the inputs do not have their rows on one axis: {shapes} (batch_axis in the option "
                "onnx says where rows are, and shared which inputs a whole batch has in common)"
            )
        for arg in (*self._inputs, *self._outputs):
            for at, dim in enumerate(arg.shape):
                if at != self.axis(arg) and dim in self._names:
                    return (
                        f"{arg.side} {arg.name!r} has the size {dim!r}, which counts rows, on axis {at} "
                        "too, so rows of one batch would see each other"
                    )
        return ""

    def _why_outputs(self) -> str:
        for arg in self._outputs:
            if not self._has_axis(arg):
                return f"output {arg.name!r} is a scalar, or its rank is unknown: it has no rows"
            first = self._rows_of(arg)
            if isinstance(first, int) and first != self.fixed:
                return f"output {arg.name!r} has the fixed size {first} where rows would be counted"
            if self.fixed == 1 and isinstance(first, str):
                return f"output {arg.name!r} counts {first!r} on its first axis, and the inputs have one row"
        return ""

    def doubt(self) -> str:
        """Return what the shapes leave uncertain: where the rows are, or whether an output has them."""
        if self.fixed == 1:
            return ""  # There is one row, or an output with a different number is refused.
        if self.guessed:
            return f"{' and '.join(map(repr, sorted(self.guessed)))} seems to be in common to all rows"
        moved = [arg.name for arg in (*self._with_rows, *self._outputs) if self.axis(arg)]
        if self.symbol is not None and moved:
            return f"rows of {moved[0]!r} seem to be on the axis {self.symbol!r}, by its name"
        names = " and ".join(map(repr, sorted(self._names))) or self.fixed or "without a name"
        for arg in self._outputs:
            first = self._rows_of(arg)
            if first not in self._names and first != self.fixed:
                found = "without a name" if first is None else repr(first)
                return f"the first axis of output {arg.name!r} is {found}, that of the inputs {names}"
            if first is None:
                return f"the first axis of output {arg.name!r} is without a name"
        return ""


def _read(model: str, side: str, arg: Any) -> Arg:
    dtype, kind = _type_of(model, side, arg)
    shape = tuple(
        None if dim is None or (isinstance(dim, str) and UNKNOWN.fullmatch(dim)) or dim == -1 else dim
        for dim in (arg.shape or ())
    )
    return Arg(arg.name, side, dtype, kind, shape if kind == "tensor" else ())


def _type_of(model: str, side: str, arg: Any) -> tuple[np.dtype[Any], str]:
    """Return the dtype and kind of a tensor type, in ONNX Runtime's notation: ``tensor(float)``."""
    if arg.type in DTYPES:
        return np.dtype(DTYPES[arg.type]), "tensor"
    if arg.type in ML_DTYPES:
        try:
            import ml_dtypes  # noqa: PLC0415  (an optional package, for the few models that need it)
        except ImportError:
            raise ModelError(
                f"{side} {arg.name!r} of {model!r} is a {arg.type}, which NumPy does not have: "
                "pip install ml_dtypes"
            ) from None
        return np.dtype(getattr(ml_dtypes, ML_DTYPES[arg.type][0])), "tensor"
    kind = KINDS.get(arg.type.partition("(")[0])
    if kind is None or kind == "sparse tensor":
        raise ModelError(
            f"{side} {arg.name!r} of {model!r} is a {arg.type}, which NumPy cannot hold. Tensors of "
            f"{', '.join(sorted(set(DTYPES.values()) - {'object'}))} and strings, sequences and maps can "
            "be served"
        )
    return np.dtype(object), kind


def _check_names(model: str, inputs: Sequence[Arg], outputs: Sequence[Arg], options: OnnxOptions) -> None:
    ranks = {arg.name: len(arg.shape) for arg in (*inputs, *outputs)}
    for name, axis in options.batch_axis.items():
        if name not in ranks:
            raise OptionsError(f"batch_axis names {name!r}, and the tensors of {model!r} are {sorted(ranks)}")
        if axis >= ranks[name]:
            raise OptionsError(
                f"batch_axis says that axis {axis} of {name!r} counts rows, and it has {ranks[name]} axes"
            )
    names = {arg.name for arg in inputs}
    unknown = frozenset(options.shared) - names
    if unknown:
        raise OptionsError(f"shared names {sorted(unknown)}, and the inputs of {model!r} are {sorted(names)}")


def _shown(shape: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"
