"""The tensors of a model and of a request: specs, results, timing.

A :class:`TensorSpec` describes one row of a tensor and says which axis counts rows, usually the first. Inside
the engine rows always come first (:meth:`TensorSpec.rows_first`), and a tensor without rows is one row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np
import numpy.typing as npt

from asynctrt._util.validation import as_int
from asynctrt.errors import ExecutionError, InputError, ModelError, show

ALONE_FIX: Final = "Open the model with batching='off', so that each request runs alone"

NDIM_MAX: Final = 64
"""The most axes of a NumPy array: lists that are nested deeper cannot become one."""

SHARED_NBYTES_MAX: Final = 4096
"""The largest output of a batch, in bytes, that is copied as one block; each caller gets a view of it. It is
small, because a caller that keeps a row keeps the block. Copying 64 rows one by one takes 0.25 µs more a row.
"""

Array = npt.NDArray[Any]
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    :param name: the tensor's name.
    :param dtype: its NumPy dtype, or whatever ``np.dtype`` accepts; kept in native byte order.
    :param dims: the dimensions of one row, without the batch axis. A string names a dimension that may differ
        from request to request; tensors that share the name have the same size there.
    :param axis: the axis that counts rows: 1 for an LSTM's state ``(2, rows, 128)``, whose ``dims`` are
        ``(2, 128)``. ``None`` for a tensor without rows, whose ``dims`` are its whole shape: all requests of
        a batch share it or, if no input of the model has rows, each request runs alone.
    :param kind: ``"tensor"``, or another kind of value that a runtime takes and returns: ``"sequence"``,
        ``"map"``, ``"optional"``. These are Python values, of dtype ``object`` and without rows.
    :raises ModelError: if the name, dtype, a dimension or the axis is not valid.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...] = ()
    axis: int | None = 0
    kind: str = "tensor"

    if TYPE_CHECKING:
        # It accepts wider types than it stores, which a dataclass cannot express.
        def __init__(
            self,
            name: str,
            dtype: npt.DTypeLike,
            dims: Sequence[int | str] = (),
            axis: int | None = 0,
            kind: str = "tensor",
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ModelError(f"the name of a tensor must be a string, not {show(self.name)}")
        object.__setattr__(self, "dtype", _dtype(self.name, self.dtype))
        object.__setattr__(self, "dims", _dims(self.name, self.dims))
        object.__setattr__(self, "axis", _axis(self.name, self.axis, len(self.dims)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by constructing a new spec, so that its dtype is NumPy's own object for it."""
        return TensorSpec, (self.name, self.dtype, self.dims, self.axis, self.kind)

    def __str__(self) -> str:
        if self.kind != "tensor":
            return f"{self.name}: {self.kind}"
        dtype = "string" if self.dtype.hasobject else self.dtype.name
        return f"{self.name}: {dtype}[{', '.join(map(str, self.shape('rows')))}]"

    @property
    def is_text(self) -> bool:
        """Whether its elements are strings, which have no fixed size in memory."""
        return self.dtype.hasobject and self.kind == "tensor"

    def shape(self, rows: Any) -> tuple[Any, ...]:
        """Return the whole shape: ``dims`` with ``rows``, a number or any other object, at ``axis``."""
        return shape_of(self.dims, self.axis, rows)

    def rows_first(self, array: Any) -> Any:
        """Return a view of a caller's array with rows first; a tensor without rows becomes one row."""
        if self.axis == 0:
            return array
        if self.axis is None:
            return array[None]
        return array.transpose(self.axis, *range(self.axis), *range(self.axis + 1, array.ndim))

    def rows_of(self, given: Any, rows: int) -> Array:
        """Return an output in a model's own memory with rows first; one without rows becomes one row.

        :raises ExecutionError: if it does not have ``rows`` rows.
        """
        if self.kind != "tensor":
            held = np.empty(1, object)
            held[0] = given
            return held
        array: Array = np.asarray(given)
        if self.axis is not None and array.shape[self.axis : self.axis + 1] != (rows,):
            axis = "first axis" if self.axis == 0 else f"axis {self.axis}"
            raise ExecutionError(
                f"output {self.name!r} has shape {array.shape} for a batch of {rows} rows: its {axis} does "
                f"not count rows, so the rows of different callers cannot be separated. {ALONE_FIX}"
            )
        rows_first: Array = self.rows_first(array)
        return rows_first

    def as_given(self, array: Any) -> Any:
        """Return a view of rows in the layout that callers get: the inverse of :meth:`rows_first`.

        Python values (:attr:`kind`) are taken out of the array that holds them.
        """
        if self.axis == 0:
            return array
        if self.axis is not None:
            return array.transpose(*range(1, self.axis + 1), 0, *range(self.axis + 1, array.ndim))
        if self.kind != "tensor":
            return array[0]
        return array[0, ...] if isinstance(array, np.ndarray) else array.as_given()

    @property
    def is_fixed(self) -> bool:
        """Whether every row has the same shape."""
        return not any(isinstance(dim, str) for dim in self.dims)

    def resolve(self, symbols: Mapping[str, int]) -> Dims | None:
        """Return a row's dimensions, given sizes of the named dimensions; ``None`` if a size is missing."""
        dims = tuple(symbols.get(dim, -1) if isinstance(dim, str) else dim for dim in self.dims)
        if -1 not in dims:
            return dims
        own = zip(dims, self.own_dims, strict=True)
        dims = tuple(symbols.get(name, -1) if dim == -1 else dim for dim, name in own)
        return None if -1 in dims else dims

    @property
    def own_dims(self) -> tuple[str, ...]:
        """Names for its dimensions that no other tensor uses, for a size on which inputs disagree."""
        axes = (axis for axis in range(len(self.dims) + 1) if axis != self.axis)
        return tuple(f"{self.name}.{axis}" for _, axis in zip(self.dims, axes, strict=False))


