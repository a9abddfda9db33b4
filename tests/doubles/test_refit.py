"""How strict the double is about refitting."""

import gc

import pytest

from asynctrt.testing import LatchDevice
from tests.doubles.support import Bench, rows
from tests.doubles.tensorrt import EngineSpec, ViolationError, double_weights

STRIPPED = EngineSpec(stripped_weights_nbytes=1000)
PACKAGES = pytest.mark.parametrize("flavour", ["tensorrt", "tensorrt_rtx"])


@pytest.fixture
def onnx(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(double_weights(STRIPPED))
    return str(path)


def refitter_of(bench, engine=None):
    return bench.trt.Refitter(engine or bench.engine, bench.logger)


@PACKAGES
def test_an_engine_gets_its_weights(onnx, flavour):
    bench = Bench(STRIPPED, flavour=flavour)
    refitter = refitter_of(bench)
    assert refitter.get_all_weights() == refitter.get_missing_weights() == list(STRIPPED.weight_names)
    assert not refitter.refit_cuda_engine()
    assert any("Missing: step1, step2" in text for text in bench.logger.errors())
    parser = bench.trt.OnnxParserRefitter(refitter, bench.logger)
    assert parser.refit_from_file(onnx)
    assert refitter.get_missing_weights() == []
    assert refitter.refit_cuda_engine()
    held = len(bench.allocator.held)
    assert refitter.release_refit_resources()
    assert len(bench.allocator.held) == held - 1
    user = bench.user().give(rows(8, 16))
    user.run()
    user.check()
    assert bench.trt.violations() == ()


def test_weights_of_a_parser_that_is_gone(onnx):
    bench = Bench(STRIPPED)
    refitter = refitter_of(bench)
    assert bench.trt.OnnxParserRefitter(refitter, bench.logger).refit_from_file(onnx)
    gc.collect()
    with pytest.raises(ViolationError, match="a parser that was destroyed"):
        refitter.refit_cuda_engine()


def test_a_parser_whose_refitter_is_gone(onnx):
    bench = Bench(STRIPPED)
    parser = bench.trt.OnnxParserRefitter(refitter_of(bench), bench.logger)
    gc.collect()
    with pytest.raises(ViolationError, match="refitter was destroyed"):
        parser.refit_from_file(onnx)


def test_a_recorder_and_a_parser():
    bench = Bench(STRIPPED)
    refitter = refitter_of(bench)
    refitter.error_recorder = bench.recorder
    with pytest.raises(ViolationError, match="has an error recorder"):
        bench.trt.OnnxParserRefitter(refitter, bench.logger)


def test_a_batch_in_flight(onnx):
    bench = Bench(EngineSpec(refittable=True), device=LatchDevice())
    refitter = refitter_of(bench)
    user, stream = bench.user().give(rows(8, 16)), bench.stream()
    assert user.context.execute_async_v3(stream.handle)
    with pytest.raises(ViolationError, match="refitted while a batch ran"):
        refitter.refit_cuda_engine()
    bench.device.open()
    bench.close()


def test_what_cannot_be_refitted():
    bench = Bench(flavour="tensorrt_rtx")
    with pytest.raises(TypeError, match="nullptr"):
        refitter_of(bench)


def test_no_memory(onnx):
    bench = Bench(STRIPPED)
    refitter = refitter_of(bench)
    parser = bench.trt.OnnxParserRefitter(refitter, bench.logger)
    assert parser.refit_from_file(onnx)
    bench.allocator.refuse = True
    assert not refitter.refit_cuda_engine()
    assert "OutOfMemory" in bench.logger.errors()[-1]


def test_errors_of_a_parser(tmp_path):
    bench = Bench(STRIPPED)
    refitter = refitter_of(bench)
    parser = bench.trt.OnnxParserRefitter(refitter, bench.logger)
    assert not parser.refit_from_file(str(tmp_path / "absent.onnx"))
    assert parser.num_errors == 1
    assert "Failed to parse" in parser.get_error(0).desc()
    assert "Failed to parse" in repr(parser.get_error(0))
    assert parser.get_error(0).node_name() == ""
    with pytest.raises(TypeError):
        parser.refit_from_file(tmp_path)
