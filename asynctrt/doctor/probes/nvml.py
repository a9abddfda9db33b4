"""Ask NVIDIA's management library (libnvidia-ml) about every GPU, using only that library."""

import ctypes
from typing import Any


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def probe() -> dict[str, Any]:
    """Return the state of each GPU, or why it cannot be read."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    status = nvml.nvmlInit_v2()
    if status:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        return {"error": (nvml.nvmlErrorString(status) or b"").decode(errors="replace") or f"error {status}"}
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return {"gpus": [_gpu(nvml, index) for index in range(count.value)]}


def _gpu(nvml: ctypes.CDLL, index: int) -> dict[str, Any]:
    """Return the state of one GPU; a value that a virtual GPU or an old driver lacks is ``None``."""
    handle = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    name = ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetName(handle, name, len(name))
    memory = _Memory()
    has_memory = not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    mig = _numbers(nvml, "nvmlDeviceGetMigMode", handle, 2)
    parts = _numbers(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle, 1) if mig else None
    return {
        "name": name.value.decode(errors="replace"),
        "free_nbytes": memory.free if has_memory else None,
        "total_nbytes": memory.total if has_memory else None,
        "mig": mig and mig[0],
        "mig_parts": sum(_has_part(nvml, handle, part) for part in range(parts[0] if parts else 0)),
    }


def _numbers(nvml: ctypes.CDLL, function: str, handle: ctypes.c_void_p, count: int) -> list[int] | None:
    """Return the numbers that an NVML function writes, or ``None`` if it is not supported."""
    values = [ctypes.c_uint() for _ in range(count)]
    if not hasattr(nvml, function) or getattr(nvml, function)(handle, *map(ctypes.byref, values)):
        return None
    return [value.value for value in values]


def _has_part(nvml: ctypes.CDLL, handle: ctypes.c_void_p, index: int) -> bool:
    return not nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index, ctypes.byref(ctypes.c_void_p()))
