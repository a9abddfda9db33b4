"""The base of the double's runtimes, engines and contexts: logger, allocator, error recorder."""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from asynctrt.devices.base import ALIGNMENT, Buffer, Device
from asynctrt.errors import DeviceMemoryError
from tests.doubles.tensorrt.monitor import Executor, ViolationError, ViolationMonitor
from tests.doubles.tensorrt.names import (
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    IErrorRecorder,
    IGpuAllocator,
    ILogger,
    require_initialised,
)
from tests.doubles.tensorrt.spec import Flavour

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Block:
    """Device memory that an engine or a context holds."""

    def __init__(self, address: int, nbytes: int, release: Callable[[], object]) -> None:
        self.address = address
        self.nbytes = nbytes
        self._release: Callable[[], object] | None = release

    def close(self) -> None:
        """Free it. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class GlobalLogger:
    """The logger of the whole library: the first that was passed since there was no runtime, and no other.

    A runtime logs with its own, and what belongs to no runtime, such as plugins, with this one. The library
    counts its runtimes, but keeps a bare pointer to the logger: it dangles once the logger is destroyed, and
    the next message ends the process, although later runtimes were given loggers of their own.
    """

    def __init__(self) -> None:
        self._logger: weakref.ref[ILogger] | None = None
        self._runtimes = 0
        # A runtime may be collected, and leave, while this thread has it.
        self._lock = threading.RLock()

    def register(self, runtime: object, logger: ILogger) -> bool:
        """Note a runtime and its logger; return whether that is the one that is used."""
        with self._lock:
            if not self._runtimes or self._logger is None:
                self._logger = weakref.ref(logger)
            self._runtimes += 1
        weakref.finalize(runtime, self._leave).atexit = False
        return self._logger() is logger

    def find(self) -> ILogger | None:
        """Return the logger that is used, or ``None`` if it was destroyed."""
        return None if self._logger is None else self._logger()

    def _leave(self) -> None:
        with self._lock:
            self._runtimes -= 1


@dataclass(frozen=True, slots=True)
class Library:
    """The state that all objects of one double share."""

    device: Device
    monitor: ViolationMonitor
    executor: Executor
    version: str
    compute_capability: tuple[int, int]
    flavour: Flavour = "tensorrt"
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers for contexts and batches."""
    log: GlobalLogger = field(default_factory=GlobalLogger)
    plugins: set[str] = field(default_factory=set)
    """The names of the plugins that are registered."""
    compiled: list[str] = field(default_factory=list)
    """What TensorRT for RTX has compiled, in order."""


class Core:
    """The state that a runtime shares with everything that was created from it, and that outlives it.

    It refers weakly to logger, allocator and recorder: the application has to keep them alive, and using one
    that was destroyed is a violation ("How TensorRT works", Object Lifetimes).
    """

    def __init__(self, library: Library, logger: ILogger) -> None:
        self.library = library
        self.version = library.version
        self.device = library.device
        self.monitor = library.monitor
        self.executor = library.executor
        self.is_lean_code_allowed = False
        self._logger = weakref.ref(logger)
        self._allocator: weakref.ref[IGpuAllocator] | None = None

    @property
    def logger(self) -> ILogger:
        """The application's logger."""
        logger = self._logger()
        if logger is None:
            raise self.monitor.found(
                "the logger was destroyed before the objects that use it, which it has to outlive"
            )
        if self.library.log.find() is None:
            raise self.monitor.found(
                "the logger that was passed first was destroyed before the objects of a later runtime: the "
                "library goes on to use it for what belongs to no runtime"
            )
        return logger

    @property
    def allocator(self) -> IGpuAllocator | None:
        """The application's allocator, or ``None`` if it has not set one."""
        if self._allocator is None:
            return None
        allocator = self._allocator()
        if allocator is None:
            raise self.monitor.found(
                "the GPU allocator was destroyed before the objects that use it, which it has to outlive"
            )
        return allocator

    @allocator.setter
    def allocator(self, allocator: IGpuAllocator | None) -> None:
        """Allocate device memory from there from now on."""
        self._allocator = None if allocator is None else weakref.ref(allocator)

    def check(self) -> None:
        """Raise a violation that was noted, or that a callback object was destroyed, as every call does
        first."""
        self.executor.poll()
        self.monitor.raise_noted()
        _ = self.logger, self.allocator

    def say(self, severity: Any, message: str) -> None:
        """Log a message with the application's logger."""
        self.logger.log(severity, message)

    def allocate(self, nbytes: int) -> Block | None:
        """Allocate from the application's allocator or, without one, from the device; ``None`` if it is
        refused."""
        if not nbytes:
            return Block(0, 0, lambda: None)
        allocator = self.allocator
        if allocator is None:
            try:
                buffer: Buffer = self.device.allocate(nbytes)
            except DeviceMemoryError:
                return None
            return Block(buffer.address, nbytes, buffer.close)
        try:
            # The real library calls these two of a plain IGpuAllocator, and never the asynchronous ones.
            address = allocator.allocate(nbytes, ALIGNMENT, 0)
        except NotImplementedError as error:
            self.say(ILogger.ERROR, str(error))
            return None
        except Exception:  # The bindings write it to the standard error stream, and refuse the memory.
            return None
        if address is None:
            raise self.monitor.found(
                "the GPU allocator returned None, of which the bindings complain on the standard error "
                "stream: refuse memory with 0"
            )
        if int(address) == 0:
            return None
        if address % ALIGNMENT:
            raise self.monitor.found(
                f"the GPU allocator returned {address:#x}, which is not aligned to {ALIGNMENT} bytes"
            )
        return Block(
            int(address), nbytes, functools.partial(self._give_back, weakref.ref(allocator), int(address))
        )

    def _give_back(self, allocator: "weakref.ref[IGpuAllocator]", address: int) -> None:
        living = allocator()
        if living is None:
            self.monitor.note(
                f"the GPU allocator was destroyed before the memory at {address:#x} was returned to it"
            )
            return
        if not living.deallocate(address):
            self.say(ILogger.ERROR, f"the GPU allocator did not free the memory at {address:#x}")


