"""Rows of different requests share batches only if their answers do not depend on one another."""

import asyncio
import logging

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

import asynctrt
from asynctrt import FunctionModel, ModelError, OptionsError, TensorSpec
from asynctrt.devices.host import HostDevice
from tests.contract.devices import Subject
from tests.models import double_onnx, mixed_onnx, node, refusing_onnx, rows, save, sequence_onnx

pytestmark = pytest.mark.anyio

FLOAT = TensorProto.FLOAT
AXIS_0 = ("axis", np.array([0], np.int64))
PAIRS = ("pairs", np.array([-1, 2, 4], np.int64))
BACK = ("back", np.array([-1, 4], np.int64))

DEPENDENT = {
    # Nodes, initialisers.
    "softmax over rows": ([node("Softmax", "x", "y", axis=0)], ()),
    "sum of earlier rows": ([node("CumSum", "x zero", "y")], [("zero", np.array(0))]),
    "sum of later rows": ([node("CumSum", "x zero", "y", reverse=1)], [("zero", np.array(0))]),
    "mean of all rows": (
        [node("ReduceMean", "x", "mean", axes=[0]), node("Sub", "x mean", "y")],
        (),
    ),
    "a little of the mean": (
        [
            node("ReduceMean", "x", "mean", axes=[0]),
            node("Mul", "mean part", "some"),
            node("Add", "x some", "y"),
        ],
        [("part", np.float32(0.01))],
    ),
    "rows in pairs": ([node("Reshape", "x pairs", "z"), node("Reshape", "z back", "y")], [PAIRS, BACK]),
    "one scale for all": (
        [
            node("DynamicQuantizeLinear", "x", "q scale zero"),
            node("DequantizeLinear", "q scale zero", "y"),
        ],
        (),
    ),
    "how many rows": (
        [
            node("Shape", "x", "shape"),
            node("Cast", "shape", "f", to=FLOAT),
            node("Gather", "f zero", "n"),
            node("Mul", "x n", "y"),
        ],
        [("zero", np.array(0))],
    ),
}


def row_model(path, nodes, weights=(), rows="n"):
    kind = FLOAT, [rows, 4]
    return save(path, nodes, [("x", *kind)], [("y", *kind)], weights)


@pytest.mark.parametrize("name", DEPENDENT)
async def test_requests_are_kept_apart_if_rows_see_each_other(name, tmp_path, caplog):
    path = row_model(tmp_path / "model.onnx", *DEPENDENT[name])
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((count, 4)).astype(np.float32) for count in (2, 4, 2, 6) * 4]
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    async with asynctrt.open(path) as engine:
        assert not engine.batching.is_on
        answers = await asyncio.gather(*[engine.infer(batch) for batch in batches])
    for batch, answer in zip(batches, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], session.run(None, {"x": batch})[0])
        assert answer.batch_rows == 1
    [said] = [record.getMessage() for record in caplog.records if "runs alone" in record.getMessage()]
    assert engine.batching.reason in said


@pytest.mark.parametrize("make", [double_onnx, mixed_onnx, sequence_onnx])
async def test_rows_that_are_independent_share_batches(make, tmp_path, caplog):
    async with asynctrt.open(make(tmp_path / "model.onnx")) as engine:
        assert engine.batching.is_on
        assert engine.batching.probe_ns > 0
        assert engine.statistics().batches == 0  # What was tried is no request's.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_output_that_has_one_row_by_chance_is_found_out(tmp_path):
    """The model takes one picture at a time, and tells of each eight columns: of one if there are eight."""
    slices = {"start": [7], "end": [1 << 20], "axis": [1], "step": [8]}
    nodes = node("Slice", "x start end axis step", "some"), node("Transpose", "some", "y", perm=[1, 0])
    weights = [(name, np.array(value)) for name, value in slices.items()]
    x, y = ("x", FLOAT, [1, "width"]), ("y", FLOAT, [None, "n"])
    path = save(tmp_path / "m.onnx", nodes, [x], [y], weights)
    widths = (8, 16, 40)
    async with asynctrt.open(path) as engine:
        assert not engine.batching.is_on
        pictures = [np.arange(width, dtype=np.float32)[None] for width in widths]
        answers = await asyncio.gather(*map(engine.infer, pictures))
    for picture, answer in zip(pictures, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], picture[:, 7::8].T)


async def test_a_model_may_be_made_to_batch_and_what_was_seen_is_said(tmp_path, caplog):
    path = row_model(tmp_path / "model.onnx", *DEPENDENT["softmax over rows"])
    async with asynctrt.open(path, batching="on") as engine:
        assert engine.batching.is_on
        [first, _] = await asyncio.gather(engine.infer(rows(1)), engine.infer(rows(2)))
        assert first.batch_rows == 2
    assert "see each other" in caplog.text


