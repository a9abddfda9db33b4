"""Rows that another process wrote into shared memory, and batches that use them in place.

The rows of a request are contiguous there, as a batch needs them. If the device works in the host's memory,
a batch of one such request runs on them directly, and the model may write to them. A device with separate
memory copies them from there if it can. Otherwise they are gathered into the context's slab, like the rows
of any other batch. The writer must leave them alone until the batch has ended.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from asynctrt.devices.base import Buffer, Stream
from asynctrt.runtime.spans import spans_of
from asynctrt.runtime.staging import Layout, RowSource, Slab, StagingBuffers
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.request import Request
from asynctrt.tensors import Array, copy_rows


class SharedBuffer:
    """Shared memory mapped into this process, as a buffer. Arrays over it keep it mapped."""

    is_host_visible = True

    def __init__(self, mapping: Any) -> None:
        self._bytes = np.frombuffer(mapping, np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.nbytes = self._bytes.nbytes

    def __repr__(self) -> str:
        return f"<SharedBuffer nbytes={self.nbytes}>"

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> Array:
        return np.ndarray(shape, dtype, self._bytes, offset)

    def close(self) -> None:
        self._bytes = self._bytes[:0].copy()


class SharedBlock:
    """A part of shared memory with rows of one shape.

    :param start: its offset in the buffer.
    :param content: everything that must stay the same for it to be the same block.
    """

    def __init__(self, buffer: Buffer, start: int, nbytes: int, content: Hashable) -> None:
        self.buffer = buffer
        self.start = start
        self.nbytes = nbytes
        self.content = content
        self.batches = 0
        """The number of batches in flight with rows of the block."""
        self.address: int | None = None
        """The buffer's address, once the device can copy from this part of it."""
        self.slabs: dict[int, Slab] = {}
        """The slabs that batches were run from, by number of rows."""
        self.is_forgotten = False
        """Whether to release the block when the last batch is over."""

    def __repr__(self) -> str:
        return f"<SharedBlock start={self.start} nbytes={self.nbytes} batches={self.batches}>"


class SharedRows(tuple[Array, ...]):  # noqa: SLOT001  (a tuple's subclasses may not have slots)
    """The payload of a request whose arrays are in a block."""

    block: SharedBlock
    offsets: tuple[int, ...]
    """The offset of each array in the buffer."""
    batches: int
    """The number of batches in flight with these rows."""
    _on_ended: Callable[[SharedBlock], None]

    @classmethod
    def at(
        cls,
        block: SharedBlock,
        offsets: tuple[int, ...],
        arrays: Iterable[Array],
        on_ended: Callable[[SharedBlock], None],
    ) -> Self:
        """Return the payload for rows in a block.

        :param on_ended: called with the block when a batch with these rows is over.
        """
        made = cls(arrays)
        made.block, made.offsets, made.batches, made._on_ended = block, offsets, 0, on_ended
        return made

    def slab(self, layout: Layout) -> Slab:
        """Return the rows as a slab for inputs.

        :param layout: the layout of the slab to replace.
        """
        rows = len(self[0])
        slab = self.block.slabs.get(rows)
        if slab is None:
            placed = zip(layout.inputs, self.offsets, strict=True)
            spans = tuple([replace(span, offset=offset) for span, offset in placed])
            own = replace(layout, inputs=spans, outputs=(), rows_max=rows, output_row_nbytes=0)
            slab = self.block.slabs[rows] = Slab(own, StagingBuffers.over(self.block.buffer))
        return slab

    def launched(self) -> None:
        """Record that a batch with these rows is in flight."""
        self.batches += 1
        self.block.batches += 1

    def ended(self) -> None:
        """Record that such a batch is over."""
        self.batches -= 1
        self.block.batches -= 1
        self._on_ended(self.block)


