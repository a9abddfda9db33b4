"""Calls that name the outputs they want: each answer has these, and what nobody names is copied nowhere."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from onnx import TensorProto

import asynctrt
from asynctrt import FunctionModel, Pipeline, TensorSpec, client
from asynctrt.devices.host import HostDevice
from asynctrt.errors import InputError, UsageError
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import node, rows, save
from tests.serving.support import address, serving
from tests.test_rows import voice_onnx, voice_request
from tests.workers import local

pytestmark = pytest.mark.anyio
WAIT_S = 30
ALL = ["hidden", "embedding", "label"]
HIDDEN, EMBEDDING, LABEL = 4 * 1024, 4 * 4, 8
"""Bytes of a row of each output."""


def encode(inputs, outputs):
    x = inputs["x"]
    outputs["hidden"][...] = np.repeat(x[:, :1], 1024, axis=1)
    outputs["embedding"][...] = 2 * x
    outputs["label"][...] = x[:, 0]


def encoder(hidden=1024, **kw):
    """A large output beside two small ones."""
    outputs = [
        TensorSpec("hidden", "float32", (hidden,)),
        TensorSpec("embedding", "float32", (4,)),
        TensorSpec("label", "int64"),
    ]
    return FunctionModel(encode, inputs=TensorSpec("x", "float32", (4,)), outputs=outputs, **kw)


class Recorder:
    """Records the bytes of each copy from the memory of a device."""

    def __init__(self, **settings):
        super().__init__(unified=False, **settings)
        self.staging = set()
        self.copied_out = []

    def allocate_staging(self, nbytes):
        buffer = super().allocate_staging(nbytes)
        self.staging.add(buffer.address)
        return buffer

    def create_stream(self):
        stream = super().create_stream()
        copy = stream.copy

        def copy_and_record(target, source, *, offset, nbytes):
            if target.address in self.staging:
                self.copied_out.append(nbytes)
            copy(target, source, offset=offset, nbytes=nbytes)

        stream.copy = copy_and_record
        return stream


class Recording(Recorder, HostDevice):
    """A device with memory of its own."""


class HeldRecording(Recorder, LatchDevice):
    """The same, whose batches end when the test lets them."""


@pytest.fixture(params=["host", "separate memory"])
def device(request):
    return HostDevice() if request.param == "host" else Recording()


def check(result, values, names):
    """Check that an answer has these outputs, in the model's order, with the values of its own rows."""
    assert list(result) == [name for name in ALL if name in names]
    expected = {
        "hidden": np.repeat(rows(*values)[:, :1], 1024, axis=1),
        "embedding": 2 * rows(*values),
        "label": np.array(values, np.int64),
    }
    for name, array in result.items():
        np.testing.assert_array_equal(array, expected[name])
        assert array.flags.writeable


async def ask(engine, *wishes):
    """Send requests of 1, 2, 3 … rows at once that want these outputs, and check each answer.

    :returns: the rows of the batches.
    """
    sent = [([10 * number + row for row in range(number + 1)], names) for number, names in enumerate(wishes)]
    async with asyncio.timeout(WAIT_S):
        results = await asyncio.gather(
            *[engine.infer(rows(*values), outputs=names) for values, names in sent]
        )
    for (values, names), result in zip(sent, results, strict=True):
        check(result, values, ALL if names == "host" else names)
    return [result.batch_rows for result in results]


MIXED = [
    [["embedding"], ["embedding"], ["embedding"]],
    [["embedding"], ["label", "embedding"], ["label"]],
    [["embedding"], "host", ["hidden"]],
    [("label", "hidden", "label"), {"embedding": 1}.keys(), ALL],
]


@pytest.mark.parametrize("wishes", MIXED)
async def test_requests_that_want_different_outputs_share_a_batch(device, wishes):
    async with asynctrt.open(encoder(), device=device, max_rows=8, contexts=1) as engine:
        assert await ask(engine, *wishes) == [6, 6, 6]
        assert await ask(engine, "host", "host") == [3, 3]


