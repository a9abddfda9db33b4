"""Arrays in the memory of a device: what a caller has there already, and what shall stay there."""

from typing import Any, Final

import numpy as np

from asynctrt.devices.base import Device, Event
from asynctrt.errors import DeviceLostError

COPY_S: Final = 60.0
"""How long a copy to the host may take before its device counts as hung."""


class DeviceArray:
    """An array on a device, rows first, in C order. It keeps its memory alive.

    Libraries on the GPU read it in place, through ``__cuda_array_interface__``: ``torch.as_tensor(array,
    device="cuda")``, ``cupy.asarray(array)``. The engine returns it when its rows are there, so there is
    nothing to wait for. Its memory is freed in the order of the default stream of CUDA; who reads it on
    another one keeps the array until that has been done.
    """

    __slots__ = ("_owner", "address", "device", "dtype", "ready", "shape")

    def __init__(
        self,
        device: Device,
        address: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        owner: object,
        ready: Event | None = None,
    ) -> None:
        self.device = device
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.ready = ready
        """Done when its content is there; ``None`` if it is."""
        # Whatever keeps the memory alive; nothing else is asked of it.
        self._owner = owner

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)} on {self.device.name}>"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "DeviceArray":
        """Some of the rows, without a copy."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise IndexError("rows of a DeviceArray are taken in order: array[start:stop]")
        return DeviceArray(
            self.device,
            self.address + start * self.row_nbytes,
            self.dtype,
            (max(stop - start, 0), *self.shape[1:]),
            owner=self._owner,
            ready=self.ready,
        )

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return len(self) * self.row_nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What the libraries on CUDA know it by, version 3 of that interface."""
        if not self.device.name.startswith("cuda"):
            raise AttributeError(f"{self!r} is not on a CUDA device")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }

    def numpy(self) -> np.ndarray:
        """A copy in the memory of the host. It blocks: call it off the loop for what is large.

        :raises DeviceError: when the device cannot copy it.
        """
        stream = self.device.create_stream()
        staging = self.device.allocate_staging(self.nbytes)
        if self.ready is not None:
            stream.wait(self.ready)
        stream.copy_bytes(staging.address, self.address, self.nbytes)
        copied = self.device.create_event()
        stream.record(copied)
        if not copied.synchronize(COPY_S):
            raise DeviceLostError(f"copying {self!r} to the host did not end within {COPY_S} s")
        stream.close(COPY_S)
        if copied.error is not None:
            raise copied.error
        array = staging.array(self.dtype, self.shape, 0)
        staging.close()
        return array
