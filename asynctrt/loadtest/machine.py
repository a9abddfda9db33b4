"""Measures the memory and GPU usage of a run.

The only importer of ``psutil`` and of ``pynvml`` (nvidia-ml-py).
"""

import contextlib
import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from asynctrt.engine import Engine
from asynctrt.errors import MissingExtraError
from asynctrt.loadtest.report import Resources
from asynctrt.loadtest.targets import TargetSpec

try:
    import psutil
    import pynvml
except ImportError as error:
    raise MissingExtraError(
        "load tests need psutil and nvidia-ml-py: pip install 'asynctrt[load]'"
    ) from error


def available_nbytes() -> int:
    """Return how much memory is available without swapping."""
    return int(psutil.virtual_memory().available)


class ResourceMonitor:
    """Sample processes and a GPU during a run, and report the largest or the mean values.

    :param pids: the sending processes.
    :param gpu: the index of the GPU on which the target computes; ``None`` if there is none, or it is
        unknown.
    """

    def __init__(self, pids: Sequence[int], gpu: int | None) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._memory_nbytes = 0
        self._gpu: Any = None
        self._gpu_name: str | None = None
        self._gpu_nbytes = 0
        self._shares: list[float] = []
        self._watts: list[float] = []
        if gpu is not None:
            # Without a driver or this GPU, report nothing about it.
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._gpu = pynvml.nvmlDeviceGetHandleByIndex(gpu)
                self._gpu_name = str(pynvml.nvmlDeviceGetName(self._gpu))

    def look(self) -> None:
        """Take one sample."""
        nbytes = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                nbytes += process.memory_info().rss
        self._memory_nbytes = max(self._memory_nbytes, nbytes)
        if self._gpu is None:
            return
        # Some GPUs, such as virtual ones, do not support every query.
        with contextlib.suppress(pynvml.NVMLError):
            self._shares.append(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu / 100)
        with contextlib.suppress(pynvml.NVMLError):
            self._gpu_nbytes = max(self._gpu_nbytes, int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used))
        with contextlib.suppress(pynvml.NVMLError):
            self._watts.append(pynvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000)

    def close(self, cores: float | None) -> Resources:
        """Stop sampling, and return the resources used.

        :param cores: the CPU use of the processes, as measured by themselves.
        """
        if self._gpu is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        return Resources(
            generator_cores=cores,
            memory_mb=self._memory_nbytes / 1e6 if self._memory_nbytes else None,
            gpu_name=self._gpu_name,
            gpu_share=sum(self._shares) / len(self._shares) if self._shares else None,
            gpu_memory_mb=self._gpu_nbytes / 1e6 if self._gpu_nbytes else None,
            gpu_watts=sum(self._watts) / len(self._watts) if self._watts else None,
        )


def gpu_of(target: Any) -> int | None:
    """Return the index of this machine's GPU on which a target may compute; ``None`` if there is none."""
    if isinstance(target, Engine):
        device = target.device_name
    elif not isinstance(target, TargetSpec):
        device = ""
    elif target.is_server:
        # A server on this machine may use its first GPU. GPUs of other machines are not visible here.
        device = "cuda" if _is_here(urlsplit(target.where).hostname or "") else ""
    else:
        device = target.device
    if not device.startswith("cuda"):
        return None
    _, _, number = device.partition(":")
    return int(number) if number.isdigit() else 0


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
