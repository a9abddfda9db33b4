"""The protobuf messages: Triton's to the last field, beside its client's own; and the tensors in them."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as triton
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import Default

from asynctrt.errors import InputError, RequestError, TooLargeError, UnsupportedError
from asynctrt.kserve.protobuf import (
    DESCRIPTORS,
    ProtobufCodec,
    message_classes,
    parse,
    split_request,
    streamed,
    streamed_error,
)
from asynctrt.serving import grpc_server
from asynctrt.serving.api import Api
from asynctrt.serving.grpc_server import GrpcServer
from asynctrt.serving.repository import Repository
from asynctrt.serving.settings import ServerSettings
from asynctrt.tensors import BatchRecord, InferResult, TensorSpec

PROTOS = ("inference.proto", "health.proto", "reflection.proto")
DESCRIBED = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
MINE = next(file for file in DESCRIBED.file if file.package == "inference")


def test_the_descriptors_are_those_of_the_proto_files(tmp_path):
    """To write them anew: run this command with ``protocol.binpb`` as its output, in asynctrt/kserve."""
    made = tmp_path / "protocol.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--descriptor_set_out={made}", *PROTOS]
    subprocess.run(command, cwd=DESCRIPTORS.parent, check=True)
    assert FileDescriptorSet.FromString(made.read_bytes()) == DESCRIBED


def test_the_service_is_what_the_server_has():
    service = next(iter(MINE.service))
    assert f"{MINE.package}.{service.name}" == grpc_server.SERVICE
    served = GrpcServer(Api(Repository()), ServerSettings())._methods()
    assert {method.name for method in service.method} == set(served) - set(grpc_server.UNSUPPORTED)
    for method in service.method:
        handler = served[method.name]
        assert method.server_streaming == handler.response_streaming
        # A single message is read as a stream of one, which is the same on the wire, once there is room.
        assert handler.request_streaming or not method.client_streaming


def everything(messages):
    """Every message, those within others included, by its name within the package."""
    for message in messages:
        yield message
        yield from everything(message.nested_types)


def fact(field):
    """All that there is to say about a field."""
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof
    return (
        field.number,
        field.type,
        field.is_repeated,
        kind and kind.full_name,
        oneof and oneof.name,
        bool(field.message_type and field.message_type.GetOptions().map_entry),
    )


OURS = {
    message.full_name: message
    for message in everything(message_classes()[item.name].DESCRIPTOR for item in MINE.message_type)
}


@pytest.mark.parametrize("name", OURS)
def test_every_field_is_tritons(name):
    ours = {field.name: fact(field) for field in OURS[name].fields}
    theirs = Default().FindMessageTypeByName(name)
    known = {field.name: fact(field) for field in theirs.fields}
    assert ours == known


ENUMS = {
    enum.full_name: enum
    for holder in (message_classes()["ModelInput"].DESCRIPTOR.file, *OURS.values())
    for enum in holder.enum_types_by_name.values()
}


@pytest.mark.parametrize("name", ENUMS)
def test_every_value_is_tritons(name):
    known = Default().FindEnumTypeByName(name)
    assert ENUMS[name].values_by_name.keys() == known.values_by_name.keys()
    assert ENUMS[name].values_by_number.keys() == known.values_by_number.keys()
    assert [value.name for value in ENUMS[name].values] == [value.name for value in known.values]


def test_the_messages_of_health_are_those_of_its_protocol():
    kinds = message_classes()
    assert kinds["HealthCheckRequest"].DESCRIPTOR.full_name == "grpc.health.v1.HealthCheckRequest"
    assert kinds["HealthCheckRequest"](service="m").SerializeToString() == b"\x0a\x01m"
    states = kinds["HealthCheckResponse"].ServingStatus.items()
    assert states == [("UNKNOWN", 0), ("SERVING", 1), ("NOT_SERVING", 2), ("SERVICE_UNKNOWN", 3)]
    assert kinds["HealthCheckResponse"](status="SERVING").SerializeToString() == b"\x08\x01"


def test_both_kinds_of_classes_live_in_one_process():
    mine = message_classes()["ModelInferRequest"](model_name="m", parameters={"p": {"int64_param": -1}})
    other = triton.ModelInferRequest.FromString(mine.SerializeToString())
    assert other.model_name == "m"
    assert other.parameters["p"].int64_param == -1
    assert type(mine) is not type(other)
    assert message_classes()["ModelInferRequest"].FromString(other.SerializeToString()) == mine


@pytest.mark.parametrize("first", ["asynctrt.kserve.protobuf", "tritonclient.grpc.service_pb2"])
def test_the_order_of_imports_does_not_matter(first):
    program = f"""
