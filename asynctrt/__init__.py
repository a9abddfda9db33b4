"""asynctrt: an asyncio batching inference engine.

::

    async with asynctrt.open("model.onnx", device="host") as engine:
        result = await engine.infer({"input": rows})
        result["output"]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynctrt._util.process import tune_process
from asynctrt.backends.build_options import BuildOptions
from asynctrt.backends.function import FunctionModel
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.batching import Batched, batch
from asynctrt.core.loading import limit_gpu_memory
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
    DeadlineUnreachableError,
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
    TargetError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedError,
    UntrustedError,
    UsageError,
)
from asynctrt.limits import within
from asynctrt.opening import Opening, open  # noqa: A004  (as in io.open and tarfile.open)
from asynctrt.options import Options
from asynctrt.pipeline import Pipeline
from asynctrt.statistics import (
    BatchStatistics,
    BatchTrace,
    ShapeStatistics,
    Statistics,
    WorkerState,
)
from asynctrt.tensors import Array, InferResult, TensorSpec, Timing

if TYPE_CHECKING:
    from asynctrt.backends.onnxruntime import OnnxModel as OnnxModel
    from asynctrt.backends.tensorrt import TensorRTModel as TensorRTModel
    from asynctrt.devices.cuda import CudaDevice as CudaDevice
    from asynctrt.plans.building import build
from asynctrt._util.version import __version__ as __version__

_LATER = {
    "CudaDevice": "asynctrt.devices.cuda",
    "OnnxModel": "asynctrt.backends.onnxruntime",
    "TensorRTModel": "asynctrt.backends.tensorrt",
    "build": "asynctrt.plans.building",
}
"""Names that are imported on first use, by module: they are rarely used, or need CUDA or a runtime. A name
whose package may be missing is not in ``__all__``, so that ``import *`` works."""

_MODULES = ("client", "loadtest", "serving", "testing")
"""Modules that are imported on first use, such as ``asynctrt.client``."""

__all__ = [
    "Arenas",
    "Array",
    "AsynctrtError",
    "BatchStatistics",
    "BatchTrace",
    "Batched",
    "BuildError",
    "BuildOptions",
    "CallerError",
    "ConnectionLostError",
    "DeadlineError",
    "DeadlineUnreachableError",
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
    "OnnxOptions",
    "Opening",
    "Options",
    "OptionsError",
    "OverloadError",
    "Pipeline",
    "PoisonError",
    "QueueFullError",
    "RequestError",
    "ShapeStatistics",
    "Statistics",
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
    "WorkerState",
    "batch",
    "build",
    "limit_gpu_memory",
    "open",
    "tune_process",
    "within",
]


def __getattr__(name: str) -> Any:
    """Import a name from ``_LATER`` or a module from ``_MODULES`` on first use."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    if name in _MODULES:
        return import_module(f"asynctrt.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List all names, also the ones that are imported on first use."""
    return sorted({*globals(), *__all__, *_LATER, *_MODULES})
