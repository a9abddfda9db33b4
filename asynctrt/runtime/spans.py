"""The rows and outputs of each request in a batch: used in process and by the fronts of workers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from asynctrt.runtime.results import ResultMemory
from asynctrt.scheduling.request import PlainRequests, Request
from asynctrt.tensors import SHARED_NBYTES_MAX, Array

PART_NBYTES_MIN: Final = 1 << 20
"""The least bytes for each thread, if several threads copy the rows of a batch."""


def spans_of(requests: Sequence[Request]) -> list[slice]:
    """Return the rows of each request in the batch, in the order in which they are gathered."""
    if type(requests) is PlainRequests:
        return [slice(row, row + 1) for row in range(len(requests))]
    spans = []
    stop = 0
    for request in requests:
        start, stop = stop, stop + request.rows
        spans.append(slice(start, stop))
    return spans


def parts_of(rows: int, nbytes: int, parts_max: int) -> list[tuple[int, int]]:
    """Divide rows into parts for several threads; return the start and stop of each part.

    :param nbytes: the bytes of all rows.
    """
    parts = max(min(parts_max, nbytes // PART_NBYTES_MIN, rows), 1)
    return list(pairwise([rows * number // parts for number in range(parts + 1)]))


def rows_between(arrays: Sequence[Array], spans: Sequence[slice], start: int, stop: int) -> list[Array]:
    """Return the rows of a batch from ``start`` up to ``stop``, one piece for each array that has some.

    An array that has grown meanwhile gives only its original rows, so that it does not shift
    the rows of others.

    :param arrays: the rows of each request.
    :param spans: their places in the batch.
    """
    return [
        array[max(start - span.start, 0) : min(stop, span.stop) - span.start]
        for array, span in zip(arrays, spans, strict=True)
        if span.start < stop and span.stop > start
    ]


def outputs_of(requests: Sequence[Request]) -> tuple[frozenset[str] | None, bool]:
    """Return the outputs that the callers of a batch want, and whether they want different ones.

    :returns: the names of all outputs that any caller wants, or ``None`` if a caller wants all outputs.
    """
    if type(requests) is PlainRequests:
        return None, False
    wanted = {request.outputs for request in requests}
    if len(wanted) == 1:
        return wanted.pop(), False
    names = [one for one in wanted if one is not None]
    return (frozenset().union(*names) if len(names) == len(wanted) else None), True


def views_of(
    outputs: Mapping[str, Array], requests: Sequence[Request], spans: Sequence[slice]
) -> list[dict[str, Array]]:
    """Return views of the rows of each request, in the outputs that its caller wants."""
    if type(requests) is PlainRequests:
        return [{name: array[span] for name, array in outputs.items()} for span in spans]
    return [
        {
            name: array[span]
            for name, array in outputs.items()
            if request.outputs is None or name in request.outputs
        }
        for request, span in zip(requests, spans, strict=True)
    ]


def copy_out(
    outputs: Mapping[str, Array], spans: Sequence[slice] | None, rows: int, memory: ResultMemory
) -> list[dict[str, Array]]:
    """Copy the outputs of each request out of ``outputs``.

    An output of up to ``SHARED_NBYTES_MAX`` bytes is copied as a block, and each request gets a view of it.

    :param spans: the rows of each request; ``None`` if every request has one row and they are in order.
    :param rows: the rows of the batch, from the first on.
    :param memory: memory for large outputs.
    """
    if rows == 1:
        own = {}
        for name, array in outputs.items():  # A comprehension costs as much as one more copy.
            own[name] = memory.copy(array[:1])
        return [own]
    if spans is None and len(outputs) == 1:
        # Iterating over a block is the cheapest way to get its rows.
        for name, array in outputs.items():
            block = array[:rows, None]
            if block.nbytes <= SHARED_NBYTES_MAX:
                return [{name: row} for row in block.copy()]
            return [{name: memory.copy(row)} for row in block]
    spans = spans or [slice(row, row + 1) for row in range(rows)]
    if len(spans) == 1:
        return [{name: memory.copy(array[spans[0]]) for name, array in outputs.items()}]
    sources = []
    for name, array in outputs.items():
        block = array[:rows]
        is_shared = block.nbytes <= SHARED_NBYTES_MAX
        sources.append((name, block.copy() if is_shared else block, is_shared))
    return [
        {name: block[span] if is_shared else memory.copy(block[span]) for name, block, is_shared in sources}
        for span in spans
    ]


def fills(
    reserved: Sequence[dict[str, Array]], views: Sequence[dict[str, Array]], nbytes: int, parts_max: int
) -> list[Callable[[], object]]:
    """Return functions for several threads that copy the outputs of each request into its reserved arrays.

    :param nbytes: the bytes of all of them.
    """
    parts = parts_of(len(reserved), nbytes, parts_max)
    return [partial(_fill, reserved[start:stop], views[start:stop]) for start, stop in parts]


def _fill(reserved: Sequence[dict[str, Array]], views: Sequence[dict[str, Array]]) -> None:
    for arrays, own in zip(reserved, views, strict=True):
        for name, array in arrays.items():
            np.copyto(array, own[name])
