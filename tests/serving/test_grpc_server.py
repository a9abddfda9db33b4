"""gRPC as its clients use it: Triton's client, plain stubs, and messages that are wrong."""

import asyncio
import gc
import threading
import tracemalloc
from contextlib import asynccontextmanager, suppress

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.grpc.service_pb2 as pb
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.utils import InferenceServerException

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.errors import UsageError
from asynctrt.kserve.protobuf import message_classes
from asynctrt.serving import gathering, grpc_server
from asynctrt.serving.api import Api
from asynctrt.serving.grpc_server import REFLECTION, SERVICE, UNSUPPORTED, GrpcServer, _Stream
from asynctrt.serving.repository import Repository
from asynctrt.serving.settings import ServerSettings
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model, rows
from tests.serving import support
from tests.serving.tls import certificate

pytestmark = pytest.mark.anyio
WAIT_S = 30
LONG = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Served:
    """A server, its model's engine, and the ways to it."""

    def __init__(self, server):
        self.server, self.api = server._grpc, server.api
        self.address = server.grpc_target
        self.port = int(self.address.rpartition(":")[2])
        self.engine = next(iter(server.repository)).engine
        self.channel = grpc.aio.insecure_channel(self.address, options=LONG)

    def unary(self, name, service=SERVICE):
        """A method that takes bytes and gives bytes."""
        return self.channel.unary_unary(f"/{service}/{name}")

    def stream(self):
        return self.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()

    async def ask(self, name, request=None, **kw):
        """A call with the messages of Triton's own client."""
        request = request or getattr(pb, f"{name}Request")()
        answer = await self.unary(name)(request.SerializeToString(), **kw)
        return getattr(pb, f"{name}Response").FromString(answer)

    async def health(self, service=""):
        kinds = message_classes()
        body = kinds["HealthCheckRequest"](service=service).SerializeToString()
        return status_of(await self.unary("Check", "grpc.health.v1.Health")(body))


def status_of(body):
    kind = message_classes()["HealthCheckResponse"]
    return kind.ServingStatus.Name(kind.FromString(body).status)


@asynccontextmanager
async def serving(models=None, **options):
    """A server on a free port, with these models by name, or by name and version."""
    async with asyncio.timeout(WAIT_S), support.serving(models, grpc=True, **options) as server:
        served = Served(server)
        try:
            yield served
        finally:
            await served.channel.close()


@asynccontextmanager
async def latched(slots=1, engine=None, **settings):
    """A server whose batches are held until the test lets them go, and their device."""
    device = LatchDevice(concurrency=slots)
    engine = {"device": device, "contexts": 2} | (engine or {})
    async with serving(engine=engine, **settings) as served:
        try:
            yield served, device
        finally:
            device.open()


def request(value=1.0, *, name="double", request_id="", shape=(1, 4), **parameters):
    message = pb.ModelInferRequest(model_name=name, id=request_id)
    message.inputs.add(name="input", datatype="FP32", shape=shape)
    message.raw_input_contents.append(np.full(shape, value, np.float32).tobytes())
    for key, parameter in parameters.items():
        message.parameters[key].int64_param = parameter
    return message


def values(answer):
    return np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()


def triton_input(array, datatype, name="input", kind=triton):
    tensor = kind.InferInput(name, array.shape, datatype)
    tensor.set_data_from_numpy(array)
    return tensor