def are_shared(requests: Sequence[Request]) -> bool:
    """Return whether the rows of all requests are known to be in blocks.

    The parts of a split call are in a block too, but are treated like any other arrays.
    """
    return all(type(request.payload) is SharedRows for request in requests)


class SharedSource(RowSource):
    """Rows of requests whose arrays are in blocks.

    :param is_captured: whether a graph of the batch is replayed, which reads the context's slab.
    """

    def __init__(self, batch: Batch, slab: Slab, *, is_captured: bool) -> None:
        super().__init__(batch, slab)
        self._rows: list[SharedRows] = [request.payload for request in batch.requests]
        # Read once: if a block is pinned in the meantime, only later batches copy from it.
        copies_rows = self.has_copies_in and slab.layout.has_rows_first
        self._addresses = [rows.block.address if copies_rows else None for rows in self._rows]
        # A batch of several requests may be retried in halves, which the model must not have overwritten.
        is_alone = len(self._rows) == 1 and batch.rows_run == batch.rows and slab.layout.is_plain
        if is_alone and not self.has_copies_in and not is_captured:
            self.inputs = self._rows[0].slab(slab.layout)
            self.staged_nbytes = 0
        if self._is_copied:
            addresses = zip(batch.requests, self._addresses, strict=True)
            copied = sum([request.rows for request, address in addresses if address is not None])
            self.staged_nbytes -= slab.layout.input_row_nbytes * copied

    def launched(self) -> None:
        for rows in self._rows:
            rows.launched()

    def ended(self) -> None:
        for rows in self._rows:
            rows.ended()

    @property
    def _is_copied(self) -> bool:
        """Whether the device copies some of the rows directly from shared memory."""
        return any(address is not None for address in self._addresses)

    def parts(self, parts_max: int) -> list[Callable[[], object]]:
        """Return functions that together stage the batch: only one if some rows are not staged."""
        if self.inputs is self.slab and not self._is_copied:
            return super().parts(parts_max)
        return [self.stage]

    def stage(self) -> None:
        """Gather the rows that are not read in place, and stage the padding."""
        if self.inputs is not self.slab:
            return
        if not self._is_copied:
            super().stage()
            return
        batch = self.batch
        spans = self.spans or spans_of(batch.requests)
        for index, view in enumerate(self.views):
            for rows, span, address in zip(self._rows, spans, self._addresses, strict=True):
                if address is None:
                    copy_rows(rows[index], view[span])
            if batch.rows_run != batch.rows:
                view[batch.rows : batch.rows_run] = self._rows[0][index][0]

    def put_in(self, stream: Stream) -> None:
        """Put the copies on a stream, directly from shared memory where possible, else from the slab."""
        if not self._is_copied:
            super().put_in(stream)
            return
        target, layout = self.slab.buffers.computed_on.address, self.slab.layout
        for index, span in enumerate(layout.inputs):
            at = target + span.offset
            for source, nbytes in self._runs(index, span.offset, span.row_nbytes):
                stream.copy_bytes(at, source, nbytes)
                at += nbytes

    def _runs(self, index: int, offset: int, row_nbytes: int) -> list[tuple[int, int]]:
        """Return the memory of the batch's rows for one input, in order, as addresses and bytes."""
        batch, staged = self.batch, self.slab.buffers.staging.address + offset
        spans = self.spans or spans_of(batch.requests)
        runs: list[tuple[int, int]] = []
        for rows, span, address in zip(self._rows, spans, self._addresses, strict=True):
            nbytes = (span.stop - span.start) * row_nbytes
            start = staged + span.start * row_nbytes
            if address is not None:
                start = address + rows.offsets[index]
            if runs and sum(runs[-1]) == start:
                start, nbytes = runs[-1][0], runs[-1][1] + nbytes
                runs.pop()
            runs.append((start, nbytes))
        if batch.rows_run != batch.rows:
            runs.append((staged + batch.rows * row_nbytes, (batch.rows_run - batch.rows) * row_nbytes))
        return runs
