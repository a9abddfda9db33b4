"""Outputs without bound memory, because their shape depends on the data."""

import math

import numpy as np

from asynctrt.devices.base import Buffer, Device, Stream, aligned
from asynctrt.errors import ExecutionError
from asynctrt.tensors import Array, Dims, TensorSpec


class UnboundOutput:
    """One such output of one context. Its copy on the host is reused, and grows by doubling."""

    def __init__(self, spec: TensorSpec, device: Device) -> None:
        self.name = spec.name
        self._spec = spec
        self._device = device
        self._staging: Buffer | None = None
        self._shape: Dims | None = None
        """The shape of the latest batch's output, until it is taken."""

    def take(self) -> Array:
        """Return a copy of the output of the finished batch. It can be taken once per batch."""
        shape, self._shape = self._shape, None
        if shape is None:
            raise ExecutionError(f"output {self.name!r} does not exist: no batch was enqueued for it")
        if not self._nbytes(shape):
            return np.empty(shape, self._spec.dtype)
        memory = self._memory_on_host()
        assert memory is not None, "the copy is on the stream"
        return memory.array(self._spec.dtype, shape, 0).copy()

    def close(self) -> None:
        """Free its memory. Idempotent."""
        self._shape = None
        self._free_staging()

    def _free_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def _stage(self, address: int, nbytes: int, stream: Stream) -> None:
        """Enqueue the copy to the host on ``stream``, after the batch that was just enqueued there."""
        staging = self._staging
        if staging is None or staging.nbytes < nbytes:
            held = 0 if staging is None else staging.nbytes
            self._free_staging()
            staging = self._staging = self._device.allocate_staging(aligned(max(nbytes, 2 * held)))
        stream.copy_bytes(staging.address, address, nbytes)

    def _memory_on_host(self) -> Buffer | None:
        return self._staging

    def _is_expected(self, shape: Dims, rows: int) -> bool:
        """Return whether it may have this shape in a batch of ``rows``; any, if requests run alone."""
        expected = self._spec.shape(rows)
        return self._spec.axis is None or (
            len(shape) == len(expected)
            and all(isinstance(dim, str) or dim == found for dim, found in zip(expected, shape, strict=True))
        )

    def _nbytes(self, shape: Dims) -> int:
        return math.prod(shape) * self._spec.dtype.itemsize
