"""Weights beside an ONNX model lie in its folder: nothing else is read, whatever the model names."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from asynctrt.core.loading import load_model
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ModelError

WEIGHTS = np.arange(4, dtype=np.float32)


def model_with(path, location):
    """Save a model that adds weights, which it says are in a file of that name."""
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location="EXTERNAL")
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        entry = weights.external_data.add()
        entry.key, entry.value = key, value
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "adds", ends[:1], ends[1:], initializer=[weights]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(made.SerializeToString())
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/weights").write_bytes(WEIGHTS.tobytes())
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_weights_beside_the_model_are_read(folder):
    (folder / "weights").write_bytes(WEIGHTS.tobytes())
    load_model(model_with(folder / "model.onnx", "weights"), HostDevice()).close()


@pytest.mark.parametrize("kind", ["up", "absolute", "link", "folder", "environment"])
def test_weights_elsewhere_are_not_read(folder, kind):
    location = "weights"
    if kind == "up":
        location = "../secret/weights"
    elif kind == "absolute":
        location = str(folder.parent / "secret/weights")
    elif kind == "environment":
        location = "/proc/self/environ"
    elif kind == "link":
        (folder / "weights").symlink_to(folder.parent / "secret/weights")
    else:
        (folder / "sub").symlink_to(folder.parent / "secret")
        location = "sub/weights"
    with pytest.raises(ModelError):
        load_model(model_with(folder / "model.onnx", location), HostDevice())
