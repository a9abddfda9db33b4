"""Callbacks for TensorRT's output: messages go to a logger, errors to a recorder.

TensorRT calls both from its own threads at any time, so both lock, hold a bounded amount and never raise: an
exception in a callback would end the process. Their locks can be taken again by the thread that has them, as
the garbage that is collected meanwhile may hold TensorRT objects, whose end is logged. A recorder must
outlive whatever was created with it ("How TensorRT works", Error Handling and Logging), so models and
contexts hold references to theirs. The logger must outlive everything: TensorRT has one in a process.
"""

import ctypes
import logging
import re
import threading
from collections import deque
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, finalize

ERRORS_MAX: Final = 32
"""How many errors a recorder keeps; later ones are dropped, and the message says so."""

TEXT_MAX: Final = 2000
"""Characters of one error's text that go into a message."""

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
"""CUDA errors after which every call that this process makes on the device fails ("How TensorRT works",
Cross-Context CUDA Error Isolation), as TensorRT writes them: by number, by name or in CUDA's words."""

NO_MEMORY: Final = r"out of memory|OutOfMemory|allocation (?:failed|failure)|failed to allocate"
"""How TensorRT words that memory was refused. It has a code for that, and uses another one."""

logger = logging.getLogger("asynctrt.tensorrt")


class MessageLog:
    """Passes TensorRT's messages on to the logger ``asynctrt.tensorrt``, and to all models.

    TensorRT takes the first logger that a process passes, ignores later ones, and goes on to call the first
    after the runtime that brought it is gone. So there is one for each library, which lives for ever, and
    what it is told cannot be told apart by model.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._subscriptions: WeakSet[LogSubscription] = WeakSet()
        self.plugins: dict[str, Any] = {}
        """The libraries of plugins that were loaded, with TensorRT's handles, by their paths."""
        self.plugins_lock = threading.Lock()

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
        """Log messages from this level on, for as long as the subscription lives."""
        made = LogSubscription(verbosity)
        with self._lock:
            self._subscriptions.add(made)
        return made


class LogSubscription:
    """What one model wants to see of the messages, and the latest errors in its thread.

    Errors arrive here instead of at a recorder while none is attached: when a runtime is being created. They
    are those of the thread that made the subscription, as others load models of their own.
    """

    def __init__(self, verbosity: int) -> None:
        self.verbosity = verbosity
        self._thread = threading.get_ident()
        self._errors: deque[str] = deque(maxlen=ERRORS_MAX)

    def told(self, level: int, message: str) -> None:
        """Keep an error of its own thread."""
        if level >= logging.ERROR and threading.get_ident() == self._thread:
            self._errors.append(message)

    def take(self) -> tuple[str, ...]:
        """Return the latest errors, and forget them."""
        # One by one: what is collected meanwhile may log another.
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

    @property
    def has_errors(self) -> bool:
        """Whether there are errors to take."""
        return bool(self._errors)

    def take(self) -> "TensorRTErrors":
        """Return all errors so far, and forget them."""
        with self._lock:
            taken = TensorRTErrors(
                tuple((_code_name(code), text) for code, text in self._errors), overflowed=self._overflowed
            )
            self._errors.clear()
            self._overflowed = False
        return taken

    def report_error(self, code: Any, desc: str) -> bool:
        """Record one error. Called by TensorRT; ``False`` lets the failed call run to its end."""
        with self._lock:
            if len(self._errors) < ERRORS_MAX:
                self._errors.append((code, str(desc)))
            else:
                self._overflowed = True
        return False

    def num_errors(self) -> int:
        """Return how many errors are kept. Called by TensorRT."""
        return len(self._errors)

    # Which of the two names the bindings call differs between versions.
    get_num_errors = num_errors

    def get_error_code(self, index: int) -> Any:
        """Return the code of one error. Called by TensorRT."""
        return self._errors[index][0]

    def get_error_desc(self, index: int) -> str:
        """Return the text of one error. Called by TensorRT."""
        return self._errors[index][1]

    def has_overflowed(self) -> bool:
        """Return whether errors were dropped. Called by TensorRT."""
        return self._overflowed

    def clear(self) -> None:
        """Forget all errors. Called by TensorRT."""
        self.take()


