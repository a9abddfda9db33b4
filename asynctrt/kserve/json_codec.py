"""Decode requests and encode answers: a JSON head, then raw tensors. The only importer of ``orjson``.

HTTP bodies and the websocket's binary messages share this form.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from asynctrt.errors import InputError, MissingExtraError, RequestError, TooLargeError, UnsupportedError
from asynctrt.kserve.codec import (
    IN_HEAD,
    JSON_NBYTES_MAX,
    LAYOUT_NBYTES_MAX,
    STRINGS_MAX,
    DecodedRequest,
    ModelCodec,
    PlacedTensor,
    RequestLayout,
    Specs,
    characters_of,
    nbytes_of,
    read_inputs,
    read_scheduling,
    refuse_shared_memory,
    remember,
    symbols_of,
)
from asynctrt.kserve.datatypes import (
    LENGTH_NBYTES,
    TEXT,
    Buffer,
    Pause,
    brief,
    check_nbytes,
    from_json,
    no_pause,
    refuse_infinities,
    size_of,
    to_json,
    write_tensor,
)
from asynctrt.kserve.plain_json import (
    ANSWERS,
    ROWS,
    check_rows,
    nested_shape,
    plain_values,
    read_form,
    read_values,
)
from asynctrt.tensors import Array, InferResult, TensorSpec, shape_of

try:
    import orjson
except ImportError as error:
    raise MissingExtraError(
        "JSON needs orjson: pip install 'asynctrt[serve]' for a server, 'asynctrt[client]' for a client, or "
        "'asynctrt[load]' for load tests"
    ) from error

JSON_LISTS_MAX: Final = 16_384
JSON_VALUES_MAX: Final = STRINGS_MAX
"""Limits for the JSON of one request: lists, objects and names in objects; and values. A list or a name costs
as much time as ten numbers, and the garbage collector visits each list: 4 MiB of empty ones took 0.7 s."""

FAST_JSON_NBYTES: Final = 32 << 10
"""JSON up to this size is parsed on the event loop, without counting its values first: parsing takes at most
0.4 ms, and converting its values to a tensor as long again."""

VALUE_NBYTES: Final = 96
"""The most memory that a parsed value takes besides its text, in bytes."""
VALUE_TEXT_NBYTES: Final = 3
"""The shortest text of a value that takes that much memory, with its comma: ``{},``."""

NUMBER_FACTOR: Final = 4
"""Size of a number in JSON, with its comma, relative to its raw bytes: a ``float32`` takes 8 to 16 bytes."""

COPIED_NBYTES_MAX: Final = 4096
"""Tensors of numbers up to this size are copied into the answer, which is faster than making a view."""

NAME_END: Final = re.compile(rb'"[ \t\r\n]*:')

ID: Final = re.compile(rb'"id"[ \t\r\n]*:[ \t\r\n]*"([\w.:-]{1,256})"')
"""A plain id in a head."""
ID_KEY: Final = re.compile(rb'"id"[ \t\r\n]*:')
"""The name of an id in a head, or of something else in it; a tensor's name may be ``id``, too."""

KNOWN_FIELDS: Final = frozenset({"inputs", "outputs", "parameters", "model_name", "model_version"})
"""The fields of a request besides its id. A head with any other may mean something else over a websocket."""


