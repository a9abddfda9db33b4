"""Models of strings, of scalars, and of rows on another axis than the first, called by every client."""

import asyncio
import json

import numpy as np
import onnx
import pytest
import tritonclient.grpc.aio as triton_grpc
from onnx import TensorProto

import asynctrt
from asynctrt.client import connect
from asynctrt.errors import InputError
from asynctrt.options import Options
from asynctrt.serving.folder import ModelFolder
from asynctrt.serving.model_config import interpret
from asynctrt.serving.repository import Repository
from asynctrt.serving.server import Server
from asynctrt.serving.settings import ServerSettings
from asynctrt.testing import LatchDevice
from tests.contract.test_transports import TRANSPORTS, Call, Refused, talking
from tests.helpers import until
from tests.models import double_onnx, node, save
from tests.serving.support import WAIT_S, ask, serving
from tests.serving.test_dashboard import Site
from tests.test_javascript_client import Page

pytestmark = pytest.mark.anyio

WORDS = [["bär", ""], ["\U0001f600", "x\0"]]
TWICE = [["bärbär", ""], ["\U0001f600\U0001f600", "x\0x\0"]]


def strings_onnx(path):
    """Every string twice."""
    nodes = [node("StringConcat", "text text", "twice")]
    tensors = [[(name, TensorProto.STRING, ["batch", 2])] for name in ("text", "twice")]
    model = onnx.load(save(path, nodes, *tensors))
    model.opset_import[0].version = 20
    onnx.save(model, path)
    return str(path)


def state_onnx(path):
    """A state ``[2, rows, 3]`` to which rows are added, and the sum of both of its layers."""
    return str(
        save(
            path,
            [node("Add", "state x", "next"), node("ReduceSum", "next first", "sum", keepdims=0)],
            [("x", TensorProto.FLOAT, ["batch", 3]), ("state", TensorProto.FLOAT, [2, "batch", 3])],
            [("next", TensorProto.FLOAT, [2, "batch", 3]), ("sum", TensorProto.FLOAT, ["batch", 3])],
            [("first", np.array([0], np.int64))],
        )
    )


def alone_onnx(path):
    """Tensors without rows: a number times a table, and a string as it is."""
    return str(
        save(
            path,
            [
                node("Mul", "table factor", "scaled"),
                node("Identity", "note", "said"),
                node("Neg", "factor", "neg"),
            ],
            [
                ("factor", TensorProto.FLOAT, []),
                ("table", TensorProto.FLOAT, [2, 3]),
                ("note", TensorProto.STRING, []),
            ],
            [
                ("scaled", TensorProto.FLOAT, [2, 3]),
                ("said", TensorProto.STRING, []),
                ("neg", TensorProto.FLOAT, []),
            ],
        )
    )


@pytest.fixture
def models(tmp_path):
    return {
        "strings": strings_onnx(tmp_path / "strings.onnx"),
        "state": (state_onnx(tmp_path / "state.onnx"), {"onnx": {"batch_axis": {"state": 1, "next": 1}}}),
        "alone": alone_onnx(tmp_path / "alone.onnx"),
    }


TABLE = np.arange(6, dtype=np.float32).reshape(2, 3)
ALONE = {"factor": np.array(0.5, np.float32), "table": TABLE, "note": np.array("bär", object)}


def state(*values):
    x = np.repeat(np.array(values, np.float32)[:, None], 3, 1)
    return {"x": x, "state": np.stack([x * 10, x * 100])}


def as_text(array):
    """An array of strings as nested lists of text: clients give bytes, text, or either by the encoding."""
    text = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    return np.array(text, object).reshape(array.shape).tolist()


# ---- every transport


