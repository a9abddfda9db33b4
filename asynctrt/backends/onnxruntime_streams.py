"""ONNX models with an ONNX Runtime session per stream: the part that is the same on every device.

A session holds its stream and must end before it: ONNX Runtime waits for the stream when a session ends, and
crashes the process if the stream is gone. So only :class:`StreamSession` refers to a session, and keeps it
alive until it is closed, whatever the garbage collector finds. Exceptions raised here carry no frame that
refers to a session.
"""

import ctypes
import math
import os
import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from asynctrt.backends.base import TensorMemory
from asynctrt.backends.onnx_objects import OnnxObject, is_session
from asynctrt.backends.onnx_options import NO_FALLBACK, OnnxOptions
from asynctrt.backends.onnxruntime import OnnxModel, checked_shape, element_type, ort
from asynctrt.devices.base import Buffer, Device, Stream, aligned
from asynctrt.errors import ExecutionError, UsageError
from asynctrt.tensors import Array, Dims, TensorSpec, shape_of


class StreamedOnnxModel(OnnxModel):
    """An ONNX model with a session per stream. A subclass defines how to create and run a session."""

    capabilities = replace(OnnxModel.capabilities, is_per_stream=True, is_traced=True, enqueue_may_block=True)

    def __init__(
        self,
        path: str | os.PathLike[str] | OnnxObject,
        options: OnnxOptions | Mapping[str, Any] | None = None,
    ) -> None:
        refuse_session(path)
        super().__init__(path, options)
        # That session was only needed to read names and types.
        super().close()
        self._sessions: WeakSet[StreamSession] = WeakSet()
        # Sessions load one at a time, so that each can measure the device memory that it took.
        self._loading = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        sessions = sum(session.is_open for session in self._sessions)
        return f"<{type(self).__name__} {self.name} sessions={sessions}>"

    def _session_options(self) -> ort.SessionOptions:
        """Return the options of a session that is only asked for names and types, and runs nothing."""
        options = super()._session_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry(NO_FALLBACK, "0")
        return options

    def _load(self, options: ort.SessionOptions) -> ort.InferenceSession:
        return self.source.load(options)

    @property
    def session(self) -> ort.InferenceSession:
        """Raise a ``UsageError``: each session belongs to a stream."""
        raise UsageError(f"{self!r} has a session for each stream, and lends none of them")

    def create_context(self, device: Device) -> "StreamContext":
        self.check_device(device)
        return StreamContext(self, device)

    def create_context_on(self, device: Device, stream: Stream) -> "StreamContext":
        """Create a context, and load its session."""
        context = self.create_context(device)
        context.load(stream)
        return context

    def create_context_for(
        self, device: Device, stream: Stream, shape: Mapping[str, int], rows: int
    ) -> "StreamContext":
        """Create a context for batches of one size, as for a ``CapableModel``.

        ONNX Runtime then computes values that depend only on sizes when it loads the session, instead of on
        the CPU in each run. In a run it would copy them to the GPU from memory that it reuses later in the
        same run, so a graph would copy the final contents of that memory.
        """
        self.check_device(device)
        shapes = {arg.name: arg.shape for arg in self._declared[0]}
        firsts = [shapes[spec.name][spec.axis] for spec in self.inputs if spec.axis is not None]
        rows_names = [dim for dim in firsts if isinstance(dim, str)]
        names = {dim for dims in shapes.values() for dim in dims if isinstance(dim, str)}
        sizes = {name: size for name, size in shape.items() if name in names}
        context = StreamContext(self, device, dict.fromkeys(rows_names, rows) | sizes)
        context.load(stream)
        return context

    def close(self) -> None:
        """Stop loading sessions. Contexts end theirs when they are closed."""
        self._closed = True

    def start_session(self, device: Device, stream: Stream, sizes: Mapping[str, int]) -> "StreamSession":
        """Load a session on ``stream`` for one context, which must close it. ``sizes`` fixes dimensions by
        name."""
        if self._closed:
            raise UsageError(f"{self!r} is closed. Load it again: {type(self).__name__}({self.source})")
        with self._loading:
            session = self.load_session(device, stream, sizes)
            self._sessions.add(session)
        return session

    @abstractmethod
    def check_device(self, device: Device) -> None:
        """Raise a ``DeviceUnavailableError`` if the model does not run on this device."""

    @abstractmethod
    def load_session(self, device: Device, stream: Stream, sizes: Mapping[str, int]) -> "StreamSession":
        """Load a session on ``stream``, as for :meth:`start_session`."""


