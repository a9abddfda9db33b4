"""What the double's runtimes, engines and contexts have in common: logger, allocator, error recorder."""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from asynctrt.devices.base import ALIGNMENT, Buffer, Device
from asynctrt.errors import DeviceMemoryError
from asynctrt.testing.tensorrt.monitor import Executor, Monitor
from asynctrt.testing.tensorrt.names import (
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    IErrorRecorder,
    IGpuAllocator,
    ILogger,
    require_initialised,
)

if TYPE_CHECKING:
    from asynctrt.testing.tensorrt.double import StrictTensorRT

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Setting(Generic[T]):
    """A property of a TensorRT object that can be set to anything, and that changes nothing in the double."""

    def __init__(self, default: T, doc: str) -> None:
        self._default = default
        self.__doc__ = doc

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> T:
        value: T = getattr(instance, self._name, self._default)
        return value

    def __set__(self, instance: Any, value: T) -> None:
        setattr(instance, self._name, value)


class Block:
    """Device memory that an engine or a context holds."""

    def __init__(self, address: int, nbytes: int, release: Callable[[], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        """Give it back. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Core:
    """What a runtime gives to all that is made of it, and what outlives it with them.

    Logger, allocator and recorder are held weakly: the application has to keep them alive, and a use of one
    that is gone is a violation ("How TensorRT works", Object Lifetimes).
    """

    def __init__(self, trt: "StrictTensorRT", logger: ILogger, version: str) -> None:
        self.trt = trt
        self.version = version
        self.device: Device = trt.device
        self.monitor: Monitor = trt.monitor
        self.executor: Executor = trt.executor
        self.is_lean_code_allowed = False
        self._logger = weakref.ref(logger)
        self._allocator: weakref.ref[IGpuAllocator] | None = None

    @property
    def logger(self) -> ILogger:
        """The application's logger.

        :raises ViolationError: when it is gone.
        """
        logger = self._logger()
        if logger is None:
            raise self.monitor.found(
                "the logger was destroyed before what was made with it: it has to span any use of them"
            )
        return logger

    @property
    def allocator(self) -> IGpuAllocator | None:
        """The application's allocator, if it has set one.

        :raises ViolationError: when it is gone.
        """
        if self._allocator is None:
            return None
        allocator = self._allocator()
        if allocator is None:
            raise self.monitor.found(
                "the GPU allocator was destroyed before what was made with it: it has to outlive all memory"
            )
        return allocator

    @allocator.setter
    def allocator(self, allocator: IGpuAllocator | None) -> None:
        """Let device memory come from there from now on."""
        self._allocator = None if allocator is None else weakref.ref(allocator)

    def check(self) -> None:
        """What every call begins with.

        :raises ViolationError: for what was noted, and for a callback object that is gone.
        """
        self.executor.poll()
        self.monitor.raise_noted()
        _ = self.logger, self.allocator

    def say(self, severity: Any, message: str) -> None:
        """One message for the application's logger."""
        self.logger.log(severity, message)

    def allocate(self, nbytes: int) -> Block | None:
        """Memory of the device: from the application's allocator or, without one, from the device.

        :raises ViolationError: when the allocator gives what is not aligned.
        """
        allocator = self.allocator
        if allocator is None:
            try:
                buffer: Buffer = self.device.allocate(nbytes)
            except DeviceMemoryError:
                return None
            return Block(buffer.address, nbytes, buffer.close)
        try:
            address = allocator.allocate_async(nbytes, ALIGNMENT, 0, 0)
        except NotImplementedError as error:
            self.say(ILogger.ERROR, str(error))
            return None
        if address is None or int(address) == 0:
            return None
        if address % ALIGNMENT:
            raise self.monitor.found(
                f"the GPU allocator gave {address:#x}, which is not aligned to {ALIGNMENT}"
            )
        return Block(
            int(address), nbytes, functools.partial(self._give_back, weakref.ref(allocator), int(address))
        )

    def _give_back(self, allocator: "weakref.ref[IGpuAllocator]", address: int) -> None:
        living = allocator()
        if living is None:
            self.monitor.note(f"the GPU allocator was destroyed before {address:#x} was given back to it")
            return
        living.deallocate_async(address, 0)


class Reporter:
    """A TensorRT object: it has an error recorder, and passes it to what it creates."""

    def __init__(self, core: Core, recorder: "weakref.ref[IErrorRecorder] | None") -> None:
        self._core = core
        self._recorder = recorder

    @property
    def error_recorder(self) -> IErrorRecorder | None:
        """Who is told of errors, instead of the logger."""
        return None if self._recorder is None else self._living_recorder()

    @error_recorder.setter
    def error_recorder(self, recorder: IErrorRecorder | None) -> None:
        """Attach one, or none. What is created from now on has it too."""
        if recorder is not None:
            require_initialised(recorder, IErrorRecorder)
        self._recorder = None if recorder is None else weakref.ref(recorder)

    def _living_recorder(self) -> IErrorRecorder:
        recorder = self._recorder() if self._recorder is not None else None
        if recorder is None:
            raise self._core.monitor.found("the error recorder was destroyed before what it was attached to")
        return recorder

    def _report(self, code: ErrorCodeTRT, where: str, kind: str, text: str) -> None:
        """An error, as the real library words it: to the recorder or, without one, to the logger."""
        message = f"{where}: Error Code {code.value}: {kind} ({text})"
        if self._recorder is not None:
            self._living_recorder().report_error(code, message)
        else:
            self._core.say(ILogger.ERROR, message)

    def _report_usage(self, where: str, text: str) -> None:
        self._report(
            ErrorCodeTRT.INVALID_ARGUMENT, where, "API Usage Error", f"Parameter check failed, {text}"
        )

    def _report_loss(self, where: str) -> bool:
        """Whether the device is lost; if so, that was reported."""
        lost = self._core.monitor.lost
        if lost is not None:
            self._report(ErrorCodeTRT.UNSPECIFIED_ERROR, where, "Cuda Runtime", lost)
        return lost is not None


S = TypeVar("S", bound=Reporter)


def checked(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Let a method begin with :meth:`Core.check`."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._core.check()
        return method(self, *args, **kwargs)

    return call


class IRuntimeConfig:
    """How a context is to be created."""

    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC

    def get_execution_context_allocation_strategy(self) -> ExecutionContextAllocationStrategy:
        """Who provides its enqueue memory."""
        return self._strategy

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> None:
        """Say who provides its enqueue memory."""
        self._strategy = ExecutionContextAllocationStrategy(strategy)
