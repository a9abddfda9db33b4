"""KServe V2 from the side of who asks: addresses, what a server says of a model, requests, answers.

What the targets over HTTP, gRPC and websocket have in common. Nothing here waits or knows of a socket.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import numpy as np

from asynctrt.errors import (
    AsynctrtError,
    InputError,
    OptionsError,
    RequestError,
    TargetError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedError,
    UsageError,
)
from asynctrt.loadtest.targets import BatchCounters, TargetSpec
from asynctrt.serving.datatypes import LENGTH_NBYTES, Buffer, size_of, to_json, write_tensor
from asynctrt.serving.datatypes import read_raw as read_numbers
from asynctrt.serving.wire import (
    as_array,
    describe,
    describe_request,
    dtype_of,
    dump,
    mapping,
    parse_object,
)
from asynctrt.tensors import Array, TensorSpec, convert

MODELS: Final = "/v2/models/"
BINARY: Final = "binary_tensor_data"
"""The extension of a server that takes and gives raw tensors over HTTP."""
SAID_LENGTH_MAX: Final = 300
"""Characters of what a server says that go into an error's message."""

REFUSALS: Final = (RequestError, UnauthorizedError, UnknownModelError, TooLargeError, UnsupportedError)
"""What a server can have against a request, each with its status for HTTP and its code for gRPC."""

UNREADABLE: Final = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
"""What comes of going through JSON that is not what it should be."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a model is.

    :param server: scheme, host and port, and what is before ``/v2`` in the path.
    :param model: empty if nobody has said which.
    :param version: empty: the newest.
    """

    server: str
    model: str = ""
    version: str = ""

    @property
    def path(self) -> str:
        """Of the model, from ``/v2`` on."""
        version = f"/versions/{quote(self.version, safe='')}" if self.version else ""
        return f"{MODELS}{quote(self.model, safe='')}{version}"


def read_address(spec: TargetSpec) -> Address:
    """``http://HOST:PORT/v2/models/NAME[/versions/VERSION]``, with ``/ws`` at the end for ``ws``; or without
    the model, for ``spec`` to say it.

    :raises UsageError: for what is none of these.
    :raises OptionsError: if the address and ``spec`` say different models.
    """
    is_websocket = spec.scheme in ("ws", "wss")
    verb = "/ws" if is_websocket else "/infer"
    example = f"{spec.scheme}://HOST:PORT/v2/models/NAME{verb if is_websocket else ''}"
    server, path = _split(spec, example)
    before, found, model = path.rpartition(MODELS)
    if not found:
        model = ""
        before, found, rest = path.rstrip("/").partition("/v2")
        if rest not in ("", verb) or (before and not found):
            raise UsageError(f"{spec.where!r} is no model's address: {example}")
    return _named(spec, server + before, *_model(model, verb))


def read_grpc_address(spec: TargetSpec) -> Address:
    """``grpc://HOST:PORT/NAME[/versions/VERSION]``, or without the model, for ``spec`` to say it.

    :raises UsageError: for what is none of these.
    :raises OptionsError: if the address and ``spec`` say different models.
    """
    example = f"{spec.scheme}://HOST:PORT/NAME"
    server, path = _split(spec, example)
    if urlsplit(server).port is None:
        raise UsageError(f"{spec.where!r} has no port: {example}")
    return _named(spec, server, *_model(path[1:], ""))


def _split(spec: TargetSpec, example: str) -> tuple[str, str]:
    """An address up to its path, and the path."""
    try:
        parts = urlsplit(spec.where)
        is_right = bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        is_right = False
    if not is_right:
        raise UsageError(f"{spec.where!r} is no address of a server: {example}")
    return f"{parts.scheme}://{parts.netloc}", parts.path


def _model(path: str, verb: str) -> tuple[str, str]:
    """Name and version. A name may hold slashes, so the path is read from its end."""
    parts = path.rstrip("/").removesuffix(verb).split("/")
    version = ""
    if len(parts) > 2 and parts[-2] == "versions":
        version = unquote(parts.pop())
        parts.pop()
    return unquote("/".join(parts)), version


