"""A GPU as a device, and its lookup by name."""

import logging
import os
import re
from typing import Any, Final

import numpy as np

from asynctrt.devices.base import Buffer, DeviceArray, check_share
from asynctrt.devices.cuda.bindings import StridedMemoryView, driver
from asynctrt.devices.cuda.context import CudaContext, text_of
from asynctrt.devices.cuda.memory import CudaBuffer, OrderedBuffer, PinnedBuffer
from asynctrt.devices.cuda.streams import CudaEvent, CudaStream
from asynctrt.errors import DeviceUnavailableError, InputError, UsageError, show

QUEUES: Final = "32"
"""The number of hardware queues that the streams of a process share on a GPU: the maximum in CUDA
(``CUDA_DEVICE_MAX_CONNECTIONS``, CUDA C++ Programming Guide, environment variables)."""

DRIVER_MIN: Final = 12_000
"""The oldest supported driver, in the format of ``cuDriverGetVersion``: graph upload needs it."""

CLOSE_S: Final = 0.1
"""How long to wait for the device's private stream when the device is closed."""

logger = logging.getLogger("asynctrt")

_OK: Final = driver.CUresult.CUDA_SUCCESS
_LAZY: Final = driver.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING
_DLPACK_CUDA: Final = 2
"""DLPack's number for CUDA memory (``kDLCUDA``)."""


class CudaDevice(CudaContext):
    """One GPU, in its primary context, which is shared with other CUDA libraries in the process.

    Engines opened with the same object share its budget; ``device="cuda:0"`` creates a new one.

    :param ordinal: the number of the GPU among those in ``CUDA_VISIBLE_DEVICES``.
    :param memory_nbytes: the most that its buffers may hold. Default: no limit but the GPU's.
    :raises DeviceUnavailableError: if the driver is missing or too old, or there is no such GPU.
    :raises DeviceLostError: if the GPU was lost in this process.
    """

    unified = False
    is_parallel = False
    is_pipelined = True
    prefers_graphs = True
    timing_is_free = False
    concurrency = 2
    """While one batch computes, the next is copied in and waits."""
    contexts_default = 2 * concurrency
    """One each for the batch being copied in, computed and copied out, and a spare."""

    def __init__(self, ordinal: int = 0, *, memory_nbytes: int | None = None) -> None:
        cuda_device = _initialise(ordinal)
        super().__init__(cuda_device, ordinal, memory_nbytes)
        self._cuda_device = cuda_device
        self.gpu = text_of(driver.cuDeviceGetName(128, cuda_device)[1])
        major, minor, is_integrated = (
            int(driver.cuDeviceGetAttribute(attribute, cuda_device)[1])
            for attribute in (
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED,
            )
        )
        self.compute_capability = major, minor
        self.is_integrated = bool(is_integrated)
        code, mode = driver.cuModuleGetLoadingMode()
        self.check(code, "asking how kernels are loaded")
        if mode != _LAZY:
            logger.warning(
                "%s: CUDA loads every kernel of every library at once (CUDA_MODULE_LOADING is %r), which "
                "takes memory and time. Leave the variable out, or set it to LAZY",
                self.name,
                os.environ.get("CUDA_MODULE_LOADING", "not set"),
            )
        # For work that must not wait for the streams of batches.
        self._own_stream = CudaStream(self)

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name} {self.gpu!r} {self.state} held={self._account.held_nbytes}>"

    @property
    def whole(self) -> "CudaDevice":
        return self

    def partition(self, share: float) -> "tuple[CudaDevice, CudaDevice]":
        """Divide its multiprocessors (CUDA's green contexts); stream priorities do not isolate work."""
        check_share(self, share)
        some, rest = self._divided(share)
        first = CudaPart(self, some)
        try:
            return first, CudaPart(self, rest)
        except BaseException:
            first.close()
            raise

    def _divided(self, share: float) -> tuple[Any, Any]:
        """Return two sets of multiprocessors as CUDA resources."""
        if not hasattr(driver, "cuGreenCtxCreate"):
            raise DeviceUnavailableError(
                f"{self.name} cannot be divided by this version of cuda-python. Update it: pip install -U "
                "cuda-python"
            )
        self.activate()
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        code, whole = driver.cuDeviceGetDevResource(self._cuda_device, kind)
        if code == _OK:
            # CUDA rounds the number up to its granularity (8 on an H200).
            wanted = max(1, round(whole.sm.smCount * share))
            code, groups, _, rest = driver.cuDevSmResourceSplitByCount(1, whole, 0, wanted)
        if code != _OK or not rest.sm.smCount:
            raise DeviceUnavailableError(
                f"{self.name} ({self.gpu}) cannot be divided into {share:.0%} and the rest: "
                f"{text_of(driver.cuGetErrorName(code)[1])}. Green contexts need a driver for CUDA 12.4 or "
                "later and a GPU with enough multiprocessors; try another share"
            )
        return groups[0], rest

    def create_stream(self) -> CudaStream:
        return CudaStream(self)

    def create_event(self, *, is_timed: bool = True) -> CudaEvent:
        return CudaEvent(self, is_timed=is_timed)

    def allocate_staging(self, nbytes: int) -> PinnedBuffer:
        return PinnedBuffer(self, nbytes)

    def allocate(self, nbytes: int) -> CudaBuffer:
        return CudaBuffer(self, nbytes, zeroed_on=self._own_stream.handle)

    def close(self) -> None:
        """Destroy its private stream. The context stays for other libraries in the process."""
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
            # The producer orders its work before this stream, as both protocols require.
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

    def allocate_ordered(self, nbytes: int, *, stream: int) -> OrderedBuffer:
        return OrderedBuffer(self, nbytes, stream)

    def free_ordered(self, buffer: Buffer, *, stream: int) -> None:
        assert isinstance(buffer, OrderedBuffer)
        buffer.close_on(stream)


