"""What a runtime tells of a model: the double of TensorRT, and ONNX Runtime."""

import dataclasses

import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceUnavailableError, ModelError, ModelNotFoundError, OptionsError
from asynctrt.plans.opened import describe, open_file
from asynctrt.plans.text import lines_of_opened
from tests.backends.tensorrt.helpers import Bench
from tests.doubles.tensorrt import EngineSpec, TensorIO, double_plan
from tests.gpu.support import gpu_is_here
from tests.models import double_onnx, lying_onnx, sequence_onnx
from tests.plans.test_plan_file import RTX


@pytest.fixture
def opened():
    made = []

    def make(spec, contexts=4, arenas=1):
        made.append(Bench(spec))
        return describe(made[-1].model, made[-1].device, contexts, arenas)

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
        persistent_nbytes=4096,
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
    memory = found.memory
    assert memory.context_nbytes == 4096
    assert memory.arena_nbytes == large.enqueue_nbytes
    assert memory.weights_nbytes == 8192
    # Two inputs and two outputs of 32 rows.
    assert memory.slab_nbytes == 2 * 32 * (16 * 4 + 4 * 4)
    assert memory.total_nbytes == 8192 + 4 * (4096 + memory.slab_nbytes) + memory.arena_nbytes
    assert memory.total_without_sharing_nbytes == memory.total_nbytes + 3 * memory.arena_nbytes
    shown = text(found)
    assert "tokens [1, 1] / [4, 8] / [8, 16]" in shown
    assert "4 contexts on 1 arena: " in shown
    assert "with an arena for each context: " in shown


def test_an_engine_whose_outputs_depend_on_the_data(opened):
    found = opened(EngineSpec(data_dependent=True), contexts=2, arenas=2)
    assert found.unbound
    assert found.memory.slab_nbytes is None
    assert found.is_capturable is False
    shown = text(found)
    assert "as large as the data says" in shown
    assert "slabs of unknown size" in shown
    assert "with an arena for each context" not in shown


def test_an_engine_that_can_be_refitted(opened):
    found = opened(EngineSpec(refittable=True))
    assert "can be refitted" in text(found)
    assert found.engine.is_refittable


def test_how_many_batches_compute_side_by_side(tmp_path, opened):
    device = HostDevice(in_place="never", unified=False)
    found = open_file(double_onnx(tmp_path / "m.onnx"), device, contexts=2)
    assert {(64, 1), (64, 2)} <= {(rows, lanes) for rows, lanes, _ in found.lane_rates}
    assert set(found.lanes.values()) <= {1, 2}
    found = opened(EngineSpec())
    shown = text(dataclasses.replace(found, lanes={15: 1, 16: 2}, lane_rates=((16, 1, 1e3), (16, 2, 1500.4))))
    assert "1 for batches of up to 15 rows" in shown
    assert "rows/s at 16: 1,000 in 1, 1,500 in 2" in shown
    assert "lanes" not in text(dataclasses.replace(found, lanes={}, lane_rates=()))


def test_an_onnx_model(tmp_path):
    found = open_file(sequence_onnx(tmp_path / "m.onnx"))
    assert (found.device, found.rows, found.engine, found.memory) == ("host", (1, None), None, None)
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
    with pytest.raises(OptionsError, match="5 arenas for 4 contexts"):
        open_file(lying_onnx(tmp_path / "m.onnx"), contexts=4, arenas=5)
    (tmp_path / "bad.onnx").write_bytes(b"\x08nonsense")
    with pytest.raises(ModelError):
        open_file(tmp_path / "bad.onnx")
    with pytest.raises(DeviceUnavailableError, match="runs on a CUDA device"):
        open_file(RTX, HostDevice(), contexts=1)


@pytest.mark.skipif(gpu_is_here(), reason="there is a GPU, so it is opened")
def test_a_plan_where_there_is_no_gpu(tmp_path):
    path = tmp_path / "m.plan"
    path.write_bytes(double_plan(EngineSpec()))
    with pytest.raises(DeviceUnavailableError, match="driver"):
        open_file(path)