import {first}
from asynctrt.kserve.protobuf import message_classes
request = message_classes()["ModelInferRequest"](id="a")
import tritonclient.grpc.service_pb2 as triton
assert triton.ModelInferRequest.FromString(request.SerializeToString()).id == "a"
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True)


def test_what_is_no_message_is_the_callers_error():
    with pytest.raises(RequestError, match="not a ModelInferRequest"):
        parse(message_classes()["ModelInferRequest"], b"\xff\xff")


# ---- tensors

DTYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "BYTES": "S4",
}
FIELDS = {
    "BOOL": ("bool_contents", [True, False]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-32768, 32767]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "FP32": ("fp32_contents", [0.5, float("inf")]),
    "FP64": ("fp64_contents", [0.1, -1e300]),
    "BYTES": ("bytes_contents", [b"ab", b""]),
}


def codec(*inputs, outputs=None, **kw):
    inputs = inputs or (TensorSpec("x", np.float32, (2,)),)
    return ProtobufCodec("model", "3", inputs, inputs if outputs is None else outputs, **kw)


def request(shape=(1, 2), datatype="FP32", name="x", raw=b"\0" * 8, **kw):
    message = triton.ModelInferRequest(**kw)
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message


def ours(message):
    return parse(message_classes()["ModelInferRequest"], message.SerializeToString())


def decode(machine, message):
    return machine.decode(ours(message))


def result(**outputs):
    return InferResult(outputs, (BatchRecord(1, 0),), 0)


@pytest.mark.parametrize("datatype", DTYPES)
def test_raw_tensors_come_and_go(datatype):
    spec = TensorSpec("x", np.dtype(DTYPES[datatype]), (2,))
    values = np.array([[b"a", b"bcd"]] if datatype == "BYTES" else [[1, 0]], spec.dtype)
    raw = b"\1\0\0\0a\3\0\0\0bcd" if datatype == "BYTES" else values.tobytes()
    machine = codec(spec)
    for _ in range(2):  # The second one by the layout of the first.
        call = decode(machine, request(datatype=datatype, raw=raw, id="7"))
        assert call.inputs["x"].dtype == spec.dtype
        assert call.inputs["x"].tolist() == values.tolist()
        answer = triton.ModelInferResponse.FromString(machine.encode(call, result(x=call.inputs["x"])))
        assert (answer.model_name, answer.model_version, answer.id) == ("model", "3", "7")
        assert [(item.name, item.datatype, list(item.shape)) for item in answer.outputs] == [
            ("x", datatype, [1, 2])
        ]
        assert list(answer.raw_output_contents) == [raw]


@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_tensors_come(datatype):
    field, values = FIELDS[datatype]
    message = request(datatype=datatype, raw=None)
    getattr(message.inputs[0].contents, field).extend(values)
    call = decode(codec(TensorSpec("x", np.dtype(DTYPES[datatype]), (2,))), message)
    assert call.inputs["x"].tolist() == [values]
    assert call.inputs["x"].dtype == np.dtype(DTYPES[datatype])