class CudaPart(CudaDevice):
    """Some multiprocessors of a GPU. Work and graphs on its streams run only there; the rest is shared."""

    def __init__(self, whole: CudaDevice, resource: Any) -> None:
        self.__dict__.update(whole.__dict__)
        self._whole = whole
        self._multiprocessors = int(resource.sm.smCount)
        code, description = driver.cuDevResourceGenerateDesc([resource], 1)
        self.check(code, "describing a part")
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        code, self._green = driver.cuGreenCtxCreate(description, self._cuda_device, flags)
        self.check(code, "making a green context")

    def __repr__(self) -> str:
        return (
            f"<CudaPart {self.name} {self.gpu!r} {self.state} multiprocessors={self._multiprocessors} "
            f"held={self._account.held_nbytes}>"
        )

    @property
    def whole(self) -> CudaDevice:
        return self._whole

    def create_stream(self) -> CudaStream:
        if self._green is None:
            raise UsageError(f"{self!r} is closed. Divide the device again")
        return CudaStream(self, green=self._green)

    def close(self) -> None:
        green, self._green = self._green, None
        if green is not None and self.lost is None:
            self.check(driver.cuGreenCtxDestroy(green)[0], "destroying a green context")


def find_cuda_device(name: str) -> CudaDevice:
    """Return the GPU called ``cuda`` or ``cuda:N``."""
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if found is None:
        by_uuid = ". A UUID names one with isolation='process'; or set CUDA_VISIBLE_DEVICES to it"
        raise DeviceUnavailableError(
            f"{show(name)} is not a device of this process. A GPU is called 'cuda:0', 'cuda:1', ..."
            f"{by_uuid * name.startswith(('cuda:MIG-', 'cuda:GPU-'))}"
        )
    return CudaDevice(int(found[1] or 0))


def _initialise(ordinal: int) -> Any:
    """Start the driver, and return its handle for the GPU with that number."""
    # By default the streams of a process share 8 hardware queues of the GPU, so a batch in one stream may
    # wait for a batch in another although both would fit. CUDA reads the variable when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES)
    try:
        code = driver.cuInit(0)[0]
    except RuntimeError as error:  # cuda-python loads the driver on the first call.
        raise DeviceUnavailableError(
            f"cuda:{ordinal} cannot be used: the NVIDIA driver's library libcuda.so.1 cannot be loaded "
            f"({error}). Install the driver (nvidia-smi should work then); in a container, start it with "
            "--gpus all. Without a GPU, use device='host'"
        ) from error
    name = text_of(driver.cuGetErrorName(code)[1])
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DeviceUnavailableError(
            f"cuda:{ordinal} cannot be used: the driver sees no GPU ({name}). Look at nvidia-smi and at "
            "CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all. Without a GPU, use device='host'"
        )
    if code != _OK:
        raise DeviceUnavailableError(
            f"cuda:{ordinal} cannot be used: the driver could not be started ({name}: "
            f"{text_of(driver.cuGetErrorString(code)[1])}). Its kernel module and its libraries must "
            "be of one version: look at nvidia-smi, and reboot after an update of the driver"
        )
    version = int(driver.cuDriverGetVersion()[1])
    if version < DRIVER_MIN:
        raise DeviceUnavailableError(
            f"cuda:{ordinal} cannot be used: the driver supports CUDA {_cuda_version(version)}, and at "
            f"least {_cuda_version(DRIVER_MIN)} is needed. Update the NVIDIA driver"
        )
    count = int(driver.cuDeviceGetCount()[1])
    if ordinal >= count:
        raise DeviceUnavailableError(
            f"there is no cuda:{ordinal}: {count} GPUs are visible, cuda:0 to cuda:{count - 1}. "
            "CUDA_VISIBLE_DEVICES may hide others"
        )
    return driver.cuDeviceGet(ordinal)[1]


def _cuda_version(number: int) -> str:
    """Return a version in the driver's notation as text: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _is_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether strides, in elements, match an array in C order."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _elsewhere(value: object, found: str, here: str) -> InputError:
    return InputError(
        f"a {type(value).__name__} is on {found}, but this engine runs on {here}. Move it there first, or "
        "open an engine on its device"
    )