def refuse_session(given: object) -> None:
    """Refuse a session that was created before its stream."""
    if is_session(given):
        raise UsageError(
            "on a GPU each context needs a session that works on its own stream, and a session of ONNX "
            "Runtime's cannot change its stream. Open the path or the bytes of the model, and give what the "
            "session was made with as the option onnx; or open the session with device='host'"
        )


class Batch(NamedTuple):
    """The inputs of a run: its rows, and each input's name, dtype, dimensions of a row and axis of rows."""

    inputs: tuple[tuple[str, np.dtype[Any], Dims, int | None], ...]
    rows: int

    def zeros(self, rows: int) -> dict[str, Array]:
        """Return zeros for each input of a batch of ``rows`` like this one."""
        return {name: np.zeros(shape_of(dims, axis, rows), dtype) for name, dtype, dims, axis in self.inputs}


class StreamSession:
    """A session on its stream, which only :meth:`close` ends. Its tensors are in ``memory``: ``cuda``,
    ``cpu``."""

    def __init__(
        self, session: ort.InferenceSession, stream: Stream, *, memory: str, ordinal: int, name: str
    ) -> None:
        self._session: ort.InferenceSession | None = session
        self.handle = stream.handle
        self.memory = memory
        self.read_on_cpu = frozenset[str]()
        """The inputs that ONNX Runtime copies to the CPU, which it does only when they are bound."""
        self.left_on_cpu = frozenset[str]()
        """The outputs that ONNX Runtime keeps on the CPU, possibly not in their bound memory."""
        self.ordinal = ordinal
        self.name = name
        # Only `close` may end it: the garbage collector may free the stream of an engine that was never
        # closed before it frees the session.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))

    def __repr__(self) -> str:
        return f"<StreamSession {self.name} {'closed' if self._session is None else 'open'}>"

    @property
    def is_open(self) -> bool:
        """Whether it is open."""
        return self._session is not None

    def settle(self, binding: Any = None) -> bool:
        """Finish what runs have left to do, by running ``binding`` again if given; return whether that
        succeeded."""
        return True

    @property
    def output_shapes(self) -> tuple[tuple[int | str | None, ...], ...]:
        """The shapes of the outputs, as far as they follow from the sizes that are fixed in the session."""
        assert self._session is not None, "a closed session tells nothing"
        return tuple(tuple(output.shape or ()) for output in self._session.get_outputs())

    def io_binding(self) -> Any:
        """Return a new I/O binding, which must be dropped before the session is closed."""
        assert self._session is not None, "a closed session is not bound"
        return self._session.io_binding()

    def put(self, binding: Any, stream: Stream, batch: Batch) -> None:
        """Enqueue a run."""
        self.run(binding, None)

    def run(self, binding: Any, options: Any) -> None:
        """Run, and raise errors as converted by :meth:`error_of`, without frames in ONNX Runtime."""
        failed: BaseException | None = None
        try:
            assert self._session is not None, "a closed session is not run"
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            failed = self.error_of(error)
        if failed is not None:
            # Not in the handler: ONNX Runtime's error would become its context, and has frames with the
            # session.
            raise failed

    def error_of(self, error: Exception) -> BaseException:
        """Return the error for the callers of a batch when ONNX Runtime raised this one."""
        return ExecutionError(f"ONNX Runtime failed to run {self.name!r}: {error}")

    @property
    def may_end(self) -> bool:
        """Whether ONNX Runtime can safely end the session. Otherwise the session is left alive for good."""
        return True

    def close(self) -> None:
        """End the session. Idempotent."""
        session, self._session = self._session, None
        if session is not None and self.may_end:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(session))