def restore_axes(moved: Iterable[TensorSpec], values: dict[str, Any]) -> None:
    """Move the rows of the outputs ``moved`` back to the axis where the model has them, for a caller."""
    for spec in moved:
        if spec.name in values:
            values[spec.name] = spec.as_given(values[spec.name])


def split_shared(specs: Sequence[TensorSpec]) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs that have rows, and the inputs that all rows of a batch share.

    If no input has rows, each request is a single row, and nothing is shared.
    """
    with_rows = tuple(spec for spec in specs if spec.axis is not None)
    if not with_rows:
        return tuple(specs), ()
    return with_rows, tuple(spec for spec in specs if spec.axis is None)


def varying_dims(specs: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Return the names of the dimensions that vary, in the order in which they first appear."""
    return tuple(dict.fromkeys(dim for spec in specs for dim in spec.dims if isinstance(dim, str)))


@dataclass(slots=True)
class Timing:
    """The times of one request's steps, in ns.

    ``queue_ns`` is the time from arrival to launch. ``copy_in_ns`` is the time to gather the rows and, on a
    device with separate memory, to copy them there; ``copy_out_ns`` is the time to copy the outputs back.
    ``compute_ns`` is the model's run time. For a request that was split, copy and compute times are summed
    over its batches. On a GPU only one in 8 short batches (below 5 ms) is timed, and the other batches of its
    size report its times.
    """

    queue_ns: int
    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int


class BatchRecord:
    """The size and times of one batch, which its requests share."""

    arena_wait_ns = copy_in_ns = compute_ns = copy_out_ns = 0

    def __init__(self, rows: int, launched_ns: int) -> None:
        self.rows = rows
        self.launched_ns = launched_ns


