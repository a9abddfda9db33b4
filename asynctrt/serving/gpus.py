"""Read the state of this machine's GPUs from NVIDIA's management library. An importer of ``pynvml``.

The library is optional: without the package (``pip install 'asynctrt[nvml]'``) or a driver, there are no
readings. All calls may block, so make them in a thread.
"""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

logger = logging.getLogger("asynctrt.serving")


class GpuFigures(NamedTuple):
    """One GPU at one moment. Values that the GPU does not report are ``None``."""

    uuid: str
    utilization: float | None
    """The fraction of recent time in which anything ran on it, 0 to 1."""
    memory_nbytes: int | None
    used_nbytes: int | None
    watts: float | None


class Gpus:
    """Reader of all GPUs that the library sees. Its methods may be called from any one thread at a time."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[tuple[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"<Gpus {[uuid for uuid, _ in self._handles or ()]}>"

    def read(self) -> list[GpuFigures]:
        """Return a reading of each GPU; empty without the package, a driver or a GPU."""
        if self._handles is None:
            self._handles = self._open()
        return [self._reading(uuid, handle) for uuid, handle in self._handles]

    def _reading(self, uuid: str, handle: Any) -> GpuFigures:
        nvml = self._nvml
        rates = _told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = _told(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuFigures(
            uuid,
            None if rates is None else rates.gpu / 100,
            None if memory is None else int(memory.total),
            None if memory is None else int(memory.used),
            None if milliwatts is None else milliwatts / 1000,
        )

    def close(self) -> None:
        """Close the library. Idempotent."""
        nvml, self._nvml, self._handles = self._nvml, None, []
        if nvml is not None:
            _told(nvml, nvml.nvmlShutdown)

    def _open(self) -> list[tuple[str, Any]]:
        if find_spec("pynvml") is None:
            return []
        import pynvml  # noqa: PLC0415  (the package is optional)

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.debug("no metrics of GPUs: %s", error)
            return []
        self._nvml = pynvml
        handles = []
        for number in range(_told(pynvml, pynvml.nvmlDeviceGetCount) or 0):
            handle = _told(pynvml, pynvml.nvmlDeviceGetHandleByIndex, number)
            uuid = None if handle is None else _told(pynvml, pynvml.nvmlDeviceGetUUID, handle)
            if uuid is not None:
                handles.append((str(uuid), handle))
        return handles


def _told(nvml: Any, ask: Callable[..., Any], *about: Any) -> Any:
    """Return what ``ask`` returns, or ``None`` if the GPU does not report it, as with some virtual GPUs."""
    try:
        return ask(*about)
    except nvml.NVMLError:
        return None
