"""Finding a device by name, and loading a model by path or name."""

import os
import re
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, Final, cast

from asynctrt._util.files import is_there
from asynctrt._util.validation import number
from asynctrt.backends.base import Model, misplaced_capabilities, missing_members
from asynctrt.backends.function import is_coroutine_function
from asynctrt.backends.onnx_objects import OnnxObject, is_session, shown
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.registry import ONNX, PLAN, PLAN_SUFFIXES, Backend, LoadRequest, find_backend
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.devices.base import Device
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeviceUnavailableError,
    ModelError,
    ModelNotFoundError,
    OptionsError,
    UsageError,
    describe,
    show,
)

ATTRIBUTE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""The name of a model in a Python module: ``package.module:attribute``."""
ENGINE_NAME: ContextVar[str] = ContextVar("ENGINE_NAME", default="")
"""The name of an engine opened in this context, in every front of a server. Engines share workers only if
they have the same name."""

GPU_NBYTES: Final = number(1, 2**62, unit="bytes")

_gpu_memory_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A model that was made for one engine. The engine closes it, as it does a model that it loaded."""

    model: Model
    where: str

    def __repr__(self) -> str:
        return show(self.where)


def find_device(device: str | Device) -> Device:
    """Return the device of that name, or the given device object."""
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise DeviceUnavailableError(
            f"{show(device)} is not a device, nor the name of one: 'host', 'cuda:0', 'cuda:1' and so on"
        )
    if device == "host":
        return HostDevice()
    if device.startswith("cuda"):
        # Imported only when needed: it loads CUDA's bindings.
        from asynctrt.devices.cuda import find_cuda_device  # noqa: PLC0415

        return find_cuda_device(device)
    raise DeviceUnavailableError(
        f"{show(device)} is not a device. There are 'host' and 'cuda:0', 'cuda:1' and so on"
    )


def limit_gpu_memory(nbytes: int | None) -> None:
    """Limit the memory on each GPU to ``nbytes`` for all engines of this process; ``None``: no limit.

    Everything that engines allocate there counts: weights and what contexts keep, arenas, the buffers of
    slabs, and outputs that stay on the GPU. An engine that would exceed the limit first goes without graphs;
    if that is not enough, opening it fails and the error shows the arithmetic. With ``isolation="process"``
    the limit applies to each worker that is started from then on.

    :raises OptionsError: for anything but a positive number.
    """
    # Imported only when needed: it loads CUDA's bindings.
    from asynctrt.devices.cuda import limit_memory  # noqa: PLC0415

    if nbytes is not None:
        nbytes = int(GPU_NBYTES("the limit of memory on each GPU", nbytes))
    limit_memory(nbytes)
    global _gpu_memory_nbytes  # noqa: PLW0603  (one for the process, as the memory is)
    _gpu_memory_nbytes = nbytes


def gpu_memory_limit() -> int | None:
    """Return the latest limit set by :func:`limit_gpu_memory`."""
    return _gpu_memory_nbytes


def load_model(
    model: str | os.PathLike[str] | OnnxObject | Model | Made,
    device: Device,
    tensorrt: TensorRTOptions | None = None,
    runtime: str | None = None,
    onnx: OnnxOptions | None = None,
) -> Model:
    """Load a model with the backend for it, or return the given object. Blocks."""
    if is_attribute(model):
        model = _made(str(model))
    backend = find_backend(model)
    _check_options(model, backend, tensorrt, onnx)
    if backend is not None:
        path = Path(model) if isinstance(model, str | os.PathLike) else cast("OnnxObject", model)
        return backend.load(
            LoadRequest(
                model=path,
                device=device,
                runtime=runtime,
                tensorrt=tensorrt,
                onnx=onnx,
            )
        )
    if isinstance(cast("object", model), FunctionType):
        raise ModelError(
            f"{shown(model)} is not a model. Make one of it: asynctrt.FunctionModel(function, inputs=..., "
            "outputs=...)"
        )
    return _given(model)


