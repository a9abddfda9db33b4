"""The backends, and which of them loads a model.

A new backend is a module with a loader, and one entry of :data:`BACKENDS`. Opening, model folders and
``config.pbtxt`` find it there.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctrt.backends.base import Model
from asynctrt.backends.onnx_objects import OnnxObject, is_onnx_object, shown
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.devices.base import Device
from asynctrt.errors import DeviceUnavailableError, OptionsError

PLAN_SUFFIXES: Final = (".plan", ".engine", ".trt")

logger = logging.getLogger("asynctrt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A model to load, and the options that say how."""

    model: Path | OnnxObject
    device: Device
    runtime: str | None = None
    tensorrt: TensorRTOptions | None = None
    onnx: OnnxOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A kind of model, and how to load it."""

    name: str
    """The name that ``backend`` in a ``config.pbtxt`` has for it."""
    platform: str
    """KServe's name, as its models say it in ``platform``."""
    suffixes: tuple[str, ...]
    """The suffixes of its files. In a model folder a version's file is ``model`` with the first."""
    load: Callable[[LoadRequest], Model]
    """Load a model; this imports the backend's library. Blocks."""


def _load_plan(request: LoadRequest) -> Model:
    path = str(request.model)
    if request.runtime == "onnxruntime":
        raise OptionsError(
            f"{path!r} is named like a TensorRT plan, which ONNX Runtime does not run. Leave runtime out"
        )
    if request.device.name == "host":
        raise DeviceUnavailableError(
            f"{path!r} is named like a TensorRT plan, which runs on a GPU: open it with "
            "device='cuda:0'. For the host device give the ONNX model that the plan was built from"
        )
    from asynctrt.backends.tensorrt import TensorRTModel  # noqa: PLC0415

    return TensorRTModel(path, device=request.device, options=request.tensorrt)


def _load_onnx(request: LoadRequest) -> Model:
    model, device = request.model, request.device
    if request.runtime == "tensorrt":
        raise OptionsError(
            f"{shown(model)} is an ONNX model, and TensorRT runs plans. Build one from it: asynctrt "
            "build MODEL.onnx; or leave runtime out"
        )
    # Imported only when needed: it loads ONNX Runtime.
    from asynctrt.backends.onnxruntime import OnnxModel  # noqa: PLC0415

    if device.name == "host":
        return OnnxModel(model, request.onnx)
    from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel  # noqa: PLC0415

    loaded = OnnxCudaModel(model, request.onnx, device=device)
    logger.info("%r runs on %s by ONNX Runtime's CUDA provider", loaded.name, device.name)
    return loaded


ONNX: Final = Backend(name="onnxruntime", platform="onnxruntime_onnx", suffixes=(".onnx",), load=_load_onnx)
PLAN: Final = Backend(name="tensorrt", platform="tensorrt_plan", suffixes=PLAN_SUFFIXES, load=_load_plan)

BACKENDS: tuple[Backend, ...] = (ONNX, PLAN)
"""All backends. The order is that in which a model folder is searched for their files."""


def find_backend(model: object) -> Backend | None:
    """Return the backend that loads a model; ``None`` for an object that is not loaded but used as it is.

    Files with an unknown suffix are read as ONNX models.
    """
    if isinstance(model, str | os.PathLike):
        suffix = Path(model).suffix
        return next((backend for backend in BACKENDS if suffix in backend.suffixes), ONNX)
    return ONNX if is_onnx_object(model) else None


def filenames() -> dict[str, str]:
    """Return the name of a version's file in a model folder, by backend."""
    return {backend.name: f"model{backend.suffixes[0]}" for backend in BACKENDS}


def backend_names() -> dict[str, str]:
    """Return the name of the backend for each name that a ``config.pbtxt`` may have for it."""
    return {name: backend.name for backend in BACKENDS for name in (backend.name, backend.platform)}
