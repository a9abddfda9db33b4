"""Batches captured as CUDA graphs: each from a context of its own, replayed on the stream of another.

Only the computing is captured. Copies and events beside a graph cost the GPU less than the same in it
(``tests/benchmarks/gpu/saturation.py``); and so one graph does for batches with times and without, for rows
that lie on the device already, and for rows that callers wrote into slots.

A context of its own is captured because TensorRT leaves undefined what a graph does once the context that it
was captured from has been given other shapes or memory ("How TensorRT works", CUDA graphs). ONNX Runtime
gives memory that a graph refers to, and kernels that cuDNN made for it, to the next run of a session.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple, cast

from asynctrt._util import clock
from asynctrt.backends.base import (
    Binding,
    ExecutionContext,
    Model,
    TracedBinding,
    TracedModel,
    create_context_on,
)
from asynctrt.devices.arenas import Arena, GrowingBuffer
from asynctrt.devices.base import Buffer, Device, Event, Graph, Stream
from asynctrt.errors import DeviceError, DeviceLostError
from asynctrt.runtime.staging import Slab
from asynctrt.runtime.trial import SAMPLES, NoTrial, Trial

CAPTURE_S: Final = 60.0
"""How long a batch may take while it is being captured."""


class CapturedBatch(NamedTuple):
    """A graph, and the context that belongs to it alone."""

    context: ExecutionContext
    graph: Graph
    launch_ns: int
    """What launching it costs the CPU; 0 if that was not measured."""

    def close(self) -> None:
        """Give both back, once no launch is under way."""
        self.graph.close()
        self.context.close()


class CaptureCosts(NamedTuple):
    """What the CPU needed to put a batch on the stream, in ns."""

    direct_ns: int
    """Call by call."""
    graph_ns: int
    """As a graph; 0 if it was not launched, in an arena that others use."""


class Capture:
    """A batch size on its way to a graph: :meth:`warm_up`, then :meth:`finish` or :meth:`close`.

    Several may be warmed up at the same time on different streams; they are finished one after the other, as
    CUDA refuses some calls while any stream captures. Both block, and the stream must be idle.

    :param slab: what batches lie in, and ``shape`` the sizes of dimensions that vary, as it is laid out.
    :param end: an event of the stream to wait with.
    :param scratch: enqueue memory that nothing else uses meanwhile.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        slab: Slab,
        shape: Mapping[str, int],
        rows: int,
        *,
        profile: int | None,
        stream: Stream,
        end: Event,
        arena: Arena | None,
        scratch: Buffer | None,
    ) -> None:
        self._rows, self._profile = rows, profile
        self._stream, self._end = stream, end
        self._arena, self._scratch = arena, scratch
        self._is_traced = isinstance(model, TracedModel) and model.is_traced
        if self._is_traced:
            self._context = cast("TracedModel", model).create_context_for(device, stream, shape, rows)
        else:
            self._context = create_context_on(model, device, stream)
        self._trial = Trial(slab, rows, stream) if self._is_traced else NoTrial()
        self._direct_ns = 0
        try:
            self._binding = self._context.bind(slab.input_memory(), slab.output_memory())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up what was begun."""
        self._context.close()

    def warm_up(self) -> None:
        """Run batches call by call: what a model does at its first (plan, allocate) is no part of a graph.

        :raises AsynctrtError: when the model or the device refuses; it is closed then.
        """
        try:
            for number in range(SAMPLES):
                self._run(number)
            if self._is_traced:
                cast("TracedBinding", self._binding).settle()
        except BaseException:
            self.close()
            raise

    def finish(self) -> tuple[CapturedBatch, CaptureCosts]:
        """Capture the computing of a batch.

        :raises ExecutionError: if a graph of a :class:`TracedModel` computes something else than it does.
        :raises AsynctrtError: when the model or the device refuses; it is closed then.
        """
        graph: Graph | None = None
        try:
            memory = None if self._arena is None else self._arena.memory
            if isinstance(memory, GrowingBuffer):
                memory.keep()
            graph = _captured(
                self._binding, self._rows, profile=self._profile, stream=self._stream, arena=memory
            )
            graph_ns = 0
            if self._arena is None or self._scratch is self._arena.memory:
                graph_ns = _tried(graph, self._trial, self._rows, self._stream, self._end)
        except BaseException:
            if graph is not None:
                graph.close()
            self.close()
            raise
        return CapturedBatch(self._context, graph, graph_ns), CaptureCosts(self._direct_ns, graph_ns)

    def _run(self, number: int) -> None:
        self._trial.put_in(number)
        start_ns = clock.now_ns()
        self._binding.enqueue(self._rows, profile=self._profile, stream=self._stream, arena=self._scratch)
        self._direct_ns = clock.now_ns() - start_ns
        self._trial.put_out()
        _wait(self._stream, self._end, f"a batch of {self._rows} rows")
        self._trial.note(number)


def _captured(
    binding: Binding, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None
) -> Graph:
    """Return the graph of one enqueue."""
    stream.begin_capture()
    try:
        binding.enqueue(rows, profile=profile, stream=stream, arena=arena)
    except BaseException:
        with suppress(DeviceError):
            stream.end_capture().close()
        raise
    return stream.end_capture()


def _tried(graph: Graph, trial: NoTrial, rows: int, stream: Stream, end: Event) -> int:
    """Launch a graph, and check what it computes if there is something to compare it with.

    :returns: what a launch costs the CPU, in ns.
    """
    costs_ns = []
    for number in range(trial.launches):
        trial.put_in(number)
        _wait(stream, end, "a copy")
        start_ns = clock.now_ns()
        graph.launch(stream=stream)
        costs_ns.append(clock.now_ns() - start_ns)
        trial.put_out()
        _wait(stream, end, f"a captured batch of {rows} rows")
        trial.check(number)
    return min(costs_ns)


def _wait(stream: Stream, end: Event, what: str) -> None:
    """Block until the stream has come this far, and raise what went wrong on the way."""
    stream.record(end)
    if not end.synchronize(CAPTURE_S):
        raise DeviceLostError(f"{what} did not end within {CAPTURE_S} s")
    if end.error is not None:
        raise end.error
