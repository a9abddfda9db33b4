"""KServe V2's tensors on the wire: a JSON header, and raw tensors after it. The only importer of ``orjson``.

What HTTP bodies and binary websocket messages have in common. Nothing here waits or knows of a socket.

A client says the same again and again: its next request's header is that of its last one, but for the id. So
what a header means (:class:`Plan`) is remembered by its bytes, and so is the header of the answer.
"""

import contextlib
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from asynctrt.errors import InputError, MissingExtraError, RequestError, TooLargeError, UnsupportedError
from asynctrt.serving.datatypes import (
    DATATYPES,
    DIMS_MAX,
    Buffer,
    brief,
    datatype_of,
    from_json,
    read_tensor,
    size_of,
    to_json,
    write_bytes,
    write_tensor,
)
from asynctrt.tensors import Array, InferResult, TensorSpec

try:
    import orjson
except ImportError as error:
    raise MissingExtraError("serving needs orjson: pip install 'asynctrt[serve]'") from error

PLANS_MAX: Final = 256
"""Headers that are remembered for each model."""

JSON_NBYTES_MAX: Final = 4 << 20
"""JSON that one request may have, by default. To read it holds the loop, 5 to 30 ms a MB."""

PLAN_NBYTES_MAX: Final = 4096
"""A longer header is not remembered."""

SIZE_MAX: Final = 2**40
"""Elements of one tensor: so many that no shape overflows, and more than any body can hold."""

DTYPES: Final = {name: dtype for dtype, name in DATATYPES.items()}
"""NumPy's names by KServe's."""

ID_START: Final = re.compile(rb'\{"id":"([\w-]+)"(?=,)')

K = TypeVar("K")
V = TypeVar("V")


class Plan:
    """What a request's header says: where its tensors lie, and what is wanted of the answer."""

    __slots__ = (
        "answer",
        "answer_key",
        "binary_nbytes",
        "http_head",
        "inputs",
        "outputs",
        "priority",
        "timeout",
    )

    def __init__(
        self,
        inputs: tuple[tuple[TensorSpec, tuple[int, ...], int, Array | None], ...],
        binary_nbytes: int,
        outputs: tuple[tuple[TensorSpec, bool], ...],
        priority: int,
        timeout: float | None,
    ) -> None:
        self.inputs = inputs
        """Spec, shape, bytes on the wire, and the array itself where the header holds the values."""
        self.binary_nbytes = binary_nbytes
        self.outputs = outputs
        """Spec, and whether it is wanted as raw bytes."""
        self.priority = priority
        """As on the wire: 1 is the most urgent, 0 the model's default."""
        self.timeout = timeout
        """Seconds, or ``None``."""
        # The last answer's shapes and header, and its HTTP head: the next one's are mostly the same.
        self.answer_key: tuple[tuple[int, ...], ...] | None = None
        self.answer = b""
        self.http_head = b""

    @property
    def is_reusable(self) -> bool:
        """Whether it says nothing but where tensors lie."""
        return all(array is None for *_, array in self.inputs)


class Call:
    """One request, decoded."""

    __slots__ = ("id", "inputs", "plan")

    def __init__(self, plan: Plan, request_id: str, inputs: dict[str, Array]) -> None:
        self.plan = plan
        self.id = request_id
        self.inputs = inputs


Specs = Mapping[str, tuple[TensorSpec, str]]


