"""Convert tensors to and from their wire form: KServe's datatypes, raw bytes, and values in JSON."""

import contextlib
import importlib
import reprlib
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from asynctrt.errors import ExecutionError, InputError, MissingExtraError, ModelError, RequestError
from asynctrt.tensors import Array, TensorSpec, cast, convert, shape_text

DATATYPES: Final = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}
"""KServe's datatype for each NumPy dtype; ``bfloat16`` is that of ``ml_dtypes``. Strings are BYTES."""

DTYPES: Final = {datatype: dtype for dtype, datatype in DATATYPES.items()}
"""The name of the NumPy dtype for each of KServe's datatypes."""

TEXT: Final = "SO"
"""The dtype kinds of BYTES tensors: byte strings of a fixed size, and objects, which are strings."""

LENGTH_NBYTES: Final = 4
"""Bytes of the little-endian length before each element of a BYTES tensor."""
LENGTH: Final = struct.Struct("<I")

NUMBERS: Final = {bool, int, float}
"""The types of JSON's numbers and booleans."""

CODES: Final = {**{code: code for code in "bhiqBHIQefd"}, "l": "q", "L": "Q"}
"""The code of ``struct``, which refuses numbers that do not fit, for each ``dtype.char`` of numbers."""

PIECE: Final = 4096
"""The number of values or byte strings converted at a time: it takes 0.2 to 0.8 ms."""

DIMS_MAX: Final = 32
"""The largest number of dimensions of a tensor, and of nesting levels in one given as JSON."""

BINARY_FIX: Final = (
    'use binary_data, in the parameters of an output of KServe V2 ({"name": ..., "parameters": '
    '{"binary_data": true}})'
)
"""What to do about an output that JSON cannot hold."""

Buffer = bytes | bytearray | memoryview

Pause = Callable[[], None]
"""Called between pieces of work in another thread, to let the event loop run."""


def no_pause() -> None:
    """Do nothing: the work is short enough not to delay the event loop."""


def size_of(shape: Sequence[int]) -> int:
    """Return the exact number of elements, however large the sizes are."""
    size = 1
    for length in shape:
        size *= length
    return size


