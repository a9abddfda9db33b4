"""The contexts of an engine, each with all that a batch needs to run on it.

It is here that a batch is put on a stream, and in what order: copy in, wait for the arena, compute, copy out.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final, cast

from asynctrt._util.cancellation import current
from asynctrt._util.nesting import Runs
from asynctrt.backends.base import (
    Binding,
    Model,
    PreparedContext,
    PreparedModel,
    create_context_on,
)
from asynctrt.devices.arenas import Arena, Arenas
from asynctrt.devices.base import Buffer, Device, Event, check_room, mib
from asynctrt.devices.host import HostStream
from asynctrt.errors import DeviceLostError, DeviceMemoryError, ExecutionError, InputError
from asynctrt.runtime.capturing import Capturing, are_dense
from asynctrt.runtime.graphs import Capture, CaptureCosts, CapturedBatch
from asynctrt.runtime.jobs import Job
from asynctrt.runtime.pad_sizes import Padding
from asynctrt.runtime.padding import PaddedSource
from asynctrt.runtime.prepare import Place, prepare
from asynctrt.runtime.shared import SharedRows, SharedSource, are_shared
from asynctrt.runtime.staging import (
    AHEAD_ROW_NBYTES_MAX,
    AHEAD_ROW_NBYTES_MIN,
    AheadRows,
    DeviceSource,
    Layout,
    RowSource,
    Slab,
    SlotSource,
    StagingBuffers,
    lay_out,
)
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.key import FIXED_SHAPE, BatchKey
from asynctrt.scheduling.policy import Captured
from asynctrt.scheduling.request import Request

SLABS_MAX: Final = 64
"""Slabs, and so bindings, that a context remembers: one for each shape, and one for each slab of slots."""

LAUNCH_NS_MAX: Final = 500_000
"""A graph whose launch takes longer is launched by a thread, if the model has threads for that."""

UNDO_S: Final = 0.1
"""How long a stream may take to come to rest when a pool that was begun is taken back. With no time at all it
would count as hung, as its last event is not done at once, and a device keeps the memory of what is hung."""

logger = logging.getLogger("asynctrt")


class BatchEvents:
    """The events of a batch on its way. Those that take times cost the CPU more, and the GPU some.

    Without times there are ``computed``, which the next batch in the arena and in the lane waits for, and
    ``copied_out``.
    """

    __slots__ = ("begun", "computed", "copied_in", "copied_out", "started")

    def __init__(self, device: Device, *, are_timed: bool) -> None:
        self.computed = device.create_event(is_timed=are_timed)
        self.copied_out = device.create_event(is_timed=are_timed)
        self.begun = device.create_event(is_timed=True) if are_timed else None
        self.copied_in = device.create_event(is_timed=True) if are_timed else None
        self.started = device.create_event(is_timed=True) if are_timed else None


class Lane:
    """Batches that compute one after the other, on whichever streams, as side by side they would be slower.

    Unlike the order in an arena, nothing but speed depends on theirs.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Event | None = None
        """Done when the latest batch in it has computed; ``None`` once that is so, or was given up."""


