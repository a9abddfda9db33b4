"""Run each request to any model alone: the batch axis becomes another dimension of the request."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from asynctrt.backends.base import (
    Binding,
    Capabilities,
    CapableModel,
    ExecutionContext,
    Model,
    ModelBase,
    TensorMemory,
)
from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.errors import InputError
from asynctrt.tensors import Array, Dims, TensorSpec

ROWS = "rows"
"""The name of the first dimension. All inputs have it, so they must agree on its size."""


def run_alone(model: Model, reason: str) -> Model:
    """Return a model that shares the weights, runs each request alone, and is closed separately."""
    if model.capabilities.has_whole:
        return cast("CapableModel", model).whole(reason)
    return (ProfiledWhole if model.capabilities.has_profiles else WholeModel)(model, reason)


class WholeModel(ModelBase):
    """A model whose tensors have no rows, wrapping one whose first axes count them."""

    def __init__(self, model: Model, reason: str) -> None:
        self._model = model
        self.name, self.platform = model.name, model.platform
        self.inputs = tuple(map(self._whole, model.inputs))
        self.outputs = tuple(map(self._whole, model.outputs))
        its = model.capabilities
        self.capabilities = Capabilities(
            rows_max=1,
            alone=reason,
            is_pure=its.is_pure,
            contexts_max=its.contexts_max,
            occupies_device=its.occupies_device,
            enqueue_may_block=its.enqueue_may_block,
            enqueue_nbytes=its.enqueue_nbytes,
            # Only with a fixed shape is it known in advance what to capture.
            is_capturable=its.is_capturable and its.rows_fixed is not None,
            has_profiles=its.has_profiles,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._model!r}>"

    def _whole(self, spec: TensorSpec) -> TensorSpec:
        return dataclasses.replace(
            spec, dims=spec.shape(self._model.capabilities.rows_fixed or ROWS), axis=None
        )

    def create_context(self, device: Device) -> ExecutionContext:
        return WholeContext(self._model.create_context(device))

    def close(self) -> None:
        """Do nothing: the wrapped model is closed separately."""


class ProfiledWhole(WholeModel):
    """A :class:`WholeModel` with optimisation profiles: the rows of the request decide which one it needs."""

    def profile_of(self, dims: tuple[Dims, ...], rows: int) -> int:
        return self._profiled.profile_of(*_split(dims))

    def rows_of(self, dims: tuple[Dims, ...]) -> tuple[tuple[int, int], ...]:
        inner, rows = _split(dims)
        ranges = self._profiled.rows_of(inner)
        if not any(least <= rows <= most for least, most in ranges):
            raise InputError(
                f"a request to {self.name!r} runs alone, and no profile of the plan takes {rows} rows of "
                f"{inner}: they take {', '.join(f'{least} to {most}' for least, most in ranges)}"
            )
        return ((1, 1),)

    @property
    def _profiled(self) -> CapableModel:
        return cast("CapableModel", self._model)


class WholeContext:
    """A context that runs one request per batch."""

    def __init__(self, context: ExecutionContext) -> None:
        self._context = context

    def bind(self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]) -> Binding:
        bound = self._context.bind(
            tuple(_with_rows(memory) for memory in inputs),
            tuple(None if memory is None else _with_rows(memory) for memory in outputs),
        )
        return WholeBinding(bound, inputs[0].dims[0])

    def close(self) -> None:
        """Close the wrapped context. Idempotent."""
        self._context.close()


class WholeBinding:
    """A binding to the memory of one request with ``rows`` rows."""

    def __init__(self, binding: Binding, rows: int) -> None:
        self._binding = binding
        self._rows = rows

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        self._binding.enqueue(self._rows, profile=profile, stream=stream, arena=arena)

    def may_block(self, rows: int, *, profile: int | None) -> bool:
        may_block: Any = getattr(self._binding, "may_block", None)
        return may_block is None or bool(may_block(self._rows, profile=profile))

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        return self._binding.unbound_outputs(self._rows)


def _split(dims: tuple[Dims, ...]) -> tuple[tuple[Dims, ...], int]:
    """Return the dimensions of a row of each input, and the number of rows."""
    return tuple(own[1:] for own in dims), dims[0][0]


def _with_rows(memory: TensorMemory) -> TensorMemory:
    """Return the memory of one request as memory of its rows."""
    array = None if memory.array is None else memory.array[0]
    return dataclasses.replace(memory, dims=memory.dims[1:], array=array, axis=0)
