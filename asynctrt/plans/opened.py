"""Inspection of a model that a runtime has opened. For a plan, opening runs its code."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asynctrt.backends.base import Model
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.tensorrt.details import EngineDetails
from asynctrt.backends.tensorrt.model import TensorRTModel
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.core.assembly import build_on, is_specialisable
from asynctrt.core.loading import find_device, load_model
from asynctrt.devices.base import Device
from asynctrt.errors import AsynctrtError, OptionsError
from asynctrt.options import Options
from asynctrt.plans.plan_file import is_plan, read_beginning
from asynctrt.tensors import TensorSpec

CLOSE_S: Final = 1.0
"""How long the streams of the trial may take to become idle."""


@dataclass(frozen=True, slots=True)
class OpenedTensor:
    """An input or output of a model, as it is served."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    """The whole shape, with names for dimensions that may vary and ``rows`` for the axis of rows."""


@dataclass(frozen=True, slots=True)
class OpenedProfile:
    """An optimisation profile."""

    index: int
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    """For each input the smallest, the optimal and the largest shape, including rows."""
    enqueue_nbytes: int
    """The enqueue memory for its largest shapes."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """An estimate of the device memory of an engine with this model."""

    contexts: int
    arenas: int
    weights_nbytes: int
    context_nbytes: int
    """The memory held by one context, measured on one."""
    arena_nbytes: int
    """The enqueue memory of one arena, for the widest profile."""
    slab_nbytes: int | None
    """The inputs and outputs of one context's largest batch; ``None`` if an output dimension is unknown."""

    @property
    def total_nbytes(self) -> int:
        """The total, as far as known."""
        return self._total(self.arenas)

    @property
    def total_without_sharing_nbytes(self) -> int:
        """The total with an arena for each context."""
        return self._total(self.contexts)

    def _total(self, arenas: int) -> int:
        each = self.context_nbytes + (self.slab_nbytes or 0)
        return self.weights_nbytes + self.contexts * each + arenas * self.arena_nbytes


@dataclass(frozen=True, slots=True)
class Opened:
    """A model as described by its runtime."""

    runtime: str
    """For example ``tensorrt_lean 11.4.0.106`` or ``ONNX Runtime``."""
    device: str
    inputs: tuple[OpenedTensor, ...]
    outputs: tuple[OpenedTensor, ...]
    rows: tuple[int | None, int | None]
    """The smallest and the largest batch; ``None`` for any number of rows."""
    batching: str = ""
    """Whether rows of different requests share batches, and why; or why that could not be tried."""
    profiles: tuple[OpenedProfile, ...] = ()
    unbound: tuple[str, ...] = ()
    """Outputs whose sizes depend on the data."""
    is_capturable: bool | None = None
    """Whether batches can be captured into CUDA graphs, as far as the library says without trying."""
    lanes: Mapping[int, int] = field(default_factory=dict)
    """How many batches compute in parallel, by the largest size that does, with the contexts of the memory
    estimate; empty on the host."""
    lane_rates: tuple[tuple[int, int, float], ...] = ()
    """What that follows from: the rows of a batch, how many computed in parallel, and rows per second."""
    specialises: bool = False
    """Whether shapes of rows that recur get separate contexts that are specialised for their sizes."""
    engine: EngineDetails | None = None
    memory: MemoryEstimate | None = None


def open_file(
    path: Path,
    device: str | Device | None = None,
    *,
    contexts: int | None = None,
    arenas: int = 1,
    options: Options | None = None,
) -> Opened:
    """Open a model with its runtime, and return the runtime's description. Blocks.

    Opening a plan runs its code: do it only with plans that you trust.

    :param device: the device. Default: ``cuda:0`` for a plan, ``host`` for an ONNX model.
    :param contexts: the number of contexts for the memory estimate. Default: the device's default.
    :param arenas: the number of blocks of enqueue memory that these contexts share.
    :param options: ``tensorrt`` says how a plan is loaded, and ``onnx`` how an ONNX model is.
    :raises ModelError, DeviceUnavailableError, DeviceMemoryError, MissingExtraError: as when an engine is
        opened.
    :raises OptionsError: if there are more arenas than contexts, or none.
    """
    options = options or Options()
    is_a_plan = is_plan(read_beginning(path))
    device = device or ("cuda:0" if is_a_plan else "host")
    found = find_device(device)
    try:
        contexts = found.contexts_default if contexts is None else contexts
        if not 1 <= arenas <= contexts:
            raise OptionsError(
                f"{arenas} arenas for {contexts} contexts: there must be at least one, and no more than "
                "contexts, as an arena serves one batch at a time"
            )
        tensorrt = options.tensorrt
        assert tensorrt is None or isinstance(tensorrt, TensorRTOptions), "it was converted by its check"
        onnx = options.onnx
        assert onnx is None or isinstance(onnx, OnnxOptions), "it was converted by its check"
        if is_a_plan and onnx is not None:
            raise OptionsError(f"onnx says how ONNX Runtime loads a model, and {str(path)!r} is a plan")
        # A plan is recognised by its content, whatever its name.
        model: Model = (
            TensorRTModel(path, device=found, options=tensorrt)
            if is_a_plan
            else load_model(path, found, tensorrt, onnx=onnx)
        )
        try:
            tried = _try_batching(model, found, options, contexts)
            description = describe(model, found, contexts, arenas)
            varies = not all(spec.is_fixed for spec in model.inputs)
            specialises = varies and is_specialisable(model)
            return dataclasses.replace(description, **tried, specialises=specialises)
        finally:
            model.close()
    finally:
        if found is not device:
            found.close()


