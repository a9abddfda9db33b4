"""From names and paths to a device, a model and the numbers that an engine is built by."""

import asyncio
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio

from asynctrt.backends.base import Model
from asynctrt.devices.base import Device
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceUnavailableError, ModelError, ModelNotFoundError, OptionsError
from asynctrt.options import MAX_ROWS_DEFAULT, Options

T = TypeVar("T")

ATTRIBUTE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""How a model in a Python module is written: ``package.module:attribute``."""

PLAN_SUFFIXES: Final = (".plan", ".engine", ".trt")


def find_device(device: str | Device) -> Device:
    """The device of that name, or the object that was given."""
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise DeviceUnavailableError(
            f"{device!r} is neither the name of a device nor a device (asynctrt.devices.base.Device)"
        )
    if device == "host":
        return HostDevice()
    if device.startswith("cuda"):
        raise DeviceUnavailableError(
            f"device {device!r}: this version of asynctrt does not run on CUDA yet. Use device='host'"
        )
    raise DeviceUnavailableError(f"there is no device {device!r}. Use device='host'")


def load_model(model: str | os.PathLike[str] | Model) -> Model:
    """The model at a path, by what kind of file it is, or the object that was given. Blocks."""
    if not isinstance(model, str | os.PathLike):
        if not isinstance(model, Model):
            raise ModelError(
                f"{model!r} is neither a path nor a model: it lacks some of inputs, outputs, rows_fixed, "
                "rows_max, enqueue_nbytes, create_context, close (asynctrt.backends.base.Model)"
            )
        return _checked(model)
    if isinstance(model, str) and ATTRIBUTE.fullmatch(model) and not Path(model).exists():
        return _checked(_attribute(model))
    path = Path(model)
    if path.suffix in PLAN_SUFFIXES:
        raise ModelError(
            f"{str(path)!r} is named like a TensorRT plan, which needs a CUDA device; this version of "
            "asynctrt does not run on CUDA yet. Give the ONNX model that the plan was built from"
        )
    if path.is_dir():
        raise ModelNotFoundError(f"{str(path)!r} is a folder. Give the path of an .onnx file in it")
    # Not before it is needed: it loads ONNX Runtime.
    from asynctrt.backends.onnxruntime import OnnxModel  # noqa: PLC0415

    return OnnxModel(path)


def name_of(model: str) -> str:
    """What a model that is given as a path, or as ``module:attribute``, is called."""
    return model.partition(":")[2] if ATTRIBUTE.fullmatch(model) else Path(model).stem


def _attribute(where: str) -> Model:
    """The model that a module has, or that a function in it makes."""
    module_name, _, attribute = where.partition(":")
    try:
        found: Any = import_module(module_name)
    except ImportError as error:
        raise ModelNotFoundError(
            f"{where!r}: the module {module_name!r} cannot be imported: {error}. It is looked for "
            "where Python looks for modules: sys.path"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ModelNotFoundError(f"{where!r}: {found!r} has no {name!r}")
        found = getattr(found, name)
    if not isinstance(found, Model) and callable(found):
        try:
            found = found()
        except Exception as error:
            raise ModelError(f"{where!r} made no model: {type(error).__name__}: {error}") from error
    if not isinstance(found, Model):
        raise ModelError(f"{where!r} is neither a model nor a function that makes one, but {found!r}")
    return found


def _checked(model: Model) -> Model:
    """A model of the caller's own, if its tensors can be told apart."""
    for side, specs in (("inputs", model.inputs), ("outputs", model.outputs)):
        names = Counter(spec.name for spec in specs)
        twice = [name for name, count in names.items() if count > 1]
        if not names or twice:
            raise ModelError(f"{model.name!r} needs {side}, each with a name of its own; twice: {twice}")
    return model


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the options come to for this model on this device."""

    rows_max: int
    contexts: int
    arenas: int
    in_flight_max: int

    @classmethod
    def of(cls, model: Model, device: Device, options: Options) -> "Sizes":
        """The numbers, or an error that says which option the model cannot be opened with."""
        contexts = options.contexts or max(
            device.contexts_default, options.max_in_flight or 0, options.arenas or 0
        )
        arenas = min(options.arenas or contexts, contexts) if model.enqueue_nbytes else 0
        in_flight_max = min(options.max_in_flight or contexts, contexts)
        fixed = model.rows_fixed
        if fixed is not None and options.max_rows != fixed:
            raise ModelError(
                f"{model.name!r} takes batches of exactly {fixed} rows. Export it with a dynamic first axis, "
                f"or open it with max_rows={fixed}: every batch is then padded to that size"
            )
        limit = model.rows_max
        if limit is not None and (options.max_rows or 0) > limit:
            raise OptionsError(
                f"max_rows is {options.max_rows}, but {model.name!r} takes at most {limit} rows. "
                f"Open it with max_rows={limit} or less"
            )
        rows_max = options.max_rows or min(
            MAX_ROWS_DEFAULT, limit or MAX_ROWS_DEFAULT, options.max_queue_rows
        )
        return cls(rows_max, contexts, arenas, in_flight_max)


async def in_thread(function: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """Run a blocking function in a thread that ends with it.

    It cannot be stopped half way, so a caller who is cancelled waits for it all the same; what it has made
    is then given to ``undo``, so that nothing is left behind.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="asynctrt-open")
    future = asyncio.get_running_loop().run_in_executor(executor, function)
    cancelled = await settled(future)
    executor.shutdown()
    if cancelled is None:
        return future.result()
    if future.exception() is None and undo is not None:
        undo(future.result())
    raise cancelled


async def settled(future: "asyncio.Future[Any]") -> asyncio.CancelledError | None:
    """Wait until it is done, whatever comes; a cancellation meanwhile is given back, to be raised."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
    return cancelled
