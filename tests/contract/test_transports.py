"""What holds of a served model however it is asked: HTTP, gRPC and websockets, in raw tensors and in JSON."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import quote

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.serving.grpc_server import SERVICE
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model, failing_model, rows
from tests.serving.support import DTYPES, WAIT_S, address, engine_of, request, serving

pytestmark = pytest.mark.anyio
STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 413,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
}
"""Codes of gRPC, as statuses of HTTP."""


class Refused(Exception):
    """A request that was not answered with tensors: a status of HTTP, and what was said."""

    @property
    def status(self):
        return self.args[0]


@dataclass
class Call:
    """A request in no protocol yet."""

    inputs: dict = field(default_factory=lambda: {"input": rows(1)})
    model: str = "double"
    version: str = ""
    id: str = ""
    outputs: tuple = ()
    parameters: dict = field(default_factory=dict)

    def content(self, *, binary):
        """The JSON of this request, and its tensors."""
        described, raw = [], []
        for name, array in self.inputs.items():
            item = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
            if binary:
                raw.append(raw_of(array))
                item["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                item["data"] = json_of(array)
            described.append(item)
        content = {"inputs": described, "parameters": dict(self.parameters)}
        if binary:
            content["parameters"]["binary_data_output"] = True
        if self.id:
            content["id"] = self.id
        if self.outputs:
            content["outputs"] = [{"name": name} for name in self.outputs]
        return content, b"".join(raw)


@dataclass
class Answer:
    outputs: dict
    id: str
    model: str
    version: str

    @property
    def first(self):
        return self.outputs["output"][:, 0].tolist()


def datatype_of(array):
    if array.dtype.kind in "SO":
        return "BYTES"
    return next(name for name, dtype in DTYPES.items() if name != "BYTES" and np.dtype(dtype) == array.dtype)


def raw_of(array):
    return serialize_byte_tensor(array.astype(object)).item() if array.dtype.kind in "SO" else array.tobytes()


def json_of(array):
    if array.dtype.kind in "SO":
        return [item if isinstance(item, str) else item.decode() for item in array.ravel().tolist()]
    return array.ravel().astype(np.float64 if array.dtype.kind == "V" else array.dtype).tolist()


def array_of(item, raw):
    shape = item["shape"]
    if item["datatype"] == "BYTES":
        strings = item["data"] if raw is None else deserialize_bytes_tensor(bytes(raw))
        return np.array([one.encode() if raw is None else one for one in strings], object).reshape(shape)
    if raw is None:
        return np.array(item["data"], DTYPES[item["datatype"]]).reshape(shape)
    return np.frombuffer(raw, DTYPES[item["datatype"]]).reshape(shape)


def read(content, raw):
    """The answer in JSON and raw tensors."""
    outputs = {}
    for item in content["outputs"]:
        nbytes = item.get("parameters", {}).get("binary_data_size")
        piece = None if nbytes is None else raw[:nbytes]
        raw = raw if nbytes is None else raw[nbytes:]
        outputs[item["name"]] = array_of(item, piece)
    assert not raw
    return Answer(outputs, content.get("id", ""), content["model_name"], content["model_version"])


class Http:
    """A connection for each request, all of which end when the client leaves."""

    def __init__(self, server, token, *, binary):
        self._server, self._token, self._binary = server, token, binary
        self._open = set()

    async def ask(self, call):
        content, raw = call.content(binary=self._binary)
        head = json.dumps(content).encode()
        version = f"/versions/{call.version}" if call.version else ""
        headers = {"Inference_Header_Content_Length": len(head)} if self._binary else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        path = f"/v2/models/{quote(call.model, safe='')}{version}/infer"
        reader, writer = await asyncio.open_connection(*address(self._server), limit=1 << 26)
        self._open.add(writer)
        try:
            writer.write(request(path, head + raw, **headers))
            said = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            fields = dict(line.split(": ", 1) for line in said[1:-2])
            body = await reader.readexactly(int(fields["content-length"]))
        finally:
            writer.transport.abort()
        status = int(said[0].split()[1])
        if status != 200:
            raise Refused(status, json.loads(body)["error"])
        length = int(fields.get("inference-header-content-length", len(body)))
        return read(json.loads(body[:length]), body[length:])

    async def leave(self):
        for writer in self._open:
            writer.transport.abort()


class Grpc:
    """Calls, or a stream for each, on one channel."""

    def __init__(self, server, token, *, streams):
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(server.grpc_target, options=options)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._streams = streams

    @staticmethod
    def message(call):
        message = pb.ModelInferRequest(model_name=call.model, model_version=call.version, id=call.id)
        for name, array in call.inputs.items():
            message.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
            message.raw_input_contents.append(raw_of(array))
        for name in call.outputs:
            message.outputs.add(name=name)
        for name, value in call.parameters.items():
            message.parameters[name].int64_param = value
        return message

    def stream(self):
        return self._channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(metadata=self._metadata)

    async def ask(self, call):
        message = self.message(call).SerializeToString()
        try:
            answer = await (self._in_stream if self._streams else self._in_call)(message)
        except grpc.aio.AioRpcError as error:
            if error.details() == "Internal error from Core":
                # The client wrote while the stream was refused, and lost the status: one call in a thousand.
                return await self.ask(call)
            raise Refused(STATUSES[error.code().name], error.details()) from None
        outputs = {}
        for item, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
            outputs[item.name] = array_of({"datatype": item.datatype, "shape": list(item.shape)}, raw)
        return Answer(outputs, answer.id, answer.model_name, answer.model_version)

    async def _in_call(self, message):
        method = self._channel.unary_unary(f"/{SERVICE}/ModelInfer")
        return pb.ModelInferResponse.FromString(await method(message, metadata=self._metadata))

    async def _in_stream(self, message):
        stream = self.stream()
        with suppress(asyncio.InvalidStateError):  # It was refused.
            await stream.write(message)
            await stream.done_writing()
        answers = [pb.ModelStreamInferResponse.FromString(raw) async for raw in stream]
        (answer,) = answers
        if answer.error_message:
            # A stream goes on, and so its errors have no code.
            raise Refused(None, answer.error_message)
        return answer.infer_response

    async def leave(self):
        await self._channel.close()


class Websocket:
    """One connection for all requests, which are told apart by their ids."""

    def __init__(self, server, token, *, binary):
        self._url = server.http_url.replace("http", "ws", 1) + "/v2/ws"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._binary = binary
        self._waiting = {}
        self._reading = None

    async def ask(self, call):
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._ready = asyncio.get_running_loop().create_future()
        socket = await self._ready
        content, raw = call.content(binary=self._binary)
        content |= {"model_name": call.model, "model_version": call.version}
        head = json.dumps(content).encode()
        answer = self._waiting[call.id] = asyncio.get_running_loop().create_future()
        await socket.send(len(head).to_bytes(4, "little") + head + raw if self._binary else head.decode())
        return await answer

    async def _read(self):
        try:
            async with connect(
                self._url, additional_headers=self._headers, max_size=None, proxy=None
            ) as socket:
                self._ready.set_result(socket)
                with suppress(ConnectionClosed):
                    async for message in socket:
                        self._answered(message)
                too_large = {1009: 413}
                for waiting in self._waiting.values():
                    waiting.set_exception(Refused(too_large.get(socket.close_code), socket.close_reason))
        except InvalidStatus as error:
            self._ready.set_exception(Refused(error.response.status_code, error.response.body.decode()))

    def _answered(self, message):
        raw = b""
        if isinstance(message, bytes):
            stop = 4 + int.from_bytes(message[:4], "little")
            message, raw = message[4:stop], message[stop:]
        content = json.loads(message)
        answer = self._waiting.pop(content.get("id", ""))
        if "error" in content:
            answer.set_exception(Refused(content["status"], content["error"]))
        else:
            answer.set_result(read(content, raw))

    async def leave(self):
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])


TRANSPORTS = {
    "http": (Http, {"binary": True}),
    "http-json": (Http, {"binary": False}),
    "grpc": (Grpc, {"streams": False}),
    "grpc-stream": (Grpc, {"streams": True}),
    "websocket": (Websocket, {"binary": True}),
    "websocket-text": (Websocket, {"binary": False}),
}


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@asynccontextmanager
async def talking(transport, models=None, *, token="", **settings):
    """A server and a client of it, within the time that any test has."""
    kind, options = TRANSPORTS[transport]
    async with (
        asyncio.timeout(WAIT_S),
        serving(models, grpc=issubclass(kind, Grpc), **settings) as server,
    ):
        client = kind(server, token, **options)
        try:
            yield server, client
        finally:
            await client.leave()


def of(*values, **more):
    return Call({"input": rows(*values)}, **more)


async def refusal(asking):
    with pytest.raises(Refused) as caught:
        await asking
    return caught.value.args


def held(**options):
    """A device whose batches end when the test says so, one at a time, and a server's settings for it."""
    device = LatchDevice(concurrency=1)
    return device, {
        "engine": {"device": device, "contexts": 1, "close_timeout": 5, **options},
        "drain_timeout": 5,
    }


