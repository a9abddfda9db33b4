"""Decode requests and encode answers as KServe's protobuf messages. The only importer of ``google.protobuf``.

The ``.proto`` files in this folder describe the messages; ``protocol.binpb`` is protoc's output for them
(tests/kserve/test_protobuf.py has the command, and checks that they agree). The classes are made at first
use, in a separate descriptor pool: ``tritonclient`` registers classes with the same names, possibly in the
same process.

An answer is assembled from bytes, as protobuf allows: the fields that repeat are cached with the request's
layout; the id and the tensors follow. That saves two copies of each tensor.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import numpy as np

from asynctrt.errors import (
    InputError,
    MissingExtraError,
    ModelError,
    RequestError,
    TooLargeError,
    UnsupportedError,
)
from asynctrt.kserve.codec import (
    FAST_NBYTES,
    LAYOUT_NBYTES_MAX,
    DecodedRequest,
    ModelCodec,
    PlacedTensor,
    RequestLayout,
    Specs,
    read_scheduling,
    refuse_shared_memory,
    remember,
)
from asynctrt.kserve.datatypes import (
    PIECE,
    Buffer,
    Pause,
    check_nbytes,
    no_pause,
    read_tensor,
    size_of,
    strings,
    write_tensor,
)
from asynctrt.tensors import Array, InferResult, TensorSpec, convert

try:
    from google.protobuf import text_format
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClassesForFiles
except ImportError as error:
    raise MissingExtraError("gRPC and config.pbtxt need protobuf: pip install 'asynctrt[serve]'") from error

DESCRIPTORS: Final = Path(__file__).parent / "protocol.binpb"
"""The ``.proto`` files of this directory, as a serialized ``FileDescriptorSet``."""

CONTENTS: Final = {
    "BOOL": ("bool_contents", "bool"),
    "INT8": ("int_contents", "int32"),
    "INT16": ("int_contents", "int32"),
    "INT32": ("int_contents", "int32"),
    "INT64": ("int64_contents", "int64"),
    "UINT8": ("uint_contents", "uint32"),
    "UINT16": ("uint_contents", "uint32"),
    "UINT32": ("uint_contents", "uint32"),
    "UINT64": ("uint64_contents", "uint64"),
    "FP32": ("fp32_contents", "float32"),
    "FP64": ("fp64_contents", "float64"),
    "BYTES": ("bytes_contents", "object"),
}
"""The field of ``InferTensorContents`` for each datatype, and its dtype. Others are only sent raw."""

# A field of bytes or text begins with its number and the wire type "a length, then that many bytes".
ID_TAG: Final = 3 << 3 | 2
RAW_TAG: Final = 6 << 3 | 2
STREAMED_TAG: Final = 2 << 3 | 2
RAW_INPUT_TAG: Final = 7 << 3 | 2
VARINT_TYPE: Final = 0
LENGTH_TYPE: Final = 2
FIXED_NBYTES: Final = {1: 8, 5: 4}
"""The size in bytes of each wire type with a fixed size."""
FIELDS_MAX: Final = 4096
"""Fields of a large request: one or two for each tensor, and others. Finding them takes 1.5 ms."""
VARINT_BITS_MAX: Final = 70

NOT_FOUND: Final = 5
"""gRPC's number for that status."""

COPY_NBYTES_MAX: Final = 1 << 20
"""The largest answer, in bytes of tensors, that the event loop copies."""


@cache
def _described() -> tuple[DescriptorPool, list[str]]:
    """Return a pool with the messages and services, and the names of their files."""
    files = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    pool = DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    return pool, [file.name for file in files]


@cache
def message_classes() -> Mapping[str, Any]:
    """Return the class of each message, by its name without the package."""
    pool, names = _described()
    classes = GetMessageClassesForFiles(names, pool)
    return MappingProxyType({name.rpartition(".")[2]: found for name, found in classes.items()})


def parse(kind: Any, body: bytes) -> Any:
    """Parse a message of class ``kind``."""
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the message is not a {kind.DESCRIPTOR.name}: {error}") from error


