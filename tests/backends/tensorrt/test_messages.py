"""The logger and the error recorder, as TensorRT calls them: from any thread, with anything."""

import logging
import threading

import pytest
import tensorrt_lean
import tensorrt_rtx

from asynctrt.backends.tensorrt.messages import ERRORS_MAX, TensorRTErrors, make_log, make_recorder
from asynctrt.devices.host import HostDevice
from asynctrt.testing.tensorrt import StrictTensorRT

MODULES = {
    "double": lambda: StrictTensorRT(HostDevice()),
    "tensorrt_lean": lambda: tensorrt_lean,
    "tensorrt_rtx": lambda: tensorrt_rtx,
}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]()


def test_severities_become_levels(module, caplog):
    log = make_log(module, logging.DEBUG)
    with caplog.at_level(logging.DEBUG, "asynctrt.tensorrt"):
        for name in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
            message = f"a message %s of {name}"
            log.log(getattr(module.ILogger.Severity, name), message)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("CRITICAL", "a message %s of INTERNAL_ERROR"),
        ("ERROR", "a message %s of ERROR"),
        ("WARNING", "a message %s of WARNING"),
        ("INFO", "a message %s of INFO"),
        ("DEBUG", "a message %s of VERBOSE"),
    ]


def test_what_is_below_the_verbosity_is_not_logged_but_errors_are_kept(module, caplog):
    log = make_log(module, logging.CRITICAL)
    with caplog.at_level(logging.DEBUG, "asynctrt.tensorrt"):
        log.log(module.ILogger.Severity.ERROR, "an error")
        log.log(module.ILogger.Severity.WARNING, "a warning")
    assert not caplog.records
    assert log.take() == ("an error",)
    assert log.take() == ()


def test_a_handler_that_raises_does_not_reach_tensorrt(module):
    class Broken(logging.Handler):
        def emit(self, record):
            raise ValueError("broken")

    log = make_log(module, logging.DEBUG)
    handler, logger = Broken(), logging.getLogger("asynctrt.tensorrt")
    logger.addHandler(handler)
    try:
        log.log(module.ILogger.Severity.ERROR, "an error")
        log.log(object(), "of an unknown severity")
    finally:
        logger.removeHandler(handler)
    assert log.take() == ("an error",)


def test_errors_are_recorded_and_taken_once(module):
    recorder = make_recorder(module)
    codes = module.ErrorCodeTRT
    assert not recorder.has_errors
    assert recorder.report_error(codes.FAILED_EXECUTION, "the first") is False
    recorder.report_error(codes.FAILED_ALLOCATION, "the second")
    assert recorder.has_errors
    assert recorder.num_errors() == 2
    assert recorder.get_error_code(1) == codes.FAILED_ALLOCATION
    assert recorder.get_error_desc(0) == "the first"
    errors = recorder.take()
    assert str(errors) == "TensorRT said: the first [FAILED_EXECUTION]; the second [FAILED_ALLOCATION]"
    assert errors.has_code("FAILED_ALLOCATION")
    assert not errors.has_code("INVALID_STATE")
    assert not recorder.take()
    assert recorder.num_errors() == 0


def test_a_recorder_is_bounded_and_says_so(module):
    recorder = make_recorder(module)
    for number in range(ERRORS_MAX + 1):
        recorder.report_error(module.ErrorCodeTRT.INTERNAL_ERROR, f"error {number}")
    assert recorder.num_errors() == ERRORS_MAX
    assert recorder.has_overflowed()
    assert "dropped" in str(recorder.take())
    assert not recorder.has_overflowed()


def test_a_recorder_is_used_from_many_threads(module):
    recorder = make_recorder(module)
    barrier = threading.Barrier(4)

    def report():
        barrier.wait(10)
        for _ in range(200):
            recorder.report_error(module.ErrorCodeTRT.INTERNAL_ERROR, "an error")
            recorder.take()

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not recorder.take()


def test_a_text_that_came_twice_is_said_once():
    assert str(TensorRTErrors((("A", "same"), ("A", "same")))) == "TensorRT said: same [A]"
    assert str(TensorRTErrors((("", "logged"),))) == "TensorRT said: logged"
    assert str(TensorRTErrors(())) == "TensorRT gave no reason"


def test_long_texts_are_cut():
    assert len(str(TensorRTErrors((("A", "x" * 100_000),)))) < 5_000


@pytest.mark.parametrize(
    "text",
    [
        "Cask (Cask convolution execution) ... (cudaError 700: an illegal memory access was encountered)",
        "Cuda Runtime (an illegal memory access was encountered)",
        "CUDA error: 719",
        "CUDA_ERROR_LAUNCH_FAILED",
        "cudaErrorMisalignedAddress",
        "uncorrectable ECC error encountered",
    ],
)
def test_errors_that_end_the_use_of_a_device(text):
    assert TensorRTErrors((("UNSPECIFIED_ERROR", text),)).is_sticky


@pytest.mark.parametrize(
    "text", ["cudaError 35: CUDA driver version is insufficient", "out of memory", "cudaError 2: 700 bytes"]
)
def test_errors_that_do_not(text):
    assert not TensorRTErrors((("UNSPECIFIED_ERROR", text),)).is_sticky
