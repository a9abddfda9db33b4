"""Batches captured as CUDA graphs: each from a context of its own, replayed on the stream of another.

Only the computing is captured. Copies and events beside a graph cost the GPU less than the same in it
(``tests/benchmarks/gpu/saturation.py``); and so one graph does for batches with times and without, for rows
that lie on the device already, and for rows that callers wrote into slots.

A context of its own is captured because TensorRT leaves undefined what a graph does once the context that it
was captured from has been given other shapes or memory ("How TensorRT works", CUDA graphs).
"""

from contextlib import suppress
from typing import Final, NamedTuple

from asynctrt import clock
from asynctrt.backends.base import Binding, ExecutionContext, Model, create_context_on
from asynctrt.devices.arenas import Arena, GrowingBuffer
from asynctrt.devices.base import Buffer, Device, Event, Graph, Stream
from asynctrt.errors import DeviceError, DeviceLostError
from asynctrt.runtime.staging import Slab

CAPTURE_S: Final = 60.0
"""How long a batch may take while it is being captured."""


class CapturedBatch(NamedTuple):
    """A graph, and the context that belongs to it alone."""

    context: ExecutionContext
    graph: Graph

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


def capture(
    device: Device,
    model: Model,
    slab: Slab,
    rows: int,
    *,
    profile: int | None,
    stream: Stream,
    end: Event,
    arena: Arena | None,
    scratch: Buffer | None,
) -> tuple[CapturedBatch, CaptureCosts]:
    """Capture the computing of a batch of ``rows`` in a slab. Blocks, and the stream must be idle.

    :param end: an event of the stream to wait with.
    :param scratch: enqueue memory that nothing else uses meanwhile.
    :raises AsynctrtError: when the model or the device refuses; nothing is left behind.
    """
    context = create_context_on(model, device, stream)
    try:
        binding = context.bind(slab.input_memory(), slab.output_memory())
        # What a model does at its first batch of a size (plan, allocate) is no part of a graph.
        for _ in range(2):
            start_ns = clock.now_ns()
            binding.enqueue(rows, profile=profile, stream=stream, arena=scratch)
            direct_ns = clock.now_ns() - start_ns
            _wait(stream, end, f"a batch of {rows} rows")
        memory = None if arena is None else arena.memory
        if isinstance(memory, GrowingBuffer):
            memory.keep()
        graph = _captured(binding, rows, profile=profile, stream=stream, arena=memory)
    except BaseException:
        context.close()
        raise
    captured = CapturedBatch(context, graph)
    graph_ns = 0
    if arena is None or scratch is arena.memory:
        try:
            start_ns = clock.now_ns()
            graph.launch(stream=stream)
            graph_ns = clock.now_ns() - start_ns
            _wait(stream, end, f"a captured batch of {rows} rows")
        except BaseException:
            captured.close()
            raise
    return captured, CaptureCosts(direct_ns, graph_ns)


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


def _wait(stream: Stream, end: Event, what: str) -> None:
    """Block until the stream has come this far, and raise what went wrong on the way."""
    stream.record(end)
    if not end.synchronize(CAPTURE_S):
        raise DeviceLostError(f"{what} did not end within {CAPTURE_S} s")
    if end.error is not None:
        raise end.error