class JsonCodec(ModelCodec):
    """Decode requests to one model and encode its answers, as JSON and raw tensors."""

    def is_slow(self, body: Buffer, head_nbytes: int) -> bool:
        """Return whether decoding a request would block the event loop for a millisecond or more.

        If so, call :meth:`decode` in a thread, with a ``pause`` that lets the loop run.
        """
        return is_slow_json(head_nbytes) or len(body) - head_nbytes > self._slow_nbytes

    def decode(self, body: Buffer, head_nbytes: int, pause: Pause = no_pause) -> DecodedRequest:
        """Decode a request: ``head_nbytes`` of JSON, then raw tensors. ``pause`` is called at intervals."""
        if head_nbytes > len(body):
            raise RequestError(
                f"the JSON header should be {head_nbytes} bytes long, but the message has {len(body)}"
            )
        head = bytes(body[:head_nbytes]) if head_nbytes <= LAYOUT_NBYTES_MAX else b""
        layout, request_id = self._heads.get(head), ""
        if layout is None:
            rest, request_id = split_id(head)
            layout = self._heads.get(rest)
        if layout is not None and layout.binary_nbytes == len(body) - head_nbytes:
            return DecodedRequest(layout, request_id, read_inputs(layout, body, head_nbytes), len(body))
        content = parse_object(memoryview(body)[:head_nbytes], "the request", self.json_max)
        return self.decode_parsed(content, head_nbytes, body, head_nbytes, pause, head=head)

    def decode_parsed(
        self,
        content: dict[str, Any],
        head_nbytes: int,
        body: Buffer,
        start: int,
        pause: Pause = no_pause,
        *,
        head: bytes = b"",
    ) -> DecodedRequest:
        """Decode a request whose head, of ``head_nbytes``, has already been parsed.

        :param start: where its raw tensors begin in ``body``.
        :param head: the head's bytes, to remember them if it has no values; empty not to.
        """
        request_id = content.pop("id", "")
        if not isinstance(request_id, str):
            raise RequestError(f"id must be a string, not {brief(request_id)}")
        values = _take_values(content)
        # Whatever its formatting, the rest usually equals that of an earlier request.
        key = _key_of(content) if head_nbytes <= FAST_JSON_NBYTES else b""
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layout(content)
            if key:
                remember(self._layouts, key, layout)
        if head and key and layout.raw_numbers and content.keys() <= KNOWN_FIELDS:
            self._remember(head, request_id, layout)
        if layout.binary_nbytes != len(body) - start:
            raise RequestError(
                f"the inputs declare {layout.binary_nbytes} bytes of tensors after the header, but "
                f"{len(body) - start} follow it"
            )
        inputs = read_inputs(layout, body, start, pause)
        if not layout.raw_numbers:
            for (spec, shape, _, array), given in zip(layout.inputs, values, strict=True):
                if array is IN_HEAD:
                    inputs[spec.name] = from_json(spec, given, shape, pause)
        return DecodedRequest(layout, request_id, inputs, len(body))

    def _remember(self, head: bytes, request_id: str, layout: RequestLayout) -> None:
        """Remember a head without its id, unless something else in it may be taken for one."""
        rest, found = split_id(head)
        if found == request_id and len(ID_KEY.findall(head)) == bool(found) and b"\\" not in head:
            remember(self._heads, rest, layout)

    def decode_known(self, rest: bytes, request_id: str, body: Buffer, start: int) -> DecodedRequest | None:
        """Decode a request without parsing its head; ``None`` if no such head was parsed before.

        :param rest: the head without its id: see :func:`split_id`.
        :param start: where the raw tensors begin in ``body``.
        """
        layout = self._heads.get(rest)
        if layout is None or layout.binary_nbytes != len(body) - start:
            return None
        return DecodedRequest(layout, request_id, read_inputs(layout, body, start), len(body))

    def decode_raw(self, body: Buffer, pause: Pause = no_pause) -> DecodedRequest:
        """Decode a body that consists of one row of the model's only input."""
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
        return DecodedRequest(layout, "", read_inputs(layout, body, 0, pause), len(body))

    def decode_plain(self, body: Buffer, pause: Pause = no_pause) -> DecodedRequest:
        """Decode a request in plain JSON: see :mod:`asynctrt.kserve.plain_json`. It wants all outputs."""
        content = parse_object(body, "the request", self.json_max)
        form = read_form(content)
        values = read_values(form, content[form], list(self._inputs))
        shapes = {name: tuple(nested_shape(name, data)) for name, data in values.items()}
        scheduling = read_scheduling(mapping(content, "parameters", "the request"))
        key = form, tuple(shapes.items()), scheduling
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._plain_layout(form, shapes, scheduling)
            remember(self._layouts, key, layout)
        inputs = {}
        for spec, shape, _, _ in layout.inputs:
            # In the form of rows, they come first.
            given = from_json(spec, values[spec.name], shape if form != ROWS else shapes[spec.name], pause)
            inputs[spec.name] = given if form != ROWS else spec.as_given(given)
        return DecodedRequest(layout, "", inputs, len(body))

    def _plain_layout(
        self, form: str, shapes: Mapping[str, tuple[int, ...]], scheduling: tuple[int, float | None]
    ) -> RequestLayout:
        placed = tuple([self._plain_input(form, name, given) for name, given in shapes.items()])
        outputs = tuple([(spec, False) for spec, _ in self._outputs.values()])
        layout = self._checked_layout(placed, outputs, *scheduling, plain=ANSWERS[form])
        self._check_written(placed, outputs)
        return layout

    def _plain_input(self, form: str, name: str, given: tuple[int, ...]) -> PlacedTensor:
        """Return an input given by its values, which nest as deep as ``given`` says."""
        spec, _ = self._named(name, "inputs", self._inputs, {})
        if form != ROWS:
            return spec, self._shape(spec, list(given)), 0, IN_HEAD
        rows, *row = given
        check_rows(rows, [spec for side in (self._inputs, self._outputs) for spec, _ in side.values()])
        return spec, self._shape(spec, list(shape_of(row, spec.axis, rows))), 0, IN_HEAD

    def encode(
        self, request: DecodedRequest, result: InferResult, pause: Pause = no_pause
    ) -> tuple[bytes, list[Buffer]]:
        """Encode an answer as its JSON head and the raw tensors that follow it."""
        layout = request.layout
        if layout.plain:
            return self._plain_answer(layout, [result[spec.name] for spec, _ in layout.outputs]), []
        values: list[Array] = []
        tensors: list[Buffer] = []
        key = []
        for spec, binary in layout.outputs:
            value = result[spec.name]
            values.append(value)
            key.append(value.shape)
            if layout.is_simple and value.nbytes <= COPIED_NBYTES_MAX:
                tensors.append(value.tobytes())
            elif binary:
                tensors.append(write_tensor(value, pause))
        if key == layout.answer_key:
            head = layout.answer
        else:
            head = self._answer(layout, values, tensors)
            if layout.is_simple:
                layout.answer_key, layout.answer, layout.http_head = key, head, b""
        if request.id:
            head = b"".join((b'{"id":', orjson.dumps(request.id), b",", memoryview(head)[1:]))
        return head, tensors

    def _layout(self, content: dict[str, Any]) -> RequestLayout:
        parameters = mapping(content, "parameters", "the request")
        binary_default = parameters.get("binary_data_output", False)
        if not isinstance(binary_default, bool):
            raise RequestError(f"binary_data_output must be true or false, not {brief(binary_default)}")
        inputs = self._items(content, "inputs", self._inputs)
        if "inputs" not in content:
            plain = f". For {ROWS} in plain JSON, use /v1/models/NAME:predict" if ROWS in content else ""
            raise RequestError(f"the request has no inputs: they are a list of tensors{plain}")
        placed = tuple([self._input(*item) for item in inputs])
        outputs = tuple(
            [
                (spec, _wants_binary(spec.name, wanted, binary_default=binary_default))
                for spec, _, _, wanted in self._items(content, "outputs", self._outputs)
            ]
        )
        if not outputs:
            outputs = tuple([(spec, binary_default) for spec, _ in self._outputs.values()])
        layout = self._checked_layout(placed, outputs, *read_scheduling(parameters))
        self._check_written(placed, outputs)
        return layout

    def _check_written(
        self, placed: tuple[PlacedTensor, ...], outputs: tuple[tuple[TensorSpec, bool], ...]
    ) -> None:
        """Refuse a request whose answer will have too much JSON, as far as its shapes tell."""
        written = [spec for spec, binary in outputs if not binary and spec.dtype.kind not in TEXT]
        if written:
            self._check_answer(NUMBER_FACTOR * nbytes_of(placed, written, symbols_of(placed, {})))

    def _check_answer(self, nbytes: int) -> None:
        """Refuse an answer with too much JSON; if its size is known early, before it is computed."""
        if nbytes > self.json_max:
            raise TooLargeError(
                f"the outputs take about {nbytes} bytes of JSON; at most {self.json_max} are sent: ask "
                'KServe V2 for them as binary data ("parameters": {"binary_data_output": true}), or raise '
                "max_json"
            )

    def _plain_answer(self, layout: RequestLayout, values: list[Array]) -> bytes:
        self._check_answer(sum(map(_json_nbytes_of, values)))
        specs = [spec for spec, _ in layout.outputs]
        return _dump_values({layout.plain: plain_values(layout.plain, specs, values, layout.rows)}, values)

    def _items(
        self, content: dict[str, Any], side: str, specs: Specs
    ) -> list[tuple[TensorSpec, str, dict[str, Any], dict[str, Any]]]:
        """Return spec, datatype, description and parameters of each tensor on one side of a request."""
        items = content.get(side, [])
        if not isinstance(items, list):
            raise RequestError(f"{side} must be a list of tensors, not {type(items).__name__}")
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
    ) -> PlacedTensor:
        if item.get("datatype") != datatype:
            raise InputError(f"input {spec.name!r} is {datatype}, not {brief(item.get('datatype'))}")
        shape = self._shape(spec, item.get("shape"))
        nbytes = parameters.get("binary_data_size")
        if nbytes is None:
            if "data" not in item:
                raise RequestError(f"input {spec.name!r} has neither data nor binary_data_size")
            return spec, shape, 0, IN_HEAD
        if "data" in item:
            raise RequestError(f"input {spec.name!r} has both data and binary_data_size: give one of them")
        if type(nbytes) is not int or nbytes < 0:
            raise RequestError(
                f"binary_data_size of {spec.name!r} must be a number of bytes, not {brief(nbytes)}"
            )
        check_nbytes(spec, shape, nbytes)
        return spec, shape, nbytes, None

    def _answer(self, layout: RequestLayout, values: list[Array], tensors: list[Buffer]) -> bytes:
        written = [value for (_, binary), value in zip(layout.outputs, values, strict=True) if not binary]
        if written:
            self._check_answer(sum(map(_json_nbytes_of, written)))
        sizes = iter(tensors)
        outputs = []
        for (spec, binary), value in zip(layout.outputs, values, strict=True):
            output: dict[str, Any] = {
                "name": spec.name,
                "datatype": self._outputs[spec.name][1],
                "shape": value.shape,
            }
            if binary:
                output["parameters"] = {"binary_data_size": len(next(sizes))}
            else:
                output["data"] = to_json(value)
            outputs.append(output)
        content = {"model_name": self.name, "model_version": self.version, "outputs": outputs}
        return _dump_values(content, written)


