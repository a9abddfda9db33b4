"""Read what the operating system tells: limits, cores, clocks, the kernel's driver. Nothing is loaded."""

import os
import platform
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctrt.cgroup import Cgroup, text_of, total_memory

NVIDIA: Final = "0x10de"
"""The number of the vendor on the PCI bus."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the operating system tells. What it does not tell is ``None``."""

    kernel: str
    cores: int
    """Cores that the machine has."""
    usable_cores: int
    """Cores that this process may run on (its affinity)."""
    quota_cores: float | None
    """Time of cores that the container may use."""
    throttled: int | None
    """Periods in which the container had used up its time."""
    memory_nbytes: int | None
    memory_limit_nbytes: int | None
    """What the container may use."""
    memory_used_nbytes: int | None
    """What the container uses, without files that could be dropped."""
    oom_kills: int | None
    """Processes of the container that were killed as its memory was used up."""
    shm_nbytes: int | None
    """Size of ``/dev/shm``."""
    shm_free_nbytes: int | None
    memlock_nbytes: int | None
    """Memory that a process may lock; ``None``: any amount."""
    descriptors: int | None
    """Open files that a process may have; ``None``: any number."""
    tasks: int | None
    """Processes and threads that the container may have; ``None``: any number, as far as is known."""
    clocksource: str | None
    governors: tuple[str, ...]
    """How the frequencies of cores are chosen: every kind that occurs."""
    scaling_driver: str | None
    gpus_on_the_bus: int
    """NVIDIA's GPUs on the PCI bus."""
    device_nodes: tuple[str, ...]
    """``/dev/nvidia*``, and ``/dev/dxg`` of WSL."""
    kernel_driver: str | None
    """The version of the NVIDIA driver in the kernel."""
    mps_daemons: int
    """Running control daemons of MPS that can be seen."""


def read_machine(root: Path = Path("/")) -> Machine:
    """Return what the operating system tells.

    :param root: the folder that has ``proc``, ``sys`` and ``dev``, for tests.
    """
    cgroup = Cgroup(root)
    shm = _disk(root / "dev/shm")
    return Machine(
        kernel=platform.release(),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        quota_cores=cgroup.quota_cores(),
        throttled=cgroup.count("cpu.stat", "nr_throttled", "cpu"),
        memory_nbytes=total_memory(root),
        memory_limit_nbytes=cgroup.memory_limit(),
        memory_used_nbytes=cgroup.memory_used(),
        oom_kills=cgroup.oom_kills(),
        shm_nbytes=shm and shm[0],
        shm_free_nbytes=shm and shm[1],
        memlock_nbytes=_limit(resource.RLIMIT_MEMLOCK),
        descriptors=_limit(resource.RLIMIT_NOFILE),
        tasks=cgroup.tasks(),
        clocksource=text_of(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        governors=tuple(
            sorted(_texts(root / "sys/devices/system/cpu", "cpu[0-9]*/cpufreq/scaling_governor"))
        ),
        scaling_driver=text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"),
        gpus_on_the_bus=sum(_is_gpu(device) for device in _listed(root / "sys/bus/pci/devices", "*")),
        device_nodes=tuple(
            f"/dev/{path.name}" for glob in ("nvidia*", "dxg") for path in _listed(root / "dev", glob)
        ),
        kernel_driver=_kernel_driver(root),
        mps_daemons=sum(
            name == "nvidia-cuda-mps" for name in map(text_of, _listed(root / "proc", "[0-9]*/comm"))
        ),
    )


def _kernel_driver(root: Path) -> str | None:
    """Return the version in the first line: ``... Module for x86_64  580.95.05  Release Build ...``."""
    first = (text_of(root / "proc/driver/nvidia/version") or "").partition("\n")[0]
    return next((word for word in first.split() if word[0].isdigit() and "." in word), None)


def _is_gpu(device: Path) -> bool:
    # Classes 0x0300 and 0x0302: with a screen and without. A GPU has an audio device beside it.
    return text_of(device / "vendor") == NVIDIA and (text_of(device / "class") or "").startswith("0x03")


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _disk(path: Path) -> tuple[int, int] | None:
    try:
        told = os.statvfs(path)
    except OSError:
        return None
    return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize


def _texts(folder: Path, glob: str) -> set[str]:
    return {text for path in _listed(folder, glob) if (text := text_of(path)) is not None}


def _listed(folder: Path, glob: str) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.glob(glob))
    return []
