"""Initialise CUDA and list its devices, using only libcuda."""

import ctypes
from typing import Any, Final

ATTRIBUTES: Final = {"major": 75, "minor": 76}
"""Attributes of a device by their numbers in ``CUdevice_attribute``."""


def probe() -> dict[str, Any]:
    """Return the CUDA version of the driver, how ``cuInit`` ended, and the devices."""
    cuda = ctypes.CDLL("libcuda.so.1")
    version, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    cuda.cuGetErrorName(code, ctypes.byref(text))
    return {
        "version": version.value,
        "init": {"code": code, "name": (text.value or b"").decode()},
        "devices": [_device(cuda, ordinal) for ordinal in range(count.value)],
    }


def _device(cuda: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    values = {}
    for attribute, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        is_told = not cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        values[attribute] = value.value if is_told else None
    return {"name": name.value.decode(errors="replace"), **values}
