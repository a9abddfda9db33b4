"""ONNX models on the host device through ONNX Runtime.

One session holds the weights. Contexts share it, because ``InferenceSession.run`` may be called from several
threads at once. Rows of numbers are bound to the slabs themselves, so that nothing is copied. Strings, and
requests that run alone, go through ``run``, which returns their outputs.
"""

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

import numpy as np

from asynctrt.backends.base import Binding, Capabilities, ExecutionContext, ModelBase, TensorMemory
from asynctrt.backends.onnx_axes import ML_DTYPES, Axes, declared, read_axes, read_whole_axes
from asynctrt.backends.onnx_objects import OnnxObject
from asynctrt.backends.onnx_options import CPU, OnnxOptions
from asynctrt.backends.onnxruntime_session import (
    LOG_FATAL_ONLY,
    Source,
    check_host_providers,
    ort,
    session_options,
    threads_of,
)
from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.devices.host import HostStream
from asynctrt.errors import AsynctrtError, DeviceUnavailableError, ExecutionError, UsageError
from asynctrt.tensors import Array

__all__ = ["LOG_FATAL_ONLY", "OnnxModel", "element_type", "ort"]

ML_NUMBERS: Final = dict(ML_DTYPES.values())


class OnnxModel(ModelBase):
    """A loaded ONNX model. Loading blocks: ``asynctrt.open(path)`` does it in a thread.

    Rows are on the axis that ``rows`` gives; or on the axis with a batch name, if every tensor has one; or on
    the first axis. If the model's shapes do not allow rows to share a batch, each request runs alone, and
    the capability ``alone`` gives the reason.

    :param path: the ``.onnx`` file; or its content as bytes; or an
        existing ``onnxruntime.InferenceSession``, which then runs batches from several threads at once and
        stays open when the model is closed.
    :param options: :class:`~asynctrt.backends.onnx_options.OnnxOptions`, or a mapping of option names to
        values.
    :raises OptionsError: for an argument of the wrong type, or an invalid option.
    :raises ModelNotFoundError: if the file does not exist.
    :raises ModelError: if it is not an ONNX model, or has a tensor that NumPy cannot hold.
    :raises MissingExtraError: if a provider or a package that the options name is not installed.
    :raises DeviceUnavailableError: if a provider cannot be loaded.
    """

    capabilities = Capabilities(is_pure=True, dims_are_hints=True, has_whole=True)

    def __init__(
        self,
        path: str | os.PathLike[str] | OnnxObject,
        options: OnnxOptions | Mapping[str, Any] | None = None,
    ) -> None:
        self.options = OnnxOptions.of(options)
        self.source = Source(path)
        self.path = self.source.path
        """The file, or ``None`` if the model was given as an object."""
        self.platform = "onnxruntime_onnx"
        try:
            session = self._load(self._session_options())
        except AsynctrtError:
            raise
        except Exception as error:
            raise self.source.refused(error, self.options) from error
        self.name = self.source.name_for(session)
        self.intra_op_threads = threads_of(session)
        self._session: ort.InferenceSession | None = session
        # A key for durations: batches take about equally long on all contexts of a model, and other models
        # may use the same device.
        self._kind = object()
        # Copies, because ONNX Runtime's objects keep the session alive.
        self._declared = declared(session.get_inputs()), declared(session.get_outputs())
        self._adopt(read_axes(self.name, self._declared[0], self._declared[1], self.options))

    def _session_options(self) -> ort.SessionOptions:
        return session_options(self.options)

    def _load(self, options: ort.SessionOptions) -> ort.InferenceSession:
        check_host_providers(self.options.providers)
        return self.source.load(options, self.options.providers)

    def whole(self, reason: str) -> Self:
        """Return this model with each request run alone. The two share weights and are closed separately.

        :param reason: why, for the capability ``alone``.
        """
        other = copy.copy(self)
        other._adopt(read_whole_axes(self.name, self._declared[0], self._declared[1], reason))
        return other

    def _adopt(self, axes: Axes) -> None:
        """Take over what the axes say: the tensors, and which rows share a batch.

        Outputs are bound to our memory, except strings and the outputs of requests that run alone: the
        declared shapes may be wrong, and the outputs of a single request need not be in a slab.
        """
        self.inputs, self.outputs, rows_fixed, alone, doubt = axes
        specs = (*self.inputs, *self.outputs)
        self.capabilities = replace(
            self.capabilities,
            rows_fixed=rows_fixed,
            rows_max=1 if alone else None,
            alone=alone,
            doubt=doubt,
            brings_outputs=bool(alone) or any(spec.dtype.hasobject for spec in specs),
        )

    @property
    def session(self) -> ort.InferenceSession:
        """The ONNX Runtime session.

        :raises UsageError: after :meth:`close`.
        """
        if self._session is None:
            raise UsageError(f"{self!r} is closed. Load it again: OnnxModel({self.source})")
        return self._session

    def __repr__(self) -> str:
        return f"<OnnxModel {self.name} intra_op_threads={self.intra_op_threads}>"

    def create_context(self, device: Device) -> ExecutionContext:
        if device.name != "host":
            raise DeviceUnavailableError(
                f"{self!r} runs on the host device, not on {device.name!r}. Open it with device='host', or "
                "open its path there: asynctrt.open(path, device='cuda:0')"
            )
        return OnnxContext(self.session, self._kind, brings_outputs=self.capabilities.brings_outputs)

    def close(self) -> None:
        """Release the session and its weights. Idempotent."""
        self._session = None


