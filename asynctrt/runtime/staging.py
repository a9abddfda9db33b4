"""Slabs, the memory that batches are staged in, and the sources of their rows.

A batch has one of three sources: rows gathered from the arrays of its callers, rows in memory shared with
another process (``shared``), and rows on the device. Whatever the source, the rows of a batch end up
contiguous, and the padding is a copy of one of them. So a batch never computes on data left by an earlier
batch.

Rows are gathered when their batch is launched, with one ``np.concatenate`` for each input, not when they
arrive: that leaves no holes for cancelled requests, and waiting rows need no slab
(``tests/benchmarks/copies.py``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from asynctrt.backends.base import Binding, TensorMemory
from asynctrt.devices.base import Buffer, Device, DeviceArray, Stream, aligned
from asynctrt.errors import InputError
from asynctrt.runtime.answers import changed_error
from asynctrt.runtime.spans import parts_of, rows_between, spans_of, views_of
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.key import Shared
from asynctrt.scheduling.request import PlainRequests, Request
from asynctrt.tensors import (
    Array,
    BatchRecord,
    Dims,
    InferResult,
    TensorSpec,
    copy_rows,
    gather,
    pins,
    split_shared,
)


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """The place of a tensor's rows in a slab."""

    name: str
    dtype: np.dtype[Any]
    dims: Dims
    offset: int
    row_nbytes: int
    """0 for strings and Python values, which are not stored in the slab."""
    axis: int | None = 0
    """The axis that counts rows, as in a :class:`~asynctrt.tensors.TensorSpec`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a slab for batches of one shape: every tensor at a multiple of 256 bytes, inputs first.

    The model allocates an output that is ``None`` itself, as when its shape depends on the data.
    """

    inputs: tuple[TensorSpan, ...]
    shared: tuple[TensorSpan, ...]
    """Inputs that all rows of a batch share, stored once for each batch."""
    outputs: tuple[TensorSpan | None, ...]
    rows_max: int
    nbytes: int
    input_row_nbytes: int
    """Bytes of one row over all inputs."""
    output_row_nbytes: int
    """Bytes of one row over all outputs whose shape is known."""
    has_rows_first: bool = True
    """Whether the rows of every tensor are contiguous, so that a batch is the first rows of the slab."""

    @property
    def is_plain(self) -> bool:
        """Whether a batch is only contiguous rows, so that it can run on them in place."""
        return self.has_rows_first and not self.shared


def lay_out(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    symbols: Mapping[str, int],
    rows_max: int,
    *,
    brings_outputs: bool = False,
) -> Layout:
    """Return the layout for these values of the dynamic dimensions.

    :param brings_outputs: whether the model allocates all outputs itself.
    """
    end = 0

    def span(spec: TensorSpec, rows: int) -> TensorSpan | None:
        nonlocal end
        dims = spec.resolve(symbols)
        if dims is None:
            return None
        itemsize = 0 if spec.dtype.hasobject else spec.dtype.itemsize
        row_nbytes = int(np.prod(dims, dtype=np.int64)) * itemsize
        placed = TensorSpan(spec.name, spec.dtype, dims, end, row_nbytes, spec.axis)
        end = aligned(end + row_nbytes * rows)
        return placed

    with_rows, shared = split_shared(inputs)
    input_spans = tuple(placed for spec in with_rows if (placed := span(spec, rows_max)) is not None)
    shared_spans = tuple(placed for spec in shared if (placed := span(spec, 1)) is not None)
    assert len(input_spans) + len(shared_spans) == len(inputs), "inputs determine every symbol that they use"
    output_spans = tuple(
        None if brings_outputs or spec.dtype.hasobject else span(spec, rows_max) for spec in outputs
    )
    return Layout(
        input_spans,
        shared_spans,
        output_spans,
        rows_max,
        end,
        sum(placed.row_nbytes for placed in input_spans),
        sum(placed.row_nbytes for placed in output_spans if placed is not None),
        all(not spec.axis for spec in (*inputs, *outputs)),
    )


