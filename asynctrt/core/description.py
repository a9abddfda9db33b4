"""The facts about an engine that do not change while it is open."""

from dataclasses import dataclass

from asynctrt.statistics import TRUSTED, Batching
from asynctrt.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Description:
    """The facts about an engine; a worker sends them to its front."""

    name: str
    platform: str
    device_name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int
    contexts: int
    parallel_batches: int
    """Batches that may compute side by side."""
    is_unified: bool = True
    """Whether its device uses the host's memory."""
    batching: Batching = TRUSTED
    """Whether rows of different requests share batches, and why."""
    files: tuple[tuple[str, str], ...] = ()
    """The model's files, each with the SHA-256 of the content that a worker opened."""
    versions: tuple[tuple[str, str], ...] = ()
    """The packages that a worker computes with, each with its version."""