class InferResult(Mapping[str, Array]):
    """The outputs of one request by tensor name. The arrays belong to the caller, who may write to them.

    A model's sequence or map is a Python list or dictionary.
    """

    __slots__ = ("_arrival_ns", "_batches", "_outputs")

    def __init__(self, outputs: dict[str, Array], batches: tuple[BatchRecord, ...], arrival_ns: int) -> None:
        self._outputs = outputs
        self._batches = batches
        self._arrival_ns = arrival_ns

    def __getitem__(self, name: str) -> Array:
        try:
            return self._outputs[name]
        except KeyError:
            raise KeyError(
                f"this answer has no output {show(name)}; it has {sorted(self._outputs)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        values = self._outputs.items()
        shapes = ", ".join(
            f"{name}: {getattr(value, 'shape', type(value).__name__)}" for name, value in values
        )
        return f"<InferResult {shapes} batch_rows={self.batch_rows}>"

    @property
    def batches(self) -> int:
        """The number of batches that computed the request: 1, or more if it was split."""
        return len(self._batches)

    @property
    def batch_rows(self) -> int:
        """The number of rows in this request's batch; in the largest one if the request was split."""
        return max(batch.rows for batch in self._batches)

    @property
    def launched_ns(self) -> int:
        """When its first batch was launched, on the same clock as :attr:`BatchTrace.launched_ns`."""
        return self._arrival_ns + self._queue_ns

    @property
    def timing(self) -> Timing:
        """The times of this request's steps."""
        batches = self._batches
        return Timing(
            self._queue_ns,
            sum(batch.copy_in_ns for batch in batches),
            self._compute_ns,
            sum(batch.copy_out_ns for batch in batches),
        )

    # A server reads these for each request, and almost every request is in a single batch.

    @property
    def _queue_ns(self) -> int:
        batches = self._batches
        launched_ns = batches[0].launched_ns
        if len(batches) > 1:
            launched_ns = min([batch.launched_ns for batch in batches])
        return launched_ns - self._arrival_ns

    @property
    def _compute_ns(self) -> int:
        batches = self._batches
        if len(batches) == 1:
            return batches[0].compute_ns
        return sum([batch.compute_ns for batch in batches])

    @classmethod
    def join(
        cls, parts: "Sequence[InferResult]", axes: Mapping[str, int] = MappingProxyType({})
    ) -> "InferResult":
        """Join the results of a split request's parts into one result, with the rows in order.

        :param axes: the axis that counts rows, by output name, for outputs where it is not the first.
        :raises ExecutionError: if the parts of a data-dependent output differ in more than their rows.
        """
        outputs = {}
        for name in parts[0]._outputs:
            arrays = [part._outputs[name] for part in parts]
            try:
                outputs[name] = np.concatenate(arrays, axes.get(name, 0))
            except ValueError as error:
                raise ExecutionError(
                    f"the request was split, and its parts cannot be joined: output {name!r} has shapes "
                    f"{show(sorted({array.shape for array in arrays}))}. Send no more rows than a batch holds"
                ) from error
        batches = tuple(batch for part in parts for batch in part._batches)
        return cls(outputs, batches, parts[0]._arrival_ns)


class Views(tuple[Array, ...]):  # noqa: SLOT001  (a tuple's subclass cannot have slots that hold anything)
    """Arrays that may be views of a caller's array without the caller's knowledge.

    If the caller resized that array with ``refcheck=False``, NumPy would not check for views, and they would
    read freed memory. NumPy refuses to resize an array that has weak references, so this keeps some.
    """

    def __init__(self, _: Iterable[Array]) -> None:
        self._pins = pins(self)


def pins(arrays: Iterable[Any]) -> list[ref[Array]]:
    """Return weak references that keep arrays from being resized for as long as they exist."""
    found = []
    for array in arrays:
        owner = array
        while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
            owner = owner.base
        if isinstance(owner, np.ndarray):
            found.append(ref(owner))
    return found


def copy_rows(rows: Array, view: Array) -> None:
    """Copy rows into a view of the same shape; a plain assignment would broadcast a changed shape."""
    if rows.shape != view.shape:
        raise ValueError(f"rows of shape {rows.shape} where {view.shape} was announced")
    view[...] = rows


def gather(arrays: Sequence[Array], view: Array, counts: list[int] | None) -> None:
    """Copy the rows of several requests, one after the other, into a view with room for exactly these rows.

    :param counts: the number of rows of each request; ``None`` if each has one.
    :raises ValueError: if an array's number of rows has changed.
    """
    np.concatenate(arrays, out=view)
    # If one array has grown and another has shrunk, the total still fits, but the rows between them shift.
    # With as many arrays as rows, each has one row if no array has more than one.
    is_changed = max(map(len, arrays)) > 1 if counts is None else list(map(len, arrays)) != counts
    if is_changed:
        raise ValueError("the number of rows of some arrays has changed")


def content_of(value: Array) -> tuple[Dims, bytes | tuple[str, ...]]:
    """Return an array's shape and its content as bytes or strings, which are equal if the arrays are."""
    flat = value.ravel()
    return value.shape, tuple(flat.tolist()) if value.dtype.hasobject else flat.tobytes()


def has_masked(array: object) -> bool:
    """Return whether an array has masked values, which a plain array cannot represent."""
    if not isinstance(array, np.ma.MaskedArray):
        return False
    mask = np.ma.getmask(array)
    return bool(np.ascontiguousarray(mask).view(np.bool_).any())  # A structured mask holds booleans too.


def convert(spec: TensorSpec, value: Any) -> Array:
    """Return nested lists or a number as an array of the tensor's dtype, if that changes no value.

    Rounding an int or a float to a narrower float is allowed, since Python's own numbers have no width.

    :raises InputError: for ragged lists, and for values that the dtype cannot hold.
    """
    if holds_text(value):
        raise InputError(
            f"input {spec.name!r} is {spec.dtype.name}; some of the values given are text. Give numbers"
        )
    try:
        given = np.asarray(_as_uint64(value) if spec.dtype == np.uint64 else value)
    except ValueError as error:
        raise InputError(
            f"input {spec.name!r} takes shape {shape_text(spec)}; the lists given are ragged ({error})"
        ) from error
    kinds = {"f": "biuf", "c": "biufc", "i": "biu", "u": "biu", "b": "b"}.get(spec.dtype.kind, "")
    if given.size and given.dtype.kind not in kinds:
        raise InputError(
            f"input {spec.name!r} is {spec.dtype.name}; the values given are {given.dtype} and cannot be "
            "converted without changing them. Give an array of that dtype"
        )
    converted = cast(given, spec.dtype)
    if spec.dtype.kind in "iu":
        overflows = not np.array_equal(converted, given)
    else:
        infinite = np.isinf(converted)
        overflows = bool(infinite.any()) and not np.array_equal(infinite, np.isinf(given))
    if overflows:
        limits = np.iinfo(spec.dtype) if spec.dtype.kind in "iu" else np.finfo(spec.dtype)
        raise InputError(
            f"input {spec.name!r} is {spec.dtype.name}, which holds {limits.min} to {limits.max}; "
            "a value given is outside that range"
        )
    return converted


def holds_text(value: Any) -> bool:
    """Return whether a value is text, or lists that contain text at any depth.

    NumPy's own array of them would hold every item, numbers too, in as many bytes as the longest text.
    """
    if not isinstance(value, list | tuple):
        return isinstance(value, str | bytes)
    lists: list[Any] = [value]
    for _ in range(NDIM_MAX):
        kinds = {kind for items in lists for kind in set(map(type, items))}
        if any(issubclass(kind, str | bytes) for kind in kinds):
            return True
        if not any(issubclass(kind, list | tuple) for kind in kinds):
            return False
        lists = [item for items in lists for item in items if isinstance(item, list | tuple)]
    return False


def to_array(value: Any) -> Array:
    """Return a value as an array; one that holds text has dtype ``object``, which keeps text as it is."""
    return np.array(value, object) if holds_text(value) else np.asarray(value)


def is_array(value: object) -> bool:
    """Return whether a value is an array of any library."""
    return (
        hasattr(value, "__array__") or hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__")
    )


def as_numpy(value: Any) -> Array:
    """Return an array of any library as a NumPy array, without a copy if possible."""
    if (
        hasattr(value, "__array__")
        or hasattr(value, "__array_interface__")
        or not hasattr(value, "__dlpack__")
    ):
        return np.asarray(value)
    return np.from_dlpack(value)


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array as another dtype, whatever NumPy's settings for values that do not fit.

    With ``np.seterr(all="raise")`` or ``warnings.simplefilter("error")`` NumPy alone would raise.
    """
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def _as_uint64(value: Any) -> Any:
    """Return whole numbers as uint64: NumPy alone converts numbers on both sides of 2**63 to floats."""
    exact = np.array(value, object)
    if all(type(item) is int and 0 <= item < 2**64 for item in exact.flat):
        return exact.astype(np.uint64)
    return value


def _dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """Return the dtype of the tensor ``name``.

    :raises ModelError: for anything that is not a dtype of values in fixed memory.
    """
    try:
        known: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype)  # None would be float64.
    except Exception:  # NumPy raises TypeError or ValueError; a foreign object may raise anything.
        known = None
    if known is None or (known.hasobject and known != np.dtype(object)):
        raise ModelError(
            f"the dtype of {name!r} must be a NumPy dtype of values in fixed memory, such as 'float32', or "
            f"object for strings, not {show(dtype)}"
        )
    if known.kind in "SU" and not known.itemsize:
        return np.dtype(object)  # `str` and `bytes` give no length, so strings of any length are meant.
    if not known.isnative:
        known = known.newbyteorder("=")  # Byte order changes no value, and arrays are converted.
    # NumPy has one object for each of its dtypes, and checks look for that object; an unpickled one differs.
    try:
        own: np.dtype[Any] = np.dtype(known.str)
    except TypeError:  # NumPy does not know another library's code, such as "<f1" for float8_e5m2.
        return known
    return own if own == known else known


def _axis(name: str, axis: Any, dims: int) -> int | None:
    """Return the axis that counts rows of a tensor with ``dims`` other axes.

    :raises ModelError: for an axis that it does not have.
    """
    if axis is None:
        return None
    try:
        known = as_int(axis)
    except Exception:  # Foreign objects may raise anything.
        known = -1
    if not 0 <= known <= dims:
        raise ModelError(
            f"the axis of {name!r} that counts rows must be a number from 0 to {dims}, or None if it has "
            f"no rows, not {show(axis)}"
        )
    return known


def _dims(name: str, dims: Any) -> tuple[int | str, ...]:
    """Return the dimensions of one row of the tensor ``name``: sizes as ``int``, and names.

    :raises ModelError: for anything else.
    """
    try:
        if isinstance(dims, str):
            raise TypeError
        return tuple([dim if isinstance(dim, str) else _size(dim) for dim in dims])
    except Exception:  # Foreign objects may raise anything.
        raise ModelError(
            f"the dims of {name!r} must be a tuple of sizes ≥ 0 and names of dimensions that vary, such as "
            f"(3, 'length'), not {show(dims)}. Leave out the axis that counts rows, and give a dimension "
            "that varies a name instead of -1 or None"
        ) from None


def _size(dim: Any) -> int:
    size = as_int(dim)
    if size < 0:
        raise ValueError
    return size


def shape_of(dims: Sequence[Any], axis: int | None, rows: Any) -> tuple[Any, ...]:
    """Return the whole shape of a tensor: ``dims``, with ``rows`` inserted at ``axis`` if there is one."""
    return tuple(dims) if axis is None else (*dims[:axis], rows, *dims[axis:])


def shape_text(spec: TensorSpec) -> str:
    """Return the shape of an array of this spec for a message, such as ``(rows, 3, length)``."""
    return f"({', '.join(map(str, spec.shape('rows')))})"


def check_shape(spec: TensorSpec, shape: Sequence[int]) -> None:
    """Check the shape of an array for an input: its number of axes, and the sizes that the model fixes.

    :raises InputError: if the model cannot take it.
    """
    expected = spec.shape("rows")
    if len(shape) == len(expected) and all(
        given == dim for dim, given in zip(expected, shape, strict=True) if not isinstance(dim, str)
    ):
        return
    if spec.axis == 0 and len(shape) == len(spec.dims):
        fix = "For a single row, add the batch axis: array[None]"
    else:
        fix = "The model fixes the size of every axis that has no name"
    raise InputError(f"input {spec.name!r} takes shape {shape_text(spec)}, given {tuple(shape)}. {fix}")


def too_many_rows(rows: int, rows_max: int, option: str = "max_queue_rows") -> InputError:
    """Return the error for a request with more rows than an engine's queue can ever hold."""
    return InputError(
        f"{rows} rows are more than the queue can ever hold ({rows_max}). "
        f"Send them in several calls, or open the engine with a larger {option}"
    )
