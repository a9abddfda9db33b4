"""A CUDA GPU as a device, through cuda-python.

Every status becomes an error in one place, :meth:`CudaContext.failed`. Running out of memory, or a refused
call, leaves the device usable. After a sticky error (an illegal address, for example) no result from it can
be trusted until the process ends ("How TensorRT works", Cross-Context CUDA Error Isolation):
:attr:`CudaContext.lost` is set from then on, and later work is refused with that error.
"""

from asynctrt.devices.cuda.context import STICKY, limit_memory
from asynctrt.devices.cuda.device import DRIVER_MIN, CudaDevice, find_cuda_device

__all__ = ["DRIVER_MIN", "STICKY", "CudaDevice", "find_cuda_device", "limit_memory"]
