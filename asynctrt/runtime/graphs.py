"""Batches captured as CUDA graphs: each from a dedicated context, replayed on the stream of another.

Only the computing is captured. Copies and events outside a graph cost the GPU less than inside it
(``tests/benchmarks/gpu/saturation.py``), and one graph then serves batches with and without times, and rows
that are on the device already.

A dedicated context is needed because a TensorRT graph has undefined behaviour once the context that it was
captured from is given other shapes or memory ("How TensorRT works", CUDA graphs). ONNX Runtime reuses memory
that a graph refers to, and kernels that cuDNN made for it, in the next run of a session.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple, cast

from asynctrt._util import clock
from asynctrt.backends.base import (
    Binding,
    CapableModel,
    ExecutionContext,
    Model,
    TracedBinding,
    create_context_on,
)
from asynctrt.devices.arenas import Arena
from asynctrt.devices.base import Buffer, Device, Event, Graph, Stream
from asynctrt.errors import DeviceError, DeviceLostError
from asynctrt.runtime.staging import Slab
from asynctrt.runtime.trial import SAMPLES, Expected, NoTrial, Trial

TRIAL_S: Final = 60.0
"""The timeout of a batch that no caller waits for, in seconds."""


class CallByCall:
    """What is launched like a graph, where none can be captured: a binding enqueued call by call.

    Its context works on a separate stream, so the two streams wait for one another.
    """

    def __init__(self, device: Device, binding: Binding, rows: int, stream: Stream) -> None:
        self._binding, self._rows, self._stream = binding, rows, stream
        self._begun = device.create_event(is_timed=False)
        self._done = device.create_event(is_timed=False)

    def launch(self, *, stream: Stream) -> None:
        """Enqueue the batch, in order with the work on ``stream``."""
        stream.record(self._begun)
        self._stream.wait(self._begun)
        try:
            self._binding.enqueue(self._rows, profile=None, stream=self._stream, arena=None)
        finally:
            self._stream.record(self._done)
            stream.wait(self._done)

    def close(self) -> None:
        """Do nothing: its context holds all that it uses."""


class Turns:
    """The order in which graphs of one context run, on any streams, because they use the same memory."""

    __slots__ = ("_last", "_lock", "_stream")

    def __init__(self) -> None:
        # Threads launch graphs whose launch takes long.
        self._lock = threading.Lock()
        self._last: Event | None = None
        self._stream: Stream | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether the latest graph hangs, so that no other may run."""
        return self._stream is not None and self._stream.is_abandoned

    def launch(self, graph: "Graph | CallByCall", stream: Stream, done: Event) -> None:
        """Launch a graph after all that were launched before it, and record ``done`` behind it."""
        with self._lock:
            if self._last is not None and self._stream is not stream:
                stream.wait(self._last)
            graph.launch(stream=stream)
            stream.record(done)
            self._last, self._stream = done, stream


class CapturedBatch(NamedTuple):
    """A graph, and the context that it was captured from."""

    context: ExecutionContext | None
    """``None`` if its owner closes it."""
    graph: Graph | CallByCall
    launch_ns: int
    """The CPU time to launch it; 0 if not measured."""
    turns: Turns | None = None
    """The turns of graphs that share the context; ``None`` if it belongs to this one alone."""

    def launch(self, stream: Stream, done: Event) -> None:
        """Put the batch on a stream, and record ``done`` behind it."""
        if self.turns is not None:
            self.turns.launch(self.graph, stream, done)
            return
        self.graph.launch(stream=stream)
        stream.record(done)

    def close(self) -> None:
        """Release both. No launch may be in progress."""
        self.graph.close()
        if self.context is not None:
            self.context.close()


class CaptureCosts(NamedTuple):
    """The CPU time to put a batch on the stream, in ns."""

    direct_ns: int
    """Call by call."""
    graph_ns: int
    """As a graph; 0 if it was not launched because other engines use its arena."""