async def fails(call):
    """The status code and the message of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


class TestTritonsClients:
    async def test_everything_that_the_sync_client_asks(self):
        def ask(address):
            with triton.InferenceServerClient(address) as client:
                assert client.is_server_live()
                assert client.is_server_ready()
                assert client.is_model_ready("double")
                assert not client.is_model_ready("missing")
                assert client.get_server_metadata().name == "asynctrt"
                metadata = client.get_model_metadata("double")
                assert list(metadata.versions) == ["1"]
                assert metadata.platform == "python"
                assert (metadata.inputs[0].name, metadata.inputs[0].datatype) == ("input", "FP32")
                assert list(metadata.inputs[0].shape) == [-1, 4]
                config = client.get_model_config("double").config
                assert config.max_batch_size == 64
                assert config.input[0].data_type == 11
                assert list(config.output[0].dims) == [4]
                assert config.HasField("dynamic_batching")
                assert config.version_policy.HasField("all")
                assert client.get_model_config("double", as_json=True)["config"]["name"] == "double"
                array = np.arange(8, dtype=np.float32).reshape(2, 4)
                answer = client.infer("double", [triton_input(array, "FP32")], request_id="7")
                assert answer.as_numpy("output").tolist() == (2 * array).tolist()
                assert answer.get_response().id == "7"
                assert answer.get_response().model_version == "1"
                statistics = client.get_inference_statistics("double").model_stats[0]
                assert statistics.inference_stats.queue.count == 1
                assert statistics.inference_count == 2
                assert len(client.get_inference_statistics().model_stats) == 1
                assert [model.name for model in client.get_model_repository_index().models] == ["double"]

        async with serving() as served:
            await asyncio.to_thread(ask, served.address)

    async def test_the_aio_client(self):
        async with serving() as served, triton_aio.InferenceServerClient(served.address) as client:
            assert await client.is_server_live()
            for compression in (None, "gzip", "deflate"):
                wanted = triton_aio.InferRequestedOutput("output")
                answer = await client.infer(
                    "double",
                    [triton_input(rows(3), "FP32", kind=triton_aio)],
                    outputs=[wanted],
                    priority=1,
                    timeout=10_000_000,
                    compression_algorithm=compression,
                )
                assert answer.as_numpy("output").tolist() == rows(6).tolist()

    async def test_the_sync_clients_stream(self):
        def stream(address):
            answers, done = {}, threading.Semaphore(0)

            def on_answer(result, error):
                response = result.get_response() if error is None else None
                answers[response.id if response else "error"] = result or error
                done.release()

            with triton.InferenceServerClient(address) as client:
                client.start_stream(on_answer)
                for number in range(10):
                    client.async_stream_infer(
                        "double",
                        [triton_input(rows(number), "FP32")],
                        request_id=str(number),
                        enable_empty_final_response=True,
                    )
                client.async_stream_infer("missing", [triton_input(rows(1), "FP32")], request_id="bad")
                for _ in range(11):
                    assert done.acquire(timeout=WAIT_S)
                client.stop_stream()
            return answers

        async with serving() as served:
            answers = await asyncio.to_thread(stream, served.address)
        assert "unknown model 'missing'" in str(answers.pop("error"))
        assert set(answers) == set(map(str, range(10)))
        for number, answer in answers.items():
            assert answer.as_numpy("output").tolist() == rows(2 * int(number)).tolist()
            assert answer.get_response().parameters["triton_final_response"].bool_param

    async def test_typed_contents(self):
        message = pb.ModelInferRequest(model_name="double")
        tensor = message.inputs.add(name="input", datatype="FP32", shape=(1, 4))
        tensor.contents.fp32_contents.extend([1, 2, 3, 4])
        async with serving() as served:
            assert values(await served.ask("ModelInfer", message)) == [2, 4, 6, 8]


class TestErrors:
    async def test_a_bad_message_has_its_code(self):
        broken = (b"\xff", b"\x0a\xff\x01a", b"\x0a\x01\xff")
        cases = [
            *(("ModelInfer", body, "INVALID_ARGUMENT", "not a ModelInferRequest") for body in broken),
            ("ModelInfer", b"", "NOT_FOUND", "unknown model ''"),
            ("ModelMetadata", pb.ModelMetadataRequest(name="x"), "NOT_FOUND", "unknown model 'x'"),
            ("ModelConfig", pb.ModelConfigRequest(name="x"), "NOT_FOUND", "unknown model 'x'"),
            ("ModelStatistics", pb.ModelStatisticsRequest(name="x"), "NOT_FOUND", "unknown model 'x'"),
            ("ServerMetadata", b"\x07", "INVALID_ARGUMENT", "not a ServerMetadataRequest"),
            ("RepositoryModelLoad", b"", "INVALID_ARGUMENT", "--model-control"),
            ("NoSuchMethod", b"", "UNIMPLEMENTED", ""),
            *((name, b"", "UNIMPLEMENTED", name) for name in UNSUPPORTED),
        ]
        async with serving() as served:
            for method, body, code, says in cases:
                body = body if isinstance(body, bytes) else body.SerializeToString()
                found, details = await fails(served.unary(method)(body))
                assert (found, says in details) == (code, True), (method, body)
            # And the next one is answered as if nothing had been.
            assert values(await served.ask("ModelInfer", request())) == [2] * 4

    async def test_a_bad_message_on_a_stream_ends_nothing(self):
        bad = [b"\xff", request(name="missing", request_id="a"), request(shape=(1, 3), request_id="b")]
        async with serving() as served:
            stream = served.stream()
            for message in [*bad, request(request_id="c")]:
                await stream.write(message if isinstance(message, bytes) else message.SerializeToString())
            await stream.done_writing()
            answers = [pb.ModelStreamInferResponse.FromString(body) async for body in stream]
            assert (await stream.code()).name == "OK"
        errors = {answer.infer_response.id: answer.error_message for answer in answers}
        assert "not a ModelInferRequest" in errors[""]
        assert "unknown model 'missing'" in errors["a"]
        assert "takes shape" in errors["b"]
        assert errors["c"] == ""
        assert len(answers) == 4

    @pytest.mark.parametrize("limit", ["max_body", "max_grpc_message"])
    async def test_a_message_that_is_too_large(self, limit):
        async with serving({"double": double_model(dims=("n",))}, **{limit: 4096}) as served:
            code, _ = await fails(served.ask("ModelInfer", request(shape=(1, 1024))))
            assert code == "RESOURCE_EXHAUSTED"
            assert len(values(await served.ask("ModelInfer", request(shape=(1, 900))))) == 900

    @pytest.mark.parametrize("is_told", [True, False], ids=["told by shapes", "not told"])
    async def test_an_answer_that_is_too_large(self, is_told):
        """The trap: gRPC copies answers as it copies requests, and everybody waits."""
        calls = []

        async def widened(inputs):
            calls.append(len(inputs["input"]))
            return {"output": np.ones((calls[-1], 1100), np.float32)}

        x = TensorSpec("input", "float32", (4,))
        wide = TensorSpec("output", "float32", (1100 if is_told else "n",))
        async with (
            asynctrt.Pipeline(widened, inputs=x, outputs=wide, max_in_flight=4) as pipeline,
            serving(max_grpc_message=4500) as served,
        ):
            served.api.repository.add("wide", pipeline)
            assert len(values(await served.ask("ModelInfer", request(name="wide")))) == 1100
            before = len(calls)
            code, details = await fails(served.ask("ModelInfer", request(name="wide", shape=(2, 4))))
            assert code == "RESOURCE_EXHAUSTED"
            assert "8800" in details
            assert "4500" in details
            assert (len(calls) == before) == is_told
            assert len(values(await served.ask("ModelInfer", request(name="wide")))) == 1100

    async def test_a_model_of_many_inputs(self):
        """One for each column of a table, as sklearn-onnx makes them."""
        names = [f"c{number}" for number in range(1000)]
        model = FunctionModel(
            lambda given, out: np.sum(list(given.values()), axis=0, out=out["sum"]),
            inputs=[TensorSpec(name, "float32", ()) for name in names],
            outputs=TensorSpec("sum", "float32", ()),
        )
        message = pb.ModelInferRequest(model_name="wide")
        for name in names:
            message.inputs.add(name=name, datatype="FP32", shape=[2])
            message.raw_input_contents.append(np.ones(2, np.float32).tobytes())
        async with serving({"wide": model}) as served:
            assert values(await served.ask("ModelInfer", message)) == [1000.0] * 2
            for _ in range(4000):
                message.outputs.add(name="sum")
            assert (await fails(served.ask("ModelInfer", message)))[0] == "RESOURCE_EXHAUSTED"

    @pytest.mark.parametrize(
        "name", ["ModelMetadata", "ModelStatistics", "RepositoryModelLoad", "ModelInfer"]
    )
    async def test_a_message_that_is_large_but_has_no_tensors(self, name):
        body = b"\x0a\x80\x80\x40" + b"x" * (1 << 20)
        async with serving(max_json=100_000) as served:
            with pytest.raises(grpc.aio.AioRpcError, match="at most 100000 are accepted"):
                await served.unary(name)(body)
            assert len(values(await served.ask("ModelInfer", request()))) > 0


class TestMemory:
    @pytest.mark.parametrize("name", ["ModelInfer", "ModelMetadata", "TraceSetting"])
    async def test_a_call_that_is_refused_keeps_nothing(self, name):
        """The cycle collector counts objects, not their bytes: 10 calls of 60 MiB took 2 GB."""
        body = b"\xfa\x7f\x80\x80\x80\x08" + bytes(16 << 20)  # A field that no message has.
        async with serving(max_grpc_message=32 << 20) as served:
            gc.disable()
            tracemalloc.start()
            try:
                for _ in range(4):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await served.unary(name)(body)
                await until(lambda: tracemalloc.get_traced_memory()[0] < 4 << 20)
            finally:
                tracemalloc.stop()
                gc.enable()


class TestBatches:
    async def test_calls_of_many_callers_share_batches(self):
        async with serving() as served:
            message = request().SerializeToString()

            async def caller():
                for _ in range(20):
                    await served.unary("ModelInfer")(message)

            await asyncio.gather(*[caller() for _ in range(32)])
            done = served.engine.statistics()
        assert done.rows == 640
        assert done.rows > 1.5 * done.batches  # 2 on a busy machine; 1.1 if calls do not wait.

    async def test_calls_of_a_lone_caller_do_not_wait(self):
        async with serving() as served:
            for _ in range(20):
                await served.ask("ModelInfer", request())
                assert not served.server._gathering.pays

    async def test_a_call_that_is_due_before_the_others_come_does_not_wait_for_them(self, monkeypatch):
        monkeypatch.setattr(gathering, "WAIT_S", 10 * WAIT_S)
        async with serving() as served:
            served.server._gathering.expect("a message that does not come")
            await served.ask("ModelInfer", request(), timeout=WAIT_S / 4)


class TestGoingAway:
    async def test_a_cancelled_call_leaves_the_queue(self):
        async with latched() as (served, device):
            first = asyncio.create_task(served.ask("ModelInfer", request(1)))
            await until(lambda: device.held == 1)
            call = served.unary("ModelInfer")(request(2).SerializeToString())
            await until(lambda: served.engine.statistics().queued_requests == 1)
            call.cancel()
            await until(lambda: served.engine.statistics().queued_requests == 0)
            assert served.engine.statistics().cancelled == 1
            await until(lambda: served.api.in_flight == 1)
            assert served.api.repository.find("double").failures["CANCELED"] == 1
            device.open()
            assert values(await first) == [2] * 4

    async def test_a_call_whose_deadline_passes_leaves_the_queue(self):
        async with latched() as (served, device):
            first = asyncio.create_task(served.ask("ModelInfer", request(1)))
            await until(lambda: device.held == 1)
            call = asyncio.create_task(fails(served.ask("ModelInfer", request(2), timeout=1)))
            await until(lambda: served.engine.statistics().queued_requests == 1)
            assert (await call)[0] == "DEADLINE_EXCEEDED"
            await until(lambda: served.engine.statistics().queued_requests == 0)
            assert served.engine.statistics().cancelled == 1
            device.open()
            await first

    async def test_calls_beyond_what_a_connection_may_have_wait(self):
        """Also those of a client that did not wait to be told how many that are."""
        async with latched(max_requests_per_connection=8) as (served, device):
            device.open()
            for _ in range(3):
                calls = [served.ask("ModelInfer", request(value)) for value in range(200)]
                assert len(await asyncio.gather(*calls)) == 200

    async def test_a_cancelled_stream_cancels_its_requests(self):
        async with latched() as (served, _):
            stream = served.stream()
            for number in range(5):
                await stream.write(request(number).SerializeToString())
            await until(lambda: served.engine.statistics().submitted == 5)
            stream.cancel()
            await until(lambda: served.api.in_flight == 0)
            assert served.engine.statistics().cancelled == 5
            assert served.engine.statistics().queued_requests == 0
            await until(lambda: "streams=0" in repr(served.server))


class TestStreams:
    async def test_answers_come_as_they_are_ready(self):
        async with latched(slots=2) as (served, device):
            stream = served.stream()
            for number in (1, 2):
                await stream.write(request(number, request_id=str(number)).SerializeToString())
                await until(lambda number=number: device.held == number)
            found = []
            for last in (True, False):
                device.release(last=last)
                found.append(pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.id)
            assert found == ["2", "1"]
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF

    async def test_the_end_of_the_stream_waits_for_its_answers(self):
        async with latched() as (served, device):
            stream = served.stream()
            for number in range(3):
                await stream.write(request(number, request_id=str(number)).SerializeToString())
            await stream.done_writing()
            await until(lambda: served.engine.statistics().submitted == 3)
            device.open()
            answers = [pb.ModelStreamInferResponse.FromString(body).infer_response async for body in stream]
            assert {answer.id: values(answer)[0] for answer in answers} == {"0": 0, "1": 2, "2": 4}
            assert (await stream.code()).name == "OK"

    async def test_others_have_their_turn_between_two_messages(self, monkeypatch):
        """However many messages a stream has sent, one is handled in an iteration of the loop."""
        turn, handled = 0, []
        begin = _Stream._begin

        async def noted(stream, *given):
            handled.append(turn)
            await begin(stream, *given)

        async def take_turns():
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(_Stream, "_begin", noted)
        async with serving() as served:
            stream = served.stream()
            turns = asyncio.create_task(take_turns())
            for _ in range(64):
                await stream.write(request().SerializeToString())
            await stream.done_writing()
            assert len([body async for body in stream]) == 64
            turns.cancel()
        assert len(set(handled)) == len(handled) == 64

    async def test_no_more_than_its_share_is_taken(self):
        async with latched(max_requests_per_connection=4) as (served, device):
            stream = served.stream()
            for number in range(10):
                await stream.write(request(number).SerializeToString())
            await stream.done_writing()
            await until(lambda: served.engine.statistics().submitted == 4)
            for _ in range(10):
                await served.ask("ServerLive")
            assert served.engine.statistics().submitted == 4
            device.open()
            assert len([body async for body in stream]) == 10

    async def test_an_empty_stream(self):
        async with serving() as served:
            stream = served.stream()
            await stream.done_writing()
            assert [body async for body in stream] == []
            assert (await stream.code()).name == "OK"

    async def test_answers_that_nobody_reads_are_bounded_in_bytes(self):
        def large(inputs, outputs):
            outputs["output"][...] = 1

        model = FunctionModel(
            large,
            inputs=TensorSpec("input", "float32", (4,)),
            outputs=TensorSpec("output", "float32", (1 << 18,)),
        )
        message = request(name="large").SerializeToString()
        async with serving({"large": model}, max_body=4 << 20) as served:
            call = served.stream()
            for _ in range(64):
                await call.write(message)
            await until(lambda: served.server._streams)
            (stream,) = served.server._streams
            await until(lambda: stream._answer_nbytes >= 4 << 20 and not stream._in_flight)
            assert served.engine.statistics().submitted <= 24
            await call.done_writing()
            async with asyncio.timeout(WAIT_S):
                assert len([answer async for answer in call]) == 64


class TestHealth:
    async def test_check(self):
        async with serving() as served:
            assert await served.health() == "SERVING"
            assert await served.health(SERVICE) == "SERVING"
            assert await served.health("double") == "SERVING"
            code, details = await fails(served.health("missing"))
            assert code == "NOT_FOUND"
            assert "'missing'" in details
            method = served.unary("Check", "grpc.health.v1.Health")
            assert (await fails(method(b"\xff")))[0] == "INVALID_ARGUMENT"

    async def test_draining(self):
        async with serving() as served:
            served.api.repository.is_draining = True
            for name in ("", SERVICE, "double"):
                assert await served.health(name) == "NOT_SERVING"
            assert not (await served.ask("ServerReady")).ready
            assert (await served.ask("ServerLive")).live
            # Whoever comes all the same is answered.
            assert values(await served.ask("ModelInfer", request())) == [2] * 4

    async def test_clients_that_would_watch_take_it_for_healthy(self):
        async with serving() as served:
            watch = served.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            assert (await watch.code()).name == "UNIMPLEMENTED"


class TestReflection:
    async def test_a_stranger_learns_the_services_and_their_messages(self):
        """With the client that grpcio-reflection has."""

        def look(target):
            with grpc.insecure_channel(target) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                found = DescriptorPool(database).FindServiceByName(SERVICE)
                return database.get_services(), [method.name for method in found.methods]

        async with serving() as served:
            services, methods = await asyncio.to_thread(look, served.address)
        assert set(services) == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"}
        assert "ModelStreamInfer" in methods

    @pytest.mark.parametrize("version", ["v1", "v1alpha"])
    async def test_what_is_not_here(self, version):
        request, response = (message_classes()[f"ServerReflection{side}"] for side in ("Request", "Response"))
        async with serving() as served:
            call = served.channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            )()
            for asked in ({"file_by_filename": "x.proto"}, {"file_containing_symbol": "a.B"}, {}):
                await call.write(request(**asked).SerializeToString())
                answer = response.FromString(await call.read())
                assert (answer.error_response.error_code, answer.original_request) == (5, request(**asked))
            await call.done_writing()
            assert (await call.code()).name == "OK"

    async def test_a_token_is_needed(self):
        async with serving(tokens=("s3cret",)) as served:
            call = served.channel.stream_stream(f"/{REFLECTION[0]}/ServerReflectionInfo")()
            assert (await call.code()).name == "UNAUTHENTICATED"


class TestRepository:
    async def test_loading_and_unloading(self):
        repository = Repository()

        async def opened():
            return await asynctrt.open(double_model())

        repository.add("double", opener=opened)
        settings = ServerSettings(grpc_port=0, model_control=True)
        server = GrpcServer(Api(repository, settings), settings)

        def ask(address):
            with triton.InferenceServerClient(address) as client:
                assert not client.is_server_ready()
                with pytest.raises(InferenceServerException, match="UNAVAILABLE.*not loaded yet"):
                    client.infer("double", [triton_input(rows(1), "FP32")])
                client.load_model("double")
                assert client.is_server_ready()
                assert client.is_model_ready("double")
                client.infer("double", [triton_input(rows(1), "FP32")])
                client.unload_model("double")
                (item,) = client.get_model_repository_index().models
                assert (item.name, item.version, item.state) == ("double", "1", "UNAVAILABLE")
                with pytest.raises(InferenceServerException, match="NOT_FOUND"):
                    client.load_model("missing")
                with pytest.raises(InferenceServerException, match="UNIMPLEMENTED.*config"):
                    client.load_model("double", config="{}")

        async with asyncio.timeout(WAIT_S):
            port = await server.start()
            try:
                await asyncio.to_thread(ask, f"127.0.0.1:{port}")
            finally:
                await server.stop(0)
                await repository.aclose()

    async def test_the_index_of_what_is_ready(self):
        async with serving({"a": double_model(), "b": double_model()}, model_control=True) as served:
            asked = pb.RepositoryModelUnloadRequest(model_name="a")
            asked.parameters["forced"].bool_param = True
            code, details = await fails(served.ask("RepositoryModelUnload", asked))
            assert (code, "'forced'" in details) == ("UNIMPLEMENTED", True), (
                "it is not passed over in silence"
            )
            del asked.parameters["forced"]
            asked.parameters["unload_dependents"].bool_param = True
            await served.ask("RepositoryModelUnload", asked)
            index = await served.ask("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
            assert [model.name for model in index.models] == ["b"]
            index = await served.ask("RepositoryIndex")
            assert [model.state for model in index.models] == ["UNAVAILABLE", "READY"]


class TestTokens:
    async def test_a_token_is_asked_for(self):
        async with serving(tokens=("one", "two")) as served:
            for method in ("ModelInfer", "ModelReady", "ServerMetadata", "ModelStatistics"):
                code, details = await fails(served.unary(method)(b""))
                assert code == "UNAUTHENTICATED"
                assert "Bearer TOKEN" in details
            stream = served.stream()
            assert (await stream.code()).name == "UNAUTHENTICATED"
            for given in ("Bearer three", "Basic one", "one", "Bearer "):
                metadata = (("authorization", given),)
                code, _ = await fails(served.ask("ModelInfer", request(), metadata=metadata))
                assert code == "UNAUTHENTICATED"
            for token in ("Bearer one", "bearer two"):
                metadata = (("authorization", token), ("trace-bin", b"\xff\0"))
                assert values(await served.ask("ModelInfer", request(), metadata=metadata)) == [2] * 4

    async def test_health_is_open(self):
        async with serving(tokens=("one",)) as served:
            assert (await served.ask("ServerLive")).live
            assert (await served.ask("ServerReady")).ready
            assert await served.health("") == "SERVING"

    async def test_who_observes_has_the_headers(self):
        seen = []
        async with serving() as served:
            served.api.observe = lambda inference: seen.append(inference.headers[b"traceparent"])
            await served.ask("ModelInfer", request(), metadata=(("traceparent", "00-1"),))
        assert seen == [b"00-1"]


class TestListening:
    async def test_tls(self, tmp_path):
        chain, key = certificate(tmp_path)

        def infer(address):
            with triton.InferenceServerClient(address, ssl=True, root_certificates=str(chain)) as client:
                return client.infer("double", [triton_input(rows(1), "FP32")]).as_numpy("output")

        async with serving(tls_certificate=chain, tls_key=key) as served:
            answer = await asyncio.to_thread(infer, f"localhost:{served.port}")
            assert answer.tolist() == rows(2).tolist()
            code, _ = await fails(served.ask("ServerLive", timeout=WAIT_S))
            assert code == "UNAVAILABLE"

    async def test_a_port_in_use(self):
        async with serving() as served:
            with pytest.raises(UsageError, match=rf"127.0.0.1 port {served.port}: .*in use.*grpc_port"):
                async with serving(grpc_port=served.port, is_inner=True):
                    pass
            assert values(await served.ask("ModelInfer", request())) == [2] * 4

    async def test_a_host_that_is_not_here(self):
        with pytest.raises(UsageError, match="cannot listen on 192.0.2.1"):
            async with serving(host="192.0.2.1"):
                pass

    async def test_ipv6(self):
        try:
            async with serving(host="::1") as served:
                channel = grpc.aio.insecure_channel(f"[::1]:{served.port}")
                answer = await channel.unary_unary(f"/{SERVICE}/ServerLive")(b"")
                await channel.close()
                assert answer == b"\x08\x01"
        except UsageError as error:
            pytest.skip(f"there is no IPv6 here: {error}")


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
PING = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + bytes(8)


class TestConnections:
    """Connections below gRPC: those that only ping, and those that say nothing."""

    @staticmethod
    async def opened(served, said):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(said)
        return reader, writer

    @pytest.mark.parametrize(("at_once", "is_cut_off"), [(1, False), (8, True)])
    async def test_a_client_may_ping_though_it_has_no_call_and_may_not_flood(self, at_once, is_cut_off):
        usual = ServerSettings().grpc_http2_min_recv_ping_interval_without_data
        assert 2 * usual <= 10_000, "as often as clients in Go, with some that come early"
        async with serving(grpc_http2_min_recv_ping_interval_without_data=100) as served:
            reader, writer = await self.opened(served, PREFACE + SETTINGS)
            for _ in range(8 // at_once):
                await asyncio.sleep(0.2)
                writer.write(PING * at_once)
            heard = b""
            async with asyncio.timeout(WAIT_S):
                while heard.count(PING[:4] + b"\1") < 8 and b"too_many_pings" not in heard:
                    piece = await reader.read(1 << 16)
                    assert piece
                    heard += piece
            assert (b"too_many_pings" in heard) == is_cut_off
            writer.close()

    @pytest.mark.parametrize("said", [b"", PREFACE[:3], PREFACE], ids=["nothing", "half", "preface"])
    async def test_connections_that_say_nothing_make_room(self, monkeypatch, said):
        monkeypatch.setattr(grpc_server, "HANDSHAKE_MS", 300)
        async with serving(max_connections=4) as served:
            silent = [await self.opened(served, said) for _ in range(8)]
            async with asyncio.timeout(WAIT_S):
                for reader, _ in silent:
                    with suppress(ConnectionResetError):
                        while await reader.read(1 << 16):
                            pass
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{served.port}")
            call = channel.unary_unary(f"/{SERVICE}/ServerLive")
            assert await call(b"", timeout=WAIT_S, wait_for_ready=True) == b"\x08\x01"
            await channel.close()
            for _, writer in silent:
                writer.close()

    async def test_nothing_is_kept_of_a_client_without_calls(self):
        async with serving() as served:
            await served.ask("ModelInfer", request())
            await until(lambda: not served.server._callers)

    async def test_an_old_connection_is_asked_to_end_and_its_client_opens_another(self):
        async with serving(grpc_max_connection_age=200) as served:
            reader, writer = await self.opened(served, PREFACE + SETTINGS)
            async with asyncio.timeout(WAIT_S):
                heard = b""
                while b"max_age" not in heard:  # The reason in its GOAWAY.
                    piece = await reader.read(1 << 16)
                    assert piece
                    heard += piece
            writer.close()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
                call = channel.unary_unary(f"/{SERVICE}/ServerLive")
                for _ in range(5):
                    assert await call(b"", timeout=WAIT_S) == b"\x08\x01"
                    await asyncio.sleep(0.1)

    async def test_connections_without_a_call_are_closed_after_a_while(self):
        async with serving(idle_timeout=1) as served:
            reader, writer = await self.opened(served, PREFACE + SETTINGS)
            async with asyncio.timeout(WAIT_S):
                while await reader.read(1 << 16):
                    pass
            writer.close()


class TestStopping:
    async def test_what_was_taken_is_answered(self):
        async with latched() as (served, device):
            call = asyncio.create_task(served.ask("ModelInfer", request(1)))
            stream = served.stream()
            await stream.write(request(2, request_id="s").SerializeToString())
            await until(lambda: served.engine.statistics().submitted == 2)
            stopping = asyncio.create_task(served.server.stop(WAIT_S))
            await until(lambda: "stopping" in repr(served.server))
            device.open()
            assert values(await call) == [2] * 4
            answer = pb.ModelStreamInferResponse.FromString(await stream.read())
            assert values(answer.infer_response) == [4] * 4
            assert (await stream.code()).name == "UNAVAILABLE"
            await stopping
            assert served.api.in_flight == 0

    async def test_an_idle_stream_does_not_hold_it_up(self):
        async with serving() as served:
            stream = served.stream()
            await stream.write(request().SerializeToString())
            await stream.read()
            await served.server.stop(WAIT_S)
            assert (await stream.code()).name == "UNAVAILABLE"
            assert (await fails(served.ask("ServerLive")))[0] == "UNAVAILABLE"

    async def test_what_takes_too_long_is_cancelled(self):
        async with latched() as (served, _):
            call = asyncio.create_task(fails(served.ask("ModelInfer", request(1))))
            await until(lambda: served.engine.statistics().submitted == 1)
            await served.server.stop(0.01)
            await call
            await until(lambda: served.api.in_flight == 0)
            assert served.engine.statistics().cancelled == 1

    async def test_a_second_stop_does_not_wait(self):
        async with latched() as (served, _):
            call = asyncio.create_task(fails(served.ask("ModelInfer", request(1))))
            await until(lambda: served.engine.statistics().submitted == 1)
            first = asyncio.create_task(served.server.stop(WAIT_S))
            await until(lambda: "stopping" in repr(served.server))
            first.cancel()
            await asyncio.wait([first])
            await served.server.stop(0)
            await call
            await until(lambda: served.api.in_flight == 0)

    async def test_stopping_what_never_started(self):
        settings = ServerSettings(grpc_port=0)
        server = GrpcServer(Api(Repository(), settings), settings)
        assert "down" in repr(server)
        await server.stop(0)
