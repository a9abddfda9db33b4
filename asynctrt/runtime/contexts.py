"""The contexts of an engine, each with everything that a batch needs to run on it.

This module puts a batch on a stream, in this order: copy in, wait for the arena, compute, copy out.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median_low
from typing import Final, cast

from asynctrt._util import clock
from asynctrt._util.cancellation import current
from asynctrt.backends.base import (
    Binding,
    Model,
    create_context_on,
)
from asynctrt.devices.arenas import Arena, Arenas
from asynctrt.devices.base import Buffer, Device, Event, check_room, mib
from asynctrt.devices.host import HostStream
from asynctrt.errors import DeviceLostError, DeviceMemoryError, ExecutionError, InputError
from asynctrt.options import BATCH_NBYTES_MAX
from asynctrt.runtime.capturing import Capturing, are_dense
from asynctrt.runtime.graphs import Capture, CaptureCosts, CapturedBatch, wait_for
from asynctrt.runtime.jobs import Job
from asynctrt.runtime.pad_sizes import Padding
from asynctrt.runtime.padding import PaddedSource
from asynctrt.runtime.prepare import Place, prepare, time_of_change
from asynctrt.runtime.shared import SharedRows, SharedSource, are_shared
from asynctrt.runtime.specialised import Site, Specialised
from asynctrt.runtime.staging import (
    DeviceSource,
    Layout,
    RowSource,
    Slab,
    StagingBuffers,
    lay_out,
)
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.key import FIXED_SHAPE
from asynctrt.scheduling.policy import Captured
from asynctrt.scheduling.request import PlainRequests

SLAB_NBYTES_MIN: Final = 1 << 20
"""The memory for slabs that a context has from the start, where shapes vary and staging memory is pinned. To
allocate and free such memory later waits for the batches on the device, once for each context and shape."""

SLABS_MAX: Final = 64
"""The most slabs, and bindings, that a context keeps: one for each shape, and one for each place in shared
memory that rows are read from in place."""

LAUNCH_NS_MAX: Final = 500_000
"""A graph whose launch takes longer is launched by a thread, if the model allows it."""

UNDO_S: Final = 0.1
"""How long to wait for a stream to become idle when undoing a pool, in seconds. Without a wait it would count
as hung, as its last event is not done at once, and a device keeps a hung stream's memory."""

logger = logging.getLogger("asynctrt")


class BatchEvents:
    """The events of a batch in flight. Timed events cost more CPU time, and some GPU time.

    Untimed batches have only ``computed``, which the next batch in the arena and in the lane waits for, and
    ``copied_out``.
    """

    __slots__ = ("begun", "computed", "copied_in", "copied_out", "started")

    def __init__(self, device: Device, *, are_timed: bool) -> None:
        self.computed = device.create_event(is_timed=are_timed)
        self.copied_out = device.create_event(is_timed=are_timed)
        self.begun = device.create_event(is_timed=True) if are_timed else None
        self.copied_in = device.create_event(is_timed=True) if are_timed else None
        self.started = device.create_event(is_timed=True) if are_timed else None


