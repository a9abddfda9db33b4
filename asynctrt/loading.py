"""From names and paths to a device, a model and the numbers that an engine is built by."""

import asyncio
import os
import re
import sys
from asyncio import _get_running_loop
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import anyio

from asynctrt.backends.base import Model
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.base import Device
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    AsynctrtError,
    DeviceUnavailableError,
    InputError,
    ModelError,
    ModelNotFoundError,
    OptionsError,
    UsageError,
)
from asynctrt.options import MAX_ROWS_DEFAULT, Options
from asynctrt.runtime.pool import Pool
from asynctrt.scheduling.request import NO_DEADLINE_NS, WholeBucket
from asynctrt.tensors import DeviceBucket, Dims, TensorSpec

T = TypeVar("T")

ATTRIBUTE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""How a model in a Python module is written: ``package.module:attribute``."""

BUCKETS_MAX: Final = 4096
"""Buckets of which it is remembered what the profiles take."""

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
        # Not before it is needed: it loads CUDA's bindings.
        from asynctrt.devices.cuda import find_cuda_device  # noqa: PLC0415

        return find_cuda_device(device)
    raise DeviceUnavailableError(
        f"there is no device {device!r}. There are 'host' and 'cuda:0', 'cuda:1' and so on"
    )


def load_model(model: str | os.PathLike[str] | Model, device: Device, flavour: str | None = None) -> Model:
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
        if device.name == "host":
            raise DeviceUnavailableError(
                f"{str(path)!r} is named like a TensorRT plan, which runs on a GPU: open it with "
                "device='cuda:0'. For the host device give the ONNX model that the plan was built from"
            )
        from asynctrt.backends.tensorrt import TensorRTModel  # noqa: PLC0415

        plan: Model = TensorRTModel(path, device=device, flavour=flavour)
        return plan
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
    graphs: tuple[int, ...]

    @classmethod
    def of(cls, model: Model, device: Device, options: Options, shared: Arenas | None = None) -> "Sizes":
        """The numbers, or an error that says which option the model cannot be opened with."""
        contexts = options.contexts or max(
            device.contexts_default, options.max_in_flight or 0, options.arenas or 0
        )
        arenas = min(options.arenas or contexts, contexts)
        if shared is not None:
            arenas = cls._shared(device, options, shared, contexts)
        if not model.enqueue_nbytes:
            arenas = 0
        in_flight_max = min(options.max_in_flight or contexts, contexts)
        rows_max = cls._rows_max(model, options)
        return cls(rows_max, contexts, arenas, in_flight_max, cls._graphs(model, device, options, rows_max))

    @staticmethod
    def _shared(device: Device, options: Options, shared: Arenas, contexts: int) -> int:
        if shared.device is not device:
            raise OptionsError(
                f"{shared!r} belong to another device object than the engine. Open both with the same one: "
                f"device = ...; Arenas(device, 2); asynctrt.open(..., device=device, shared_arenas=arenas)"
            )
        if options.arenas not in (None, len(shared)) or contexts < len(shared):
            raise OptionsError(
                f"{len(shared)} arenas are shared, so leave the option arenas out, and have at least as many "
                f"contexts; arenas is {options.arenas} and there are {contexts} contexts"
            )
        return len(shared)

    @staticmethod
    def _rows_max(model: Model, options: Options) -> int:
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
        return options.max_rows or min(MAX_ROWS_DEFAULT, limit or MAX_ROWS_DEFAULT, options.max_queue_rows)

    @staticmethod
    def _graphs(model: Model, device: Device, options: Options, rows_max: int) -> tuple[int, ...]:
        """The batch sizes to capture."""
        if options.graphs == "off" or (options.graphs == "auto" and not device.prefers_graphs):
            return ()
        if model.rows_fixed is not None:
            return (model.rows_fixed,)
        least = int(getattr(model, "rows_min", 1))
        if options.graphs == "auto":
            # Each size takes a context of its own in every bay, so there are few: powers of four.
            powers = (4**power for power in range(rows_max.bit_length()))
            return tuple(sorted({least, rows_max, *(rows for rows in powers if least < rows < rows_max)}))
        sizes = tuple(int(rows) for rows in options.graphs)
        if sizes[-1] > rows_max or sizes[0] < least:
            raise OptionsError(
                f"graphs is {sizes}, but {model.name!r} takes batches of {least} to {rows_max} rows here"
            )
        return sizes


@dataclass(frozen=True, slots=True)
class Built:
    """All that an engine stands on. Who made a part closes it."""

    device: Device
    model: Model
    pool: Pool
    arenas: Arenas | None
    sizes: Sizes
    owns_device: bool
    owns_model: bool
    owns_arenas: bool

    def close(self, timeout_s: float, slots: Callable[[], None] | None = None) -> int:
        """Give back what is ours; returns how many contexts had to be abandoned. Blocks."""
        abandoned = self.pool.close(timeout_s)
        if abandoned:
            # What runs still uses the weights and the memory, so they stay too.
            return abandoned
        if slots is not None:
            slots()
        if self.owns_arenas and self.arenas is not None:
            self.arenas.close()
        if self.owns_model:
            self.model.close()
        if self.owns_device:
            self.device.close()
        return 0


def build_on(
    model: str | os.PathLike[str] | Model, device: str | Device, options: Options, shared: Arenas | None
) -> Built:
    """Load a model and make what its batches need. Blocks; what fails leaves nothing behind.

    :raises AsynctrtError: whatever a model or a device refuses.
    """
    found = find_device(device)
    loaded: Model | None = None
    arenas: Arenas | None = None
    try:
        loaded = load_model(model, found, options.flavour)
        sizes = Sizes.of(loaded, found, options, shared)
        if sizes.arenas:
            arenas = shared or Arenas(found, sizes.arenas)
        pool = Pool(
            found,
            loaded,
            contexts=sizes.contexts,
            arenas=arenas,
            rows_max=sizes.rows_max,
            graphs=sizes.graphs,
        )
    except BaseException as error:
        if arenas is not None and arenas is not shared:
            arenas.close()
        if loaded is not None and loaded is not model:
            loaded.close()
        if found is not device:
            found.close()
        if loaded is None or isinstance(error, AsynctrtError) or not isinstance(error, Exception):
            raise
        raise ModelError(
            f"{loaded.name!r} could not be set up on {found.name!r}: {type(error).__name__}: {error}"
        ) from error
    return Built(
        found,
        loaded,
        pool,
        arenas,
        sizes,
        owns_device=found is not device,
        owns_model=isinstance(model, str | os.PathLike),
        owns_arenas=arenas is not shared,
    )


@runtime_checkable
class Profiled(Protocol):
    """What a model with profiles has besides: which of them takes what."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What it takes."""

    def profile_of(self, dims: tuple[Dims, ...], rows: int) -> int:
        """The profile for a batch of so many rows of these dimensions."""

    def rows_of(self, dims: tuple[Dims, ...]) -> tuple[tuple[int, int], ...]:
        """The smallest and the largest batch of each profile that takes rows of these dimensions."""


