"""Execution contexts with all that a batch needs to run on one, and the leases on them.

A bay is what stays together for the engine's life: a context, its stream, its events, its staging memory.
A lease is the right to one bay, and to one arena, for one batch. It dies when it is released.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Final

from asynctrt.backends.base import Binding, ExecutionContext, Model, TensorMemory
from asynctrt.devices.base import Buffer, Device, Event
from asynctrt.errors import ExecutionError, InternalError
from asynctrt.runtime.batch import Layout, Place, lay_out
from asynctrt.scheduling.ledger import Launch
from asynctrt.tensors import BUCKET_FIXED, Array, BatchRecord

SLABS_MAX: Final = 64
"""Slabs, and so bindings, that a bay remembers: one a bucket, and one a slot slab."""


class Memory:
    """Staging memory and, on a device with memory of its own, its twin there, at equal offsets."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.staging = device.allocate_staging(nbytes)
        self.twin: Buffer | None = None
        if not device.unified:
            try:
                self.twin = device.allocate(nbytes)
            except BaseException:
                self.staging.close()
                raise

    @property
    def nbytes(self) -> int:
        """Bytes held, on both sides together."""
        return self.staging.nbytes + (self.twin.nbytes if self.twin else 0)

    def close(self) -> None:
        """Give both back. Idempotent."""
        self.staging.close()
        if self.twin is not None:
            self.twin.close()


class Slab:
    """Memory seen through the layout of one bucket: an array of ``rows_max`` rows for each tensor."""

    def __init__(self, layout: Layout, memory: Memory) -> None:
        self.layout = layout
        self.memory = memory
        staging = memory.staging
        self.inputs = tuple(self._array(staging, place) for place in layout.inputs)
        self.outputs = {
            place.name: self._array(staging, place) for place in layout.outputs if place is not None
        }

    def bind(self, context: ExecutionContext) -> Binding:
        """Tie a context to this slab, or to its twin on the device."""
        return context.bind(
            tuple(self._tensor_memory(place) for place in self.layout.inputs),
            tuple(None if place is None else self._tensor_memory(place) for place in self.layout.outputs),
        )

    def _array(self, buffer: Buffer, place: Place) -> Array:
        shape = (self.layout.rows_max, *place.dims)
        return buffer.array(place.dtype, shape, place.offset)

    def _tensor_memory(self, place: Place) -> TensorMemory:
        buffer = self.memory.twin or self.memory.staging
        array = self._array(buffer, place) if buffer.is_host_visible else None
        return TensorMemory(place.name, place.dtype, place.dims, buffer.address + place.offset, array)


class Arena:
    """One block of enqueue memory, in the order of the streams that use it."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.last_use: Event | None = None


class Bay:
    """A context and all that it needs to run one batch at a time."""

    def __init__(self, device: Device, model: Model) -> None:
        self._device = device
        self.stream = device.create_stream()
        self.begun = device.create_event()
        self.copied_in = device.create_event()
        self.computed = device.create_event()
        self.copied_out = device.create_event()
        try:
            self.context = model.create_context(device)
        except BaseException:
            self.stream.close(0.0)
            raise
        self._memory: Memory | None = None
        self._slabs: OrderedDict[Hashable, Slab] = OrderedDict()
        self._bindings: OrderedDict[Slab, Binding] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory and its twin."""
        return self._memory.nbytes if self._memory else 0

    def slab(self, bucket: Hashable, layout: Layout) -> Slab:
        """This bay's own slab for a bucket. All its slabs share one memory, which grows as needed."""
        slab = self._slabs.get(bucket)
        if slab is None:
            if self._memory is None or self._memory.staging.nbytes < layout.nbytes:
                grown = Memory(self._device, layout.nbytes)
                self._forget()
                self._memory = grown
            slab = self._slabs[bucket] = Slab(layout, self._memory)
            if len(self._slabs) > SLABS_MAX:
                _, dropped = self._slabs.popitem(last=False)
                self._bindings.pop(dropped, None)
        self._slabs.move_to_end(bucket)
        return slab

    def binding(self, slab: Slab) -> Binding:
        """The context tied to a slab: to one of its own, or to one that callers filled."""
        binding = self._bindings.get(slab)
        if binding is None:
            binding = self._bindings[slab] = slab.bind(self.context)
            if len(self._bindings) > SLABS_MAX:
                self._bindings.popitem(last=False)
        return binding

    def forget(self, slab: Slab) -> None:
        """A slab that callers filled is no more."""
        self._bindings.pop(slab, None)

    def close(self, timeout_s: float) -> bool:
        """Give everything back; False, and keep it, if the stream's work does not end in time."""
        if not self.stream.close(timeout_s):
            return False
        self._forget()
        self.context.close()
        return True

    def _forget(self) -> None:
        self._slabs.clear()
        self._bindings.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Lease:
    """The right to a bay and an arena, for one batch."""

    __slots__ = ("_arena", "_bay", "end", "record", "slab")

    def __init__(self, bay: Bay, arena: Arena | None, slab: Slab, record: BatchRecord) -> None:
        self._bay: Bay | None = bay
        self._arena = arena
        self.slab = slab
        self.record = record
        # Done when the batch is: what the reaper waits for.
        self.end: Event = bay.computed if slab.memory.twin is None else bay.copied_out

    @property
    def bay(self) -> Bay:
        """The bay, as long as the lease lives."""
        if self._bay is None:
            raise InternalError("this lease has been released")
        return self._bay

    def enqueue(self, rows: int) -> None:
        """Put the whole batch on the bay's stream: copy in, compute, copy out. Returns at once."""
        bay, memory = self.bay, self.slab.memory
        stream = bay.stream
        stream.record(bay.begun)
        if memory.twin is not None:
            for place in self.slab.layout.inputs:
                stream.copy(
                    memory.twin,
                    memory.staging,
                    offset=place.offset,
                    nbytes=place.row_nbytes * rows,
                )
            stream.record(bay.copied_in)
        arena = self._arena
        if arena is not None and arena.last_use is not None:
            stream.wait(arena.last_use)
        bay.binding(self.slab).enqueue(rows, stream=stream, arena=None if arena is None else arena.buffer)
        stream.record(bay.computed)
        if arena is not None:
            arena.last_use = bay.computed
        if memory.twin is not None:
            for output in self.slab.layout.outputs:
                if output is not None:
                    stream.copy(
                        memory.staging,
                        memory.twin,
                        offset=output.offset,
                        nbytes=output.row_nbytes * rows,
                    )
            stream.record(bay.copied_out)

    def enqueue_end(self) -> None:
        """After :meth:`enqueue` raised: mark the end of what it had put on the stream by then."""
        self.bay.stream.record(self.end)

    def error(self) -> BaseException | None:
        """What went wrong on the way, once the batch is done."""
        bay = self.bay
        if self.slab.memory.twin is None:
            return bay.computed.error
        return bay.copied_in.error or bay.computed.error or bay.copied_out.error

    def note_times(self) -> None:
        """Add what the device measured to the batch's record, once the batch is done."""
        bay, record = self.bay, self.record
        if self.slab.memory.twin is None:
            record.compute_ns = bay.computed.elapsed_ns(bay.begun)
        else:
            record.copy_in_ns += bay.copied_in.elapsed_ns(bay.begun)
            record.compute_ns = bay.computed.elapsed_ns(bay.copied_in)
            record.copy_out_ns = bay.copied_out.elapsed_ns(bay.computed)

    def outputs(self, rows: int) -> Mapping[str, Array]:
        """The outputs of the batch, by name; those in the slab are overwritten by the next one.

        :raises ExecutionError: for an output whose shape turns out to have no batch axis.
        """
        bound = self.slab.outputs
        if len(bound) == len(self.slab.layout.outputs):
            return bound
        unbound = self.bay.binding(self.slab).unbound_outputs(rows)
        for name, array in unbound.items():
            if array.shape[:1] != (rows,):
                raise ExecutionError(
                    f"output {name!r} has shape {array.shape} for a batch of {rows} rows: its first axis "
                    "does not count rows, so they cannot be told apart"
                )
        return {**bound, **unbound}

    def release(self) -> None:
        """End it. Idempotent."""
        self._bay = self._arena = None


