"""ONNX models with a session of ONNX Runtime's for each stream: what is the same on every device.

::

    model = OnnxCudaModel("model.onnx", device=device)  # a StreamedOnnxModel
    context = model.create_context_on(device, stream)  # loads a session that works on that stream
    binding = context.bind(inputs, outputs)
    binding.enqueue(8, profile=None, stream=stream, arena=None)
    context.close()  # ends the session; the stream is closed after it

A session knows its stream, and must end before it: ONNX Runtime waits for the stream when it ends a session,
and ends the process if it is gone. So nobody has a session but a :class:`StreamSession`, which is kept alive
until it is closed, whatever the garbage collector finds; and what is raised here carries no frame that does.
"""

import ctypes
import math
import os
import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from asynctrt.backends.base import TensorMemory
from asynctrt.backends.onnx_axes import FIRST_AXIS, RowSettings
from asynctrt.backends.onnxruntime import OnnxModel, checked_shape, element_type, ort
from asynctrt.devices.base import Buffer, Device, Stream, aligned
from asynctrt.errors import ExecutionError, UsageError
from asynctrt.onnx_objects import OnnxObject, is_session
from asynctrt.onnx_options import NO_FALLBACK, OnnxOptions
from asynctrt.tensors import Array, Dims, TensorSpec, shape_of


class StreamedOnnxModel(OnnxModel):
    """An ONNX model that has a session for each stream. A subclass says how a session is made and run.

    :param path: as for :class:`OnnxModel`, but for a session: each stream needs one that works on it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | OnnxObject,
        options: OnnxOptions | Mapping[str, Any] | None = None,
        *,
        rows: RowSettings = FIRST_AXIS,
    ) -> None:
        refuse_session(path)
        super().__init__(path, options, rows=rows)
        self.batch_sizes = self.options.batch_sizes
        """What batches are padded to, as for :class:`~asynctrt.backends.base.PreparedModel`."""
        # That session was there to be asked for names and types.
        super().close()
        self.enqueue_may_block = self.options.launch != "loop"
        self.turn: AbstractContextManager[object] = (
            threading.Lock() if self.options.launch == "thread" else nullcontext()
        )
        """Held while a batch is put on a stream."""
        self._sessions: WeakSet[StreamSession] = WeakSet()
        # One after the other, so that each can tell what it took of the device's memory.
        self._loading = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        sessions = sum(session.is_open for session in self._sessions)
        return f"<{type(self).__name__} {self.name} sessions={sessions}>"

    def _session_options(self) -> ort.SessionOptions:
        """Return those of a session that is there to be asked for names and types, and runs nothing."""
        options = super()._session_options()
        options.enable_profiling = False
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry(NO_FALLBACK, "0")
        return options

    def _load(self, options: ort.SessionOptions) -> ort.InferenceSession:
        return self.source.load(options)

    @property
    def session(self) -> ort.InferenceSession:
        """There is none that could be handed out: each belongs to a stream.

        :raises UsageError: always.
        """
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
        """Create a context for batches of one size, as a ``TracedModel``.

        ONNX Runtime computes what depends on sizes alone when it loads the session, and no longer on the CPU
        in each run. It would copy that to the GPU from memory that it uses for something else in the same
        run, and a graph of that copies what was there in the end.
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
        """Note that no session is to be loaded any more; contexts end theirs when they are closed."""
        self._closed = True

    def start_session(self, device: Device, stream: Stream, sizes: Mapping[str, int]) -> "StreamSession":
        """Load a session that works on ``stream``, for one context, which closes it.

        :param sizes: those of dimensions that do not vary in this session, by their names in the file.
        :raises UsageError: if the model is closed.
        """
        if self._closed:
            raise UsageError(f"{self!r} is closed. Load it again: {type(self).__name__}({self.source})")
        with self._loading:
            session = self.load_session(device, stream, sizes)
            self._sessions.add(session)
        return session

    @abstractmethod
    def check_device(self, device: Device) -> None:
        """Check that the model runs on this device.

        :raises DeviceUnavailableError: if not.
        """

    @abstractmethod
    def load_session(self, device: Device, stream: Stream, sizes: Mapping[str, int]) -> "StreamSession":
        """Load a session that works on ``stream``, as :meth:`start_session` says."""


def refuse_session(given: object) -> None:
    """Refuse a session that was made before its stream.

    :raises UsageError: for any session.
    """
    if is_session(given):
        raise UsageError(
            "on a GPU each context needs a session that works on its own stream, and a session of ONNX "
            "Runtime's cannot change its stream. Open the path or the bytes of the model, and give what the "
            "session was made with as the option onnx; or open the session with device='host'"
        )


