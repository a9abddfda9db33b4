"""Buffers of a CUDA device."""

from weakref import finalize

import numpy as np

from asynctrt.devices.base import ALIGNMENT, view_of
from asynctrt.devices.cuda.bindings import driver
from asynctrt.devices.cuda.context import LEGACY_STREAM, CudaContext
from asynctrt.errors import DeviceError


class CudaBuffer:
    """Zeroed device memory, which the CPU cannot access."""

    def __init__(self, context: CudaContext, nbytes: int, *, zeroed_on: int) -> None:
        self._context = context
        self.nbytes = nbytes
        self.address = context.take(nbytes, zeroed_on=zeroed_on)

    def __repr__(self) -> str:
        return f"<CudaBuffer {self._context.name} nbytes={self.nbytes}>"

    @property
    def is_host_visible(self) -> bool:
        return False

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        raise DeviceError(f"{self!r} is memory of the GPU: copy it to staging memory to look at it")

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            self._context.give_back(address, self.nbytes)


class PinnedBuffer:
    """Zeroed, page-locked host memory, which the GPU can copy from and to without the CPU.

    Views keep it alive after :meth:`close`.
    """

    def __init__(self, context: CudaContext, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bytes = np.asarray(_PinnedBlock(context, nbytes))[:nbytes]
        self._bytes[...] = 0
        self.address: int = self._bytes.ctypes.data

    def __repr__(self) -> str:
        return f"<PinnedBuffer nbytes={self.nbytes}>"

    @property
    def is_host_visible(self) -> bool:
        return True

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        return view_of(self._bytes, dtype, shape, offset)

    def close(self) -> None:
        self._bytes = self._bytes[:0].copy()


class _PinnedBlock:
    """The memory that NumPy's views refer to, freed when the last view goes."""

    def __init__(self, context: CudaContext, nbytes: int) -> None:
        context.activate()
        code, address = driver.cuMemHostAlloc(max(nbytes, ALIGNMENT), driver.CU_MEMHOSTALLOC_PORTABLE)
        context.check(code, f"{nbytes} bytes of pinned memory")
        self.__array_interface__ = {
            "version": 3,
            "shape": (max(nbytes, ALIGNMENT),),
            "typestr": "|u1",
            "data": (int(address), False),
        }
        # At exit the driver frees all memory itself, and may be unloaded before this could run.
        finalize(self, context.free_pinned, int(address)).atexit = False


class OrderedBuffer:
    """Stream-ordered device memory: allocated in the order of one stream, and freed in that of any stream."""

    def __init__(self, context: CudaContext, nbytes: int, stream: int) -> None:
        self._context = context
        self.nbytes = nbytes
        self.address = context.take_in_order(nbytes, stream)
        self._free = finalize(self, context.free_in_order, self.address, nbytes, LEGACY_STREAM)
        self._free.atexit = False

    @property
    def is_host_visible(self) -> bool:
        return False

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> np.ndarray:
        raise DeviceError("outputs that stay on the GPU cannot be seen by the CPU: DeviceArray.numpy()")

    def close(self) -> None:
        self._free()

    def close_on(self, stream: int) -> None:
        """Free it once the stream with this handle has done its work so far."""
        if self._free.detach() is not None:
            self._context.free_in_order(self.address, self.nbytes, stream)