async def test_of_rows_that_are_one_each():
    async with asynctrt.open(encoder(), max_rows=8) as engine:
        names = [["label"], ["hidden"], "host", ["label", "embedding"]]
        results = await asyncio.gather(
            *[engine.infer(rows(value), outputs=one) for value, one in enumerate(names)]
        )
        for value, (one, result) in enumerate(zip(names, results, strict=True)):
            check(result, [value], ALL if one == "host" else one)
        assert {result.batch_rows for result in results} == {4}


@pytest.mark.parametrize(
    ("wishes", "copied"),
    [
        ([["embedding"]], [EMBEDDING]),
        ([["label"], ["label"]], [3 * LABEL]),
        ([["label"], ["embedding"]], [3 * EMBEDDING, 3 * LABEL]),
        ([["label"], "host"], [3 * HIDDEN, 3 * EMBEDDING, 3 * LABEL]),
        ([["label"], ALL], [3 * HIDDEN, 3 * EMBEDDING, 3 * LABEL]),
        (["host"], [HIDDEN, EMBEDDING, LABEL]),
    ],
)
async def test_what_nobody_wants_is_not_copied_from_the_device(wishes, copied):
    device = Recording()
    async with asynctrt.open(encoder(), device=device, max_rows=8, contexts=1) as engine:
        device.copied_out.clear()
        await ask(engine, *wishes)
        assert device.copied_out == copied
        assert engine.statistics().batches == 1


@pytest.mark.parametrize("kind", ["ends first", "cancelled in flight"])
async def test_one_who_leaves_does_not_change_what_others_get(kind):
    device = LatchDevice(unified=False)
    async with asynctrt.open(encoder(), device=device, max_rows=8) as engine:
        gone = asyncio.create_task(engine.infer(rows(1), outputs=["hidden"]))
        stays = asyncio.create_task(engine.infer(rows(2, 3), outputs=["embedding"]))
        if kind == "cancelled in flight":
            await device.wait_held(1)
            gone.cancel()
        device.open()
        check(await stays, [2, 3], ["embedding"])
        (outcome,) = await asyncio.gather(gone, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError) == (kind == "cancelled in flight")


@pytest.mark.parametrize("call", ["infer", "submit"])
async def test_more_rows_than_a_batch_holds(device, call):
    async with asynctrt.open(encoder(), device=device, max_rows=4) as engine:
        values = list(range(11))
        result = await getattr(engine, call)(rows(*values), outputs=["label", "embedding"])
        check(result, values, ["embedding", "label"])
        assert result.batches == 3
        check(await engine.infer(rows(*values)), values, ALL)


async def test_outputs_so_large_that_a_thread_copies_them(device):
    async with asynctrt.open(encoder(), device=device, max_rows=2048, contexts=1) as engine:
        values = list(range(1500))
        wishes = (["hidden"], ["label", "hidden"])
        results = await asyncio.gather(*[engine.infer(rows(*values), outputs=names) for names in wishes[:1]])
        results += await asyncio.gather(
            *[engine.infer(rows(*values[:1000]), outputs=names) for names in wishes]
        )
        check(results[0], values, ["hidden"])
        check(results[1], values[:1000], ["hidden"])
        check(results[2], values[:1000], ["hidden", "label"])
        assert results[1].batch_rows == 2000


async def test_urgent_requests(device):
    settings = {"device": device, "max_rows": 8, "priorities": 2}
    async with asynctrt.open(encoder(), **settings) as engine:
        urgent, other = await asyncio.gather(
            engine.infer(rows(1), outputs=["label"], priority=1), engine.infer(rows(2), outputs=["embedding"])
        )
        check(urgent, [1], ["label"])
        check(other, [2], ["embedding"])