def _try_batching(model: Model, device: Device, options: Options, contexts: int) -> dict[str, Any]:
    """Run made-up rows, as opening an engine does; return the conclusions about batches."""
    settings = dataclasses.replace(options, contexts=1, graphs="off", tensorrt=None, onnx=None)
    if device.is_pipelined:  # Batches side by side take other times if they are graphs.
        settings = dataclasses.replace(settings, contexts=contexts, graphs=options.graphs)
    try:
        parts = build_on(model, device, settings, None)
    except AsynctrtError as error:
        return {"batching": f"could not be tried: {error}"}
    parts.close(CLOSE_S)
    return {
        "batching": str(parts.batching),
        "lanes": parts.lanes_by_rows,
        "lane_rates": parts.calibration.rates,
    }


def describe(model: Model, device: Device, contexts: int, arenas: int) -> Opened:
    """Return the runtime's description of an open model."""
    fixed = model.capabilities.rows_fixed
    inputs, outputs = _tensors(model.inputs), _tensors(model.outputs)
    if not isinstance(model, TensorRTModel):
        return Opened(
            model.platform, device.name, inputs, outputs, (fixed or 1, fixed or model.capabilities.rows_max)
        )
    signature = model.signature
    return Opened(
        runtime=model.flavour.title,
        device=" ".join(filter(None, (device.name, device.gpu))),
        inputs=inputs,
        outputs=outputs,
        rows=(signature.rows_min, signature.rows_max),
        profiles=tuple(
            OpenedProfile(
                profile.index,
                {spec.name: shapes for spec, shapes in zip(model.inputs, profile.shapes, strict=True)},
                profile.enqueue_nbytes,
            )
            for profile in signature.profiles
        ),
        unbound=signature.unbound,
        is_capturable=model.capabilities.is_capturable,
        engine=model.details(),
        memory=_memory(model, device, contexts, arenas),
    )


def _tensors(specs: Sequence[TensorSpec]) -> tuple[OpenedTensor, ...]:
    return tuple(OpenedTensor(spec.name, spec.dtype.name, spec.shape("rows")) for spec in specs)


def _memory(model: TensorRTModel, device: Device, contexts: int, arenas: int) -> MemoryEstimate:
    contexts = min(contexts, model.capabilities.contexts_max or contexts)
    before = model.memory_statistics().held_nbytes
    context = model.create_context(device)
    try:
        kept = max(0, model.memory_statistics().held_nbytes - before)
    finally:
        context.close()
    return MemoryEstimate(
        contexts,
        min(arenas, contexts),
        model.weights_nbytes,
        kept,
        model.capabilities.enqueue_nbytes,
        slab_nbytes=_slab(model),
    )


def _slab(model: TensorRTModel) -> int | None:
    """Return the bytes of inputs and outputs of the largest batch of any profile; ``None`` if unknown."""
    sizes = []
    for profile in model.signature.profiles:
        symbols: dict[str, int] = {}
        for spec, (_, _, largest) in zip(model.inputs, profile.shapes, strict=True):
            named = zip(spec.dims, largest[1:], strict=True)
            symbols |= {dim: size for dim, size in named if isinstance(dim, str)}
        nbytes = 0
        for spec in (*model.inputs, *model.outputs):
            dims = spec.resolve(symbols)
            if dims is None:
                return None
            nbytes += profile.rows_max * math.prod(dims) * spec.dtype.itemsize
        sizes.append(nbytes)
    return max(sizes)
