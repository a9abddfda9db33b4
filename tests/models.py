"""Models for the tests: ONNX graphs made here, and Python functions."""

import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from asynctrt.backends.function import FunctionModel
from asynctrt.tensors import TensorSpec

FLOAT = np.dtype("float32")


def save(path, nodes, inputs, outputs, weights=(), name="graph"):
    """An ONNX file from nodes and ``(name, type, shape)`` triples."""
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(*triple) for triple in inputs],
        [helper.make_tensor_value_info(*triple) for triple in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def node(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def double_onnx(path, rows="batch", dims=(4,)):
    """``output = 2 * input``, float32."""
    return save(
        path,
        [node("Add", "input input", "output")],
        [("input", TensorProto.FLOAT, [rows, *dims])],
        [("output", TensorProto.FLOAT, [rows, *dims])],
    )


def scale_onnx(path, factor, work=0):
    """``output = factor * input``, float32, 4 a row. The file is there whole or not at all.

    :param work: products with a unit matrix of 512 that it takes on the way, for a model that is not instant.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    wide = np.eye(4, 512, dtype=np.float32)
    steps = [f"x{number}" for number in range(work + 1)]
    save(
        part,
        [
            node("MatMul", "input wide", "x0"),
            *(node("MatMul", f"{before} unit", after) for before, after in pairwise(steps)),
            node("MatMul", f"{steps[-1]} narrow", "output"),
        ],
        [("input", TensorProto.FLOAT, ["batch", 4])],
        [("output", TensorProto.FLOAT, ["batch", 4])],
        [("wide", wide * np.float32(factor)), ("narrow", wide.T.copy())]
        + [("unit", np.eye(512, dtype=np.float32))] * bool(work),
    )
    return part.replace(path)


def mixed_onnx(path):
    """Two inputs and three outputs of mixed types: sums of ints and floats, and a comparison."""
    return save(
        path,
        [
            node("Cast", "ids", "ids_float", to=TensorProto.FLOAT),
            node("Add", "ids_float values", "sum"),
            node("Greater", "sum limit", "large"),
            node("Add", "ids ids", "twice"),
        ],
        [("ids", TensorProto.INT64, ["n", 3]), ("values", TensorProto.FLOAT, ["n", 3])],
        [
            ("sum", TensorProto.FLOAT, ["n", 3]),
            ("large", TensorProto.BOOL, ["n", 3]),
            ("twice", TensorProto.INT64, ["n", 3]),
        ],
        [("limit", np.float32(10))],
    )


def sequence_onnx(path, rows="batch"):
    """Rows of any length: each is doubled, and each is summed up."""
    return save(
        path,
        [
            node("Add", "tokens tokens", "doubled"),
            node("ReduceSum", "tokens axis", "total", keepdims=0),
        ],
        [("tokens", TensorProto.FLOAT, [rows, "length"])],
        [("doubled", TensorProto.FLOAT, [rows, "length"]), ("total", TensorProto.FLOAT, [rows])],
        [("axis", np.array([1], np.int64))],
    )


def unnamed_output_onnx(path):
    """An output whose length has a name that no input has: its memory is the runtime's."""
    return save(
        path,
        [node("Concat", "tokens tokens", "joined", axis=1)],
        [("tokens", TensorProto.FLOAT, ["batch", "length"])],
        [("joined", TensorProto.FLOAT, ["batch", "joined_length"])],
    )


def detector_onnx(path):
    """Images of any size, which four convolutions halve, to six values for each place that is left.

    As in a YOLO, nodes that work on shapes compute the shape of the output, and the number of places
    has a name that no input has.
    """
    rng = np.random.default_rng(0)
    nodes, weights, name = [], [], "images"
    for number, (before, after) in enumerate([(3, 8), (8, 16), (16, 16), (16, 6)]):
        weights.append((f"w{number}", rng.normal(0, 0.1, (after, before, 3, 3)).astype(np.float32)))
        nodes.append(node("Conv", f"{name} w{number}", f"c{number}", pads=[1, 1, 1, 1], strides=[2, 2]))
        nodes.append(node("Relu", f"c{number}", f"r{number}"))
        name = f"r{number}"
    nodes += [
        node("Shape", name, "shape"),
        node("Gather", "shape first", "rows"),
        node("Concat", "rows rest", "target", axis=0),
        node("Reshape", f"{name} target", "output0"),
    ]
    weights += [("first", np.array([0])), ("rest", np.array([6, -1]))]
    sides = ["batch", 3, "height", "width"]
    return save(
        path,
        nodes,
        [("images", TensorProto.FLOAT, sides)],
        [("output0", TensorProto.FLOAT, ["batch", 6, "places"])],
        weights,
    )


def refusing_onnx(path):
    """Takes whole numbers from 1000 to 1002, and fails with any other."""
    return save(
        path,
        [node("Add", "x far", "at"), node("Gather", "table at", "y")],
        [("x", TensorProto.INT64, ["n"])],
        [("y", TensorProto.FLOAT, ["n"])],
        [("far", np.array(-1000)), ("table", np.arange(3, dtype=np.float32))],
    )


def lying_onnx(path):
    """Claims to give a row for each that it takes, and gives the first of two."""
    return save(
        path,
        [node("Compress", "input first_only", "output", axis=0)],
        [("input", TensorProto.FLOAT, ["n", 2])],
        [("output", TensorProto.FLOAT, ["n", 2])],
        [("first_only", np.array([True, False]))],
    )


def double(inputs, outputs):
    outputs["output"][...] = 2 * inputs["input"]


def double_model(function=double, dims=(4,), *, rows_fixed=None, rows_max=None, **kw):
    """``output = 2 * input`` as a Python function."""
    model = FunctionModel(
        function,
        inputs=TensorSpec("input", FLOAT, dims),
        outputs=TensorSpec("output", FLOAT, dims),
        **kw,
    )
    if rows_fixed or rows_max:
        model.capabilities = replace(model.capabilities, rows_fixed=rows_fixed, rows_max=rows_max)
    return model


def failing_model(**kw):
    """Doubles, but raises for a batch with a negative number in it."""

    def function(inputs, outputs):
        if (inputs["input"] < 0).any():
            raise ValueError("negative number")
        double(inputs, outputs)

    return double_model(function, **kw)


class Gate:
    """A function that waits, in its thread, until the test lets it go on."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, inputs, outputs):
        self.entered.release()
        assert self.go.acquire(timeout=30), "the test never let it go on"
        double(inputs, outputs)


def rows(*values, dims=(4,)):
    """Rows of float32, each filled with one value."""
    return np.stack([np.full(dims, value, np.float32) for value in values])
