"""The GPUs: memory, MIG, exclusive mode."""

from collections.abc import Iterator
from typing import Any, Final

from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, note, ok, warning

FULL_NBYTES: Final = 512 << 20
"""With less free memory, CUDA itself and a small engine hardly fit."""

FULL_SHARE: Final = 0.1
"""If less than this share of its memory is free, something else is using the GPU."""

EXCLUSIVE: Final = 3
"""``CU_COMPUTEMODE_EXCLUSIVE_PROCESS``."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings about the GPUs."""
    if not facts.expects_gpu:
        return
    value = facts.nvml.value or {}
    if "gpus" not in value:
        yield note(
            "gpu.management",
            "MIG and memory of the GPUs are unknown: the management library (libnvidia-ml.so.1) says "
            f"{value.get('error') or facts.nvml.said}",
            "Check nvidia-smi; start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    for index, gpu in enumerate(value.get("gpus", ())):
        yield from _of_one(f"GPU {index} ({gpu['name']})", gpu)
    for ordinal, gpu in enumerate(facts.gpus):
        if gpu["compute_mode"] == EXCLUSIVE:
            yield warning(
                "gpu.exclusive",
                f"cuda:{ordinal} ({gpu['name']}) is in exclusive mode: a second process, such as a server's "
                "successor, is refused",
                "nvidia-smi -c DEFAULT; or keep it, and let the processes share the GPU through MPS",
            )


def _of_one(name: str, gpu: dict[str, Any]) -> Iterator[Finding]:
    free, total = gpu["free_nbytes"], gpu["total_nbytes"]
    said = f"{name}: {(free or 0) / 2**30:,.1f} of {(total or 0) / 2**30:,.1f} GiB of memory are free"
    if total and (free < FULL_NBYTES or free < FULL_SHARE * total):
        yield (error if free < FULL_NBYTES else warning)(
            "gpu.memory",
            f"{said}. Engines will not open, or fail later when other processes take the rest",
            "End what else runs there (see nvidia-smi), choose another GPU with CUDA_VISIBLE_DEVICES, or "
            "limit each process: asynctrt.limit_gpu_memory, asynctrt serve --gpu-memory",
        )
    elif total:
        yield ok("gpu.memory", said)
    if gpu["mig"] == 1 and not gpu["mig_parts"]:
        yield error(
            "gpu.mig",
            f"{name} is in MIG mode, but this process sees no MIG instance, and only instances compute",
            "Make one (nvidia-smi mig -cgi ... -C), give it to the container, or nvidia-smi -mig 0",
        )
    elif gpu["mig"] == 1:
        yield note(
            "gpu.mig",
            f"{name} is divided into {gpu['mig_parts']} MIG instances; a process sees one of them. Plans "
            "that were built on the whole GPU may be refused there",
            "Choose one by its UUID (nvidia-smi -L): CUDA_VISIBLE_DEVICES=MIG-..., or several with a worker "
            'each: asynctrt.open(..., isolation="process", device=["cuda:MIG-...", "cuda:MIG-..."]). Build '
            "plans on the smallest instance that is to run them",
        )
