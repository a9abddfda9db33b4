"""Rows into a slab, outputs back to their requests.

Rows are gathered when their batch is launched, with one ``np.concatenate`` an input, not when they arrive:
100 ns a row against 200, no holes where a request was cancelled, and no slab for what only waits. Large
batches are gathered off the loop, as NumPy gives the GIL up for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asynctrt.devices.base import aligned
from asynctrt.scheduling.request import Request
from asynctrt.tensors import Array, BatchRecord, Dims, InferResult, TensorSpec

SHARED_NBYTES_MAX: Final = 128 * 1024
"""Up to this size a batch's output is copied as one block, of which each result is a view. A result that
is kept then keeps so much memory at the most; larger outputs are copied request by request."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's rows lie within a slab."""

    name: str
    dtype: np.dtype[Any]
    dims: Dims
    offset: int
    row_nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a slab holds the batches of one bucket: every tensor at a multiple of 256 bytes.

    An output that is ``None`` has a shape that depends on the data; the model brings its memory.
    """

    inputs: tuple[Place, ...]
    outputs: tuple[Place | None, ...]
    rows_max: int
    nbytes: int
    input_row_nbytes: int
    """Bytes of one row over all inputs."""
    output_row_nbytes: int
    """Bytes of one row over all outputs whose shape is known."""


def lay_out(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    symbols: Mapping[str, int],
    rows_max: int,
) -> Layout:
    """The layout for these values of the dynamic dimensions."""
    end = 0

    def place(spec: TensorSpec) -> Place | None:
        nonlocal end
        dims = spec.resolve(symbols)
        if dims is None:
            return None
        row_nbytes = int(np.prod(dims, dtype=np.int64)) * spec.dtype.itemsize
        placed = Place(spec.name, spec.dtype, dims, end, row_nbytes)
        end = aligned(end + row_nbytes * rows_max)
        return placed

    placed_inputs = tuple(placed for spec in inputs if (placed := place(spec)) is not None)
    assert len(placed_inputs) == len(inputs), "inputs determine every symbol of their own"
    placed_outputs = tuple(place(spec) for spec in outputs)
    return Layout(
        placed_inputs,
        placed_outputs,
        rows_max,
        end,
        sum(placed.row_nbytes for placed in placed_inputs),
        sum(placed.row_nbytes for placed in placed_outputs if placed is not None),
    )


def gather(requests: Sequence[Request], views: Sequence[Array], rows: int) -> None:
    """Copy the requests' arrays, one after the other, into the first ``rows`` rows of each view."""
    for index, view in enumerate(views):
        if len(requests) == 1:
            view[:rows] = requests[0].payload[index]
        else:
            np.concatenate([request.payload[index] for request in requests], out=view[:rows])


def spans_of(requests: Sequence[Request]) -> list[slice]:
    """Which rows of the batch belong to which request, in the order in which they are gathered."""
    spans = []
    stop = 0
    for request in requests:
        start, stop = stop, stop + request.rows
        spans.append(slice(start, stop))
    return spans


def copy_out(
    outputs: Mapping[str, Array], spans: Sequence[slice] | None, rows: int, *, shared: bool
) -> list[dict[str, Array]]:
    """The outputs of each request, copied out of ``outputs``, whose first ``rows`` rows are the batch.

    ``spans`` are each request's rows; ``None`` if every request has one row and they lie in order. With
    ``shared``, the batch is copied as a block, of which each request gets a view.
    """
    if shared:
        blocks = {name: array[:rows].copy() for name, array in outputs.items()}
        if rows == 1:
            return [blocks]
        if spans is None and len(blocks) == 1:
            # Iterating over a block is the cheapest way to get its rows.
            for name, block in blocks.items():
                return [{name: row} for row in block.reshape(rows, 1, *block.shape[1:])]
        spans = spans or [slice(row, row + 1) for row in range(rows)]
        return [{name: block[span] for name, block in blocks.items()} for span in spans]
    spans = spans or [slice(row, row + 1) for row in range(rows)]
    return [{name: array[span].copy() for name, array in outputs.items()} for span in spans]


def reserve(outputs: Mapping[str, Array], spans: Sequence[slice] | None, rows: int) -> list[dict[str, Array]]:
    """Arrays for the outputs of each request, to be filled by another thread.

    Made in the loop's thread: memory that another thread allocates and this one frees goes back to the system
    each time, and to fault new pages in takes longer than the copy.
    """
    spans = spans or [slice(row, row + 1) for row in range(rows)]
    return [{name: np.empty_like(array[span]) for name, array in outputs.items()} for span in spans]


def fill(
    reserved: Sequence[dict[str, Array]], outputs: Mapping[str, Array], spans: Sequence[slice] | None
) -> None:
    """Copy the outputs of each request into what was reserved for it."""
    spans = spans or [slice(row, row + 1) for row in range(len(reserved))]
    for values, span in zip(reserved, spans, strict=True):
        for name, value in values.items():
            np.copyto(value, outputs[name][span])


def deliver(requests: Sequence[Request], outputs: Sequence[dict[str, Any]], record: BatchRecord) -> None:
    """Answer every caller that still waits. A request and its future may know each other: no longer."""
    batches = (record,)
    for request, values in zip(requests, outputs, strict=True):
        future = request.future
        request.future = None
        if not future.done():
            future.set_result(InferResult(values, batches, request.arrival_ns))