def split_id(head: bytes) -> tuple[bytes, str]:
    """Return a head with an empty id, and the id; the head as it is, and no id, if it has no plain one."""
    at = head.find(b'"id"')  # Searching for the expression would take several times longer.
    found = ID.match(head, at) if at >= 0 else None
    if found is None:
        return head, ""
    start, end = found.span(1)
    return head[:start] + head[end:], found[1].decode()


def _take_values(content: dict[str, Any]) -> list[Any]:
    """Take the values of the inputs out of a request, and return them in order; leave what says that they
    were there."""
    inputs = content.get("inputs")
    values = []
    for item in inputs if isinstance(inputs, list) else ():
        has_values = isinstance(item, dict) and "data" in item
        values.append(item["data"] if has_values else None)
        if has_values:
            item["data"] = True
    return values


def _key_of(content: dict[str, Any]) -> bytes:
    """Return a key that is equal for equal content; empty if that is large, or nests too deep."""
    try:
        key = orjson.dumps(content)
    except TypeError:
        return b""
    return key if len(key) <= LAYOUT_NBYTES_MAX else b""


def _json_nbytes_of(array: Array) -> int:
    """Estimate how many bytes of JSON a tensor takes."""
    if array.dtype.kind == "O":
        return LENGTH_NBYTES * array.size + characters_of(array)
    return array.nbytes if array.dtype.kind in TEXT else NUMBER_FACTOR * array.nbytes