class Pool:
    """All bays and arenas of an engine. The ledger says which is free; this has the objects.

    :raises DeviceMemoryError: when they do not fit; what was made until then is given back.
    """

    def __init__(self, device: Device, model: Model, *, contexts: int, arenas: int, rows_max: int) -> None:
        self._device = device
        self._model = model
        self._rows_max = rows_max
        self._layouts: OrderedDict[Hashable, Layout] = OrderedDict()
        self._arenas: list[Arena] = []
        self._bays: list[Bay] = []
        self._closed = False
        try:
            for _ in range(arenas):
                self._arenas.append(Arena(device.allocate(model.enqueue_nbytes)))
            for _ in range(contexts):
                self._bays.append(Bay(device, model))
            if all(spec.is_fixed for spec in model.inputs):
                # Rows of one shape only: what a batch needs is known, and is refused here if at all.
                for bay in self._bays:
                    bay.binding(bay.slab(BUCKET_FIXED, self.layout(BUCKET_FIXED)))
        except BaseException:
            self.close(0.0)
            raise

    def __repr__(self) -> str:
        return f"<Pool bays={len(self._bays)} arenas={len(self._arenas)} nbytes={self.nbytes}>"

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory, of its twin on the device, and of arenas."""
        return sum(bay.nbytes for bay in self._bays) + sum(arena.buffer.nbytes for arena in self._arenas)

    def layout(self, bucket: Hashable) -> Layout:
        """How a slab holds the batches of a bucket."""
        layout = self._layouts.get(bucket)
        if layout is None:
            assert isinstance(bucket, tuple)
            layout = lay_out(self._model.inputs, self._model.outputs, dict(bucket), self._rows_max)
            self._layouts[bucket] = layout
            if len(self._layouts) > SLABS_MAX:
                self._layouts.popitem(last=False)
        return layout

    def create_slab(self, bucket: Hashable) -> Slab:
        """A slab that belongs to no bay, for callers to fill.

        :raises DeviceMemoryError: when there is no room for it.
        """
        layout = self.layout(bucket)
        return Slab(layout, Memory(self._device, layout.nbytes))

    def close_slab(self, slab: Slab) -> None:
        """Give back a slab that callers filled, which no batch uses any more."""
        for bay in self._bays:
            bay.forget(slab)
        slab.memory.close()

    def lease(self, launch: Launch, slab: Slab | None) -> Lease:
        """What the ledger took for ``launch``; with ``slab``, the batch lies there already.

        :raises DeviceMemoryError: when the bucket's rows need more memory than there is.
        """
        bay = self._bays[launch.context]
        arena = None if launch.arena is None else self._arenas[launch.arena]
        record = BatchRecord(launch.rows, launch.launched_ns)
        if slab is None:
            slab = bay.slab(launch.bucket, self.layout(launch.bucket))
        return Lease(bay, arena, slab, record)

    def close(self, timeout_s: float) -> int:
        """Give everything back; returns how many bays had to be abandoned, their work still running."""
        if self._closed:
            return 0
        self._closed = True
        abandoned = sum(not bay.close(timeout_s) for bay in self._bays)
        if not abandoned:
            for arena in self._arenas:
                arena.buffer.close()
            self._bays.clear()
        return abandoned
