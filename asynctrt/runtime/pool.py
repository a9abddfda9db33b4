"""All the bays of an engine, and the leases on them.

A lease is the right to one bay, and to the arena that it works in, for one batch. It dies when it is
released.
"""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

from asynctrt.backends.base import Model
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.base import Buffer, Device, Event, check_room, mib
from asynctrt.errors import DeviceLostError, DeviceMemoryError, ExecutionError, InternalError
from asynctrt.runtime.batch import Layout, lay_out
from asynctrt.runtime.bay import SLABS_MAX, Bay, Memory, Placement, Slab
from asynctrt.scheduling.ledger import Launch
from asynctrt.tensors import BUCKET_FIXED, Array, BatchRecord, DeviceBucket

UNDO_S: Final = 0.1
"""How long a stream may take to come to rest when a pool that was begun is taken back. With no time at all it
would count as hung, as its last event is not done at once, and a device keeps the memory of what is hung."""

logger = logging.getLogger("asynctrt")


class Lease:
    """The right to a bay and its arena, for one batch.

    :param is_timed: whether the device takes the times of this batch.
    """

    __slots__ = ("_bay", "end", "marks", "placement", "record", "slab")

    def __init__(self, bay: Bay, slab: Slab, record: BatchRecord, *, is_timed: bool) -> None:
        self._bay: Bay | None = bay
        self.slab = slab
        self.record = record
        self.placement: Placement | None = None
        self.marks = bay.timed if is_timed else bay.plain
        self.end: Event = self.marks.computed if slab.memory.twin is None else self.marks.copied_out
        """Done when the batch is: what the reaper waits for."""

    @property
    def bay(self) -> Bay:
        """The bay, as long as the lease lives."""
        if self._bay is None:
            raise InternalError("this lease has been released")
        return self._bay

    def enqueue(self, rows: int) -> None:
        """Put the whole batch on the bay's stream: copy in, compute, copy out. Returns at once."""
        bay, placement = self.bay, self.placement
        if placement is not None and placement.outputs is not None:
            self.end = self.marks.copied_out
        arena = bay.arena
        if arena is None:
            bay.put(self.slab, rows, self.marks, None, placement)
            return
        # What this very stream did before is over before anyway.
        bay.put(self.slab, rows, self.marks, None if bay.was_last_in_arena else arena.last_use, placement)
        arena.last_use = self.marks.computed

    def enqueue_end(self) -> None:
        """After :meth:`enqueue` raised: mark the end of what it had put on the stream by then."""
        bay, marks = self.bay, self.marks
        bay.stream.record(marks.computed)
        if bay.arena is not None:
            bay.arena.last_use = marks.computed
        if self.end is marks.copied_out:
            bay.stream.record(marks.copied_out)

    def error(self) -> BaseException | None:
        """What went wrong on the way, once the batch is done."""
        marks = self.marks
        error = marks.computed.error
        if self.end is marks.copied_out:
            error = error or marks.copied_out.error
        if marks.copied_in is not None and (self.slab.memory.twin is not None or self.placement is not None):
            error = error or marks.copied_in.error
        return error

    def note_times(self) -> tuple[int, int] | None:
        """Add what the device measured to the batch's record, once the batch is done.

        :returns: the device's own times of copying in and out, in ns; ``None`` if it took no times.
        """
        marks, record = self.marks, self.record
        if marks.begun is None or marks.copied_in is None or marks.started is None:
            return None
        before, copy_in_ns, copy_out_ns = marks.begun, 0, 0
        if self.slab.memory.twin is not None:
            before = marks.copied_in
            copy_in_ns = before.elapsed_ns(marks.begun)
            copy_out_ns = marks.copied_out.elapsed_ns(marks.computed)
        if self.bay.arena is not None:
            record.arena_wait_ns = marks.started.elapsed_ns(before)
            before = marks.started
        record.compute_ns = marks.computed.elapsed_ns(before)
        record.copy_in_ns += copy_in_ns
        record.copy_out_ns = copy_out_ns
        return copy_in_ns, copy_out_ns

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
        self._bay = None


