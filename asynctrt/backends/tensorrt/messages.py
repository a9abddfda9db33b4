"""Callbacks for TensorRT's output: messages go to a logger, errors to a recorder.

TensorRT calls both from its own threads at any time. So both use locks, hold a bounded amount and never
raise: an exception in a callback would end the process. The locks are reentrant, because garbage collection
may free TensorRT objects, which log when they are freed. A recorder must outlive all objects created with it
("How TensorRT works", Error Handling and Logging), so models and contexts hold references to theirs. The
logger must outlive everything: TensorRT has one per process.
"""

import ctypes
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any, Final, Self, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, finalize

from asynctrt.errors import DESCRIBED_MAX

ERRORS_MAX: Final = 32
"""The maximum number of errors that a recorder keeps. Later ones are dropped, and the message says so."""

LEVELS: Final = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}
"""TensorRT's severities, as levels of :mod:`logging`."""

STICKY: Final = re.compile(
    r"(?:cudaError|Cuda failure:?|CUDA error:?)\s*\(?(?:214|220|700|702|709|710|71[4-9]|999)\b"
    r"|cudaError(?:IllegalAddress|LaunchFailure|LaunchTimeout|MisalignedAddress|IllegalInstruction"
    r"|InvalidAddressSpace|InvalidPc|HardwareStackError|Assert|ECCUncorrectable|NvlinkUncorrectable)"
    r"|CUDA_ERROR_(?:ILLEGAL_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION"
    r"|INVALID_ADDRESS_SPACE|INVALID_PC|HARDWARE_STACK_ERROR|ASSERT|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE)"
    r"|illegal memory access|misaligned address|unspecified launch failure|illegal instruction"
    r"|device-side assert|uncorrectable (?:ECC|NVLink) error|hardware stack error",
    re.IGNORECASE,
)
"""CUDA errors after which all calls of this process on the device fail ("How TensorRT works", Cross-Context
CUDA Error Isolation), in the forms that TensorRT uses: by number, by name or in CUDA's words."""

NO_MEMORY: Final = r"out of memory|OutOfMemory|allocation (?:failed|failure)|failed to allocate"
"""TensorRT's texts for a refused allocation. It has an error code for that, but uses another one."""

logger = logging.getLogger("asynctrt.tensorrt")

F = TypeVar("F", bound=Callable[..., Any])


def callback(function: F) -> F:
    """Mark a method that TensorRT calls, and may call again in the same thread before it returns.

    Garbage that is collected while it runs frees TensorRT objects, and these log. The bindings (pybind11)
    would take that for a call of the base class, which they refuse as "pure virtual": the message is lost, or
    memory is not freed. They tell by the name of the running code, so the code gets another name.
    """
    method = cast("FunctionType", function)
    method.__code__ = method.__code__.replace(co_name=f"{method.__name__} for TensorRT")
    return function


class MessageLog:
    """Forwards TensorRT's messages to the logger ``asynctrt.tensorrt``, and to all models.

    TensorRT uses the first logger that a process passes, ignores later ones, and keeps calling the first
    after its runtime is gone. So there is one logger per library, which lives forever, and its messages
    cannot be attributed to a model.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._subscriptions: WeakSet[LogSubscription] = WeakSet()
        self.plugins: dict[str, Any] = {}
        """The plugin libraries that were loaded: TensorRT's handles by path."""
        self.plugins_lock = threading.Lock()

    @callback
    def log(self, severity: Any, msg: str) -> None:
        """Log one message. Called by TensorRT."""
        try:
            level = LEVELS.get(str(getattr(severity, "name", severity)), logging.WARNING)
            with self._lock:
                subscriptions = list(self._subscriptions)
            for subscription in subscriptions:
                subscription.told(level, msg)
            if level >= min([one.verbosity for one in subscriptions], default=logging.WARNING):
                logger.log(level, "%s", msg)
        except Exception:
            logger.debug("a message from TensorRT could not be logged", exc_info=True)

    def subscribe(self, verbosity: int) -> "LogSubscription":
        """Log messages of this level or higher for as long as the subscription lives."""
        made = LogSubscription(verbosity)
        with self._lock:
            self._subscriptions.add(made)
        return made


class LogSubscription:
    """The verbosity of one model, and the latest errors in its thread.

    Errors arrive here instead of at a recorder while none is attached, as during the creation of a runtime.
    Only errors of the subscribing thread are kept, because other threads load other models.
    """

    def __init__(self, verbosity: int) -> None:
        self.verbosity = verbosity
        self._thread = threading.get_ident()
        self._errors: deque[str] = deque(maxlen=ERRORS_MAX)

    def told(self, level: int, message: str) -> None:
        """Keep the message if it is an error of this subscription's thread."""
        if level >= logging.ERROR and threading.get_ident() == self._thread:
            self._errors.append(message)

    def take(self) -> tuple[str, ...]:
        """Return and clear the latest errors."""
        # One by one, because garbage collection in between may log another.
        taken = []
        while self._errors:
            taken.append(self._errors.popleft())
        return tuple(taken)