def test_arrays_of_any_layout_go():
    machine = codec()
    call = decode(machine, request())
    turned = np.arange(6, dtype=np.float32).reshape(3, 2).T
    answer = triton.ModelInferResponse.FromString(machine.encode(call, result(x=turned)))
    assert list(answer.raw_output_contents) == [np.ascontiguousarray(turned).tobytes()]
    empty = np.zeros((0, 2), np.float32)
    answer = triton.ModelInferResponse.FromString(machine.encode(call, result(x=empty)))
    assert list(answer.raw_output_contents) == [b""]
    assert list(answer.outputs[0].shape) == [0, 2]


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 16383, 16384, 2**21])
def test_lengths_of_any_size(nbytes):
    machine = codec(TensorSpec("x", np.uint8, ("n",)))
    raw = b"\7" * nbytes
    call = decode(machine, request((1, nbytes), "UINT8", raw=raw, id="i" * nbytes))
    body = machine.encode(call, result(x=call.inputs["x"]))
    answer = triton.ModelInferResponse.FromString(body)
    assert answer.raw_output_contents[0] == raw
    assert len(answer.id) == nbytes
    on_stream = triton.ModelStreamInferResponse.FromString(streamed(body))
    assert on_stream.infer_response.raw_output_contents[0] == raw
    assert on_stream.infer_response.parameters["triton_final_response"].bool_param
    assert not on_stream.error_message


def test_an_error_on_a_stream():
    answer = triton.ModelStreamInferResponse.FromString(streamed_error("größer", "no: ☹"))
    assert (answer.error_message, answer.infer_response.id) == ("no: ☹", "größer")
    assert answer.infer_response.parameters["triton_final_response"].bool_param


def test_outputs_are_those_asked_for_in_their_order():
    specs = [TensorSpec(name, np.float32, (1,)) for name in "abc"]
    machine = codec(outputs=specs)
    message = request()
    values = {name: np.full((1, 1), number, np.float32) for number, name in enumerate("abc")}
    answer = triton.ModelInferResponse.FromString(machine.encode(decode(machine, message), result(**values)))
    assert [item.name for item in answer.outputs] == ["a", "b", "c"]
    for name in "ca":
        message.outputs.add(name=name)
    answer = triton.ModelInferResponse.FromString(machine.encode(decode(machine, message), result(**values)))
    assert [item.name for item in answer.outputs] == ["c", "a"]
    assert [np.frombuffer(raw, np.float32)[0] for raw in answer.raw_output_contents] == [2, 0]


def test_layouts_are_remembered_without_ids_and_tensors():
    machine = codec()
    layouts = {
        decode(machine, request(id=str(number), raw=bytes([number] * 8))).layout for number in range(5)
    }
    assert len(layouts) == 1
    assert decode(machine, request((2, 2), raw=bytes(16))).layout not in layouts
    other = request()
    other.parameters["priority"].uint64_param = 2
    assert decode(machine, other).layout.priority == 2
    assert decode(machine, request()).layout.priority == 0


def test_layouts_are_bounded():
    machine = codec(TensorSpec("x", np.uint8, ("n",)))
    for number in range(1, 600):
        decode(machine, request((1, number), "UINT8", raw=bytes(number)))
        assert len(machine._layouts) <= 256
    long = request((1, 1), "UINT8", raw=b"1")
    long.parameters["comment"].string_param = "x" * 5000
    before = set(machine._layouts)
    decode(machine, long)
    assert set(machine._layouts) == before


def test_typed_values_are_not_remembered():
    machine = codec()
    for value in (1.0, 2.0):
        message = request(raw=None)
        message.inputs[0].contents.fp32_contents.extend([value, value])
        assert decode(machine, message).inputs["x"].tolist() == [[value, value]]
    assert not machine._layouts


def test_priority_and_timeout():
    message = request()
    message.parameters["priority"].int64_param = 1
    message.parameters["timeout"].int64_param = 1500
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.parameters["nothing"].SetInParent()
    layout = decode(codec(), message).layout
    assert (layout.priority, layout.timeout) == (1, 0.0015)


def with_parameter(name, **value):
    message = request()
    message.parameters[name].CopyFrom(triton.InferParameter(**value))
    return message


def typed(datatype="FP32", shape=(1, 2), **contents):
    message = request(shape, datatype, raw=None)
    message.inputs[0].contents.CopyFrom(triton.InferTensorContents(**contents))
    return message


def changed(change, **kw):
    message = request(**kw)
    change(message)
    return message