def datatype_of(spec: TensorSpec) -> str:
    """Return KServe's datatype for a tensor."""
    dtype = spec.dtype
    if spec.kind != "tensor":
        raise ModelError(
            f"KServe carries tensors alone, and {spec.name!r} is a {spec.kind}: export the model without it "
            "(a classifier from skl2onnx with zipmap=False)"
        )
    if dtype.kind in TEXT:
        return "BYTES"
    name = DATATYPES.get(dtype.name)
    if name is None or not dtype.isnative:
        raise ModelError(
            f"KServe has no datatype for {dtype}, the dtype of tensor {spec.name!r}. It has datatypes for "
            f"{', '.join(sorted(DATATYPES))}, for strings, which are 'object', and for byte strings of a "
            "fixed size, such as 'S32'"
        )
    return name


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the NumPy dtype for a datatype: ``object`` for BYTES.

    :raises KeyError: if KServe has no such datatype.
    :raises MissingExtraError: for BF16 without ``ml_dtypes``.
    """
    if datatype == "BYTES":
        return np.dtype(object)
    name = DTYPES[datatype]
    with contextlib.suppress(TypeError):
        return np.dtype(name)
    try:
        # Importing it registers the name with NumPy.
        dtype: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise MissingExtraError(f"a tensor is {name}, which NumPy lacks: pip install ml_dtypes") from None
    return dtype


# ---- raw tensors


def read_tensor(
    spec: TensorSpec,
    shape: Sequence[int],
    body: Buffer,
    start: int,
    nbytes: int,
    pause: Pause = no_pause,
    *,
    decodes: bool = True,
) -> Array:
    """Read a tensor from the ``nbytes`` of a message that begin at ``start``. Numbers are a view of it: their
    rows are copied once, into their batch's slab.

    The caller has checked ``nbytes`` against the shape (see :func:`check_nbytes`).
    """
    if spec.dtype.kind in TEXT:
        raw = memoryview(body)[start : start + nbytes]
        return read_bytes(spec, raw, size_of(shape), pause, decodes=decodes).reshape(shape)
    array: Array = np.ndarray(shape, spec.dtype, body, start)
    if spec.dtype.kind == "b" and array.size and int(array.view(np.uint8).max()) > 1:
        raise InputError(f"tensor {spec.name!r} is BOOL, so each of its bytes must be 0 or 1")
    return array


def read_bytes(
    spec: TensorSpec, raw: memoryview, count: int, pause: Pause = no_pause, *, decodes: bool = True
) -> Array:
    """Read the ``count`` elements of a BYTES tensor, calling ``pause`` at intervals."""
    elements: list[bytes] = []
    position, nbytes = 0, len(raw)
    length_of = LENGTH.unpack_from
    while len(elements) < count:
        for _ in range(min(PIECE, count - len(elements))):
            start = position + LENGTH_NBYTES
            position = start + length_of(raw, position)[0] if start <= nbytes else start
            if position > nbytes:
                raise InputError(
                    f"tensor {spec.name!r}: element {len(elements)} of {count} ends at byte {position} of "
                    f"{nbytes}. Each element is a length of 4 bytes, little-endian, then that many bytes"
                )
            elements.append(raw[start:position].tobytes())
        pause()
    if position != len(raw):
        raise InputError(
            f"tensor {spec.name!r}: {len(raw) - position} bytes are left after its {count} elements"
        )
    return strings(spec, elements, pause, decodes=decodes)


def check_nbytes(spec: TensorSpec, shape: Sequence[int], nbytes: int) -> None:
    """Check the size of a raw tensor against its shape."""
    if spec.dtype.kind in TEXT:
        if nbytes < LENGTH_NBYTES * size_of(shape):
            raise InputError(f"tensor {spec.name!r} has {nbytes} bytes, too few for shape {list(shape)}")
    elif nbytes != size_of(shape) * spec.dtype.itemsize:
        raise InputError(
            f"tensor {spec.name!r} of shape {list(shape)} takes {size_of(shape) * spec.dtype.itemsize} "
            f"bytes, but {nbytes} are given"
        )


def write_tensor(array: Array, pause: Pause = no_pause) -> Buffer:
    """Return the wire form of a tensor: its bytes in C order, or :func:`write_bytes`."""
    if array.dtype.kind in TEXT:
        return write_bytes(array, pause)
    if not array.size:
        return b""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if array.dtype.kind == "V":  # bfloat16, for which memoryview has no format.
        array = array.view(np.uint16)
    return array.data.cast("B")


def write_bytes(array: Array, pause: Pause = no_pause) -> bytes:
    """Return the wire form of a BYTES tensor, calling ``pause`` at intervals. Text is encoded as UTF-8."""
    flat, parts, pack = array.reshape(-1), [], LENGTH.pack
    for start in range(0, flat.size, PIECE):
        elements = [_utf8(element) for element in flat[start : start + PIECE].tolist()]
        parts.append(b"".join([part for item in elements for part in (pack(len(item)), item)]))
        pause()
    return b"".join(parts)


def strings(
    spec: TensorSpec, elements: list[bytes], pause: Pause = no_pause, *, decodes: bool = True
) -> Array:
    """Return elements as a one-dimensional array of the spec's dtype; for ``object``, decode them from UTF-8.

    A model with a dtype of fixed-size byte strings ignores trailing NULs, so elements that end in a NUL are
    refused.

    :param decodes: whether to decode elements of ``object`` to text; if not, they stay bytes.
    """
    is_text = spec.dtype.kind == "O"
    array = np.empty(len(elements), spec.dtype)
    for start in range(0, len(elements), PIECE):
        piece = elements[start : start + PIECE]
        if is_text:
            array[start : start + PIECE] = _decoded(spec, piece, start) if decodes else piece
        else:
            array[start : start + PIECE] = piece
            # NumPy cuts off long elements and drops trailing NULs: either changes the total size.
            if int(np.char.str_len(array[start : start + PIECE]).sum()) != sum(map(len, piece)):
                raise _unfit(spec, piece, start)
        pause()
    return array


def _decoded(spec: TensorSpec, elements: list[bytes], first: int) -> list[str]:
    """Decode elements to text.

    :param first: the index of the first element, for the message.
    """
    found: list[str] = []
    try:
        for element in elements:
            found.append(element.decode())  # noqa: PERF401  (its length tells which element failed)
    except UnicodeDecodeError as error:
        raise InputError(
            f"tensor {spec.name!r}: element {first + len(found)} is not UTF-8 text ({error.reason} at byte "
            f"{error.start}), and the model takes text"
        ) from error
    return found


def _unfit(spec: TensorSpec, elements: list[bytes], first: int) -> InputError:
    """Return the error for the first element that does not fit."""
    longest = spec.dtype.itemsize
    for number, element in enumerate(elements, first):
        if len(element) > longest:
            return InputError(
                f"tensor {spec.name!r}: element {number} has {len(element)} bytes; the model takes at most "
                f"{longest}"
            )
        if element.endswith(b"\0"):
            break
    return InputError(
        f"tensor {spec.name!r}: element {number} ends in a NUL byte, which the model would not see"
    )


# ---- tensors in JSON


def from_json(spec: TensorSpec, data: Any, shape: tuple[int, ...], pause: Pause = no_pause) -> Array:
    """Read a tensor given as JSON, nested or flat, as an array of ``shape``."""
    if not isinstance(data, list):
        if shape:
            raise InputError(f"input {spec.name!r}: data must be a list, not {type(data).__name__}")
        data = [data]
    if (packed := _packed(spec.dtype, data, size_of(shape))) is not None:
        return packed.reshape(shape)
    values, kinds = _flat(spec, data, pause)
    if len(values) != size_of(shape):
        raise InputError(f"input {spec.name!r} has {len(values)} values, but shape {list(shape)}")
    if spec.dtype.kind not in TEXT and not kinds <= NUMBERS:
        # Without this check, NumPy would widen every element to the longest string before refusing any.
        odd = next(value for value in values if type(value) not in NUMBERS)
        kind = "booleans" if spec.dtype.kind == "b" else "numbers"
        raise InputError(
            f"input {spec.name!r} is {spec.dtype.name}, so its values must be {kind}, not {brief(odd)}"
        )
    if len(values) <= PIECE:
        return _converted(spec, values).reshape(shape)
    arrays = []
    for start in range(0, len(values), PIECE):
        arrays.append(_converted(spec, values[start : start + PIECE]))
        pause()
    return np.concatenate(arrays).reshape(shape)


def _packed(dtype: np.dtype[Any], data: list[Any], count: int) -> Array | None:
    """Return nested or flat lists of ``count`` numbers as an array; ``None`` for many, or if they do not fit.

    NumPy alone takes four times as long, to find out what they are.
    """
    code = CODES.get(dtype.char)
    for _ in range(DIMS_MAX):
        if code is None or not data or len(data) > min(count, PIECE):
            return None
        if type(data[0]) is not list:
            break
        if set(map(type, data)) != {list} or len(set(map(len, data))) > 1:
            return None
        data = list(chain.from_iterable(data))
    if len(data) != count:
        return None
    try:
        return np.frombuffer(bytearray(struct.pack(f"<{count}{code}", *data)), dtype)
    except (struct.error, OverflowError):
        return None


def _converted(spec: TensorSpec, values: list[Any]) -> Array:
    """Convert a flat list from JSON."""
    if spec.dtype.kind in TEXT:
        return strings(spec, [_encoded(spec, item) for item in values])
    if spec.dtype.kind == "V":
        return _bfloats(spec, values)
    return convert(spec, values)


def to_json(array: Array, *, is_nested: bool = False, fix: str = BINARY_FIX) -> Any:
    """Return a tensor's values as a sequence that JSON can hold. NaN becomes null.

    :param is_nested: whether to return lists as deep as the tensor has axes, and a scalar's value alone; if
        not, the sequence is flat.
    :param fix: what to do about a value that JSON cannot hold, for the message.
    :raises RequestError: for byte strings that JSON cannot hold; infinities become null: see
        :func:`refuse_infinities`.
    :raises ExecutionError: for objects that are not strings.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind in TEXT:
        try:
            values = [_utf8(item).decode() for item in flat.tolist()]
        except UnicodeDecodeError as error:
            raise RequestError(
                f"a tensor holds bytes that are not UTF-8 text, which JSON cannot carry: {fix}"
            ) from error
        if not is_nested:
            return values
        flat = np.array(values, object)
        return flat.reshape(array.shape).tolist()
    if flat.dtype.kind == "V":  # bfloat16
        flat = flat.astype(np.float32)
    if not is_nested:
        return flat
    if not array.size:
        return array.tolist()
    return flat.reshape(array.shape) if array.ndim else flat[0]