class ErrorRecorder:
    """Keeps the errors of one TensorRT object until an exception takes them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._errors: list[tuple[Any, str]] = []
        self._overflowed = False

    def another(self) -> Self:
        """Return another recorder of the same class: a class is never freed without the collector."""
        return type(self)()

    @property
    def has_errors(self) -> bool:
        """Whether there are errors to take."""
        return bool(self._errors)

    def take(self) -> "TensorRTErrors":
        """Return and clear all errors so far."""
        with self._lock:
            taken = TensorRTErrors(
                tuple((str(getattr(code, "name", code)), text) for code, text in self._errors),
                overflowed=self._overflowed,
            )
            self._errors.clear()
            self._overflowed = False
        return taken

    @callback
    def report_error(self, code: Any, desc: str) -> bool:
        """Record one error. Called by TensorRT; ``False`` lets the failed call continue."""
        with self._lock:
            if len(self._errors) < ERRORS_MAX:
                self._errors.append((code, str(desc)))
            else:
                self._overflowed = True
        return False

    @callback
    def num_errors(self) -> int:
        """Return the number of errors kept. Called by TensorRT."""
        return len(self._errors)

    # The bindings call one of these two names, depending on the version.
    get_num_errors = num_errors

    @callback
    def get_error_code(self, index: int) -> Any:
        """Return the code of one error. Called by TensorRT."""
        return self._errors[index][0]

    @callback
    def get_error_desc(self, index: int) -> str:
        """Return the text of one error. Called by TensorRT."""
        return self._errors[index][1]

    @callback
    def has_overflowed(self) -> bool:
        """Return whether errors were dropped. Called by TensorRT."""
        return self._overflowed

    @callback
    def clear(self) -> None:
        """Clear all errors. Called by TensorRT."""
        self.take()


class TensorRTErrors:
    """Errors taken from a recorder: each has a code name, empty for a logged error, and a text."""

    __slots__ = ("_errors", "_overflowed")

    def __init__(self, errors: tuple[tuple[str, str], ...], *, overflowed: bool = False) -> None:
        self._errors = errors
        self._overflowed = overflowed

    @classmethod
    def logged(cls, texts: Iterable[str]) -> "TensorRTErrors":
        """Return errors that were logged, which have texts and no codes."""
        return cls(tuple(("", text) for text in texts))

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __str__(self) -> str:
        """Return all texts, without repetition, to end a message with."""
        if not self._errors:
            return "TensorRT gave no reason"
        texts = dict.fromkeys(
            text.strip()[:DESCRIBED_MAX] + (f" [{code}]" if code else "") for code, text in self._errors
        )
        more = "; further errors were dropped" if self._overflowed else ""
        return f"TensorRT said: {'; '.join(texts)}{more}"

    def search(self, pattern: str) -> re.Match[str] | None:
        """Return the first match of a pattern in the texts, ignoring case."""
        return re.search(pattern, "\n".join(text for _, text in self._errors), re.IGNORECASE)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether any of them reports a refused allocation."""
        has_code = any(code == "FAILED_ALLOCATION" for code, _ in self._errors)
        return has_code or self.search(NO_MEMORY) is not None

    @property
    def is_sticky(self) -> bool:
        """Whether any of them names a CUDA error after which nothing on the device can be trusted."""
        return any(STICKY.search(text) for _, text in self._errors)

    def joined(self, texts: tuple[str, ...]) -> "TensorRTErrors":
        """Return these errors followed by logged ones."""
        return TensorRTErrors((*self._errors, *(("", text) for text in texts)), overflowed=self._overflowed)


class _Logs:
    """The loggers, one per library."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._logs: WeakKeyDictionary[Any, MessageLog] = WeakKeyDictionary()

    def find(self, module: Any) -> MessageLog:
        with self._lock:
            log = self._logs.get(module)
            if log is None:
                log = self._logs[module] = _make_log(module)
                if isinstance(module, ModuleType):
                    # TensorRT calls it until the process ends, even after its owners here are gone.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(log))
            return log


_logs = _Logs()


def log_of(module: Any) -> MessageLog:
    """Return the one logger of a library: an ``ILogger`` for the flavour ``module``, which lives as long."""
    return _logs.find(module)


def _make_log(module: Any) -> MessageLog:
    class Log(MessageLog, module.ILogger):  # type: ignore[misc]  # The module is known only at run time.
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            MessageLog.__init__(self)

    return Log()


def make_recorder(module: Any) -> ErrorRecorder:
    """Create an error recorder that is an ``IErrorRecorder`` for the flavour ``module``."""

    class Recorder(ErrorRecorder, module.IErrorRecorder):  # type: ignore[misc]  # The module is known only at run time.
        def __init__(self) -> None:
            module.IErrorRecorder.__init__(self)
            ErrorRecorder.__init__(self)

    return Recorder()


def create_with_errors(kind: Any, module: Any, told: LogSubscription) -> tuple[Any, tuple[str, ...]]:
    """Create a runtime or a builder, and return it with the errors: TensorRT only logs that CUDA fails."""
    try:
        return kind(log_of(module)), told.take()
    except (RuntimeError, TypeError) as error:
        return None, (*told.take(), str(error))


def keep_alive(user: Any, *used: Any) -> None:
    """Keep everything in ``used`` alive as long as ``user`` lives, whatever else refers to ``user``.

    Callback objects must outlive the TensorRT objects that call them, and a traceback, for example, can keep
    an engine alive for longer than its model. The bindings themselves keep different objects alive in
    different versions.
    """
    finalize(user, _let_go, used).atexit = False


def _let_go(used: tuple[Any, ...]) -> None:
    """Drop the reference to ``used`` by returning."""
