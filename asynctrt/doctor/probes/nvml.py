"""Ask NVIDIA's management library about every GPU, through cuda-python or nvidia-ml-py.

One of the importers of ``cuda`` and of ``pynvml``: a program of its own, so that a driver that hangs here
holds up nothing else.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

BINDINGS: Final = {
    "cuda.bindings.nvml": {
        "init": "init_v2",
        "driver": "system_get_driver_version",
        "count": "device_get_count_v2",
        "handle": "device_get_handle_by_index_v2",
        "name": "device_get_name",
        "uuid": "device_get_uuid",
        "memory": "device_get_memory_info_v2",
        "mig": "device_get_mig_mode",
        "mig_count": "device_get_max_mig_device_count",
        "mig_handle": "device_get_mig_device_handle_by_index",
        "compute_mode": "device_get_compute_mode",
        "persistence": "device_get_persistence_mode",
        "clock": "device_get_clock_info",
        "clock_max": "device_get_max_clock_info",
        "slowed": "device_get_current_clocks_event_reasons",
        "processes": "device_get_compute_running_processes_v3",
        "mps_processes": "device_get_mps_compute_running_processes_v3",
        "remapped": "device_get_remapped_rows",
    },
    "pynvml": {
        "init": "nvmlInit",
        "driver": "nvmlSystemGetDriverVersion",
        "count": "nvmlDeviceGetCount",
        "handle": "nvmlDeviceGetHandleByIndex",
        "name": "nvmlDeviceGetName",
        "uuid": "nvmlDeviceGetUUID",
        "memory": "nvmlDeviceGetMemoryInfo",
        "mig": "nvmlDeviceGetMigMode",
        "mig_count": "nvmlDeviceGetMaxMigDeviceCount",
        "mig_handle": "nvmlDeviceGetMigDeviceHandleByIndex",
        "compute_mode": "nvmlDeviceGetComputeMode",
        "persistence": "nvmlDeviceGetPersistenceMode",
        "clock": "nvmlDeviceGetClockInfo",
        "clock_max": "nvmlDeviceGetMaxClockInfo",
        "slowed": "nvmlDeviceGetCurrentClocksEventReasons",
        "processes": "nvmlDeviceGetComputeRunningProcesses",
        "mps_processes": "nvmlDeviceGetMPSComputeRunningProcesses",
        "remapped": "nvmlDeviceGetRemappedRows",
    },
}
"""Packages that speak to the library, the first preferred, and what they call each question."""

SM_CLOCK: Final = 1
"""``NVML_CLOCK_SM``."""


class Nvml:
    """The library through one package. What a GPU does not tell is ``None``."""

    def __init__(self, module: Any, names: dict[str, str]) -> None:
        self._module = module
        self._names = names

    def __repr__(self) -> str:
        return f"<Nvml through {self._module.__name__}>"

    def ask(self, question: str, *about: Any) -> Any:
        """Return the answer to a question, or raise what the package raises."""
        return getattr(self._module, self._names[question])(*about)

    def told(self, question: str, *about: Any, read: Callable[[Any], Any] = int) -> Any:
        """Return the answer as ``read`` reads it; ``None`` if there is none."""
        try:
            return read(self.ask(question, *about))
        except Exception:
            return None  # A virtual GPU, an old driver or an old package lacks one thing or another.


def probe() -> dict[str, Any]:
    """Return the driver's version and what each GPU tells, or why nothing can be known."""
    missing = []
    for name, names in BINDINGS.items():
        try:
            module = import_module(name)
        except ImportError:
            missing.append(name)
            continue
        nvml = Nvml(module, names)
        try:
            nvml.ask("init")
        except Exception as error:
            return {"through": name, "error": f"{type(error).__name__}: {error}"}
        return {"through": name, **read(nvml)}
    return {"error": f"none of {', '.join(missing)} can be imported"}


def read(nvml: Nvml) -> dict[str, Any]:
    """Return what the library tells once it is initialised."""
    count = nvml.told("count") or 0
    return {
        "driver": nvml.told("driver", read=str),
        "gpus": [_gpu(nvml, nvml.ask("handle", index)) for index in range(count)],
    }


def _gpu(nvml: Nvml, handle: Any) -> dict[str, Any]:
    memory = nvml.told("memory", handle, read=lambda told: (int(told.free), int(told.total)))
    parts = range(nvml.told("mig_count", handle) or 0)
    return {
        "name": nvml.told("name", handle, read=str),
        "uuid": nvml.told("uuid", handle, read=str),
        "free_nbytes": memory and memory[0],
        "total_nbytes": memory and memory[1],
        "mig": nvml.told("mig", handle, read=lambda told: int(told[0])),
        "mig_parts": sum(nvml.told("mig_handle", handle, part, read=bool) is not None for part in parts),
        "compute_mode": nvml.told("compute_mode", handle),
        "persistence": nvml.told("persistence", handle),
        "clock_mhz": nvml.told("clock", handle, SM_CLOCK),
        "clock_max_mhz": nvml.told("clock_max", handle, SM_CLOCK),
        "slowed": nvml.told("slowed", handle),
        "processes": nvml.told("processes", handle, read=len),
        "mps_processes": nvml.told("mps_processes", handle, read=len),
        "remapped": nvml.told("remapped", handle, read=lambda told: [int(part) for part in told]),
    }