class Pool:
    """All bays and arenas of an engine. The ledger says which is free; this has the objects.

    :param arenas: the arenas that its contexts work in; ``None`` for a model that needs none.
    :param graphs: batch sizes to capture, rising; the model says whether it can be captured at all.
    :raises DeviceMemoryError: when they do not fit; what was made until then is given back.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        *,
        contexts: int,
        arenas: Arenas | None,
        rows_max: int,
        graphs: Sequence[int] = (),
    ) -> None:
        self._device = device
        self._model = model
        self._rows_max = rows_max
        self._layouts: OrderedDict[Hashable, Layout] = OrderedDict()
        self._arenas = arenas
        self._bays: list[Bay] = []
        self._closed = False
        self.graph_sizes: tuple[int, ...] = ()
        """The batch sizes that were captured."""
        self.direct_ns = self.graph_ns = 0
        """What the CPU needs to put a batch on a stream: call by call, and captured; if it was measured."""
        if arenas is not None:
            arenas.reserve(model.enqueue_nbytes)
            arenas.engines += 1
        try:
            self._make_bays(contexts)
            if all(spec.is_fixed for spec in model.inputs):
                # Rows of one shape only: what a batch needs is known, and is refused here if at all.
                self._make_slabs()
                if graphs and getattr(model, "is_capturable", False):
                    self._capture(graphs)
        except BaseException:
            self.close(UNDO_S)
            raise

    def __repr__(self) -> str:
        arenas = 0 if self._arenas is None else len(self._arenas)
        return f"<Pool bays={len(self._bays)} arenas={arenas} nbytes={self.nbytes}>"

    @property
    def arenas_nbytes(self) -> int:
        """Bytes of the arenas."""
        return 0 if self._arenas is None else self._arenas.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory, of its twin on the device, and of arenas."""
        if self._closed:
            return sum(bay.nbytes for bay in self._bays)
        return sum(bay.nbytes for bay in self._bays) + self.arenas_nbytes

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

    def lease(self, launch: Launch, slab: Slab | None, *, is_timed: bool = True) -> Lease:
        """What the ledger took for ``launch``; with ``slab``, the batch lies there already.

        :raises DeviceMemoryError: when the bucket's rows need more memory than there is.
        """
        bay = self._bays[launch.context]
        record = BatchRecord(launch.rows, launch.launched_ns)
        if slab is None:
            bucket = launch.bucket.bucket if isinstance(launch.bucket, DeviceBucket) else launch.bucket
            slab = bay.slab(bucket, self.layout(bucket))
        return Lease(bay, slab, record, is_timed=is_timed)

    def close(self, timeout_s: float) -> int:
        """Give everything back; returns how many bays had to be abandoned, their work still running."""
        if self._closed:
            return 0
        self._closed = True
        abandoned = sum(not bay.close(timeout_s) for bay in self._bays)
        if abandoned:
            self._device.abandon()
        else:
            self._bays.clear()
        if self._arenas is not None:
            self._arenas.engines -= 1
        return abandoned

    def _make_bays(self, contexts: int) -> None:
        """The first context shows what one takes besides; the others are made if as much is left for each."""
        for index in range(contexts):
            arena = None if self._arenas is None else self._arenas.arenas[index % len(self._arenas)]
            free_nbytes = self._device.memory().room_nbytes if index == 0 else 0
            self._bays.append(Bay(self._device, self._model, arena))
            if index == 0 and contexts > 1 and not self._device.unified:
                each_nbytes = max(free_nbytes - self._device.memory().room_nbytes, 0)
                check_room(
                    self._device,
                    each_nbytes * (contexts - 1),
                    f"{contexts - 1} more contexts of {self._model.name!r}, each as large as the first "
                    f"({mib(each_nbytes)}),",
                    "Open the engine with fewer contexts",
                )

    def _make_slabs(self) -> None:
        layout = self.layout(BUCKET_FIXED)
        if not self._device.unified:
            check_room(
                self._device,
                layout.nbytes * len(self._bays),
                f"the slabs of {len(self._bays)} contexts, {mib(layout.nbytes)} for {self._rows_max} rows",
                "Open the engine with fewer contexts or a smaller max_rows",
            )
        for bay in self._bays:
            bay.binding(bay.slab(BUCKET_FIXED, layout))

    def _capture(self, sizes: Sequence[int]) -> None:
        """Capture the sizes on every bay, or none: an engine that cannot be captured runs call by call."""
        arenas, own = self._arenas, None
        if arenas is not None and arenas.engines > 1:
            # Other engines are running in these arenas, and nothing here is in order with them.
            own = self._device.allocate(arenas.arenas[0].memory.nbytes)
        try:
            took_ns = [self._capture_one(bay, rows, own) for bay in self._bays for rows in sizes]
        except (DeviceMemoryError, DeviceLostError):
            raise
        except Exception as error:
            logger.warning(
                "%r cannot be captured as a CUDA graph, so its batches are put on the device call by call "
                "(graphs='off' does so from the start): %s",
                self._model.name,
                error,
            )
            for bay in self._bays:
                bay.uncapture()
        else:
            self.graph_sizes = tuple(sizes)
            self.direct_ns = sorted(direct_ns for direct_ns, _ in took_ns)[len(took_ns) // 2]
            self.graph_ns = sorted(graph_ns for _, graph_ns in took_ns)[len(took_ns) // 2]
        finally:
            if own is not None:
                own.close()

    def _capture_one(self, bay: Bay, rows: int, own: Buffer | None) -> tuple[int, int]:
        scratch = own or (None if bay.arena is None else bay.arena.memory)
        return bay.capture(bay.slab(BUCKET_FIXED, self.layout(BUCKET_FIXED)), rows, scratch)
