"""A Python function as a model on the host device: for tests, for load tests, for a model of one's own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from asynctrt.backends.base import TensorMemory
from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.devices.host import HostStream
from asynctrt.errors import DeviceUnavailableError, ModelError
from asynctrt.tensors import Array, TensorSpec

BatchFunction = Callable[[Mapping[str, Array], Mapping[str, Array]], None]


class FunctionModel:
    """Calls ``function(inputs, outputs)`` once a batch.

    Both are mappings from tensor name to an array ``(rows, *dims)`` that lies in the batch's slab: the
    function reads the one and writes the other in place, and keeps neither. It runs in a thread of the
    device, or in the event loop's if it was measured to be shorter than a hand-over (50 µs).

    :param function: called with the batch's inputs and outputs; what it raises fails this batch alone.
    :param inputs: one spec or several; the same for ``outputs``.
    :param rows_fixed: the only batch size it takes, if it does.
    :param rows_max: the largest batch it takes, if it has a limit.
    :raises ModelError: for an output dimension that no input determines.
    """

    def __init__(
        self,
        function: BatchFunction,
        *,
        inputs: TensorSpec | Sequence[TensorSpec],
        outputs: TensorSpec | Sequence[TensorSpec],
        name: str | None = None,
        rows_fixed: int | None = None,
        rows_max: int | None = None,
    ) -> None:
        self.function = function
        self.name: str = name or getattr(function, "__name__", None) or type(function).__name__
        self.inputs = (inputs,) if isinstance(inputs, TensorSpec) else tuple(inputs)
        self.outputs = (outputs,) if isinstance(outputs, TensorSpec) else tuple(outputs)
        self.rows_fixed = rows_fixed
        self.rows_max = rows_max
        self.enqueue_nbytes = 0
        self.platform = "python"
        known = {dim for spec in self.inputs for dim in spec.dims}
        for spec in self.outputs:
            for dim in spec.dims:
                if isinstance(dim, str) and dim not in known:
                    raise ModelError(
                        f"output {spec.name!r} has the dimension {dim!r}, which no input has. A function "
                        "writes into memory given to it, so its output shapes follow from its inputs"
                    )

    def __repr__(self) -> str:
        return f"<FunctionModel {self.name}>"

    def create_context(self, device: Device) -> "FunctionContext":
        if device.name != "host":
            raise DeviceUnavailableError(
                f"{self!r} runs on the host device, not on {device.name!r}. Open it with device='host'"
            )
        return FunctionContext(self.function)

    def close(self) -> None:
        """A function holds nothing."""


class FunctionContext:
    """A context of a :class:`FunctionModel`; it has no state, so any number may exist."""

    def __init__(self, function: BatchFunction) -> None:
        self._function = function

    def bind(
        self, inputs: tuple[TensorMemory, ...], outputs: tuple[TensorMemory | None, ...]
    ) -> "FunctionBinding":
        return FunctionBinding(self._function, inputs, outputs)

    def close(self) -> None:
        """Nothing is held."""


class FunctionBinding:
    """The function with its arrays."""

    def __init__(
        self,
        function: BatchFunction,
        inputs: tuple[TensorMemory, ...],
        outputs: tuple[TensorMemory | None, ...],
    ) -> None:
        self._function = function
        self._dims = tuple(memory.dims for memory in inputs)
        self._memory = (inputs, tuple(memory for memory in outputs if memory is not None))
        self._rows = 0
        self._call: Callable[[], None] = lambda: None

    def enqueue(self, rows: int, *, stream: Stream, arena: Buffer | None) -> None:
        assert isinstance(stream, HostStream)
        if rows != self._rows:
            inputs, outputs = (
                {memory.name: memory.array[:rows] for memory in side if memory.array is not None}
                for side in self._memory
            )
            self._call = partial(self._function, inputs, outputs)
            self._rows = rows
        stream.launch(self._call, label=(self._dims, rows))

    def unbound_outputs(self, rows: int) -> Mapping[str, Array]:
        return {}
