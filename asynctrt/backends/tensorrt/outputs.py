"""Outputs without bound memory, because their size is only known when the batch is enqueued.

TensorRT requests their memory through an ``IOutputAllocator`` and reports the shape, both before
``execute_async_v3`` returns. So a copy to the host of exactly the output's bytes is enqueued on the batch's
stream right after the batch, with no other waits.
"""

import logging
from collections.abc import Mapping
from typing import Any

from asynctrt.backends.tensorrt.engine import shape_of
from asynctrt.backends.tensorrt.memory import DeviceMemory
from asynctrt.backends.tensorrt.messages import callback
from asynctrt.backends.unbound import UnboundOutput
from asynctrt.devices.base import ALIGNMENT, Buffer, Device, Stream, aligned
from asynctrt.errors import ExecutionError
from asynctrt.tensors import Dims, TensorSpec

logger = logging.getLogger("asynctrt.tensorrt")


class TensorRTOutput(UnboundOutput):
    """One such output of one context. Its memory is reused for later batches, and grows by doubling."""

    def __init__(self, spec: TensorSpec, device: Device, memory: DeviceMemory) -> None:
        super().__init__(spec, device)
        self._memory = memory
        self._buffer: Buffer | None = None

    def __repr__(self) -> str:
        held = 0 if self._buffer is None else self._buffer.nbytes
        return f"<TensorRTOutput {self.name} shape={self._shape} held={held}>"

    def begin(self) -> None:
        """Clear the shape of the previous batch before a batch is enqueued."""
        self._shape = None

    def reserve(self, nbytes: int) -> int | None:
        """Return the address of large enough memory, or ``None`` to refuse. Called by TensorRT."""
        buffer = self._buffer
        if buffer is not None and nbytes <= buffer.nbytes:
            return buffer.address
        held = 0 if buffer is None else buffer.nbytes
        # The previous batch is done, so its output can be freed before the new memory is allocated.
        self._free()
        wanted = aligned(max(nbytes, ALIGNMENT))
        for size in dict.fromkeys((max(wanted, 2 * held), wanted)):
            address = self._memory.take(size)
            if address is not None:
                self._memory.take_refusals()
                self._buffer = self._memory.buffer_at(address)
                return address
        return None

    def notify(self, shape: Dims) -> None:
        """Record the shape. Called by TensorRT."""
        self._shape = shape

    def collect(self, rows: int, stream: Stream) -> None:
        """Enqueue the copy to the host on ``stream``, after the batch that was just enqueued there."""
        # Only a shape that passes all checks is available to take().
        shape, self._shape = self._shape, None
        buffer = self._buffer
        if shape is None or buffer is None or min(shape, default=0) < 0:
            raise ExecutionError(
                f"TensorRT enqueued a batch without reporting the shape of output {self.name!r}"
            )
        nbytes = self._nbytes(shape)
        # Rows beyond this batch, or bytes beyond the requested ones, would belong to another batch.
        if not self._is_expected(shape, rows) or nbytes > buffer.nbytes:
            raise ExecutionError(
                f"TensorRT reported shape {shape} ({nbytes} bytes) for output {self._spec}, after a batch of "
                f"{rows} rows for which it had asked for {buffer.nbytes} bytes"
            )
        if nbytes and not buffer.is_host_visible:
            self._stage(buffer.address, nbytes, stream)
        self._shape = shape

    def close(self) -> None:
        super().close()
        self._free()

    def _memory_on_host(self) -> Buffer | None:
        buffer = self._buffer
        return buffer if buffer is not None and buffer.is_host_visible else self._staging

    def _free(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.give_back(buffer.address)


class OutputAllocator:
    """Takes the memory of these outputs of one context."""

    def __init__(self, outputs: Mapping[str, TensorRTOutput]) -> None:
        self._outputs = outputs

    @callback
    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
        """Return the address of memory for an output, or 0 to refuse: the bindings do not accept None."""
        try:
            return self._outputs[tensor_name].reserve(size) or 0
        except Exception:  # TensorRT calls this, and its code cannot handle exceptions.
            logger.warning("no memory for output %r", tensor_name, exc_info=True)
            return 0

    @callback
    def reallocate_output_async(
        self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
    ) -> int:
        """Do the same: memory for immediate use can be used in the order of any stream."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    @callback
    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        """Record the shape of an output."""
        self._outputs[tensor_name].notify(shape_of(shape))
