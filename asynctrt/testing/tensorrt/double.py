"""The object that stands in for the module ``tensorrt``."""

import itertools
from typing import Final

from asynctrt.devices.base import Device
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceUnavailableError
from asynctrt.testing.tensorrt import names
from asynctrt.testing.tensorrt.context import IExecutionContext as Context
from asynctrt.testing.tensorrt.core import IRuntimeConfig as Config
from asynctrt.testing.tensorrt.engine import ICudaEngine as Engine
from asynctrt.testing.tensorrt.host import HostExecutor
from asynctrt.testing.tensorrt.monitor import Executor, Fault, Monitor, check_fault
from asynctrt.testing.tensorrt.runtime import Runtime as PlainRuntime
from asynctrt.testing.tensorrt.spec import COMPUTE_CAPABILITY, VERSION


class StrictTensorRT:
    """TensorRT, as far as an inference runtime uses it: strict where the real one is undefined.

    Use it wherever the module ``tensorrt`` is expected. Its plans come from :func:`double_plan`.

    :param device: a host device, or a CUDA device, where the engines compute.
    :param version: the version of the library that it is.
    :param compute_capability: what plans are checked against.
    :raises DeviceUnavailableError: for a device of another kind.
    """

    ILogger = names.ILogger
    Logger = names.Logger
    IErrorRecorder = names.IErrorRecorder
    IVersionedInterface = names.IVersionedInterface
    IGpuAllocator = names.IGpuAllocator
    IGpuAsyncAllocator = names.IGpuAsyncAllocator
    IOutputAllocator = names.IOutputAllocator
    IRuntimeConfig = Config
    ICudaEngine = Engine
    IExecutionContext = Context
    DataType = names.DataType
    TensorIOMode = names.TensorIOMode
    TensorLocation = names.TensorLocation
    ExecutionContextAllocationStrategy = names.ExecutionContextAllocationStrategy
    ErrorCodeTRT = names.ErrorCodeTRT
    HardwareCompatibilityLevel = names.HardwareCompatibilityLevel
    EngineStat = names.EngineStat
    EngineCapability = names.EngineCapability
    ProfilingVerbosity = names.ProfilingVerbosity
    TempfileControlFlag = names.TempfileControlFlag
    AllocatorFlag = names.AllocatorFlag
    APILanguage = names.APILanguage
    Dims = names.Dims
    volume = staticmethod(names.volume)
    nptype = staticmethod(names.nptype)
    float32: Final = names.DataType.FLOAT
    float16: Final = names.DataType.HALF
    bfloat16: Final = names.DataType.BF16
    int8: Final = names.DataType.INT8
    uint8: Final = names.DataType.UINT8
    int32: Final = names.DataType.INT32
    int64: Final = names.DataType.INT64
    bool: Final = names.DataType.BOOL

    def __init__(
        self,
        device: Device,
        *,
        version: str = VERSION,
        compute_capability: tuple[int, int] = COMPUTE_CAPABILITY,
    ) -> None:
        names.version_of(version)
        self.__name__ = "tensorrt"
        self.__version__ = version
        self.device = device
        self.compute_capability = compute_capability
        self.monitor = Monitor()
        self.executor: Executor = _executor(device, self.monitor)
        self._numbers = itertools.count(1)
        # Each double has its own class: the real module's knows its library in the same way.
        self.Runtime = type("Runtime", (PlainRuntime,), {"_trt": self, "__doc__": PlainRuntime.__doc__})

    def __repr__(self) -> str:
        return f"<StrictTensorRT {self.__version__} on {self.device!r}>"

    def fail_next(self, what: Fault, count: int = 1) -> None:
        """Let the next ``count`` of these fail.

        ``enqueue``: ``execute_async_v3`` returns False. ``context-memory``, ``deserialize-memory``: memory is
        refused. ``hang``: the next batch to execute does not end before :meth:`release_hangs`.
        ``illegal-address``: the next batch to execute reads where nothing is, and the device is lost.

        :raises OptionsError: for anything else.
        """
        check_fault(what, count)
        # The device first: what is due may be taken at once.
        self.executor.armed(what, count)
        self.monitor.arm(what, count)

    def release_hangs(self) -> None:
        """Let every batch that hangs go on."""
        self.executor.release_hangs()

    def violations(self) -> tuple[str, ...]:
        """All violations so far. A test should end with none of them."""
        self.executor.poll()
        return self.monitor.violations()

    def number(self) -> int:
        """For the double itself: the next number of a context or a batch."""
        return next(self._numbers)


def _executor(device: Device, monitor: Monitor) -> Executor:
    if isinstance(device, HostDevice):
        return HostExecutor(device, monitor)
    if hasattr(device, "ordinal"):
        # Only now: a host needs no CUDA.
        from asynctrt.devices.cuda import CudaDevice  # noqa: PLC0415
        from asynctrt.testing.tensorrt.cuda import CudaExecutor  # noqa: PLC0415

        if isinstance(device, CudaDevice):
            return CudaExecutor(device, monitor)
    raise DeviceUnavailableError(f"the TensorRT double runs on a host or a CUDA device, not on {device!r}")
