"""Read what the operating system tells: limits, cores, clocks, the kernel's driver. Nothing is loaded."""

import os
import platform
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NVIDIA: Final = "0x10de"
"""The number of the vendor on the PCI bus."""

V1_UNLIMITED: Final = 1 << 60
"""What a cgroup of version 1 says when it has no limit is larger than this."""


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
    cgroup = _Cgroup(root)
    shm = _disk(root / "dev/shm")
    return Machine(
        kernel=platform.release(),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        quota_cores=cgroup.quota_cores(),
        throttled=cgroup.count("cpu.stat", "nr_throttled", "cpu"),
        memory_nbytes=_total_memory(root),
        memory_limit_nbytes=cgroup.memory_limit(),
        memory_used_nbytes=cgroup.memory_used(),
        oom_kills=cgroup.oom_kills(),
        shm_nbytes=shm and shm[0],
        shm_free_nbytes=shm and shm[1],
        memlock_nbytes=_limit(resource.RLIMIT_MEMLOCK),
        descriptors=_limit(resource.RLIMIT_NOFILE),
        tasks=cgroup.tasks(),
        clocksource=_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        governors=tuple(
            sorted(_texts(root / "sys/devices/system/cpu", "cpu[0-9]*/cpufreq/scaling_governor"))
        ),
        scaling_driver=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"),
        gpus_on_the_bus=sum(_is_gpu(device) for device in _listed(root / "sys/bus/pci/devices", "*")),
        device_nodes=tuple(
            f"/dev/{path.name}" for glob in ("nvidia*", "dxg") for path in _listed(root / "dev", glob)
        ),
        kernel_driver=_kernel_driver(root),
        mps_daemons=sum(
            name == "nvidia-cuda-mps" for name in map(_text, _listed(root / "proc", "[0-9]*/comm"))
        ),
    )


class _Cgroup:
    """The control group of this process, of version 2 or 1, and those around it."""

    def __init__(self, root: Path) -> None:
        self._top = root / "sys/fs/cgroup"
        self._paths = {}
        for line in (_text(root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", maxsplit=2)
            for controller in controllers.split(","):
                self._paths[controller] = path.lstrip("/")

    def quota_cores(self) -> float | None:
        found = []
        for folder in self._folders("cpu"):
            quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
            if not quota:
                quota = _text(folder / "cpu.cfs_quota_us") or ""
                period = _text(folder / "cpu.cfs_period_us") or ""
            if quota.isdigit() and period.isdigit() and int(period):
                found.append(int(quota) / int(period))
        return min(found, default=None)

    def memory_limit(self) -> int | None:
        found = []
        for folder in self._folders("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                limit = _text(folder / name) or ""
                if limit.isdigit() and int(limit) < V1_UNLIMITED:
                    found.append(int(limit))
        return min(found, default=None)

    def tasks(self) -> int | None:
        limits = [_text(folder / "pids.max") or "" for folder in self._folders("pids")]
        return min([int(limit) for limit in limits if limit.isdigit()], default=None)

    def memory_used(self) -> int | None:
        for folder in self._folders("memory"):
            for name, files in (
                ("memory.current", "inactive_file"),
                ("memory.usage_in_bytes", "total_inactive_file"),
            ):
                used = _text(folder / name) or ""
                if used.isdigit():
                    return max(0, int(used) - (_field(folder / "memory.stat", files) or 0))
        return None

    def oom_kills(self) -> int | None:
        told = self.count("memory.events", "oom_kill", "memory")
        return self.count("memory.oom_control", "oom_kill", "memory") if told is None else told

    def count(self, file: str, name: str, controller: str) -> int | None:
        """Return a number that the nearest group tells."""
        for folder in self._folders(controller):
            value = _field(folder / file, name)
            if value is not None:
                return value
        return None

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the groups, the innermost first; in a container only some are visible."""
        for top, path in (
            (self._top / controller, self._paths.get(controller)),
            (self._top, self._paths.get("")),
        ):
            if path is None:
                continue
            inner = top / path
            while inner != top and top in inner.parents:
                yield inner
                inner = inner.parent
            yield top


def _total_memory(root: Path) -> int | None:
    kib = _field(root / "proc/meminfo", "MemTotal:")
    return None if kib is None else kib * 1024


def _kernel_driver(root: Path) -> str | None:
    """Return the version in the first line: ``... Module for x86_64  580.95.05  Release Build ...``."""
    first = (_text(root / "proc/driver/nvidia/version") or "").partition("\n")[0]
    return next((word for word in first.split() if word[0].isdigit() and "." in word), None)


def _is_gpu(device: Path) -> bool:
    # Classes 0x0300 and 0x0302: with a screen and without. A GPU has an audio device beside it.
    return _text(device / "vendor") == NVIDIA and (_text(device / "class") or "").startswith("0x03")


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _disk(path: Path) -> tuple[int, int] | None:
    try:
        told = os.statvfs(path)
    except OSError:
        return None
    return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize


def _field(path: Path, name: str) -> int | None:
    """Return the number that follows a name at the beginning of a line."""
    for line in (_text(path) or "").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _texts(folder: Path, glob: str) -> set[str]:
    return {text for path in _listed(folder, glob) if (text := _text(path)) is not None}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _listed(folder: Path, glob: str) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.glob(glob))
    return []
