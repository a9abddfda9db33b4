"""asynctrt: an asyncio batching inference engine.

::

    async with asynctrt.open("model.onnx", device="host") as engine:
        result = await engine.infer({"input": rows})
        result["output"]
"""

from typing import TYPE_CHECKING, Any

from asynctrt.backends.function import FunctionModel
from asynctrt.batching import Batched, batch
from asynctrt.build_options import BuildOptions
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.base import DeviceArray
from asynctrt.devices.host import HostDevice
from asynctrt.engine import Engine
from asynctrt.errors import (
    AsynctrtError,
    BuildError,
    CallerError,
    ConnectionLostError,
    DeadlineError,
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    DeviceUnavailableError,
    EngineClosedError,
    ExecutionError,
    InputError,
    InternalError,
    LifecycleError,
    MissingExtraError,
    ModelError,
    ModelNotFoundError,
    ModelNotReadyError,
    OptionsError,
    OverloadError,
    PoisonError,
    QueueFullError,
    RequestError,
    SuspendedError,
    TargetError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedError,
    UntrustedError,
    UsageError,
)
from asynctrt.loading import limit_gpu_memory
from asynctrt.opening import Opening, open  # noqa: A004  (as in io.open and tarfile.open)
from asynctrt.options import Options
from asynctrt.pipeline import Pipeline
from asynctrt.process import tune_process
from asynctrt.runtime.slots import Slot
from asynctrt.statistics import BatchStatistics, BatchTrace, Statistics
from asynctrt.tensorrt_options import TensorRTOptions
from asynctrt.tensors import InferResult, TensorSpec, Timing

if TYPE_CHECKING:
    from asynctrt.plans.building import build
from asynctrt.version import __version__ as __version__

__all__ = [
    "Arenas",
    "AsynctrtError",
    "BatchStatistics",
    "BatchTrace",
    "Batched",
    "BuildError",
    "BuildOptions",
    "CallerError",
    "ConnectionLostError",
    "DeadlineError",
    "DeviceArray",
    "DeviceError",
    "DeviceLostError",
    "DeviceMemoryError",
    "DeviceUnavailableError",
    "Engine",
    "EngineClosedError",
    "ExecutionError",
    "FunctionModel",
    "HostDevice",
    "InferResult",
    "InputError",
    "InternalError",
    "LifecycleError",
    "MissingExtraError",
    "ModelError",
    "ModelNotFoundError",
    "ModelNotReadyError",
    "Opening",
    "Options",
    "OptionsError",
    "OverloadError",
    "Pipeline",
    "PoisonError",
    "QueueFullError",
    "RequestError",
    "Slot",
    "Statistics",
    "SuspendedError",
    "TargetError",
    "TensorRTOptions",
    "TensorSpec",
    "Timing",
    "TooLargeError",
    "UnauthorizedError",
    "UnknownModelError",
    "UnsupportedError",
    "UntrustedError",
    "UsageError",
    "batch",
    "build",
    "limit_gpu_memory",
    "open",
    "tune_process",
]


def __getattr__(name: str) -> Any:
    """Import ``build`` when it is first used: few programs build plans."""
    if name == "build":
        from asynctrt.plans.building import build  # noqa: PLC0415

        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name what is imported when it is first used, too."""
    return sorted({*globals(), *__all__})