class StagingBuffers:
    """Staging memory and, on a device with separate memory, a buffer of equal size there."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.staging = device.allocate_staging(nbytes)
        self.device_buffer: Buffer | None = None
        if not device.unified:
            try:
                self.device_buffer = device.allocate(nbytes)
            except BaseException:
                self.staging.close()
                raise

    @classmethod
    def over(cls, staging: Buffer) -> "StagingBuffers":
        """Return existing memory as staging memory. Its owner still closes it."""
        made = cls.__new__(cls)
        made.staging, made.device_buffer = staging, None
        return made

    @property
    def computed_on(self) -> Buffer:
        """The buffer that the device reads and writes."""
        return self.staging if self.device_buffer is None else self.device_buffer

    @property
    def nbytes(self) -> int:
        """The bytes of both buffers together."""
        return self.staging.nbytes + (self.device_buffer.nbytes if self.device_buffer else 0)

    def close(self) -> None:
        """Free both buffers. Idempotent."""
        self.staging.close()
        if self.device_buffer is not None:
            self.device_buffer.close()


class Slab:
    """Memory viewed with the layout of one shape: an array of ``rows_max`` rows for each tensor."""

    def __init__(self, layout: Layout, buffers: StagingBuffers) -> None:
        self.layout = layout
        self.buffers = buffers
        staging = buffers.staging
        self.inputs = tuple([self._array(staging, span) for span in layout.inputs])
        self.outputs = {span.name: self._array(staging, span) for span in layout.outputs if span is not None}
        self.shared = tuple([self._array(staging, span, 1) for span in layout.shared])
        """The inputs that all rows of a batch share, each an array of one row."""
        self._views: dict[int, tuple[tuple[Array, ...], dict[str, Array]]] = {}
        self.binding: Binding | None = None
        """The context that owns this slab, bound to it."""

    def input_views(self, rows: int) -> tuple[Array, ...]:
        """Return the inputs of a batch of ``rows`` rows, with rows first; they may have more rows."""
        return self.inputs if self.layout.has_rows_first else self._views_of(rows)[0]

    def output_views(self, rows: int) -> dict[str, Array]:
        """Return the outputs of such a batch in the same way."""
        return self.outputs if self.layout.has_rows_first else self._views_of(rows)[1]

    def _views_of(self, rows: int) -> tuple[tuple[Array, ...], dict[str, Array]]:
        """Return views of memory in which the place of a row depends on the batch's number of rows."""
        views = self._views.get(rows)
        if views is None:
            layout = self.layout
            inputs = zip(layout.inputs, self.inputs, strict=True)
            outputs = {span.name: span for span in layout.outputs if span is not None}
            views = self._views[rows] = (
                tuple([_rows_first(span, array, rows) for span, array in inputs]),
                {name: _rows_first(outputs[name], array, rows) for name, array in self.outputs.items()},
            )
        return views

    def stage_shared(self, values: Sequence[Shared]) -> None:
        """Write the inputs that the rows of a batch share, taken from its key."""
        for array, (_, content) in zip(self.shared, values, strict=True):
            flat = content if isinstance(content, tuple) else np.frombuffer(content, array.dtype)
            array.reshape(-1)[...] = flat

    def input_memory(self) -> tuple[TensorMemory, ...]:
        """Return the memory that the device reads: inputs with rows, then inputs of the whole batch."""
        spans, arrays = (*self.layout.inputs, *self.layout.shared), (*self.inputs, *self.shared)
        return tuple(self._tensor_memory(span, array) for span, array in zip(spans, arrays, strict=True))

    def output_memory(self) -> tuple[TensorMemory | None, ...]:
        """Return the memory that the device writes the outputs to; ``None`` for outputs not in the slab."""
        return tuple(
            None if span is None else self._tensor_memory(span, None) for span in self.layout.outputs
        )

    def put_in(self, stream: Stream, rows: int) -> None:
        """Put copies of the inputs to the device's buffer on a stream."""
        buffers = self.buffers
        assert buffers.device_buffer is not None
        for span in self.layout.inputs:
            nbytes = span.row_nbytes * rows
            stream.copy(buffers.device_buffer, buffers.staging, offset=span.offset, nbytes=nbytes)

    def put_shared_in(self, stream: Stream) -> None:
        """Put copies of the inputs that the rows of a batch share on a stream."""
        buffers = self.buffers
        for span in self.layout.shared:
            assert buffers.device_buffer is not None
            stream.copy(buffers.device_buffer, buffers.staging, offset=span.offset, nbytes=span.row_nbytes)

    def put_out(self, stream: Stream, rows: int, wanted: frozenset[str] | None = None) -> None:
        """Put copies of the outputs from the device's buffer on a stream.

        :param wanted: the names of the outputs to copy; ``None`` for all.
        """
        buffers = self.buffers
        assert buffers.device_buffer is not None
        for span in self.layout.outputs:
            if span is not None and (wanted is None or span.name in wanted):
                nbytes = span.row_nbytes * rows
                stream.copy(buffers.staging, buffers.device_buffer, offset=span.offset, nbytes=nbytes)

    def _array(self, buffer: Buffer, span: TensorSpan, rows: int | None = None) -> Array:
        shape = (self.layout.rows_max if rows is None else rows, *span.dims)
        if span.dtype.hasobject:
            return np.full(shape, "" if span.dims or span.axis is not None else None, object)
        return buffer.array(span.dtype, shape, span.offset)

    def _tensor_memory(self, span: TensorSpan, objects: Array | None) -> TensorMemory:
        """Return a tensor's memory. Strings and Python values stay in the array that they are staged in."""
        if span.dtype.hasobject:
            return TensorMemory(span.name, span.dtype, span.dims, 0, objects, span.axis)
        buffer = self.buffers.computed_on
        rows = 1 if span in self.layout.shared else None
        array = self._array(buffer, span, rows) if buffer.is_host_visible else None
        return TensorMemory(span.name, span.dtype, span.dims, buffer.address + span.offset, array, span.axis)


