"""ONNX models: what can be read, and what is refused with which fix."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto

import asynctrt
from asynctrt.backends.onnx_axes import Declared, read_axes
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    MissingExtraError,
    ModelError,
    ModelNotFoundError,
    OptionsError,
    UsageError,
)
from asynctrt.runtime.staging import Slab, StagingBuffers, lay_out
from tests.models import double_onnx, node, save, sequence_onnx, unnamed_output_onnx

FLOAT = TensorProto.FLOAT


def refused(path, *, error=ModelError):
    with pytest.raises(error) as caught:
        OnnxModel(path)
    return str(caught.value)


def alone(path):
    """Return why each request to a model runs alone."""
    model = OnnxModel(path)
    assert model.capabilities.rows_max == 1
    assert [spec.axis for spec in (*model.inputs, *model.outputs)] == [None] * (
        len(model.inputs) + len(model.outputs)
    )
    return model.capabilities.alone


def identity(path, kind, shape):
    return save(
        path, [node("Identity", "input", "output")], [("input", kind, shape)], [("output", kind, shape)]
    )


def saved(folder, *nodes, outputs=("n", 2), **others):
    """Save a model with the input ``[n, 2]``, and others of these shapes."""
    inputs = [(name, FLOAT, shape) for name, shape in {"input": ["n", 2], **others}.items()]
    return save(folder / "m.onnx", nodes, inputs, [("output", FLOAT, list(outputs))])


def test_a_missing_file(tmp_path):
    message = refused(tmp_path / "none.onnx", error=ModelNotFoundError)
    assert "none.onnx" in message
    assert "working directory" in message


def test_a_truncated_model(tmp_path):
    path = double_onnx(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[:-20])
    assert "is not an ONNX model, or is damaged" in refused(path)


def test_a_model_with_an_operator_that_there_is_not(tmp_path):
    assert "NoSuchOperator" in refused(saved(tmp_path, node("NoSuchOperator", "input", "output")))


def test_a_fixed_batch_axis_is_reported(tmp_path):
    assert OnnxModel(double_onnx(tmp_path / "m.onnx", rows=8)).capabilities.rows_fixed == 8
    assert OnnxModel(double_onnx(tmp_path / "n.onnx")).capabilities.rows_fixed is None


def test_names_types_and_dimensions(tmp_path):
    model = OnnxModel(sequence_onnx(tmp_path / "sequence.onnx"))
    assert model.name == "sequence"
    assert [str(spec) for spec in model.inputs] == ["tokens: float32[rows, length]"]
    assert [str(spec) for spec in model.outputs] == [
        "doubled: float32[rows, length]",
        "total: float32[rows]",
    ]
    assert repr(model) == "<OnnxModel sequence intra_op_threads=1>"


def test_a_dimension_without_a_name_gets_one_of_its_own(tmp_path):
    model = OnnxModel(identity(tmp_path / "m.onnx", FLOAT, ["n", None, 3]))
    assert model.inputs[0].dims == ("input.1", 3)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (TensorProto.FLOAT16, "float16"),
        (TensorProto.DOUBLE, "float64"),
        (TensorProto.INT8, "int8"),
        (TensorProto.UINT16, "uint16"),
        (TensorProto.INT32, "int32"),
        (TensorProto.BOOL, "bool"),
        (TensorProto.STRING, "object"),
        (TensorProto.BFLOAT16, "bfloat16"),
    ],
)
def test_types(tmp_path, kind, dtype):
    assert OnnxModel(identity(tmp_path / "m.onnx", kind, ["n", 2])).inputs[0].dtype == np.dtype(dtype)


def test_a_type_that_numpy_does_not_have(tmp_path, monkeypatch):
    path = identity(tmp_path / "m.onnx", TensorProto.BFLOAT16, ["n", 2])
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert "pip install ml_dtypes" in refused(path)


@pytest.mark.anyio
async def test_values_of_such_a_type_are_computed_with(tmp_path):
    async with asynctrt.open(identity(tmp_path / "m.onnx", TensorProto.BFLOAT16, ["n", 2])) as engine:
        sent = np.ones((3, 2), engine.inputs[0].dtype)
        np.testing.assert_array_equal((await engine.infer(sent))["output"], sent)


def test_a_scalar_input(tmp_path):
    model = OnnxModel(saved(tmp_path, node("Add", "input scale", "output"), scale=[]))
    assert [spec.axis for spec in model.inputs] == [0, None]
    assert model.capabilities.doubt == "'scale' seems to be in common to all rows"


def test_inputs_that_do_not_share_a_batch_axis(tmp_path):
    path = saved(tmp_path, node("Add", "input other", "output"), other=[1, 2])
    assert "do not have their rows on one axis: {'input': '[n, 2]', 'other': '[1, 2]'}" in alone(path)


def test_an_output_without_a_batch_axis(tmp_path):
    path = saved(tmp_path, node("ReduceMean", "input", "output", axes=[0], keepdims=1), outputs=(1, 2))
    assert "output 'output' has the fixed size 1 where rows" in alone(path)


def test_rows_that_would_see_each_other(tmp_path):
    turned = node("Transpose", "input", "turned", perm=[1, 0])
    path = saved(tmp_path, turned, node("MatMul", "input turned", "output"), outputs=("n", "n"))
    assert "rows of one batch would see each other" in alone(path)


def test_an_output_whose_shape_no_input_determines(tmp_path):
    model = OnnxModel(unnamed_output_onnx(tmp_path / "m.onnx"))
    assert model.outputs[0].dims == ("joined_length",)


FIRST_AXES = {
    "the hits of all rows together": (
        [node("NonZero", "input", "where"), node("Transpose", "where", "output", perm=[1, 0])],
        TensorProto.INT64,
    ),
    "every row twice": ([node("Concat", "input input", "output", axis=0)], FLOAT),
    "those rows that are not masked": (
        [
            node("Cast", "input", "large", to=TensorProto.BOOL),
            node("Slice", "large zero one one", "column"),
            node("Squeeze", "column one", "mask"),
            node("Compress", "input mask", "output", axis=0),
        ],
        FLOAT,
    ),
}
WEIGHTS = [("zero", np.array([0])), ("one", np.array([1]))]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("rows", "count"), [("n", "k"), ("n", None), (None, None), ("unk__1", "unk__2"), (4, "k")]
)
@pytest.mark.parametrize("what", FIRST_AXES)
async def test_an_output_whose_first_axis_counts_something_else(tmp_path, what, rows, count):
    """Where the number happens to be that of the rows, answers would go to the wrong callers."""
    nodes, kind = FIRST_AXES[what]
    path = save(
        tmp_path / "m.onnx", nodes, [("input", FLOAT, [rows, 2])], [("output", kind, [count, 2])], WEIGHTS
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    async with asynctrt.open(path, max_rows=4) as engine:
        assert not engine.batching.is_on
        sent = [np.eye(4, 2, dtype=np.float32) * number for number in range(6)]
        answers = await asyncio.gather(*map(engine.infer, sent))
    for one, answer in zip(sent, answers, strict=True):
        np.testing.assert_array_equal(answer["output"], session.run(None, {"input": one})[0])


@pytest.mark.parametrize("names", [["unk__1", "unk__2", "unk__3"], ["x_axis", "x_axis", "y_axis"]])
def test_an_exporter_may_name_the_batch_axis_of_each_tensor_differently(tmp_path, names):
    """Made-up rows show whether it is the same axis."""
    path = save(
        tmp_path / "m.onnx",
        [node("Add", "a b", "sum"), node("MatMul", "sum weight", "output")],
        [("a", FLOAT, [names[0], 2]), ("b", FLOAT, [names[1], 2])],
        [("output", FLOAT, [names[2], 3])],
        [("weight", np.ones((2, 3), np.float32))],
    )
    model = OnnxModel(path)
    assert [str(spec) for spec in model.outputs] == ["output: float32[rows, 3]"]
    assert model.capabilities.rows_fixed is None


def test_no_telemetry_is_written_into_the_home_directory(tmp_path):
    model, home = double_onnx(tmp_path / "m.onnx"), tmp_path / "home"
    home.mkdir()
    kept = ("PATH", "PYTHONPATH", "VIRTUAL_ENV")
    variables = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(home)}
    program = f"from asynctrt.backends.onnxruntime import OnnxModel; OnnxModel({str(model)!r})"
    subprocess.run([sys.executable, "-c", program], env=variables, check=True, timeout=60)
    assert list(home.rglob("*")) == []


def test_a_model_without_threads(tmp_path):
    with pytest.raises(OptionsError, match="intra_op_num_threads must be a whole number from 0 to 1024, not"):
        OnnxModel(double_onnx(tmp_path / "m.onnx"), {"intra_op_num_threads": -1})


def test_a_closed_model_says_so(tmp_path):
    model = OnnxModel(double_onnx(tmp_path / "m.onnx"))
    model.close()
    with pytest.raises(UsageError, match="is closed. Load it again"):
        model.create_context(HostDevice())


@pytest.mark.anyio
async def test_closing_an_engine_lets_go_of_the_weights_at_once(tmp_path):
    """Not when the garbage collector comes by: weights are large."""
    gc.disable()
    try:
        async with asynctrt.open(double_onnx(tmp_path / "m.onnx")) as engine:
            session = weakref.ref(engine._model.session)
            await engine.infer(np.ones((1, 4), np.float32))
            assert session() is not None
        assert session() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("make", "output"), [(sequence_onnx, "doubled"), (unnamed_output_onnx, "joined")])
def test_a_batch_does_not_change_what_an_earlier_one_is_bound_to(tmp_path, make, output):
    """ONNX Runtime ends the process if an I/O binding changes while it runs."""
    device, model = HostDevice(in_place="never"), OnnxModel(make(tmp_path / "m.onnx"))
    layout = lay_out(model.inputs, model.outputs, {"length": 3}, 2)
    slab = Slab(layout, StagingBuffers(device, layout.nbytes))
    slab.inputs[0][...] = 1
    binding = model.create_context(device).bind(slab.input_memory(), slab.output_memory())
    stream, end, gate, found = device.create_stream(), device.create_event(), threading.Event(), []
    stream.launch(gate.wait)
    for rows in (2, 1):

        def look(rows=rows):
            outputs = slab.outputs | binding.unbound_outputs(rows)
            found.append(outputs[output].any(axis=1).tolist())

        binding.enqueue(rows, profile=None, stream=stream, arena=None)
        stream.launch(look)
    gate.set()
    stream.record(end)
    assert end.synchronize(30)
    assert end.error is None
    assert found[0] == [True, True]
    stream.close(1.0)
    model.close()


def test_without_onnxruntime_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "asynctrt.backends.onnxruntime_session")
    with pytest.raises(MissingExtraError, match=r"pip install 'asynctrt\[cpu\]'"):
        import asynctrt.backends.onnxruntime_session  # noqa: F401
    monkeypatch.undo()
    assert sys.modules["onnxruntime"] is onnxruntime


def test_what_is_said_of_a_sequence_comes_before_its_missing_rank():
    """What skl2onnx's zipmap leaves has no rank."""
    given = Declared("x", "tensor(float)", ("rows", 4))
    classes = Declared("p", "seq(map(int64,tensor(float)))", ())
    axes = read_axes("m", [given], [classes], OnnxOptions())
    assert axes.alone == "output 'p' is a sequence"
    assert [spec.kind for spec in axes.outputs] == ["sequence"]


def test_a_sparse_tensor_is_refused():
    given = Declared("x", "sparse_tensor(float)", ("rows", 4))
    with pytest.raises(ModelError, match="input 'x' of 'm' is a sparse_tensor"):
        read_axes("m", [given], [given], OnnxOptions())
