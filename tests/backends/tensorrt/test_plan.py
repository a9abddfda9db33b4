"""Headers of plans, and files that are not plans."""

import io
import json
import zipfile

import numpy as np
import pytest

from asynctrt.backends.tensorrt.plan import TAG_RTX, TAG_TENSORRT, read_header, read_plan
from asynctrt.errors import ModelError, ModelNotFoundError
from tests.backends.tensorrt.helpers import header
from tests.doubles.tensorrt import EngineSpec, double_plan
from tests.models import double_onnx


def refused(content, error=ModelError):
    with pytest.raises(error) as caught:
        read_plan(content)
    return str(caught.value)


def test_the_header_of_a_real_plan_of_tensorrt_for_rtx(rtx_plan):
    import tensorrt_rtx

    plan = rtx_plan()
    read = read_header(plan)
    assert read.tag == TAG_RTX
    assert read.kind == "TensorRT for RTX"
    assert read.nbytes == len(plan)
    assert read.version_text == tensorrt_rtx.__version__
    assert (8, 9) in read.compute_capabilities
    assert (9, 0) not in read.compute_capabilities


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("SM75",), ((7, 5),)), (("SM80", "SM120"), ((8, 0), (12, 0))), (("SM86", "SM89"), ((8, 6), (8, 9)))],
)
def test_a_real_plan_says_which_gpus_it_was_built_for(rtx_plan, names, expected):
    assert read_header(rtx_plan(*names)).compute_capabilities == expected


def test_the_header_of_a_plan_of_tensorrt():
    plan = double_plan(EngineSpec(), version="10.13.2.6")
    read = read_header(plan)
    assert read.tag == TAG_TENSORRT
    assert read.version == (10, 13, 2, 6)
    assert read.nbytes == len(plan)
    assert read.compute_capabilities is None


def test_a_plan_from_a_file_is_named_after_it(tmp_path):
    path = tmp_path / "resnet.plan"
    path.write_bytes(double_plan(EngineSpec()))
    read = read_plan(path)
    assert read.name == "resnet"
    assert str(path) in read.where
    assert read_plan(str(path)).content == path.read_bytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_plan_in_memory(kind):
    plan = double_plan(EngineSpec())
    read = read_plan(kind(plan))
    assert read.content == plan
    assert "bytes" in read.where


def test_a_file_that_is_not_there(tmp_path):
    message = refused(tmp_path / "none.plan", ModelNotFoundError)
    assert "none.plan" in message
    assert "working directory" in message


def test_a_folder(tmp_path):
    assert "is a folder" in refused(tmp_path, ModelNotFoundError)


def test_an_onnx_model(tmp_path):
    message = refused(double_onnx(tmp_path / "model.plan"))
    assert "ONNX model" in message
    assert "model.plan" in message


def pytorch_file():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(zipfile.ZipInfo("model/data.pkl"), b"\x80\x02")  # Which is of 1980, and not of now.
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (json.dumps({"model": 1}).encode(), "text"),
        (pytorch_file(), "PyTorch"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"ptrt" + bytes(100), "before 8.6"),
        (np.arange(100).tobytes(), "begins with"),
    ],
)
def test_what_is_no_plan_is_named(content, said):
    message = refused(content)
    assert said in message
    assert message.rstrip(".").count(".") >= 1, "it says what to do"


@pytest.mark.parametrize("nbytes", [4, 63])
def test_a_header_that_is_cut_off(nbytes):
    assert "truncated" in refused(header()[:nbytes])


def test_a_plan_that_is_cut_off(rtx_plan):
    plan = rtx_plan()
    message = refused(plan[:-1])
    assert f"{len(plan):,}" in message
    assert f"{len(plan) - 1:,}" in message
    assert "Copy it again" in message


def test_more_than_the_plan_is_left_to_the_library():
    plan = double_plan(EngineSpec())
    assert read_plan(plan + b"x").header.nbytes == len(plan)
