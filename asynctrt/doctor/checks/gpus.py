"""The GPUs: memory, sharing (MIG, MPS, exclusive mode), power and clocks, and variables that change CUDA."""

from collections.abc import Iterator
from typing import Any, Final

from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, note, ok, unknown, warning

FULL_NBYTES: Final = 512 << 20
"""With less free memory, CUDA itself and a small engine hardly fit."""

FULL_SHARE: Final = 0.1
"""If less than this share of its memory is free, something else is using the GPU."""

EXCLUSIVE: Final = (1, 3)
"""``EXCLUSIVE`` of old drivers, and ``EXCLUSIVE_PROCESS``."""
PROHIBITED: Final = 2

SLOWED: Final = {
    0x8: ("the hardware slows it down: power or heat", True),
    0x20: ("it is too hot (software)", True),
    0x40: ("it is too hot (hardware)", True),
    0x80: ("the power supply slows it down", True),
    0x2: ("its clocks are set by hand", False),
    0x4: ("it is at its power limit", False),
}
"""Reasons for a lower clock, by NVML's bits, and whether something is wrong then."""

LAZY_SINCE: Final = (12, 2)
"""The CUDA version from which kernels are loaded lazily on Linux unless it says otherwise."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield what is known about the GPUs."""
    told = facts.nvml.value or {}
    if facts.gpus or told.get("gpus"):
        yield from _management(facts)
        for index, gpu in enumerate(told.get("gpus", ())):
            yield from _of_one(f"GPU {index} ({gpu['name']})", gpu)
    elif facts.expects_gpu:
        yield _unknown(facts)
    for ordinal, gpu in enumerate(facts.gpus):
        yield from _compute_mode(f"cuda:{ordinal} ({gpu['name']})", gpu["compute_mode"])
    yield from _mps(facts)
    yield from _variables(facts)


def _management(facts: Facts) -> Iterator[Finding]:
    if not (facts.nvml.has_answered and "gpus" in facts.nvml.value):
        yield _unknown(facts)


def _unknown(facts: Facts) -> Finding:
    value = facts.nvml.value or {}
    return unknown(
        "gpu.management",
        "MIG, persistence, clocks, temperature and memory errors of the GPUs cannot be known: "
        f"{value.get('error') or facts.nvml.said or 'no answer'}",
        "They are asked from NVIDIA's management library (libnvidia-ml.so.1).",
        "Install the driver; start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility; see whether "
        "nvidia-smi works. If a package is missing: pip install 'asynctrt[nvml]'",
    )


def _of_one(name: str, gpu: dict[str, Any]) -> Iterator[Finding]:
    yield from _memory(name, gpu)
    yield from _mig(name, gpu)
    if gpu["persistence"] == 0:
        yield note(
            "gpu.persistence",
            f"{name}: persistence mode is off",
            "The driver lets go of the GPU when its last process ends, so the next one starts seconds later "
            "and finds other clocks.",
            "nvidia-smi -pm 1, or run nvidia-persistenced",
        )
    bits = gpu["slowed"] or 0
    for bit, (reason, is_wrong) in SLOWED.items():
        if bits & bit:
            clocks = f"{gpu['clock_mhz']} of {gpu['clock_max_mhz']} MHz"
            make = warning if is_wrong else note
            yield make(
                "gpu.clocks",
                f"{name} runs at {clocks}: {reason}",
                "Batches take longer than they could, and not always the same time.",
                "Look at nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK",
            )
    # Corrected, uncorrected, one that is pending, one that failed.
    corrected, uncorrected, pending, failed = (*(gpu["remapped"] or ()), 0, 0, 0, 0)[:4]
    if failed or pending or uncorrected:
        make = error if failed else warning
        yield make(
            "gpu.hardware",
            f"{name}: {corrected + uncorrected} rows of its memory were replaced as they were bad"
            + (", and one could not be" if failed else ", one only after the next reset" if pending else ""),
            "Memory that goes bad ends processes (Xid 48, 94, 95), on whatever line of code they are.",
            "Reset the GPU or restart the machine; have it replaced if rows cannot be replaced any more",
        )


def _memory(name: str, gpu: dict[str, Any]) -> Iterator[Finding]:
    free, total = gpu["free_nbytes"], gpu["total_nbytes"]
    if not total or free is None:
        return
    said = f"{name}: {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB of memory are free"
    others = f", {gpu['processes']} processes compute there" if gpu["processes"] else ""
    if free < FULL_NBYTES or free < FULL_SHARE * total:
        make = error if free < FULL_NBYTES else warning
        yield make(
            "gpu.memory",
            said + others,
            "Engines will not open, or fail later when others take the rest: running out of memory shows up "
            "at whichever call happens to ask for some.",
            "End what else runs there (see nvidia-smi), choose another GPU with CUDA_VISIBLE_DEVICES, or "
            "limit each process: asynctrt.limit_gpu_memory, asynctrt serve --gpu-memory",
        )
    else:
        yield ok("gpu.memory", said + others)


