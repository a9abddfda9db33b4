"""Rows of different sizes share batches by default, if padding changes no answer."""

import asyncio
import itertools
import logging
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.core import lengths
from asynctrt.devices.host import HostDevice
from asynctrt.tensors import TensorSpec
from tests.benchmarks.lengths import encoder_onnx
from tests.contract.devices import strict
from tests.core.test_independence import recurrent_onnx
from tests.doubles.tensorrt import EngineSpec, TensorIO
from tests.helpers import WAIT_S
from tests.models import node, save, sequence_onnx

pytestmark = pytest.mark.anyio

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
TEXT = ["batch", "sequence"]
ONE = ("one", np.array([1], np.int64))


@pytest.fixture(autouse=True)
def _every_batch_takes_a_millisecond(monkeypatch):
    """Sharing a batch always pays then, however busy the machine is while the costs are measured."""
    monkeypatch.setattr(lengths, "clock", SimpleNamespace(now_ns=itertools.count(0, 1_000_000).__next__))


@pytest.fixture
def encoder(tmp_path):
    return encoder_onnx(tmp_path / "encoder.onnx", 8)


def texts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"input_ids": rng.integers(1, 1000, (1, size)), "attention_mask": np.ones((1, size), np.int64)}
        for size in lengths
    ]


async def same_as_alone(path, sent, engine, **tolerance):
    """Ask for all at once, and compare each answer with that of ONNX Runtime to the same request."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    answers = await asyncio.gather(*map(engine.infer, sent))
    for one, answer in zip(sent, answers, strict=True):
        for spec, right in zip(session.get_outputs(), session.run(None, one), strict=True):
            assert answer[spec.name].shape == right.shape
            np.testing.assert_allclose(answer[spec.name], right, **(tolerance or {"atol": 1e-4}))


async def test_texts_of_all_lengths_share_batches_by_default(encoder, caplog):
    caplog.set_level(logging.INFO, "asynctrt")
    async with asyncio.timeout(WAIT_S), asynctrt.open(encoder, contexts=1) as engine:
        assert "padding sequence changed no answer" in engine.batching.lengths
        assert engine.batching.lengths in str(engine.batching)
        assert [text for text in caplog.messages if engine.batching.lengths in text]
        await same_as_alone(encoder, texts(*range(33, 64), 5, 100), engine)
        assert engine.statistics().batches <= 10, "one for each size that they are padded to, at most"
        with pytest.raises(asynctrt.AsynctrtError):
            await engine.infer({"input_ids": np.ones((1, 3), int), "attention_mask": np.ones((1, 4), int)})


async def test_it_can_be_turned_off(encoder):
    async with asyncio.timeout(WAIT_S), asynctrt.open(encoder, contexts=1, pad="off") as engine:
        assert engine.batching.lengths == ""
        sent = texts(*range(33, 64))
        await same_as_alone(encoder, sent, engine)
        assert engine.statistics().batches == len(sent)


@pytest.mark.parametrize("seed", range(8))
async def test_answers_are_those_to_each_row_alone(encoder, seed):
    rng = np.random.default_rng(seed)
    async with asyncio.timeout(WAIT_S), asynctrt.open(encoder) as engine:
        for _ in range(8):
            sent = texts(*rng.integers(1, 200, rng.integers(1, 50)), seed=seed)
            await same_as_alone(encoder, sent, engine)


async def test_an_output_whose_dimension_has_another_name_is_cut_back(tmp_path):
    nodes = [
        node("Greater", "x zero", "is"),
        node("Cast", "is", "f", to=FLOAT),
        node("ReduceSum", "f one", "y", keepdims=0),
        node("Identity", "x", "z"),
    ]
    outputs = [("y", FLOAT, ["n"]), ("z", FLOAT, ["n", "other"])]
    weights = [ONE, ("zero", np.float32(0))]
    path = save(tmp_path / "m.onnx", nodes, [("x", FLOAT, ["n", "length"])], outputs, weights)
    sent = [{"x": np.random.default_rng(size).random((1, size), np.float32)} for size in (3, 30, 17, 5)]
    async with asyncio.timeout(WAIT_S), asynctrt.open(path) as engine:
        assert "share batches: padding length" in engine.batching.lengths
        await same_as_alone(path, sent, engine)


def ids_model(path, nodes, weights=(), out=("batch", 4), masked=True):
    """A model of token ids and a mask: ``x`` has the words of each, four numbers long."""
    rng = np.random.default_rng(0)
    words = ("words", rng.standard_normal((1000, 4)).astype(np.float32))
    inputs = [("input_ids", INT, TEXT)] + [("attention_mask", INT, TEXT)] * masked
    return save(
        path,
        [node("Gather", "words input_ids", "x"), *nodes],
        inputs,
        [("y", FLOAT, list(out))],
        [words, *weights],
    )


MASKED_MEAN = (
    node("Cast", "attention_mask", "m", to=FLOAT),
    node("Unsqueeze", "m two", "m3"),
    node("Mul", "x m3", "shown"),
    node("ReduceSum", "shown one", "sum", keepdims=0),
    node("ReduceSum", "m3 one", "count", keepdims=0),
)
TWO = ("two", np.array([2], np.int64))

SEEING = {
    "the mean of all": ([node("ReduceMean", "x", "y", axes=[1], keepdims=0)], ()),
    "the largest of all": ([node("ReduceMax", "x", "y", axes=[1], keepdims=0)], ()),
    "the mean, with a mask that is hardly used": (
        [
            node("Cast", "attention_mask", "m", to=FLOAT),
            node("ReduceSum", "m one", "count", keepdims=1),
            node("Mul", "count zero", "nothing"),
            node("ReduceMean", "x", "mean", axes=[1], keepdims=0),
            node("Add", "mean nothing", "y"),
        ],
        (ONE, ("zero", np.float32(0))),
    ),
    "the last token": (
        [node("Gather", "x last", "y", axis=1)],
        (("last", np.array(-1, np.int64)),),
    ),
    "only much padding": (
        [
            *MASKED_MEAN,
            node("Div", "sum count", "mean"),
            node("Shape", "input_ids", "shape"),
            node("Gather", "shape at", "size"),
            node("Cast", "size", "sizef", to=FLOAT),
            node("ReduceSum", "m one", "shownf", keepdims=1),
            node("Sub", "sizef shownf", "padding"),
            node("Sub", "padding fifty", "over"),
            node("Relu", "over", "much"),
            node("Add", "mean much", "y"),
        ],
        (ONE, TWO, ("at", np.array(1, np.int64)), ("fifty", np.float32(50))),
    ),
}


@pytest.mark.parametrize("name", SEEING)
async def test_models_that_see_their_padding_keep_lengths_apart(name, tmp_path, caplog):
    nodes, weights = SEEING[name]
    path = ids_model(tmp_path / "model.onnx", nodes, weights)
    async with asyncio.timeout(WAIT_S), asynctrt.open(path, contexts=1) as engine:
        assert "do not share batches" in engine.batching.lengths
        await same_as_alone(path, texts(3, 5, 7, 7, 100, 64), engine)
    [said] = [text for text in caplog.messages if "do not share batches" in text]
    assert "small batches" in said
    assert "pad='off'" in said


async def test_a_mean_over_the_mask_does_not_see_padding(tmp_path):
    path = ids_model(tmp_path / "m.onnx", [*MASKED_MEAN, node("Div", "sum count", "y")], (ONE, TWO))
    async with asyncio.timeout(WAIT_S), asynctrt.open(path, contexts=1) as engine:
        assert "share batches: padding" in engine.batching.lengths
        await same_as_alone(path, texts(*range(65, 128)), engine)
        assert engine.statistics().batches < 5


async def test_sums_see_none_of_it_where_values_are_padded_with_zeros(tmp_path):
    given = [("x", FLOAT, ["n", "length", 2])]
    nodes = [node("ReduceSum", "x one", "y", keepdims=0)]
    path = save(tmp_path / "m.onnx", nodes, given, [("y", FLOAT, ["n", 2])], [ONE])
    async with asyncio.timeout(WAIT_S), asynctrt.open(path) as engine:
        assert "share batches: padding length" in engine.batching.lengths


async def test_a_largest_value_is_seen_though_most_rows_do_not_show_it(tmp_path):
    """Zeros are larger than all of a row whose values are negative, and than those of few others."""
    given = [("x", FLOAT, ["n", "length", 2])]
    nodes = [node("ReduceMax", "x", "y", axes=[1], keepdims=0)]
    path = save(tmp_path / "m.onnx", nodes, given, [("y", FLOAT, ["n", 2])])
    async with asyncio.timeout(WAIT_S), asynctrt.open(path) as engine:
        assert "do not share batches" in engine.batching.lengths


async def test_recurrent_networks_and_pictures_see_padding(tmp_path):
    kernel = ("kernel", np.ones((1, 3, 3, 3), np.float32)), ("bias", np.ones(1, np.float32))
    nodes = [
        node("Conv", "x kernel bias", "c", pads=[1, 1, 1, 1]),
        node("Conv", "c k2", "y", pads=[1, 1, 1, 1]),
    ]
    picture = save(
        tmp_path / "picture.onnx",
        nodes,
        [("x", FLOAT, ["n", 3, "height", "width"])],
        [("y", FLOAT, ["n", 1, "height", "width"])],
        [*kernel, ("k2", np.ones((1, 1, 3, 3), np.float32))],
    )
    for path in (picture, recurrent_onnx(tmp_path / "gru.onnx")):
        async with asyncio.timeout(WAIT_S), asynctrt.open(path) as engine:
            assert "do not share batches" in engine.batching.lengths


async def test_no_row_is_padded_beyond_what_is_known_to_run(tmp_path):
    """A table of 77 positions, as of a model that shortens its texts to that."""
    nodes = [
        node("Shape", "input_ids", "shape"),
        node("Gather", "shape at", "size"),
        node("Range", "zero size step", "positions"),
        node("Gather", "table positions", "place"),
        node("Add", "x place", "y"),
    ]
    table = ("table", np.random.default_rng(1).standard_normal((77, 4)).astype(np.float32))
    weights = [table, *[(name, np.array(value)) for name, value in (("at", 1), ("zero", 0), ("step", 1))]]
    path = ids_model(tmp_path / "m.onnx", nodes, weights, out=("batch", "sequence", 4), masked=False)
    sent = [{"input_ids": text["input_ids"]} for text in texts(70, 77, 65, 71, 5, 40)]
    async with asyncio.timeout(WAIT_S), asynctrt.open(path) as engine:
        assert "share batches: padding" in engine.batching.lengths
        for _ in range(3):
            await same_as_alone(path, sent, engine)


async def test_nothing_is_said_where_rows_cannot_be_made_up_or_answers_do_not_vary(tmp_path, caplog):
    nodes = [node("Mul", "x zero", "y")]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [("x", FLOAT, ["n", "k"])],
        [("y", FLOAT, ["n", "k"])],
        [("zero", np.float32(0))],
    )
    async with asyncio.timeout(WAIT_S), asynctrt.open(path) as engine:
        assert engine.batching.lengths == ""
    assert not caplog.messages


async def test_all_dimensions_that_vary():
    """Images of all sizes, by a function that may be tried."""
    model = FunctionModel(
        lambda inputs: {"sum": inputs["x"].sum((1, 2)), "same": inputs["x"]},
        inputs=TensorSpec("x", "float64", ("height", "width")),
        outputs=[TensorSpec("sum", "float64"), TensorSpec("same", "float64", ("height", "width"))],
    )
    rng = np.random.default_rng(0)
    async with asyncio.timeout(WAIT_S), asynctrt.open(model, batching="probe", contexts=1) as engine:
        assert "share batches: padding height, width" in engine.batching.lengths
        calls = [rng.random((1, rng.integers(30, 50), rng.integers(70, 110))) for _ in range(64)]
        for call, answer in zip(calls, await asyncio.gather(*map(engine.infer, calls)), strict=True):
            np.testing.assert_allclose(answer["sum"], call.sum((1, 2)))
            np.testing.assert_array_equal(answer["same"], call)
        assert engine.statistics().batches < 32


async def test_rows_longer_than_any_that_was_tried_share_batches(encoder):
    async with asyncio.timeout(WAIT_S), asynctrt.open(encoder, contexts=1) as engine:
        await same_as_alone(encoder, texts(*range(700, 716)), engine)
        assert engine.statistics().batches < 6


async def test_rows_on_the_device_are_run_as_they_are(tmp_path):
    path, device = sequence_onnx(tmp_path / "sequence.onnx"), HostDevice()
    async with asyncio.timeout(WAIT_S), asynctrt.open(path, device=device) as engine:
        assert "share batches: padding length" in engine.batching.lengths
        held = (await engine.infer(np.ones((2, 3), np.float32), outputs="device"))["doubled"]
        np.testing.assert_array_equal((await engine.infer(held))["total"], [6, 6])


async def test_outputs_on_the_device_are_not_padded(encoder):
    one = texts(5)[0]
    async with asyncio.timeout(WAIT_S), asynctrt.open(encoder, device=HostDevice()) as engine:
        held = await engine.infer(one, outputs="device")
        assert held["output"].shape == (1, 5, 8)


RANGE = ((1, 1), (4, 16), (8, 20))
SPEC = EngineSpec(
    inputs=(TensorIO("ids", dims=(-1, -1)), TensorIO("mask", dims=(-1, -1))),
    profiles=({"ids": RANGE, "mask": RANGE},),
)


async def test_a_plan_is_padded_within_its_profile():
    device = HostDevice(in_place="never")
    model = strict(device, SPEC)
    try:
        async with asyncio.timeout(WAIT_S), asynctrt.open(model, device=device, contexts=1) as engine:
            assert "ids.1=mask.1" in engine.batching.lengths
            calls = [np.full((1, size), size, np.float32) for size in range(17, 21)] * 4
            sent = [{"ids": call, "mask": np.ones_like(call)} for call in calls]
            answers = await asyncio.gather(*map(engine.infer, sent))
            for one, answer in zip(sent, answers, strict=True):
                for name, array in SPEC.expected(one).items():
                    np.testing.assert_array_equal(answer[name], array)
            assert engine.statistics().batches < 6
            nothing = np.ones((1, 0), np.float32)
            with pytest.raises(asynctrt.InputError, match="profile"):
                await engine.infer({"ids": nothing, "mask": nothing})
        assert model.flavour.module.violations() == ()
    finally:
        model.close()


@pytest.mark.tier2
async def test_in_workers(encoder):
    async with asyncio.timeout(WAIT_S), asynctrt.open(encoder, isolation="process") as engine:
        assert "share batches: padding" in engine.batching.lengths
        await same_as_alone(encoder, texts(*range(33, 64), 5, 100), engine)
        assert engine.statistics().batches < 20
