"""``asynctrt.open``: turn a model's path or name into an engine."""

import errno
import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Unpack

from asynctrt._util.loops import in_thread, running_loop, see_through_in_thread
from asynctrt._util.process import is_in_worker
from asynctrt.backends.base import Model
from asynctrt.backends.onnx_objects import OnnxObject, shown
from asynctrt.core.assembly import EngineParts, build_on
from asynctrt.core.local import LocalEngine
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.base import Device
from asynctrt.engine import STREAM_END_S, Engine
from asynctrt.errors import SHOWN_MAX, DeviceUnavailableError, OptionsError, UsageError, bounded
from asynctrt.limits import unlimited
from asynctrt.options import Options, Settings

NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
"""Error numbers: the process, or the system, has no file descriptors left."""

GPU: Final = re.compile(r"cuda:\d+")


def open(  # noqa: A001  (it is the module's verb, as in io.open and tarfile.open)
    model: str | os.PathLike[str] | OnnxObject | Model,
    *,
    device: str | Device | Sequence[str] = "host",
    shared_arenas: Arenas | None = None,
    options: Options | None = None,
    **settings: Unpack[Settings],
) -> "Opening":
    """Load a model onto a device and open an engine for it.

    Use it as ``async with asynctrt.open(...) as engine:``; or as ``engine = await asynctrt.open(...)``, with
    ``await engine.aclose()`` at the end. The model is loaded in a thread. The engine belongs to the running
    event loop.

    :param model: one of these:

        - a path to an ``.onnx`` file;
        - a path to a TensorRT plan (``.plan``, ``.engine``, ``.trt``). A plan is code: open only plans that
          you trust;
        - ``"module:attribute"``, which names a model in a Python module or a function that makes one;
        - the content of an ``.onnx`` file, as bytes;
        - a model or, on the host device, an ``onnxruntime.InferenceSession``. The caller still has to
          close it.
    :param device: ``"host"``, ``"cuda:0"`` and so on, or a device object. With ``isolation="process"``
        several devices may be given, as a list of names or ``"cuda:0,cuda:1"``. Each then has its own worker
        process, and a request goes to the device that has the fewest rows to answer.
    :param shared_arenas: enqueue memory to share with other engines on the same device object.
    :param options: an :class:`Options`; ``settings`` are single options, which override it.
    :raises OptionsError: immediately, if an option is unknown or impossible.
    :raises ModelNotFoundError, ModelError: on entering, if the model cannot be served.
    :raises DeviceUnavailableError: on entering, if this machine does not have the device.
    :raises MissingExtraError: on entering, if the model needs a package that is not installed.
    """
    return Opening(model, device, shared_arenas, Options.from_settings(options, dict(settings)))


def _build(
    model: str | os.PathLike[str] | OnnxObject | Model,
    device: str | Device,
    options: Options,
    shared: Arenas | None,
) -> EngineParts:
    """Build the parts of an engine. If the GPU cannot be used, say what examines the machine."""
    try:
        return build_on(model, device, options, shared)
    except DeviceUnavailableError as error:
        if not isinstance(device, str) or not GPU.fullmatch(device):
            raise
        said = f"{error}. To examine this machine: asynctrt doctor --device {device}"
        raise DeviceUnavailableError(said) from error.__cause__


@contextmanager
def _apart() -> Iterator[None]:
    """Open an engine without the limits of the surrounding work, which the engine outlives.

    :raises DeviceUnavailableError: if no file descriptors are left for it.
    """
    try:
        with unlimited():
            yield
    except OSError as error:
        if error.errno not in NO_DESCRIPTORS:
            raise
        raise DeviceUnavailableError(
            f"no file descriptors are left to open an engine with: {error}. Close some, or raise "
            "the limit (ulimit -n)"
        ) from error


async def open_local(
    model: str | os.PathLike[str] | OnnxObject | Model,
    device: str | Device,
    options: Options,
    shared_arenas: Arenas | None = None,
    *,
    rows_first: bool = False,
) -> LocalEngine:
    """Open an engine in this process, as :func:`open` does.

    :param rows_first: as for :class:`LocalEngine`.
    """
    loop = running_loop()
    if shared_arenas is not None:
        shared_arenas.claim(get_ident())
    with _apart():
        build = partial(_build, model, device, options, shared_arenas)
        parts = await in_thread(build, undo=lambda parts: parts.close(STREAM_END_S))
        try:
            return LocalEngine(loop, parts, options, rows_first=rows_first)
        except BaseException:
            await see_through_in_thread(partial(parts.close, STREAM_END_S))
            raise


