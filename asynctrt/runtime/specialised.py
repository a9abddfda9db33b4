"""Shapes with separate contexts: each knows all sizes of one batch, and is captured if possible.

A library that knows the sizes of all dimensions computes what depends on them alone when it loads a model,
instead of on the CPU in each batch, and plans its kernels once. So a model whose dimensions are all symbolic
runs like one whose shapes are fixed. Each batch size of each shape takes a context. Where batches compute one
after the other, all contexts of the engine share it, each with a graph that reads and writes the slab of that
context; otherwise there is one beside each. Its answers are compared with the answers of a context
for any size.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, cast

from asynctrt._util import clock
from asynctrt._util.cancellation import Cancellation, cancelled_by, current
from asynctrt.backends.base import CapableModel, TracedContext, create_context_on
from asynctrt.devices.base import Device, Event, Stream, mib
from asynctrt.errors import DeviceLostError, DeviceMemoryError, ExecutionError, UsageError
from asynctrt.runtime.capturing import SHARE_MAX, Capturing
from asynctrt.runtime.graphs import Capture, CaptureCosts, CapturedBatch, Turns, wait_for
from asynctrt.runtime.prepare import CHANGE_NS_MIN, time_of_change
from asynctrt.runtime.staging import Layout, Slab, StagingBuffers, lay_out
from asynctrt.runtime.trial import SAMPLES, Expected, Trial
from asynctrt.statistics import ShapeStatistics

BUILD_S_MAX: Final = 60.0
"""The longest time to spend on a shape while the engine serves, in seconds."""

CHANGE_SHARE_MIN: Final = 0.5
"""Without graphs, a shape gets separate contexts only if a change of the batch size adds at least this share
of a batch's time."""

CLOSE_S: Final = 10.0
"""How long to wait for the work of a stream that is no longer used, in seconds."""

ROUNDS: Final = 8
"""How often to time a batch; the least counts. Others may use the device meanwhile."""

logger = logging.getLogger("asynctrt")


class Site:
    """The contexts of one shape beside one context of the engine, with the slab that their batches use."""

    def __init__(self, device: Device, model: CapableModel, shape: Hashable) -> None:
        self.device = device
        self._model, self._sizes = model, symbols_of(shape)
        self.stream = device.create_stream()
        self.end = device.create_event(is_timed=False)
        self.slab: Slab | None = None
        self.contexts: dict[int, TracedContext] = {}
        """The contexts on its stream, by the rows of a batch. Graphs of other sites may be captured from them
        too."""
        self.captured: dict[int, CapturedBatch] = {}
        """What is launched, by the rows of a batch."""

    @property
    def nbytes(self) -> int:
        """The bytes of the slab."""
        return 0 if self.slab is None else self.slab.buffers.nbytes

    def lay_out(self, layout: Layout) -> Slab:
        """Allocate the slab."""
        self.slab = Slab(layout, StagingBuffers(self.device, layout.nbytes))
        return self.slab

    def context(self, rows: int) -> TracedContext:
        """Return the context for batches of ``rows``, and create it if needed."""
        if rows not in self.contexts:
            self.contexts[rows] = self._model.create_context_for(self.device, self.stream, self._sizes, rows)
        return self.contexts[rows]

    def begin(
        self, rows: int, expected: Expected, *, is_direct: bool, lender: "Site | None" = None
    ) -> Capture:
        """Begin to capture a batch in its slab.

        :param expected: the expected outputs of a trial.
        :param lender: the site whose context of that size to capture from. Default: this one.
        """
        assert self.slab is not None
        place = lender or self
        return Capture(
            self.device,
            self._model,
            self.slab,
            self._sizes,
            rows,
            profile=None,
            stream=place.stream,
            end=place.end,
            arena=None,
            scratch=None,
            expected=expected,
            is_direct=is_direct,
            context=place.context(rows),
        )

    def keep_captured(
        self, shape: Hashable, rows: int, capture: Capture, turns: Turns | None = None
    ) -> CaptureCosts:
        """Finish a warmed-up capture, as for a :class:`~asynctrt.runtime.capturing.CapturingContext`.

        :param turns: the turns of graphs that share its context.
        """
        captured, costs = capture.finish()
        self.captured[rows] = captured._replace(turns=turns)
        return costs

    def share(self, turns: Mapping[int, Turns]) -> None:
        """Let other sites capture graphs from the contexts of this one."""
        for rows, captured in self.captured.items():
            self.captured[rows] = captured._replace(turns=turns[rows])

    def forget_graphs(self) -> None:
        """Close all graphs."""
        for captured in self.captured.values():
            captured.close()
        self.captured.clear()

    def forget_captured(self) -> None:
        """Close all graphs and contexts. No graph of another site may be captured from them."""
        self.forget_graphs()
        for context in self.contexts.values():
            context.close()
        self.contexts.clear()

    def timed_ns(self, rows: int) -> int:
        """Return how long it takes to launch a batch of what is in the slab, and to compute it."""
        captured = self.captured[rows]
        return least_ns(lambda: captured.graph.launch(stream=self.stream), self.stream, self.end)

    def close(self, timeout_s: float) -> None:
        """Release everything. The stream is idle, and no graph of another site uses its contexts."""
        self.forget_captured()
        if self.slab is not None:
            self.slab.binding = None
            self.slab.buffers.close()
        self.stream.close(timeout_s)


