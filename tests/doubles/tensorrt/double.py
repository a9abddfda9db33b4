"""The object that takes the place of the module ``tensorrt``."""

from functools import partial
from typing import Any, Final

from asynctrt.devices.base import Device
from asynctrt.devices.host import HostDevice
from tests.doubles.tensorrt import names
from tests.doubles.tensorrt.context import IExecutionContext as Context
from tests.doubles.tensorrt.core import IRuntimeConfig as Config
from tests.doubles.tensorrt.core import Library
from tests.doubles.tensorrt.engine import ICudaEngine as Engine
from tests.doubles.tensorrt.engine import engine_class_of
from tests.doubles.tensorrt.host import HostExecutor
from tests.doubles.tensorrt.inspector import EngineInspector
from tests.doubles.tensorrt.monitor import Executor, Fault, ViolationMonitor
from tests.doubles.tensorrt.refit import OnnxParserRefitter, ParserError, Refitter
from tests.doubles.tensorrt.rtx import (
    IHostMemory,
    IRuntimeCache,
    RtxCudaEngine,
    RtxExecutionContext,
    RtxRuntime,
    RtxRuntimeConfig,
)
from tests.doubles.tensorrt.runtime import PluginRegistry, initialise_plugins
from tests.doubles.tensorrt.runtime import Runtime as PlainRuntime
from tests.doubles.tensorrt.spec import COMPUTE_CAPABILITY, Flavour, version_for
from tests.doubles.tensorrt.versions import SINCE, is_missing, of_version

RTX: Final = ("tensorrt_rtx",)
WITH_PARSER: Final = ("tensorrt", "tensorrt_rtx")
ONLY: Final = {
    "init_libnvinfer_plugins": WITH_PARSER,
    "OnnxParserRefitter": WITH_PARSER,
    "ParserError": WITH_PARSER,
    "EngineInspector": WITH_PARSER,
    "IRuntimeCache": RTX,
    "CudaGraphStrategy": RTX,
}
"""The flavours that have a name, where not all do."""


class StrictTensorRT:
    """The part of TensorRT that an inference runtime uses, strict where the real library is undefined.

    Use it wherever the module ``tensorrt`` is expected. :func:`double_plan` makes its plans.

    :param device: the host device or CUDA device on which the engines compute.
    :param version: the version of TensorRT to imitate; ``None`` for the newest that is known.
    :param compute_capability: the compute capability that plans have to be built for.
    :param flavour: the package to imitate, which runs plans that :func:`double_plan` made for it.
    """

    ILogger = names.ILogger
    IErrorRecorder = names.IErrorRecorder
    IGpuAllocator = names.IGpuAllocator
    IGpuAsyncAllocator = names.IGpuAsyncAllocator
    IOutputAllocator = names.IOutputAllocator
    IHostMemory = IHostMemory
    EngineInspector = EngineInspector
    LayerInformationFormat = names.LayerInformationFormat
    IRuntimeCache = IRuntimeCache
    Refitter = Refitter
    OnnxParserRefitter = OnnxParserRefitter
    ParserError = ParserError
    DataType = names.DataType
    TensorIOMode = names.TensorIOMode
    TensorLocation = names.TensorLocation
    ExecutionContextAllocationStrategy = names.ExecutionContextAllocationStrategy
    ErrorCodeTRT = names.ErrorCodeTRT
    HardwareCompatibilityLevel = names.HardwareCompatibilityLevel
    EngineStat = names.EngineStat
    EngineCapability = names.EngineCapability
    ProfilingVerbosity = names.ProfilingVerbosity
    CudaGraphStrategy = names.CudaGraphStrategy
    Dims = names.Dims
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
        version: str | None = None,
        compute_capability: tuple[int, int] = COMPUTE_CAPABILITY,
        flavour: Flavour = "tensorrt",
    ) -> None:
        version = version_for(flavour) if version is None else version
        names.version_of(version)
        self.__name__ = flavour
        self.__version__ = version
        self.device = device
        self.compute_capability = compute_capability
        self.monitor = ViolationMonitor()
        self.executor: Executor = _executor(device, self.monitor)
        library = Library(device, self.monitor, self.executor, version, compute_capability, flavour)
        self._library = library
        self.init_libnvinfer_plugins = partial(initialise_plugins, library)
        is_rtx = flavour in RTX
        self.IRuntimeConfig: type[Config] = RtxRuntimeConfig if is_rtx else Config
        self.ICudaEngine: type[Engine] = RtxCudaEngine if is_rtx else engine_class_of(version)
        self.IExecutionContext: type[Context] = (
            RtxExecutionContext if is_rtx else of_version(Context, version)
        )
        if not is_rtx:
            for kind in (names.IGpuAllocator, Refitter, ParserError):
                setattr(self, kind.__name__, of_version(kind, version))
        plain = RtxRuntime if is_rtx else PlainRuntime
        # Each double has its own class, since a Runtime is created without naming its library.
        self.Runtime = type("Runtime", (plain,), {"_library": library, "__doc__": plain.__doc__})

    def __getattribute__(self, name: str) -> Any:
        if name in ONLY or name in SINCE:
            flavour, version = self.__name__, self.__version__
            is_newer = flavour not in RTX and is_missing(name, version)
            if is_newer or flavour not in ONLY.get(name, (flavour,)):
                raise AttributeError(f"module {flavour!r} has no attribute {name!r} in version {version}")
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return f"<StrictTensorRT {self.__name__} {self.__version__} on {self.device!r}>"

    @property
    def compiled(self) -> tuple[str, ...]:
        """What TensorRT for RTX would have compiled so far: what no runtime cache had."""
        return tuple(self._library.compiled)

    def get_plugin_registry(self) -> PluginRegistry:
        """Return the registry of plugins, which all runtimes share."""
        return PluginRegistry(self._library)

    def fail_next(self, what: Fault, count: int = 1) -> None:
        """Make the next ``count`` operations fail.

        ``enqueue``: ``execute_async_v3`` returns ``False``. ``enqueue-hang``: it does not return before
        :meth:`release_hangs`. ``context-memory``: no context is created, for lack of memory that no allocator
        was asked for. ``deserialize-memory``: memory is refused. ``hang``: the next batch to execute does not
        end before :meth:`release_hangs`.
        ``illegal-address``: the next batch to execute reads an unmapped address, and the device is lost.
        """
        # The device first: a failure that is due may be taken at once.
        self.executor.armed(what, count)
        self.monitor.arm(what, count)

    @property
    def hanging(self) -> int:
        """Return how many batches and enqueues hang now."""
        return self.monitor.hanging + self.executor.hanging

    def release_hangs(self) -> None:
        """Let every hanging batch, and every hanging enqueue, continue."""
        self.monitor.release_hangs()
        self.executor.release_hangs()

    def violations(self) -> tuple[str, ...]:
        """Return all violations so far. A test should end by checking that there are none."""
        self.executor.poll()
        return self.monitor.violations()


def _executor(device: Device, monitor: ViolationMonitor) -> Executor:
    if isinstance(device, HostDevice):
        return HostExecutor(device, monitor)
    # Imported only here: a host device needs no CUDA.
    from asynctrt.devices.cuda import CudaDevice
    from tests.doubles.tensorrt.cuda import CudaExecutor

    assert isinstance(device, CudaDevice), f"not a host or a CUDA device: {device!r}"
    return CudaExecutor(device, monitor)