def reflected(request: Any) -> dict[str, Any]:
    """Return the answer to a request of gRPC's server reflection, as the response's fields."""
    pool, names = _described()
    asked = request.WhichOneof("message_request")
    try:
        if asked == "list_services":
            services = [one for name in names for one in pool.FindFileByName(name).services_by_name.values()]
            return {"list_services_response": {"service": [{"name": one.full_name} for one in services]}}
        if asked == "file_by_filename":
            file = pool.FindFileByName(request.file_by_filename)
        else:
            file = pool.FindFileContainingSymbol(request.file_containing_symbol)
    except KeyError:
        return {"error_response": {"error_code": NOT_FOUND, "error_message": "it is not served here"}}
    return {"file_descriptor_response": {"file_descriptor_proto": [file.serialized_pb]}}


@cache
def _stated_config() -> Any:
    """Return a class for a model's configuration whose fields record whether they were set.

    In proto3 a number set to 0 looks like one that is not set; in proto2 it does not.
    """
    file = next(
        file
        for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
        if file.package == "inference"
    )
    file.ClearField("service")
    file.syntax = "proto2"
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClassesForFiles([file.name], pool)["inference.ModelConfig"]


def parse_model_config(text: str) -> Any:
    """Parse a ``config.pbtxt``, protobuf's text form of a ``ModelConfig``."""
    try:
        return text_format.Parse(text, _stated_config()())
    except text_format.ParseError as error:
        raise ModelError(f"it is not a model configuration: {error}") from error


class SplitRequest(NamedTuple):
    """A serialized ``ModelInferRequest`` without its raw tensors, and the raw tensors as views of it."""

    rest: bytes
    raw: list[memoryview] | None
    """``None`` if they were left in ``rest``."""

    @property
    def is_slow(self) -> bool:
        """Whether parsing and decoding it would block the event loop for a millisecond or more."""
        return self.raw is not None and len(self.rest) > FAST_NBYTES


def split_request(body: Buffer, *, nbytes_max: int) -> SplitRequest:
    """Take the raw tensors out of a large ``ModelInferRequest``, and check the size of the rest.

    A field of 2 bytes becomes an object of a hundred, so parsing a message could take many times its size in
    memory, and block the event loop for seconds. Parsing raw tensors would copy them twice, at 0.5 ms a MiB.

    :param nbytes_max: the largest size in bytes of everything but raw tensors.
    :raises TooLargeError: if it exceeds either limit.
    :raises RequestError: if it is not such a message. Most malformed messages are left for :func:`parse`.
    """
    if len(body) <= FAST_NBYTES:  # Whatever it holds costs little.
        return SplitRequest(bytes(body), None)
    position, raw_nbytes, fields, end = 0, 0, 0, len(body)
    view, raw = memoryview(body), []
    rest = []  # The bytes between raw tensors.
    copied = 0
    while position < end:
        fields += 1
        start = position
        if fields > FIELDS_MAX:
            raise TooLargeError(
                f"the request has more than {FIELDS_MAX} inputs, outputs, raw tensors and parameters"
            )
        tag, position = _varint(body, position)
        kind = tag & 7
        if kind == LENGTH_TYPE:
            length, position = _varint(body, position)
            position += length
            if tag == RAW_INPUT_TAG and position <= end:
                raw_nbytes += length
                raw.append(view[position - length : position])
                rest.append(view[copied:start])
                copied = position
        elif kind in FIXED_NBYTES:
            position += FIXED_NBYTES[kind]
        elif kind == VARINT_TYPE:
            _, position = _varint(body, position)
        else:
            raise RequestError("the message is not a ModelInferRequest: it has a group")
    if end - raw_nbytes > nbytes_max:
        raise TooLargeError(
            f"the request has {end - raw_nbytes} bytes besides raw_input_contents; at most {nbytes_max} are "
            "accepted: send tensors in raw_input_contents"
        )
    rest.append(view[copied:])
    return SplitRequest(b"".join(rest), raw)


def streamed(answer: bytes) -> bytes:
    """Wrap a serialized ``ModelInferResponse`` as the only answer to its request on a stream."""
    final = _final()
    return b"".join((_head(STREAMED_TAG, len(answer) + len(final)), answer, final))