def forget_all(sites: Sequence[Site]) -> None:
    """Close the graphs of all sites of a shape, and then their contexts, which the sites may share."""
    for site in sites:
        site.forget_graphs()
    for site in sites:
        site.forget_captured()


def release(sites: Sequence[Site], timeout_s: float) -> None:
    """Release all sites of a shape, or none if the work of a stream does not end in time."""
    for site in sites:
        site.device.activate()
    if all(site.stream.drain(timeout_s) for site in sites):
        forget_all(sites)
        for site in sites:
            site.close(timeout_s)


def least_ns(launch: Callable[[], object], stream: Stream, end: Event) -> int:
    """Return the least time of several launches on an idle stream, with the work that they launch."""
    taken_ns = []
    for _ in range(ROUNDS):
        start_ns = clock.now_ns()
        launch()
        wait_for(stream, end, "a batch")
        taken_ns.append(clock.now_ns() - start_ns)
    return min(taken_ns)


class Specialised(NamedTuple):
    """A shape with separate contexts."""

    shape: Hashable
    sites: tuple[Site, ...]
    """One beside each context of the engine."""
    statistics: ShapeStatistics
    """Their cost and their gain."""

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Release all sites. Blocks. No batch may still use them."""
        release(self.sites, timeout_s)


class NoGainError(ExecutionError):
    """The model would not run faster in contexts that know their sizes."""


class Deadline(Cancellation):
    """A cancellation that cancels itself after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._until_ns = clock.now_ns() + int(seconds * 1e9)

    @property
    def is_cancelled(self) -> bool:
        return super().is_cancelled or self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether its time is over."""
        return clock.now_ns() >= self._until_ns


class Reference:
    """A context for any size, to compare answers and times with, on a separate stream."""

    def __init__(self, device: Device, model: CapableModel) -> None:
        self._device, self._model = device, model
        self._stream = device.create_stream()
        self._end = device.create_event(is_timed=False)
        try:
            self._context = cast("TracedContext", create_context_on(model, device, self._stream))
        except BaseException:
            self._stream.close(0.0)
            raise
        self._slab: Slab | None = None
        self._expected: Expected = {}
        self._rows = 0

    def bind(self, slab: Slab) -> None:
        """Run batches of another shape in its slab from now on."""
        self._slab = slab
        self._binding = self._context.bind(slab.input_memory(), slab.output_memory())
        self._expected, self._rows = {}, 0

    def expected(self, rows: int) -> Expected:
        """Return the answers to the rows of a trial with ``rows`` rows.

        They are the first rows of a trial with more, so this runs a batch only if it never ran one as large.
        """
        if rows > self._rows:
            assert self._slab is not None, "it is bound first"
            trial = Trial(self._slab, rows, self._stream)
            for number in range(SAMPLES):
                trial.put_in(number)
                self._run(rows)
                trial.put_out()
                wait_for(self._stream, self._end, "a batch")
                trial.note(number)
            self._expected, self._rows = trial.expected, rows
        return {
            number: {name: array[:rows] for name, array in outputs.items()}
            for number, outputs in self._expected.items()
        }

    def time_ns(self, rows: int) -> int:
        """Return how long a batch of some rows takes, run several times in a row."""
        return least_ns(partial(self._run, rows), self._stream, self._end)

    def changes_slowly(self, rows_max: int) -> bool:
        """Return whether a batch takes much longer after one of another size."""
        if rows_max < 2:
            return False
        pair = rows_max, rows_max // 2
        for rows in pair:
            self._once_ns(rows)  # Do not measure one-time work.
        change = time_of_change(self._once_ns, pair)
        return change.extra_ns >= max(CHANGE_NS_MIN, CHANGE_SHARE_MIN * change.same_ns)

    def rest(self) -> None:
        """Free the memory of its runs, and forget the slab. Blocks."""
        self._context.settle()
        del self._binding
        self._slab, self._expected, self._rows = None, {}, 0

    def close(self) -> None:
        """Close the context. Blocks until its work has ended."""
        with suppress(Exception):
            self._stream.drain(CLOSE_S)
        self._context.close()
        self._stream.close(CLOSE_S)

    def _once_ns(self, rows: int) -> int:
        """Run a batch; return how long it took.

        :raises UsageError: if the building was cancelled; nothing is run then.
        """
        if current().is_cancelled:
            raise UsageError("batches are not run any more, since the building was cancelled")
        start_ns = clock.now_ns()
        self._run(rows)
        wait_for(self._stream, self._end, "a batch")
        return clock.now_ns() - start_ns

    def _run(self, rows: int) -> None:
        self._binding.enqueue(rows, profile=None, stream=self._stream, arena=None)


class Builder:
    """Builds the contexts of a shape, in the calling thread. It touches nothing that batches use.

    It keeps its reference: a library may hold the GIL while it ends a context.

    :param contexts: how many contexts the engine has.
    :param captures: whether to capture CUDA graphs where that can be done.
    """

    def __init__(self, device: Device, model: CapableModel, contexts: int, *, captures: bool) -> None:
        self._share_nbytes = int(device.memory().room_nbytes * SHARE_MAX)
        self._device, self._model = device, model
        self._contexts = contexts
        self._captures = captures
        self.in_turn = False
        """Whether batches compute one after the other, so that contexts of the engine can share one."""
        self._reference: Reference | None = None
        self._lock = threading.Lock()

    def build(
        self,
        shape: Hashable,
        sizes: Sequence[int],
        *,
        one_by_one: bool,
        cancellation: Cancellation,
        held_nbytes: int = 0,
    ) -> Specialised:
        """Build contexts of some batch sizes of a shape. Blocks.

        :param sizes: rising; fewer of them are built if not all fit.
        :param one_by_one: whether to build in this thread alone.
        :param held_nbytes: the device memory that other shapes hold, of the half of what was free at first.
        :raises NoGainError: if it would not pay off.
        :raises ExecutionError: if answers differ, or the model fails.
        :raises DeviceMemoryError: if there is no room.
        :raises UsageError: if it was cancelled.
        """
        start_ns = clock.now_ns()
        self._device.activate()
        sites: list[Site] = []
        with self._lock:
            try:
                reference = self._reference = self._reference or Reference(self._device, self._model)
                room_nbytes = self._device.memory().room_nbytes
                limit_nbytes = min(self._share_nbytes - held_nbytes, room_nbytes)
                with cancelled_by(cancellation):
                    # One by one: if one cannot be created, the ones before it are released.
                    sites.extend(Site(self._device, self._model, shape) for _ in range(self._contexts))
                    layout = self._layout(shape, sizes[-1], sites[0])
                    self._check_slabs(layout, limit_nbytes)
                    slabs = [site.lay_out(layout) for site in sites]
                    reference.bind(slabs[0])
                    fit = partial(self._fit, shape, sites, reference, limit_nbytes, one_by_one=one_by_one)
                    taken, is_captured = self._fill(shape, sites, sizes, reference, fit)
                before_ns = {rows: reference.time_ns(rows) for rows in (taken[-1], taken[0])}
                after_ns = {rows: sites[0].timed_ns(rows) for rows in taken}
                reference.rest()
                if cancellation.is_cancelled:  # The caller may have stopped waiting.
                    raise UsageError("contexts are not built any more, since that was cancelled")
            except BaseException:
                self._close_reference()
                release(sites, CLOSE_S)
                raise
        built_ns = clock.now_ns() - start_ns
        nbytes = max(room_nbytes - self._device.memory().room_nbytes, 0)
        statistics = ShapeStatistics(named(shape), taken, is_captured, built_ns, nbytes, before_ns, after_ns)
        return Specialised(shape, tuple(sites), statistics)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Close the reference. Blocks; return False, with nothing done, if a thread still builds after that.

        Until then the model must stay open: what is being built runs batches.
        """
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._close_reference()
        finally:
            self._lock.release()
        return True

    def _close_reference(self) -> None:
        reference, self._reference = self._reference, None
        if reference is not None:
            reference.close()

    def _layout(self, shape: Hashable, rows: int, site: Site) -> Layout:
        """Return the layout of the slabs, with outputs whose sizes follow only from the inputs."""
        model, context = self._model, site.context(rows)
        layout = lay_out(model.inputs, model.outputs, {**context.told_sizes(), **symbols_of(shape)}, rows)
        if None in layout.outputs:
            raise NoGainError("the shape of an output depends on the data")
        return layout

    def _check_slabs(self, layout: Layout, limit_nbytes: int) -> None:
        taken_nbytes = layout.nbytes * self._contexts
        if not self._device.unified and taken_nbytes > limit_nbytes:
            raise DeviceMemoryError(
                f"slabs for {layout.rows_max} rows take {mib(taken_nbytes)} in {self._contexts} contexts, "
                f"and {mib(limit_nbytes)} are left to shapes with separate contexts"
            )

    def _fit(
        self,
        shape: Hashable,
        sites: Sequence[Site],
        reference: Reference,
        limit_nbytes: int,
        sizes: Sequence[int],
        *,
        one_by_one: bool,
        is_direct: bool,
    ) -> tuple[int, ...]:
        """Fill the sites with contexts of as many sizes as fit, and return these."""

        def begin(site: Site, _: Hashable, rows: int, lender: Site | None = None) -> Capture:
            # The first site, whose slab the reference uses as well, captures each size before any other does,
            # and the largest size before all others.
            return site.begin(rows, reference.expected(rows), is_direct=is_direct, lender=lender)

        first, *others = sites
        is_shared = self.in_turn and not is_direct
        capturing = Capturing(
            self._device,
            self._model,
            [first] if is_shared else sites,
            [shape],
            begin,
            one_by_one=one_by_one,
            limit_nbytes=limit_nbytes,
        )
        taken = capturing.fit(sizes)[0]
        if is_shared:
            turns = {rows: Turns() for rows in taken}
            first.share(turns)
            for site in others:
                for rows in reversed(taken):
                    capture = begin(site, shape, rows, first)
                    capture.warm_up()
                    site.keep_captured(shape, rows, capture, turns[rows])
        return taken

    def _fill(
        self,
        shape: Hashable,
        sites: Sequence[Site],
        sizes: Sequence[int],
        reference: Reference,
        fit: Callable[..., tuple[int, ...]],
    ) -> tuple[tuple[int, ...], bool]:
        """Fill the sites, by graphs if possible; return the sizes that fit, and whether they are graphs."""
        if self._captures:
            try:
                return fit(sizes, is_direct=False), True
            except (DeviceLostError, DeviceMemoryError):
                raise
            except Exception as error:
                if current().is_cancelled:
                    raise
                logger.debug("%r: %s is not captured: %s", self._model.name, named(shape), error)
                forget_all(sites)
        if not reference.changes_slowly(sizes[-1]):
            raise NoGainError(
                "it cannot be captured as a CUDA graph, and changes of the batch size take no time"
            )
        return fit(sizes, is_direct=True), False


def symbols_of(shape: Hashable) -> dict[str, int]:
    """Return the sizes of dynamic dimensions by their names, from the shape of a key."""
    return dict(cast("tuple[tuple[str, int], ...]", shape))


def named(shape: Hashable) -> str:
    """Return a shape in words."""
    return " ".join(f"{name}={size}" for name, size in symbols_of(shape).items())
