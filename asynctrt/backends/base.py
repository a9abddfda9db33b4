"""The protocols that a backend implements: :class:`Model`, :class:`ExecutionContext` and :class:`Binding`.

A model is loaded once per device and holds its weights once. Its contexts run batches: one context runs one
batch at a time, and several contexts run concurrently.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol, cast, runtime_checkable

import numpy as np

from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.tensors import Array, Dims, TensorSpec, shape_of


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """The memory that one tensor is bound to, with room for the rows of the largest batch.

    ``address`` is the address that the device reads or writes; 0 for strings and Python values. ``array`` is
    the same memory as a NumPy array of shape ``(rows_max, *dims)`` if the CPU can access it, and ``None``
    otherwise. Unless ``axis`` is 0, its layout depends on the number of rows: see :meth:`view`.
    """

    name: str
    dtype: np.dtype[Any]
    dims: Dims
    address: int
    array: Array | None
    axis: int | None = 0
    """The axis that counts rows, as in a :class:`~asynctrt.tensors.TensorSpec`."""

    def shape(self, rows: int) -> Dims:
        """Return the whole shape of ``rows`` rows, in the model's layout."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a model accepts, needs and can do.

    The defaults describe a model that runs batches of any size, needs no enqueue memory, and is not
    captured into graphs. Some capabilities say that the model has methods of a :class:`CapableModel`.
    """

    rows_fixed: int | None = None
    """The only batch size the model accepts, or ``None``; batches are padded up to it."""
    rows_min: int = 1
    """The smallest batch the model accepts for some shape of its inputs."""
    rows_max: int | None = None
    """The largest batch the model accepts, or ``None`` for no limit."""
    batch_sizes: tuple[int, ...] = ()
    """The only batch sizes that it may see, ascending, to which batches are padded; empty for any size. Each
    is run beforehand, in the thread that runs it later."""
    alone: str = ""
    """The reason why each request runs alone; empty if requests share batches."""
    doubt: str = ""
    """The reason to doubt that outputs have one row per row of the inputs; empty if there is none."""
    is_pure: bool = False
    """Whether a batch does nothing but compute, so that it is safe to try the model with made-up rows."""
    dims_are_hints: bool = False
    """Whether inputs may disagree on the size of a dimension that they both name."""
    brings_outputs: bool = False
    """Whether it provides the memory of all outputs, so that none is bound."""
    contexts_max: int | None = None
    """The maximum number of contexts at once; ``None`` for no limit."""
    occupies_device: bool = True
    """Whether a batch keeps the device busy. If not, batches run concurrently on all contexts."""
    enqueue_may_block: bool = False
    """Whether enqueueing a batch may be slow, so that it is done in a thread.

    A :class:`SlowBinding` tells which batches are slow; other bindings always use the thread.
    """
    enqueue_nbytes: int = 0
    """Bytes of enqueue memory that the largest batch needs in its arena; 0 for none."""
    is_capturable: bool = False
    """Whether batches can be captured into CUDA graphs, as far as can be known without trying."""
    is_traced: bool = False
    """Whether its library was not designed for capture, so that graphs are compared with batches. It then has
    ``create_context_for``, and each of its contexts is a :class:`TracedContext`."""
    is_specialisable: bool = False
    """Whether it is traced, and recurring shapes are worth separate contexts."""
    changes_slowly: bool = False
    """Whether a batch of another size than the previous one is known to be slow, as with convolutions, which
    cuDNN plans anew. Some models know this once a context has run."""
    has_profiles: bool = False
    """Whether it has optimisation profiles: ``profile_of`` and ``rows_of``."""
    has_ranges: bool = False
    """Whether it knows the sizes of its dynamic dimensions: ``ranges_of``."""
    is_per_stream: bool = False
    """Whether each context is created for one stream: ``create_context_on``."""
    shapes_beforehand: tuple[tuple[tuple[str, int], ...], ...] = ()
    """If dimensions vary, the shapes to run each batch size of beforehand, as sizes of dimensions by name."""
    has_host_twin: bool = False
    """Whether it also exists on the host: ``host_twin``."""
    has_whole: bool = False
    """Whether it knows by itself how each request runs alone: ``whole``."""


class Binding(Protocol):
    """A context bound to one set of tensor memory, so that whatever does not change is set once."""

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        """Enqueue one batch on ``stream``, and return before it has run.

        Earlier batches of this binding may still be waiting or running on the stream, as when an engine
        measures its model. Change what they use only in stream order.

        :param rows: how many rows of the bound memory the batch occupies.
        :param profile: the optimisation profile to use. ``None`` for a model without profiles, or to leave
            the choice to the model.
        :param arena: the enqueue memory, for a model whose ``enqueue_nbytes`` is not 0. This batch has
            exclusive use of it, in stream order.
        """

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        """Return the outputs for which no memory was bound, once the batch is done; the caller owns them."""


class SlowBinding(Binding, Protocol):
    """A binding of a model with ``enqueue_may_block`` that knows which batches block."""

    def may_block(self, rows: int, *, profile: int | None) -> bool:
        """Return whether to enqueue the next batch, of ``rows``, in a thread, because enqueueing may be slow.

        That batch is the next to be enqueued, and nothing else is enqueued in the meantime.
        """


class ExecutionContext(Protocol):
    """Runs batches of one model, one at a time."""

    def bind(self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]) -> Binding:
        """Bind this context to memory. ``None`` stands for an output whose shape depends on the data."""

    def close(self) -> None:
        """Release the context's resources. Idempotent."""


