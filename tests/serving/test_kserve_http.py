"""KServe over HTTP as NVIDIA's clients speak it: ``tritonclient.http``, sync and asyncio, unmodified.

What only the C++ client does, or no client lets one do, is done by hand.
"""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.scheduling.batch import Reason
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import FLOAT, double_model, rows
from tests.serving.support import WAIT_S, address, ask, connected, engine_of, serving
from tests.serving.test_http import infer, json_body

pytestmark = pytest.mark.anyio
INFER = "/v2/models/double/infer"


@pytest.fixture
def kind():
    """Which of the two clients: both make the same requests, and what only one may notice is ``by_both``."""
    return "aio"


by_both = pytest.mark.parametrize("kind", ["sync", "aio"])


class InThread:
    """The sync client in a thread of its own, which its event loop belongs to; every call is awaited."""

    def __init__(self, url, **settings):
        self._thread = ThreadPoolExecutor(1)
        self._client = self._thread.submit(
            triton.InferenceServerClient, url, network_timeout=WAIT_S / 2, **settings
        ).result(WAIT_S)

    def __getattr__(self, name):
        def call(*args, **kw):
            return self.run(lambda client: getattr(client, name)(*args, **kw))

        return call

    async def run(self, work):
        """``work``, called with the client in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._client)

    async def aclose(self):
        await self.close()
        self._thread.shutdown(wait=False)


@asynccontextmanager
async def client_of(server, kind, **settings):
    url = "{}:{}".format(*address(server))
    if kind == "aio":
        async with triton_aio.InferenceServerClient(url) as client:
            yield client
        return
    client = InThread(url, **settings)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def talking(kind, models=None, **settings):
    """A server and a client of it. No test of both takes longer than ``WAIT_S``."""
    async with (
        asyncio.timeout(WAIT_S),
        serving(models, **settings) as server,
        client_of(server, kind) as client,
    ):
        yield server, client


def given(name, array, *, binary=True):
    """An input."""
    tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    return tensor.set_data_from_numpy(array, binary_data=binary)


def wanted(name, **kw):
    """A requested output."""
    return triton.InferRequestedOutput(name, **kw)


def four(*values, **kw):
    """The input of the model that doubles."""
    return [given("input", rows(*values), **kw)]


def first(result, name="output"):
    return result.as_numpy(name)[:, 0].tolist()


async def refusal(call):
    """Status and text of the error that a call ends with."""
    with pytest.raises(InferenceServerException) as caught:
        await call
    return int(caught.value.status()), caught.value.message()


def reversing_model(dtype, dims=(3,)):
    """Each row with its elements in reverse order."""

    def reverse(inputs, outputs):
        outputs["output"][...] = inputs["input"][:, ::-1]

    spec = TensorSpec("input", dtype, dims)
    return FunctionModel(reverse, inputs=spec, outputs=TensorSpec("output", dtype, dims))


def mixed_model():
    """Inputs and outputs of several datatypes and ranks."""

    return FunctionModel(
        lambda inputs, outputs: None,
        inputs=[
            TensorSpec("values", FLOAT, ("n",)),
            TensorSpec("factor", np.float64),
            TensorSpec("ids", np.int64, (2,)),
            TensorSpec("label", "S8", (1,)),
        ],
        outputs=[
            TensorSpec("scaled", FLOAT, ("n",)),
            TensorSpec("total", np.int64),
            TensorSpec("large", np.bool_, (2,)),
            TensorSpec("label", "S8", (1,)),
        ],
    )


def held(model=None, **settings):
    """Models and engine options for batches, one at a time, that end when the test says so."""
    device = LatchDevice(concurrency=1)
    engine = {"device": device, "contexts": 1, "close_timeout": 5, **settings}
    return device, {"models": {"double": model or double_model()}, "engine": engine, "drain_timeout": 5}


class TestHealth:
    @by_both
    async def test_live_and_ready(self, kind):
        async with talking(kind) as (_, client):
            assert await client.is_server_live() is True
            assert await client.is_server_ready() is True
            assert await client.is_model_ready("double") is True
            assert await client.is_model_ready("double", "1") is True

    @pytest.mark.parametrize(("name", "version"), [("nothing", ""), ("double", "2"), ("double", "x")])
    @by_both
    async def test_an_unknown_model_is_not_ready_and_no_exception(self, kind, name, version):
        async with talking(kind) as (_, client):
            assert await client.is_model_ready(name, version) is False


class TestDescriptions:
    @by_both
    async def test_the_server(self, kind):
        async with talking(kind) as (_, client):
            content = await client.get_server_metadata()
            assert content["name"] == "asynctrt"
            assert content["version"] == asynctrt.__version__
            assert {"binary_tensor_data", "statistics", "model_configuration"} <= set(content["extensions"])
            # Only what is there is announced.
            assert not {"classification", "system_shared_memory", "trace"} & set(content["extensions"])

    async def test_a_model(self, kind):
        async with talking(kind, {"mixed": mixed_model(), ("mixed", "12"): mixed_model()}) as (_, client):
            content = await client.get_model_metadata("mixed")
            assert content == await client.get_model_metadata("mixed", "12")
            assert content == {
                "name": "mixed",
                "versions": ["1", "12"],
                "platform": "python",
                "inputs": [
                    {"name": "values", "datatype": "FP32", "shape": [-1, -1]},
                    {"name": "factor", "datatype": "FP64", "shape": [-1]},
                    {"name": "ids", "datatype": "INT64", "shape": [-1, 2]},
                    {"name": "label", "datatype": "BYTES", "shape": [-1, 1]},
                ],
                "outputs": [
                    {"name": "scaled", "datatype": "FP32", "shape": [-1, -1]},
                    {"name": "total", "datatype": "INT64", "shape": [-1]},
                    {"name": "large", "datatype": "BOOL", "shape": [-1, 2]},
                    {"name": "label", "datatype": "BYTES", "shape": [-1, 1]},
                ],
            }

    async def test_a_configuration_agrees_with_the_metadata(self, kind):
        engine = {"max_rows": 16, "max_delay": 0.002, "priorities": 5, "contexts": 4, "arenas": 2}
        model = mixed_model()
        model.capabilities = replace(model.capabilities, enqueue_nbytes=1000)
        async with talking(kind, {"mixed": model}, engine=engine) as (_, client):
            content = await client.get_model_config("mixed")
            metadata = await client.get_model_metadata("mixed")
            assert content == await client.get_model_config("mixed", "1")
        assert (content["name"], content["platform"]) == ("mixed", "python")
        assert content["max_batch_size"] == 16
        assert content["dynamic_batching"]["max_queue_delay_microseconds"] == 2000
        assert content["dynamic_batching"]["priority_levels"] == 5
        assert [group["count"] for group in content["instance_group"]] == [2]
        assert "sequence_batching" not in content
        assert "ensemble_scheduling" not in content
        for side in ("input", "output"):
            described = {tensor["name"]: tensor for tensor in metadata[side + "s"]}
            assert [tensor["name"] for tensor in content[side]] == list(described)
            for tensor in content[side]:
                datatype = tensor["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
                assert datatype == described[tensor["name"]]["datatype"]
                assert [-1, *tensor["dims"]] == described[tensor["name"]]["shape"]
                assert tensor["is_shape_tensor"] is False
                assert not tensor.get("optional", False)

    async def test_the_repository(self, kind):
        models = {"a": double_model(), ("b", "1"): double_model(), ("b", "10"): double_model()}
        async with talking(kind, models) as (server, client):
            index = await client.get_model_repository_index()
            assert index == [
                {"name": name, "version": version, "state": "READY", "reason": ""}
                for name, version in [("a", "1"), ("b", "1"), ("b", "10")]
            ]
            await server.repository.unload("b")
            index = await client.get_model_repository_index()
            assert index[1:] == [
                {"name": "b", "version": version, "state": "UNAVAILABLE", "reason": "unloaded"}
                for version in ("1", "10")
            ]
            # No client of Python's can ask for that.
            status, _, body = await ask(server, "/v2/repository/index", b'{"ready": true}')
            assert (status, [item["name"] for item in json.loads(body)]) == (200, ["a"])

    @by_both
    async def test_long_descriptions_can_be_read(self, kind):
        """Clients decompress an inference's answer and nothing else, whatever they say that they accept."""
        models = {f"model-{number}": mixed_model() for number in range(20)}
        async with talking(kind, models) as (_, client):
            assert len(await client.get_model_repository_index()) == 20
            assert len((await client.get_inference_statistics())["model_stats"]) == 20
            assert (await client.get_model_config("model-0"))["name"] == "model-0"
            assert (await client.get_model_metadata("model-0"))["name"] == "model-0"
            status, text = await refusal(client.infer("n" * 600, four(1)))
            assert status == 404
            assert "unknown model 'nnn" in text


