"""Plans that get their weights from an ONNX file."""

import gc

import pytest

from asynctrt.backends.tensorrt import refit
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError, ExecutionError, ModelError, OptionsError
from tests.backends.tensorrt.helpers import Bench
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan, double_weights

STRIPPED = EngineSpec(stripped_weights_nbytes=3 << 20)
BOTH = pytest.mark.parametrize("double", ["tensorrt", "tensorrt_rtx"])


@pytest.fixture
def onnx(tmp_path):
    def write(spec=STRIPPED, **kw):
        path = tmp_path / "model.onnx"
        path.write_bytes(double_weights(spec, **kw))
        return path

    return write


@BOTH
def test_a_stripped_plan_gets_its_weights(bench, onnx, double):
    made = bench(STRIPPED, double=double, refit_from=onnx())
    context = made.model.create_context(made.device)
    made.run(made.bind(context), 9, made.arena())
    assert made.model.memory_statistics().blocks == 1, "the weights alone are kept"
    context.close()


def test_a_plan_that_has_its_weights_gets_others(bench, onnx):
    made = bench(EngineSpec(refittable=True), refit_from=onnx(EngineSpec(bias=3)))
    made.spec = EngineSpec(bias=3)
    context = made.model.create_context(made.device)
    made.run(made.bind(context), 9, made.arena())
    context.close()


def test_a_plan_that_cannot_be_refitted(bench, onnx):
    with pytest.raises(OptionsError, match=r"model\.onnx', but .* was not built to be refitted.*STRIP_PLAN"):
        bench(model=False, refit_from=onnx()).open()
    gc.collect()


@pytest.mark.parametrize("double", ["tensorrt_lean", "tensorrt_dispatch"])
def test_packages_without_a_parser(bench, onnx, double):
    with pytest.raises(OptionsError, match=rf"refit_from is .*{double} .*tensorrt or tensorrt_rtx"):
        bench(STRIPPED, double=double, model=False, refit_from=onnx()).open()


@BOTH
def test_a_file_that_lacks_weights(bench, onnx, double):
    with pytest.raises(ModelError, match="cannot be refitted from .*successfully refitted 2 out of 4"):
        bench(STRIPPED, double=double, model=False, refit_from=onnx(without=("step2", "step4"))).open()
    gc.collect()


def test_weights_that_the_parser_does_not_miss(bench, onnx, monkeypatch):
    made = bench(STRIPPED, model=False, refit_from=onnx())
    names = [f"layer{number}" for number in range(7)]
    monkeypatch.setattr(made.trt.Refitter, "get_missing_weights", lambda self: names)
    with pytest.raises(ModelError, match=r"lacks 'layer0', .* 'layer4' and 2 more, which .* needs"):
        made.open()
    gc.collect()


def test_a_file_of_another_kind(bench, tmp_path):
    (tmp_path / "model.onnx").write_text("no weights")
    with pytest.raises(ModelError, match="Failed to parse ONNX model from file"):
        bench(STRIPPED, model=False, refit_from=tmp_path / "model.onnx").open()
    gc.collect()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OptionsError, match="refit_from: there is no file"):
        Bench(refit_from=tmp_path / "absent.onnx")


def test_no_room_to_refit(bench, onnx):
    made = bench(STRIPPED, model=False, refit_from=onnx(), memory_budget=6000)
    with pytest.raises(DeviceMemoryError, match="refitting .* failed for lack of memory.*memory_budget"):
        made.open()
    gc.collect()
    assert made.device.memory().held_nbytes == 0


def test_a_refitter_that_cannot_be_made(bench, onnx, monkeypatch):
    made = bench(STRIPPED, model=False, refit_from=onnx())
    monkeypatch.setattr(refit, "log_of", lambda module: None)
    with pytest.raises(ExecutionError, match="creating a refitter .* failed"):
        made.open()
    gc.collect()


def test_an_older_library_that_does_not_tell(bench, onnx, caplog):
    trt = StrictTensorRT(HostDevice(), version="10.13.2.6")
    plan = double_plan(STRIPPED, version="10.13.2.6")
    bench(STRIPPED, trt=trt, device=trt.device, plan=plan)
    assert "does not tell whether it has its weights" in caplog.text
    caplog.clear()
    again = bench(STRIPPED, trt=trt, device=trt.device, plan=plan, refit_from=onnx())
    context = again.model.create_context(again.device)
    again.run(again.bind(context), 9, again.arena())
    context.close()
    assert not caplog.records
