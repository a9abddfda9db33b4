"""Requests that travel to a worker together, in one block of shared memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from asynctrt.errors import InputError
from asynctrt.runtime.answers import changed_error
from asynctrt.runtime.spans import parts_of, rows_between, spans_of
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import QUEUED, Request
from asynctrt.tensors import Array, copy_rows, gather, pins
from asynctrt.workers.layout import LAUNCHED, SYMBOLS, BlockArrays, GroupLayout
from asynctrt.workers.memory import Heap, SharedMemory

PIECES: Final = 4
"""A group smaller than a batch has at most this fraction of one."""


class RequestGroup:
    """Requests of one tick that may share a batch, one after the other in the arrays of one block.

    The worker's engine treats a group as a single request, so that per-request costs are paid once for all.
    The inputs stay in the block until the group is answered, so that it can be given to another worker.
    """

    __slots__ = (
        "block",
        "deadline_ns",
        "deaths",
        "generation",
        "hangs",
        "key",
        "large",
        "layout",
        "left",
        "nbytes",
        "number",
        "pins",
        "priority",
        "requests",
        "rows",
        "sent_ns",
        "sources",
    )

    def __init__(self, requests: list[Request], layout: GroupLayout) -> None:
        first = requests[0]
        self.requests = requests
        self.rows = sum([request.rows for request in requests])
        self.key: BatchKey = first.key
        self.priority = first.priority
        self.deadline_ns = first.deadline_ns  # The others have the same tick and timeout.
        self.layout = layout
        self.nbytes = layout.nbytes(self.rows)
        self.block = -1
        self.generation = 0
        """The generation of its block's pages, from :meth:`Heap.generation`."""
        self.sources: Sequence[Any] | None = None
        """The arrays that large rows were copied from, because a model may overwrite its inputs in place."""
        self.large: tuple[int, int] | None = None
        """Offset and bytes of the block for an answer that does not fit into its own."""
        self.pins: Sequence[object] = ()
        """References that keep arrays from being freed while threads copy them."""
        self.left = len(requests)
        """Requests whose callers still wait."""
        self.number = 0
        self.sent_ns = 0
        """When it was last given to a worker."""
        self.deaths = 0
        """Workers that died while it was in a batch."""
        self.hangs = False
        """Whether one of those workers had not answered it within the batch_timeout."""

    def __repr__(self) -> str:
        return f"<Group {self.number} requests={len(self.requests)} rows={self.rows} deaths={self.deaths}>"

    def allocate(self, heap: Heap) -> None:
        """Allocate a block.

        :raises MemoryError: if there is no room.
        """
        self.block = heap.allocate(self.nbytes)
        self.generation = heap.generation(self.block)
        words = heap.memory.words
        words[self.launched] = 0
        for at, size in enumerate(self.layout.symbols, start=self.block // 8 + SYMBOLS):
            words[at] = size

    def free(self, heap: Heap) -> None:
        """Give its blocks back. Idempotent."""
        if self.block >= 0:
            heap.free(self.block, self.nbytes)
        self.block, self.sources = -1, None
        if self.large is not None:
            heap.free(*self.large)
            self.large = None

    @property
    def launched(self) -> int:
        """The index of the word of shared memory that says whether it was launched."""
        return self.block // 8 + LAUNCHED

    def arrays(self, memory: SharedMemory) -> BlockArrays:
        """Return its inputs and outputs."""
        return self.layout.arrays(memory, self.block, self.rows)

    def write(self, memory: SharedMemory, payloads: Sequence[Any]) -> list[tuple[Request, InputError]]:
        """Copy rows into the block.

        :param payloads: the arrays of each request, because a cancelled request no longer has them.
        :returns: the requests whose rows could not be copied, each with the error for its caller.
        """
        if self.layout.is_large:
            self.sources = payloads
        views = list(self.arrays(memory).inputs.values())
        try:
            if len(payloads) == 1:
                for view, array in zip(views, payloads[0], strict=True):
                    copy_rows(array, view)
            else:
                counts = [request.rows for request in self.requests]
                for number, view in enumerate(views):
                    gather([payload[number] for payload in payloads], view, counts)
        except Exception:
            return self._write_one_by_one(views, payloads)
        return []

    def writes(
        self, memory: SharedMemory, payloads: Sequence[Any], parts_max: int
    ) -> list[Callable[[], object]]:
        """Return functions that copy the rows into the block in parts, for several threads.

        If one of them raises, call :meth:`write`, which finds the requests whose rows cannot be copied.
        """
        if self.layout.is_large:
            self.sources = payloads
        # Keep the arrays from being freed while threads read them.
        self.pins = pins(array for payload in payloads for array in payload)
        views = list(self.arrays(memory).inputs.values())
        spans = spans_of(self.requests)
        return [
            partial(_write_part, views, payloads, spans, *part)
            for part in parts_of(self.rows, self.nbytes, parts_max)
        ]

    def _write_one_by_one(
        self, views: Sequence[Array], payloads: Sequence[Any]
    ) -> list[tuple[Request, InputError]]:
        """Find requests whose rows cannot be copied, and fill in the first row of another request."""
        good, refused, spans = None, [], []
        for request, payload, span in zip(self.requests, payloads, spans_of(self.requests), strict=True):
            try:
                for view, array in zip(views, payload, strict=True):
                    copy_rows(array, view[span])
            except Exception as error:
                refused.append((request, changed_error(error)))
                spans.append(span)
            else:
                good = span.start
        for span in spans if good is not None else ():
            for view in views:
                view[span] = view[good]
        return refused

    def restore(self, memory: SharedMemory) -> list[tuple[Request, InputError]]:
        """Copy large rows again, because a model that used them in place may have overwritten them.

        :returns: as :meth:`write`; they may include requests whose callers no longer wait.
        """
        if self.sources is None:
            return []
        # Once a request is answered or cancelled, its caller may change the arrays.
        payloads = [
            source if request.state is QUEUED else ()
            for request, source in zip(self.requests, self.sources, strict=True)
        ]
        return self.write(memory, payloads)

    def waiting(self) -> list[Request]:
        """Return the requests whose callers still wait."""
        return [request for request in self.requests if request.state is QUEUED]

    def singles(self, heap: Heap) -> "list[RequestGroup]":
        """Move each waiting request to a new group with its own block. The old block stays as it is.

        :raises MemoryError: if there is no room; then nothing has changed.
        """
        spans = spans_of(self.requests)
        sources = self.sources or self.requests
        whole = self.arrays(heap.memory).inputs
        made: list[RequestGroup] = []
        try:
            for request, span, source in zip(self.requests, spans, sources, strict=True):
                if request.state is not QUEUED:
                    continue
                single = RequestGroup([request], self.layout)
                single.allocate(heap)
                made.append(single)
                single.deaths, single.hangs = self.deaths, self.hangs
                if self.sources is not None:
                    single.sources = [source]
                for name, view in single.arrays(heap.memory).inputs.items():
                    view[...] = whole[name][span]
        except MemoryError:
            for single in made:
                single.free(heap)
            raise
        for single in made:
            single.requests[0].payload = single
        self.requests, self.left = [], 0
        return made


def _write_part(
    views: Sequence[Array], payloads: Sequence[Any], spans: Sequence[slice], start: int, stop: int
) -> None:
    """Copy some rows of a group into its block."""
    for number, view in enumerate(views):
        arrays = [payload[number] for payload in payloads]
        np.concatenate(rows_between(arrays, spans, start, stop), out=view[start:stop])


def formed(
    requests: Sequence[Request], rows_max: int, *, alone: bool, parts: int = 1, pieces: int = PIECES
) -> list[list[Request]]:
    """Cut requests of one kind into groups.

    While enough rows are left for a whole batch, a group has the rows of one. The rest is cut into smaller
    groups, so that the worker can fill its batches with groups of several ticks.

    :param rows_max: the maximum rows of one batch.
    :param alone: whether each request becomes a separate group.
    :param parts: the minimum number of groups, if the requests can be divided so: the number of batches that
        compute side by side.
    :param pieces: a group smaller than a batch has at most this fraction of one.
    """
    if alone or len(requests) == 1:
        return [[request] for request in requests]
    left = sum([request.rows for request in requests])
    share = -(-left // parts)
    groups: list[list[Request]] = []
    group: list[Request] = []
    rows = 0
    limit = min(rows_max if left >= rows_max else max(rows_max // pieces, 1), share)
    for request in requests:
        if group and rows + request.rows > limit:
            groups.append(group)
            left -= rows
            group, rows = [], 0
            limit = min(rows_max if left >= rows_max else max(rows_max // pieces, 1), share)
        group.append(request)
        rows += request.rows
    groups.append(group)
    return groups