class ComputeOrder:
    """Batches that compute one after the other, on any streams, because in parallel they would be slower.

    Unlike the order in an arena, this order affects only speed.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Event | None = None
        """Done when the latest batch in the lane has computed; ``None`` once it has, or was abandoned."""


class PooledContext:
    """An execution context and everything it needs to run one batch at a time.

    :param keeps_thread: whether its work keeps to one thread on the host device.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        arena: Arena | None,
        *,
        keeps_thread: bool = False,
    ) -> None:
        self._device = device
        self._model = model
        self.output_specs = {spec.name: spec for spec in model.outputs}
        self.arena = arena
        self.is_direct = arena is None and not model.capabilities.enqueue_may_block
        """Whether the event loop can always enqueue a batch without blocking."""
        self.is_enqueueing = False
        """Whether a thread is putting a batch on the stream."""
        self.job: Job | None = None
        """The latest job, running or done, of a thread that reads or writes its slabs."""
        self.stream = device.create_stream()
        if isinstance(self.stream, HostStream):
            self.stream.belong_to(model.name, keeps_thread=keeps_thread)
        self.timed = BatchEvents(device, are_timed=True)
        self.untimed = BatchEvents(device, are_timed=False)
        try:
            self.context = create_context_on(model, device, self.stream)
        except BaseException:
            self.stream.close(0.0)
            raise
        self._buffers: StagingBuffers | None = None
        self._grown: StagingBuffers | None = None
        # Pinned memory that became too small, kept because freeing it holds up all other calls of CUDA (13 ms
        # for 90 MB on an H100). It usually doubles when it grows, so this is about as much as is used.
        self._outgrown: list[StagingBuffers] = []
        self._slabs: OrderedDict[Hashable, Slab] = OrderedDict()
        self._bindings_in_place: OrderedDict[Slab, Binding] = OrderedDict()
        # If any shape is captured, all are, so their few slabs are never evicted and do not grow.
        self._captured: dict[tuple[Hashable, int], CapturedBatch] = {}
        # Shapes that were specialised, with slabs that belong to them alone.
        self._told: dict[Hashable, Site] = {}

    @property
    def slab_nbytes(self) -> int:
        """The bytes for a slab that is not of a specialised shape."""
        return 0 if self._buffers is None else self._buffers.staging.nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of staging memory and its counterpart on the device."""
        told = sum(site.nbytes for site in tuple(self._told.values()))
        outgrown = sum(buffers.nbytes for buffers in tuple(self._outgrown))
        return told + outgrown + (self._buffers.nbytes if self._buffers else 0)

    def adopt(self, shape: Hashable, site: Site) -> None:
        """Run later batches of a shape in its separate contexts. A batch in flight keeps its slab."""
        self._told[shape] = site

    def release(self, shape: Hashable) -> None:
        """Run later batches of a shape like any other. The caller closes the site once no batch uses it."""
        del self._told[shape]

    def comes_to_rest(self, timeout_s: float) -> bool:
        """Wait until no thread uses its slabs and its stream is idle; return False after the timeout."""
        # The thread first: it may put work on the stream.
        return (self.job is None or self.job.synchronize(timeout_s)) and self.stream.drain(timeout_s)

    @property
    def was_last_in_arena(self) -> bool:
        """Whether the arena was last used by this context."""
        last = None if self.arena is None else self.arena.last_use
        return last is not None and (last is self.timed.computed or last is self.untimed.computed)

    def slab(self, shape: Hashable, layout_of: Callable[[Hashable], Layout]) -> Slab:
        """Return this context's slab for a shape. They share one memory, which grows, if not specialised."""
        if self._told and (site := self._told.get(shape)) is not None and site.slab is not None:
            return site.slab
        slab = self._slabs.get(shape)
        if slab is None:
            layout = layout_of(shape)
            if self._buffers is None or self.missing_nbytes(layout):
                grown, self._grown = self._grown or StagingBuffers(self._device, layout.nbytes), None
                self._forget_slabs()
                if self._buffers is not None:
                    self._outgrown.append(self._buffers)
                if self._device.unified:
                    self._close_outgrown()
                self._buffers = grown
            slab = self._slabs[shape] = Slab(layout, self._buffers)
            if len(self._slabs) > SLABS_MAX:
                self._slabs.popitem(last=False)
                self._bindings_in_place.clear()
        elif len(self._slabs) > 1:
            self._slabs.move_to_end(shape)
        return slab

    def has_own_slab(self, shape: Hashable) -> bool:
        """Return whether a shape has a slab that belongs to it alone."""
        return shape in self._told

    def missing_nbytes(self, layout: Layout) -> int:
        """Return the bytes to allocate for a layout; 0 if there is enough memory."""
        return layout.nbytes if self.slab_nbytes < layout.nbytes else 0

    def reserve(self, nbytes: int) -> None:
        """Allocate memory for slabs of shapes that are not known yet, if there is room."""
        with suppress(DeviceMemoryError):
            self._buffers = StagingBuffers(self._device, nbytes)

    def grow(self, layout: Layout, nbytes: int) -> None:
        """Allocate memory for a slab of this layout, in any thread; :meth:`slab` uses it from then on.

        :param nbytes: allocate this much, or twice the memory so far, if that is more and there is room.
        :raises DeviceMemoryError: if there is no room.
        """
        doubled = 2 * self.slab_nbytes
        if layout.nbytes <= BATCH_NBYTES_MAX:
            doubled = min(doubled, BATCH_NBYTES_MAX)  # Only single rows may need more.
        for wanted in (max(layout.nbytes, nbytes, doubled), layout.nbytes):
            with suppress(DeviceMemoryError):
                self._grown = StagingBuffers(self._device, wanted)
                return
        self._close_outgrown()
        self._grown = StagingBuffers(self._device, layout.nbytes)

    def is_captured(self, shape: Hashable, rows: int) -> bool:
        """Return whether batches of ``rows`` rows of this shape were captured."""
        site = self._told.get(shape)
        return (shape, rows) in self._captured if site is None else rows in site.captured

    @property
    def launches_slowly(self) -> bool:
        """Whether any of its graphs must be launched by a thread."""
        return any(captured.launch_ns > LAUNCH_NS_MAX for captured in self._captured.values())

    def binding(self, source: RowSource) -> Binding:
        """Return the context bound to the memory that a batch is read from and written to."""
        slab = source.slab
        if source.inputs is slab:
            if slab.binding is None:
                slab.binding = self.context.bind(slab.input_memory(), slab.output_memory())
            return slab.binding
        binding = self._bindings_in_place.get(source.inputs)
        if binding is None:
            binding = self.context.bind(source.inputs.input_memory(), slab.output_memory())
            self._bindings_in_place[source.inputs] = binding
            if len(self._bindings_in_place) > SLABS_MAX:
                self._bindings_in_place.popitem(last=False)
        self._bindings_in_place.move_to_end(source.inputs)
        return binding

    def may_block(self, source: RowSource) -> bool:
        """Return whether :meth:`enqueue` may take so long that a thread must call it."""
        if not self._model.capabilities.enqueue_may_block:
            return False
        captured = self._captured_of(source)
        if captured is not None:
            return captured.launch_ns > LAUNCH_NS_MAX
        binding = self.binding(source)
        # A SlowBinding, but isinstance() of a protocol takes as long as everything else up to the launch.
        may_block = getattr(binding, "may_block", None)
        return may_block is None or bool(may_block(source.batch.rows_run, profile=source.batch.profile))

    def enqueue(
        self,
        source: RowSource,
        events: BatchEvents,
        lane: ComputeOrder | None = None,
        *,
        scratch: Buffer | None = None,
    ) -> None:
        """Put a whole batch on the stream and return at once. Only this method defines the order of steps.

        :param lane: the lane to compute in, after the batches already there.
        :param scratch: enqueue memory to use, call by call, instead of the arena that others may use.
        """
        stream, batch = self.stream, source.batch
        arena = self.arena if scratch is None else None
        if events.begun is not None:
            stream.record(events.begun)
        if source.has_copies_in:
            self._copy_in(source, events)
        if arena is not None or lane is not None:
            self._wait_for_turn(lane, events)
        is_captured = scratch is None and (self._captured or self._told)
        captured = self._captured_of(source) if is_captured else None
        if captured is not None:
            captured.launch(stream, events.computed)
        else:
            memory = scratch if arena is None else arena.memory
            binding = source.inputs.binding or self.binding(source)
            binding.enqueue(batch.rows_run, profile=batch.profile, stream=stream, arena=memory)
            stream.record(events.computed)
        if source.has_copies_out:
            source.put_out(stream)
            stream.record(events.copied_out)
        if arena is not None:
            arena.last_use = events.computed
        if lane is not None:
            lane.last = events.computed

    def _captured_of(self, source: RowSource) -> CapturedBatch | None:
        """Return the capture of such a batch, if its rows are where graphs read them."""
        if source.inputs is not source.slab:
            return None
        if self._told and (site := self._told.get(source.batch.key.shape)) is not None:
            # A batch whose rows were staged before the shape was specialised lies elsewhere.
            captured = site.captured.get(source.batch.rows_run) if source.slab is site.slab else None
            is_stuck = captured is not None and captured.turns is not None and captured.turns.is_stuck
            return None if is_stuck else captured
        return self._captured.get((source.batch.key.shape, source.batch.rows_run))

    def _copy_in(self, source: RowSource, events: BatchEvents) -> None:
        source.put_in(self.stream)
        source.slab.put_shared_in(self.stream)
        if events.copied_in is not None:
            self.stream.record(events.copied_in)

    def _wait_for_turn(self, lane: ComputeOrder | None, events: BatchEvents) -> None:
        """Make the stream wait for the previous batches in the arena and in the lane."""
        last_use = None if self.arena is None else self.arena.last_use
        # Work of this stream is in order anyway.
        if last_use is not None and not self.was_last_in_arena:
            self.stream.wait(last_use)
        if lane is not None and lane.last is not None and lane.last is not last_use:
            self.stream.wait(lane.last)
        if events.started is not None:
            self.stream.record(events.started)

    def enqueue_end(self, source: RowSource, events: BatchEvents) -> None:
        """After :meth:`enqueue` raised, mark the end of the work that it had put on the stream."""
        arena = self.arena
        # It may have raised before it waited. Waiting for this batch must include the batches before it.
        if arena is not None and arena.last_use is not None and not self.was_last_in_arena:
            self.stream.wait(arena.last_use)
        self.stream.record(events.computed)
        if arena is not None:
            arena.last_use = events.computed
        if source.has_copies_out:
            self.stream.record(events.copied_out)

    def keep_captured(self, shape: Hashable, rows: int, capture: Capture) -> CaptureCosts:
        """Finish a warmed-up capture, and launch its graph for such batches from now on."""
        self._captured[shape, rows], costs = capture.finish()
        return costs

    def forget_captured(self) -> None:
        """Forget every graph."""
        for captured in self._captured.values():
            captured.close()
        self._captured.clear()

    def forget_inputs(self, slab: Slab) -> None:
        """Drop everything cached for a slab of inputs that is about to be freed."""
        self._bindings_in_place.pop(slab, None)

    def close(self, timeout_s: float) -> bool:
        """Release everything; if the stream's work does not end in time, keep it and return False."""
        if not self.stream.drain(timeout_s):
            return False
        if self.arena is not None and self.was_last_in_arena:
            self.arena.last_use = None
        self._forget()
        self._told.clear()
        self.context.close()
        # Close the stream after graphs and the library's context, which may refer to it.
        return self.stream.close(timeout_s)

    def forget_slabs(self) -> None:
        """Free the memory that slabs needed beyond what it has from the start. It must be idle."""
        if self.slab_nbytes > SLAB_NBYTES_MIN:
            self._forget()
            self.reserve(SLAB_NBYTES_MIN)

    def _forget_slabs(self) -> None:
        self.forget_captured()
        self._slabs.clear()
        self._bindings_in_place.clear()

    def _close_outgrown(self) -> None:
        while self._outgrown:
            self._outgrown.pop().close()

    def _forget(self) -> None:
        self._forget_slabs()
        self._close_outgrown()
        for buffers in (self._buffers, self._grown):
            if buffers is not None:
                buffers.close()
        self._buffers = self._grown = None


