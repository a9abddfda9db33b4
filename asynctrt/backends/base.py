"""The protocols that a backend implements: :class:`Model`, :class:`ExecutionContext` and :class:`Binding`.

A model is loaded once per device and holds its weights once. Its contexts run batches: one context runs
one batch at a time, and several contexts run side by side.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.tensors import Array, Dims, TensorSpec, shape_of


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """The memory that one tensor is bound to, with room for the rows of the largest batch.

    ``address`` is what the device reads or writes; 0 for strings and Python values. ``array`` is the same
    memory as a NumPy array of shape ``(rows_max, *dims)`` if the CPU can access it, and ``None`` otherwise.
    Unless ``axis`` is 0, it is laid out anew for each number of rows: see :meth:`view`.
    """

    name: str
    dtype: np.dtype[Any]
    dims: Dims
    address: int
    array: Array | None
    axis: int | None = 0
    """The axis that counts rows, as in a :class:`~asynctrt.tensors.TensorSpec`."""

    def shape(self, rows: int) -> Dims:
        """Return the whole shape of ``rows`` rows, as the model has it."""
        return shape_of(self.dims, self.axis, rows)

    def view(self, rows: int) -> Array:
        """Return the memory of ``rows`` rows as an array of :meth:`shape`, if the CPU can access it."""
        assert self.array is not None, "the CPU cannot access it"
        if self.axis == 0:
            return self.array[:rows]
        if self.axis is None:
            view: Array = self.array[0, ...]
            return view
        return self.array.reshape(-1)[: rows * math.prod(self.dims)].reshape(self.shape(rows))


class Binding(Protocol):
    """A context bound to one set of tensor memory, so that whatever does not change is set only once."""

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        """Enqueue one batch on ``stream``, and return before it has run.

        :param rows: how many rows of the bound memory the batch occupies.
        :param profile: the optimisation profile to run it with. ``None`` for a model without profiles, or
            to leave the choice to the model.
        :param arena: the enqueue memory to work in, for a model whose ``enqueue_nbytes`` is not 0. It belongs
            to this batch alone, in stream order.
        """

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        """Return the outputs for which no memory was bound, once the batch is done; the caller owns them."""


@runtime_checkable
class SlowBinding(Binding, Protocol):
    """A binding of a model whose ``enqueue_may_block``, if it can tell when."""

    def may_block(self, rows: int, *, profile: int | None) -> bool:
        """Return whether to enqueue the next batch, of ``rows``, in a thread, because that may take long.

        It is enqueued next, and nothing else is meanwhile.
        """


class ExecutionContext(Protocol):
    """Runs batches of one model, one at a time."""

    def bind(self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]) -> Binding:
        """Bind this context to memory. ``None`` stands for an output whose shape depends on the data."""

    def close(self) -> None:
        """Release what the context holds. Idempotent."""


@runtime_checkable
class Model(Protocol):
    """One loaded engine. ``asynctrt.open`` accepts any object with these members.

    A model of your own is easiest to write as a subclass of :class:`ModelBase`, which has defaults for
    everything that most models do not care about.
    """

    @property
    def name(self) -> str:
        """The name used in messages and metrics."""

    @property
    def platform(self) -> str:
        """What runs the model, in KServe's words: ``onnxruntime_onnx``, ``tensorrt_plan``, ``python``."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs, in the order in which contexts are bound to them."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, in the order in which contexts are bound to them."""

    @property
    def rows_fixed(self) -> int | None:
        """The only batch size the model accepts, or ``None``; batches are padded up to it."""

    @property
    def rows_min(self) -> int:
        """The smallest batch the model accepts for some shape of its inputs."""

    @property
    def rows_max(self) -> int | None:
        """The largest batch the model accepts, or ``None`` for no limit."""

    @property
    def enqueue_nbytes(self) -> int:
        """Bytes of enqueue memory that the largest batch needs in its arena; 0 for none."""

    @property
    def is_capturable(self) -> bool:
        """Whether batches can be captured into CUDA graphs, as far as is known without trying."""

    @property
    def occupies_device(self) -> bool:
        """Whether a batch keeps the device busy. If not, as many run at once as there are contexts."""

    @property
    def enqueue_may_block(self) -> bool:
        """Whether enqueueing a batch may take long, so that it is done in a thread.

        Bindings that are a :class:`SlowBinding` say for which batches; with others it is done for all.
        """

    def create_context(self, device: Device) -> ExecutionContext:
        """Create a context on ``device``.

        :raises DeviceUnavailableError: when the model does not run on this kind of device.
        """

    def close(self) -> None:
        """Release the weights. Idempotent; every context is closed before."""


