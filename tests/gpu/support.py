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


def processes_on(ordinal):
    """Return, by the number of each process that has a context on a GPU, the bytes that it has taken there.

    A driver in a container may tell of none, or number them as the machine does.
    """
    from cuda.bindings import nvml

    nvml.init_v2()
    found = nvml.device_get_compute_running_processes_v3(nvml.device_get_handle_by_index_v2(ordinal))
    return {int(process.pid): int(process.used_gpu_memory) for process in found}


def memory_of_process(ordinal):
    """Return the bytes of a GPU that this process has taken, or ``None`` where the driver does not tell."""
    try:
        own = processes_on(ordinal).get(os.getpid())
    except Exception:  # Bindings without it, a driver that refuses.
        return None
    return own if own and 0 < own < 1 << 48 else None