def refuse_infinities(arrays: Iterable[Array], *, fix: str = BINARY_FIX) -> None:
    """Check that JSON can hold the numbers of tensors."""
    for array in arrays:
        wide = array.astype(np.float32) if array.dtype.kind == "V" else array
        if wide.dtype.kind == "f" and np.isinf(wide).any():
            raise RequestError(f"a tensor holds infinities, which JSON cannot carry: {fix}")


def brief(value: object) -> str:
    """Return the beginning of a value's ``repr``, without walking deeply nested values from a client."""
    short = reprlib.Repr()
    short.maxlevel = 2
    return short.repr(value)[:80]


def _flat(spec: TensorSpec, data: list[Any], pause: Pause) -> tuple[list[Any], set[type]]:
    """Flatten nested lists, in order; return the values and their types."""
    values = data
    for _ in range(DIMS_MAX):
        kinds: set[type] = set()
        for start in range(0, len(values), PIECE):
            kinds |= set(map(type, values[start : start + PIECE]))
            pause()
        if list not in kinds:
            return values, kinds
        if len(kinds) > 1 or len(set(map(len, values))) > 1:
            raise InputError(
                f"input {spec.name!r} takes shape {shape_text(spec)}; the lists given are ragged"
            )
        values = list(chain.from_iterable(values))
    raise InputError(f"input {spec.name!r}: data nests lists more than {DIMS_MAX} deep")


def _bfloats(spec: TensorSpec, data: list[Any]) -> Array:
    """Convert values to ``bfloat16``, refusing any that NumPy would silently turn into infinities."""
    wide = convert(TensorSpec(spec.name, np.dtype("float32"), spec.dims), data)
    array = cast(wide, spec.dtype)
    if not np.array_equal(np.isinf(array), np.isinf(wide)):
        raise InputError(f"input {spec.name!r} is bfloat16; a value is beyond its largest, 3.39e38")
    return array


def _encoded(spec: TensorSpec, item: Any) -> bytes:
    if not isinstance(item, str):
        raise InputError(
            f"input {spec.name!r} is BYTES, so in JSON its values must be strings, not {brief(item)}"
        )
    return item.encode()


def _utf8(item: Any) -> bytes:
    """Return a string of an output as bytes."""
    if isinstance(item, bytes):
        return item
    try:
        return str.encode(item)
    except (TypeError, UnicodeEncodeError) as error:
        raise ExecutionError(
            f"a tensor of strings holds {brief(item)} of type {type(item).__name__}: give str or bytes"
        ) from error