def shapes(metadata):
    return {
        item["name"]: (item["datatype"], item["shape"]) for item in metadata["inputs"] + metadata["outputs"]
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_transport_has_their_values(models, transport):
    async with talking(transport, models) as (_, client):
        answer = await client.ask(Call({"text": np.array(WORDS, object)}, "strings"))
        assert as_text(answer.outputs["twice"]) == TWICE
        for values in ((1,), (1, 2, 3)):
            given = state(*values)
            answer = await client.ask(Call(given, "state"))
            assert answer.outputs["next"].tolist() == (given["state"] + given["x"]).tolist()
            assert answer.outputs["sum"].tolist() == (112 * given["x"]).tolist()
        outputs = (await client.ask(Call(ALONE, "alone"))).outputs
        assert outputs["scaled"].tolist() == (TABLE / 2).tolist()
        assert (outputs["neg"].shape, outputs["neg"].item()) == ((), -0.5)
        assert (outputs["said"].shape, as_text(outputs["said"])) == ((), "bär")


async def test_their_descriptions(models):
    expected = {
        "strings": dict.fromkeys(("text", "twice"), ("BYTES", [-1, 2])),
        "state": {
            "x": ("FP32", [-1, 3]),
            "state": ("FP32", [2, -1, 3]),
            "next": ("FP32", [2, -1, 3]),
            "sum": ("FP32", [-1, 3]),
        },
        "alone": {
            "factor": ("FP32", []),
            "table": ("FP32", [2, 3]),
            "note": ("BYTES", []),
            "scaled": ("FP32", [2, 3]),
            "said": ("BYTES", []),
            "neg": ("FP32", []),
        },
    }
    async with (
        serving(models, grpc=True) as server,
        triton_grpc.InferenceServerClient(server.grpc_target) as client,
    ):
        for name, described in expected.items():
            _, _, body = await ask(server, f"/v2/models/{name}")
            assert shapes(json.loads(body)) == described
            metadata = await client.get_model_metadata(name)
            assert {
                one.name: (one.datatype, list(one.shape)) for one in (*metadata.inputs, *metadata.outputs)
            } == described
            engine = server.repository.find(name).engine
            _, _, body = await ask(server, f"/v2/models/{name}/config")
            config = json.loads(body)
            assert config["parameters"] == {"batching": {"string_value": engine.batching.reason}}
            assert ("dynamic_batching" in config) == engine.batching.is_on == (name != "alone")
            if name == "strings":
                continue  # Its rows are those of a batch, of which a configuration does not tell.
            assert config["max_batch_size"] == 0
            assert {
                item["name"]: (item["data_type"], item["dims"]) for item in config["input"] + config["output"]
            } == {
                tensor: ("TYPE_" + kind.replace("BYTES", "STRING"), dims)
                for tensor, (kind, dims) in described.items()
            }


# ---- ours


@pytest.fixture(params=["http", "ws"])
def url(request):
    """How a server's address is made one of a client over HTTP or a websocket."""
    if request.param == "http":
        return lambda server: server.http_url
    return lambda server: server.http_url.replace("http", "ws", 1) + "/v2/ws"


class TestOurClients:
    @pytest.mark.parametrize(
        "given",
        [
            WORDS,
            np.array(WORDS, object),
            [[word.encode() for word in row] for row in WORDS],
        ],
        ids=["lists", "objects", "bytes"],
    )
    async def test_strings(self, models, url, given):
        async with serving(models) as server, connect(url(server)) as client:
            for inputs in (given, {"text": given}):
                assert as_text((await client.infer("strings", inputs))["twice"]) == TWICE
            with pytest.raises(InputError, match="element 0 is not UTF-8 text"):
                await client.infer("strings", [[b"\xff", b"a"]])
            with pytest.raises(InputError, match=r"'text' takes shape \(rows, 2\), given \(2,\)"):
                await client.infer("strings", ["a", "b"])

    async def test_tensors_without_rows(self, models, url):
        async with serving(models) as server, connect(url(server)) as client:
            for given in (ALONE, {"factor": 0.5, "table": TABLE.tolist(), "note": "bär"}):
                outputs = await client.infer("alone", given)
                assert {name: (array.shape, array.tolist()) for name, array in outputs.items()} == {
                    "scaled": ((2, 3), (TABLE / 2).tolist()),
                    "said": ((), "bär".encode()),
                    "neg": ((), -0.5),
                }
            with pytest.raises(InputError, match=r"'factor' takes shape \(\), given \(1,\)"):
                await client.infer("alone", ALONE | {"factor": np.ones(1, np.float32)})
            # A request that has no rows counts as one.
            stats = server.repository.find("alone").statistics()
            assert (stats["inference_count"], stats["inference_stats"]["success"]["count"]) == (2, 2)


# ---- by hand


async def test_strings_that_are_too_long_for_a_message_of_grpc(models):
    async with talking("grpc", models, max_grpc_message=1 << 20) as (_, client):
        short = np.array([["a" * 10, "b"]], object)
        assert as_text((await client.ask(Call({"text": short}, "strings"))).outputs["twice"])[0][1] == "bb"
        with pytest.raises(Refused, match="at most 1048576 are sent over gRPC"):
            await client.ask(Call({"text": np.array([["a" * 600_000, ""]], object)}, "strings"))


# ---- the way into the engine


async def test_a_large_request_with_rows_on_another_axis_waits_in_parts(models):
    device = LatchDevice(concurrency=1)
    engine = {"device": device, "contexts": 1, "max_rows": 2, "max_queue_rows": 16}
    models = {"state": models["state"]}
    async with serving(models, engine=engine) as server, connect(server.http_url) as client:
        gate = server.repository.find("state").admission.gate
        given = [state(*range(1, 7)), state(*range(11, 17))]
        calls = [asyncio.ensure_future(client.infer("state", inputs)) for inputs in given]
        await until(lambda: server.api.in_flight == 2)
        assert gate.waiting == 3
        device.open()
        for inputs, call in zip(given, calls, strict=True):
            outputs = await call
            assert outputs["next"].tolist() == (inputs["state"] + inputs["x"]).tolist()
            assert outputs["sum"].tolist() == (112 * inputs["x"]).tolist()


# ---- Triton's configuration


def test_a_max_batch_size_of_0_is_batching_off(tmp_path):
    config = interpret(
        "max_batch_size: 0 dynamic_batching { max_queue_delay_microseconds: 100 priority_levels: 2 "
        "default_queue_policy { max_queue_size: 5 } }",
        tmp_path,
    )
    assert config.options == {"batching": "off", "priorities": 2, "max_queue_rows": 5}
    assert [sentence.split()[0] for sentence in config.ignored] == [
        "dynamic_batching.max_queue_delay_microseconds",
        "dynamic_batching.default_priority_level",
    ]
    assert Options(**config.options).batching == "off"
    assert "batching" not in interpret("max_batch_size: 4", tmp_path).options
    assert "batching" not in interpret("", tmp_path).options


async def test_a_folder_with_a_max_batch_size_of_0(tmp_path):
    (tmp_path / "m/1").mkdir(parents=True)
    double_onnx(tmp_path / "m/1/model.onnx")
    (tmp_path / "m/config.pbtxt").write_text(
        'max_batch_size: 0 input { name: "input" data_type: TYPE_FP32 dims: [ -1, 4 ] }'
    )
    repository = Repository()
    repository.add_place(ModelFolder(tmp_path))
    settings = ServerSettings(http_port=0, grpc_port=0)
    async with asyncio.timeout(WAIT_S), Server(repository, settings) as server:
        await repository.load_all()
        served = repository.find("m")
        assert not served.engine.batching.is_on
        config = served.config()
        assert (config["max_batch_size"], config["input"][0]["dims"]) == (0, [-1, 4])
        assert served.metadata(["1"])["inputs"][0]["shape"] == [-1, 4]
        async with connect(server.http_url) as client:
            outputs = await client.infer("m", np.ones((5, 4), np.float32))
            assert outputs["output"].tolist() == [[2.0] * 4] * 5


async def test_the_dashboard_says_why(models):
    for name in ("strings", "alone"):
        async with asynctrt.open(models[name]) as engine:
            answer = await Site((name, engine)).get("/dashboard/recent")
            (model,) = json.loads(b"".join(answer.body))["models"]
            assert model["batching"] == engine.batching.reason


async def test_the_client_for_browsers(models, chromium):
    async with serving(models) as server, Page(server, chromium) as page:
        assert await page.run(
            """const text = ({ shape, data }) => [shape, data.map((one) => new TextDecoder().decode(one))];
            const { twice } = await client.infer("strings", { text: tensor("BYTES", [1, 2], ["bär", ""]) });
            const { said, neg } = await client.infer("alone", {
              factor: tensor("FP32", [], [2]), table: tensor("FP32", [2, 3], Array(6).fill(1)),
              note: tensor("BYTES", [], ["ü"]),
            });
            return [text(twice), text(said), [neg.shape, Array.from(neg.data)]];"""
        ) == [[[1, 2], ["bärbär", ""]], [[], ["ü"]], [[], [-2]]]