class StreamContext:
    """A context on one stream. Its session is loaded at the first batch at the latest; ``sizes`` are fixed in
    it."""

    def __init__(
        self, model: StreamedOnnxModel, device: Device, sizes: Mapping[str, int] | None = None
    ) -> None:
        self._model = model
        self.device = device
        self._sizes = sizes or {}
        self._session: StreamSession | None = None
        # The bindings still in use: a pool drops bindings that it has not used for long.
        self._bindings: WeakSet[StreamBinding] = WeakSet()
        self._closed = False

    def __repr__(self) -> str:
        return f"<StreamContext {self._model.name} {'closed' if self._closed else 'open'}>"

    def load(self, stream: Stream) -> StreamSession:
        """Return the session on ``stream``, and load it if needed."""
        assert not self._closed, "a closed context runs nothing"
        if self._session is None:
            self._session = self._model.start_session(self.device, stream, self._sizes)
        assert self._session.handle == stream.handle, "a context runs on one stream"
        return self._session

    def told_sizes(self) -> dict[str, int]:
        """Return the sizes of the outputs' dimensions that follow from the sizes of this context."""
        assert self._session is not None, "it is created with its session"
        found: dict[str, int] = {}
        for spec, shape in zip(self._model.outputs, self._session.output_shapes, strict=True):
            own = [size for at, size in enumerate(shape) if at != spec.axis]
            pairs = zip(spec.dims, own, strict=False)
            found |= {dim: size for dim, size in pairs if isinstance(dim, str) and isinstance(size, int)}
        return found

    def settle(self, binding: Any = None) -> None:
        """Finish what runs have left to do, and free their memory. Blocks."""
        if self._session is not None and not self._session.settle(binding) and binding is not None:
            raise ExecutionError(f"{self._session!r} does not come to rest")

    def bind(
        self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]
    ) -> "StreamBinding":
        assert not self._closed, "a closed context cannot be bound"
        binding = StreamBinding(self, inputs, tuple(zip(self._model.outputs, outputs, strict=True)))
        self._bindings.add(binding)
        return binding

    def close(self) -> None:
        """Drop the bindings, and end the session. Idempotent."""
        self._closed = True
        for binding in tuple(self._bindings):
            binding.forget()
        session, self._session = self._session, None
        if session is not None:
            session.close()


class StreamBinding:
    """The I/O bindings of a context to one set of memory, one for each number of rows."""

    def __init__(
        self,
        context: StreamContext,
        inputs: tuple[TensorMemory, ...],
        outputs: tuple[tuple[TensorSpec, TensorMemory | None], ...],
    ) -> None:
        self._context = context
        self._inputs = inputs
        self._outputs = outputs
        self._kinds = tuple((memory.name, memory.dtype, memory.dims, memory.axis) for memory in inputs)
        self._bound: dict[int, Any] = {}
        self._unbound = {
            index: UnboundOutput(spec, context.device)
            for index, (spec, memory) in enumerate(outputs)
            if memory is None
        }

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        failed: Exception | None = None
        try:
            self._enqueue(rows, stream)
        except Exception as error:
            # Callers may keep the error after the session is closed, but frames below refer to the session.
            failed = error.with_traceback(None)
        if failed is not None:
            raise failed

    def _enqueue(self, rows: int, stream: Stream) -> None:
        session = self._context.load(stream)
        if stream.is_capturing:
            _check_can_be_captured(session)
        if session.read_on_cpu:
            self._wait_for_rows(stream)
        binding = self._bound.get(rows)
        if binding is None:
            binding = self._bound[rows] = self._bind(session, rows)
        else:
            if session.read_on_cpu:
                self._bind_inputs(session, binding, rows, session.read_on_cpu)
            if self._unbound:
                # Otherwise the outputs of the previous batch of that size would be returned again.
                self._bind_outputs(session, binding, rows)
        session.put(binding, stream, Batch(self._kinds, rows))
        self._bring(binding, rows, stream)
        for index, output in self._unbound.items():
            output.collect(binding, index, rows, stream)

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        return {output.name: output.take() for output in self._unbound.values()}

    def settle(self) -> None:
        """Finish what earlier batches have left to do. Blocks."""
        for binding in self._bound.values():
            self._context.settle(binding)

    def forget(self) -> None:
        """Drop all bindings."""
        self._bound.clear()
        for output in self._unbound.values():
            output.close()

    def _wait_for_rows(self, stream: Stream) -> None:
        """Wait until the rows are on the device: ONNX Runtime copies some of them when they are bound."""
        event = self._context.device.create_event(is_timed=False)
        stream.record(event)
        event.synchronize()
        if event.error is not None:
            raise event.error

    def _bring(self, binding: Any, rows: int, stream: Stream) -> None:
        """Copy each output that ONNX Runtime put elsewhere to its bound memory.

        ONNX Runtime does that with outputs computed on the CPU, and with an output that is also an input.
        """
        for value, (_, memory) in zip(binding.get_outputs(), self._outputs, strict=True):
            if memory is not None and value.data_ptr() != memory.address:
                shape = checked_shape(memory, value.shape(), rows)
                nbytes = math.prod(shape) * memory.dtype.itemsize
                if nbytes:
                    stream.copy_bytes(memory.address, value.data_ptr(), nbytes)

    def _bind(self, session: StreamSession, rows: int) -> Any:
        binding = session.io_binding()
        self._bind_inputs(session, binding, rows, [memory.name for memory in self._inputs])
        self._bind_outputs(session, binding, rows)
        return binding

    def _bind_inputs(self, session: StreamSession, binding: Any, rows: int, names: Collection[str]) -> None:
        where = session.memory, session.ordinal
        for memory in self._inputs:
            if memory.name in names:
                kind = element_type(memory.dtype), memory.shape(rows)
                binding.bind_input(memory.name, *where, *kind, memory.address)

    def _bind_outputs(self, session: StreamSession, binding: Any, rows: int) -> None:
        binding.clear_binding_outputs()
        where = session.memory, session.ordinal
        for spec, memory in self._outputs:
            if memory is None:
                binding.bind_output(spec.name, *where)
            else:
                kind = element_type(memory.dtype), memory.shape(rows)
                binding.bind_output(spec.name, *where, *kind, memory.address)