class TestControl:
    async def test_is_refused_unless_the_server_allows_it(self, kind):
        async with talking(kind) as (_, client):
            for call in (client.load_model, client.unload_model):
                status, text = await refusal(call("double"))
                assert status == 400
                assert "--model-control" in text
            assert await client.is_model_ready("double") is True

    @by_both
    async def test_unload_and_load(self, kind):
        async with talking(kind, {"a": double_model(), "b": double_model()}, model_control=True) as (
            _,
            client,
        ):
            await client.unload_model("a")
            assert await client.is_model_ready("a") is False
            assert await client.is_model_ready("b") is True
            # What was unloaded on purpose is not missed.
            assert await client.is_server_ready() is True
            for call in (client.infer("a", four(1)), client.get_model_metadata("a")):
                status, text = await refusal(call)
                assert (status, "unloaded" in text) == (503, True)
            assert first(await client.infer("b", four(1))) == [2]
            await client.unload_model("a")
            await client.load_model("a")
            await client.load_model("a")
            assert await client.is_model_ready("a") is True
            assert first(await client.infer("a", four(1))) == [2]

    async def test_a_configuration_or_files_for_a_model_are_refused(self, kind):
        """They would be passed over in silence otherwise."""
        async with talking(kind, model_control=True) as (_, client):
            status, text = await refusal(client.load_model("double", config='{"max_batch_size": 1}'))
            assert status in (400, 501)
            assert "config" in text