class ContextPool:
    """All contexts and arenas of an engine. The scheduler knows which are free; the pool owns the objects.

    :param arenas: the arenas that its contexts work in; ``None`` for a model that needs no arenas.
    :param graphs: batch sizes to capture, rising; the model says whether it can be captured at all.
    :param profile_of: the profile for a captured batch of a shape and a number of rows; ``None`` for a model
        without profiles.
    :param rows_held: the rows that a slab of a shape holds. Default: ``rows_max``.
    :param prepares: whether to run batches of some sizes beforehand, for a model that asks for it.
    :param padding: the dimensions and inputs to pad.
    :param shapes: all shapes of batches, each with ``rows_max`` rows, to capture graphs of them.
    :raises DeviceMemoryError: if they do not fit; everything created until then is released.
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
        profile_of: Callable[[Hashable, int], int | None] = lambda *_: None,
        rows_held: Callable[[Hashable], int] | None = None,
        prepares: bool = True,
        padding: Padding | None = None,
        shapes: Sequence[Hashable] = (),
    ) -> None:
        self._device = device
        self.padding = padding
        """The dimensions and inputs to pad."""
        self._model = model
        self._rows_held = rows_held or (lambda _: rows_max)
        self._profile_of = profile_of
        self._layouts: OrderedDict[Hashable, Layout] = OrderedDict()
        self._arenas = arenas
        self.contexts: list[PooledContext] = []
        """The contexts by number, until the pool is closed."""
        self._closed = False
        is_fixed = all(spec.is_fixed for spec in model.inputs)
        by_size = sorted(shapes, key=lambda shape: self.layout(shape).nbytes)
        self._shapes = (FIXED_SHAPE.shape,) if is_fixed else tuple(by_size)
        self.may_grow = not self._shapes
        """Whether slabs are created and grow while batches run."""
        self.captured = Captured()
        """The captured batch sizes, and the CPU time to launch one."""
        self.specialised: dict[Hashable, Specialised] = {}
        """The shapes with separate contexts."""
        self.prepared: tuple[int, ...] = ()
        """The only batch sizes that are run, if changing the size takes long; empty if any size is run."""
        if arenas is not None:
            arenas.join(model.capabilities.enqueue_nbytes)
        try:
            self._make_contexts(contexts)
            if self.may_grow and not device.unified:
                for context in self.contexts:
                    context.reserve(SLAB_NBYTES_MIN)
            elif not self.may_grow:
                # The shapes are known, and so is the memory of a batch: allocate it or fail now.
                self._make_slabs()
                if graphs and model.capabilities.is_capturable:
                    self._capture(graphs)
            if prepares and model.capabilities.rows_fixed is None:
                self._restrict(model, rows_max)
        except BaseException:
            self.close(UNDO_S)
            raise

    def __repr__(self) -> str:
        arenas = 0 if self._arenas is None else len(self._arenas)
        return f"<ContextPool contexts={len(self.contexts)} arenas={arenas} nbytes={self.nbytes}>"

    @property
    def arenas(self) -> Sequence[Arena]:
        """The arenas by number."""
        return () if self._arenas is None else self._arenas.arenas

    @property
    def arenas_nbytes(self) -> int:
        """The bytes of the arenas."""
        return 0 if self._arenas is None else self._arenas.nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of staging memory, of its counterpart on the device, and of arenas."""
        held = sum(context.nbytes for context in self.contexts)
        return held if self._closed else held + self.arenas_nbytes

    @property
    def always_replays(self) -> bool:
        """Whether every batch is padded to a captured size, and no graph takes long to launch."""
        sizes = self.captured.sizes
        return (
            bool(sizes)
            and sizes in (self.prepared, (self._model.capabilities.rows_fixed,))
            and not any(context.launches_slowly for context in self.contexts)
        )

    def layout(self, shape: Hashable) -> Layout:
        """Return the layout of a slab for batches of a shape."""
        layout = self._layouts.get(shape)
        if layout is None:
            assert isinstance(shape, tuple)
            rows = self._rows_held(shape)
            model = self._model
            brings = model.capabilities.brings_outputs
            layout = lay_out(model.inputs, model.outputs, dict(shape), rows, brings_outputs=brings)
            self._layouts[shape] = layout
            if len(self._layouts) > SLABS_MAX:
                self._layouts.popitem(last=False)
        return layout

    def missing_nbytes(self, batch: Batch) -> int:
        """Return the bytes to allocate for the slab of a batch; 0 if there is enough memory."""
        context, shape = self.contexts[batch.context], batch.key.shape
        return 0 if context.has_own_slab(shape) else context.missing_nbytes(self.layout(shape))

    def adopt(self, made: Specialised) -> None:
        """Run later batches of a shape in its separate contexts, which the pool closes."""
        for context, site in zip(self.contexts, made.sites, strict=True):
            context.adopt(made.shape, site)
        self.specialised[made.shape] = made

    def release(self, shape: Hashable) -> Specialised:
        """Run later batches of a shape like any other. Close what is returned once no batch uses it."""
        for context in self.contexts:
            context.release(shape)
        return self.specialised.pop(shape)

    def growth(self, batch: Batch) -> Callable[[], object]:
        """Return a function that allocates the missing memory of a batch's slab, in any thread.

        It allocates as much as any other context has, since a shape that needs that will come here too.
        """
        largest = max(context.slab_nbytes for context in self.contexts)
        return partial(self.contexts[batch.context].grow, self.layout(batch.key.shape), largest)

    def source(self, batch: Batch) -> RowSource:
        """Return the source of a batch's rows, with the slab of its context.

        :raises DeviceMemoryError: if rows of this shape need more memory than there is.
        :raises ExecutionError: if the model now asks for more rows than at first.
        """
        key, context = batch.key, self.contexts[batch.context]
        slab = context.slab(key.shape, self.layout)
        if batch.rows_run > slab.layout.rows_max:
            # The device would read and write out of bounds.
            raise ExecutionError(
                f"{self._model.name!r} is to run {batch.rows_run} rows, and said before that batches of this "
                f"shape have at most {slab.layout.rows_max}. Mend its rows_of: it must not change its answers"
            )
        if key.shared:
            slab.stage_shared(key.shared)
        if key.on_device or key.outputs_on_device:
            return DeviceSource(batch, slab, device=self._device, stream=context.stream)
        padding = self.padding
        if padding is not None and (not padding.is_default or padding.knows(key.shape)):
            padded = PaddedSource(batch, slab, padding)
            if padded.is_cut:
                return padded
        requests = batch.requests
        is_plain = type(requests) is PlainRequests
        if not is_plain and type(requests[0].payload) is SharedRows and are_shared(requests):
            return SharedSource(batch, slab, is_captured=context.is_captured(key.shape, batch.rows_run))
        return RowSource(batch, slab)

    def forget_inputs(self, slab: Slab) -> None:
        """Forget a slab of inputs that belongs to no context. No batch may still use it."""
        for context in self.contexts:
            context.forget_inputs(slab)

    def close(self, timeout_s: float) -> int:
        """Release everything; return how many contexts had to be abandoned, with work still running.

        Call it again later to release the abandoned contexts.
        """
        still_running = [context for context in self.contexts if not context.comes_to_rest(timeout_s)]
        at_rest = [context for context in self.contexts if context not in still_running]
        # Before freeing anything: a device keeps what is closed while work on it may run forever.
        for context in still_running:
            self._device.abandon(context.stream)
        for context in at_rest:
            self._device.ended(context.stream)
        if not still_running:  # Sites of a shape may share what a batch that hangs uses.
            for made in self.specialised.values():
                made.close(timeout_s)
        if not still_running or self._device.unified:  # What a GPU would keep is closed once nothing hangs.
            for context in at_rest:
                context.close(timeout_s)
            self.contexts = still_running
        if not self._closed and self._arenas is not None:
            self._arenas.leave()
        self._closed = True
        return len(still_running)

    def _make_contexts(self, contexts: int) -> None:
        """Create one to measure its memory, and the others only if enough is left for each."""
        keeps_thread = contexts == 1 or bool(self._model.capabilities.batch_sizes)
        for index in range(contexts):
            arena = None if self._arenas is None else self._arenas.arenas[index % len(self._arenas)]
            free_nbytes = self._device.memory().room_nbytes if index == 0 else 0
            self.contexts.append(PooledContext(self._device, self._model, arena, keeps_thread=keeps_thread))
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
        layout = self.layout(self._shapes[-1])
        if not self._device.unified:
            # An integrated device has one memory, which staging memory shares.
            copies = 2 if self._device.is_integrated else 1
            check_room(
                self._device,
                layout.nbytes * len(self.contexts) * copies,
                f"the slabs of {len(self.contexts)} contexts, {mib(layout.nbytes)} for {layout.rows_max} "
                "rows,",
                "Open the engine with fewer contexts or a smaller max_rows",
            )
        for context in self.contexts:
            for shape in reversed(self._shapes):
                slab = context.slab(shape, self.layout)
                slab.binding = context.context.bind(slab.input_memory(), slab.output_memory())

    def _restrict(self, model: Model, rows_max: int) -> None:
        """Restrict batches to the sizes that the model asks for, or to captured ones that suffice."""
        its = model.capabilities
        if its.batch_sizes:
            self.prepared = its.batch_sizes
            if getattr(self._device, "holds_batches", False):
                return
            for shape in (*self._shapes, *its.shapes_beforehand):
                self._prepare(model, shape)
        elif its.is_traced and are_dense(self.captured.sizes, rows_max):
            self.prepared = self.captured.sizes

    def _prepare(self, model: Model, shape: Hashable) -> None:
        """Prepare the model's batch sizes of a shape in each context."""
        places = []
        for context in self.contexts:
            slab = context.slab(shape, self.layout)
            if slab.binding is None:
                slab.binding = context.context.bind(slab.input_memory(), slab.output_memory())
            inputs = (*slab.inputs, *slab.shared)
            numbers = tuple(array for array in inputs if not array.dtype.hasobject)
            places.append(Place(slab.binding, context.stream, context.untimed.computed, current(), numbers))
        prepare(self._device, model, places)

    def _capture(self, sizes: Sequence[int]) -> None:
        """Capture the sizes on every context, or no size: without graphs, batches run call by call.

        Each captured size takes a dedicated execution context on each context. If they do not fit, the engine
        runs without graphs.
        """
        arenas = self._arenas
        own: Buffer | None = None
        try:
            if arenas is not None and arenas.is_shared:
                # Other engines may use these arenas at any time, and captures are not ordered with them.
                own = self._device.allocate(arenas.arenas[0].memory.nbytes)
            begin = partial(self._begin_capture, own)
            capturing = Capturing(
                self._device,
                self._model,
                self.contexts,
                self._shapes,
                begin,
                # Contexts may share an arena, in which no two may warm up at the same time.
                one_by_one=arenas is not None,
            )
            sizes = self._sizes_taken(sizes)
            if not sizes:
                return
            sizes, costs = capturing.run(sizes)
            change_ns = self._change_ns(sizes[-1], own)
        except DeviceLostError:
            raise
        except Exception as error:
            if current().is_cancelled:
                raise
            logger.warning(
                "%r %s, so its batches are put on the device call by call (graphs='off' does so from the "
                "start): %s",
                self._model.name,
                "has no room for CUDA graphs"
                if isinstance(error, DeviceMemoryError)
                else "cannot be captured as a CUDA graph",
                error,
            )
            for context in self.contexts:
                context.forget_captured()
        else:
            direct_ns = change_ns or median_low(cost.direct_ns for cost in costs)
            graph_ns = median_low(cost.graph_ns for cost in costs)
            self.captured = Captured(tuple(sizes), direct_ns, graph_ns)
        finally:
            if own is not None:
                own.close()

    def _change_ns(self, largest: int, own: Buffer | None) -> int:
        """Return the CPU time to enqueue a batch that is not captured, in ns; 0 if it was not measured.

        The batch before it in its context usually had another size.
        """
        shape = self._shapes[-1]
        sizes = self._sizes_taken([max(largest // 2, 1), largest])
        if self._model.capabilities.is_traced or len(set(sizes)) < 2:
            return 0
        context = self.contexts[0]
        binding = context.slab(shape, self.layout).binding
        assert binding is not None, "slabs of known shapes are bound when they are made"
        arena = own or (None if context.arena is None else context.arena.memory)

        def enqueue(rows: int) -> int:
            profile = self._profile_of(shape, rows)
            start_ns = clock.now_ns()
            binding.enqueue(rows, profile=profile, stream=context.stream, arena=arena)
            took_ns = clock.now_ns() - start_ns
            wait_for(context.stream, context.untimed.computed, f"a batch of {rows} rows")
            return took_ns

        for rows in sizes:
            enqueue(rows)  # The first run of each size includes one-time work.
        return sum(time_of_change(enqueue, sizes))

    def _sizes_taken(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes that profiles take of every shape: there may be gaps between profiles."""
        taken = []
        for rows in sizes:
            try:
                for shape in self._shapes:
                    self._profile_of(shape, rows)
            except InputError as error:
                logger.debug("%r: batches of %d rows are not captured: %s", self._model.name, rows, error)
            else:
                taken.append(rows)
        return taken

    def _begin_capture(
        self, own: Buffer | None, context: PooledContext, shape: Hashable, rows: int
    ) -> Capture:
        """Begin to capture batches of ``rows`` rows of a shape in a context's slab.

        :param own: enqueue memory that nothing else uses. Default: the context's arena.
        """
        return Capture(
            self._device,
            self._model,
            context.slab(shape, self.layout),
            dict(cast("tuple[tuple[str, int], ...]", shape)),
            rows,
            profile=self._profile_of(shape, rows),
            stream=context.stream,
            end=context.untimed.computed,
            arena=context.arena,
            scratch=own or (None if context.arena is None else context.arena.memory),
        )