def _mig(name: str, gpu: dict[str, Any]) -> Iterator[Finding]:
    if gpu["mig"] != 1:
        return
    if not gpu["mig_parts"]:
        yield error(
            "gpu.mig",
            f"{name} is in MIG mode, but has no part that this process sees",
            "In that mode only parts (MIG instances) compute, so nothing runs on this GPU.",
            "Make one (nvidia-smi mig -cgi ... -C), give it to the container, or leave the mode: nvidia-smi "
            "-mig 0",
        )
        return
    yield note(
        "gpu.mig",
        f"{name} is divided (MIG) into {gpu['mig_parts']} parts",
        "A process sees one part, with its own memory and multiprocessors; a fault in one does not reach "
        "the others. Plans that were built on the whole GPU may be refused on a part.",
        "Choose one by its UUID: CUDA_VISIBLE_DEVICES=MIG-..., or several with a worker each: "
        'asynctrt.open(..., isolation="process", device=["cuda:MIG-...", "cuda:MIG-..."]); '
        "nvidia-smi -L lists them. Build plans on the smallest part that is to run them",
    )


def _compute_mode(name: str, mode: int | None) -> Iterator[Finding]:
    if mode == PROHIBITED:
        yield error(
            "gpu.prohibited",
            f"{name} lets no process compute (compute mode PROHIBITED)",
            "Nothing can be opened on it.",
            "nvidia-smi -c DEFAULT",
        )
    elif mode in EXCLUSIVE:
        yield warning(
            "gpu.exclusive",
            f"{name} is in exclusive mode: one process at a time",
            "A second process, such as a new server beside the one that it replaces, fails with a device "
            "that is busy or unavailable.",
            "nvidia-smi -c DEFAULT; or keep it, and let the processes share the GPU through MPS",
        )


def _mps(facts: Facts) -> Iterator[Finding]:
    told = facts.nvml.value or {}
    clients = sum(gpu["mps_processes"] or 0 for gpu in told.get("gpus", ()))
    named = [name for name in sorted(facts.env) if name.startswith("CUDA_MPS_")]
    if not (clients or named or facts.machine.mps_daemons):
        return
    signs = ", ".join(
        [
            *(f"{name}={facts.env[name]}" for name in named),
            *(["its control daemon runs"] if facts.machine.mps_daemons else []),
            *([f"{clients} clients"] if clients else []),
        ]
    )
    yield warning(
        "gpu.mps",
        f"Processes may share a GPU through MPS ({signs})",
        "A fatal fault of one client hits all clients of the same server: each loses its device. MPS is no "
        "boundary between tenants.",
        "Run under a supervisor that restarts (asynctrt serve --on-device-lost exit). For isolation use MIG, "
        "one process for each part",
    )
    share = facts.env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if share and share != "100":
        yield note(
            "gpu.mps_share",
            f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={share} limits this process to a share of the GPU",
            "Batches take longer than on the whole GPU, and plans may choose other kernels.",
            "Leave it out to use all of it; urgent_share divides a GPU within one process",
        )


def _variables(facts: Facts) -> Iterator[Finding]:
    env = facts.env
    mode = env.get("CUDA_MODULE_LOADING", "").upper()
    is_lazy_by_itself = facts.cuda_version is None or facts.cuda_version >= LAZY_SINCE
    if mode == "EAGER" or (mode in ("", "DEFAULT") and not is_lazy_by_itself):
        said = "is EAGER" if mode == "EAGER" else "is not set, and this driver then loads eagerly"
        yield warning(
            "cuda.lazy_loading",
            f"CUDA_MODULE_LOADING {said}",
            "CUDA loads every kernel of every library at once, which takes time and hundreds of MiB of "
            "memory on the GPU and the host.",
            "export CUDA_MODULE_LOADING=LAZY",
        )
    if env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield warning(
            "cuda.launch_blocking",
            f"CUDA_LAUNCH_BLOCKING is {env['CUDA_LAUNCH_BLOCKING']}",
            "Every launch waits for the GPU: nothing overlaps, and the event loop is held up. It helps to "
            "find the line that crashes, and is for that alone.",
            "unset CUDA_LAUNCH_BLOCKING",
        )
    if env.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield warning(
            "cuda.connections",
            "CUDA_DEVICE_MAX_CONNECTIONS is 1",
            "Work of all streams goes through one queue to the GPU, so that copies and computing of "
            "different batches wait for one another.",
            "unset CUDA_DEVICE_MAX_CONNECTIONS (8 is the default)",
        )