class TestInfer:
    @pytest.mark.parametrize("output", ["binary", "json", "default"])
    @pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
    @by_both
    async def test_binary_and_json(self, kind, binary, output):
        outputs = None if output == "default" else [wanted("output", binary_data=output == "binary")]
        async with talking(kind) as (_, client):
            for value in range(3):
                result = await client.infer("double", four(value, 7, binary=binary), outputs=outputs)
                assert result.as_numpy("output").tolist() == rows(2 * value, 14).tolist()
                assert result.as_numpy("output").dtype == np.float32
                assert result.as_numpy("nothing") is None
                content = result.get_response()
                assert (content["model_name"], content["model_version"]) == ("double", "1")
                assert "id" not in content
                described = {"name": "output", "datatype": "FP32", "shape": [2, 4]}
                if output == "json":
                    described["data"] = [2 * value] * 4 + [14] * 4
                else:
                    described["parameters"] = {"binary_data_size": 32}
                assert content["outputs"] == [described]

    async def test_async_infer_of_the_sync_client(self):
        device, settings = held()

        def send(client):
            asked = [
                client.async_infer("double", four(value), request_id=f"id-{value}") for value in range(4)
            ]
            return [handle.get_result(timeout=WAIT_S) for handle in asked]

        async with asyncio.timeout(WAIT_S), serving(**settings) as server:
            async with client_of(server, "sync", concurrency=4) as client:
                sending = asyncio.create_task(client.run(send))
                await until(lambda: engine_of(server).statistics().submitted == 4)
                device.open()
                results = await sending
            assert [first(result) for result in results] == [[0], [2], [4], [6]]
            assert [result.get_response()["id"] for result in results] == [f"id-{v}" for v in range(4)]
            # They were there together, and so in fewer batches.
            assert engine_of(server).statistics().batches == 2


@pytest.mark.parametrize("name", ["a/b c.d", "per%20cent+", "模型?#", "ready/x"])
@by_both
async def test_names(kind, name):
    async with talking(kind, {name: double_model(), (name, "7"): double_model()}, model_control=True) as (
        _,
        client,
    ):
        for version in ("", "7", "1"):
            assert await client.is_model_ready(name, version) is True
            result = await client.infer(name, four(2), model_version=version)
            assert result.get_response()["model_name"] == name
            assert result.get_response()["model_version"] == version or "7"
            assert (await client.get_model_metadata(name, version))["name"] == name
            assert (await client.get_model_config(name, version))["name"] == name
            stats = (await client.get_inference_statistics(name, version))["model_stats"]
            assert {item["name"] for item in stats} == {name}
        await client.unload_model(name)
        assert await client.is_model_ready(name) is False
        await client.load_model(name)
        assert first(await client.infer(name, four(2))) == [4]


