"""The check of a call's inputs: takes arrays by name and returns checked arrays in the model's order.

Inputs that pass cannot harm other requests of their batch: they are plain ``numpy.ndarray`` objects
(subclasses may redefine what copying means) of the right dtype, rows and shape.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from asynctrt._util.validation import int_or_none
from asynctrt.devices.base import DeviceArray
from asynctrt.errors import InputError, describe, show
from asynctrt.scheduling.key import FIXED_SHAPE, SHAPES_MAX, BatchKey
from asynctrt.tensors import (
    Array,
    Dims,
    TensorSpec,
    Views,
    as_numpy,
    check_shape,
    content_of,
    convert,
    has_masked,
    is_array,
    split_shared,
    to_array,
)

Inputs = Mapping[str, npt.ArrayLike] | npt.ArrayLike

Outputs = Literal["host", "device"] | Sequence[str]
"""The type of a call's ``outputs``: where to leave all outputs, or the names of the wanted ones."""

Checked = tuple[tuple[Array, ...], int, BatchKey]
"""Arrays with rows first, in the model's order, their number of rows, and the key of their batches."""


class InputCheck:
    """Checks the inputs of a call against the specs, and finds the key of the batches that they may join.

    :param specs: the model's inputs, in the order in which arrays are returned.
    :param check_key: an additional check of the rows' shape; raises ``InputError`` to refuse it.
    :param import_array: returns an array on the engine's device, or ``None`` for any other object.
    :param ignores_extra: drop inputs that the model does not have instead of refusing them.
    :param rows_first: take all arrays with rows first, whatever axis counts rows, and inputs without rows
        repeated for each row, as a worker gets them from its front.
    :param repeats_shared: repeat inputs that all rows share for each row, as a front writes them.
    :param dims_are_hints: whether two inputs may disagree on the size of a dimension that they both name.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        check_key: Callable[[BatchKey], object] | None = None,
        import_array: Callable[[object], DeviceArray | None] | None = None,
        ignores_extra: bool = False,
        rows_first: bool = False,
        repeats_shared: bool = False,
        dims_are_hints: bool = False,
    ) -> None:
        self.specs = tuple(specs)
        self._with_rows, self._shared = split_shared(self.specs)
        self._shared_names = frozenset(spec.name for spec in self._shared)
        self._repeats_shared = repeats_shared
        # The specs of the arrays as callers give them.
        self._given = (
            tuple(dataclasses.replace(spec, axis=0) for spec in self.specs) if rows_first else self.specs
        )
        self._is_plain = not self._shared and all(spec.axis == 0 for spec in self._given)
        # Whether checking shapes and dtypes is enough.
        self._remembers = not any(spec.dtype.hasobject for spec in self.specs)
        self._remembers &= self._is_plain or not (rows_first or repeats_shared)
        self._ignores_extra = ignores_extra
        self._dims_are_hints = dims_are_hints
        self._check_key = check_key
        self._import_array = import_array
        self._names = tuple(spec.name for spec in self.specs)
        self._dtypes = tuple(spec.dtype for spec in self.specs)
        # A single input has a quicker check. Its name; None if there are several inputs.
        self._only = self._names[0] if len(self._names) == 1 else None
        self._dtype = self._dtypes[0]
        # The rows and key of shapes that passed before: most calls have a known shape.
        self._known: dict[tuple[Any, ...], tuple[int, BatchKey]] = {}

    @property
    def looks_at_shapes_alone(self) -> bool:
        """Whether arrays that passed once pass again unchanged, whatever values are written to them."""
        return type(self) is InputCheck and self._remembers and not self._shared

    def validate(self, inputs: Inputs) -> Checked:
        """Return the checked arrays of a call.

        :raises InputError: naming the tensor, what is expected and what was given.
        """
        if (name := self._only) is not None:
            array = inputs.get(name) if type(inputs) is dict and len(inputs) == 1 else inputs
            if type(array) is ndarray and array.dtype is self._dtype:
                known = self._known.get(array.shape)
                if known is not None:
                    rows, key = known
                    return ((array,), rows, key) if self._is_plain else self._as_rows((array,), rows, key)
        elif type(inputs) is dict and len(inputs) == len(self._names):
            arrays: tuple[Any, ...] = tuple([inputs.get(name) for name in self._names])
            for array, dtype in zip(arrays, self._dtypes):  # noqa: B905  (equal by construction)
                if type(array) is not ndarray or array.dtype is not dtype:
                    break
            else:
                known = self._known.get(tuple([array.shape for array in arrays]))
                if known is not None:
                    if self._is_plain:
                        return arrays, known[0], known[1]
                    return self._as_rows(arrays, known[0], known[1])
        return self._check(inputs)

    def _as_rows(self, arrays: tuple[Array, ...], rows: int, key: BatchKey) -> Checked:
        """Return arrays of known shapes with rows first, and move inputs that rows share to the key."""
        placed, shared = [], []
        for spec, array in zip(self.specs, arrays, strict=True):
            if spec.axis is None and self._shared:
                shared.append(content_of(array))
            else:
                placed.append(spec.rows_first(array))
        return Views(placed), rows, BatchKey(key.shape, shared=tuple(shared))

    def _check(self, inputs: Inputs) -> Checked:
        named = self._by_name(inputs)
        given = {spec.name: self._one(spec, named.get(spec.name)) for spec in self._given}
        placed = {spec.name: self._placed(spec, given[spec.name]) for spec in self._given}
        arrays: tuple[Any, ...] = tuple(placed[spec.name] for spec in self._with_rows)
        if any(array is not named[spec.name] for spec, array in zip(self._with_rows, arrays, strict=True)):
            arrays = Views(arrays)
        first, rows = self._with_rows[0], len(arrays[0])
        for spec, array in zip(self._with_rows, arrays, strict=True):
            if len(array) != rows:
                raise InputError(
                    f"input {spec.name!r} has {len(array)} rows, but {first.name!r} has "
                    f"{rows}. Give every input the same number of rows"
                )
        if not rows:
            raise InputError(f"input {first.name!r} has no rows. Give at least one: shape {first.shape(1)}")
        key = self.key_of([placed[spec.name].shape[1:] for spec in self.specs])
        if self._check_key is not None:
            self._check_key(key)
        on_device = any(isinstance(array, DeviceArray) for array in arrays)
        if self._remembers and not on_device:
            if len(self._known) >= SHAPES_MAX:
                self._known.clear()
            shapes = tuple(array.shape for array in given.values())
            self._known[shapes if len(shapes) > 1 else shapes[0]] = rows, key
        if self._shared:
            arrays, key = self._with_shared(arrays, key, placed, rows)
        return arrays, rows, key._replace(on_device=True) if on_device else key

    def _with_shared(
        self, arrays: tuple[Any, ...], key: BatchKey, placed: Mapping[str, Any], rows: int
    ) -> tuple[tuple[Any, ...], BatchKey]:
        """Return arrays and key with the inputs that all rows share."""
        shared = {spec.name: placed[spec.name][0, ...] for spec in self._shared}
        key = key._replace(shared=tuple(map(content_of, shared.values())))
        if not self._repeats_shared:
            return arrays, key
        repeated = {name: np.broadcast_to(value, (rows, *value.shape)) for name, value in shared.items()}
        return Views({**placed, **repeated}[spec.name] for spec in self.specs), key

    def _placed(self, spec: TensorSpec, value: Any) -> Any:
        """Return a checked value with rows first; one row for a Python value, or one that all rows share.

        :raises InputError: for an array on the device whose layout would have to change there.
        """
        if spec.kind != "tensor":
            return spec.rows_of(value, 1)
        if not isinstance(value, DeviceArray) or (spec.axis == 0 and spec.name not in self._shared_names):
            return spec.rows_first(value)
        if spec.axis is None and spec.name not in self._shared_names:
            return value.as_row()
        what = (
            "all rows of a batch have in common" if spec.axis is None else f"has its rows on axis {spec.axis}"
        )
        raise InputError(
            f"input {spec.name!r}, which {what}, lies on the device. Give it as an array on the host"
        )

    def key_of(self, shapes: Sequence[Dims]) -> BatchKey:
        """Return the key of a batch, given the shape of one row of each input.

        :raises InputError: if two inputs disagree on a dynamic dimension.
        """
        symbols = self.symbols(shapes)
        return BatchKey(tuple(symbols.items())) if symbols else FIXED_SHAPE

    def key_of_dims(self, dims: Mapping[str, Dims]) -> BatchKey:
        """Return the key of a batch, given the dimensions of one row by the names of the inputs.

        Inputs whose dimensions the model fixes may be left out.

        :raises InputError: for unknown names, and dimensions that do not fit the model's.
        """
        return self.key_of(self._shapes_of(dims))

    def _shapes_of(self, dims: Mapping[str, Dims]) -> list[Dims]:
        """Return the shape of one row of each input, as :meth:`key_of_dims` takes them."""
        if not isinstance(dims, Mapping) or not set(dims) <= set(self._names):
            raise InputError(
                f"dims must map names of inputs to the dimensions of one row, not {show(dims)}; the inputs "
                f"are {list(self._names)}"
            )
        shapes = []
        for spec in self.specs:
            given = dims.get(spec.name, spec.dims)
            shape = tuple(map(int_or_none, given)) if isinstance(given, tuple | list) else (None,)
            fits = len(shape) == len(spec.dims) and all(
                size is not None and size >= 0 and (isinstance(dim, str) or dim == size)
                for dim, size in zip(spec.dims, shape, strict=False)
            )
            if not fits:
                raise InputError(
                    f"input {spec.name!r} has rows of shape {spec.dims}, given {show(given)}. Give the "
                    "dimensions of one row"
                )
            shapes.append(tuple(size for size in shape if size is not None))
        return shapes

    def key_as_given(self, arrays: Sequence[Array], key: BatchKey) -> BatchKey:
        """Return the key of checked arrays that are not padded, given the one that :meth:`validate` found."""
        return key

    def symbols(self, shapes: Sequence[Dims]) -> dict[str, int]:
        """Return the size of each named dimension, given the shape of one row of each input.

        :raises InputError: if two inputs disagree on a dimension. If names of dimensions are hints, each
            input then has its own size instead (:attr:`TensorSpec.own_dims`).
        """
        symbols: dict[str, int] = {}
        apart: set[str] = set()
        for spec, shape in zip(self.specs, shapes, strict=True):
            for axis, (dim, given) in enumerate(zip(spec.dims, shape, strict=True), start=1):
                if not isinstance(dim, str) or symbols.setdefault(dim, given) == given:
                    continue
                if not self._dims_are_hints:
                    raise InputError(
                        f"input {spec.name!r} has size {given} on axis {axis} ({dim!r}), and {dim!r} is "
                        f"{symbols[dim]} on an earlier axis. Give both the same size"
                    )
                apart.add(dim)
        if not apart:
            return symbols
        for dim in apart:
            del symbols[dim]
        for spec, shape in zip(self.specs, shapes, strict=True):
            own = zip(spec.dims, spec.own_dims, shape, strict=True)
            symbols.update({name: given for dim, name, given in own if dim in apart})
        return symbols

    def _by_name(self, inputs: Inputs) -> Mapping[str, Any]:
        names = [spec.name for spec in self.specs]
        if not isinstance(inputs, Mapping):
            if len(names) != 1:
                raise InputError(
                    f"this model has {len(names)} inputs: give a mapping with {names}, "
                    f"not one {type(inputs).__name__}"
                )
            return {names[0]: inputs}
        missing = [spec.name for spec in self.specs if spec.name not in inputs and spec.kind != "optional"]
        unknown = [] if self._ignores_extra else [name for name in inputs if name not in names]
        if missing or unknown:
            fix = " (ignore_extra=True drops what the model does not have)" if unknown and not missing else ""
            raise InputError(
                f"the model's inputs are {names}; missing: {missing}, unknown: {show(unknown)}. "
                f"Give exactly the model's inputs, by name{fix}"
            )
        return inputs

    def _one(self, spec: TensorSpec, value: Any) -> Any:
        if spec.kind != "tensor":
            return value
        array = as_text(spec, value) if spec.is_text else self._as_array(spec, value)
        if array.dtype != spec.dtype:
            if not _converts(array, spec):
                raise InputError(
                    f"input {spec.name!r} is {spec.dtype.name}, given {array.dtype}. Convert it yourself, "
                    f"array.astype({spec.dtype.name!r}), so that no precision is lost silently"
                )
            array = array.astype(spec.dtype)
        check_shape(spec, array.shape)
        return array

    def _as_array(self, spec: TensorSpec, value: Any) -> Any:
        if type(value) is ndarray:
            return value
        if isinstance(value, ndarray):
            if has_masked(value):
                raise InputError(
                    f"input {spec.name!r} has masked values, which a model cannot leave out. Replace them: "
                    "array.filled(value)"
                )
            # A view as the base class. A subclass may refuse to be joined with plain arrays, or redefine
            # joining, and the other requests of the batch would fail too.
            return np.asarray(value)
        if self._import_array is not None and (placed := self._import_array(value)) is not None:
            return placed
        if isinstance(value, list | tuple | int | float | bool | str | bytes):
            return convert(spec, value)
        return self._foreign(spec, value)

    @staticmethod
    def _foreign(spec: TensorSpec, value: Any) -> Array:
        """Return another library's array as a NumPy array, without a copy if the library allows that."""
        if not is_array(value):
            try:
                memoryview(value)
            except TypeError:
                raise InputError(
                    f"input {spec.name!r} takes an array or nested lists, given {type(value).__name__}"
                ) from None
        try:
            return as_numpy(value)
        except Exception as error:
            raise InputError(
                f"input {spec.name!r}: the {type(value).__name__} cannot be read as an array "
                f"({describe(error)}). Give a NumPy array"
            ) from error