def output(name, **parameters):
    def change(message):
        item = message.outputs.add(name=name)
        for key, value in parameters.items():
            item.parameters[key].int64_param = value

    return change


BYTES = TensorSpec("x", np.dtype("S4"), (2,))
INT8 = TensorSpec("x", np.int8, (2,))
HALF = TensorSpec("x", np.float16, (2,))

BAD = {
    "no input": (
        RequestError,
        "each of the 0 inputs, not 1",
        triton.ModelInferRequest(raw_input_contents=[b""]),
    ),
    "no name": (InputError, "unknown input ''", request(name="")),
    "input twice": (
        RequestError,
        "duplicate input 'x'",
        changed(lambda m: m.inputs.add(name="x", datatype="FP32", shape=(1, 2))),
    ),
    "no datatype": (InputError, "'x' is FP32, not ''", request(datatype="")),
    "negative": (RequestError, "none negative", request((-1, -2))),
    "no shape": (InputError, "takes shape \\(rows, 2\\), given \\(\\)", request(())),
    "many dimensions": (RequestError, "shape of 'x'", request((1,) * 33)),
    "huge": (RequestError, "more elements than any message", request((2**62, 2**62))),
    "few bytes": (InputError, "takes 8 bytes, but 7", request(raw=b"1234567")),
    "many bytes": (InputError, "takes 8 bytes, but 9", request(raw=b"123456789")),
    "many tensors": (
        RequestError,
        "each of the 1 inputs, not 2",
        changed(lambda m: m.raw_input_contents.append(b"")),
    ),
    "both forms": (
        RequestError,
        "one or the other",
        changed(lambda m: m.inputs[0].contents.fp32_contents.append(1)),
    ),
    "neither form": (RequestError, "neither raw_input_contents nor contents.fp32", request(raw=None)),
    "few values": (InputError, "has 1 values, but shape", typed(fp32_contents=[1])),
    "the wrong field": (InputError, "in fp32_contents, not in", typed(fp64_contents=[1, 2])),
    "two fields": (InputError, "not in", typed(fp32_contents=[1, 2], fp64_contents=[1, 2])),
    "out of range": (InputError, "holds -128 to 127", typed("INT8", int_contents=[1, 128]), INT8),
    "half typed": (InputError, "raw_input_contents only", typed("FP16", fp32_contents=[1, 2]), HALF),
    "bytes too long": (
        InputError,
        "the model takes at most 4",
        typed("BYTES", bytes_contents=[b"", b"12345"]),
        BYTES,
    ),
    "bytes uneven": (
        InputError,
        "element 1 of 2 ends",
        request(datatype="BYTES", raw=b"\0\0\0\0\1\0\0\0"),
        BYTES,
    ),
    "bytes left": (InputError, "1 bytes are left", request(datatype="BYTES", raw=bytes(9)), BYTES),
    "bytes few": (InputError, "too few for shape", request(datatype="BYTES", raw=bytes(7)), BYTES),
    "bytes of a huge shape": (
        InputError,
        "too few for shape",
        request((2**16, 2), "BYTES", raw=bytes(8)),
        BYTES,
    ),
    "more byte strings than are accepted": (
        TooLargeError,
        "elements of BYTES",
        request((2**20, 2), "BYTES", raw=b"\xff" * 8),
        BYTES,
    ),
    "another shape than the model's": (
        InputError,
        "takes shape",
        request((1, 3), "BYTES", raw=b"\xff" * 12),
        BYTES,
    ),
    "output twice": (
        RequestError,
        "duplicate output 'x'",
        changed(lambda m: [output("x")(m), output("x")(m)]),
    ),
    "classification": (UnsupportedError, "classification", changed(output("x", classification=3))),
    "output in shared memory": (
        UnsupportedError,
        "shared memory",
        changed(output("x", shared_memory_region=1)),
    ),
    "input in shared memory": (
        UnsupportedError,
        "shared memory",
        changed(lambda m: m.inputs[0].parameters["shared_memory_region"].SetInParent()),
    ),
    "priority as text": (
        RequestError,
        "priority must be a whole number",
        with_parameter("priority", string_param="1"),
    ),
    "priority as bool": (RequestError, "priority must be", with_parameter("priority", bool_param=True)),
    "timeout as double": (RequestError, "timeout must be", with_parameter("timeout", double_param=1.5)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_named(name):
    error, says, message, *spec = BAD[name]
    machine = codec(*spec)
    for _ in range(2):
        with pytest.raises(error, match=says):
            decode(machine, message)
    good = {"S": request(datatype="BYTES"), "f": request(raw=bytes(8))}.get(
        machine._inputs["x"][0].dtype.kind
    )
    if good is not None and spec != [HALF]:
        decode(machine, good)


def test_too_many_rows_are_refused_before_their_values_are_read():
    message = request((5, 2), "BYTES", raw=b"\xff" * 40)
    with pytest.raises(InputError, match="5 rows are more than the queue can ever hold"):
        decode(codec(BYTES, rows_max=4), message)


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (b"\x2a\x00" * 200_000, TooLargeError, "more than 4096 inputs"),
        (b"\x3a\x00" * 200_000, TooLargeError, "more than 4096 inputs"),
        (b"\xa0\x06\x01" * 200_000, TooLargeError, "more than 4096 inputs"),
        (b"\x25abcd" * 200_000, TooLargeError, "more than 4096 inputs"),
        (
            b"\xba\x80\x00\x00" * 200_000,
            TooLargeError,
            "more than 4096 inputs",
        ),  # A tag that is longer than needed.
        (b"\x2a\xc0\x84\x3d" + b"\x18\x01" * 500_000, TooLargeError, "bytes besides raw_input_contents"),
        (b"\x3b\x3c" + b"\x2a\x00" * 200_000, RequestError, "has a group"),
    ],
    ids=["inputs", "raw", "unknown", "fixed", "tags", "dims", "group"],
)
def test_a_message_that_would_grow_is_refused_before_it_is_parsed(body, error, says):
    with pytest.raises(error, match=says):
        split_request(body, nbytes_max=300_000)


