"""Where rows are: on another axis, in common, nowhere; and values that are not numbers."""

import asyncio
import gc
import sys

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import asynctrt
from asynctrt import FunctionModel, InputError, ModelError, OptionsError, TensorSpec
from tests.models import double_onnx, node, rows, save

pytestmark = pytest.mark.anyio

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
STATE_AXES = {"state": 1, "stateN": 1}


def voice_onnx(path, samples=3, width=4):
    """As a detector of voices has it: rows, a state with rows on axis 1, and a rate that is a scalar."""
    return save(
        path,
        [
            node("Cast", "sr", "rate", to=FLOAT),
            node("ReduceSum", "state last", "sums", keepdims=0),
            node("ReduceSum", "sums first", "sum", keepdims=0),
            node("Unsqueeze", "sum one", "column"),
            node("Mul", "input rate", "scaled"),
            node("Add", "scaled column", "output"),
            node("Add", "state state", "stateN"),
        ],
        [("input", FLOAT, ["batch", samples]), ("state", FLOAT, [2, "batch", width]), ("sr", INT64, [])],
        [("output", FLOAT, ["batch", samples]), ("stateN", FLOAT, [2, "batch", width])],
        [("last", np.array([2])), ("first", np.array([0])), ("one", np.array([1]))],
    )


def voice_request(rng, count, rate):
    return {
        "input": rng.random((count, 3), np.float32),
        "state": rng.random((2, count, 4), np.float32),
        "sr": np.array(rate),
    }


def direct(path):
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def check(session, request, answer):
    names = [output.name for output in session.get_outputs()]
    for name, right in zip(names, session.run(names, request), strict=True):
        assert answer[name].shape == right.shape
        np.testing.assert_allclose(answer[name], right, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"isolation": "process"}], ids=["here", "worker"])
async def test_rows_on_another_axis_and_inputs_in_common(settings, tmp_path):
    path = voice_onnx(tmp_path / "voice.onnx")
    rng = np.random.default_rng(0)
    # Some have more rows than a batch holds, and are joined on the axis where their rows are.
    requests = [
        voice_request(rng, int(count), rate) for count in rng.integers(1, 12, 40) for rate in (8000, 16000)
    ]
    session = direct(path)
    async with asynctrt.open(
        path, onnx={"batch_axis": STATE_AXES, "shared": {"sr"}}, max_rows=8, **settings
    ) as engine:
        assert engine.batching.is_on
        assert [spec.shape("n") for spec in engine.inputs] == [("n", 3), (2, "n", 4), ()]
        answers = await asyncio.gather(*map(engine.infer, requests))
    for request, answer in zip(requests, answers, strict=True):
        check(session, request, answer)
    assert max(answer.batch_rows for answer in answers) == 8


async def test_requests_share_a_batch_only_if_what_is_in_common_is_equal(tmp_path):
    device = asynctrt.testing.LatchDevice()
    rng = np.random.default_rng(0)
    async with asynctrt.open(
        voice_onnx(tmp_path / "voice.onnx"),
        onnx={"batch_axis": STATE_AXES, "shared": "sr"},
        device=device,
        contexts=1,
    ) as engine:
        first = asyncio.ensure_future(engine.infer(voice_request(rng, 1, 1)))
        await device.wait_held()
        others = [
            asyncio.ensure_future(engine.infer(voice_request(rng, 1, rate))) for rate in (1, 2, 1, 2, 2)
        ]
        await asyncio.sleep(0)
        device.open()
        await first
        assert [(await one).batch_rows for one in others] == [2, 3, 2, 3, 3]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "separate memory"])
