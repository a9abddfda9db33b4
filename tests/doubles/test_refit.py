"""How strict the double is about refitting."""

import gc

import pytest

from asynctrt.testing import LatchDevice
from tests.doubles.support import Bench, rows
from tests.doubles.tensorrt import EngineSpec, ViolationError, double_weights

STRIPPED = EngineSpec(stripped_weights_nbytes=1000)


@pytest.fixture
def onnx(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(double_weights(STRIPPED))
    return str(path)


def refitter_of(bench, engine=None):
    return bench.trt.Refitter(engine or bench.engine, bench.logger)


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