def streamed_error(request_id: str, message: str) -> bytes:
    """Return the answer on a stream to a failed request."""
    kinds = message_classes()
    response = parse(kinds["ModelInferResponse"], _final())
    response.id = request_id
    failed = kinds["ModelStreamInferResponse"](error_message=message, infer_response=response)
    return bytes(failed.SerializeToString())


class ProtobufCodec(ModelCodec):
    """Decode requests to one model and encode its answers, as protobuf messages."""

    def is_slow(self, raw: Sequence[Buffer] | None) -> bool:
        """Return whether reading the raw tensors of a request would block the event loop."""
        return raw is not None and sum(map(len, raw)) > self._slow_nbytes

    def decode(
        self, request: Any, raw: Sequence[memoryview] | None = None, pause: Pause = no_pause
    ) -> DecodedRequest:
        """Decode a ``ModelInferRequest``. Its id and its raw tensors are removed from it."""
        request_id = request.id
        contents: Sequence[Buffer] = list(request.raw_input_contents) if raw is None else raw
        if not contents:
            layout = self._layout(request, is_raw=False, pause=pause)
            arrays = {spec.name: array for spec, _, _, array in layout.inputs if array is not None}
            return DecodedRequest(layout, request_id, arrays, 0)
        # The remaining fields usually equal an earlier request's, byte for byte.
        request.ClearField("id")
        request.ClearField("raw_input_contents")
        key = request.SerializeToString()
        known = self._layouts.get(key)
        layout = self._layout(request, is_raw=True) if known is None else known
        if known is None and len(key) <= LAYOUT_NBYTES_MAX:
            remember(self._layouts, key, layout)
        if len(contents) != len(layout.inputs):
            raise RequestError(
                f"raw_input_contents must have one entry for each of the {len(layout.inputs)} inputs, not "
                f"{len(contents)}"
            )
        views: dict[str, Array] = {}
        for (spec, shape, nbytes, _), content in zip(layout.inputs, contents, strict=True):
            if len(content) != nbytes:
                check_nbytes(spec, shape, len(content))
            if layout.raw_numbers:
                views[spec.name] = np.ndarray(shape, spec.dtype, content)
            else:
                views[spec.name] = read_tensor(spec, shape, content, 0, len(content), pause)
        # Large raw tensors are views of one message, and small ones are copies.
        message_nbytes = sum(map(len, contents)) if raw is None else len(cast("Buffer", raw[0].obj))
        return DecodedRequest(layout, request_id, views, message_nbytes)

    @staticmethod
    def is_slow_answer(layout: RequestLayout, result: InferResult) -> bool:
        """Return whether encoding an answer would block the event loop for a millisecond or more."""
        # The tensors are copied, which takes 0.5 ms a MiB once memory must be requested from the system.
        return layout.answer_nbytes > COPY_NBYTES_MAX or ModelCodec.is_slow_answer(layout, result)

    def encode(self, request: DecodedRequest, result: InferResult, pause: Pause = no_pause) -> bytes:
        """Return the answer, a serialized ``ModelInferResponse``. ``pause`` is called at intervals."""
        layout = request.layout
        values = [result[spec.name] for spec, _ in layout.outputs]
        shapes = [value.shape for value in values]
        if shapes != layout.answer_key:
            layout.answer_key, layout.answer = shapes, self._described(layout, shapes)
        pieces: list[Any] = [layout.answer]
        if request.id:
            text = request.id.encode()
            pieces += (_head(ID_TAG, len(text)), text)
        for value in values:
            raw = write_tensor(value, pause)
            pieces += (_head(RAW_TAG, len(raw)), raw)
        return b"".join(pieces)

    def _described(self, layout: RequestLayout, shapes: Iterable[tuple[int, ...]]) -> bytes:
        """Return an answer without its id and its tensors."""
        outputs = [
            {"name": spec.name, "datatype": self._outputs[spec.name][1], "shape": shape}
            for (spec, _), shape in zip(layout.outputs, shapes, strict=True)
        ]
        kind = message_classes()["ModelInferResponse"]
        described = kind(model_name=self.name, model_version=self.version, outputs=outputs)
        return bytes(described.SerializeToString())

    def _layout(self, request: Any, *, is_raw: bool, pause: Pause = no_pause) -> RequestLayout:
        placed = tuple(
            [
                self._input(spec, datatype, item, is_raw=is_raw, pause=pause)
                for spec, datatype, item in self._items(request.inputs, "inputs", self._inputs)
            ]
        )
        outputs = []
        for spec, _, item in self._items(request.outputs, "outputs", self._outputs):
            if "classification" in item.parameters:
                raise UnsupportedError(
                    f"output {spec.name!r}: classification is not supported; request the scores instead"
                )
            outputs.append((spec, True))
        outputs = outputs or [(spec, True) for spec, _ in self._outputs.values()]
        parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
        return self._checked_layout(placed, tuple(outputs), *read_scheduling(parameters))

    def _items(self, items: Any, side: str, specs: Specs) -> list[tuple[TensorSpec, str, Any]]:
        """Return spec, datatype and description of each tensor on one side of a request."""
        found: dict[str, tuple[TensorSpec, str, Any]] = {}
        for item in items:
            spec, datatype = self._named(item.name, side, specs, found)
            refuse_shared_memory(item.name, item.parameters)
            found[item.name] = spec, datatype, item
        return list(found.values())

    def _input(
        self, spec: TensorSpec, datatype: str, item: Any, *, is_raw: bool, pause: Pause
    ) -> PlacedTensor:
        if item.datatype != datatype:
            raise InputError(f"input {spec.name!r} is {datatype}, not {item.datatype!r:.40}")
        shape = self._shape(spec, list(item.shape))
        given = [field.name for field, _ in item.contents.ListFields()]
        if not is_raw:
            return spec, shape, 0, _typed(spec, datatype, shape, given, item.contents, pause)
        if given:
            raise RequestError(
                f"input {spec.name!r} has contents beside raw_input_contents: give one or the other"
            )
        return spec, shape, size_of(shape) * spec.dtype.itemsize, None