class Batch(NamedTuple):
    """What a run is given: its rows, and each input's name, dtype, dimensions of a row and axis of rows."""

    inputs: tuple[tuple[str, np.dtype[Any], Dims, int | None], ...]
    rows: int

    def zeros(self, rows: int) -> dict[str, Array]:
        """Return zeros for each input of a batch of ``rows`` like this one."""
        return {name: np.zeros(shape_of(dims, axis, rows), dtype) for name, dtype, dims, axis in self.inputs}


class StreamSession:
    """A session on its stream. It is ended by :meth:`close`, and by nothing else.

    :param memory: what ONNX Runtime calls the memory that tensors are bound in: ``cuda``, ``cpu``.
    :param ordinal: the number of the device among those.
    """

    def __init__(
        self, session: ort.InferenceSession, stream: Stream, *, memory: str, ordinal: int, name: str
    ) -> None:
        self._session: ort.InferenceSession | None = session
        self.handle = stream.handle
        self.memory = memory
        self.read_on_cpu = frozenset[str]()
        """The inputs that ONNX Runtime copies to the CPU, when they are bound and at no other time."""
        self.left_on_cpu = frozenset[str]()
        """The outputs that ONNX Runtime has on the CPU, and may put elsewhere than where they are bound."""
        self.ordinal = ordinal
        self.name = name
        # The collector may come upon an engine that was never closed, whose stream it may have freed before.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))

    def __repr__(self) -> str:
        return f"<StreamSession {self.name} {'closed' if self._session is None else 'open'}>"

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return self._session is not None

    def settle(self, binding: Any = None) -> bool:
        """Have done what runs have left to do, and say whether it is. Blocks.

        :param binding: one whose memory is still there, so that its batch may be run again. Default: none is.
        """
        return True

    def io_binding(self) -> Any:
        """Return a new I/O binding. Whoever has one gives it up before the session is closed."""
        assert self._session is not None, "a closed session is not bound"
        return self._session.io_binding()

    def put(self, binding: Any, stream: Stream, batch: Batch) -> None:
        """Put a run on the stream.

        :raises AsynctrtError: as :meth:`error_of` tells.
        """
        self.run(binding, None)

    def run(self, binding: Any, options: Any) -> None:
        """Run, and raise what :meth:`error_of` makes of an error, without the frames of ONNX Runtime's."""
        failed: BaseException | None = None
        try:
            assert self._session is not None, "a closed session is not run"
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            failed = self.error_of(error)
        if failed is not None:
            # Not in the handler: ONNX Runtime's error would be its context, and has frames with the session.
            raise failed

    def error_of(self, error: Exception) -> BaseException:
        """Return the error for the callers of a batch for one of ONNX Runtime's."""
        return ExecutionError(f"ONNX Runtime failed to run {self.name!r}: {error}")

    @property
    def may_end(self) -> bool:
        """Whether ONNX Runtime can end the session without harm. It is left alive for good otherwise."""
        return True

    def close(self) -> None:
        """End the session. Idempotent."""
        session, self._session = self._session, None
        if session is not None and self.may_end:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(session))


