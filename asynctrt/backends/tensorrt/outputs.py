"""Outputs without bound memory, because their size is only known when the batch is enqueued.

TensorRT requests their memory through an ``IOutputAllocator`` and reports the shape, both before
``execute_async_v3`` returns. So a copy to the host of exactly the output's bytes is enqueued on the batch's
stream right after the batch, with no other waits.
"""

import logging
import math
from typing import Any

import numpy as np

from asynctrt.backends.tensorrt.engine import shape_of
from asynctrt.backends.tensorrt.memory import DeviceMemory
from asynctrt.backends.tensorrt.messages import callback
from asynctrt.devices.base import ALIGNMENT, Buffer, Device, Stream, aligned
from asynctrt.errors import ExecutionError
from asynctrt.tensors import Array, Dims, TensorSpec

logger = logging.getLogger("asynctrt.tensorrt")


class UnboundOutput:
    """One such output of one context. Its memory is reused for later batches, and grows by doubling."""

    def __init__(self, spec: TensorSpec, device: Device, memory: DeviceMemory) -> None:
        self._spec = spec
        self._device = device
        self._memory = memory
        self._buffer: Buffer | None = None
        self._staging: Buffer | None = None
        self._shape: Dims | None = None

    def __repr__(self) -> str:
        held = 0 if self._buffer is None else self._buffer.nbytes
        return f"<UnboundOutput {self._spec.name} shape={self._shape} held={held}>"

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self._spec.name

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
        """Enqueue the copy to the host on ``stream``, after the batch that was just enqueued there.

        :raises ExecutionError: if TensorRT did not report the shape, or if the shape does not match ``rows``
            rows of the spec or exceeds the memory that was requested.
        """
        # Only a shape that passes all checks is available to take().
        shape, self._shape = self._shape, None
        buffer = self._buffer
        if shape is None or buffer is None or min(shape, default=0) < 0:
            raise ExecutionError(
                f"TensorRT enqueued a batch without reporting the shape of output {self._spec.name!r}"
            )
        nbytes = self._nbytes(shape)
        # Rows beyond this batch, or bytes beyond the requested ones, would belong to another batch.
        if not self._is_expected(shape, rows) or nbytes > buffer.nbytes:
            raise ExecutionError(
                f"TensorRT reported shape {shape} ({nbytes} bytes) for output {self._spec}, after a batch of "
                f"{rows} rows for which it had asked for {buffer.nbytes} bytes"
            )
        if not buffer.is_host_visible and nbytes:
            if self._staging is None or self._staging.nbytes < nbytes:
                staging, self._staging = self._staging, None
                if staging is not None:
                    staging.close()
                self._staging = self._device.allocate_staging(buffer.nbytes)
            stream.copy(self._staging, buffer, offset=0, nbytes=nbytes)
        self._shape = shape

    def take(self) -> Array:
        """Return a copy of the output of the finished batch. It can be taken once per batch.

        :raises ExecutionError: if no batch was enqueued since the last call.
        """
        shape, self._shape = self._shape, None
        buffer = self._buffer
        if shape is None or buffer is None:
            raise ExecutionError(f"output {self._spec.name!r} does not exist: no batch was enqueued for it")
        if not self._nbytes(shape):
            return np.empty(shape, self._spec.dtype)
        source = buffer if buffer.is_host_visible else self._staging
        assert source is not None, "collect() has put the copy on the stream"
        return source.array(self._spec.dtype, shape, 0).copy()

    def close(self) -> None:
        """Free its memory. Idempotent."""
        self._free()
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _free(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.give_back(buffer.address)

    def _is_expected(self, shape: Dims, rows: int) -> bool:
        expected = (rows, *self._spec.dims)
        return len(shape) == len(expected) and all(
            isinstance(dim, str) or dim == found for dim, found in zip(expected, shape, strict=True)
        )

    def _nbytes(self, shape: Dims) -> int:
        return math.prod(shape) * self._spec.dtype.itemsize


def make_output_allocator(module: Any, outputs: dict[str, UnboundOutput]) -> Any:
    """Create an ``IOutputAllocator`` for the flavour ``module`` and all these outputs of one context."""

    class OutputAllocator(module.IOutputAllocator):  # type: ignore[misc]  # The module is known only at run time.
        def __init__(self) -> None:
            module.IOutputAllocator.__init__(self)

        @callback
        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            """Return the address of memory for an output, or 0 to refuse: the bindings do not accept None."""
            try:
                return outputs[tensor_name].reserve(size) or 0
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
            outputs[tensor_name].notify(shape_of(shape))

    return OutputAllocator()
