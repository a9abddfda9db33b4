"""An ONNX model on the host device through ONNX Runtime. The only importer of ``onnxruntime``.

One session holds the weights; contexts are I/O bindings over it, and ``InferenceSession.run`` may be called
from several threads at once. Inputs and outputs are bound to the slabs themselves, so nothing is copied.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from asynctrt.backends.base import TensorMemory
from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.devices.host import HostStream
from asynctrt.errors import (
    DeviceUnavailableError,
    MissingExtraError,
    ModelError,
    ModelNotFoundError,
    OptionsError,
    UsageError,
)
from asynctrt.tensors import Array, TensorSpec

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingExtraError(
        "ONNX models need ONNX Runtime, which is not installed: pip install 'asynctrt[cpu]'"
    ) from error

DTYPES: Final = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
} | {f"tensor({kind}{bits})": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
"""ONNX Runtime's names of the types that NumPy has too."""

LOG_NOTHING_BUT_FATAL: Final = 4
"""Whatever ONNX Runtime reports as an error is in the exception; it need not be on stderr as well."""


class OnnxModel:
    """An ONNX model, loaded. Loading blocks: ``asynctrt.open(path)`` does it in a thread.

    :param path: the ``.onnx`` file.
    :param intra_op_threads: threads that one batch computes on. The default is 1, since the host device
        computes as many batches at once as there are cores. Measured with an MLP on 2 cores: 50,000 rows/s
        under 256 callers, against 45,000 with 2 threads a batch and one batch at a time. Those are better for
        a few callers (32: 41,000 rows/s against 35,000; a lone one: 6,500 against 3,900) at twice the CPU,
        for ONNX Runtime's threads spin while they wait: ``OnnxModel(path, intra_op_threads=2)`` on
        ``HostDevice(threads=1)``.
    :raises OptionsError: for an impossible number of threads.
    :raises ModelNotFoundError: if there is no such file.
    :raises ModelError: if it is no ONNX model, or one whose rows cannot be batched.
    """

    def __init__(self, path: str | os.PathLike[str], *, intra_op_threads: int = 1) -> None:
        self.path = Path(path)
        if intra_op_threads < 1:
            raise OptionsError(f"intra_op_threads is at least 1, not {intra_op_threads}")
        if not self.path.exists():
            raise ModelNotFoundError(
                f"there is no file {str(self.path)!r}. Give the path of an .onnx file; the working "
                f"directory is {str(Path.cwd())!r}"
            )
        self.name = self.path.stem
        self.platform = "onnxruntime_onnx"
        self.intra_op_threads = intra_op_threads
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.intra_op_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = LOG_NOTHING_BUT_FATAL
        try:
            session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ModelError(
                f"{str(self.path)!r} cannot be loaded by ONNX Runtime {ort.__version__}: "
                f"{_first_line(error)}. Check it with onnx.checker.check_model"
            ) from error
        self._session: ort.InferenceSession | None = session
        self.inputs, self.outputs, self.rows_fixed = read_specs(
            self.name, session.get_inputs(), session.get_outputs()
        )
        self.rows_max: int | None = None
        # ONNX Runtime has an allocator of its own for what a batch needs on the way.
        self.enqueue_nbytes = 0

    @property
    def session(self) -> ort.InferenceSession:
        """ONNX Runtime's own object.

        :raises UsageError: after :meth:`close`.
        """
        if self._session is None:
            raise UsageError(f"{self!r} is closed. Load it again: OnnxModel({str(self.path)!r})")
        return self._session

    def __repr__(self) -> str:
        return f"<OnnxModel {self.name} intra_op_threads={self.intra_op_threads}>"

    def create_context(self, device: Device) -> "OnnxContext":
        if device.name != "host":
            raise DeviceUnavailableError(
                f"{self!r} runs on the host device, not on {device.name!r}. Open it with device='host', "
                "or build a TensorRT plan for the GPU"
            )
        return OnnxContext(self.session)

    def close(self) -> None:
        """Let go of the session and so of the weights; idempotent."""
        self._session = None