class Reporter:
    """A TensorRT object with an error recorder, which it passes on to the objects that it creates."""

    def __init__(self, core: Core, recorder: "weakref.ref[IErrorRecorder] | None") -> None:
        self._core = core
        self._recorder = recorder

    @property
    def error_recorder(self) -> IErrorRecorder | None:
        """The recorder of errors, which go to the logger if it is ``None``."""
        return None if self._recorder is None else self._living_recorder()

    @error_recorder.setter
    def error_recorder(self, recorder: IErrorRecorder | None) -> None:
        """Attach a recorder, or none. Objects that are created from now on inherit it."""
        if recorder is not None:
            require_initialised(recorder, IErrorRecorder)
        else:
            self._check_detachable()
        self._recorder = None if recorder is None else weakref.ref(recorder)

    def _check_detachable(self) -> None:
        """Check that it may be left without a recorder."""

    def _living_recorder(self) -> IErrorRecorder:
        recorder = self._recorder() if self._recorder is not None else None
        if recorder is None:
            raise self._core.monitor.found(
                "the error recorder was destroyed before the object that it is attached to"
            )
        return recorder

    def _report(self, code: ErrorCodeTRT, where: str, kind: str, text: str) -> None:
        """Report an error, worded as by the real library, to the recorder or, without one, to the logger."""
        self._report_words(code, f"{where}: Error Code {code.value}: {kind} ({text})")

    def _report_words(self, code: ErrorCodeTRT, message: str) -> None:
        """Report an error of which the real library says no more than this."""
        if self._recorder is not None:
            self._living_recorder().report_error(code, message)
        else:
            self._core.say(ILogger.ERROR, message)

    def _report_usage(self, where: str, text: str) -> None:
        self._report(
            ErrorCodeTRT.INVALID_ARGUMENT, where, "API Usage Error", f"Parameter check failed, {text}"
        )

    def _report_memory(self, where: str, text: str) -> None:
        """Report that memory was refused. The real library has a code for it, and uses another one."""
        self._report(ErrorCodeTRT.INTERNAL_ERROR, where, "OutOfMemory", text)

    def _report_destroyed_late(self, where: str) -> None:
        """Report that what it holds on a lost device cannot be freed. For destructors: never raises."""
        try:
            self._report_loss(where)
        except ViolationError as error:
            # Nobody would hear of what a destructor raises.
            self._core.monitor.note(str(error))

    def _report_loss(self, where: str) -> bool:
        """Return whether the device is lost; report it if so."""
        lost = self._core.monitor.lost
        if lost is not None:
            self._report(ErrorCodeTRT.UNSPECIFIED_ERROR, where, "Cuda Runtime", lost)
        return lost is not None


S = TypeVar("S", bound=Reporter)


def checked(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Make a method begin with :meth:`Core.check`."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._core.check()
        return method(self, *args, **kwargs)

    return call


class IRuntimeConfig:
    """Settings for creating a context."""

    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC

    def get_execution_context_allocation_strategy(self) -> ExecutionContextAllocationStrategy:
        """Return who provides the context's enqueue memory."""
        return self._strategy

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> None:
        """Set who provides the context's enqueue memory."""
        self._strategy = ExecutionContextAllocationStrategy(strategy)