class TestScheduling:
    @by_both
    async def test_parameters_of_ones_own_are_passed_over(self, kind):
        async with talking(kind) as (_, client):
            result = await client.infer(
                "double",
                four(1),
                parameters={"tenant": "a", "temperature": 0.5, "debug": True},
                query_params={"trace": "1"},
                headers={"X-Request-From": "test"},
                sequence_id=17,
                sequence_start=True,
            )
            assert first(result) == [2]


class TestCompression:
    @pytest.mark.parametrize("answered", [None, "gzip", "deflate"])
    @pytest.mark.parametrize("asked", [None, "gzip", "deflate"])
    @by_both
    async def test_both_ways(self, kind, asked, answered):
        array = np.arange(1500, dtype=np.float32).reshape(3, 500)
        async with talking(kind, {"model": reversing_model(FLOAT, (500,))}) as (_, client):
            for binary in (True, False):
                result = await client.infer(
                    "model",
                    [given("input", array, binary=binary)],
                    outputs=[wanted("output", binary_data=binary)],
                    request_id="7",
                    request_compression_algorithm=asked,
                    response_compression_algorithm=answered,
                )
                assert np.array_equal(result.as_numpy("output"), array[:, ::-1])
                assert result.get_response()["id"] == "7"

    @by_both
    async def test_errors_to_compressed_requests(self, kind):
        async with talking(kind) as (_, client):
            status, text = await refusal(
                client.infer(
                    "double",
                    [given("input", np.zeros((1, 5), np.float32))],
                    request_compression_algorithm="gzip",
                    response_compression_algorithm="gzip",
                )
            )
            assert status == 400
            assert "(rows, 4), given (1, 5)" in text


class TestStatistics:
    async def test_before_the_first_request(self, kind):
        async with talking(kind) as (_, client):
            (stats,) = (await client.get_inference_statistics("double"))["model_stats"]
        nothing = {"count": 0, "ns": 0}
        names = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        assert stats.pop("memory_usage")[0]["byte_size"] > 0
        assert stats == {
            "name": "double",
            "version": "1",
            "last_inference": 0,
            "inference_count": 0,
            "execution_count": 0,
            "inference_stats": dict.fromkeys((*names, "cache_hit", "cache_miss"), nothing),
            "response_stats": {},
            "batches_launched": dict.fromkeys(map(str, Reason), 0),
            "batch_stats": [],
        }

    @by_both
    async def test_they_advance_as_the_requests_do(self, kind):
        """A batch of one row, then one of four from three requests; then one that fails in each way."""
        device, settings = held()
        async with talking(kind, **settings) as (server, client):
            engine = engine_of(server)
            async with connected(server) as one, connected(server) as two, connected(server) as three:
                asked = [(one, (1,)), (two, (2,)), (three, (3, 4))]
                for number, (raw, values) in enumerate(asked, start=1):
                    raw.send(infer(*values))
                    await until(lambda number=number: engine.statistics().submitted == number)
                before = (await client.get_inference_statistics("double"))["model_stats"][0]
                # What is still to be answered has not advanced anything.
                assert before["inference_stats"]["queue"] == {"count": 0, "ns": 0}
                device.open()
                for raw, _ in asked:
                    assert (await raw.answer())[0] == 200
            (stats,) = (await client.get_inference_statistics("double", "1"))["model_stats"]
            check_statistics(stats, {1: 1, 3: 1}, requests={1: 1, 3: 2}, failed=0)
            assert abs(stats["last_inference"] / 1000 - time.time()) < 3600

            device.shut()
            wrong = [given("input", np.zeros((1, 4), np.float64))]
            assert (await refusal(client.infer("double", wrong)))[0] == 400
            async with connected(server) as raw:
                raw.send(infer(5))
                await until(lambda: device.held == 1)
                assert (await refusal(client.infer("double", four(6), timeout=1)))[0] == 503
                async with connected(server) as gone:
                    gone.send(infer(7))
                    await until(lambda: engine.statistics().queued_requests == 1)
                await until(lambda: engine.statistics().cancelled == 1)
                device.open()
                assert (await raw.answer())[0] == 200
            (stats,) = (await client.get_inference_statistics("double", "1"))["model_stats"]
            check_statistics(stats, {1: 2, 3: 1}, requests={1: 2, 3: 2}, failed=3)

    async def test_of_all_models(self, kind):
        models = {"a": double_model(), "b/c": double_model(), ("b/c", "2"): double_model()}
        async with talking(kind, models) as (_, client):
            await client.infer("b/c", four(1))
            content = await client.get_inference_statistics()
            counts = [
                (item["name"], item["version"], item["inference_stats"]["queue"]["count"])
                for item in content["model_stats"]
            ]
            assert counts == [("a", "1", 0), ("b/c", "1", 0), ("b/c", "2", 1)]


