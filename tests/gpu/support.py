"""Whether there is a GPU. Where there is none, the suites run on the host device with the strict double."""

from functools import cache
from importlib.util import find_spec


@cache
def gpu_is_here():
    """Whether the driver sees a GPU."""
    try:
        from cuda.bindings import driver

        return driver.cuInit(0)[0] == 0 and driver.cuDeviceGetCount()[1] > 0
    except (ImportError, RuntimeError):
        return False


@cache
def torch_is_here():
    """Whether PyTorch is installed, and sees the GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