async def test_padding_and_other_devices_lay_rows_out_alike(unified, tmp_path):
    """A time-first model with rows on axis 1, whose times are padded."""
    path = save(
        tmp_path / "times.onnx",
        [node("Add", "x x", "y"), node("ReduceSum", "x zero", "sum", keepdims=0)],
        [("x", FLOAT, ["time", "n", 2])],
        [("y", FLOAT, ["time", "n", 2]), ("sum", FLOAT, ["n", 2])],
        [("zero", np.array([0]))],
    )
    rng = np.random.default_rng(0)
    requests = [{"x": rng.random((times, count, 2), np.float32)} for times in (3, 5, 8) for count in (1, 2)]
    session = direct(path)
    device = asynctrt.HostDevice(in_place="never", unified=unified)
    async with asynctrt.open(
        path, onnx={"batch_axis": {"x": 1, "y": 1}}, pad={"time": (4, 8)}, device=device
    ) as engine:
        for _ in range(3):
            answers = await asyncio.gather(*map(engine.infer, requests))
            for request, answer in zip(requests, answers, strict=True):
                check(session, request, answer)
        assert max(answer.batch_rows for answer in answers) > 2


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"onnx": {"batch_axis": {"stat": 1}}}, "batch_axis names 'stat'"),
        ({"onnx": {"batch_axis": {"state": 3}}}, "it has 3 axes"),
        ({"onnx": {"batch_axis": {"state": -1}}}, "batch_axis must be axes from 0 on"),
        ({"onnx": {"shared": {"rate"}}}, "shared names"),
        ({"batching": "off", "onnx": {"shared": {"sr"}}}, "with batching='off'"),
        (
            {"onnx": {"batch_axis": {"state": 1}}, "batching": "on"},
            "'stateN' has the size 'batch'.*on axis 1 too",
        ),
    ],
)
async def test_what_is_wrong_with_axes_is_said(settings, match, tmp_path):
    with pytest.raises((OptionsError, ModelError), match=match):
        await asynctrt.open(voice_onnx(tmp_path / "voice.onnx"), **settings)


@pytest.mark.parametrize("name", ["batch", "batch_size", "N", "b"])
async def test_rows_are_found_by_the_name_of_a_batch_and_scalars_are_in_common(name, tmp_path):
    """As torch exports recurrent layers: times first, a state, and a temperature, say."""
    path = save(
        tmp_path / "times.onnx",
        [
            node("CumSum", "x zero", "sums"),
            node("Mul", "sums k", "y"),
            node("Mul", "state k", "next"),
        ],
        [("x", FLOAT, ["time", name, 3]), ("state", FLOAT, [2, name, 4]), ("k", FLOAT, [])],
        [("y", FLOAT, ["time", name, 3]), ("next", FLOAT, [2, name, 4])],
        [("zero", np.array(0))],
    )
    rng = np.random.default_rng(0)
    requests = [
        {
            "x": rng.random((5, count, 3), np.float32),
            "state": rng.random((2, count, 4), np.float32),
            "k": np.array(factor, np.float32),
        }
        for count in (1, 3, 1, 2)
        for factor in (1, 2)
    ]
    async with asynctrt.open(path) as engine:
        assert engine.batching.is_on
        assert [spec.axis for spec in engine.inputs] == [1, 1, None]
        answers = await asyncio.gather(*map(engine.infer, requests))
    for request, answer in zip(requests, answers, strict=True):
        check(direct(path), request, answer)
    assert max(answer.batch_rows for answer in answers) > 3


async def test_as_many_values_in_common_as_there_are_requests_leave_nothing_behind(tmp_path):
    """A temperature that every caller chooses: each is a batch of its own, and is forgotten."""
    path = save(
        tmp_path / "scaled.onnx",
        [node("Mul", "x k", "y")],
        [("x", FLOAT, ["n", 4]), ("k", FLOAT, [])],
        [("y", FLOAT, ["n", 4])],
    )
    async with asynctrt.open(path, max_queue_rows=512) as engine:
        for start in range(0, 8000, 500):
            sent = [{"x": rows(1), "k": np.float32(number)} for number in range(start, start + 500)]
            answers = await asyncio.gather(*map(engine.infer, sent))
            assert [answer["y"][0, 0] for answer in answers] == list(range(start, start + 500))
            if start == 2000:
                before = sum(sys.getsizeof(one) for one in gc.get_objects())
        assert sum(sys.getsizeof(one) for one in gc.get_objects()) < before + (1 << 19)


async def test_only_an_onnx_file_is_told_where_its_rows_are():
    model = FunctionModel(
        lambda inputs: inputs["x"], inputs=TensorSpec("x", "f4", (2,)), outputs=TensorSpec("y", "f4", (2,))
    )
    with pytest.raises(OptionsError, match="the option onnx says how ONNX Runtime loads"):
        await asynctrt.open(model, onnx={"shared": {"x"}})


