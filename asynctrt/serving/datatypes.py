"""KServe's datatypes and NumPy's, and the wire form of the one that is not a number: BYTES."""

import reprlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from asynctrt.errors import InputError, ModelError, RequestError
from asynctrt.tensors import Array, TensorSpec, convert

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
"""KServe's names by NumPy's; ``bfloat16`` is that of ``ml_dtypes``. Byte strings (``S32``) are BYTES."""

LENGTH_NBYTES: Final = 4
"""An element of a BYTES tensor has its length before it, little-endian."""

DIMS_MAX: Final = 32
"""Dimensions of a tensor, and lists within lists of one that is given as JSON."""


Buffer = bytes | memoryview


def size_of(shape: Sequence[int]) -> int:
    """The number of elements, exact whatever the sizes."""
    size = 1
    for length in shape:
        size *= length
    return size


def datatype_of(spec: TensorSpec) -> str:
    """KServe's name of a tensor's dtype.

    :raises ModelError: for one that has none.
    """
    dtype = spec.dtype
    if dtype.kind == "S" and dtype.itemsize:
        return "BYTES"
    name = DATATYPES.get(dtype.name)
    if name is None or not dtype.isnative:
        raise ModelError(
            f"tensor {spec.name!r} is {dtype}, which KServe's protocol has no name for. It has "
            f"{sorted(DATATYPES)} and byte strings of a fixed size, such as 'S32'"
        )
    return name


def read_bytes(spec: TensorSpec, raw: memoryview, count: int) -> Array:
    """``count`` elements of a BYTES tensor, from their wire form.

    :raises InputError: when lengths and bytes do not come out even, or an element does not fit the model.
    """
    elements: list[bytes] = []
    position = 0
    for _ in range(count):
        start = position + LENGTH_NBYTES
        length = int.from_bytes(raw[position:start], "little")
        position = start + length
        if position > len(raw):
            raise InputError(
                f"input {spec.name!r}: element {len(elements)} of {count} ends at byte {position}, but "
                f"there are {len(raw)}. Each element is its length in 4 bytes, little-endian, and its bytes"
            )
        elements.append(bytes(raw[start:position]))
    if position != len(raw):
        raise InputError(
            f"input {spec.name!r}: {len(raw) - position} bytes are left after its {count} elements"
        )
    return strings(spec, elements)


def read_raw(spec: TensorSpec, shape: Sequence[int], body: Buffer, start: int = 0) -> Array:
    """A tensor of numbers as a view of a message: rows are copied once, into the slab of their batch.

    :raises InputError: for a BOOL that is neither 0 nor 1, with which a model may do anything.
    """
    array: Array = np.ndarray(shape, spec.dtype, body, start)
    if spec.dtype.kind == "b" and array.size and int(array.view(np.uint8).max()) > 1:
        raise InputError(f"input {spec.name!r} is BOOL: each of its bytes is 0 or 1")
    return array


def read_tensor(spec: TensorSpec, shape: Sequence[int], body: Buffer, start: int, nbytes: int) -> Array:
    """The tensor whose wire form is ``nbytes`` of a message from ``start`` on; numbers as a view.

    :raises InputError: for bytes that are no such tensor.
    """
    if spec.dtype.kind == "S":
        return read_bytes(spec, memoryview(body)[start : start + nbytes], size_of(shape)).reshape(shape)
    return read_raw(spec, shape, body, start)


def write_tensor(array: Array) -> Buffer:
    """The wire form of a tensor: its bytes in C order, or :func:`write_bytes`."""
    if array.dtype.kind == "S":
        return write_bytes(array)
    if not array.size:
        return b""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if array.dtype.kind == "V":  # bfloat16, whose format no memoryview knows.
        array = array.view(np.uint16)
    return array.data.cast("B")


def write_bytes(array: Array) -> bytes:
    """The wire form of a BYTES tensor."""
    elements = [bytes(element) for element in array.ravel().tolist()]
    return b"".join([part for item in elements for part in (len(item).to_bytes(4, "little"), item)])


def from_json(spec: TensorSpec, data: Any, shape: tuple[int, ...]) -> Array:
    """A tensor given as JSON, nested or flat, as an array of ``shape``.

    :raises InputError: for values or a number of values that do not fit.
    """
    if not isinstance(data, list):
        raise InputError(f"input {spec.name!r}: data is a list, not {type(data).__name__}")
    values = _flat(spec, data)
    if spec.dtype.kind == "S":
        array = strings(spec, [_encoded(spec, item) for item in values])
    elif str in set(map(type, values)):
        # NumPy would make room for the longest of them in every element before anybody could refuse it.
        raise InputError(f"input {spec.name!r} is {spec.dtype.name}: in JSON its elements are no strings")
    elif spec.dtype.name == "bfloat16":
        array = _bfloats(spec, data)
    else:
        array = convert(spec, data)
    if array.size != size_of(shape):
        raise InputError(f"input {spec.name!r} has {array.size} values, but shape {list(shape)}")
    return array.reshape(shape)


def to_json(array: Array) -> Any:
    """The values of a tensor, flat, as something that JSON can hold. NaN becomes null.

    :raises RequestError: for values that it cannot.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "S":
        try:
            return [item.decode() for item in flat.tolist()]
        except UnicodeDecodeError as error:
            raise RequestError("an output holds bytes that are no text: ask for binary_data") from error
    if flat.dtype.name == "bfloat16":
        flat = flat.astype(np.float32)
    if flat.dtype.kind == "f" and np.isinf(flat).any():
        raise RequestError("an output holds infinities, which JSON has no word for: ask for binary_data")
    return flat


def brief(value: object) -> str:
    """The beginning of a value's ``repr``, without going through all that a client may have nested in it."""
    short = reprlib.Repr()
    short.maxlevel = 2
    return short.repr(value)[:80]


def _flat(spec: TensorSpec, data: list[Any]) -> list[Any]:
    """The values of nested lists, in order."""
    values = data
    for _ in range(DIMS_MAX):
        if list not in set(map(type, values)):
            return values
        values = list(chain.from_iterable([item if type(item) is list else (item,) for item in values]))
    raise InputError(f"input {spec.name!r}: data has lists within lists, {DIMS_MAX} of them at the most")


def _bfloats(spec: TensorSpec, data: list[Any]) -> Array:
    """NumPy converts to ``bfloat16`` without a word of what has become infinite."""
    wide = convert(TensorSpec(spec.name, np.dtype("float32"), spec.dims), data)
    array = wide.astype(spec.dtype)
    if not np.array_equal(np.isinf(array), np.isinf(wide)):
        raise InputError(f"input {spec.name!r} is bfloat16; a value given is beyond its largest, 3.39e38")
    return array


def _encoded(spec: TensorSpec, item: Any) -> bytes:
    if not isinstance(item, str):
        raise InputError(f"input {spec.name!r} is BYTES: in JSON its elements are strings, not {brief(item)}")
    return item.encode()


def strings(spec: TensorSpec, elements: list[bytes]) -> Array:
    """Elements as an array of the model's dtype, which is of a fixed size and ends at the first NUL.

    A dtype without a size, as a client has it, becomes that of the longest.
    """
    longest = spec.dtype.itemsize
    for number, element in enumerate(elements):
        if longest and len(element) > longest:
            raise InputError(
                f"input {spec.name!r}: element {number} has {len(element)} bytes; the model takes {longest}"
            )
        if element.endswith(b"\0"):
            raise InputError(
                f"input {spec.name!r}: element {number} ends in a NUL byte, which the model could not see"
            )
    return np.array(elements, spec.dtype)