async def test_batching_can_be_off_for_any_model(tmp_path):
    async with asynctrt.open(double_onnx(tmp_path / "double.onnx"), batching="off") as engine:
        answers = await asyncio.gather(*[engine.infer(rows(*range(count))) for count in (1, 5, 100, 3)])
        assert [answer.batches for answer in answers] == [1] * 4
        assert [len(answer["output"]) for answer in answers] == [1, 5, 100, 3]
        assert not engine.batching.is_on
        assert engine.max_rows == 1


async def test_shapes_that_forbid_it_are_an_error_if_it_must_batch(tmp_path):
    path = save(
        tmp_path / "table.onnx",
        [node("Gather", "table ids", "y")],
        [("ids", TensorProto.INT64, ["n"]), ("table", FLOAT, [3, 4])],
        [("y", FLOAT, ["n", 4])],
    )
    with pytest.raises(ModelError, match="do not have their rows on one axis.*shared which"):
        await asynctrt.open(path, batching="on")
    async with asynctrt.open(path) as engine:
        answer = await engine.infer({"ids": np.array([2, 0]), "table": rows(1, 2, 3)})
        np.testing.assert_array_equal(answer["y"], rows(3, 1))


async def test_a_fixed_batch_of_one_opens_by_itself_and_splits_what_has_more(tmp_path):
    path = double_onnx(tmp_path / "double.onnx", rows=1)
    async with asynctrt.open(path) as engine:
        assert engine.max_rows == 1
        answer = await engine.infer(rows(1, 2, 3))
        np.testing.assert_array_equal(answer["output"], 2 * rows(1, 2, 3))
        assert answer.batches == 3


async def test_another_fixed_batch_takes_requests_of_its_size_or_fills_batches(tmp_path):
    path = double_onnx(tmp_path / "double.onnx", rows=4)
    async with asynctrt.open(path) as engine:
        assert "max_rows=4" in engine.batching.reason
        np.testing.assert_array_equal((await engine.infer(rows(1, 2, 3, 4)))["output"], 2 * rows(1, 2, 3, 4))
        with pytest.raises(asynctrt.InputError, match=r"takes shape \(4, 4\)"):
            await engine.infer(rows(1))
    async with asynctrt.open(path, max_rows=4) as engine:
        assert engine.batching.is_on
        np.testing.assert_array_equal((await engine.infer(rows(1)))["output"], 2 * rows(1))


async def test_an_output_of_another_shape_than_declared_is_given_as_it_is(tmp_path):
    """As exporters declare a batch where there are time steps: no request fails."""
    path = save(
        tmp_path / "steps.onnx",
        [node("Transpose", "x", "y", perm=[1, 0])],
        [("x", FLOAT, [1, "w"])],
        [("y", FLOAT, [1, "steps"])],
    )
    async with asynctrt.open(path) as engine:
        sent = [np.arange(width, dtype=np.float32)[None] for width in (3, 5, 8, 5)]
        answers = await asyncio.gather(*[engine.infer(one) for one in sent])
        for one, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer["y"], one.T)


async def test_an_output_whose_rows_have_another_name_is_found_to_have_rows(tmp_path):
    path = save(
        tmp_path / "top.onnx",
        [node("TopK", "x two", "v i", axis=1)],
        [("x", FLOAT, ["N", "S"])],
        [("v", FLOAT, ["v0", "v1"]), ("i", TensorProto.INT64, ["i0", "i1"])],
        [("two", np.array([2]))],
    )
    async with asynctrt.open(path) as engine:
        assert engine.batching.is_on


async def test_what_draws_random_numbers_is_not_judged_by_them(tmp_path):
    path = row_model(tmp_path / "random.onnx", [node("RandomUniformLike", "x", "r"), node("Add", "x r", "y")])
    async with asynctrt.open(path) as engine:
        assert engine.batching.is_on
        assert "run to run" in engine.batching.reason


async def test_what_made_up_rows_cannot_be_run_through_is_trusted_by_its_names(tmp_path):
    """An index that no made-up value hits: the name of the first axis decides."""
    path = refusing_onnx(tmp_path / "refusing.onnx")
    async with asynctrt.open(path) as engine:
        assert engine.batching.is_on
        assert "could not be run" in engine.batching.reason
        np.testing.assert_array_equal((await engine.infer(np.array([1001, 1002])))["y"], [1, 2])


