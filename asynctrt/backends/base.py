"""The protocols that a backend fulfils: :class:`Model` and :class:`ExecutionContext`.

A model is loaded once on a device and has its weights once. Its contexts run batches; one context runs
one batch at a time, several contexts run side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.tensors import Array, Dims, TensorSpec


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """Where a tensor's rows lie, for as many rows as a batch holds at the most.

    ``address`` is what the device reads or writes. ``array`` is the same memory as a NumPy array of shape
    ``(rows_max, *dims)`` where the CPU can see it, and ``None`` elsewhere.
    """

    name: str
    dtype: np.dtype[Any]
    dims: Dims
    address: int
    array: Array | None


class Binding(Protocol):
    """A context tied to one set of tensor memory, so that what does not change is set once."""

    def enqueue(self, rows: int, *, stream: Stream, arena: Buffer | None) -> None:
        """Put one batch on ``stream``; returns before it has run.

        ``rows`` is how many rows of the bound memory hold a batch. ``arena`` is the enqueue memory to
        work in, for a model whose ``enqueue_nbytes`` is not 0; it is this batch's alone, in stream order.
        """

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        """The outputs for which no memory was bound, once the batch is done: the caller's to keep."""


class ExecutionContext(Protocol):
    """Runs batches of one model, one at a time."""

    def bind(self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]) -> Binding:
        """Tie this context to memory. ``None`` stands for an output whose shape depends on the data."""

    def close(self) -> None:
        """Give back what the context holds. Idempotent."""


@runtime_checkable
class Model(Protocol):
    """One loaded engine. ``asynctrt.open`` takes any object that has this surface."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What it takes."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What it gives."""

    @property
    def rows_fixed(self) -> int | None:
        """The batch size it was built for, if it takes no other; batches are padded up to it."""

    @property
    def rows_max(self) -> int | None:
        """The largest batch it takes, if it has a limit."""

    @property
    def enqueue_nbytes(self) -> int:
        """Bytes of enqueue memory that a batch needs on the device; 0: it needs none from outside."""

    def create_context(self, device: Device) -> ExecutionContext:
        """A new context on ``device``.

        :raises DeviceUnavailableError: when the model does not run on this kind of device.
        """

    def close(self) -> None:
        """Give back the weights. Idempotent; every context is closed before."""
