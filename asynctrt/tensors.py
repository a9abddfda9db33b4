"""What goes into a model and what comes out: specs, the check of a call's inputs, results.

A tensor's leading axis is always the batch axis. A :class:`TensorSpec` describes one row, and a request
carries one row or more.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from asynctrt.devices.arrays import DeviceArray
from asynctrt.errors import InputError, ModelError

Array = npt.NDArray[Any]
Dims = tuple[int, ...]
Inputs = Mapping[str, npt.ArrayLike] | npt.ArrayLike

BUCKET_FIXED: Final = ()
"""The bucket of every request to a model whose rows have one shape only: no dynamic dimension, no value."""

SHAPES_MAX: Final = 4096
"""How many shapes of inputs are remembered as checked."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    :param name: the tensor's name.
    :param dtype: its NumPy dtype.
    :param dims: the dimensions of one row, without the batch axis. A string is a dimension that may differ
        from request to request; where two tensors share it, they agree on it.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "dims", tuple(self.dims))
        for dim in self.dims:
            if not isinstance(dim, str) and (isinstance(dim, bool) or int(dim) < 0):
                raise ModelError(f"{self.name!r} has the impossible dimension {dim!r}")

    def __str__(self) -> str:
        axes = ", ".join(["rows", *map(str, self.dims)])
        return f"{self.name}: {self.dtype.name}[{axes}]"

    @property
    def is_fixed(self) -> bool:
        """Whether every row has the same shape."""
        return not any(isinstance(dim, str) for dim in self.dims)

    def resolve(self, symbols: Mapping[str, int]) -> Dims | None:
        """The dimensions of a row for these values of the symbols; ``None`` if one is not among them."""
        dims = tuple(symbols.get(dim, -1) if isinstance(dim, str) else dim for dim in self.dims)
        return None if -1 in dims else dims


class DeviceBucket(NamedTuple):
    """The bucket of requests with arrays on the device: inputs that lie there, or outputs that stay there."""

    bucket: Hashable
    has_outputs: bool
    """Whether the outputs stay on the device."""


class Timing:
    """Where the time of one request went, in ns.

    ``queue_ns`` is from arrival to launch. ``copy_in_ns`` is gathering the rows and, on a device with
    memory of its own, copying them there; ``copy_out_ns`` is the way back. ``compute_ns`` is the model.
    For a request that was split, copies and compute are summed over its batches. A GPU takes the times of one
    in 8 short batches (below 5 ms), which stand for the others of their size.
    """

    __slots__ = ("compute_ns", "copy_in_ns", "copy_out_ns", "queue_ns")

    def __init__(self, queue_ns: int, copy_in_ns: int, compute_ns: int, copy_out_ns: int) -> None:
        self.queue_ns = queue_ns
        self.copy_in_ns = copy_in_ns
        self.compute_ns = compute_ns
        self.copy_out_ns = copy_out_ns

    def __repr__(self) -> str:
        return (
            f"Timing(queue_ns={self.queue_ns}, copy_in_ns={self.copy_in_ns}, "
            f"compute_ns={self.compute_ns}, copy_out_ns={self.copy_out_ns})"
        )


class BatchRecord:
    """What the requests of one batch share: its size and times. One object a batch, not one a request."""

    __slots__ = ("arena_wait_ns", "compute_ns", "copy_in_ns", "copy_out_ns", "launched_ns", "rows")

    def __init__(self, rows: int, launched_ns: int) -> None:
        self.rows = rows
        self.launched_ns = launched_ns
        self.arena_wait_ns = 0
        self.copy_in_ns = 0
        self.compute_ns = 0
        self.copy_out_ns = 0


class InferResult(Mapping[str, Array]):
    """The outputs of one request by tensor name. They belong to the caller, who may write to them."""

    __slots__ = ("_arrival_ns", "_batches", "_outputs")

    def __init__(self, outputs: dict[str, Array], batches: tuple[BatchRecord, ...], arrival_ns: int) -> None:
        self._outputs = outputs
        self._batches = batches
        self._arrival_ns = arrival_ns

    def __getitem__(self, name: str) -> Array:
        try:
            return self._outputs[name]
        except KeyError:
            raise KeyError(f"{name!r} is not an output; there are {sorted(self._outputs)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {value.shape}" for name, value in self._outputs.items())
        return f"<InferResult {shapes} batch_rows={self.batch_rows}>"

    @property
    def batches(self) -> int:
        """How many batches computed it: 1, or more if it was split."""
        return len(self._batches)

    @property
    def batch_rows(self) -> int:
        """Rows of the batch that this request was part of; of the largest one, if it was split."""
        return max(batch.rows for batch in self._batches)

    @property
    def timing(self) -> Timing:
        """Where the time went."""
        batches = self._batches
        return Timing(
            min(batch.launched_ns for batch in batches) - self._arrival_ns,
            sum(batch.copy_in_ns for batch in batches),
            sum(batch.compute_ns for batch in batches),
            sum(batch.copy_out_ns for batch in batches),
        )

    @classmethod
    def join(cls, parts: "Sequence[InferResult]") -> "InferResult":
        """The parts of a request that was split, as one result, rows in order."""
        outputs = {
            name: np.concatenate([part._outputs[name] for part in parts]) for name in parts[0]._outputs
        }
        batches = tuple(batch for part in parts for batch in part._batches)
        return cls(outputs, batches, parts[0]._arrival_ns)