async def test_rows_that_are_padded_and_cut_back(device):
    def copy(inputs, outputs):
        outputs["tokens"][...] = inputs["x"]
        outputs["sum"][...] = inputs["x"].sum(axis=1)

    model = FunctionModel(
        copy,
        inputs=TensorSpec("x", "float32", ("length",)),
        outputs=[TensorSpec("tokens", "float32", ("length",)), TensorSpec("sum", "float32")],
    )
    async with asynctrt.open(model, device=device, max_rows=8, pad={"length": (4, 8)}) as engine:
        sent = [np.full((1, length), length, np.float32) for length in (5, 6, 7)]
        wishes = [["sum"], ["tokens"], "host"]
        results = await asyncio.gather(
            *[engine.infer(array, outputs=names) for array, names in zip(sent, wishes, strict=True)]
        )
        assert [list(result) for result in results] == [["sum"], ["tokens"], ["tokens", "sum"]]
        assert {result.batch_rows for result in results} == {3}
        for array, result in zip(sent, results, strict=True):
            for name, expected in {"tokens": array, "sum": array.sum(axis=1)}.items():
                if name in result:
                    np.testing.assert_array_equal(result[name], expected)


async def test_outputs_with_rows_on_another_axis(device, tmp_path):
    path, rng = voice_onnx(tmp_path / "voice.onnx"), np.random.default_rng(0)
    async with asynctrt.open(
        path, onnx={"batch_axis": {"state": 1, "stateN": 1}, "shared": {"sr"}}, max_rows=8, device=device
    ) as engine:
        requests = [voice_request(rng, count, 8000) for count in (2, 3, 20)]
        wishes = [["stateN"], ["output"], ["stateN"]]
        results = await asyncio.gather(
            *[engine.infer(sent, outputs=names) for sent, names in zip(requests, wishes, strict=True)]
        )
    assert [list(result) for result in results] == wishes
    for sent, result in zip(requests, results, strict=True):
        if "stateN" in result:
            np.testing.assert_array_equal(result["stateN"], 2 * sent["state"])
        else:
            assert result["output"].shape == sent["input"].shape


def brings_outputs_onnx(path):
    """``joined``, whose length no input has, before ``ints``, whose memory is the engine's."""
    return save(
        path,
        [node("Concat", "x x", "joined", axis=1), node("Cast", "x", "ints", to=TensorProto.INT32)],
        [("x", TensorProto.FLOAT, ["batch", "length"])],
        [
            ("joined", TensorProto.FLOAT, ["batch", "joined_length"]),
            ("ints", TensorProto.INT32, ["batch", "length"]),
        ],
    )


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_outputs_whose_memory_is_the_runtimes(tmp_path, isolation):
    path = brings_outputs_onnx(tmp_path / "m.onnx")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = {"joined": np.concatenate([x, x], axis=1), "ints": x.astype(np.int32)}
    async with local.opened(path, device="host") as (isolated, direct, _):
        engine = direct if isolation == "none" else isolated
        wishes = ["host", ["ints"], ["joined"], ["ints", "joined"]]
        results = [await engine.infer(x, outputs=names) for names in wishes]
        results += await asyncio.gather(*[engine.infer(x, outputs=names) for names in wishes])
    for names, result in zip(wishes * 2, results, strict=True):
        assert list(result) == [name for name in expected if names == "host" or name in names]
        for name, array in result.items():
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("wishes", MIXED)
async def test_workers(wishes):
    async with local.opened(encoder(), device="host", max_rows=8) as (engine, _, _):
        await ask(engine, *wishes)
        await ask(engine, "host", "host")
        values = list(range(20))
        check(await engine.infer(rows(*values), outputs=["label"]), values, ["label"])


async def test_what_threads_of_a_front_copy():
    async with local.opened(encoder(), device="host", max_rows=2048) as (engine, _, _):
        values = list(range(1500))
        check(await engine.infer(rows(*values), outputs=["hidden"]), values, ["hidden"])


@pytest.mark.parametrize("kind", ["engine", "workers", "pipeline"])
@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            "embedding",
            r"a list of names .* \(hidden, embedding, label\), not 'embedding'",
        ),
        (b"label", "must be 'host' or 'device', or a list of names"),
        (None, "must be 'host' or 'device', or a list of names .* not None"),
        ([["label"]], "must be 'host' or 'device', or a list of names"),
        ([], "outputs names none. Name some of the model's outputs: hidden, embedding, label"),
        (["label", "logits"], "unknown output 'logits'; the model's outputs: hidden, embedding, label"),
        ([1], "unknown output 1"),
    ],
)
async def test_what_names_no_outputs_is_refused_before_it_is_queued(kind, outputs, says):
    async with local.opened(encoder(), device="host") as (isolated, direct, _):
        engine = isolated if kind == "workers" else direct
        if kind == "pipeline":
            engine = Pipeline(direct.infer, inputs=direct.inputs, outputs=direct.outputs)
        for call in (engine.infer, engine.submit):
            with pytest.raises(InputError, match=says):
                await call(rows(1), outputs=outputs)
        assert engine.statistics().submitted == 0
        await engine.aclose()