class NotOpenError(UsageError, AttributeError):
    """An engine's attribute was used before the engine was open.

    It is an ``AttributeError`` too, so ``hasattr`` and ``inspect`` see no such attribute.
    """


class Opening:
    """An engine that is not open yet: enter it with ``async with``, or await it."""

    def __init__(
        self,
        model: str | os.PathLike[str] | OnnxObject | Model,
        device: str | Device | Sequence[str],
        shared_arenas: Arenas | None,
        options: Options,
    ) -> None:
        self._model = model
        self._device = device
        self._shared_arenas = shared_arenas
        self._options = options
        self._engine: Engine | None = None

    def __repr__(self) -> str:
        return f"<asynctrt.open({shown(self._model)}): not entered yet, use 'async with' or 'await'>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Engine, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotOpenError(
            f"this engine is not open yet, so it has no {name!r}: "
            "async with asynctrt.open(...) as engine, or engine = await asynctrt.open(...)"
        )

    def __enter__(self) -> None:
        raise UsageError("an engine is opened with 'async with', not with 'with'")

    def __exit__(self, *_: object) -> None:
        raise UsageError("an engine is opened with 'async with', not with 'with'")

    def __await__(self) -> "Generator[Any, None, Engine]":
        return self._open().__await__()

    async def __aenter__(self) -> "Engine":
        if self._engine is not None:
            raise UsageError("this engine was entered before. Call asynctrt.open(...) again for another")
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._engine is not None:
            await self._engine.__aexit__(kind, error, trace)

    async def _open(self) -> "Engine":
        running_loop()
        devices = _names(self._device)
        if self._options.isolation != "none":
            return await self._open_isolated(devices)
        if len(devices) != 1:
            raise OptionsError(
                "an engine in this process runs on one device, not on "
                f"{bounded(', '.join(map(str, devices)), SHOWN_MAX)}. Open it with isolation='process', or "
                "open an engine for each device"
            )
        return await open_local(self._model, devices[0], self._options, self._shared_arenas)

    async def _open_isolated(self, devices: "Sequence[str | Device]") -> "Engine":
        """Open the engine in worker processes, to which only names can be passed."""
        if is_in_worker():
            raise UsageError(
                "an attempt was made to start a worker process (isolation='process') from within one, or "
                "from a process that one has started. This probably means that the module of the model opens "
                "its engine when it is imported, which a worker does as well. Open it under "
                "if __name__ == '__main__': instead. An engine that a model opens while it runs needs "
                "isolation='none'"
            )
        if isinstance(self._model, str) and self._model.partition(":")[0] in ("__main__", "__mp_main__"):
            raise UsageError(
                f"{self._model!r} is in the main module, which is another one in a worker process. Put the "
                "model into a module that can be imported, such as service.py, and open 'service:model'"
            )
        if not isinstance(self._model, str | os.PathLike):
            raise UsageError(
                f"isolation='process' opens the model in another process, so it needs its path or "
                f"'module:attribute', not {shown(self._model)}"
            )
        if self._shared_arenas is not None or not all(isinstance(device, str) for device in devices):
            raise UsageError(
                "isolation='process' opens the device in another process, so it needs the device's name, "
                "such as 'cuda:0', and no shared_arenas"
            )
        # Imported only here, because most engines run in this process.
        try:
            from asynctrt.workers.engine import open_isolated  # noqa: PLC0415
        except OSError as error:  # Without a free file descriptor nothing can be imported.
            raise DeviceUnavailableError(f"worker processes cannot be started here: {error}") from error

        with _apart():
            return await open_isolated(os.fspath(self._model), [str(name) for name in devices], self._options)


def _names(device: str | Device | Sequence[str]) -> "Sequence[str | Device]":
    """Return the devices as a sequence; split names at commas."""
    if isinstance(device, str):
        return [name.strip() for name in device.split(",")]
    if isinstance(device, list | tuple) and device:
        return list(device)
    return [device]  # type: ignore[list-item]
