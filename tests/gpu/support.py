"""Detect GPUs. Without one, the suites run on the host device with the strict double."""

import os
from functools import cache
from importlib.util import find_spec


@cache
def gpu_count():
    """Return how many GPUs the driver sees."""
    try:
        from cuda.bindings import driver

        return int(driver.cuDeviceGetCount()[1]) if driver.cuInit(0)[0] == 0 else 0
    except (ImportError, RuntimeError):
        return 0


def gpu_is_here():
    """Return whether the driver sees a GPU."""
    return gpu_count() > 0


@cache
def torch_is_here():
    """Return whether PyTorch is installed and sees the GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def memory_of_process(ordinal):
    """Return the bytes of a GPU that this process has taken, or ``None`` where the driver does not tell.

    It numbers processes as the machine does, not as a container: only one that is alone there is told.
    """
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        found = nvml.device_get_compute_running_processes_v3(nvml.device_get_handle_by_index_v2(ordinal))
        own = [int(process.used_gpu_memory) for process in found if int(process.pid) == os.getpid()]
    except Exception:  # Bindings without it, a driver that refuses.
        return None
    return own[0] if own and 0 < own[0] < 1 << 48 else None