def check_statistics(stats, batches, *, requests, failed):
    """That so many batches, and requests in them, by the batch's rows, are all that there was."""
    done = stats["inference_stats"]
    by_rows = {item["batch_size"]: item for item in stats["batch_stats"]}
    assert {size: item["compute_infer"]["count"] for size, item in by_rows.items()} == batches
    assert stats["inference_count"] == sum(size * count for size, count in batches.items())
    assert stats["execution_count"] == sum(batches.values())
    succeeded = sum(requests.values())
    parts = ("compute_input", "compute_infer", "compute_output")
    assert {name: done[name]["count"] for name in ("success", "queue", *parts)} == dict.fromkeys(
        ("success", "queue", *parts), succeeded
    )
    assert done["fail"]["count"] == failed
    assert done["cache_hit"] == done["cache_miss"] == {"count": 0, "ns": 0}
    for name in parts:
        # Each request has had the time of the batch that it was in.
        if all(count in (1, batches[size]) for size, count in requests.items()):
            assert done[name]["ns"] == sum(item[name]["ns"] for item in by_rows.values())
        assert done[name]["ns"] >= sum(item[name]["ns"] for item in by_rows.values())
    assert done["success"]["ns"] >= sum(done[name]["ns"] for name in ("queue", *parts))
    assert done["queue"]["ns"] > 0


class TestByHand:
    """What the C++ client does and Python's do not."""

    async def test_a_raw_body_of_a_row_of_any_length(self):
        async with serving({"any": reversing_model(np.int16, ("n",))}) as server:
            for length in (1, 5):
                array = np.arange(length, dtype=np.int16)
                status, headers, body = await ask(
                    server, "/v2/models/any/infer", array.tobytes(), Inference_Header_Content_Length=0
                )
                assert status == 200
                head = int(headers["inference-header-content-length"])
                assert np.frombuffer(body[head:], np.int16).tolist() == array[::-1].tolist()

    async def test_the_header_is_sent_for_json_alone_too(self):
        async with serving() as server:
            for _ in range(2):
                body = json_body(3, id="")
                status, headers, answer = await ask(
                    server, INFER, body, Inference_Header_Content_Length=len(body)
                )
                content = json.loads(answer)
                assert (status, headers["content-type"]) == (200, "application/json")
                assert "inference-header-content-length" not in headers
                assert int(headers["content-length"]) == len(answer)
                # An empty id is none; parameters without a binary_data_size would be an error there.
                assert "id" not in content
                (output,) = content["outputs"]
                assert "parameters" not in output
                assert output["data"] == [6] * 4


class TestErrors:
    @by_both
    async def test_what_is_not_there_says_so(self, kind):
        async with talking(kind) as (_, client):
            calls = (
                lambda: client.register_system_shared_memory("region", "/region", 16),
                lambda: client.unregister_system_shared_memory(),
                lambda: client.get_system_shared_memory_status(),
                lambda: client.register_cuda_shared_memory("region", "aGFuZGxl", 0, 16),
                lambda: client.unregister_cuda_shared_memory("region"),
                lambda: client.get_cuda_shared_memory_status(),
                lambda: client.get_trace_settings(),
                lambda: client.update_trace_settings(settings={"trace_rate": "1"}),
                lambda: client.get_log_settings(),
                lambda: client.update_log_settings({"log_verbose_level": 1}),
            )
            for call in calls:
                status, text = await refusal(call())
                assert status == 501
                assert "this server does not implement" in text

    async def test_tensors_in_shared_memory_and_classes(self, kind):
        async with talking(kind) as (_, client):
            shared = triton.InferInput("input", [1, 4], "FP32").set_shared_memory("region", 16)
            status, text = await refusal(client.infer("double", [shared]))
            assert (status, "'input'" in text) == (501, True)
            output = wanted("output")
            output.set_shared_memory("region", 16)
            status, text = await refusal(client.infer("double", four(1), outputs=[output]))
            assert (status, "'output'" in text) == (501, True)
            status, text = await refusal(
                client.infer("double", four(1), outputs=[wanted("output", class_count=3)])
            )
            assert status == 501
            assert "classification" in text
