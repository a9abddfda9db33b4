"""A bay: an execution context with all that a batch needs to run on it, together for the engine's life.

It is here that a batch is put on a stream, and in what order: copy in, wait for the arena, compute, copy out.
"""

import gc
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from asynctrt import clock
from asynctrt.backends.base import Binding, ExecutionContext, Model, TensorMemory
from asynctrt.devices.arenas import Arena
from asynctrt.devices.arrays import DeviceArray
from asynctrt.devices.base import Buffer, Device, Event, Graph, Stream
from asynctrt.errors import DeviceError, DeviceLostError
from asynctrt.runtime.batch import Layout, Place
from asynctrt.tensors import Array

SLABS_MAX: Final = 64
"""Slabs, and so bindings, that a bay remembers: one a bucket, and one a slot slab."""

CAPTURE_S: Final = 60.0
"""How long a batch may take while it is being captured."""


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

    def put_in(self, stream: Stream, rows: int) -> None:
        """Put the copies of the inputs to the twin on a stream."""
        memory = self.memory
        assert memory.twin is not None
        for place in self.layout.inputs:
            stream.copy(memory.twin, memory.staging, offset=place.offset, nbytes=place.row_nbytes * rows)

    def put_out(self, stream: Stream, rows: int) -> None:
        """Put the copies of the outputs from the twin on a stream."""
        memory = self.memory
        assert memory.twin is not None
        for place in self.layout.outputs:
            if place is not None:
                stream.copy(memory.staging, memory.twin, offset=place.offset, nbytes=place.row_nbytes * rows)

    def _array(self, buffer: Buffer, place: Place) -> Array:
        shape = (self.layout.rows_max, *place.dims)
        return buffer.array(place.dtype, shape, place.offset)

    def _tensor_memory(self, place: Place) -> TensorMemory:
        buffer = self.memory.twin or self.memory.staging
        array = self._array(buffer, place) if buffer.is_host_visible else None
        return TensorMemory(place.name, place.dtype, place.dims, buffer.address + place.offset, array)


@dataclass(slots=True)
class Placement:
    """Where the rows of a batch come from and go to, if some of them lie on the device.

    A copy is from an address to an address, of so many bytes: target, source, nbytes.
    """

    copies_in: list[tuple[int, int, int]]
    after: list[Event]
    """Done when what is copied is there."""
    copies_out: list[tuple[int, int, int]]
    outputs: list[dict[str, DeviceArray]] | None
    """For each request, if its outputs stay on the device."""

    def put_in(self, stream: Stream) -> None:
        """Put the copies of the inputs on a stream, after whoever writes what they copy."""
        for ready in self.after:
            stream.wait(ready)
        for copy in self.copies_in:
            stream.copy_bytes(*copy)

    def put_out(self, stream: Stream) -> None:
        """Put the copies of the outputs on a stream."""
        for copy in self.copies_out:
            stream.copy_bytes(*copy)


class Marks:
    """The events of a batch on its way. Those that take times cost the CPU more, and the GPU some.

    Without times there are ``computed``, which the next batch in the arena waits for, and ``copied_out``.
    """

    __slots__ = ("begun", "computed", "copied_in", "copied_out", "started")

    def __init__(self, device: Device, *, are_timed: bool) -> None:
        self.computed = device.create_event(is_timed=are_timed)
        self.copied_out = device.create_event(is_timed=are_timed)
        self.begun = device.create_event(is_timed=True) if are_timed else None
        self.copied_in = device.create_event(is_timed=True) if are_timed else None
        self.started = device.create_event(is_timed=True) if are_timed else None