@pytest.mark.parametrize("batching", ["auto", "probe"])
async def test_functions_are_tried_only_if_that_is_asked_for(batching):
    calls = []

    def centred(inputs):
        calls.append(len(inputs["x"]))
        return inputs["x"] - inputs["x"].mean(axis=0)

    spec = TensorSpec("x", "float32", (4,))
    model = FunctionModel(centred, inputs=spec, outputs=TensorSpec("y", "float32", (4,)))
    async with asynctrt.open(model, batching=batching) as engine:
        assert engine.batching.is_on is (batching == "auto")
        assert bool(calls) is (batching == "probe")
        sent = [rows(1, 2), rows(5, 9, 7)]
        answers = await asyncio.gather(*map(engine.infer, sent))
        if batching == "probe":
            for one, answer in zip(sent, answers, strict=True):
                np.testing.assert_array_equal(answer["y"], one - one.mean(axis=0))


async def test_requests_that_run_alone_are_queued_as_ever(tmp_path):
    """Priorities, deadlines, cancelling and the bound of the queue hold for them too."""
    device = asynctrt.testing.LatchDevice()
    async with asynctrt.open(
        double_onnx(tmp_path / "double.onnx"),
        device=device,
        batching="off",
        contexts=1,
        max_queue_rows=3,
        max_rows=1,
    ) as engine:
        first = asyncio.ensure_future(engine.infer(rows(0)))
        await device.wait_held()
        late = asyncio.ensure_future(engine.infer(rows(1, 2), timeout=0.01))
        low = asyncio.ensure_future(engine.infer(rows(3)))
        gone = asyncio.ensure_future(engine.infer(rows(4)))
        await asyncio.sleep(0)
        with pytest.raises(asynctrt.QueueFullError):
            await engine.infer(rows(5))
        gone.cancel()
        with pytest.raises(asynctrt.DeadlineError):
            await late
        high = asyncio.ensure_future(engine.infer(rows(6), priority=2))
        await asyncio.sleep(0)
        done = []
        low.add_done_callback(lambda _: done.append("low"))
        high.add_done_callback(lambda _: done.append("high"))
        device.open()
        for sent, answer in ((0, first), (3, low), (6, high)):
            np.testing.assert_array_equal((await answer)["output"], 2 * rows(sent))
        await asyncio.sleep(0)
        assert done == ["high", "low"]
        assert engine.statistics().cancelled == 1


# Padding


def recurrent_onnx(path, *, has_lengths=False):
    """A GRU that gives its last state, which padding changes unless it is told the lengths."""
    rng = np.random.default_rng(0)
    weights = [
        ("W", rng.standard_normal((1, 12, 2)).astype(np.float32)),
        ("R", rng.standard_normal((1, 12, 4)).astype(np.float32)),
        ("first", np.array([0])),
    ]
    inputs = "t W R  lengths" if has_lengths else "t W R"
    nodes = [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("GRU", inputs, "all last", hidden_size=4),
        node("Squeeze", "last first", "y"),
    ]
    if has_lengths:
        nodes[1].input[3:] = ["", "lengths"]
    given = [("x", FLOAT, ["n", "length", 2])] + [("lengths", TensorProto.INT32, ["n"])] * has_lengths
    return save(path, nodes, given, [("y", FLOAT, ["n", 4])], weights)


async def test_padding_that_changes_answers_is_refused(tmp_path):
    with pytest.raises(OptionsError, match="padding changes the answers of 'gru'.*has no input for a mask"):
        await asynctrt.open(recurrent_onnx(tmp_path / "gru.onnx"), pad={"length": (8, 16)})


async def test_padding_is_refused_with_the_input_that_would_make_it_harmless(tmp_path):
    path = recurrent_onnx(tmp_path / "gru.onnx", has_lengths=True)
    sent = [np.random.default_rng(length).random((1, length, 2), np.float32) for length in (3, 8, 11)]
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    async with asynctrt.open(path, pad={"length": (8, 16)}, pad_with={"lengths": "length"}) as engine:
        answers = await asyncio.gather(*map(engine.infer, sent))
    for one, answer in zip(sent, answers, strict=True):
        lengths = np.array([one.shape[1]], np.int32)
        right = session.run(None, {"x": one, "lengths": lengths})[0]
        np.testing.assert_allclose(answer["y"], right, atol=1e-6)


async def test_padding_that_changes_nothing_is_taken(tmp_path):
    async with asynctrt.open(sequence_onnx(tmp_path / "sequence.onnx"), pad={"length": (8, 16)}) as engine:
        answer = await engine.infer(np.ones((1, 5), np.float32))
        assert answer["doubled"].shape == (1, 5)


# Plans


async def test_a_plan_is_tried_and_can_run_requests_alone():
    subject = Subject(HostDevice(in_place="never"))
    async with subject.open() as engine:
        assert engine.batching.probe_ns > 0
        assert engine.batching.is_on
    async with subject.open(batching="off") as engine:
        assert not engine.batching.is_on
        for number in (1, 2, 4):
            sent = rows(*range(number))
            expected = subject.spec.expected({"input": sent})
            answer = await engine.infer(sent)
            np.testing.assert_array_equal(answer["output"], expected["output"])
            assert answer.batches == 1
