"""A CUDA GPU as a device, through cuda-python.

Every status becomes an error in one place, :meth:`CudaContext.failed`. Out of memory and refusals leave the
device as it was. After a sticky error (an illegal address, for example) nothing on it can be trusted until
the process has ended ("How TensorRT works", Cross-Context CUDA Error Isolation): :attr:`CudaContext.lost`
tells that from then on, and all later work is refused with it.
"""

from asynctrt.devices.cuda.context import STICKY, limit_memory
from asynctrt.devices.cuda.device import DRIVER_MIN, CudaDevice, find_cuda_device

__all__ = ["DRIVER_MIN", "STICKY", "CudaDevice", "find_cuda_device", "limit_memory"]