class Bay:
    """A context and all that it needs to run one batch at a time."""

    def __init__(self, device: Device, model: Model, arena: Arena | None) -> None:
        self._device = device
        self._model = model
        self.arena = arena
        self.stream = device.create_stream()
        self.timed = Marks(device, are_timed=True)
        self.plain = Marks(device, are_timed=False)
        try:
            self.context = model.create_context(device)
        except BaseException:
            self.stream.close(0.0)
            raise
        self._memory: Memory | None = None
        self._slabs: OrderedDict[Hashable, Slab] = OrderedDict()
        self._bindings: OrderedDict[Slab, Binding] = OrderedDict()
        self._graphs: dict[Slab, dict[int, Captured]] = {}

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
                self.forget(dropped)
        self._slabs.move_to_end(bucket)
        return slab

    def binding(self, slab: Slab) -> Binding:
        """The context tied to a slab: to one of its own, or to one that callers filled."""
        binding = self._bindings.get(slab)
        if binding is None:
            binding = self._bindings[slab] = slab.bind(self.context)
            if len(self._bindings) > SLABS_MAX:
                self.forget(next(iter(self._bindings)))
        return binding

    def put(
        self, slab: Slab, rows: int, marks: Marks, after: Event | None, placement: Placement | None
    ) -> None:
        """Put a whole batch on the stream: this is the one order of things.

        :param after: what its computing waits for, in the arena; its copy in does not.
        :param placement: the copies of a batch that is not simply copied in and out as a whole.
        """
        stream, arena = self.stream, self.arena
        if marks.begun is not None:
            stream.record(marks.begun)
        if placement is not None or slab.memory.twin is not None:
            if placement is not None:
                placement.put_in(stream)
            else:
                slab.put_in(stream, rows)
            if marks.copied_in is not None:
                stream.record(marks.copied_in)
        if after is not None:
            stream.wait(after)
        if marks.started is not None and arena is not None:
            stream.record(marks.started)
        graphs = self._graphs.get(slab)
        captured = None if graphs is None else graphs.get(rows)
        if captured is not None:
            captured.graph.launch(stream=stream)
        else:
            memory = None if arena is None else arena.memory
            self.binding(slab).enqueue(rows, stream=stream, arena=memory)
        stream.record(marks.computed)
        if placement is not None and placement.outputs is not None:
            placement.put_out(stream)
            stream.record(marks.copied_out)
        elif slab.memory.twin is not None:
            slab.put_out(stream, rows)
            stream.record(marks.copied_out)

    def capture(self, slab: Slab, rows: int, scratch: Buffer | None) -> tuple[int, int]:
        """Capture the computing of a batch of ``rows``. Blocks, and the bay must be idle.

        Only the computing: copies and events beside a graph were measured to take the GPU less time than the
        same in it (18 µs against 20 to 25 a batch), the CPU 2 µs more; and so one graph does for batches
        with times and without, and for rows that lie on the device already.

        A context of its own is captured, as TensorRT leaves undefined what a graph does once the context
        that it was captured from has been given other shapes or memory.

        :param scratch: enqueue memory that nobody else uses meanwhile.
        :returns: how long it took to put such a batch on the stream call by call, and as a graph, in ns; 0
            for the graph in an arena that others use.
        :raises AsynctrtError: when the model or the device refuses; the bay is as it was before.
        """
        stream, arena = self.stream, self.arena
        context = self._model.create_context(self._device)
        try:
            binding = slab.bind(context)
            # What a model does at its first batch of a size (to plan, to allocate) is no part of a graph.
            for _ in range(2):
                start_ns = clock.now_ns()
                binding.enqueue(rows, stream=stream, arena=scratch)
                direct_ns = clock.now_ns() - start_ns
                self._wait(f"a batch of {rows} rows")
            graph = self._captured(binding, rows)
        except BaseException:
            context.close()
            raise
        self._graphs.setdefault(slab, {})[rows] = Captured(context, graph)
        graph_ns = 0
        if arena is None or scratch is arena.memory:
            start_ns = clock.now_ns()
            graph.launch(stream=stream)
            graph_ns = clock.now_ns() - start_ns
            self._wait(f"a captured batch of {rows} rows")
        return direct_ns, graph_ns

    def _captured(self, binding: Binding, rows: int) -> Graph:
        """The graph of one enqueue."""
        stream, arena = self.stream, self.arena
        # To free memory in the thread that captures ends the capture, and the collector might just then free
        # what an earlier engine has left.
        collects = gc.isenabled()
        gc.disable()
        try:
            stream.begin_capture()
            try:
                binding.enqueue(rows, stream=stream, arena=None if arena is None else arena.memory)
            except BaseException:
                with suppress(DeviceError):
                    stream.end_capture().close()
                raise
            return stream.end_capture()
        finally:
            if collects:
                gc.enable()

    def uncapture(self) -> None:
        """Forget every graph."""
        for slab in list(self._graphs):
            self._uncapture(slab)

    def forget(self, slab: Slab) -> None:
        """A slab is no more."""
        self._bindings.pop(slab, None)
        self._uncapture(slab)

    def close(self, timeout_s: float) -> bool:
        """Give everything back; False, and keep it, if the stream's work does not end in time."""
        if not self.stream.close(timeout_s):
            return False
        if self.arena is not None and self.was_last_in_arena:
            self.arena.last_use = None
        self._forget()
        self.context.close()
        return True

    @property
    def was_last_in_arena(self) -> bool:
        """Whether the arena's last use was by this bay."""
        return self.arena is not None and self.arena.last_use in (self.timed.computed, self.plain.computed)

    def _wait(self, what: str) -> None:
        """Block until the stream has come this far, and raise what went wrong on the way."""
        end = self.plain.computed
        self.stream.record(end)
        if not end.synchronize(CAPTURE_S):
            raise DeviceLostError(f"{what} did not end within {CAPTURE_S} s")
        if end.error is not None:
            raise end.error

    def _uncapture(self, slab: Slab) -> None:
        for captured in self._graphs.pop(slab, {}).values():
            captured.graph.close()
            captured.context.close()

    def _forget(self) -> None:
        self.uncapture()
        self._slabs.clear()
        self._bindings.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and the context that belongs to it alone."""

    context: ExecutionContext
    graph: Graph
