"""ONNX models: what can be read, and what is refused with which fix."""

import gc
import sys
import weakref

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto

import asynctrt
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import MissingExtraError, ModelError, ModelNotFoundError, OptionsError, UsageError
from tests.models import double_onnx, node, save, sequence_onnx, unnamed_output_onnx

FLOAT = TensorProto.FLOAT


def refused(path, *, error=ModelError):
    with pytest.raises(error) as caught:
        OnnxModel(path)
    return str(caught.value)


def identity(path, kind, shape, output_shape=None):
    nodes = [node("Identity", "input", "output")]
    return save(path, nodes, [("input", kind, shape)], [("output", kind, output_shape or shape)])


def test_a_missing_file(tmp_path):
    message = refused(tmp_path / "none.onnx", error=ModelNotFoundError)
    assert "none.onnx" in message
    assert "working directory" in message


@pytest.mark.parametrize("content", [b"", b"this is no model", bytes(range(256)) * 100])
def test_a_file_that_is_no_onnx_model(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert "cannot be loaded by ONNX Runtime" in refused(path)


def test_a_truncated_model(tmp_path):
    path = double_onnx(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[:-20])
    assert "cannot be loaded" in refused(path)


def test_a_model_with_an_operator_that_there_is_not(tmp_path):
    path = save(
        tmp_path / "model.onnx",
        [node("NoSuchOperator", "input", "output")],
        [("input", FLOAT, ["n", 2])],
        [("output", FLOAT, ["n", 2])],
    )
    assert "NoSuchOperator" in refused(path)


def test_a_fixed_batch_axis_is_reported(tmp_path):
    assert OnnxModel(double_onnx(tmp_path / "m.onnx", rows=8)).rows_fixed == 8
    assert OnnxModel(double_onnx(tmp_path / "n.onnx")).rows_fixed is None


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
    ],
)
def test_types(tmp_path, kind, dtype):
    assert OnnxModel(identity(tmp_path / "m.onnx", kind, ["n", 2])).inputs[0].dtype == np.dtype(dtype)


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.BFLOAT16])
def test_types_that_cannot_lie_in_a_slab(tmp_path, kind):
    message = refused(identity(tmp_path / "m.onnx", kind, ["n", 2]))
    assert "input 'input'" in message
    assert "outside the model" in message


def test_a_scalar_input(tmp_path):
    path = save(
        tmp_path / "m.onnx",
        [node("Add", "input scale", "output")],
        [("input", FLOAT, ["n", 2]), ("scale", FLOAT, [])],
        [("output", FLOAT, ["n", 2])],
    )
    assert "input 'scale'" in refused(path)
    assert "scalar" in refused(path)


def test_inputs_that_do_not_share_a_batch_axis(tmp_path):
    path = save(
        tmp_path / "m.onnx",
        [node("Add", "input other", "output")],
        [("input", FLOAT, ["n", 2]), ("other", FLOAT, [1, 2])],
        [("output", FLOAT, ["n", 2])],
    )
    assert "do not share a batch axis" in refused(path)


def test_an_output_without_a_batch_axis(tmp_path):
    path = save(
        tmp_path / "m.onnx",
        [node("ReduceMean", "input", "output", axes=[0], keepdims=1)],
        [("input", FLOAT, ["n", 2])],
        [("output", FLOAT, [1, 2])],
    )
    assert "output 'output' of 'm' has the fixed first axis 1" in refused(path)


def test_rows_that_would_see_each_other(tmp_path):
    path = save(
        tmp_path / "m.onnx",
        [node("Transpose", "input", "turned", perm=[1, 0]), node("MatMul", "input turned", "output")],
        [("input", FLOAT, ["n", 2])],
        [("output", FLOAT, ["n", "n"])],
    )
    assert "rows of one batch would see each other" in refused(path)


def test_an_output_whose_shape_no_input_determines(tmp_path):
    model = OnnxModel(unnamed_output_onnx(tmp_path / "m.onnx"))
    assert model.outputs[0].dims == ("joined_length",)


def test_a_model_without_threads(tmp_path):
    with pytest.raises(OptionsError, match="intra_op_threads is at least 1, not 0"):
        OnnxModel(double_onnx(tmp_path / "m.onnx"), intra_op_threads=0)


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
            async with engine.slot() as slot:
                await slot.infer()
            assert session() is not None
        assert session() is None
    finally:
        gc.enable()


def test_without_onnxruntime_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "asynctrt.backends.onnxruntime")
    with pytest.raises(MissingExtraError, match=r"pip install 'asynctrt\[cpu\]'"):
        import asynctrt.backends.onnxruntime  # noqa: F401
    monkeypatch.undo()
    assert sys.modules["onnxruntime"] is onnxruntime