@runtime_checkable
class ProfiledModel(Model, Protocol):
    """A model with optimisation profiles, each of which accepts a range of shapes and of batch sizes."""

    def profile_of(self, dims: tuple[Dims, ...], rows: int) -> int:
        """Return the index of the profile to run a batch with.

        :param dims: the dimensions of one row of each input.
        :raises InputError: when no profile accepts the batch.
        """

    def rows_of(self, dims: tuple[Dims, ...]) -> tuple[tuple[int, int], ...]:
        """Return the smallest and the largest batch of each profile that accepts rows of these dimensions.

        :param dims: the dimensions of one row of each input.
        :raises InputError: when no profile accepts them.
        """


@runtime_checkable
class RangedModel(Model, Protocol):
    """A model that tells how large its dynamic dimensions may be."""

    def ranges_of(self, dim: str) -> tuple[tuple[int, int], ...]:
        """Return the smallest and the largest size of a dimension in each profile, in their order.

        :param dim: its name, as the inputs have it.
        """


@runtime_checkable
class StreamModel(Model, Protocol):
    """A model whose contexts are each made for one stream, and run on no other."""

    def create_context_on(self, device: Device, stream: Stream) -> ExecutionContext:
        """Create a context that runs on ``stream``, and is closed before it.

        :raises DeviceUnavailableError: when the model does not run on this kind of device.
        """


def create_context_on(model: Model, device: Device, stream: Stream) -> ExecutionContext:
    """Create a context of any model, to run on ``stream``."""
    if isinstance(model, StreamModel):
        return model.create_context_on(device, stream)
    return model.create_context(device)


@runtime_checkable
class PreparedModel(Model, Protocol):
    """A model whose contexts may take long over a batch of another size than the one before.

    They are a :class:`PreparedContext` each.
    """

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """The batch sizes to run, rising, to which others are padded; empty for all.

        ``None`` lets the engine choose, if it finds that changes take long.
        """


class PreparedContext(ExecutionContext, Protocol):
    """A context of such a model."""

    def keep_apart(self, sizes: Sequence[int]) -> None:
        """Let batches of each of these sizes know of no other from now on, and forget others."""


@runtime_checkable
class TracedModel(Model, Protocol):
    """A model of a library that was not made to be captured, so that its graphs are compared with batches.

    Its bindings are a :class:`TracedBinding` each.
    """

    @property
    def is_traced(self) -> bool:
        """Whether it is such a model."""

    def create_context_for(
        self, device: Device, stream: Stream, shape: Mapping[str, int], rows: int
    ) -> ExecutionContext:
        """Create a context for batches of ``rows`` only, whose varying dimensions are those of ``shape``."""


class TracedBinding(Binding, Protocol):
    """A binding of such a model."""

    def settle(self) -> None:
        """Have done what earlier batches have left to do, so that it does not get into a graph. Blocks."""


@runtime_checkable
class ReservingModel(Model, Protocol):
    """A model whose batches can reserve what they need in arenas that are sized by shapes."""

    @property
    def reserves_arenas(self) -> bool:
        """Whether a binding calls :meth:`GrowingBuffer.reserve` of its arena before it enqueues a batch."""


MODEL_MEMBERS: Final = tuple(name for name in vars(Model) if not name.startswith("_"))
"""The members of :class:`Model`, in the order in which it declares them."""


def missing_members(model: object) -> tuple[str, ...]:
    """Return the members of :class:`Model` that an object lacks."""
    return tuple(name for name in MODEL_MEMBERS if not hasattr(model, name))


class ModelBase:
    """Defaults for a model of your own, which adds name, inputs, outputs, create_context and close.

    By default a model accepts batches of any size, needs no enqueue memory, and is not captured into graphs.
    """

    platform: str = "custom"
    rows_fixed: int | None = None
    rows_min: int = 1
    rows_max: int | None = None
    enqueue_nbytes: int = 0
    is_capturable: bool = False
    occupies_device: bool = True
    enqueue_may_block: bool = False
    alone: str = ""
    """Why each request runs alone; empty if rows of several share batches."""
    doubt: str = ""
    """What leaves open whether outputs have a row for each of the inputs; empty for nothing."""
    is_pure: bool = False
    """Whether a batch does nothing but compute, so that made-up rows may be run to try the model."""
    brings_outputs: bool = False
    """Whether it brings the memory of all outputs, so that none is bound."""
    dims_are_hints: bool = False
    """Whether inputs may disagree on the size of a dimension that they both name."""
    contexts_max: int | None = None
    """The most contexts that it can have at once; ``None`` for no limit."""