class PooledContext:
    """An execution context and all that it needs to run one batch at a time.

    :param runs: those of the engine. On the host device all that runs on its stream is among them.
    :param is_only: whether the engine has no other. On the host device its work keeps to one thread.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        arena: Arena | None,
        runs: Runs | None = None,
        *,
        is_only: bool = False,
    ) -> None:
        self._device = device
        self._model = model
        self.output_specs = {spec.name: spec for spec in model.outputs}
        self.arena = arena
        self.is_direct = arena is None and not model.enqueue_may_block
        """Whether a batch can always be enqueued at once, by the event loop."""
        self.is_enqueueing = False
        """Whether a thread is putting a batch on the stream."""
        self.job: Job | None = None
        """What a thread did last that reads or writes its slabs, or is doing."""
        self.stream = device.create_stream()
        if isinstance(self.stream, HostStream):
            self.stream.belong_to(model.name, runs or Runs(model.name), keeps_thread=is_only)
        self.timed = BatchEvents(device, are_timed=True)
        self.untimed = BatchEvents(device, are_timed=False)
        try:
            self.context = create_context_on(model, device, self.stream)
        except BaseException:
            self.stream.close(0.0)
            raise
        self._buffers: StagingBuffers | None = None
        self._grown: StagingBuffers | None = None
        self._slabs: OrderedDict[Hashable, Slab] = OrderedDict()
        self._slot_bindings: OrderedDict[Slab, Binding] = OrderedDict()
        # Captured are all shapes that batches have: few slabs, which are never evicted, and do not grow.
        self._captured: dict[tuple[Hashable, int], CapturedBatch] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of staging memory and its counterpart on the device."""
        return self._buffers.nbytes if self._buffers else 0

    def comes_to_rest(self, timeout_s: float) -> bool:
        """Wait until no thread works on its slabs and nothing runs on its stream; say whether that is so."""
        # The thread first: it may put something on the stream.
        return (self.job is None or self.job.synchronize(timeout_s)) and self.stream.drain(timeout_s)

    @property
    def was_last_in_arena(self) -> bool:
        """Return whether the arena's last use was by this context."""
        last = None if self.arena is None else self.arena.last_use
        return last is not None and (last is self.timed.computed or last is self.untimed.computed)

    def slab(self, shape: Hashable, layout_of: Callable[[Hashable], Layout]) -> Slab:
        """Return this context's own slab for a shape. All its slabs share one memory, which grows."""
        slab = self._slabs.get(shape)
        if slab is None:
            layout = layout_of(shape)
            if self._buffers is None or self.missing_nbytes(layout):
                grown, self._grown = self._grown or StagingBuffers(self._device, layout.nbytes), None
                self._forget()
                self._buffers = grown
            slab = self._slabs[shape] = Slab(layout, self._buffers)
            if len(self._slabs) > SLABS_MAX:
                self._slabs.popitem(last=False)
                self._slot_bindings.clear()
        elif len(self._slabs) > 1:
            self._slabs.move_to_end(shape)
        return slab

    def missing_nbytes(self, layout: Layout) -> int:
        """Return the size of the memory to allocate for a layout; 0 if there is enough."""
        held = 0 if self._buffers is None else self._buffers.staging.nbytes
        return layout.nbytes if held < layout.nbytes else 0

    def grow(self, layout: Layout) -> None:
        """Allocate memory for a slab of this layout, in any thread; :meth:`slab` then frees what it replaces.

        To free it here would be to wait for all work on the device, if this thread runs no event loop.
        """
        self._grown = StagingBuffers(self._device, layout.nbytes)

    def is_captured(self, shape: Hashable, rows: int) -> bool:
        """Return whether batches of ``rows`` of this shape were captured."""
        return (shape, rows) in self._captured

    @property
    def launches_slowly(self) -> bool:
        """Whether a thread has to launch one of its graphs."""
        return any(captured.launch_ns > LAUNCH_NS_MAX for captured in self._captured.values())

    def binding(self, source: RowSource) -> Binding:
        """Return the context tied to the memory that a batch is read from and written to."""
        slab = source.slab
        if source.inputs is slab:
            if slab.binding is None:
                slab.binding = self.context.bind(slab.input_memory(), slab.output_memory())
            return slab.binding
        binding = self._slot_bindings.get(source.inputs)
        if binding is None:
            binding = self.context.bind(source.inputs.input_memory(), slab.output_memory())
            self._slot_bindings[source.inputs] = binding
            if len(self._slot_bindings) > SLABS_MAX:
                self._slot_bindings.popitem(last=False)
        self._slot_bindings.move_to_end(source.inputs)
        return binding

    def may_block(self, source: RowSource) -> bool:
        """Return whether :meth:`enqueue` may take so long that a thread has to do it."""
        if not self._model.enqueue_may_block:
            return False
        captured = self._captured_of(source)
        if captured is not None:
            return captured.launch_ns > LAUNCH_NS_MAX
        binding = self.binding(source)
        # A SlowBinding, but to ask isinstance() for a protocol takes as long as all else up to the launch.
        may_block = getattr(binding, "may_block", None)
        return may_block is None or bool(may_block(source.batch.rows_run, profile=source.batch.profile))

    def enqueue(
        self,
        source: RowSource,
        events: BatchEvents,
        lane: Lane | None = None,
        *,
        scratch: Buffer | None = None,
    ) -> None:
        """Put a whole batch on the stream and return at once. This is the one order of things.

        :param lane: what it computes in, after the batches that are there.
        :param scratch: enqueue memory to work in, call by call, instead of the arena that others may use.
        """
        stream, batch = self.stream, source.batch
        arena = self.arena if scratch is None else None
        if events.begun is not None:
            stream.record(events.begun)
        if source.has_copies_in:
            source.put_in(stream)
            source.slab.put_shared_in(stream)
            if events.copied_in is not None:
                stream.record(events.copied_in)
        if scratch is None:
            self._wait_for_turn(lane)
        if (arena is not None or lane is not None) and events.started is not None:
            stream.record(events.started)
        memory = scratch if arena is None else arena.memory
        captured = None if scratch is not None else self._captured_of(source)
        if captured is not None:
            captured.graph.launch(stream=stream)
        else:
            self.binding(source).enqueue(batch.rows_run, profile=batch.profile, stream=stream, arena=memory)
        stream.record(events.computed)
        if source.has_copies_out:
            source.put_out(stream)
            stream.record(events.copied_out)
        if arena is not None:
            arena.last_use = events.computed
        if lane is not None:
            lane.last = events.computed

    def _captured_of(self, source: RowSource) -> CapturedBatch | None:
        """Return what was captured of such a batch, if it lies where graphs read."""
        if not self._captured or source.inputs is not source.slab:
            return None
        return self._captured.get((source.batch.key.shape, source.batch.rows_run))

    def _wait_for_turn(self, lane: Lane | None) -> None:
        """Let the stream wait for the batches before, in the arena and in the lane."""
        last_use = None if self.arena is None else self.arena.last_use
        # What this very stream did before is over before anyway.
        if last_use is not None and not self.was_last_in_arena:
            self.stream.wait(last_use)
        if lane is not None and lane.last is not None and lane.last is not last_use:
            self.stream.wait(lane.last)

    def enqueue_end(self, source: RowSource, events: BatchEvents) -> None:
        """After :meth:`enqueue` raised: mark the end of what it had put on the stream by then."""
        arena = self.arena
        # It may have raised before it waited. Whoever waits for this batch waits for those before it, too.
        if arena is not None and arena.last_use is not None and not self.was_last_in_arena:
            self.stream.wait(arena.last_use)
        self.stream.record(events.computed)
        if arena is not None:
            arena.last_use = events.computed
        if source.has_copies_out:
            self.stream.record(events.copied_out)

    def begin_capture(
        self, slab: Slab, shape: Hashable, rows: int, *, profile: int | None, scratch: Buffer | None
    ) -> Capture:
        """Begin to capture batches of ``rows`` of this shape in this context's own slab."""
        return Capture(
            self._device,
            self._model,
            slab,
            dict(cast("tuple[tuple[str, int], ...]", shape)),
            rows,
            profile=profile,
            stream=self.stream,
            end=self.untimed.computed,
            arena=self.arena,
            scratch=scratch,
        )

    def keep_captured(self, shape: Hashable, rows: int, capture: Capture) -> CaptureCosts:
        """Finish what was warmed up, and launch its graph for such batches from now on."""
        self._captured[shape, rows], costs = capture.finish()
        return costs

    def forget_captured(self) -> None:
        """Forget every graph."""
        for captured in self._captured.values():
            captured.close()
        self._captured.clear()

    def forget_inputs(self, slab: Slab) -> None:
        """Drop everything cached for a slab of inputs that is about to be freed."""
        self._slot_bindings.pop(slab, None)

    def close(self, timeout_s: float) -> bool:
        """Give everything back; False, and keep it, if the stream's work does not end in time."""
        if not self.stream.drain(timeout_s):
            return False
        if self.arena is not None and self.was_last_in_arena:
            self.arena.last_use = None
        self._forget()
        self.context.close()
        # After what may refer to it: graphs, and the library's own context.
        return self.stream.close(timeout_s)

    def _forget(self) -> None:
        self.forget_captured()
        self._slabs.clear()
        self._slot_bindings.clear()
        for buffers in (self._buffers, self._grown):
            if buffers is not None:
                buffers.close()
        self._buffers = self._grown = None