def _given(model: object) -> Model:
    """Check and return a model that was given as an object."""
    if isinstance(model, Made):
        return _checked(model.model)
    if hasattr(model, "SerializeToString"):
        raise ModelError("open takes the bytes of an onnx.ModelProto: give model.SerializeToString()")
    if not isinstance(model, Model):
        raise ModelError(
            f"{shown(model)} is not a path and not a model: it lacks {', '.join(missing_members(model))}"
            ". A custom model has all of these if it derives from asynctrt.backends.base.ModelBase and adds "
            "name, inputs, outputs, create_context and close"
        )
    misplaced = misplaced_capabilities(model)
    if misplaced:
        raise ModelError(
            f"{model.name!r} has the attribute {', '.join(misplaced)}, which is not read. Put it into the "
            f"model's capabilities: capabilities = asynctrt.backends.base.Capabilities({misplaced[0]}=...)"
        )
    return _checked(model)


def _check_options(
    model: object,
    backend: Backend | None,
    tensorrt: TensorRTOptions | None,
    onnx: OnnxOptions | None,
) -> None:
    """Check that options of a runtime are given only for models that it runs."""
    if tensorrt is not None and backend is not PLAN:
        raise OptionsError(
            f"the option tensorrt is for TensorRT plans ({', '.join(PLAN_SUFFIXES)}), and {shown(model)} is "
            "not a plan. Leave it out; a TensorRTModel takes it as its own argument options"
        )
    honoured: tuple[str, ...] = ("shapes",) if backend is not ONNX else ()
    if is_session(model):  # It is loaded already. Only which axes count rows is left to say.
        honoured = ("batch_axis", "shared", "shapes")
    if onnx is not None and honoured and onnx.says_more_than(honoured):
        raise OptionsError(
            f"the option onnx says how ONNX Runtime loads a model, which it does not do with "
            f"{shown(model)}. Leave it out; an OnnxModel takes it as its own argument options"
        )


def is_attribute(model: object) -> bool:
    """Return whether a model is given as ``module:attribute``, rather than as a file of that name."""
    return isinstance(model, str) and bool(ATTRIBUTE.fullmatch(model)) and not is_there(model)


def name_of(model: str) -> str:
    """Return the name of a model that is given as a path or as ``module:attribute``."""
    return model.partition(":")[2] if ATTRIBUTE.fullmatch(model) else Path(model).stem


def make(where: str) -> Any:
    """Import ``module:attribute``; if it is a function, but not a coroutine function, call it.

    A model, whether it is the attribute or the function's result, is returned as :class:`Made`.

    :raises ModelNotFoundError, ModelError: if it cannot be imported, or the function raises.
    """
    module_name, _, attribute = where.partition(":")
    try:
        found: Any = import_module(module_name)
    except ImportError as error:
        raise ModelNotFoundError(
            f"{where!r}: the module {module_name!r} cannot be imported: {error}. It is looked for "
            "where Python looks for modules: sys.path"
        ) from error
    except Exception as error:
        raise ModelError(
            f"{where!r}: the module {module_name!r} cannot be imported: {describe(error)}"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ModelNotFoundError(f"{where!r}: {show(found)} has no {name!r}")
        found = getattr(found, name)
    if not isinstance(found, Model) and callable(found) and not is_coroutine_function(found):
        try:
            found = found()
        except UsageError as error:
            raise ModelError(
                f"{where!r} made no model: {error}. If it needs an event loop, make it a coroutine function"
            ) from error
        except Exception as error:
            raise ModelError(f"{where!r} made no model: {describe(error)}") from error
    return owned(found, where)


def owned(thing: Any, where: str) -> Any:
    """Return a model as :class:`Made`, and anything else unchanged."""
    return Made(thing, where) if isinstance(thing, Model) else thing


def _made(where: str) -> "Made | str | os.PathLike[str]":
    """Return the model or path at ``module:attribute``, or the one that the function there returns."""
    made = make(where)
    if not isinstance(made, Made | str | os.PathLike):
        raise ModelError(
            f"{where!r} is not a model or a path, nor a function that makes one, but {show(made)}. An "
            "engine, or what makes one, is for asynctrt serve without isolation='process'"
        )
    return made


def _checked(model: Model) -> Model:
    """Return a caller's model if the names of its tensors are unique."""
    for side, specs in (("inputs", model.inputs), ("outputs", model.outputs)):
        names = Counter(spec.name for spec in specs)
        twice = [name for name, count in names.items() if count > 1]
        if not names or twice:
            raise ModelError(f"{model.name!r} needs {side}, each with a unique name; twice: {twice}")
    return model
