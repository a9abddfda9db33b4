"""The operating system: memory and cores of the container, open files."""

from collections.abc import Iterator
from typing import Final

from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, note, ok, warning
from asynctrt.doctor.machine import Machine

MEMORY_SHARE: Final = 0.1
"""With a smaller share of memory left, the next model may not fit."""

DESCRIPTORS: Final = 4096
"""Each connection of a server takes one descriptor, each worker about ten."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings about the operating system."""
    machine = facts.machine
    yield from _memory(machine)
    quota, cores = machine.quota_cores, f"{machine.usable_cores} cores"
    if quota is None or quota >= machine.usable_cores:
        yield ok("container.cpu", cores)
    else:
        yield warning(
            "container.cpu",
            f"{cores}, but a CPU quota of {quota:g}: when it is used up, threads stop for up to 100 ms",
            "Pin the container to whole cores (cpuset) and lift the quota, or use HostDevice(threads=...)",
        )
    if machine.descriptors is not None and machine.descriptors < DESCRIPTORS:
        yield note(
            "system.descriptors",
            f"A process may have {machine.descriptors:,} open files (RLIMIT_NOFILE): one for each connection",
            "ulimit -n 65536; docker run --ulimit nofile=65536; LimitNOFILE=65536 in systemd",
        )


def _memory(machine: Machine) -> Iterator[Finding]:
    fix = "Raise the limit, or lower max_rows, contexts or max_queue_rows. A build takes twice the weights"
    if machine.oom_kills:
        what = f"{machine.oom_kills} processes of this container were killed because its memory was used up"
        yield warning("container.oom", f"{what}; they vanish without a message (exit status 137)", fix)
    total, limit, used = machine.memory_nbytes, machine.memory_limit_nbytes, machine.memory_used_nbytes or 0
    if limit is None or (total is not None and limit >= total):
        yield ok("container.memory", f"{_mib(total)} of memory, no limit" if total else "No limit of memory")
        return
    said = f"This container may use {_mib(limit)} of memory, and uses {_mib(used)}"
    if limit - used >= MEMORY_SHARE * limit:
        yield ok("container.memory", said)
    else:
        yield warning("container.memory", f"{said}. Beyond the limit the kernel kills the process", fix)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB" if nbytes >= 2**20 else f"{nbytes // 1024:,} KiB"