class OnnxContext:
    """A context over the model's one session."""

    def __init__(self, session: ort.InferenceSession, kind: object, *, brings_outputs: bool) -> None:
        self._session: ort.InferenceSession | None = session
        self._kind = kind
        self._brings_outputs = brings_outputs

    def bind(self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]) -> Binding:
        assert self._session is not None, "a closed context cannot be bound"
        if self._brings_outputs:
            return OnnxRunBinding(self._session, inputs, self._kind)
        return OnnxBinding(self._session, inputs, outputs, self._kind)

    def close(self) -> None:
        """Release the session. Bindings go with the slabs that they were created for."""
        self._session = None


class HostBinding(ABC):
    """A session whose batches run on streams of the host device."""

    def __init__(self, session: ort.InferenceSession, inputs: tuple[TensorMemory, ...], kind: object) -> None:
        self._session = session
        self._inputs = inputs
        self._output_names = [output.name for output in session.get_outputs()]
        self._kind = kind, tuple(memory.dims for memory in inputs)

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        assert isinstance(stream, HostStream)
        stream.launch(partial(self._run, rows), label=(self._kind, rows), run_on="auto")

    @abstractmethod
    def _run(self, rows: int) -> None: ...


class OnnxBinding(HostBinding):
    """An ``IOBinding`` to one set of slab memory, rebound when the number of rows changes."""

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: tuple[TensorMemory, ...],
        outputs: tuple[TensorMemory | None, ...],
        kind: object,
    ) -> None:
        super().__init__(session, inputs, kind)
        self._outputs = outputs
        self._bound_outputs = [(index, memory) for index, memory in enumerate(outputs) if memory is not None]
        self._has_unbound = len(self._bound_outputs) < len(outputs)
        # Bind outputs without memory of ours anew for each batch. Otherwise ONNX Runtime would write the next
        # batch into the results of the previous one. Do so with all memory unless the CPU provider runs
        # everything: the plugin of OpenVINO 1.8 keeps the outputs of its first run, whatever the inputs are.
        self._rebinds = self._has_unbound or session.get_providers() != [CPU]
        self._binding = session.io_binding()
        self._bound_rows = 0

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        if not self._has_unbound:
            return {}
        values = self._binding.get_outputs()
        return {
            name: values[index].numpy()
            for index, name in enumerate(self._output_names)
            if self._outputs[index] is None
        }

    def _bind(self, rows: int) -> None:
        self._bound_rows = 0  # Nothing is bound if Ctrl-C ends this early.
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        for memory in self._inputs:
            self._binding.bind_input(
                memory.name, "cpu", 0, element_type(memory.dtype), memory.shape(rows), memory.address
            )
        for name, bound in zip(self._output_names, self._outputs, strict=True):
            if bound is None:
                self._binding.bind_output(name, "cpu")
            else:
                shape = bound.shape(rows)
                self._binding.bind_output(name, "cpu", 0, element_type(bound.dtype), shape, bound.address)
        self._bound_rows = rows

    def _run(self, rows: int) -> None:
        """Run the batch. Copy each output that ONNX Runtime put elsewhere to its bound memory.

        ONNX Runtime leaves the bound memory of an output unwritten if it is also an input of the graph.

        Binding is part of the run: an ``IOBinding`` that changes during a run can end the process, and an
        earlier batch may be running while this one is enqueued.

        :raises ExecutionError: if the shape of an output differs from the bound shape.
        """
        if rows != self._bound_rows or self._rebinds:
            self._bind(rows)
        self._session.run_with_iobinding(self._binding)
        values = self._binding.get_outputs_as_ortvaluevector()
        for index, memory in self._bound_outputs:
            value = values[index]
            if value.data_ptr() != memory.address:
                checked_shape(memory, value.shape(), rows)
                memory.view(rows)[...] = value.numpy()


def checked_shape(memory: TensorMemory, found: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return the shape that an output is bound with, after checking that the result has it."""
    shape = memory.shape(rows)
    if tuple(found) != shape:
        raise ExecutionError(
            f"ONNX Runtime gave shape {tuple(found)} for output {memory.name!r}, which the model declares as "
            f"{shape} in a batch of {rows} rows"
        )
    return shape


class OnnxRunBinding(HostBinding):
    """A session that is called with arrays and returns new values of any shape and type."""

    def __init__(self, session: ort.InferenceSession, inputs: tuple[TensorMemory, ...], kind: object) -> None:
        super().__init__(session, inputs, kind)
        self._kinds = {value.name: value.type for value in session.get_inputs()}
        self._values: Sequence[Any] = ()

    def unbound_outputs(self, rows: int) -> Mapping[str, Any]:
        values, self._values = self._values, ()
        return dict(zip(self._output_names, values, strict=True))

    def _run(self, rows: int) -> None:
        feeds = {memory.name: self._feed(memory, rows) for memory in self._inputs}
        self._values = self._session.run(self._output_names, feeds)
        for memory in self._inputs:
            if memory.dtype.hasobject and memory.array is not None:
                memory.array[...] = None  # Do not keep callers' strings and values until the next batch.

    def _feed(self, memory: TensorMemory, rows: int) -> Any:
        """Return the value to pass for an input: an array, or the Python value that a caller passed."""
        is_tensor = self._kinds[memory.name].startswith("tensor(")
        assert is_tensor or memory.array is not None, "values lie on the host"
        return memory.view(rows) if is_tensor else memory.array[0]  # type: ignore[index]


def element_type(dtype: np.dtype[Any]) -> Any:
    """Return the element type for an I/O binding: NumPy's type, or ONNX's number if NumPy has none."""
    return ML_NUMBERS.get(dtype.name, dtype.type)
