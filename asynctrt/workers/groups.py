"""Requests that travel to a worker together, in one block of shared memory."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from asynctrt.errors import InputError
from asynctrt.runtime.answers import changed_error
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import QUEUED, Request
from asynctrt.tensors import Array, copy_rows
from asynctrt.workers.layout import LAUNCHED, SYMBOLS, Layout
from asynctrt.workers.memory import Heap, SharedMemory


class Group:
    """Requests of one tick that may share a batch, one after the other in the arrays of one block.

    The worker's engine has it as a single request: what a request costs there is paid once for all of them.
    The inputs stay in the block until it is answered, so that another worker can be given it.
    """

    __slots__ = (
        "block",
        "deadline_ns",
        "deaths",
        "key",
        "large",
        "layout",
        "left",
        "nbytes",
        "number",
        "priority",
        "requests",
        "rows",
    )

    def __init__(self, requests: list[Request], layout: Layout) -> None:
        first = requests[0]
        self.requests = requests
        self.rows = sum([request.rows for request in requests])
        self.key: BatchKey = first.key
        self.priority = first.priority
        self.deadline_ns = first.deadline_ns  # Of the same tick and with the same timeout as the others.
        self.layout = layout
        self.nbytes = layout.nbytes(self.rows)
        self.block = -1
        self.large: tuple[int, int] | None = None
        """Offset and bytes of the block for an answer that does not fit into its own."""
        self.left = len(requests)
        """Requests whose callers still wait."""
        self.number = 0
        self.deaths = 0
        """Workers that died while it was in a batch."""

    def __repr__(self) -> str:
        return f"<Group {self.number} requests={len(self.requests)} rows={self.rows} deaths={self.deaths}>"

    def allocate(self, heap: Heap, memory: SharedMemory) -> None:
        """Get a block.

        :raises MemoryError: if there is no room.
        """
        self.block = heap.allocate(self.nbytes)
        word = self.block // 8
        memory.words[word + LAUNCHED] = 0
        for at, size in enumerate(self.layout.symbols, start=word + SYMBOLS):
            memory.words[at] = size

    def free(self, heap: Heap) -> None:
        """Give its blocks back. Idempotent."""
        if self.block >= 0:
            heap.free(self.block, self.nbytes)
            self.block = -1
        if self.large is not None:
            heap.free(*self.large)
            self.large = None

    def write(self, memory: SharedMemory, payloads: Sequence[Any]) -> list[tuple[Request, InputError]]:
        """Copy rows into the block.

        :param payloads: the arrays of each request. A cancelled request has its own no more.
        :returns: the requests whose rows could not be copied, with what to tell their callers.
        """
        views = list(self.layout.inputs(memory, self.block, self.rows).values())
        try:
            if len(payloads) == 1:
                for view, array in zip(views, payloads[0], strict=True):
                    copy_rows(array, view)
            else:
                for number, view in enumerate(views):
                    np.concatenate([payload[number] for payload in payloads], out=view)
        except Exception:
            return self._write_one_by_one(views, payloads)
        return []

    def _write_one_by_one(
        self, views: Sequence[Array], payloads: Sequence[Any]
    ) -> list[tuple[Request, InputError]]:
        """Find whose rows cannot be copied, and put a copy of another one's first row in their place."""
        good, refused, spans = None, [], []
        for request, payload, start in zip(self.requests, payloads, starts_of(self.requests), strict=True):
            span = slice(start, start + request.rows)
            try:
                for view, array in zip(views, payload, strict=True):
                    copy_rows(array, view[span])
            except Exception as error:
                refused.append((request, changed_error(error)))
                spans.append(span)
            else:
                good = start
        for span in spans if good is not None else ():
            for view in views:
                view[span] = view[good]
        return refused

    def waiting(self) -> list[Request]:
        """Return the requests whose callers still wait."""
        return [request for request in self.requests if request.state is QUEUED]

    def parts(self, heap: Heap, memory: SharedMemory) -> "list[Group]":
        """Return what is left of it in two groups with blocks of their own; its own block is free then.

        :raises MemoryError: if there is no room; nothing has changed then.
        """
        waiting = self.waiting()
        half = (len(waiting) + 1) // 2
        made = [Group(part, self.layout) for part in (waiting[:half], waiting[half:]) if part]
        done = []
        try:
            for part in made:
                part.allocate(heap, memory)
                done.append(part)
        except MemoryError:
            for part in done:
                part.free(heap)
            raise
        starts = dict(zip(map(id, self.requests), starts_of(self.requests), strict=True))
        whole = self.layout.inputs(memory, self.block, self.rows)
        for part in made:
            part.deaths = self.deaths
            views = part.layout.inputs(memory, part.block, part.rows)
            at = 0
            for request in part.requests:
                request.payload = part
                start = starts[id(request)]
                for name, view in views.items():
                    view[at : at + request.rows] = whole[name][start : start + request.rows]
                at += request.rows
        self.free(heap)
        return made


def starts_of(requests: Iterable[Request]) -> list[int]:
    """Return where the rows of each request begin."""
    starts, start = [], 0
    for request in requests:
        starts.append(start)
        start += request.rows
    return starts


def formed(requests: Sequence[Request], rows_max: int, *, alone: bool, parts: int = 1) -> list[list[Request]]:
    """Cut requests of one kind into groups.

    As long as there are enough for a whole batch, each has the rows of one. What is left over is cut finer,
    so that the worker can fill its batches with groups of several ticks.

    :param rows_max: rows that one batch holds.
    :param alone: whether each request is a group of its own.
    :param parts: how many groups there are at least, if the requests can be divided so: batches that compute
        side by side.
    """
    if alone or len(requests) == 1:
        return [[request] for request in requests]
    left = sum([request.rows for request in requests])
    share = -(-left // parts)
    groups: list[list[Request]] = []
    group: list[Request] = []
    rows = 0
    limit = min(rows_max if left >= rows_max else max(rows_max // PIECES, 1), share)
    for request in requests:
        if group and rows + request.rows > limit:
            groups.append(group)
            left -= rows
            group, rows = [], 0
            limit = min(rows_max if left >= rows_max else max(rows_max // PIECES, 1), share)
        group.append(request)
        rows += request.rows
    groups.append(group)
    return groups


PIECES = 4
"""Groups that are not a batch by themselves have at most this part of one."""


def copied(views: dict[str, Any]) -> dict[str, Array]:
    """Return arrays of one's own."""
    return {name: view.copy() for name, view in views.items()}
