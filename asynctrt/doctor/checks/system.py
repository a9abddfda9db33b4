"""The operating system: what the container may use, shared and locked memory, cores and clocks."""

import re
from collections.abc import Iterator
from typing import Final

from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, note, ok, warning
from asynctrt.doctor.machine import Machine

MEMORY_SHARE: Final = 0.1
"""With a smaller share of memory left, the next model may be one too many."""

SHM: Final = "/dev/shm"  # noqa: S108  (nothing is written there)

SHM_NBYTES: Final = 64 << 20
"""What Docker gives a container by default."""

MEMLOCK_NBYTES: Final = 64 << 20

SLOW_CLOCKS: Final = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
"""Clocks that take a microsecond or more to read, as each time is asked of the kernel."""

ACTIVE_DRIVERS: Final = re.compile(r"intel_pstate|amd-pstate-epp|amd_pstate_epp")
"""With these, `powersave` chooses the frequency by the load, as others do with other names."""

MEMFD_KERNEL: Final = (3, 17)


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is known about the operating system."""
    machine = facts.machine
    yield from _memory(machine)
    yield from _cores(machine)
    yield from _shared(machine)
    yield from _locked(facts)
    yield from _clocks(machine)
    yield from _kernel(machine)


def _memory(machine: Machine) -> Iterator[Finding]:
    if machine.oom_kills:
        yield warning(
            "container.oom",
            f"{machine.oom_kills} processes of this container were killed as its memory was used up",
            "A process that is killed so vanishes without a message (exit status 137), whatever it did.",
            "Give the container more memory, or lower max_rows, contexts or max_queue_rows. Building a plan "
            "takes at least twice the size of its weights",
        )
    limit, used = machine.memory_limit_nbytes, machine.memory_used_nbytes
    if limit is None or limit >= (machine.memory_nbytes or limit + 1):
        total = machine.memory_nbytes
        yield ok("container.memory", f"Memory: {_gib(total)}, no limit" if total else "Memory: no limit")
        return
    said = f"This container may use {_gib(limit)} of memory" + (f", {_gib(used)} are used" if used else "")
    if used is not None and limit - used < MEMORY_SHARE * limit:
        yield warning(
            "container.memory",
            said,
            "Beyond the limit the kernel ends the process without a message (exit status 137). Staging "
            "memory is locked and counts in full, as does what workers share.",
            "Raise the limit, or lower max_rows and contexts",
        )
    else:
        yield ok("container.memory", said)


def _cores(machine: Machine) -> Iterator[Finding]:
    quota, usable = machine.quota_cores, machine.usable_cores
    said = f"Cores: {usable} of {machine.cores} can be used"
    if quota is not None and quota < usable:
        throttled = f"; it was held up {machine.throttled:,} times" if machine.throttled else ""
        yield warning(
            "container.cpu",
            f"{said}, for the time of {quota:g} (a CPU quota){throttled}",
            "A process that has used its share is stopped until the next period, for up to 100 ms: that is "
            "in the latency of every request. The host device starts as many threads as there are cores.",
            "Pin the container to whole cores (cpuset) and lift the quota, or open the model on a device of "
            "fewer threads: HostDevice(threads=...)",
        )
    elif usable == 1:
        yield note(
            "system.cores",
            said,
            "The event loop shares its core with the driver's threads and with everything else.",
            "Give the process a second core: taskset, cpuset",
        )
    else:
        yield ok("system.cores", said)


def _shared(machine: Machine) -> Iterator[Finding]:
    total, free = machine.shm_nbytes, machine.shm_free_nbytes
    if total is None or free is None:
        yield note(
            "container.shm",
            f"There is no {SHM}",
            "Shared memory of Python and PyTorch, and NCCL, need it; asynctrt and its workers do not.",
            "docker run --shm-size=1g; an emptyDir of medium Memory in Kubernetes",
        )
    elif free <= SHM_NBYTES:
        make = note if free > SHM_NBYTES // 4 else warning
        yield make(
            "container.shm",
            f"{SHM} has {_mib(total)}, of which {_mib(free)} are free",
            "Writing beyond that ends a process with SIGBUS. Shared memory of Python and PyTorch, and NCCL, "
            "live there; asynctrt and its workers take none.",
            "docker run --shm-size=1g or --ipc=host; an emptyDir of medium Memory in Kubernetes",
        )
    else:
        yield ok("container.shm", f"{SHM}: {_mib(free)} free")


def _locked(facts: Facts) -> Iterator[Finding]:
    limit = facts.machine.memlock_nbytes
    if limit is None or limit >= MEMLOCK_NBYTES:
        shown = "any amount" if limit is None else _mib(limit)
        yield ok("system.memlock", f"A process may lock {shown} of memory (RLIMIT_MEMLOCK)")
        return
    if any(one.has_answered for name, one in facts.engines.items() if name.startswith("cuda")):
        yield ok(
            "system.memlock",
            f"RLIMIT_MEMLOCK is {_kib(limit)}, and CUDA could lock 64 MiB of staging memory all the same",
        )
        return
    make = warning if facts.expects_gpu else note
    yield make(
        "system.memlock",
        f"A process may lock {_kib(limit)} of memory (RLIMIT_MEMLOCK)",
        "Copies to a GPU start from locked (pinned) memory. NVIDIA's driver mostly locks it itself, beyond "
        "this limit; some systems (RDMA, virtual GPUs) do not.",
        "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in systemd",
    )


def _clocks(machine: Machine) -> Iterator[Finding]:
    if machine.clocksource in SLOW_CLOCKS:
        yield warning(
            "system.clocksource",
            f"The kernel's clock is {machine.clocksource}",
            "Each look at the time takes a microsecond or more, and an event loop looks many times for each "
            "request.",
            "Find out why the kernel gave up tsc (dmesg | grep -i clocksource); on a virtual machine use its "
            "own clock",
        )
    slow = set(machine.governors) & {"powersave", "conservative"}
    if slow and not ACTIVE_DRIVERS.match(machine.scaling_driver or ""):
        yield warning(
            "system.governor",
            f"The frequency of cores is chosen by {', '.join(sorted(slow))} ({machine.scaling_driver})",
            "Cores stay slow, or take many milliseconds to become fast, while requests come in bursts.",
            "cpupower frequency-set -g performance",
        )
    elif machine.governors:
        yield ok("system.governor", f"Frequency of cores: {', '.join(machine.governors)}")


def _kernel(machine: Machine) -> Iterator[Finding]:
    found = re.match(r"(\d+)\.(\d+)", machine.kernel)
    if found and (int(found[1]), int(found[2])) < MEMFD_KERNEL:
        yield note(
            "system.kernel",
            f"The kernel is {machine.kernel}",
            "Before 3.17, version-compatible plans unpack their runtime into a temporary folder.",
            "TensorRTOptions(temporary_directory=...) names a folder from which code may be run",
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def _kib(nbytes: int) -> str:
    return f"{nbytes // 1024:,} KiB"