class TensorRTErrors:
    """Errors taken from a recorder: each is the name of its code, empty for a logged one, and a text."""

    __slots__ = ("_errors", "_overflowed")

    def __init__(self, errors: tuple[tuple[str, str], ...], *, overflowed: bool = False) -> None:
        self._errors = errors
        self._overflowed = overflowed

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __str__(self) -> str:
        """Return all texts, without repetition, for the end of a message."""
        if not self._errors:
            return "TensorRT gave no reason"
        texts = dict.fromkeys(
            text.strip()[:TEXT_MAX] + (f" [{code}]" if code else "") for code, text in self._errors
        )
        more = "; further errors were dropped" if self._overflowed else ""
        return f"TensorRT said: {'; '.join(texts)}{more}"

    def has_code(self, name: str) -> bool:
        """Return whether any error has the code ``name`` of ``ErrorCodeTRT``."""
        return any(code == name for code, _ in self._errors)

    def search(self, pattern: str) -> re.Match[str] | None:
        """Return the first match of a pattern in the texts, ignoring case."""
        return re.search(pattern, "\n".join(text for _, text in self._errors), re.IGNORECASE)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether any of them says that memory was refused."""
        return self.has_code("FAILED_ALLOCATION") or self.search(NO_MEMORY) is not None

    @property
    def is_sticky(self) -> bool:
        """Whether any of them names a CUDA error after which nothing on the device can be trusted."""
        return any(STICKY.search(text) for _, text in self._errors)

    def joined(self, texts: tuple[str, ...]) -> "TensorRTErrors":
        """Return these errors followed by those that were logged."""
        return TensorRTErrors((*self._errors, *(("", text) for text in texts)), overflowed=self._overflowed)


class _Logs:
    """The logger of each library."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._logs: WeakKeyDictionary[Any, MessageLog] = WeakKeyDictionary()

    def find(self, module: Any) -> MessageLog:
        with self._lock:
            log = self._logs.get(module)
            if log is None:
                log = self._logs[module] = _make_log(module)
                if isinstance(module, ModuleType):
                    # TensorRT calls it until the process ends, whatever becomes of what holds it here.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(log))
            return log


_logs = _Logs()


def log_of(module: Any) -> MessageLog:
    """Return the one logger of a library: an ``ILogger`` of the flavour ``module``, which lives as long."""
    return _logs.find(module)


def _make_log(module: Any) -> MessageLog:
    class Log(MessageLog, module.ILogger):  # type: ignore[misc]  # The module is known only at run time.
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            MessageLog.__init__(self)

    return Log()


def make_recorder(module: Any) -> ErrorRecorder:
    """Create an error recorder that is an ``IErrorRecorder`` of the flavour ``module``."""

    class Recorder(ErrorRecorder, module.IErrorRecorder):  # type: ignore[misc]  # The module is known only at run time.
        def __init__(self) -> None:
            module.IErrorRecorder.__init__(self)
            ErrorRecorder.__init__(self)

    return Recorder()


def keep_alive(user: Any, *used: Any) -> None:
    """Keep everything in ``used`` alive for as long as ``user`` is, whatever else refers to ``user``.

    Callback objects must outlive the TensorRT objects that call them, and a traceback, for example, can keep
    an engine alive for longer than its model. What the bindings themselves keep alive differs between
    versions.
    """
    finalize(user, _let_go, used).atexit = False


def _let_go(used: tuple[Any, ...]) -> None:
    """Drop the reference to ``used``, which ends with this call."""


def _code_name(code: Any) -> str:
    return str(getattr(code, "name", code))