async def test_a_text_that_is_the_default_by_value_alone():
    async with asynctrt.open(encoder()) as engine:
        check(await engine.infer(rows(1), outputs=str(np.str_("host"))), [1], ALL)


async def test_a_pipeline_answers_with_what_is_named():
    async with asynctrt.open(encoder()) as engine:

        async def embed(given):
            return await engine.infer(given, outputs=["embedding", "label"])

        kept = [spec for spec in engine.outputs if spec.name != "hidden"]
        async with Pipeline(embed, inputs=engine.inputs, outputs=kept) as pipeline:
            check(await pipeline.infer(rows(3), outputs=["label"]), [3], ["label"])
            check(await pipeline.submit(rows(3, 4)), [3, 4], ["embedding", "label"])
            with pytest.raises(UsageError, match="on the host"):
                pipeline.submit(rows(3), outputs="device")


@asynccontextmanager
async def asking(protocol, server):
    """Yield what sends rows to the model ``encoder``, and returns the arrays that were asked for by name."""
    if protocol in ("http", "grpc"):
        triton = triton_http if protocol == "http" else triton_grpc
        url = server.grpc_target if protocol == "grpc" else "{}:{}".format(*address(server))

        async def infer(array, names):
            given = triton.InferInput("x", list(array.shape), "FP32")
            given.set_data_from_numpy(array)
            wanted = [triton.InferRequestedOutput(name) for name in names]
            result = await one.infer("encoder", [given], outputs=wanted)
            return {name: result.as_numpy(name) for name in names}

        async with triton.InferenceServerClient(url) as one:
            yield infer
    else:
        async with client.connect(server.http_url.replace("http", "ws", 1) + "/v2/ws", proxy=None) as one:
            yield lambda array, names: one.infer("encoder", {"x": array}, outputs=names)


@pytest.mark.parametrize("protocol", ["http", "grpc", "websocket"])
async def test_a_server_has_only_that_copied_which_its_clients_name(protocol):
    device = Recording()
    settings = {"engine": {"device": device, "max_rows": 4, "contexts": 1}, "grpc": protocol == "grpc"}
    async with serving({"encoder": encoder()}, **settings) as server, asking(protocol, server) as infer:
        device.copied_out.clear()
        assert (await infer(rows(3, 4), ["label"]))["label"].tolist() == [3, 4]
        assert device.copied_out == [2 * LABEL]
        values = list(range(7))  # In two batches.
        found = await infer(rows(*values), ["embedding", "label"])
        np.testing.assert_array_equal(found["embedding"], 2 * rows(*values))
        assert found["label"].tolist() == values
        assert device.copied_out[1:] == [4 * EMBEDDING, 4 * LABEL, 3 * EMBEDDING, 3 * LABEL]
        both = await asyncio.gather(infer(rows(1), ALL), infer(rows(2), ["embedding"]))
        assert both[0]["hidden"].shape == (1, 1024)
        np.testing.assert_array_equal(both[1]["embedding"], 2 * rows(2))


async def test_the_parts_in_which_a_request_waits_name_the_same():
    device = HeldRecording()
    settings = {"engine": {"device": device, "max_rows": 8, "contexts": 1}}
    async with serving({"encoder": encoder()}, **settings) as server, asking("http", server) as infer:
        device.copied_out.clear()
        values = list(range(200))
        large = asyncio.create_task(infer(rows(*values), ["label"]))
        await until(lambda: server.repository.find("encoder").admission.gate.waiting)
        device.open()
        assert (await large)["label"].tolist() == values
        assert device.copied_out == [8 * LABEL] * 25
