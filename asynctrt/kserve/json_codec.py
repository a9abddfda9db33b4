"""Decode requests and encode answers: a JSON head, then raw tensors. The only importer of ``orjson``.

HTTP bodies and the websocket's binary messages share this form.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asynctrt.errors import InputError, MissingExtraError, RequestError, TooLargeError, UnsupportedError
from asynctrt.kserve.codec import (
    ANSWER_NBYTES_MAX,
    FAST_NBYTES,
    LAYOUT_NBYTES_MAX,
    DecodedRequest,
    ModelCodec,
    PlacedTensor,
    RequestLayout,
    Specs,
    read_inputs,
    read_scheduling,
    refuse_shared_memory,
    remember,
)
from asynctrt.kserve.datatypes import (
    LENGTH_NBYTES,
    PIECE,
    Buffer,
    brief,
    check_nbytes,
    from_json,
    pieces_for_json,
    size_of,
    write_tensor,
)
from asynctrt.kserve.json_pieces import Pause, loads_in_pieces, no_pause
from asynctrt.tensors import Array, InferResult, TensorSpec

try:
    import orjson
except ImportError as error:
    raise MissingExtraError("serving needs orjson: pip install 'asynctrt[serve]'") from error

JSON_NBYTES_MAX: Final = 4 << 20
"""Default limit for the JSON of one request."""

JSON_LISTS_MAX: Final = 16_384
JSON_VALUES_MAX: Final = 262_144
"""Lists and objects, and values, that the JSON of one request may have. A list costs as much time as ten
numbers, and the garbage collector looks at each: 4 MiB of empty ones took 0.7 s."""

FAST_TEXT_NBYTES: Final = 256 << 10
"""JSON of few values is parsed by the event loop up to this size: long strings take little."""

COUNT_NBYTES_MIN: Final = 32 << 10
"""JSON up to this size is parsed without being counted."""

COPIED_NBYTES_MAX: Final = 4096
"""Tensors of numbers up to this size are copied for the answer, which takes less time than to view them."""

ID_START: Final = re.compile(rb'\{"id":"([\w-]+)"(?=,)')


class JsonCodec(ModelCodec):
    """Decode requests to one model and encode its answers, as JSON and raw tensors.

    :param json_max: the largest JSON part of a request, in bytes. The other parameters are those of
        :class:`ModelCodec`.
    """

    def __init__(
        self,
        name: str,
        version: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        tensors_max: int = 64,
        rows_max: int | None = None,
        json_max: int = JSON_NBYTES_MAX,
        answer_max: int = ANSWER_NBYTES_MAX,
        pad: Mapping[str, Any] | str | None = None,
    ) -> None:
        super().__init__(
            name,
            version,
            inputs,
            outputs,
            tensors_max=tensors_max,
            rows_max=rows_max,
            answer_max=answer_max,
            pad=pad,
        )
        self.json_max = json_max

    def is_slow(self, body: Buffer, head_nbytes: int) -> bool:
        """Return whether decoding a request would hold the event loop for a millisecond or more.

        Then :meth:`decode` belongs in a thread, with a ``pause`` that lets the loop run.
        """
        if len(body) - head_nbytes > self._slow_nbytes:
            return True
        return is_slow_json(body, head_nbytes)

    def decode(self, body: Buffer, head_nbytes: int, pause: Pause = no_pause) -> DecodedRequest:
        """Decode a request: ``head_nbytes`` of JSON, then raw tensors. ``pause`` is called on the way.

        :raises RequestError: if it breaks the protocol; the message names the field.
        :raises InputError: if the model cannot take one of its tensors.
        """
        if head_nbytes > len(body):
            raise RequestError(
                f"the JSON header should be {head_nbytes} bytes long, but the message has {len(body)}"
            )
        if head_nbytes > self.json_max:
            check_json_nbytes(head_nbytes, "the request", self.json_max)
        head = body[:head_nbytes] if type(body) is bytes else bytes(memoryview(body)[:head_nbytes])
        if head in self._layouts and not head.startswith(b","):
            # One that is remembered as a whole has no id, so that there is none to look for.
            request_id, rest = "", head
        else:
            request_id, rest = split_id(head)
        return self.decode_split(head, request_id, rest, body, head_nbytes, pause)

    def decode_split(
        self,
        head: bytes,
        request_id: str,
        rest: bytes,
        body: Buffer,
        start: int,
        pause: Pause = no_pause,
    ) -> DecodedRequest:
        """Decode as :meth:`decode` a head that :func:`split_id` has split; the tensors begin at ``start``."""
        layout = self._layouts.get(rest)
        if layout is None:
            request_id, layout = self._parse(head, rest, pause)
        if layout.binary_nbytes != len(body) - start:
            raise RequestError(
                f"the inputs declare {layout.binary_nbytes} bytes of tensors after the header, but "
                f"{len(body) - start} follow it"
            )
        return DecodedRequest(layout, request_id, read_inputs(layout, body, start, pause))

    def knows(self, rest: bytes) -> bool:
        """Return whether the layout of a head is remembered, given its rest from :func:`split_id`."""
        return rest in self._layouts

    def decode_raw(self, body: Buffer, pause: Pause = no_pause) -> DecodedRequest:
        """Decode a body that is one row of the model's only input, and nothing else.

        :raises RequestError: if the model has other inputs, or the bytes do not determine the shape.
        """
        if len(self._inputs) != 1:
            raise RequestError(
                f"a raw body holds one input, but {self.name!r} has {len(self._inputs)}: send a JSON header"
            )
        ((spec, datatype),) = self._inputs.values()
        row = spec.shape(1)
        open_dims = [dim for dim in row if isinstance(dim, str)]
        fixed = size_of([dim for dim in row if not isinstance(dim, str)])
        count, left = (1, 0) if datatype == "BYTES" else divmod(len(body), spec.dtype.itemsize)
        if len(open_dims) > 1 or left or not fixed or count % fixed or (not open_dims and count != fixed):
            raise RequestError(
                f"a raw body of {len(body)} bytes is not one row of {spec}: send a JSON header with the shape"
            )
        shape = tuple([count // fixed if isinstance(dim, str) else dim for dim in row])
        if datatype == "BYTES":
            body = b"".join((len(body).to_bytes(LENGTH_NBYTES, "little"), body))
        outputs = tuple((spec, True) for spec, _ in self._outputs.values())
        layout = self._checked_layout(((spec, shape, len(body), None),), outputs)
        return DecodedRequest(layout, "", read_inputs(layout, body, 0, pause))

    def encode(
        self, request: DecodedRequest, result: InferResult, pause: Pause = no_pause
    ) -> tuple[bytes, list[Buffer]]:
        """Encode an answer as its JSON head and the raw tensors that follow it.

        :param pause: called between pieces of work: see :meth:`is_slow_answer`.
        :raises RequestError: if JSON cannot hold an output that is wanted as JSON.
        """
        layout = request.layout
        outputs = layout.outputs
        values = [result[spec.name] for spec, _ in outputs]
        tensors: list[Buffer] = []
        key = tuple([value.shape for value in values])
        for (_, binary), value in zip(outputs, values, strict=True):
            if layout.is_simple and value.nbytes <= COPIED_NBYTES_MAX:
                tensors.append(value.tobytes())
            elif binary:
                tensors.append(write_tensor(value, pause))
        if key == layout.answer_key:
            head = layout.answer
        else:
            head = self._answer(layout, values, tensors, pause)
            if layout.is_simple:
                layout.answer_key, layout.answer, layout.http_head = key, head, b""
        if request.id:
            head = b"".join((b'{"id":', orjson.dumps(request.id), b",", memoryview(head)[1:]))
        return head, tensors

    def _parse(self, head: bytes, rest: bytes, pause: Pause) -> tuple[str, RequestLayout]:
        content = parse_object(head, "the request", self.json_max, pause)
        request_id = content.get("id", "")
        if not isinstance(request_id, str):
            raise RequestError(f"id must be a string, not {brief(request_id)}")
        layout = self._layout(content, pause)
        # `rest` stands for this layout only if the id, and the whole id, is what was cut off.
        is_same = rest is head or (b'"id"' not in rest and b"\\" not in rest)
        if (
            is_same
            and layout.is_reusable
            and len(rest) <= LAYOUT_NBYTES_MAX
            and (rest is not head or not request_id)
        ):
            remember(self._layouts, rest, layout)
        return request_id, layout

    def _layout(self, content: dict[str, Any], pause: Pause) -> RequestLayout:
        parameters = mapping(content, "parameters", "the request")
        binary_default = parameters.get("binary_data_output", False)
        if not isinstance(binary_default, bool):
            raise RequestError(f"binary_data_output must be true or false, not {brief(binary_default)}")
        inputs = self._items(content, "inputs", self._inputs)
        if "inputs" not in content:
            raise RequestError("the request has no inputs: they are a list of tensors")
        placed = tuple([self._input(*item, pause) for item in inputs])
        outputs = tuple(
            [
                (spec, _wants_binary(spec.name, wanted, binary_default=binary_default))
                for spec, _, _, wanted in self._items(content, "outputs", self._outputs)
            ]
        )
        if not outputs:
            outputs = tuple([(spec, binary_default) for spec, _ in self._outputs.values()])
        return self._checked_layout(placed, outputs, *read_scheduling(parameters))

    def _items(
        self, content: dict[str, Any], side: str, specs: Specs
    ) -> list[tuple[TensorSpec, str, dict[str, Any], dict[str, Any]]]:
        """Return spec, datatype, description and parameters of each tensor on one side of a request."""
        items = content.get(side, [])
        if not isinstance(items, list):
            raise RequestError(f"{side} must be a list of tensors, not {type(items).__name__}")
        self._check_count(side, len(items))
        found: dict[str, tuple[TensorSpec, str, dict[str, Any], dict[str, Any]]] = {}
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                raise RequestError(f"each of the {side} must be an object with a name, not {brief(item)}")
            name = item["name"]
            spec, datatype = self._named(name, side, specs, found)
            parameters = mapping(item, "parameters", repr(name))
            refuse_shared_memory(name, parameters)
            found[name] = spec, datatype, item, parameters
        return list(found.values())

    def _input(
        self,
        spec: TensorSpec,
        datatype: str,
        item: dict[str, Any],
        parameters: dict[str, Any],
        pause: Pause,
    ) -> PlacedTensor:
        if item.get("datatype") != datatype:
            raise InputError(f"input {spec.name!r} is {datatype}, not {brief(item.get('datatype'))}")
        shape = self._shape(spec, item.get("shape"))
        nbytes = parameters.get("binary_data_size")
        if nbytes is None:
            if "data" not in item:
                raise RequestError(f"input {spec.name!r} has neither data nor binary_data_size")
            return spec, shape, 0, from_json(spec, item["data"], shape, pause)
        if "data" in item:
            raise RequestError(f"input {spec.name!r} has both data and binary_data_size: give one of them")
        if type(nbytes) is not int or nbytes < 0:
            raise RequestError(
                f"binary_data_size of {spec.name!r} must be a number of bytes, not {brief(nbytes)}"
            )
        check_nbytes(spec, shape, nbytes)
        return spec, shape, nbytes, None

    def _answer(
        self, layout: RequestLayout, values: list[Array], tensors: list[Buffer], pause: Pause
    ) -> bytes:
        answer = {"model_name": self.name, "model_version": self.version}
        parts = [orjson.dumps(answer)[:-1], b',"outputs":[']
        sizes = iter(tensors)
        for number, ((spec, binary), value) in enumerate(zip(layout.outputs, values, strict=True)):
            output: dict[str, Any] = {
                "name": spec.name,
                "datatype": self._outputs[spec.name][1],
                "shape": value.shape,
            }
            if binary:
                output["parameters"] = {"binary_data_size": len(next(sizes))}
            parts += (b"," if number else b"", orjson.dumps(output))
            if not binary:
                parts[-1] = parts[-1][:-1]
                comma = b',"data":['
                for piece in pieces_for_json(value):
                    parts += (comma, dump(piece)[1:-1])
                    comma = b","
                    pause()
                parts.append(b"]}")
        parts.append(b"]}")
        return b"".join(parts)


def _wants_binary(name: str, parameters: dict[str, Any], *, binary_default: bool) -> bool:
    if parameters.get("classification"):
        raise UnsupportedError(
            f"output {name!r}: classification is not supported; request the scores instead"
        )
    binary = parameters.get("binary_data", binary_default)
    if not isinstance(binary, bool):
        raise RequestError(f"binary_data of {name!r} must be true or false, not {brief(binary)}")
    return binary


def is_slow_json(raw: Buffer, nbytes: int) -> bool:
    """Return whether parsing ``nbytes`` of JSON would hold the event loop for a millisecond or more."""
    if nbytes <= FAST_NBYTES:
        return False
    return nbytes > FAST_TEXT_NBYTES or bytes(raw[:nbytes]).count(b",") > PIECE


def check_json_nbytes(nbytes: int, what: str, nbytes_max: int) -> None:
    """Check the size of JSON.

    :raises TooLargeError: if it has more than ``nbytes_max`` bytes.
    """
    if nbytes > nbytes_max:
        raise TooLargeError(
            f"{what} has {nbytes} bytes of JSON; at most {nbytes_max} are accepted: send tensors raw"
        )


def parse_object(
    raw: Buffer, what: str, nbytes_max: int = JSON_NBYTES_MAX, pause: Pause = no_pause
) -> dict[str, Any]:
    """Parse a JSON object. Messages call it ``what``.

    :param pause: called between pieces of work.
    :raises TooLargeError: if it has more than ``nbytes_max`` bytes.
    :raises RequestError: if it is anything else.
    """
    check_json_nbytes(len(raw), what, nbytes_max)
    if len(raw) > COUNT_NBYTES_MIN:
        _check_values(bytes(raw), what)
    try:
        is_cut = pause is not no_pause
        content = loads_in_pieces(bytes(raw), orjson.loads, pause) if is_cut else orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raw = bytes(raw)
        is_rich = b"NaN" in raw or b"Infinity" in raw
        fix = ". JSON has no NaN and no Infinity: send such numbers as binary data" if is_rich else ""
        raise RequestError(f"{what} is not valid JSON: {error}{fix}") from error
    if not isinstance(content, dict):
        raise RequestError(f"{what} must be a JSON object, not {type(content).__name__}")
    return content


def _check_values(raw: bytes, what: str) -> None:
    """Refuse JSON with too many values: parsing it would hold the loop, however short it is."""
    lists = raw.count(b"[") + raw.count(b"{")
    if lists > JSON_LISTS_MAX:
        raise TooLargeError(
            f"{what} has {lists} lists and objects of JSON; at most {JSON_LISTS_MAX} are accepted: send the "
            "values of a tensor as one flat list, or raw"
        )
    values = raw.count(b",")
    if values > JSON_VALUES_MAX:
        raise TooLargeError(
            f"{what} has {values} values of JSON; at most {JSON_VALUES_MAX} are accepted: send tensors raw"
        )


def dump(content: object) -> bytes:
    """Return ``content`` as JSON; NumPy arrays become lists."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def mapping(content: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return the object under ``name``, or an empty one if there is none.

    :raises RequestError: if something else is there.
    """
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} of {where} must be an object, not {type(value).__name__}")
    return value


def split_id(head: bytes) -> tuple[str, bytes]:
    """Split an id at the very beginning off a head. Without one, return "" and the head itself.

    The rest is only looked up among heads that were parsed whole, so it need not be JSON.
    """
    found = ID_START.match(head)
    if found is None:
        # What begins like the rest of another head is not JSON, and must not be taken for that rest.
        return "", b"" if head.startswith(b",") else head
    return found[1].decode(), head[found.end() :]
