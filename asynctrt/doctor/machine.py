"""Read limits, cores and signs of a GPU from the operating system. No library is loaded."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asynctrt._util.cgroup import Cgroup, text_of, total_memory

NVIDIA: Final = "0x10de"
"""NVIDIA's vendor id on the PCI bus."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine as the operating system describes it. A missing or unknown limit is ``None``."""

    usable_cores: int
    """Cores that this process may run on (its affinity)."""
    quota_cores: float | None
    """The CPU quota of the container, in cores."""
    memory_nbytes: int | None
    memory_limit_nbytes: int | None
    """The memory that the container may use."""
    memory_used_nbytes: int | None
    """The memory that the container uses, without cached files that could be dropped."""
    oom_kills: int | None
    """Processes of the container that were killed because its memory was used up."""
    descriptors: int | None
    """The maximum number of open files of a process."""
    gpu_signs: tuple[str, ...]
    """``/dev/nvidia*``, ``/dev/dxg`` of WSL, and the PCI paths of NVIDIA's GPUs."""


def read_machine(root: Path = Path("/")) -> Machine:
    """Read the facts about the machine from the operating system.

    :param root: the folder with ``proc``, ``sys`` and ``dev``, for tests.
    """
    cgroup = Cgroup(root)
    return Machine(
        usable_cores=len(os.sched_getaffinity(0)),
        quota_cores=cgroup.quota_cores(),
        memory_nbytes=total_memory(root),
        memory_limit_nbytes=cgroup.memory_limit(),
        memory_used_nbytes=cgroup.memory_used(),
        oom_kills=cgroup.oom_kills(),
        descriptors=_descriptors(),
        gpu_signs=tuple(f"/{path.relative_to(root)}" for path in _gpu_signs(root)),
    )


def _gpu_signs(root: Path) -> Iterator[Path]:
    yield from sorted((root / "dev").glob("nvidia*"))
    yield from (root / "dev").glob("dxg")
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        # Classes 0x0300 and 0x0302: with a screen and without. A GPU has an audio device beside it.
        if text_of(device / "vendor") == NVIDIA and (text_of(device / "class") or "").startswith("0x03"):
            yield device


def _descriptors() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
