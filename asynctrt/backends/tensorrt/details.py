"""What TensorRT tells of a deserialised engine, besides its tensors and profiles."""

from dataclasses import dataclass
from typing import Any

from asynctrt.backends.tensorrt.engine import engine_stat


@dataclass(frozen=True, slots=True)
class EngineDetails:
    """What TensorRT tells of an engine. What a version does not tell is ``None``."""

    name: str
    layers: int
    weights_nbytes: int | None
    """All weights, also those that are not on the device."""
    stripped_nbytes: int | None
    """Weights that the plan was built without: 0 unless it is stripped."""
    streamable_nbytes: int
    """Weights that can stay on the host and be streamed for each batch."""
    is_refittable: bool
    aux_streams: int
    hardware_compatibility: str
    capability: str
    """The runtime that it was built for: ``STANDARD``, ``SAFETY`` and so on."""


def read_details(module: Any, engine: Any) -> EngineDetails:
    """Return what TensorRT tells of an engine.

    :param module: the flavour's module.
    """
    stripped = engine_stat(module, engine, "STRIPPED_WEIGHTS_SIZE")
    return EngineDetails(
        name=str(engine.name),
        layers=int(engine.num_layers),
        weights_nbytes=engine_stat(module, engine, "TOTAL_WEIGHTS_SIZE"),
        # A complete engine answers -1.
        stripped_nbytes=None if stripped is None else max(0, stripped),
        streamable_nbytes=int(engine.streamable_weights_size),
        is_refittable=bool(engine.refittable),
        aux_streams=int(engine.num_aux_streams),
        hardware_compatibility=_name(engine.hardware_compatibility_level),
        capability=_name(engine.engine_capability),
    )


def _name(member: Any) -> str:
    return str(getattr(member, "name", member))
