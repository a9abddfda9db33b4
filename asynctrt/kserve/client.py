"""Write requests and read answers: the client's side of the protocol, for clients and load tests."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from asynctrt.errors import AsynctrtError, InputError, ModelError, RequestError, show
from asynctrt.kserve.codec import PlacedTensor, read_tensors
from asynctrt.kserve.datatypes import (
    DATATYPES,
    TEXT,
    Buffer,
    check_nbytes,
    dtype_of,
    read_tensor,
    refuse_infinities,
    to_json,
)
from asynctrt.kserve.json_codec import dump, mapping, parse_object
from asynctrt.tensors import Array, TensorSpec, cast, convert, has_masked, to_array

TEXT_LENGTH_MAX: Final = 300
"""Characters of a server's text that an error message quotes."""

JSON_FIX: Final = "replace it, because this server has no binary extension"
"""What to do about an input that a server without raw tensors cannot get."""

UNREADABLE: Final = (RequestError, ModelError, AttributeError, KeyError, TypeError, ValueError, OverflowError)
"""The errors raised while walking through malformed content."""


class AnswerError(AsynctrtError):
    """The server's answer breaks the protocol."""


# ---- requests


def as_arrays(inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return a request's inputs as arrays whose dtypes the protocol supports; see :func:`as_array`."""
    return {name: as_array(name, value) for name, value in inputs.items()}


def as_array(name: str, value: Any) -> Array:
    """Return an input as an array in native byte order. Text, and objects that are text or bytes, become
    an array of bytes objects."""
    if has_masked(value):
        raise InputError(
            f"input {name!r} has masked values, which a model cannot leave out. Replace them: "
            "array.filled(value)"
        )
    array = to_array(value)
    if array.dtype.kind in "UO":
        array = _byte_strings(name, array)
    if array.dtype.kind not in TEXT and array.dtype.name not in DATATYPES:
        raise InputError(
            f"KServe has no datatype for {array.dtype}, the dtype of input {name!r}. It has datatypes for "
            f"{', '.join(DATATYPES)} and for strings"
        )
    # The wire is little-endian, as is every machine that this code supports.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _byte_strings(name: str, array: Array) -> Array:
    """Encode an array of text, or of objects that are each text or bytes."""
    strings = np.empty(array.size, object)
    for index, item in enumerate(array.reshape(-1).tolist()):
        if not isinstance(item, str | bytes):
            raise InputError(f"input {name!r} holds objects of type {type(item).__name__}, not bytes or text")
        try:
            strings[index] = item.encode() if isinstance(item, str) else item
        except UnicodeEncodeError as error:
            raise InputError(f"input {name!r} has text that UTF-8 cannot hold: {error}") from error
    return strings.reshape(array.shape)


def describe(name: str, array: Array) -> dict[str, Any]:
    """Return the name, datatype and shape of an input that :func:`as_array` returned."""
    datatype = "BYTES" if array.dtype.kind in TEXT else DATATYPES[array.dtype.name]
    return {"name": name, "datatype": datatype, "shape": list(array.shape)}


def names_of(outputs: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the wanted outputs; ``None`` for all."""
    if isinstance(outputs, str):
        raise InputError(
            f"outputs must be names of the model's outputs, such as [{show(outputs)}], not {show(outputs)}. "
            "Answers of a server always come to this process: outputs='host' and 'device' are for an engine "
            "in it"
        )
    return None if outputs is None else tuple(outputs)


def describe_request(
    arrays: Mapping[str, Array],
    sizes: Sequence[int] | None,
    *,
    outputs: tuple[str, ...] | None = None,
    timeout: float | None = None,
    priority: int = 0,
) -> dict[str, Any]:
    """Return the head of a request: its tensors follow as raw bytes, and it asks for raw outputs.

    :param sizes: the number of raw bytes of each tensor; ``None`` puts the values into the JSON instead.
    :param outputs: as :func:`names_of` returns them.
    :param timeout: seconds that the request may be queued.
    """
    parameters: dict[str, Any] = {} if sizes is None else {"binary_data_output": True}
    if timeout is not None:
        parameters["timeout"] = max(1, round(timeout * 1e6))
    if priority:
        parameters["priority"] = priority
    content: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if sizes is None:
        refuse_infinities(arrays.values(), fix=JSON_FIX)
        content["inputs"] = [
            describe(name, array) | {"data": to_json(array, fix=JSON_FIX)} for name, array in arrays.items()
        ]
    else:
        content["inputs"] = [
            describe(name, array) | {"parameters": {"binary_data_size": nbytes}}
            for (name, array), nbytes in zip(arrays.items(), sizes, strict=True)
        ]
    if outputs is not None:
        content["outputs"] = [{"name": name} for name in outputs]
    return content


BINARY: Final = "binary_tensor_data"
"""The protocol extension that sends tensors as raw bytes after the JSON."""


HEAD_NBYTES: Final = "Inference-Header-Content-Length"
"""The HTTP header with the size of the JSON that raw tensors follow."""


def write_request(
    arrays: Mapping[str, Array], tensors: Sequence[Buffer] | None, **wanted: Any
) -> tuple[bytes, dict[str, str]]:
    """Return a request's body over HTTP, and the headers that describe it.

    :param tensors: the raw bytes of the arrays; ``None`` puts their values into the JSON instead, for servers
        without the binary extension.
    :param wanted: as for :func:`describe_request`.
    """
    sizes = None if tensors is None else [len(tensor) for tensor in tensors]
    head = dump(describe_request(arrays, sizes, **wanted))
    if tensors is None:
        return head, {"Content-Type": "application/json"}
    headers = {HEAD_NBYTES: str(len(head)), "Content-Type": "application/octet-stream"}
    return b"".join((head, *tensors)), headers


def takes_binary(server: Mapping[str, Any]) -> bool:
    """Return whether a server accepts raw tensors; a server without a list of extensions is assumed to."""
    extensions = server.get("extensions")
    return not isinstance(extensions, list) or BINARY in extensions


# ---- answers


def read_specs(tensors: Iterable[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    """Return the specs of a model's tensors from their descriptions in its metadata.

    The first axis counts rows if its size is open; if not, the tensor is always sent whole. Other open axes
    are called ``NAME.AXIS``.
    """
    specs = []
    try:
        for item in tensors:
            name, datatype = str(item["name"]), item["datatype"]
            sizes = [int(size) for size in item["shape"]]
            dims = [size if size >= 0 else f"{name}.{axis}" for axis, size in enumerate(sizes)]
            has_rows = sizes[:1] == [-1]
            specs.append(TensorSpec(name, _dtype(name, datatype), dims[has_rows:], 0 if has_rows else None))
    except UNREADABLE as error:
        raise AnswerError(f"the model's metadata cannot be read: {text_of(error)}") from error
    return tuple(specs)


def read_answer(body: bytes, headers: Mapping[str, str]) -> dict[str, Array]:
    """Return the outputs of an answer over HTTP: a JSON head and then raw tensors, or JSON alone."""
    length = headers.get(HEAD_NBYTES)
    try:
        head = body if length is None else body[: int(length)]
    except ValueError as error:
        raise AnswerError(f"{HEAD_NBYTES} is {length!r:.40}, not a number of bytes") from error
    try:
        outputs = place_outputs(parse_object(head, "the answer", len(head)))
        return read_outputs(outputs, body, len(head))
    except AnswerError as error:
        raise AnswerError(f"{error}; it begins {show(head)}") from error
    except UNREADABLE as error:
        raise AnswerError(f"the answer cannot be read: {text_of(error)}; it begins {show(head)}") from error


def place_outputs(content: Mapping[str, Any]) -> list[PlacedTensor]:
    """Return the outputs of an answer from its JSON head, in the order of their raw bytes."""
    outputs: list[PlacedTensor] = []
    try:
        for output in content["outputs"]:
            name, datatype = output["name"], output["datatype"]
            shape = tuple([int(size) for size in output["shape"]])
            nbytes = mapping(output, "parameters", repr(name)).get("binary_data_size")
            spec = TensorSpec(name, _dtype(name, datatype))
            if nbytes is None:
                outputs.append((spec, shape, 0, read_values(name, datatype, shape, output["data"])))
            else:
                check_nbytes(spec, shape, nbytes)
                outputs.append((spec, shape, nbytes, None))
    except UNREADABLE as error:
        raise AnswerError(f"the answer cannot be read: {text_of(error)}") from error
    return outputs


def read_outputs(outputs: Sequence[PlacedTensor], body: Buffer, start: int) -> dict[str, Array]:
    """Return outputs by name, reading raw ones from ``body`` at ``start``; numbers are views of it."""
    if sum([nbytes for _, _, nbytes, _ in outputs]) > len(body) - start:
        raise AnswerError(
            f"the answer cannot be read: its outputs take more than the {len(body) - start} bytes after its "
            "header"
        )
    try:
        return read_tensors(outputs, body, start, decodes=False)
    except UNREADABLE as error:
        raise AnswerError(f"the answer cannot be read: {text_of(error)}") from error


def read_output(name: str, datatype: str, shape: Sequence[int], raw: Buffer) -> Array:
    """Return an output from its raw bytes alone, as sent over gRPC.

    :raises ValueError: if the datatype is unknown, or the bytes do not fit datatype and shape.
    """
    spec = TensorSpec(name, _dtype(name, datatype))
    check_nbytes(spec, shape, len(raw))
    return read_tensor(spec, shape, raw, 0, len(raw), decodes=False)


def read_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Array:
    """Return an output from its values, nested or flat. A ``null`` among floats is NaN.

    :raises ValueError: if the datatype is unknown, or the values or their number do not fit.
    """
    dtype = _dtype(name, datatype)
    if dtype.kind == "O":
        return _byte_strings(name, np.array(values, object)).reshape(shape)
    if dtype.kind in "fV":  # bfloat16 has kind V, which NumPy does not treat as a float.
        return cast(np.array(values, np.float64), dtype).reshape(shape)
    return convert(TensorSpec(name, dtype), values).reshape(shape)


def _dtype(name: str, datatype: Any) -> np.dtype[Any]:
    try:
        return dtype_of(datatype)
    except (KeyError, TypeError):
        raise ValueError(f"tensor {name!r} has the unknown datatype {datatype!r:.40}") from None


def text_of(error: BaseException) -> str:
    """Return an error's message, shortened, or its class if it has none."""
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return str(error)[:TEXT_LENGTH_MAX] or type(error).__name__
