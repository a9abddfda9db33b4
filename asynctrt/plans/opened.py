"""Inspection of a model that a runtime has opened. For a plan, opening runs its code."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asynctrt.backends.base import Model
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.tensorrt.details import EngineDetails
from asynctrt.backends.tensorrt.manifest import NamedTensor
from asynctrt.backends.tensorrt.model import TensorRTModel
from asynctrt.backends.tensorrt.plan import is_plan
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.core.assembly import build_on, is_specialisable
from asynctrt.core.loading import find_device, load_model
from asynctrt.devices.base import Device
from asynctrt.errors import AsynctrtError, OptionsError
from asynctrt.options import Options
from asynctrt.plans.plan_file import read_beginning
from asynctrt.tensors import TensorSpec

CLOSE_S: Final = 1.0
"""How long the streams of the trial may take to become idle."""


@dataclass(frozen=True, slots=True)
class OpenedProfile:
    """An optimisation profile."""

    index: int
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    """For each input the smallest, the optimal and the largest shape, including rows."""
    enqueue_nbytes: int
    """The enqueue memory for its largest shapes."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model as described by its runtime."""

    runtime: str
    """For example ``tensorrt_lean 11.4.0.106`` or ``ONNX Runtime``."""
    device: str
    inputs: tuple[NamedTensor, ...]
    """As they are served: ``rows`` is the axis of rows."""
    outputs: tuple[NamedTensor, ...]
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
    """How many batches compute in parallel, by the largest size that does; empty on the host."""
    lane_rates: tuple[tuple[int, int, float], ...] = ()
    """What that follows from: the rows of a batch, how many computed in parallel, and rows per second."""
    specialises: bool = False
    """Whether shapes of rows that recur get separate contexts that are specialised for their sizes."""
    engine: EngineDetails | None = None


def open_file(
    path: Path,
    device: str | Device | None = None,
    *,
    options: Options | None = None,
) -> Opened:
    """Open a model with its runtime, and return the runtime's description. Blocks.

    Opening a plan runs its code: do it only with plans that you trust. By default a plan is opened on
    ``cuda:0``, and an ONNX model on ``host``.
    """
    options = options or Options()
    is_a_plan = is_plan(read_beginning(path))
    device = device or ("cuda:0" if is_a_plan else "host")
    found = find_device(device)
    try:
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
            tried = _try_batching(model, found, options)
            description = describe(model, found)
            varies = not all(spec.is_fixed for spec in model.inputs)
            specialises = varies and is_specialisable(model)
            return dataclasses.replace(description, **tried, specialises=specialises)
        finally:
            model.close()
    finally:
        if found is not device:
            found.close()


def _try_batching(model: Model, device: Device, options: Options) -> dict[str, Any]:
    """Run made-up rows, as opening an engine does; return the conclusions about batches."""
    settings = dataclasses.replace(options, contexts=1, graphs="off", tensorrt=None, onnx=None)
    if device.is_pipelined:  # As graphs, batches side by side take different times.
        contexts = options.contexts or device.contexts_default
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


def describe(model: Model, device: Device) -> Opened:
    """Return the runtime's description of an open model."""
    fixed = model.capabilities.rows_fixed
    inputs, outputs = _tensors(model.inputs), _tensors(model.outputs)
    if not isinstance(model, TensorRTModel):
        return Opened(
            model.platform, device.name, inputs, outputs, (fixed or 1, fixed or model.capabilities.rows_max)
        )
    signature, details = model.signature, model.details()
    if details.weights_nbytes is None:
        details = dataclasses.replace(details, weights_nbytes=model.weights_nbytes)
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
        engine=details,
    )


def _tensors(specs: Sequence[TensorSpec]) -> tuple[NamedTensor, ...]:
    return tuple(NamedTensor(spec.name, spec.dtype.name, spec.shape("rows")) for spec in specs)
