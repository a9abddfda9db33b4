"""What a runtime tells of a model: the double of TensorRT, and ONNX Runtime."""

import dataclasses

import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceUnavailableError, ModelError, ModelNotFoundError
from asynctrt.options import Options
from asynctrt.plans.opened import describe, open_file
from asynctrt.plans.text import lines_of_opened
from tests.backends.tensorrt.helpers import Bench
from tests.doubles.tensorrt import EngineSpec, TensorIO, double_plan
from tests.gpu.support import gpu_is_here
from tests.models import double_onnx, sequence_onnx
from tests.plans.test_plan_file import RTX


@pytest.fixture
def opened():
    made = []

    def make(spec):
        made.append(Bench(spec))
        return describe(made[-1].model, made[-1].device)

    yield make
    for one in made:
        assert one.trt.violations() == ()
        one.close()


def text(found):
    return "\n".join(lines_of_opened(found))


def test_an_engine_with_profiles(opened):
    spec = EngineSpec(
        inputs=(TensorIO("tokens", "int32", (-1, -1)), TensorIO("mask", "float32", (-1, 4))),
        profiles=(
            {"tokens": ((1, 1), (4, 8), (8, 16)), "mask": ((1, 4), (4, 4), (8, 4))},
            {"tokens": ((1, 1), (16, 8), (32, 16)), "mask": ((1, 4), (16, 4), (32, 4))},
        ),
        weights_nbytes=8192,
    )
    found = opened(spec)
    assert found.runtime.startswith("tensorrt 11.")
    assert [(one.name, one.dtype, one.dims) for one in found.inputs] == [
        ("tokens", "int32", ("rows", "tokens.1")),
        ("mask", "float32", ("rows", 4)),
    ]
    assert found.rows == (1, 32)
    small, large = found.profiles
    assert small.shapes["tokens"] == ((1, 1), (4, 8), (8, 16))
    assert 0 < small.enqueue_nbytes < large.enqueue_nbytes
    assert (found.engine.layers > 0, found.engine.weights_nbytes) == (True, 8192)
    assert (found.engine.is_refittable, found.engine.stripped_nbytes) == (False, 0)
    assert "tokens [1, 1] / [4, 8] / [8, 16]" in text(found)


def test_an_engine_whose_outputs_depend_on_the_data(opened):
    found = opened(EngineSpec(data_dependent=True))
    assert found.unbound
    assert found.is_capturable is False
    assert "as large as the data says" in text(found)


def test_an_engine_that_can_be_refitted(opened):
    found = opened(EngineSpec(refittable=True))
    assert "can be refitted" in text(found)
    assert found.engine.is_refittable


def test_how_many_batches_compute_side_by_side(tmp_path, opened):
    device = HostDevice(in_place="never", unified=False)
    found = open_file(double_onnx(tmp_path / "m.onnx"), device, options=Options(contexts=2))
    assert {(64, 1), (64, 2)} <= {(rows, lanes) for rows, lanes, _ in found.lane_rates}
    assert set(found.lanes.values()) <= {1, 2}
    found = opened(EngineSpec())
    shown = text(dataclasses.replace(found, lanes={15: 1, 16: 2}, lane_rates=((16, 1, 1e3), (16, 2, 1500.4))))
    assert "1 for batches of up to 15 rows" in shown
    assert "rows/s at 16: 1,000 in 1, 1,500 in 2" in shown
    assert "lanes" not in text(dataclasses.replace(found, lanes={}, lane_rates=()))


def test_an_onnx_model(tmp_path):
    found = open_file(sequence_onnx(tmp_path / "m.onnx"))
    assert (found.device, found.rows, found.engine) == ("host", (1, None), None)
    assert found.inputs[0].dims == ("rows", "length")
    assert "1 to any number" in text(found)
    fixed = open_file(double_onnx(tmp_path / "fixed.onnx", rows=4))
    assert "exactly 4" in text(fixed)
    assert not found.specialises, "on the host one session runs all shapes"
    assert "recur" not in text(found)
    assert "recurring ones" in text(dataclasses.replace(found, specialises=True))


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(ModelNotFoundError):
        open_file(tmp_path / "missing.plan")
    (tmp_path / "bad.onnx").write_bytes(b"\x08nonsense")
    with pytest.raises(ModelError):
        open_file(tmp_path / "bad.onnx")
    with pytest.raises(DeviceUnavailableError, match="runs on a CUDA device"):
        open_file(RTX, HostDevice())


@pytest.mark.skipif(gpu_is_here(), reason="there is a GPU, so it is opened")
def test_a_plan_where_there_is_no_gpu(tmp_path):
    path = tmp_path / "m.plan"
    path.write_bytes(double_plan(EngineSpec()))
    with pytest.raises(DeviceUnavailableError, match="driver"):
        open_file(path)