def test_raw_tensors_are_not_counted():
    message = request((1000, 2), raw=bytes(8000))
    for _ in range(50):
        message.raw_input_contents.append(bytes(100_000))
    body = message.SerializeToString()
    split = split_request(body, nbytes_max=1000)
    assert [len(raw) for raw in split.raw] == [8000] + [100_000] * 50
    # They are views, and the rest is a message that says all but them.
    assert all(raw.obj is body for raw in split.raw)
    message.ClearField("raw_input_contents")
    assert parse(message_classes()["ModelInferRequest"], split.rest) == ours(message)


def test_fields_between_and_after_raw_tensors_are_kept():
    """A message's fields may come in any order, and a repeated field in several places."""
    first, second = bytes(20_000), b"\1" * 20_000
    raw = [b"\x3a\xa0\x9c\x01" + content for content in (first, second)]
    expected = request((1, 2))
    expected.ClearField("raw_input_contents")
    body = raw[0] + expected.SerializeToString() + raw[1] + b"\x1a\x01z"
    split = split_request(body, nbytes_max=1000)
    assert split.raw == [first, second]
    expected.id = "z"
    assert parse(message_classes()["ModelInferRequest"], split.rest) == ours(expected)


@pytest.mark.parametrize("end", [b"\x2a", b"\x2a\xff", b"\x2a\xff\xff\xff\xff\x0f", b"\xff" * 20, b"\x21"])
def test_a_message_that_is_cut_off_is_left_to_the_parser(end):
    body = request((1000, 2), raw=bytes(100_000)).SerializeToString() + end
    split = split_request(body, nbytes_max=1000)
    with pytest.raises(RequestError):
        parse(message_classes()["ModelInferRequest"], split.rest)


def test_a_remembered_plan_still_looks_at_the_bytes():
    machine = codec()
    decode(machine, request())
    with pytest.raises(InputError, match="8 bytes, but 4"):
        decode(machine, request(raw=b"1234"))
    with pytest.raises(RequestError, match="not 2"):
        decode(machine, changed(lambda m: m.raw_input_contents.append(b"")))