class Capture:
    """The capture of one batch size: call :meth:`warm_up`, then :meth:`finish` or :meth:`close`.

    Several captures may warm up at the same time on different streams, but must finish one after the other,
    as CUDA refuses some calls while any stream captures. Both steps block and need an idle stream.

    :param slab: the slab of the batches, laid out for ``shape``, the sizes of dynamic dimensions.
    :param end: an event of the stream to wait with.
    :param scratch: enqueue memory that nothing else uses meanwhile.
    :param expected: the expected outputs of the trial. Default: what its own batches compute.
    :param is_direct: whether :meth:`finish` leaves the batch to be enqueued call by call.
    :param context: the context to capture from, for batches of this size only, which its owner closes.
        Default: a new one.
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
        expected: Expected | None = None,
        is_direct: bool = False,
        context: ExecutionContext | None = None,
    ) -> None:
        self._device, self._is_direct = device, is_direct
        self._rows, self._profile = rows, profile
        self._stream, self._end = stream, end
        self._arena, self._scratch = arena, scratch
        self._is_traced = model.capabilities.is_traced
        self._owned: ExecutionContext | None = None
        if context is None and self._is_traced:
            context = self._owned = cast("CapableModel", model).create_context_for(
                device, stream, shape, rows
            )
        elif context is None:
            context = self._owned = create_context_on(model, device, stream)
        self._trial = Trial(slab, rows, stream, expected) if self._is_traced else NoTrial()
        self._direct_ns = 0
        try:
            self._binding = context.bind(slab.input_memory(), slab.output_memory())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abandon the capture."""
        if self._owned is not None:
            self._owned.close()

    def warm_up(self) -> None:
        """Run batches call by call: a model's first runs plan and allocate, which a graph must not contain.

        :raises AsynctrtError: if the model or the device refuses; the capture is closed then.
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

        :raises ExecutionError: if a graph of a traced model and the model compute different outputs.
        :raises AsynctrtError: if the model or the device refuses; the capture is closed then.
        """
        if self._is_direct:
            launched = CallByCall(self._device, self._binding, self._rows, self._stream)
            costs = CaptureCosts(self._direct_ns, self._direct_ns)
            return CapturedBatch(self._owned, launched, self._direct_ns), costs
        graph: Graph | None = None
        try:
            memory = None if self._arena is None else self._arena.memory
            graph = self._captured(memory)
            graph_ns = self._tried(graph) if memory is None or self._scratch is memory else 0
        except BaseException:
            if graph is not None:
                graph.close()
            self.close()
            raise
        return CapturedBatch(self._owned, graph, graph_ns), CaptureCosts(self._direct_ns, graph_ns)

    def _run(self, number: int) -> None:
        self._trial.put_in(number)
        start_ns = clock.now_ns()
        self._binding.enqueue(self._rows, profile=self._profile, stream=self._stream, arena=self._scratch)
        self._direct_ns = clock.now_ns() - start_ns
        self._trial.put_out()
        wait_for(self._stream, self._end, f"a batch of {self._rows} rows")
        self._trial.note(number)

    def _captured(self, arena: Buffer | None) -> Graph:
        """Return the graph of one enqueue."""
        self._stream.begin_capture()
        try:
            self._binding.enqueue(self._rows, profile=self._profile, stream=self._stream, arena=arena)
        except BaseException:
            with suppress(DeviceError):
                self._stream.end_capture().close()
            raise
        return self._stream.end_capture()

    def _tried(self, graph: Graph) -> int:
        """Launch a graph, and check its outputs if there are outputs to compare with.

        :returns: the CPU time of a launch, in ns.
        """
        costs_ns = []
        for number in range(self._trial.launches):
            self._trial.put_in(number)
            wait_for(self._stream, self._end, "a copy")
            start_ns = clock.now_ns()
            graph.launch(stream=self._stream)
            costs_ns.append(clock.now_ns() - start_ns)
            self._trial.put_out()
            wait_for(self._stream, self._end, f"a captured batch of {self._rows} rows")
            self._trial.check(number)
        return min(costs_ns)


def wait_for(stream: Stream, end: Event, what: str, timeout_s: float | None = None) -> None:
    """Block until the stream's work so far is done, and raise its error if it failed.

    :param timeout_s: Default: :data:`TRIAL_S`.
    """
    timeout_s = timeout_s or TRIAL_S
    stream.record(end)
    if not end.synchronize(timeout_s):
        raise DeviceLostError(f"{what} did not end within {timeout_s:g} s")
    if end.error is not None:
        raise end.error