class ModelCodec:
    """What a codec knows of its model, whatever the protocol: its tensors, and the plans it remembers.

    :param name: the model's, and ``version``, as answers have them.
    :param tensors_max: inputs and outputs that one request may name.
    :raises ModelError: for a tensor that the protocol has no datatype for.
    """

    def __init__(
        self,
        name: str,
        version: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        tensors_max: int = 64,
    ) -> None:
        self.name = name
        self.version = version
        self.tensors_max = tensors_max
        self._inputs: Specs = {spec.name: (spec, datatype_of(spec)) for spec in inputs}
        self._outputs: Specs = {spec.name: (spec, datatype_of(spec)) for spec in outputs}
        self._plans: dict[bytes, Plan] = {}

    def _check_count(self, side: str, count: int) -> None:
        """Whether so many tensors may stand on one side of a request."""
        if count > self.tensors_max:
            raise TooLargeError(f"{count} {side} are more than the {self.tensors_max} that are taken")

    @staticmethod
    def _named(name: str, side: str, specs: Specs, found: Mapping[str, object]) -> tuple[TensorSpec, str]:
        """Spec and datatype of a tensor that a request names, besides those that were ``found`` in it."""
        if name not in specs:
            raise InputError(f"{brief(name)} is none of the model's {side}: {', '.join(specs)}")
        if name in found:
            raise RequestError(f"{name!r} is twice among the {side}")
        return specs[name]


