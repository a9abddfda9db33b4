"""A CUDA GPU as a device, on cuda-python. ``cuda_objects`` has what it makes; nothing else imports ``cuda``.

What runs once a batch goes through ``cuda.bindings``, which was measured faster than ``cuda.core`` (a query
0.9 µs against 1.5); arrays of other libraries are looked at through ``cuda.core``.

Every status goes through one funnel, :meth:`CudaDevice.failed`: out of memory and refusals leave the device
as it was, while a sticky error (an illegal address, say) leaves nothing on it that can be trusted until the
process has ended ("How TensorRT works", Cross-Context CUDA Error Isolation). Then :attr:`CudaDevice.lost`
says so, and whatever comes later is refused with it.
"""

import logging
import re
import threading
from typing import Any, Final

import numpy as np

from asynctrt.devices.arrays import DeviceArray
from asynctrt.devices.base import ALIGNMENT, MemoryFigures, Stream
from asynctrt.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    DeviceUnavailableError,
    InputError,
    OptionsError,
)

try:
    from cuda.bindings import driver
    from cuda.core.utils import StridedMemoryView
except ImportError as error:
    raise DeviceUnavailableError(
        f"a CUDA device needs cuda-python, which cannot be imported here ({error}): pip install cuda-python"
    ) from error

from asynctrt.devices.cuda_objects import (
    CudaBuffer,
    CudaEvent,
    CudaStream,
    OutputBuffer,
    PinnedBuffer,
)

DRIVER_MIN: Final = 12_000
"""The oldest driver, as ``cuDriverGetVersion`` counts: graphs with event nodes and graph upload need it."""

SLOTS: Final = 2
"""Batches that keep a GPU busy: while one computes, the next is copied in and waits for it there."""

CONTEXTS: Final = 4
"""One batch that is copied in, one that computes, one that is copied out, and one to spare."""

CLOSE_S: Final = 0.1
"""How long the device's own stream may take to come to rest."""

STICKY: Final = frozenset(
    getattr(driver.CUresult, name)
    for name in (
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    )
    if hasattr(driver.CUresult, name)  # Older bindings know fewer.
)
"""After one of these every later call of the process on the device fails too."""

_OK: Final = driver.CUresult.CUDA_SUCCESS
_DLPACK_CUDA: Final = 2
"""DLPack's number of CUDA's memory (``kDLCUDA``)."""
_LEGACY_STREAM: Final = 1
"""``CU_STREAM_LEGACY``: the default stream, which PyTorch and others use unless they are told otherwise."""

logger = logging.getLogger("asynctrt")