class Profiles:
    """Which profile of a model takes which rows, and how many. Contexts are kept on theirs.

    :param rows_max: rows that one batch of the engine holds at the most.
    """

    def __init__(self, model: Profiled, rows_max: int) -> None:
        self._model = model
        self._rows_max = rows_max
        self._ranges: dict[Hashable, tuple[tuple[int, int], ...]] = {}

    def check(self, dims: tuple[Dims, ...]) -> None:
        """Whether some profile takes such rows.

        :raises InputError: if none does.
        """
        self._model.rows_of(dims)

    def limit_of(self, bucket: Hashable) -> int:
        """Rows that one batch of this bucket holds at the most."""
        return min(self._rows_max, max(most for _, most in self._ranges_of(bucket)))

    def admitted(self, bucket: Hashable, rows: int) -> int:
        """``rows``, or as many more as the smallest batch has that a profile takes."""
        return min(max(rows, least) for least, most in self._ranges_of(bucket) if rows <= most)

    def kind_of(self, bucket: Hashable, rows: int) -> int:
        """The profile for a batch of this bucket."""
        return self._model.profile_of(self._dims_of(bucket), self.admitted(bucket, rows))

    def _ranges_of(self, bucket: Hashable) -> tuple[tuple[int, int], ...]:
        ranges = self._ranges.get(bucket)
        if ranges is None:
            if len(self._ranges) >= BUCKETS_MAX:
                self._ranges.clear()
            ranges = self._ranges[bucket] = self._model.rows_of(self._dims_of(bucket))
        return ranges

    def _dims_of(self, bucket: Hashable) -> tuple[Dims, ...]:
        while isinstance(bucket, WholeBucket | DeviceBucket):
            bucket = bucket.bucket
        assert isinstance(bucket, tuple)
        symbols = dict(bucket)
        resolved = (spec.resolve(symbols) for spec in self._model.inputs)
        return tuple(dims for dims in resolved if dims is not None)


def profiles_of(model: Model, rows_max: int) -> Profiles | None:
    """The profiles of a model, if it has any."""
    return Profiles(model, rows_max) if isinstance(model, Profiled) else None


def running_loop() -> asyncio.AbstractEventLoop:
    """The running asyncio loop.

    :raises UsageError: without one, or on trio.
    """
    loop = _get_running_loop()
    if loop is not None:
        return loop
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        raise UsageError(
            "asynctrt runs on asyncio, and this is trio. Run the application with "
            "anyio.run(main, backend='asyncio', backend_options={'use_uvloop': True})"
        )
    raise UsageError("no event loop is running. Call it from a coroutine: asyncio.run(main())")


def timeout_ns_of(timeout: float) -> int:
    """Seconds in ns.

    :raises InputError: for what is no number of seconds.
    """
    try:
        return int(timeout * 1e9) if timeout >= 0 else _bad_timeout(timeout)
    except OverflowError:  # Infinity: 292 years, the longest that fits into the clock's 63 bits.
        return NO_DEADLINE_NS // 2
    except (TypeError, ValueError):
        return _bad_timeout(timeout)


def _bad_timeout(timeout: object) -> int:
    raise InputError(f"timeout is in seconds and not negative, not {timeout!r}")


async def in_thread(function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
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