@runtime_checkable
class Model(Protocol):
    """One loaded engine. ``asynctrt.open`` accepts any object with these members.

    The easiest way to write a model is a subclass of :class:`ModelBase`, which has defaults for all members
    that most models do not need.
    """

    @property
    def name(self) -> str:
        """The name used in messages and metrics."""

    @property
    def platform(self) -> str:
        """The runtime, as named by KServe: ``onnxruntime_onnx``, ``tensorrt_plan``, ``python``."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs, in the order in which contexts are bound to them."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, in the order in which contexts are bound to them."""

    @property
    def capabilities(self) -> Capabilities:
        """What the model accepts, needs and can do."""

    def create_context(self, device: Device) -> ExecutionContext:
        """Create a context on ``device``.

        :raises DeviceUnavailableError: when the model does not run on this kind of device.
        """

    def close(self) -> None:
        """Release the weights. Idempotent; all contexts are closed first."""


class TracedContext(ExecutionContext, Protocol):
    """A context of a traced model. Each of its bindings is a :class:`TracedBinding`."""

    def settle(self) -> None:
        """Finish what its runs have left to do, and free their memory. Blocks."""

    def told_sizes(self) -> Mapping[str, int]:
        """Return the sizes of outputs' dimensions that follow from its own sizes, if it is for one size."""


class TracedBinding(Binding, Protocol):
    """A binding of a traced model."""

    def settle(self) -> None:
        """Run what earlier batches left to do, to keep it out of a graph. Blocks."""


class CapableModel(Model, Protocol):
    """A model with all methods that capabilities say it has. One that says less lacks some of them."""

    def profile_of(self, dims: tuple[Dims, ...], rows: int) -> int:
        """Return the index of the optimisation profile to run a batch with. Each accepts a range of shapes
        and batch sizes.

        :param dims: the dimensions of one row of each input.
        :raises InputError: when no profile accepts the batch.
        """

    def rows_of(self, dims: tuple[Dims, ...]) -> tuple[tuple[int, int], ...]:
        """Return the smallest and the largest batch of each profile that accepts rows of these dimensions.

        :param dims: the dimensions of one row of each input.
        :raises InputError: when no profile accepts them.
        """

    def ranges_of(self, dim: str) -> tuple[tuple[int, int], ...]:
        """Return the smallest and the largest size of a dimension in each profile, in profile order.

        :param dim: its name in the input specs.
        """

    def create_context_on(self, device: Device, stream: Stream) -> ExecutionContext:
        """Create a context that runs on ``stream`` only. It must be closed before the stream.

        :raises DeviceUnavailableError: when the model does not run on this kind of device.
        """

    def create_context_for(
        self, device: Device, stream: Stream, shape: Mapping[str, int], rows: int
    ) -> TracedContext:
        """Create a context for batches of ``rows`` only, with the dynamic dimensions given in ``shape``."""

    def host_twin(self) -> Model:
        """Return the same model for the host device, where made-up rows that fail do no harm. Blocks.

        The caller closes it.
        """

    def whole(self, reason: str) -> Model:
        """Return this model with each request run alone. The two share weights and are closed separately.

        :param reason: why, for the capability ``alone``.
        """


def ranged_model(model: Model) -> CapableModel | None:
    """Return a model if it knows the size ranges of its dynamic dimensions, and ``None`` otherwise."""
    return cast("CapableModel", model) if model.capabilities.has_ranges else None


def create_context_on(model: Model, device: Device, stream: Stream) -> ExecutionContext:
    """Create a context of any model, to run on ``stream``."""
    if model.capabilities.is_per_stream:
        return cast("CapableModel", model).create_context_on(device, stream)
    return model.create_context(device)


MODEL_MEMBERS: Final = tuple(name for name in vars(Model) if not name.startswith("_"))
"""The members of :class:`Model`, in order of declaration."""


def missing_members(model: object) -> tuple[str, ...]:
    """Return the members of :class:`Model` that an object lacks."""
    return tuple(name for name in MODEL_MEMBERS if not hasattr(model, name))


def misplaced_capabilities(model: object) -> tuple[str, ...]:
    """Return the capabilities that an object has as attributes, where nothing reads them."""
    return tuple(field.name for field in fields(Capabilities) if hasattr(model, field.name))


class ModelBase:
    """Defaults for a custom model, which adds name, inputs, outputs, create_context and close."""

    platform: str = "custom"
    capabilities: Capabilities = Capabilities()
