"""ONNX models on the host device through ONNX Runtime.

One session holds the weights. Contexts are I/O bindings over it, since ``InferenceSession.run`` may be called
from several threads at once. Inputs and outputs are bound to the slabs themselves, so nothing is copied.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from asynctrt.backends.base import ExecutionContext, ModelBase, TensorMemory
from asynctrt.backends.batch_axis import BatchAxis
from asynctrt.backends.onnxruntime_session import (
    LOG_FATAL_ONLY,
    Source,
    bindable,
    check_host_providers,
    ort,
    session_options,
    threads_of,
)
from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.devices.host import HostStream
from asynctrt.errors import AsynctrtError, DeviceUnavailableError, ModelError, UsageError
from asynctrt.onnx_objects import OnnxObject
from asynctrt.onnx_options import OnnxOptions
from asynctrt.tensors import Array, TensorSpec

__all__ = ["LOG_FATAL_ONLY", "OnnxModel", "ort", "read_specs"]

DTYPES: Final = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
} | {f"tensor({kind}{bits})": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
"""NumPy's dtype for each type of ONNX Runtime's that NumPy has."""

UNKNOWN: Final = re.compile(r"unk__\d+")
"""How tf2onnx writes dimensions that it does not know: each has another number, so these are not names."""

ROWS_ASSUMED: Final = 7919
"""A batch size for shape inference: a prime that no other dimension has by chance."""


class OnnxModel(ModelBase):
    """A loaded ONNX model. Loading blocks: ``asynctrt.open(path)`` does it in a thread.

    The first axis of every input and output counts rows. If an output's first axis has another name than the
    inputs', ONNX Runtime's shape inference has to show that it counts rows all the same. A first axis without
    a name, or with one as tf2onnx writes it (``unk__7``), is trusted when the model is loaded; a batch that
    returns another number of rows fails.

    :param path: the ``.onnx`` file; or, as an object, the content of one (bytes, an ``onnx.ModelProto``), or
        an ``onnxruntime.InferenceSession`` of your own, which runs batches from several threads at once and
        is not ended when the model is closed.
    :param options: :class:`~asynctrt.onnx_options.OnnxOptions`, or a mapping of their names.
    :raises OptionsError: for an argument of another kind, or an option that is not valid.
    :raises ModelNotFoundError: if the file does not exist.
    :raises ModelError: if it is not an ONNX model, or its rows cannot be batched.
    :raises MissingExtraError: if a provider or a package that the options name is not installed.
    :raises DeviceUnavailableError: if a provider does not load.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | OnnxObject,
        options: OnnxOptions | Mapping[str, Any] | None = None,
    ) -> None:
        self.options = OnnxOptions.of(options)
        self.source = Source(path)
        self.path = self.source.path
        """The file, or ``None`` for a model that was given as an object."""
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
        # Contexts of one model take about as long for a batch, and others may be on the same device.
        self._kind = object()
        self.inputs, self.outputs, self.rows_fixed = read_specs(
            self.name, session.get_inputs(), session.get_outputs()
        )
        self._check_first_axes(session.get_inputs(), session.get_outputs())

    def _session_options(self) -> ort.SessionOptions:
        return session_options(self.options)

    def _load(self, options: ort.SessionOptions) -> ort.InferenceSession:
        check_host_providers(self.options.providers)
        return self.source.load(options, self.options.providers)

    def _check_first_axes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check that an output counts rows although its first axis has another name than the inputs'.

        Some exporters name the batch axis of each tensor differently. The axis may just as well count
        something else, such as what was found in all rows together, and where that number happened to equal
        the number of rows, answers would go to the wrong callers.

        :raises ModelError: if ONNX Runtime's shape inference does not find the number of rows there.
        """
        names = {arg.shape[0] for arg in inputs if isinstance(arg.shape[0], str)}
        doubtful = [
            arg
            for arg in outputs
            if isinstance(arg.shape[0], str)
            and arg.shape[0] not in names
            and not UNKNOWN.fullmatch(arg.shape[0])
        ]
        if not doubtful or not (names or self.rows_fixed):
            return
        inferred = self._infer_first_axes(names) if names else {}
        for arg in doubtful:
            if inferred.get(arg.name) != ROWS_ASSUMED:
                raise ModelError(
                    f"output {arg.name!r} of {self.name!r} has the first axis {arg.shape[0]!r}, that of the "
                    f"inputs is {' and '.join(map(repr, sorted(names))) or self.rows_fixed}, and shape "
                    "inference does not show that both count rows. Export the model with one name for the "
                    "first axis of every input and output"
                )

    def _infer_first_axes(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the first axis of each output, by its name, when all inputs have ``ROWS_ASSUMED`` rows."""
        options = self._session_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        for name in names:
            options.add_free_dimension_override_by_name(name, ROWS_ASSUMED)
        try:
            session = self._load(options)
        except Exception:  # The model contradicts itself for this number of rows, so it does not batch.
            return {}
        return {arg.name: arg.shape[0] for arg in session.get_outputs()}

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
        return OnnxContext(bindable(self.session), self._kind)

    def close(self) -> None:
        """Release the session, and with it the weights. Idempotent."""
        self._session = None