def _rows_first(span: TensorSpan, array: Array, rows: int) -> Array:
    """Return memory laid out for ``rows`` rows as an array with rows first."""
    if not span.axis:
        return array
    shape = (*span.dims[: span.axis], rows, *span.dims[span.axis :])
    nbytes = rows * math.prod(span.dims)
    return np.moveaxis(array.reshape(-1)[:nbytes].reshape(shape), span.axis, 0)


class RowSource:
    """The source of one batch's rows. The base class gathers them from the arrays of its callers.

    :param slab: the slab of the context, which the batch is computed in.
    """

    # Defaults of the class, so that a batch stores only what differs.
    device_outputs: list[dict[str, DeviceArray]] | None = None
    """The outputs of each request, if they stay on the device."""
    spans: list[slice] | None = None
    """The rows of each request in the slab; ``None`` if each has one row and they are in order."""
    wanted: frozenset[str] | None = None
    """The names of the outputs to copy from the device and out of the slab; ``None`` for all."""
    is_cut = False
    """Whether to copy each request out separately: rows are padded, or callers want different outputs."""
    refused: tuple[tuple[Request, InputError], ...] = ()
    """Requests whose rows could not be staged. The other requests continue."""

    def __init__(self, batch: Batch, slab: Slab) -> None:
        self.batch = batch
        self.slab = slab
        self.inputs = slab
        """The slab that the model reads."""
        self.views = slab.inputs if slab.layout.has_rows_first else slab.input_views(batch.rows_run)
        """The inputs of the batch in the slab, with rows first."""
        if type(batch.requests) is not PlainRequests and batch.rows != len(batch.requests):
            self.spans = spans_of(batch.requests)
        self.has_copies_in = self.has_copies_out = slab.buffers.device_buffer is not None
        self.staged_nbytes = slab.layout.input_row_nbytes * batch.rows_run
        """The bytes that :meth:`stage` copies with the CPU."""

    def launched(self) -> None:
        """Record that the batch is in flight: its rows must not change."""

    def ended(self) -> None:
        """Record that the batch is over."""

    def stage(self) -> None:
        """Copy the rows contiguously into the slab, and pad them. Runs in any thread.

        :raises InputError: if no request's rows can be staged.
        """
        batch = self.batch
        counts = None if self.spans is None else [request.rows for request in batch.requests]
        try:
            for index, view in enumerate(self.views):
                arrays = self.arrays_of(index)
                if len(arrays) > 1:
                    gather(arrays, view[: batch.rows], counts)
                else:
                    copy_rows(arrays[0], view[: batch.rows])
        except Exception:
            self._stage_one_by_one()
        if batch.rows_run != batch.rows:
            for view in self.views:
                view[batch.rows : batch.rows_run] = view[0]

    def parts(self, parts_max: int) -> list[Callable[[], object]]:
        """Return functions for several threads that together do the same as :meth:`stage`.

        If one of them raises, call :meth:`stage`, which finds the requests whose rows cannot be staged.
        """
        # Keeps the arrays alive while threads read them.
        self._pins = pins(array for index in range(len(self.views)) for array in self.arrays_of(index))
        parts = parts_of(self.batch.rows_run, self.staged_nbytes, parts_max)
        if len(parts) < 2:
            return [self.stage]
        return [partial(self._stage_part, start, stop) for start, stop in parts]

    def _stage_part(self, start: int, stop: int) -> None:
        """Stage some rows of the batch, including padding."""
        batch = self.batch
        end = min(stop, batch.rows)
        spans = self.spans or spans_of(batch.requests)
        for index, view in enumerate(self.views):
            arrays = self.arrays_of(index)
            inside = rows_between(arrays, spans, start, end)
            if inside:
                np.concatenate(inside, out=view[start:end])
            if stop > batch.rows:
                view[max(start, batch.rows) : stop] = arrays[0][0]

    def arrays_of(self, index: int) -> Sequence[Array]:
        """Return the rows of each request for one input."""
        requests = self.batch.requests
        if type(requests) is PlainRequests and (entries := requests.entries):
            if len(entries) == 1:
                return (entries[0][1][index],)  # A comprehension takes as long as copying a row.
            return [payload[index] for _, payload, _ in entries]
        return [request.payload[index] for request in requests]

    def put(self, number: int, index: int, view: Array) -> None:
        """Write the rows of one request for one input."""
        copy_rows(self.arrays_of(index)[number], view)

    def cut(self, outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        """Return views of the outputs that the caller of each request wants."""
        requests = self.batch.requests
        return views_of(outputs, requests, self.spans or spans_of(requests))

    def put_in(self, stream: Stream) -> None:
        """Put copies to the device on a stream."""
        self.slab.put_in(stream, self.batch.rows_run)

    def put_out(self, stream: Stream) -> None:
        """Put copies from the device on a stream."""
        batch = self.batch
        rows = batch.rows if self.slab.layout.has_rows_first else batch.rows_run
        self.slab.put_out(stream, rows, self.wanted)

    def _stage_one_by_one(self) -> None:
        """Refuse requests whose rows cannot be staged, and fill their place with another request's row."""
        spans = self.spans or spans_of(self.batch.requests)
        good = -1
        for number, (request, span) in enumerate(zip(self.batch.requests, spans, strict=True)):
            try:
                for index, view in enumerate(self.views):
                    self.put(number, index, view[span])
            except Exception as error:
                self._refuse(request, error)
            else:
                good = span.start
        if good < 0:
            raise self._all_refused()
        for request, _ in self.refused:
            span = spans[self.batch.requests.index(request)]
            for view in self.views:
                view[span] = view[good]

    def _all_refused(self) -> InputError:
        """Return the error of a batch in which no request can be staged, and drop all references to it."""
        refused, self.refused = self.refused, ()
        return refused[0][1]

    def _refuse(self, request: Request, error: Exception) -> None:
        self.refused += ((request, changed_error(error)),)


class DeviceSource(RowSource):
    """Rows that lie at least partly on the device, or whose outputs stay there.

    Each array is copied separately, on the batch's stream and after the event of its writer, directly to or
    from the memory on the device, never through the host.
    """

    def __init__(self, batch: Batch, slab: Slab, *, device: Device, stream: Stream) -> None:
        super().__init__(batch, slab)
        self._device = device
        self._stream = stream
        # Each copy is a target address, a source address, and nbytes.
        self._copies_in: list[tuple[int, int, int]] = []
        self._copies_out: list[tuple[int, int, int]] = []
        self._after: list[Any] = []
        self.has_copies_in = True
        self.has_copies_out = self.has_copies_out or batch.key.outputs_on_device
        self.staged_nbytes = 0  # The few rows on the host are staged at once.

    def stage(self) -> None:
        """Stage the rows that are on the host, and plan the copies.

        :raises InputError: if no request's rows can be staged, or if an output whose shape depends on the
            data should stay on the device.
        :raises DeviceMemoryError: if there is no room for the outputs.
        """
        batch, good = self.batch, -1
        spans = self.spans or spans_of(batch.requests)
        for request, rows in zip(batch.requests, spans, strict=True):
            try:
                for index, span in enumerate(self.slab.layout.inputs):
                    self._plan_in(request, index, span, rows)
            except Exception as error:
                self._refuse(request, error)
            else:
                good = rows.start
        if good < 0:
            raise self._all_refused()
        # On the stream, copies of a row come after the copy that writes the row.
        for request, _ in self.refused:
            rows = spans[batch.requests.index(request)]
            self._plan_copies(good, range(rows.start, rows.stop))
        self._plan_copies(good, range(batch.rows, batch.rows_run))
        if batch.key.outputs_on_device:
            self.device_outputs = [{} for _ in batch.requests]
            self._plan_outputs(self.device_outputs)

    def put_in(self, stream: Stream) -> None:
        """Put copies on a stream, after the writers of their sources."""
        for ready in self._after:
            stream.wait(ready)
        for copy in self._copies_in:
            stream.copy_bytes(*copy)

    def put_out(self, stream: Stream) -> None:
        """Put copies of the outputs on a stream, to the host or to their final memory on the device."""
        if self.device_outputs is None:
            super().put_out(stream)
        for copy in self._copies_out:
            stream.copy_bytes(*copy)

    def _plan_in(self, request: Request, index: int, span: TensorSpan, rows: slice) -> None:
        buffers = self.slab.buffers
        array = request.payload[index]
        offset, nbytes = span.offset + rows.start * span.row_nbytes, request.rows * span.row_nbytes
        target = buffers.computed_on.address + offset
        if isinstance(array, DeviceArray):
            self._copies_in.append((target, array.address, nbytes))
            if array.ready is not None:
                self._after.append(array.ready)
        else:
            copy_rows(array, self.slab.inputs[index][rows])
            if buffers.device_buffer is not None:
                self._copies_in.append((target, buffers.staging.address + offset, nbytes))

    def _plan_copies(self, row: int, rows: range) -> None:
        """Plan to fill other rows with copies of ``row``."""
        for span in self.slab.layout.inputs:
            first, nbytes = self.slab.buffers.computed_on.address + span.offset, span.row_nbytes
            if nbytes:
                source = first + row * nbytes
                self._copies_in += [(first + other * nbytes, source, nbytes) for other in rows]

    def _plan_outputs(self, outputs: Sequence[dict[str, DeviceArray]]) -> None:
        assert self.slab.layout.has_rows_first, "others are refused when they are asked for"
        computed = self.slab.buffers.computed_on.address
        for span in self.slab.layout.outputs:
            if span is None:
                raise InputError(
                    "outputs='device' needs outputs whose shapes follow from the inputs, and one of this "
                    "model depends on the data. Ask for outputs='host'"
                )
            source = computed + span.offset
            for request, arrays in zip(self.batch.requests, outputs, strict=True):
                nbytes = request.rows * span.row_nbytes
                buffer = self._device.allocate_ordered(nbytes, stream=self._stream.handle)
                self._copies_out.append((buffer.address, source, nbytes))
                shape = (request.rows, *span.dims)
                arrays[span.name] = DeviceArray(self._device, buffer.address, span.dtype, shape, owner=buffer)
                source += nbytes


def deliver(requests: Sequence[Request], outputs: Sequence[dict[str, Any]], record: BatchRecord) -> None:
    """Answer every caller that still waits, and drop what their requests hold."""
    batches = (record,)
    try:
        if type(requests) is PlainRequests and (entries := requests.entries):
            for (future, _, arrival_ns), own in zip(entries, outputs, strict=True):
                if not future.done():
                    future.set_result(InferResult(own, batches, arrival_ns))
            requests.entries = []
            return
        for request, own in zip(requests, outputs, strict=True):
            future = request.future
            if future is not None and not future.done():
                future.set_result(InferResult(own, batches, request.arrival_ns))
            request.future = request.payload = None
    except Exception:
        raise
    except BaseException:
        # Leave Ctrl-C to the application, but answer the remaining callers first.
        deliver(requests, outputs, record)
        raise
