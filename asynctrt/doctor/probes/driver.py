"""Initialise CUDA and list its devices, through libcuda alone."""

import ctypes
from typing import Any, Final

ATTRIBUTES: Final = {
    "major": 75,
    "minor": 76,
    "multiprocessors": 16,
    "integrated": 18,
    "compute_mode": 20,
}
"""Attributes of a device by their numbers in ``CUdevice_attribute``."""


def probe() -> dict[str, Any]:
    """Return the version of the driver, how ``cuInit`` ended, and the devices."""
    cuda = ctypes.CDLL("libcuda.so.1")
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    found: dict[str, Any] = {"version": version.value, "devices": []}
    found["init"] = _status(cuda, cuda.cuInit(0))
    if found["init"]["code"]:
        return found
    count = ctypes.c_int()
    found["count"] = _status(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)))
    found["devices"] = [_device(cuda, ordinal) for ordinal in range(count.value)]
    return found


def _device(cuda: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    nbytes = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    values = {}
    for attribute, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        is_told = not cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        values[attribute] = value.value if is_told else None
    return {"name": name.value.decode(errors="replace"), "memory_nbytes": nbytes.value, **values}


def _status(cuda: ctypes.CDLL, code: int) -> dict[str, Any]:
    text = ctypes.c_char_p()
    is_known = hasattr(cuda, "cuGetErrorName") and not cuda.cuGetErrorName(code, ctypes.byref(text))
    return {"code": code, "name": (text.value or b"").decode() if is_known else ""}