class InputCheck:
    """Checks the inputs of a call against the specs, and says which bucket they belong to.

    :param specs: the model's inputs, in the order in which arrays are returned.
    :param check_finite: refuse NaN and infinities in floating-point inputs.
    :param check_dims: what else to ask about the dimensions of one row of each input.
    :param import_array: takes an array that lies on the engine's device, or says that it is none.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        check_finite: bool = False,
        check_dims: Callable[[tuple[Dims, ...]], object] | None = None,
        import_array: Callable[[object], DeviceArray | None] | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self._check_finite = check_finite
        self._check_dims = check_dims
        self._import_array = import_array
        self._names = tuple(spec.name for spec in self.specs)
        self._dtypes = tuple(spec.dtype for spec in self.specs)
        # Shapes that were checked before, and what came of it: most calls bring no new one.
        self._known: dict[tuple[Any, ...], tuple[int, Hashable]] = {}

    def admit(self, inputs: Inputs) -> tuple[tuple[Array, ...], int, Hashable]:
        """The arrays in order of the specs, their number of rows, and their bucket.

        :raises InputError: naming tensor, expected and given.
        """
        if len(self._names) == 1:
            named = type(inputs) is dict and len(inputs) == 1
            array = inputs.get(self._names[0]) if named else inputs  # type: ignore[union-attr]
            if type(array) is ndarray and array.dtype is self._dtypes[0]:
                known = self._known.get(array.shape)
                if known is not None:
                    return (array,), known[0], known[1]
        elif type(inputs) is dict and len(inputs) == len(self._names):
            arrays: tuple[Any, ...] = tuple([inputs.get(name) for name in self._names])
            for array, dtype in zip(arrays, self._dtypes):  # noqa: B905  (equal by construction)
                if type(array) is not ndarray or array.dtype is not dtype:
                    break
            else:
                known = self._known.get(tuple([array.shape for array in arrays]))
                if known is not None:
                    return arrays, known[0], known[1]
        return self._check(inputs)

    def _check(self, inputs: Inputs) -> tuple[tuple[Array, ...], int, Hashable]:
        named = self._by_name(inputs)
        arrays = tuple(self._one(spec, named[spec.name]) for spec in self.specs)
        rows = len(arrays[0])
        for spec, array in zip(self.specs, arrays, strict=True):
            if len(array) != rows:
                raise InputError(
                    f"input {spec.name!r} has {len(array)} rows, but {self.specs[0].name!r} has "
                    f"{rows}. Give every input the same number of rows"
                )
        if not rows:
            raise InputError(
                f"input {self.specs[0].name!r} has no rows. Give at least one: shape "
                f"{(1, *self.specs[0].dims)}"
            )
        symbols = self.symbols([array.shape[1:] for array in arrays])
        if self._check_dims is not None:
            self._check_dims(tuple(array.shape[1:] for array in arrays))
        bucket: Hashable = tuple(symbols.items())
        if any(isinstance(array, DeviceArray) for array in arrays):
            return arrays, rows, DeviceBucket(bucket, has_outputs=False)
        if not self._check_finite:  # Which looks at values, and has to each time.
            if len(self._known) >= SHAPES_MAX:
                self._known.clear()
            shapes = tuple(array.shape for array in arrays)
            self._known[shapes if len(shapes) > 1 else shapes[0]] = rows, bucket
        return arrays, rows, bucket

    def symbols(self, shapes: Sequence[Dims]) -> dict[str, int]:
        """The value of each dynamic dimension, from the shapes of one row of each input.

        :raises InputError: when two inputs do not agree on one.
        """
        symbols: dict[str, int] = {}
        for spec, shape in zip(self.specs, shapes, strict=True):
            for axis, (dim, given) in enumerate(zip(spec.dims, shape, strict=True), start=1):
                if isinstance(dim, str) and symbols.setdefault(dim, given) != given:
                    raise InputError(
                        f"input {spec.name!r} has {given} on axis {axis} ({dim!r}), but another "
                        f"input has {symbols[dim]}. Give both the same size"
                    )
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
        missing = [name for name in names if name not in inputs]
        unknown = [name for name in inputs if name not in names]
        if missing or unknown:
            raise InputError(
                f"the model's inputs are {names}; missing: {missing}, unknown: {unknown}. "
                "Give exactly the model's inputs, by name"
            )
        return inputs

    def _one(self, spec: TensorSpec, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            array: Any = value
        elif self._import_array is not None and (placed := self._import_array(value)) is not None:
            array = placed
        elif isinstance(value, list | tuple | int | float | bool | str | bytes):
            array = convert(spec, value)
        else:
            array = self._foreign(spec, value)
        if array.dtype != spec.dtype:
            raise InputError(
                f"input {spec.name!r} is {spec.dtype.name}, given {array.dtype}. "
                f"Convert it yourself, array.astype({spec.dtype.name!r}), so that no precision is "
                "lost unseen"
            )
        if array.ndim != 1 + len(spec.dims) or any(
            given != dim
            for dim, given in zip(spec.dims, array.shape[1:], strict=True)
            if not isinstance(dim, str)
        ):
            raise InputError(
                f"input {spec.name!r} takes shape {_shape(spec)}, given {array.shape}. "
                + _shape_fix(spec, array)
            )
        if self._check_finite and isinstance(array, DeviceArray):
            raise InputError(
                f"input {spec.name!r} lies on the device, and this engine was opened with check_finite=True, "
                "which looks at values on the CPU. Check it there, and open the engine without"
            )
        if self._check_finite and array.dtype.kind in "fc" and not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            raise InputError(
                f"input {spec.name!r} has a NaN or an infinity in row {row}, and this engine was "
                "opened with check_finite=True. Clean the row, or open it without"
            )
        return array

    @staticmethod
    def _foreign(spec: TensorSpec, value: Any) -> Array:
        """An array of another library that offers itself to NumPy, taken without a copy if it can be."""
        if not (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
            try:
                memoryview(value)
            except TypeError:
                raise InputError(
                    f"input {spec.name!r} takes an array or nested lists, given {type(value).__name__}"
                ) from None
        try:
            return np.asarray(value)
        except Exception as error:
            raise InputError(
                f"input {spec.name!r}: the {type(value).__name__} cannot be read as an array "
                f"({error}). Give a NumPy array"
            ) from error


def convert(spec: TensorSpec, value: Any) -> Array:
    """Nested lists or a number as an array of the tensor's dtype, if no value changes by it.

    Rounding an int or a float to a narrower float is allowed, as Python's own numbers have no width.
    """
    try:
        given = np.asarray(_whole(value) if spec.dtype == np.uint64 else value)
    except ValueError as error:
        raise InputError(
            f"input {spec.name!r} takes shape {_shape(spec)}; the lists given are ragged ({error})"
        ) from error
    kinds = {"f": "biuf", "c": "biufc", "i": "biu", "u": "biu", "b": "b"}.get(spec.dtype.kind, "")
    if given.size and given.dtype.kind not in kinds:
        raise InputError(
            f"input {spec.name!r} is {spec.dtype.name}; the values given are {given.dtype} and "
            "cannot be converted without changing them"
        )
    with np.errstate(over="ignore"):
        converted: Array = given.astype(spec.dtype)
    if spec.dtype.kind in "iu":
        outside = not np.array_equal(converted, given)
    else:
        outside = not np.array_equal(np.isinf(converted), np.isinf(given))
    if outside:
        limits = np.iinfo(spec.dtype) if spec.dtype.kind in "iu" else np.finfo(spec.dtype)
        raise InputError(
            f"input {spec.name!r} is {spec.dtype.name}, which holds {limits.min} to {limits.max}; "
            "a value given is outside"
        )
    return converted


def _whole(value: Any) -> Any:
    """Whole numbers as uint64; by itself NumPy makes floats of numbers on both sides of 2**63."""
    exact = np.array(value, object)
    if all(type(item) is int and 0 <= item < 2**64 for item in exact.flat):
        return exact.astype(np.uint64)
    return value


def _shape(spec: TensorSpec) -> str:
    return f"({', '.join(['rows', *map(str, spec.dims)])})"


def _shape_fix(spec: TensorSpec, array: Array) -> str:
    if array.ndim == len(spec.dims):
        return "For a single row, add the batch axis: array[None]"
    return "Every axis but the first is fixed by the model, unless it has a name above"
