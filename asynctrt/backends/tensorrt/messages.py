"""What TensorRT says: its messages to a logger, its errors to a recorder.

TensorRT calls both from threads of its own at any time, so both lock, hold a bounded amount and never raise:
an exception in a callback would end the process. Both must outlive what was made with them ("How TensorRT
works", Error Handling and Logging), so models and contexts hold them by reference.
"""

import logging
import re
import threading
from collections import deque
from typing import Any, Final
from weakref import finalize

ERRORS_MAX: Final = 32
"""Errors that a recorder keeps; later ones are counted and dropped."""

TEXT_MAX: Final = 2000
"""How much of one error's text goes into a message."""

LEVELS: Final = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}
"""TensorRT's severities as levels of :mod:`logging`."""

STICKY: Final = re.compile(
    r"(?:cudaError|Cuda failure:?|CUDA error:?)\s*\(?(?:214|220|700|702|709|71[0-9])\b"
    r"|cudaError(?:IllegalAddress|LaunchFailure|LaunchTimeout|MisalignedAddress|IllegalInstruction"
    r"|InvalidAddressSpace|InvalidPc|HardwareStackError|Assert|ECCUncorrectable|NvlinkUncorrectable)"
    r"|CUDA_ERROR_(?:ILLEGAL_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION"
    r"|INVALID_ADDRESS_SPACE|INVALID_PC|HARDWARE_STACK_ERROR|ASSERT|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE)"
    r"|illegal memory access|misaligned address|unspecified launch failure|illegal instruction"
    r"|device-side assert|uncorrectable (?:ECC|NVLink) error|hardware stack error",
    re.IGNORECASE,
)
"""CUDA errors after which every call of the process on the device fails ("How TensorRT works", Cross-Context
CUDA Error Isolation), as TensorRT writes them: by number, by name or in CUDA's words."""

logger = logging.getLogger("asynctrt.tensorrt")


class MessageLog:
    """Hands TensorRT's messages to the logger ``asynctrt.tensorrt``, and keeps the latest errors among them.

    Errors come here instead of to the recorder when none is attached yet: while a runtime is being made.
    """

    def __init__(self, verbosity: int) -> None:
        self._verbosity = verbosity
        self._lock = threading.Lock()
        self._errors: deque[str] = deque(maxlen=ERRORS_MAX)

    def log(self, severity: Any, msg: str) -> None:
        """For TensorRT: one message."""
        try:
            level = LEVELS.get(str(getattr(severity, "name", severity)), logging.WARNING)
            if level >= logging.ERROR:
                with self._lock:
                    self._errors.append(msg)
            if level >= self._verbosity:
                logger.log(level, "%s", msg)
        except Exception:
            logger.debug("a message of TensorRT could not be logged", exc_info=True)

    def take(self) -> tuple[str, ...]:
        """The latest errors, which are then forgotten."""
        with self._lock:
            taken = tuple(self._errors)
            self._errors.clear()
        return taken


class ErrorRecorder:
    """Keeps the errors of one TensorRT object, until they are taken for an exception."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[tuple[Any, str]] = []
        self._overflowed = False

    @property
    def has_errors(self) -> bool:
        """Whether there are any, without taking them."""
        return bool(self._errors)

    def take(self) -> "Errors":
        """All errors until now, which are then forgotten."""
        with self._lock:
            taken = Errors(
                tuple((_code_name(code), text) for code, text in self._errors), overflowed=self._overflowed
            )
            self._errors.clear()
            self._overflowed = False
        return taken

    def report_error(self, code: Any, desc: str) -> bool:
        """For TensorRT: one error. False: the call that failed may go on to its end."""
        with self._lock:
            if len(self._errors) < ERRORS_MAX:
                self._errors.append((code, str(desc)))
            else:
                self._overflowed = True
        return False

    def num_errors(self) -> int:
        """For TensorRT: how many are kept."""
        return len(self._errors)

    # The bindings ask for one name and were seen to have asked for the other.
    get_num_errors = num_errors

    def get_error_code(self, index: int) -> Any:
        """For TensorRT: the code of one."""
        return self._errors[index][0]

    def get_error_desc(self, index: int) -> str:
        """For TensorRT: the text of one."""
        return self._errors[index][1]

    def has_overflowed(self) -> bool:
        """For TensorRT: whether some were dropped."""
        return self._overflowed

    def clear(self) -> None:
        """For TensorRT: forget all."""
        self.take()


class Errors:
    """Errors that were taken from a recorder: each a code's name, empty for what was logged, and a text."""

    __slots__ = ("_errors", "_overflowed")

    def __init__(self, errors: tuple[tuple[str, str], ...], *, overflowed: bool = False) -> None:
        self._errors = errors
        self._overflowed = overflowed

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __str__(self) -> str:
        """All texts, each once, as they go into a message."""
        if not self._errors:
            return "TensorRT gave no reason"
        texts = dict.fromkeys(
            text.strip()[:TEXT_MAX] + (f" [{code}]" if code else "") for code, text in self._errors
        )
        more = "; more errors followed that were not kept" if self._overflowed else ""
        return f"TensorRT said: {'; '.join(texts)}{more}"

    def has_code(self, name: str) -> bool:
        """Whether one of them has the code ``name`` of ``ErrorCodeTRT``."""
        return any(code == name for code, _ in self._errors)

    def search(self, pattern: str) -> re.Match[str] | None:
        """The first place in the texts where a pattern is found, in any case."""
        return re.search(pattern, "\n".join(text for _, text in self._errors), re.IGNORECASE)

    @property
    def is_sticky(self) -> bool:
        """Whether they name a CUDA error after which nothing on the device can be trusted."""
        return any(STICKY.search(text) for _, text in self._errors)

    def joined(self, texts: tuple[str, ...]) -> "Errors":
        """These and what the logger was told."""
        return Errors((*self._errors, *(("", text) for text in texts)), overflowed=self._overflowed)


def make_log(module: Any, verbosity: int) -> MessageLog:
    """A logger as the flavour ``module`` takes one."""

    class Log(MessageLog, module.ILogger):  # type: ignore[misc]  # Which module is known at run time.
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            MessageLog.__init__(self, verbosity)

    return Log()


def make_recorder(module: Any) -> ErrorRecorder:
    """An error recorder as the flavour ``module`` takes one."""

    class Recorder(ErrorRecorder, module.IErrorRecorder):  # type: ignore[misc]  # Which module is known at run time.
        def __init__(self) -> None:
            module.IErrorRecorder.__init__(self)
            ErrorRecorder.__init__(self)

    return Recorder()


def keep_alive(user: Any, *used: Any) -> None:
    """Let everything in ``used`` live for as long as ``user`` does, whoever else holds on to that.

    What TensorRT calls back must outlive what calls it, and a traceback, say, can hold an engine longer than
    its model does. The bindings hold some of it themselves; which, differs from version to version.
    """
    finalize(user, _let_go, used).atexit = False


def _let_go(used: tuple[Any, ...]) -> None:
    """Nothing is left to be done: the reference to ``used`` goes with this call."""


def _code_name(code: Any) -> str:
    return str(getattr(code, "name", code))
