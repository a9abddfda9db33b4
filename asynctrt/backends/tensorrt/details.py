"""Properties of a deserialised engine other than its tensors and profiles."""

import json
from dataclasses import dataclass
from typing import Any, Final

from asynctrt.backends.tensorrt.abilities import Abilities

LAYERS_MAX: Final = 10_000
"""The maximum number of layers whose names are kept."""


@dataclass(frozen=True, slots=True)
class EngineDetails:
    """Properties that TensorRT reports for an engine; ``None`` if a version does not report them."""

    name: str
    layers: int
    """Layers of the engine, after layers of the model were fused or split."""
    layer_names: tuple[str, ...]
    """Layer names, if the plan keeps them and the package (``tensorrt``, ``tensorrt_rtx``) can read them."""
    weights_nbytes: int | None
    """All weights, including those not on the device."""
    stripped_nbytes: int | None
    """Weights that the plan was built without: 0 unless it is stripped."""
    is_refittable: bool
    aux_streams: int
    hardware_compatibility: str
    capability: str
    """The runtime that it was built for, such as ``STANDARD`` or ``SAFETY``."""


def read_details(module: Any, engine: Any, abilities: Abilities) -> EngineDetails:
    """Return the properties of an engine."""
    stripped = abilities.stat(engine, module, "STRIPPED_WEIGHTS_SIZE")
    return EngineDetails(
        name=str(engine.name),
        layers=int(engine.num_layers),
        layer_names=_layer_names(module, engine),
        weights_nbytes=abilities.stat(engine, module, "TOTAL_WEIGHTS_SIZE"),
        # A complete engine returns -1.
        stripped_nbytes=None if stripped is None else max(0, stripped),
        is_refittable=bool(engine.refittable),
        aux_streams=int(engine.num_aux_streams),
        hardware_compatibility=_name(engine.hardware_compatibility_level),
        capability=_name(engine.engine_capability),
    )


def _layer_names(module: Any, engine: Any) -> tuple[str, ...]:
    # Every package has the engine's method, but not every package has the type that it returns.
    if not hasattr(module, "EngineInspector"):
        return ()
    inspector = engine.create_engine_inspector()
    try:
        told = json.loads(inspector.get_engine_information(module.LayerInformationFormat.JSON))
        layers = told["Layers"][:LAYERS_MAX]
        return tuple(str(one["Name"]) if isinstance(one, dict) else str(one) for one in layers)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        return ()  # The plan may not keep them (ProfilingVerbosity.NONE).


def _name(member: Any) -> str:
    return str(getattr(member, "name", member))