def _named(spec: TargetSpec, server: str, model: str, version: str) -> Address:
    if model and spec.model and model != spec.model:
        raise OptionsError(
            f"the address says model {model!r}, and the option model says {spec.model!r}: give one of them"
        )
    return Address(server, model or spec.model or "", version)


def choose_model(names: Collection[str], where: str) -> str:
    """The only one of a server's models.

    :raises OptionsError: if there are others.
    """
    if len(names) != 1:
        listed = ", ".join(repr(name) for name in sorted(names)) or "none that are ready"
        raise OptionsError(
            f"{where} does not say which model, and the server has {listed}: name it in the address, or with "
            "--model NAME"
        )
    (name,) = names
    return name


# ---- what a server says


def read_index(models: Iterable[Mapping[str, Any]]) -> set[str]:
    """The names of the models that can be asked, of what a server lists."""
    return {str(item["name"]) for item in models if item.get("state") in (None, "", "READY")}


def read_specs(tensors: Iterable[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    """What one row of a model's tensors is made of, by their descriptions in its metadata.

    The first axis is that of the rows, whether it is open or not: who sends to a model that takes 3 rows and
    no others sends 3 rows. Other open axes are ``NAME.AXIS``.

    :raises TargetError: for a description that is none, or a datatype that is unknown.
    """
    specs = []
    try:
        for item in tensors:
            name, datatype = str(item["name"]), item["datatype"]
            sizes = [int(size) for size in item["shape"]][1:]
            dims = [size if size >= 0 else f"{name}.{axis}" for axis, size in enumerate(sizes, start=1)]
            specs.append(TensorSpec(name, _dtype(name, datatype), tuple(dims)))
    except UNREADABLE as error:
        raise TargetError(f"the model's metadata cannot be read: {_said(error)}") from error
    return tuple(specs)


def read_counters(models: Sequence[Mapping[str, Any]]) -> BatchCounters:
    """What the statistics of a model say, all its versions together. They are Triton's extension.

    :raises TypeError: and others of ``UNREADABLE``, if they are no such statistics.
    """
    sums = dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 0)
    requests = rows = batches = 0
    by_rows: dict[int, int] = {}
    for model in models:
        rows += int(model["inference_count"])
        batches += int(model["execution_count"])
        durations = model["inference_stats"]
        requests += int(durations["success"]["count"])
        for name in sums:
            sums[name] += int(durations[name]["ns"])
        for item in model.get("batch_stats", ()):
            size = int(item["batch_size"])
            by_rows[size] = by_rows.get(size, 0) + int(item["compute_infer"]["count"])
    return BatchCounters(
        requests,
        rows,
        batches,
        queue_ns=sums["queue"],
        copy_in_ns=sums["compute_input"],
        compute_ns=sums["compute_infer"],
        copy_out_ns=sums["compute_output"],
        by_rows=dict(sorted(by_rows.items())),
    )


# ---- requests


def as_arrays(inputs: Mapping[str, Any]) -> dict[str, Array]:
    """A request's inputs as arrays that the protocol has datatypes for.

    :raises InputError: for one that it has none for.
    """
    return {name: as_array(name, _strings(name, value)) for name, value in inputs.items()}


def _strings(name: str, value: Any) -> Any:
    """Byte strings and text in an array of objects, as readers of files and Triton's client have them."""
    array = np.asarray(value)
    if array.dtype.kind != "O":
        return array
    elements = [item.encode() if isinstance(item, str) else item for item in array.ravel().tolist()]
    for element in elements:
        if not isinstance(element, bytes):
            raise InputError(f"input {name!r} holds objects: {type(element).__name__}, not bytes or text")
        if element.endswith(b"\0"):
            raise InputError(f"input {name!r} has bytes that end in a NUL, which NumPy's strings drop")
    return np.array(elements, "S").reshape(array.shape)


def write_binary(inputs: Mapping[str, Any], priority: int) -> tuple[bytes, int]:
    """The body of a request with raw tensors, and how much of it is the header."""
    arrays = as_arrays(inputs)
    tensors: list[Buffer] = [write_tensor(array) for array in arrays.values()]
    head = dump(describe_request(arrays, [len(tensor) for tensor in tensors], priority=priority))
    return b"".join((head, *tensors)), len(head)


def write_json(inputs: Mapping[str, Any], priority: int) -> bytes:
    """The body of a request that is JSON alone, for servers that take nothing else.

    :raises RequestError: for what JSON cannot hold: infinities, bytes that are no text.
    """
    content: dict[str, Any] = {"parameters": {"priority": priority}} if priority else {}
    content["inputs"] = [
        describe(name, array) | {"data": to_json(array)} for name, array in as_arrays(inputs).items()
    ]
    return dump(content)


# ---- answers


def read_answer(body: bytes, head_nbytes: int | None) -> dict[str, Array]:
    """The outputs of an answer: JSON, and raw tensors after it if it says how long it is.

    :raises TargetError: if it is none.
    """
    head = body if head_nbytes is None else body[:head_nbytes]
    position = len(head)
    arrays = {}
    try:
        content = parse_object(head, "the answer", len(head))
        for output in content["outputs"]:
            name, datatype = output["name"], output["datatype"]
            shape = [int(size) for size in output["shape"]]
            nbytes = mapping(output, "parameters", repr(name)).get("binary_data_size")
            if nbytes is None:
                arrays[name] = read_values(name, datatype, shape, output["data"])
            else:
                arrays[name] = read_wire(
                    name, datatype, shape, memoryview(body)[position : position + nbytes]
                )
                position += nbytes
    except (*UNREADABLE, AsynctrtError) as error:
        raise TargetError(f"the answer cannot be read: {_said(error)}; it begins {head[:100]!r}") from error
    return arrays


def read_wire(name: str, datatype: str, shape: Sequence[int], raw: Buffer) -> Array:
    """A tensor from its wire form.

    :raises ValueError: if it is not as long as it should be.
    """
    dtype = _dtype(name, datatype)
    if dtype.kind == "S":
        return np.array(_elements(bytes(raw)), dtype).reshape(shape)
    if len(raw) != size_of(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} is {datatype} of shape {list(shape)} and has {len(raw)} bytes")
    return read_numbers(TensorSpec(name, dtype), shape, raw)


def _elements(raw: bytes) -> list[bytes]:
    """The elements of a BYTES tensor. NULs at their ends will not be in a NumPy array of them."""
    elements = []
    position = 0
    while position < len(raw):
        start = position + LENGTH_NBYTES
        position = start + int.from_bytes(raw[position:start], "little")
        elements.append(raw[start:position])
    if position != len(raw):
        raise ValueError(f"the last of {len(elements)} byte strings ends at {position} of {len(raw)} bytes")
    return elements


def read_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Array:
    """A tensor from its values, in lists within lists or flat. What is ``null`` in a tensor of floats is NaN.

    :raises ValueError: for values, or a number of them, that do not fit.
    """
    dtype = _dtype(name, datatype)
    if dtype.kind == "S":
        flat = np.array(values, object).ravel().tolist()
        elements = [item if isinstance(item, bytes) else item.encode() for item in flat]
        return np.array(elements, dtype).reshape(shape)
    if dtype.kind in "fV":  # V is bfloat16, whose kind NumPy does not know.
        with np.errstate(over="ignore"):
            return np.array(values, np.float64).astype(dtype).reshape(shape)
    return convert(TensorSpec(name, dtype), values).reshape(shape)


def _dtype(name: str, datatype: Any) -> np.dtype[Any]:
    """NumPy's dtype for a datatype; byte strings are as long as the longest of them."""
    if datatype == "BYTES":
        return np.dtype("S")
    try:
        return dtype_of(datatype)
    except (KeyError, TypeError):
        raise TargetError(f"tensor {name!r} is {datatype!r:.40}, which is no datatype of KServe's") from None


def _said(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"there is no {error.args[0]!r}"
    return str(error)[:SAID_LENGTH_MAX] or type(error).__name__