class OnnxContext:
    """A context over the model's one session."""

    def __init__(self, session: ort.InferenceSession, kind: object) -> None:
        self._session: ort.InferenceSession | None = session
        self._kind = kind

    def bind(
        self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]
    ) -> "OnnxBinding":
        assert self._session is not None, "a closed context cannot be bound"
        return OnnxBinding(self._session, inputs, outputs, self._kind)

    def close(self) -> None:
        """Release the session. Bindings are dropped with what they were made for."""
        self._session = None


class OnnxBinding:
    """An ``IOBinding`` to one set of slab memory, rebound when the number of rows changes."""

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: tuple[TensorMemory, ...],
        outputs: tuple[TensorMemory | None, ...],
        kind: object,
    ) -> None:
        self._session = session
        self._inputs = inputs
        self._outputs = outputs
        self._output_names = [output.name for output in session.get_outputs()]
        self._kind = kind, tuple(memory.dims for memory in inputs)
        self._binding = session.io_binding()
        self._bound_rows = 0

    def enqueue(self, rows: int, *, profile: int | None, stream: Stream, arena: Buffer | None) -> None:
        assert isinstance(stream, HostStream)
        # An output without memory of ours is bound anew each time. Otherwise ONNX Runtime would write the
        # next batch into the answers of the last one.
        if rows != self._bound_rows or None in self._outputs:
            self._bind(rows)
        stream.launch(self._run, label=(self._kind, rows))

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        if None not in self._outputs:
            return {}
        values = self._binding.get_outputs()
        return {
            name: values[index].numpy()
            for index, name in enumerate(self._output_names)
            if self._outputs[index] is None
        }

    def _bind(self, rows: int) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        for memory in self._inputs:
            self._binding.bind_input(
                memory.name, "cpu", 0, memory.dtype.type, (rows, *memory.dims), memory.address
            )
        for name, bound in zip(self._output_names, self._outputs, strict=True):
            if bound is None:
                self._binding.bind_output(name, "cpu")
            else:
                shape = (rows, *bound.dims)
                self._binding.bind_output(name, "cpu", 0, bound.dtype.type, shape, bound.address)
        self._bound_rows = rows

    def _run(self) -> None:
        self._session.run_with_iobinding(self._binding)


def read_specs(
    name: str, inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], int | None]:
    """Return the specs that ONNX Runtime's ``NodeArg`` objects describe, and the batch size if it is fixed.

    :raises ModelError: for a type that cannot lie in a slab, or a tensor without a batch axis.
    """
    # The types are checked first: a sequence or a map has no rank, but a batch axis would not help it.
    for kind, side in (("input", inputs), ("output", outputs)):
        for arg in side:
            _check_type(name, kind, arg)
    batch = BatchAxis(name, "Export the model")
    rows_fixed = batch.fixed_rows(
        {arg.name: arg.shape for arg in inputs}, {arg.name: arg.shape for arg in outputs}
    )
    batch_symbols = {arg.shape[0] for arg in inputs} - {None, rows_fixed}
    return (
        tuple(_read_spec(batch, "input", arg, batch_symbols) for arg in inputs),
        tuple(_read_spec(batch, "output", arg, batch_symbols) for arg in outputs),
        rows_fixed,
    )


def _check_type(model: str, kind: str, arg: Any) -> None:
    if arg.type not in DTYPES:
        raise ModelError(
            f"{kind} {arg.name!r} of {model!r} is a {arg.type}. Rows lie in fixed memory, so tensors "
            f"of numbers and booleans can be served: {sorted(set(DTYPES.values()))}. Do the rest (tokenising "
            "text, naming classes: zipmap=False in skl2onnx) outside the model"
        )


def _read_spec(batch: BatchAxis, kind: str, arg: Any, batch_symbols: set[str]) -> TensorSpec:
    dims = []
    for axis, dim in enumerate(arg.shape[1:], start=1):
        if dim in batch_symbols:
            raise batch.second_axis_error(kind, arg.name, axis)
        dims.append(dim if dim is not None else f"{arg.name}.{axis}")
    return TensorSpec(arg.name, np.dtype(DTYPES[arg.type]), tuple(dims))