async def test_two_lengths_under_one_name_run_as_onnx_runtime_runs_them(tmp_path):
    path = save(
        tmp_path / "lengths.onnx",
        [node("ReduceSum", "a axis", "s"), node("Add", "b s", "y")],
        [("a", FLOAT, ["N", "seq"]), ("b", FLOAT, ["N", "seq"])],
        [("y", FLOAT, ["N", "seq"])],
        [("axis", np.array([1]))],
    )
    rng = np.random.default_rng(0)
    requests = [
        {"a": rng.random((2, 7), np.float32), "b": rng.random((2, size), np.float32)} for size in (3, 7, 3)
    ]
    async with asynctrt.open(path) as engine:
        answers = await asyncio.gather(*map(engine.infer, requests))
    for request, answer in zip(requests, answers, strict=True):
        check(direct(path), request, answer)


@pytest.mark.parametrize("unknown", ["?", "None", "-1", "dynamic", "unk__7", ""])
async def test_what_exporters_write_for_unknown_is_no_name(unknown, tmp_path):
    path = save(
        tmp_path / "picture.onnx",
        [node("GlobalAveragePool", "x", "p"), node("Flatten", "p", "y")],
        [("x", FLOAT, [unknown, 3, unknown, unknown])],
        [("y", FLOAT, [unknown, 3])],
    )
    async with asynctrt.open(path) as engine:
        assert engine.batching.is_on
        sizes = ((48, 192), (5, 4), (48, 192))
        sent = [np.random.default_rng(0).random((1, 3, *size), np.float32) for size in sizes]
        for one, answer in zip(sent, await asyncio.gather(*map(engine.infer, sent)), strict=True):
            check(direct(path), {"x": one}, answer)


# Values that are not numbers


