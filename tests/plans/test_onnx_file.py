"""ONNX files: what they tell, against what was put into them and against what ONNX Runtime makes of them."""

import hashlib

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.errors import ModelError, ModelNotFoundError
from asynctrt.plans.inspection import inspect
from asynctrt.plans.onnx_file import OnnxTensor, read_onnx_file
from tests.models import (
    double_onnx,
    lying_onnx,
    mixed_onnx,
    node,
    save,
    scale_onnx,
    sequence_onnx,
    unnamed_output_onnx,
)

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def test_all_that_a_model_tells(tmp_path):
    path = mixed_onnx(tmp_path / "m.onnx")
    model = onnx.load(path)
    model.producer_name, model.producer_version, model.model_version = "maker", "1.2", 3
    helper.set_model_props(model, {"key": "value"})
    onnx.save(model, path)
    found = inspect(path)
    assert (found.path, found.nbytes) == (str(path), path.stat().st_size)
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (found.ir_version, found.opsets, found.producer) == (9, {"ai.onnx": 17}, "maker 1.2")
    assert (found.model_version, found.metadata) == (3, {"key": "value"})
    assert found.inputs == (
        OnnxTensor("ids", "tensor", "int64", ("n", 3)),
        OnnxTensor("values", "tensor", "float32", ("n", 3)),
    )
    assert [one.dtype for one in found.outputs] == ["float32", "bool", "int64"]
    assert (found.batching.rows, found.batching.refusal, found.batching.free_dims) == ("n", None, ())


def with_dims(path, given, taken=None, dtype=FLOAT):
    """A model whose input and output have these dimensions."""
    return save(
        path,
        [node("Identity", "x", "y")],
        [("x", dtype, given)],
        [("y", dtype, given if taken is None else taken)],
    )


def two_inputs(path, first, second):
    return save(
        path,
        [node("Identity", "a", "c"), node("Identity", "b", "d")],
        [("a", FLOAT, first), ("b", FLOAT, second)],
        [("c", FLOAT, first), ("d", FLOAT, second)],
    )


MODELS = {
    "rows": lambda path: double_onnx(path),
    "fixed rows": lambda path: double_onnx(path, rows=4),
    "no name": lambda path: double_onnx(path, rows=None),
    "a name of tf2onnx's": lambda path: with_dims(path, ["unk__1", 2], ["unk__2", 2]),
    "a free dimension": lambda path: sequence_onnx(path),
    "an output of its own size": lambda path: unnamed_output_onnx(path),
    "weights": lambda path: scale_onnx(path, 2),
    "a lie": lambda path: lying_onnx(path),
    "several": lambda path: mixed_onnx(path),
    "a scalar": lambda path: with_dims(path, []),
    "fixed and named": lambda path: two_inputs(path, [4, 2], ["n", 2]),
    "different sizes": lambda path: two_inputs(path, [4, 2], [5, 2]),
    "two names": lambda path: two_inputs(path, ["n", 2], ["m", 2]),
    "rows on two axes": lambda path: with_dims(path, ["n", "n"]),
    "text": lambda path: with_dims(path, ["n", 2], dtype=TensorProto.STRING),
    "bfloat16": lambda path: with_dims(path, ["n", 2], dtype=TensorProto.BFLOAT16),
    "float64": lambda path: with_dims(path, ["n", 2], dtype=TensorProto.DOUBLE),
    "an output of fixed size": lambda path: save(
        path,
        [node("Identity", "x", "y"), node("ReduceSum", "x", "z", keepdims=1)],
        [("x", FLOAT, ["n", 2])],
        [("y", FLOAT, ["n", 2]), ("z", FLOAT, [1, 1])],
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_batching_is_judged_as_when_the_model_is_opened(tmp_path, kind):
    path = MODELS[kind](tmp_path / "model.onnx")
    found = read_onnx_file(path).batching
    opened = OnnxModel(path)
    free = [dim for spec in opened.inputs for dim in spec.dims if isinstance(dim, str)]
    assert list(found.free_dims) == list(dict.fromkeys(free))
    assert (found.rows if isinstance(found.rows, int) else None) == opened.capabilities.rows_fixed
    # ONNX Runtime knows more of shapes than the file declares.
    assert (found.alone, found.doubt) == (
        opened.capabilities.alone,
        opened.capabilities.doubt,
    ) or kind == "a lie"
    assert found.refusal is None
    opened.close()


def test_a_type_that_cannot_be_served_is_a_refusal(tmp_path):
    path = with_dims(tmp_path / "m.onnx", ["n", 2], dtype=TensorProto.COMPLEX64)
    assert "input 'x' of 'm' is a tensor(complex64)" in read_onnx_file(path).batching.refusal


def test_doubts_are_about_outputs_with_another_name(tmp_path):
    path = with_dims(tmp_path / "m.onnx", ["n", 2], ["m", 2])
    doubt = read_onnx_file(path).batching.doubt
    assert doubt == "the first axis of output 'y' is 'm', that of the inputs 'n'"


def test_rows_are_named_where_they_are(tmp_path):
    found = read_onnx_file(with_dims(tmp_path / "m.onnx", ["time", "batch"])).batching
    assert (found.rows, found.free_dims) == ("batch", ("time",))


def test_other_types_than_tensors(tmp_path):
    tensor = helper.make_tensor_type_proto(FLOAT, None)
    graph = helper.make_graph(
        [node("SequenceConstruct", "x", "s")],
        "g",
        [helper.make_value_info("x", tensor)],
        [helper.make_value_info("s", helper.make_sequence_type_proto(tensor))],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph), path)
    found = read_onnx_file(path)
    assert found.inputs == (OnnxTensor("x", "tensor", "float32", None),)
    assert found.outputs == (OnnxTensor("s", "sequence", None, None),)
    assert "output 's' is a sequence" in found.batching.alone


def test_files_that_are_none(tmp_path):
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        inspect(tmp_path / "missing.onnx")
    with pytest.raises(ModelNotFoundError, match="is a folder"):
        inspect(tmp_path)
    for content in (b"", b"nonsense", b"\x08", b"\x08\x09", bytes(100)):
        path = tmp_path / "bad.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelError, match="Export the model again"):
            inspect(path)


def test_damaged_files_are_refused_or_read_but_never_more(tmp_path):
    """Any bit may be flipped: the answer is a description or a typed error."""
    whole = mixed_onnx(tmp_path / "m.onnx").read_bytes()
    random = np.random.default_rng(5)
    path = tmp_path / "damaged.onnx"
    refused = 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[random.integers(len(whole))] ^= 1 << random.integers(8)
        path.write_bytes(damaged[: len(whole) - random.integers(4)])
        try:
            read_onnx_file(path)
        except ModelError:
            refused += 1
    assert 0 < refused < 100