def _typed(
    spec: TensorSpec,
    datatype: str,
    shape: tuple[int, ...],
    given: list[str],
    contents: Any,
    pause: Pause,
) -> Array:
    """Return a tensor given as a list of values."""
    if datatype not in CONTENTS:
        raise InputError(f"input {spec.name!r} is {datatype}, which is accepted as raw_input_contents only")
    field, dtype = CONTENTS[datatype]
    count = size_of(shape)
    if not given and count:
        raise RequestError(f"input {spec.name!r} has neither raw_input_contents nor contents.{field}")
    if given not in ([], [field]):
        raise InputError(
            f"input {spec.name!r} is {datatype}: its values must be in {field}, not in {', '.join(given)}"
        )
    values = getattr(contents, field)
    if len(values) != count:
        raise InputError(f"input {spec.name!r} has {len(values)} values, but shape {list(shape)}")
    if datatype == "BYTES":
        return strings(spec, list(values), pause).reshape(shape)
    array = np.empty(count, dtype)
    for start in range(0, count, PIECE):
        array[start : start + PIECE] = values[start : start + PIECE]
        pause()
    return convert(spec, array).reshape(shape)


def _value(parameter: Any) -> Any:
    """Return the value of an ``InferParameter``."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


@cache
def _final() -> bytes:
    """Return the serialized field that marks an answer as its request's last."""
    response = message_classes()["ModelInferResponse"]()
    response.parameters["triton_final_response"].bool_param = True
    return bytes(response.SerializeToString())


def _varint(body: Buffer, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it: the body's end if it is malformed."""
    value = shift = 0
    while position < len(body) and shift < VARINT_BITS_MAX:
        byte = body[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    return 0, len(body)


def _head(tag: int, nbytes: int) -> bytes:
    """Return a field's prefix: its tag, and its number of bytes as a varint."""
    if nbytes < 128:
        return bytes((tag, nbytes))
    head = [tag]
    while nbytes >= 128:
        head.append(nbytes & 127 | 128)
        nbytes >>= 7
    head.append(nbytes)
    return bytes(head)