def labels_onnx(path):
    """Names in, the number of each out, and each name again."""
    nodes = [
        helper.make_node(
            "LabelEncoder",
            ["names"],
            ["ids"],
            domain="ai.onnx.ml",
            keys_strings=["a", "b", "é"],
            values_int64s=[1, 2, 3],
            default_int64=-1,
        ),
        node("Identity", "names", "again"),
    ]
    graph = helper.make_graph(
        nodes,
        "labels",
        [helper.make_tensor_value_info("names", STRING, ["n", 2])],
        [
            helper.make_tensor_value_info("ids", INT64, ["n", 2]),
            helper.make_tensor_value_info("again", STRING, ["n", 2]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    return path


@pytest.mark.parametrize("batching", ["auto", "off"])
async def test_strings_go_in_and_out(batching, tmp_path):
    async with asynctrt.open(labels_onnx(tmp_path / "labels.onnx"), batching=batching, contexts=1) as engine:
        assert engine.batching.is_on is (batching == "auto")
        sent = [
            np.array([["a", "b"]]),
            [["é", "x"], ["b", "b"]],
            np.array([[b"a", "é".encode()]], object),
        ]
        answers = await asyncio.gather(*map(engine.infer, sent))
        assert [answer["ids"].tolist() for answer in answers] == [[[1, 2]], [[3, -1], [2, 2]], [[1, 3]]]
        assert [answer["again"].tolist() for answer in answers] == [
            [["a", "b"]],
            [["é", "x"], ["b", "b"]],
            [["a", "é"]],
        ]
        if batching == "auto":
            assert max(answer.batch_rows for answer in answers) > 1
        for wrong in (np.ones((1, 2)), [["a"], ["b", "c"]], np.array([[b"\xff", b"a"]], object), [[1, 2]]):
            with pytest.raises(InputError, match="'names'"):
                await engine.infer(wrong)


async def test_strings_do_not_cross_into_a_worker(tmp_path):
    with pytest.raises(ModelError, match="strings or Python values.*without isolation='process'"):
        await asynctrt.open(labels_onnx(tmp_path / "labels.onnx"), isolation="process")


def optional_onnx(path):
    """A sequence in and out, and an input that may be left out."""
    tensor = helper.make_tensor_type_proto(FLOAT, ["k"])
    sequence = helper.make_sequence_type_proto(tensor)
    then = helper.make_graph(
        [helper.make_node("OptionalGetElement", ["maybe"], ["given"])],
        "then",
        [],
        [helper.make_tensor_value_info("given", FLOAT, None)],
    )
    otherwise = helper.make_graph(
        [helper.make_node("Identity", ["none"], ["nothing"])],
        "otherwise",
        [],
        [helper.make_tensor_value_info("nothing", FLOAT, None)],
    )
    nodes = [
        helper.make_node("OptionalHasElement", ["maybe"], ["has"]),
        helper.make_node("If", ["has"], ["added"], then_branch=then, else_branch=otherwise),
        helper.make_node("SequenceInsert", ["parts", "added"], ["more"]),
    ]
    graph = helper.make_graph(
        nodes,
        "optional",
        [
            helper.make_value_info("parts", sequence),
            helper.make_value_info("maybe", helper.make_optional_type_proto(tensor)),
        ],
        [helper.make_value_info("more", sequence)],
        [helper.make_tensor("none", FLOAT, [1], [0.0])],
    )
    opset = helper.make_opsetid("", 18)
    path.write_bytes(helper.make_model(graph, opset_imports=[opset], ir_version=9).SerializeToString())
    return path


async def test_sequences_and_optional_inputs(tmp_path):
    async with asynctrt.open(optional_onnx(tmp_path / "optional.onnx")) as engine:
        assert "is a sequence" in engine.batching.reason
        parts = [np.float32([1]), np.float32([2, 3])]
        with_it, without = await asyncio.gather(
            engine.infer({"parts": parts, "maybe": np.float32([7, 8])}), engine.infer({"parts": parts})
        )
        assert [part.tolist() for part in with_it["more"]] == [[1], [2, 3], [7, 8]]
        assert [part.tolist() for part in without["more"]] == [[1], [2, 3], [0]]
        assert "more" in repr(without)


# What callers give


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("int64", np.array([[1, 2]], np.int32)),
        ("int64", np.array([[1, 2]], np.uint8)),
        ("int64", np.array([[True, False]])),
        ("int8", np.array([[True, False]])),
        ("float32", np.array([[1, 2]], ">f4")),
        ("int64", np.array([[1, 2]], ">i4")),
    ],
)
async def test_values_are_converted_if_none_can_change(dtype, given):
    spec = TensorSpec("x", dtype, (2,))
    model = FunctionModel(lambda inputs: inputs["x"], inputs=spec, outputs=TensorSpec("y", dtype, (2,)))
    async with asynctrt.open(model) as engine:
        answer = await engine.infer(given)
        assert answer["y"].dtype == dtype
        np.testing.assert_array_equal(answer["y"], given.astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("float64", np.ones((1, 2), np.float32)),
        ("float32", np.ones((1, 2))),
        ("int32", np.ones((1, 2), np.int64)),
        ("float32", np.ones((1, 2), np.int8)),
        ("uint64", np.ones((1, 2), np.int8)),
        ("bool", np.ones((1, 2), np.int8)),
    ],
)
async def test_values_are_refused_if_one_could_change_or_was_rounded(dtype, given):
    spec = TensorSpec("x", dtype, (2,))
    model = FunctionModel(lambda inputs: inputs["x"], inputs=spec, outputs=TensorSpec("y", dtype, (2,)))
    async with asynctrt.open(model) as engine:
        with pytest.raises(InputError, match="Convert it yourself"):
            await engine.infer(given)


async def test_inputs_that_the_model_does_not_have_are_dropped_if_that_is_said(tmp_path):
    path = double_onnx(tmp_path / "double.onnx")
    extra = {"input": rows(1), "token_type_ids": np.zeros((1, 4), np.int64)}
    async with asynctrt.open(path) as engine:
        with pytest.raises(InputError, match="unknown.*token_type_ids.*ignore_extra=True"):
            await engine.infer(extra)
    async with asynctrt.open(path, ignore_extra=True) as engine:
        np.testing.assert_array_equal((await engine.infer(extra))["output"], 2 * rows(1))
