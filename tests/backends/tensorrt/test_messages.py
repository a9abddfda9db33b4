"""The logger and the error recorder, as TensorRT calls them: from any thread, with anything."""

import gc
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from asynctrt.backends.tensorrt.messages import ERRORS_MAX, LEVELS, TensorRTErrors, log_of, make_recorder
from tests.backends.tensorrt.helpers import in_threads

ROOT = Path(__file__).parents[3]


def test_severities_become_levels(module, caplog):
    log = log_of(module)
    loud = log.subscribe(logging.DEBUG)
    with caplog.at_level(logging.DEBUG, "asynctrt.tensorrt"):
        for name in LEVELS:
            message = f"a message %s of {name}"
            log.log(getattr(module.ILogger.Severity, name), message)
    assert loud.take() == ("a message %s of INTERNAL_ERROR", "a message %s of ERROR")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("CRITICAL", "a message %s of INTERNAL_ERROR"),
        ("ERROR", "a message %s of ERROR"),
        ("WARNING", "a message %s of WARNING"),
        ("INFO", "a message %s of INFO"),
        ("DEBUG", "a message %s of VERBOSE"),
    ]


def test_what_is_below_the_verbosity_is_not_logged_but_errors_are_kept(module, caplog):
    log = log_of(module)
    seen = log.subscribe(logging.CRITICAL)
    with caplog.at_level(logging.DEBUG, "asynctrt.tensorrt"):
        log.log(module.ILogger.Severity.ERROR, "an error")
        log.log(module.ILogger.Severity.WARNING, "a warning")
    assert not caplog.records
    assert seen.take() == ("an error",)
    assert seen.take() == ()


def test_a_handler_that_raises_does_not_reach_tensorrt(module):
    class Broken(logging.Handler):
        def emit(self, record):
            raise ValueError("broken")

    log = log_of(module)
    seen = log.subscribe(logging.DEBUG)
    handler, logger = Broken(), logging.getLogger("asynctrt.tensorrt")
    logger.addHandler(handler)
    try:
        log.log(module.ILogger.Severity.ERROR, "an error")
        log.log(object(), "of an unknown severity")
    finally:
        logger.removeHandler(handler)
    assert seen.take() == ("an error",)


def test_a_library_has_one_logger_and_each_model_its_own_verbosity(module, caplog):
    log = log_of(module)
    assert log_of(module) is log
    loud, quiet = log.subscribe(logging.DEBUG), log.subscribe(logging.ERROR)
    with caplog.at_level(logging.DEBUG, "asynctrt.tensorrt"):
        log.log(module.ILogger.Severity.INFO, "once")
        del loud
        gc.collect()
        log.log(module.ILogger.Severity.INFO, "never")
        log.log(module.ILogger.Severity.ERROR, "an error")
    assert [record.getMessage() for record in caplog.records] == ["once", "an error"]
    assert quiet.take() == ("an error",)


def test_what_another_thread_caused_is_not_blamed_on_a_model(module):
    log = log_of(module)
    mine, others = log.subscribe(logging.CRITICAL), []

    def load():
        seen = log.subscribe(logging.CRITICAL)
        log.log(module.ILogger.Severity.ERROR, "an error")
        others.append(seen.take())

    in_threads(load, 1)
    assert others == [("an error",)]
    assert mine.take() == ()


def test_the_garbage_of_a_message_may_log_one_of_its_own(module):
    """Whatever is allocated while a lock is held may start a collection, and that free a TensorRT object."""
    log, recorder = log_of(module), make_recorder(module)

    class Freed:
        def __del__(self):
            log.log(module.ILogger.Severity.VERBOSE, "freed")
            recorder.report_error(module.ErrorCodeTRT.INTERNAL_ERROR, "freed")

    class Message(str):
        __slots__ = ()

        def __str__(self):
            Freed()
            return "a message"

    finished = []

    def report():
        recorder.report_error(module.ErrorCodeTRT.INTERNAL_ERROR, Message())
        finished.append(len(recorder.take().__str__()))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    thread.join(20)
    assert finished


def printed(program):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


TWO_RUNTIMES = """
import gc, logging, sys
import tensorrt_rtx as trt
from asynctrt.backends.tensorrt.messages import log_of

logging.basicConfig(stream=sys.stdout)

def runtime():
    model = log_of(trt).subscribe(logging.WARNING)
    return trt.Runtime(log_of(trt)), model

first, second = runtime(), runtime()
del first
gc.collect()
trt.get_plugin_registry().get_creator("unheard-of", "1", "")
print("the second one goes on", flush=True)
"""


def test_the_real_library_calls_the_first_logger_for_ever():
    """What belongs to no runtime, such as plugins, is logged with it; freed, it ended the process."""
    said = printed(TWO_RUNTIMES).splitlines()
    assert said[-1] == "the second one goes on"
    assert any("unheard-of" in line for line in said[:-1]), "nothing was logged, so this proves nothing"
    assert not any("differs" in line for line in said)


WITHIN_A_MESSAGE = """
import logging, operator, sys
import tensorrt_rtx as trt
from asynctrt.backends.tensorrt.messages import log_of

logging.basicConfig(stream=sys.stdout)
log = log_of(trt)
runtime = trt.Runtime(log)

class Severity:
    get_creator = staticmethod(trt.get_plugin_registry().get_creator)
    name = property(operator.methodcaller("get_creator", "inner", "1", ""))

log.log(Severity(), "outer")
"""


def test_the_real_library_logs_while_it_logs():
    """As when garbage is collected there: the bindings took the second for a call of the base class."""
    said = printed(WITHIN_A_MESSAGE).splitlines()
    assert [word for line in said for word in ("outer", "inner") if word in line] == ["inner", "outer"]


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
    assert errors.is_out_of_memory
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

    def report():
        for _ in range(200):
            recorder.report_error(module.ErrorCodeTRT.INTERNAL_ERROR, "an error")
            recorder.take()

    in_threads(report)
    assert not recorder.take()


def test_a_text_that_came_twice_is_said_once():
    assert str(TensorRTErrors((("A", "same"), ("A", "same")))) == "TensorRT said: same [A]"
    assert str(TensorRTErrors((("", "logged"),))) == "TensorRT said: logged"
    assert str(TensorRTErrors(())) == "TensorRT gave no reason"


def test_long_texts_are_cut():
    assert len(str(TensorRTErrors((("A", "x" * 100_000),)))) < 5_000


@pytest.mark.parametrize(
    ("text", "is_sticky"),
    [
        (
            "Cask (Cask convolution execution) ... (cudaError 700: an illegal memory access was encountered)",
            True,
        ),
        ("Cuda Runtime (an illegal memory access was encountered)", True),
        ("CUDA error: 719", True),
        ("CUDA error: 714", True),
        ("CUDA error: 999", True),
        ("CUDA_ERROR_LAUNCH_FAILED", True),
        ("cudaErrorMisalignedAddress", True),
        ("uncorrectable ECC error encountered", True),
        ("cudaError 35: CUDA driver version is insufficient", False),
        ("out of memory", False),
        ("cudaError 2: 700 bytes", False),
        ("cudaError 712: part or all of the requested memory range is already mapped", False),
    ],
)
def test_errors_that_end_the_use_of_a_device(text, is_sticky):
    assert TensorRTErrors((("UNSPECIFIED_ERROR", text),)).is_sticky == is_sticky