def _wants_binary(name: str, parameters: dict[str, Any], *, binary_default: bool) -> bool:
    if parameters.get("classification"):
        raise UnsupportedError(
            f"output {name!r}: classification is not supported; request the scores instead"
        )
    binary = parameters.get("binary_data", binary_default)
    if not isinstance(binary, bool):
        raise RequestError(f"binary_data of {name!r} must be true or false, not {brief(binary)}")
    return binary


def is_slow_json(nbytes: int) -> bool:
    """Return whether parsing JSON could block the event loop for a millisecond or more."""
    return nbytes > FAST_JSON_NBYTES


def parsed_nbytes(nbytes: int) -> int:
    """Return the most memory that parsing JSON takes, in bytes."""
    return 2 * nbytes + VALUE_NBYTES * min(nbytes // VALUE_TEXT_NBYTES, JSON_VALUES_MAX)


def parse_object(raw: Buffer, what: str, nbytes_max: int = JSON_NBYTES_MAX) -> dict[str, Any]:
    """Parse a JSON object. Messages call it ``what``."""
    if len(raw) > nbytes_max:
        raise TooLargeError(
            f"{what} has {len(raw)} bytes of JSON; at most {nbytes_max} are accepted: send tensors as binary "
            "data (Inference-Header-Content-Length over HTTP, a binary message over a websocket), or raise "
            "max_json"
        )
    if len(raw) > FAST_JSON_NBYTES:
        _check_values(bytes(raw), what)
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raw = bytes(raw)
        is_rich = b"NaN" in raw or b"Infinity" in raw
        fix = ". JSON has no NaN and no Infinity: send such numbers as binary data" if is_rich else ""
        raise RequestError(f"{what} is not valid JSON: {error}{fix}") from error
    if not isinstance(content, dict):
        raise RequestError(f"{what} must be a JSON object, not {type(content).__name__}")
    return content


def _check_values(raw: bytes, what: str) -> None:
    """Refuse JSON with too many values: parsing it would block the event loop, even if the JSON is short."""
    lists = raw.count(b"[") + raw.count(b"{")
    if lists > JSON_LISTS_MAX:
        raise TooLargeError(
            f"{what} has {lists} lists and objects of JSON; at most {JSON_LISTS_MAX} are accepted: send the "
            "values of a tensor as one flat list, or as binary data"
        )
    values = raw.count(b",")
    if values > JSON_VALUES_MAX:
        raise TooLargeError(
            f"{what} has {values} values of JSON; at most {JSON_VALUES_MAX} are accepted: send tensors as "
            "binary data"
        )
    # Text may hold any number of colons, but rarely one after a quote.
    if raw.count(b":") > JSON_LISTS_MAX and any(islice(NAME_END.finditer(raw), JSON_LISTS_MAX, None)):
        raise TooLargeError(f"{what} has more than {JSON_LISTS_MAX} names in its JSON objects")


def dump(content: object) -> bytes:
    """Return ``content`` as JSON; NumPy arrays become lists."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _dump_values(content: object, arrays: Iterable[Array]) -> bytes:
    """Return an answer with the values of ``arrays`` as JSON."""
    raw = dump(content)
    if b"null" in raw:  # NaN, or an infinity.
        refuse_infinities(arrays)
    return raw


def mapping(content: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return the object under ``name``, or an empty one if there is none."""
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} of {where} must be an object, not {type(value).__name__}")
    return value
