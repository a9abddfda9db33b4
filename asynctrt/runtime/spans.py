"""Which rows of a batch are whose, and the outputs for each: in process, and in fronts of workers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from asynctrt.scheduling.request import Request
from asynctrt.tensors import Array

PART_NBYTES_MIN: Final = 1 << 20
"""Several threads copy the rows of a batch, each at least so much of them."""


def spans_of(requests: Sequence[Request]) -> list[slice]:
    """Return which rows of the batch belong to which request, in the order in which they are gathered."""
    spans = []
    stop = 0
    for request in requests:
        start, stop = stop, stop + request.rows
        spans.append(slice(start, stop))
    return spans


def parts_of(rows: int, nbytes: int, parts_max: int) -> list[tuple[int, int]]:
    """Return the parts in which several threads copy rows: where each begins, and the next one does.

    :param nbytes: of all rows.
    """
    parts = max(min(parts_max, nbytes // PART_NBYTES_MIN, rows), 1)
    return list(pairwise([rows * number // parts for number in range(parts + 1)]))


def rows_between(arrays: Sequence[Array], spans: Sequence[slice], start: int, stop: int) -> list[Array]:
    """Return the rows of a batch from ``start`` up to ``stop``, in as many pieces as they lie in.

    No array gives more than its own rows, even if it has grown meanwhile: those of others would be pushed
    along.

    :param arrays: the rows of each request.
    :param spans: which rows of the batch those are.
    """
    return [
        array[max(start - span.start, 0) : min(stop, span.stop) - span.start]
        for array, span in zip(arrays, spans, strict=True)
        if span.start < stop and span.stop > start
    ]


def outputs_of(requests: Sequence[Request]) -> tuple[frozenset[str] | None, bool]:
    """Return the outputs that the callers of a batch want, and whether they want different ones.

    :returns: the names of all outputs that any of them wants, or ``None`` if one wants all.
    """
    wanted = {request.outputs for request in requests}
    if len(wanted) == 1:
        return wanted.pop(), False
    names = [one for one in wanted if one is not None]
    return (frozenset().union(*names) if len(names) == len(wanted) else None), True


def views_of(
    outputs: Mapping[str, Array], requests: Sequence[Request], spans: Sequence[slice]
) -> list[dict[str, Array]]:
    """Return views of the rows of each request, in the outputs that its caller wants."""
    return [
        {
            name: array[span]
            for name, array in outputs.items()
            if request.outputs is None or name in request.outputs
        }
        for request, span in zip(requests, spans, strict=True)
    ]


def copy_out(
    outputs: Mapping[str, Array], spans: Sequence[slice] | None, rows: int, *, shared: bool
) -> list[dict[str, Array]]:
    """Copy the outputs of each request out of ``outputs``.

    :param spans: the rows of each request; ``None`` if every request has one row and they lie in order.
    :param rows: the rows of the batch, from the first on.
    :param shared: whether to copy the batch as a block, of which each request gets a view.
    """
    if shared:
        blocks = {}
        for name, array in outputs.items():  # A comprehension takes longer by as much as a copy.
            blocks[name] = array[:rows].copy()
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