def times(factor):
    def function(inputs, outputs):
        outputs["output"][...] = factor * inputs["input"]

    return double_model(function)


def squares(inputs, outputs):
    """Give n x n values for rows of n and m."""
    outputs["y"][...] = outputs["z"][...] = 1


def extremes(dtype):
    """A row of the ends of a dtype, and one of ordinary values."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.array([[True, False, False], [False, True, True]])
    if dtype.kind == "S":
        return np.array([[b"", b"sixteen bytes...", "Größe".encode()], [b"a\0b", b"x", b'"\\\n']], "S16")
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.array([[info.min, info.max, 0], [1, 2, info.max // 3]], dtype)
    info = ml_dtypes.finfo(dtype)
    return np.array([[info.max, info.min, info.smallest_subnormal], [0.1, -1.5, 1 / 3]], dtype)


def reversing(dtype):
    def reverse(inputs, outputs):
        outputs["output"][...] = inputs["input"][:, ::-1]

    return FunctionModel(
        reverse, inputs=TensorSpec("input", dtype, (3,)), outputs=TensorSpec("output", dtype, (3,))
    )


class TestAnswers:
    async def test_values_and_ids(self, transport):
        async with talking(transport) as (server, client):
            for request_id in ("", "7", "a-b_c", "", 'Größe "模型" \\', "x" * 200):
                answer = await client.ask(of(1, 2.5, id=request_id))
                assert answer.outputs["output"].tolist() == rows(2, 5).tolist()
                assert (answer.id, answer.model, answer.version) == (request_id, "double", "1")
            assert engine_of(server).statistics().succeeded == 6
            assert server.api.in_flight == 0

    async def test_many_at_once(self, transport):
        async with talking(transport) as (server, client):
            calls = [client.ask(of(value, value + 0.5, id=str(value))) for value in range(100)]
            answers = await asyncio.gather(*calls)
            assert [answer.first for answer in answers] == [
                [2 * value, 2 * value + 1] for value in range(100)
            ]
            assert [answer.id for answer in answers] == [str(value) for value in range(100)]
            assert engine_of(server).statistics().succeeded == 100

    async def test_every_datatype(self, transport):
        models = {name: reversing(dtype) for name, dtype in DTYPES.items()}
        async with talking(transport, models) as (_, client):
            for name, dtype in DTYPES.items():
                array = extremes(dtype)
                answer = await client.ask(Call({"input": array}, name))
                assert answer.outputs["output"].dtype == (object if name == "BYTES" else dtype)
                assert answer.outputs["output"].tolist() == array[:, ::-1].tolist(), name

    async def test_several_tensors_of_which_some_are_asked_for(self, transport):
        def compute(inputs, outputs):
            outputs["sum"][...] = inputs["a"] + inputs["b"]
            outputs["difference"][...] = inputs["a"] - inputs["b"]

        specs = [TensorSpec(name, "float32", (4,)) for name in ("a", "b", "sum", "difference")]
        models = {"two": FunctionModel(compute, inputs=specs[:2], outputs=specs[2:])}
        async with talking(transport, models) as (_, client):
            # In the model's order and in another.
            for inputs in ({"a": rows(3), "b": rows(1)}, {"b": rows(1), "a": rows(3)}):
                for names in ((), ("difference", "sum"), ("difference",)):
                    answer = await client.ask(Call(inputs, "two", outputs=names))
                    assert list(answer.outputs) == list(names or ("sum", "difference"))
                    assert answer.outputs["difference"].tolist() == rows(2).tolist()

    async def test_names_and_versions(self, transport):
        names = [
            "org/model",
            "two words",
            "per%20cent",
            "模型",
            "a:b@c&d=e;f?g#h",
            "versions/2",
            "infer",
            "quote'\"",
        ]
        models = {(name, version): times(int(version)) for name in names for version in ("2", "10")}
        async with talking(transport, models) as (_, client):
            for name in names:
                # The newest is meant if none is named.
                for version, factor in (("", 10), ("2", 2), ("10", 10)):
                    answer = await client.ask(of(1, model=name, version=version))
                    assert (answer.first, answer.model, answer.version) == ([factor], name, str(factor))

    async def test_more_rows_than_a_batch_holds_and_large_ones(self, transport):
        model = double_model(dims=("n",))
        async with talking(transport, {"double": model}, engine={"max_rows": 4}) as (_, client):
            assert (await client.ask(of(*range(11)))).first == [2 * value for value in range(11)]
            large = np.arange(6 << 14, dtype=np.float32).reshape(6, 1 << 14)
            answer = await client.ask(Call({"input": large}))
            assert np.array_equal(answer.outputs["output"], 2 * large)
            answer = await client.ask(Call({"input": np.zeros((2, 0), np.float32)}))
            assert answer.outputs["output"].shape == (2, 0)


WRONG = {
    "a model": (of(1, model="doubel"), 404, "'doubel'"),
    "a version": (of(1, version="7"), 404, "'7'"),
    "a version that is no number": (of(1, version="01"), 404, "'01'"),
    "a shape": (Call({"input": rows(1)[:, :3]}), 400, "(rows, 4), given (1, 3)"),
    "no batch axis": (Call({"input": rows(1)[0]}), 400, "array[None]"),
    "no rows": (Call({"input": rows(1)[:0]}), 400, "'input' has no rows"),
    "a datatype": (Call({"input": rows(1).astype(np.float64)}), 400, "'FP64'"),
    "an input": (Call({"inptu": rows(1)}), 400, "'inptu'"),
    "no input": (Call({}), 400, "missing: ['input']"),
    "an output": (of(1, outputs=("scale",)), 400, "'scale'"),
    "a timeout": (of(1, parameters={"timeout": -1}), 400, "timeout"),
    "a priority": (of(1, parameters={"priority": -1}), 400, "priority"),
    "too many rows": (of(*range(40)), 400, "queue"),
}


class TestErrors:
    async def test_what_is_wrong_is_said_and_the_next_is_answered(self, transport):
        async with talking(transport, engine={"max_rows": 4, "max_queue_rows": 32}) as (server, client):
            for name, (call, status, says) in WRONG.items():
                found, text = await refusal(client.ask(call))
                assert found in (status, None), name
                assert says in text, name
                assert (await client.ask(of(1))).first == [2], name
            model = server.repository.find("double")
            # What is of no model is counted for none.
            assert model.failures["OTHER"] == len(WRONG) - 3
            assert engine_of(server).statistics().succeeded == len(WRONG)
            assert server.api.in_flight == 0

    async def test_a_batch_that_fails(self, transport):
        async with talking(transport, {"double": failing_model()}) as (server, client):
            status, text = await refusal(client.ask(of(-1)))
            assert (status in (500, None), "negative number" in text) == (True, True)
            assert (await client.ask(of(1))).first == [2]
            assert engine_of(server).statistics().failed == 1
            assert server.repository.find("double").failures["BACKEND"] == 1

    async def test_a_failure_of_our_own_is_logged_and_not_told(self, transport, monkeypatch, caplog):
        async with talking(transport) as (server, client):

            def broken(*call, **more):
                raise RuntimeError("the secret")

            monkeypatch.setattr(server.repository.find("double"), "submit", broken)
            with caplog.at_level(logging.ERROR, "asynctrt.serving"):
                status, text = await refusal(client.ask(of(1)))
            assert (status in (500, None), "the secret" in text) == (True, False)
            assert "the secret" in caplog.text

    async def test_what_is_too_large(self, transport):
        models = {"double": double_model(dims=("n",))}
        async with talking(transport, models, max_body=16 << 10) as (_, client):
            status, _ = await refusal(client.ask(Call({"input": np.zeros((1, 8 << 10), np.float32)})))
            assert status == 413
            assert (await client.ask(of(1))).first == [2]

    async def test_few_bytes_do_not_ask_for_much_memory(self, transport):
        inputs = TensorSpec("x", "float32", ("n", "m"))
        outputs = [TensorSpec("y", "float32", ("n", "n")), TensorSpec("z", "float32", ())]
        models = {"square": FunctionModel(squares, inputs=inputs, outputs=outputs)}
        async with talking(transport, models, max_answer=40_404) as (server, client):
            for shape, output, says in (
                # An input without elements weighs nothing, and its other sizes are those of the output.
                ((1, 1 << 31, 0), "y", "no elements"),
                ((1, 101, 1), "y", "40808 bytes; at most 40404 "),
                # It is made, too, if only another one is asked for.
                ((1, 101, 1), "z", "40808 bytes; at most 40404 "),
            ):
                call = Call({"x": np.zeros(shape, np.float32)}, "square", outputs=(output,))
                status, text = await refusal(client.ask(call))
                assert (status in (413, None), says in text) == (True, True)
            await client.ask(Call({"x": np.zeros((1, 100, 1), np.float32)}, "square"))
            assert engine_of(server, "square").statistics().batches == 1

    async def test_tokens(self, transport):
        for token in ("", "three"):
            async with talking(transport, tokens=("one", "two"), token=token) as (server, client):
                status, text = await refusal(client.ask(of(1)))
                assert (status, "token" in text) == (401, True)
                assert engine_of(server).statistics().submitted == 0
        async with talking(transport, tokens=("one", "two"), token="two") as (_, client):
            assert (await client.ask(of(1))).first == [2]


class TestWaiting:
    async def test_a_timeout_in_the_queue(self, transport):
        device, settings = held()
        async with talking(transport, **settings) as (server, client):
            engine = engine_of(server)
            first = asyncio.create_task(client.ask(of(1, id="1")))
            await device.wait_held()
            status, text = await refusal(client.ask(of(2, id="2", parameters={"timeout": 1000})))
            assert (status in (503, None), "timeout of 1.000 ms passed" in text) == (True, True)
            assert (engine.statistics().expired, engine.statistics().queued_requests) == (1, 0)
            device.open()
            assert (await first).first == [2]
            for timeout in (WAIT_S * 1_000_000, 0):
                assert (await client.ask(of(2, parameters={"timeout": timeout}))).first == [4]

    async def test_a_full_queue(self, transport):
        device, settings = held(max_rows=1, max_queue_rows=1)
        async with talking(transport, **settings) as (server, client):
            first = asyncio.create_task(client.ask(of(1, id="1")))
            await device.wait_held()
            second = asyncio.create_task(client.ask(of(2, id="2")))
            await until(lambda: engine_of(server).statistics().queued_requests == 1)
            status, text = await refusal(client.ask(of(3, id="3")))
            assert (status in (503, None), "queue" in text) == (True, True)
            assert server.repository.find("double").failures["REJECTED"] == 1
            device.open()
            assert [(await first).first, (await second).first] == [[2], [4]]

    async def test_priorities(self, transport):
        """On the wire 1 is the most urgent; 0, and what is beyond the last level, is the model's default."""
        seen = []

        def note(inputs, outputs):
            seen.extend(inputs["input"][:, 0].tolist())
            outputs["output"][...] = 2 * inputs["input"]

        device, settings = held(max_rows=1, priorities=3)
        async with talking(transport, {"double": double_model(note)}, **settings) as (server, client):
            asked = []
            for value, priority in enumerate([0, 3, 0, 2, 9, 1]):
                call = of(value, id=str(value), parameters={"priority": priority})
                asked.append(asyncio.create_task(client.ask(call)))
                await until(lambda value=value: server.repository.find("double").pending == value + 1)
            device.open()
            assert [answer.first for answer in await asyncio.gather(*asked)] == [[2 * v] for v in range(6)]
            assert seen == [0, 5, 3, 1, 2, 4]

    async def test_a_client_that_leaves_cancels_what_it_has_asked(self, transport):
        device, settings = held(max_rows=1)
        async with talking(transport, **settings) as (server, client):
            engine = engine_of(server)
            asked = []
            for value in (1, 2, 3):
                asked.append(asyncio.create_task(client.ask(of(value, id=str(value)))))
                await until(lambda value=value: engine.statistics().submitted == value)
            assert (device.held, engine.statistics().queued_requests) == (1, 2)
            await client.leave()
            # What is in flight goes on, without it.
            await until(lambda: engine.statistics().cancelled == 3)
            assert engine.statistics().queued_requests == 0
            await until(lambda: server.api.in_flight == 0)
            assert server.repository.find("double").failures["CANCELED"] == 3
            device.open()
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


