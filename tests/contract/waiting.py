"""The CPU as a device that frees memory as a GPU does."""

import traceback
from asyncio import _get_running_loop
from functools import partial

import numpy as np

from asynctrt.devices.cuda.context import CudaContext, Gpu
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError
from tests.doubles.support import until

BYTES = np.dtype(np.uint8)


class WaitingBuffer:
    """A buffer of the host that is freed as one of the GPU; what uses it after that finds nonsense."""

    def __init__(self, device, buffer, *, is_staging):
        self._device = device
        self._buffer = buffer
        self._is_staging = is_staging
        self._is_closed = False

    def __getattr__(self, name):
        return getattr(self._buffer, name)

    def close(self):
        if not self._is_closed:
            self._is_closed = True
            self._device.free(self._free)

    def _free(self):
        if not self._is_staging:  # Views keep staging memory alive.
            self._buffer.array(BYTES, (self._buffer.nbytes,), 0)[:] = 0xEE
        self._buffer.close()


class WaitingDevice(HostDevice):
    """To free anything waits for all work, so the CUDA device's own rules decide when and where that is done.

    ``violations`` says where memory was freed on an event loop, or while work hangs that was given up.
    """

    abandon = CudaContext.abandon
    ended = CudaContext.ended

    def __init__(self, **kw):
        super().__init__(**{"in_place": "never", "unified": False, **kw})
        self._gpu = Gpu()
        self.violations = []

    def allocate(self, nbytes):
        return WaitingBuffer(self, self._allocate(nbytes), is_staging=False)

    def allocate_staging(self, nbytes):
        return WaitingBuffer(self, self._allocate(nbytes), is_staging=True)

    def allocate_ordered(self, nbytes, *, stream):
        return self._allocate(nbytes)  # Freed in the order of a stream, which waits for nothing.

    def _allocate(self, nbytes):
        try:
            return HostDevice.allocate(self, nbytes)
        except DeviceMemoryError:
            if not self._gpu.wait_for_frees():
                raise
            return HostDevice.allocate(self, nbytes)

    def free(self, free):
        self._gpu.free(partial(self._free, free))

    def _free(self, free):
        if _get_running_loop() is not None:
            self._violated("on an event loop")
        if self._gpu.hanging:
            self._violated("while work hangs")
        for stream in list(self._streams.values()):
            # Whoever sees it idle once has waited for all that was on it.
            until(lambda stream=stream: not stream._is_served)
        free()

    def _violated(self, where):
        self.violations.append(f"memory was freed {where}:\n{''.join(traceback.format_stack(limit=12))}")

    def close(self):
        super().close()
        # What hung and has ended is let go by a thread.
        until(lambda: not self._gpu.hanging and not self._gpu.put_off and not self._gpu._is_freeing)
        assert not self.violations, self.violations[0]
