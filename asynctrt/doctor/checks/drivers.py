"""The NVIDIA driver: whether it is there, starts, shows the GPUs, and is new enough for the CUDA packages."""

import re
from collections.abc import Iterator
from typing import Final

from asynctrt.doctor.children import Ending
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, note, ok

CUDA_MIN: Final = (12, 0)
"""The oldest CUDA version of a driver with which asynctrt runs."""

NO_GPU: Final = 100
"""``CUDA_ERROR_NO_DEVICE``."""

CAUSES: Final = {
    34: ("a stub of libcuda was loaded", "Take the folder named stubs out of LD_LIBRARY_PATH"),
    NO_GPU: ("the driver shows no GPU", "Check nvidia-smi -L; start a container with --gpus all"),
    802: ("the fabric manager (NVSwitch) is not ready", "systemctl start nvidia-fabricmanager"),
    803: ("libcuda does not fit the kernel's driver", "Reboot, or remove libcuda from the container's image"),
    804: ("this GPU does not run with cuda-compat", "Take the folder compat out of LD_LIBRARY_PATH"),
}
"""For each error code of ``cuInit``: the cause and the fix."""

UNKNOWN_CAUSE: Final = ("CUDA does not start", "Check nvidia-smi and the kernel's log (dmesg | grep NVRM)")

HOST: Final = "Without a GPU, models run on the host device: asynctrt.open(..., device='host')"


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings about the driver."""
    if facts.driver.has_answered:
        yield from _started(facts)
        yield from _old(facts)
    else:
        yield _missing(facts)


def _missing(facts: Facts) -> Finding:
    outcome, signs = facts.driver, facts.gpu_signs
    if outcome.ending is not Ending.FAILED or "cannot open shared object file" not in outcome.said:
        return error(
            "driver.broken",
            f"The driver's library libcuda.so.1 cannot be used: {outcome.said}. Every program that uses CUDA "
            "fails in the same way",
            "Reinstall the driver and restart the machine; check nvidia-smi and the kernel's log (dmesg)",
        )
    said = f"There is a GPU ({', '.join(signs[:3])}), but no" if signs else "There is no"
    return (error if facts.expects_gpu else note)(
        "driver.missing",
        f"{said} NVIDIA driver (libcuda.so.1). {HOST}",
        "Install the NVIDIA driver, after which nvidia-smi works. In a container, start it with --gpus all "
        "and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    )


def _started(facts: Facts) -> Iterator[Finding]:
    init, gpus, visible = facts.driver.value["init"], facts.gpus, facts.env.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and not gpus
    if is_hidden:
        yield error(
            "driver.hidden",
            f"CUDA_VISIBLE_DEVICES is {visible!r}, and CUDA shows no GPU. The list ends at the first GPU "
            "that does not exist",
            "Unset the variable, or name the GPUs by the numbers or UUIDs of nvidia-smi -L",
        )
    said = f"CUDA {_dotted(_supported(facts))}"
    if gpus:
        listed = ", ".join(
            f"cuda:{ordinal} {gpu['name']} (compute capability {gpu['major']}.{gpu['minor']})"
            for ordinal, gpu in enumerate(gpus)
        )
        yield ok("driver", f"{said}: {listed}")
    elif not is_hidden or init["code"] not in (0, NO_GPU):
        cause, fix = CAUSES.get(init["code"] or NO_GPU, UNKNOWN_CAUSE)
        what = f"{said}: {cause} ({init['name'] or init['code']}). {HOST}"
        yield (error if facts.expects_gpu else note)("driver.init", what, fix)


def _old(facts: Facts) -> Iterator[Finding]:
    """Compare the driver's CUDA version with the oldest that works and with the packages' requirements."""
    cuda = _supported(facts)
    said = f"The driver supports CUDA {_dotted(cuda)}"
    if cuda < CUDA_MIN:
        what = f"{said}, and asynctrt needs CUDA {_dotted(CUDA_MIN)} or later"
        yield error("driver.old", what, "Update the driver")
    newer = [name for name, version in facts.distributions.items() if built_for(name, version) > cuda[0]]
    if newer:
        yield error(
            "driver.old",
            f"{said}, and these packages are for a later major version: {', '.join(sorted(newer))}. They do "
            "not start (CUDA driver version is insufficient), or crash later",
            f"Update the driver, or install packages for CUDA {cuda[0]} (their names end in -cu{cuda[0]})",
        )


def built_for(name: str, version: str) -> int:
    """Return the major version of CUDA that a package is built for, from its name; 0 if unknown."""
    if name == "nvidia-cuda-runtime":  # From CUDA 13 on, its name does not end in the version.
        return int(version.partition(".")[0])
    found = re.fullmatch(r"(?:nvidia-cuda-runtime|tensorrt(?:-\w+)?)-cu(\d+)(?:-bindings|-libs)?", name)
    return int(found[1]) if found else 0


def _supported(facts: Facts) -> tuple[int, int]:
    version = facts.driver.value["version"]
    return version // 1000, version % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