class TestModelsThatComeAndGo:
    async def test_one_that_is_loaded_unloaded_and_loaded_again(self, transport):
        async def opened():
            return await asynctrt.open(times(5))

        async with talking(transport) as (server, client):
            server.repository.add("late", opener=opened)
            for reason in ("not loaded yet", "unloaded", "unloaded"):
                status, text = await refusal(client.ask(of(1, model="late")))
                assert (status in (503, None), reason in text) == (True, True)
                await server.repository.load("late")
                assert (await client.ask(of(1, model="late"))).first == [5]
                await server.repository.unload("late")
            assert (await client.ask(of(1))).first == [2]

    async def test_the_newest_version_that_is_served(self, transport):
        async def opened():
            return await asynctrt.open(times(3))

        async with talking(transport) as (server, client):
            server.repository.add("double", version="2", opener=opened)
            assert (await client.ask(of(1))).version == "1"
            status, text = await refusal(client.ask(of(1, version="2")))
            assert (status in (503, None), "version 2 of 'double'" in text) == (True, True)
            await server.repository.load("double")
            assert (await client.ask(of(1))).version == "2"

    async def test_what_is_in_flight_is_answered_when_its_model_is_unloaded(self, transport):
        device, settings = held()
        async with talking(transport, **settings) as (server, client):
            engine = engine_of(server)
            asked = [asyncio.create_task(client.ask(of(value, id=str(value)))) for value in (1, 2)]
            await until(lambda: engine.statistics().submitted == 2)
            unloading = asyncio.create_task(server.repository.unload("double"))
            await until(lambda: engine.statistics().state == "draining")
            device.open()
            assert [(await one).first for one in asked] == [[2], [4]]
            await unloading
