"""Outputs for which no memory can be bound, because their size is known only when the batch is enqueued.

TensorRT asks for their memory through an ``IOutputAllocator`` and says the shape, both before
``execute_async_v3`` returns. So the copy to the host is put on the batch's own stream right behind it, of
exactly the bytes there are, and nobody waits for anything but the batch.
"""

import logging
import math
from typing import Any

import numpy as np

from asynctrt.backends.tensorrt.engine import shape_of
from asynctrt.backends.tensorrt.memory import DeviceMemory
from asynctrt.devices.base import ALIGNMENT, Buffer, Device, Stream, aligned
from asynctrt.errors import ExecutionError
from asynctrt.tensors import Array, Dims, TensorSpec

logger = logging.getLogger("asynctrt.tensorrt")


class UnboundOutput:
    """One output of one context. Its memory is kept from batch to batch and grows by doubling."""

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
        """A batch is about to be enqueued: what is known is of the one before."""
        self._shape = None

    def reserve(self, nbytes: int) -> int | None:
        """For TensorRT: the address of memory that is large enough, or None if there is no room."""
        buffer = self._buffer
        if buffer is not None and nbytes <= buffer.nbytes:
            return buffer.address
        held = 0 if buffer is None else buffer.nbytes
        # The batch before this one is done, so its output may go before the new memory comes.
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
        """For TensorRT: what it came to."""
        self._shape = shape

    def collect(self, stream: Stream) -> None:
        """Put the copy to the host on the stream, behind the batch that was just enqueued there.

        :raises ExecutionError: if TensorRT did not say the shape.
        """
        shape, buffer = self._shape, self._buffer
        if shape is None or buffer is None or min(shape, default=0) < 0:
            raise ExecutionError(
                f"TensorRT enqueued a batch and did not say the shape of output {self._spec.name!r}"
            )
        nbytes = self._nbytes(shape)
        if not buffer.is_host_visible and nbytes:
            if self._staging is None or self._staging.nbytes < nbytes:
                staging, self._staging = self._staging, None
                if staging is not None:
                    staging.close()
                self._staging = self._device.allocate_staging(buffer.nbytes)
            stream.copy(self._staging, buffer, offset=0, nbytes=nbytes)

    def array(self) -> Array:
        """The output of the batch that is done: a copy, the caller's to keep."""
        shape, buffer = self._shape, self._buffer
        if shape is None or buffer is None:
            raise ExecutionError(f"output {self._spec.name!r} is not there: its batch was not enqueued")
        if not self._nbytes(shape):
            return np.empty(shape, self._spec.dtype)
        source = buffer if buffer.is_host_visible else self._staging
        assert source is not None, "collect() has put the copy on the stream"
        return source.array(self._spec.dtype, shape, 0).copy()

    def close(self) -> None:
        """Give its memory back. Idempotent."""
        self._free()
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _free(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.give_back(buffer.address)

    def _nbytes(self, shape: Dims) -> int:
        return math.prod(shape) * self._spec.dtype.itemsize


def make_output_allocator(module: Any, outputs: dict[str, UnboundOutput]) -> Any:
    """An ``IOutputAllocator`` of the flavour ``module`` for all these outputs of one context."""

    class OutputAllocator(module.IOutputAllocator):  # type: ignore[misc]  # Which module is known at run time.
        def __init__(self) -> None:
            module.IOutputAllocator.__init__(self)

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int | None:
            """Memory for an output, or None where it is refused."""
            try:
                return outputs[tensor_name].reserve(size)
            except Exception:  # TensorRT calls this, and an exception would go through its code.
                logger.warning("no memory for output %r", tensor_name, exc_info=True)
                return None

        def reallocate_output_async(
            self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
        ) -> int | None:
            """The same: what is there at once is so in the order of every stream."""
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            """The shape that the output has."""
            outputs[tensor_name].notify(shape_of(shape))

    return OutputAllocator()
