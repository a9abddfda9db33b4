"""Buffers of the host device."""

from collections.abc import Callable
from typing import Final
from weakref import finalize

import numpy as np

from asynctrt.devices.base import view_of
from asynctrt.errors import DeviceMemoryError

BLOCK_ALIGNMENT: Final = 512
"""The alignment of CUDA allocations, which TensorRT 8 requires of enqueue memory."""


class HostBuffer:
    """Zeroed memory of the process, aligned to 512 bytes. Views keep it alive after :meth:`close`."""

    def __init__(self, nbytes: int, on_close: Callable[[int], None] | None = None) -> None:
        try:
            block = np.zeros(nbytes + BLOCK_ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise DeviceMemoryError(
                f"the host has no memory for a buffer of {nbytes} bytes. Lower max_rows or contexts"
            ) from error
        start = -block.ctypes.data % BLOCK_ALIGNMENT
        self._bytes = block[start : start + nbytes]
        # Runs once: on `close`, or when the last reference goes.
        self._give_back = None if on_close is None else finalize(self, on_close, nbytes)

    @property
    def address(self) -> int:
        return self._bytes.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def is_host_visible(self) -> bool:
        return True

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        return view_of(self._bytes, dtype, shape, offset)

    def close(self) -> None:
        if self._give_back is not None:
            self._give_back()
        self._bytes = self._bytes[:0].copy()