def as_text(spec: TensorSpec, value: Any) -> Array:
    """Return strings as an array of dtype ``object`` of ``str``; bytes are read as UTF-8.

    :raises InputError: for anything else.
    """
    try:
        given = to_array(value)
        if given.dtype.kind == "U":
            return given.astype(object)
        if given.dtype.kind in "SO":
            texts = [item.decode() if isinstance(item, bytes) else item for item in given.ravel().tolist()]
            if all(isinstance(text, str) for text in texts):
                found = np.empty(given.shape, object)
                found.reshape(-1)[...] = texts
                return found
    except (ValueError, TypeError) as error:  # Ragged lists, bytes that are not UTF-8.
        raise InputError(f"input {spec.name!r} takes strings, and what was given is not: {error}") from error
    raise InputError(f"input {spec.name!r} takes strings (str, or bytes in UTF-8), given {show(given.dtype)}")


def _converts(array: Any, spec: TensorSpec) -> bool:
    """Return whether an array can be converted to the tensor's dtype without changing any value.

    Integers may be widened, and the byte order may differ. A float is never widened: a caller that gives
    float32 for an expected float64 may have lost precision before.
    """
    if isinstance(array, DeviceArray) or array.dtype.hasobject:
        return False
    if array.dtype.newbyteorder("=") == spec.dtype:
        return True
    return (
        array.dtype.kind in "biu"
        and spec.dtype.kind in "iu"
        and np.can_cast(array.dtype, spec.dtype, casting="safe")
    )
