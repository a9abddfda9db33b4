"""KServe's protobuf messages, and the tensors in them. The only importer of ``google.protobuf``.

The messages are Triton's ``grpc_service.proto``, the part of ``model_config.proto`` that a model here has
values for, and those of gRPC's health. They are built from the table below at first use, in a pool of their
own: the classes that ``tritonclient`` brings have the same names and live in the same process.

An answer is put together from bytes, as protobuf allows: the fields that stay the same are remembered with
the request's :class:`Plan`, the id and the tensors follow. That saves two copies of each tensor.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from asynctrt.errors import InputError, MissingExtraError, RequestError, UnsupportedError
from asynctrt.serving.datatypes import read_tensor, size_of, strings, write_tensor
from asynctrt.serving.wire import (
    PLAN_NBYTES_MAX,
    Call,
    ModelCodec,
    Plan,
    Specs,
    check_nbytes,
    read_scheduling,
    read_shape,
    refuse_shared_memory,
    remember,
)
from asynctrt.tensors import Array, InferResult, TensorSpec, convert

try:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass
except ImportError as error:
    raise MissingExtraError("gRPC needs protobuf: pip install 'asynctrt[serve]'") from error

PACKAGE: Final = "inference"

# A field is its name, its number and its type; ``*`` after a type: repeated; ``{}``: a map from strings to
# it; ``@``: the oneof that the field is in.
MESSAGES: Final = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live 1 bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready 1 bool",
    "ModelReadyRequest": "name 1 string, version 2 string",
    "ModelReadyResponse": "ready 1 bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name 1 string, version 2 string, extensions 3 string*",
    "ModelMetadataRequest": "name 1 string, version 2 string",
    "ModelMetadataResponse": "name 1 string, versions 2 string*, platform 3 string, "
    "inputs 4 ModelMetadataResponse.TensorMetadata*, outputs 5 ModelMetadataResponse.TensorMetadata*",
    "ModelMetadataResponse.TensorMetadata": "name 1 string, datatype 2 string, shape 3 int64*",
    "InferParameter": "bool_param 1 bool @parameter_choice, int64_param 2 int64 @parameter_choice, "
    "string_param 3 string @parameter_choice, double_param 4 double @parameter_choice, "
    "uint64_param 5 uint64 @parameter_choice",
    "InferTensorContents": "bool_contents 1 bool*, int_contents 2 int32*, int64_contents 3 int64*, "
    "uint_contents 4 uint32*, uint64_contents 5 uint64*, fp32_contents 6 float*, fp64_contents 7 double*, "
    "bytes_contents 8 bytes*",
    "ModelInferRequest": "model_name 1 string, model_version 2 string, id 3 string, "
    "parameters 4 InferParameter{}, inputs 5 ModelInferRequest.InferInputTensor*, "
    "outputs 6 ModelInferRequest.InferRequestedOutputTensor*, raw_input_contents 7 bytes*",
    "ModelInferRequest.InferInputTensor": "name 1 string, datatype 2 string, shape 3 int64*, "
    "parameters 4 InferParameter{}, contents 5 InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "name 1 string, parameters 2 InferParameter{}",
    "ModelInferResponse": "model_name 1 string, model_version 2 string, id 3 string, "
    "parameters 4 InferParameter{}, outputs 5 ModelInferResponse.InferOutputTensor*, "
    "raw_output_contents 6 bytes*",
    "ModelInferResponse.InferOutputTensor": "name 1 string, datatype 2 string, shape 3 int64*, "
    "parameters 4 InferParameter{}, contents 5 InferTensorContents",
    "ModelStreamInferResponse": "error_message 1 string, infer_response 2 ModelInferResponse",
    "ModelConfigRequest": "name 1 string, version 2 string",
    "ModelConfigResponse": "config 1 ModelConfig",
    "ModelStatisticsRequest": "name 1 string, version 2 string",
    "ModelStatisticsResponse": "model_stats 1 ModelStatistics*",
    "ModelStatistics": "name 1 string, version 2 string, last_inference 3 uint64, inference_count 4 uint64, "
    "execution_count 5 uint64, inference_stats 6 InferStatistics, batch_stats 7 InferBatchStatistics*, "
    "memory_usage 8 MemoryUsage*, response_stats 9 InferResponseStatistics{}",
    "InferStatistics": "success 1 StatisticDuration, fail 2 StatisticDuration, queue 3 StatisticDuration, "
    "compute_input 4 StatisticDuration, compute_infer 5 StatisticDuration, "
    "compute_output 6 StatisticDuration, cache_hit 7 StatisticDuration, cache_miss 8 StatisticDuration",
    "InferBatchStatistics": "batch_size 1 uint64, compute_input 2 StatisticDuration, "
    "compute_infer 3 StatisticDuration, compute_output 4 StatisticDuration",
    "InferResponseStatistics": "compute_infer 1 StatisticDuration, compute_output 2 StatisticDuration, "
    "success 3 StatisticDuration, fail 4 StatisticDuration, empty_response 5 StatisticDuration, "
    "cancel 6 StatisticDuration",
    "StatisticDuration": "count 1 uint64, ns 2 uint64",
    "MemoryUsage": "type 1 string, id 2 int64, byte_size 3 uint64",
    "ModelRepositoryParameter": "bool_param 1 bool @parameter_choice, int64_param 2 int64 @parameter_choice, "
    "string_param 3 string @parameter_choice, bytes_param 4 bytes @parameter_choice",
    "RepositoryIndexRequest": "repository_name 1 string, ready 2 bool",
    "RepositoryIndexResponse": "models 1 RepositoryIndexResponse.ModelIndex*",
    "RepositoryIndexResponse.ModelIndex": "name 1 string, version 2 string, state 3 string, reason 4 string",
    "RepositoryModelLoadRequest": "repository_name 1 string, model_name 2 string, "
    "parameters 3 ModelRepositoryParameter{}",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "repository_name 1 string, model_name 2 string, "
    "parameters 3 ModelRepositoryParameter{}",
    "RepositoryModelUnloadResponse": "",
    # Of the configuration, what ServedModel.config() has.
    "ModelConfig": "name 1 string, platform 2 string, version_policy 3 ModelVersionPolicy, "
    "max_batch_size 4 int32, input 5 ModelInput*, output 6 ModelOutput*, "
    "instance_group 7 ModelInstanceGroup*, dynamic_batching 11 ModelDynamicBatching @scheduling_choice, "
    "backend 17 string",
    "ModelVersionPolicy": "all 2 ModelVersionPolicy.All @policy_choice",
    "ModelVersionPolicy.All": "",
    "ModelInput": "name 1 string, data_type 2 DataType, format 3 ModelInput.Format, dims 4 int64*, "
    "is_shape_tensor 6 bool, optional 8 bool",
    "ModelOutput": "name 1 string, data_type 2 DataType, dims 3 int64*, label_filename 4 string, "
    "is_shape_tensor 6 bool",
    "ModelInstanceGroup": "name 1 string, count 2 int32, kind 4 ModelInstanceGroup.Kind",
    "ModelDynamicBatching": "preferred_batch_size 1 int32*, max_queue_delay_microseconds 2 uint64, "
    "priority_levels 4 uint64, default_priority_level 5 uint64",
    # These are of the package grpc.health.v1, which their bytes do not tell.
    "HealthCheckRequest": "service 1 string",
    "HealthCheckResponse": "status 1 HealthCheckResponse.ServingStatus",
}
"""The fields of each message, by its name within the package."""

ENUMS: Final = {
    "DataType": "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 "
    "TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16",
    "ModelInput.Format": "FORMAT_NONE FORMAT_NHWC FORMAT_NCHW",
    "ModelInstanceGroup.Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
    "HealthCheckResponse.ServingStatus": "UNKNOWN SERVING NOT_SERVING SERVICE_UNKNOWN",
}
"""The values of each enumeration, numbered from 0."""

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
"""The field of ``InferTensorContents`` for each datatype, and what it holds. The others come raw only."""

# What stands before a field of bytes or text: its number and the kind "a length, then as many bytes".
ID_TAG: Final = 3 << 3 | 2
RAW_TAG: Final = 6 << 3 | 2
STREAMED_TAG: Final = 2 << 3 | 2


@cache
def message_classes() -> Mapping[str, Any]:
    """The class of each message, by its name within the package."""
    file = FileDescriptorProto(name="asynctrt/inference.proto", package=PACKAGE, syntax="proto3")
    protos: dict[str, Any] = {}
    for name in sorted(MESSAGES):  # A nested message comes after the one that it is in.
        parent, _, own = name.rpartition(".")
        protos[name] = protos[parent].nested_type.add() if parent else file.message_type.add()
        protos[name].name = own
    for name, values in ENUMS.items():
        parent, _, own = name.rpartition(".")
        enum = (protos[parent] if parent else file).enum_type.add(name=own)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        for field in filter(None, fields.split(", ")):
            _add_field(protos[name], name, *field.split())
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}
    return MappingProxyType(found)


def _add_field(proto: Any, owner: str, name: str, number: str, kind: str, oneof: str = "") -> None:
    field = proto.field.add(name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
    if oneof:
        names = [item.name for item in proto.oneof_decl]
        if oneof[1:] not in names:
            names.append(oneof[1:])
            proto.oneof_decl.add(name=oneof[1:])
        field.oneof_index = names.index(oneof[1:])
    if kind.endswith(("*", "{}")):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind.endswith("{}"):
        # On the wire a map is a list of messages with a key and a value, and so it is declared.
        entry = name.title().replace("_", "") + "Entry"
        nested = proto.nested_type.add(name=entry)
        nested.options.map_entry = True
        _add_field(nested, entry, "key", "1", "string")
        _add_field(nested, entry, "value", "2", kind[:-2])
        kind = f"{owner}.{entry}"
    kind = kind.rstrip("*")
    scalar = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}", None)
    if scalar is not None:
        field.type = scalar
    else:
        field.type = FieldDescriptorProto.TYPE_ENUM if kind in ENUMS else FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def parse(kind: Any, body: bytes) -> Any:
    """A message of class ``kind`` from its bytes.

    :raises RequestError: if they are none.
    """
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the message is no {kind.DESCRIPTOR.name}: {error}") from error


def streamed(answer: bytes) -> bytes:
    """A ``ModelInferResponse`` as the one and last answer of its request on a stream."""
    final = _final()
    return b"".join((_head(STREAMED_TAG, len(answer) + len(final)), answer, final))


def streamed_error(request_id: str, message: str) -> bytes:
    """What a request on a stream has failed with."""
    kinds = message_classes()
    response = parse(kinds["ModelInferResponse"], _final())
    response.id = request_id
    failed = kinds["ModelStreamInferResponse"](error_message=message, infer_response=response)
    return bytes(failed.SerializeToString())


class InferCodec(ModelCodec):
    """Decodes inference requests to one model and encodes its answers, as ``wire.Codec`` does for HTTP."""

    def decode(self, request: Any) -> Call:
        """A request, which is taken apart: its id and its raw tensors are no longer in it afterwards.

        :raises RequestError: naming the field that breaks the protocol.
        :raises InputError: for a tensor that the model cannot take.
        """
        request_id = request.id
        contents = list(request.raw_input_contents)
        if not contents:
            plan = self._plan(request, is_raw=False)
            arrays = {spec.name: array for spec, _, _, array in plan.inputs if array is not None}
            return Call(plan, request_id, arrays)
        # What is left is that of the last request, mostly, and its bytes say so.
        request.ClearField("id")
        request.ClearField("raw_input_contents")
        key = request.SerializeToString()
        plan = self._plans.get(key) or self._new_plan(request, key)
        if len(contents) != len(plan.inputs):
            raise RequestError(
                f"raw_input_contents has {len(contents)} entries for {len(plan.inputs)} inputs: one for each"
            )
        views: dict[str, Array] = {}
        for (spec, shape, nbytes, _), content in zip(plan.inputs, contents, strict=True):
            if len(content) != nbytes:
                check_nbytes(spec, shape, len(content))
            views[spec.name] = read_tensor(spec, shape, content, 0, len(content))
        return Call(plan, request_id, views)

    def encode(self, call: Call, result: InferResult) -> bytes:
        """The answer, a ``ModelInferResponse``."""
        plan = call.plan
        values = [result[spec.name] for spec, _ in plan.outputs]
        shapes = tuple([value.shape for value in values])
        if shapes != plan.answer_key:
            plan.answer_key, plan.answer = shapes, self._described(plan, shapes)
        pieces: list[Any] = [plan.answer]
        if call.id:
            text = call.id.encode()
            pieces += (_head(ID_TAG, len(text)), text)
        for value in values:
            raw = write_tensor(value)
            pieces += (_head(RAW_TAG, len(raw)), raw)
        return b"".join(pieces)

    def _described(self, plan: Plan, shapes: Iterable[tuple[int, ...]]) -> bytes:
        """All of an answer but its id and its tensors."""
        outputs = [
            {"name": spec.name, "datatype": self._outputs[spec.name][1], "shape": shape}
            for (spec, _), shape in zip(plan.outputs, shapes, strict=True)
        ]
        kind = message_classes()["ModelInferResponse"]
        described = kind(model_name=self.name, model_version=self.version, outputs=outputs)
        return bytes(described.SerializeToString())

    def _new_plan(self, request: Any, key: bytes) -> Plan:
        plan = self._plan(request, is_raw=True)
        if len(key) <= PLAN_NBYTES_MAX:
            remember(self._plans, key, plan)
        return plan

    def _plan(self, request: Any, *, is_raw: bool) -> Plan:
        placed = tuple(
            [
                self._input(spec, datatype, item, is_raw=is_raw)
                for spec, datatype, item in self._items(request.inputs, "inputs", self._inputs)
            ]
        )
        outputs = []
        for spec, _, item in self._items(request.outputs, "outputs", self._outputs):
            if "classification" in item.parameters:
                raise UnsupportedError(
                    f"output {spec.name!r}: classification is not implemented; take the scores"
                )
            outputs.append((spec, True))
        outputs = outputs or [(spec, True) for spec, _ in self._outputs.values()]
        parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
        priority, timeout = read_scheduling(parameters)
        return Plan(placed, sum([nbytes for _, _, nbytes, _ in placed]), tuple(outputs), priority, timeout)

    def _items(self, items: Any, side: str, specs: Specs) -> list[tuple[TensorSpec, str, Any]]:
        """Spec, datatype and description of each tensor on one side of a request."""
        self._check_count(side, len(items))
        found: dict[str, tuple[TensorSpec, str, Any]] = {}
        for item in items:
            spec, datatype = self._named(item.name, side, specs, found)
            refuse_shared_memory(item.name, item.parameters)
            found[item.name] = spec, datatype, item
        return list(found.values())

    @staticmethod
    def _input(
        spec: TensorSpec, datatype: str, item: Any, *, is_raw: bool
    ) -> tuple[TensorSpec, tuple[int, ...], int, Array | None]:
        if item.datatype != datatype:
            raise InputError(f"input {spec.name!r} is {datatype}, not {item.datatype!r:.40}")
        shape = read_shape(spec.name, list(item.shape))
        given = [field.name for field, _ in item.contents.ListFields()]
        if not is_raw:
            return spec, shape, 0, _typed(spec, datatype, shape, given, item.contents)
        if given:
            raise RequestError(
                f"input {spec.name!r} has contents, but there are raw_input_contents: give one or the other"
            )
        return spec, shape, size_of(shape) * spec.dtype.itemsize, None


def _typed(spec: TensorSpec, datatype: str, shape: tuple[int, ...], given: list[str], contents: Any) -> Array:
    """A tensor that is given as a list of values."""
    if datatype not in CONTENTS:
        raise InputError(f"input {spec.name!r} is {datatype}, which has raw_input_contents only")
    field, dtype = CONTENTS[datatype]
    count = size_of(shape)
    if not given and count:
        raise RequestError(f"input {spec.name!r} has neither raw_input_contents nor contents.{field}")
    if given not in ([], [field]):
        raise InputError(f"input {spec.name!r} is {datatype}: its values are in {field}, not in {given}")
    values = list(getattr(contents, field))
    if len(values) != count:
        raise InputError(f"input {spec.name!r} has {len(values)} values, but shape {list(shape)}")
    if datatype == "BYTES":
        return strings(spec, values).reshape(shape)
    return convert(spec, np.array(values, dtype)).reshape(shape)


def _value(parameter: Any) -> Any:
    """What an ``InferParameter`` holds."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


@cache
def _final() -> bytes:
    """The field of an answer that says that none follows."""
    response = message_classes()["ModelInferResponse"]()
    response.parameters["triton_final_response"].bool_param = True
    return bytes(response.SerializeToString())


def _head(tag: int, nbytes: int) -> bytes:
    """What stands before a field's bytes: its tag, and their number in groups of seven bits."""
    if nbytes < 128:
        return bytes((tag, nbytes))
    head = [tag]
    while nbytes >= 128:
        head.append(nbytes & 127 | 128)
        nbytes >>= 7
    head.append(nbytes)
    return bytes(head)