class CudaDevice:
    """One GPU, in its primary context, which it shares with the other CUDA libraries of the process.

    Engines that shall share its budget are opened with the same object; ``device="cuda:0"`` makes a new one.

    :param ordinal: as CUDA counts, ``CUDA_VISIBLE_DEVICES`` taken into account.
    :param memory_nbytes: what its buffers may come to at the most. Default: what the GPU has.
    :param slots: how many batches keep it busy; more may wait for their turn there.
    :raises DeviceUnavailableError: without a driver, with one that is too old, or without such a GPU.
    """

    def __init__(self, ordinal: int = 0, *, memory_nbytes: int | None = None, slots: int = SLOTS) -> None:
        if slots < 1:
            raise OptionsError(f"slots is at least 1, not {slots}")
        self.ordinal = ordinal
        self._slots = slots
        self._memory_nbytes = memory_nbytes
        self._lost: DeviceLostError | None = None
        # Guards what engines on several threads may change at once.
        self._lock = threading.Lock()
        self._held_nbytes = 0
        self._is_stuck = False
        cuda_device = _initialise(ordinal)
        code, self._context = driver.cuDevicePrimaryCtxRetain(cuda_device)
        self.check(code, f"the context of cuda:{ordinal}")
        self.activate()
        self._model = _text(driver.cuDeviceGetName(128, cuda_device)[1])
        major, minor, l2_nbytes = (
            int(driver.cuDeviceGetAttribute(attribute, cuda_device)[1])
            for attribute in (
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE,
            )
        )
        self.compute_capability = major, minor
        self.l2_persisting_nbytes = l2_nbytes
        code, least, greatest = driver.cuCtxGetStreamPriorityRange()
        self.check(code, "the range of stream priorities")
        self._priorities = int(least), int(greatest)
        # For what has to be done at once, whatever the streams of batches are doing.
        self._own_stream = CudaStream(self, 0)

    def __repr__(self) -> str:
        state = "lost" if self._lost else "stuck" if self._is_stuck else "ready"
        return f"<CudaDevice {self.name} {self._model!r} {state} held={self._held_nbytes}>"

    @property
    def name(self) -> str:
        return f"cuda:{self.ordinal}"

    @property
    def gpu(self) -> str:
        """What the GPU is called: ``NVIDIA H200``."""
        return self._model

    @property
    def unified(self) -> bool:
        return False

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def is_parallel(self) -> bool:
        return False

    @property
    def prefers_graphs(self) -> bool:
        return True

    @property
    def timing_is_free(self) -> bool:
        return False

    @property
    def contexts_default(self) -> int:
        return CONTEXTS

    @property
    def lost(self) -> DeviceLostError | None:
        return self._lost

    def activate(self) -> None:
        code = driver.cuCtxSetCurrent(self._context)[0]
        if code != _OK:
            raise self.failed(code, f"making {self.name} the current device")

    def memory(self) -> MemoryFigures:
        self.activate()
        code, free, total = driver.cuMemGetInfo()
        self.check(code, "asking for free memory")
        return MemoryFigures(int(free), int(total), self._held_nbytes, self._memory_nbytes)

    def create_stream(self, *, priority: int = 0) -> CudaStream:
        # CUDA's priorities are the other way round: a lower number is served first.
        least, greatest = self._priorities
        return CudaStream(self, max(min(-priority, least), greatest))

    def create_event(self, *, is_timed: bool = True) -> CudaEvent:
        return CudaEvent(self, is_timed=is_timed)

    def allocate_staging(self, nbytes: int) -> PinnedBuffer:
        return PinnedBuffer(self, nbytes)

    def allocate(self, nbytes: int) -> CudaBuffer:
        return CudaBuffer(self, nbytes)

    def close(self) -> None:
        """The context is the process's, and what libraries hold in it outlives this object."""
        self._own_stream.close(CLOSE_S)

    def import_array(self, value: object) -> DeviceArray | None:
        if isinstance(value, DeviceArray):
            if value.device.name != self.name:
                raise _elsewhere(value, value.device.name, self.name)
            return value
        dlpack = getattr(value, "__dlpack_device__", None)
        is_cuda = (
            dlpack()[0] == _DLPACK_CUDA if dlpack is not None else hasattr(value, "__cuda_array_interface__")
        )
        if not is_cuda:
            return None
        self.activate()
        with self._lock:
            # The producer puts its work in order before this stream, as both protocols ask.
            try:
                view = StridedMemoryView.from_any_interface(value, stream_ptr=self._own_stream.handle)
            except BufferError as error:
                raise InputError(f"a {type(value).__name__} on the GPU cannot be read: {error}") from error
            ready = self.create_event()
            self._own_stream.record(ready)
        if view.device_id != self.ordinal:
            raise _elsewhere(value, f"cuda:{view.device_id}", self.name)
        shape = tuple(view.shape)
        if view.strides is not None and not _is_c_order(shape, tuple(view.strides)):
            raise InputError(
                f"an array of shape {shape} on {self.name} is not in C order (strides {view.strides}). "
                "Make it contiguous first: tensor.contiguous(), cupy.ascontiguousarray(array)"
            )
        return DeviceArray(self, int(view.ptr), np.dtype(view.dtype), shape, owner=(view, value), ready=ready)

    def allocate_output(self, nbytes: int, *, stream: Stream) -> OutputBuffer:
        return OutputBuffer(self, nbytes, stream)

    def abandon(self) -> None:
        """Something on it may run for ever: from now on nothing is freed, as to free waits for all work."""
        if not self._is_stuck:
            self._is_stuck = True
            logger.error(
                "%r: work on it did not end. Its memory stays allocated until the process ends, since "
                "freeing any would wait for that work",
                self,
            )

    def take(self, nbytes: int) -> int:
        """For buffers: the address of that much zeroed memory.

        :raises DeviceMemoryError: beyond the budget, or when the GPU has no room.
        """
        self.activate()
        with self._lock:
            budget = self._memory_nbytes
            if budget is not None and self._held_nbytes + nbytes > budget:
                raise DeviceMemoryError(
                    f"{self.name} holds {self._held_nbytes} bytes of the {budget} that it may, and has no "
                    f"room for {nbytes} more. Lower max_rows, contexts or arenas, or raise memory_nbytes"
                )
            code, address = driver.cuMemAlloc(max(nbytes, ALIGNMENT))
            self.check(code, f"{nbytes} bytes of memory")
            self._held_nbytes += nbytes
        stream = self._own_stream
        try:
            code = driver.cuMemsetD8Async(address, 0, max(nbytes, ALIGNMENT), stream.handle)[0]
            self.check(code, "zeroing memory")
            self.check(driver.cuStreamSynchronize(stream.handle)[0], "zeroing memory")
        except BaseException:
            self.give_back(int(address), nbytes)
            raise
        return int(address)

    def give_back(self, address: int, nbytes: int) -> None:
        """For buffers: free memory, unless something may still be running that never ends."""
        if self._is_stuck or self._lost is not None:
            return
        self.activate()
        self.check(driver.cuMemFree(address)[0], "freeing memory")
        with self._lock:
            self._held_nbytes -= nbytes

    def free_pinned(self, address: int) -> None:
        """For pinned blocks: as :meth:`give_back`, from any thread and at any time."""
        if self._is_stuck or self._lost is not None:
            return
        driver.cuCtxPushCurrent(self._context)
        driver.cuMemFreeHost(address)
        driver.cuCtxPopCurrent()

    def free_output(self, address: int) -> None:
        """For outputs: free memory after what the default stream has been given until now."""
        if self._lost is not None:
            return
        driver.cuCtxPushCurrent(self._context)
        driver.cuMemFreeAsync(address, _LEGACY_STREAM)
        driver.cuCtxPopCurrent()

    def check(self, code: Any, what: str) -> None:
        """Raise what :meth:`failed` makes of a status that is not success."""
        if code != _OK:
            raise self.failed(code, what)

    def failed(self, code: Any, what: str) -> DeviceError:
        """The error for a status; a sticky one is remembered as the end of this device."""
        name = _text(driver.cuGetErrorName(code)[1])
        said = _text(driver.cuGetErrorString(code)[1])
        if code in STICKY:
            lost = DeviceLostError(
                f"{self.name}: {what} failed with {name} ({said}). After this error CUDA refuses every "
                "call of this process on this GPU, so nothing on it can be trusted: only a new process "
                "helps. Restart it (a supervisor can), and look for the cause with compute-sanitizer"
            )
            if self._lost is None:
                self._lost = lost
                logger.critical("%s", lost)
            return lost
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return DeviceMemoryError(
                f"{self.name} has no room for {what} ({name}); {self._memory_said()}. Lower max_rows, "
                "contexts or arenas, or end what else uses the GPU (nvidia-smi shows it)"
            )
        return DeviceError(f"{self.name}: {what} failed with {name} ({said})")

    def _memory_said(self) -> str:
        code, free, total = driver.cuMemGetInfo()
        if code != _OK:
            return "how much is free is not known"
        return str(MemoryFigures(int(free), int(total), self._held_nbytes, self._memory_nbytes))