class ContextPool:
    """All contexts and arenas of an engine. The scheduler says which is free; this has the objects.

    :param arenas: the arenas that its contexts work in; ``None`` for a model that needs none.
    :param graphs: batch sizes to capture, rising; the model says whether it can be captured at all.
    :param profile_of: the profile for a captured batch of a size; ``None`` for a model without profiles.
    :param rows_held: the rows that a slab of a shape holds, where that is not ``rows_max``.
    :param prepares: whether batches of some sizes are run beforehand, for a model that asks for it.
    :param padding: what is padded to common sizes.
    :param shapes: those that all batches have, of as many rows each, if graphs of them are to be captured.
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
        profile_of: Callable[[int], int | None] = lambda _: None,
        rows_held: Callable[[Hashable], int] | None = None,
        prepares: bool = True,
        padding: Padding | None = None,
        shapes: Sequence[Hashable] = (),
    ) -> None:
        self._device = device
        self._padding = padding
        self._model = model
        self.runs = Runs(model.name)
        """What runs on its contexts, on the host device."""
        self._rows_held = rows_held or (lambda _: rows_max)
        self._profile_of = profile_of
        self._layouts: OrderedDict[Hashable, Layout] = OrderedDict()
        self._arenas = arenas
        self.contexts: list[PooledContext] = []
        """By their numbers, until it is closed."""
        self._closed = False
        is_fixed = all(spec.is_fixed for spec in model.inputs)
        self._shapes = (FIXED_SHAPE.shape,) if is_fixed else tuple(sorted(shapes, key=self._nbytes_of))
        self.may_grow = not self._shapes
        """Whether slabs are made, and grow, while batches run."""
        self.captured = Captured()
        """The batch sizes that were captured, and what launching one costs."""
        self.prepared: tuple[int, ...] = ()
        """The only batch sizes that are run, if a change of the size takes long."""
        if arenas is not None:
            arenas.join(model.enqueue_nbytes)
        try:
            self._make_contexts(contexts)
            if not self.may_grow:
                # The shapes are known, so what a batch needs is, too, and is refused here if at all.
                self._make_slabs()
                if graphs and model.is_capturable and self._may_capture:
                    self._capture(graphs)
                if prepares and model.rows_fixed is None and isinstance(model, PreparedModel):
                    if are_dense(self.captured.sizes, rows_max):
                        self.prepared = self.captured.sizes
                    elif is_fixed:
                        self._prepare(model, rows_max)
        except BaseException:
            self.close(UNDO_S)
            raise

    def __repr__(self) -> str:
        arenas = 0 if self._arenas is None else len(self._arenas)
        return f"<ContextPool contexts={len(self.contexts)} arenas={arenas} nbytes={self.nbytes}>"

    @property
    def arenas(self) -> Sequence[Arena]:
        """Return the arenas by their numbers."""
        return () if self._arenas is None else self._arenas.arenas

    @property
    def arenas_nbytes(self) -> int:
        """Return the bytes of the arenas."""
        return 0 if self._arenas is None else self._arenas.nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of staging memory, of its counterpart on the device, and of arenas."""
        held = sum(context.nbytes for context in self.contexts)
        return held if self._closed else held + self.arenas_nbytes

    @property
    def always_replays(self) -> bool:
        """Whether every batch is padded to a size that was captured, and none takes long to launch."""
        sizes = self.captured.sizes
        return (
            bool(sizes)
            and sizes in (self.prepared, (self._model.rows_fixed,))
            and not any(context.launches_slowly for context in self.contexts)
        )

    def layout(self, shape: Hashable) -> Layout:
        """Return how a slab holds the batches of a shape."""
        layout = self._layouts.get(shape)
        if layout is None:
            assert isinstance(shape, tuple)
            rows = self._rows_held(shape)
            model = self._model
            brings = getattr(model, "brings_outputs", False)
            layout = lay_out(model.inputs, model.outputs, dict(shape), rows, brings_outputs=brings)
            self._layouts[shape] = layout
            if len(self._layouts) > SLABS_MAX:
                self._layouts.popitem(last=False)
        return layout

    def _nbytes_of(self, shape: Hashable) -> int:
        return self.layout(shape).nbytes

    def missing_nbytes(self, batch: Batch) -> int:
        """Return the size of the memory to allocate for the slab of a batch; 0 if there is enough."""
        return self.contexts[batch.context].missing_nbytes(self.layout(batch.key.shape))

    def growth(self, batch: Batch) -> Callable[[], object]:
        """Return what allocates it, in any thread."""
        return partial(self.contexts[batch.context].grow, self.layout(batch.key.shape))

    def source(self, batch: Batch, ahead: AheadRows | None = None) -> RowSource:
        """Return where the rows of a batch come from, in the slab of its context.

        :param ahead: rows that were copied into a slab before, if any were.
        :raises DeviceMemoryError: when rows of this shape need more memory than there is.
        :raises ExecutionError: when the model now asks for more rows than it did at first.
        """
        key, context = batch.key, self.contexts[batch.context]
        slab = context.slab(key.shape, self.layout)
        if batch.rows_run > slab.layout.rows_max:
            # Else the device would read and write beyond its memory.
            raise ExecutionError(
                f"{self._model.name!r} is to run {batch.rows_run} rows, and said before that batches of this "
                f"shape have at most {slab.layout.rows_max}. Mend its rows_of: it must not change its answers"
            )
        if key.shared:
            slab.stage_shared(key.shared)
        if key.slab is not None:
            return SlotSource(batch, slab, is_captured=context.is_captured(key.shape, batch.rows_run))
        if key.on_device or key.outputs_on_device:
            return DeviceSource(batch, slab, device=self._device, stream=context.stream)
        if self._padding is not None:
            return PaddedSource(batch, slab, self._padding)
        if type(batch.requests[0].payload) is SharedRows and are_shared(batch.requests):
            return SharedSource(batch, slab, is_captured=context.is_captured(key.shape, batch.rows_run))
        source = RowSource(batch, slab)
        if ahead is not None:
            source.leave_out(ahead)
        return source

    def copies_ahead(self, key: BatchKey) -> bool:
        """Return whether it is worth it to copy such rows before their batch is launched."""
        if key.slab is not None or key.on_device or key.outputs_on_device or self._padding is not None:
            return False
        if not self.layout(key.shape).has_rows_first:
            return False
        return AHEAD_ROW_NBYTES_MIN <= self.layout(key.shape).input_row_nbytes <= AHEAD_ROW_NBYTES_MAX

    def ahead_slab(self, key: BatchKey, request: Request, context: int) -> Slab | None:
        """Return where such rows can be copied to before they are launched on a context that is free.

        ``None`` if there is no memory for them yet, or if they lie in memory that batches are copied from.

        :param request: the first of them.
        """
        pooled = self.contexts[context]
        if type(request.payload) is SharedRows or pooled.missing_nbytes(self.layout(key.shape)):
            return None
        return pooled.slab(key.shape, self.layout)

    def create_slot_slab(self, shape: Hashable) -> Slab:
        """Return a slab for callers to fill: inputs only, in staging memory.

        :raises DeviceMemoryError: when there is no room for it.
        """
        layout = self.layout(shape)
        buffers = StagingBuffers(self._device, layout.inputs_nbytes, has_device_buffer=False)
        return Slab(layout, buffers, has_outputs=False)

    def close_slot_slab(self, slab: Slab) -> None:
        """Give back a slab that callers filled, which no batch uses any more."""
        self.forget_inputs(slab)
        slab.buffers.close()

    def forget_inputs(self, slab: Slab) -> None:
        """Forget a slab of inputs that is not a context's own, and that no batch uses any more."""
        for context in self.contexts:
            context.forget_inputs(slab)

    def close(self, timeout_s: float) -> int:
        """Give everything back; returns how many contexts had to be abandoned, their work still running.

        May be called again later, for those that were.
        """
        still_running = [context for context in self.contexts if not context.comes_to_rest(timeout_s)]
        for context in still_running:
            # Before anything is freed, as that would wait for them.
            self._device.abandon(context.stream)
        for context in self.contexts:
            if context not in still_running:
                self._device.ended(context.stream)
                context.close(timeout_s)
        self.contexts = still_running
        if not self._closed and self._arenas is not None:
            self._arenas.leave()
        self._closed = True
        return len(still_running)

    def _make_contexts(self, contexts: int) -> None:
        """Make one to see what it takes, and the others only if there is as much left for each."""
        for index in range(contexts):
            arena = None if self._arenas is None else self._arenas.arenas[index % len(self._arenas)]
            free_nbytes = self._device.memory().room_nbytes if index == 0 else 0
            self.contexts.append(
                PooledContext(self._device, self._model, arena, self.runs, is_only=contexts == 1)
            )
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
            # Staging memory takes of the same memory if there is only one.
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

    def _prepare(self, model: PreparedModel, rows_max: int) -> None:
        """Prepare for some batch sizes, if a change of the size takes long."""
        places = []
        for context in self.contexts:
            binding = context.slab(FIXED_SHAPE.shape, self.layout).binding
            assert binding is not None
            owner = cast("PreparedContext", context.context)
            places.append(Place(owner, binding, context.stream, context.untimed.computed, current()))
        self.prepared = prepare(self._device, model, places, rows_max)

    def _capture(self, sizes: Sequence[int]) -> None:
        """Capture the sizes on every context, or none: what cannot be captured runs call by call.

        A captured size takes an execution context of its own on each context. If there is no room for them,
        the engine runs without graphs.
        """
        arenas = self._arenas
        own: Buffer | None = None
        try:
            if arenas is not None and arenas.is_shared:
                # Other engines may run in these arenas at any time, and nothing here is in order with them.
                own = self._device.allocate(arenas.arenas[0].memory.nbytes)
            begin = partial(self._begin_capture, own)
            capturing = Capturing(self._device, self._model, self.contexts, self._shapes, begin)
            sizes, costs = capturing.run(self._sizes_taken(sizes))
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
            if not costs:
                return
            direct_ns = sorted(cost.direct_ns for cost in costs)[len(costs) // 2]
            graph_ns = sorted(cost.graph_ns for cost in costs)[len(costs) // 2]
            self.captured = Captured(tuple(sizes), direct_ns, graph_ns)
        finally:
            if own is not None:
                own.close()

    @property
    def _may_capture(self) -> bool:
        """Whether the arenas stay where they are, as graphs need it."""
        arenas = self._arenas
        if arenas is None or not (arenas.by_shapes and arenas.is_shared):
            return True
        logger.warning(
            "%r captures no CUDA graphs, since other engines may let its arenas grow at any time",
            self._model.name,
        )
        return False

    def _sizes_taken(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes that some profile takes: there may be gaps between profiles."""
        taken = []
        for rows in sizes:
            try:
                self._profile_of(rows)
            except InputError as error:
                logger.debug("%r: batches of %d rows are not captured: %s", self._model.name, rows, error)
            else:
                taken.append(rows)
        return taken

    def _begin_capture(
        self, own: Buffer | None, context: PooledContext, shape: Hashable, rows: int
    ) -> Capture:
        scratch = own or (None if context.arena is None else context.arena.memory)
        slab = context.slab(shape, self.layout)
        return context.begin_capture(slab, shape, rows, profile=self._profile_of(rows), scratch=scratch)
