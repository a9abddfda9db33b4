"""Sizes to pad to that the engine chooses, powers of two: answers stay right."""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import numpy as np
import pytest

import asynctrt
import asynctrt.client
from asynctrt.backends.function import FunctionModel
from asynctrt.core.padded_inputs import PaddedInputCheck, front_check
from asynctrt.devices.host import HostDevice
from asynctrt.errors import InputError, OptionsError, TooLargeError
from asynctrt.kserve.json_codec import JsonCodec
from asynctrt.options import Options
from asynctrt.runtime.pad_sizes import Limits, Padding
from asynctrt.serving.command import configure, read_config
from asynctrt.tensors import TensorSpec
from tests.helpers import WAIT_S
from tests.models import sequence_onnx
from tests.runtime.test_pad_sizes import COUNT, IDS, MASK, TWO, ids
from tests.serving.support import ask, serving
from tests.workers.models import masked

pytestmark = pytest.mark.anyio

MASKED = {"mask": "mask", "count": "length"}


def padding(pad, pad_with=None, inputs=(IDS, MASK, COUNT), limits=None):
    return Padding.of("model", inputs, (), Options(pad=pad, pad_with=pad_with), limits or Limits())


def seen(sizes):
    """A model that tells the size to which its rows were padded, and collects it."""

    def run(inputs):
        sizes.append(inputs["x"].shape[1])
        total = inputs["x"].sum(1)
        return {"total": total, "padded": np.full_like(total, inputs["x"].shape[1]), "same": inputs["x"]}

    return FunctionModel(
        run,
        inputs=TensorSpec("x", "int64", ("length",)),
        outputs=[
            TensorSpec("total", "int64"),
            TensorSpec("padded", "int64"),
            TensorSpec("same", "int64", ("length",)),
        ],
        name="seen",
    )


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("auto", "auto"),
        (["auto"], "auto"),
        (" auto : 512", "auto:512"),
        ({"n": "auto"}, {"n": "auto"}),
        (["n=auto:8", "m=4,2"], {"n": "auto:8", "m": (2, 4)}),
        (["ids.1=mask.1=auto"], {"ids.1=mask.1": "auto"}),
    ],
)
def test_it_may_be_written_in_several_ways(given, kept):
    assert Options(pad=given).pad == kept


@pytest.mark.parametrize(
    "given",
    ["auto:", "auto:0", "auto:-4", "auto:x", "automatic", {"n": "auto:"}, ["auto", "auto"], {"n": "aut"}],
)
def test_what_is_no_way_to_write_it(given):
    with pytest.raises(OptionsError, match="pad must be sizes"):
        Options(pad=given)


def test_what_depends_on_others_is_not_deterministic():
    for pad in ("auto", {"n": "auto", "m": 4}):
        with pytest.raises(OptionsError, match="depends on other requests"):
            Options(pad=pad, batching="deterministic")
    Options(pad={"n": 4}, batching="deterministic")


