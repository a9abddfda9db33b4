"""Detect GPUs. Without one, the suites run on the host device with the strict double."""

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