def find_cuda_device(name: str) -> CudaDevice:
    """The GPU called ``cuda`` or ``cuda:N``.

    :raises DeviceUnavailableError: if it is not here.
    """
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if found is None:
        raise DeviceUnavailableError(f"there is no device {name!r}. A GPU is called 'cuda:0', 'cuda:1', ...")
    return CudaDevice(int(found[1] or 0))


def _initialise(ordinal: int) -> Any:
    """CUDA's device of that number, or what is missing, with the fix."""
    try:
        code = driver.cuInit(0)[0]
    except RuntimeError as error:  # cuda-python loads the driver at its first call.
        raise DeviceUnavailableError(
            f"cuda:{ordinal} cannot be used: the NVIDIA driver's library libcuda.so.1 cannot be loaded "
            f"({error}). Install the driver (nvidia-smi should work then); in a container, start it with "
            "--gpus all. Without a GPU, use device='host'"
        ) from error
    name = _text(driver.cuGetErrorName(code)[1])
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DeviceUnavailableError(
            f"cuda:{ordinal} cannot be used: the driver sees no GPU ({name}). Look at nvidia-smi and at "
            "CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all. Without a GPU, use device='host'"
        )
    if code != _OK:
        raise DeviceUnavailableError(
            f"cuda:{ordinal} cannot be used: the driver could not be started ({name}: "
            f"{_text(driver.cuGetErrorString(code)[1])}). Its kernel module and its libraries must be of one "
            "version: look at nvidia-smi, and reboot after an update of the driver"
        )
    version = int(driver.cuDriverGetVersion()[1])
    if version < DRIVER_MIN:
        raise DeviceUnavailableError(
            f"cuda:{ordinal} cannot be used: the driver supports CUDA {version // 1000}."
            f"{version % 1000 // 10}, and at least {DRIVER_MIN // 1000}.{DRIVER_MIN % 1000 // 10} is needed. "
            "Update the NVIDIA driver"
        )
    count = int(driver.cuDeviceGetCount()[1])
    if ordinal >= count:
        raise DeviceUnavailableError(
            f"there is no cuda:{ordinal}: {count} GPUs are visible, cuda:0 to cuda:{count - 1}. "
            "CUDA_VISIBLE_DEVICES may hide others"
        )
    return driver.cuDeviceGet(ordinal)[1]


def _is_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides, counted in elements, are those of an array in C order."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _elsewhere(value: object, found: str, here: str) -> InputError:
    return InputError(
        f"a {type(value).__name__} lies on {found}, and this engine runs on {here}. Move it there first, or "
        "open an engine on its device"
    )


def _text(raw: Any) -> str:
    """A C string of the driver's."""
    return raw.split(b"\0", 1)[0].decode(errors="replace") if isinstance(raw, bytes) else str(raw)