class Codec(ModelCodec):
    """Decodes requests to one model and encodes its answers, as JSON and raw tensors.

    :param json_max: bytes of a request's JSON. The others are those of :class:`ModelCodec`.
    """

    def __init__(
        self,
        name: str,
        version: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        tensors_max: int = 64,
        json_max: int = JSON_NBYTES_MAX,
    ) -> None:
        super().__init__(name, version, inputs, outputs, tensors_max=tensors_max)
        self.json_max = json_max

    def decode(self, body: bytes, head_nbytes: int) -> Call:
        """A request: ``head_nbytes`` of JSON, and raw tensors after it.

        :raises RequestError: naming the field that breaks the protocol.
        :raises InputError: for a tensor that the model cannot take.
        """
        if head_nbytes > len(body):
            raise RequestError(
                f"the header's length is given as {head_nbytes} bytes; the message has {len(body)}"
            )
        head = body[:head_nbytes]
        request_id, rest = split_id(head)
        return self.decode_split(head, request_id, rest, body, head_nbytes)

    def decode_split(self, head: bytes, request_id: str, rest: bytes, body: bytes, start: int) -> Call:
        """As :meth:`decode`, of a header that was split already; the tensors begin at ``start``."""
        plan = self._plans.get(rest)
        if plan is None:
            request_id, plan = self._parse(head, rest)
        if plan.binary_nbytes != len(body) - start:
            raise RequestError(
                f"the inputs say that {plan.binary_nbytes} bytes of tensors follow the header, and "
                f"{len(body) - start} do"
            )
        return Call(plan, request_id, self._arrays(plan, body, start))

    def knows(self, rest: bytes) -> bool:
        """Whether a header is remembered, given as :func:`split_id` gives it."""
        return rest in self._plans

    def decode_raw(self, body: bytes) -> Call:
        """A body that is one row of the model's only input, and nothing else.

        :raises RequestError: when the model has other inputs, or a shape that the bytes do not tell.
        """
        if len(self._inputs) != 1:
            raise RequestError(
                f"a raw body is one input, but {self.name!r} has {len(self._inputs)}: send a JSON header"
            )
        ((spec, datatype),) = self._inputs.values()
        open_dims = [dim for dim in spec.dims if isinstance(dim, str)]
        fixed = 1
        for dim in spec.dims:
            fixed *= 1 if isinstance(dim, str) else dim
        count, left = (1, 0) if datatype == "BYTES" else divmod(len(body), spec.dtype.itemsize)
        if len(open_dims) > 1 or left or not fixed or count % fixed or (not open_dims and count != fixed):
            raise RequestError(
                f"a raw body of {len(body)} bytes is no row of {spec}: send a JSON header that says the shape"
            )
        shape = (1, *(count // fixed if isinstance(dim, str) else dim for dim in spec.dims))
        if datatype == "BYTES":
            body = write_bytes(np.array([body], object))
        outputs = tuple((spec, True) for spec, _ in self._outputs.values())
        plan = Plan(((spec, shape, len(body), None),), len(body), outputs, 0, None)
        return Call(plan, "", self._arrays(plan, body, 0))

    def encode(self, call: Call, result: InferResult) -> tuple[bytes, list[Buffer]]:
        """An answer: its JSON header, and the raw tensors that follow it.

        :raises RequestError: for an output that JSON cannot hold.
        """
        plan = call.plan
        outputs = plan.outputs
        values = [result[spec.name] for spec, _ in outputs]
        tensors: list[Buffer] = []
        key = tuple([value.shape for value in values])
        for (_, binary), value in zip(outputs, values, strict=True):
            if binary:
                tensors.append(write_tensor(value))
        if key == plan.answer_key:
            head = plan.answer
        else:
            head = self._answer(plan, values, tensors)
            if len(tensors) == len(outputs) and not any(spec.dtype.kind == "S" for spec, _ in outputs):
                plan.answer_key, plan.answer, plan.http_head = key, head, b""
        if call.id:
            head = b'{"id":' + orjson.dumps(call.id) + b"," + head[1:]
        return head, tensors

    def _parse(self, head: bytes, rest: bytes) -> tuple[str, Plan]:
        content = parse_object(head, "the request", self.json_max)
        request_id = content.get("id", "")
        if not isinstance(request_id, str):
            raise RequestError(f"id is a string, not {brief(request_id)}")
        plan = self._plan(content)
        # `rest` stands for this plan only if it was the id, and the whole id, that was cut off.
        is_same = rest is head or (b'"id"' not in rest and b"\\" not in rest)
        if (
            is_same
            and plan.is_reusable
            and len(rest) <= PLAN_NBYTES_MAX
            and (rest is not head or not request_id)
        ):
            remember(self._plans, rest, plan)
        return request_id, plan

    def _plan(self, content: dict[str, Any]) -> Plan:
        parameters = mapping(content, "parameters", "the request")
        binary_default = parameters.get("binary_data_output", False)
        if not isinstance(binary_default, bool):
            raise RequestError(f"binary_data_output is true or false, not {brief(binary_default)}")
        inputs = self._items(content, "inputs", self._inputs)
        if "inputs" not in content:
            raise RequestError("the request has no inputs: a list of tensors")
        placed = tuple([self._input(*item) for item in inputs])
        outputs = tuple(
            [
                (spec, _wants_binary(spec.name, wanted, binary_default=binary_default))
                for spec, _, _, wanted in self._items(content, "outputs", self._outputs)
            ]
        )
        if not outputs:
            outputs = tuple([(spec, binary_default) for spec, _ in self._outputs.values()])
        priority, timeout = read_scheduling(parameters)
        binary_nbytes = sum([nbytes for _, _, nbytes, _ in placed])
        return Plan(placed, binary_nbytes, outputs, priority, timeout)

    def _items(
        self, content: dict[str, Any], side: str, specs: Specs
    ) -> list[tuple[TensorSpec, str, dict[str, Any], dict[str, Any]]]:
        """Spec, datatype, description and parameters of each tensor on one side of a request."""
        items = content.get(side, [])
        if not isinstance(items, list):
            raise RequestError(f"{side} is a list of tensors, not {type(items).__name__}")
        self._check_count(side, len(items))
        found: dict[str, tuple[TensorSpec, str, dict[str, Any], dict[str, Any]]] = {}
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                raise RequestError(f"each of the {side} is an object with a name, not {brief(item)}")
            name = item["name"]
            spec, datatype = self._named(name, side, specs, found)
            parameters = mapping(item, "parameters", repr(name))
            refuse_shared_memory(name, parameters)
            found[name] = spec, datatype, item, parameters
        return list(found.values())

    def _input(
        self, spec: TensorSpec, datatype: str, item: dict[str, Any], parameters: dict[str, Any]
    ) -> tuple[TensorSpec, tuple[int, ...], int, Array | None]:
        if item.get("datatype") != datatype:
            raise InputError(f"input {spec.name!r} is {datatype}, not {brief(item.get('datatype'))}")
        shape = read_shape(spec.name, item.get("shape"))
        nbytes = parameters.get("binary_data_size")
        if nbytes is None:
            if "data" not in item:
                raise RequestError(f"input {spec.name!r} has neither data nor a binary_data_size")
            return spec, shape, 0, from_json(spec, item["data"], shape)
        if "data" in item:
            raise RequestError(f"input {spec.name!r} has both data and a binary_data_size: give one")
        if type(nbytes) is not int or nbytes < 0:
            raise RequestError(f"binary_data_size of {spec.name!r} is a number of bytes, not {brief(nbytes)}")
        check_nbytes(spec, shape, nbytes)
        return spec, shape, nbytes, None

    @staticmethod
    def _arrays(plan: Plan, body: bytes, start: int) -> dict[str, Array]:
        arrays = {}
        for spec, shape, nbytes, array in plan.inputs:
            if array is not None:
                arrays[spec.name] = array
            else:
                arrays[spec.name] = read_tensor(spec, shape, body, start, nbytes)
            start += nbytes
        return arrays

    def _answer(self, plan: Plan, values: list[Array], tensors: list[Buffer]) -> bytes:
        described = []
        sizes = iter(tensors)
        for (spec, binary), value in zip(plan.outputs, values, strict=True):
            output: dict[str, Any] = {
                "name": spec.name,
                "datatype": self._outputs[spec.name][1],
                "shape": value.shape,
            }
            if binary:
                output["parameters"] = {"binary_data_size": len(next(sizes))}
            else:
                output["data"] = to_json(value)
            described.append(output)
        answer = {"model_name": self.name, "model_version": self.version, "outputs": described}
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def remember(known: dict[K, V], key: K, value: V) -> None:
    """Keep what comes again and again. Who says something new each time empties it, and it stays small."""
    if len(known) >= PLANS_MAX:
        known.clear()
    known[key] = value


# ---- the client's side


def as_array(name: str, value: Any) -> Array:
    """What is to be sent as an input; text becomes byte strings.

    :raises InputError: for what the protocol has no datatype for.
    """
    array = np.asarray(value)
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.dtype.kind != "S" and array.dtype.name not in DATATYPES:
        raise InputError(
            f"input {name!r} is {array.dtype}; the protocol has {', '.join(DATATYPES)} and bytes"
        )
    # The wire is little-endian, as the machines are that this runs on.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def describe(name: str, array: Array) -> dict[str, Any]:
    """Name, datatype and shape of a tensor that :func:`as_array` gave."""
    datatype = "BYTES" if array.dtype.kind == "S" else DATATYPES[array.dtype.name]
    return {"name": name, "datatype": datatype, "shape": list(array.shape)}


def describe_request(
    arrays: Mapping[str, Array],
    sizes: Sequence[int],
    *,
    outputs: Sequence[str] | None = None,
    timeout: float | None = None,
    priority: int = 0,
) -> dict[str, Any]:
    """What the header of a request says whose tensors follow it raw, as those of its answer are to.

    :param sizes: bytes of each tensor.
    """
    parameters: dict[str, Any] = {"binary_data_output": True}
    if timeout is not None:
        parameters["timeout"] = max(1, round(timeout * 1e6))
    if priority:
        parameters["priority"] = priority
    content: dict[str, Any] = {"parameters": parameters}
    content["inputs"] = [
        describe(name, array) | {"parameters": {"binary_data_size": nbytes}}
        for (name, array), nbytes in zip(arrays.items(), sizes, strict=True)
    ]
    if outputs is not None:
        content["outputs"] = [{"name": name} for name in outputs]
    return content


def dtype_of(datatype: str) -> np.dtype[Any]:
    """NumPy's dtype for a datatype of KServe's that is a number.

    :raises KeyError: for any other.
    :raises MissingExtraError: for one that NumPy does not have by itself.
    """
    name = DTYPES[datatype]
    with contextlib.suppress(TypeError):
        return np.dtype(name)
    try:
        # It teaches NumPy the name.
        dtype: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise MissingExtraError(f"a tensor is {name}, for which NumPy needs: pip install ml_dtypes") from None
    return dtype


# ---- both sides


def refuse_shared_memory(name: str, parameters: Mapping[str, Any]) -> None:
    """Whether a tensor is in the message, where this server looks for it.

    :raises UnsupportedError: if not.
    """
    if "shared_memory_region" in parameters:
        raise UnsupportedError(f"{name!r} is in shared memory, which this server does not have")


def _wants_binary(name: str, parameters: dict[str, Any], *, binary_default: bool) -> bool:
    if parameters.get("classification"):
        raise UnsupportedError(f"output {name!r}: classification is not implemented; take the scores")
    binary = parameters.get("binary_data", binary_default)
    if not isinstance(binary, bool):
        raise RequestError(f"binary_data of {name!r} is true or false, not {brief(binary)}")
    return binary


def parse_object(raw: Buffer, what: str, nbytes_max: int = JSON_NBYTES_MAX) -> dict[str, Any]:
    """A JSON object.

    :raises TooLargeError: for more bytes than ``nbytes_max``.
    :raises RequestError: for anything else.
    """
    if len(raw) > nbytes_max:
        raise TooLargeError(
            f"{what} has {len(raw)} bytes of JSON, and {nbytes_max} are taken: send tensors raw"
        )
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raw = bytes(raw)
        is_rich = b"NaN" in raw or b"Infinity" in raw
        fix = ". JSON has no NaN and no Infinity: send such numbers as binary data" if is_rich else ""
        raise RequestError(f"{what} is no JSON: {error}{fix}") from error
    if not isinstance(content, dict):
        raise RequestError(f"{what} is a JSON object, not {type(content).__name__}")
    return content


def dump(content: object) -> bytes:
    """JSON."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def mapping(content: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The object of that name; empty if there is none."""
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} of {where} is an object, not {type(value).__name__}")
    return value


def read_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape as the wire has it.

    :raises RequestError: for what cannot be a shape.
    """
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= DIMS_MAX
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise RequestError(
            f"shape of {name!r} is a list of 1 to {DIMS_MAX} sizes, none negative, not {brief(shape)}"
        )
    # A size of 0 makes the others no smaller: NumPy refuses shapes that would overflow without it.
    if size_of([size for size in shape if size]) > SIZE_MAX:
        raise RequestError(f"shape of {name!r} has more elements than any message: {brief(shape)}")
    return tuple(shape)


def check_nbytes(spec: TensorSpec, shape: tuple[int, ...], nbytes: int) -> None:
    """Whether a raw tensor has as many bytes as its shape says.

    :raises InputError: if not.
    """
    if spec.dtype.kind == "S":
        if nbytes < 4 * size_of(shape):  # Each element has its length before it.
            raise InputError(f"input {spec.name!r} has {nbytes} bytes, too few for shape {list(shape)}")
    elif nbytes != size_of(shape) * spec.dtype.itemsize:
        raise InputError(
            f"input {spec.name!r} of shape {list(shape)} has {size_of(shape) * spec.dtype.itemsize} bytes, "
            f"but {nbytes} are given"
        )


def read_scheduling(parameters: Mapping[str, Any]) -> tuple[int, float | None]:
    """Priority as on the wire, and the timeout in seconds, from a request's parameters."""
    priority = parameters.get("priority", 0)
    if type(priority) is not int or priority < 0:
        raise RequestError(f"priority is a whole number, 0 or more, not {brief(priority)}")
    timeout_us = parameters.get("timeout", 0)
    if type(timeout_us) is not int or timeout_us < 0:
        raise RequestError(f"timeout is in whole microseconds and not negative, not {brief(timeout_us)}")
    return priority, timeout_us / 1e6 if timeout_us else None


def split_id(head: bytes) -> tuple[str, bytes]:
    """An id at the very beginning of a header, and the header without it; ``rest is head`` if there is none.

    The rest is only ever looked up among headers that were parsed whole, so it need not be JSON.
    """
    found = ID_START.match(head)
    if found is None:
        # What begins like the rest of another header is no JSON, and must not be taken for that rest.
        return "", b"" if head.startswith(b",") else head
    return found[1].decode(), head[found.end() :]
