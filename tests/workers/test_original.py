"""Whether a worker that takes another's place has opened the same: files, versions, inputs, outputs."""

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from asynctrt.backends import onnx_objects
from asynctrt.core.description import Description
from asynctrt.errors import ModelError
from asynctrt.plans.building import read_source
from asynctrt.statistics import Batching
from asynctrt.tensors import TensorSpec
from asynctrt.workers import original
from asynctrt.workers.original import Original, check_unchanged, difference, digests_of, files_of, marks_of
from tests.models import double_onnx

X, Y = TensorSpec("x", "float32", (4,)), TensorSpec("y", "float32", (4,))
FIRST = Description(
    *("kind", "python", "host", (X,), (Y,), 64, 1, 1),
    files=(("m.onnx", "1"), ("m.data", "2")),
    versions=(("asynctrt", "1"), ("numpy", "2")),
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": (("m.onnx", "3"), ("m.data", "2"))}, "'m.onnx' was changed"),
        ({"files": (("m.onnx", "1"),)}, "'m.data' is not used any more"),
        ({"files": (*FIRST.files, ("new", "4"))}, "'new' was changed"),
        ({"versions": (("asynctrt", "1"), ("numpy", "3"))}, "numpy 3 is installed now"),
        ({"inputs": (dataclasses.replace(X, dims=(8,)),)}, "inputs or outputs"),
        ({"outputs": (TensorSpec("y", "float64", (4,)),)}, "inputs or outputs"),
        ({"outputs": (TensorSpec("z", "float32", (4,)),)}, "inputs or outputs"),
        ({"name": "other"}, "'other'"),
        ({"platform": "tensorrt_plan"}, "tensorrt_plan"),
        ({"batching": Batching(is_on=not FIRST.batching.is_on, reason="")}, "may share a batch"),
    ],
)
def test_any_difference_is_named(change, said):
    assert said in difference(FIRST, dataclasses.replace(FIRST, **change))


def test_what_each_device_has_of_its_own_makes_no_difference():
    other = dataclasses.replace(FIRST, device_name="cuda:1", contexts=4, parallel_batches=2, max_rows=8)
    assert difference(FIRST, FIRST) == difference(FIRST, other) == ""


def test_the_next_one_may_take_some_times_as_long_as_the_slowest(monkeypatch):
    monkeypatch.setattr(original, "OPENING_S_MIN", 2.0)
    one = Original()
    assert one.opening_s_max is None
    assert not one.why_not(FIRST, 0.1)
    assert one.opening_s_max == 2.0
    assert one.why_not(dataclasses.replace(FIRST, name="other"), 100.0)
    assert not one.why_not(FIRST, 3.0)
    assert one.opening_s_max == 30.0


@pytest.mark.parametrize("name", ["weights", "w" * 200])
@pytest.mark.parametrize("part", [onnx_objects.PART_NBYTES, 1, 7])
def test_the_files_of_a_model_are_its_own_and_those_with_its_weights(tmp_path, monkeypatch, name, part):
    monkeypatch.setattr(onnx_objects, "PART_NBYTES", part)
    weights = numpy_helper.from_array(np.ones(4096, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4096])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 4096])],
        [weights],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location=name, size_threshold=0)
    assert files_of(str(path)) == [path, tmp_path / name]
    before = digests_of(files_of(str(path)))
    with (tmp_path / name).open("r+b") as file:
        file.write(b"1")
    after = digests_of(files_of(str(path)))
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_a_model_of_many_files_is_told_of_in_few_words(tmp_path):
    files = [tmp_path / f"{number}" for number in range(2000)]
    for path in files:
        path.write_text("1")
    before = digests_of(files)
    assert len(before) == original.FILES_NAMED + 1
    files[-1].write_text("2")
    after = digests_of(files)
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


def test_the_file_of_a_model_in_a_module_is_the_module_s():
    (path,) = files_of("tests.workers.models:kind")
    assert path.name == "models.py"
    assert files_of("tests.workers.no_such_module:kind") == files_of("sys:path") == []
    assert files_of("nothing.onnx") == []


@pytest.mark.parametrize("change", ["written", "replaced", "removed"])
def test_what_changes_while_it_is_opened_is_refused(tmp_path, change):
    path = double_onnx(tmp_path / "double.onnx")
    before = marks_of([path])
    check_unchanged([path], before)
    if change == "written":
        with path.open("ab") as file:
            file.write(b"1")
    elif change == "replaced":
        double_onnx(tmp_path / "other.onnx").rename(path)
    else:
        path.unlink()
    with pytest.raises(ModelError, match="was changed while it was opened"):
        check_unchanged([path], before)


def test_a_name_that_no_file_can_have_names_none(tmp_path):
    """Damaged weights may look like the name of a file."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\n\x08location\x12\xac\x02" + b"w" * 300)
    assert files_of(str(path)) == [path]
    assert read_source(path).external == {}
    assert files_of("m" * 5000) == [], "opening it says why"