class OnnxContext:
    """A context over the model's one session."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session: ort.InferenceSession | None = session

    def bind(
        self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]
    ) -> "OnnxBinding":
        assert self._session is not None, "a closed context is bound to nothing"
        return OnnxBinding(self._session, inputs, outputs)

    def close(self) -> None:
        """Let go of the session. The bindings go with their bay."""
        self._session = None


class OnnxBinding:
    """An ``IOBinding`` to one set of slab memory, rebound when the number of rows changes (5 µs)."""

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: tuple[TensorMemory, ...],
        outputs: tuple[TensorMemory | None, ...],
    ) -> None:
        self._session = session
        self._inputs = inputs
        self._outputs = outputs
        self._output_names = [output.name for output in session.get_outputs()]
        self._dims = tuple(memory.dims for memory in inputs)
        self._binding = session.io_binding()
        self._bound_rows = 0

    def enqueue(self, rows: int, *, stream: Stream, arena: Buffer | None) -> None:
        assert isinstance(stream, HostStream)
        # An output without memory is bound anew each time: else ONNX Runtime would write the next batch
        # into the last one's answer.
        if rows != self._bound_rows or None in self._outputs:
            self._bind(rows)
        stream.launch(self._run, label=(self._dims, rows))

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
    """Specs from ONNX Runtime's ``NodeArg`` objects, and the batch size if it is fixed.

    :raises ModelError: for a type that cannot lie in a slab, or a tensor without a batch axis.
    """
    if not inputs or not outputs:
        raise ModelError(f"{name!r} has {len(inputs)} inputs and {len(outputs)} outputs: needs both")
    fixed = {arg.shape[0] for arg in inputs if arg.shape and isinstance(arg.shape[0], int)}
    dynamic = [arg.name for arg in inputs if arg.shape and not isinstance(arg.shape[0], int)]
    if len(fixed) > 1 or (fixed and dynamic):
        shapes = {arg.name: arg.shape for arg in inputs}
        raise ModelError(
            f"the inputs of {name!r} do not share a batch axis: {shapes}. Export the model with a dynamic "
            "first axis on every input"
        )
    rows_fixed = fixed.pop() if fixed else None
    batch_symbols = {arg.shape[0] for arg in inputs if arg.shape} - {None, rows_fixed}
    for arg in outputs:
        if arg.shape and isinstance(arg.shape[0], int) and arg.shape[0] != rows_fixed:
            raise ModelError(
                f"output {arg.name!r} of {name!r} has the fixed first axis {arg.shape[0]}, so its rows "
                "cannot be told apart. Export it with a first axis that counts rows"
            )
    return (
        tuple(_read_spec(name, "input", arg, batch_symbols) for arg in inputs),
        tuple(_read_spec(name, "output", arg, batch_symbols) for arg in outputs),
        rows_fixed,
    )


def _read_spec(model: str, kind: str, arg: Any, batch_symbols: set[str]) -> TensorSpec:
    if arg.type not in DTYPES:
        raise ModelError(
            f"{kind} {arg.name!r} of {model!r} is a {arg.type}. Rows lie in fixed memory, so tensors of "
            f"numbers and booleans can be served: {sorted(set(DTYPES.values()))}. Do the rest (tokenising "
            "text, naming classes: zipmap=False in skl2onnx) outside the model"
        )
    if not arg.shape:
        raise ModelError(
            f"{kind} {arg.name!r} of {model!r} is a scalar or has no known rank. Batching needs a first axis "
            "that counts rows: export the model with one"
        )
    dims = []
    for axis, dim in enumerate(arg.shape[1:], start=1):
        if dim in batch_symbols:
            raise ModelError(
                f"{kind} {arg.name!r} of {model!r} has the batch size on axis {axis} too ({arg.shape}): rows "
                "of one batch would see each other, so requests cannot share one"
            )
        dims.append(dim if dim is not None else f"{arg.name}.{axis}")
    return TensorSpec(arg.name, np.dtype(DTYPES[arg.type]), tuple(dims))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