@pytest.mark.parametrize(
    ("pad", "inputs", "limits", "says"),
    [
        ("auto", [COUNT], None, "and 'model' has none besides its rows"),
        ({"lenght": "auto"}, [IDS], None, "the dimension 'lenght', but the dimensions"),
        (
            {"length": "auto:9"},
            [IDS],
            Limits(lambda _: [(10, 20)]),
            "'auto:9' for 'length', .* takes 10 to 20",
        ),
        (
            "auto",
            [TensorSpec("a", "int64", ("a.1",)), TensorSpec("b", "int64", ("b.1",))],
            None,
            r"which of 'a.1', 'b.1' are the same.*pad={'a.1=b.1': 'auto'}",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_when_it_is_opened(pad, inputs, limits, says):
    with pytest.raises(OptionsError, match=says):
        padding(pad, inputs=inputs, limits=limits)


def test_a_length_has_to_fit_into_its_dtype():
    inputs, pad_with = (IDS, TensorSpec("count", "int8", (1,))), {"count": "length"}
    found = padding("auto", pad_with, inputs)
    assert found.key_of({"length": 100}).shape == (("length", 127),)
    with pytest.raises(InputError, match=r"pads to at most 127, as pad={'length': 'auto'} and the model say"):
        found.key_of({"length": 128})
    with pytest.raises(OptionsError, match="up to 500, and its dtype int8"):
        padding("auto:500", pad_with, inputs)


def test_sizes_are_within_the_profiles():
    ranges = {"n": [(8, 20), (40, 100)], "m": [(1, 30), (40, 90)]}
    found = padding(
        {"n=m": "auto:80"}, inputs=[TensorSpec("x", "int8", ("n", "m"))], limits=Limits(ranges.get)
    )
    sizes = found.chosen["n", "m"]
    assert [sizes.rounded(size) for size in (1, 17, 21, 64, 70, 81)] == [8, 20, 40, 64, 80, None]


def test_two_dimensions_that_no_profile_takes_as_they_are_padded():
    """Each is within one of the profiles, but not in the same."""

    def check_key(key):
        sizes = dict(key.shape)
        if sizes["n"] > 8 and sizes["m"] > 8:
            raise InputError("no profile")

    inputs = [TensorSpec("x", "int8", ("n", "m"))]
    ranges = {"n": [(1, 8), (1, 99)], "m": [(1, 99), (1, 8)]}
    found = padding("auto", inputs=inputs, limits=Limits(ranges.get))
    check = PaddedInputCheck(inputs, found, check_key=check_key)
    keys = [dict(check.validate(np.zeros((1, *dims), np.int8))[2].shape) for dims in ((9, 3), (9, 8))]
    assert keys == [{"n": 16, "m": 4}, {"n": 16, "m": 8}]
    with pytest.raises(InputError, match="no profile"):
        check.validate(np.zeros((1, 50, 30), np.int8))


async def test_answers_stay_right_whatever_lengths_come():
    ran, rng = [], random.Random(0)
    async with asyncio.timeout(WAIT_S), asynctrt.open(seen(ran), pad={"length": "auto:700"}) as engine:
        for most in (20, 200, 20, 700):
            for _ in range(12):
                calls = [ids(rng.randint(1, 3), rng.randint(1, most)) for _ in range(32)]
                answers = await asyncio.gather(*map(engine.infer, calls))
                for call, answer in zip(calls, answers, strict=True):
                    np.testing.assert_array_equal(answer["total"], call.sum(1))
                    np.testing.assert_array_equal(answer["same"], call)
                    assert (answer["padded"] >= call.shape[1]).all()
        assert max(ran) <= 700
        with pytest.raises(InputError, match=r"size 701 on axis 1 \('length'\), .* at most 700"):
            await engine.infer(ids(1, 701))


async def test_all_dimensions_that_vary():
    """Images of all sizes."""
    model = FunctionModel(
        lambda inputs: {"sum": inputs["x"].sum((1, 2)), "same": inputs["x"]},
        inputs=TensorSpec("x", "float64", ("height", "width")),
        outputs=[TensorSpec("sum", "float64"), TensorSpec("same", "float64", ("height", "width"))],
    )
    rng = np.random.default_rng(0)
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, pad="auto") as engine:
        for _ in range(10):
            calls = [rng.random((1, rng.integers(30, 50), rng.integers(70, 110))) for _ in range(32)]
            for call, answer in zip(calls, await asyncio.gather(*map(engine.infer, calls)), strict=True):
                np.testing.assert_allclose(answer["sum"], call.sum((1, 2)))
                np.testing.assert_array_equal(answer["same"], call)


async def test_masks_and_lengths():
    async with asyncio.timeout(WAIT_S), asynctrt.open(masked(), pad="auto", pad_with=MASKED) as engine:
        for start in range(0, 30, 10):
            calls = [ids(1 + n % 2, 1 + start + n % 17) for n in range(100)]
            for call, answer in zip(calls, await asyncio.gather(*map(engine.infer, calls)), strict=True):
                np.testing.assert_array_equal(answer["sum"], call.sum(1))
                np.testing.assert_array_equal(answer["length"], np.full((len(call), 1), call.shape[1]))
                np.testing.assert_array_equal(answer["same"], call)
                np.testing.assert_array_equal(answer["rest"], np.zeros(len(call)))


async def test_batches_of_a_fixed_size(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx", rows=8)
    async with asyncio.timeout(WAIT_S), asynctrt.open(path, pad="auto", max_rows=8) as engine:
        for length in (3, 9, 30):
            calls = [np.full((1 + n % 3, length + n % 5), n, np.float32) for n in range(128)]
            for call, answer in zip(calls, await asyncio.gather(*map(engine.infer, calls)), strict=True):
                np.testing.assert_array_equal(answer["doubled"], 2 * call)


async def test_rows_on_the_device_are_run_as_they_are(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx")
    device = HostDevice()
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(path, device=device) as first,
        asynctrt.open(path, device=device, pad="auto") as second,
    ):
        held = (await first.infer(np.ones((2, 3), np.float32), outputs="device"))["doubled"]
        np.testing.assert_array_equal((await second.infer(held))["total"], [6, 6])
        with pytest.raises(InputError, match="outputs='device'"):
            await second.infer(np.ones((1, 4), np.float32), outputs="device")


def test_sizes_that_are_given_are_kept_beside_those_that_are_chosen():
    found = padding({"n": "auto", "m": (4, 8)}, {"mask": "mask"}, TWO)
    check = PaddedInputCheck(TWO, found, import_array=None)
    assert check.validate(np.ones((1, 5, 5), np.float32))[2].shape == (("n", 8), ("m", 8))
    assert check.key_of_dims({"x": (5, 8), "mask": (5,)}).shape == (("n", 5), ("m", 8))
    with pytest.raises(InputError, match="are padded"):
        check.key_of_dims({"x": (5, 5), "mask": (5,)})


def test_a_front_refuses_only_what_it_knows_to_be_too_long():
    options = Options(pad="auto:64", pad_with=MASKED)
    check = front_check("model", (IDS, MASK, COUNT), (), options)
    assert check.validate(ids(2, 3))[2].shape == (("length", 3),)
    with pytest.raises(InputError, match="at most 64"):
        check.validate(ids(1, 65))


def test_a_server_counts_the_bytes_of_what_is_padded():
    request = {
        "inputs": [{"name": "ids", "shape": [1, 9], "datatype": "INT64", "data": [[1] * 9]}],
    }
    body = json.dumps(request).encode()
    for pad, allowed in (("auto", 16 * 8), ({"length": "auto"}, 16 * 8), (None, 9 * 8)):
        for more, is_refused in ((0, False), (-1, True)):
            codec = JsonCodec("model", "1", [IDS], [IDS], answer_max=allowed + more, pad=pad)
            if is_refused:
                with pytest.raises(TooLargeError, match="bytes"):
                    codec.decode(body, len(body))
            else:
                codec.decode(body, len(body))


def test_in_a_file_and_as_a_flag(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text(
        'pad = "auto"\n[[models]]\npath = "a.onnx"\n'
        '[[models]]\npath = "b.onnx"\npad = {text = "auto:512", side = [32, 64]}\n'
    )
    models = configure({"models": ["c.onnx"], "pad": ["text=auto"]}, read_config(path)).models
    found = [Options.from_settings(None, dict(model.settings)).pad for model in models]
    assert found == [{"text": "auto"}, {"text": "auto:512", "side": (32, 64)}, {"text": "auto"}]
    models = configure({}, read_config(path)).models
    assert Options.from_settings(None, dict(models[0].settings)).pad == "auto"


@asynccontextmanager
async def in_a_worker(**settings):
    async with (
        asyncio.timeout(WAIT_S),
        asynctrt.open(
            "tests.workers.models:masked", isolation="process", pad_with=MASKED, **settings
        ) as engine,
    ):
        yield engine


@pytest.mark.tier2
async def test_in_a_worker_process():
    async with in_a_worker(pad="auto:64") as engine:
        for _ in range(8):
            calls = [ids(1 + n % 2, 1 + n % 40) for n in range(100)]
            for call, answer in zip(calls, await asyncio.gather(*map(engine.infer, calls)), strict=True):
                np.testing.assert_array_equal(answer["sum"], call.sum(1))
                np.testing.assert_array_equal(answer["same"], call)
        with pytest.raises(InputError, match="at most 64"):
            await engine.infer(ids(1, 65))


@pytest.mark.tier2
async def test_clients_of_a_server():
    settings = {"pad": "auto:64", "pad_with": MASKED}
    async with asyncio.timeout(WAIT_S), serving({"masked": masked()}, engine=settings) as server:
        _, _, body = await ask(server, "/v2/models/masked")
        assert [tensor["shape"] for tensor in json.loads(body)["inputs"]] == [[-1, -1], [-1, -1], [-1, 1]]
        async with asynctrt.client.connect(server.http_url) as client:
            calls = [ids(1, n) for n in range(1, 65)]
            answers = await asyncio.gather(*[client.infer("masked", {"ids": call}) for call in calls])
            for call, answer in zip(calls, answers, strict=True):
                np.testing.assert_array_equal(answer["sum"], call.sum(1))
                np.testing.assert_array_equal(answer["same"], call)
            with pytest.raises(InputError, match="at most 64"):
                await client.infer("masked", {"ids": ids(1, 65)})