def _check_can_be_captured(session: StreamSession) -> None:
    """Check that ONNX Runtime makes no copies outside a run: a graph would not repeat them."""
    if session.read_on_cpu:
        names = ", ".join(sorted(session.read_on_cpu))
        raise ExecutionError(f"{session.name!r} has inputs that operators on the CPU read: {names}")
    if session.left_on_cpu:
        names = ", ".join(sorted(session.left_on_cpu))
        raise ExecutionError(f"{session.name!r} has outputs that ONNX Runtime has on the CPU: {names}")


class UnboundOutput:
    """An output in ONNX Runtime's memory, with a shape that depends on the data. We copy it to the host."""

    def __init__(self, spec: TensorSpec, device: Device) -> None:
        self._spec = spec
        self._device = device
        self._staging: Buffer | None = None
        self._shape: Dims | None = None

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self._spec.name

    def collect(self, binding: Any, index: int, rows: int, stream: Stream) -> None:
        """Enqueue the copy to the host on ``stream``, after the batch that was just enqueued.

        :raises ExecutionError: if the shape is not that of ``rows`` rows of the spec.
        """
        self._shape = None
        value = binding.get_outputs()[index]
        shape = tuple(value.shape())
        self._check(shape, rows)
        nbytes = math.prod(shape) * self._spec.dtype.itemsize
        if nbytes:
            if self._staging is None or self._staging.nbytes < nbytes:
                held = 0 if self._staging is None else self._staging.nbytes
                self._free()
                self._staging = self._device.allocate_staging(aligned(max(nbytes, 2 * held)))
            stream.copy_bytes(self._staging.address, value.data_ptr(), nbytes)
        self._shape = shape

    def take(self) -> Array:
        """Return the output of the finished batch. It can be taken once per batch.

        :raises ExecutionError: if there is no output.
        """
        shape, self._shape = self._shape, None
        if shape is None:
            raise ExecutionError(f"output {self.name!r} does not exist: no batch was enqueued for it")
        if not math.prod(shape):
            return np.empty(shape, self._spec.dtype)
        assert self._staging is not None, "collect() has put the copy on the stream"
        return self._staging.array(self._spec.dtype, shape, 0).copy()

    def close(self) -> None:
        """Free its memory. Idempotent."""
        self._free()

    def _check(self, shape: Dims, rows: int) -> None:
        if self._spec.axis is None:
            return  # Any shape is valid for a request that runs alone.
        expected = self._spec.shape(rows)
        if len(shape) != len(expected) or any(
            not isinstance(dim, str) and dim != found for dim, found in zip(expected, shape, strict=True)
        ):
            raise ExecutionError(
                f"ONNX Runtime gave shape {tuple(shape)} for output {self._spec}, in a batch of {rows} rows"
            )

    def _free(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None