class StreamContext:
    """A context with the sessions of its stream, which it loads at the first batch unless it has done so.

    There is one, or one for each batch size that is kept apart.

    :param sizes: those of dimensions that do not vary in this context, by their names in the file.
    """

    def __init__(
        self, model: StreamedOnnxModel, device: Device, sizes: Mapping[str, int] | None = None
    ) -> None:
        self._model = model
        self.device = device
        self._sizes = sizes or {}
        self._sessions: dict[int, StreamSession] = {}
        self._apart: frozenset[int] = frozenset()
        # Those that are still in use: a pool drops what it has not used for long.
        self._bindings: WeakSet[StreamBinding] = WeakSet()
        self._closed = False

    def __repr__(self) -> str:
        return f"<StreamContext {self._model.name} {'closed' if self._closed else 'open'}>"

    def load(self, stream: Stream, rows: int = 0) -> StreamSession:
        """Return the session for batches of ``rows``, which is one of ``stream``."""
        assert not self._closed, "a closed context runs nothing"
        number = rows if rows in self._apart else 0
        session = self._sessions.get(number)
        if session is None:
            session = self._sessions[number] = self._model.start_session(self.device, stream, self._sizes)
        assert session.handle == stream.handle, "a context runs on one stream"
        return session

    def keep_apart(self, sizes: Sequence[int]) -> None:
        """Let batches of each of these sizes have a session of their own, while nothing runs.

        Those of other sizes are ended, but for the one that was there first.
        """
        self._apart = frozenset(sizes)
        self._leave({0, *sizes})

    def _leave(self, kept: Collection[int]) -> None:
        for binding in tuple(self._bindings):
            binding.forget()
        for number in [number for number in self._sessions if number not in kept]:
            self._sessions.pop(number).close()

    @property
    def turn(self) -> AbstractContextManager[object]:
        """What is held while a batch is put on the stream."""
        return self._model.turn

    def bind(
        self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]
    ) -> "StreamBinding":
        assert not self._closed, "a closed context cannot be bound"
        binding = StreamBinding(self, inputs, tuple(zip(self._model.outputs, outputs, strict=True)))
        self._bindings.add(binding)
        return binding

    def close(self) -> None:
        """Give up what is bound, and end the sessions. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._leave(())


class StreamBinding:
    """The I/O bindings of a context to one set of memory: one for each number of rows."""

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
        self._bound: dict[int, tuple[StreamSession, Any]] = {}
        self._unbound = {
            index: UnboundOutput(spec, context.device)
            for index, (spec, memory) in enumerate(outputs)
            if memory is None
        }

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        failed: Exception | None = None
        try:
            with self._context.turn:
                self._enqueue(rows, stream)
        except Exception as error:
            # Callers may keep it longer than the session lives, and frames below have the session.
            failed = error.with_traceback(None)
        if failed is not None:
            raise failed

    def _enqueue(self, rows: int, stream: Stream) -> None:
        session = self._context.load(stream, rows)
        if stream.is_capturing:
            _check_can_be_captured(session)
        if session.read_on_cpu:
            self._wait_for_rows(stream)
        known, binding = self._bound.get(rows, (None, None))
        if known is not session:
            binding = self._bind(session, rows)
            self._bound[rows] = session, binding
        else:
            if session.read_on_cpu:
                self._bind_inputs(session, binding, rows, session.read_on_cpu)
            if self._unbound:
                # Otherwise what the last batch of that size left would be handed out again.
                self._bind_outputs(session, binding, rows)
        session.put(binding, stream, Batch(self._kinds, rows))
        self._bring(binding, rows, stream)
        for index, output in self._unbound.items():
            output.collect(binding, index, rows, stream)

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        return {output.name: output.take() for output in self._unbound.values()}

    def settle(self) -> None:
        """Have done what earlier batches have left to do, as a ``TracedBinding``. Blocks.

        :raises ExecutionError: if it is not done soon.
        """
        for session, binding in self._bound.values():
            if not session.settle(binding):
                raise ExecutionError(f"{session!r} does not come to rest")

    def forget(self) -> None:
        """Give up all that is bound."""
        self._bound.clear()
        for output in self._unbound.values():
            output.close()

    def _wait_for_rows(self, stream: Stream) -> None:
        """Wait until the rows are on the device: ONNX Runtime copies some from there when they are bound."""
        event = self._context.device.create_event(is_timed=False)
        stream.record(event)
        event.synchronize()
        if event.error is not None:
            raise event.error

    def _bring(self, binding: Any, rows: int, stream: Stream) -> None:
        """Copy each output that ONNX Runtime put elsewhere to the memory that it is bound to.

        It does so with what it computes on the CPU, and with an output that is also an input.

        :raises ExecutionError: for an output of another shape than it is bound with.
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
    """Check that ONNX Runtime makes no copies beside a run: they would be made now, and never again.

    :raises ExecutionError: if it does.
    """
    if session.read_on_cpu:
        names = ", ".join(sorted(session.read_on_cpu))
        raise ExecutionError(f"{session.name!r} has inputs that operators on the CPU read: {names}")
    if session.left_on_cpu:
        names = ", ".join(sorted(session.left_on_cpu))
        raise ExecutionError(f"{session.name!r} has outputs that ONNX Runtime has on the CPU: {names}")


class UnboundOutput:
    """An output of ONNX Runtime's own memory, whose shape depends on the data: copied to the host by us."""

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
        """Put the copy to the host on ``stream``, behind the batch that was just put there.

        :raises ExecutionError: for a shape that is not of ``rows`` rows as those of the spec.
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
        """Return the output of the batch that is done. Each batch's can be taken once.

        :raises ExecutionError: if there is none.
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
            return  # A request that runs alone gets whatever there is.
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
